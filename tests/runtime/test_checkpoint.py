"""Checkpoints of real workers on one rank, without Ray: what is in them, damage, a full disk, export."""

import errno
import json
import math
import os
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from rlhf_api import RuntimeConfig
from rlhf_api.checkpoint import Checkpoint as Settings
from rlhf_runtime.checkpoint import randomness
from rlhf_runtime.checkpoint.driver_state import DriverState, read_metrics
from rlhf_runtime.checkpoint.identity import require_same, trained_from
from rlhf_runtime.checkpoint.manifest import Checkpoint, DamagedError, FileRecord
from rlhf_runtime.checkpoint.resume import find_checkpoint
from rlhf_runtime.checkpoint.saver import Saver
from rlhf_runtime.checkpoint.store import CheckpointStore
from rlhf_runtime.errors import CheckpointError, InputError
from rlhf_runtime.export import checkpoint_at, export_checkpoint, main, trained_by
from rlhf_runtime.hugging_face import Trained
from rlhf_runtime.models import load_tokenizer, model_folder
from rlhf_runtime.single_controller.calls import WorkerFuture
from rlhf_runtime.types import Prompt
from rlhf_runtime.workers.critic import CriticWorker
from rlhf_runtime.workers.policy import PolicyWorker
from rlhf_runtime.workers.reward import RewardWorker
from rlhf_runtime.workers.saved import SavedWorker
from transformers import AutoModelForCausalLM

STATE = DriverState(prompts={"yielded": 3}, response_lengths={"mean": 0.1}, kl_coefficient=0.1 + 0.2)
PROMPTS = [Prompt(0, "1+1=", [5, 6]), Prompt(1, "2+2=", [7, 8])]
FILES = [
    "checkpoint.json",
    "critic-00000-of-00001.safetensors",
    "driver.json",
    "metrics.jsonl",
    "model/config.json",
    "model/generation_config.json",
    "model/tokenizer.json",
    "model/tokenizer_config.json",
    "policy-00000-of-00001.safetensors",
    "reward-00000-of-00001.safetensors",
]


class Group:
    """A worker in this process in the place of a group of actors."""

    world_size = 1

    def __init__(self, worker: SavedWorker) -> None:
        self.worker = worker

    def save(self, folder: str) -> WorkerFuture:
        self.worker.save(folder)
        return WorkerFuture(lambda: [None])

    def saved(self, wait: bool) -> WorkerFuture:
        return WorkerFuture(lambda: [self.worker.saved(wait)])


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def config(make_config) -> RuntimeConfig:
    return make_config()


@pytest.fixture(scope="module")
def groups(config: RuntimeConfig) -> dict[str, Group]:
    return {
        "policy": Group(PolicyWorker(config)),
        "critic": Group(CriticWorker(config)),
        "reward": Group(RewardWorker(config)),
    }


@pytest.fixture(scope="module")
def origin(config: RuntimeConfig) -> dict:
    return origin_of(config)


def origin_of(config: RuntimeConfig, prompts: list[Prompt] = PROMPTS, **folders: Path) -> dict:
    return trained_from(config, {role: model_folder(config, role) for role in config.models.by_role} | folders, prompts)


@pytest.fixture
def saver(config: RuntimeConfig, groups: dict[str, Group], origin: dict, tmp_path: Path) -> Callable[..., Saver]:
    def make(keep: int = 3) -> Saver:
        return Saver(CheckpointStore(tmp_path, keep), groups, model_folder(config, "policy"), origin)

    return make


@pytest.fixture
def taken(saver: Callable[..., Saver], tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 1 and 2."""
    take(saver(), 1, 2)
    return tmp_path


def take(saver: Saver, *steps: int) -> None:
    for step in steps:
        saver.begin(step, step, STATE, [{"step": n, "loss": math.nan} for n in range(1, step + 1)])
    saver.look(wait=True)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def newest(folder: Path) -> int:
    return CheckpointStore(folder, 3).find().step


def test_a_checkpoint_is_whole_once_it_has_its_name(saver, tmp_path):
    one = saver()
    one.begin(1, 1, STATE, [])
    assert names(tmp_path) == [".step-000001-partial"]
    assert newest(tmp_path) == 0
    one.look(wait=True)
    assert names(tmp_path) == ["step-000001"]
    written = sorted(str(path.relative_to(tmp_path / "step-000001")) for path in tmp_path.rglob("*") if path.is_file())
    assert written == FILES


def test_what_the_driver_knew_comes_back_to_the_bit(taken):
    checkpoint = CheckpointStore(taken, 3).find().checkpoint
    assert (checkpoint.manifest.step, checkpoint.manifest.ranks) == (2, {"policy": 1, "critic": 1, "reward": 1})
    assert DriverState.read(checkpoint.folder) == STATE
    rows = read_metrics(checkpoint.folder)
    assert [row["step"] for row in rows] == [1, 2]
    assert math.isnan(rows[0]["loss"])


def test_the_newest_are_kept(saver, tmp_path):
    take(saver(keep=2), 1, 2, 10, 9)
    assert names(tmp_path) == ["step-000009", "step-000010"]


def test_a_step_taken_again_takes_the_place_of_the_old_one(saver, tmp_path):
    take(saver(), 1)
    (tmp_path / "step-000001" / "driver.json").write_text("damaged")
    take(saver(), 1)
    assert names(tmp_path) == ["step-000001"]
    assert newest(tmp_path) == 1


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flipped", "gone"])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_one_is_passed_over_and_named(taken, name, damage):
    damage(taken / "step-000002" / name)
    store = CheckpointStore(taken, 3)
    found = store.find()
    assert found.step == 1
    [note] = found.notes
    assert note.startswith(f"Passed over {taken}/step-000002, which is damaged: {name}")
    store.clear(found)
    assert names(taken) == ["step-000001", "step-000002.damaged"]


@pytest.mark.parametrize("where", ["of", "stat", "read_bytes", "scandir"])
def test_a_storage_that_fails_damages_nothing(taken, monkeypatch, where):
    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    of = {"of": FileRecord, "scandir": os}.get(where, Path)
    monkeypatch.setattr(of, where, fail)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(taken, 3).find()
    monkeypatch.undo()
    assert str(caught.value).startswith(f"{taken}")
    assert "got `Input/output error` while reading a checkpoint" in str(caught.value)
    assert newest(taken) == 2


def test_an_unfinished_one_is_passed_over_named_and_cleared(saver, taken):
    shutil.copytree(taken / "step-000002", taken / ".step-000003-partial")
    shutil.copytree(taken / "step-000002", taken / ".step-000000-removed")
    store = CheckpointStore(taken, 3)
    found = store.find()
    assert (found.step, found.notes) == (2, [f"Passed over {taken}/.step-000003-partial: it was not finished"])
    store.clear(found)
    assert names(taken) == ["step-000001", "step-000002"]


def test_damaged_ones_do_not_push_out_whole_ones(saver, taken):
    cut(taken / "step-000002" / "driver.json")
    store = CheckpointStore(taken, 1)
    store.clear(store.find())
    take(saver(keep=1), 1)
    assert newest(taken) == 1


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """Files of at most so many bytes can be written: what more does to a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [10, 20_000], ids=["for nothing", "for small files"])
def test_a_full_disk_is_told_and_keeps_the_last_good_one(saver, taken, size):
    with pytest.raises(CheckpointError) as caught, room_for(size):
        take(saver(), 3)
    assert caught.value.exit_code == 6
    message = str(caught.value)
    assert message.startswith(f"{taken}/.step-000003-partial")
    assert "File too large" in message
    assert "Fix: free space" in message
    assert newest(taken) == 2


def test_nothing_is_written_over(taken):
    with pytest.raises(InputError, match=r"holds checkpoints up to step 2; expected none.*--resume"):
        find_checkpoint(Settings(path=str(taken)))
    assert find_checkpoint(Settings(path=str(taken), resume=True)).step == 2


def test_damaged_ones_alone_are_no_reason_to_start_anew(taken):
    for step in (1, 2):
        cut(taken / f"step-00000{step}" / "metrics.jsonl")
    with pytest.raises(InputError, match=r"damaged checkpoints alone.*step-000002: metrics\.jsonl has"):
        find_checkpoint(Settings(path=str(taken), resume=True))


@pytest.mark.parametrize("settings", [None, Settings(path="/nowhere", resume=True)], ids=["none", "empty"])
def test_without_checkpoints_a_run_starts_anew(settings):
    assert find_checkpoint(settings).checkpoint is None


def test_another_format_is_not_misread(taken):
    manifest = taken / "step-000002" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"formatVersion": 1', '"formatVersion": 2'))
    with pytest.raises(DamagedError):
        Checkpoint.open(taken / "step-000002")


def test_what_was_trained_from_something_else_is_refused_by_name(config, make_config, taken, origin, tmp_path):
    checkpoint = CheckpointStore(taken, 3).find().checkpoint
    require_same(checkpoint, json.loads(json.dumps(origin)))
    other_model = tmp_path / "model"
    shutil.copytree(model_folder(config, "policy"), other_model)
    flip(other_model / "model.safetensors")
    (other_model / "tokenizer_config.json").write_text("{}")
    changed = make_config(
        algorithm={"ppo": {"clipRange": {"low": 0.3}}},
        data={"prompts": {"builtin": "arithmetic"}, "batchSize": 7, "maxPromptLength": 8, "maxResponseLength": 8},
    )
    with pytest.raises(InputError) as caught:
        require_same(checkpoint, origin_of(changed, PROMPTS[:1], policy=other_model))
    told = {line.partition(": got ")[0]: line for line in str(caught.value).splitlines()}
    assert set(told) == {
        "models.policy",
        "models.policy (tokenizer)",
        "algorithm.ppo.clipRange.low",
        "data.prompts",
        "data.batchSize",
    }
    assert "got 0.3; expected 0.2, as in" in told["algorithm.ppo.clipRange.low"]


def test_steps_and_optimizers_may_change(config, make_config, taken):
    optimizer = {"learningRate": 0.5}
    changed = {"steps": 99, "policyOptimizer": optimizer, "criticOptimizer": optimizer}
    training = make_config().training.model_dump(by_alias=True) | changed
    checkpoint = CheckpointStore(taken, 3).find().checkpoint
    require_same(checkpoint, origin_of(make_config(training=training)))


def test_random_generators_come_back():
    def draw() -> list[float]:
        return [random.random(), np.random.random(), torch.rand(1).item(), random.gauss(0, 1)]

    draw()
    state = json.loads(json.dumps(randomness.capture()))
    drawn = draw()
    randomness.restore(state)
    assert draw() == drawn


def test_a_reward_that_draws_goes_on_drawing(groups, taken):
    reward = groups["reward"].worker
    checkpoint = CheckpointStore(taken, 3).find().checkpoint
    drawn = []
    for _ in range(2):
        reward.load(str(checkpoint.folder), checkpoint.manifest.ranks["reward"])
        drawn.append(random.random())
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("moved", [False, True], ids=["in place", "moved aside"])
def test_a_run_exports_what_its_policy_would(config, make_config, groups, saver, tmp_path, moved):
    run = tmp_path / "run"
    run.mkdir()
    described = make_config(runDir=str(run), checkpoint={"path": str(run / "checkpoints")})
    (run / "runtime.json").write_text(described.model_dump_json(by_alias=True))
    take(saver(), 1)
    (run / "checkpoints").mkdir()
    (tmp_path / "step-000001").rename(run / "checkpoints" / "step-000001")
    if moved:
        run = run.rename(tmp_path / "run.1")
    checkpoint, notes = checkpoint_at(run)
    assert notes == []
    export_checkpoint(checkpoint, tmp_path / "exported")
    groups["policy"].worker.export(str(tmp_path / "direct"), trained_by(checkpoint.manifest))
    exported, direct = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("exported", "direct")
    )
    assert exported == direct
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    load_tokenizer(tmp_path / "exported")


def test_an_export_says_of_which_checkpoint_it_is(saver, tmp_path):
    made = saver()
    take(made, 1, 2)
    checkpoint = CheckpointStore(tmp_path, 3).find().checkpoint
    assert trained_by(made.finished) == trained_by(checkpoint.manifest)
    export_checkpoint(checkpoint, tmp_path / "out")
    told = Trained.read(tmp_path / "out")
    assert told.step == 2
    assert told not in (None, trained_by(Checkpoint.open(tmp_path / "step-000001").manifest))


def test_an_export_onto_a_full_disk_is_told(taken, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["export", str(taken), str(taken / "out")])
    with room_for(20_000):
        assert main() == 6
    assert capsys.readouterr().err.startswith(f"{taken}/out: got `File too large` while writing the trained model; ")
    assert not (taken / "out").exists()


def test_what_holds_no_checkpoint_cannot_be_exported(taken, tmp_path):
    assert checkpoint_at(taken)[0].manifest.step == 2
    assert checkpoint_at(taken / "step-000001")[0].manifest.step == 1
    cut(taken / "step-000001" / "driver.json")
    for path, told in ((tmp_path / "nowhere", "no whole checkpoint"), (taken / "step-000001", "damaged")):
        with pytest.raises(InputError, match=told):
            checkpoint_at(path)
