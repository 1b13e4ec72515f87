"""Tokens, positions and masks of both forward passes: checked, completed, converted."""

import functools
from typing import Any

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask

from .loop_slots import cache_length

__all__ = ["accepts_past_key_values", "embed_inputs", "resolve_mask", "resolve_positions"]


def accepts_past_key_values(forward):
    """Let a forward that takes `cache` take the older name `past_key_values` too.

    Without it the old name would vanish in `**kwargs` and every step would decode without a past.
    """

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        if "past_key_values" in kwargs:
            old = kwargs.pop("past_key_values")
            if old is not None and kwargs.get("cache") is not None and kwargs["cache"] is not old:
                raise ValueError(
                    "cache and past_key_values are two different objects, but they are two names of one argument. "
                    "Pass `cache` only."
                )
            if old is not None:
                kwargs["cache"] = old
        return forward(self, *args, **kwargs)

    return wrapped


def embed_inputs(
    embedding: nn.Module, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None
) -> torch.Tensor:
    """Embeddings `[batch, positions, width]`, looked up for `input_ids` `[batch, positions]` or taken as given.

    Raises:
        ValueError: none or both are given, or one has the wrong shape or dtype.
    """
    if (input_ids is None) == (inputs_embeds is None):
        given = "both" if input_ids is not None else "none"
        raise ValueError(f"input_ids and inputs_embeds: {given} given, but exactly one is needed.")
    name = "inputs_embeds" if input_ids is None else "input_ids"
    given = inputs_embeds if input_ids is None else input_ids
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"{name} is a {type(given).__name__}, but a tensor is needed: `torch.tensor(...)`.")
    if given.numel() == 0:
        raise ValueError(
            f"{name} has shape {tuple(given.shape)}: there is no token in it. Give every row at least one."
        )
    if input_ids is not None:
        if input_ids.ndim != 2 or input_ids.is_floating_point():
            raise ValueError(
                f"input_ids has shape {tuple(input_ids.shape)} and dtype {input_ids.dtype}, but token ids "
                "[batch, positions] of an integer dtype are needed. A single prompt is `ids[None]`."
            )
        return embedding(input_ids)
    if inputs_embeds.ndim != 3 or inputs_embeds.shape[-1] != embedding.embedding_dim:
        raise ValueError(
            f"inputs_embeds has shape {tuple(inputs_embeds.shape)}, but [batch, positions, {embedding.embedding_dim}] "
            "is needed. `model.get_input_embeddings()(ids)` gives it."
        )
    return inputs_embeds


def resolve_positions(
    embeds: torch.Tensor, attention_mask: Any, position_ids: torch.Tensor | None, cache: Cache | None
) -> torch.Tensor:
    """Positions `[batch or 1, positions]`, int64.

    Where none are given they count the tokens that a 2-D mask keeps, so padding on the left shifts nothing; without
    such a mask they count on from the length of the cache.

    Raises:
        ValueError: `position_ids` does not fit the input.
    """
    batch, length = embeds.shape[:2]
    if position_ids is not None:
        positions = position_ids[None] if position_ids.ndim == 1 else position_ids
        if positions.ndim != 2 or positions.shape[0] not in (1, batch) or positions.shape[1] != length:
            raise ValueError(
                f"position_ids has shape {tuple(position_ids.shape)}, but the input has {batch} rows of {length} "
                f"tokens. Pass [{length}], [1, {length}] or [{batch}, {length}], or leave it out."
            )
        return positions.to(embeds.device)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2 and attention_mask.shape[1] >= length:
        kept = attention_mask.to(embeds.device).long().cumsum(-1) - 1
        return kept.clamp(min=0)[:, -length:]
    return (torch.arange(length, device=embeds.device) + cache_length(cache))[None]


def resolve_mask(
    config: Any,
    embeds: torch.Tensor,
    attention_mask: Any,
    position_ids: torch.Tensor,
    cache: Cache | None,
) -> Any:
    """The mask in the form that the configured attention implementation reads.

    Args:
        embeds: `[batch, queries, width]`, for sizes, dtype and device.
        attention_mask: None; 2-D `[batch, cached + queries]`, true or 1 where there is a token; or prepared 4-D
            `[batch or 1, heads or 1, queries, keys]`, where a bool or integer mask is true at what may be attended
            and a floating one is added to the scores. A dict of masks by layer type, as `generate` prepares for a
            static cache, gives its "full_attention" entry. Other objects (a flex `BlockMask`) pass through.

    Raises:
        ValueError: shape or values fit none of these.
    """
    if attention_mask is None:
        return create_causal_mask(config, embeds, None, cache, position_ids=position_ids)
    if isinstance(attention_mask, dict) and "full_attention" in attention_mask:
        attention_mask = attention_mask["full_attention"]
        if attention_mask is None:
            return None
    if isinstance(attention_mask, BlockMask):
        return attention_mask
    if not isinstance(attention_mask, torch.Tensor):
        raise ValueError(
            f"attention_mask is a {type(attention_mask).__name__}, but a 2-D or 4-D tensor or a `BlockMask` is needed."
        )
    if attention_mask.ndim == 2:
        _check_padding_mask(attention_mask, embeds, cache)
        return create_causal_mask(config, embeds, attention_mask.bool(), cache, position_ids=position_ids)
    if attention_mask.ndim == 4:
        return _convert_prepared_mask(config._attn_implementation, attention_mask, embeds, cache)
    raise ValueError(
        f"attention_mask has {attention_mask.ndim} dimensions, but 2 ([batch, positions], 1 where there is a token) or "
        "4 ([batch, heads or 1, queries, keys]) are needed."
    )


def _check_padding_mask(mask: torch.Tensor, embeds: torch.Tensor, cache: Cache | None) -> None:
    batch, length = embeds.shape[:2]
    past = cache_length(cache)
    if isinstance(past, torch.Tensor):
        if torch.compiler.is_compiling():
            return  # reading the length of a static cache off the device would break the graph
        past = int(past)
    if mask.shape != (batch, past + length):
        held = f" onto {past} cached ones" if past else ""
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but {batch} rows of {length} tokens{held} are given: it "
            f"needs [{batch}, {past + length}], the cached positions included."
        )
    if mask.is_floating_point() and not ((mask == 0) | (mask == 1)).all():
        raise ValueError(
            "attention_mask is 2-D and floating with values other than 0 and 1. Pass 1 where there is a token and 0 at "
            "padding; an additive mask has to be 4-D."
        )


def _convert_prepared_mask(
    implementation: str, mask: torch.Tensor, embeds: torch.Tensor, cache: Cache | None
) -> torch.Tensor:
    batch, length = embeds.shape[:2]
    # A static cache returns all its places, filled or not.
    keys = length if cache is None else cache.get_mask_sizes(length, 0)[0]
    if mask.shape[0] not in (1, batch) or mask.shape[2] != length or mask.shape[3] != keys:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, but a prepared mask of this input is [{batch} or 1, heads "
            f"or 1, {length}, {keys}]."
        )
    if implementation not in ("eager", "sdpa", "flex_attention"):
        raise ValueError(
            f"attention_mask is 4-D, which the attention implementation {implementation!r} cannot read. Pass a 2-D "
            "mask, or use 'sdpa' or 'eager'."
        )
    if not mask.is_floating_point():
        if mask.dtype != torch.bool and not ((mask == 0) | (mask == 1)).all():
            raise ValueError(
                "attention_mask is 4-D and of an integer dtype with values other than 0 and 1. Pass 1 or True at what "
                "may be attended, or an additive mask of a floating dtype."
            )
        mask = mask.bool()
        if implementation == "sdpa":
            return mask
        # Added, not read as truth: True alone would raise the score of a kept key by one.
        zero = torch.zeros((), dtype=embeds.dtype, device=embeds.device)
        return torch.where(mask.to(embeds.device), zero, torch.finfo(embeds.dtype).min)
    # A narrower dtype would turn a large negative number into -inf, and a row of nothing but -inf into no number.
    return mask.to(embeds.device).clamp(min=torch.finfo(embeds.dtype).min).to(embeds.dtype)
