"""Plain `generate`, without cdb: caches, chunks, decoding modes."""

import pytest
import torch
from transformers import DynamicCache, StaticCache, pipeline
from transformers.cache_utils import EncoderDecoderCache

from ..tiny import FAMILIES, RANDOM, assert_close, left_pad, load_family, prompts, random_huginn, random_ouro


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture
def model(family):
    return load_family(family, dtype=torch.float64)


@pytest.fixture
def kwargs(family):
    return FAMILIES[family][0]


@pytest.fixture
def ids():
    return prompts(9, vocab=256)[0][None]


def greedy(model, ids, **kwargs):
    return model.generate(ids, do_sample=False, max_new_tokens=8, **kwargs)


def test_cached_equals_recompute_at_every_step(model, ids, kwargs):
    """B-01: with one slot per layer the first token is right and the text breaks down after about two."""
    cached, recomputed = (
        greedy(model, ids, use_cache=use_cache, return_dict_in_generate=True, output_logits=True, **kwargs)
        for use_cache in (True, False)
    )
    assert torch.equal(cached.sequences, recomputed.sequences)
    for step, (left, right) in enumerate(zip(cached.logits, recomputed.logits, strict=True)):
        assert_close(left, right, 1e-6, f"token {step}")


@torch.no_grad()
def test_a_loop_gets_slots_of_its_own(family, model, ids, kwargs):
    cache = model(ids, **kwargs).cache
    loops = kwargs.get("num_steps", 4)
    outside, core = (0, 3) if family == "ouro" else (4, 4)
    assert len(cache.layers) == outside + core * loops
    lengths = [layer.get_seq_length() for layer in cache.layers]
    assert lengths == [9] * len(cache.layers)
    first, second = (cache.layers[outside + loop * core].keys for loop in (0, 1))
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("pieces", [(4, 5), (1,) * 9, (8, 1), (2, 3, 4)])
@pytest.mark.parametrize("make_cache", [DynamicCache, lambda config=None: DynamicCache(config=config), None])
@torch.no_grad()
def test_prompt_in_pieces_equals_the_prompt_whole(model, ids, kwargs, pieces, make_cache):
    """B-06 and L-01: offsets moved inside a step, several new tokens onto a filled cache."""
    whole = model(ids, **kwargs).logits
    if make_cache is None:
        cache = StaticCache(config=model.config, max_cache_len=16)
    else:
        cache = DynamicCache() if make_cache is DynamicCache else make_cache(config=model.config)
    parts = []
    for chunk in ids.split(pieces, dim=1):
        output = model(chunk, cache=cache, **kwargs)
        assert output.cache is cache
        parts.append(output.logits)
    assert_close(torch.cat(parts, dim=1), whole, 1e-9)


@torch.no_grad()
def test_pieces_of_a_left_padded_batch(model, kwargs):
    rows = prompts(3, 9, vocab=256)
    ids, mask = left_pad(rows)
    whole = model(ids, attention_mask=mask, **kwargs).logits
    first = model(ids[:, :7], attention_mask=mask[:, :7], **kwargs)
    second = model(ids[:, 7:], attention_mask=mask, cache=first.cache, **kwargs)
    assert_close(second.logits, whole[:, 7:], 1e-9)


@torch.no_grad()
def test_query_position_is_the_same_in_every_loop(family, model, ids, kwargs):
    """B-06: a cache length advanced inside the step rotates later readers by one too many."""
    seen = []
    core = model.model.layers[0].self_attn if family == "ouro" else model.transformer["core_block"][0].attn
    core.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["position_embeddings"]), with_kwargs=True
    )
    cache = model(ids, **kwargs).cache
    seen.clear()
    model(ids[:, :1], cache=cache, **kwargs)
    cos, sin = model.get_submodule("model" if family == "ouro" else "").rotary_emb(
        model.lm_head.weight, torch.tensor([[9]])
    )
    assert len(seen) == kwargs.get("num_steps", 4)
    assert all(torch.equal(c, cos) and torch.equal(s, sin) for c, s in seen)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_both_names_of_the_cache_work(model, ids, kwargs, name):
    """L-08: a forward that swallows the name decodes without a past, and nothing says so."""
    whole = model(ids, **kwargs).logits[:, -1]
    cache = model(ids[:, :-1], **kwargs).cache
    stepped = model(ids[:, -1:], **{name: cache}, **kwargs)
    assert_close(stepped.logits[:, -1], whole, 1e-9)
    assert stepped.cache is cache
    assert stepped.past_key_values is cache
    assert cache.get_seq_length() == ids.shape[1]


def test_both_names_at_once_must_agree(model, ids, kwargs):
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model(ids, cache=DynamicCache(), past_key_values=DynamicCache(), **kwargs)
    cache = DynamicCache()
    assert model(ids, cache=cache, past_key_values=cache, **kwargs).cache is cache
    assert model(ids, past_key_values=None, use_cache=False, **kwargs).cache is None


@torch.no_grad()
def test_no_cached_position_is_ever_dropped(model, ids, kwargs):
    """Changing any cached token changes the logits, so each of them was read."""
    cache = model(ids[:, :-1], **kwargs).cache
    reference = model(ids[:, -1:], cache=cache, **kwargs).logits
    for position in range(ids.shape[1] - 1):
        changed = ids.clone()
        changed[0, position] = (changed[0, position] + 1) % 256
        cache = model(changed[:, :-1], **kwargs).cache
        assert (model(ids[:, -1:], cache=cache, **kwargs).logits - reference).abs().max() > 1e-6, position


@pytest.mark.parametrize(
    "options",
    [
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"prefill_chunk_size": 4},
        {"prompt_lookup_num_tokens": 3},
        {"past_key_values": "fresh"},
    ],
    ids=str,
)
def test_greedy_is_the_same_by_every_route(model, ids, kwargs, options):
    expected = greedy(model, ids, use_cache=False, **kwargs)
    if options.get("past_key_values"):
        options = {"cache": DynamicCache(config=model.config)}
    assert torch.equal(greedy(model, ids, **options, **kwargs), expected)


def test_static_cache_of_a_padded_batch(model, kwargs):
    ids, mask = left_pad(prompts(3, 9, vocab=256))
    expected = greedy(model, ids, attention_mask=mask, **kwargs)
    assert torch.equal(greedy(model, ids, attention_mask=mask, cache_implementation="static", **kwargs), expected)


@pytest.mark.parametrize("same", [True, False])
def test_assisted_decoding(family, model, ids, kwargs, same):
    """L-01: the draft is verified by feeding several tokens onto the cache, and rejected ones are cropped."""
    assistant = load_family(family, dtype=torch.float64)
    if not same:
        for parameter in assistant.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    expected = greedy(model, ids, **kwargs)
    assert torch.equal(greedy(model, ids, assistant_model=assistant, **kwargs), expected)


def test_beams_cached_equal_uncached(model, kwargs):
    ids, mask = left_pad(prompts(5, 9, vocab=256))
    options = {"attention_mask": mask, "num_beams": 3, "num_return_sequences": 2, **kwargs}
    cached = greedy(model, ids, **options)
    assert cached.shape[0] == 4
    assert torch.equal(cached, greedy(model, ids, use_cache=False, **options))


def test_sampling_repeats_with_its_seed_and_is_not_shifted_by_the_cache(model, ids, kwargs):
    def sample(**options):
        torch.manual_seed(7)
        return model.generate(
            ids, do_sample=True, temperature=1.5, max_new_tokens=8, num_return_sequences=3, **options, **kwargs
        )

    first = sample()
    assert torch.equal(first, sample())
    assert torch.equal(first, sample(use_cache=False))
    assert len({tuple(row) for row in first.tolist()}) == 3


def test_inputs_embeds(model, ids, kwargs):
    expected = greedy(model, ids, **kwargs)[:, ids.shape[1] :]
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(greedy(model, None, inputs_embeds=embeds, **kwargs), expected)


def test_more_rows_of_one_prompt_equal_the_prompt(model, ids, kwargs):
    expected = greedy(model, ids, **kwargs)
    assert torch.equal(greedy(model, ids.expand(4, -1), **kwargs), expected.expand(4, -1))


def test_exit_arguments_reach_generate():
    model = load_family("ouro", dtype=torch.float64)
    ids = prompts(9, vocab=256)[0][None]
    by_step = {greedy(model, ids, exit_at_step=step).tolist()[0][9:].__str__() for step in range(4)}
    assert len(by_step) == 4
    assert torch.equal(greedy(model, ids, exit_at_step=3), greedy(model, ids))
    assert torch.equal(greedy(model, ids, exit_threshold=1.0), greedy(model, ids))
    for options in ({"exit_at_step": 1}, {"exit_threshold": 0.5}, {"use_weighted_exit": True}):
        assert torch.equal(greedy(model, ids, **options), greedy(model, ids, use_cache=False, **options)), options


def test_config_defaults_of_the_exit():
    ids = prompts(9, vocab=256)[0][None]
    for default, explicit in [
        ({"early_exit_threshold": 0.5}, {"exit_threshold": 0.5}),
        ({"early_exit_step": 1}, {"exit_at_step": 1}),
    ]:
        configured = load_family("ouro", **default)
        assert torch.equal(configured(ids).logits, load_family("ouro")(ids, **explicit).logits)
        # L-03: the config's default does not count against the call's own wish
        weighted = configured(ids, use_weighted_exit=True).logits
        assert torch.equal(weighted, load_family("ouro")(ids, use_weighted_exit=True).logits)
    assert (weighted - load_family("ouro")(ids).logits).abs().max() > 1e-2


@pytest.mark.parametrize("steps", [5, torch.tensor(5), torch.tensor([5]), torch.tensor([[5]]), (2, 3), (0, 5)], ids=str)
def test_every_form_of_num_steps(steps):
    """L-05: a 0-d tensor made the published code raise."""
    model = load_family("huginn")
    ids = prompts(9, vocab=256)[0][None]
    assert torch.equal(model(ids, num_steps=steps).logits, model(ids, num_steps=5).logits)
    expected = greedy(model, ids, num_steps=5, num_beams=2)
    assert torch.equal(greedy(model, ids, num_steps=steps, num_beams=2), expected)


def test_num_steps_may_exceed_the_trained_number():
    model = random_huginn()
    ids = prompts(5)[0][None]
    assert model(ids, num_steps=20).logits.isfinite().all()
    assert greedy(model, ids, num_steps=20).shape == (1, 13)


@torch.no_grad()
def test_position_ids_in_every_form(model, ids, kwargs):
    """L-05: positions per row made the published code raise, and a cached step without them restarted at 0."""
    batch = ids.expand(2, -1)
    expected = model(batch, **kwargs).logits
    positions = torch.arange(9)
    for form in (positions, positions[None], positions.expand(2, -1), positions.int()):
        assert_close(model(batch, position_ids=form, **kwargs).logits, expected, 1e-9)
    # rotary attention knows differences only
    assert_close(model(batch, position_ids=positions + 7, **kwargs).logits, expected, 1e-9)
    cache = model(batch[:, :8], **kwargs).cache
    assert_close(model(batch[:, 8:], cache=cache, **kwargs).logits, expected[:, 8:], 1e-9)


@torch.no_grad()
def test_logits_to_keep(model, ids, kwargs):
    full = model(ids, **kwargs).logits
    assert_close(model(ids, logits_to_keep=2, **kwargs).logits, full[:, -2:], 1e-9)
    assert_close(model(ids, logits_to_keep=torch.tensor([0, 4]), **kwargs).logits, full[:, [0, 4]], 1e-9)


@torch.no_grad()
def test_logits_to_keep_with_an_exit():
    model = load_family("ouro", dtype=torch.float64)
    ids = prompts(9, vocab=256)[0][None]
    for options in ({"exit_threshold": 0.5}, {"use_weighted_exit": True}, {"exit_at_step": 2}):
        full = model(ids, **options)
        kept = model(ids, logits_to_keep=3, **options)
        assert_close(kept.logits, full.logits[:, -3:], 1e-9, str(options))
        assert kept.exit_pdf.shape == full.exit_pdf.shape


@torch.no_grad()
def test_hidden_states_and_attentions(family, model, ids, kwargs):
    model.set_attn_implementation("eager")
    output = model(ids, output_hidden_states=True, output_attentions=True, **kwargs)
    layers = 3 * 4 if family == "ouro" else 2 + 4 * 4 + 2
    assert len(output.attentions) == layers
    assert len(output.hidden_states) == layers + 1
    assert all(state.shape == (1, 9, 64) for state in output.hidden_states)
    assert all(weights.shape == (1, 4, 9, 9) for weights in output.attentions)
    scale = 1.0 if family == "ouro" else 8.0
    assert torch.equal(output.hidden_states[0], model.get_input_embeddings()(ids) * scale)
    if family == "ouro":
        assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    as_tuple = model(ids, return_dict=False, **kwargs)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], output.logits) or (as_tuple[0] - output.logits).abs().max() < 1e-9


def test_a_cache_of_the_wrong_kind_is_refused(family, model, ids, kwargs):
    other = random_ouro(num_hidden_layers=1) if family == "huginn" else random_ouro(num_hidden_layers=2)
    wrong = {
        "tuple": ((torch.zeros(1), torch.zeros(1)),),
        "EncoderDecoderCache": EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "needs at least": DynamicCache(config=other.config),
    }
    for word, cache in wrong.items():
        with pytest.raises(ValueError, match="cache") as error:
            model(ids, cache=cache, **kwargs)
        assert word in str(error.value)


@torch.no_grad()
def test_a_cache_filled_at_another_depth_is_refused():
    ids = prompts(5)[0][None]
    ouro, huginn = random_ouro(), random_huginn()
    shallow = ouro(ids, exit_at_step=1).cache
    assert ouro(ids[:, :1], exit_at_step=1, cache=shallow).logits.shape == (1, 1, 50)
    with pytest.raises(ValueError, match=r"6 positions, but only 0 at loop 3 of the 4"):
        ouro(ids[:, :1], cache=shallow)
    shallow = huginn(ids, num_steps=2).cache
    with pytest.raises(ValueError, match="another number of loops"):
        huginn(ids[:, :1], num_steps=3, cache=shallow)
    deep = huginn(ids, num_steps=3).cache
    huginn(ids[:, :1], num_steps=2, cache=deep)  # right by itself, but it leaves loop 3 behind
    with pytest.raises(ValueError, match="only 5 at loop 3"):
        huginn(ids[:, :1], num_steps=3, cache=deep)


@pytest.mark.parametrize("family", FAMILIES)
def test_end_of_sequence_ids_may_be_a_list(family):
    """G-01: the id in the config is not the id that ends a turn in the chat format."""
    model = RANDOM[family](eos_token_id=0)
    ids = prompts(6)[0][None]
    free = greedy(model, ids, eos_token_id=None)[0, 6:].tolist()
    stop = free[3]
    for eos in (stop, [0, stop]):
        stopped = greedy(model, ids, eos_token_id=eos)[0, 6:].tolist()
        assert stopped == free[: free.index(stop) + 1]
    model.generation_config.eos_token_id = [0, stop]
    assert greedy(model, ids)[0, 6:].tolist() == free[: free.index(stop) + 1]


def test_a_generate_argument_misspelt_is_refused(model, ids):
    with pytest.raises(ValueError, match="num_stepz"):
        model.generate(ids, num_stepz=3)


def tiny_tokenizer(eos="</s>"):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "</s>": 1, "<end>": 2} | {f"w{i}": i for i in range(3, 50)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token=eos, padding_side="left")


@pytest.mark.parametrize("family", FAMILIES)
def test_text_generation_pipeline(family):
    model = RANDOM[family](eos_token_id=None, pad_token_id=0)
    pipe = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    texts = ["w5 w6 w7", "w9 w4 w3 w11 w40 w8"]
    batched = pipe(texts, max_new_tokens=6, do_sample=False, batch_size=2, return_full_text=False)
    for text, result in zip(texts, batched, strict=True):
        alone = pipe(text, max_new_tokens=6, do_sample=False, return_full_text=False)
        assert result[0]["generated_text"] == alone[0]["generated_text"]
        ids = tiny_tokenizer()(text, return_tensors="pt").input_ids
        tokens = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        expected = tiny_tokenizer().decode(tokens, skip_special_tokens=True)
        assert result[0]["generated_text"].split() == expected.split()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tokenizer_with_another_end_is_pointed_out_once(family, caplog):
    """G-01: stock generate goes on past the end of a turn when the config's end id is not the tokenizer's."""
    import transformers

    model = RANDOM[family](eos_token_id=0)
    ids = prompts(6)[0][None]
    transformers.utils.logging.enable_propagation()
    try:
        for _ in range(2):
            model.generate(ids, max_new_tokens=2, tokenizer=tiny_tokenizer(eos="<end>"), pad_token_id=0)
        assert caplog.text.count("The tokenizer ends a sequence") == 1
        assert "<end>" in caplog.text
        caplog.clear()
        agreed = {"eos_token_id": [0, 2], "pad_token_id": 0}
        model.generate(ids, max_new_tokens=2, tokenizer=tiny_tokenizer(eos="<end>"), **agreed)
        assert "The tokenizer ends a sequence" not in caplog.text
    finally:
        transformers.utils.logging.disable_propagation()
