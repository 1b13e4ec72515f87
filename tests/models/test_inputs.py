"""Bad input is refused with an error that names the argument, the value, the reason and the way out."""

import pytest
import torch

from ..tiny import FAMILIES, RANDOM, prompts, random_huginn, random_ouro

IDS = prompts(6)[0][None]


@pytest.fixture(params=FAMILIES)
def model(request):
    return RANDOM[request.param]()


def refused(words, run, error=ValueError):
    with pytest.raises(error) as caught:
        run()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"exit_at_step": 4}, ["exit_at_step=4", "total_ut_steps=4", "0 to 3"]),
        ({"exit_at_step": -1}, ["exit_at_step=-1", "0 to 3"]),
        ({"exit_at_step": 1.0}, ["exit_at_step=1.0", "integer"]),
        ({"exit_at_step": True}, ["exit_at_step=True"]),
        ({"exit_threshold": 0.0}, ["exit_threshold=0.0", "(0, 1]"]),
        ({"exit_threshold": 1.01}, ["exit_threshold=1.01", "(0, 1]"]),
        ({"exit_threshold": float("nan")}, ["exit_threshold=nan"]),
        ({"exit_at_step": 1, "exit_threshold": 0.5}, ["exit_at_step=1", "exit_threshold=0.5", "one of them"]),
        ({"exit_at_step": 3, "exit_threshold": 1.0}, ["exit_at_step=3", "exit_threshold=1.0"]),
        ({"exit_at_step": 0, "use_weighted_exit": True}, ["exit_at_step=0", "use_weighted_exit=True"]),
        ({"exit_threshold": 1.0, "use_weighted_exit": True}, ["exit_threshold=1.0", "use_weighted_exit=True"]),
    ],
)
def test_exits_of_ouro(arguments, words):
    """L-03: the published code ignores these without a word."""
    model = random_ouro()
    refused(words, lambda: model(IDS, **arguments))
    refused(words, lambda: model.generate(IDS, max_new_tokens=2, **arguments))


@pytest.mark.parametrize("loops", [0, 5, -1])
def test_loops_of_ouro_model(loops):
    refused([f"loops={loops}", "total_ut_steps=4"], lambda: random_ouro().model(IDS, loops=loops))


@pytest.mark.parametrize("steps", [0, -2, 1.5, True, "4", (1, 2, 3), (0, 0), (-1, 4), torch.tensor([1.5])], ids=str)
def test_num_steps_of_huginn(steps):
    model = random_huginn()
    refused(["num_steps=", "at least 1"], lambda: model(IDS, num_steps=steps))
    refused(["num_steps=", "at least 1"], lambda: model.generate(IDS, max_new_tokens=2, num_steps=steps))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"init_scale": -1.0}, ["init_scale=-1.0"]),
        ({"init_scale": float("nan")}, ["init_scale=nan"]),
        ({"init_scale": 1.0, "init_seed": torch.tensor([1, 2])}, ["init_seed", "2 values", "1 rows"]),
        ({"input_states": torch.zeros(1, 5, 32)}, ["input_states", "(1, 5, 32)", "(1, 6, 32)"]),
        ({"input_states": torch.zeros(1, 6, 32), "init_scale": 1.0}, ["input_states", "init_scale=1.0"]),
    ],
)
def test_start_state_of_huginn(arguments, words):
    refused(words, lambda: random_huginn()(IDS, **arguments))


def test_tokens(model):
    embeds = model.get_input_embeddings()(IDS)
    refused(["input_ids and inputs_embeds", "none"], lambda: model())
    refused(["input_ids and inputs_embeds", "both"], lambda: model(IDS, inputs_embeds=embeds))
    refused(["input_ids", "(6,)", "ids[None]"], lambda: model(IDS[0]))
    refused(["input_ids", "float32"], lambda: model(IDS.float()))
    refused(["inputs_embeds", "(6, 32)"], lambda: model(inputs_embeds=embeds[0]))
    refused(["inputs_embeds", "(1, 6, 31)", "32"], lambda: model(inputs_embeds=embeds[..., 1:]))


def test_masks(model):
    refused(["attention_mask", "(1, 5)", "[1, 6]"], lambda: model(IDS, attention_mask=torch.ones(1, 5)))
    refused(["attention_mask", "(2, 6)", "1 rows"], lambda: model(IDS, attention_mask=torch.ones(2, 6).long()))
    refused(["attention_mask", "3 dimensions"], lambda: model(IDS, attention_mask=torch.ones(1, 1, 6)))
    refused(["attention_mask", "(1, 1, 5, 6)"], lambda: model(IDS, attention_mask=torch.zeros(1, 1, 5, 6)))
    refused(["attention_mask", "(1, 1, 6, 7)"], lambda: model(IDS, attention_mask=torch.zeros(1, 1, 6, 7)))
    additive = torch.full((1, 6), -1e4)
    refused(["attention_mask", "other than 0 and 1"], lambda: model(IDS, attention_mask=additive))
    integers = torch.full((1, 1, 6, 6), -10000)
    refused(["attention_mask", "integer", "other than 0 and 1"], lambda: model(IDS, attention_mask=integers))
    cache = model(IDS).cache
    short = torch.ones(1, 1).long()
    refused(
        ["attention_mask", "(1, 1)", "6 cached", "[1, 7]"],
        lambda: model(IDS[:, :1], cache=cache, attention_mask=short),
    )


def test_things_that_are_no_tensors_or_hold_nothing(model):
    refused(["input_ids", "list"], lambda: model([[1, 2]]))
    refused(["attention_mask", "list"], lambda: model(IDS, attention_mask=[[1] * 6]))
    refused(["attention_mask", "dict"], lambda: model(IDS, attention_mask={"sliding_attention": None}))
    refused(["input_ids", "(1, 0)"], lambda: model(IDS[:, :0]))
    refused(["input_ids", "(0, 6)"], lambda: model(IDS[:0]))


def test_labels(model):
    pair = torch.cat((IDS, IDS))
    for training in (False, True):
        model.train(training)
        refused(["labels", "(6, 2)", "(2, 6)"], lambda: model(pair, labels=pair.reshape(6, 2)))
        refused(["labels", "(1, 5)", "(1, 6)"], lambda: model(IDS, labels=IDS[:, :5]))
        refused(["labels", "float32"], lambda: model(IDS, labels=IDS.float()))
        refused(["logits_to_keep=2", "labels"], lambda: model(IDS, labels=IDS, logits_to_keep=2))


@torch.no_grad()
def test_caches_that_cannot_follow(model):
    from transformers import DynamicCache, MistralConfig, StaticCache

    sliding = DynamicCache(config=MistralConfig(num_hidden_layers=40, sliding_window=3))
    refused(["cache", "DynamicSlidingWindowLayer", "forget"], lambda: model(IDS, cache=sliding))
    filled = model(IDS).cache
    refused(["cache", "1 rows", "has 2"], lambda: model(torch.cat((IDS, IDS))[:, :1], cache=filled))
    static = StaticCache(config=model.config, max_cache_len=16)
    model(IDS, cache=static)
    for wrong in (1, 3, 8):
        mask = torch.ones(1, wrong).long()
        refused(["attention_mask", "[1, 7]"], lambda m=mask: model(IDS[:, :1], attention_mask=m, cache=static))
    right = model(IDS[:, :1], attention_mask=torch.ones(1, 7).long(), cache=static)
    assert (right.logits - model(IDS[:, :1], cache=filled).logits).abs().max() < 1e-4
    refused(["cache_implementation='paged'", "cdb=True"], lambda: model.generate(IDS, cache_implementation="paged"))


def test_numbers_of_other_libraries_and_wrong_kinds():
    import numpy as np

    ouro, huginn = random_ouro(), random_huginn()
    assert torch.equal(ouro(IDS, exit_at_step=np.int64(1)).logits, ouro(IDS, exit_at_step=1).logits)
    assert torch.equal(ouro(IDS, exit_threshold=torch.tensor(0.5)).logits, ouro(IDS, exit_threshold=0.5).logits)
    refused(["exit_threshold='0.5'"], lambda: ouro(IDS, exit_threshold="0.5"))
    refused(["loops='2'"], lambda: ouro.model(IDS, loops="2"))
    refused(["loops=True"], lambda: ouro.model(IDS, loops=True))
    refused(["init_seed=1.5"], lambda: huginn(IDS, init_scale=1.0, init_seed=1.5))
    refused(["init_scale=inf"], lambda: huginn(IDS, init_scale=float("inf")))
    refused(["init_scale='1'"], lambda: huginn(IDS, init_scale="1"))
    options = {"max_new_tokens": 2, "num_beams": 2, "do_sample": False}
    for name, value in (("exit_threshold", 0.5), ("exit_at_step", 1)):
        tensor = ouro.generate(IDS, **{name: torch.tensor(value)}, **options)
        assert torch.equal(tensor, ouro.generate(IDS, **{name: value}, **options))
    noise = {"init_scale": torch.tensor(1.0), "init_seed": torch.tensor([3])}
    plain = huginn.generate(torch.cat((IDS, IDS)), init_scale=1.0, init_seed=3, **options)
    assert torch.equal(huginn.generate(torch.cat((IDS, IDS)), **noise, **options), plain)


def test_a_cache_by_position_beside_the_older_name_left_empty(model):
    cache = model(IDS).cache
    positional = model(IDS[:, :1], None, None, cache, past_key_values=None)
    assert positional.cache is cache


def test_positions(model):
    refused(["position_ids", "(5,)", "[6]"], lambda: model(IDS, position_ids=torch.arange(5)))
    refused(["position_ids", "(2, 6)", "[1, 6]"], lambda: model(IDS, position_ids=torch.arange(6).expand(2, -1)))


def test_unknown_arguments_are_refused_with_the_nearest_name():
    model = random_ouro()
    refused(["exit_at_stp", "`exit_at_step`"], lambda: model(IDS, exit_at_stp=1), TypeError)
    refused(["output_hidden_state", "`output_hidden_states`"], lambda: model(IDS, output_hidden_state=True), TypeError)
    refused(["num_stepz", "`num_steps`"], lambda: random_huginn()(IDS, num_stepz=1), TypeError)
    refused(["cdb_threshold"], lambda: model.generate(IDS, cdb_threshold=1))


def test_attention_weights_need_the_eager_implementation(model):
    words = ["output_attentions=True", "'sdpa'", "'eager'"]
    refused(words, lambda: model(IDS, output_attentions=True))
    refused(words, lambda: model.generate(IDS, output_attentions=True, return_dict_in_generate=True))
    model.set_attn_implementation("eager")
    assert model(IDS, output_attentions=True).attentions
