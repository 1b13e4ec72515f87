"""When the rows of a call end: the merged stopping criteria of `generate`, for rows that reach a token at any time."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from transformers.generation import stopping_criteria as stock

from .engine import Engine
from .failures import errors_of_requests
from .request import Request
from .row_copies import Copier, PerRow
from .trial import trial

__all__ = ["Stops"]


class Stops:
    """The stopping criteria of one call, sorted by what they look at.

    * A length limit and end tokens are read off the criteria.
    * Stop strings, and criteria of the user's that treat every row by itself, are asked about each row alone, on its
      own padded history. A criterion object is copied for every row; a function is not.
    * Other criteria of the user's are *replayed*: called on all rows, ended ones padded, in the order of the tokens as
      stock `generate` would, as soon as no row that runs has fewer tokens. Rows that are ahead by then lose what comes
      after the token that ends them (`CDBStats` counts what ran). Whether a criterion treats rows by itself is tried
      first, see `trial`; it has to return a tensor with an entry for every row. What one raises
      fails every row that had not ended.
    * A time limit is looked at after every launch that yields tokens, so at least one row has one; it ends all rows,
      those that have not started included.

    Args:
        criteria: what stock `generate` makes of its arguments and the user's own.
        histories: the padded prompts, int64 `[rows, positions]`.
        vocab: columns of the scores.
        keep_scores: criteria are given the scores of all steps so far, a tuple of `[rows, vocab]`; else None.
        pad: fills rows that have ended.

    Attributes:
        max_new_tokens: tokens per row at most, at least 1.
    """

    def __init__(
        self, criteria: Sequence[Callable], histories: torch.Tensor, vocab: int, keep_scores: bool, pad: int = 0
    ):
        self.histories, self.vocab, self.keep_scores, self.pad = histories, vocab, keep_scores, pad
        limits = [c for c in criteria if type(c) is stock.MaxLengthCriteria]
        # As stock, which looks at the length after a token.
        self.max_new_tokens = max(1, min(c.max_length for c in limits) - histories.shape[1])
        self._ends = {
            int(token) for c in criteria if type(c) is stock.EosTokenCriteria for token in c.eos_token_id.flatten()
        }
        # A clock that nobody sets: the criteria's own would end rows when the time of day is changed.
        self._ends_at = min(
            (
                time.monotonic() + c.max_time - (time.time() - c.initial_timestamp)
                for c in criteria
                if type(c) is stock.MaxTimeCriteria
            ),
            default=math.inf,
        )
        self._own = PerRow()
        self._replayed: list[Callable] = []
        self._step = 0  # tokens that the replayed criteria have seen
        for criterion in criteria:
            self._sort(criterion)

    @property
    def replays(self) -> bool:
        """Whether tokens may be taken back."""
        return bool(self._replayed)

    def _sort(self, criterion: Callable) -> None:
        if type(criterion) in (stock.EosTokenCriteria, stock.MaxTimeCriteria):
            return
        if type(criterion) is stock.MaxLengthCriteria:
            most = criterion.max_position_embeddings
            if most is None or criterion.max_length <= most:
                return  # else it has to see the rows: it warns of those that grow beyond what the model was trained for
        if type(criterion) in (stock.MaxLengthCriteria, stock.StopStringCriteria) or len(self.histories) == 1:
            self._own.add(lambda row: criterion)
        elif (copier := self._copier_for_rows(criterion)) is not None:
            copier.warn_if_large(f"stopping_criteria {getattr(criterion, '__name__', type(criterion).__name__)}")
            self._own.add(lambda row: copier())
        else:
            self._replayed.append(criterion)

    def _copier_for_rows(self, criterion: Callable) -> Copier | None:
        """What makes a criterion for every row, where it treats rows by themselves."""
        try:
            copier = Copier(criterion)
        except Exception:  # what cannot be copied has one state for all rows, and is replayed
            return None
        found = trial(copier, self.histories, self.vocab, True if self.keep_scores else None)
        return copier if found is None else None

    def release(self, row: int) -> None:
        """Drop what is held for a row that has ended."""
        self._own.release(row)

    def row_ends(self, request: Request) -> bool:
        """Whether a row ends with its last token, as far as that is its own business."""
        ends = request.tokens[-1] in self._ends
        own = self._own[request.row]
        if own:
            prompt = self.histories[request.row]
            history = torch.cat((prompt, prompt.new_tensor(request.tokens)))[None]
            scores = tuple(line[None] for line in request.scores) if self.keep_scores else None
            said = [bool(criterion(history, scores)) for criterion in own]  # all, as stock does: they may keep count
            ends = ends or any(said)
        return ends

    def after_tokens(self, engine: Engine, requests: Sequence[Request]) -> None:
        """End rows by what all rows decide together. To be called after every launch that yields tokens."""
        if time.monotonic() > self._ends_at:
            for request in requests:
                if not request.ended:
                    engine.cancel(request.key)
        while self._replayed and self._step < _front(requests):
            self._step += 1
            try:
                done_rows = self._replay(requests)
            except errors_of_requests() as error:  # it is asked about all rows, so it is theirs
                self._fail(engine, requests, error)
                return
            for request, done in zip(requests, done_rows, strict=True):
                if done and len(request.tokens) >= self._step:
                    _cut(request, self._step)
                    if not request.ended:
                        engine.cancel(request.key)
                        request.status = "finished"  # the criterion has ended it, as any other would

    def _fail(self, engine: Engine, requests: Sequence[Request], error: BaseException) -> None:
        """Fail the rows that were to get more than `_step` tokens; what they had by then is kept."""
        for request in requests:
            if not request.ended or len(request.tokens) > self._step:
                _cut(request, self._step)
                if request.error is None:
                    engine.fail(request, error)

    def _replay(self, requests: Sequence[Request]) -> list[bool]:
        """What the replayed criteria say of every row after `_step` tokens."""
        tokens = [(request.tokens + [self.pad] * self._step)[: self._step] for request in requests]
        ids = torch.cat((self.histories, self.histories.new_tensor(tokens)), dim=1)
        scores = tuple(self._scores(requests, step) for step in range(self._step)) if self.keep_scores else None
        done = torch.zeros(len(requests), dtype=torch.bool, device=ids.device)
        for criterion in self._replayed:
            done = done | _of_rows(criterion, criterion(ids, scores), len(requests)).to(done.device)
        return done.tolist()

    def _scores(self, requests: Sequence[Request], step: int) -> torch.Tensor:
        ended = next(r.scores[step] for r in requests if len(r.scores) > step).new_full((self.vocab,), -torch.inf)
        if 0 <= self.pad < self.vocab:  # a pad token beyond the vocabulary has no score
            ended[self.pad] = 0.0
        return torch.stack([r.scores[step] if len(r.scores) > step else ended for r in requests])


def _front(requests: Sequence[Request]) -> int:
    """Tokens that every row has which may still get one; where none may, those of the longest."""
    running = [len(request.tokens) for request in requests if not request.ended]
    return min(running) if running else max(len(request.tokens) for request in requests)


def _of_rows(criterion: Callable, said: Any, rows: int) -> torch.Tensor:
    """What a replayed criterion said, as bool `[rows]` or `[1]` for all of them."""
    if isinstance(said, bool | numpy.bool_ | torch.Tensor):
        flags = torch.as_tensor(said).flatten().bool()
        if len(flags) in (1, rows):
            return flags
    name = getattr(criterion, "__name__", type(criterion).__name__)
    given = f"shape {tuple(said.shape)}" if isinstance(said, torch.Tensor) else repr(said)
    raise ValueError(
        f"stopping_criteria {name} returned {given} for {rows} rows. "
        "Return a tensor with an entry for every row, or one bool for all."
    )


def _cut(request: Request, length: int) -> None:
    """Take back the tokens after `length`."""
    for of_tokens in (request.tokens, request.exit_depths, request.scores, request.logits):
        del of_tokens[length:]
