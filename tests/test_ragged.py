"""Prompts whose positions leave the loop one by one, by their rules, or at the depths that they had before."""

import functools

import numpy
import pytest
import torch

from hf_cdb import CDBConfig, ExitRule
from hf_cdb.adapters import adapter_for
from hf_cdb.engine import Engine
from hf_cdb.exits import Listening, make_rule
from hf_cdb.ragged import RaggedPrompt
from hf_cdb.reference import reference_generate
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler
from hf_cdb.spans import Spans

from .pairwise import pairwise
from .requests import last, told
from .test_engine import THRESHOLDS, model_of
from .tiny import assert_close, left_pad, prompts
from .toy import ToyModel, predict, toy_prompt

LENGTHS = (11, 1, 26, 2, 17)  # in no order
NEW_TOKENS = 4


def engine_of(model, **cdb):
    adapter = adapter_for(model)
    return Engine(adapter, CDBConfig(**cdb).resolve(adapter))


def requests_of(rows, new_tokens=NEW_TOKENS, **fields):
    """A request for every prompt, whose sampler keeps the logits."""
    sampler = Sampler([()] * len(rows), rows, do_sample=False, keep_logits=True)
    found = []
    for key, row in enumerate(rows):
        name = "prompt_embeds" if row.is_floating_point() else "prompt_ids"
        found.append(Request(key, new_tokens, sampler, row=key, **{name: row}, **fields))
    return found


def run(engine, requests):
    for request in requests:
        engine.add_request(request)
    engine.run()
    return requests


@functools.cache
def expected_of(name, length, settings):
    """The oracle's output for the prompt of this length."""
    prompt = prompts(*LENGTHS)[LENGTHS.index(length)]
    return reference_generate(model_of(name), prompt, NEW_TOKENS, prefill_exit=True, **dict(settings))


def assert_as_expected(request, expected, tolerance=1e-6):
    assert request.error is None
    assert (request.prompt_depths or expected.prompt_depths) == expected.prompt_depths
    assert (request.tokens, request.exit_depths) == (expected.tokens, expected.exit_depths)
    assert_close(torch.stack(request.logits), expected.logits, tolerance)


CASES = pairwise(
    {
        "model": ["ouro", "ouro-gqa", "huginn", "dory"],
        "exit_rule": list(THRESHOLDS),
        "lookahead": [0, 1],
        "min_depth": [1, 2],
        "prefill_chunk_size": [None, 1, 4],
        "max_prefill_tokens": [None, 9],
        "max_num_seqs": [1, 3, 64],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_engine_equals_the_oracle(case):
    case = dict(case)
    name = case.pop("model")
    if case["exit_rule"] == "gate" and "ouro" not in name:
        case["exit_rule"] = "confidence"
    case["exit_threshold"] = THRESHOLDS[case["exit_rule"]][name]
    oracle = {key: case[key] for key in ("exit_rule", "exit_threshold", "lookahead", "min_depth")}
    engine = engine_of(model_of(name), prefill_exit=True, **case)
    requests = run(engine, requests_of(prompts(*LENGTHS)))
    depths = []
    for request, length in zip(requests, LENGTHS, strict=True):
        expected = expected_of(name, length, tuple(sorted(oracle.items())))
        assert_as_expected(request, expected)
        depths += expected.prompt_depths
    stats = engine.stats
    assert stats.prompt_depths == {depth: depths.count(depth) for depth in set(depths)}
    assert stats.mean_prompt_depth == pytest.approx(sum(depths) / len(depths))
    assert engine.cache.core_bytes == 0


@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
def test_the_cases_spread_over_depths(name):
    """Depths that were all equal would prove little."""
    for rule, thresholds in THRESHOLDS.items():
        if name in thresholds:
            settings = {"exit_rule": rule, "exit_threshold": thresholds[name], "lookahead": 0, "min_depth": 1}
            expected = [expected_of(name, length, tuple(sorted(settings.items()))) for length in LENGTHS]
            assert len({depth for one in expected for depth in one.prompt_depths[:-1]}) > 1, rule
            full = adapter_for(model_of(name)).full_depth
            assert all(one.prompt_depths[-1] == one.exit_depths[0] == full for one in expected)


@pytest.mark.parametrize("chunk", [None, 1, 2])
def test_every_read_of_the_toy_is_right_by_value(chunk):
    """Each entry carries (request, position, loop, layer), and the digit of a token says where it leaves."""
    model = ToyModel()
    rows = [toy_prompt(row + 1, *range(row, row + length)) for row, length in enumerate((3, 1, 9, 2, 5))]
    engine = engine_of(model, prefill_exit=True, prefill_chunk_size=chunk, max_num_seqs=3)
    for request, row in zip(run(engine, requests_of(rows, 6)), rows, strict=True):
        depths = [model.config.depths[int(token) % 10] for token in row[:-1]] + [4]
        expected = predict(model.config, row.tolist(), 6, "last_exited", 2, prompt_depths=depths)
        assert (request.prompt_depths or [4]) == depths
        assert (request.tokens, request.exit_depths) == (expected.tokens, expected.exit_depths)
        assert_close(torch.stack(request.logits), torch.stack(expected.logits), 1e-4)


@pytest.mark.parametrize("name", ["ouro-gqa", "huginn", "dory"])
def test_beside_rows_with_rules_of_their_own(name):
    """Some leave in their prompt and some do not, by several rules, beside rows that decode; each is the oracle's."""
    model = model_of(name)
    rows = prompts(*LENGTHS, *LENGTHS)
    rules = ["confidence", "latent-diff", "kl", "never"]
    chosen = [(rules[index % 4], index % 3 != 0, 1 + index % 2) for index in range(len(rows))]
    engine = engine_of(model, exit_rule="never", max_num_seqs=4, prefill_chunk_size=5)
    requests = requests_of(rows)
    thresholds = [None if rule == "never" else THRESHOLDS[rule][name] for rule, _, _ in chosen]
    made = {rule: make_rule(rule, threshold) for (rule, *_), threshold in zip(chosen, thresholds, strict=True)}
    for request, (rule, leaves, least) in zip(requests, chosen, strict=True):
        request.rule, request.prefill_exit, request.min_depth = made[rule], leaves, least
    run(engine, requests)
    for request, row, (rule, leaves, least), threshold in zip(requests, rows, chosen, thresholds, strict=True):
        options = {"exit_rule": rule, "exit_threshold": threshold, "prefill_exit": leaves, "min_depth": least}
        assert_as_expected(request, reference_generate(model, row, NEW_TOKENS, **options))


def test_embeddings_and_less_than_the_full_depth():
    model = model_of("huginn")
    rows = [model.get_input_embeddings()(row).detach() for row in prompts(*LENGTHS)]
    requests = requests_of(rows, prefill_exit=True, max_depth=4)
    run(engine_of(model, exit_rule="latent-diff", exit_threshold=0.6), requests)
    for request, row in zip(requests, rows, strict=True):
        options = {"exit_rule": "latent-diff", "exit_threshold": 0.6, "max_depth": 4, "prefill_exit": True}
        assert_as_expected(request, reference_generate(model, row, NEW_TOKENS, **options))


class Sometimes(ExitRule):
    """Asks for logits in every other loop only: those that left in between still count for the coda's layers."""

    def leave(self, places, depths, previous, state, logits):
        if depths[0] % 2:
            return state[:, 0] > 0.3
        assert torch.equal(logits(), logits())  # asking again changes nothing
        return logits().amax(-1) > 1.5


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_rule_that_asks_for_logits_now_and_then(chunk):
    def plain(loop, previous, state, logits):
        return bool(state[0] > 0.3 if loop % 2 else logits().amax() > 1.5)

    model, row = model_of("huginn"), prompts(26)[0]
    expected = reference_generate(model, row, NEW_TOKENS, exit_rule=plain, prefill_exit=True)
    assert len(set(expected.prompt_depths)) > 2
    settings = {"exit_rule": Sometimes(), "prefill_exit": True, "prefill_chunk_size": chunk}
    assert_as_expected(run(engine_of(model, **settings), requests_of([row]))[0], expected)


def keys_and_values(engine, key, positions):
    """What a request holds at its first positions, in the slots and in the layers around them."""
    segment = engine.cache._segments[key]
    outer = engine.cache._pools["outer"].tensor.narrow(1, segment.outer, segment.capacity)
    if len(outer) and not segment.short:  # a head is one stretch
        outer = outer.view(len(outer), engine.cache._heads, segment.capacity, -1).transpose(1, 2)
    outer = outer[:, :positions]
    core = engine.cache._core_entries(segment)[..., :positions, :].clone()
    for position in range(positions if segment.short else 0):  # slots that are read from the one before
        last = engine.cache._written[segment.core + position]
        core[:, last + 1 :, :, position] = core[:, last : last + 1, :, position]
    return core, outer.clone()


@pytest.mark.parametrize("short", [True, False], ids=["packed", "by-views"])
@pytest.mark.parametrize("prefill_exit", [False, True])
@pytest.mark.parametrize("rule", ["gate", "latent-diff", "entropy-diff", "argmax-stability"])
@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
def test_a_request_that_goes_on_is_as_if_it_had_never_stopped(name, rule, prefill_exit, short, monkeypatch):
    """One pass at the depths that prompt and tokens had gives their keys and values, and what follows from them."""
    if not short:
        monkeypatch.setattr("hf_cdb.cache.SHORT_BYTES", 0)
    model = model_of(name)
    rule = "confidence" if rule == "gate" and name != "ouro" else rule
    settings = {"exit_rule": rule, "exit_threshold": THRESHOLDS[rule][name], "prefill_exit": prefill_exit}
    rows, before = prompts(9, 1, 14), 5
    whole = run(engine_of(model, **settings), requests_of(rows, 9))
    first, second = engine_of(model, **settings), engine_of(model, **settings, prefill_chunk_size=6)
    stopped, again = requests_of(rows, 9), requests_of(rows, 9)
    for request in stopped:
        first.add_request(request)
    while any(len(request.tokens) < before for request in stopped):
        first.step()
        for request in stopped:
            if len(request.tokens) == before and request.status == "running":
                held = keys_and_values(first, request.key, request.prefill_length)
                first.cancel(request.key)
                other = again[request.key]
                other.tokens, other.exit_depths = list(request.tokens), list(request.exit_depths)
                other.prompt_depths, other.logits = request.prompt_depths, list(request.logits)
                second.add_request(other)
                while len(other.tokens) == before and (other.status != "running" or other.end <= other.prefill_length):
                    second.step()
                for left, right in zip(held, keys_and_values(second, other.key, other.prefill_length), strict=True):
                    assert_close(left, right, 1e-9)
    second.run()
    for one, other in zip(whole, again, strict=True):
        assert (one.tokens, one.exit_depths) == (other.tokens, other.exit_depths)
        assert_close(torch.stack(one.logits), torch.stack(other.logits), 1e-6)
    assert not second.stats.prompt_depths  # what runs again is no new prompt


@pytest.mark.parametrize("chunk", [None, 4])
def test_a_request_of_embeddings_goes_on(chunk):
    model = model_of("huginn")
    rows = [model.get_input_embeddings()(row).detach() for row in prompts(6, 3)]
    settings = {"exit_rule": "latent-diff", "exit_threshold": 0.6}
    whole = run(engine_of(model, **settings), requests_of(rows, 6))
    again = requests_of(rows, 6)
    for one, other in zip(whole, again, strict=True):
        other.tokens, other.exit_depths = one.tokens[:4], one.exit_depths[:4]
    run(engine_of(model, **settings, prefill_chunk_size=chunk), again)
    assert [(one.tokens, one.exit_depths) for one in whole] == [(one.tokens, one.exit_depths) for one in again]


def brought(depths, **fields):
    return {"tokens": [1] * len(depths), "exit_depths": depths, "max_new_tokens": 9, **fields}


@pytest.mark.parametrize(
    ("settings", "fields", "match"),
    [
        ({}, {"exit_depths": [4]}, "0 tokens of at most 4 and 1 depths"),
        ({}, brought([4, 9]), r"exit_depths\[1\] of request 0 is 9: .* between 1 and 4"),
        ({}, brought([4, 0]), r"exit_depths\[1\] of request 0 is 0"),
        ({}, brought([4, -3]), r"exit_depths\[1\] of request 0 is -3"),
        ({}, brought([4, 1.5]), r"exit_depths\[1\] of request 0 is 1.5: .* as integers"),
        ({}, brought([4, True]), r"exit_depths\[1\] of request 0 is True"),
        ({}, brought(["4", "1"]), r"exit_depths\[0\] of request 0 is '4'"),
        ({}, brought([1, 1]), r"exit_depths\[0\] of request 0 is 1, but .* max_depth=4"),
        ({}, brought([4, 4], max_depth=2), r"exit_depths\[0\] of request 0 is 4: .* between 1 and 2"),
        ({"min_depth": 3}, brought([4, 2]), r"exit_depths\[1\] of request 0 is 2: with min_depth=3"),
        ({"lookahead": 1}, brought([4, 1]), r"exit_depths\[1\] of request 0 is 1: .* between 2 and 4"),
        ({}, brought([4, 4], tokens=[1, 50]), "tokens of request 0 hold 50: .* between 0 and 49"),
        ({}, brought([4, 4], tokens=[-1, 1]), "tokens of request 0 hold -1"),
        ({}, brought([4, 4], tokens=[1, 2.0]), "tokens of request 0 hold 2.0"),
        ({}, brought([4], prompt_depths=[4, 4]), "prompt_depths of request 0 has 2 depths, .* 3 positions"),
        ({}, brought([4], prompt_depths=[4, 2, 4]), r"prompt_depths\[1\] of .* prefill_exit=False .* between 4 and 4"),
        ({"prefill_exit": True}, brought([4], prompt_depths=[0, 1, 4]), r"prompt_depths\[0\] of request 0 is 0"),
        ({"prefill_exit": True}, brought([4], prompt_depths=[1, 1, 1]), r"prompt_depths\[-1\] of request 0 is 1, but"),
        ({"prefill_exit": True}, brought([4]), "prompt_depths=None: how deep .* is lost"),
    ],
)
def test_what_no_run_left_is_refused(settings, fields, match):
    """And fails nobody else."""
    model, (row, other) = model_of("ouro"), prompts(3, 5)
    engine = engine_of(model, exit_threshold=0.6, **settings)
    plain, wrong = requests_of([other], prefill_exit=False)[0], requests_of([row])[0]
    plain.key = 1
    engine.add_request(plain)
    for name, value in fields.items():
        setattr(wrong, name, value)
    with pytest.raises(ValueError, match=match):
        engine.add_request(wrong)
    engine.run()
    options = {name: value for name, value in settings.items() if name != "prefill_exit"}
    assert_as_expected(plain, reference_generate(model, other, NEW_TOKENS, exit_threshold=0.6, **options))


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"min_depth": 3}, brought([2, 2], max_depth=2)),  # which is then the least as well
        ({"lookahead": 1, "max_depth": 1}, brought([1, 1])),
        ({"prefill_exit": True, "exit_rule": "never"}, brought([4, 4])),
        ({"prefill_exit": True}, brought([4, numpy.int64(1)], prompt_depths=numpy.array([1, 2, 4]))),
        ({}, brought([4, 1], prompt_depths=[4, 4, 4])),
    ],
)
def test_depths_at_the_ends_of_their_range_go_on(settings, fields):
    request = requests_of(prompts(3))[0]
    for name, value in fields.items():
        setattr(request, name, value)
    run(engine_of(model_of("ouro"), **settings), [request])
    assert (request.status, len(request.tokens), len(request.exit_depths)) == ("finished", 9, 9)


@pytest.mark.parametrize(
    ("fields", "policy", "match"),
    [
        ({"tokens": [1, 2], "exit_depths": [4]}, "last_exited", "a depth for each"),
        ({"tokens": [1] * 4, "exit_depths": [4] * 4}, "last_exited", "room for more"),
        ({"tokens": [1, 2], "exit_depths": [4, 4]}, "modular", "cannot run again in one pass"),
    ],
)
def test_what_cannot_go_on_is_refused(fields, policy, match):
    engine = engine_of(model_of("ouro"), exit_rule="never", kv_policy=policy)
    with pytest.raises(ValueError, match=match):
        engine.add_request(requests_of(prompts(3), **fields)[0])


def test_the_prompt_alone_runs_again_under_every_policy():
    engine = engine_of(model_of("ouro"), exit_threshold=0.6, kv_policy="modular")
    rows = prompts(7)
    expected = run(engine, requests_of(rows))[0]
    again = requests_of(rows)
    again[0].tokens, again[0].exit_depths = expected.tokens[:1], expected.exit_depths[:1]
    run(engine, again)
    assert (again[0].tokens, again[0].exit_depths) == (expected.tokens, expected.exit_depths)


class Watching(ExitRule):
    """Notes what it is told, and lets positions leave by their place."""

    def __init__(self):
        self.begun, self.asked = [], []
        super().__init__()

    def begin(self, places, embeds, start, tokens):
        assert len(embeds) == len(start) == len(tokens) == len(places)
        self.begun += zip(places.tolist(), tokens, strict=True)

    def leave(self, places, depths, previous, state, logits):
        assert previous.shape == state.shape
        assert not torch.equal(previous, state)
        self.asked.append((depths[0], places.tolist()))
        return [bool(place % 2) for place in places.tolist()]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_a_rule_is_told(lookahead):
    """Places are positions; tokens count back from the one that the prompt yields; those that left are not asked."""
    rule = Watching()
    engine = engine_of(model_of("ouro"), exit_rule=rule, prefill_exit=True, lookahead=lookahead, min_depth=2)
    request = run(engine, requests_of(prompts(5), 1))[0]
    assert request.prompt_depths == [4, 2, 4, 2, 4]
    assert rule.begun == [(position, (0, position - 4)) for position in range(5)]
    everyone, even = [0, 1, 2, 3], [0, 2]
    assert rule.asked == [(1, everyone), (2, even if lookahead else everyone), (3, even)]


def test_a_rule_around_another_has_a_copy_of_both():
    rule = Listening(make_rule("entropy-diff", 0.5))
    engine = engine_of(model_of("ouro"), exit_rule=rule, prefill_exit=True)
    requests = run(engine, requests_of(prompts(6, 4), 2))
    assert [request.prompt_depths for request in requests] == [[4] * 6, [4] * 4]
    wanted = {(row, index) for row, length in enumerate((6, 4)) for index in range(1 - length, 2) if index}
    assert rule.scores.keys() == wanted
    assert all(len(scores) == 3 for scores in rule.scores.values())


class Raising(ExitRule):
    def leave(self, places, depths, previous, state, logits):
        raise RuntimeError("no opinion")


def test_a_rule_that_raises_fails_its_own_request():
    engine = engine_of(model_of("ouro"), exit_threshold=0.6)
    requests = requests_of(prompts(6, 7))
    requests[0].rule, requests[0].prefill_exit = Raising(), True
    run(engine, requests)
    assert (requests[0].status, str(requests[0].error)) == ("failed", "no opinion")
    assert_as_expected(
        requests[1], reference_generate(model_of("ouro"), prompts(6, 7)[1], NEW_TOKENS, exit_threshold=0.6)
    )
    assert engine.cache.core_bytes == 0
    with pytest.raises(RuntimeError, match="no opinion"):
        run(engine_of(model_of("ouro"), exit_rule=Raising(), prefill_exit=True), requests_of(prompts(6)))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"prefill_exit": 1}, "prefill_exit=1: choose True or False"),
        ({"prefill_exit": True, "kv_policy": "shared"}, "kv_policy='shared': loops share slots"),
        ({"prefill_exit": True, "exit_rule": "replay", "exit_depths": [[4]]}, "none of the prompt"),
        ({"prefill_exit": True, "quality": 0.99}, "calibrated with prompts at full depth"),
    ],
)
def test_refused_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        CDBConfig(**settings).resolve(adapter_for(model_of("ouro")))


def test_generate_takes_the_setting():
    model = model_of("ouro")
    rows = prompts(*LENGTHS)
    ids, mask = left_pad(rows)
    settings = {"exit_threshold": 0.6, "prefill_exit": True, "max_num_seqs": 2}
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(ids, attention_mask=mask, cdb=settings, **options)
    expected = [reference_generate(model, row, NEW_TOKENS, exit_threshold=0.6, prefill_exit=True) for row in rows]
    assert output.sequences[:, ids.shape[1] :].tolist() == [one.tokens for one in expected]
    assert output.exit_depths.tolist() == [one.exit_depths for one in expected]
    assert output.stats.prompt_depths.total() == sum(LENGTHS)
    assert 1 < output.stats.mean_prompt_depth < 4
    told = output.stats.to_dict()
    assert told["mean_prompt_depth"] == output.stats.mean_prompt_depth
    plain = model.generate(ids, attention_mask=mask, cdb={"exit_threshold": 0.6}, **options)
    assert plain.stats.prompt_depths == {4: sum(LENGTHS)}


def test_requests_of_a_manager_choose():
    model = model_of("ouro")
    row = prompts(17)[0]
    with model.continuous_batching_context_manager(cdb={"exit_threshold": 0.6, "prefill_exit": True}) as manager:
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        kinds = [{}, {"prefill_exit": False}, {"exit_depths": [4, 1, 2, 3]}]
        names = [manager.add_request(row.tolist(), **options, **kind) for kind in kinds]
        found = [told(last(manager, name)) for name in names]
    leaving = reference_generate(model, row, NEW_TOKENS, exit_threshold=0.6, prefill_exit=True)
    full = reference_generate(model, row, NEW_TOKENS, exit_threshold=0.6)
    replayed = reference_generate(model, row, NEW_TOKENS, exit_rule="replay", exit_depths=[4, 1, 2, 3])
    assert found == [(one.tokens, one.exit_depths) for one in (leaving, full, replayed)]


def spans_by_hand():
    """Positions 3 4 | 1 2 4 | none | 7, of four requests."""
    start, end = numpy.array([3, 1, 6, 7]), numpy.array([5, 5, 6, 8])
    return Spans([10, 11, 12, 13], start, end, numpy.array([1, 2, 3, 4]), {1: numpy.array([1, 2, 4])})


def test_spans_with_gaps_by_hand():
    spans = spans_by_hand()
    assert (spans.tokens, spans.single) == (6, False)
    assert spans.lengths.tolist() == [2, 3, 0, 1]
    assert spans.positions().tolist() == [3, 4, 1, 2, 4, 7]
    assert spans.by_token(spans.loop).tolist() == [1, 1, 2, 2, 2, 4]
    assert (spans.where(0), spans.where(1).tolist(), spans.where(2)) == (slice(3, 5), [1, 2, 4], slice(6, 6))
    taken = spans.take([3, 1])
    assert (taken.keys, taken.positions().tolist()) == ([13, 11], [7, 1, 2, 4])
    runs, of = spans.runs()
    assert of.tolist() == [0, 1, 1, 3]
    assert (runs.keys, runs.start.tolist(), runs.end.tolist()) == ([10, 11, 11, 13], [3, 1, 4, 7], [5, 3, 5, 8])
    assert runs.loop.tolist() == [1, 2, 2, 4]
    assert runs.positions().tolist() == spans.positions().tolist()
    plain = Spans([1], numpy.array([0]), numpy.array([3]), numpy.array([1]))
    assert plain.runs()[0] is plain


def test_what_the_coda_has_not_seen_by_hand():
    ragged = RaggedPrompt(numpy.full(5, 4), rule=object())
    assert ragged.undecided.tolist() == [True] * 4 + [False]
    ragged.leave(numpy.array([1, 2]), 1)
    assert ragged.unshown(3, 1).tolist() == [0, 1, 2]
    assert ragged.unshown(5, 1).tolist() == [3, 4]
    ragged.leave(numpy.array([3]), 2)
    assert ragged.unshown(5, 2).tolist() == [0, 3, 4]
    assert ragged.unshown(5, 3).tolist() == [0, 4]
