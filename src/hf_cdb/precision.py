"""The precision that norms, gates, rotary angles and softmax are computed in."""

import torch

__all__ = ["at_least_float32"]


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or in its own dtype where that is wider (a float64 model stays float64).

    Half precision is enough to store a state but not to square and sum it: a float16 mean of squares overflows at
    256, a bfloat16 cumulative probability rounds up to 1 too early.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
