import pytest
import torch

from hf_cdb.training.optimizers import build_optimizers, learning_rate_factor, set_learning_rates, split_parameters
from hf_cdb.training.recipe import OptimizerRecipe

from ..tiny import RANDOM, random_ouro


def names_of(model, parameters):
    return {name for name, parameter in model.named_parameters() if any(parameter is each for each in parameters)}


def test_muon_takes_the_matrices_of_ouros_layers():
    model = random_ouro()
    body, rest = (names_of(model, part) for part in split_parameters(model))
    assert body == {name for name, _ in model.named_parameters() if name.endswith("proj.weight")}
    assert rest >= {"model.embed_tokens.weight", "lm_head.weight", "model.early_exit_gate.weight", "model.norm.weight"}
    assert not body & rest
    assert body | rest == {name for name, _ in model.named_parameters()}


def test_muon_takes_the_adapter_and_leaves_a_tied_head():
    model = RANDOM["huginn"]()
    body, rest = (names_of(model, part) for part in split_parameters(model))
    assert "transformer.adapter.weight" in body
    assert "transformer.core_block.0.mlp.fc.weight" in body
    assert {"transformer.wte.weight", "transformer.ln_f.weight", "transformer.core_block.0.attn.qk_bias"} <= rest


def test_frozen_parameters_are_left_out():
    model = random_ouro()
    model.model.early_exit_gate.requires_grad_(False)
    trained = names_of(model, [parameter for part in split_parameters(model) for parameter in part])
    assert trained == {name for name, _ in model.named_parameters()} - {
        "model.early_exit_gate.weight",
        "model.early_exit_gate.bias",
    }


def test_a_muon_step_is_the_orthogonal_factor_of_the_gradient():
    model = random_ouro()
    muon, _ = build_optimizers(model, OptimizerRecipe(muon_lr=0.5, muon_weight_decay=0.0))
    weight = model.model.layers[0].self_attn.q_proj.weight
    left, scales, right = torch.linalg.svd(torch.randn(weight.shape))
    scales = torch.linspace(1.0, 4.0, len(scales))
    before, weight.grad = weight.detach().clone(), left @ scales.diag() @ right
    muon.step()
    moved = left.T @ (before - weight.detach()) @ right.T / 0.5
    # Five Newton-Schulz iterations bring singular values into this range, and turn no direction.
    assert moved.diag().min() > 0.6
    assert moved.diag().max() < 1.3
    assert (moved - moved.diag().diag()).abs().max() < 0.05


def test_the_schedule_by_hand():
    recipe = OptimizerRecipe(warmup_steps=4, flat_until=0.5, final_fraction=0.1)
    factors = {step: learning_rate_factor(step, 100, recipe) for step in (0, 1, 3, 4, 50, 75, 99)}
    assert factors == pytest.approx({0: 0.25, 1: 0.5, 3: 1, 4: 1, 50: 1, 75: 0.55, 99: 1 - 0.9 * 0.98})


def test_the_schedule_without_a_rise_or_a_fall():
    recipe = OptimizerRecipe(warmup_steps=0, flat_until=1.0)
    assert [learning_rate_factor(step, 10, recipe) for step in range(10)] == [1.0] * 10


def test_learning_rates_follow_the_factor():
    optimizers = build_optimizers(random_ouro(), OptimizerRecipe(muon_lr=0.02, adamw_lr=0.004))
    for factor in (0.5, 0.25):  # not on top of each other
        set_learning_rates(optimizers, factor)
        assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [0.02 * factor, 0.004 * factor]
