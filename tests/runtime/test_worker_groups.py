"""Which workers take which GPUs, without any."""

from typing import Any

import pytest
from rlhf_runtime import worker_groups
from rlhf_runtime.single_controller.watch import COLLECTIVE_SHARE
from rlhf_runtime.worker_groups import spawn_worker_groups

FUNCTION = {"name": "digits", "function": {"name": "digit_share"}}
MODEL = {"name": "judge", "model": {"path": "/rm"}}


class Recorded:
    """Stands for a RayWorkerGroup and remembers how it was asked for."""

    made: list["Recorded"]

    def __init__(self, pool: object, init: object, **options: Any) -> None:
        self.options = options
        self.events: list[str] = []
        self.made.append(self)

    def spawn(self, roles: Any) -> dict[str, Any]:
        return dict.fromkeys(roles, self)

    def wait_ready(self) -> None:
        self.events.append(f"ready before the {len(self.made) + 1}. group")


@pytest.fixture
def spawned(make_config, monkeypatch: pytest.MonkeyPatch):
    """The groups that a job with these rewards and roles a group would start, by name, in their order."""

    def _spawned(
        rewards: list[dict], *roles: list[str], device: str = "cuda", gpus: float = 1, **fields: Any
    ) -> dict[str, Recorded]:
        Recorded.made = []
        monkeypatch.setattr(worker_groups, "RayWorkerGroup", Recorded)
        bundle = {"device": device, "gpusPerWorker": gpus, "bundle": {"CPU": 3}, "strategy": "PACK", "fallback": []}
        groups = [{"name": f"g{i}", "workers": 1, "roles": own, **bundle} for i, own in enumerate(roles)]
        config = make_config(rewards=rewards, groups=groups, **fields)

        class Pools:
            pools = dict.fromkeys(group.name for group in config.groups)

        spawn_worker_groups(config, Pools, None)
        return {group.options["name"]: group for group in Recorded.made}

    return _spawned


TRAINING = ["policy", "critic", "reference"]


@pytest.mark.parametrize(("sync_seconds", "patience"), [(60, 600), (600, 720), (3600, 4320)])
def test_ranks_are_not_blamed_for_each_other_while_a_sync_may_last(spawned, sync_seconds: int, patience: float) -> None:
    sync = {"transport": "nccl", "reason": "apart", "bucketBytes": 1024, "verify": True, "timeoutSeconds": sync_seconds}
    training = spawned([FUNCTION], [*TRAINING, "rollout", "reward"], weightSync=sync)["g0/training"]
    assert training.options["timeout_seconds"] == patience
    assert COLLECTIVE_SHARE * patience > sync_seconds


def test_functions_take_no_gpu(spawned) -> None:
    reward = spawned([FUNCTION], [*TRAINING, "rollout", "reward"])["g0/reward"].options
    assert (reward["device"], reward["num_gpus"], reward["visible_devices_from"]) == ("cpu", 0, None)


def test_a_model_alone_takes_the_gpus_of_its_bundle(spawned) -> None:
    reward = spawned([FUNCTION, MODEL], [*TRAINING, "rollout"], ["reward"])["g1/reward"].options
    assert (reward["device"], reward["num_gpus"], reward["visible_devices_from"]) == ("cuda", None, None)


def test_a_model_beside_training_shares_its_gpu_and_is_there_before_the_engine(spawned) -> None:
    groups = spawned([MODEL], [*TRAINING, "rollout", "reward"])
    assert list(groups) == ["g0/training", "g0/reward", "g0/rollout"]
    assert groups["g0/reward"].options["visible_devices_from"] is groups["g0/training"]
    assert groups["g0/reward"].options["device"] == "cuda"
    assert groups["g0/reward"].events == ["ready before the 3. group"]


def test_a_model_beside_engines_shares_theirs(spawned) -> None:
    groups = spawned([MODEL], TRAINING, ["rollout", "reward"])
    assert groups["g1/reward"].options["visible_devices_from"] is groups["g1/rollout"]


@pytest.mark.parametrize(("device", "gpus"), [("cpu", 1), ("cpu", 0), ("cuda", 0)])
def test_a_model_without_a_gpu_computes_on_the_cpu(spawned, device: str, gpus: float) -> None:
    reward = spawned([MODEL], [*TRAINING, "rollout"], ["reward"], device=device, gpus=gpus)["g1/reward"].options
    assert (reward["device"], reward["num_gpus"]) == ("cpu", 0)
