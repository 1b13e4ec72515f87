import pytest
import torch

from hf_cdb.adapters import adapter_for
from hf_cdb.bench.models import RANDOM, check_device, load_model, load_tokenizer, plain_generation


@pytest.mark.parametrize(
    ("name", "per_loop", "share"),
    [
        # By hand: layers * (4 h^2 + 3 h i + 4 h) + h in the core, vocabulary * h + h + 1 beside it.
        ("random-ouro-20m", 6 * (4 * 512**2 + 3 * 512 * 1408 + 4 * 512) + 512, 0.217),
        # 4 layers of 4 h^2 + 3 h i + 4 h + 2 h (bias of queries and keys), and 2 h^2 that inject the prompt.
        ("random-huginn-20m", 4 * (4 * 576**2 + 3 * 576 * 1952 + 6 * 576) + 2 * 576**2, 1.21),
    ],
)
def test_sizes_of_random_models(name, per_loop, share):
    once, core = adapter_for(load_model(name)).parameter_counts()
    assert core == per_loop
    assert once / core == pytest.approx(share, abs=2e-3)


@pytest.mark.parametrize(
    ("name", "layers", "head"),
    [
        ("random-ouro-20m", 0, 8192 * 512 + 513),
        # Two layers, sized as above, and the norm before the head, which runs with the layers' tokens or with its own.
        ("random-huginn-20m", 2 * (4 * 576**2 + 3 * 576 * 1952 + 6 * 576) + 576, 8192 * 576),
    ],
)
def test_what_of_the_coda_runs_all_tokens_of_a_prompt(name, layers, head):
    assert adapter_for(load_model(name)).coda_layers_share() == pytest.approx(layers / (layers + head))


def test_devices_that_are_not_here():
    check_device("cpu")
    for device in ("foo", "cpu:x", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(ValueError, match=f"device='{device}' cannot be used here"):
            check_device(device)


def test_the_100m_model_has_the_boundary_share_of_the_published_one():
    shares = []
    for name in ("random-ouro-100m", "random-ouro-1.4b"):
        with torch.device("meta"):
            once, core = adapter_for(load_model(name, device="meta")).parameter_counts()
        shares.append(once / core)
    assert shares[1] == pytest.approx(0.0816, abs=1e-4)
    assert shares[0] == pytest.approx(shares[1], abs=2e-3)


def test_random_weights_do_not_depend_on_the_state_of_the_generator_and_leave_it():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = load_model("random-ouro-20m").lm_head.weight
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert torch.equal(load_model("random-ouro-20m").lm_head.weight, first)


@pytest.mark.parametrize("name", ["tiny-ouro", "tiny-huginn"])
def test_embedded_models_generate_to_the_asked_length(name):
    model = load_model(name)
    ids = load_tokenizer(name)("In the beginning", return_tensors="pt").input_ids
    output = model.generate(ids, max_new_tokens=3, **plain_generation(model))
    assert output.shape == (1, ids.shape[1] + 3)
    assert model.generation_config.eos_token_id is None


def test_dtype():
    assert load_model("tiny-ouro", dtype="bfloat16").dtype == torch.bfloat16


def test_tokens_of_texts_are_in_the_vocabulary_of_random_models():
    size = len(load_tokenizer("random-huginn-20m"))
    assert all(size <= sizes.get("vocab_size", size) for sizes in RANDOM.values())


def test_a_misspelt_random_model_is_refused_with_a_hint():
    with pytest.raises(ValueError, match=r"random-ouro-20b.*Did you mean random-ouro-20m\?"):
        load_model("random-ouro-20b")
