"""Slots of an ordinary Transformers cache for looped models: one per loop and layer.

A layer that runs in every loop writes other keys in each of them, so a cache with one slot per layer would let loop 2
overwrite loop 1. The caches of Transformers are lists of per-layer stores; a looped model takes a longer list.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache, StaticLayer

__all__ = ["cache_length", "prepare_loop_slots"]


def cache_length(cache: Cache | None):
    """Positions that `cache` holds: int, or a 0-d int64 tensor for a static cache; 0 for None."""
    return 0 if cache is None else cache.get_seq_length()


def prepare_loop_slots(
    cache: Cache, batch: int, first_core_slot: int, core_layers: int, loops: int, built_with: int
) -> None:
    """Give `cache` a slot for every core layer and loop, and check that all of them hold the same past.

    Slots below `first_core_slot` belong to layers outside the loop; the slot of core layer l in loop t (from 0) is
    `first_core_slot + t * core_layers + l`.

    Args:
        cache: a cache of full-attention layers: dynamic (with or without config), offloaded or static.
        batch: rows of the coming forward.
        loops: loops that it runs.
        built_with: number of layers that a cache made from the model's config has.

    Raises:
        ValueError: `cache` is no decoder cache of this model, or was filled with another number of rows or loops.
    """
    if isinstance(cache, EncoderDecoderCache) or not isinstance(cache, Cache):
        raise ValueError(
            f"cache={type(cache).__name__} cannot hold keys and values per loop: a looped model needs a decoder "
            "`Cache` with a list of layers. Pass `DynamicCache(config=model.config)`, or none and `use_cache=True`."
        )
    other = [layer for layer in cache.layers if not isinstance(layer, CacheLayerMixin) or layer.is_sliding]
    if other:
        raise ValueError(
            f"cache has layers of type {type(other[0]).__name__}, which forget positions, but every layer of this "
            "model attends to all of them. Pass `DynamicCache(config=model.config)`."
        )
    filled = [layer.keys for layer in cache.layers[:1] if layer.is_initialized and layer.keys.numel()]
    if filled and len(filled[0]) != batch:
        raise ValueError(
            f"cache holds {len(filled[0])} rows, but the input has {batch}. Pass a cache that was filled with the same "
            "rows; `cache.batch_repeat_interleave` repeats them."
        )
    needed = first_core_slot + core_layers * loops
    if cache.layer_class_to_replicate is None:
        if len(cache.layers) < built_with:
            raise ValueError(
                f"cache has {len(cache.layers)} layers, but this model needs at least {built_with}: it was made for "
                "another model. Pass `DynamicCache(config=model.config)`."
            )
        while len(cache.layers) < needed:
            cache.layers.append(_empty_like(cache.layers[0]))

    past = cache_length(cache)
    if isinstance(past, torch.Tensor) and torch.compiler.is_compiling():
        return  # reading a length off the device would break the graph; the eager prefill has checked it
    for loop in range(loops):
        held = cache.get_seq_length(first_core_slot + loop * core_layers)
        if held != past:
            raise ValueError(
                f"cache holds {int(past)} positions, but only {int(held)} at loop {loop + 1} of the {loops} asked for: "
                "it was filled at another number of loops. Run the same number of loops on one cache, or start with "
                "an empty one."
            )


def _empty_like(layer: CacheLayerMixin) -> CacheLayerMixin:
    if type(layer) is DynamicLayer:
        return DynamicLayer()
    if type(layer) is StaticLayer:
        return StaticLayer(max_cache_len=layer.max_cache_len)
    raise ValueError(
        f"cache_implementation: layers of type {type(layer).__name__} cannot be repeated for every loop. Use a dynamic "
        "or a static cache (`cache_implementation=None` or 'static')."
    )
