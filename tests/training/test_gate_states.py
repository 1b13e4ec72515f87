"""States and scores of packed rows, against plain forwards of single rows."""

import pytest
import torch

from hf_cdb.adapters import adapter_for
from hf_cdb.training.gate_data import Row
from hf_cdb.training.gate_states import collect_states

from ..dory import random_dory
from ..test_exit_heads import refused
from ..tiny import assert_close, prompts, random_huginn, random_ouro

MODELS = {"ouro": random_ouro, "huginn": random_huginn, "dory": random_dory}


def rows_of(*lengths, seed=0, vocab=50):
    return [Row(ids.tolist(), [1.0] * len(ids)) for ids in prompts(*lengths, vocab=vocab, seed=seed)]


def loop_outputs(model, ids):
    """Logits after every loop, `[R, positions, vocab]`, by the models' own forward run to each depth."""
    if isinstance(model, type(random_huginn())):
        return [model(ids, num_steps=depth).logits[0] for depth in range(1, 7)]
    if isinstance(model, type(random_ouro())):
        return [model(ids, exit_at_step=step).logits[0] for step in range(4)]
    outputs = []
    for depth in range(1, 5):
        model.config.n_recurrent_loops = model.model.config.n_recurrent_loops = depth
        outputs.append(model(ids, use_cache=False).logits[0])
    return outputs


@torch.no_grad()
@pytest.mark.parametrize("name", ["ouro", "huginn", "dory"])
def test_scores_of_packed_rows(name):
    """Rows beyond dory's window of 8 are among them."""
    model = MODELS[name]()
    rows = rows_of(12, 2, 20, 1, 5)
    cache = collect_states(adapter_for(model), rows, "same-step", progress=False)
    assert len(cache) == 11 + 1 + 19 + 4
    first = 0
    for row in rows:
        ids = torch.tensor([row.ids])
        predicted = slice(first, first + len(row.ids) - 1)
        first = predicted.stop
        full, *shallow = [log.log_softmax(-1)[:-1] for log in reversed(loop_outputs(model, ids))]
        for loop, log_p in enumerate([*reversed(shallow), full]):
            loss = -log_p[torch.arange(len(log_p)), ids[0, 1:]]
            assert_close(cache.scores.loss[predicted, loop], loss, 1e-4)
            kl = torch.nn.functional.kl_div(log_p, full, log_target=True, reduction="none").sum(-1)
            assert_close(cache.scores.kl[predicted, loop], kl, 1e-4)
            agrees = (log_p.argmax(-1) == full.argmax(-1)).float()
            assert torch.equal(cache.scores.agrees[predicted, loop], agrees)


@torch.no_grad()
@pytest.mark.parametrize("max_memory", [1, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_states_in_memory_and_on_disk(max_memory, dtype):
    model = random_ouro().to(dtype)
    rows = rows_of(6, 9)
    states = [
        torch.stack(model.model(torch.tensor([row.ids]), output_loop_states=True).loop_states, dim=2)[0, :-1]
        for row in rows
    ]
    expected = torch.cat(states).float()  # tokens, loops, width
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5  # rows run packed, so they round otherwise
    for kind, loops in (("same-step", 3), ("lookahead", 2)):
        cache = collect_states(adapter_for(model), rows, kind, max_memory=max_memory, progress=False)
        assert cache.inputs == loops
        everything = cache.states(torch.arange(13 * loops)).view(13, loops, 32)
        assert_close(everything, expected[:, :loops], tolerance)
        some = torch.tensor([7, 0, 7, 12])
        assert torch.equal(cache.states(some), everything.flatten(0, 1)[some])
        assert cache.bytes == 13 * loops * 32 * (2 if dtype == torch.bfloat16 else 4)
        cache.close()
    cache = collect_states(adapter_for(model), rows, "preloop", progress=False)
    embeddings = torch.cat([model.get_input_embeddings()(torch.tensor(row.ids[:-1])) for row in rows])
    assert_close(cache.states(torch.arange(13)), embeddings.float(), 0)


def test_only_tokens_with_a_weight_count():
    rows = [Row([1, 2, 3, 4], [1.0, 0.0, 0.5, 2.0], [0, 1, 2, 3]), Row([5, 6], [1.0, 0.0]), Row([7, 8], [0.0, 1.0])]
    cache = collect_states(adapter_for(random_ouro()), rows, "same-step", progress=False)
    assert cache.weights.tolist() == [0.5, 2.0, 1.0]
    assert cache.sizes.tolist() == [2, 3, -1]
    refused(["weight above 0"], lambda: collect_states(adapter_for(random_ouro()), rows[1:2], "same-step"))
    model = random_ouro()
    model.config._attn_implementation = "flash_attention_2"
    refused(["flash_attention_2", "sdpa"], lambda: collect_states(adapter_for(model), rows, "same-step"))
