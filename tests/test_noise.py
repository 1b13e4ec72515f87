"""Noise: whose it is, and what it depends on."""

import itertools
import random

import pytest
import torch

from hf_cdb import noise as noise_module
from hf_cdb.noise import Noise, derive_seed

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


def matrices(rows, vocab, tokens, seed=0):
    """What stock sampling draws for a batch."""
    torch.manual_seed(seed)
    return [torch.empty(rows, vocab).exponential_() for _ in range(tokens)]


def walk(rows, tokens, seed=0):
    """(row, index) as rows of a launch ask for them: row r is r + 1 times as fast as row 0, in no order of rows."""
    order = [((index + 1) / (row + 1), row, index) for row in range(rows) for index in range(tokens)]
    generator = random.Random(seed)
    return [(row, index) for _, _, row, index in sorted((at, generator.random(), row, i) for at, row, i in order)]


@pytest.fixture
def drawn(monkeypatch):
    """How many numbers were drawn, in a list."""
    counts = []
    draw = torch.Tensor.exponential_

    def count(self, *args, **kwargs):
        counts.append(self.numel())
        return draw(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "exponential_", count)
    return counts


ROWS, VOCAB, TOKENS = 4, 20_000, 24
MATRIX = 4 * ROWS * VOCAB


@pytest.mark.parametrize("order", ["in step", "adrift"])
def test_lines_are_stock_s_and_few_are_drawn_twice(drawn, order):
    """However far rows drift apart, within the bound, and the global generator is left where stock leaves it."""
    expected = matrices(ROWS, VOCAB, TOKENS)
    after = torch.rand(3)
    drawn.clear()
    torch.manual_seed(0)
    noise = Noise(ROWS, VOCAB, CPU, max_bytes=4 * MATRIX)
    steps = [(row, index) for index in range(TOKENS) for row in range(ROWS)]
    for row, index in steps if order == "in step" else walk(ROWS, TOKENS):
        assert torch.equal(noise.line(row, None, index), expected[index][row])
        assert noise.held_bytes <= 4 * MATRIX
    assert sum(drawn) <= (1 if order == "in step" else 2) * TOKENS * ROWS * VOCAB
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("follow", [True, False])
@pytest.mark.parametrize("vocab", [10, 2000])
@pytest.mark.parametrize("order", ["adrift", "any"])
def test_lines_are_stock_s_where_the_bound_is_far_too_small(monkeypatch, follow, vocab, order):
    """Then matrices are drawn again; also where torch draws a matrix in another way than its lines."""
    monkeypatch.setattr(noise_module, "_lines_follow_each_other", lambda vocab: follow)
    expected = matrices(3, vocab, 12)
    torch.manual_seed(0)
    noise = Noise(3, vocab, CPU, max_bytes=2 * 3 * vocab * 4)
    steps = walk(3, 12)
    if order == "any":
        random.Random(1).shuffle(steps)
    for row, index in steps:
        assert torch.equal(noise.line(row, None, index), expected[index][row])
        assert noise.held_bytes <= 2 * 3 * vocab * 4 + 4 * vocab  # and the line that is asked for


def test_nothing_waits_for_a_row_that_has_ended():
    expected = matrices(3, 10, 9)
    torch.manual_seed(0)
    noise = Noise(3, 10, CPU)
    noise.line(1, None, 0)
    for index in range(5):
        noise.line(0, None, index)
    noise.release(1)
    assert noise.held_bytes == 3 * 10 * 4 + 4 * 10 * 4  # the last matrix, and of four others row 2's line
    for index in range(5, 9):
        noise.line(0, None, index)
    assert noise.held_bytes == 3 * 10 * 4 + 8 * 10 * 4
    noise.release(2)
    assert noise.held_bytes == 3 * 10 * 4
    assert torch.equal(noise.line(2, None, 3), expected[3][2])
