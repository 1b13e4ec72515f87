"""E-03: Huginn's random start state depends on seed and position, not on neighbours, order or the cache."""

import math

import torch

from hf_cdb.models.huginn.start_state import random_start_state

from ..tiny import assert_close, left_pad, load_family, prompts, random_huginn

NOISE = {"num_steps": 3, "init_scale": 1.0}


def test_noise_has_the_published_distribution():
    noise = random_start_state(torch.tensor([[1], [2]]), torch.arange(400)[None], 256, std=0.5)
    assert noise.shape == (2, 400, 256)
    assert noise.dtype == torch.float32
    # a normal cut at 3 standard deviations has variance 1 - 2 * 3 * phi(3) / (Phi(3) - Phi(-3))
    phi = math.exp(-4.5) / math.sqrt(2 * math.pi)
    variance = 1 - 6 * phi / math.erf(3 / math.sqrt(2))
    assert abs(noise.std().item() / 0.5 - math.sqrt(variance)) < 0.01
    assert abs(noise.mean().item()) < 0.005
    assert noise.abs().max() <= 1.5
    assert noise.abs().max() > 1.4
    # neither neighbours nor rows nor channels are correlated
    for left, right in ((noise[0], noise[1]), (noise[0, 1:], noise[0, :-1]), (noise[0, :, 1:], noise[0, :, :-1])):
        assert abs(torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]) < 0.01


def test_noise_is_a_function_of_seed_and_position():
    whole = random_start_state(torch.tensor([[5], [9]]), torch.arange(10)[None], 8, 1.0)
    part = random_start_state(torch.tensor([[9]]), torch.tensor([[7, 3]]), 8, 1.0)
    assert torch.equal(part[0], whole[1, [7, 3]])
    assert not torch.equal(whole[0], whole[1])


def test_scale_of_the_start_state():
    model = random_huginn()
    embeds, positions = torch.zeros(1, 2000, 32), torch.arange(2000)[None]
    start = model.start(embeds, positions, init_scale=2.0)
    # std sqrt(2 / (5 n)) * sqrt(n) times the scale; the cut takes 1.4 %
    assert abs(start.std().item() / (2 * math.sqrt(2 / 5)) - 0.986) < 0.01
    assert torch.equal(model.start(embeds, positions), torch.zeros_like(embeds))


def test_the_global_generator_is_left_alone():
    model = random_huginn()
    state = torch.get_rng_state()
    model(prompts(5)[0][None], **NOISE)
    assert torch.equal(torch.get_rng_state(), state)


def test_default_is_deterministic_and_without_noise():
    model = random_huginn()
    ids = prompts(5)[0][None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert torch.equal(model(ids).logits, model(ids, init_scale=0.0).logits)
    assert torch.equal(model(ids).logits, model(ids, input_states=torch.zeros(1, 5, 32)).logits)
    assert not torch.equal(model(ids).logits, model(ids, init_scale=1.0).logits)


def test_one_seed_alone_in_a_batch_and_in_another_order():
    model = load_family("huginn", dtype=torch.float64)
    rows = prompts(4, 7, 11, vocab=256)
    seeds = torch.tensor([3, 1, 8])
    ids, mask = left_pad(rows)
    with torch.no_grad():
        batch = model(ids, attention_mask=mask, init_seed=seeds, **NOISE).logits
        for index, row in enumerate(rows):
            alone = model(row[None], init_seed=int(seeds[index]), **NOISE).logits[0]
            assert_close(batch[index, -len(row) :], alone, 1e-9, f"row {index}")
            assert (model(row[None], init_seed=2, **NOISE).logits[0] - alone).abs().max() > 1e-3
        order = [2, 0, 1]
        shuffled = model(ids[order], attention_mask=mask[order], init_seed=seeds[order], **NOISE).logits
        assert_close(shuffled[:, -4:], batch[order][:, -4:], 1e-9, "another order")


def test_generation_with_noise_cached_uncached_and_batched():
    model = load_family("huginn", dtype=torch.float64)
    rows = prompts(4, 11, vocab=256)
    ids, mask = left_pad(rows)
    options = {"max_new_tokens": 8, "do_sample": False, **NOISE}
    seeds = torch.tensor([3, 1])
    batch = model.generate(ids, attention_mask=mask, init_seed=seeds, **options)
    uncached = model.generate(ids, attention_mask=mask, init_seed=seeds, use_cache=False, **options)
    assert torch.equal(batch, uncached)
    for index, row in enumerate(rows):
        alone = model.generate(row[None], init_seed=seeds[index], **options)
        assert batch[index, 11:].tolist() == alone[0, len(row) :].tolist()
    beams = model.generate(rows[0][None], init_seed=torch.tensor(3), num_beams=2, **options)
    assert beams.shape == (1, 12)


def test_sampling_is_not_shifted_by_noise():
    model = random_huginn()
    ids = prompts(5)[0][None]

    def sample(**options):
        torch.manual_seed(4)
        model.generate(ids, do_sample=True, max_new_tokens=6, num_steps=3, eos_token_id=None, **options)
        return torch.get_rng_state()

    assert torch.equal(sample(), sample(init_scale=1.0))


def test_noise_in_the_config():
    ids = prompts(5)[0][None]
    noisy = random_huginn(init_scale=1.0, init_seed=4)
    expected = random_huginn()(ids, init_scale=1.0, init_seed=4).logits
    assert torch.equal(noisy(ids).logits, expected)
    assert torch.equal(noisy(ids, init_scale=0.0).logits, random_huginn()(ids).logits)
