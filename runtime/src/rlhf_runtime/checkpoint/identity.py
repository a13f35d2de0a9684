"""What a checkpoint was trained from, and whether a job that would go on from it is the same.

Models, tokenizer, algorithm, and what the position in the data is counted in have to be. Anything else, such as steps,
optimizers and placement, may change and takes effect from the next step on.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from rlhf_api import RuntimeConfig
from rlhf_api.errors import FieldError
from rlhf_api.runtime_config import ModelRole

from rlhf_runtime.checkpoint.manifest import Checkpoint
from rlhf_runtime.errors import InputError
from rlhf_runtime.hugging_face import WEIGHT_FILES, tokenizer_files

if TYPE_CHECKING:
    from rlhf_runtime.types import Prompt

SAMPLE, EVERY = 1 << 16, 1 << 24
"""Of weights, this many bytes in every so many are looked at: training changes all of them, and files are large."""


def trained_from(
    config: RuntimeConfig, folders: Mapping[ModelRole, Path], prompts: "Sequence[Prompt]"
) -> dict[str, Any]:
    """What tells a job's starting point from any other, as JSON by the field that says it.

    Args:
        config: The job.
        folders: The model folder of each role.
        prompts: The training prompts.
    """
    models = {f"models.{role}": _digest([_weights(folder)]) for role, folder in sorted(folders.items())}
    algorithm = config.algorithm.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        **models,
        "models.policy (tokenizer)": _digest(file.read_bytes() for file in tokenizer_files(folders["policy"])),
        **_flat("algorithm", algorithm),
        "data.prompts": _digest(json.dumps([prompt.text, prompt.token_ids]).encode() for prompt in prompts),
        "data.batchSize": config.data.batch_size,
        "data.seed": config.seed,
    }


def require_same(checkpoint: Checkpoint, now: Mapping[str, Any]) -> None:
    """Refuse to go on from a checkpoint of another job.

    Raises:
        InputError: naming every field that differs.
    """
    then = checkpoint.manifest.trained_from
    fix = "change it back, or start anew with another checkpoint.path and without resume"
    problems = [
        FieldError(name, _shown(now.get(name)), f"{_shown(then.get(name))}, as in {checkpoint.folder}", fix)
        for name in dict.fromkeys([*now, *then])
        if now.get(name) != then.get(name)
    ]
    if problems:
        raise InputError("\n".join(map(str, problems)))


def _shown(value: Any) -> str:
    match value:
        case None:
            return "none"
        case str():
            return f"content {value}" if value.startswith(_MARK) else f"`{value}`"
    return str(value)


_MARK = "xxh3:"


def _flat(path: str, value: Any) -> dict[str, Any]:
    """The leaves of nested mappings by their paths."""
    if not isinstance(value, dict):
        return {path: value}
    return {name: leaf for key, inner in value.items() for name, leaf in _flat(f"{path}.{key}", inner).items()}


def _weights(folder: Path) -> bytes:
    digest = xxhash.xxh3_128((folder / "config.json").read_bytes())
    for path in sorted(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for place in (*range(0, size, EVERY), max(size - SAMPLE, 0)):
                file.seek(place)
                digest.update(file.read(SAMPLE))
    return digest.digest()


def _digest(parts: Iterable[bytes]) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return _MARK + digest.hexdigest()
