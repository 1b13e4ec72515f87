"""Rules that need no training: the state, or the output, has settled."""

import torch

from ..precision import at_least_float32
from .rule import ExitRule, check_positive, check_probability

__all__ = [
    "ArgmaxStability",
    "Confidence",
    "Cosine",
    "EntropyDiff",
    "KLDivergence",
    "LatentDiff",
    "MinPKLDivergence",
]


class LatentDiff(ExitRule):
    """Leaves when the state has settled: `||s_t - s_(t-1)|| / ||s_t|| < threshold`."""

    name = "latent-diff"
    default_threshold = 0.03

    def check(self):
        check_positive(self)

    def leave(self, places, depths, previous, state, logits):
        previous, state = at_least_float32(previous), at_least_float32(state)
        self.score = (state - previous).norm(dim=-1) / state.norm(dim=-1)
        return self.score < self.threshold


class Cosine(ExitRule):
    """Leaves when the direction of the state has settled: `1 - cos(s_t, s_(t-1)) < threshold`.

    A zero state has no direction: the comparison with it is not a number and never leaves.
    """

    name = "cosine"
    default_threshold = 1e-3

    def check(self):
        check_positive(self)

    def leave(self, places, depths, previous, state, logits):
        previous, state = at_least_float32(previous), at_least_float32(state)
        cosine = (previous * state).sum(-1) / (previous.norm(dim=-1) * state.norm(dim=-1))
        self.score = 1 - cosine
        return self.score < self.threshold


class EntropyDiff(ExitRule):
    """Leaves when the entropy of the output has settled: `|H_t - H_(t-1)| < threshold`, in nats, `H_0 = 100`."""

    name = "entropy-diff"
    needs_logits = True
    reads_previous = False
    default_threshold = 1e-3

    def check(self):
        check_positive(self)

    def fresh(self, memory):
        return 100.0

    def leave(self, places, depths, previous, state, logits):
        probabilities = logits().softmax(-1)
        entropy = -(probabilities * (probabilities + 1e-10).log()).sum(-1)
        before = self.memory("entropy", entropy, 100.0)
        self.score = (entropy - before[places]).abs()
        before[places] = entropy
        return self.score < self.threshold


class KLDivergence(ExitRule):
    """Leaves when the output has settled: `sum p_(t-1) (log p_(t-1) - log p_t) < threshold`, `p_0` uniform."""

    name = "kl"
    needs_logits = True
    reads_previous = False
    default_threshold = 1e-3

    def check(self):
        check_positive(self)

    def fresh(self, memory):
        return 1.0 / memory.shape[-1]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(-1)

    def leave(self, places, depths, previous, state, logits):
        now = self.probabilities(logits())
        memory = self.memory("probabilities", now, 1.0 / now.shape[-1])
        before = memory[places]
        memory[places] = now
        # where a probability is zero the limit of p log p is
        self.score = torch.where(before > 0, before * (before.log() - now.log()), 0.0).sum(-1)
        return self.score < self.threshold


class MinPKLDivergence(KLDivergence):
    """As `kl`, after every probability below a tenth of the largest is set to 1 / vocab and all are renormalised."""

    name = "minp-kl"
    default_threshold = 1e-5

    def probabilities(self, logits):
        p = super().probabilities(logits)
        p = torch.where(p < 0.1 * p.amax(-1, keepdim=True), 1.0 / p.shape[-1], p)
        return p / p.sum(-1, keepdim=True)


class ArgmaxStability(ExitRule):
    """Leaves after `threshold` consecutive loops that did not change the most probable token.

    The first loop is compared with nothing, so a threshold of 5 needs at least loop 6.
    """

    name = "argmax-stability"
    needs_logits = True
    reads_previous = False
    default_threshold = 5
    higher_is_deeper = True

    def check(self):
        if isinstance(self.threshold, bool) or not self.threshold >= 1 or self.threshold % 1 != 0:
            raise ValueError(
                f"exit_threshold={self.threshold!r}: {self.name} counts unchanged loops. Choose an integer of at "
                "least 1."
            )

    def begin(self, places, embeds, start, tokens):
        if self._memory:
            self._memory["best"][places] = -1
            self._memory["unchanged"][places] = 0

    def leave(self, places, depths, previous, state, logits):
        now = logits().argmax(-1)
        best, unchanged = self.memory("best", now, -1), self.memory("unchanged", now, 0)
        count = torch.where(now == best[places], unchanged[places] + 1, 0)
        best[places], unchanged[places] = now, count
        return count >= self.threshold


class Confidence(ExitRule):
    """Leaves when the most probable token has at least probability `threshold`."""

    name = "confidence"
    needs_logits = True
    reads_previous = False
    default_threshold = 0.9
    higher_is_deeper = True

    def check(self):
        check_probability(self)

    def leave(self, places, depths, previous, state, logits):
        self.score = logits().softmax(-1).amax(-1)
        return self.score >= self.threshold
