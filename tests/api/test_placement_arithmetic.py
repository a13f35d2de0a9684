import pytest
from rlhf_api.placement import capacity, gpu_capacity, room

NODE = {"CPU": 4.0, "GPU": 8.0, "pool-a": 1.0}


@pytest.mark.parametrize(
    ("bundle", "count"),
    [
        ({"GPU": 1.0}, 8),
        ({"GPU": 3.0}, 2),
        ({"GPU": 16.0}, 0),
        ({"GPU": 0.1}, 80),
        ({"CPU": 3.0, "GPU": 1.0}, 1),
        ({"pool-a": 0.001}, 1000),
        ({"pool-b": 0.001}, 0),
        ({"CPU": 1.0, "GPU": 0.0}, 4),
    ],
)
def test_bundles_of_a_node(bundle, count):
    assert capacity(NODE, bundle) == count


def test_a_share_of_a_gpu_comes_from_one_gpu():
    assert capacity({"GPU": 2.0}, {"GPU": 0.6}) == 2
    assert capacity({"GPU": 1.5}, {"GPU": 0.5}) == 3
    assert gpu_capacity([0.4, 0.4, 1.0], 0.4) == 4
    assert gpu_capacity([0.4, 0.4, 1.0], 0.5) == 2
    assert gpu_capacity([0.9, 1.0, 1.0], 2) == 1


@pytest.mark.parametrize(
    ("strategy", "most"),
    [("STRICT_PACK", 8), ("STRICT_SPREAD", 3), ("PACK", 24), ("SPREAD", 24)],
)
def test_the_most_that_each_strategy_places_on_three_nodes(strategy, most):
    nodes, bundle = [{"GPU": 8.0}] * 3, {"GPU": 1.0}
    assert room([capacity(node, bundle) for node in nodes], strategy) == most


def test_nothing_fits_on_no_node():
    assert room([], "PACK") == room([], "STRICT_PACK") == 0
