"""Every system serves the same requests; the truth is stock generation, one request at a time."""

import pytest
import torch

from hf_cdb.adapters import adapter_for
from hf_cdb.bench.models import plain_generation
from hf_cdb.bench.systems import SYSTEMS, cdb_settings, serve
from hf_cdb.bench.workloads import Workload

from ..tiny import RANDOM

PROMPTS = [[3, 7, 9], [11, 2], [5, 8, 1, 4, 20], [6], [30, 31]]
NEW = [4, 1, 3, 5, 2]


def make(family):
    model = RANDOM[family]().to(torch.float64)
    model.generation_config.update(eos_token_id=None, pad_token_id=0)
    return model


def alone(model):
    options = plain_generation(model)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=new, **options)[0, len(prompt) :].tolist()
        for prompt, new in zip(PROMPTS, NEW, strict=True)
    ]


@pytest.mark.parametrize("family", ["ouro", "huginn"])
def test_at_full_depth_all_systems_give_the_tokens_of_stock_generation_alone(family):
    model = make(family)
    depth = adapter_for(model).full_depth
    workload = Workload(PROMPTS, NEW, [[depth] * new for new in NEW])
    truth = alone(model)
    for name in SYSTEMS:
        run = serve(name, model, workload, 2, cdb_settings(model, workload))
        assert run.tokens == truth, name
        assert run.seconds > 0
        if run.depths is not None:
            assert run.depths == workload.depths
    assert alone(model) == truth  # and leave the model as it was


def test_depths_are_replayed():
    model = make("ouro")
    depths = [[4, 1, 2, 3], [4], [4, 4, 1], [4, 2, 2, 1, 3], [4, 1]]
    workload = Workload(PROMPTS, NEW, depths)
    settings = cdb_settings(model, workload, kv_policy="shared", min_coda_batch=2, lookahead=None)
    for name in ("no-refill", "refill"):
        run = serve(name, model, workload, 2, settings)
        assert run.depths == depths
        assert run.stats.rows["loop"] == sum(map(sum, depths))
    # The full-depth run keeps the policy and nothing about exits.
    full = serve("full", model, workload, 2, settings)
    assert full.depths == [[4] * new for new in NEW]
    assert full.stats.kv_bytes == run.stats.kv_bytes


def test_live_depths_are_those_of_generate():
    model = make("ouro")
    model.generation_config.cdb_config = {"exit_threshold": 0.6}
    workload = Workload(PROMPTS, NEW, None)
    run = serve("refill", model, workload, 2, cdb_settings(model, workload))
    for prompt, new, depths, tokens in zip(PROMPTS, NEW, run.depths, run.tokens, strict=True):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=new, cdb=True, do_sample=False, return_dict_in_generate=True
        )
        assert output.exit_depths[0].tolist() == depths
        assert output.sequences[0, len(prompt) :].tolist() == tokens
    assert {depth for row in run.depths for depth in row[1:]} - {4}


def test_saved_settings_that_the_benchmark_decides_itself_are_left_out():
    model = make("ouro")
    model.generation_config.cdb_config = {"exit_threshold": 0.6, "max_num_seqs": 3, "refill": False, "trace": True}
    live = Workload(PROMPTS, NEW, None)
    assert cdb_settings(model, live) == {"exit_threshold": 0.6, "prefix_reuse": False}
    assert cdb_settings(model, live, max_num_seqs=4, min_depth=2) == {
        "exit_threshold": 0.6,
        "max_num_seqs": 4,
        "min_depth": 2,
        "prefix_reuse": False,
    }
    assert serve("refill", model, live, 2, cdb_settings(model, live)).stats.max_num_seqs == 2


def test_settings_that_contradict_the_depths():
    model = make("ouro")
    replayed = Workload(PROMPTS, NEW, [[4] + [1] * (new - 1) for new in NEW])
    with pytest.raises(ValueError, match=r"exit_rule='gate' has no meaning.*Pass --mix live"):
        cdb_settings(model, replayed, exit_rule="gate")
    with pytest.raises(ValueError, match=r"max_depth=2 has no meaning.*Pass --mix live"):
        cdb_settings(model, replayed, max_depth=2)
    with pytest.raises(ValueError, match="lookahead=1: a token runs at least 2 loops"):
        cdb_settings(model, replayed, lookahead=1)
