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
