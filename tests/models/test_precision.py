"""Half precision stores the weights; norms, gates, angles and softmax compute in at least float32."""

import pytest
import torch

from hf_cdb.models.norm import LoopRMSNorm
from hf_cdb.models.rope import LoopRotaryEmbedding, rotate_halves, rotate_pairs

from ..tiny import FAMILIES, RANDOM, assert_close, load_family, prompts, random_ouro

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_half_precision_forward_is_near_float32(family, dtype, implementation):
    kwargs, _ = FAMILIES[family]
    ids = prompts(12, vocab=256)[0][None]
    exact = load_family(family)(ids, **kwargs).logits
    model = load_family(family, dtype=dtype, attn_implementation=implementation)
    logits = model(ids, **kwargs).logits
    assert logits.dtype == dtype
    # a few hundred roundings of relative size eps / 2 each, on logits of spread 2
    assert (logits.float() - exact).abs().mean() < 20 * torch.finfo(dtype).eps


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_float64_stays_float64(family):
    kwargs, tolerance = FAMILIES[family]
    ids = prompts(12, vocab=256)[0][None]
    model = load_family(family, dtype=torch.float64)
    logits = model(ids, **kwargs).logits
    assert logits.dtype == torch.float64
    narrow = load_family(family)(ids, **kwargs).logits
    difference = (logits - narrow).abs().max().item()
    assert 0 < difference < tolerance
    # nothing on the way was rounded to float32: a change far below its resolution comes through
    model.get_output_embeddings().weight.data *= 1 + 1e-12
    model.get_input_embeddings().weight.data *= 1 + 1e-12
    assert 0 < (model(ids, **kwargs).logits - logits).abs().max() < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_angles_survive_casting_the_model(family, dtype):
    """L-04: `model.to(bfloat16)` rounds every buffer, and casting back cannot restore it."""
    model = load_family(family)
    rotary = model.model.rotary_emb if family == "ouro" else model.rotary_emb
    before = rotary.inv_freq.clone()
    positions = torch.tensor([[0, 1, 200]])
    cos, sin = rotary(torch.zeros(1), positions)
    for _ in range(2):
        model.to(dtype)
        assert rotary.inv_freq.dtype == torch.float32
        assert torch.equal(rotary.inv_freq, before)
        half_cos, half_sin = rotary(torch.zeros(1, dtype=dtype), positions)
        assert half_cos.dtype == torch.float32
        assert torch.equal(half_cos, cos)
        assert torch.equal(half_sin, sin)
    model.float()
    assert torch.equal(rotary.inv_freq, before)


def test_gate_and_exit_distribution_in_half_precision():
    for dtype in HALF:
        output = load_family("ouro", dtype=dtype)(prompts(12, vocab=256)[0][None])
        assert output.gate_logits.dtype == output.exit_pdf.dtype == torch.float32
        torch.testing.assert_close(output.exit_pdf.sum(-1), torch.ones(1, 12))


def test_norm_by_hand_and_beyond_the_range_of_float16():
    norm = LoopRMSNorm(4, eps=0.0)
    x = torch.tensor([[3.0, -3.0, 3.0, 3.0], [1.0, 2.0, 2.0, 4.0]])
    norm.weight.data = torch.tensor([1.0, 2.0, 1.0, 0.5])
    expected = torch.tensor([[1.0, -2.0, 1.0, 0.5], [0.4, 1.6, 0.8, 0.8]])
    torch.testing.assert_close(norm(x), expected)
    large = norm.half()(torch.full((1, 4), 1000.0, dtype=torch.float16))  # its square overflows float16
    torch.testing.assert_close(large, norm.weight[None])


def test_statistics_of_the_norm_are_float32():
    torch.manual_seed(0)
    x = torch.randn(4, 512).bfloat16()
    norm = LoopRMSNorm(512, eps=1e-6).bfloat16()
    wide = x.float()
    exact = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(norm(x), exact)


def test_softmax_of_eager_attention_is_float32():
    from hf_cdb.models.attention import eager_attention

    torch.manual_seed(0)
    module = torch.nn.Module()
    module.num_key_value_groups = 1
    query, key, value = torch.randn(3, 1, 2, 5, 16).bfloat16()
    _, weights = eager_attention(module, query, key, value, None, scaling=0.25)
    scores = (query @ key.transpose(-1, -2)) * 0.25
    assert torch.equal(weights, scores.float().softmax(-1).bfloat16())


def test_attention_dropout_drops_in_training_only():
    model = random_ouro(attention_dropout=0.5)
    ids = prompts(9)[0][None]
    assert torch.equal(model(ids).logits, random_ouro()(ids).logits)
    model.train()
    assert not torch.equal(model(ids).logits, model(ids).logits)


def test_gate_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        output = load_family("ouro")(prompts(12, vocab=256)[0][None])
    assert output.gate_logits.dtype == output.exit_pdf.dtype == torch.float32
    torch.testing.assert_close(output.exit_pdf.sum(-1), torch.ones(1, 12))


def test_rotations_by_hand():
    config = random_ouro(hidden_size=4, num_attention_heads=1, rope_parameters={"rope_theta": 100.0}).config
    rotary = LoopRotaryEmbedding(config)
    torch.testing.assert_close(rotary.inv_freq, torch.tensor([1.0, 0.1]))
    cos, sin = rotary(torch.zeros(1, dtype=torch.float64), torch.tensor([[3]]))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 4)
    a, b = torch.tensor(3.0).double(), torch.tensor(0.3).double()
    halves = [a.cos() - 3 * a.sin(), 2 * b.cos() - 4 * b.sin(), 3 * a.cos() + a.sin(), 4 * b.cos() + 2 * b.sin()]
    assert_close(rotate_halves(x, cos, sin).flatten(), torch.stack(halves), 1e-7)
    pairs = [a.cos() - 2 * a.sin(), 2 * a.cos() + a.sin(), 3 * b.cos() - 4 * b.sin(), 4 * b.cos() + 3 * b.sin()]
    assert_close(rotate_pairs(x, cos, sin).flatten(), torch.stack(pairs), 1e-7)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 2.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 2.0},
    ],
    ids=lambda scaling: scaling["rope_type"],
)
@torch.no_grad()
def test_scaled_rotary_embeddings_of_ouro(scaling):
    model = random_ouro(rope_scaling=scaling, rope_theta=1e4, max_position_embeddings=64)
    assert model.config.rope_parameters["rope_theta"] == 1e4
    ids = prompts(9)[0][None]
    plain = random_ouro(rope_theta=1e4, max_position_embeddings=64)(ids).logits
    assert (torch.equal(model(ids).logits, plain)) is (scaling["rope_type"] == "dynamic")
    rotary = model.model.rotary_emb
    if scaling["rope_type"] == "yarn":
        cos, _ = rotary(torch.zeros(1), torch.tensor([[0]]))
        assert rotary.attention_scaling != 1
        assert torch.equal(cos, torch.full_like(cos, rotary.attention_scaling))
    if scaling["rope_type"] == "dynamic":
        before = rotary.inv_freq.clone()
        model(prompts(100)[0][None])
        assert not torch.equal(rotary.inv_freq, before)
    if scaling["rope_type"] == "linear":
        halved = random_ouro(rope_theta=1e4)(ids, position_ids=torch.arange(9) * 0.5)
        assert_close(model(ids).logits, halved.logits, 1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_batch_shape_changes_tokens_only_at_near_ties(family):
    """E-01 for plain generate: float32 agrees at every batch size; bfloat16 differs where the margin is rounding."""
    model = RANDOM[family](eos_token_id=None, pad_token_id=0)
    ids = prompts(7)[0][None]

    def run(rows):
        return model.generate(
            ids.expand(rows, -1), max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
        )

    alone = run(1)
    for rows in (2, 4, 8):
        assert torch.equal(run(rows).sequences, alone.sequences.expand(rows, -1))
    model.bfloat16()
    alone = run(1)
    for rows in (2, 4, 8):
        batch = run(rows)
        for row in range(rows):
            differs = (batch.sequences[row] != alone.sequences[0]).nonzero().flatten()
            if len(differs):
                best = alone.logits[differs[0] - ids.shape[1]][0].float().topk(2).values
                assert (best[0] - best[1]) / best[0].abs() < 0.05
