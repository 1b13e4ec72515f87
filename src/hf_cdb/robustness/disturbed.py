"""An exit rule whose signal is read wrongly."""

import math

import numpy
import torch

from ..exits import ExitRule, Listening, Wrapped
from ..precision import at_least_float32

__all__ = ["Disturbed", "Settling", "settledness", "threshold_at"]


def settledness(rule: ExitRule, score: torch.Tensor) -> torch.Tensor:
    """A rule's score on a scale without ends that grows as the token settles.

    The log odds of probabilities, which leave when high (gate, confidence); less the log of differences, which leave
    when low. A difference that rounding has made negative counts as 0.
    """
    score = at_least_float32(score)
    return score.logit() if rule.higher_is_deeper else -score.clamp(min=0).log()


def threshold_at(rule: ExitRule, settled: float) -> float:
    """The threshold that lies at this `settledness` on the rule's own scale."""
    return 1 / (1 + math.exp(-settled)) if rule.higher_is_deeper else math.exp(-settled)


class Disturbed(Wrapped):
    """Another rule, whose score is held against the threshold after an error `unit * (bias + noise * z)`.

    z is standard normal: a function of the seed, the row, the index of the token and the loop, so that a row meets the
    same errors whatever runs beside it. Errors are on the scale of `settledness`; a positive bias lets tokens leave
    earlier. What the rule remembers is not disturbed: the reading is wrong, not the state.

    Args:
        rule: one with a score: not argmax-stability, preloop, never or replay.
        noise, bias: in units.
        unit: of errors, such as `Settling.spread`.
        seed: of the errors.

    Raises:
        ValueError: noise or unit below 0, no finite number, or a threshold that is off the scale, as 1 is, at which a
            gate lets nothing leave.
    """

    def __init__(self, rule: ExitRule, noise: float = 0.0, bias: float = 0.0, *, unit: float = 1.0, seed: int = 0):
        for name, value in (("noise", noise), ("bias", bias), ("unit", unit)):
            if not math.isfinite(value) or (value < 0 and name != "bias"):
                raise ValueError(f"{name}={value}: choose a finite number{'' if name == 'bias' else ' of at least 0'}.")
        self.noise, self.bias, self.unit, self.seed = noise, bias, unit, seed
        threshold = math.nan if rule.threshold is None else float(rule.threshold)
        self._bar = settledness(rule, torch.tensor(threshold, dtype=torch.float64)).item()
        if not math.isfinite(self._bar):
            raise ValueError(
                f"exit_rule={rule.name!r} with threshold {rule.threshold} cannot be disturbed: errors are on a scale "
                "for probabilities below 1 and for differences. Choose gate, confidence or a rule of differences."
            )
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
        if not self.noise and not self.bias:
            return flags
        if self.rule.score is None:
            raise ValueError(
                f"exit_rule={self.rule.name!r} holds no score against its threshold that an error could be added to. "
                "Choose gate, confidence or a rule of differences."
            )
        z = self._z[places.tolist(), numpy.array(depths) - 1]
        error = torch.from_numpy(self.unit * (self.bias + self.noise * z)).to(places.device)
        return settledness(self.rule, self.rule.score.double()) + error >= self._bar


class Settling(Listening):
    """Listens to how settled tokens are."""

    @property
    def heard(self) -> numpy.ndarray:
        """`settledness` of every token after every loop that the rule was asked after, `[tokens, loops]`."""
        scores = torch.tensor(list(self.scores.values()), dtype=torch.float64)
        return settledness(self.rule, scores).numpy()

    @property
    def spread(self) -> float:
        """Standard deviation of `settledness` among tokens after the same loop, over all loops."""
        heard = numpy.where(numpy.isfinite(self.heard), self.heard, numpy.nan)
        return float(numpy.sqrt(numpy.nanmean((heard - numpy.nanmean(heard, axis=0)) ** 2)))
