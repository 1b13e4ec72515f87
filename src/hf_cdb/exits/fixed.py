"""Rules that look at nothing: full depth, and given depths."""

from collections.abc import Sequence

from .rule import ExitRule

__all__ = ["Never", "Replay"]


class Never(ExitRule):
    """Full depth for every token: exits are off."""

    name = "never"
    reads_state = reads_previous = False

    def leave(self, places, depths, previous, state, logits):
        return [False] * len(depths)


class Replay(ExitRule):
    """Given depths; lookahead does not shift them.

    Args:
        depths: rows of depths, one row for each row of the call; entry k belongs to its k-th new token.
    """

    name = "replay"
    reads_state = reads_previous = False

    def __init__(self, depths: Sequence[Sequence[int]]):
        self.depths = [list(row) for row in depths]
        self.copies = 1  # rows of the call that share a row of depths, set by every call
        super().__init__()

    def bind(self, adapter, places):
        super().bind(adapter, places)
        self._wanted = [0] * places

    def begin(self, places, embeds, start, tokens):
        for place, (row, index) in zip(places.tolist(), tokens, strict=True):
            self._wanted[place] = self.depths[row // self.copies][index]

    def leave(self, places, depths, previous, state, logits):
        reached = [depth + self.lookahead for depth in depths]
        return [depth >= self._wanted[place] for place, depth in zip(places.tolist(), reached, strict=True)]
