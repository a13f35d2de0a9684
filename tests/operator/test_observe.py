"""Kubernetes objects, read into what a decision needs."""

import pytest
from rlhf_operator.observe import cluster_view, job_view, pod_view, troubles

META = {
    "name": "math-1",
    "namespace": "team",
    "uid": "u",
    "resourceVersion": "7",
    "creationTimestamp": "2026-01-01T00:00:00Z",
}


def ray_cluster(status=None, spec=None, **meta):
    groups = [
        {"groupName": "train", "replicas": 2, "minReplicas": 2, "maxReplicas": 2},
        {"groupName": "rollout", "replicas": 3, "minReplicas": 1, "maxReplicas": 3},
    ]
    return cluster_view(
        {"metadata": META | meta, "spec": {"workerGroupSpecs": groups} | (spec or {}), "status": status}
    )


def conditions(**holding):
    return [{"type": kind, "status": "True" if holds else "False"} for kind, holds in holding.items()]


def test_a_cluster_is_ready_when_its_head_and_its_fewest_workers_are():
    whole = conditions(HeadPodReady=True, RayClusterProvisioned=True)
    assert ray_cluster({"conditions": whole, "readyWorkerReplicas": 3}).ready_by_sums
    assert not ray_cluster({"conditions": whole, "readyWorkerReplicas": 2}).ready_by_sums
    headless = conditions(HeadPodReady=False, RayClusterProvisioned=True)
    assert not ray_cluster({"conditions": headless, "readyWorkerReplicas": 5}).ready_by_sums
    never_whole = conditions(HeadPodReady=True, RayClusterProvisioned=False)
    assert not ray_cluster({"conditions": never_whole, "readyWorkerReplicas": 3}).ready_by_sums
    assert not ray_cluster(None).ready_by_sums


def test_pods_tell_whether_each_group_has_its_share():
    whole = conditions(HeadPodReady=True, RayClusterProvisioned=True)
    view = ray_cluster({"conditions": whole, "readyWorkerReplicas": 3})
    assert view.scales
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    rollouts, trainers = [pod("r", "rollout", **ready)], [pod("t", "train", **ready)]
    assert view.ready_by_pods(rollouts + 2 * trainers)
    assert not view.ready_by_pods(2 * rollouts + trainers)
    assert not view.ready_by_pods(rollouts + trainers + [pod("t", "train")])


def test_a_cluster_counts_as_suspended_from_the_wish_to_the_return_of_its_pods():
    assert ray_cluster(spec={"suspend": True}).suspended
    assert ray_cluster({"conditions": conditions(RayClusterSuspending=True)}).suspended
    assert ray_cluster({"conditions": conditions(RayClusterSuspended=True)}).suspended
    assert not ray_cluster({"conditions": conditions(RayClusterSuspended=False)}, {"suspend": False}).suspended


def test_who_controls_a_cluster_is_its_owner():
    references = [{"uid": "a", "controller": False}, {"uid": "b", "controller": True}]
    assert ray_cluster(ownerReferences=references).owner == "b"
    assert ray_cluster().owner is None


def pod(name="p", group="train", restarts="Always", **status):
    meta = {"name": name, "labels": {"ray.io/group": group}}
    return pod_view({"metadata": meta, "spec": {"restartPolicy": restarts}, "status": status})


def waiting(reason, message=""):
    return [{"name": "ray", "state": {"waiting": {"reason": reason, "message": message}}}]


@pytest.mark.parametrize(
    ("status", "trouble"),
    [
        ({"containerStatuses": waiting("ErrImagePull", "not found")}, "container `ray`: ErrImagePull: not found"),
        ({"containerStatuses": waiting("CreateContainerConfigError", 'secret "x" not found')}, 'secret "x" not found'),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4"}]},
            "Unschedulable: 0/4",
        ),
        (
            {
                "initContainerStatuses": [
                    {
                        "name": "wait",
                        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                        "lastState": {"terminated": {"reason": "Error", "exitCode": 3, "message": "no DNS"}},
                    }
                ]
            },
            "init container `wait`: Error, exit code 3: no DNS",
        ),
        (
            {"containerStatuses": [{"name": "ray", "state": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}]},
            "OOMKilled, exit code 137",
        ),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted: low on memory"),
        (
            {
                "phase": "Failed",
                "initContainerStatuses": [
                    {
                        "name": "fetch",
                        "state": {"terminated": {"reason": "Error", "exitCode": 3, "message": "no DNS"}},
                    }
                ],
                "containerStatuses": [{"name": "ray", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            "init container `fetch`: Error, exit code 3: no DNS",
        ),
        ({"phase": "Failed"}, "Failed: the pod failed"),
    ],
)
def test_a_pod_tells_why_it_does_not_run(status, trouble):
    assert trouble in pod(**status).trouble


def test_a_container_that_is_tried_again_and_again_tells_the_same_each_time():
    quoted = 'Back-off pulling image "x": ErrImagePull: not found'
    assert (
        pod(containerStatuses=waiting("ErrImagePull", "not found")).trouble
        == pod(containerStatuses=waiting("ImagePullBackOff", quoted)).trouble
    )
    ended = {"reason": "Error", "exitCode": 3}
    pausing = waiting("CrashLoopBackOff", "back-off 40s")[0] | {"lastState": {"terminated": ended}}
    dead = {"name": "ray", "state": {"terminated": ended}}
    again = {"name": "ray", "state": {"running": {}}, "lastState": {"terminated": ended}, "ready": False}
    told = {pod(containerStatuses=[container]).trouble for container in (pausing, dead, again)}
    assert told == {"container `ray`: Error, exit code 3"}
    assert pod(containerStatuses=[again | {"ready": True}]).trouble is None
    assert pod(initContainerStatuses=[again | {"state": {"terminated": {"exitCode": 0}}}]).trouble is None


def test_a_pod_has_ended_when_its_own_containers_did_it_and_none_of_them_starts_again():
    failed = [{"name": "ray", "state": {"terminated": {"reason": "Error", "exitCode": 3}}}]
    assert pod(restarts="Never", phase="Pending", initContainerStatuses=failed).ended
    assert pod(restarts="Never", phase="Failed", containerStatuses=failed).ended
    assert not pod(restarts="Never", phase="Failed", reason="Evicted", containerStatuses=failed).ended
    assert not pod(phase="Pending", initContainerStatuses=failed).ended
    assert not pod(restarts="Never", phase="Running", containerStatuses=[failed[0] | {"name": "autoscaler"}]).ended
    assert not pod(restarts="Never", phase="Pending", containerStatuses=waiting("ContainerCreating")).ended


def test_a_pod_that_starts_or_runs_has_no_trouble():
    assert pod(containerStatuses=waiting("ContainerCreating")).trouble is None
    ready = [{"type": "Ready", "status": "True"}]
    assert (pod(conditions=ready).ready, pod(conditions=ready).trouble) == (True, None)
    assert pod().trouble is None


def test_the_same_trouble_of_many_pods_is_told_once_the_heads_first():
    pods = [pod(f"w{i}", containerStatuses=waiting("ErrImagePull")) for i in range(5)]
    pods.append(pod("head", "headgroup", containerStatuses=waiting("RunContainerError")))
    assert troubles(pods) == ("pod head: container `ray`: RunContainerError; pod w0: container `ray`: ErrImagePull")


def test_a_status_is_read_without_what_another_release_tells_and_says_why_it_cannot_be():
    job = {"apiVersion": "v", "kind": "RLHFJob", "metadata": META, "spec": {}}
    newer = job_view(job | {"status": {"phase": "Training", "x": 1}})
    assert (newer.status.phase, newer.unreadable) == ("Training", None)
    broken = job_view(job | {"status": {"phase": "Lost", "x": 1}})
    assert "status.phase: got 'Lost'" in broken.unreadable
    assert broken.raw_status == {"phase": "Lost", "x": 1}
