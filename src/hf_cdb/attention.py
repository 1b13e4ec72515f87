"""Attention over a `DepthCache`, whose rows have caches of different lengths at different depths.

Long rows are attended to one call each, on views of their own keys and values: no copy, no padding, no mask. For
short rows the calls would cost more than the attention; they are packed beside each other and take one call together.
"""

import threading
import weakref

import numpy
import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from .cache import DepthCache
from .places import Pack
from .precision import attention_dtype
from .split_attention import attend_split, may_split
from .transfer import to_device

__all__ = ["DEPTH_ATTENTION", "AttentionSwitch", "depth_attention"]

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
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Causal attention of every span of the bound launch over what its request has cached.

    Args:
        query: `[1, heads, tokens, head dim]`, the spans one after the other.
        key, value: the new entries, `[1, kv heads, tokens, head dim]`, which `depth_cache` has stored already.
        scaling: factor on the scores.
        sliding_window: a query reads the last so many positions, its own included.
        dropout: share of the weights to drop; layers give it in training mode.

    Returns:
        `[1, tokens, heads, head dim]`, and None for the weights.
    """
    places = depth_cache.places
    if depth_cache.flash is not None:
        options = {"scaling": scaling, "window": sliding_window, "dropout": dropout}
        queries = query[0].transpose(0, 1)
        return places.table.attend(depth_cache.flash, queries, *depth_cache.pages(), **options)[None], None
    if len(places.packs) == 1 and not places.single and not places.split:
        return _attend_pack(places.packs[0], query, depth_cache, scaling, sliding_window, dropout)[None], None
    parts: list[tuple[torch.Tensor | slice, torch.Tensor]] = []
    for pack in places.packs:
        parts.append((pack.tokens, _attend_pack(pack, query, depth_cache, scaling, sliding_window, dropout)))
    single, split = places.single, places.split
    if split and not may_split(query, sliding_window, dropout):
        single, split = [*single, *split], []
    if split:
        tokens = torch.from_numpy(depth_cache.bound.first[split])
        parts.append((tokens, attend_split(query, depth_cache, split, scaling)))
    for index in single:
        spans = depth_cache.bound
        token, length = int(spans.first[index]), int(spans.lengths[index])
        if not length:
            continue
        gaps = None if spans.gaps is None else spans.gaps.get(index)
        # What a prompt that starts here reads are its own new entries, warm in the caches of the processor.
        whole = spans.start[index] == 0 and gaps is None
        window = sliding_window if gaps is None else None
        read = [x.narrow(2, token, length) for x in (key, value)] if whole else depth_cache.views(index, window)
        own = _attend_span(query.narrow(2, token, length), *read, scaling, sliding_window, dropout, gaps)
        parts.append((slice(token, token + length), own[0].transpose(0, 1)))
    # Under autocast what comes out is of another dtype than the queries.
    output = parts[0][1].new_empty(query.shape[2], query.shape[1], query.shape[3])
    for tokens, part in parts:
        output[tokens] = part
    return output[None], None


def _attend_pack(
    pack: Pack, query: torch.Tensor, depth_cache: DepthCache, scaling: float, window: int | None, dropout: float
) -> torch.Tensor:
    """Attention of packed spans in one call, `[spans, heads, head dim]`."""
    queries = query[0].transpose(0, 1)
    if pack.tokens is not None:
        queries = queries[pack.tokens]
    both = depth_cache.packed(pack)
    # The heads that share a key are as good as queries of it.
    grouped = queries.unflatten(1, (both.shape[2], -1))
    options = {"scale": scaling, "dropout_p": dropout, "attn_mask": pack.mask(window)}
    return _attention(grouped, both[0], both[1], **options).flatten(1, 2)


def _attend_span(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    window: int | None,
    dropout: float,
    gaps: numpy.ndarray | None = None,
) -> torch.Tensor:
    """Attention of the last positions of what is read, or of the positions `gaps`."""
    options = {"scale": scaling, "dropout_p": dropout}
    queries, keys = query.shape[2], key.shape[2]
    groups = query.shape[1] // key.shape[1]
    if queries == 1:
        if window is not None and keys > window:
            key, value = key.narrow(2, keys - window, window), value.narrow(2, keys - window, window)
        if groups == 1:
            return _attention(query, key, value, **options)
        # The heads that share a key are as good as queries of it, and need no copies of it.
        grouped = query.reshape(1, key.shape[1], groups, -1)
        output = _attention(grouped, key, value, **options)
        return output.reshape(query.shape)
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    if queries == keys and (window is None or keys <= window):
        return _attention(query, key, value, is_causal=True, **options)
    if gaps is None:
        positions = torch.arange(keys - queries, keys, device=query.device)
    else:
        positions = to_device(torch.from_numpy(gaps), query.device)
    distance = positions[:, None] - torch.arange(keys, device=query.device)
    mask = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return _attention(query, key, value, attn_mask=mask, **options)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options) -> torch.Tensor:
    """PyTorch's, in the dtype that is right for the device."""
    wide, own = attention_dtype(query), query.dtype
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(wide)
    query, key, value = query.to(wide), key.to(wide), value.to(wide)
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, **options).to(own)


AttentionInterface.register(DEPTH_ATTENTION, depth_attention)


_LOCKS: "weakref.WeakKeyDictionary[nn.Module, threading.RLock]" = weakref.WeakKeyDictionary()
_GUARD = threading.Lock()


class AttentionSwitch:
    """Context manager: while it is open, the layers of `model` call the attention function of this name.

    The choice stands in the model's config. Switches of one model take turns, so that several threads may generate
    with cdb; a thread that runs the model without cdb meanwhile may meet the wrong function.

    Args:
        model: the model.
        implementation: the name; None leaves the function that the model was loaded with, and takes its turn.
    """

    def __init__(self, model: nn.Module, implementation: str | None = DEPTH_ATTENTION):
        self.implementation = implementation
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self._own: list[str] = []
        with _GUARD:
            self._lock = _LOCKS.setdefault(model, threading.RLock())

    @property
    def own(self) -> str | None:
        """The attention function that the model was loaded with."""
        with self._lock:  # in the middle of another thread's launch it is not there
            return self._configs[0]._attn_implementation if self._configs else None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._own = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            _choose(config, self.implementation or config._attn_implementation)

    def __exit__(self, *error) -> None:
        for config, own in zip(self._configs, self._own, strict=True):
            _choose(config, own)
        self._lock.release()


def _choose(config: PreTrainedConfig, implementation: str) -> None:
    """Set the attention function of one config, past a setter that visits others and costs 30 us a time."""
    if "_attn_implementation_internal" in vars(config):
        vars(config)["_attn_implementation_internal"] = implementation
    else:
        config._attn_implementation = implementation
