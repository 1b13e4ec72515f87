"""The base of all exit rules, and of a user's own."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from ..adapters import LoopAdapter

__all__ = ["ExitRule", "check_positive", "check_probability"]


class ExitRule(ABC):
    """Base of all rules, and of yours: `CDBConfig(exit_rule=YourRule(...))`.

    Attributes:
        name: what configs call the rule.
        needs_logits: whether `leave` reads logits; they cost a run of the coda in every loop.
        reads_state, reads_previous: whether `leave` reads `state` (or calls `logits`) and `previous`; False spares
            gathering the rows of that tensor, and it comes with all rows of the launch.
        default_threshold: used where none is given.
        higher_is_deeper: whether a higher threshold lets tokens leave later.
        lookahead: 1 where a True takes effect one loop later; set by `configure`.
        score: what the last call of `leave` held against the threshold, `[rows]`; None where the rule has no such
            number. `hf_cdb.diagnose` reads it.
    """

    name: str = "user"
    needs_logits: bool = False
    reads_state: bool = True
    reads_previous: bool = True
    default_threshold: float | None = None
    higher_is_deeper: bool = False
    lookahead: int = 0
    score: torch.Tensor | None = None

    def __init__(self, threshold: float | None = None):
        self.threshold = self.default_threshold if threshold is None else threshold
        self.check()

    def check(self) -> None:  # noqa: B027 (a rule without a threshold has nothing to check)
        """Raise a ValueError for a threshold that means nothing on this rule's scale."""

    def configure(self, adapter: LoopAdapter, depth: int, lookahead: int) -> None:
        """Called with the model, the full depth and the lookahead that the rule will run with.

        Raises:
            ValueError: the rule cannot run so.
        """
        self.lookahead = lookahead

    def copy(self) -> "ExitRule":
        """A rule that decides as this one, of which `bind` gives a memory of its own. With `prefill_exit` there is one
        for every prompt, whose positions are its rows and places."""
        return copy.copy(self)

    def bind(self, adapter: LoopAdapter, places: int) -> None:
        """Called once before the first token: the model, and the number of places that rows can hold. Whatever is kept
        between calls is made anew here."""
        self.adapter, self.places = adapter, places
        self._memory: dict[str, torch.Tensor] = {}

    def memory(self, name: str, like: torch.Tensor, fill: float) -> torch.Tensor:
        """A tensor `[places, *like.shape[1:]]` of the dtype of `like`, filled at first, kept between calls."""
        if name not in self._memory:
            self._memory[name] = like.new_full((self.places, *like.shape[1:]), fill)
        return self._memory[name]

    def begin(self, places: torch.Tensor, embeds: torch.Tensor, start: torch.Tensor, tokens: Sequence[tuple]) -> None:
        """A new token begins in these rows.

        Args:
            places: int64 `[rows]`.
            embeds: `[rows, width]`, the prelude's output.
            start: `[rows, width]`, the state before loop 1.
            tokens: for every row (row of the call, index of the token in its output). Of a position of a prompt
                (`prefill_exit`) that is the token after it, so the last but one has -1 and the first the least.
        """
        for memory in self._memory.values():
            memory[places] = self.fresh(memory)

    def fresh(self, memory: torch.Tensor) -> float:
        """What `memory` holds before loop 1; rules with several memories override `begin` instead."""
        return 0.0

    @abstractmethod
    def leave(
        self, places: torch.Tensor, depths: Sequence[int], previous: torch.Tensor, state: torch.Tensor, logits: Callable
    ) -> torch.Tensor | Sequence[bool]:
        """Which rows may leave after the loop they just ran.

        Called after every loop but the last possible one, also before `min_depth`, so that memory accumulates.

        Args:
            places: int64 `[rows]`.
            depths: the loop that each row just ran, from 1.
            previous, state: `[rows, width]`, before and after it, not normed by the coda.
            logits: no arguments, gives `[rows, vocab]` in at least float32; runs the coda.

        Returns:
            bool `[rows]`, a tensor or a sequence. With lookahead, whether one more loop is enough.
        """


def check_probability(rule: ExitRule) -> None:
    """Refuse a threshold outside (0, 1]."""
    if isinstance(rule.threshold, bool) or not 0 < rule.threshold <= 1:
        raise ValueError(
            f"exit_threshold={rule.threshold!r} is outside (0, 1]: {rule.name} compares it with a probability. Choose "
            "less to leave earlier."
        )


def check_positive(rule: ExitRule) -> None:
    """Refuse a threshold that is not positive and finite."""
    if isinstance(rule.threshold, bool) or not 0 < rule.threshold < float("inf"):
        raise ValueError(
            f"exit_threshold={rule.threshold!r} is no positive number: {rule.name} leaves when a difference falls "
            "below it. Choose more to leave earlier."
        )
