"""A prompt whose positions leave the loop one by one."""

import numpy

from .exits import ExitRule

__all__ = ["RaggedPrompt"]


class RaggedPrompt:
    """How many loops each position of a prompt runs, given or decided on the way.

    Loop t runs the positions that have not left before it. One that left at depth d is read by deeper loops from its
    entry of loop d, as tokens that left early are (`last_exited`).

    Args:
        depths: int64 `[positions]`. Beside a rule, the full depth of all.
        rule: decides about all positions but the last, which yields the next token; bound to as many places as there
            are positions. None: the depths are given.

    Attributes:
        depths: as given, or as decided so far.
        rule: as given.
        undecided: bool `[positions]`, those that the rule is asked about.
    """

    def __init__(self, depths: numpy.ndarray, rule: ExitRule | None = None):
        self.depths, self.rule = depths, rule
        self.undecided = numpy.full(len(depths), rule is not None)
        self.undecided[-1] = False
        # The loop of the state that the layers after the loop were last given.
        self._shown = numpy.zeros_like(depths)

    def leave(self, positions: numpy.ndarray, depth: int) -> None:
        """Let positions leave at `depth`."""
        self.depths[positions] = depth
        self.undecided[positions] = False

    def unshown(self, end: int, loop: int) -> numpy.ndarray:
        """The positions before `end` whose state after `loop`, or after the loop where they left, the layers after the
        loop have not been given. They count as shown from now on."""
        ran = numpy.minimum(self.depths[:end], loop)
        positions = numpy.flatnonzero(self._shown[:end] != ran)
        self._shown[positions] = ran[positions]
        return positions
