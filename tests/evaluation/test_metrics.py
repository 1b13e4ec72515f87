import math
import sys

import evaluate
import pytest

from hf_cdb.evaluation import metrics
from hf_cdb.evaluation.metrics import check_metric, load_metric, metric_path, score_answers


def compute(name, predictions, references, **options):
    """As anyone would who has the folder alone."""
    return evaluate.load(metric_path(name)).compute(predictions=predictions, references=references, **options)


@pytest.mark.parametrize(
    ("filter", "prediction", "right"),
    [
        ("whole", " ABCD\n", True),
        ("whole", "ABCDE", False),
        ("strict", "so 7 and 3. #### 1,234.", True),
        ("strict", "#### 1234 or #### 5", True),  # the first counts
        ("strict", "#### 5 or #### 1234", False),
        ("strict", "1234", False),
        ("strict", "####1234", False),  # the harness asks for the space
        ("flexible", "first 5, in the end $1,234.", True),
        ("flexible", "1234 of 5", False),  # the last counts
        ("flexible", "#### 1234", True),
        ("flexible", "none at all", False),
        ("flexible", "-1234", False),
    ],
)
def test_exact_match(filter, prediction, right):
    reference = "ABCD" if filter == "whole" else "He has 1200 + 34 = 1234.\n#### 1,234"
    assert load_metric("exact_match").scores([prediction], [reference], filter) == [float(right)]


def test_exact_match_of_plain_references():
    assert compute("exact_match", ["it is 7.", "8"], ["7", "9"], filter="flexible") == {"exact_match": 0.5}
    with pytest.raises(ValueError, match=r"filter='loose': choose whole, strict or flexible"):
        load_metric("exact_match").scores(["7"], ["7"], "loose")


def test_token_agreement():
    found = compute(
        "token_agreement", [[1, 2, 3, 4], [1, 2], [5], [7, 8]], [[1, 2, 9, 4], [1, 2, 3, 4], [5, 6], [7, 8]]
    )
    assert found == {"token_agreement": (2 / 4 + 2 / 4 + 1 / 2 + 1) / 4, "identical": 0.25, "first_divergence": 5 / 3}
    longer = load_metric("token_agreement").scores([[1, 2, 3], []], [[1, 2], []])
    assert longer[0] == {"token_agreement": 1.0, "identical": 0.0, "first_divergence": 2}
    assert longer[1] == {"token_agreement": 1.0, "identical": 1.0, "first_divergence": None}


def test_length_and_bits():
    assert compute("length", [3, 5], [1, 0]) == {"length": 4.0, "cut_off": 0.5}
    found = compute("bits_per_byte", [12.0, 4.0], [6, 2], tokens=[3, 1])
    assert found == {"bits_per_byte": 2.0, "perplexity": 16.0}


def test_calibration():
    scores, agrees = [0.1, 0.2, 0.2, 0.4, 0.5, 0.6], [0, 0, 1, 1, 1, 0]
    found = compute("calibration", scores, agrees, bins=2)
    assert found["bins"] == [
        {"low": 0.1, "high": 0.2, "count": 3, "agreement": pytest.approx(1 / 3)},
        {"low": 0.4, "high": 0.6, "count": 3, "agreement": pytest.approx(2 / 3)},
    ]
    pairs = [
        (s > t) + 0.5 * (s == t)
        for s, a in zip(scores, agrees, strict=True)
        if a
        for t, b in zip(scores, agrees, strict=True)
        if not b
    ]
    assert found["auc"] == pytest.approx(sum(pairs) / len(pairs))
    assert compute("calibration", [0.5] * 4, [1] * 4) == {
        "bins": [{"low": 0.5, "high": 0.5, "count": 4, "agreement": 1.0}],
        "auc": None,
        "not_finite": 0,
    }
    scores, agrees = [0.1, math.nan, 0.2, math.inf, 0.4, 0.5, 0.2, 0.6], [0, 1, 0, 0, 1, 1, 1, 0]
    assert compute("calibration", scores, agrees, bins=2) == {**found, "not_finite": 2}
    assert compute("calibration", [math.nan], [1]) == {"bins": [], "auc": None, "not_finite": 1}


def test_rouge_and_chrf():
    # "the cat sat" against "the cat": longest common subsequence 2, precision 2 / 3, recall 1.
    assert load_metric("rouge").scores(["the cat sat"], ["the cat"]) == [pytest.approx(0.8)]
    assert compute("rouge", ["the cat sat"], ["the cat"], variant="rouge2") == {"rouge2": pytest.approx(2 / 3)}
    assert load_metric("chrf").scores(["the cat", "xyz"], ["the cat", "the cat"]) == [pytest.approx(1.0), 0.0]
    both = score_answers(["rouge:rouge1", "chrf:chrF2++", "exact_match"], ["the cat"], ["the cat"])
    assert both == [{"rouge:rouge1": 1.0, "chrf:chrF2++": pytest.approx(1.0), "exact_match": 1.0}]


def test_names():
    for metric, words in [
        ("bleu", "metric='bleu' scores no answers: choose one of exact_match, rouge, chrf"),
        ("length", "scores no answers"),
        (3, "metric=3 scores no answers"),
        ("rouge:rouge9", "rouge has the variants rougeL, rouge1, rouge2"),
    ]:
        with pytest.raises(ValueError, match=words):
            check_metric(metric)
    with pytest.raises(ValueError, match=r"metric='bleu' is unknown: choose one of bits_per_byte, calibration"):
        metric_path("bleu")


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    metrics.load_metric.cache_clear()
    with pytest.raises(ValueError, match=r"metric='rouge' needs a package .*hf-cdb\[eval\]"):
        check_metric("rouge")
    metrics.load_metric.cache_clear()
