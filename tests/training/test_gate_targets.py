"""Targets of exit heads, by hand."""

import math

import pytest
import torch

from hf_cdb.training.gate_targets import (
    Agreement,
    Improvement,
    KLToFull,
    LoopScores,
    exit_distribution,
    make_target,
)

from ..test_exit_heads import refused


def scores(**kwargs):
    tensors = {name: torch.tensor(value) for name, value in kwargs.items()}
    empty = torch.zeros_like(next(iter(tensors.values())))
    return LoopScores(**{name: tensors.get(name, empty) for name in ("kl", "loss", "agrees")})


def test_kl_target():
    """At the scale the hazard is one half; going on at e times it has odds e^slope; a KL of 0 is a hazard of 1."""
    hazards = KLToFull(slope=3.0, scale=0.03).hazards(scores(kl=[[0.03 * math.e, 0.03, 0.0, 0.0]]))
    assert hazards[0].tolist() == pytest.approx([1 / (1 + math.exp(3)), 0.5, 1.0, 1.0])
    doubled = KLToFull(slope=2.0, scale=0.5).hazards(scores(kl=[[1.0, -1e-9, 0.0]]))
    assert doubled[0].tolist() == pytest.approx([1 / (1 + 4), 1.0, 1.0])  # e^(2 log 2) = 4


def test_improvement_target():
    """Least later losses of 3 2 2.5 1.9 are 1.9 1.9 1.9: improvements 1.1, .1, .6. Later loss may rise: 1 2 3."""
    hazards = Improvement(slope=10.0, margin=0.1).hazards(scores(loss=[[3.0, 2.0, 2.5, 1.9]]))
    expected = [1 / (1 + math.exp(10 * (better - 0.1))) for better in (1.1, 0.1, 0.6)]
    assert hazards[0].tolist() == pytest.approx([*expected, 1.0], abs=1e-6)
    rising = Improvement(slope=1.0, margin=0.5).hazards(scores(loss=[[1.0, 2.0, 3.0]]))
    assert rising[0].tolist() == pytest.approx([1 / (1 + math.exp(-1.5))] * 2 + [1.0])


def test_agreement_target():
    assert Agreement().hazards(scores(agrees=[[0.0, 1.0, 0.0, 1.0]])).tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_exit_distribution():
    """Hazards .2 .5 and the certain end: .2, .8 x .5, .8 x .5; the last hazard counts for nothing."""
    assert exit_distribution(torch.tensor([[0.2, 0.5, 0.3]]))[0].tolist() == pytest.approx([0.2, 0.4, 0.4])
    assert exit_distribution(torch.tensor([[0.0, 1.0, 1.0]])).tolist() == [[0.0, 1.0, 0.0]]


def test_options_of_targets():
    assert make_target("kl", slope=None, scale=0.1) == KLToFull(scale=0.1)
    assert make_target("improvement", margin=0.2).to_dict() == {"name": "improvement", "slope": 20.0, "margin": 0.2}
    refused(["target='klx'", "agreement"], lambda: make_target("klx"))
    refused(["margin=0.1", "'kl'", "slope, scale"], lambda: make_target("kl", margin=0.1))
    refused(["slope=1.0", "'agreement'"], lambda: make_target("agreement", slope=1.0))
    refused(["scale=0.0", "positive"], lambda: make_target("kl", scale=0.0))
