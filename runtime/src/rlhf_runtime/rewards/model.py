"""Reward models: sequence classifiers with one output, which is the score.

    prompt, response -> text -> tokens -> micro-batches, padded on the right -> classifier -> a score each

Padding is masked, so that a score does not depend on the other rows. Nothing is cut: a text that is too long for the
classifier is an error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rlhf_api.errors import FieldError
from rlhf_api.rewards import Reward, RewardModel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
from transformers.utils import logging as hf_logging

from rlhf_runtime.errors import InputError, RewardError
from rlhf_runtime.memory import enough_memory
from rlhf_runtime.models import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CLASSIFIER = "a sequence classifier with one output"
_SHOWN = 60
_ENOUGH_MEMORY = enough_memory(
    "rewards", "lower training.microBatchTokens, or rollout.gpuMemoryUtilization where engines share the GPU"
)


@dataclass(frozen=True)
class ModelFiles:
    """What of a classifier is known without its weights."""

    folder: Path
    """Its folder."""
    config: PreTrainedConfig
    """Its config, with the pad token that the tokenizer has."""
    tokenizer: "PreTrainedTokenizerFast"
    """Its own tokenizer."""

    @property
    def longest(self) -> int:
        """Most tokens that it reads."""
        positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return int(min(self.tokenizer.model_max_length, positions or self.tokenizer.model_max_length))


class ModelTerm:
    """One term of the reward, computed by a classifier.

    Args:
        reward: The term as the manifest has it.
        path: Its place there, for messages.
        device: What to compute on.
        micro_batch_tokens: Most tokens, padding counted, of one forward pass; one row is always let through.

    Raises:
        InputError: when the folder holds no such classifier.
        ResourceError: when the GPU's memory does not suffice for it.
    """

    @_ENOUGH_MEMORY
    def __init__(self, reward: Reward, path: str, device: torch.device, micro_batch_tokens: int) -> None:
        assert reward.model is not None, "a term without a model"
        self.name = reward.name
        self.weight = reward.weight
        self._path = path
        self._format = reward.model.format
        self._device = device
        self._micro_batch_tokens = micro_batch_tokens
        self._files = read_files(reward.model, path)
        self._network = _load(self._files, path).to(device)

    @_ENOUGH_MEMORY
    def score(self, prompts: Sequence[str], responses: Sequence[str], columns: Sequence[Any]) -> np.ndarray:
        """Unweighted scores [B] float32 of B responses, in their order.

        Args:
            prompts: B prompts.
            responses: B responses.
            columns: The other fields of each one's data row, which a classifier has no use for.

        Raises:
            RewardError: naming the first response that is too long, or whose score is not finite.
            ResourceError: when the GPU's memory does not suffice.
        """
        tokens = self._tokenize(prompts, responses)
        scores = torch.zeros(len(tokens))
        for rows in _micro_batches([len(row) for row in tokens], self._micro_batch_tokens):
            scores[rows] = self._forward([tokens[row] for row in rows])
        for row in (~scores.isfinite()).nonzero().flatten().tolist():
            fix = "copy its weights again, or choose another model"
            raise self._error(f"{scores[row].item()} for {_shown(row, responses)}", "a finite number", fix)
        return scores.numpy()

    def _tokenize(self, prompts: Sequence[str], responses: Sequence[str]) -> list[torch.Tensor]:
        """The tokens of each prompt and its response, B tensors [L] int64."""
        tokenizer, chat = self._files.tokenizer, self._format == "chat"
        pairs = zip(prompts, responses, strict=True)
        texts = [_conversation(tokenizer, *pair) if chat else "".join(pair) for pair in pairs]
        # a chat template writes the special tokens itself
        encoded = tokenizer(texts, add_special_tokens=not chat, verbose=False)["input_ids"]
        for row, ids in enumerate(encoded):
            if not 0 < len(ids) <= self._files.longest:
                expected = f"1 to {self._files.longest}, which the model reads"
                fix = "lower data.maxResponseLength, or use a model of a longer context"
                raise self._error(f"{len(ids)} tokens in prompt and {_shown(row, responses)}", expected, fix)
        return [torch.tensor(ids, dtype=torch.int64) for ids in encoded]

    @torch.no_grad()
    def _forward(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        """Scores [b] float32, on the CPU, of b rows of tokens."""
        pad = self._files.tokenizer.pad_token_id
        input_ids = pad_sequence(list(rows), batch_first=True, padding_value=pad)  # [b, L]
        counts = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(input_ids.shape[1]) < counts.unsqueeze(1)).long()  # [b, L]
        logits = self._network(input_ids=input_ids.to(self._device), attention_mask=mask.to(self._device)).logits
        scores: torch.Tensor = logits.squeeze(-1).float().cpu()
        return scores

    def _error(self, got: str, expected: str, fix: str) -> RewardError:
        return RewardError(str(FieldError(f"rewards.{self.name} ({self._files.folder})", got, expected, fix)))


def read_files(model: RewardModel, path: str) -> ModelFiles:
    """Read config and tokenizer of a classifier.

    Args:
        model: The classifier.
        path: Its place in the manifest, for messages.

    Raises:
        InputError: when they are not those of a classifier with one output, or do not fit each other.
    """
    folder = Path(model.path)
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise _input_error(path, f"a config that cannot be read ({_first_line(error)})", _CLASSIFIER) from error
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise _input_error(path, f"a {config.model_type} model, which transformers has no classifier of", _CLASSIFIER)
    if config.num_labels != 1:
        raise _input_error(path, f"{folder}, a model of {config.num_labels} outputs", f"{_CLASSIFIER} (num_labels 1)")
    try:
        tokenizer = load_tokenizer(folder, special=("pad",))
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    _require_fit(config, tokenizer, path)
    if model.format == "chat" and not tokenizer.chat_template:
        fix = "use `format: text`, or save the template there"
        raise _input_error(path, f"{folder} without a chat template", "one for `format: chat`", fix)
    return ModelFiles(folder, config, tokenizer)


def _require_fit(config: PreTrainedConfig, tokenizer: "PreTrainedTokenizerFast", path: str) -> None:
    """Refuse a config whose vocabulary or pad token are not the tokenizer's; give it the latter if it has none.

    Decoders are read at their last token that is no padding.
    """
    text, fix = config.get_text_config(), "save model and tokenizer of one classifier there"
    if text.vocab_size < len(tokenizer):
        got, expected = f"a vocabulary of {text.vocab_size}", f"at least the {len(tokenizer)} tokens of its tokenizer"
        raise _input_error(path, got, expected, fix)
    pad = getattr(text, "pad_token_id", None)
    if pad not in (None, tokenizer.pad_token_id):
        got = f"pad token {pad} in config.json"
        raise _input_error(path, got, f"{tokenizer.pad_token_id}, which is the tokenizer's", fix)
    text.pad_token_id = tokenizer.pad_token_id


def _load(files: ModelFiles, path: str) -> torch.nn.Module:
    """The classifier in float32 with every one of its weights from the folder."""
    hf_logging.disable_progress_bar()
    verbosity = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()  # what it would warn of is refused below
    try:
        network, report = AutoModelForSequenceClassification.from_pretrained(
            files.folder,
            config=files.config,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise _input_error(path, f"no model to load ({_first_line(error)})", _CLASSIFIER) from error
    finally:
        hf_logging.set_verbosity(verbosity)
    if missing := sorted(report["missing_keys"]):
        raise _input_error(path, f"no weights for {', '.join(missing[:5])} in {files.folder}", "all of the model's")
    classifier: torch.nn.Module = network.eval()
    return classifier


def _micro_batches(lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Rows by length, cut so that rows times the longest stays within `tokens`; a longer row stands alone."""
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and longest * (len(batches[-1]) + 1) <= tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = lengths[row]
    return batches


def _conversation(tokenizer: "PreTrainedTokenizerFast", prompt: str, response: str) -> str:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _shown(row: int, responses: Sequence[str]) -> str:
    text = repr(responses[row])
    return f"response {row} ({text if len(text) <= _SHOWN else text[: _SHOWN - 3] + '...'})"


def _input_error(path: str, got: str, expected: str, fix: str = "name the folder of such a model") -> InputError:
    return InputError(str(FieldError(path, got, expected, fix)))
