"""Rows of tokens without padding, and how they are packed into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rlhf_runtime.engines.attention import Packing


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch as a model reads it: b rows one after the other, T tokens in all."""

    input_ids: torch.Tensor
    """[1, T] int64: each prompt and all of its response but the last token."""
    position_ids: torch.Tensor
    """[1, T] int64: counted from 0 in each row."""
    packing: Packing
    """Where rows begin and end."""
    places: torch.Tensor
    """[n] int64: the positions of the T whose next token is a response token."""
    targets: torch.Tensor
    """[n] int64: those response tokens."""

    def to(self, device: torch.device) -> "ModelInput":
        """The same on a device."""
        return ModelInput(
            self.input_ids.to(device),
            self.position_ids.to(device),
            Packing(self.packing.lengths, self.packing.offsets.to(device)),
            self.places.to(device),
            self.targets.to(device),
        )


@dataclass(frozen=True)
class Sequences:
    """B prompts and their responses. "Flat" means all response tokens [N], row after row."""

    prompts: Sequence[torch.Tensor]
    """B tensors [P] int64, each of one token at least."""
    responses: Sequence[torch.Tensor]
    """B tensors [R] int64."""

    def __len__(self) -> int:
        return len(self.prompts)

    @cached_property
    def _offsets(self) -> list[int]:
        offsets = [0]
        for response in self.responses:
            offsets.append(offsets[-1] + len(response))
        return offsets

    @property
    def tokens(self) -> int:
        """N, the number of response tokens."""
        return self._offsets[-1]

    def flat_places(self, rows: Sequence[int]) -> torch.Tensor:
        """Where the response tokens of some rows stand in the flat order, [n] int64."""
        return torch.cat([torch.arange(self._offsets[row], self._offsets[row + 1]) for row in rows])

    def micro_batches(self, tokens: int) -> list[list[int]]:
        """Rows of each micro-batch, at most `tokens` in all; a longer row stands alone.

        The longest first, each into the first that has room: at most 11/9 of the fewest that there can be, plus one
        (Johnson 1973, first-fit decreasing).
        """
        lengths = [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]
        batches: list[list[int]] = []
        room: list[int] = []
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            index = next((index for index, left in enumerate(room) if lengths[row] <= left), len(room))
            if index == len(room):
                batches.append([])
                room.append(tokens)
            batches[index].append(row)
            room[index] -= lengths[row]
        return batches

    def model_input(self, rows: Sequence[int]) -> ModelInput:
        """Some rows, at least one, as a model reads them."""
        responses = [self.responses[row] for row in rows]
        lines = [torch.cat([self.prompts[row], self.responses[row][:-1]]) for row in rows]
        lengths = [len(line) for line in lines]
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        # response token j is predicted one position earlier, so a row's last R positions predict its R tokens
        places = [
            torch.arange(end - len(response), end)
            for end, response in zip(offsets[1:].tolist(), responses, strict=True)
        ]
        positions = torch.cat([torch.arange(length) for length in lengths])
        packing = Packing(lengths, offsets.int())
        return ModelInput(torch.cat(lines)[None], positions[None], packing, torch.cat(places), torch.cat(responses))


BLANK = Sequences([torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)])
"""The row of a forward pass that is made only because other ranks make one."""
