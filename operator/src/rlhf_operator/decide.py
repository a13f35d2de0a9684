"""From what is seen of a job to what is told about it and what is done next. Pure.

Two names in the status carry the whole state. `rayCluster` is set while a cluster is wanted, `submissionId` while a try
is. Each is told before it is made, so that an operator which dies in between makes the same one again and no second;
and a number is never used twice.
"""

from collections.abc import Callable

from rlhf_api.pools import NodePool
from rlhf_api.status import PoolStatus

from rlhf_operator import conditions
from rlhf_operator.conditions import changed_at, condition_of, is_true, reason_of
from rlhf_operator.decision import LATER, SOON, Decision, Draft, DropJob, MakeCluster, Patience, Seen, Submit
from rlhf_operator.kuberay import HEAD_GROUP
from rlhf_operator.manifests import cluster_name, submission_id
from rlhf_operator.observe import format_time, parse_time, troubles
from rlhf_operator.policies.deadlines import deadlines
from rlhf_operator.policies.head_loss import loss
from rlhf_operator.policies.retries import end_of, exhausted, not_before
from rlhf_operator.policies.suspend import suspension
from rlhf_operator.policies.ttl import seconds_to_live

COUNTED = (conditions.CREATING, conditions.WAITING_FOR_PODS)
"""Reasons of ClusterReady after which the number of pods that are ready is all that changes."""
MOST_ERRORS = 20
"""Problems of a spec that are told; a status must stay small."""
COUNT_SECONDS = 5.0
"""Between two words about how many pods are ready: each costs a write, and a large cluster has many pods."""

Step = Callable[[Draft], bool]
"""One question about a job. True ends the pass: what follows does not arise."""


def decide(seen: Seen, patience: Patience) -> Decision:
    """Decide one pass: ask each question of `STEPS` in turn, until one settles it; and tidy up."""
    draft = Draft(seen, patience, seen.job.status)
    for step in STEPS:
        if step(draft):
            break
    draft.actions += seen.leftovers or ()
    return Decision(draft.status, tuple(draft.actions), draft.again)


def _deleted(draft: Draft) -> bool:
    """What is being deleted is left alone: its children go by their owner references."""
    return draft.seen.job.deleting


def _finished(draft: Draft) -> bool:
    """What has finished stays so: its clusters go, and after its time, which may still be changed, the job does."""
    if draft.status.phase not in ("Succeeded", "Failed"):
        return False
    draft.drop(filter(None, (draft.seen.ours, *draft.seen.others)))
    draft.set(observed_generation=draft.seen.job.generation)
    left = seconds_to_live(draft.terms.ttl_seconds_after_finished, draft.status, draft.seen.now)
    if left is not None and left <= 0:
        draft.actions.append(DropJob())
    elif left is not None:
        draft.look_again(left)
    return True


def _refused(draft: Draft) -> bool:
    """A spec that cannot be run is told, with every problem; a run that is on goes on by what it was started with."""
    problems, seen = draft.seen.problems, draft.seen
    if problems:
        shown = "; ".join(str(problem) for problem in problems[:MOST_ERRORS])
        more = f"; and {len(problems) - MOST_ERRORS} more" if len(problems) > MOST_ERRORS else ""
        draft.tell("Accepted", False, conditions.INVALID_SPEC, shown + more)
    elif problems is not None:
        draft.tell("Accepted", True, conditions.ACCEPTED, "The spec can be run.")
    if problems is not None:
        draft.set(observed_generation=seen.job.generation)
    if not problems:
        draft.set(gpus=seen.terms.gpus)
    accepted = not problems and is_true(draft.status, "Accepted")
    if accepted or draft.status.ray_cluster is not None:
        return False
    draft.drop(seen.others)
    if problems is None:
        draft.look_again(SOON)
    unknown = f"Whether the spec can be run is not known yet: {seen.blind}"
    message = unknown if problems is None else "The spec cannot be run: see the condition Accepted."
    draft.set(phase="Pending", message=message)
    return True


def _ended(draft: Draft) -> bool:
    """A driver that has ended succeeded, failed for good, or is followed by a next try on the same cluster."""
    end = end_of(draft.seen.driver) if draft.seen.driver and draft.status.submission_id else None
    if end is None:
        return False
    if end.progress:
        draft.set(progress=end.progress)
    if end.kind is None:
        draft.finish("Succeeded", end.reason, end.message)
        return True
    draft.count(end.kind, end.reason, end.message)
    draft.tell("Training", False, end.reason, end.message)
    draft.end_try()
    if end.fatal:
        draft.finish("Failed", end.reason, end.message)
        return True
    return _next_try_or_fail(draft, end.message)


def _suspended(draft: Draft) -> bool:
    """A suspended job holds no machines; its clocks stop, and its try ends without being counted."""
    terms, now = draft.terms, draft.seen.now
    held = suspension(terms, draft.seen.ours)
    if held is None:
        draft.tell("Suspended", False, conditions.NOT_SUSPENDED, "")
        draft.set(start_time=draft.status.start_time or format_time(now))
        return False
    draft.tell("Suspended", True, held.reason, held.message)
    draft.tell("ClusterReady", False, held.reason, held.message)
    draft.tell("Training", False, held.reason, held.message)
    draft.set(phase="Suspended", message=held.message, start_time=None, pools=[], pool_summary=None)
    draft.end_try()
    if not held.keeps_cluster:
        draft.give_up_cluster()
    draft.drop(draft.seen.others)
    return True


def _overdue(draft: Draft) -> bool:
    """A deadline that has passed ends the job."""
    for deadline in deadlines(draft.terms, draft.status, draft.seen.now):
        if deadline.seconds_left <= 0:
            draft.finish("Failed", deadline.reason, deadline.message)
            return True
        draft.look_again(deadline.seconds_left)
    return False


def _lost(draft: Draft) -> bool:
    """A lost cluster is given up, and the next one made after a pause; counted as no fault of the program's."""
    seen, status = draft.seen, draft.status
    if seen.driver:
        away = seen.driver.state == "unreachable"
        draft.set(unreachable_since=(status.unreachable_since or format_time(seen.now)) if away else None)
    if status.ray_cluster is None:
        return False
    patience = draft.patience.job_api_seconds
    lost = loss(draft.status, seen.ours, seen.driver, seen.now, patience, seen.silent_since, seen.pods or ())
    if lost is None:
        return False
    draft.count("Infrastructure", lost.reason, lost.message)
    draft.tell("ClusterReady", False, lost.reason, lost.message)
    draft.tell("Training", False, lost.reason, lost.message)
    draft.end_try()
    draft.give_up_cluster()
    return _next_try_or_fail(draft, lost.message)


def _without_cluster(draft: Draft) -> bool:
    """A cluster is wanted and not there: once its predecessors are gone, it is named, and then made."""
    seen, status = draft.seen, draft.status
    _tell_feasibility(draft)
    if status.ray_cluster is None:
        draft.drop(seen.others)
        if seen.others:
            names = ", ".join(other.name for other in seen.others)
            draft.tell("ClusterReady", False, conditions.WAITING_FOR_PREDECESSOR, f"RayCluster {names} is going.")
            draft.look_again(SOON)
            draft.waits_for(f"Waiting until RayCluster {names} is gone.")
            return True
        if seen.leftovers or None in (seen.leftovers, seen.lingering):
            draft.look_again(SOON)
            draft.waits_for(f"Waiting until all of the last cluster is gone. {seen.blind}".strip())
            return True
        if _backs_off(draft) or _outlived(draft):
            return True
        number = (status.cluster or 0) + 1
        name = cluster_name(seen.job.name, number)
        draft.set(cluster=number, ray_cluster=name, try_=None, unreachable_since=None)
        draft.tell("ClusterReady", False, conditions.CREATING, f"RayCluster {name} is about to be made.")
        draft.tell("Training", False, conditions.WAITING_FOR_CLUSTER, "The cluster is not ready yet.")
    elif seen.ours and not seen.ours.deleting:
        return False
    name = draft.status.ray_cluster or ""
    if seen.cluster:
        why = "is being deleted" if seen.cluster.deleting else "belongs to another"
        message = f"A RayCluster {name} {why}. Waiting until the name is free."
        draft.tell("ClusterReady", False, conditions.NAME_TAKEN, message)
        draft.look_again(SOON)
        draft.waits_for(message)
        return True
    if seen.trouble:
        draft.tell("ClusterReady", False, conditions.CREATE_REFUSED, seen.trouble)
    _tell_pools(draft)
    draft.actions.append(MakeCluster(draft.status.cluster or 1))
    draft.waits_for(seen.trouble or f"RayCluster {name} is being made.")
    return True


def _cluster_ready(draft: Draft) -> bool:
    """The cluster's own state: what it waits for, with Kubernetes' reasons."""
    cluster = draft.seen.ours
    if cluster is None:
        raise ValueError("the step before settles a cluster that is not there")
    _tell_pools(draft)
    if draft.seen.whole:
        draft.tell("ClusterReady", True, conditions.ALL_PODS_READY, "Head and workers are ready.")
        if not is_true(draft.status, "PlacementFeasible"):
            draft.tell("PlacementFeasible", True, conditions.NODES_FIT, "All pods were placed.")
        return False
    failure = cluster.conditions.get("ReplicaFailure")
    trouble = troubles(draft.seen.pods or ())
    if failure and failure.status:
        trouble = trouble or f"{failure.reason}: {failure.message}"
    if not trouble and reason_of(draft.status, "ClusterReady") in COUNTED and draft.rest(COUNT_SECONDS):
        return True
    _tell_feasibility(draft)
    waiting = f"{cluster.ready_workers} of {cluster.wanted_workers} workers are ready"
    waiting += "" if cluster.head_ready else ", the head is not"
    waiting += f"; {draft.seen.blind}" if draft.seen.blind else ""
    waiting += f"; by pools: {draft.status.pool_summary}" if cluster.ready_by_sums else ""
    if trouble:
        draft.tell("ClusterReady", False, conditions.PODS_NOT_STARTING, f"{waiting}. {trouble}")
    elif draft.seen.pods is not None or reason_of(draft.status, "ClusterReady") != conditions.PODS_NOT_STARTING:
        draft.tell("ClusterReady", False, conditions.WAITING_FOR_PODS, f"{waiting}.")
    since = max(cluster.created, changed_at(draft.status, "ClusterReady") or cluster.created)
    draft.look_again(min(max((draft.seen.now - since).total_seconds() / 2, SOON), LATER))
    if draft.status.submission_id is None:
        told = condition_of(draft.status, "ClusterReady")
        draft.waits_for(told.message if told else waiting)
        return True
    return False


def _without_try(draft: Draft) -> bool:
    """A try is wanted and there is none: after a pause it is named, and then submitted to a cluster that is ready."""
    status, job = draft.status, draft.seen.job
    if status.submission_id is None:
        if _backs_off(draft):
            return True
        number = (status.try_ or 0) + 1
        name = submission_id(job.name, status.cluster or 1, number)
        draft.set(try_=number, tries=(status.tries or 0) + 1, submission_id=name)
        draft.tell("Training", False, conditions.SUBMITTING, f"The driver is submitted as {name}.")
        draft.actions.append(Submit(name))
        draft.look_again(SOON)
        draft.waits_for(f"The driver is submitted as {name}.")
        return True
    driver, told = draft.seen.driver, f"The driver is submitted as {status.submission_id}."
    if driver is None or driver.state != "unknown":
        return False
    if not is_true(status, "ClusterReady"):
        ready = condition_of(status, "ClusterReady")
        draft.waits_for(ready.message if ready else told)
        return True
    if draft.seen.trouble:
        told = f"{told} Not yet taken: {draft.seen.trouble}"
        draft.tell("Training", False, conditions.SUBMITTING, told)
    draft.actions.append(Submit(status.submission_id))
    draft.look_again(SOON)
    draft.waits_for(told)
    return True


def _training(draft: Draft) -> bool:
    """The driver's own state, by Ray's word and its progress; a word that does not come changes nothing."""
    driver, status, now = draft.seen.driver, draft.status, draft.seen.now
    if driver is None or driver.state == "unreachable":
        since = parse_time(status.unreachable_since) if status.unreachable_since else now
        draft.look_again(min(max((now - since).total_seconds() / 2, SOON), LATER))
        waits = "Training, though" if is_true(status, "Training") else "The driver was submitted, and"
        silent = f"{waits} Ray's job API does not answer"
        why = f": {driver.message}" if driver and driver.message else ""
        told = status.message or ""  # one way of not answering turns into another, which is no news
        draft.waits_for(told if told.startswith(silent) else f"{silent}{why}.")
        return True
    if driver.state == "pending":
        draft.tell("Training", False, conditions.DRIVER_STARTING, "Ray starts the driver.")
        draft.look_again(SOON)
        draft.waits_for("Ray starts the driver.")
        return True
    if not is_true(status, "Training"):
        draft.set(training_time=format_time(now))
    draft.tell("Training", True, conditions.DRIVER_RUNNING, "The driver runs.")
    draft.set(phase="Training", message="Training.")
    if driver.progress:
        draft.set(progress=driver.progress)
    age = (now - parse_time(draft.status.training_time or format_time(now))).total_seconds()
    draft.look_again(min(max(age / 10, SOON), draft.patience.follow_seconds))
    return True


STEPS: tuple[Step, ...] = (
    _deleted,
    _finished,
    _refused,
    _ended,
    _suspended,
    _overdue,
    _lost,
    _without_cluster,
    _cluster_ready,
    _without_try,
    _training,
)
"""The questions in their order. An end that has been seen counts, whatever else would have ended the try."""


def _next_try_or_fail(draft: Draft, message: str) -> bool:
    used_up = exhausted(draft.terms, draft.status)
    if used_up:
        draft.finish("Failed", "BackoffLimitExceeded", f"{used_up}. The last: {message}")
    else:
        draft.set(phase="Restarting", message=f"{message} The next try resumes from the newest checkpoint.")
        draft.look_again(SOON)
    return True


def _backs_off(draft: Draft) -> bool:
    """Whether the pause after a failure still lasts."""
    time = not_before(draft.status, draft.patience.retry_seconds)
    if time is None or time <= draft.seen.now:
        return False
    last = draft.status.failures[-1]
    message = f"The next try begins at {format_time(time)}. The last one ended with {last.reason}: {last.message}"
    draft.tell("Training", False, conditions.BACKING_OFF, message)
    draft.look_again((time - draft.seen.now).total_seconds())
    draft.waits_for(message)
    return True


def _outlived(draft: Draft) -> bool:
    """Whether pods outlive the last cluster: its driver, among them, would write where the next one resumes."""
    pods = sorted(draft.seen.lingering or (), key=lambda pod: (pod.group != HEAD_GROUP, pod.name))
    if not pods:
        return False
    what = f"pod {pods[0].name}" + (" and others" if len(pods) > 1 else "")
    message = f"Waiting until {what} of the last cluster has ended."
    draft.tell("ClusterReady", False, conditions.WAITING_FOR_PREDECESSOR, message)
    draft.look_again(SOON)
    draft.waits_for(message)
    return True


def _tell_feasibility(draft: Draft) -> None:
    told = draft.seen.feasibility
    if told:
        draft.tell("PlacementFeasible", told.holds, told.reason, told.message)


def _tell_pools(draft: Draft) -> None:
    """Pods of each pool, and all in one line."""
    if not draft.terms.pools:
        return
    before = {pool.name: pool.ready for pool in draft.status.pools}
    pools = [
        PoolStatus(name=pool.name, desired=pool.nodes, ready=_ready_nodes(draft, pool, before.get(pool.name, 0)))
        for pool in draft.terms.pools
    ]
    draft.set(pools=pools, pool_summary=", ".join(f"{pool.name} {pool.ready}/{pool.desired}" for pool in pools))


def _ready_nodes(draft: Draft, pool: NodePool, before: int) -> int:
    """A pool's ready pods: by the pods where they were looked at, else by the cluster's sum where that tells."""
    cluster, pods = draft.seen.ours, draft.seen.pods
    if cluster is None:
        return 0
    if pods is not None:
        return sum(pod.ready and pod.group == pool.name for pod in pods)
    if len(draft.terms.pools) == 1:
        return cluster.ready_workers
    return pool.nodes if cluster.ready_by_sums and not cluster.scales else before
