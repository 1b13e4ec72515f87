"""The exit rules of the rows of a launch, each asked about its own rows."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from .adapters import LoopAdapter
from .exits import ExitRule
from .failures import errors_of_requests
from .request import Request

__all__ = ["RowRules"]


class RowRules:
    """Requests may share a rule, which then decides about all of theirs at once.

    A rule that raises fails the requests that brought it; where it is that of all, it is an error of the model.

    Args:
        common: the rule of requests that bring none.
        adapter, places: see `ExitRule.bind`.
    """

    def __init__(self, common: ExitRule, adapter: LoopAdapter, places: int):
        self._common, self._adapter, self._places = common, adapter, places
        self._bound: weakref.WeakValueDictionary[int, ExitRule] = weakref.WeakValueDictionary()  # they may not hash
        self.bind(common)

    def bind(self, rule: ExitRule) -> None:
        """To be called before the first token of a request that has this rule."""
        if self._bound.get(id(rule)) is not rule:
            rule.bind(self._adapter, self._places)
            self._bound[id(rule)] = rule

    @contextmanager
    def _failing(self, rule: ExitRule, rows: Sequence[Request]) -> Iterator[None]:
        """What the rule raises becomes the error of its rows, unless it is the common one."""
        try:
            yield
        except errors_of_requests() as error:
            if rule is self._common:
                raise
            for row in rows:
                row.error = error

    def begin(self, rows: Sequence[Request], places: torch.Tensor, embeds: torch.Tensor, start: torch.Tensor) -> None:
        """A new token begins in these rows; see `ExitRule.begin`."""
        for rule, lines in _groups(rows):
            own = [rows[line] for line in lines]
            tokens = [(row.row, len(row.tokens)) for row in own]
            with self._failing(rule, own):
                if len(own) == len(rows):
                    rule.begin(places, embeds, start, tokens)
                else:
                    at = torch.as_tensor(lines, device=places.device)
                    rule.begin(places[at], embeds[at], start[at], tokens)

    def leave(
        self,
        rows: Sequence[Request],
        places: torch.Tensor,
        depths: Sequence[int],
        previous: torch.Tensor,
        state: torch.Tensor,
        logits: Callable[[], torch.Tensor],
    ) -> Any:
        """Which rows may leave, one bool a row; see `ExitRule.leave`. Those whose rule fails may.

        Args:
            previous, state: `[rows, width]`, or anything where no rule of the rows reads it.

        Raises:
            ValueError: the common rule said something else.
        """
        groups = _groups(rows)
        if len(groups) == 1:
            rule = groups[0][0]
            with self._failing(rule, rows):
                return _checked(rule, rule.leave(places, depths, previous, state, logits), len(rows))
            return [True] * len(rows)
        said = torch.ones(len(rows), dtype=torch.bool, device=places.device)
        asked: list[torch.Tensor] = []

        def logits_of(at: torch.Tensor) -> torch.Tensor:
            if not asked:  # once for all rules
                asked.append(logits())
            return asked[0][at]

        for rule, lines in groups:
            at = torch.as_tensor(lines, device=places.device)
            some = [depths[line] for line in lines]
            before = previous[at] if rule.reads_previous else previous
            after = state[at] if rule.reads_state else state
            with self._failing(rule, [rows[line] for line in lines]):
                own = rule.leave(places[at], some, before, after, lambda at=at: logits_of(at))
                said[at] = torch.as_tensor(_checked(rule, own, len(lines)), device=places.device)
        return said

    def of_prompt(self, row: Request) -> ExitRule | None:
        """The rule of a row with a memory of its own, a place for every position of its prompt; None where it fails."""
        with self._failing(row.rule, [row]):
            rule = row.rule.copy()
            rule.bind(self._adapter, row.prefill_length)
            return rule
        return None

    def begin_prompt(self, row: Request, positions: torch.Tensor, embeds: torch.Tensor, start: torch.Tensor) -> None:
        """Positions of a prompt begin; see `ExitRule.begin`."""
        with self._failing(row.rule, [row]):
            tokens = [(row.row, position + 1 - row.prefill_length) for position in positions.tolist()]
            row.ragged.rule.begin(positions, embeds, start, tokens)

    def leave_prompt(
        self,
        row: Request,
        positions: torch.Tensor,
        loop: int,
        previous: torch.Tensor,
        state: torch.Tensor,
        logits: Callable[[], torch.Tensor],
    ) -> numpy.ndarray:
        """Which positions of a prompt may leave, bool `[positions]`; see `ExitRule.leave`. Where its rule fails, all.

        Raises:
            ValueError: the common rule said something else.
        """
        rule, count = row.ragged.rule, len(positions)
        with self._failing(row.rule, [row]):
            said = _checked(rule, rule.leave(positions, [loop] * count, previous, state, logits), count)
            return torch.as_tensor(said).cpu().numpy()
        return numpy.ones(count, dtype=bool)


def _groups(rows: Sequence[Request]) -> list[tuple[ExitRule, Sequence[int]]]:
    """Every rule with the rows, by index, that it decides about."""
    first = rows[0].rule
    if all(row.rule is first for row in rows):
        return [(first, range(len(rows)))]
    groups: dict[int, tuple[ExitRule, list[int]]] = {}
    for line, row in enumerate(rows):
        groups.setdefault(id(row.rule), (row.rule, []))[1].append(line)
    return list(groups.values())


def _checked(rule: ExitRule, said: Any, rows: int) -> torch.Tensor | list[bool]:
    """What a rule said, where it is one bool a row."""
    if isinstance(said, torch.Tensor):
        given, right = f"{said.dtype} {list(said.shape)}", said.dtype == torch.bool and said.shape == (rows,)
        flags = said
    else:
        flags = list(said) if isinstance(said, Sequence | numpy.ndarray) else []
        given, right = repr(said), len(flags) == rows and all(isinstance(flag, bool | numpy.bool_) for flag in flags)
    if not right:
        raise ValueError(
            f"exit rule {rule.name!r} ({type(rule).__name__}) returned {given} for {rows} rows: `leave` gives one bool "
            f"per row, a bool tensor [{rows}] or a sequence."
        )
    return flags
