"""What an exit head is worth: depths, agreement and loss per threshold, beside fixed depths of the same mean."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..exit_heads import ExitHead
from ..exits import ExitRule, Gate, Preloop
from .gate_states import LoopCache

__all__ = ["Report", "ReportRow", "report"]

_NOTE = (
    "Teacher forced: every token sees the true past with the keys of full depth, which a run that leaves early does "
    "not have. Means are weighted as in training; bits per byte count running text only. *Mix*: fixed depths mixed to "
    "the same mean depth, the measure that a head has to beat."
)


@dataclass
class ReportRow:
    """One threshold or one fixed depth.

    Attributes:
        threshold: cumulative exit probability; None for a fixed depth.
        mean_depth: loops per token.
        depths: share of the tokens that leave at depth 1, 2, ..., R.
        agreement: share of the tokens whose most probable successor is that of full depth.
        loss: nats per token.
        bits_per_byte: None where no bytes are known.
        mix_agreement, mix_loss, mix_bits_per_byte: the same of the two nearest fixed depths, mixed to this mean depth.
    """

    threshold: float | None
    mean_depth: float
    depths: list[float]
    agreement: float
    loss: float
    bits_per_byte: float | None
    mix_agreement: float | None = None
    mix_loss: float | None = None
    mix_bits_per_byte: float | None = None


@dataclass
class Report:
    """Rows for fixed depths 1 to R and for the thresholds, and what the head is."""

    head: dict[str, Any]
    tokens: int
    fixed: list[ReportRow]
    thresholds: list[ReportRow]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def to_markdown(self) -> str:
        """A table to read, and what it assumes."""
        loops = len(self.fixed)
        bytes_known = self.fixed[0].bits_per_byte is not None
        heads = ["depth or threshold", "mean depth", f"exits 1-{loops}", "agreement", "mix", "loss", "mix"]
        lines = []
        for row in (*self.fixed, *self.thresholds):
            name = f"depth {row.mean_depth:.0f}" if row.threshold is None else f"{row.threshold:g}"
            shares = "" if row.threshold is None else " ".join(f"{share:.2f}".lstrip("0") for share in row.depths)
            cells = [name, f"{row.mean_depth:.2f}", shares, f"{row.agreement:.3f}", _cell(row.mix_agreement, 3)]
            cells += [f"{row.loss:.4f}", _cell(row.mix_loss, 4)]
            if bytes_known:
                cells += [f"{row.bits_per_byte:.4f}", _cell(row.mix_bits_per_byte, 4)]
            lines.append(cells)
        heads += ["bits per byte", "mix"] if bytes_known else []
        table = [heads, ["---"] * len(heads), *lines]
        rendered = "\n".join(f"| {' | '.join(cells)} |" for cells in table)
        title = f"# Exit head `{self.head['kind']}`, target `{self.head['target'].get('name')}`"
        training = ", ".join(f"{name} {_plain(value)}" for name, value in self.head["training"].items())
        return f"{title}\n\n{training}\n\n{rendered}\n\n{self.tokens} held-out tokens. {_NOTE}\n"


@torch.no_grad()
def report(head: ExitHead, cache: LoopCache, thresholds: Sequence[float]) -> Report:
    """Judge a head on cached states with the engine's own rules.

    Args:
        head: trained for the cache's model and kind.
        cache: of held-out rows.
        thresholds: cumulative exit probabilities, in (0, 1].
    """
    loops = cache.adapter.full_depth
    head = head.to(cache.adapter.device)
    fixed = [_row(cache, torch.full((len(cache),), depth), None) for depth in range(1, loops + 1)]
    rows = [_row(cache, exit_depths(head, cache, threshold), threshold) for threshold in thresholds]
    for row in rows:
        _mix(row, fixed)
    return Report(head.metadata(), len(cache), fixed, rows)


@torch.no_grad()
def exit_depths(head: ExitHead, cache: LoopCache, threshold: float) -> torch.Tensor:
    """Depth at which the engine's rule lets every token go, int64 `[tokens]`."""
    lookahead = int(head.kind == "lookahead")
    depths = []
    for tokens in torch.arange(len(cache)).split(4096):
        rule: ExitRule = Preloop(head, threshold) if head.kind == "preloop" else Gate(threshold, head)
        rule.configure(cache.adapter, cache.adapter.full_depth, lookahead)
        rule.bind(cache.adapter, len(tokens))
        depths.append(_ask(rule, cache, tokens).cpu())
    return torch.cat(depths)


def _ask(rule: ExitRule, cache: LoopCache, tokens: torch.Tensor) -> torch.Tensor:
    """Run one rule over the loops of these tokens, all at the same depth."""
    loops, device = cache.adapter.full_depth, cache.adapter.device
    places = torch.arange(len(tokens), device=device)
    first = cache.states(tokens * cache.inputs)
    rule.begin(places, first, first, [(0, int(token)) for token in tokens])
    depth = torch.full((len(tokens),), loops, device=device)
    for loop in range(1, loops - rule.lookahead):
        # A rule that decides before the loop looks at no state after it.
        state = first if rule.name == "preloop" else cache.states(tokens * cache.inputs + loop - 1)
        leaves = torch.as_tensor(rule.leave(places, [loop] * len(tokens), state, state, None), device=device)
        depth = torch.where(leaves & (depth == loops), loop + rule.lookahead, depth)
    return depth


def _row(cache: LoopCache, depths: torch.Tensor, threshold: float | None) -> ReportRow:
    """Means over the tokens, each at its depth."""
    shares = cache.weights.double() / cache.weights.double().sum()
    at = depths[:, None] - 1
    loss = cache.scores.loss.double().gather(1, at)[:, 0]
    text = cache.sizes >= 0
    size = int(cache.sizes[text].sum())
    return ReportRow(
        threshold,
        (shares * depths).sum().item(),
        [shares[depths == depth].sum().item() for depth in range(1, cache.adapter.full_depth + 1)],
        (shares * cache.scores.agrees.gather(1, at)[:, 0]).sum().item(),
        (shares * loss).sum().item(),
        loss[text].sum().item() / math.log(2) / size if size else None,
    )


def _mix(row: ReportRow, fixed: Sequence[ReportRow]) -> None:
    """Fill in the fixed depths below and above the mean depth, mixed to it."""
    below = min(max(math.floor(row.mean_depth), 1), len(fixed))
    low, high = fixed[below - 1], fixed[min(below, len(fixed) - 1)]
    share = min(max(row.mean_depth - below, 0.0), 1.0)
    for name in ("agreement", "loss", "bits_per_byte"):
        if getattr(low, name) is not None:
            setattr(row, f"mix_{name}", (1 - share) * getattr(low, name) + share * getattr(high, name))


def _cell(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
