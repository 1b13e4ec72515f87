"""Attention by FlashAttention-2 over pages of the pool: nothing is gathered, whatever the lengths and depths."""

from collections.abc import Callable
from typing import NamedTuple

import numpy
import torch
from transformers.utils import is_flash_attn_2_available

from .adapters import LoopAdapter
from .spans import Spans
from .transfer import to_device

__all__ = ["PAGE", "PageTable", "find_flash"]

PAGE = 256  # positions: the kernels read pages of multiples of it
_LARGEST_HEAD = 256


def find_flash(adapter: LoopAdapter, implementation: str | None) -> Callable | None:
    """`flash_attn_varlen_func`, where the model was loaded with it and its kernels fit; else None.

    Args:
        adapter: gives device, dtype and size of a head.
        implementation: the model's own `attn_implementation`.
    """
    if implementation != "flash_attention_2" or not is_flash_attn_2_available():
        return None
    fits = adapter.dtype in (torch.float16, torch.bfloat16) and adapter.head_dim <= _LARGEST_HEAD
    if adapter.device.type != "cuda" or not fits:
        return None
    from flash_attn import flash_attn_varlen_func

    return flash_attn_varlen_func


class PageTable(NamedTuple):
    """What the spans of a launch read, in the form of `flash_attn_varlen_func`.

    Attributes:
        pages: int32 `[spans, most pages]`, the pages of the pool, padded with pages of the span's own.
        cu_queries, cu_keys: int32 `[spans + 1]`, sums of the new positions and of the positions that are read.
        most_queries, most_keys: of one span.
    """

    pages: torch.Tensor
    cu_queries: torch.Tensor
    cu_keys: torch.Tensor
    most_queries: int
    most_keys: int

    @classmethod
    def create(cls, spans: Spans, firsts: numpy.ndarray, device: torch.device) -> "PageTable":
        """The table of a launch.

        Args:
            spans: of the launch.
            firsts: int64 `[spans]`, the row of the pool where each reads its first position, a multiple of `PAGE`.
            device: of the tensors.
        """
        most_keys = int(spans.end.max())
        last = (spans.end[:, None] - 1) // PAGE
        pages = firsts[:, None] // PAGE + numpy.minimum(numpy.arange(-(-most_keys // PAGE)), last)
        sums = [numpy.concatenate(([0], counts.cumsum())) for counts in (spans.lengths, spans.end)]
        tensors = [to_device(torch.from_numpy(x.astype(numpy.int32)), device) for x in (pages, *sums)]
        return cls(*tensors, int(spans.lengths.max()), most_keys)

    def attend(
        self,
        flash: Callable,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        dropout: float,
    ) -> torch.Tensor:
        """Causal attention of all spans in one call, `[tokens, heads, head dim]`.

        Args:
            flash: `flash_attn_varlen_func`.
            query: `[tokens, heads, head dim]`.
            key, value: the pool by pages, `[pages, PAGE, kv heads, head dim]`.
            scaling, window, dropout: see `depth_attention`.
        """
        output = flash(
            query.to(key.dtype),  # under autocast they come in another one
            key,
            value,
            cu_seqlens_q=self.cu_queries,
            cu_seqlens_k=self.cu_keys,
            max_seqlen_q=self.most_queries,
            max_seqlen_k=self.most_keys,
            dropout_p=dropout,
            softmax_scale=scaling,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            block_table=self.pages,
        )
        return output.to(query.dtype)
