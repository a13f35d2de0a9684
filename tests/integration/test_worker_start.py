"""How workers are started on a real Ray of two local nodes with fake GPUs: what they see, and what they are refused."""

import os
import sys
from collections.abc import Iterator

import pytest
import ray
import torch
from ray import cloudpickle
from rlhf_api.runtime_config import LocalNode
from rlhf_runtime.errors import InputError
from rlhf_runtime.single_controller import (
    LocalCluster,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    Worker,
    register,
    reserve,
)

# Workers cannot import a test file by name.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Engine(Worker):
    """A worker that talks to no other, such as a rollout engine."""

    needs_process_group = False

    @register()
    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    @register()
    def path(self) -> str:
        return os.environ["PYTHONPATH"].split(os.pathsep)[0]

    @register()
    def names(self) -> set[str]:
        return set(os.environ)

    @register()
    def indirect(self, value: int) -> int:
        return self.plain(value)

    def plain(self, value: int) -> int:
        return value + 1


class Unready(Engine):
    def __init__(self):
        raise InputError("models.policy: got no folder; expected one. Fix: name it")


@pytest.fixture(scope="module")
def cluster(local_nodes: list[LocalNode]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_OF_THE_DRIVER", "hunter2")
        with LocalCluster(local_nodes, python_path=["/of/rewards"]):
            yield


@pytest.fixture(scope="module")
def single(cluster: None) -> Iterator[RayResourcePool]:
    """One bundle, for what needs one worker."""
    pool = RayResourcePool("single", 1, {"CPU": 0.25}, "PACK")
    reserve([pool], 30)
    yield pool
    pool.remove()


def test_an_engine_sees_the_devices_of_its_siblings(pool: RayResourcePool) -> None:
    init = RayClassWithInitArgs(Engine)
    siblings = RayWorkerGroup(pool, init)
    engines = RayWorkerGroup(pool, init, visible_devices_from=siblings, name="rollout")
    own, seen, paths = siblings.devices(), engines.devices(), engines.path()
    engines.shutdown()
    siblings.shutdown()
    assert seen == own
    assert [len({"0", "1"} & set(own)), len({"2", "3"} & set(own))] == [1, 1]
    assert paths == ["/of/rewards"] * 2


def test_a_call_on_a_handle_is_timed_and_told_with_the_groups_next_one(single: RayResourcePool) -> None:
    group = RayWorkerGroup(single, RayClassWithInitArgs(Engine))
    assert ray.get(group.workers[0].plain.remote(1)) == 2
    assert group.indirect(2) == [3]
    spans = group.take_spans()
    group.shutdown()
    assert [(span.group, span.role, span.method, span.rank) for span in spans] == [
        ("single", None, "plain", 0),
        ("single", None, "indirect", 0),
    ]
    assert spans[0].start <= spans[0].end <= spans[1].start


def test_a_worker_gets_of_the_environment_what_its_class_lets_through(
    single: RayResourcePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_OF_THE_DRIVER", "yes")  # set after the nodes were started
    group = RayWorkerGroup(single, RayClassWithInitArgs(Engine))
    (names,) = group.names()
    group.shutdown()
    assert {"NCCL_OF_THE_DRIVER", "PATH", "HOME"} <= names
    assert "SECRET_OF_THE_DRIVER" in os.environ  # set before them
    assert "SECRET_OF_THE_DRIVER" not in names


def test_a_worker_that_cannot_start_is_told_plainly_and_takes_its_group_along(single: RayResourcePool) -> None:
    group = RayWorkerGroup(single, RayClassWithInitArgs(Unready))
    with pytest.raises(InputError, match=r"^models\.policy: got no folder"):
        group.devices()
    assert group.workers == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has working CUDA")
def test_a_cuda_group_without_cuda_is_refused_by_name(single: RayResourcePool) -> None:
    with pytest.raises(InputError, match="group `single`: got device cuda and no working CUDA"):
        RayWorkerGroup(single, RayClassWithInitArgs(Engine), device="cuda").wait_ready()
