"""Launches of one width and context, timed: what `hf-cdb bench step` puts into a place of its table."""

import statistics
import time

import numpy
import torch
from transformers import PreTrainedModel

from ..adapters import adapter_for
from ..config import CDBConfig
from ..engine import Engine
from ..spans import Spans
from ..trace import TracedLaunch
from .attention_clock import AttentionClock
from .systems import greedy_requests

__all__ = ["Cell", "fits", "measure_cell"]

_FILL = 512  # positions of a cache that are written at once


class Cell:
    """Launches of one width and context.

    Args:
        width: rows.
        context: positions of each row's cache, the new one left out.

    Attributes:
        seconds: by stage, of every launch that was timed.
        attention: seconds inside the attention function, of the same launches; on an accelerator, where the function
            returns before it is done, none.
    """

    def __init__(self, width: int, context: int):
        self.width, self.context = width, context
        self.seconds: dict[str, list[float]] = {"prelude": [], "loop": [], "coda": []}
        self.attention: dict[str, list[float]] = {"prelude": [], "loop": [], "coda": []}

    def median(self, stage: str) -> float:
        """Seconds of a launch of the stage."""
        return statistics.median(self.seconds[stage])

    @property
    def attention_share(self) -> float | None:
        """Of the loop's launches, by medians; None where it was not timed."""
        inside = self.attention["loop"]
        return statistics.median(inside) / self.median("loop") if inside else None

    def launches(self) -> list[TracedLaunch]:
        """One launch of each stage, as a trace would hold it, for `fit_costs`."""
        rows, reads = tuple(range(self.width)), self.width * (self.context + 1)
        return [
            TracedLaunch(stage, rows, (1,) * self.width, self.width, reads, 0, 0, 0, 0, 0.0, self.median(stage))
            for stage in self.seconds
        ]


def fits(model: PreTrainedModel, width: int, context: int, gibibytes: float) -> bool:
    """Whether the keys and values of a cell need no more."""
    adapter = adapter_for(model)
    layers = adapter.prelude_layers + adapter.core_layers + adapter.coda_layers
    position = layers * 2 * adapter.kv_heads * adapter.head_dim * adapter.dtype.itemsize
    return width * (context + 4) * position <= gibibytes * 2**30


def measure_cell(model: PreTrainedModel, cell: Cell, seed: int = 0) -> None:
    """Time the launches of two tokens of every row, after another one to warm up, and add them to the cell."""
    adapter = adapter_for(model)
    config = CDBConfig(exit_rule="never", kv_policy="modular", kv_slots=1, max_num_seqs=cell.width)
    engine = Engine(adapter, config.resolve(adapter))
    requests = greedy_requests([[1]] * cell.width, [cell.context + 4] * cell.width)
    for request in requests:
        engine.add_request(request)
    with AttentionClock() as clock:
        _run_token(engine, clock)  # the prompt's, of one position: now every row has its place in the cache
        _fill(engine, cell, seed)
        for request in requests:
            request.start, request.end = cell.context, cell.context + 1
        _run_token(engine, clock)
        for stage, seconds, attention in [*_run_token(engine, clock), *_run_token(engine, clock)]:
            cell.seconds[stage].append(seconds)
            if adapter.device.type == "cpu":
                cell.attention[stage].append(attention)
    engine.close()


def _run_token(engine: Engine, clock: AttentionClock) -> list[tuple[str, float, float]]:
    """Run launches up to the next coda; of each its stage, its seconds, and those inside the attention function."""
    found: list[tuple[str, float, float]] = []
    while not found or found[-1][0] != "coda":
        clock.seconds = 0.0
        _synchronize(engine)
        begin = time.perf_counter()
        launch = engine.step()
        _synchronize(engine)
        found.append((launch.stage, time.perf_counter() - begin, clock.seconds))
    return found


def _synchronize(engine: Engine) -> None:
    """Wait for an accelerator, on which launches return before they are done."""
    if engine.adapter.device.type != "cpu":
        torch.accelerator.synchronize()


def _fill(engine: Engine, cell: Cell, seed: int) -> None:
    """Random keys and values in place of a prompt's: memory that nothing was written to reads faster than it should."""
    adapter = engine.adapter
    generator = torch.Generator(device=adapter.device).manual_seed(seed)
    length = min(_FILL, cell.context)
    shape = (1, adapter.kv_heads, length, adapter.head_dim)
    new = torch.randn(shape, dtype=adapter.dtype, device=adapter.device, generator=generator)
    for row in range(cell.width):
        for start in range(0, cell.context, length):
            end = min(start + length, cell.context)
            engine.cache.bind(Spans([row], numpy.array([start]), numpy.array([end]), loop=numpy.array([1])))
            part = new[:, :, : end - start]
            for layer_idx in range(adapter.prelude_layers + adapter.core_layers + adapter.coda_layers):
                engine.cache.update(part, part, layer_idx)
