"""What the pods of a job are given beside their resources, in the words of Kubernetes."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rlhf_api.base import ApiModel, DnsSubdomain, Integer, JsonObject, LabelValues, field_problem
from rlhf_api.quantity import Cpus, Quantity


class KeySelector(ApiModel):
    """A key of a Secret or a ConfigMap in the job's namespace."""

    name: DnsSubdomain
    """Its object."""
    key: Annotated[str, Field(pattern=r"^[-._a-zA-Z0-9]+$", max_length=253)]
    """The key in it."""
    optional: bool = False
    """Start without the variable where object or key are missing."""


class EnvVarSource(ApiModel):
    """Where the value of a variable comes from: exactly one of them."""

    secret_key_ref: KeySelector | None = None
    """A key of a Secret. The operator passes the reference on and never reads the value."""
    config_map_key_ref: KeySelector | None = None
    """A key of a ConfigMap."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.secret_key_ref is None) == (self.config_map_key_ref is None):
            got = "none of them" if self.secret_key_ref is None else "secretKeyRef and configMapKeyRef"
            raise field_problem(got, "exactly one of secretKeyRef, configMapKeyRef", "give one of the two")
        return self


class EnvVar(ApiModel):
    """An environment variable of every container that runs the image."""

    name: Annotated[str, Field(pattern=r"^[-._a-zA-Z][-._a-zA-Z0-9]*$", max_length=253)]
    """Its name."""
    value: str | None = None
    """Its value. Default: empty, where `valueFrom` is not given."""
    value_from: EnvVarSource | None = None
    """Where its value comes from."""

    @model_validator(mode="after")
    def _one_value(self) -> Self:
        if self.value is not None and self.value_from is not None:
            raise field_problem("value and valueFrom", "one of them", "remove one of the two")
        return self


class LocalObjectReference(ApiModel):
    """An object of the job's namespace."""

    name: DnsSubdomain
    """Its name."""


class Toleration(ApiModel):
    """A Kubernetes toleration."""

    key: str | None = None
    """Taint key; none matches every key."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """How key and value are compared."""
    value: str | None = None
    """Taint value for `Equal`."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Taint effect; none matches every effect."""
    toleration_seconds: Integer | None = None
    """Seconds that a `NoExecute` taint is tolerated."""


class PodSettings(ApiModel):
    """Where pods go and what they are told. All of it is ignored on this machine."""

    node_selector: LabelValues = Field(default_factory=dict)
    """Labels a node must have."""
    tolerations: Annotated[list[Toleration], Field(max_length=64)] = Field(default_factory=list)
    """Taints that are tolerated."""
    affinity: JsonObject | None = None
    """Kubernetes affinity."""
    topology_spread_constraints: Annotated[list[JsonObject], Field(max_length=16)] = Field(default_factory=list)
    """Kubernetes topology spread constraints."""
    priority_class_name: DnsSubdomain | None = None
    """Priority of the pods."""
    runtime_class_name: DnsSubdomain | None = None
    """Container runtime, such as `nvidia`."""
    scheduler_name: DnsSubdomain | None = None
    """Scheduler of the pods. Labels that it reads go into `podTemplate` or, where KubeRay reads them, `rayCluster`."""
    env: Annotated[list[EnvVar], Field(max_length=256)] = Field(default_factory=list)
    """Variables of these pods, such as NCCL's; one of the same name in `spec.env` gives way."""
    pod_template: JsonObject | None = None
    """What is not foreseen here: `metadata` and `spec` of a Kubernetes pod template, merged over what is rendered.
    Mappings merge; lists of named items merge by name; other lists are replaced. The Ray container is `ray`."""


class Head(PodSettings):
    """The pod of Ray's head and of the driver. It has no role of a group and offers no GPU."""

    cpu: Cpus = 1
    """CPUs."""
    memory: Quantity = "4Gi"
    """Memory. The driver holds a step's batch."""


class Rdma(ApiModel):
    """A network device for RDMA, as a device plugin offers it."""

    resource: Annotated[str, Field(min_length=1, max_length=253)]
    """Kubernetes resource name, such as `rdma/hca`."""
    count: Annotated[Integer, Field(ge=1, le=1000)] = 1
    """How many a node."""


class RayClusterMetadata(ApiModel):
    """What the RayCluster carries for others that read it: KubeRay's gang schedulers, a queue."""

    labels: LabelValues = Field(default_factory=dict)
    """Labels, such as `ray.io/scheduler-name: volcano` or `kueue.x-k8s.io/queue-name`."""
    annotations: Annotated[dict[str, str], Field(max_length=64)] = Field(default_factory=dict)
    """Annotations."""
