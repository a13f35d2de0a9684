"""Hugging Face folders: which files belong to what, and how one is written."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

NETWORK_FILES = frozenset({"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json"})
"""Text files of a model folder that belong to its weights; the others belong to its tokenizer."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""Patterns of the files with its weights."""


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that belong to its tokenizer and to generation, by name."""
    kinds = {".json", ".txt", ".model", ".jinja"}
    return sorted(file for file in folder.iterdir() if file.suffix in kinds and file.name not in NETWORK_FILES)


def write_model(
    network: "PreTrainedModel", weights: "Mapping[str, torch.Tensor]", tokenizer: Path, folder: Path
) -> None:
    """Write a folder of config, safetensors and tokenizer, which appears once it is complete, in the place of any.

    Args:
        network: The model; its own weights are not looked at.
        weights: On the CPU, under the network's names, a tied one once.
        tokenizer: The model folder with the tokenizer's files.
        folder: What to write.
    """
    scratch = folder.with_name(f".{folder.name}-partial")
    shutil.rmtree(scratch, ignore_errors=True)
    network.save_pretrained(scratch, state_dict=dict(weights))
    for file in tokenizer_files(tokenizer):
        shutil.copy(file, scratch / file.name)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)
