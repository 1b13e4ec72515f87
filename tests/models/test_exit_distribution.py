import pytest
import torch

from hf_cdb.models.ouro.exit_distribution import ExitGate, exit_probabilities, first_step_reaching


def test_probabilities_by_hand():
    logits = torch.tensor([0.0, 0.0, 0.0, 5.0])
    assert exit_probabilities(logits).tolist() == [0.5, 0.25, 0.125, 0.125]
    # hazards 1/5, 1/2, 3/4: p = .2, .8 * .5 = .4, .8 * .5 * .75 = .3, the rest .1
    logits = torch.logit(torch.tensor([0.2, 0.5, 0.75, 0.1], dtype=torch.float64))
    assert exit_probabilities(logits).tolist() == pytest.approx([0.2, 0.4, 0.3, 0.1], abs=1e-12)


def test_one_loop_takes_everything():
    assert exit_probabilities(torch.tensor([[-3.0]])).tolist() == [[1.0]]
    assert first_step_reaching(torch.tensor([[1.0]]), 0.5).tolist() == [0]


@pytest.mark.parametrize(
    ("threshold", "step"), [(0.1, 0), (0.2, 0), (0.201, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.91, 3), (1.0, 3)]
)
def test_steps_by_hand(threshold, step):
    pdf = torch.tensor([[0.2, 0.4, 0.3, 0.1]], dtype=torch.float64)
    assert first_step_reaching(pdf, threshold).tolist() == [step]


def test_threshold_one_ignores_probabilities_that_round_up_to_one():
    """L-02: in float32 the first probability already is exactly 1."""
    pdf = exit_probabilities(torch.tensor([[40.0, 0.0, 0.0, 0.0]]))
    assert pdf[0, 0] == 1.0
    assert first_step_reaching(pdf, 1.0).tolist() == [3]
    assert first_step_reaching(pdf, 0.999).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gate_computes_in_float32(dtype):
    gate = ExitGate(8).to(dtype)
    state = torch.randn(2, 3, 8).to(dtype)
    logits = gate(state)
    assert logits.dtype == torch.float32
    assert logits.shape == (2, 3, 1)
    by_hand = state.float() @ gate.weight.float().T + gate.bias.float()
    assert logits.allclose(by_hand, atol=1e-6)
    assert gate.double()(state.double()).dtype == torch.float64
