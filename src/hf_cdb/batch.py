"""The rows of a launch and their positions."""

from collections.abc import Mapping
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

    Attributes:
        rows: the requests of the launch, in its order.
        prompts, decoding: which of them are at their prompt, and which are not.
        ragged: of the prompts in a launch of the loop, those whose positions leave it one by one.
        spans: the positions.
    """

    def __init__(self, launch: Launch, requests: Mapping[int, Request], device: torch.device):
        self.launch, self.device = launch, device
        self.rows = [requests[key] for key in launch.keys]
        self.prompts, self.ragged = [], []
        self.decoding = range(len(self.rows))
        if launch.pieces:
            self.prompts = [index for index, key in enumerate(launch.keys) if key in launch.pieces]
            self.decoding = [index for index, key in enumerate(launch.keys) if key not in launch.pieces]
        for index in self.prompts:
            self.rows[index].end = self.rows[index].prefill_length
        start = numpy.array([row.start for row in self.rows], dtype=numpy.int64)
        end = numpy.array([row.end for row in self.rows], dtype=numpy.int64)
        for index in self.prompts:
            start[index], end[index] = launch.pieces[launch.keys[index]]
        gaps = None
        if self.prompts and launch.stage == "loop":
            self.ragged = [index for index in self.prompts if self.rows[index].ragged is not None]
            gaps = self._without_left(start, end) if self.ragged else None
        self.spans = Spans(launch.keys, start, end, numpy.maximum(launch.depths, 1), gaps)

    def __len__(self) -> int:
        return len(self.rows)

    def _without_left(self, start: numpy.ndarray, end: numpy.ndarray) -> dict[int, numpy.ndarray]:
        """Take the positions that have left the loop out of the ragged spans; see `Spans` for what it returns."""
        gaps = {}
        for index in self.ragged:
            depths = self.rows[index].ragged.depths[start[index] : end[index]]
            running = start[index] + numpy.flatnonzero(depths >= self.launch.depths[index])
            if not len(running):
                start[index] = end[index]
                continue
            start[index], end[index] = running[0], running[-1] + 1
            if len(running) < end[index] - start[index]:
                gaps[index] = running
        return gaps

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 `[1, tokens]`."""
        return self.tensor(self.spans.positions())[None]

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 `[decoding rows]`."""
        places = self.launch.places
        return self.tensor(places if not self.prompts else [places[index] for index in self.decoding])

    @cached_property
    def decoding_tokens(self) -> torch.Tensor:
        """int64 `[decoding rows]`, their tokens in the launch."""
        return self.tensor(self.spans.first[self.decoding])

    def tensor(self, values) -> torch.Tensor:
        """int64, on the device."""
        made = torch.from_numpy(numpy.asarray(values, dtype=numpy.int64))
        return made if self.device.type == "cpu" else to_device(made, self.device)
