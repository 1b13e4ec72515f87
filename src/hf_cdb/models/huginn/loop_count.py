"""How many loops a Huginn pass runs, and how many of them carry gradient."""

import math
from typing import Any

import torch

__all__ = ["draw_num_steps", "parse_num_steps"]


def draw_num_steps(mean_recurrence: int, mean_backprop_depth: int) -> tuple[int, int]:
    """Random loops without and with gradient, log-normal Poisson (arXiv 2502.05171, section on training objective).

    `tau ~ N(log r - 1/8, 1/2)`, loops `~ Poisson(exp(tau)) + 1` with mean `r + 1`; the last `mean_backprop_depth`
    of them carry gradient. Drawn from torch's global generator of the CPU.

    Args:
        mean_recurrence: r.
        mean_backprop_depth: most loops with gradient.
    """
    sigma = 0.5
    tau = torch.normal(math.log(mean_recurrence) - sigma**2 / 2, sigma, (1,))
    loops = int(torch.poisson(tau.exp())) + 1
    with_gradient = min(loops, mean_backprop_depth)
    return loops - with_gradient, with_gradient


def parse_num_steps(num_steps: Any) -> tuple[int, int]:
    """Loops without and with gradient from the forms that users pass.

    Args:
        num_steps: an integer; a tensor of one integer, of any shape; or a pair (loops without, loops with gradient).

    Raises:
        ValueError: no such number, or fewer than one loop in all.
    """
    values = num_steps.flatten().tolist() if isinstance(num_steps, torch.Tensor) else num_steps
    values = list(values) if isinstance(values, (list, tuple)) else [values]
    whole = all(isinstance(value, int) and not isinstance(value, bool) for value in values)
    if not whole or len(values) not in (1, 2) or min(values) < 0 or sum(values) < 1:
        raise ValueError(
            f"num_steps={num_steps!r} is no number of loops. Pass an integer of at least 1, or a pair (loops without "
            "gradient, loops with gradient)."
        )
    return (0, values[0]) if len(values) == 1 else (values[0], values[1])
