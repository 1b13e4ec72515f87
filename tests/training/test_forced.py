import copy
import math
from functools import partial

import pytest
import torch
from tokenizers.processors import ByteLevel

from hf_cdb.reference import reference_generate
from hf_cdb.training.forced import FixedDepth, Window, cut_windows, read_text
from hf_cdb.training.measure import bits_per_byte
from hf_cdb.training.passes import logits_by_depth

from ..tiny import random_huginn, random_ouro
from .tokens import tokenizer

TEXTS = ["In the beginning God created the heaven and the earth.\n" * 9, "And God said, Let there be light. " * 12]


@pytest.fixture(scope="module")
def model():
    return random_ouro(vocab_size=512, hidden_size=32)


def test_windows_by_hand(model):
    text = TEXTS[0]
    ids = tokenizer()(text, add_special_tokens=False).input_ids
    windows = cut_windows(model, tokenizer(), [text, "too short"], length=20, context=12)
    assert [window.text for window in windows] == [0] * len(windows)
    assert len(windows) == (len(ids) - 20) // 8 + 1
    assert windows[0].inputs == [tokenizer().bos_token_id, *ids[:19]]
    assert windows[1].targets == ids[8:28]
    assert windows[1].sizes == [len(tokenizer().decode([token])) for token in ids[8:28]]
    full = logits_by_depth(model, torch.tensor([windows[1].inputs]), depths=[4])[4]
    assert windows[1].best == full[0].argmax(-1).tolist()


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("text", ["Grüße aus Köln, 日本語 🙂 — schön. " * 3, "plain words  and spaces \n" * 3])
def test_every_byte_is_counted_once(model, text, trim_offsets):
    """Characters of several tokens, and tokens whose offsets leave out their space as GPT-2's do."""
    bytewise = copy.deepcopy(tokenizer())
    bytewise.backend_tokenizer.post_processor = ByteLevel(trim_offsets=trim_offsets)
    ids = bytewise(text, add_special_tokens=False).input_ids
    (window,) = cut_windows(model, bytewise, [text], length=len(ids), context=len(ids) - 1)
    assert sum(window.sizes) == len(text.encode())
    # A token that begins at a character's first byte is where the bytes are counted: from there on, as decoded.
    for place in range(1, len(ids)):
        rest = bytewise.decode(ids[place:])
        if text.endswith(rest) and not trim_offsets:
            assert sum(window.sizes[place:]) == len(rest.encode())


def test_a_tokenizer_without_bos(model):
    """EOS stands in its place, as in lm_eval; without that too it is told."""
    bare = copy.deepcopy(tokenizer())
    eos = bare.eos_token_id
    bare.bos_token = None
    first, *_ = cut_windows(model, bare, TEXTS, length=20, context=12)
    assert first.inputs[0] == eos
    logits_of = partial(logits_by_depth, model, depths=[4])
    score = bits_per_byte(logits_of, bare, TEXTS[:1], length=20, context=12)[4]
    ids = torch.tensor([[eos, *bare(TEXTS[0], add_special_tokens=False).input_ids]])
    losses = model(ids[:, :20]).logits.detach().log_softmax(-1)[0, torch.arange(20), ids[0, 1:21]] / -math.log(2)
    short = bare.decode(ids[0, 1:21])
    found = bits_per_byte(logits_of, bare, [short], length=20, context=0)[4]
    assert score.count == 1
    assert found.mean == pytest.approx(float(losses.sum()) / len(short.encode()), rel=1e-5)
    bare.eos_token = None
    with pytest.raises(ValueError, match="neither BOS nor EOS"):
        cut_windows(model, bare, TEXTS, length=20, context=12)


@pytest.mark.parametrize("context", [0, 20])
def test_nothing_to_score_is_refused(model, context):
    with pytest.raises(ValueError, match=f"context={context}"):
        cut_windows(model, tokenizer(), TEXTS, length=20, context=context)
    with pytest.raises(ValueError, match="length=2000"):
        cut_windows(model, tokenizer(), TEXTS, length=2000, context=12)


def test_full_depth_costs_what_a_pass_over_whole_rows_says(model):
    windows = cut_windows(model, tokenizer(), TEXTS, length=20, context=12)
    read = read_text(model, windows, {"exit_rule": "never"}, context=12)
    bits, sizes = [0.0, 0.0], [0, 0]
    for window in windows:
        logits = logits_by_depth(model, torch.tensor([window.inputs]), depths=[4])[4][0]
        for place in range(12, 20):
            bits[window.text] -= logits[place].log_softmax(-1)[window.targets[place]].item() / math.log(2)
            sizes[window.text] += window.sizes[place]
    assert read.bits == pytest.approx(bits, rel=1e-5)
    assert read.sizes == sizes
    assert read.agreement == 1
    assert read.depths == {4: 8 * len(windows)}
    assert read.bits_per_byte.mean == pytest.approx(sum(bits) / sum(sizes), rel=1e-5)
    assert read.excess(read).mean == 0
    # With windows that do not overlap both ways of reading score nearly the same tokens.
    whole = bits_per_byte(
        lambda ids: logits_by_depth(model, ids, depths=[4]), tokenizer(), TEXTS, length=20, context=12
    )
    assert whole[4].mean == pytest.approx(read.bits_per_byte.mean, rel=0.1)


@pytest.mark.parametrize(("make", "threshold"), [(random_ouro, 0.6), (random_huginn, 0.5)])
def test_exits_cost_what_the_oracle_says(make, threshold):
    """The text is what the oracle itself writes with these exits, so its logits tell what each token costs."""
    model = make(vocab_size=512)
    prompt = torch.arange(3, 9)
    settings = {"exit_rule": "latent-diff", "exit_threshold": threshold}
    written = reference_generate(model, prompt, max_new_tokens=7, **settings)
    tokens = [*prompt.tolist(), *written.tokens]
    window = Window(0, tokens[:-1], tokens[1:], [1] * (len(tokens) - 1), [0] * (len(tokens) - 1))
    read = read_text(model, [window], settings, context=6)
    costs = [-logits.log_softmax(-1).max().item() / math.log(2) for logits in written.logits[1:]]
    assert read.bits == pytest.approx([sum(costs)], rel=1e-4)
    assert sum(depth * count for depth, count in read.depths.items()) == sum(written.exit_depths[1:])
    assert len(read.depths) > 1


def test_a_fixed_depth_is_kept(model):
    windows = cut_windows(model, tokenizer(), TEXTS[:1], length=20, context=12)
    for depth in (1, 3, 4):
        read = read_text(model, windows, {"exit_rule": FixedDepth(depth)}, context=12)
        assert read.depths == {depth: 8 * len(windows)}
        assert read.mean_depth == depth
