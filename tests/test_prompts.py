"""The forms that prompts, masks and names of arguments come in."""

import pytest
import torch
from transformers import WatermarkingConfig
from transformers.utils import logging

from .test_generation import refused
from .tiny import RANDOM, left_pad, prompts

IDS, MASK = left_pad(prompts(3, 9, 6))
EARLY = {"exit_rule": "confidence", "exit_threshold": 0.1}
NEVER = {"exit_rule": "never"}


def generate(model, cdb, ids=IDS, mask=MASK, **options):
    options = {"max_new_tokens": 6, "do_sample": False, **options}
    return model.generate(ids, attention_mask=mask, cdb=cdb, **options)


def said_by_transformers(monkeypatch, level="warning", module="transformers.generation.utils"):
    said = []
    monkeypatch.setattr(logging.get_logger(module), level, lambda text, *_: said.append(text))
    return said


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool, torch.float32])
def test_masks_of_every_dtype(model, dtype):
    """C-02: read, and with one sense."""
    for cdb in (NEVER, EARLY):
        assert torch.equal(generate(model, cdb, mask=MASK.to(dtype)), generate(model, cdb))
    assert not torch.equal(generate(model, EARLY, mask=torch.ones_like(MASK)), generate(model, EARLY))


def test_a_mask_with_holes(model):
    """Tokens that the mask leaves out take no position, wherever they stand."""
    mask = MASK.clone()
    mask[1, [0, 4, 5]] = 0
    mask[2, 6] = 0
    assert torch.equal(generate(model, NEVER, mask=mask), generate(model, False, mask=mask))
    without = IDS[1:2, mask[1].bool()]
    assert torch.equal(generate(model, EARLY, mask=mask)[1, 9:], generate(model, EARLY, without, None)[0, 6:])


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (MASK[:, 1:], ["attention_mask", "(3, 8)", "(3, 9)"]),
        (MASK[:1], ["attention_mask", "(1, 9)", "(3, 9)"]),
        (MASK[:, None, None].expand(-1, 1, 9, -1), ["attention_mask", "2D"]),
        (torch.cat((MASK[:2], torch.zeros_like(MASK[:1]))), ["row 2", "attention_mask"]),
    ],
    ids=["short", "one row", "4-D", "empty row"],
)
def test_masks_that_do_not_fit(ouro, mask, words):
    refused(words, lambda: generate(ouro, EARLY, mask=mask), (ValueError, RuntimeError))


@pytest.mark.parametrize(("shape", "words"), [((1, 0), ["no token"]), ((0, 4), ["no row", "(0, 4)"])])
def test_empty_prompts(ouro, shape, words):
    ids = torch.zeros(shape, dtype=torch.long)
    refused(words, lambda: generate(ouro, EARLY, ids, torch.ones(shape).long()))
    with pytest.raises((ValueError, RuntimeError, IndexError)):
        generate(ouro, False, ids, torch.ones(shape).long())


def test_right_padding_is_warned_of_as_stock_does_and_read_from_the_mask(model, monkeypatch):
    rows = prompts(3, 9)
    ids, mask = (side.flip(1) for side in left_pad([row.flip(0) for row in rows]))
    said = said_by_transformers(monkeypatch)
    output = generate(model, EARLY, ids, mask)
    assert len(said) == 1
    assert "right-padding was detected" in said[0]
    for line, row in enumerate(rows):
        alone = generate(model, EARLY, row[None], None)
        assert output[line, 9:].tolist() == alone[0, len(row) :].tolist()


@pytest.mark.parametrize("copies", [1, 3])
def test_bos_alone(model, copies):
    options = {"bos_token_id": 7, "max_new_tokens": 5, "do_sample": copies > 1, "num_return_sequences": copies}
    results = []
    for cdb in (False, NEVER):
        torch.manual_seed(3)
        results.append(model.generate(cdb=cdb, **options))
    assert torch.equal(*results)
    assert (results[1][:, 0] == 7).all()
    refused(["bos_token_id"], lambda: model.generate(cdb=NEVER, max_new_tokens=5))


@pytest.mark.parametrize("length", [9, 12, 20])
def test_prompts_up_to_and_beyond_the_position_limit(length, monkeypatch):
    """Stock warns once of rows that grow longer than the model was trained for, and goes on."""
    limits = {"ouro": {"max_position_embeddings": 12}, "huginn": {"block_size": 12}}
    for family, limit in limits.items():
        model = RANDOM[family](eos_token_id=None, pad_token_id=0, **limit).double()
        ids, mask = left_pad(prompts(length, 4))
        said = said_by_transformers(monkeypatch, "warning_once", "transformers.generation.stopping_criteria")
        stock = generate(model, False, ids, mask)
        warned = set(said)
        said.clear()
        assert torch.equal(generate(model, NEVER, ids, mask), stock)
        assert len(warned) == 1
        assert set(said) == warned
        early = generate(model, EARLY, ids, mask)
        alone = generate(model, EARLY, ids[1:], mask[1:])
        assert torch.equal(early[1:], alone)


def test_a_thousand_rows(ouro):
    ids = torch.randint(1, 50, (1000, 4), generator=torch.Generator().manual_seed(0))
    output = generate(ouro, EARLY, ids, None, max_new_tokens=3, repetition_penalty=1.5, return_dict_in_generate=True)
    assert output.sequences.shape == (1000, 7)
    assert output.stats.tokens == 3000
    for row in (0, 63, 64, 499, 999):
        alone = generate(ouro, EARLY, ids[row : row + 1], None, max_new_tokens=3, repetition_penalty=1.5)
        assert torch.equal(output.sequences[row], alone[0])


def test_embeddings_beside_the_ids_that_processors_see(model):
    """With both given, embeddings are the prompt and ids the history."""
    embeds = model.get_input_embeddings()(IDS)
    options = {"inputs_embeds": embeds, "no_repeat_ngram_size": 1}
    stock = generate(model, False, **options)
    assert torch.equal(generate(model, NEVER, **options), stock)
    assert torch.equal(stock, generate(model, False, no_repeat_ngram_size=1))
    alone = [
        generate(model, EARLY, IDS[row : row + 1], MASK[row : row + 1], **{**options, "inputs_embeds": part})
        for row, part in enumerate(embeds.split(1))
    ]
    assert torch.equal(generate(model, {**EARLY, "max_num_seqs": 2}, **options), torch.cat(alone))


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 4.0},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 4, "eos_token_id": list(range(1, 50, 4))},
        {"max_length": 13, "max_new_tokens": None},
        {"watermarking_config": WatermarkingConfig(bias=9.0)},
        {"logits_processor": [lambda ids, scores: scores.roll(ids.shape[1], dims=1)]},
        {"stopping_criteria": [lambda ids, scores: ids[:, -1] % 3 == 0], "eos_token_id": 999},
        {"do_sample": True, "num_return_sequences": 2, "top_k": 5},
    ],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.filterwarnings("ignore:Passing `:UserWarning")  # stock's, that rules see new tokens only
def test_embeddings_alone(model, options):
    """Then the history begins with the first new token."""
    embeds = model.get_input_embeddings()(IDS)
    results = []
    for cdb in (False, NEVER):
        torch.manual_seed(3)
        results.append(generate(model, cdb, None, inputs_embeds=embeds, **options))
    assert torch.equal(*results)
    options = {**options, "return_dict_in_generate": True}
    together = generate(model, {**EARLY, "seeds": [4, 5, 6], "max_num_seqs": 2}, None, inputs_embeds=embeds, **options)
    copies = len(together.sequences) // 3
    for row, part in enumerate(embeds.split(1)):
        alone = generate(model, {**EARLY, "seeds": [4 + row]}, None, MASK[row : row + 1], inputs_embeds=part, **options)
        lines, new = slice(row * copies, (row + 1) * copies), alone.exit_depths.shape[1]
        assert torch.equal(together.sequences[lines, :new], alone.sequences)
        assert torch.equal(together.exit_depths[lines, :new], alone.exit_depths)
        assert not together.exit_depths[lines, new:].any()


@pytest.mark.parametrize("options", [{"eos_token_id": 43}, {"eos_token_id": 43, "pad_token_id": 3}])
def test_transition_scores_of_rows_that_end_early(model, options):
    model.generation_config.pad_token_id = None
    if isinstance(options["eos_token_id"], int):
        options["eos_token_id"] = int(generate(model, NEVER, pad_token_id=0)[1, 11])
    pad = options.get("pad_token_id", options["eos_token_id"])
    options = {**options, "return_dict_in_generate": True, "output_scores": True}
    stock, ours = generate(model, False, **options), generate(model, NEVER, **options)
    assert torch.equal(ours.sequences, stock.sequences)
    lengths = ours.exit_depths.count_nonzero(dim=1)
    assert lengths.min() < lengths.max()
    scores = [
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (ours, stock)
    ]
    for row, length in enumerate(lengths):
        assert (scores[0][row, :length] - scores[1][row, :length]).abs().max() < 1e-5
        assert (scores[0][row, length:] == 0).all()
        assert (ours.sequences[row, 9 + length :] == pad).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cdb_threshold": 0.5}, ["'cdb_threshold'", "cdb={'exit_threshold': ...}"]),
        ({"max_num_seqs": 4}, ["'max_num_seqs'", "cdb={'max_num_seqs': ...}"]),
        ({"max_new_token": 4}, ["'max_new_token'", "Did you mean 'max_new_tokens'"]),
        ({"repetition_penality": 1.2}, ["Did you mean 'repetition_penalty'"]),
        ({"attention_msk": MASK}, ["Did you mean 'attention_mask'"]),
        ({"return_legacy_cache": True}, ["'return_legacy_cache'"]),
        ({"input_idx": IDS}, ["Did you mean 'input_ids'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_names_that_nobody_knows(ouro, arguments, words):
    """J-01: refused with a hint; without cdb the message is stock's."""
    refused(words, lambda: generate(ouro, True, **arguments))
    with pytest.raises(ValueError, match="not used by the model") as caught:
        generate(ouro, False, **arguments)
    assert "cdb=" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"cbd": True}, ["'cbd'", "Did you mean 'cdb'"]),
        ({"cdb_confg": {}}, ["'cdb_confg'", "cdb={...}"]),
        ({"cdb_treshold": 0.5}, ["cdb={'exit_threshold': ...}"]),
        ({"max_num_seqs": 4}, ["cdb={'max_num_seqs': ...}"]),
        ({"on_tokn": print}, ["Did you mean 'on_token'"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_misspelt_names_of_cdb_where_nothing_else_asks_for_it(model, arguments, words):
    """A name that is cdb's gets the hint though cdb is not on; others get stock's message."""
    refused(["not used by the model", *words], lambda: generate(model, None, **arguments))
    with pytest.raises(ValueError, match="not used by the model") as caught:
        generate(model, None, repetition_penality=1.2)
    assert "Did you mean" not in str(caught.value)
