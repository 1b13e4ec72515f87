"""Scaled dot product attention of both models: Transformers' registry, with an eager fall-back."""

from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..precision import at_least_float32

__all__ = ["attend", "eager_attention"]


def eager_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention from plain matrix products; the implementation that can return its weights.

    Args:
        module: gives `num_key_value_groups` (query heads per key/value head) and `training`.
        query: `[batch, heads, queries, head_dim]`.
        key, value: `[batch, kv_heads, keys, head_dim]`. Query head h reads key/value head `h // groups`.
        attention_mask: additive, broadcastable to `[batch, heads, queries, keys]`, or None.

    Returns:
        The output `[batch, queries, heads, head_dim]` and the weights `[batch, heads, queries, keys]`. The softmax
        runs in at least float32.
    """
    groups = module.num_key_value_groups
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = at_least_float32((query @ key.transpose(-1, -2)) * scaling)
    if attention_mask is not None:
        # In half precision a score below zero and the lowest number of the mask would add up to -inf.
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the attention implementation that `module.config` names; shapes as in `eager_attention`."""
    implementation: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
        module.config._attn_implementation, eager_attention
    )
    return implementation(
        module,
        query,
        key,
        value,
        attention_mask,
        scaling=module.scaling,
        dropout=dropout if module.training else 0.0,
        **kwargs,
    )
