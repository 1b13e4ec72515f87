"""How much of each prompt a launch runs. Pure Python."""

from collections.abc import Sequence

from .admission import Row

__all__ = ["Prefill", "share_out"]


class Prefill:
    """Cuts prompts into pieces.

    Every piece passes a stage before any piece of the prompt passes the next one (depth-major), so that the cut changes
    no result, and may be another one in every stage.

    Args:
        chunk_size: positions of one prompt per launch at most; None is all of them.
        max_tokens: positions of all prompts together, at most: in a launch of the loop, and between two of these in
            all launches of the prelude, and of the coda. None is no limit.
    """

    def __init__(self, chunk_size: int | None, max_tokens: int | None):
        self.chunk_size, self.max_tokens = chunk_size, max_tokens
        self.renew()

    def renew(self) -> None:
        """A loop runs next, or nothing but prompts that have used up what they may."""
        self._left = dict.fromkeys(("prelude", "loop", "coda"), self.max_tokens)

    def cut(self, stage: str, rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
        """Pieces for a launch that is run.

        Args:
            stage: "prelude", "loop" or "coda".
            rows: those that are ready for it with their prompt, in the order in which they became so.

        Returns:
            By key of the row `(start, end)`, positions from `start` up to and without `end`. Rows that get none are
            left out.
        """
        wanted = [row.prompt - row.done for row in rows]
        if self.chunk_size is not None:
            wanted = [min(positions, self.chunk_size) for positions in wanted]
        if self.max_tokens is not None:
            loops_left = [row.max_depth - row.depth if stage == "loop" else 1 for row in rows]
            lengths = [row.prompt - row.first for row in rows]
            remaining = [
                length * left - (row.done - row.first)
                for row, length, left in zip(rows, lengths, loops_left, strict=True)
            ]
            wanted = share_out(self._left[stage], wanted, remaining)
            self._left[stage] -= sum(wanted)
        return {row.key: (row.done, row.done + size) for row, size in zip(rows, wanted, strict=True) if size}


def share_out(most: int, wanted: Sequence[int], remaining: Sequence[int]) -> list[int]:
    """Positions for every prompt, `most` in all.

    Half goes to the first prompt, so that it never waits for ever. The other half, and what the first one does not
    want, goes to those with the least remaining work: they are soon done, and hold up the others the least (shortest
    remaining processing time first, Schrage 1968).

    Args:
        most: positions.
        wanted: at most so many for each, in the order in which they became ready.
        remaining: work until each has passed its stage, in all its loops.
    """
    given = [0] * len(wanted)
    if most > 0 and wanted:
        given[0] = min(wanted[0], (most + 1) // 2)
        most -= given[0]
    for index in sorted(range(len(wanted)), key=remaining.__getitem__):
        more = min(wanted[index] - given[index], most)
        given[index] += more
        most -= more
    return given
