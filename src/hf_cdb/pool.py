"""Memory for the keys and values of many requests in one tensor, handed out in segments."""

import bisect

import torch

__all__ = ["Pool"]


class Pool:
    """A tensor `[layers, rows, width]` of which requests hold consecutive rows, the same ones in every layer.

    One tensor for all requests lets a launch write the new entries of all of its rows by one indexed copy a layer.

    Args:
        layers, width, dtype, device: of the tensor.
        most: rows that it grows to; more only where segments need more. None is any number.
    """

    def __init__(self, layers: int, width: int, dtype: torch.dtype, device: torch.device, most: int | None = None):
        self.most = most
        self.tensor = torch.empty(layers, 0, width, dtype=dtype, device=device)
        self._free: list[tuple[int, int]] = []  # (first row, rows), in order, never adjacent

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, all layers together."""
        layers, _, width = self.tensor.shape
        return layers * width * self.tensor.dtype.itemsize

    @property
    def reserved_bytes(self) -> int:
        """Bytes of the whole tensor, free rows included."""
        return self.tensor.nbytes

    def allocate(self, rows: int) -> int:
        """First row of a segment of `rows` rows; the tensor grows where no gap is large enough.

        Views of the tensor taken before are of no use afterwards.
        """
        first = self.take(rows)
        if first is not None:
            return first
        end = self.tensor.shape[1]
        more = end // 4 if self.most is None else min(end // 4, self.most - end)
        self._extend(max(rows - self._tail, more))
        return self.allocate(rows)

    def take(self, rows: int) -> int | None:
        """First row of a segment of `rows` rows; None where no gap is large enough."""
        for index, (first, length) in enumerate(self._free):
            if length >= rows:
                rest = (first + rows, length - rows)
                self._free[index : index + 1] = [rest] if rest[1] else []
                return first
        return None

    def has_room(self, rows: int) -> bool:
        """Whether a segment of `rows` rows finds a gap, or the tensor may grow by it."""
        if self.most is None or self.tensor.shape[1] - self._tail + rows <= self.most:
            return True
        return any(length >= rows for _, length in self._free)

    def close_gaps(self, held: list[tuple[int, int]]) -> list[int]:
        """Move segments together, so that all free rows follow them. One is copied at a time.

        Args:
            held: (first row, rows) of every segment, in order.

        Returns:
            Their first rows from now on.
        """
        firsts, end = [], 0
        for first, rows in held:
            if first > end:
                self.tensor[:, end : end + rows] = self.tensor[:, first : first + rows].clone()
            firsts.append(end)
            end += rows
        free = self.tensor.shape[1] - end
        self._free = [(end, free)] if free else []
        return firsts

    @property
    def _tail(self) -> int:
        """Free rows at the end."""
        return self._free[-1][1] if self._free and sum(self._free[-1]) == self.tensor.shape[1] else 0

    def reserve(self, rows: int) -> None:
        """Make room for `rows` more rows at once, so that a burst of segments grows the tensor once."""
        room = sum(length for _, length in self._free)
        if room < rows:
            self._extend(rows - room)

    def release(self, first: int, rows: int) -> None:
        """Give a segment back."""
        index = bisect.bisect(self._free, (first, rows))
        if index < len(self._free) and first + rows == self._free[index][0]:
            rows += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            index -= 1
            before, length = self._free.pop(index)
            first, rows = before, length + rows
        self._free.insert(index, (first, rows))

    def renew(self, rows: int) -> None:
        """Have a new tensor of `rows` rows, all of them free."""
        layers, _, width = self.tensor.shape
        self.tensor = self.tensor.new_empty(layers, rows, width)
        self._free = [(0, rows)]

    def _extend(self, rows: int) -> None:
        layers, held, width = self.tensor.shape
        grown = self.tensor.new_empty(layers, held + rows, width)
        grown[:, :held] = self.tensor
        self.tensor = grown
        self.release(held, rows)
