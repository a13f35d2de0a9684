"""Need and have, pool by pool."""

import pytest
from rlhf_api.pods import Rdma, Toleration
from rlhf_api.pools import NodePool
from rlhf_operator.feasibility import feasibility, node_of

TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}


def nodes(count, gpus=8, resource="nvidia.com/gpu", taints=(), **labels):
    status = {"allocatable": {"cpu": "64", "memory": "512Gi", resource: str(gpus)}}
    made = {"metadata": {"name": "n", "labels": labels}, "spec": {"taints": list(taints)}, "status": status}
    return [node_of(made)] * count


def pool(**changes):
    return NodePool(**{"name": "train", "nodes": 2, "gpus_per_node": 8} | changes)


def test_nodes_of_the_right_kind_are_counted():
    assert feasibility([pool()], nodes(2)).holds
    told = feasibility([pool(node_selector={"gpu": "h100"})], [*nodes(1, gpu="h100"), *nodes(5, gpu="a100")])
    assert told.holds is False
    assert "pool `train` needs 2 nodes of 8 nvidia.com/gpu; the cluster has room for 1 (1 match" in told.message


def test_a_taint_has_to_be_tolerated():
    assert not feasibility([pool()], nodes(2, taints=[TAINT])).holds
    for toleration in (
        Toleration(key="nvidia.com/gpu", operator="Exists"),
        Toleration(operator="Exists"),
        Toleration(key="nvidia.com/gpu", value="present", effect="NoSchedule"),
    ):
        assert feasibility([pool(tolerations=[toleration])], nodes(2, taints=[TAINT])).holds
    other = Toleration(key="nvidia.com/gpu", value="absent")
    assert not feasibility([pool(tolerations=[other])], nodes(2, taints=[TAINT])).holds


def test_cpus_memory_and_slices_of_a_gpu_count_too():
    assert not feasibility([pool(cpu="65")], nodes(9)).holds
    assert not feasibility([pool(memory="513Gi")], nodes(9)).holds
    slices = pool(gpu_resource="nvidia.com/mig-1g.10gb", gpus_per_node=7)
    assert feasibility([slices], nodes(2, 7, "nvidia.com/mig-1g.10gb")).holds
    assert not feasibility([slices], nodes(2)).holds


def test_devices_for_rdma_count_too():
    wanted = pool(rdma=Rdma(resource="rdma/hca", count=4))
    told = feasibility([wanted], nodes(2))
    assert told.holds is False
    assert "8 nvidia.com/gpu, 4 rdma/hca" in told.message


def affinity(key, operator, *values, what="matchExpressions"):
    terms = [{what: [{"key": key, "operator": operator, "values": list(values)}]}]
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}}


@pytest.mark.parametrize(
    ("wish", "holds"),
    [
        (affinity("gpu", "In", "a100", "h100"), True),
        (affinity("gpu", "In", "a100"), False),
        (affinity("gpu", "NotIn", "h100"), False),
        (affinity("other", "NotIn", "h100"), True),
        (affinity("gpu", "Exists"), True),
        (affinity("gpu", "DoesNotExist"), False),
        (affinity("gib", "Gt", "79"), True),
        (affinity("gib", "Gt", "80"), False),
        (affinity("gib", "Lt", "81"), True),
        (affinity("gpu", "Lt", "81"), False),
        (affinity("metadata.name", "In", "n", what="matchFields"), True),
        (affinity("metadata.name", "In", "m", what="matchFields"), False),
        (affinity("gpu", "In", what="none"), False),
        ({"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}}, True),
        ({"nodeAffinity": "nonsense"}, True),
    ],
)
def test_what_an_affinity_requires_of_nodes_counts(wish, holds):
    assert feasibility([pool(affinity=wish)], nodes(2, gpu="h100", gib="80")).holds is holds


def test_a_node_has_to_meet_one_term_of_an_affinity_in_all_its_wishes():
    wish = affinity("gpu", "In", "a100")
    terms = wish["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    terms[0]["matchExpressions"].append({"key": "gib", "operator": "Exists"})
    assert not feasibility([pool(affinity=wish)], nodes(2, gpu="h100", gib="80")).holds
    terms.append({"matchExpressions": [{"key": "gib", "operator": "Exists"}]})
    assert feasibility([pool(affinity=wish)], nodes(2, gpu="h100", gib="80")).holds


def test_a_large_node_holds_several_pods_of_a_pool():
    assert feasibility([pool(gpus_per_node=4)], nodes(1)).holds


def test_a_pool_that_scales_needs_its_fewest():
    assert feasibility([pool(min_nodes=1, max_nodes=4)], nodes(1)).holds


def test_where_nodes_may_not_be_listed_nothing_is_known():
    assert feasibility([pool()], None).holds is None
