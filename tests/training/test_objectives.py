import pytest
import torch

from hf_cdb.training.batches import Line, pack_lines
from hf_cdb.training.objectives import HuginnObjective, build_objective
from hf_cdb.training.recipe import ObjectiveRecipe

from ..tiny import random_huginn, random_ouro

LINES = [Line([1, 5, 6, 9], [5, 6, 9, 2], 2), Line([1, 7, 3], [7, 3, 2], 1), Line([1, 8, 9, 4, 4], [8, 9, 4, 4, 2], 3)]


def packed():
    """Two rows: the first two lines and padding, the third line and padding."""
    batch = pack_lines(LINES, 8, pad=0, prompt_weight=0.25)
    return batch, float(batch["weights"].sum())


def weighted_mean(logits_of):
    """By hand: every line alone, weight 1 on its answer and a quarter on its prompt."""
    total = weights = 0.0
    for line in LINES:
        log_probabilities = logits_of(torch.tensor([line.inputs]))[0].log_softmax(-1)
        for place, target in enumerate(line.targets):
            weight = 1.0 if place >= line.answer_start else 0.25
            total -= weight * log_probabilities[place, target]
            weights += weight
    return total / weights


def test_ouros_losses_are_those_of_every_line_alone():
    model = random_ouro().train()
    objective = build_objective(model, ObjectiveRecipe("loops", [1.0, 0.0, 2.0, 1.0]), seed=0)
    loss, losses = objective(*packed(), step=0)
    expected = [weighted_mean(lambda ids, t=t: model(ids, exit_at_step=t).logits).item() for t in range(4)]
    assert losses.tolist() == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx((expected[0] + 2 * expected[2] + expected[3]) / 4, rel=1e-5)
    assert not losses.requires_grad


def test_ouros_gate_is_frozen_only_where_the_loss_leaves_it_out():
    for kind, trained in (("loops", False), ("expected", True)):
        model = random_ouro()
        build_objective(model, ObjectiveRecipe(kind), seed=0)
        assert all(parameter.requires_grad is trained for parameter in model.model.early_exit_gate.parameters())


def test_ouros_expected_loss_is_the_models_own_where_all_weights_are_one():
    model = random_ouro().train()
    ids = torch.tensor([[1, 5, 6, 9, 2]])
    batch = pack_lines([Line([1, 5, 6, 9], [5, 6, 9, 2], 0)], 4, pad=0)
    loss, _ = build_objective(model, ObjectiveRecipe("expected"), seed=0)(batch, 4.0, step=0)
    assert loss.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_huginns_loss_is_that_of_every_line_alone_at_the_drawn_depth():
    model = random_huginn().train()
    objective = build_objective(model, ObjectiveRecipe("random-depth"), seed=3)
    loss, losses = objective(*packed(), step=5)
    depth = sum(objective.draw_num_steps(5))
    expected = weighted_mean(lambda ids: model(ids, num_steps=depth).logits).item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)
    assert losses.tolist() == [loss.item()]


def test_huginns_depths_depend_on_seed_and_step_alone():
    model = random_huginn(mean_recurrence=6, mean_backprop_depth=2)
    state = torch.get_rng_state()
    draws = [HuginnObjective(model, seed=1).draw_num_steps(step) for step in range(40)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert [HuginnObjective(model, seed=1).draw_num_steps(step) for step in range(40)] == draws
    assert [HuginnObjective(model, seed=2).draw_num_steps(step) for step in range(40)] != draws
    assert len({sum(draw) for draw in draws}) > 4
    assert max(with_gradient for _, with_gradient in draws) == 2


def test_shares_of_a_batch_add_up():
    objective = build_objective(random_ouro().train(), ObjectiveRecipe("loops"), seed=0)
    batch, weight = packed()
    whole, _ = objective(batch, weight, 0)
    shares = [objective({name: rows[k::2] for name, rows in batch.items()}, weight, 0)[0] for k in range(2)]
    assert sum(shares).item() == pytest.approx(whole.item(), rel=1e-6)
