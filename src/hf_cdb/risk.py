"""Is a mean loss below a limit? Answers that hold for every distribution, from a finite sample.

Losses are those of independent examples of one kind: drawn alike, and like what the answer is for. Two p-values of the
hypothesis "the expected loss is above the limit":

* `hoeffding_bentkus` for losses in [0, 1]: the smaller of two bounds on the same tail, Bates et al. 2021
  (arXiv 2101.02703), as Learn then Test takes it, Angelopoulos et al. 2021 (arXiv 2110.01052).
* `betting` for losses in [-1, 1], negative where something was gained: a bet against the hypothesis whose capital it
  lets grow in expectation never. Grid Kelly of Waudby-Smith and Ramdas 2020 (arXiv 2010.09686), with the capital at the
  end of the sample, so that the order of the examples does not matter.
"""

from functools import lru_cache

import numpy
import torch

__all__ = ["betting", "fewest", "hoeffding_bentkus", "interval", "p_value", "upper_limit"]

_STAKES = 100  # of the grid; more change the second digit of a p-value


def p_value(losses: numpy.ndarray, limit: float, signed: bool) -> float:
    """Of the hypothesis that the expected loss is above `limit`: true ones have a p-value <= u with probability <= u.

    Args:
        losses: `[examples]`, in [0, 1], or in [-1, 1] where they are signed.
        limit: on the losses' scale.
        signed: whether losses may be negative; decided before they are seen.

    Raises:
        ValueError: no losses, or some that are no such numbers.
    """
    losses = _checked(losses, signed)
    return betting(losses, limit) if signed else hoeffding_bentkus(losses, limit)


def hoeffding_bentkus(losses: numpy.ndarray, limit: float) -> float:
    """`min(exp(-n h(r, a)), e P[Bin(n, a) <= ceil(n r)])` for n losses of mean r and the limit a, at most 1.

    `h(r, a) = r ln(r / a) + (1 - r) ln((1 - r) / (1 - a))`, for r < a; 1 for others.

    Args:
        losses: `[examples]` in [0, 1].
        limit: a limit of 1 or more holds for certain, one below 0 for no loss.
    """
    count, mean = len(losses), float(losses.mean())
    if limit >= 1:
        return 0.0
    if mean >= limit:
        return 1.0
    divergence = (1 - mean) * numpy.log((1 - mean) / (1 - limit))
    if mean:
        divergence += mean * numpy.log(mean / limit)
    # The sum of floats may lie a rounding error above the whole number that it means.
    bentkus = numpy.e * _binomial_cdf(count, limit)[int(numpy.ceil(losses.sum() - 1e-9))]
    return float(min(numpy.exp(-count * divergence), bentkus, 1.0))


@lru_cache(maxsize=4)  # a calibration asks for one again and again
def _binomial_cdf(count: int, probability: float) -> numpy.ndarray:
    """`P[Bin(count, probability) <= k]` for k = 0 ... count."""
    binomial = torch.distributions.Binomial(count, torch.tensor(probability, dtype=torch.float64))
    return binomial.log_prob(torch.arange(count + 1, dtype=torch.float64)).exp().cumsum(0).numpy()


def betting(losses: numpy.ndarray, limit: float) -> float:
    """One over the capital `mean_u prod_i (1 + u (a - x_i) / (1 - a))` of bets u on a grid in (0, 1), at most 1.

    No factor is negative for x <= 1, and with an expected loss of at least a none has a mean above 1: by Markov's
    inequality a capital of 1 / p has a probability of p at most. How far losses may fall below 0 does not matter.

    Args:
        losses: `[examples]` in [-1, 1], x.
        limit: a; 1 or more holds for certain.
    """
    return _bet(*numpy.unique(losses, return_counts=True), limit)


def _bet(values: numpy.ndarray, counts: numpy.ndarray, limit: float) -> float:
    """`betting` for losses of which every value occurs so often."""
    if limit >= 1:
        return 0.0
    stakes = (numpy.arange(_STAKES) + 0.5) / _STAKES / (1 - limit)
    growth = numpy.log1p(stakes[:, None] * (limit - values)) @ counts
    return float(numpy.exp(min(0.0, numpy.log(_STAKES) - numpy.logaddexp.reduce(growth))))


def upper_limit(losses: numpy.ndarray, confidence: float, signed: bool) -> float:
    """The lowest limit that the expected loss lies below with this confidence, as `p_value` judges it.

    Args:
        losses, signed: as of `p_value`.
        confidence: in (0, 1).
    """
    losses = _checked(losses, signed)
    low, high = float(losses.mean()), 1.0  # p-values fall with the limit, from 1 at the mean
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (low, middle) if p_value(losses, middle, signed) <= 1 - confidence else (middle, high)
    return high


def interval(losses: numpy.ndarray, confidence: float, signed: bool) -> tuple[float, float]:
    """Both limits of the expected loss; each is wrong with half of what the confidence leaves.

    Args:
        losses, confidence, signed: as of `upper_limit`.
    """
    each = 1 - (1 - confidence) / 2
    top = 0.0 if signed else 1.0  # losses turned round: gains
    return top - upper_limit(top - numpy.asarray(losses), each, signed), upper_limit(losses, each, signed)


def fewest(limit: float, confidence: float, signed: bool) -> int:
    """Examples that it takes at least to show a loss below the limit: where nothing at all is lost.

    Args:
        limit: above 0.
        confidence, signed: as of `upper_limit`.
    """

    def shown(count: int) -> bool:
        # Hoeffding's bound of no loss is the chance of none among so many.
        p = _bet(numpy.zeros(1), numpy.array([count]), limit) if signed else (1 - limit) ** count
        return p <= 1 - confidence

    few, enough = 0, 1
    while not shown(enough):
        few, enough = enough, 2 * enough
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if shown(middle) else (middle, enough)
    return enough


def _checked(losses: numpy.ndarray, signed: bool) -> numpy.ndarray:
    losses = numpy.asarray(losses, dtype=numpy.float64)
    least = -1.0 if signed else 0.0
    if losses.ndim != 1 or not losses.size:
        raise ValueError(f"losses of shape {losses.shape}: give one number for each of at least one example.")
    if not numpy.all((losses >= least) & (losses <= 1)):
        wrong = losses[~((losses >= least) & (losses <= 1))][0]
        raise ValueError(
            f"losses: {wrong} is outside [{least:g}, 1], the range that the bound is for. Scale the score."
        )
    return losses
