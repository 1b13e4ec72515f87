"""Tokens from logits of ragged rows: processors and noise.

Rows of a launch are at different lengths. Processors that look at a row's scores alone run once on the whole block;
those that look at its history run row by row, each row with processors of its own and its own padded history, so that
every one sees what it would see in stock `generate`.
"""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .processors import SCORES_ONLY
from .request import Request

__all__ = ["Noise", "Sampler", "derive_seed"]


class Noise:
    """Exponential noise that belongs to (row, index of the token), never to the schedule.

    Stock sampling draws one `[batch, vocab]` matrix of it per token: on the CPU `multinomial(p, 1)` is
    `argmax(p / q)` with q exponential. Here line b of the same matrices, drawn in the same order and only when
    needed, belongs to row b, so the same seed gives the same tokens whatever the schedule.

    Args:
        rows: rows of the call. None draws every line from the row's own seed instead.
        vocab: columns.
        max_bytes: matrices kept for rows that lag behind; older ones are drawn again from the generator's state.
    """

    def __init__(self, rows: int | None, vocab: int, device: torch.device, max_bytes: int = 256 * 2**20):
        self.rows, self.vocab, self.device = rows, vocab, device
        self._kept = max(1, max_bytes // (4 * vocab * (rows or 1)))
        self._states: list[torch.Tensor] = []
        self._matrices: dict[int, torch.Tensor] = {}
        # Rows beyond the shared matrices, and the call's own randomness for them.
        self._base = int(torch.randint(2**62, ())) if rows is None else 0

    def line(self, row: int, seed: int | None, index: int) -> torch.Tensor:
        """float32 `[vocab]` for token `index` of `row`; a seed of the row's own decides it alone."""
        if seed is not None:
            return self._seeded(seed, index)
        if self.rows is None:
            return self._seeded(_hash(self._base, row), index)
        while len(self._states) <= index:
            self._states.append(torch.get_rng_state())
            self._keep(len(self._states) - 1, torch.empty(self.rows, self.vocab).exponential_())
        if index not in self._matrices:
            generator = torch.Generator().set_state(self._states[index])
            self._keep(index, torch.empty(self.rows, self.vocab).exponential_(generator=generator))
        return self._matrices[index][row].to(self.device)

    def _keep(self, index: int, matrix: torch.Tensor) -> None:
        while len(self._matrices) >= self._kept:
            del self._matrices[min(self._matrices)]
        self._matrices[index] = matrix

    def _seeded(self, seed: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_hash(seed, index))
        return torch.empty(self.vocab).exponential_(generator=generator).to(self.device)


def derive_seed(seed: int, copy: int) -> int:
    """Seed of return sequence `copy` of a prompt with `seed`; the first keeps it."""
    return seed if copy == 0 else _hash(seed, copy)


def _hash(*values: int) -> int:
    text = ",".join(map(str, values)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


class Sampler:
    """Chooses the next tokens of rows that are at different lengths.

    Args:
        processors: for every row of the call its own list, all of the same kinds in the same order.
        histories: for every row its padded prompt, int64 `[positions]`.
        do_sample: draw from the distribution; else take the most probable token.
        noise: for `do_sample`.
        keep_scores, keep_logits: record them in the requests.
    """

    def __init__(
        self,
        processors: Sequence[Sequence[Callable]],
        histories: Sequence[torch.Tensor],
        do_sample: bool,
        noise: Noise | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ):
        self.processors, self.histories = processors, histories
        self.do_sample, self.noise = do_sample, noise
        self.keep_scores, self.keep_logits = keep_scores, keep_logits

    def choose(self, rows: Sequence[Request], logits: torch.Tensor) -> list[int]:
        """The next token of every row. A row whose processors raised has an `error` instead: its token means nothing.

        Args:
            logits: `[rows, vocab]`.
        """
        logits = logits.float()  # as stock generate
        scores = self._process(rows, logits)
        tokens = self._draw(rows, scores) if self.do_sample else _largest(scores)
        if self.keep_logits or self.keep_scores:
            for row, logits_line, scores_line in zip(rows, logits, scores, strict=True):
                if self.keep_logits and row.error is None:
                    row.logits.append(logits_line.clone())
                if self.keep_scores and row.error is None:
                    row.scores.append(scores_line.clone())
        return tokens

    def _draw(self, rows: Sequence[Request], scores: torch.Tensor) -> list[int]:
        probabilities = nn.functional.softmax(scores, dim=-1)
        for row, possible in zip(rows, probabilities.isfinite().all(-1).tolist(), strict=True):
            if not possible and row.error is None:
                row.error = ValueError(
                    f"token {len(row.tokens)} of row {row.row} cannot be drawn: the scores after the processors hold "
                    "NaN or +inf, or are -inf everywhere. Loosen what forbids tokens, or pass "
                    "remove_invalid_values=True if the model's own logits are not finite."
                )
        noise = torch.stack([self.noise.line(row.row, row.seed, len(row.tokens)) for row in rows])
        return _largest(probabilities / noise)

    def _process(self, rows: Sequence[Request], scores: torch.Tensor) -> torch.Tensor:
        kinds = self.processors[rows[0].row]
        if not kinds:
            return scores
        scores = scores.clone()
        histories: list[torch.Tensor] | None = None
        for index, processor in enumerate(kinds):
            block = self._run_together(processor, scores) if type(processor) in SCORES_ONLY else None
            if block is not None:
                scores = block
                continue
            histories = histories or [self.history(row)[None] for row in rows]
            scores = torch.cat(
                [
                    self._run_alone(index, row, history, scores[line : line + 1])
                    for line, (row, history) in enumerate(zip(rows, histories, strict=True))
                ]
            )
        return scores

    def _run_together(self, processor: Callable, scores: torch.Tensor) -> torch.Tensor | None:
        """One call for all rows; None where it raises, to find out by single calls whose scores are to blame."""
        try:
            return processor(None, scores)
        except Exception:
            return None

    def _run_alone(self, index: int, row: Request, history: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Processor `index` of one row; what it raises becomes the row's error, and the others go on."""
        if row.error is not None:
            return scores
        try:
            processed = self.processors[row.row][index](history, scores)
            if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
                shape = getattr(processed, "shape", type(processed).__name__)
                raise ValueError(
                    f"{self.processors[row.row][index]!r} returned {shape} for scores {tuple(scores.shape)}. A logits "
                    "processor returns scores of the shape that it is given."
                )
            return processed
        except Exception as error:
            row.error = error
            return scores

    def history(self, row: Request) -> torch.Tensor:
        """The row's padded prompt and its tokens so far, int64 `[positions]`."""
        prompt = self.histories[row.row]
        return torch.cat((prompt, prompt.new_tensor(row.tokens)))


def _largest(scores: torch.Tensor) -> list[int]:
    """Where each row of float scores is largest, the first place of several; a NaN counts as largest."""
    # The same in NumPy, whose search is ten times faster on the CPU.
    return (scores.numpy() if scores.device.type == "cpu" else scores).argmax(-1).tolist()
