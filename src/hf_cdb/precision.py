"""The precision that norms, gates, rotary angles and softmax are computed in."""

import torch

__all__ = ["at_least_float32", "attention_dtype"]


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """`x` in float32, or in its own dtype where that is wider (a float64 model stays float64).

    Half precision is enough to store a state but not to square and sum it: a float16 mean of squares overflows at
    256, a bfloat16 cumulative probability rounds up to 1 too early.
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))


def attention_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype for attention over entries such as `x`: their own, but on a CPU at least float32.

    There PyTorch's kernel takes four to seven times as long for one query in half precision.
    """
    return torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else x.dtype
