"""What running on this machine adds to a plan: folders in the place of volumes, and a look at what is there."""

import itertools
import os.path
import posixpath
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_api import FieldError, RLHFJob, RLHFJobSpec, SpecError
from rlhf_api.data import Data, Prompts
from rlhf_api.rewards import Reward
from rlhf_api.roles import ModelSource, ReferenceSource
from rlhf_api.spec import Storage

from rlhf_operator.plan import Plan, build_plan
from rlhf_operator.volumes import below, volume_of

GpuCount = Callable[[], int]
Source = ModelSource | ReferenceSource | None


def parse_mounts(options: Sequence[str]) -> dict[str, Path]:
    """`name=dir` options as a mapping from a storage's name to an absolute folder.

    Raises:
        SpecError: for an option of another form, a name given twice, or a folder that does not exist.
    """
    mounts, errors = dict[str, Path](), []
    for option in options:
        name, _, folder = option.partition("=")
        path = Path(folder).expanduser().absolute()
        if not name or not folder:
            errors.append(FieldError("--mount", f"`{option}`", "NAME=DIR", "write such as --mount models=./models"))
        elif name in mounts:
            errors.append(FieldError("--mount", f"`{name}` again", "each name once", "remove one of the two"))
        elif not os.path.isdir(path):  # unlike Path's, false where a folder above may not be looked into
            errors.append(FieldError("--mount", f"`{folder}`", "a folder that exists", "create it or correct the name"))
        mounts[name] = path
    if errors:
        raise SpecError(errors)
    return mounts


def plan_here(
    job: RLHFJob, manifest_dir: Path, mounts: Mapping[str, Path], run_dir: Path, count_gpus: GpuCount
) -> Plan:
    """Plan a job for this machine, all of its paths resolved and what they lead to looked at.

    Args:
        job: as it was written.
        manifest_dir: what relative paths are relative to.
        mounts: folders by the name of the storage in whose place they stand.
        run_dir: where the run's files go.
        count_gpus: how many GPUs this machine has; called only when the job asks for some.

    Raises:
        SpecError: with every problem of the job, its files and this machine.
    """
    places = _Places(manifest_dir.absolute(), job.spec.storage, mounts)
    code = places.base / job.spec.code.config_map if job.spec.code else None
    here = job.model_copy(update={"spec": _with_local_paths(job.spec, places)})
    errors = [*_unknown_mounts(job.spec, mounts), *_missing_files(job.spec, places), *_missing_code(code)]
    try:
        plan = build_plan(here, str(run_dir.absolute()), [str(code)] if code else [])
    except SpecError as error:
        raise SpecError([*errors, *error.errors]) from None
    errors += _missing_gpus(plan.job.spec, count_gpus)
    if errors:
        raise SpecError(errors)
    return plan


def visible_gpus(environment: Mapping[str, str], list_uuids: Callable[[], Sequence[str]] | None = None) -> int:
    """How many GPUs this machine offers: those that nvidia-smi lists, as far as CUDA_VISIBLE_DEVICES names them."""
    uuids = (list_uuids or _nvidia_smi)()
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return len(uuids)

    def known(name: str) -> bool:
        by_uuid = name.startswith("MIG-") or any(uuid.startswith(name) for uuid in uuids if name)
        return by_uuid or (name.isdecimal() and int(name) < len(uuids))

    # CUDA sees nothing from the first unknown entry on
    return len(list(itertools.takewhile(known, (part.strip() for part in chosen.split(",")))))


def _nvidia_smi() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


@dataclass(frozen=True)
class _Places:
    """Where the paths of a manifest lead on this machine."""

    base: Path
    storage: Sequence[Storage]
    mounts: Mapping[str, Path]

    def local(self, path: str) -> Path:
        """The path here; one on a storage that is not mounted stays as it is."""
        volume = volume_of(path, self.storage)
        if volume and volume.name in self.mounts:
            return self.mounts[volume.name] / (below(posixpath.normpath(path), volume.mount_path) or "")
        return Path(posixpath.normpath(self.base / path))

    def resolve(self, path: str | None) -> str | None:
        """`local` for a field that may be left out."""
        return None if path is None else str(self.local(path))

    def not_mounted(self, field: str, path: str) -> FieldError | None:
        """What is wrong with a path on a storage that no folder stands for."""
        volume = volume_of(path, self.storage)
        if volume is None or volume.name in self.mounts:
            return None
        fix = f"add --mount {volume.name}=DIR"
        return FieldError(field, f"`{path}` on storage `{volume.name}`", "a folder in the storage's place", fix)

    def problem(self, field: str, path: str, marker: str, expected: str) -> FieldError | None:
        """What is wrong with a path that should lead to something that holds `marker`."""
        if problem := self.not_mounted(field, path):
            return problem
        place = self.local(path)
        try:
            if (place / marker).is_file():
                return None
        except OSError as error:  # such as a folder above that may not be looked into
            fix = "correct the path, or let this user read it, as by chmod -R a+rX"
            return FieldError(field, f"`{path}`, which cannot be read ({error.strerror}: {place})", expected, fix)
        got = f"`{path}`" if str(place) == path else f"`{path}`, which is {place} here"
        fix = "correct the path" if posixpath.isabs(path) else "correct the path: it starts at the manifest's folder"
        return FieldError(field, got, expected, fix)


def _with_local_paths(spec: RLHFJobSpec, places: _Places) -> RLHFJobSpec:
    policy, critic, reference = spec.models.policy, spec.models.critic, spec.models.reference
    update = {
        "policy": policy.model_copy(update={"path": places.resolve(policy.path)}),
        "critic": critic.model_copy(update={"path": places.resolve(critic.path)}) if critic else None,
        "reference": reference.model_copy(update={"path": places.resolve(reference.path)}) if reference else None,
    }
    checkpoint = spec.checkpoint
    if checkpoint and posixpath.isabs(checkpoint.path):  # any other starts at the run's folder
        checkpoint = checkpoint.model_copy(update={"path": places.resolve(checkpoint.path)})
    return spec.model_copy(
        update={
            "models": spec.models.model_copy(update=update),
            "data": _with_local_prompts(spec.data, places),
            "rewards": [_with_local_model(reward, places) for reward in spec.rewards],
            "checkpoint": checkpoint,
        }
    )


def _with_local_prompts(data: Data, places: _Places) -> Data:
    def local(prompts: Prompts) -> Prompts:
        return prompts.model_copy(update={"path": places.resolve(prompts.path)})

    evaluation = data.evaluation
    if evaluation:
        evaluation = evaluation.model_copy(update={"prompts": local(evaluation.prompts)})
    return data.model_copy(update={"prompts": local(data.prompts), "evaluation": evaluation})


def _with_local_model(reward: Reward, places: _Places) -> Reward:
    if reward.model is None:
        return reward
    model = reward.model.model_copy(update={"path": str(places.local(reward.model.path))})
    return reward.model_copy(update={"model": model})


def _missing_files(spec: RLHFJobSpec, places: _Places) -> Iterator[FieldError]:
    sources: dict[str, Source] = {
        "policy": spec.models.policy,
        "critic": spec.models.critic,
        "reference": spec.models.reference,
    }
    models = {f"spec.models.{role}.path": source.path for role, source in sources.items() if source}
    models |= {
        f"spec.rewards[{i}].model.path": reward.model.path for i, reward in enumerate(spec.rewards) if reward.model
    }
    prompts = {"spec.data.prompts.path": spec.data.prompts.path}
    if spec.data.evaluation:
        prompts["spec.data.evaluation.prompts.path"] = spec.data.evaluation.prompts.path
    needs = [(field, path, "config.json", "a model folder with a config.json") for field, path in models.items()]
    needs += [(field, path, "", "a JSONL file that exists") for field, path in prompts.items()]
    for field, path, marker, expected in needs:
        if path is not None and (problem := places.problem(field, path, marker, expected)):
            yield problem
    if spec.checkpoint and (problem := places.not_mounted("spec.checkpoint.path", spec.checkpoint.path)):
        yield problem


def _unknown_mounts(spec: RLHFJobSpec, mounts: Mapping[str, Path]) -> Iterator[FieldError]:
    known = [volume.name for volume in spec.storage]
    for name in mounts:
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no mount: spec.storage is empty"
            yield FieldError("--mount", f"`{name}`", expected, "name a storage of spec.storage")


def _missing_code(code: Path | None) -> Iterator[FieldError]:
    if code and not os.path.isdir(code):
        fix = f"create the folder {code} with the modules of the ConfigMap"
        yield FieldError("spec.code.configMap", f"`{code.name}`", "a folder of that name beside the manifest", fix)


def _missing_gpus(spec: RLHFJobSpec, count_gpus: GpuCount) -> Iterator[FieldError]:
    asking = [(i, pool) for i, pool in enumerate(spec.node_pools) if pool.device == "cuda"]
    need = sum(pool.nodes * pool.gpus_per_node for _, pool in asking)
    if not asking or need <= (have := count_gpus()):
        return
    for index, pool in asking:
        gpus = pool.nodes * pool.gpus_per_node
        total = f"; all `cuda` pools want {need}" if len(asking) > 1 else ""
        yield FieldError(
            f"spec.nodePools[{index}]",
            f"{gpus} GPUs (nodes {pool.nodes} times gpusPerNode {pool.gpus_per_node}{total})",
            f"at most {have}, which this machine has",
            "ask for fewer, or set `device: cpu`",
        )
