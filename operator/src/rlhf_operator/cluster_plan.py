"""The plan of a job on a cluster: the same decisions as on this machine, with paths as pods see them."""

from dataclasses import dataclass

from rlhf_api import FieldError, RLHFJob, RuntimeConfig, SpecError

from rlhf_operator.bundles import Bundles
from rlhf_operator.plan import build_plan

CODE_DIR = "/etc/rlhf/code"
"""Where the modules of `spec.code` are mounted."""
RUN_DIR = "/rlhf/runs"
"""The folder of run folders on the head, gone with it."""


@dataclass(frozen=True)
class ClusterPlan:
    """What will run on a cluster and where."""

    job: RLHFJob
    """The job with every default explicit, the image included."""
    image: str
    """The runtime's image."""
    config: RuntimeConfig
    """The runtime's whole input, its paths as pods see them; it joins the cluster that is there."""
    groups: tuple[Bundles, ...]
    """Where each group goes, in the manifest's order."""
    notes: tuple[str, ...]
    """What was decided, a sentence each."""


def plan_cluster(job: RLHFJob, default_image: str | None = None) -> ClusterPlan:
    """Plan a job for a cluster. Pure.

    Args:
        job: as it was written.
        default_image: the image of jobs that name none.

    Raises:
        SpecError: with every problem of the job, those of `build_plan` included.
    """
    image, errors = job.spec.image or default_image, list[FieldError]()
    if image is None:
        fix = "add `image`, or give the operator a default"
        errors.append(FieldError("spec.image", "nothing", "the runtime's image", fix))
    try:
        plan = build_plan(job, f"{RUN_DIR}/{job.metadata.name}", [CODE_DIR] if job.spec.code else [])
    except SpecError as error:
        raise SpecError([*errors, *error.errors]) from None
    if errors or image is None:
        raise SpecError(errors)
    full = plan.job.model_copy(update={"spec": plan.job.spec.model_copy(update={"image": image})})
    return ClusterPlan(full, image, plan.config.model_copy(update={"local_nodes": None}), plan.groups, plan.notes)
