"""Hugging Face folders: which files belong to what, and what one of ours was trained to."""

from pathlib import Path
from typing import Self

from pydantic import ValidationError
from rlhf_api.base import ApiModel

TRAINED = "trained.json"
"""File of a folder that was written here: see `Trained`."""
NETWORK_FILES = frozenset({"config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json", TRAINED})
"""Text files of a model folder that belong to its weights; the others belong to its tokenizer."""
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")
"""Patterns of the files with its weights."""


class Trained(ApiModel):
    """What the model of a folder was trained to."""

    step: int
    """Steps that were finished."""
    checkpoint: str | None = None
    """Checksum of the manifest of the checkpoint with the same weights, if there was one."""

    def write(self, folder: Path) -> None:
        """Write it into a model's folder."""
        (folder / TRAINED).write_text(self.model_dump_json(by_alias=True) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Read it; None where no model is told to be there."""
        try:
            return cls.model_validate_json((folder / TRAINED).read_bytes(), by_alias=True, by_name=False)
        except (OSError, ValidationError):
            return None


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a model folder that belong to its tokenizer and to generation, by name."""
    kinds = {".json", ".txt", ".model", ".jinja"}
    return sorted(file for file in folder.iterdir() if file.suffix in kinds and file.name not in NETWORK_FILES)
