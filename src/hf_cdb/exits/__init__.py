"""When does a token leave the loop? Rules over all rows of a launch at once.

A rule sees the core state of every row after every loop and says which rows may leave. What it remembers between the
loops of one token lives in tensors over the rows' places, made new for every token. The definitions of the Huginn
criteria are those of the published code (arXiv 2502.05171), the gate's of arXiv 2510.25741.
"""

from collections.abc import Sequence

from ..exit_heads import ExitHead
from .criteria import ArgmaxStability, Confidence, Cosine, EntropyDiff, KLDivergence, LatentDiff, MinPKLDivergence
from .fixed import Never, Replay
from .gates import Gate, Preloop
from .listening import Listening
from .rule import ExitRule
from .wrapped import Wrapped

__all__ = [
    "RULES",
    "ArgmaxStability",
    "ExitRule",
    "Gate",
    "Listening",
    "Never",
    "Preloop",
    "Replay",
    "Wrapped",
    "make_rule",
]

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


def make_rule(
    name: str,
    threshold: float | None,
    depths: Sequence[Sequence[int]] | None = None,
    head: ExitHead | None = None,
) -> ExitRule:
    """The rule called `name`.

    Args:
        name: one of `RULES`.
        threshold: on the rule's scale, None for its default.
        depths: for "replay".
        head: for "preloop", and for "gate" in place of the model's own gate.

    Raises:
        ValueError: a threshold off the rule's scale, or "preloop" without a head.
    """
    if name == "replay":
        return Replay(depths)
    if name == "gate":
        return Gate(threshold, head)
    if name == "preloop":
        return Preloop(head, threshold)
    return RULES[name](threshold)
