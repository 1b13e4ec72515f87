"""Requests that come over time, served by the real engine on this machine."""

import dataclasses
import time
from collections.abc import Sequence

import numpy

from ..adapters import LoopAdapter
from ..config import CDBConfig
from ..engine import Engine
from ..request import Request
from ..trace import Trace
from .served import Served
from .simulation import Settings
from .systems import greedy_requests
from .workloads import Workload

__all__ = ["draw_arrivals", "serve_arrivals", "with_depths"]


def serve_arrivals(
    adapter: LoopAdapter,
    settings: Settings,
    workload: Workload,
    arrivals: Sequence[float],
    trace: bool = False,
    processor_time: bool = False,
) -> tuple[Served, Trace | None]:
    """Run a workload whose depths are given, greedily; requests come when they are due.

    Args:
        adapter: of the model.
        settings: without lookahead, under which no depth of 1 can be replayed, and without a limit of positions.
        workload: with depths.
        arrivals: seconds from the start, in order.
        trace: also record the launches.
        processor_time: by the clock of the thread, in which other processes do not show; for one torch thread on the
            CPU. While nothing is there to do this clock is put forward.

    Returns:
        What became of the requests, and the trace, both on the same clock.

    Raises:
        ValueError: settings with lookahead, or with a limit of positions: the engine counts bytes.
        RuntimeError: a request failed.
    """
    if settings.lookahead or settings.max_kv_positions is not None:
        raise ValueError(
            f"lookahead={settings.lookahead}, max_kv_positions={settings.max_kv_positions}: these can be simulated, "
            "but not served by replay. Leave them out."
        )
    config = CDBConfig(
        exit_rule="replay",
        exit_depths=workload.depths,
        max_num_seqs=settings.max_num_seqs,
        refill=settings.refill,
        min_coda_batch=settings.min_coda_batch,
        prefill_chunk_size=settings.prefill_chunk_size,
        max_prefill_tokens=settings.max_prefill_tokens,
        prefix_reuse=False,  # bounds and simulation count every prompt
        trace=trace,
    )
    engine = Engine(adapter, config.resolve(adapter))
    requests = greedy_requests(workload.prompts, workload.new_tokens)
    served = Served(settings.max_num_seqs, arrivals, workload.new_tokens)
    now = time.thread_time if processor_time else time.perf_counter
    times: list[tuple[float, float]] = []
    origin, coming = now(), 0
    while True:
        began = now() - origin
        while coming < len(requests) and arrivals[coming] <= began:
            engine.add_request(requests[coming])
            coming += 1
        counts = engine.stats.tokens
        launch = engine.step()
        ended = now() - origin
        if launch is None:
            if coming == len(requests):
                _check(requests)
                return served, _timed(engine.stats.trace, times)
            idle = max(0.0, arrivals[coming] - ended)
            if processor_time:
                origin -= idle
            else:
                time.sleep(idle)
            continue
        times.append((began, ended))
        tokens: list[int] = []
        if engine.stats.tokens > counts:
            # Of prompts in pieces those with the last one only.
            tokens = [key for key in launch.keys if key not in launch.pieces or requests[key].tokens]
        served.record(launch, began, ended, tokens, [key for key in tokens if requests[key].ended])


def _timed(trace: Trace | None, times: Sequence[tuple[float, float]]) -> Trace | None:
    """The launches of the trace with these times of their starts and ends."""
    if trace is None:
        return None
    pairs = zip(trace, times, strict=True)
    return Trace(dataclasses.replace(launch, start=began, duration=ended - began) for launch, (began, ended) in pairs)


def _check(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.status != "finished":
            raise RuntimeError(f"request {request.key} ended as {request.status}.") from request.error


def draw_arrivals(requests: int, rate: float | None, seed: int) -> list[float]:
    """Seconds at which requests come: all at 0, or with exponential times between them, `rate` a second."""
    if rate is None:
        return [0.0] * requests
    return numpy.random.default_rng([seed, 4]).exponential(1 / rate, size=requests).cumsum().tolist()


def with_depths(workload: Workload, depth: int) -> Workload:
    """The same requests, all of whose tokens run `depth` loops."""
    return dataclasses.replace(workload, depths=[[depth] * new for new in workload.new_tokens])
