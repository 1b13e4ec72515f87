"""What rows carry from one launch to the next."""

import torch

from .batch import Batch

__all__ = ["RowStates"]


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
        if len(batch) == 1 and not batch.ragged:  # those are compared with what is written next
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
            if len(part) == row.end:
                setattr(row, name, part)
                continue
            if getattr(row, name) is None:  # the first piece of a prompt
                setattr(row, name, part.new_empty(row.end, part.shape[1]))
            getattr(row, name)[batch.spans.where(index)] = part

    @staticmethod
    def _part(name: str, batch: Batch, index: int) -> torch.Tensor:
        """What a prompt carries for the positions of this launch."""
        return getattr(batch.rows[index], name)[batch.spans.where(index)]

    def _table(self, name: str, place: int, like: torch.Tensor) -> torch.Tensor:
        """The table, with a line for `place` and wide enough a dtype: under autocast stages differ in theirs."""
        table = self._tables.get(name)
        held = 0 if table is None else len(table)
        dtype = like.dtype if table is None else torch.promote_types(table.dtype, like.dtype)
        if place >= held or table.dtype != dtype:
            grown = like.new_zeros(held if place < held else 2 * place + 2, like.shape[1], dtype=dtype)
            if table is not None:
                grown[:held] = table
            self._tables[name] = table = grown
        return table
