"""One loop of the core over the spans of a launch: layer by layer, or as one compiled graph.

In the graph, writing keys and values and attending to them is one operator, since the rows of a launch and their
places change all the time and only its Python knows them. The rest between two attentions is fused, and on CUDA
captured: the operator is where a captured graph ends and the next begins.
"""

import functools
import threading
import weakref
from collections.abc import Callable

import numpy
import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from transformers import AttentionInterface
from transformers.utils import logging

from .adapters import LoopAdapter
from .attention import AttentionSwitch, depth_attention
from .cache import DepthCache
from .prepack import PrepackedWeights
from .spans import Spans

__all__ = ["CompiledLoop", "EagerLoop", "bucket"]

logger = logging.get_logger(__name__)

TRACED_ATTENTION = "hf_cdb_traced"
SCRATCH = "scratch"  # key of what padding writes and reads; those of requests are integers

_OPERATORS = torch.library.Library("hf_cdb_loop", "DEF")
_OPERATORS.define(
    "attend(Tensor query, Tensor key, Tensor value, int layer, float scaling, int? window, float dropout) -> Tensor",
    tags=(torch.Tag.cudagraph_unsafe,),
)
_RUNNING = threading.local()  # `cache`: the one of the launch that this thread runs
_FAILED: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def _attend(query, key, value, layer, scaling, window, dropout):
    _RUNNING.cache.update(key, value, layer)
    output, _ = depth_attention(None, query, key, value, None, scaling, _RUNNING.cache, window, dropout)
    return output.contiguous()


def _shape_of_attend(query, key, value, layer, scaling, window, dropout):
    _, heads, tokens, size = query.shape
    return query.new_empty(1, tokens, heads, size)


_OPERATORS.impl("attend", _attend, "CompositeExplicitAutograd")
torch.library.register_fake("hf_cdb_loop::attend", _shape_of_attend)


class _TracedCache:
    """Stands for the cache while layers are traced: remembers which of them asks."""

    layer = 0

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.layer = layer_idx
        return key_states, value_states


def _traced_attention(
    module, query, key, value, attention_mask, scaling, depth_cache, sliding_window=None, dropout=0.0, **kwargs
):
    arguments = (depth_cache.layer, scaling, sliding_window, dropout)
    return torch.ops.hf_cdb_loop.attend(query, key, value, *arguments), None


AttentionInterface.register(TRACED_ATTENTION, _traced_attention)


class EagerLoop:
    """Runs `adapter.loop` as it stands.

    Args:
        adapter: the model's stages.
        cache: of the rows.
        attention, weights: open while it runs.
    """

    def __init__(self, adapter: LoopAdapter, cache: DepthCache, attention: AttentionSwitch, weights: PrepackedWeights):
        self.adapter, self.cache, self.attention, self.weights = adapter, cache, attention, weights

    def run(
        self, spans: Spans, positions: torch.Tensor, state: torch.Tensor, embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """The state after one loop, `[1, tokens, width]`.

        Args:
            spans: the positions that run.
            positions: the same, int64 `[1, tokens]`.
            state, embeds: see `LoopAdapter.loop`.
        """
        self.cache.bind(spans)
        layer_inputs = self.adapter.layer_inputs(positions, self.cache, depth_cache=self.cache)
        with self.attention, self.weights:
            return self.adapter.loop(state, embeds, layer_inputs)


class CompiledLoop(EagerLoop):
    """Runs it as one compiled graph, the same one for any number of rows; as it stands, with a warning, where that
    fails.

    On CUDA graphs are captured, one for each number of rows. So that they are few, launches are padded to the next
    `bucket`, and launches with prompts run as they stand.

    Args:
        adapter, cache, attention, weights: as of `EagerLoop`.
        captured: whether graphs are captured.
    """

    def __init__(
        self,
        adapter: LoopAdapter,
        cache: DepthCache,
        attention: AttentionSwitch,
        weights: PrepackedWeights,
        captured: bool,
    ):
        super().__init__(adapter, cache, attention, weights)
        self.captured = captured
        self._traced = AttentionSwitch(adapter.model, TRACED_ATTENTION)
        self._stand_in = _TracedCache()
        if captured:
            cache.allocate(SCRATCH, 1)

    def run(self, spans, positions, state, embeds):
        if self.adapter.model in _FAILED or (self.captured and not spans.single):
            return super().run(spans, positions, state, embeds)
        try:
            if not self.captured:
                return self._run_graph(spans, positions, state, embeds)
            padded = _pad(spans, positions, state, embeds)
            torch.compiler.cudagraph_mark_step_begin()
            return self._run_graph(*padded)[:, : len(spans)]
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            _FAILED.add(self.adapter.model)
            reason = next(iter(str(error).strip().splitlines()), "no reason given")
            logger.warning_once(
                f"compile=True: the loop of {type(self.adapter.model).__name__} runs without being compiled, since "
                f"that failed: {type(error).__name__}: {reason}"
            )
            return super().run(spans, positions, state, embeds)

    def _run_graph(self, spans, positions, state, embeds):
        self.cache.bind(spans)
        layer_inputs = self.adapter.layer_inputs(positions, self._stand_in, depth_cache=self._stand_in)
        _RUNNING.cache = self.cache
        try:
            with self._traced, self.weights:
                return _graph(self.captured)(self.adapter, state, embeds, layer_inputs)
        finally:
            del _RUNNING.cache


def _loop(adapter, state, embeds, layer_inputs):
    return adapter.loop(state, embeds, layer_inputs)


@functools.cache
def _graph(captured: bool) -> Callable:
    """The compiled loop of whatever adapter; `torch.compile` keeps a graph for every model that it meets."""
    mode = "reduce-overhead" if captured else None
    return torch.compile(_loop, fullgraph=True, dynamic=True, mode=mode)


def bucket(rows: int) -> int:
    """The next number of rows that graphs are captured for: powers of two up to 16, then multiples of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 16 else -(-rows // 8) * 8


def _pad(
    spans: Spans, positions: torch.Tensor, state: torch.Tensor, embeds: torch.Tensor | None
) -> tuple[Spans, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Fill a launch of single positions up to the next bucket with rows that run position 0 of `SCRATCH`."""
    more = bucket(len(spans)) - len(spans)
    zeros, ones = numpy.zeros(more, dtype=numpy.int64), numpy.ones(more, dtype=numpy.int64)
    fill = zip((spans.start, spans.end, spans.loop), (zeros, ones, ones), strict=True)
    padded = Spans([*spans.keys, *[SCRATCH] * more], *(numpy.concatenate(pair) for pair in fill))
    state, embeds = (x if x is None else nn.functional.pad(x, (0, 0, 0, more)) for x in (state, embeds))
    return padded, nn.functional.pad(positions, (0, more)), state, embeds
