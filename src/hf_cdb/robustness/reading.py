"""What a setting makes of the material, token by token, held against full depth."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from ..config import CDBConfig
from ..training.forced import FixedDepth, force
from ..training.measure import Score
from .material import Material

__all__ = ["Reading", "fixed_depths", "mixed", "read"]


@dataclass(frozen=True)
class Reading:
    """Every token of the continuations but the first ones, which the prompts give at full depth: arrays `[tokens]`.

    Attributes:
        owner: the independent item that the token belongs to.
        position: in its continuation, from 1.
        token_class: see `material.token_class`.
        depth: loops it was predicted after.
        lost: whether the most probable token is not that of full depth.
        extra_bits: `log2 p_full - log2 p` of the given token.
        score_lost: `[items]`, by prompt, whether the continuation is what greedy generation gives at full depth, less
            whether it is here: what exact match loses. Meaningless for text.
    """

    owner: numpy.ndarray
    position: numpy.ndarray
    token_class: numpy.ndarray
    depth: numpy.ndarray
    lost: numpy.ndarray
    extra_bits: numpy.ndarray
    score_lost: numpy.ndarray

    @property
    def mean_depth(self) -> float:
        return float(self.depth.mean())

    def disagreement(self, chosen: numpy.ndarray | None = None) -> Score:
        """Share of tokens, of the chosen ones, that full depth would predict otherwise; items are independent."""
        return self._ratio(self.lost, chosen)

    def extra(self, chosen: numpy.ndarray | None = None) -> Score:
        """Bits per token above full depth."""
        return self._ratio(self.extra_bits, chosen)

    def score_loss(self) -> Score:
        """Exact match lost, as a share of the prompts."""
        return Score.of_ratio(self.score_lost.tolist(), [1.0] * len(self.score_lost))

    def losses(self) -> numpy.ndarray:
        """Disagreement of every item, `[items]`, in [0, 1]."""
        items, place = numpy.unique(self.owner, return_inverse=True)
        return numpy.bincount(place, self.lost, len(items)) / numpy.bincount(place, minlength=len(items))

    def _ratio(self, values: numpy.ndarray, chosen: numpy.ndarray | None) -> Score:
        kept = slice(None) if chosen is None else chosen
        items, place = numpy.unique(self.owner[kept], return_inverse=True)
        sums = numpy.bincount(place, values[kept], len(items))
        return Score.of_ratio(sums.tolist(), numpy.bincount(place, minlength=len(items)).tolist())


def read(model: Any, material: Material, cdb: dict[str, Any]) -> Reading:
    """Run a setting over the material; settings that are not named are the defaults, not those saved with the model."""
    rows = force(model, material.prompts, material.continuations, CDBConfig(**cdb))
    columns: list[tuple] = []
    score_lost = []
    for row, full, tokens, owner, classes in zip(
        rows, material.full, material.continuations, material.owners, material.classes, strict=True
    ):
        score_lost.append(int(full.best == tokens) - int(row.best == tokens))
        for place in range(1, len(tokens)):
            lost = row.best[place] != full.best[place]
            extra = row.bits[place] - full.bits[place]
            columns.append((owner, place, classes[place], row.depths[place], lost, extra))
    arrays = [numpy.array(column) for column in zip(*columns, strict=True)]
    return Reading(*arrays[:4], arrays[4].astype(float), arrays[5], numpy.array(score_lost))


def fixed_depths(model: Any, material: Material, full_depth: int) -> list[Reading]:
    """The material with all tokens at depth 1, 2, ..., `full_depth`."""
    return [read(model, material, {"exit_rule": FixedDepth(depth)}) for depth in range(1, full_depth + 1)]


def mixed(curve: Sequence[Reading], mean_depth: float, value: Callable[[Reading], float]) -> float:
    """What fixed depths would give, mixed by a coin to this mean depth: exits that know nothing of the token."""
    below = min(int(mean_depth), len(curve) - 1)
    share = mean_depth - below
    return (1 - share) * value(curve[below - 1]) + share * value(curve[below])
