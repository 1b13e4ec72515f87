"""Attention over a `DepthCache`: one call per row, on views of its own keys and values.

Rows of a launch have caches of different lengths at different depths. Gathering them into one padded tensor costs
more than the attention itself; on the CPU a call per row on views is as fast as one padded batch, and needs no mask.
"""

import torch
from torch import nn
from transformers import AttentionInterface

from .cache import DepthCache

__all__ = ["DEPTH_ATTENTION", "DepthAttention", "depth_attention"]

DEPTH_ATTENTION = "hf_cdb_depth"


def depth_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float,
    depth_cache: DepthCache,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Causal attention of every span of the bound launch over what its request has cached.

    Args:
        query: `[1, heads, tokens, head dim]`, the spans one after the other.
        key, value: ignored; `depth_cache.reads` has them, the new ones included.
        scaling: factor on the scores.
        sliding_window: a query reads the last so many positions, its own included.

    Returns:
        `[1, tokens, heads, head dim]`, and None for the weights.
    """
    reads = depth_cache.reads
    queries = query.split([length for _, _, length in reads], dim=2)
    outputs = [_attend_span(q, k, v, scaling, sliding_window) for q, (k, v, _) in zip(queries, reads, strict=True)]
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return output.transpose(1, 2).contiguous(), None


def _attend_span(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float, window: int | None
) -> torch.Tensor:
    queries, keys = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    if queries == 1:
        if window is not None and keys > window:
            key, value = key.narrow(2, keys - window, window), value.narrow(2, keys - window, window)
        if groups == 1:
            return nn.functional.scaled_dot_product_attention(query, key, value, scale=scaling)
        # The heads that share a key are as good as queries of it, and need no copies of it.
        grouped = query.reshape(1, key.shape[1], groups, -1)
        output = nn.functional.scaled_dot_product_attention(grouped, key, value, scale=scaling)
        return output.reshape(query.shape)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if queries == keys and (window is None or keys <= window):
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    distance = torch.arange(keys - queries, keys, device=query.device)[:, None] - torch.arange(
        keys, device=query.device
    )
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)


AttentionInterface.register(DEPTH_ATTENTION, depth_attention)


class DepthAttention:
    """Context manager: while it is open, the layers of `model` call `depth_attention`.

    The choice stands in the model's config, so nobody else can run the model meanwhile.
    """

    def __init__(self, model: nn.Module):
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self._before: list[str] = []

    def __enter__(self) -> None:
        self._before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = DEPTH_ATTENTION

    def __exit__(self, *error) -> None:
        for config, before in zip(self._configs, self._before, strict=True):
            config._attn_implementation = before
