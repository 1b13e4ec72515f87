"""Errors on an exit signal: of the right size, on the right side, and a row's own."""

import math

import numpy
import pytest
import torch

from hf_cdb import ExitRule
from hf_cdb.adapters import adapter_for
from hf_cdb.config import CDBConfig
from hf_cdb.engine import Engine
from hf_cdb.exits import RULES, ArgmaxStability, Gate, Never, Preloop
from hf_cdb.exits.criteria import Confidence, Cosine, LatentDiff
from hf_cdb.request import Request
from hf_cdb.robustness.disturbed import Disturbed, Settling, settledness, threshold_at
from hf_cdb.sampling import Sampler

from ..test_config import refused
from ..tiny import left_pad, prompts, random_ouro


@pytest.fixture
def model():
    return random_ouro(eos_token_id=None, pad_token_id=0).double()


def depths(model, rule, rows, **cdb):
    ids, mask = left_pad(rows)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(ids, attention_mask=mask, cdb={"exit_rule": rule, **cdb}, **options).exit_depths


ROWS = prompts(3, 6, 4, 5)


@pytest.mark.parametrize("rule", [lambda: Confidence(0.1), lambda: Gate(0.5), lambda: LatentDiff(0.4)])
def test_without_errors_nothing_changes(model, rule):
    assert torch.equal(depths(model, Disturbed(rule()), ROWS), depths(model, rule(), ROWS))


@pytest.mark.parametrize("rule", [lambda: Confidence(0.1), lambda: Gate(0.6), lambda: LatentDiff(0.5)])
def test_a_bias_is_another_threshold(model, rule):
    """A signal that is read as more settled is one held against a lower bar; tokens leave earlier."""
    for bias in (-0.7, 0.4):
        biased = depths(model, Disturbed(rule(), bias=bias, unit=0.5), ROWS)
        moved = rule()
        moved.threshold = threshold_at(moved, float(settledness(moved, torch.tensor(moved.threshold))) - bias * 0.5)
        assert torch.equal(biased, depths(model, moved, ROWS))
    assert (
        depths(model, Disturbed(rule(), bias=3.0), ROWS).sum() < depths(model, Disturbed(rule(), bias=-3.0), ROWS).sum()
    )


def test_a_row_meets_its_own_errors(model):
    """Whatever runs beside it, and in whatever order."""
    rule = Disturbed(Confidence(0.1), noise=1.0, seed=5)
    wanted = depths(model, rule, ROWS)
    assert not torch.equal(wanted, depths(model, Confidence(0.1), ROWS))
    for cdb in ({"max_num_seqs": 1}, {"max_num_seqs": 2, "refill": False}, {"min_coda_batch": 3}):
        assert torch.equal(wanted, depths(model, rule, ROWS, **cdb))
    adapter = adapter_for(model)
    for row, prompt in enumerate(ROWS):
        engine = Engine(adapter, CDBConfig(exit_rule=rule).resolve(adapter))
        sampler = Sampler([()] * len(ROWS), ROWS, do_sample=False)
        request = Request(key=9, row=row, prompt_ids=prompt, max_new_tokens=8, sampler=sampler)
        engine.add_request(request)
        engine.run()
        assert request.exit_depths == wanted[row].tolist()
    assert not torch.equal(wanted, depths(model, Disturbed(Confidence(0.1), noise=1.0, seed=6), ROWS))


class Constant(ExitRule):
    """Says the same of every row."""

    name = "constant"
    higher_is_deeper = True

    def __init__(self, score, threshold):
        self.value = score
        super().__init__(threshold)

    def begin(self, places, embeds, start, tokens):
        pass

    def leave(self, places, depths, previous, state, logits):
        self.score = torch.full((len(depths),), self.value)
        return self.score >= self.threshold


def leaving(rule, rows=4000, loop=2):
    rule.configure(None, 4, 0)
    rule.bind(None, rows)
    places = torch.arange(rows)
    rule.begin(places, None, None, [(row, 3) for row in range(rows)])
    return torch.as_tensor(rule.leave(places, [loop] * rows, None, None, None)).double().mean().item()


def test_noise_is_normal_and_as_large_as_said():
    """log odds of .5 are 0, of .731 are 1: with noise s and unit u a row leaves with P[z >= (1 / u - b) / s]."""
    threshold = 1 / (1 + math.exp(-1.0))
    for noise, bias, unit in ((1.0, 0.0, 1.0), (0.5, 0.0, 1.0), (2.0, 0.0, 0.5), (1.0, 0.5, 1.0), (1.0, -1.0, 2.0)):
        share = leaving(Disturbed(Constant(0.5, threshold), noise, bias, unit=unit))
        expected = 0.5 * math.erfc((1.0 / unit - bias) / noise / math.sqrt(2))
        assert share == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 4000))
    assert leaving(Disturbed(Constant(math.nan, 0.5), 100.0)) == 0.0  # what is no number never leaves
    one, other = (leaving(Disturbed(Constant(0.5, threshold), 1.0), loop=loop) for loop in (1, 2))
    assert one != other


def test_the_scale_of_settledness():
    assert settledness(Confidence(), torch.tensor([0.5, 0.9])).tolist() == pytest.approx([0.0, math.log(9)])
    assert settledness(LatentDiff(), torch.tensor([1.0, 0.1, -1e-9])).tolist() == pytest.approx(
        [0, math.log(10), math.inf]
    )
    for rule in (Confidence(0.3), LatentDiff(0.02)):
        assert threshold_at(rule, float(settledness(rule, torch.tensor(rule.threshold)))) == pytest.approx(
            rule.threshold
        )


def test_what_cannot_be_disturbed(model):
    for rule in (ArgmaxStability(1), ArgmaxStability(2), Gate(1.0), Never()):
        refused(
            [f"exit_rule={rule.name!r} with threshold", "cannot be disturbed"], lambda rule=rule: Disturbed(rule, 1.0)
        )
    preloop = Preloop(lambda embeds: torch.zeros(len(embeds), 4))
    refused(["'preloop'", "no score"], lambda: depths(model, Disturbed(preloop, 1.0), ROWS))
    refused(["'argmax-stability'", "no score"], lambda: depths(model, Settling(ArgmaxStability(1)), ROWS))
    refused(["noise=-1", "at least 0"], lambda: Disturbed(Cosine(), -1))
    refused(["bias=nan"], lambda: Disturbed(Cosine(), bias=math.nan))
    refused(["unit=inf"], lambda: Disturbed(Cosine(), unit=math.inf))


def test_listening_lets_nothing_leave_and_hears_all(model):
    for name in ("gate", "latent-diff", "kl"):
        rule = Settling(RULES[name](0.5))
        assert depths(model, rule, ROWS).eq(4).all()
        assert rule.heard.shape == (4 * 7, 3)  # tokens after the first, loops but the last
        if name == "gate":
            assert (numpy.diff(rule.heard) >= 0).all()  # the cumulative probability


def test_the_spread_is_that_within_loops():
    rule = Settling(Confidence())
    settled = {(0, 1): [1.0, 10.0], (1, 1): [3.0, 10.0], (2, 1): [2.0, math.inf]}
    rule.scores = {key: torch.tensor(values, dtype=torch.float64).sigmoid().tolist() for key, values in settled.items()}
    assert rule.spread == pytest.approx(math.sqrt((1 + 1 + 0 + 0 + 0) / 5))
