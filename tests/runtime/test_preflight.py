import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rlhf_api.roles import ModelSource
from rlhf_runtime.errors import InputError
from rlhf_runtime.models import ascii_tokenizer, materialize, stop_token_ids
from rlhf_runtime.preflight import preflight
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def model_folder(make_config, tmp_path_factory) -> Path:
    return materialize(make_config().models.policy, tmp_path_factory.mktemp("models"))


@pytest.fixture
def copy(model_folder, tmp_path):
    """Copies the model to a folder of its own and changes fields of its config.json."""

    def make(name: str, **fields) -> Path:
        folder = shutil.copytree(model_folder, tmp_path / name)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))
        return folder

    return make


def models_of(policy: Path, critic: Path | None = None, reference: Path | None = None) -> dict:
    roles = {"policy": policy, "critic": critic or policy, "reference": reference or policy}
    return {role: {"path": str(folder)} for role, folder in roles.items()}


def refusal(config) -> list[str]:
    with pytest.raises(InputError) as caught:
        preflight(config)
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert all(": got " in line and "; expected " in line and ". Fix: " in line for line in lines), lines
    return lines


def test_a_good_config_gives_what_was_loaded(make_config, model_folder):
    sets = preflight(make_config(models=models_of(model_folder)))
    prompts = sets.training
    assert (len(prompts), sets.evaluation) == (100, [])
    assert ascii_tokenizer().decode(prompts[0].token_ids) == prompts[0].text
    assert prompts[0].columns == {"answer": "0"}


def test_something_else_runs_once_the_files_are_checked_and_only_then(make_config, model_folder, tmp_path):
    (tmp_path / "train.jsonl").write_text("[]\n")
    calls = []
    data = {"prompts": {"path": str(tmp_path / "train.jsonl")}}
    with pytest.raises(InputError):
        preflight(make_config(models=models_of(model_folder), data=data), meanwhile=lambda: calls.append("early"))
    preflight(make_config(models=models_of(model_folder)), meanwhile=lambda: calls.append("beside"))
    assert calls == ["beside"]


def test_random_models_need_no_folder(make_config):
    assert len(preflight(make_config()).training) == 100


def evaluated(prompts: dict, **fields) -> dict:
    """A `data` section with held-out prompts."""
    lengths = {"maxPromptLength": 8, "maxResponseLength": 8}
    return {"prompts": {"builtin": "arithmetic"}, "evaluation": {"prompts": prompts, **fields}, **lengths}


def test_held_out_prompts_are_loaded_too(make_config, model_folder):
    data = evaluated({"inline": [{"question": "1+1=", "answer": "2"}], "field": "question"}, maxResponseLength=8)
    (prompt,) = preflight(make_config(models=models_of(model_folder), data=data)).evaluation
    assert (prompt.text, prompt.columns) == ("1+1=", {"answer": "2"})


def test_held_out_prompts_are_checked_as_those_of_training(make_config, model_folder, tmp_path):
    rewards = [{"name": "right", "function": {"name": "exact_match"}}]
    data = evaluated({"inline": [{"prompt": "1+1=", "answer": "2"}, "1+2="]}, maxResponseLength=8)
    (line,) = refusal(make_config(rewards=rewards, data=data))
    assert "the first of them row 2 of data.evaluation.prompts" in line
    (line,) = refusal(make_config(data=evaluated({"path": str(tmp_path / "none.jsonl")})))
    assert line.startswith("data.evaluation.prompts.path: got ")
    (line,) = refusal(make_config(data=evaluated({"inline": [{"text": "a"}]})))
    assert line.startswith("data.evaluation.prompts.inline[0]: got only `text`")
    assert "data.evaluation.prompts.field" in line
    (line,) = refusal(make_config(data=evaluated({"inline": ["far too long"]})))
    assert line.startswith("data.evaluation.prompts.inline[0]: got a prompt of 12 tokens")
    (line,) = refusal(make_config(data=evaluated({"inline": ["a"]}, maxResponseLength=57)))
    assert line.startswith("models.policy: got data.maxPromptLength + data.evaluation.maxResponseLength = 65 tokens")


def test_what_is_cheap_to_know_is_told_at_once_and_before_torch(make_config, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n[]\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text("<html>")
    config = make_config(
        data={"prompts": {"path": str(tmp_path / "train.jsonl")}},
        rewards=[{"name": "mine", "function": {"importPath": "nowhere:f"}}],
        models=models_of(tmp_path / "missing", tmp_path / "empty", tmp_path / "text"),
    )
    got = [line.split("; expected ")[0] for line in refusal(config)]
    assert got == [
        f"{tmp_path}/train.jsonl:1: got only `text`",
        f"{tmp_path}/train.jsonl:2: got a list",
        "rewards.mine.function.importPath: got nowhere, but there is no module nowhere",
        f"models.policy.path: got {tmp_path}/missing, which is no folder",
        f"models.critic.path: got {tmp_path}/empty without config.json",
        f"models.critic.path: got {tmp_path}/empty without weights",
        f"models.reference.path: got {tmp_path}/text/config.json, which is not JSON (Expecting value: line 1 column 1 "
        "(char 0))",
        f"models.reference.path: got {tmp_path}/text without weights",
    ]  # fmt: skip
    code = (
        "import sys; from rlhf_api import RuntimeConfig; from rlhf_runtime.preflight import preflight, InputError\n"
        "try: preflight(RuntimeConfig.model_validate_json(sys.argv[1]))\n"
        "except InputError: sys.exit(42 + bool({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    document = config.model_dump_json(by_alias=True)
    assert subprocess.run([sys.executable, "-c", code, document], check=False).returncode == 42


def test_a_model_that_may_not_be_read_is_told(make_config, model_folder, copy, monkeypatch):
    long, closed = Path(f"/{'x' * 300}"), copy("closed")  # such a name cannot be looked at by anybody
    opened, answer = Path.open, PermissionError(errno.EACCES, "Permission denied")

    def refuse(path, *arguments, **named):
        if path == closed / "tokenizer.json":
            raise answer
        return opened(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", refuse)
    first, second = refusal(make_config(models=models_of(model_folder, long, closed)))
    assert first.startswith(f"models.critic.path: got {long}, which cannot be read (File name too long); expected ")
    assert second.startswith(f"models.reference.path: got {closed}/tokenizer.json, which cannot be read (Permission de")
    assert "chmod" in second
    answer = OSError(errno.ESTALE, "Stale file handle")  # of storage that may answer again
    with pytest.raises(OSError, match="Stale"):
        preflight(make_config(models=models_of(model_folder, closed)))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: content[:100],
        lambda content: b"",
        lambda content: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        lambda content: (2).to_bytes(8, "little") + b"[]",
    ],
    ids=["tensors", "header", "empty", "git-lfs", "list"],
)
def test_weights_that_are_not_all_there(make_config, copy, spoil):
    folder = copy("spoilt")
    weights = folder / "model.safetensors"
    weights.write_bytes(spoil(weights.read_bytes()))
    [line, *_] = refusal(make_config(models=models_of(folder)))
    assert line.startswith(f"models.policy.path: got {weights}, which is cut short; ")
    assert "git-lfs" in line


def test_reward_functions_come_from_the_python_path(make_config, model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "preflight_rewards.py").write_text(
        "def score(prompts, responses, answer): return [0.0] * len(prompts)\n"
    )
    config = make_config(
        models=models_of(model_folder),
        rewards=[{"name": "mine", "function": {"importPath": "preflight_rewards:score"}}],
        pythonPath=[str(tmp_path)],
    )
    assert preflight(config)
    assert sys.path[0] == str(tmp_path)


@pytest.mark.parametrize(
    ("parameters", "rows", "got"),
    [
        ("prompts, responses", [{"prompt": "a", "answer": "1"}], "got an unexpected keyword argument 'answer'"),
        ("prompts, responses, *, label", ["a"], "missing a required"),
        ("prompts", ["a"], "too many positional arguments"),
    ],
)
def test_a_function_that_cannot_take_the_columns_is_told(make_config, tmp_path, monkeypatch, parameters, rows, got):
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"columns_{len(parameters)}"
    (tmp_path / f"{name}.py").write_text(f"def score({parameters}): return [0.0] * len(prompts)\n")
    config = make_config(
        data={"prompts": {"inline": rows}, "maxPromptLength": 8, "maxResponseLength": 8},
        rewards=[{"name": "mine", "function": {"importPath": f"{name}:score"}}],
        pythonPath=[str(tmp_path)],
    )
    (line,) = refusal(config)
    assert line.startswith("rewards.mine.function.importPath: got ")
    assert got in line


def test_exact_match_needs_an_answer_in_each_row(make_config):
    rewards = [{"name": "right", "function": {"name": "exact_match"}}]
    data = {"prompts": {"inline": [{"prompt": "a", "answer": "1"}, "b", {"prompt": "c", "answer": None}]}}
    (line,) = refusal(make_config(rewards=rewards, data=data))
    assert line.startswith("rewards.right.function.name: got 2 rows without `answer`, the first of them row 2")


def test_a_prompt_that_is_too_long_names_its_row(make_config, model_folder):
    data = {"prompts": {"inline": ["short", "far too long"]}, "maxPromptLength": 8, "maxResponseLength": 8}
    (line,) = refusal(make_config(models=models_of(model_folder), data=data))
    assert line.startswith("data.prompts.inline[1]: got a prompt of 12 tokens; expected at most 8")


def test_sequences_must_fit_every_model(make_config, model_folder, copy):
    critic = copy("critic", max_position_embeddings=15)
    (line,) = refusal(make_config(models=models_of(model_folder, critic=critic)))
    assert line.startswith("models.critic: got data.maxPromptLength + data.maxResponseLength = 16 tokens")
    assert "expected at most 15" in line
    data = {"prompts": {"builtin": "arithmetic"}, "maxPromptLength": 8, "maxResponseLength": 7}
    assert preflight(make_config(models=models_of(model_folder, critic=critic), data=data))


def test_a_vocabulary_that_is_too_small_or_another(make_config, model_folder, copy):
    small = copy("small", vocab_size=90)
    other = copy("other")
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())[:95]
    vocabulary = {text: index for index, text in enumerate(["<pad>", "<eos>", *characters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(other / "tokenizer.json"))
    first, second = refusal(make_config(models=models_of(model_folder, critic=small, reference=other)))
    assert first.startswith(
        f"models.critic: got a vocabulary of 90; expected at least the {len(ascii_tokenizer())} tokens"
    )
    assert second.startswith("models.reference: got a tokenizer in which ")


def test_a_padded_vocabulary_is_no_other_vocabulary(make_config, model_folder, copy):
    assert preflight(make_config(models=models_of(model_folder, critic=copy("padded", vocab_size=128))))


def test_a_tokenizer_needs_an_end_token_and_no_pad_token(make_config, copy):
    policy = copy("policy")
    settings = json.loads((policy / "tokenizer_config.json").read_text())
    settings.pop("pad_token")
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    assert preflight(make_config(models=models_of(policy)))
    settings.pop("eos_token")
    (policy / "tokenizer_config.json").write_text(json.dumps(settings))
    (line,) = refusal(make_config(models=models_of(policy)))
    assert "got no eos token" in line
    for file in policy.glob("tokenizer*"):
        file.unlink()
    (line,) = refusal(make_config(models=models_of(policy)))
    assert line.startswith(f"models.policy.path: got {policy} without a tokenizer")


def test_a_random_model_that_cannot_be_built_is_told(make_config):
    bad = ModelSource.model_validate({"random": {"architecture": "qwen0"}})
    models = json.loads(make_config().models.model_dump_json(by_alias=True))
    models["critic"] = json.loads(bad.model_dump_json(by_alias=True))
    (line,) = refusal(make_config(models=models))
    assert "got qwen0" in line


def cuda_config(make_config, model_folder, **fields):
    group = json.loads(make_config().groups[0].model_dump_json(by_alias=True))
    groups = [group | {"device": "cuda", "workers": 2, "gpusPerWorker": 1.0}]
    return make_config(models=models_of(model_folder), groups=groups, **fields)


def test_cuda_is_obeyed_never_guessed(make_config, model_folder, monkeypatch):
    monkeypatch.setattr("rlhf_runtime.preflight._installed", lambda distribution: distribution == "vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (line,) = refusal(cuda_config(make_config, model_folder))
    assert "got device cuda, which torch cannot use here" in line
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (line,) = refusal(cuda_config(make_config, model_folder))
    assert "got 2 GPUs asked for; expected at most the 1" in line
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert preflight(cuda_config(make_config, model_folder))


def test_each_device_needs_its_build_of_vllm(make_config, model_folder):
    (line,) = refusal(cuda_config(make_config, model_folder))
    assert "got device cuda without the package vllm; " in line
    assert "make setup BUILD=gpu" in line


def test_a_cluster_is_not_judged_by_the_drivers_own_node(make_config, model_folder, monkeypatch):
    monkeypatch.setattr("rlhf_runtime.preflight._installed", lambda distribution: distribution == "vllm")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert preflight(cuda_config(make_config, model_folder, localNodes=None))


@pytest.mark.parametrize(("listed", "ids"), [(None, (1,)), (7, (1, 7)), ([7, 1, 5], (1, 7, 5))])
def test_every_end_of_text_that_a_model_names_ends_a_response(tmp_path, listed, ids):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert stop_token_ids(tmp_path, ascii_tokenizer()) == ids


def test_a_run_folder_that_cannot_be_written_to(make_config, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"runDir: got .*/file/run \(Not a directory\); expected a folder to write to"):
        preflight(make_config(runDir=str(tmp_path / "file" / "run")))
