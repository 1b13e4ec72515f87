"""`quality` stands for a threshold that was calibrated, under the settings it was calibrated with."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_cdb import CDBConfig
from hf_cdb.adapters import adapter_for
from hf_cdb.calibrated import Calibrated, remember
from hf_cdb.exits import Never

from .test_config import refused
from .tiny import random_huginn, random_ouro

FOUND = Calibrated(
    quality=0.9,
    exit_threshold=0.11,
    exit_rule="confidence",
    lookahead=0,
    kv_policy="last_exited",
    kv_slots=None,
    min_depth=1,
    max_depth=4,
    loss="agreement",
    confidence=0.95,
    data="letters",
    examples=300,
    mean_depth=2.5,
    held_out={"examples": 200, "loss": 0.05, "low": 0.02, "high": 0.08, "mean_depth": 2.6},
)
IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])


def threshold(model, **settings):
    return CDBConfig(**settings).resolve(adapter_for(model)).exit_rule.threshold


@pytest.fixture
def calibrated(ouro):
    for quality, value in ((0.9, 0.11), (0.95, 0.22), (0.99, 0.33)):
        remember(ouro, dataclasses.replace(FOUND, quality=quality, exit_threshold=value))
    remember(ouro, dataclasses.replace(FOUND, exit_rule="gate", lookahead=1, quality=0.9, exit_threshold=0.44))
    return ouro


def test_the_lowest_quality_that_is_enough(calibrated):
    for quality, value in ((0.5, 0.11), (0.9, 0.11), (0.91, 0.22), (0.95, 0.22), (0.96, 0.33), (0.99, 0.33)):
        assert threshold(calibrated, exit_rule="confidence", quality=quality) == value
    assert threshold(calibrated, lookahead=1, quality=0.9) == 0.44  # auto is the gate
    assert threshold(calibrated, exit_rule="confidence", kv_policy="last_exited", quality=0.9) == 0.11
    assert threshold(calibrated, exit_rule="confidence", max_depth=4, max_num_seqs=2, quality=0.9) == 0.11
    refused(
        ["quality=0.995", "highest", "is 0.99", "hf-cdb calibrate"],
        lambda: threshold(calibrated, exit_rule="confidence", quality=0.995),
    )


def test_losses_and_data_are_kept_apart(ouro):
    """A quality of one is not compared with that of another, and none forgets another."""
    entries = [("agreement", "a", 0.9, 0.11), ("score: f1", "a", 0.95, 0.22), ("score: f1", "b", 0.95, 0.33)]
    for count, (loss, data, quality, value) in enumerate(entries, 1):
        found = dataclasses.replace(FOUND, loss=loss, data=data, quality=quality, exit_threshold=value)
        remember(ouro, found)
        assert threshold(ouro, exit_rule="confidence", quality=0.85) == value  # the last one's
        assert len(ouro.generation_config.cdb_calibrated) == count
    remember(ouro, dataclasses.replace(FOUND, loss="agreement", data="a", quality=0.9, exit_threshold=0.12))
    kept = [entry["exit_threshold"] for entry in ouro.generation_config.cdb_calibrated]
    assert kept == [0.22, 0.33, 0.12]  # it took the place of its like only
    refused(["quality=0.95", "is 0.9 (agreement, on a)"], lambda: threshold(ouro, exit_rule="confidence", quality=0.95))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exit_rule": "kl"}, ["exit_rule='kl'", "exit_rule='confidence'"]),
        ({"exit_rule": "confidence", "lookahead": 1}, ["lookahead=1", "calibrated was lookahead=0"]),
        (
            {"exit_rule": "confidence", "kv_policy": "modular"},
            ["kv_policy='modular'", "kv_slots=2", "kv_policy='last_exited'"],
        ),
        ({"exit_rule": "confidence", "min_depth": 2}, ["min_depth=2", "calibrated was min_depth=1"]),
        ({"exit_rule": "confidence", "max_depth": 3}, ["max_depth=3", "calibrated was max_depth=4"]),
    ],
)
def test_other_settings_than_those_calibrated(calibrated, settings, words):
    refused(["quality=0.9 with", *words], lambda: threshold(calibrated, quality=0.9, **settings))


def test_a_description_names_the_threshold(calibrated):
    adapter = adapter_for(calibrated)
    config = CDBConfig(exit_rule="confidence", quality=0.95)
    described = config.described(adapter)
    assert (described["exit_threshold"], described["quality"]) == (0.22, None)
    assert CDBConfig(**described).resolve(adapter).exit_rule.threshold == 0.22


def test_a_policy_of_slots(ouro):
    remember(ouro, dataclasses.replace(FOUND, kv_policy="modular", kv_slots=2))
    modular = {"exit_rule": "confidence", "kv_policy": "modular", "quality": 0.9}
    assert threshold(ouro, **modular) == threshold(ouro, kv_slots=2, **modular) == 0.11
    refused(["kv_slots=3", "kv_slots=2"], lambda: threshold(ouro, kv_slots=3, **modular))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quality": 1.0}, ["quality=1.0", "exit_rule='never'"]),
        ({"quality": 0}, ["quality=0", "between 0 and 1"]),
        ({"quality": "high"}, ["quality='high'"]),
        ({"quality": True}, ["quality=True"]),
        ({"quality": float("nan")}, ["quality=nan"]),
        ({"quality": 0.9, "exit_threshold": 0.5}, ["quality=0.9 beside exit_threshold=0.5", "one of them"]),
        ({"quality": 0.9, "exit_rule": "never"}, ["quality=0.9 beside exit_rule='never'"]),
        ({"quality": 0.9, "exit_rule": Never()}, ["quality=0.9 beside exit_rule=", "by name"]),
    ],
)
def test_qualities_that_mean_nothing(settings, words):
    refused(words, lambda: CDBConfig(**settings))


def test_nothing_was_calibrated():
    for model in (random_ouro(), random_huginn()):
        refused(
            ["quality=0.99", "nothing was calibrated", "hf-cdb calibrate MODEL --quality 0.99"],
            lambda model=model: threshold(model, quality=0.99),
        )
    model = random_ouro()
    model.generation_config.cdb_calibrated = [{"quality": 0.9}]
    refused(["cdb_calibrated=[{'quality': 0.9}]", "missing"], lambda: threshold(model, quality=0.9))


def depths(model, cdb=True, **kwargs):
    return model.generate(
        IDS, max_new_tokens=6, do_sample=False, return_dict_in_generate=True, cdb=cdb, **kwargs
    ).exit_depths.tolist()


def test_what_is_remembered_is_what_cdb_uses(calibrated, tmp_path, engines):
    """Through a folder; and the rest of the saved settings stays."""
    calibrated.generation_config.cdb_config = {**calibrated.generation_config.cdb_config, "max_num_seqs": 3}
    remember(calibrated, dataclasses.replace(FOUND, quality=0.9, exit_threshold=0.05))
    calibrated.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval().double()
    assert len(model.generation_config.cdb_calibrated) == 4
    assert model.generation_config.cdb_config["quality"] == 0.9
    wanted = depths(model, CDBConfig(exit_rule="confidence", exit_threshold=0.05))
    for cdb in (True, {"max_num_seqs": 1}, {"quality": 0.9}, {"quality": 0.5}):
        assert depths(model, cdb) == wanted
        assert engines[-1].config.exit_rule.threshold == 0.05
    assert wanted != [[4] * 6] * 2
    depths(model)
    assert engines[-1].config.max_num_seqs == 3
    depths(model, {"quality": 0.99})
    assert engines[-1].config.exit_rule.threshold == 0.33


def test_a_threshold_in_the_call_takes_the_place_of_a_saved_quality(calibrated, engines):
    remember(calibrated, FOUND)
    depths(calibrated, {"exit_threshold": 0.7})
    assert engines[-1].config.exit_rule.threshold == 0.7
    depths(calibrated, exit_threshold=0.6)  # the model's own keyword
    assert engines[-1].config.exit_rule.threshold == 0.6
    depths(calibrated, criterion="cosine")
    assert engines[-1].config.exit_rule.name == "cosine"
    depths(calibrated, exit_at_step=1)
    assert engines[-1].config.max_depth == 2
    depths(calibrated, {"exit_rule": "gate", "exit_threshold": 0.2})
    assert engines[-1].config.exit_rule.threshold == 0.2
    refused(["quality=0.9", "exit_threshold=0.6"], lambda: depths(calibrated, {"quality": 0.9}, exit_threshold=0.6))
    refused(["exit_at_step=1", "quality=0.9"], lambda: depths(calibrated, {"quality": 0.9}, exit_at_step=1))


def test_settings_under_cdb_itself_are_replaced(ouro):
    ouro.generation_config.cdb = {"exit_rule": "gate", "exit_threshold": 0.3, "max_num_seqs": 5}
    remember(ouro, FOUND)
    assert ouro.generation_config.cdb is True
    assert ouro.generation_config.cdb_config["max_num_seqs"] == 5
    assert "exit_threshold" not in ouro.generation_config.cdb_config
    depths(ouro)
