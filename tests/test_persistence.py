"""Settings of cdb that are saved with a model."""

import json
import logging
import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as library_logging

from hf_cdb import CDBConfig, enable_cdb
from hf_cdb.exits import Gate

from .dory import random_dory
from .test_generation import EARLY, IDS, MASK, generate, refused


@pytest.fixture
def quiet(caplog):
    """Fails on any warning, of either kind."""
    library_logging.enable_propagation()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        yield
    library_logging.disable_propagation()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def bare(model, cdb=None, **kwargs):
    """A call that says nothing about cdb unless told to."""
    more = {} if cdb is None else {"cdb": cdb}
    return model.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False, **more, **kwargs)


@pytest.mark.parametrize("spelt", ["two names", "one dict", "object", "settings object"])
def test_round_trip_without_a_warning(model, tmp_path, quiet, spelt):
    """Folder to model and back, twice: the same files, the same tokens, nothing to be told."""
    wanted, stock = bare(model, EARLY), bare(model, False)
    assert not torch.equal(wanted, stock)
    config = model.generation_config
    if spelt == "two names":
        config.cdb, config.cdb_config = True, dict(EARLY)
    elif spelt == "one dict":
        config.cdb = dict(EARLY)
    elif spelt == "object":
        config.cdb = CDBConfig(**EARLY)
    else:
        config.cdb, config.cdb_config = True, CDBConfig(**EARLY)
    assert torch.equal(bare(model), wanted)
    model.save_pretrained(tmp_path / "one")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one").eval()
    assert torch.equal(bare(loaded), wanted)
    assert torch.equal(bare(loaded, False), stock)
    assert torch.equal(bare(loaded, True), wanted)
    loaded.save_pretrained(tmp_path / "two")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("one", "two")]
    assert files[0] == files[1]
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "one" / name).read_text() == (tmp_path / "two" / name).read_text()
    saved = json.loads((tmp_path / "one" / "generation_config.json").read_text())
    kept = saved["cdb"] if isinstance(saved["cdb"], dict) else saved["cdb_config"]
    assert kept == EARLY
    assert "cdb" not in json.loads((tmp_path / "one" / "config.json").read_text())
    assert GenerationConfig.from_pretrained(tmp_path / "two").to_dict()["cdb"] == saved["cdb"]


def test_a_call_is_merged_into_what_is_saved(ouro, engines):
    ouro.generation_config.cdb = True
    ouro.generation_config.cdb_config = {**EARLY, "max_num_seqs": 2}
    bare(ouro, {"min_depth": 3})
    merged = engines[-1].config
    assert (merged.exit_rule.name, merged.exit_rule.threshold) == ("confidence", 0.1)
    assert (merged.max_num_seqs, merged.min_depth) == (2, 3)
    bare(ouro, CDBConfig(exit_rule="never"))
    assert engines[-1].config.max_num_seqs == 64
    assert ouro.generation_config.cdb_config == {**EARLY, "max_num_seqs": 2}


def test_saved_settings_wait_for_cdb(ouro):
    """Settings alone switch nothing on; and cdb=True finds them."""
    wanted, stock = bare(ouro, EARLY), bare(ouro, False)
    ouro.generation_config.cdb_config = dict(EARLY)
    assert torch.equal(bare(ouro), stock)
    assert torch.equal(bare(ouro, True), wanted)
    ouro.generation_config.cdb = False
    assert torch.equal(bare(ouro), stock)


def test_a_generation_config_of_the_call(ouro):
    """One that names cdb decides; one that does not leaves it to the model's."""
    wanted, stock = bare(ouro, EARLY), bare(ouro, False)
    plain = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0)
    names_it = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, cdb=True, cdb_config=dict(EARLY))
    off = GenerationConfig(max_new_tokens=8, do_sample=False, pad_token_id=0, cdb=False)
    assert torch.equal(ouro.generate(IDS, attention_mask=MASK, generation_config=plain), stock)
    assert torch.equal(ouro.generate(IDS, attention_mask=MASK, generation_config=names_it), wanted)
    assert torch.equal(ouro.generate(IDS, attention_mask=MASK, generation_config=names_it, cdb=False), stock)
    ouro.generation_config.cdb = dict(EARLY)
    assert torch.equal(ouro.generate(IDS, attention_mask=MASK, generation_config=plain), wanted)
    assert torch.equal(ouro.generate(IDS, plain, attention_mask=MASK), wanted)
    assert torch.equal(ouro.generate(IDS, attention_mask=MASK, generation_config=off), stock)


def test_an_enabled_model_of_transformers(tmp_path, quiet):
    model = enable_cdb(random_dory(eos_token_id=None, pad_token_id=0))
    model.generation_config.cdb, model.generation_config.cdb_config = True, dict(EARLY)
    wanted = bare(model)
    assert torch.equal(wanted, bare(model, EARLY))
    model.save_pretrained(tmp_path)
    loaded = enable_cdb(AutoModelForCausalLM.from_pretrained(tmp_path).eval())
    assert torch.equal(bare(loaded), wanted)


def test_a_folder_that_could_be_pushed(ouro, tmp_path):
    """What another process reads after nothing but `import hf_cdb`."""
    import subprocess
    import sys

    ouro.float().generation_config.cdb = {"exit_threshold": 0.6}
    ouro.save_pretrained(tmp_path)
    wanted = bare(ouro, return_dict_in_generate=True)
    code = (
        "import sys, torch, hf_cdb, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()\n"
        "ids = torch.tensor([[3, 4, 5]])\n"
        "options = {'max_new_tokens': 8, 'return_dict_in_generate': True}\n"
        "out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)\n"
        "print(out.exit_depths.tolist(), out.sequences.tolist())\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ids = torch.tensor([[3, 4, 5]])
    alone = ouro.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False, return_dict_in_generate=True
    )
    assert done.stdout.strip() == f"{alone.exit_depths.tolist()} {alone.sequences.tolist()}"
    assert wanted.exit_depths.min() < 4


def test_what_cannot_be_saved_is_said_before_anything_is_written(ouro, tmp_path):
    ouro.generation_config.cdb_config = {"exit_rule": Gate(0.5)}
    refused(["exit_rule=", "Save a rule's name"], lambda: ouro.save_pretrained(tmp_path / "model"))
    ouro.generation_config.cdb_config = {"exit_treshold": 0.5}
    refused(["'exit_treshold'", "'exit_threshold'"], lambda: ouro.save_pretrained(tmp_path / "model"))
    ouro.generation_config.cdb, ouro.generation_config.cdb_config = {"max_num_seqs": 0}, None
    refused(["max_num_seqs=0"], lambda: ouro.save_pretrained(tmp_path / "model"))
    assert not (tmp_path / "model").exists()


def test_tensors_among_the_settings_are_saved_as_numbers(ouro, tmp_path):
    ouro.generation_config.cdb = True
    ouro.generation_config.cdb_config = {**EARLY, "seeds": torch.tensor([4, 5, 6])}
    options = {"attention_mask": MASK, "max_new_tokens": 8, "do_sample": True}
    wanted = ouro.generate(IDS, **options)
    ouro.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "generation_config.json").read_text())["cdb_config"]["seeds"] == [4, 5, 6]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded.generate(IDS, **options), wanted)
    assert torch.equal(generate(loaded, False), generate(ouro, False))
