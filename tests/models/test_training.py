"""A few steps reduce the loss of both models, on the objective each was published with."""

import math

import pytest
import torch

from hf_cdb.models.huginn.loop_count import draw_num_steps
from hf_cdb.models.ouro.objective import expected_exit_loss

from ..tiny import RANDOM, assert_close, prompts, random_huginn, random_ouro

BATCH = torch.stack(prompts(12, 12, 12, 12))


def train(model, steps=30, **kwargs):
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = model(BATCH, labels=BATCH, **kwargs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", RANDOM)
def test_a_few_steps_reduce_the_loss(family):
    losses = train(RANDOM[family]())
    assert sum(losses[-5:]) / 5 < 0.6 * sum(losses[:5]) / 5


@pytest.mark.parametrize("family", RANDOM)
def test_gradient_checkpointing_gives_the_same_gradients(family):
    def gradients(checkpointing):
        model = RANDOM[family]().train()
        if checkpointing:
            model.activation_checkpointing_enable()
        torch.manual_seed(3)  # Huginn draws its number of loops
        loss = model(BATCH, labels=BATCH, use_cache=False).loss
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    (plain_loss, plain), (loss, checkpointed) = gradients(False), gradients(True)
    assert torch.equal(plain_loss, loss)
    assert all(gradient is not None for gradient in plain)
    for left, right in zip(plain, checkpointed, strict=True):
        assert_close(left, right, 1e-5)


def test_objective_of_ouro_by_hand():
    """Two loops, one predicted token: p = (1/4, 3/4), probabilities of the label 1/2 and 1/8."""
    pdf = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    logits = [torch.tensor([[[math.log(p), math.log(1 - p)], [0.0, 0.0]]]) for p in (0.5, 0.125)]
    loss = expected_exit_loss(logits, pdf, torch.tensor([[1, 0]]), entropy_weight=0.1)
    entropy = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    assert loss.item() == pytest.approx(0.25 * math.log(2) + 0.75 * math.log(8) - 0.1 * entropy)
    assert expected_exit_loss(logits, pdf, torch.tensor([[1, 0]]), 0.1, num_items_in_batch=4) == pytest.approx(
        loss.item() / 4
    )
    assert expected_exit_loss(logits, pdf, torch.tensor([[1, -100]]), 0.1) != expected_exit_loss(
        logits, pdf, torch.tensor([[1, 0]]), 0.1
    )


def test_objective_of_ouro_reaches_the_gate_and_needs_no_exit_argument():
    model = random_ouro().train()
    model(BATCH, labels=BATCH).loss.backward()
    assert model.model.early_exit_gate.weight.grad.abs().max() > 0
    plain = random_ouro()
    evaluated = plain(BATCH, labels=BATCH)
    logits = evaluated.logits[:, :-1].flatten(0, 1)
    assert_close(evaluated.loss, torch.nn.functional.cross_entropy(logits, BATCH[:, 1:].flatten()), 1e-5)
    fixed = random_ouro().train()(BATCH, labels=BATCH, exit_at_step=1)
    logits = plain(BATCH, exit_at_step=1).logits[:, :-1].flatten(0, 1)
    assert_close(fixed.loss, torch.nn.functional.cross_entropy(logits, BATCH[:, 1:].flatten()), 1e-5)


def test_the_config_s_entropy_weight_counts():
    losses = [random_ouro(exit_entropy_weight=weight).train()(BATCH, labels=BATCH).loss.item() for weight in (0.0, 0.2)]
    pdf = random_ouro()(BATCH).exit_pdf[:, :-1]
    assert losses[0] - losses[1] == pytest.approx(0.2 * torch.special.entr(pdf).sum(-1).mean().item(), rel=1e-4)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("family", RANDOM)
def test_items_of_the_whole_batch_divide_the_loss(family, training):
    """Gradient accumulation: the sum over the predicted tokens by a divisor of the trainer's."""
    kwargs = {"num_steps": 3} if family == "huginn" else {}
    model = RANDOM[family]().train(training)
    mean = model(BATCH, labels=BATCH, **kwargs).loss
    items = torch.tensor(100)
    assert_close(model(BATCH, labels=BATCH, num_items_in_batch=items, **kwargs).loss, mean * 4 * 11 / 100, 1e-5)
    shifted = torch.nn.functional.pad(BATCH[:, 1:], (0, 1), value=-100)
    other = torch.full_like(BATCH, -100)
    assert_close(model(BATCH, labels=other, shift_labels=shifted, **kwargs).loss, mean, 1e-5)


def test_a_fixed_step_of_the_config_holds_in_training():
    output = random_ouro(early_exit_step=1).train()(BATCH, labels=BATCH)
    assert torch.equal(output.logits, random_ouro()(BATCH, exit_at_step=1).logits)
    assert (output.exit_steps == 1).all()


def test_training_draws_its_loops_and_truncates_at_the_configured_depth(monkeypatch):
    model = random_huginn(mean_recurrence=6, mean_backprop_depth=2).train()
    seen = []
    loop = type(model).loop

    def counting(self, *args, **kwargs):
        seen.append(torch.is_grad_enabled())
        return loop(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "loop", counting)
    counts = []
    for seed in range(12):
        seen.clear()
        torch.manual_seed(seed)
        expected = draw_num_steps(6, 2)
        torch.manual_seed(seed)
        model(BATCH, labels=BATCH, use_cache=False)
        assert seen == [False] * expected[0] + [True] * expected[1]
        counts.append(len(seen))
    assert len(set(counts)) > 3
    seen.clear()
    model.eval()(BATCH, labels=BATCH)
    assert len(seen) == 6


def test_labels_may_be_masked():
    for family, make in RANDOM.items():
        labels = BATCH.clone()
        labels[:, 6:] = -100
        loss = make()(BATCH, labels=labels).loss
        shorter = make()(BATCH[:, :6], labels=BATCH[:, :6]).loss
        assert_close(loss, shorter, 1e-5, family)


def test_loops_without_gradient_leave_the_loss_alone_and_truncate_the_gradient():
    whole, truncated = random_huginn().train(), random_huginn().train()
    losses = [
        model(BATCH, labels=BATCH, num_steps=steps, use_cache=False).loss
        for model, steps in ((whole, 5), (truncated, (3, 2)))
    ]
    assert_close(losses[0], losses[1], 1e-5)
    for loss in losses:
        loss.backward()
    name = "transformer.adapter.weight"
    left, right = (model.get_parameter(name).grad for model in (whole, truncated))
    assert right.abs().max() > 0
    assert (left - right).abs().max() > 1e-6
    # only the gradient of the embedding through the prelude remains where no loop carries any
    none = random_huginn().train()
    none(BATCH, labels=BATCH, num_steps=(5, 0), use_cache=False).loss.backward()
    assert none.get_parameter(name).grad is None


def test_random_number_of_loops():
    torch.manual_seed(0)
    draws = [draw_num_steps(8, 3) for _ in range(4000)]
    loops = torch.tensor([sum(draw) for draw in draws], dtype=torch.float64)
    assert loops.min() >= 1
    assert loops.mean().item() == pytest.approx(9, rel=0.05)
    assert all(with_gradient == min(3, without + with_gradient) for without, with_gradient in draws)
    # log-normal Poisson: variance of the rate plus its mean, 64 (exp(1/4) - 1) + 8
    assert loops.var().item() == pytest.approx(64 * (math.exp(0.25) - 1) + 8, rel=0.15)


def test_generation_in_training_mode_runs_the_configured_loops():
    model = random_huginn(eos_token_id=None)
    ids = BATCH[:1]
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(model.train().generate(ids, max_new_tokens=6, do_sample=False), expected)
