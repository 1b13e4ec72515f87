"""Intervals of means from the items themselves."""

from collections.abc import Sequence

import numpy

__all__ = ["interval"]

_BLOCK = 1 << 22  # indices drawn at a time


def interval(
    values: Sequence[float],
    weights: Sequence[float] | None = None,
    *,
    seed: int = 0,
    draws: int = 2000,
    level: float = 0.95,
) -> dict[str, float | int]:
    """A mean with the interval of the percentile bootstrap (Efron, Tibshirani, An Introduction to the Bootstrap, 13).

    Args:
        values: one per independent item; for a ratio what stands above the line.
        weights: what stands below it; without them the mean.
        seed: the same for values to be compared: they then see the same draws.
        draws: samples of items with replacement.
        level: share of the samples' means that lie between `low` and `high`, the same share outside on both sides.

    Returns:
        `mean`, `low`, `high` and `count`, the number of items. Where all items are the same the interval is a point;
        a share of 0 or 1 in n items then excludes, with 95 % confidence, no more than what is 3 / n away.

    Raises:
        ValueError: no value.
    """
    if not len(values):
        raise ValueError("values=[]: the mean of nothing.")
    tops = numpy.asarray(values, dtype=float)
    bottoms = numpy.ones_like(tops) if weights is None else numpy.asarray(weights, dtype=float)
    rng = numpy.random.default_rng(seed)
    means = []
    left = draws
    while left:
        size = min(left, max(1, _BLOCK // len(tops)))
        chosen = rng.integers(len(tops), size=(size, len(tops)))
        means.append(tops[chosen].sum(1) / bottoms[chosen].sum(1))
        left -= size
    low, high = numpy.quantile(numpy.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return {"mean": float(tops.sum() / bottoms.sum()), "low": float(low), "high": float(high), "count": len(tops)}
