"""A model's folder, against what transformers writes; what it takes, and what becomes of one that was there."""

import errno
import json
from pathlib import Path

import pytest
import torch
from rlhf_runtime import model_writer
from rlhf_runtime.checkpoint.shards import Shard, ShardReader, State, shard_file, write_shards
from rlhf_runtime.errors import CheckpointError
from rlhf_runtime.hugging_face import TRAINED, Trained, tokenizer_files
from rlhf_runtime.model_writer import Rows, write_model
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "pad_token_id": None,
}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS = {
    "plain": ("qwen2", {"tie_word_embeddings": False}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "experts apart on disk": ("qwen3_moe", MIXTURE),
    "experts renamed on disk": ("mixtral", MIXTURE),
}
TWELVE = Trained(step=12, checkpoint="c")


def network_of(kind: str) -> PreTrainedModel:
    name, fields = KINDS[kind]
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES, **fields)).eval()


def weights_of(network: PreTrainedModel, parts: int = 1) -> dict[str, Rows]:
    """Each parameter once, cut as ranks hold it."""
    return {name: tensor.detach().chunk(parts) for name, tensor in network.named_parameters()}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path / "tokenizer"


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loaded", [False, True], ids=["made anew", "loaded"])
def test_it_is_what_transformers_writes(kind: str, loaded: bool, tokenizer: Path, tmp_path: Path) -> None:
    network = network_of(kind)
    network.save_pretrained(tmp_path / "theirs")
    if loaded:
        network = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
        network.save_pretrained(tmp_path / "theirs")
    write_model(network, weights_of(network, parts=2), tokenizer, tmp_path / "ours", TWELVE)
    theirs, ours = stored(tmp_path / "theirs"), stored(tmp_path / "ours")
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes()
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_one_is_several_files_with_an_index(kind: str, tokenizer: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(model_writer, "FILE_BYTES", 30_000)
    network = network_of(kind)
    write_model(network, weights_of(network), tokenizer, tmp_path / "out", TWELVE)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2
    assert files[-1] == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    found = {}
    for name in files:
        with safe_open(tmp_path / "out" / name, framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            found |= dict.fromkeys(file.keys(), name)
    assert found == index["weight_map"]
    sizes = [tensor.nbytes for tensor in stored(tmp_path / "out").values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = dict(network.named_parameters())
    assert all(torch.equal(parameter, expected[name]) for name, parameter in loaded.named_parameters())


@pytest.mark.parametrize(("kind", "most"), [("plain", 0), ("experts apart on disk", 0.6)])
def test_no_more_than_a_layer_is_in_memory(kind: str, most: float, tokenizer: Path, tmp_path, monkeypatch) -> None:
    network = network_of(kind)
    weights = weights_of(network, parts=2)
    together: list[int] = []
    convert = model_writer.revert_weight_conversion

    def measured(network: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        together.append(sum(tensor.nbytes for tensor in tensors.values() if not tensor.is_meta))
        return convert(network, tensors)

    monkeypatch.setattr(model_writer, "revert_weight_conversion", measured)
    write_model(network, weights, tokenizer, tmp_path / "out", TWELVE)
    assert max(together) <= most * sum(part.nbytes for parts in weights.values() for part in parts)


def test_parts_of_a_checkpoint_are_mapped_and_not_read(tmp_path: Path) -> None:
    tensor = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, -1)
    for rank, rows in enumerate(tensor.chunk(2)):
        state = State({"model/w": Shard(rows, rank * 512, tuple(tensor.shape))}, {})
        write_shards(tmp_path / shard_file("policy", rank, 2), state)
    with ShardReader(tmp_path, "policy", 2) as reader:
        parts = reader.parts("model/w")
        assert torch.equal(torch.cat(parts), tensor)
        assert torch.equal(reader.read("model/w", 500, 20), tensor[500:520])
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in mapped]
        assert all(any(low <= part.data_ptr() < high for low, high in ranges) for part in parts)


def test_one_that_was_there_stays_until_the_new_one_is_whole(tokenizer: Path, tmp_path: Path, monkeypatch) -> None:
    network = network_of("plain")
    write_model(network, weights_of(network), tokenizer, tmp_path / "out", TWELVE)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(model_writer, "flush", full)
    with pytest.raises(CheckpointError) as caught:
        write_model(network, weights_of(network), tokenizer, tmp_path / "out", Trained(step=24))
    assert str(caught.value).startswith(f"{tmp_path}/out: got `No space left on device` while writing the trained")
    assert caught.value.exit_code == 6
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    monkeypatch.undo()
    (tmp_path / "out" / "stale.bin").touch()
    write_model(network, weights_of(network), tokenizer, tmp_path / "out", Trained(step=24))
    assert Trained.read(tmp_path / "out") == Trained(step=24)
    assert {path.name for path in (tmp_path / "out").iterdir()} == before.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "tokenizer"]


def test_what_is_said_of_a_model_is_no_tokenizers(tokenizer: Path, tmp_path: Path) -> None:
    network = network_of("plain")
    write_model(network, weights_of(network), tokenizer, tmp_path / "one", TWELVE)
    assert TRAINED not in [file.name for file in tokenizer_files(tmp_path / "one")]
    write_model(network, weights_of(network), tmp_path / "one", tmp_path / "two", Trained(step=3))
    assert (Trained.read(tmp_path / "one"), Trained.read(tmp_path / "two")) == (TWELVE, Trained(step=3))
    (tmp_path / "two" / TRAINED).write_text("{")
    assert Trained.read(tmp_path / "two") is None
    assert Trained.read(tokenizer) is None
