"""From gate logits to the distribution over exit loops (arXiv 2510.25741)."""

import torch
from torch import nn

from ...precision import at_least_float32

__all__ = ["ExitGate", "exit_probabilities", "first_step_reaching"]


class ExitGate(nn.Linear):
    """Logit of leaving after this loop, `[..., width] -> [..., 1]`, computed in at least float32, also under autocast.

    In half precision the probabilities that follow from it would round up to 1 before the last loop.
    """

    def __init__(self, width: int):
        super().__init__(width, 1)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        with torch.autocast(state.device.type, enabled=False):
            weight, bias = at_least_float32(self.weight), at_least_float32(self.bias)
            return nn.functional.linear(state.to(weight.dtype), weight, bias)


def exit_probabilities(gate_logits: torch.Tensor) -> torch.Tensor:
    """Probability of leaving after each loop: `p_t = l_t * prod_{j<t} (1 - l_j)` with `l = sigmoid(gate_logits)`.

    The last loop takes all that is left, so the result sums to 1.

    Args:
        gate_logits: `[..., loops]`, at least float32.

    Returns:
        `[..., loops]`, dtype of the input.
    """
    hazards = gate_logits[..., :-1].sigmoid()
    # 1 - sigmoid(x) = sigmoid(-x), without the cancellation at large x.
    survival = (-gate_logits[..., :-1]).sigmoid().cumprod(dim=-1)
    started = nn.functional.pad(survival, (1, 0), value=1.0)
    return started * nn.functional.pad(hazards, (0, 1), value=1.0)


def first_step_reaching(pdf: torch.Tensor, threshold: float) -> torch.Tensor:
    """First step, from 0, whose cumulative probability reaches `threshold`; the last step where none does.

    A threshold of 1 never leaves early: a cumulative probability can round up to 1 before the last step.

    Args:
        pdf: `[..., loops]`, as `exit_probabilities` returns it.
        threshold: in (0, 1].

    Returns:
        int64 `[...]`.
    """
    last = pdf.shape[-1] - 1
    if threshold >= 1.0:
        return torch.full(pdf.shape[:-1], last, dtype=torch.long, device=pdf.device)
    reached = pdf[..., :-1].cumsum(dim=-1) >= threshold
    return nn.functional.pad(reached, (0, 1), value=True).int().argmax(dim=-1)
