"""An exit rule whose signal is read wrongly."""

import math

import numpy
import torch

from ..exits import ExitRule, Wrapped
from ..precision import at_least_float32

__all__ = ["Disturbed", "Listening", "settledness"]


def settledness(rule: ExitRule, score: torch.Tensor) -> torch.Tensor:
    """A rule's score on a scale without ends that grows as the token settles.

    The log odds of probabilities, which leave when high (gate, confidence); less the log of differences, which leave
    when low. A difference that rounding has made negative counts as 0.
    """
    score = at_least_float32(score)
    return score.logit() if rule.higher_is_deeper else -score.clamp(min=0).log()


class Disturbed(Wrapped):
    """Another rule, whose score is held against the threshold after an error `unit * (bias + noise * z)`.

    z is standard normal: a function of the seed, the row, the index of the token and the loop, so that a row meets the
    same errors whatever runs beside it. Errors are on the scale of `settledness`; a positive bias lets tokens leave
    earlier. What the rule remembers is not disturbed: the reading is wrong, not the state.

    Args:
        rule: one with a score: not argmax-stability, preloop, never or replay.
        noise, bias: in units.
        unit: of errors, such as `Listening.spread`.
        seed: of the errors.

    Raises:
        ValueError: noise or unit below 0, or no finite number.
    """

    def __init__(self, rule: ExitRule, noise: float = 0.0, bias: float = 0.0, *, unit: float = 1.0, seed: int = 0):
        for name, value in (("noise", noise), ("bias", bias), ("unit", unit)):
            if not math.isfinite(value) or (value < 0 and name != "bias"):
                raise ValueError(f"{name}={value}: choose a finite number{'' if name == 'bias' else ' of at least 0'}.")
        self.noise, self.bias, self.unit, self.seed = noise, bias, unit, seed
        super().__init__(rule)

    def configure(self, adapter, depth, lookahead):
        super().configure(adapter, depth, lookahead)
        self._depth = depth

    def bind(self, adapter, places):
        super().bind(adapter, places)
        self._z = numpy.zeros((places, self._depth))

    def begin(self, places, embeds, start, tokens):
        super().begin(places, embeds, start, tokens)
        for place, (row, index) in zip(places.tolist(), tokens, strict=True):
            self._z[place] = numpy.random.default_rng((self.seed, row, index)).standard_normal(self._depth)

    def leave(self, places, depths, previous, state, logits):
        flags = super().leave(places, depths, previous, state, logits)
        threshold = settledness(self.rule, torch.tensor(float(self.rule.threshold), dtype=torch.float64))
        if not (self.noise or self.bias) or threshold == math.inf:  # a gate's threshold of 1 never leaves
            return flags
        if self.rule.score is None:
            raise ValueError(
                f"exit_rule={self.rule.name!r} holds no score against its threshold that an error could be added to. "
                "Choose gate, confidence or a rule of differences."
            )
        z = self._z[places.tolist(), numpy.array(depths) - 1]
        error = torch.from_numpy(self.unit * (self.bias + self.noise * z)).to(places.device)
        return settledness(self.rule, self.rule.score.double()) + error >= threshold.to(places.device)


class Listening(Wrapped):
    """Asks a rule after every loop, and lets nothing leave."""

    def __init__(self, rule: ExitRule):
        self.heard: dict[int, list[torch.Tensor]] = {}  # by loop
        super().__init__(rule)

    def leave(self, places, depths, previous, state, logits):
        super().leave(places, depths, previous, state, logits)
        if self.rule.score is not None:
            for depth, score in zip(depths, settledness(self.rule, self.rule.score), strict=True):
                self.heard.setdefault(depth, []).append(score)
        return [False] * len(depths)

    @property
    def spread(self) -> float:
        """Standard deviation of the rule's `settledness` among tokens after the same loop, over all loops.

        Raises:
            ValueError: the rule has no score.
        """
        if not self.heard:
            raise ValueError(f"exit_rule={self.rule.name!r} holds no score against its threshold, so it has no spread.")
        scores = [torch.stack(scores) for scores in self.heard.values()]
        finite = [part[part.isfinite()].double() for part in scores]
        squares = sum(float(((part - part.mean()) ** 2).sum()) for part in finite if len(part))
        return math.sqrt(squares / max(1, sum(map(len, finite)) - len(finite)))
