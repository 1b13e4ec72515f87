"""Stopping: end tokens, lengths, strings, time, and criteria of users, by row or for all rows together."""

import threading
import types

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria as stock_criteria
from transformers.utils import logging

from hf_cdb import RowsFailedError

from .test_generation import letter_tokenizer
from .tiny import assert_close, left_pad, prompts

IDS, MASK = left_pad(prompts(3, 9, 6))
EARLY = {"exit_rule": "confidence", "exit_threshold": 0.1}
NEVER = {"exit_rule": "never"}
NO_END = 999  # with any end token stock pads rows that have ended; without one it goes on writing into them
WIDTHS = (1, 64)


def generate(model, cdb, rows=slice(None), **options):
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": NO_END, **options}
    return model.generate(IDS[rows], attention_mask=MASK[rows], cdb=cdb, **options)


def agrees(model, make, widths=WIDTHS, **options):
    """A criterion ends rows where stock ends them, whatever the schedule; the output with exits off."""
    stock = generate(model, False, stopping_criteria=[make()], **options)
    for width in widths:
        ours = generate(model, {**NEVER, "max_num_seqs": width}, stopping_criteria=[make()], **options)
        same = stock if isinstance(stock, torch.Tensor) else stock.sequences
        assert torch.equal(ours if isinstance(ours, torch.Tensor) else ours.sequences, same)
    free = generate(model, False, **options)
    assert same.shape != (free if isinstance(free, torch.Tensor) else free.sequences).shape or not torch.equal(
        same, free if isinstance(free, torch.Tensor) else free.sequences
    ), "the criterion ends nothing"
    return ours


def divisible(ids, scores):
    """By row, on its history."""
    return ids.sum(1) % 5 == 0


class ThreeEven(StoppingCriteria):
    """By row, with a state for each that is made in the first call."""

    def __init__(self):
        self.count = None

    def __call__(self, ids, scores, **kwargs):
        even = (ids[:, -1] % 2 == 0).long()
        self.count = even if self.count is None else self.count + even
        return self.count >= 3


class AllHaveIt(StoppingCriteria):
    """One bool for all rows, and a tracker with an entry for each: as evaluation harnesses stop on several tokens."""

    def __init__(self, rows=3):
        self.done = [False] * rows

    def __call__(self, ids, scores, **kwargs):
        for row, done in enumerate(self.done):
            if not done:
                self.done[row] = any(token % 3 == 0 or token > 40 for token in ids[row, 9:].tolist())
        return all(self.done)


class Locked(StoppingCriteria):
    """Cannot be copied, so there is one for all rows."""

    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, ids, scores, **kwargs):
        return torch.full((len(ids),), ids.shape[1] == 12)


def majority(ids, scores):
    """A tensor with an entry for each row, but of all rows together."""
    return torch.full((len(ids),), bool((ids[:, -1] % 2 == 1).sum() * 2 > len(ids)))


@pytest.mark.parametrize("make", [lambda: divisible, ThreeEven])
def test_a_criterion_by_row_is_asked_about_the_row_alone(model, make):
    agrees(model, make)
    options = {"return_dict_in_generate": True}
    together = generate(model, {**EARLY, "max_num_seqs": 2}, stopping_criteria=[make()], **options)
    for row in range(3):
        alone = generate(model, EARLY, slice(row, row + 1), stopping_criteria=[make()], **options)
        length = alone.sequences.shape[1]
        assert torch.equal(together.sequences[row, :length], alone.sequences[0])
        assert (together.sequences[row, length:] == 0).all()
        assert torch.equal(together.exit_depths[row, : length - 9], alone.exit_depths[0])
        assert not together.exit_depths[row, length - 9 :].any()
    # Rows that end early free their places: nobody ran beyond its end.
    assert together.stats.tokens == int(together.exit_depths.count_nonzero())


def counting():
    """A function with a state, in a variable of the function around it."""
    calls = 0

    def fourth(ids, scores):
        nonlocal calls
        calls += 1
        return torch.full((len(ids),), calls == 4)

    return fourth


@pytest.mark.parametrize("make", [AllHaveIt, Locked, lambda: majority, counting])
def test_a_criterion_of_all_rows_is_replayed_in_step_order(model, make):
    output = agrees(model, make, return_dict_in_generate=True, output_scores=True, output_logits=True)
    new = output.sequences.shape[1] - 9
    assert len(output.scores) == len(output.logits) == new == output.exit_depths.shape[1] < 8
    assert {row.status for row in output.row_stats} == {"finished"}
    assert [row.tokens for row in output.row_stats] == output.exit_depths.count_nonzero(dim=1).tolist()


def test_a_tracker_of_many_rows_is_replayed(ouro):
    """The trial hands it as many rows as the call has: with fewer it would fail together as it does alone."""
    ids, mask = left_pad(prompts(*range(1, 8)))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "eos_token_id": NO_END}

    class AnyHasIt(AllHaveIt):
        def __call__(self, ids, scores, **kwargs):
            self.done = [bool(ids[row, -1] % 5 == 3) for row in range(len(self.done))]
            return sum(self.done) >= 3

    results = [ouro.generate(ids, cdb=cdb, stopping_criteria=[AnyHasIt(7)], **options) for cdb in (False, NEVER)]
    assert torch.equal(*results)
    assert results[0].shape[1] < 15


def test_replayed_criteria_beside_rows_that_end_on_their_own(model):
    """Rows that have ended are shown padded, as stock shows them."""
    seen = {}

    class Records(AllHaveIt):
        def __call__(self, ids, scores, **kwargs):
            if len(ids) == 3:
                lines.append(ids.tolist())
            return ids.shape[1] == 14

    ends = generate(model, NEVER)[0, 10].item()
    for cdb in (False, {**NEVER, "max_num_seqs": 2}):
        seen[bool(cdb)] = lines = []
        generate(model, cdb, stopping_criteria=[Records()], eos_token_id=ends)
    calls = [line for line in seen[True] if line in seen[False]]
    assert calls == seen[False]


@pytest.mark.parametrize("kept", [True, False])
def test_criteria_are_given_the_scores(model, kept):
    """A tuple of [rows, vocab] where they are kept, as stock hands them on; else None."""

    def low(ids, scores):
        assert (scores is not None) == kept
        if not kept:
            return ids[:, -1] % 4 == 0
        assert all(step.shape == (len(ids), 50) for step in scores)
        return scores[-1].gather(1, ids[:, -1:])[:, 0] < 2.5

    def low_mean(ids, scores):
        return low(ids, scores).double().mean() >= 0.5

    options = {"output_scores": kept, "return_dict_in_generate": kept}
    for criterion in (low, low_mean):
        stock = generate(model, False, stopping_criteria=[criterion], **options)
        ours = generate(model, NEVER, stopping_criteria=[criterion], **options)
        if kept:
            assert torch.equal(ours.sequences, stock.sequences)
            assert_close(ours.scores[0], stock.scores[0], 1e-5)
        else:
            assert torch.equal(ours, stock)


def test_tokens_that_may_be_taken_back_are_not_told(ouro):
    with pytest.raises(ValueError, match=r"on_token.*all rows together"):
        generate(ouro, EARLY, stopping_criteria=[AllHaveIt()], on_token=print)
    told = []
    generate(ouro, EARLY, stopping_criteria=[divisible], on_token=lambda *what: told.append(what))
    assert told


@pytest.mark.parametrize(
    "make",
    [
        lambda: MaxLengthCriteria(12),
        lambda: MaxLengthCriteria(5),
        lambda: EosTokenCriteria(list(range(0, 50, 4))),
        lambda: EosTokenCriteria(list(range(3, 50, 5))),
    ],
)
def test_a_user_s_own_of_a_built_in_kind_takes_precedence(model, make):
    agrees(model, make)


def test_a_criterion_that_raises_fails_its_row(ouro):
    def odd(ids, scores):
        if ids.shape[1] == 12 and int(ids[0, 8]) == int(IDS[2, 8]):
            raise KeyError("odd")
        return ids[:, -1] < 0

    with pytest.raises(RowsFailedError, match="row 2: KeyError") as caught:
        generate(ouro, EARLY, stopping_criteria=[odd])
    assert torch.equal(caught.value.output[:2], generate(ouro, EARLY)[:2])


@pytest.mark.parametrize(
    "settings", [NEVER, EARLY, {**EARLY, "max_num_seqs": 2}, {**EARLY, "max_num_seqs": 1}], ids=str
)
def test_a_replayed_criterion_that_raises_fails_the_rows_that_it_is_asked_about(model, engines, settings):
    """They keep what they had at that step, whatever the schedule; a row that had ended before has not failed."""
    whole = generate(model, settings, return_dict_in_generate=True)
    end = int(whole.sequences[1, 10])
    first = whole.sequences[:, 9:].tolist()
    lengths = [min(3, row.index(end) + 1) if end in row else 3 for row in first]

    def spoilt(ids, scores):
        if ids.shape[1] == 12:
            raise KeyError("spoilt")
        return False

    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "eos_token_id": end}
    with pytest.raises(RowsFailedError) as caught:
        generate(model, settings, stopping_criteria=[spoilt], **options)
    error, output = caught.value, caught.value.output
    failed = [row for row in range(3) if end not in first[row][:3]]
    assert failed
    assert 1 not in failed
    assert list(error.errors) == failed
    assert {repr(cause) for cause in error.errors.values()} == {"KeyError('spoilt')"}
    assert error.__cause__ is error.errors[failed[0]]
    assert output.sequences.shape == (3, 12)
    assert len(output.scores) == len(output.logits) == 3
    for row, length in enumerate(lengths):
        assert output.sequences[row, 9:].tolist() == first[row][:length] + [0] * (3 - length)
        assert torch.equal(output.exit_depths[row, :length], whole.exit_depths[row, :length])
        assert output.row_stats[row].status == ("failed" if row in failed else "finished")
        assert output.row_stats[row].tokens == length
    assert engines[-1].cache.core_bytes == engines[-1].cache.outer_bytes == len(engines[-1].scheduler) == 0


def test_max_length_counts_the_padding(model):
    stock = generate(model, False, max_length=13, max_new_tokens=None)
    ours = generate(model, NEVER, max_length=13, max_new_tokens=None)
    assert torch.equal(ours, stock)
    assert ours.shape == (3, 13)
    unpadded = model.generate(
        IDS[:1, 6:], max_length=13, do_sample=False, eos_token_id=NO_END, cdb=NEVER, return_dict_in_generate=True
    )
    assert unpadded.exit_depths.shape == (1, 10)


def test_time_that_is_over_leaves_every_started_row_a_token(model):
    over = [MaxTimeCriteria(1.0, initial_timestamp=0.0)]
    assert torch.equal(generate(model, NEVER, stopping_criteria=over), generate(model, False, stopping_criteria=over))
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    output = generate(model, {**EARLY, "max_num_seqs": 2}, stopping_criteria=over, **options)
    whole = generate(model, EARLY)
    assert torch.equal(output.sequences[:2], whole[:2, :10])
    assert output.sequences[2].tolist() == [*IDS[2].tolist(), 0]
    assert output.exit_depths.count_nonzero(dim=1).tolist() == [1, 1, 0]
    assert {row.status for row in output.row_stats} == {"cancelled"}
    assert output.scores[0][2, 0] == 0
    assert (output.scores[0][2, 1:] == -torch.inf).all()
    assert (output.logits[0][2] == 0).all()


def test_max_time_keeps_what_is_done(model, monkeypatch):
    """By a clock that ticks once for every look at it."""
    ticks = iter(range(1000))
    clock = types.SimpleNamespace(time=lambda: next(ticks))
    monkeypatch.setattr(stock_criteria, "time", clock)
    whole = generate(model, EARLY, return_dict_in_generate=True)
    output = generate(model, EARLY, max_time=5.0, return_dict_in_generate=True)
    lengths = output.exit_depths.count_nonzero(dim=1).tolist()
    assert 1 <= min(lengths) <= max(lengths) < 8
    for row, length in enumerate(lengths):
        assert torch.equal(output.sequences[row, : 9 + length], whole.sequences[row, : 9 + length])
        assert torch.equal(output.exit_depths[row, :length], whole.exit_depths[row, :length])
        assert (output.sequences[row, 9 + length :] == 0).all()
    assert torch.equal(generate(model, EARLY), whole.sequences)


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("by", ["strings", "end"])
def test_what_stops_a_row_stops_no_other(model, by, first):
    """G-05: one row ends in the first half, the next begins with the second, one holds both; each in every place."""
    scripts = [[5, 5, 5, 5, 5, 4], [9, 5, 5, 5, 5, 5], [5, 4, 9, 5, 5, 5]]
    scripts = scripts[first:] + scripts[:first]

    def scripted(prompt, ids):
        return [scripts[prompt][len(ids) - 9]]

    tokenizer = letter_tokenizer()
    options = {"prefix_allowed_tokens_fn": scripted, "max_new_tokens": 6}
    if by == "strings":
        options |= {"stop_strings": [tokenizer.decode([4, 9])], "tokenizer": tokenizer}
        expected = [[5, 4, 9, 0, 0, 0] if row[1:3] == [4, 9] else row for row in scripts]
    else:
        options["eos_token_id"] = 9
        ends = [row.index(9) + 1 if 9 in row else 6 for row in scripts]
        expected = [row[:end] + [0] * (6 - end) for row, end in zip(scripts, ends, strict=True)]
    for cdb in (False, NEVER, {**EARLY, "max_num_seqs": 2}):
        assert generate(model, cdb, **options)[:, 9:].tolist() == expected


def test_the_end_id_of_the_chat_format(ouro, monkeypatch):
    """G-01: the config names 0, the tokenizer 2, and the scripted answer is 5, 2, 9, 9."""
    tokenizer = letter_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": tokenizer.decode([7, 8, 9])}], return_tensors="pt", return_dict=True
    )
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.generation"), "warning_once", said.append)
    length = chat["input_ids"].shape[1]

    def scripted(prompt, ids):
        return [[5, 2, 9, 9][len(ids) - length]]

    def answer(**options):
        output = ouro.generate(
            **chat, max_new_tokens=4, do_sample=False, cdb=EARLY, prefix_allowed_tokens_fn=scripted, **options
        )
        return output[0, length:].tolist()

    assert answer(tokenizer=tokenizer, eos_token_id=0) == [5, 2, 9, 9]
    assert len(said) == 1
    assert "id 2" in said[0]
    assert "eos_token_id=[0]" in said[0]
    for ends in (2, [0, 2]):
        assert answer(tokenizer=tokenizer, eos_token_id=ends) == [5, 2]
    assert len(said) == 1


@pytest.mark.parametrize("kind", [list, StoppingCriteriaList])
def test_criteria_come_as_a_list_of_either_kind(ouro, kind):
    stock = generate(ouro, False, stopping_criteria=StoppingCriteriaList([divisible, ThreeEven()]))
    assert torch.equal(generate(ouro, NEVER, stopping_criteria=kind([divisible, ThreeEven()])), stock)


def test_a_criterion_that_raises_for_a_late_row_only(model):
    """The trial gives all rows together; what raises there for one row is that row's failure, not all rows'."""
    ids, mask = IDS.repeat(2, 1), MASK.repeat(2, 1)
    ids[ids == 49] = 48
    ids[4, 8] = 49
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "eos_token_id": NO_END, "cdb": EARLY}
    whole = model.generate(ids, **options)

    def picky(ids, scores):
        if (ids[:, 8] == 49).any():
            raise KeyError("49")
        return ids[:, -1] < 0

    with pytest.raises(RowsFailedError) as caught:
        model.generate(ids, stopping_criteria=[picky], **options)
    assert list(caught.value.errors) == [4]
    others = [0, 1, 2, 3, 5]
    assert torch.equal(caught.value.output[others], whole[others])


def test_a_replayed_criterion_may_answer_in_a_column(model):
    """Stock cannot do that, so the truth is the same answer in a line."""

    def line(ids, scores):
        return (ids[:, -1] + ids[0, -1]) % 3 == 0

    ours = agrees(model, lambda: line)
    for width in WIDTHS:
        column = [lambda ids, scores: line(ids, scores)[:, None]]
        assert torch.equal(generate(model, {**NEVER, "max_num_seqs": width}, stopping_criteria=column), ours)


@pytest.mark.parametrize(
    ("said", "words"), [(torch.ones(3, 3).bool(), "shape (3, 3)"), ([False, True], "[False, True]"), (None, "None")]
)
def test_a_replayed_criterion_of_another_shape(ouro, said, words):
    def odd(ids, scores):
        return said

    with pytest.raises(RowsFailedError) as caught:
        generate(ouro, EARLY, stopping_criteria=[odd])
    error = caught.value.errors[0]
    assert isinstance(error, ValueError)
    assert f"stopping_criteria odd returned {words} for 3 rows" in str(error)
    assert list(caught.value.errors) == [0, 1, 2]


def test_replayed_criteria_see_the_scores_of_ended_rows(ouro):
    """A pad token beyond the vocabulary has none; stock would go on to look it up among the embeddings."""
    end = int(generate(ouro, False)[1, 10])
    seen = {}

    def look(ids, scores):
        seen[ids.shape[1]] = scores
        return False

    options = {"return_dict_in_generate": True, "output_scores": True, "eos_token_id": end, "stopping_criteria": [look]}
    stock = generate(ouro, False, **options)
    expected = seen.pop(stock.sequences.shape[1])
    for pad in (0, 60):
        seen.clear()
        ours = generate(ouro, NEVER, pad_token_id=pad, **options)
        live = ours.exit_depths > 0
        assert torch.equal(ours.sequences[:, 9:].where(live, 0), stock.sequences[:, 9:].where(live, 0))
        scores = seen[ours.sequences.shape[1]]
        assert len(scores) == len(expected)
        for step, (given, wanted) in enumerate(zip(scores, expected, strict=True)):
            going = ours.exit_depths[:, step] > 0
            assert_close(given[going], wanted[going], 1e-5)
            assert given[~going].isfinite().sum() == (int((~going).sum()) if pad < 50 else 0)
    assert not going.all()
