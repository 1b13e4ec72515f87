"""The rows of a launch, and what they carry from one launch to the next."""

from collections.abc import Mapping
from functools import cached_property

import numpy
import torch

from .places import Spans
from .request import Request
from .scheduler import Launch

__all__ = ["Batch", "RowStates"]


class Batch:
    """The requests of a launch and the positions that they run.

    Args:
        launch: of the scheduler.
        requests: all that are in flight, by key.
        chunk: positions of a prompt per launch at most, None is all.
        device: of the tensors.

    Attributes:
        rows: the requests of the launch, in its order.
        prompts, decoding: which of them are at their prompt, and which are not.
        spans: the positions.
    """

    def __init__(self, launch: Launch, requests: Mapping[int, Request], chunk: int | None, device: torch.device):
        self.launch, self.device = launch, device
        self.rows = [requests[key] for key in launch.keys]
        self.prompts = [index for index, row in enumerate(self.rows) if not row.tokens]
        self.decoding = range(len(self.rows))
        if self.prompts:
            self.decoding = [index for index, row in enumerate(self.rows) if row.tokens]
        for index in self.prompts:
            self.rows[index].end = self.rows[index].prompt_length
        start = numpy.array([row.start for row in self.rows], dtype=numpy.int64)
        end = numpy.array([row.end for row in self.rows], dtype=numpy.int64)
        if chunk is not None:
            for index in self.prompts:
                start[index] = launch.chunks[index] * chunk
                end[index] = min(start[index] + chunk, end[index])
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

    @cached_property
    def decoding_tokens(self) -> torch.Tensor:
        """int64 `[decoding rows]`, their tokens in the launch."""
        return self.tensor(self.spans.first[self.decoding])

    def tensor(self, values) -> torch.Tensor:
        """int64, on the device."""
        made = torch.from_numpy(numpy.asarray(values, dtype=numpy.int64))
        return made if self.device.type == "cpu" else made.to(self.device)


class RowStates:
    """The state and the prelude's output of rows between launches.

    Decoding rows have a line in a table, by place, so that a launch reads and writes all of them at once. A prompt
    has tensors of its own in its request, one line for each position.
    """

    def __init__(self):
        self._tables: dict[str, torch.Tensor] = {}

    def read(self, name: str, batch: Batch) -> torch.Tensor:
        """What the launch's tokens carry, `[tokens, width]`.

        Args:
            name: "state" or "embeds".
        """
        if not batch.prompts:
            return self._tables[name].index_select(0, batch.places)
        parts = [(batch.spans.first[index], self._part(name, batch, index)) for index in batch.prompts]
        if len(batch) == 1:
            return parts[0][1]
        values = parts[0][1].new_empty(batch.spans.tokens, parts[0][1].shape[1])
        for first, part in parts:
            values[first : first + len(part)] = part
        if batch.decoding:
            values[batch.decoding_tokens] = self._tables[name][batch.places].to(values.dtype)
        return values

    def write(self, name: str, batch: Batch, values: torch.Tensor) -> None:
        """Keep `values` `[tokens, width]` for the launches to come."""
        if batch.decoding:
            lines = values if not batch.prompts else values[batch.decoding_tokens]
            table = self._table(name, max(batch.launch.places), lines)
            table.index_copy_(0, batch.places, lines.to(table.dtype))
        for index in batch.prompts:
            row, first = batch.rows[index], batch.spans.first[index]
            part = values[first : first + batch.spans.lengths[index]]
            if len(part) == row.prompt_length:
                setattr(row, name, part)
                continue
            if getattr(row, name) is None:  # the first piece of a prompt
                setattr(row, name, part.new_empty(row.prompt_length, part.shape[1]))
            self._part(name, batch, index)[:] = part

    @staticmethod
    def _part(name: str, batch: Batch, index: int) -> torch.Tensor:
        """What a prompt carries for the positions of this launch."""
        return getattr(batch.rows[index], name)[batch.spans.start[index] : batch.spans.end[index]]

    def _table(self, name: str, place: int, like: torch.Tensor) -> torch.Tensor:
        """The table, with a line for `place` and wide enough a dtype: under autocast stages differ in theirs."""
        table = self._tables.get(name)
        if table is None or len(table) <= place or table.dtype != like.dtype:
            lines, dtype = 2 * place + 2, like.dtype
            if table is not None:
                lines = len(table) if place < len(table) else lines
                dtype = torch.promote_types(table.dtype, dtype)
            grown = like.new_zeros(lines, like.shape[1], dtype=dtype)
            if table is not None:
                grown[: len(table)] = table
            self._tables[name] = table = grown
        return table
