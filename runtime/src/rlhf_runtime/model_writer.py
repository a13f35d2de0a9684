"""A model as a Hugging Face folder, written a tensor at a time.

    rows of each tensor ─ names and shapes as transformers saves them ─ files of at most 5 GB ─ beside, renamed

The safetensors package writes a file from tensors that are all in memory. Here a file's header is made of shapes alone,
and contents follow one by one, so that those which lie in a checkpoint's mapped files are never in memory as a whole.
"""

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from rlhf_runtime.checkpoint.store import flush
from rlhf_runtime.errors import CheckpointError
from rlhf_runtime.hugging_face import Trained, tokenizer_files

FILE_BYTES = 5 * 10**9
"""Most bytes of tensors in a file, unless those that have to be written together are more."""

Rows = Sequence[torch.Tensor]
"""A tensor on the CPU as parts of its rows in order; one without dimensions is one part."""

_LAYER = re.compile(r".*?\.\d+\.")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class _Piece:
    """Tensors that are written together."""

    sources: Sequence[str]
    """Their names in the network."""
    stored: Mapping[str, torch.Tensor]
    """What they become, by name, without content."""
    converted: bool
    """Whether that is anything else than the one source as it is."""

    @property
    def bytes(self) -> int:
        """Their size."""
        return sum(tensor.nbytes for tensor in self.stored.values())


def write_model(
    network: PreTrainedModel, weights: Mapping[str, Rows], tokenizer: Path, folder: Path, trained: Trained
) -> None:
    """Write a folder of config, safetensors and tokenizer, which appears once it is complete, in the place of any.

    Args:
        network: The model; its own weights are not looked at.
        weights: Under the network's names, a tied one once.
        tokenizer: The model folder with the tokenizer's files.
        folder: What to write.
        trained: What is said of it.

    Raises:
        CheckpointError: when it cannot be written. A folder that was there then still is.
    """
    scratch, old = (folder.with_name(f".{folder.name}-{state}") for state in ("partial", "removed"))
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        network.save_pretrained(scratch, state_dict={})  # its config alone
        _write_weights(network, weights, scratch)
        for file in tokenizer_files(tokenizer):
            shutil.copy(file, scratch / file.name)
        trained.write(scratch)
        for path in (*scratch.iterdir(), scratch):
            flush(path)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            folder.rename(old)
        try:
            scratch.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        flush(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CheckpointError(
            f"{folder}: got `{reason}` while writing the trained model; expected room and the right to write there. "
            f"Fix: free space, then run again, or write it from the last checkpoint with `rlhf export`"
        ) from None


def _write_weights(network: PreTrainedModel, weights: Mapping[str, Rows], folder: Path) -> None:
    """Write one file, or several with their index."""
    files = _files(_pieces(network, {name: _without_content(rows) for name, rows in weights.items()}))
    place: dict[str, str] = {}
    for number, pieces in enumerate(files, start=1):
        count = f"-{number:05d}-of-{len(files):05d}" if len(files) > 1 else ""
        path = folder / f"model{count}.safetensors"
        _write_file(path, network, pieces, weights)
        place |= {name: path.name for piece in pieces for name in piece.stored}
    if len(files) > 1:
        total = {"total_size": sum(piece.bytes for pieces in files for piece in pieces)}
        index = {"metadata": total, "weight_map": place}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _pieces(network: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> list[_Piece]:
    """What is written together: most tensors stand alone; those that are saved otherwise than trained, by layer.

    Args:
        network: The model.
        tensors: Without content, by name.
    """
    ignored = network._keys_to_ignore_on_save or ()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ignored}
    stored = revert_weight_conversion(network, dict(tensors))
    alone = {name: tensor for name, tensor in tensors.items() if stored.get(name) is tensor}
    layers: dict[str, list[str]] = {}
    for name in sorted(tensors.keys() - alone.keys()):
        layer = _LAYER.match(name)
        layers.setdefault(layer[0] if layer else name, []).append(name)
    pieces = [_Piece([name], {name: tensor}, converted=False) for name, tensor in alone.items()]
    for names in layers.values():
        whole = revert_weight_conversion(network, {name: tensors[name] for name in names})
        pieces.append(_Piece(names, whole, converted=True))
    found = {name: tensor.shape for piece in pieces for name, tensor in piece.stored.items()}
    if found != {name: tensor.shape for name, tensor in stored.items()}:  # what is saved as one is of several layers
        pieces = [_Piece(list(tensors), stored, converted=True)]
    # readers want each tensor at a multiple of its elements' size
    return sorted(pieces, key=lambda piece: -max(tensor.itemsize for tensor in piece.stored.values()))


def _files(pieces: Sequence[_Piece]) -> list[list[_Piece]]:
    """What goes into each file."""
    files, size = list[list[_Piece]]([[]]), 0
    for piece in pieces:
        if files[-1] and size + piece.bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.bytes
    return files


def _write_file(path: Path, network: PreTrainedModel, pieces: Sequence[_Piece], weights: Mapping[str, Rows]) -> None:
    """Write a safetensors file: the length of its header, the header, the contents without gaps."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in (item for piece in pieces for item in piece.stored.items()):
        begin, end = end, end + tensor.nbytes
        shape, dtype = list(tensor.shape), _DTYPES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # contents begin at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            for part in _contents(network, piece, weights):
                file.write(part.contiguous().flatten().view(torch.uint8).numpy())
        assert file.tell() == 8 + len(text) + end, "contents of another size than their shapes"


def _contents(network: PreTrainedModel, piece: _Piece, weights: Mapping[str, Rows]) -> Iterable[torch.Tensor]:
    """What is written of a piece, in order."""
    if not piece.converted:
        return weights[piece.sources[0]]
    whole = {name: _whole(weights[name]) for name in piece.sources}
    stored = revert_weight_conversion(network, whole)
    return [stored[name] for name in piece.stored]


def _whole(rows: Rows) -> torch.Tensor:
    return torch.cat(list(rows)) if len(rows) > 1 else rows[0]


def _without_content(rows: Rows) -> torch.Tensor:
    """A tensor with the shape of the whole."""
    shape = (sum(map(len, rows)), *rows[0].shape[1:]) if rows[0].dim() else ()
    return torch.empty(shape, dtype=rows[0].dtype, device="meta")
