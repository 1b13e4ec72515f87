"""Rules that look at nothing: full depth, and given depths."""

from collections.abc import Sequence

import torch

from ..transfer import to_device
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

    def begin(self, places, embeds, start, tokens):
        wanted = torch.tensor([self.depths[row // self.copies][index] for row, index in tokens])
        wanted = to_device(wanted, places.device)
        self.memory("wanted", wanted, 0)[places] = wanted

    def leave(self, places, depths, previous, state, logits):
        reached = to_device(torch.tensor(depths), places.device) + self.lookahead
        return reached >= self._memory["wanted"][places]
