"""The stages of a model over the rows of a launch."""

from collections.abc import Callable
from typing import Any

import numpy
import torch

from .adapters import LoopAdapter
from .attention import AttentionSwitch
from .batch import Batch
from .cache import DepthCache
from .compact_cache import CompactCache
from .config import CDBConfig
from .core_loop import CompiledLoop, EagerLoop
from .flash import find_flash
from .kv_policy import KVPolicy
from .prepack import PrepackedWeights
from .request import Request
from .spans import Spans
from .transfer import to_device

__all__ = ["Stages"]


class Stages:
    """Runs the prelude, a loop and the coda for rows at different positions and depths.

    Args:
        adapter, config: see `Engine`.

    Attributes:
        cache: of the rows; a request has to have its room there before it runs.
        core: runs loops.
    """

    def __init__(self, adapter: LoopAdapter, config: CDBConfig):
        self.adapter = adapter
        self._prepack = config.prepack_weights
        self._attention = AttentionSwitch(adapter.model)
        self._weights = PrepackedWeights(adapter.model, self._prepack)
        policy = KVPolicy.create(config.kv_policy, config.max_depth, config.kv_slots)
        self.cache = _make_cache(config.kv_layout, adapter, policy, find_flash(adapter, self._attention.own))
        parts = (adapter, self.cache, self._attention, self._weights)
        captured = adapter.device.type == "cuda"
        self.core = CompiledLoop(*parts, captured) if config.compile else EagerLoop(*parts)

    def refresh_weights(self) -> None:
        """To be called after the model's weights have changed."""
        self._weights = self.core.weights = PrepackedWeights(self.adapter.model, self._prepack)

    def prelude(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The prelude's output and the states before loop 1, each `[tokens, width]`."""
        layer_inputs = self._address(batch.spans, batch.positions) if self.adapter.prelude_layers else {}
        with self._attention, self._weights:
            embeds = self.adapter.prelude(*_inputs(batch, self.adapter), layer_inputs)
        return embeds[0], self._start(batch, embeds)

    def loop(self, batch: Batch, state: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """The states after one loop more, `[tokens, width]` as they come; `embeds` as `LoopAdapter.loop` has them."""
        return self.core.run(batch.spans, batch.positions, state[None], None if embeds is None else embeds[None])[0]

    def coda(self, spans: Spans, state: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[kept, vocab]` in at least float32 of states `[tokens, width]`; see `LoopAdapter.coda`."""
        layer_inputs = {}
        if self.adapter.coda_layers:
            positions = to_device(torch.from_numpy(spans.positions()), self.adapter.device)
            layer_inputs = self._address(spans, positions[None])
        with self._attention, self._weights:
            logits = self.adapter.coda(state[None], layer_inputs, keep)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _address(self, spans: Spans, positions: torch.Tensor) -> dict:
        """Bind the cache to the spans; the arguments that layers share."""
        self.cache.bind(spans)
        return self.adapter.layer_inputs(positions, self.cache, depth_cache=self.cache)

    def _start(self, batch: Batch, embeds: torch.Tensor) -> torch.Tensor:
        """The states before loop 1, `[tokens, width]`, of embeddings `[1, tokens, width]`."""
        groups: dict[tuple, list[int]] = {}  # rows whose options differ in nothing but the seed
        for index, row in enumerate(batch.rows):
            options = row.start_options
            kind = (options.get("init_scale"), "init_seed" in options) if options else ()
            groups.setdefault(kind, []).append(index)
        if len(groups) == 1:
            return self.adapter.start(embeds, batch.positions, **_start_options(batch.rows, batch.spans, batch.device))[
                0
            ]
        states = torch.empty_like(embeds[0])
        for indices in groups.values():
            rows, spans = [batch.rows[index] for index in indices], batch.spans.take(indices)
            spread = [range(batch.spans.first[index], batch.spans.last[index] + 1) for index in indices]
            tokens = batch.tensor(numpy.concatenate(spread))
            own = self.adapter.start(
                embeds[:, tokens], batch.positions[:, tokens], **_start_options(rows, spans, batch.device)
            )[0]
            states[tokens] = own.to(states.dtype)
        return states


def _make_cache(layout: str, adapter: LoopAdapter, policy: KVPolicy, flash: Callable | None) -> DepthCache:
    if layout == "dense":
        return DepthCache(adapter, policy, flash)
    if flash is not None:
        raise ValueError(
            f"kv_layout={layout!r} with attn_implementation='flash_attention_2': its kernel reads whole pages of one "
            "slot. Choose kv_layout='dense', or load the model with attn_implementation='sdpa'."
        )
    return CompactCache(adapter, policy)


def _inputs(batch: Batch, adapter: LoopAdapter) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Token ids `[1, tokens]` and None; or None and embeddings, where a prompt was given as such."""
    if not batch.prompts:
        ids = [row.tokens[-1] for row in batch.rows]
        for index in batch.again:
            ids[index] = batch.rows[index].tokens[batch.rows[index].token_under_way]
        return batch.tensor(ids)[None], None
    prompts_of_embeds = any(batch.rows[index].prompt_embeds is not None for index in batch.prompts)
    embedding = adapter.model.get_input_embeddings() if prompts_of_embeds else None
    parts = []
    for row, start, end in zip(batch.rows, batch.spans.start, batch.spans.end, strict=True):
        length = row.prompt_length
        ids = []
        if start < length and row.prompt_embeds is not None:
            parts.append(row.prompt_embeds[start:end].to(batch.device))
        elif start < length:
            ids.append(row.prompt_ids[start:end].to(batch.device))
        if end > length:
            ids.append(batch.tensor(row.tokens[max(start - length, 0) : end - length]))
        parts += ids if embedding is None else map(embedding, ids)
    whole = torch.cat(parts)[None]
    return (whole, None) if embedding is None else (None, whole)


def _start_options(rows: list[Request], spans: Spans, device: torch.device) -> dict[str, Any]:
    """Arguments of the adapter's `start`; seeds per row become seeds per token."""
    options = dict(rows[0].start_options)
    if "init_seed" in options:
        seeds = numpy.array([row.start_options["init_seed"] for row in rows], dtype=numpy.int64)
        options["init_seed"] = to_device(torch.from_numpy(spans.by_token(seeds)), device)[None]
    return options
