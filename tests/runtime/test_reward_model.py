"""Reward models: tiny random classifiers, written to a folder as users' are."""

import json
from pathlib import Path

import pytest
import torch
from rlhf_api.rewards import Reward
from rlhf_runtime.errors import InputError, RewardError
from rlhf_runtime.models import ascii_tokenizer
from rlhf_runtime.preflight import preflight
from rlhf_runtime.protocol import DataProto
from rlhf_runtime.rewards.model import ModelTerm
from rlhf_runtime.single_controller.decorator import MODES, registered_methods
from rlhf_runtime.workers.reward import RewardWorker
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip
PROMPTS = ["1+1=", "a much longer prompt than the others", "2", "3+4="]
RESPONSES = ["2", "yes", "", "7 or so, I should think"]
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def write(folder: Path, architecture: str = "qwen2", causal: bool = False, **fields) -> Path:
    """A random model with the tokenizer of ASCII characters; by default a classifier of one output."""
    tokenizer = ascii_tokenizer()
    config = AutoConfig.for_model(
        architecture,
        **{**SIZES, "max_position_embeddings": 64, "vocab_size": len(tokenizer), "num_labels": 1,
           "pad_token_id": tokenizer.pad_token_id, **fields},
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
        network = kind.from_config(config).eval()
        for parameter in network.parameters():  # as sharp as a trained one, whatever its kind's initialization
            parameter.data.add_(0.2 * torch.randn(parameter.shape))
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["qwen2", "bert"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder, read at its last token, and an encoder, read at its first."""
    return write(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("decoder"))


def term(folder: Path, tokens: int = 1024, **fields) -> ModelTerm:
    reward = Reward.model_validate({"name": "judge", "model": {"path": str(folder), **fields}})
    return ModelTerm(reward, "rewards[0].model.path", torch.device("cpu"), tokens)


def network(folder: Path) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def alone(folder: Path, texts: list[str]) -> list[float]:
    """What transformers itself says of each text, one at a time and without padding."""
    model, tokenizer = network(folder), ascii_tokenizer()
    return [model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits.item() for text in texts]


@pytest.mark.parametrize("tokens", [1, 50, 1024], ids=["one row a pass", "some", "all in one pass"])
def test_scores_are_those_of_transformers_whatever_stands_beside_a_row(folder: Path, tokens: int) -> None:
    expected = alone(folder, [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)])
    assert max(expected) - min(expected) > 0.05
    assert term(folder, tokens).score(PROMPTS, RESPONSES, [{}] * 4).tolist() == pytest.approx(expected, abs=1e-5)
    for row in range(4):
        (score,) = term(folder, tokens).score(PROMPTS[row : row + 1], RESPONSES[row : row + 1], [{}])
        assert score == pytest.approx(expected[row], abs=1e-5)


def test_no_pass_is_larger_than_the_budget(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, shapes = term(decoder, tokens=60), []
    forward = judge._network.forward
    monkeypatch.setattr(judge._network, "forward", lambda **k: shapes.append(k["input_ids"].shape) or forward(**k))
    judge.score(PROMPTS, RESPONSES, [{}] * 4)
    assert len(shapes) > 1
    assert all(shape.numel() <= 60 for shape in shapes)


def test_a_conversation_is_written_by_the_chat_template(tmp_path: Path) -> None:
    folder = write(tmp_path)
    tokenizer = ascii_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    expected = alone(folder, ["[user]1+1=[assistant]2", "[user]3[assistant]no"])
    scores = term(folder, format="chat").score(["1+1=", "3"], ["2", "no"], [{}] * 2)
    assert scores.tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("length", "right"), [(60, True), (61, False)])
def test_what_is_too_long_is_refused_not_cut(decoder: Path, length: int, right: bool) -> None:
    prompts, responses = ["1+1=", "1+1="], ["2", "x" * length]
    if right:
        assert len(term(decoder).score(prompts, responses, [{}] * 2)) == 2
        return
    with pytest.raises(RewardError, match=r"^rewards\.judge \(.*\): got 65 tokens in prompt and response 1 \('xxx"):
        term(decoder).score(prompts, responses, [{}] * 2)


def test_a_score_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    model = network(folder)
    model.score.weight.data[0, 0] = torch.nan
    model.save_pretrained(folder)
    with pytest.raises(RewardError, match=r"got nan for response 0 \('2'\); expected a finite number"):
        term(folder).score(["1+1="], ["2"], [{}])


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_score_by_models_and_functions_together(make_config, decoder: Path, workers: int) -> None:
    rewards = [
        {"name": "judge", "weight": 2.0, "model": {"path": str(decoder)}},
        {"name": "digits", "function": {"name": "digit_share"}},
    ]
    group = [RewardWorker(make_config(rewards=rewards)) for _ in range(workers)]
    mode = MODES[registered_methods(RewardWorker)["score"].dispatch_mode]
    batch = DataProto.from_dict(
        {"sample_index": torch.arange(4)}, {"prompt": PROMPTS, "response": RESPONSES, "columns": [{}] * 4}
    )
    call = mode.dispatch(workers, (batch,), {})
    parts = [worker.score(part) for worker, part in zip(group, call.args[0].values, strict=True)]
    if workers == 3:  # four rows on three ranks: the last two rows only fill up
        assert parts[2].batch["reward/judge"].tolist() == [0, 0]
    scores = mode.collect(call, parts).batch
    expected = alone(decoder, [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)])
    assert scores["reward/judge"].tolist() == pytest.approx(expected, abs=1e-5)
    total = [2 * judged + digits for judged, digits in zip(expected, [1.0, 0.0, 0.0, 1 / 23], strict=True)]
    assert scores["scores"].tolist() == pytest.approx(total, abs=1e-4)


# -------------------------------------------------------------------------------------------------------- preflight


def refusals(make_config, folder: Path, **fields) -> list[str]:
    rewards = [
        {"name": "digits", "function": {"name": "digit_share"}},
        {"name": "judge", "model": {"path": str(folder), **fields}},
    ]
    with pytest.raises(InputError) as caught:
        preflight(make_config(rewards=rewards))
    return str(caught.value).splitlines()


def change(folder: Path, name: str, **fields) -> Path:
    content = json.loads((folder / name).read_text())
    (folder / name).write_text(json.dumps(content | fields))
    return folder


def test_a_good_classifier_is_let_through(make_config, folder: Path) -> None:
    assert preflight(make_config(rewards=[{"name": "judge", "model": {"path": str(folder)}}]))


def test_files_that_are_not_there_are_told_at_once(make_config, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    lines = refusals(make_config, tmp_path)
    assert [line.split("; ")[0] for line in lines] == [
        f"rewards[1].model.path: got {tmp_path} without config.json",
        f"rewards[1].model.path: got {tmp_path} without weights",
        f"rewards[1].model.path: got {tmp_path} without a tokenizer",
    ]
    assert "expected *.safetensors. " in lines[1]
    (line,) = refusals(make_config, tmp_path / "nowhere")
    assert "which is no folder" in line


@pytest.mark.parametrize(
    ("spoil", "got"),
    [
        (lambda folder: write(folder, num_labels=2), "a model of 2 outputs; expected a sequence classifier with one"),
        (lambda folder: change(write(folder), "config.json", model_type="vit"), "which transformers has no classifier"),
        (lambda folder: change(write(folder), "config.json", model_type="none"), "a config that cannot be read"),
        (
            lambda folder: change(
                write(folder), "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"}
            ),
            "a config that cannot be read",
        ),
        (lambda folder: change(write(folder), "config.json", vocab_size=50), "got a vocabulary of 50; expected at"),
        (lambda folder: change(write(folder), "config.json", pad_token_id=7), "got pad token 7 in config.json; expect"),
        (lambda folder: change(write(folder), "tokenizer_config.json", pad_token=None), "got no pad token"),
    ],
    ids=["outputs", "kind", "unknown", "code of its own", "vocabulary", "pad", "no pad"],
)
def test_a_model_that_is_no_reward_model_is_told(make_config, tmp_path: Path, spoil, got: str) -> None:
    (line,) = refusals(make_config, spoil(tmp_path))
    assert line.startswith("rewards[1].model.path: ")
    assert got in line


def test_a_chat_needs_a_template(make_config, decoder: Path) -> None:
    (line,) = refusals(make_config, decoder, format="chat")
    assert "without a chat template; expected one for `format: chat`" in line


def test_a_language_model_without_a_head_is_no_classifier(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"^rewards\[0\]\.model\.path: got no weights for score\.weight"):
        term(write(tmp_path, causal=True))
