"""Cost tables from launches that were timed: robust least squares."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy

from ..trace import STAGES, TracedLaunch
from .costs import UNTOLD, CostTable, StageCost, coda_width
from .launches import new_tokens

__all__ = ["fit_costs"]

_SEGMENTS = 8  # of a fitted line, where the launches have as many different widths
_ROUNDS = 20  # of reweighting, until outliers have lost their weight
_SHARES = 10  # steps in which the share of the coda's layers is looked for


def fit_costs(
    launches: Iterable[TracedLaunch],
    full_depth: int,
    about: Mapping[str, Any] | None = None,
    coda_layers_share: float | None = None,
) -> CostTable:
    """The table that explains launches which were run: robust least squares.

    Args:
        launches: of runs, one run after the other, each in its order.
        full_depth: R.
        about: where they come from.
        coda_layers_share: see `CostTable`; None is the one that explains the launches best.

    Raises:
        ValueError: a stage did not run at two different widths.
    """
    launches = list(launches)
    ends = new_tokens(launches)
    codas = [(launch, end) for launch, end in zip(launches, ends, strict=True) if launch.stage == "coda"]
    if coda_layers_share is None:
        coda_layers_share = _explaining_share(codas)
    stages, untold = {}, []
    for stage in STAGES:
        own = [(launch, float(launch.tokens)) for launch in launches if launch.stage == stage]
        if stage == "coda":
            own = _with_width(codas, coda_layers_share)
        try:
            stages[stage], told = _fit_stage(own)
        except ValueError as error:
            raise ValueError(f"{stage}: {error}") from None
        untold += [] if told else [stage]
    about = dict(about or {}) | ({UNTOLD: untold} if untold else {})
    return CostTable(full_depth, **stages, coda_layers_share=coda_layers_share, about=about)


def _fit_stage(launches: Sequence[tuple[TracedLaunch, float]]) -> tuple[StageCost, bool]:
    """A stage's costs from launches that were timed, each with its width: the line between their widths, or between
    quantiles of them where they are many, and the slope of the context. Least squares of the relative residuals,
    outliers counting little.

    Returns:
        The costs, and whether the launches tell what the context costs: where it rises with the width alone, its slope
        cannot be told from theirs, and is 0.

    Raises:
        ValueError: fewer than two different widths.
    """
    different = len({width for _, width in launches})
    if different < 2:
        raise ValueError(f"launches of {different} different widths: two at least give a line. Time more, of others.")
    x = numpy.array([width for _, width in launches])
    context, y = (numpy.array([getattr(one, name) for one, _ in launches], float) for name in ("context", "duration"))
    knots = numpy.unique(x)
    if len(knots) > _SEGMENTS + 1:
        knots = numpy.unique(numpy.quantile(x, numpy.linspace(0, 1, _SEGMENTS + 1), method="nearest"))
    # Column k is 1 at knot k, 0 at the others, and linear between: its factor is the seconds at the knot.
    columns = numpy.stack([numpy.interp(x, knots, row) for row in numpy.eye(len(knots))], axis=1)
    told = _tell_apart(context, columns, y)
    factors = _robust(numpy.column_stack([columns, context]), y) if told else numpy.array([-1.0])
    if factors[-1] < 0:
        factors = numpy.append(_robust(columns, y), 0.0)
    # What noise puts below a narrower launch, or below nothing, costs as much as that one.
    values = numpy.maximum.accumulate(numpy.maximum(factors[:-1], y.min() / 2))
    widths = tuple(int(knot) if knot.is_integer() else knot for knot in knots.tolist())
    return StageCost(widths, tuple(values.tolist()), float(factors[-1])), told


def _tell_apart(context: numpy.ndarray, columns: numpy.ndarray, y: numpy.ndarray) -> bool:
    """Whether more than a hundredth of the context is its own, and no combination of the widths' columns. A slope that
    rests on less is one of noise."""
    own, others = context / y, columns / y[:, None]
    factors, *_ = numpy.linalg.lstsq(others, own, rcond=None)
    return bool(numpy.linalg.norm(own - others @ factors) > 0.01 * numpy.linalg.norm(own))


def _with_width(codas: Sequence[tuple[TracedLaunch, int]], share: float) -> list[tuple[TracedLaunch, float]]:
    """Launches of the coda with their widths; those left out that run nothing: pieces of prompts before a bare head."""
    found = [(launch, coda_width(launch.tokens, ending, share)) for launch, ending in codas]
    return [(launch, width) for launch, width in found if width >= 1]


def _explaining_share(codas: Sequence[tuple[TracedLaunch, int]]) -> float:
    """The `coda_layers_share` with the least residuals; 0 where no prompt ran, so that none can be told."""
    if all(launch.tokens == ending for launch, ending in codas):
        return 0.0

    def residual(share: float) -> float:
        try:
            own = _with_width(codas, share)
            cost, _ = _fit_stage(own)
        except ValueError:
            return math.inf  # one width
        return statistics.fmean(min(1.0, abs(one.duration / cost(width, one.context) - 1)) for one, width in own)

    return min((step / _SHARES for step in range(_SHARES + 1)), key=residual)


def _robust(columns: numpy.ndarray, y: numpy.ndarray) -> numpy.ndarray:
    """Factors of the columns that give `y`: least squares reweighted by what they give (relative residuals) and by how
    far off a value is (Huber 1964)."""
    scale = numpy.maximum(numpy.abs(columns).max(axis=0), 1e-300)
    weights = numpy.ones_like(y)
    for _ in range(_ROUNDS):
        factors, *_ = numpy.linalg.lstsq(columns / scale * weights[:, None], y * weights, rcond=None)
        given = columns / scale @ factors
        # By what is given and not by what was seen: that would favour launches that noise made short.
        given = numpy.maximum(given, y.min() / 2)
        residuals = numpy.abs(y / given - 1)
        # 1.345 standard deviations, which is 1.4826 times the median residual for normal noise.
        limit = max(1.345 * 1.4826 * float(numpy.median(residuals)), 1e-9)
        weights = numpy.sqrt(numpy.minimum(1.0, limit / numpy.maximum(residuals, 1e-12))) / given
    return factors / scale
