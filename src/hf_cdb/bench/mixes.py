"""Depth mixes: which share of the tokens leaves after which loop."""

import difflib
import math
from collections.abc import Sequence

import numpy

__all__ = ["MIXES", "check_mix", "default_mix", "depth_shares", "draw_depths"]

# Of arXiv 2608.09444, by quarters of the full depth: 1 is R / 4 rounded up, 4 is R.
QUARTERS = {
    "full": {4: 1.0},
    "shallow-heavy": {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1},
    "deep-heavy": {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4},
}
MIXES = (*QUARTERS, "shallow", "bimodal", "clustered", "poisson-lognormal")
SIGMA = 0.5  # of the lognormal rate, as in arXiv 2502.05171


def default_mix(full_depth: int) -> str:
    """The mix that is taken where none is asked for: many loops get the spread that Huginn is trained with."""
    return "shallow-heavy" if full_depth <= 8 else "poisson-lognormal:6"


def check_mix(mix: str) -> None:
    """Refuse what is a mix for no model, whose full depth is not known yet.

    Raises:
        ValueError: as `depth_shares`, but for depths beyond the last loop.
    """
    name, _, rest = mix.partition(":")
    if name == "poisson-lognormal":
        _mean_depth(mix, rest)
    elif mix not in MIXES:
        _free(mix)


def depth_shares(mix: str, full_depth: int) -> dict[int, float]:
    """Shares by depth; they add up to 1.

    Args:
        mix: one of
            * `full`, `shallow` (all leave after loop 1), `bimodal` (half after loop 1, half at full depth),
              `clustered` (80 % after loop 1, the others at full depth), `shallow-heavy` (.4, .3, .2, .1 of the tokens
              after each quarter of the loops), `deep-heavy` (its mirror);
            * `poisson-lognormal:MEAN`: 1 + Poisson(rate), the rate lognormal with sigma 0.5, as Huginn's number of
              loops is drawn in training (arXiv 2502.05171), all beyond full depth at full depth;
            * depths and shares, such as `1:.4,2:.3,4:.3`.
        full_depth: R.

    Raises:
        ValueError: no such mix, a depth out of range, a negative share, or shares that do not add up to 1.
    """
    name, _, rest = mix.partition(":")
    if name == "poisson-lognormal":
        return _poisson_lognormal(mix, rest, full_depth)
    if mix in QUARTERS:
        shares: dict[int, float] = {}
        for quarter, share in QUARTERS[mix].items():
            depth = math.ceil(quarter * full_depth / 4)
            shares[depth] = shares.get(depth, 0.0) + share
        return shares
    named = {
        "shallow": {1: 1.0},
        "bimodal": {1: 0.5, full_depth: 0.5},
        "clustered": {1: 0.8, full_depth: 0.2},
    }
    if mix in named:
        return {1: 1.0} if full_depth == 1 else named[mix]
    return _free(mix, full_depth)


def _free(mix: str, full_depth: int | None = None) -> dict[int, float]:
    try:
        pairs = [(int(depth), float(share)) for depth, share in (pair.split(":") for pair in mix.split(","))]
    except ValueError:
        near = difflib.get_close_matches(mix, MIXES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"mix={mix!r} is no mix of depths.{hint} Name one of {', '.join(MIXES)}, or give depths and shares, such "
            "as 1:.4,2:.3,4:.3."
        ) from None
    shares = dict(pairs)
    if len(shares) < len(pairs):
        twice = next(depth for depth in shares if sum(depth == other for other, _ in pairs) > 1)
        raise ValueError(f"mix={mix!r} names depth {twice} twice. Give each depth one share.")
    wrong = [depth for depth in shares if depth < 1 or (full_depth is not None and depth > full_depth)]
    if wrong:
        loops = "from 1 on" if full_depth is None else f"1 to {full_depth}"
        raise ValueError(f"mix={mix!r} names depth {wrong[0]}, but the model has loops {loops}.")
    negative = [depth for depth, share in shares.items() if not share >= 0]
    if negative:
        depth = negative[0]
        raise ValueError(f"mix={mix!r}: the share of depth {depth} is {shares[depth]:g}. Give shares of at least 0.")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise ValueError(f"mix={mix!r}: the shares add up to {sum(shares.values()):g}. Give shares that add up to 1.")
    return shares


def _mean_depth(mix: str, text: str, full_depth: int | None = None) -> float:
    try:
        mean = float(text or 6)
    except ValueError:
        mean = 0.0
    if not 1 < mean < (math.inf if full_depth is None else full_depth):
        most = "full depth" if full_depth is None else full_depth
        raise ValueError(f"mix={mix!r}: give a mean depth between 1 and {most}, as in poisson-lognormal:6.")
    return mean


def _poisson_lognormal(mix: str, mean_text: str, full_depth: int) -> dict[int, float]:
    mean = _mean_depth(mix, mean_text, full_depth)
    # The expectation over the rate by Gauss-Hermite quadrature; a lognormal of mean m has log-mean log m - sigma^2 / 2.
    nodes, weights = numpy.polynomial.hermite_e.hermegauss(48)
    rates = numpy.exp(math.log(mean - 1) - SIGMA**2 / 2 + SIGMA * nodes)
    weights = weights / weights.sum()
    shares = {}
    for depth in range(1, full_depth):
        density = numpy.exp((depth - 1) * numpy.log(rates) - rates - math.lgamma(depth))
        shares[depth] = float(weights @ density)
    return {**shares, full_depth: 1.0 - sum(shares.values())}


def draw_depths(
    shares: dict[int, float], new_tokens: Sequence[int], full_depth: int, rng: numpy.random.Generator
) -> list[list[int]]:
    """For every request a depth per new token, independent draws; the first is R, for the prompt gives it."""
    depths, probabilities = list(shares), numpy.array(list(shares.values()))
    probabilities = probabilities / probabilities.sum()
    drawn = [rng.choice(depths, size=count, p=probabilities).tolist() for count in new_tokens]
    return [[full_depth, *row[1:]] for row in drawn]
