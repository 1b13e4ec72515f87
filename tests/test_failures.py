"""What goes wrong in one row stays there; what goes wrong in the model ends the call and leaves nothing behind."""

import itertools
import pickle
import threading

import pytest
import torch

from hf_cdb import CDBConfig, RowsFailedError
from hf_cdb.adapters import adapter_for
from hf_cdb.engine import Engine
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler

from .test_generation import EARLY, IDS, MASK, generate
from .test_streaming import assert_left_clean, stream
from .toy import ToyModel, predict, toy_prompt

DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


class RaisesFor:
    """A logits processor, or a stopping criterion, that raises once a row that begins so is `length` tokens long."""

    def __init__(self, row, length, answer):
        self.begin, self.length, self.answer = IDS[row].tolist(), length, answer

    def __call__(self, input_ids, scores):
        ours = [row[: len(self.begin)].tolist() == self.begin for row in input_ids]
        if any(ours) and input_ids.shape[1] >= len(self.begin) + self.length:
            raise KeyError("not in the trie")
        return self.answer(input_ids, scores)


def unchanged(input_ids, scores):
    return scores


def goes_on(input_ids, scores):
    return torch.zeros(len(input_ids), dtype=torch.bool)


def raises_on_token(row, index):
    """A callback that raises at the token `index` of `row`."""
    seen = []

    def on_token(at, token, depth):
        if at == row:
            seen.append(token)
            if len(seen) > index:
                raise KeyError("not in the trie")

    return on_token


class OnceTried:
    """A processor or criterion that raises once a row has two new tokens, as no trial has."""

    def __init__(self, error, answer):
        self.error, self.answer = error, answer

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] >= IDS.shape[1] + 2:
            raise self.error("own")
        return self.answer(input_ids, scores)


# What raises -> arguments of generate, made anew, and how many tokens row 1 has then.
CULPRITS = {
    "processor": (lambda: {"logits_processor": [RaisesFor(1, 3, unchanged)]}, 3),
    "processor at once": (lambda: {"logits_processor": [RaisesFor(1, 0, unchanged)]}, 0),
    "criterion": (lambda: {"stopping_criteria": [RaisesFor(1, 3, goes_on)]}, 3),
    "callback": (lambda: {"on_token": raises_on_token(1, 2)}, 3),
    "callback at the last token": (lambda: {"on_token": raises_on_token(1, 7)}, 8),
}


@pytest.mark.parametrize("settings", [EARLY, {**EARLY, "max_num_seqs": 1}, {**EARLY, "refill": False}], ids=str)
@pytest.mark.parametrize("culprit", CULPRITS)
def test_a_row_fails_alone(ouro, engines, culprit, settings):
    """The other rows have what they have without it; the failed one what it had until then."""
    make_arguments, tokens = CULPRITS[culprit]
    whole = generate(ouro, settings, **DICT)
    with pytest.raises(RowsFailedError) as caught:
        generate(ouro, settings, **DICT, **make_arguments())
    error = caught.value
    assert list(error.errors) == [1]
    assert isinstance(error.errors[1], KeyError)
    assert error.__cause__ is error.errors[1]
    assert "1 of 3 rows failed: row 1: KeyError('not in the trie')" in str(error)
    output = error.output
    expected, depths = whole.sequences.clone(), whole.exit_depths.clone()
    expected[1, 9 + tokens :], depths[1, tokens:] = 0, 0
    assert torch.equal(output.sequences, expected)
    assert torch.equal(output.exit_depths, depths)
    for step in range(8):
        assert torch.equal(output.scores[step][[0, 2]], whole.scores[step][[0, 2]])
        if step < tokens:
            assert torch.equal(output.scores[step][1], whole.scores[step][1])
        else:
            assert output.scores[step][1].tolist() == [0.0] + [-torch.inf] * 49
            assert not output.logits[step][1].any()
    assert [row.status for row in output.row_stats] == ["finished", "failed", "finished"]
    assert [row.tokens for row in output.row_stats] == [8, tokens, 8]
    assert [row.error for row in output.row_stats] == [None, error.errors[1], None]
    assert_left_clean(ouro, engines, whole.sequences)


def test_stats_of_every_row(model):
    output = generate(model, EARLY, return_dict_in_generate=True)
    for row, depths in zip(output.row_stats, output.exit_depths, strict=True):
        assert (row.tokens, row.loops, row.status, row.error) == (8, depths.sum(), "finished", None)
        assert row.mean_depth == pytest.approx(depths.double().mean().item())
    assert sum(row.loops for row in output.row_stats) == output.stats.mean_depth * output.stats.tokens


def test_without_a_dict_the_error_holds_the_sequences(ouro):
    whole = generate(ouro, EARLY)
    with pytest.raises(RowsFailedError) as caught:
        generate(ouro, EARLY, on_token=raises_on_token(0, 0))
    assert torch.equal(caught.value.output[1:], whole[1:])
    twin = pickle.loads(pickle.dumps(caught.value))
    assert torch.equal(twin.output, caught.value.output)
    assert str(twin) == str(caught.value)


def test_when_every_row_fails_at_once(ouro):
    def fails(ids, scores):
        raise KeyError("no")

    with pytest.raises(RowsFailedError, match="3 of 3 rows failed") as caught:
        generate(ouro, EARLY, logits_processor=[fails], **DICT)
    assert torch.equal(caught.value.output.sequences, IDS)
    assert caught.value.output.exit_depths.shape == (3, 0)
    assert caught.value.output.scores == caught.value.output.logits == ()
    assert [row.mean_depth for row in caught.value.output.row_stats] == [0, 0, 0]


def test_many_failed_rows_are_named_in_short(ouro):
    def on_token(row, token, depth):
        raise ValueError(f"row {row} has had enough")

    with pytest.raises(RowsFailedError, match=r"8 of 8 rows failed: row 0.*row 4.*; and 3 more\."):
        generate(ouro, EARLY, IDS[:1].expand(8, -1), MASK[:1].expand(8, -1), on_token=on_token)


def test_a_prompt_that_can_never_fit_fails_alone(ouro):
    """Rows of 3, 9 and 6 tokens of which the budget holds the shorter two, one at a time."""
    adapter = adapter_for(ouro)
    position = Engine(adapter, CDBConfig(exit_rule="never").resolve(adapter)).cache.bytes_per_position()
    whole = generate(ouro, EARLY)
    with pytest.raises(RowsFailedError, match=rf"1 of 3 rows failed: row 1.*needs {16 * position}") as caught:
        generate(ouro, {**EARLY, "max_kv_memory": 15 * position})
    assert torch.equal(caught.value.output[[0, 2]], whole[[0, 2]])


def test_a_row_that_fails_in_the_iterator(ouro, engines):
    """Its pieces until then come, those of the others all, and then the error."""
    whole = generate(ouro, EARLY)
    rows = [[] for _ in range(3)]
    pieces = stream(ouro, EARLY, stopping_criteria=[RaisesFor(1, 3, goes_on)])
    for row, token, _ in itertools.islice(pieces, 8 + 3 + 8):
        rows[row].append(token)
    with pytest.raises(RowsFailedError) as caught:
        next(pieces)
    assert rows == [whole[0, 9:].tolist(), whole[1, 9:12].tolist(), whole[2, 9:].tolist()]
    assert list(caught.value.errors) == [1]
    assert_left_clean(ouro, engines, whole)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_nobody_s_failure(ouro, engines, error):
    before = generate(ouro, EARLY)

    def on_token(row, token, depth):
        raise error

    with pytest.raises(error):
        generate(ouro, EARLY, on_token=on_token)
    assert_left_clean(ouro, engines, before)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("culprit", ["processor", "criterion", "callback"])
def test_in_another_thread_nothing_interrupts(ouro, culprit, error):
    """Signals go to the main thread; in another it is the row's own code that raises."""
    whole, raised = generate(ouro, EARLY), []

    def fails(*args):
        raise error("own")

    arguments = {
        "processor": {"logits_processor": [OnceTried(error, unchanged)]},
        "criterion": {"stopping_criteria": [OnceTried(error, goes_on)]},
        "callback": {"on_token": fails},
    }[culprit]

    def run():
        try:
            generate(ouro, EARLY, **arguments)
        except RowsFailedError as caught:
            raised.append(caught)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert [type(own) for own in raised[0].errors.values()] == [error] * 3
    assert torch.equal(generate(ouro, EARLY), whole)


def test_the_model_fails_in_any_stage(model, engines):
    """The error comes out as it is, and everything is as before."""
    before = generate(model, EARLY)
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    for module in (head, embedding):
        for at in (1, 5):
            count = []

            def boom(*_, count=count, at=at):
                count.append(1)
                if len(count) == at:
                    raise RuntimeError("boom")

            handle = module.register_forward_pre_hook(boom)
            with pytest.raises(RuntimeError, match="boom"):
                generate(model, EARLY)
            handle.remove()
            assert_left_clean(model, engines, before)


def toy_engine(rows, **config):
    model = ToyModel()
    adapter = adapter_for(model)
    engine = Engine(adapter, CDBConfig(**config).resolve(adapter))
    return model, engine, toy_requests(0, rows)


def toy_requests(first, rows, new_tokens=6):
    prompts = [toy_prompt(row + 1, row % 10) for row in range(first, first + rows)]
    sampler = Sampler([()] * rows, prompts, do_sample=False)
    return [
        Request(key=first + row, row=row, max_new_tokens=new_tokens, sampler=sampler, prompt_ids=prompts[row])
        for row in range(rows)
    ]


def test_an_engine_works_on_after_its_model_failed():
    """H-01: requests under way and waiting get the cause; those added afterwards are answered."""
    model, engine, requests = toy_engine(4, max_num_seqs=2)
    for request in requests:
        engine.add_request(request)
    count = []

    def boom(*_):
        count.append(1)
        if len(count) == 7:
            raise RuntimeError("boom")

    handle = model.layers[1].register_forward_pre_hook(boom)
    with pytest.raises(RuntimeError, match="boom") as caught:
        engine.run()
    handle.remove()
    assert [request.status for request in requests] == ["failed"] * 4
    assert all(request.error is caught.value for request in requests)
    assert engine.step() is None
    assert engine.cache.core_bytes == engine.cache.outer_bytes == 0
    later = toy_requests(0, 4)
    for request in later:
        engine.add_request(request)
    engine.run()
    for request in later:
        expected = predict(model.config, request.prompt_ids.tolist(), 6)
        assert request.status == "finished"
        assert (request.tokens, request.exit_depths) == (expected.tokens, expected.exit_depths)


def test_a_row_that_ended_in_the_launch_that_failed(monkeypatch):
    """It has its answer, and its place is free."""
    model, engine, _ = toy_engine(0)
    short, long = toy_requests(0, 2)
    short.max_new_tokens, long.prompt_ids = 2, short.prompt_ids  # the same script: they leave together
    engine.add_request(short)
    engine.add_request(long)

    def boom(*_):
        raise RuntimeError("boom")

    monkeypatch.setattr(engine.cache, "leave", boom)
    with pytest.raises(RuntimeError, match="boom"):
        engine.run()
    assert (short.status, long.status) == ("finished", "failed")
    assert short.tokens == predict(model.config, short.prompt_ids.tolist(), 2).tokens
    assert engine.step() is None
    assert len(engine.scheduler) == 0


@pytest.mark.parametrize("min_coda_batch", [1, 3])
def test_failing_rows_make_room_for_those_that_wait(min_coda_batch):
    """Every third request fails, at a token of its own; the others are right by value."""
    model, engine, requests = toy_engine(9, max_num_seqs=3, min_coda_batch=min_coda_batch)

    def fails(request):
        if len(request.tokens) == 1 + request.key // 3:
            raise ArithmeticError(request.key)
        return False

    for request in requests:
        request.stop = fails if request.key % 3 == 0 else None
        engine.add_request(request)
    engine.run()
    for request in requests:
        expected = predict(model.config, request.prompt_ids.tolist(), 6)
        length = 1 + request.key // 3 if request.key % 3 == 0 else 6
        assert request.tokens == expected.tokens[:length]
        assert request.exit_depths == expected.exit_depths[:length]
        assert request.status == ("failed" if request.key % 3 == 0 else "finished")
        assert (request.error is None) == (request.key % 3 != 0)
    assert engine.cache.core_bytes == 0
    assert engine.stats.tokens == sum(len(request.tokens) for request in requests)


def test_two_requests_with_one_key():
    """H-07: the second is refused at once; later the key may be used again."""
    _, engine, requests = toy_engine(1)
    twin = toy_requests(0, 1)[0]
    engine.add_request(requests[0])
    with pytest.raises(ValueError, match="key=0 names an unfinished request"):
        engine.add_request(twin)
    engine.run()
    engine.add_request(twin)
    engine.run()
    assert twin.tokens == requests[0].tokens
