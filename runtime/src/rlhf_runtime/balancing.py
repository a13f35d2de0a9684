"""Prompts balanced over rollout engines by the work that they are expected to be.

    ResponseLengths.forecast -> `expected_tokens` -> BALANCED: longest first, each to the engine with the least to do

The samples of a prompt stay together, so that one engine reads it, once, and its prefix cache serves the others. What
is sampled for a row depends on its own seed, not on its engine, so balancing changes when a response is there and never
what it says.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import torch

from rlhf_runtime.protocol import DataProto
from rlhf_runtime.ragged import lengths
from rlhf_runtime.single_controller.decorator import Call, Mode, in_order, require_batch, scatter


class ResponseLengths:
    """What is known of how long responses get, to be asked before a rollout and told after it.

    Args:
        longest: Tokens of the longest response, which is expected as long as nothing is known.
    """

    def __init__(self, longest: int) -> None:
        self._mean = float(longest)
        self._by_prompt: dict[int, float] = {}

    def forecast(self, batch: DataProto) -> DataProto:
        """`expected_tokens` [B] float32: as many as the prompt's last responses had on average; and its `prompt_index`.

        A prompt that was not seen yet is expected to get a response of the last step's mean length.

        Args:
            batch: `prompt_index` [B] int64.
        """
        prompts = batch.batch["prompt_index"]
        expected = [self._by_prompt.get(index, self._mean) for index in prompts.tolist()]
        return DataProto.from_dict(
            {"expected_tokens": torch.tensor(expected, dtype=torch.float32), "prompt_index": prompts}
        )

    def observe(self, prompt_index: torch.Tensor, response_ids: torch.Tensor) -> None:
        """Take the responses, ragged [B, R*], to the prompts of these indices, [B]."""
        counts = lengths(response_ids).float()
        self._mean = counts.mean().item()
        prompts, places = prompt_index.unique(return_inverse=True)
        sums = torch.zeros(len(prompts)).index_add(0, places, counts)
        means = sums / torch.bincount(places)
        self._by_prompt.update(zip(prompts.tolist(), means.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """What is known, as JSON."""
        return {"mean": self._mean, "by_prompt": list(self._by_prompt.items())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know that, and nothing else."""
        self._mean = state["mean"]
        self._by_prompt = dict(state["by_prompt"])


def assign(work: Sequence[float], engines: int) -> list[list[int]]:
    """The pieces of work of each engine, ascending: the longest first, each to the engine with the least to do.

    No engine gets more than 4/3 of the least that the busiest must get (Graham 1969, longest processing time).
    """
    loads = [(0.0, engine) for engine in range(engines)]
    pieces: list[list[int]] = [[] for _ in range(engines)]
    for piece in sorted(range(len(work)), key=lambda piece: -work[piece]):
        load, engine = heapq.heappop(loads)
        pieces[engine].append(piece)
        heapq.heappush(loads, (load + work[piece], engine))
    return [sorted(own) for own in pieces]


def assign_rows(batch: DataProto, engines: int) -> list[torch.Tensor]:
    """The rows of each engine, ascending int64: those of a prompt together, unless engines would have none of them.

    Args:
        batch: `prompt_ids` ragged [B, P*], `prompt_index` [B] and `expected_tokens` [B].
        engines: How many.
    """
    prompts, piece_of = batch.batch["prompt_index"].unique(return_inverse=True)
    if len(prompts) < engines:
        piece_of = torch.arange(len(batch))
    # Each reads its prompt once and writes all of its responses.
    work = torch.zeros(int(piece_of.max()) + 1)
    work[piece_of] = lengths(batch.batch["prompt_ids"]).float()
    work.index_add_(0, piece_of, batch.batch["expected_tokens"])
    return [torch.isin(piece_of, torch.tensor(own)).nonzero().squeeze(1) for own in assign(work.tolist(), engines)]


def _dispatch(engines: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    batch = require_batch(args)
    return scatter(batch, assign_rows(batch, engines), len(batch), args[1:], kwargs)


BALANCED = Mode(_dispatch, in_order)
"""Rows of the first argument, a `DataProto` given by position, over the ranks as `assign_rows` says, the other
arguments whole; the rows of the results in the order of the argument's. A rank without rows is not called.

Raises:
    ValueError: when the first argument is no `DataProto` with rows.
"""
