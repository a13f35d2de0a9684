"""From rows to the batches of a step.

    Row --tokenize--> Prompt --PromptLoader--> list[Prompt] of a step --make_batch--> DataProto [B]

B = batchSize * samplesPerPrompt.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from rlhf_api.errors import FieldError
from torch.utils.data import Sampler
from torchdata.stateful_dataloader import StatefulDataLoader

from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import ragged
from rlhf_runtime.rows import Row, raise_problems
from rlhf_runtime.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def tokenize(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerFast", max_prompt_length: int) -> list[Prompt]:
    """Tokenize every prompt, cutting none.

    Raises:
        InputError: naming the rows whose prompt has no tokens or more than `max_prompt_length`.
    """
    encoded = tokenizer([row.text for row in rows], verbose=False)["input_ids"]
    prompts, problems = [], []
    for index, (row, token_ids) in enumerate(zip(rows, encoded, strict=True)):
        prompts.append(Prompt(index, row.text, token_ids, row.columns))
        if not token_ids:
            fix = "change the prompt: none of its characters is in the tokenizer's vocabulary"
            problems.append(FieldError(row.where, "a prompt of 0 tokens", "at least 1 token", fix))
        elif len(token_ids) > max_prompt_length:
            expected = f"at most {max_prompt_length} tokens (data.maxPromptLength)"
            fix = "shorten the prompt or raise data.maxPromptLength"
            problems.append(FieldError(row.where, f"a prompt of {len(token_ids)} tokens", expected, fix))
    raise_problems(problems)
    return prompts


class _EndlessShuffle(Sampler[int]):
    """Row indices without end: every row once an epoch, each epoch in an order of its own drawn from the seed."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed)
        while True:
            yield from torch.randperm(self._count, generator=generator).tolist()


class PromptLoader:
    """Endless batches of exactly `batch_size` prompts; a batch may run across the end of an epoch.

    The order depends on the seed alone. `state_dict` holds the position, and a loader of the same prompts, batch size
    and seed that loads it goes on with the batch after.
    """

    def __init__(self, prompts: Sequence[Prompt], batch_size: int, seed: int) -> None:
        self._loader = StatefulDataLoader(
            prompts,  # type: ignore[arg-type]  # any sequence is a map-style data set
            batch_size=batch_size,
            sampler=_EndlessShuffle(len(prompts), seed),
            collate_fn=list,
            generator=torch.Generator(),  # its own, so that iterating draws nothing from the global one
        )
        self._batches: Iterator[list[Prompt]] | None = None

    def __iter__(self) -> "PromptLoader":
        return self

    def __next__(self) -> list[Prompt]:
        if self._batches is None:
            self._batches = iter(self._loader)
        return next(self._batches)

    def state_dict(self) -> dict[str, Any]:
        """The position, as torchdata's StatefulDataLoader keeps it."""
        return self._loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self._loader.load_state_dict(state)
        self._batches = None


def make_batch(prompts: Sequence[Prompt], samples_per_prompt: int, first_sample: int = 0) -> DataProto:
    """The prompts of a step, each repeated `samples_per_prompt` times in adjacent rows.

    Returns:
        B = len(prompts) * samples_per_prompt rows of `prompt_ids` (ragged [B, P*] int64), `prompt_index` ([B] int64:
        rows of the data set), `sample_index` ([B] int64, from `first_sample` on: tells the samples of a step apart) and
        the non-tensors `prompt` ([B] str), `columns` ([B] dict).
    """
    repeated = [prompt for prompt in prompts for _ in range(samples_per_prompt)]
    return DataProto.from_dict(
        tensors={
            "prompt_ids": ragged([torch.tensor(prompt.token_ids, dtype=torch.int64) for prompt in repeated]),
            "prompt_index": torch.tensor([prompt.index for prompt in repeated]),
            "sample_index": torch.arange(first_sample, first_sample + len(repeated), dtype=torch.int64),
        },
        non_tensors={
            "prompt": [prompt.text for prompt in repeated],
            "columns": [dict(prompt.columns) for prompt in repeated],
        },
    )
