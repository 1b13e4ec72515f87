"""A rule that only listens to another one."""

from .rule import ExitRule
from .wrapped import Wrapped

__all__ = ["Listening"]


class Listening(Wrapped):
    """Asks a rule after every loop, and lets nothing leave.

    Args:
        rule: one with a score: not argmax-stability, preloop, never or replay.
        tokens: also hear the most probable token after every loop, which costs a run of the coda.

    Attributes:
        scores: (row, index of the token) -> the score after every loop that the rule was asked after.
        tokens: likewise the most probable tokens; empty unless asked for.

    Raises:
        ValueError: from `leave`, where the rule has no score.
    """

    def __init__(self, rule: ExitRule, tokens: bool = False):
        self.scores: dict[tuple[int, int], list[float]] = {}
        self.tokens: dict[tuple[int, int], list[int]] = {}
        super().__init__(rule)
        self._hears_tokens = tokens
        self.needs_logits = rule.needs_logits or tokens

    def bind(self, adapter, places):
        super().bind(adapter, places)
        self._keys: dict[int, tuple[int, int]] = {}

    def begin(self, places, embeds, start, tokens):
        self._keys.update(zip(places.tolist(), tokens, strict=True))
        super().begin(places, embeds, start, tokens)

    def leave(self, places, depths, previous, state, logits):
        super().leave(places, depths, previous, state, logits)
        if self.rule.score is None:
            raise ValueError(
                f"exit_rule={self.rule.name!r} holds no score against its threshold to listen to. Choose gate, "
                "confidence or a rule of differences."
            )
        keys = [self._keys[place] for place in places.tolist()]
        for key, score in zip(keys, self.rule.score.tolist(), strict=True):
            self.scores.setdefault(key, []).append(score)
        if self._hears_tokens:
            for key, token in zip(keys, logits().argmax(-1).tolist(), strict=True):
                self.tokens.setdefault(key, []).append(token)
        return [False] * len(depths)
