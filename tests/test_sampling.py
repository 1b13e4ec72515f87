"""Noise: whose it is, and what it depends on."""

import itertools

import pytest
import torch

from hf_cdb.sampling import Noise, derive_seed

from .tiny import RANDOM

CPU = torch.device("cpu")
EARLY = {"exit_rule": "confidence", "exit_threshold": 0.1}
PAIRS = list(itertools.product(range(12), range(12)))


def distinct(lines):
    return len({tuple(line.tolist()) for line in lines}) == len(lines)


def test_derived_seeds_do_not_meet():
    """Neither each other nor the seeds that a user gives, which often follow one another."""
    assert [derive_seed(seed, 0) for seed in range(12)] == list(range(12))
    assert len({derive_seed(seed, copy) for seed, copy in PAIRS}) == len(PAIRS)


def test_a_line_belongs_to_seed_and_index():
    """And to nothing else: neither the row, nor the global generator, nor what was drawn before."""
    noise = Noise(None, 4, CPU)
    lines = [noise.line(0, seed, index) for seed, index in PAIRS]
    assert distinct(lines)
    torch.manual_seed(99)
    other = Noise(3, 4, CPU)
    for row, (seed, index) in reversed(list(enumerate(PAIRS))):
        assert torch.equal(other.line(row % 3, seed, index), lines[row])


def test_more_rows_than_places_draw_from_the_global_seed_and_their_row():
    def lines(seed):
        torch.manual_seed(seed)
        noise = Noise(None, 4, CPU)
        return [noise.line(row, None, index) for row, index in PAIRS]

    first = lines(1)
    assert distinct([*first, *lines(2)])
    assert all(map(torch.equal, lines(1), first))


@pytest.mark.parametrize("family", RANDOM)
def test_calls_beyond_the_rows_in_flight_differ(family):
    """By the global seed, from call to call, and from row to row of the same prompt."""
    model = RANDOM[family](eos_token_id=None, pad_token_id=0).double()
    ids = torch.tensor([[7, 3, 9]] * 3)

    def sample():
        options = {"do_sample": True, "temperature": 3.0, "max_new_tokens": 8}
        return [tuple(row) for row in model.generate(ids, cdb={**EARLY, "max_num_seqs": 2}, **options).tolist()]

    torch.manual_seed(1)
    first, second = sample(), sample()
    torch.manual_seed(2)
    third = sample()
    assert len({*first, *second, *third}) == 9
    torch.manual_seed(1)
    assert sample() == first
