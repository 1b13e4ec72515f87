"""The rows of a launch and their positions."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property

import numpy
import torch

from .request import Request
from .scheduler import Launch
from .spans import Spans
from .transfer import to_device

__all__ = ["Batch"]


class Batch:
    """The requests of a launch and the positions that they run.

    Args:
        launch: of the scheduler.
        requests: all that are in flight, by key.
        device: of the tensors.
        again: keys of requests that run again what they had, see `RowMemory`.

    Attributes:
        rows: the requests of the launch, in its order.
        prompts, decoding: which of them are at their prompt, and which are not.
        again: which of them run again what they had; at their prompt, or decoding.
        deciding: those of the decoding ones that do not.
        spans: the positions.
    """

    def __init__(
        self, launch: Launch, requests: Mapping[int, Request], device: torch.device, again: Collection[int] = ()
    ):
        self.launch, self.device = launch, device
        self.rows = [requests[key] for key in launch.keys]
        self.prompts = [index for index, row in enumerate(self.rows) if row.in_prompt]
        self.decoding = range(len(self.rows))
        if self.prompts:
            self.decoding = [index for index, row in enumerate(self.rows) if not row.in_prompt]
        self.again, self.deciding = [], self.decoding
        if again:
            self.again = [index for index, key in enumerate(launch.keys) if key in again]
            self.deciding = [index for index in self.decoding if launch.keys[index] not in again]
        for index in self.prompts:
            self.rows[index].end = self.rows[index].prompt_length
        start = numpy.array([row.start for row in self.rows], dtype=numpy.int64)
        end = numpy.array([row.end for row in self.rows], dtype=numpy.int64)
        for index in self.prompts:
            start[index], end[index] = launch.pieces[launch.keys[index]]
        self.spans = Spans(launch.keys, start, end, numpy.maximum(launch.depths, 1))

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 `[1, tokens]`."""
        return self.tensor(self.spans.positions())[None]

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 `[decoding rows]`."""
        places = self.launch.places
        return self.tensor(places if not self.prompts else [places[index] for index in self.decoding])

    def places_of(self, indices: Sequence[int]) -> torch.Tensor:
        """int64 `[indices]`, the places of these rows."""
        if len(indices) == len(self.decoding) and not self.prompts:
            return self.places
        return self.tensor([self.launch.places[index] for index in indices])

    @cached_property
    def decoding_tokens(self) -> torch.Tensor:
        """int64 `[decoding rows]`, their tokens in the launch."""
        return self.tensor(self.spans.first[self.decoding])

    def tensor(self, values) -> torch.Tensor:
        """int64, on the device."""
        made = torch.from_numpy(numpy.asarray(values, dtype=numpy.int64))
        return made if self.device.type == "cpu" else to_device(made, self.device)
