"""Tokens from logits of ragged rows.

Rows of a launch are at different lengths. Processors that look at a row's scores alone run once on the whole block;
those that look at its history run row by row, each row with processors of its own and its own padded history, so that
every one sees what it would see in stock `generate`.
"""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from .failures import errors_of_requests
from .noise import Noise
from .precision import at_least_float32
from .processors import SCORES_ONLY
from .request import Request
from .row_copies import PerRow

__all__ = ["Sampler"]


class Sampler:
    """Chooses the next tokens of rows that are at different lengths.

    Args:
        processors: for every row of the call its own list, all of the same kinds in the same order; a `PerRow` makes
            a list when the row needs it.
        histories: for every row its padded prompt, int64 `[positions]`.
        do_sample: draw from the distribution; else take the most probable token.
        noise: for `do_sample`.
        keep_scores, keep_logits: record them in the requests.
        alike: of the processors, see `key_of_scores_only`.

    Attributes:
        key: samplers of equal keys choose alike, so that one serves the rows of all; None: it serves its own alone.
    """

    def __init__(
        self,
        processors: Sequence[Sequence[Callable]] | PerRow,
        histories: Sequence[torch.Tensor],
        do_sample: bool,
        noise: Noise | None = None,
        keep_scores: bool = False,
        keep_logits: bool = False,
        alike: Hashable | None = None,
    ):
        self.processors, self.histories = processors, histories
        self.do_sample, self.noise = do_sample, noise
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        # Of a PerRow the length is that of every row's list.
        self._processes = len(processors) > 0 if isinstance(processors, PerRow) else any(processors)
        own = keep_scores or keep_logits or (self._processes and alike is None)
        self.key: Hashable | None = None if own else (do_sample, alike if self._processes else ())

    def choose(self, rows: Sequence[Request], logits: torch.Tensor) -> list[int]:
        """The next token of every row. A row whose processors raised has an `error` instead: its token means nothing.

        Args:
            rows: each with this sampler, or another of its key.
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

    def release(self, row: int) -> None:
        """Drop what is held for a row that has ended."""
        if isinstance(self.processors, PerRow):
            self.processors.release(row)
        if self.noise is not None:
            self.noise.release(row)

    def _draw(self, rows: Sequence[Request], scores: torch.Tensor) -> list[int]:
        probabilities = nn.functional.softmax(scores, dim=-1)
        for row, possible in zip(rows, probabilities.isfinite().all(-1).tolist(), strict=True):
            if not possible and row.error is None:
                row.error = ValueError(
                    f"token {len(row.tokens)} of row {row.row} cannot be drawn: the scores after the processors hold "
                    "NaN or +inf, or are -inf everywhere. Loosen what forbids tokens, or pass "
                    "remove_invalid_values=True if the model's own logits are not finite."
                )
        noise = torch.stack([row.sampler.noise.line(row.row, row.seed, len(row.tokens)) for row in rows])
        return _largest(probabilities / noise)

    def _process(self, rows: Sequence[Request], scores: torch.Tensor) -> torch.Tensor:
        if not self._processes:
            return scores
        kinds = self.processors[rows[0].row]
        scores = scores.clone()
        histories: list[torch.Tensor] | None = None
        for index, processor in enumerate(kinds):
            block = self._run_together(processor, scores) if type(processor) in SCORES_ONLY else None
            if block is not None:
                scores = block
                continue
            histories = histories or [row.sampler.history(row)[None] for row in rows]
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
            processor = row.sampler.processors[row.row][index]
            processed = processor(history, scores)
            if not isinstance(processed, torch.Tensor) or processed.shape != scores.shape:
                shape = getattr(processed, "shape", type(processed).__name__)
                raise ValueError(
                    f"{processor!r} returned {shape} for scores {tuple(scores.shape)}. A logits processor returns "
                    "scores of the shape that it is given."
                )
            if not processed.is_floating_point() or processed.device != scores.device:
                raise ValueError(
                    f"{processor!r} returned {processed.dtype} on {processed.device} for scores that are "
                    f"{scores.dtype} on {scores.device}. A logits processor returns scores of the kind it is given."
                )
            return processed
        except errors_of_requests() as error:
            row.error = error
            return scores

    def history(self, row: Request) -> torch.Tensor:
        """The row's padded prompt and its tokens so far, int64 `[positions]`."""
        prompt = self.histories[row.row]
        return torch.cat((prompt, prompt.new_tensor(row.tokens)))


def _largest(scores: torch.Tensor) -> list[int]:
    """Where each row of float scores is largest, the first place of several; a NaN counts as largest."""
    if scores.device.type != "cpu":
        return scores.argmax(-1).tolist()
    # The same in NumPy, whose search is ten times faster; it has no bfloat16.
    return at_least_float32(scores).numpy().argmax(-1).tolist()
