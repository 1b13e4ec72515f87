import itertools

import numpy
import pytest

from hf_cdb.evaluation.bootstrap import interval


def test_against_all_samples():
    """Of four items there are 4 ** 4 samples, all equally likely."""
    tops, bottoms = [3.0, 0.0, 5.0, 1.0], [1.0, 2.0, 4.0, 1.0]
    samples = list(itertools.product(range(4), repeat=4))
    ratios = [sum(tops[k] for k in one) / sum(bottoms[k] for k in one) for one in samples]
    found = interval(tops, bottoms, draws=40_000, level=0.9)
    assert found["mean"] == 9 / 8
    assert found["count"] == 4
    low, high = numpy.quantile(ratios, [0.05, 0.95])
    assert found["low"] == pytest.approx(low, abs=0.03)
    assert found["high"] == pytest.approx(high, abs=0.03)


def test_it_holds_the_truth_as_often_as_it_says():
    """Simulated shares: 95 of 100 intervals, give or take three standard errors, hold the true one."""
    rng = numpy.random.default_rng(0)
    held = 0
    for _ in range(400):
        found = interval(rng.random(100) < 0.3, draws=400)
        held += found["low"] <= 0.3 <= found["high"]
    assert 0.95 - 3 * 0.011 - 0.01 <= held / 400 <= 1


def test_the_same_seed_sees_the_same_draws():
    values = [0.0, 1.0, 1.0, 0.0, 1.0]
    shifted = interval([value + 2 for value in values], seed=3)
    assert {name: value - 2 for name, value in shifted.items() if name != "count"} == pytest.approx(
        {name: value for name, value in interval(values, seed=3).items() if name != "count"}
    )
    assert interval([1.0] * 5) == {"mean": 1.0, "low": 1.0, "high": 1.0, "count": 5}
    with pytest.raises(ValueError, match="the mean of nothing"):
        interval([])
