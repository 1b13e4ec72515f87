"""Attention of one query over two stretches of memory, each read in place."""

from collections.abc import Sequence

import torch

from .compact_cache import CompactCache
from .precision import attention_dtype

__all__ = ["attend_split", "may_split"]

# PyTorch's own kernel for the CPU, which its attention function calls; only this way it tells the log-sum-exp.
_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def may_split(query: torch.Tensor, window: int | None, dropout: float) -> bool:
    """Whether `attend_split` serves: the kernel is the CPU's, drops no weights, and the stretches have no order."""
    return query.device.type == "cpu" and window is None and not dropout


def attend_split(query: torch.Tensor, cache: CompactCache, indices: Sequence[int], scaling: float) -> torch.Tensor:
    """Attention of spans of one position over what they read, `[spans, heads, head dim]`.

    With outputs `a`, `b` and log-sum-exps `p`, `q` of the two stretches the whole is `b + sigmoid(p - q) (a - b)`: the
    softmax over both gives the first one the share `e^p / (e^p + e^q)`. Joined for all spans at once.

    Args:
        query: `[1, heads, tokens, head dim]` of the launch.
        cache: of the rows.
        indices: the spans, of those that `places.split` names.
        scaling: factor on the scores.
    """
    own, parts = query.dtype, ([], [])
    queries = query[0].transpose(0, 1)[cache.bound.first[indices]]
    # The heads that share a key are as good as queries of it: [1, kv heads, heads of each, head dim] for every span.
    grouped = queries.unflatten(1, (cache.adapter.kv_heads, -1)).to(attention_dtype(query))
    for index, one in zip(indices, grouped.split(1), strict=True):
        for part, (key, value) in zip(parts, cache.stretches(index), strict=True):
            part.append(_kernel(one, key.to(one.dtype), value.to(one.dtype), scale=scaling))
    (left, left_sums), (slot, slot_sums) = ([torch.cat(x) for x in zip(*part, strict=True)] for part in parts)
    share = torch.sigmoid(left_sums - slot_sums)[..., None]
    return torch.lerp(slot, left, share.to(slot.dtype)).flatten(1, 2).to(own)
