"""Root mean square normalisation, shared by Ouro and Huginn."""

import torch
from torch import nn

from ..precision import at_least_float32

__all__ = ["LoopRMSNorm"]


class LoopRMSNorm(nn.Module):
    """`weight * x / sqrt(mean(x^2) + eps)` over the last dimension (arXiv 1910.07467).

    The quotient is computed in at least float32 and cast back before it is multiplied with the weight, the order both
    published models use.

    Args:
        size: width of the last dimension.
        eps: added to the mean of squares.
    """

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = at_least_float32(x)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"
