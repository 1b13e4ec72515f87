"""States and logits of a looped model after every depth, from one pass over packed rows."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..adapters import LoopAdapter, adapter_for
from .batches import block_mask

__all__ = ["logits_by_depth", "packed_mask", "states_by_depth"]


@torch.no_grad()
def states_by_depth(
    model: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    depths: Sequence[int] | None = None,
) -> dict[int, torch.Tensor]:
    """Core state `[rows, length, width]` after each depth, as exit rules and gates see it, from one pass.

    Args:
        model: any model with an adapter, in evaluation mode, whose attention implementation reads an additive mask
            ("eager" or "sdpa"). A start state is the model's own default: zeros for Huginn.
        input_ids: int64 `[rows, length]`.
        position_ids: int64 `[rows, length]`; default 0, 1, 2, ...
        segments: int64 `[rows, length]`: a token attends to earlier ones of its own segment; default one segment.
        depths: loops to report, from 1, ascending or not; default all up to the model's own number.

    Raises:
        ValueError: a depth that the model cannot run.
    """
    states, _ = _run(model, input_ids, position_ids, segments, depths, with_logits=False)
    return states


@torch.no_grad()
def logits_by_depth(
    model: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
    depths: Sequence[int] | None = None,
) -> dict[int, torch.Tensor]:
    """Logits `[rows, length, vocab]` after each depth, in the model's dtype; arguments as of `states_by_depth`."""
    _, logits = _run(model, input_ids, position_ids, segments, depths, with_logits=True)
    return logits


def _run(model, input_ids, position_ids, segments, depths, with_logits):
    adapter = adapter_for(model)
    depths = _check_depths(adapter, depths)
    positions = torch.arange(input_ids.shape[1])[None].expand_as(input_ids) if position_ids is None else position_ids
    segments = torch.zeros_like(input_ids) if segments is None else segments
    states, logits = {depth: [] for depth in depths}, {depth: [] for depth in depths}
    # Stages of an adapter work on launches of one row.
    for row in zip(input_ids, positions, segments, strict=True):
        ids, position, segment = (values[None].to(adapter.device) for values in row)
        inputs = adapter.layer_inputs(position, None, attention_mask=packed_mask(adapter, segment))
        embeds = adapter.prelude(ids, None, inputs)
        state = adapter.start(embeds, position)
        for depth in range(1, max(depths) + 1):
            state = adapter.loop(state, embeds, inputs)
            if depth in states:
                states[depth].append(state[0])
                if with_logits:
                    logits[depth].append(adapter.coda(state, inputs))
    return tuple({depth: torch.stack(rows) for depth, rows in kind.items() if rows} for kind in (states, logits))


def _check_depths(adapter: LoopAdapter, depths: Sequence[int] | None) -> list[int]:
    depths = list(range(1, adapter.full_depth + 1) if depths is None else depths)
    most = math.inf if adapter.may_deepen else adapter.full_depth
    if not depths or not all(isinstance(depth, int) and 1 <= depth <= most for depth in depths):
        range_ = "1 or more" if adapter.may_deepen else f"1 to {most}"
        raise ValueError(f"depths={depths}: {type(adapter.model).__name__} runs {range_} loops. Choose among these.")
    return depths


def packed_mask(adapter: LoopAdapter, segments: torch.Tensor) -> Any:
    """Additive mask `[1, 1, length, length]` of segments int64 `[1, length]`, each causal and by itself.

    A dict by layer type where some layers see `sliding_window` positions only.
    """
    keep = block_mask(segments)
    full = torch.zeros(keep.shape, dtype=adapter.dtype, device=keep.device).masked_fill(~keep, -math.inf)
    config = adapter.model.config
    if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
        return full
    index = torch.arange(segments.shape[1], device=keep.device)
    far = index[:, None] - index >= config.sliding_window
    return {"full_attention": full, "sliding_attention": full.masked_fill(far, -math.inf)}
