import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from hf_cdb.training.batches import block_mask, encode_lines, pack_lines
from hf_cdb.training.measure import Score, bits_per_byte, exact_match, teacher_forced_exact_match
from hf_cdb.training.passes import logits_by_depth, states_by_depth
from hf_cdb.training.tasks import TASKS, Example, examples

from ..dory import random_dory
from ..tiny import RANDOM, assert_close, prompts, random_huginn, random_ouro
from .tokens import tokenizer

TEXTS = ["In the beginning God created the heaven and the earth.\n" * 8, "Amen", "16 For God so loved " * 9]


def uniform(ids, depths=(1, 2)):
    """All tokens alike at depth 1; at depth 2 half of the probability on token 0."""
    flat = torch.zeros(*ids.shape, 512)
    peaked = flat.clone()
    peaked[..., 0] = math.log(511)
    return {1: flat, 2: peaked}


@pytest.mark.parametrize(("length", "context"), [(128, 64), (16, 0), (7, 6), (1000, 1)])
def test_bits_of_a_uniform_distribution(length, context):
    """Every token is scored once: 9 bits each of 512, and 1 + log2 511 where half goes to another."""
    scores = bits_per_byte(uniform, tokenizer(), TEXTS, length=length, context=context, rows=3)
    tokens = sum(len(tokenizer()(text, add_special_tokens=False).input_ids) for text in TEXTS)
    size = sum(len(text) for text in TEXTS)
    assert scores[1].mean == pytest.approx(9 * tokens / size)
    assert scores[2].mean == pytest.approx((1 + math.log2(511)) * tokens / size, rel=1e-5)
    assert scores[1].count == 3


def test_each_token_is_scored_with_its_own_context():
    """A "model" that knows the next token of the text where it sees enough of it."""
    text = "".join(chr(65 + k) for k in range(26)) + "0123456789"
    ids = tokenizer()(text, add_special_tokens=False).input_ids
    following = dict(zip([1, *ids], ids, strict=False))

    def knows(inputs):
        logits = torch.zeros(*inputs.shape, 512)
        for row, tokens in enumerate(inputs.tolist()):
            for column, token in enumerate(tokens):
                seen = column >= 4 or tokens[0] == 1  # five tokens, or all there are
                logits[row, column, following[token]] = 50.0 if seen else 0.0
        return {1: logits}

    assert len(ids) == 36
    assert bits_per_byte(knows, tokenizer(), [text], length=10, context=4)[1].mean == pytest.approx(0, abs=1e-6)
    # Windows begin at 0, 7, 14, 21, 26 and score 10, 7, 7, 7, 5; three times one of them saw 4 only.
    blind = bits_per_byte(knows, tokenizer(), [text], length=10, context=3)[1].mean
    assert blind == pytest.approx(9 * 3 / 36, rel=1e-4)


def test_bytes_are_counted_in_utf_8():
    text = "é" * 5
    tokens = len(tokenizer()(text, add_special_tokens=False).input_ids)
    assert bits_per_byte(uniform, tokenizer(), [text])[1].mean == pytest.approx(9 * tokens / 10)


def test_limit_and_default_texts():
    scores = bits_per_byte(uniform, tokenizer(), limit=2)
    assert scores[1].count == 2
    one = bits_per_byte(uniform, tokenizer(), TEXTS, limit=1)
    assert one[1].mean == bits_per_byte(uniform, tokenizer(), TEXTS[:1])[1].mean
    assert math.isnan(one[1].standard_error)


def test_errors_by_hand():
    assert Score.of_shares(3, 4) == Score(0.75, math.sqrt(0.75 * 0.25 / 4), 4)
    # 6 bits of 4 bytes: r = 1.5, deviations 1 - 1.5 = -0.5 and 5 - 4.5 = 0.5.
    assert Score.of_ratio([1.0, 5.0], [1, 3]) == Score(1.5, math.sqrt(2 * 0.5) / 4, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"length": 8, "context": 8}, "context=8"), ({"limit": 0}, "limit=0"), ({"texts": ["a", ""]}, "one character")],
)
def test_texts_that_cannot_be_measured(settings, words):
    with pytest.raises(ValueError, match=words):
        bits_per_byte(uniform, tokenizer(), **{"texts": TEXTS, **settings})


@pytest.mark.parametrize("family", RANDOM)
def test_logits_are_those_of_the_forward_at_every_depth(family):
    model = RANDOM[family]().double()
    ids = torch.stack(prompts(9, 9))
    keyword = {"ouro": lambda depth: {"exit_at_step": depth - 1}, "huginn": lambda depth: {"num_steps": depth}}[family]
    logits = logits_by_depth(model, ids)
    assert list(logits) == list(range(1, 5 if family == "ouro" else 7))
    for depth, values in logits.items():
        assert_close(values, model(ids, **keyword(depth)).logits, 1e-9)
    assert list(logits_by_depth(model, ids, depths=(3, 1))) == [3, 1]


def test_logits_of_a_model_with_sliding_layers():
    model = random_dory().double()
    ids = torch.stack(prompts(12, 12))
    logits = logits_by_depth(model, ids)
    assert_close(logits[max(logits)], model(ids).logits.double(), 1e-6)


@pytest.mark.parametrize("family", RANDOM)
def test_segments_do_not_see_each_other(family):
    model = RANDOM[family]().double()
    left, right = prompts(5, 4)
    ids = torch.cat([left, right])[None]
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
    segments = torch.tensor([[0] * 5 + [1] * 4])
    packed = states_by_depth(model, ids, positions, segments)
    for depth, state in packed.items():
        assert_close(state[:, :5], states_by_depth(model, left[None])[depth], 1e-9)
        assert_close(state[:, 5:], states_by_depth(model, right[None])[depth], 1e-9)
    # The mask of the batches says the same to the models' own forward.
    forward = model(ids, attention_mask=block_mask(segments), position_ids=positions).logits
    assert_close(logits_by_depth(model, ids, positions, segments)[max(packed)], forward, 1e-9)


def test_depths_that_do_not_exist():
    ids = torch.stack(prompts(4, 4))
    for depths in ((5,), (0, 1), (), (1.5,)):
        with pytest.raises(ValueError, match="depths"):
            logits_by_depth(random_ouro(), ids, depths=depths)
    assert list(logits_by_depth(random_huginn(), ids, depths=(9,))) == [9]


def briefly_trained(family, drawn):
    """A model that answers some of the examples, and at each depth others."""
    sizes = {"vocab_size": 512, "eos_token_id": 2, "pad_token_id": 0}
    model = {"ouro": partial(random_ouro, initializer_range=0.2), "huginn": random_huginn}[family](**sizes)
    batch = pack_lines(encode_lines(tokenizer(), drawn), 128, pad=0, prompt_weight=0.1)
    mask = block_mask(batch["segments"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(25):
        logits = model(batch["input_ids"], attention_mask=mask, position_ids=batch["position_ids"]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
        loss = (loss * batch["weights"].flatten()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.double()


@pytest.mark.parametrize("family", RANDOM)
def test_teacher_forcing_equals_generation(family):
    drawn = [x for name in ("parity", "chain") for x in examples(name, "train", 20)]
    # Answers of one sign, some of which a little training gets right.
    drawn = [replace(x, answer=x.answer[-1]) for x in drawn]
    model = briefly_trained(family, drawn)
    forced = teacher_forced_exact_match(model, tokenizer(), drawn, length=60)
    full = max(forced)
    assert any(0 < score.mean < 1 for score in forced[full].values())
    assert len({tuple(scores.values()) for scores in forced.values()}) > 1
    for depth in forced:
        greedy = exact_match(model, tokenizer(), drawn, depth=depth, batch_size=16)
        assert greedy.tasks == forced[depth]
        assert greedy.depths is None
    assert exact_match(model, tokenizer(), drawn).tasks == forced[full]
    assert exact_match(model, tokenizer(), drawn, cdb={"exit_rule": "never"}).tasks == forced[full]
    for depth in (1, full - 1):
        fixed = exact_match(model, tokenizer(), drawn, cdb={"exit_rule": "never", "max_depth": depth})
        assert fixed.tasks == forced[depth]
        assert list(fixed.depths) == [depth]
        assert fixed.mean_depth == depth


class Scripted(nn.Module):
    """Generates what it is told, by prompt, after checking the padding."""

    def __init__(self, says, depths=None):
        super().__init__()
        self.says, self.depths, self.device = says, depths, torch.device("cpu")

    def generate(self, ids, attention_mask, max_new_tokens, pad_token_id, **options):
        self.options = options
        rows, depths = [], []
        for row, kept in zip(ids, attention_mask.bool(), strict=True):
            assert kept.tolist() == sorted(kept.tolist())
            assert row[kept][0] == 1
            assert row[~kept].eq(pad_token_id).all()
            tokens = tokenizer()(self.says[tokenizer().decode(row[kept][1:])], add_special_tokens=False).input_ids
            rows.append((tokens + [0] * max_new_tokens)[:max_new_tokens])
            depths.append(([4] + [2] * len(tokens) + [0] * max_new_tokens)[:max_new_tokens])
        sequences = torch.cat([ids, torch.tensor(rows)], dim=1)
        return type("Output", (), {"sequences": sequences, "exit_depths": torch.tensor(depths)})


def test_exact_match_by_hand():
    drawn = [
        Example("copy", "copy:ABCD=", "ABCD", 4),
        Example("copy", "copy:AB=", "AB", 2),
        Example("sort", "sort:BA=", "AB", 2),
        Example("copy", "copy:A=", "A", 1),
        Example("copy", "copy:B=", "B", 1),
    ]
    says = {
        "copy:ABCD=": "ABCD<eos>",
        "copy:AB=": "ABC<eos>",  # too long
        "sort:BA=": "AB<eos>",
        "copy:A=": "",  # nothing
        "copy:B=": "B<eos>AAA",  # what follows the end counts for nothing
    }
    model = Scripted(says)
    found = exact_match(model, tokenizer(), drawn, cdb={"exit_rule": "gate"}, batch_size=2)
    assert found.right == [True, False, True, False, True]
    assert found.tasks == {"copy": Score(0.5, 0.25, 4), "sort": Score(1.0, 0.0, 1)}
    assert found.mean == 0.75
    assert model.options["cdb"] == {"exit_rule": "gate"}
    assert model.options["do_sample"] is False
    assert found.mean_depth == pytest.approx(sum(d * n for d, n in found.depths.items()) / sum(found.depths.values()))
    assert found.depths[4] == 5
    assert set(found.depths) == {2, 4}
    assert exact_match(model, tokenizer(), drawn).depths is None


def test_depths_are_counted_over_generated_tokens():
    model = random_ouro(vocab_size=512, eos_token_id=2, pad_token_id=0).double()
    drawn = examples("copy", "test", 6)
    found = exact_match(model, tokenizer(), drawn, cdb={"exit_rule": "confidence", "exit_threshold": 0.05})
    assert found.depths[4] >= 6
    assert 1 <= found.mean_depth < 4
    assert set(found.tasks) == {"copy"}


def test_what_decides_the_depth_is_named_once():
    drawn = examples("copy", "test", 2)
    with pytest.raises(ValueError, match=r"depth=2 and cdb=True"):
        exact_match(random_ouro(vocab_size=512), tokenizer(), drawn, depth=2, cdb=True)
    with pytest.raises(ValueError, match=r"depth=2.*'dory'.*max_depth"):
        exact_match(random_dory(vocab_size=512), tokenizer(), drawn, depth=2)
    assert set(TASKS) >= {example.task for example in drawn}
