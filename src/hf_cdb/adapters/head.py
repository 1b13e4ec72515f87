"""The language modelling head on few rows."""

import torch
from torch import nn

from ..prepack import is_plain

__all__ = ["apply_head"]

FEW_ROWS = 8


def apply_head(head: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """`head(states)`, `[rows, width]` to `[rows, vocab]`.

    With depth batching few rows at a time reach the head. MKL multiplies 2 to 8 rows in float32 about 1.5 times
    faster when the large matrix stands on the left, so a head that is a plain layer of weights is applied that way.
    """
    few = 1 < len(states) <= FEW_ROWS and states.dtype == torch.float32 and states.device.type == "cpu"
    plain = few and is_plain(head) and "forward" not in vars(head) and head.bias is None
    if plain and head.weight.dtype == torch.float32 and torch.backends.mkl.is_available():
        return (head.weight @ states.T).T
    return head(states)
