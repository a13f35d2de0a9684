"""The plan of a job on a cluster: the same decisions as on this machine, with paths as pods see them."""

import posixpath
from dataclasses import dataclass

from rlhf_api import FieldError, RLHFJob, RLHFJobSpec, RuntimeConfig, SpecError

from rlhf_operator.bundles import Bundles
from rlhf_operator.cluster_checks import check_cluster, cluster_notes
from rlhf_operator.plan import build_plan
from rlhf_operator.pod_layout import CODE_DIR, RUN_FOLDER, RUNS_DIR
from rlhf_operator.volumes import volume_of


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

    The run folder lies beside the checkpoints, so that metrics and the trained model outlive the pods. Without
    checkpoints it goes with the head.

    Args:
        job: as it was written.
        default_image: the image of jobs that name none.

    Raises:
        SpecError: with every problem of the job, those of `build_plan` included.
    """
    spec, image = job.spec, job.spec.image or default_image
    errors = check_cluster(job)
    if not image:
        fix = "add `image`, or give the operator a default"
        errors.insert(0, FieldError("spec.image", "nothing", "the runtime's image", fix))
    try:
        plan = build_plan(job, run_dir(job.metadata.name, spec), [CODE_DIR] if spec.code else [], here=False)
    except SpecError as error:
        raise SpecError([*errors, *error.errors]) from None
    if errors or not image:
        raise SpecError(errors)
    full = plan.job.model_copy(update={"spec": plan.job.spec.model_copy(update={"image": image})})
    return ClusterPlan(full, image, plan.config, plan.groups, (*plan.notes, *cluster_notes(spec)))


def run_dir(name: str, spec: RLHFJobSpec) -> str:
    """The run folder of a job, as its pods see it.

    Args:
        name: the job's name.
        spec: its spec.
    """
    if spec.checkpoint and volume_of(spec.checkpoint.path, spec.storage):
        return posixpath.join(posixpath.normpath(spec.checkpoint.path), RUN_FOLDER)
    return f"{RUNS_DIR}/{name}"
