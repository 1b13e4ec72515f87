"""Bounds on expected losses: values by hand, edges, and the promise that they make."""

import itertools
import math

import numpy
import pytest

from hf_cdb.risk import betting, fewest, hoeffding_bentkus, interval, p_value, upper_limit


def ones(count, of):
    return numpy.array([1.0] * count + [0.0] * (of - count))


def test_hoeffding_bentkus_by_hand():
    """n = 10, a = .5: P[Bin <= 2] = 56 / 1024, and h(.2, .5) = .2 ln .4 + .8 ln 1.6 = .19275."""
    assert hoeffding_bentkus(ones(2, 10), 0.5) == pytest.approx(math.exp(-1.9274475))
    assert math.exp(-1.9274475) < math.e * 56 / 1024
    # n = 4, a = .25, one loss of .5: ceil(n r) = 1, P = .75^4 + 4 .25 .75^3; h(.125, .25) = .0482385.
    assert hoeffding_bentkus(numpy.array([0.5, 0, 0, 0]), 0.25) == pytest.approx(math.exp(-4 * 0.0482385), abs=1e-6)
    # Without losses Hoeffding's bound is the binomial itself, (1 - a)^n.
    assert hoeffding_bentkus(numpy.zeros(298), 0.01) == pytest.approx(0.99**298)
    # n = 1000, a = .1, 80 losses: Bentkus' is the smaller; the sum of the tail in exact integers.
    tail = sum(math.comb(1000, k) * 9 ** (1000 - k) for k in range(81)) / 10**1000
    assert hoeffding_bentkus(ones(80, 1000), 0.1) == pytest.approx(math.e * tail)


def test_betting_by_hand():
    """Two losses, .5 and -1, at a = 0: the capital of stake u is (1 - .5 u)(1 + u)."""
    stakes = [(k + 0.5) / 100 for k in range(100)]
    capital = sum((1 - 0.5 * u) * (1 + u) for u in stakes) / 100
    assert betting(numpy.array([0.5, -1.0]), 0.0) == pytest.approx(1 / capital)
    # At a = .5 stakes go up to 2: 200 examples without a loss give a mean of (1 + u)^200.
    capital = sum((1 + u) ** 200 for u in stakes) / 100
    assert betting(numpy.zeros(200), 0.5) == pytest.approx(1 / capital)
    # By the integral over all stakes: (1 - a)^n grows to ((1 / (1 - a))^(n + 1) - 1) / ((n + 1) a / (1 - a)).
    whole = ((1 / 0.99) ** 501 - 1) / (501 * 0.01 / 0.99)
    assert betting(numpy.zeros(500), 0.01) == pytest.approx(1 / whole, rel=1e-3)


@pytest.mark.parametrize("signed", [False, True])
def test_edges(signed):
    for count in (1, 3, 1000):
        assert p_value(numpy.ones(count), 0.5, signed) == 1.0
        assert p_value(numpy.full(count, 0.25), 0.25, signed) == 1.0  # at the limit nothing is known
        assert p_value(numpy.ones(count), 1.0, signed) == 0.0  # no loss is above 1
        assert 0 <= p_value(numpy.zeros(count), 0.5, signed) < 1
        assert p_value(numpy.zeros(count), 0.0, signed) == 1.0
    assert p_value(numpy.zeros(1), 0.05, signed) > 0.9  # one example proves nothing
    assert p_value(numpy.zeros(100_000), 0.5, signed) == pytest.approx(0, abs=1e-300)


@pytest.mark.parametrize("signed", [False, True])
def test_what_a_p_value_follows(signed):
    """Falls with the limit and with examples, rises with losses, and does not see their order."""
    losses = numpy.random.default_rng(0).random(60) ** 4
    by_limit = [p_value(losses, limit, signed) for limit in numpy.linspace(0.2, 0.99, 20)]
    assert all(left >= right for left, right in itertools.pairwise(by_limit))
    by_count = [p_value(ones(count, 10 * count), 0.2, signed) for count in (5, 10, 20, 40)]
    assert all(left > right for left, right in itertools.pairwise(by_count))
    by_losses = [p_value(ones(count, 100), 0.2, signed) for count in range(21)]
    assert all(left <= right for left, right in itertools.pairwise(by_losses))
    assert p_value(losses[::-1], 0.4, signed) == pytest.approx(p_value(losses, 0.4, signed))


def test_gains_pay_for_losses():
    net = numpy.array([1.0] * 10 + [-1.0] * 10 + [0.0] * 980)
    assert p_value(net, 0.05, True) < 0.05
    assert p_value(net, 0.0, True) == 1.0
    more = numpy.array([1.0] * 10 + [-1.0] * 200 + [0.0] * 790)
    assert p_value(more, 0.0, True) < 0.05


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([], "shape (0,)"),
        ([[0.5]], "shape (1, 1)"),
        ([0.5, 1.5], "1.5 is outside [0, 1]"),
        ([0.5, -0.5], "-0.5 is outside [0, 1]"),
        ([math.nan], "nan is outside"),
    ],
)
def test_losses_that_no_bound_is_for(losses, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        p_value(losses, 0.1, False)
    assert words in str(error.value)


def test_the_fewest_examples():
    """ln .05 / ln .99 is 298.07; a bet pays for not knowing the best stake."""
    assert fewest(0.01, 0.95, False) == 299
    assert fewest(0.5, 0.9, False) == 4
    for limit, confidence in ((0.01, 0.95), (0.3, 0.5)):
        count = fewest(limit, confidence, True)
        assert p_value(numpy.zeros(count), limit, True) <= 1 - confidence
        assert count == 1 or p_value(numpy.zeros(count - 1), limit, True) > 1 - confidence


def test_limits_of_the_mean():
    """Without losses the limit of 95 % solves (1 - a)^n = .05, the rule of three."""
    assert upper_limit(numpy.zeros(300), 0.95, False) == pytest.approx(1 - 0.05 ** (1 / 300), abs=2e-6)
    low, high = interval(numpy.zeros(300), 0.9, False)
    assert low == pytest.approx(0, abs=1e-5)
    assert high == pytest.approx(1 - 0.05 ** (1 / 300), abs=2e-6)
    losses = numpy.random.default_rng(1).choice([1.0, 0.0, -1.0], 500, p=[0.1, 0.85, 0.05])
    low, high = interval(losses, 0.95, True)
    assert -1 <= low < losses.mean() < high <= 1
    assert interval(-losses, 0.95, True) == (pytest.approx(-high, abs=1e-5), pytest.approx(-low, abs=1e-5))
    assert interval(numpy.ones(5), 0.95, False)[1] == 1.0
    assert p_value(losses, high + 1e-5, True) <= 0.025 < p_value(losses, high - 1e-5, True)


@pytest.mark.parametrize(
    ("signed", "shares"),
    [
        (False, {1.0: 0.05, 0.0: 0.95}),  # all or nothing
        (False, {0.25: 0.2, 0.0: 0.8}),  # of parts
        (True, {1.0: 0.08, -1.0: 0.03, 0.0: 0.89}),  # gains beside losses
    ],
)
def test_limits_cover_the_expected_loss(signed, shares):
    """Over 1,000 samples of 200 no more are wrong than the confidence leaves, but for the luck of 1,000 draws."""
    values, odds = numpy.array(list(shares)), list(shares.values())
    expected = float(values @ odds)
    draws = numpy.random.default_rng(2).choice(values, (1000, 200), p=odds)
    wrong = sum(p_value(losses, expected, signed) <= 0.1 for losses in draws)
    assert wrong <= 100 + 3 * math.sqrt(1000 * 0.1 * 0.9)
