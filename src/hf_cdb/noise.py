"""Noise for sampling, which belongs to a row and the index of its token."""

import functools
import hashlib

import torch
from transformers.utils import logging

__all__ = ["Noise", "derive_seed"]

logger = logging.get_logger(__name__)


class Noise:
    """Exponential noise that belongs to (row, index of the token), never to the schedule.

    Stock sampling draws one `[batch, vocab]` matrix of it per token: on the CPU `multinomial(p, 1)` is
    `argmax(p / q)` with q exponential. Here line b of the same matrices, drawn in the same order and only when
    needed, belongs to row b, so the same seed gives the same tokens whatever the schedule.

    A matrix is drawn for the first row that needs a line of it. The lines of rows that lag behind wait: whole in half
    of `max_bytes`, then as the state of the generator before the line, from which that line alone is drawn a second
    time. What exceeds both is drawn again with its whole matrix.

    Args:
        rows: rows of the call. None draws every line from the row's own seed instead.
        vocab: columns.
        device: where lines are needed; they are drawn on the CPU.
        max_bytes: held for rows that lag behind; at least one matrix may wait whole.

    Attributes:
        held_bytes: what waits now.
    """

    def __init__(self, rows: int | None, vocab: int, device: torch.device, max_bytes: int = 256 * 2**20):
        self.rows, self.vocab, self.device = rows, vocab, device
        # Rows beyond the shared matrices, and the call's own randomness for them.
        self._base = int(torch.randint(2**62, ())) if rows is None else 0
        self._starts: list[torch.Tensor] = []  # state of the generator before each matrix
        self._block: tuple[int, torch.Tensor] | None = None  # the matrix drawn last, by index, where it was kept whole
        self._next = [0] * (rows or 0)  # index of the line that each row needs next; None for a row that needs no more
        self._waiting: list[dict[int, torch.Tensor]] = [{} for _ in self._next]  # by row: index -> line, or its state
        self._held = {torch.float32: 0, torch.uint8: 0}  # bytes of lines, and of states
        line, state = 4 * vocab, torch.get_rng_state().nbytes
        self._room = {
            torch.float32: max(max_bytes // 2, line * (rows or 0)),
            torch.uint8: max_bytes // 2 if state < line else 0,
        }

    def line(self, row: int, seed: int | None, index: int) -> torch.Tensor:
        """float32 `[vocab]` for token `index` of `row`; a seed of the row's own decides it alone."""
        if seed is not None:
            return self._seeded(seed, index)
        if self.rows is None:
            return self._seeded(_hash(self._base, row), index)
        while len(self._starts) <= index:
            self._starts.append(torch.get_rng_state())
            self._draw(len(self._starts) - 1, torch.default_generator)
        line = self._take(row, index)
        if line is None:
            logger.warning_once(
                "Noise of rows that lag far behind exceeds its bound and is drawn again, which is slow. A seed for "
                "every prompt, cdb={'seeds': [...]}, spares that; the tokens are then others than stock generate's."
            )
            self._draw(index, torch.Generator().set_state(self._starts[index]), asking=row)
            line = self._take(row, index)
        if self._next[row] is not None:
            self._next[row] = max(self._next[row], index + 1)
        return line.to(self.device)

    def release(self, row: int) -> None:
        """Hold nothing more for a row that has ended."""
        if self.rows is None:
            return
        self._next[row] = None
        for index in list(self._waiting[row]):
            self._pop(row, index)

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values()) + (0 if self._block is None else self._block[1].nbytes)

    def _take(self, row: int, index: int) -> torch.Tensor | None:
        """The line, if it is there or can be drawn by itself."""
        if self._block is not None and self._block[0] == index:
            return self._block[1][row]
        kept = self._pop(row, index)
        if kept is None or kept.dtype == torch.float32:
            return kept
        return torch.empty(self.vocab).exponential_(generator=torch.Generator().set_state(kept))

    def _draw(self, index: int, generator: torch.Generator, asking: int | None = None) -> None:
        """Draw a matrix; hold what rows will need of it, and the line of the row that asks for it again."""
        if self._block is not None:
            before, lines = self._block
            self._block = None
            for row in self._needing(before):
                if self._fits(lines[row]):
                    self._hold(row, before, lines[row].clone())
        whole = 4 * self.rows * self.vocab
        if self._held[torch.float32] + whole <= self._room[torch.float32] or not _lines_follow_each_other(self.vocab):
            self._block = (index, torch.empty(self.rows, self.vocab).exponential_(generator=generator))
            return
        needing = {*self._needing(index), asking}
        for row in range(self.rows):
            state = generator.get_state() if row in needing else None
            line = torch.empty(self.vocab).exponential_(generator=generator)
            if row == asking or (state is not None and self._fits(line)):
                self._hold(row, index, line)
            elif state is not None and self._fits(state):
                self._hold(row, index, state)

    def _needing(self, index: int) -> list[int]:
        """Rows that have not come to this index yet."""
        return [row for row, due in enumerate(self._next) if due is not None and due <= index]

    def _fits(self, kept: torch.Tensor) -> bool:
        """Whether there is room for another line or state like this one."""
        return self._held[kept.dtype] + kept.nbytes <= self._room[kept.dtype]

    def _hold(self, row: int, index: int, kept: torch.Tensor) -> None:
        self._pop(row, index)
        self._waiting[row][index] = kept
        self._held[kept.dtype] += kept.nbytes

    def _pop(self, row: int, index: int) -> torch.Tensor | None:
        kept = self._waiting[row].pop(index, None)
        if kept is not None:
            self._held[kept.dtype] -= kept.nbytes
        return kept

    def _seeded(self, seed: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_hash(seed, index))
        return torch.empty(self.vocab).exponential_(generator=generator).to(self.device)


@functools.cache
def _lines_follow_each_other(vocab: int) -> bool:
    """Whether torch draws a matrix line by line from one stream, as its plain CPU kernel does, so that lines can be
    drawn one at a time. Vendor kernels that give each call a stream of its own do not."""
    both = torch.empty(2, vocab).exponential_(generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    return all(torch.equal(line, torch.empty(vocab).exponential_(generator=generator)) for line in both)


def derive_seed(seed: int, copy: int) -> int:
    """Seed of return sequence `copy` of a prompt with `seed`; the first keeps it."""
    return seed if copy == 0 else _hash(seed, copy)


def _hash(*values: int) -> int:
    text = ",".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
