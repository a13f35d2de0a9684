"""Rows of tokens without padding, and how they are cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True)
class ModelInput:
    """One micro-batch of b rows as a model reads it."""

    input_ids: torch.Tensor
    """[b, L] int64: each prompt and all of its response but the last token, padded on the right."""
    places: torch.Tensor
    """[n] int64: the positions of the flattened [b * L] whose next token is a response token."""
    targets: torch.Tensor
    """[n] int64: those response tokens."""

    def to(self, device: torch.device) -> "ModelInput":
        """The same on a device."""
        return ModelInput(self.input_ids.to(device), self.places.to(device), self.targets.to(device))


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
        """Rows by length, cut so that rows times the longest stays within `tokens`; a longer row stands alone."""
        lengths = [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]
        batches: list[list[int]] = []
        longest = 0
        for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
            if batches and longest * (len(batches[-1]) + 1) <= tokens:
                batches[-1].append(row)
            else:
                batches.append([row])
                longest = lengths[row]
        return batches

    def model_input(self, rows: Sequence[int]) -> ModelInput:
        """Some rows, at least one, as a model reads them."""
        responses = [self.responses[row] for row in rows]
        inputs = [torch.cat([self.prompts[row], self.responses[row][:-1]]) for row in rows]
        input_ids = pad_sequence(inputs, batch_first=True)
        # response token j is predicted one position earlier, so a row's last R positions predict its R tokens
        places = [
            torch.arange(len(line) - len(response), len(line)) + index * input_ids.shape[1]
            for index, (line, response) in enumerate(zip(inputs, responses, strict=True))
        ]
        return ModelInput(input_ids, torch.cat(places), torch.cat(responses))


BLANK = Sequences([torch.zeros(1, dtype=torch.int64)], [torch.zeros(1, dtype=torch.int64)])
"""The row of a forward pass that is made only because other ranks make one."""
