"""What runs together."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Launch"]


@dataclass(frozen=True)
class Launch:
    """Rows that run one stage together.

    Attributes:
        stage: "prelude", "loop" or "coda".
        keys: the rows, by the keys they were added under.
        places: their places, each in `range(max_num_seqs)` and held for as long as the row is in flight.
        depths: for "loop" the loop that each row runs, from 1; else the loops it has run.
        pieces: for every row that is at its prompt, by key, the positions of it that it runs, `(start, end)`.
        continued: how many of these are of a prompt that has run earlier ones in this stage.
    """

    stage: str
    keys: tuple[int, ...]
    places: tuple[int, ...]
    depths: tuple[int, ...]
    pieces: Mapping[int, tuple[int, int]]
    continued: int = 0

    def __len__(self) -> int:
        return len(self.keys)
