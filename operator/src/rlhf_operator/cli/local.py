"""The commands that need no cluster: `rlhf validate`, `rlhf plan`, `rlhf run` and `rlhf export`."""

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rlhf_api import FieldError, RuntimeConfig, SpecError

from rlhf_operator import run_folder
from rlhf_operator.bundles import Bundles
from rlhf_operator.cli.problems import BAD_INPUT, told
from rlhf_operator.defaults import resolved
from rlhf_operator.local import parse_mounts, plan_here, visible_gpus
from rlhf_operator.manifest import read_manifest
from rlhf_operator.plan import Plan, build_plan

File = Annotated[Path, typer.Argument(metavar="FILE", help="an RLHFJob manifest", show_default=False)]


def validate(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="RLHFJob manifests", show_default=False)],
) -> None:
    """Check manifests: their fields, how the fields fit together, and whether the roles fit on the pools."""
    right = True
    for file in files:
        try:
            with told(file):
                job = read_manifest(file)
                build_plan(job, f"runs/{job.metadata.name}")
                typer.echo(f"{file}: valid")
        except typer.Exit:
            right = False
    if not right:
        raise typer.Exit(BAD_INPUT)


def plan(file: File) -> None:
    """Show what would run where, and why. Needs no cluster, no GPU and none of the manifest's files."""
    with told(file):
        job = read_manifest(file)
        made = build_plan(job, f"runs/{job.metadata.name}")
    _print_plan(made)
    batch, samples = made.config.data.batch_size, made.config.rollout.samples_per_prompt
    settings = made.config.algorithm.settings
    updates = settings.epochs * -(-batch * samples // resolved(settings.mini_batch_size))
    typer.echo(
        f"Each of {made.config.training.steps} steps: {batch} prompts x {samples} = {batch * samples} samples, "
        f"{updates} optimizer step{'s' * (updates > 1)}"
    )


def run(
    file: File,
    mount: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=DIR", help="a folder in the place of a storage of the manifest; may be repeated"),
    ] = None,
    runs_dir: Annotated[Path, typer.Option(metavar="DIR", help="where run folders are made")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="go on from the newest whole checkpoint, as `resume: true` does")
    ] = False,
) -> None:
    """Train on this machine.

    The run's folder is DIR/<job's name>; the folder of an earlier run of that name is moved aside, unless this run goes
    on in it.
    """
    with told(file):
        mounts = parse_mounts(mount or [])
        job = read_manifest(file)
        folder = runs_dir.absolute() / job.metadata.name
        made = plan_here(job, file.parent, mounts, folder, lambda: visible_gpus(os.environ))
        _require_runtime()
        going_on, runtime = _resumed(made.config, resume)
        moved = run_folder.prepare(folder, going_on)
        config = run_folder.write(folder, made.job, runtime)
    _print_plan(made)
    if moved:
        typer.echo(f"The earlier run's folder is now {moved}")
    typer.echo(f"Run folder: {folder}")
    sys.stdout.flush()
    sys.stderr.flush()
    # From here on the runtime answers for them: it unblocks them once it does.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    os.execv(sys.executable, [sys.executable, "-m", "rlhf_runtime", str(config)])


def export(
    source: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="a run's folder, or one checkpoint", show_default=False)
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="the folder to write", show_default=False)],
) -> None:
    """Write a checkpoint's policy as a folder that transformers and vLLM load. Of a run it is the newest whole one."""
    with told(source):
        _require_runtime()
    os.execv(sys.executable, [sys.executable, "-m", "rlhf_runtime.export", str(source), str(folder)])


def _resumed(config: RuntimeConfig, asked: bool) -> tuple[bool, RuntimeConfig]:
    """Whether a run goes on from checkpoints, by its manifest or because it was asked to, and the config to run with.

    Raises:
        SpecError: when it was asked to, and there are none.
    """
    checkpoint = config.checkpoint
    there = checkpoint is not None and run_folder.holds_checkpoints(Path(checkpoint.path))
    if asked and (checkpoint is None or not there):
        got = f"no checkpoint in {checkpoint.path}" if checkpoint else "a manifest without spec.checkpoint"
        fix = "run without --resume" if checkpoint else "add `checkpoint`, and run without --resume first"
        raise SpecError([FieldError("--resume", got, "a checkpoint to go on from", fix)])
    if checkpoint is None or not asked:
        return bool(checkpoint and checkpoint.resume and there), config
    return True, config.model_copy(update={"checkpoint": checkpoint.model_copy(update={"resume": True})})


def _require_runtime() -> None:
    if importlib.util.find_spec("rlhf_runtime") is None:
        fix = "install rlhf-runtime[cpu] or rlhf-runtime[gpu] beside rlhf-operator"
        raise SpecError([FieldError("rlhf run", "no module rlhf_runtime", "the runtime on this machine", fix)])


def _print_plan(made: Plan) -> None:
    table = Table(title=f"{made.config.name}: who runs where", title_justify="left")
    for heading in ("group", "pool", "device", "roles", "workers", "bundle", "strategy"):
        table.add_column(heading, overflow="fold", justify="right" if heading == "workers" else "left")
    for row in made.groups:
        pool = f"{row.pool.name} ({row.pool.nodes} node{'s' * (row.pool.nodes > 1)})"
        bundle = ", ".join(f"{row.resources[key]:g} {key}" for key in ("CPU", "GPU") if key in row.resources)
        roles, strategies = ", ".join(row.group.roles), ",\nelse ".join(row.strategies)
        table.add_row(row.group.name, pool, row.device, roles, _workers(row, made.config.engines), bundle, strategies)
    console = Console(markup=False, highlight=False)
    console.print(table)
    sync = made.config.weight_sync
    lines = [f"Weight sync: {sync.transport} ({sync.reason})", *(f"Note: {note}" for note in made.notes)]
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)  # whole lines for a program, whole words for a person


def _workers(row: Bundles, engines: int) -> str:
    """Ranks, and engines with the devices of each where there is more than one."""
    if "rollout" not in row.group.roles:
        return str(row.group.workers)
    size = f" × {row.tensor_parallel}" if row.tensor_parallel > 1 else ""
    shown = f"{engines} engine{'s' * (engines > 1)}{size}"
    return shown if row.group.roles == ["rollout"] else f"{row.group.workers} ({shown})"
