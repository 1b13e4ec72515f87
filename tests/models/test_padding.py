"""Masks: a padded row is the row alone, in every form the mask can take (reports C-01 and C-02)."""

import pytest
import torch

from ..tiny import FAMILIES, assert_close, left_pad, load_family, prompts

LENGTHS = (3, 9, 17)
IMPLEMENTATIONS = ["eager", "sdpa"]
PRECISIONS = [torch.float32, torch.float64]


def tolerance(family, dtype):
    return 1e-9 if dtype == torch.float64 else FAMILIES[family][1]


@pytest.fixture(params=[(f, i, d) for f in FAMILIES for i in IMPLEMENTATIONS for d in PRECISIONS], ids=str)
def case(request):
    family, implementation, dtype = request.param
    model = load_family(family, attn_implementation=implementation, dtype=dtype)
    return model, FAMILIES[family][0], tolerance(family, dtype)


@torch.no_grad()
def test_forward_of_a_left_padded_batch_equals_single_runs(case):
    model, kwargs, limit = case
    rows = prompts(*LENGTHS, vocab=256)
    ids, mask = left_pad(rows)
    batch = model(ids, attention_mask=mask, **kwargs).logits
    assert batch.isfinite().all()
    for index, row in enumerate(rows):
        alone = model(row[None], **kwargs).logits[0]
        assert_close(batch[index, -len(row) :], alone, limit, f"row of {len(row)}")


def test_generation_of_a_left_padded_batch_equals_single_runs(case):
    model, kwargs, limit = case
    rows = prompts(*LENGTHS, vocab=256)
    ids, mask = left_pad(rows)
    kwargs = {
        "max_new_tokens": 8,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        **kwargs,
    }
    batch = model.generate(ids, attention_mask=mask, **kwargs)
    for index, row in enumerate(rows):
        alone = model.generate(row[None], **kwargs)
        assert batch.sequences[index, ids.shape[1] :].tolist() == alone.sequences[0, len(row) :].tolist()
        # generate casts logits to float32
        for step, (padded, single) in enumerate(zip(batch.logits, alone.logits, strict=True)):
            assert_close(padded[index], single[0], max(limit, 1e-6), f"row of {len(row)}, token {step}")


def masks_of(mask, dtype):
    """Every form of one mask: the rows' padding, by query and key."""
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    prepared = (causal[None] & mask[:, None].bool())[:, None]
    additive = torch.zeros(prepared.shape, dtype=dtype).masked_fill(~prepared, torch.finfo(dtype).min)
    return {
        "int64": mask,
        "int32": mask.int(),
        "bool": mask.bool(),
        "float": mask.float(),
        "4-D bool": prepared,
        "4-D int": prepared.long(),
        "4-D per head": prepared.expand(-1, 4, -1, -1),
        "4-D additive": additive,
        "4-D minus infinity": additive.masked_fill(~prepared, -torch.inf),
    }


@torch.no_grad()
def test_every_form_of_the_mask_means_the_same(case):
    model, kwargs, limit = case
    rows = prompts(*LENGTHS, vocab=256)
    ids, mask = left_pad(rows)
    for name, form in masks_of(mask, model.dtype).items():
        with_positions = {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)} if "4-D" in name else {}
        batch = model(ids, attention_mask=form, **with_positions, **kwargs).logits
        for index, row in enumerate(rows):
            alone = model(row[None], **kwargs).logits[0]
            assert_close(batch[index, -len(row) :], alone, limit, f"{name} mask, row of {len(row)}")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_weights_do_not_change_the_meaning_of_the_mask(family):
    """C-02: the published code read the mask in opposite ways with and without attention outputs."""
    kwargs, limit = FAMILIES[family]
    model = load_family(family, attn_implementation="eager")
    ids, mask = left_pad(prompts(3, 9, vocab=256))
    for name, form in masks_of(mask, torch.float32).items():
        without = model(ids, attention_mask=form, **kwargs)
        with_weights = model(ids, attention_mask=form, output_attentions=True, **kwargs)
        assert_close(with_weights.logits[0, -3:], without.logits[0, -3:], limit, name)
        for weights in with_weights.attentions:
            # the three real queries of row 0 put nothing on its six padded keys
            assert weights[0, :, -3:, :6].max() == 0
            assert weights[0, :, -3:].sum(-1).allclose(torch.ones(()), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_half_precision_masks_give_numbers(family, dtype):
    """The lowest number of the mask and a negative score add up to -inf in half precision, and padding to none."""
    kwargs, _ = FAMILIES[family]
    model = load_family(family, dtype=dtype, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "q_proj" in name or "k_proj" in name or "Wqkv" in name:
            parameter.mul_(8)
    ids, mask = left_pad(prompts(1, 3, vocab=256))
    for form in (mask, *(masks_of(mask, torch.float32)[name] for name in ("4-D additive", "4-D minus infinity"))):
        assert model(ids, attention_mask=form, **kwargs).logits.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_right_padding_leaves_the_real_positions_alone(family):
    kwargs, limit = FAMILIES[family]
    model = load_family(family)
    row = prompts(9, vocab=256)[0]
    ids = torch.cat([row, row.new_zeros(4)])[None]
    mask = (torch.arange(13) < 9).long()[None]
    padded = model(ids, attention_mask=mask, **kwargs).logits[0, :9]
    assert_close(padded, model(row[None], **kwargs).logits[0], limit)
