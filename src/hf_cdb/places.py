"""Where the tokens of a launch lie in a pool of keys and values."""

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from .adapters import LoopAdapter

__all__ = ["PACK_BYTES", "Places", "Span"]

# Keys and values of a row and layer up to which copying them costs less than a call of their own, on the CPU.
PACK_BYTES = 160 * 1024


@dataclass
class Span:
    """Consecutive new positions of one request in a launch.

    Attributes:
        key: the request.
        start, end: positions `[start, end)`.
        loop: for the core: the loop they run, from 1.
    """

    key: int
    start: int
    end: int
    loop: int = 1


class Places:
    """Where in a pool the spans of a launch lie, the same in every layer, and how their attention is shared out.

    Attributes:
        firsts: by span the row of its first key of the first head, in the slot of its loop.
        capacities: by span the rows from one head to the next.
        written: int64 `[2 * kv heads * tokens]`, where the new keys and values go.
        short: spans of one position that are attended to together, on a packed copy; fewer than two are not.
        short_tokens: int64 `[short spans]`, their tokens in the launch, or None where they are all of it.
    """

    def __init__(self, spans: list[Span], firsts: list[int], capacities: list[int], adapter: LoopAdapter):
        self.firsts, self.capacities = firsts, capacities
        self._device, self._dtype = adapter.device, adapter.dtype
        self._heads = torch.arange(2 * adapter.kv_heads, device=self._device)[:, None]
        tokens = [(f + p, c) for s, f, c in zip(spans, firsts, capacities, strict=True) for p in range(s.start, s.end)]
        first, capacity = torch.tensor(tokens, device=self._device).T
        self.written = (first + self._heads * capacity).flatten()

        position_bytes = 2 * adapter.kv_heads * adapter.head_dim * adapter.dtype.itemsize
        most = PACK_BYTES // position_bytes
        self.short = [i for i, span in enumerate(spans) if span.end - span.start == 1 and span.end <= most]
        self.short = self.short if len(self.short) > 1 else []
        self.short_tokens = None
        if len(self.short) < len(spans):
            starts = [0, *accumulate(span.end - span.start for span in spans)]
            self.short_tokens = torch.tensor([starts[i] for i in self.short], dtype=torch.long, device=self._device)
        self._ends = [spans[i].end for i in self.short]
        self._masks: dict[int | None, torch.Tensor | None] = {}

    @cached_property
    def packed_rows(self) -> torch.Tensor:
        """int64 `[2, short spans, kv heads, longest]`: the rows of everything that the short spans read."""
        first = torch.tensor([self.firsts[i] for i in self.short], device=self._device)
        capacity = torch.tensor([self.capacities[i] for i in self.short], device=self._device)
        last = torch.tensor(self._ends, device=self._device)[:, None] - 1
        position = torch.minimum(torch.arange(max(self._ends), device=self._device), last)
        heads = self._heads.view(2, 1, -1, 1) * capacity[:, None, None]
        return first[:, None, None] + heads + position[:, None]

    def packed_mask(self, window: int | None) -> torch.Tensor | None:
        """`[short spans, 1, 1, longest]`, 0 at what each reads and -inf elsewhere; None where that is everything.

        Args:
            window: the last so many positions only.
        """
        if window not in self._masks:
            self._masks[window] = None
            longest = max(self._ends)
            if min(self._ends) < longest or (window is not None and window < longest):
                end = torch.tensor(self._ends, device=self._device)[:, None]
                position = torch.arange(longest, device=self._device)
                seen = position < end
                seen = seen if window is None else seen & (position >= end - window)
                mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
                self._masks[window] = mask.masked_fill(~seen, -torch.inf)[:, None, None]
        return self._masks[window]
