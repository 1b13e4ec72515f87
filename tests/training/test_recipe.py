from pathlib import Path

import pytest
import yaml

from hf_cdb.training.recipe import build_config
from hf_cdb.training.recipe_file import load_recipe, recipe_from_dict, write_recipe

from .tokens import tokenizer

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))
SMOKE = next(path for path in CONFIGS if path.stem == "smoke-ouro")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_recipes_of_the_repository(path, tmp_path):
    recipe = load_recipe(path)
    config = build_config(recipe, tokenizer())
    assert config.vocab_size == len(tokenizer())
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    for key, value in recipe.model.items():
        assert getattr(config, key, config.to_dict().get(key)) == value
    write_recipe(recipe, tmp_path)
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_overrides():
    recipe = load_recipe(
        SMOKE, ["steps=9", "optimizer.muon_lr=7e-3", "model.hidden_size=64", "data.task_shares={add: 2}"]
    )
    assert (recipe.steps, recipe.optimizer.muon_lr, recipe.model["hidden_size"]) == (9, 0.007, 64)
    assert recipe.data.task_shares == {"add": 2}
    changed = {"steps", "optimizer.muon_lr", "model.hidden_size", "data.task_shares.add"}
    assert set(recipe.differences(load_recipe(SMOKE))) == changed


def test_measurements_and_checkpoints_are_no_difference():
    other = load_recipe(SMOKE, ["evaluation.every=5", "checkpoint.keep=9", "log_every=3"])
    assert other != load_recipe(SMOKE)
    assert other.differences(load_recipe(SMOKE)) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["stepz=3"], ["'stepz'", "Did you mean 'steps'"]),
        (["optimizer.lr=3"], ["recipe: optimizer", "'lr'", "unknown"]),
        (["model.hiden_size=3"], ["'hiden_size'", "OuroConfig", "Did you mean 'hidden_size'"]),
        (["model.vocab_size=3"], ["vocab_size", "tokenizer", "data.vocab_size"]),
        (["model.model_type=llama"], ["model_type='llama'", "ouro, huginn_raven"]),
        (["objective.kind=mean"], ["kind='mean'", "'loops'"]),
        (["objective.kind=random-depth", "objective.loop_weights=null"], ["kind='random-depth'", "'ouro'"]),
        (["objective.kind=expected"], ["loop_weights=[1, 1, 2]", "kind='expected'"]),
        (["objective.loop_weights=[1, 1]"], ["loop_weights=[1, 1]", "2 values for 3 loops"]),
        (["objective.loop_weights=[0, 0, 0]"], ["loop_weights", "above 0"]),
        (["steps=0"], ["steps=0", "at least 1"]),
        (["steps=many"], ["steps='many'", "int is needed"]),
        (["optimizer.muon_lr=fast"], ["muon_lr='fast'", "float is needed"]),
        (["optimizer.muon_lr=0"], ["muon_lr=0.0", "above 0"]),
        (["optimizer.flat_until=1.5"], ["flat_until=1.5", "at most 1"]),
        (["data.task_shares={sums: 1}"], ["'sums'", "add"]),
        (["data.task_shares={add: -1}"], ["add=-1", "at least 0"]),
        (["data.text_rows=0", "data.task_rows=0"], ["text_rows=0", "task_rows=0"]),
        (["checkpoint.every_steps=0"], ["every_steps=0"]),
        (["evaluation.final_chapters=0"], ["final_chapters=0"]),
        (["embedding_std=0"], ["embedding_std=0.0"]),
        (["mixed_precision=fp16"], ["mixed_precision='fp16'", "bf16"]),
        (["attention=flash_attention_2"], ["attention='flash_attention_2'", "sdpa"]),
        (["save_dtype=int8"], ["save_dtype='int8'", "float16"]),
        (["compile=1"], ["compile=1", "bool is needed"]),
        (["data=3"], ["data=3", "section"]),
        (["steps.more=3"], ["steps.more=3", "not a section"]),
        (["steps"], ["'steps'", "key=value"]),
        (["steps=[1"], ["steps=[1", "no YAML"]),
        (["data={length: 1, length: 2}"], ["'length' stands twice"]),
    ],
)
def test_refused(overrides, words):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        load_recipe(SMOKE, overrides)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


def test_what_no_model_can_be_built_from_is_refused():
    with pytest.raises(ValueError, match="hidden_size=32 is not a multiple of num_attention_heads=3"):
        build_config(load_recipe(SMOKE, ["model.num_attention_heads=3"]), tokenizer())
    with pytest.raises(ValueError, match="length=64 exceeds the 32 positions"):
        build_config(load_recipe(SMOKE, ["model.max_position_embeddings=32"]), tokenizer())


def test_files_that_are_no_recipes(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        load_recipe(tmp_path / "none.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(ValueError, match="holds list, but a mapping"):
        load_recipe(tmp_path / "list.yaml")
    values = yaml.safe_load(SMOKE.read_text())
    del values["objective"]
    with pytest.raises(ValueError, match="the key 'objective' is missing"):
        recipe_from_dict(values)


def test_a_recipe_that_is_no_utf_8_is_named(tmp_path):
    path = tmp_path / "odd.yaml"
    path.write_bytes(SMOKE.read_bytes() + "# né".encode("latin-1"))
    with pytest.raises(ValueError, match=r"config='.*odd\.yaml' is no UTF-8 text .*0xe9"):
        load_recipe(path)
