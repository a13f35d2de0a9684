"""The RLHFJob resource."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError
from pydantic_core import PydanticSerializationError

from rlhf_api.base import DNS_1035, ApiModel
from rlhf_api.errors import FieldError, SpecError, field_errors
from rlhf_api.spec import RLHFJobSpec

GROUP = "rlhf-operator.io"
VERSION = "v1alpha1"


class Metadata(ApiModel):
    """The part of Kubernetes' object metadata that a manifest may give."""

    name: Annotated[str, Field(pattern=DNS_1035, max_length=45)]
    """The job's name: DNS-1035, short enough for the names derived from it."""
    namespace: str | None = None
    """Kubernetes namespace. Ignored on this machine."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Kubernetes labels. Ignored on this machine."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Kubernetes annotations. Ignored on this machine."""


class RLHFJob(ApiModel):
    """One manifest: models, data, algorithm, node pools, and which role runs where."""

    api_version: Literal["rlhf-operator.io/v1alpha1"]
    """Group and version of this resource."""
    kind: Literal["RLHFJob"]
    """Always RLHFJob."""
    metadata: Metadata
    """The job's name."""
    spec: RLHFJobSpec
    """What to do."""

    @classmethod
    def from_cluster(cls, obj: Mapping[str, Any]) -> Self:
        """Read an object as an API server gives it: with a status, and metadata that no manifest has.

        Raises:
            SpecError: with every problem of the spec that the API server let pass.
        """
        metadata = obj.get("metadata", {})
        kept = {key: metadata[key] for key in ("name", "namespace", "labels", "annotations") if key in metadata}
        return cls.parse({key: value for key, value in obj.items() if key != "status"} | {"metadata": kept})

    @classmethod
    def parse(cls, manifest: Any) -> Self:
        """Read a manifest as it is written: without what an API server adds to it.

        Raises:
            SpecError: with every problem of the manifest's form.
        """
        try:
            job = cls.model_validate(manifest, by_alias=True, by_name=False)
            job.model_dump_json()
        except ValidationError as error:
            raise SpecError(field_errors(cls, error)) from None
        except PydanticSerializationError:  # YAML can write half of a surrogate pair, which no file can hold
            got, fix = "a text with half a character", "remove escapes between \\ud800 and \\udfff"
            raise SpecError([FieldError("the document", got, "text that UTF-8 can hold", fix)]) from None
        return job
