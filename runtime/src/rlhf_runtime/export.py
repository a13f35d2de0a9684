"""`python -m rlhf_runtime.export SOURCE DIR`: a checkpoint's policy as a Hugging Face folder, without GPUs or Ray."""

import argparse
import json
import sys
from pathlib import Path

from rlhf_api import RuntimeConfig, SpecError

from rlhf_runtime.checkpoint.manifest import MANIFEST, MODEL_FILES, Checkpoint, DamagedError, Manifest
from rlhf_runtime.checkpoint.store import CheckpointStore, Found
from rlhf_runtime.errors import InputError, RLHFError
from rlhf_runtime.hugging_face import Trained

ROLE = "policy"


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write a checkpoint's policy as a Hugging Face folder, which appears once it is complete.

    Raises:
        CheckpointError: when it cannot be written.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from rlhf_runtime.checkpoint.shards import ShardReader
    from rlhf_runtime.engines.torch_engine import PREFIX
    from rlhf_runtime.engines.training_state import MODEL
    from rlhf_runtime.model_writer import write_model

    disable_progress_bar()
    source = checkpoint.folder / MODEL_FILES
    config = AutoConfig.from_pretrained(source, local_files_only=True)
    with torch.device("meta"):  # its names and layout are needed, its weights are not
        network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    before = f"{MODEL}{PREFIX}"
    with ShardReader(checkpoint.folder, ROLE, checkpoint.manifest.ranks[ROLE]) as reader:
        names = [name for name in reader.shapes if name.startswith(before)]
        weights = {name.removeprefix(before): reader.parts(name) for name in names}
        write_model(network, weights, source, folder, trained_by(checkpoint.manifest))


def trained_by(manifest: Manifest) -> Trained:
    """What is said of a model with the weights of a checkpoint."""
    return Trained(step=manifest.step, checkpoint=manifest.checksum)


def checkpoint_at(source: Path) -> tuple[Checkpoint, list[str]]:
    """The checkpoint that a path leads to, and what was passed over.

    Args:
        source: A checkpoint, a folder of checkpoints, or a run's folder; of several the newest whole one is taken.

    Raises:
        InputError: when there is none.
    """
    if (source / MANIFEST).exists():
        try:
            return Checkpoint.open(source), []
        except DamagedError as error:
            fix = "choose another checkpoint of that run"
            raise InputError(
                f"{source}: got a damaged checkpoint ({error}); expected a whole one. Fix: {fix}"
            ) from None
    found = _newest(source)
    if found.checkpoint is None:
        what = "; ".join([f"no whole checkpoint in {source}", *found.notes])
        fix = "name a checkpoint, or the folder of a run whose manifest has `checkpoint`"
        raise InputError(f"{source}: got {what}; expected one. Fix: {fix}")
    return found.checkpoint, found.notes


def _newest(source: Path) -> Found:
    """What is in a run's folder, also in one that was moved since, or in a folder of checkpoints."""
    runtime = source / "runtime.json"
    if not runtime.exists():
        return CheckpointStore(source, keep=1).find()
    try:
        config = RuntimeConfig.parse(json.loads(runtime.read_text()))
    except (SpecError, ValueError) as error:
        raise InputError(
            f"{runtime}: got no RuntimeConfig ({error}); expected a run's. Fix: name a checkpoint"
        ) from None
    if config.checkpoint is None:
        return Found()
    path = Path(config.checkpoint.path)
    if path.is_relative_to(config.run_dir):
        path = source / path.relative_to(config.run_dir)
    return CheckpointStore(path, keep=1).find()


def main() -> int:
    """Export what the command line names and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rlhf_runtime.export", description=__doc__)
    parser.add_argument("source", type=Path, help="a checkpoint, or a run's folder for its newest")
    parser.add_argument("folder", type=Path, help="the folder to write")
    arguments = parser.parse_args()
    try:
        _require_free(arguments.folder)
        checkpoint, passed_over = checkpoint_at(arguments.source)
        for note in passed_over:
            sys.stderr.write(f"{note}\n")
        export_checkpoint(checkpoint, arguments.folder.absolute())
    except RLHFError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"{arguments.folder}: got `{error}`; expected a folder to write. Fix: choose another\n")
        return InputError.exit_code
    sys.stdout.write(f"{arguments.folder}: the policy of step {checkpoint.manifest.step}, from {checkpoint.folder}\n")
    return 0


def _require_free(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: got a name that is taken; expected a free one. Fix: remove it or choose another")


if __name__ == "__main__":
    sys.exit(main())
