"""Rules that were trained: the model's own gate, and heads for it (see `hf_cdb.exit_heads`)."""

import torch
from torch import nn

from ..adapters import LoopAdapter
from ..exit_heads import ExitHead, HazardHead
from ..precision import at_least_float32
from ..transfer import to_device
from .rule import ExitRule, check_probability

__all__ = ["Gate", "Preloop"]


class Gate(ExitRule):
    """Leaves when the cumulative exit probability reaches the threshold.

    With hazards `l_t` and survival `S_t = prod_{j<=t} (1 - l_j)` the probability of leaving at t is `l_t S_(t-1)`.
    A threshold of 1 never leaves, also where the sum rounds up to 1.

    Args:
        threshold: in (0, 1]; default 1 for the model's own gate, 0.5 for a head.
        head: gives the hazards' logits in place of the model's own gate; as the rule "gate" a model's trained head is
            found without it.
    """

    name = "gate"
    reads_previous = False
    default_threshold = 1.0
    higher_is_deeper = True
    default_head_threshold = 0.5

    def __init__(self, threshold: float | None = None, head: HazardHead | None = None):
        self.head = head
        super().__init__(self.default_head_threshold if threshold is None and head is not None else threshold)

    def check(self):
        check_probability(self)

    def configure(self, adapter, depth, lookahead):
        super().configure(adapter, depth, lookahead)
        if self.head is None and not adapter.has_gate:
            raise ValueError(
                f"exit_rule=Gate(): {type(adapter.model).__name__} has no exit gate of its own. Pass Gate a head, or "
                "exit_rule='gate', which finds a trained one."
            )
        _check_head(self, adapter, ("same-step", "lookahead") if lookahead else ("same-step",))

    def begin(self, places, embeds, start, tokens):
        like = at_least_float32(start[:, 0])
        self.memory("survival", like, 1.0)[places] = 1.0
        self.memory("reached", like, 0.0)[places] = 0.0

    def leave(self, places, depths, previous, state, logits):
        if self.threshold >= 1.0:
            return [False] * len(depths)
        gate = self.adapter.gate_logits(state) if self.head is None else self.head(state, depths)
        survival, reached = self._memory["survival"], self._memory["reached"]
        alive = survival[places]
        total = reached[places] + gate.sigmoid() * alive
        reached[places], survival[places] = total, (-gate).sigmoid() * alive
        self.score = total
        return total >= self.threshold


class Preloop(ExitRule):
    """Fixes the depth before loop 1: the first depth whose cumulative probability reaches the threshold.

    Lookahead does not shift it, but leaves no depth below 2.

    Args:
        head: gives logits `[rows, depths]` for the prelude's output `[rows, width]`.
        threshold: in (0, 1]; 1 is the last depth.
    """

    name = "preloop"
    reads_state = reads_previous = False
    default_threshold = 0.5
    higher_is_deeper = True

    def __init__(self, head: nn.Module | None = None, threshold: float | None = None):
        if head is None:
            raise ValueError(
                "exit_rule='preloop' needs a head that predicts the depth, and this model has none. Train one with "
                "`hf-cdb train gate MODEL --kind preloop`, pass exit_rule=hf_cdb.exits.Preloop(head), or use another "
                "rule."
            )
        self.head = head
        super().__init__(threshold)

    def check(self):
        check_probability(self)

    def configure(self, adapter, depth, lookahead):
        super().configure(adapter, depth, lookahead)
        _check_head(self, adapter, ("preloop",))
        if isinstance(self.head, ExitHead) and depth > self.head.depths:
            raise ValueError(
                f"max_depth={depth} exceeds the {self.head.depths} depths that the preloop head chooses from. Choose "
                f"at most {self.head.depths}, or another exit rule."
            )

    def begin(self, places, embeds, start, tokens):
        probabilities = at_least_float32(self.head(embeds)).softmax(-1)
        reached = probabilities[:, :-1].cumsum(-1) >= self.threshold
        if self.threshold >= 1.0:
            reached = torch.zeros_like(reached)
        depth = nn.functional.pad(reached, (0, 1), value=True).int().argmax(-1) + 1
        self.memory("depth", depth, 0)[places] = depth

    def leave(self, places, depths, previous, state, logits):
        reached = to_device(torch.tensor(depths), places.device) + self.lookahead
        return reached >= self._memory["depth"][places]


def _check_head(rule: Gate | Preloop, adapter: LoopAdapter, kinds: tuple[str, ...]) -> None:
    """Refuse a trained head of another horizon or for another model; what a user wrote is taken as it is."""
    if not isinstance(rule.head, ExitHead):
        return
    rule.head.check(adapter)
    if rule.head.kind not in kinds:
        raise ValueError(
            f"exit_rule={rule.name!r} with lookahead={rule.lookahead} reads a head of kind {' or '.join(kinds)}, but "
            f"this one is {rule.head.kind}. Train the other kind, or set the rule and the lookahead that it is for."
        )
