"""Weight sync into two real vLLM engines, from a policy of one rank and of two."""

import os
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from rlhf_runtime.engines.vllm_engine import Sampling
from rlhf_runtime.errors import InputError, WeightSyncError
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import lengths, ragged


@pytest.fixture(scope="module", params=list(product(["shm", "gloo"], [False, True])), ids=str)
def synced(stage: Any, request: pytest.FixtureRequest) -> dict[str, Any]:
    """The engines' greedy tokens on either side of a sync from seed 0's weights to seed 1's."""
    stage.prepare(*request.param)
    folder = stage.load(1)
    before, report, after = stage.greedy(), stage.sync(), stage.greedy()
    return {"before": before, "report": report, "after": after, "folder": folder}


def test_engines_generate_as_an_engine_that_loaded_the_new_weights(stage: Any, synced: dict[str, Any]) -> None:
    fresh, parameters = ray.get(stage.rollout.actors[0].fresh.remote(stage.export(1), stage.settings))
    assert fresh == stage.trainer.greedy()[0]
    assert all(old != new for engine in synced["before"] for old, new in zip(engine, fresh, strict=True))
    assert synced["after"] == [fresh, fresh]
    assert stage.rollout.parameters() == [parameters, parameters]


def test_a_report_counts_each_tensor_once(stage: Any, synced: dict[str, Any]) -> None:
    file_bytes = sum(path.stat().st_size for path in Path(synced["folder"]).glob("*.safetensors"))
    assert synced["report"].version == 1
    assert file_bytes - 8192 < synced["report"].bytes < file_bytes


def test_nothing_lies_in_shared_memory(stage: Any, synced: dict[str, Any]) -> None:
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("rlhf")]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_trainers(stage: Any, synced: dict[str, Any], temperature: float) -> None:
    sampling = Sampling(temperature=temperature, max_tokens=16, stop_token_ids=(1,))
    other = 1.7 - temperature
    mismatch = 0.0
    for response in stage.rollout.sample(stage.PROMPTS, sampling, stage.version):
        for prompt, (tokens, log_probs) in zip(stage.PROMPTS, response, strict=True):
            assert log_probs == pytest.approx(stage.trainer.log_probs(prompt, tokens, temperature)[0], abs=1e-4)
            wrong = torch.tensor(stage.trainer.log_probs(prompt, tokens, other)[0])
            mismatch = max(mismatch, float((torch.tensor(log_probs) - wrong).abs().max()))
    assert mismatch > 0.1


def test_a_row_depends_on_its_sample_index_and_not_on_its_engine(stage: Any, synced: dict[str, Any]) -> None:
    prompts = [stage.PROMPTS[0]] * 4 + stage.PROMPTS[1:]
    columns = {
        "prompt_ids": ragged([torch.tensor(prompt) for prompt in prompts]),
        "sample_index": torch.tensor([0, 1, 2, 0, 4, 5]),
    }
    batch = DataProto.from_dict(columns)
    first, second = stage.rollout.actors
    whole = ray.get(first.generate.remote(batch, stage.version)).batch
    halves = ray.get(
        [
            actor.generate.remote(half, stage.version)
            for actor, half in zip((second, first), batch.chunk(2), strict=True)
        ]
    )
    split = DataProto.concat(halves).batch
    rows = [row.tolist() for row in whole["response_ids"].unbind()]
    assert rows == [row.tolist() for row in split["response_ids"].unbind()]
    assert rows[0] == rows[3]
    assert rows[0] != rows[1] != rows[2]
    assert whole["weight_version"].tolist() == [stage.version] * 6
    assert torch.equal(lengths(whole["response_ids"]), lengths(whole["rollout_log_probs"]))
    assert all(len(row) == 16 or row[-1] == 1 for row in rows)


def test_prefixes_cached_before_a_sync_are_forgotten(stage: Any, synced: dict[str, Any]) -> None:
    old = stage.greedy(stage.LONG)
    assert min(stage.rollout.cached_tokens()) >= 128
    stage.load(0)
    stage.sync()
    new = stage.greedy(stage.LONG)
    assert new == [stage.trainer.greedy(stage.LONG)[0]] * 2
    assert new != old
    stage.load(1)
    stage.rollout.refuse_reset(True)
    with pytest.raises(WeightSyncError, match="prefix cache"):
        stage.sync()
    with pytest.raises(WeightSyncError, match="while paused"):
        stage.greedy()
    stage.rollout.refuse_reset(False)
    stage.sync()
    assert stage.greedy(stage.LONG) == old


def test_a_sharded_policy_arrives_whole(stage: Any, synced: dict[str, Any]) -> None:
    parameters = stage.rollout.parameters()
    stage.connect(sharded=True, verify=False)
    stage.load(0)
    stage.sync()
    assert stage.greedy() == synced["before"]
    stage.connect(sharded=True)
    stage.load(1)
    stage.sync()
    assert stage.greedy() == synced["after"]
    assert stage.rollout.parameters() == parameters
    stage.connect(sharded=False)
    stage.load(1)


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("nothing moved", "model.embed_tokens.weight"),
        ("flipped", "model.layers.1.mlp.up_proj.weight"),
        ("lost", "model.layers.0.self_attn.k_proj.bias"),
        ("norm left out", "model.layers.1.input_layernorm.weight"),
        ("part left out", "model.layers.0.self_attn.qkv_proj.bias"),
    ],
)
def test_a_sync_that_goes_wrong_twice_names_the_first_tensor(
    stage: Any, synced: dict[str, Any], how: str, name: str
) -> None:
    with pytest.raises(WeightSyncError, match=f"weightSync: {name}: got"):
        stage.sync(stage.wrong(how, times=2))
    with pytest.raises(WeightSyncError, match="while paused"):
        stage.greedy()
    stage.sync()
    assert stage.greedy() == synced["after"]


@pytest.mark.parametrize(("how", "told"), [("flipped", "up_proj.weight: got checksum"), ("engine fails", "layers.9")])
def test_a_sync_that_goes_wrong_once_is_repeated_and_says_so(
    stage: Any, synced: dict[str, Any], how: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    stage.load(0)
    stage.sync()
    stage.load(1)
    stage.sync(stage.wrong(how, times=1))
    assert stage.greedy() == synced["after"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert told in caplog.text


def test_a_sender_that_fails_by_itself_is_not_repeated_and_frees_the_engines(
    stage: Any, synced: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(WeightSyncError, match="the memory is gone"):
        stage.sync(stage.wrong("sender fails", times=2))
    assert not caplog.records
    stage.sync()
    assert stage.greedy() == synced["after"]


def test_another_version_is_refused(stage: Any, synced: dict[str, Any]) -> None:
    for version in (stage.version - 1, stage.version + 1):
        with pytest.raises(WeightSyncError, match=f"version {version}; expected {stage.version}"):
            stage.rollout.sample(stage.PROMPTS, stage.GREEDY, version)


def test_a_model_that_vllm_cannot_run_here_is_refused_at_the_start(stage: Any, synced: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"models.policy: got attention heads of size 16; expected one of"):
        stage.rollout.unsupported(stage.settings, stage.cache + "/models")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a GPU; `shm` stands for it here")
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_arrive_over_cuda_ipc(on_gpu: Any, tied: bool) -> None:
    stage = on_gpu
    stage.prepare("ipc", tied)
    folder = stage.load(1)
    before = stage.greedy()
    assert stage.sync().version == 1
    fresh, parameters = ray.get(stage.rollout.actors[0].fresh.remote(folder, stage.settings))
    assert stage.greedy() == [fresh] != before
    assert stage.rollout.parameters() == [parameters]
