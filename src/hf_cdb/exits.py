"""When does a token leave the loop? Rules over all rows of a launch at once.

A rule sees the core state of every row after every loop and says which rows may leave. What it remembers between the
loops of one token lives in tensors over the rows' places, made new for every token. The definitions of the Huginn
criteria are those of the published code (arXiv 2502.05171), the gate's of arXiv 2510.25741.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .adapters import LoopAdapter
from .precision import at_least_float32

__all__ = ["RULES", "ExitRule", "Never", "Preloop", "Replay", "make_rule"]


class ExitRule(ABC):
    """Base of all rules, and of yours: `CDBConfig(exit_rule=YourRule(...))`.

    Attributes:
        name: what configs call the rule.
        needs_logits: whether `leave` reads logits; they cost a run of the coda in every loop.
        default_threshold: used where none is given.
    """

    name: str = "user"
    needs_logits: bool = False
    default_threshold: float | None = None

    def __init__(self, threshold: float | None = None):
        self.threshold = self.default_threshold if threshold is None else threshold
        self.check()

    def check(self) -> None:  # noqa: B027 (a rule without a threshold has nothing to check)
        """Raise a ValueError for a threshold that means nothing on this rule's scale."""

    def bind(self, adapter: LoopAdapter, places: int) -> None:
        """Called once before the first token: the model, and the number of places that rows can hold."""
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
            tokens: for every row (row of the call, index of the token in its output).
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


class Never(ExitRule):
    """Full depth for every token: exits are off."""

    name = "never"

    def leave(self, places, depths, previous, state, logits):
        return [False] * len(depths)


class Gate(ExitRule):
    """The model's own gate: leaves when the cumulative exit probability reaches the threshold.

    With hazards `l_t` and survival `S_t = prod_{j<=t} (1 - l_j)` the probability of leaving at t is `l_t S_(t-1)`.
    A threshold of 1 never leaves, also where the sum rounds up to 1.
    """

    name = "gate"
    default_threshold = 1.0

    def check(self):
        _check_probability(self)

    def begin(self, places, embeds, start, tokens):
        like = at_least_float32(start[:, 0])
        self.memory("survival", like, 1.0)[places] = 1.0
        self.memory("reached", like, 0.0)[places] = 0.0

    def leave(self, places, depths, previous, state, logits):
        if self.threshold >= 1.0:
            return [False] * len(depths)
        gate = self.adapter.gate_logits(state)
        survival, reached = self._memory["survival"], self._memory["reached"]
        alive = survival[places]
        total = reached[places] + gate.sigmoid() * alive
        reached[places], survival[places] = total, (-gate).sigmoid() * alive
        return total >= self.threshold


class LatentDiff(ExitRule):
    """Leaves when the state has settled: `||s_t - s_(t-1)|| / ||s_t|| < threshold`."""

    name = "latent-diff"
    default_threshold = 0.03

    def check(self):
        _check_positive(self)

    def leave(self, places, depths, previous, state, logits):
        previous, state = at_least_float32(previous), at_least_float32(state)
        return (state - previous).norm(dim=-1) / state.norm(dim=-1) < self.threshold


class Cosine(ExitRule):
    """Leaves when the direction of the state has settled: `1 - cos(s_t, s_(t-1)) < threshold`.

    A zero state has no direction: the comparison with it is not a number and never leaves.
    """

    name = "cosine"
    default_threshold = 1e-3

    def check(self):
        _check_positive(self)

    def leave(self, places, depths, previous, state, logits):
        previous, state = at_least_float32(previous), at_least_float32(state)
        cosine = (previous * state).sum(-1) / (previous.norm(dim=-1) * state.norm(dim=-1))
        return 1 - cosine < self.threshold


class EntropyDiff(ExitRule):
    """Leaves when the entropy of the output has settled: `|H_t - H_(t-1)| < threshold`, in nats, `H_0 = 100`."""

    name = "entropy-diff"
    needs_logits = True
    default_threshold = 1e-3

    def check(self):
        _check_positive(self)

    def fresh(self, memory):
        return 100.0

    def leave(self, places, depths, previous, state, logits):
        probabilities = logits().softmax(-1)
        entropy = -(probabilities * (probabilities + 1e-10).log()).sum(-1)
        before = self.memory("entropy", entropy, 100.0)
        difference = (entropy - before[places]).abs()
        before[places] = entropy
        return difference < self.threshold


class KLDivergence(ExitRule):
    """Leaves when the output has settled: `sum p_(t-1) (log p_(t-1) - log p_t) < threshold`, `p_0` uniform."""

    name = "kl"
    needs_logits = True
    default_threshold = 1e-3

    def check(self):
        _check_positive(self)

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
        difference = torch.where(before > 0, before * (before.log() - now.log()), 0.0).sum(-1)
        return difference < self.threshold


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
    default_threshold = 5

    def check(self):
        if isinstance(self.threshold, bool) or self.threshold != int(self.threshold) or self.threshold < 1:
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
    default_threshold = 0.9

    def check(self):
        _check_probability(self)

    def leave(self, places, depths, previous, state, logits):
        return logits().softmax(-1).amax(-1) >= self.threshold


class Preloop(ExitRule):
    """Fixes the depth before loop 1: the first depth whose cumulative probability reaches the threshold.

    Args:
        head: gives logits `[rows, depths]` for the prelude's output `[rows, width]`.
        threshold: in (0, 1]; 1 is the last depth.
    """

    name = "preloop"
    default_threshold = 0.5

    def __init__(self, head: nn.Module | None = None, threshold: float | None = None):
        if head is None:
            raise ValueError(
                "exit_rule='preloop' needs a head that predicts the depth, and this model has none. Pass "
                "exit_rule=hf_cdb.exits.Preloop(head), or use another rule."
            )
        self.head = head
        super().__init__(threshold)

    def check(self):
        _check_probability(self)

    def begin(self, places, embeds, start, tokens):
        probabilities = at_least_float32(self.head(embeds)).softmax(-1)
        reached = probabilities[:, :-1].cumsum(-1) >= self.threshold
        if self.threshold >= 1.0:
            reached = torch.zeros_like(reached)
        depth = nn.functional.pad(reached, (0, 1), value=True).int().argmax(-1) + 1
        self.memory("depth", depth, 0)[places] = depth

    def leave(self, places, depths, previous, state, logits):
        return torch.tensor(depths, device=places.device) >= self._memory["depth"][places]


class Replay(ExitRule):
    """Given depths.

    Args:
        depths: rows of depths, one row for each row of the call; entry k belongs to its k-th new token.
    """

    name = "replay"

    def __init__(self, depths: Sequence[Sequence[int]]):
        self.depths = [list(row) for row in depths]
        super().__init__()

    def bind(self, adapter, places):
        super().bind(adapter, places)
        self._wanted = [0] * places

    def begin(self, places, embeds, start, tokens):
        for place, (row, index) in zip(places.tolist(), tokens, strict=True):
            self._wanted[place] = self.depths[row][index]

    def leave(self, places, depths, previous, state, logits):
        return [depth >= self._wanted[place] for place, depth in zip(places.tolist(), depths, strict=True)]


RULES: dict[str, type[ExitRule]] = {
    rule.name: rule
    for rule in (
        Never,
        Gate,
        LatentDiff,
        Cosine,
        EntropyDiff,
        KLDivergence,
        MinPKLDivergence,
        ArgmaxStability,
        Confidence,
        Preloop,
        Replay,
    )
}


def make_rule(name: str, threshold: float | None, depths: Sequence[Sequence[int]] | None = None) -> ExitRule:
    """The rule called `name`.

    Raises:
        ValueError: a threshold off the rule's scale.
    """
    if name == "replay":
        return Replay(depths)
    if name == "preloop":
        return Preloop(threshold=threshold)
    return RULES[name](threshold)


def _check_probability(rule: ExitRule) -> None:
    if isinstance(rule.threshold, bool) or not 0 < rule.threshold <= 1:
        raise ValueError(
            f"exit_threshold={rule.threshold!r} is outside (0, 1]: {rule.name} compares it with a probability. Choose "
            "less to leave earlier."
        )


def _check_positive(rule: ExitRule) -> None:
    if isinstance(rule.threshold, bool) or not 0 < rule.threshold < float("inf"):
        raise ValueError(
            f"exit_threshold={rule.threshold!r} is no positive number: {rule.name} leaves when a difference falls "
            "below it. Choose more to leave earlier."
        )
