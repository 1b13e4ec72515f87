"""`diagnose` finds what differs, says where first, and tells a near tie from a mistake."""

import threading

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from hf_cdb import diagnose, enable_cdb
from hf_cdb.diagnosis import Difference
from hf_cdb.exits import RULES
from hf_cdb.exits.criteria import Confidence
from hf_cdb.sampling import Sampler

from .dory import random_dory
from .test_engine import THRESHOLDS
from .test_generation import EARLY, generate, letter_tokenizer, refused
from .tiny import RANDOM, left_pad, prompts, random_huginn, random_ouro

ROWS = prompts(3, 9, 6)


@pytest.mark.parametrize("family", [*RANDOM, "dory"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_nothing_differs_in_full_precision(family, dtype):
    make = RANDOM.get(family, random_dory)
    model = enable_cdb(make(eos_token_id=None, pad_token_id=0).to(dtype))
    settings = {"exit_rule": "latent-diff", "exit_threshold": 0.6, "max_num_seqs": 2}
    found = diagnose(model, ROWS, cdb=settings, max_new_tokens=8)
    output = generate(model, settings, *left_pad(ROWS), return_dict_in_generate=True)
    assert found.differences == []
    assert found.mean_depth == output.stats.mean_depth
    for comparison in (found.exits_off, found.alone):
        assert (comparison.rows, comparison.tokens, comparison.agreeing) == (3, 24, 24)
        assert comparison.rounding < (1e-3 if dtype == torch.float32 else 1e-6)
    report = str(found).splitlines()
    assert report[0] == f"{type(model).__name__}, {str(dtype)[6:]}, mean depth {output.stats.mean_depth:.2f}"
    assert report[1].startswith("exits off against stock generate: 3 of 3 rows are equal, 24 of 24 tokens")
    assert report[2].startswith("rows of the batch against rows alone: 3 of 3 rows are equal")
    assert report[-1] == "No difference."


def test_bfloat16_differs_at_near_ties_only():
    """E-01: rounding depends on the shape of the batch, and decides what is close."""
    model = random_huginn(eos_token_id=None, pad_token_id=0).bfloat16()
    found = diagnose(model, prompts(3, 9, 6, 12), cdb={"exit_threshold": 0.6}, max_new_tokens=10)
    assert found.differences  # else the case shows nothing
    assert found.explained
    assert "All differences are near ties" in str(found)


def test_a_wrong_token_is_no_near_tie(ouro, monkeypatch):
    """A mistake put into one row: found there, with the margin of the token that stock generate chose."""
    choose = Sampler.choose

    def wrong(self, rows, logits):
        tokens = choose(self, rows, logits)
        return [
            (token + 1) % 50 if row.row == 1 and len(row.tokens) == 4 else token
            for row, token in zip(rows, tokens, strict=True)
        ]

    stock = generate(ouro, False, *left_pad(ROWS), return_dict_in_generate=True, output_scores=True)
    monkeypatch.setattr(Sampler, "choose", wrong)
    found = diagnose(ouro, ROWS, cdb={"exit_rule": "never"}, max_new_tokens=8)
    (difference,) = found.exits_off.differences
    best = stock.scores[4][1].sort(descending=True).values
    expected = int(stock.sequences[1, 9 + 4])
    assert (difference.row, difference.token, difference.kind) == (1, 4, "token")
    assert (difference.got, difference.expected) == ((expected + 1) % 50, expected)
    assert difference.margin == pytest.approx(float(best[0] - best[1]), rel=1e-4)
    assert not difference.near_tie
    assert not found.explained
    assert found.exits_off.agreeing == 4 + 8 + 8
    assert "row 1, token 4: token" in str(found)
    assert "NO near tie" in str(found)
    assert str(found).endswith("please report them, with these settings.")


class Crowded(Confidence):
    """A rule that asks for less where several rows are looked at together, as no rule may."""

    def leave(self, places, depths, previous, state, logits):
        flags = super().leave(places, depths, previous, state, logits)
        return flags if len(depths) == 1 else self.score >= self.threshold / 2


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_wrong_depth_is_no_near_tie(ouro, lookahead):
    """The margin is the distance of the lone row's own score from the threshold, at the loop where the two part."""
    settings = {"exit_rule": Crowded(0.5), "lookahead": lookahead}
    found = diagnose(ouro, ROWS, cdb=settings, max_new_tokens=8)
    assert found.exits_off.differences == []
    assert found.alone.differences
    ids, mask = left_pad(ROWS)
    for difference in found.alone.differences:
        row = slice(difference.row, difference.row + 1)
        options = {"max_new_tokens": 8, "return_dict_in_generate": True}
        alone = generate(
            ouro, {**settings, "exit_rule": "confidence", "exit_threshold": 0.5}, ids[row], mask[row], **options
        )
        depths = alone.exit_depths[0].tolist()
        assert difference.kind == "depth"
        assert difference.expected == depths[difference.token]
        assert difference.got < difference.expected
        # The same row at the depth of the shorter loop tells the confidence there.
        depths[difference.token] = difference.got - lookahead
        if depths[difference.token] > lookahead:
            replay = {"exit_rule": "replay", "exit_depths": [depths]}
            logits = generate(ouro, replay, ids[row], mask[row], **options, output_logits=True).logits
            confidence = logits[difference.token][0].softmax(-1).max().item()
            assert difference.margin == pytest.approx(0.5 - confidence, abs=1e-5)
        assert not difference.near_tie


@pytest.mark.parametrize("rule", [name for name in RULES if name not in ("never", "replay", "preloop")])
def test_scores_of_the_rules_decide(ouro, rule):
    """What a rule calls its score is what it holds against its threshold."""
    from hf_cdb import CDBConfig
    from hf_cdb.adapters import adapter_for
    from hf_cdb.diagnosis import _Watched

    threshold = THRESHOLDS[rule]["ouro"]
    resolved = CDBConfig(exit_rule=rule, exit_threshold=threshold).resolve(adapter_for(ouro)).exit_rule
    watched = _Watched(resolved)
    output = generate(ouro, CDBConfig(exit_rule=watched), *left_pad(ROWS), return_dict_in_generate=True)
    if rule == "argmax-stability":
        assert watched.scores == {}
        return
    at_least = rule in ("gate", "confidence")
    for (row, token), scores in watched.scores.items():
        leave = [score >= threshold if at_least else score < threshold for score in scores]
        depth = output.exit_depths[row, token].item()
        assert leave == [*[False] * (depth - 1), True][: len(scores)]
        assert len(scores) == min(depth, 3)


def test_margins_and_near_ties_by_hand():
    def difference(margin, rounding):
        return Difference(0, 3, "token", 5, 6, margin, rounding)

    assert difference(0.2, 0.1).near_tie
    assert not difference(0.21, 0.1).near_tie
    assert not difference(None, 0.1).near_tie
    assert str(difference(0.2, 0.1)) == (
        "row 0, token 3: token 5 in place of 6; margin 0.2, rounding elsewhere 0.1: a near tie"
    )
    assert str(difference(None, 0.1)).endswith("the exit rule has no score to judge it by")


def test_other_policies_are_not_held_to_stock(ouro):
    found = diagnose(ouro, ROWS, cdb={**EARLY, "kv_policy": "first_then_shared"}, max_new_tokens=4)
    assert found.exits_off is None
    assert "exits off: not compared" in str(found)
    assert found.alone.agreeing == 12


def test_a_smaller_depth_has_a_twin(ouro):
    found = diagnose(ouro, ROWS, cdb={"exit_rule": "never", "max_depth": 2}, max_new_tokens=6)
    assert found.differences == []
    assert found.mean_depth == 2
    dory = enable_cdb(random_dory(eos_token_id=None, pad_token_id=0))
    refused(
        ["max_depth=2", "DoryForCausalLM"], lambda: diagnose(dory, ROWS, cdb={"exit_rule": "never", "max_depth": 2})
    )


def test_texts_and_rows_that_end(ouro):
    tokenizer = letter_tokenizer()
    texts = ["ABC", "HELLO"]
    ids = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    free = generate(ouro, EARLY, *left_pad(ids))[:, 5:]
    options = {"cdb": EARLY, "max_new_tokens": 8, "eos_token_id": [int(free[0, 2]), 999]}
    found = diagnose(ouro, texts, tokenizer, **options)
    assert found == diagnose(ouro, ids, **options)
    assert found.differences == []
    assert found.alone.tokens < 16


class Counting(LogitsProcessor):
    """Keeps a state: raises another token with every call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        scores = scores.clone()
        scores[:, self.calls * 7 % 50] += 50
        return scores


class Fourth(StoppingCriteria):
    """Keeps a state: ends rows with its fourth call."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores, **kwargs):
        self.calls += 1
        return torch.full((len(ids),), self.calls == 4)


def test_a_state_does_not_pass_from_run_to_run(ouro):
    """Rows that are the same in every run are found to be, whatever their processors and criteria count."""
    processor, criterion = Counting(), Fourth()
    options = {"logits_processor": [processor], "stopping_criteria": [criterion], "max_new_tokens": 8}
    found = diagnose(ouro, ROWS, cdb=EARLY, **options)
    assert found.differences == []
    assert found.exits_off.tokens == found.alone.tokens == 3 * 4
    assert processor.calls == criterion.calls == 0
    scores = generate(ouro, False, *left_pad(ROWS), logits_processor=[Counting()], max_new_tokens=4)
    assert scores[:, 9:].tolist() == [[7, 14, 21, 28]] * 3  # it decides the tokens

    class Locked(Counting):
        def __init__(self):
            self.lock = threading.Lock()

    words = ["logits_processor Locked", "lock", "__deepcopy__"]
    refused(words, lambda: diagnose(ouro, ROWS[:1], logits_processor=[Locked()]))


def test_a_single_text_is_one_prompt(ouro):
    tokenizer = letter_tokenizer()
    found = diagnose(ouro, "HELLO", tokenizer, cdb=EARLY, max_new_tokens=4)
    assert found == diagnose(ouro, ["HELLO"], tokenizer, cdb=EARLY, max_new_tokens=4)
    assert found.alone.rows == 1
    for flat in ([3, 4, 5], torch.tensor([3, 4, 5])):
        refused(["prompts[0]=", "3", "token ids for each prompt"], lambda flat=flat: diagnose(ouro, flat))


def test_what_cannot_be_diagnosed(ouro):
    refused(["prompts=[]", "at least one"], lambda: diagnose(ouro, []))
    refused(["'ABC'", "tokenizer"], lambda: diagnose(ouro, ["ABC"]))
    refused(["do_sample=True"], lambda: diagnose(ouro, ROWS, do_sample=True))
    replay = {"exit_rule": "replay", "exit_depths": [[4] * 32] * 3}
    refused(["replay", "decides"], lambda: diagnose(ouro, ROWS, cdb=replay))
    refused(["'exit_treshold'"], lambda: diagnose(ouro, ROWS, cdb={"exit_treshold": 1}))


def test_saved_settings_of_generation_do_not_get_in_the_way():
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    model.generation_config.update(do_sample=True, num_return_sequences=2)
    model.generation_config.cdb_config = {"seeds": [1, 2]}
    found = diagnose(model, prompts(3, 5), cdb=True, max_new_tokens=3)
    assert "2 of 2 rows are equal" in str(found)
