"""Requests that come over time, served by the real engine on this machine."""

import dataclasses
import time
from collections.abc import Sequence

from ..adapters import LoopAdapter
from ..config import CDBConfig
from ..engine import Engine
from ..request import Request
from ..trace import Trace
from .served import Served
from .simulation import Settings
from .systems import greedy_requests
from .workloads import Workload

__all__ = ["serve_arrivals", "with_depths"]


def serve_arrivals(
    adapter: LoopAdapter, settings: Settings, workload: Workload, arrivals: Sequence[float], trace: bool = False
) -> tuple[Served, Trace | None]:
    """Run a workload whose depths are given, greedily; requests come when they are due.

    Args:
        adapter: of the model.
        settings: without lookahead, which does not shift depths that are given.
        workload: with depths.
        arrivals: seconds from the start, in order.
        trace: also record the launches.

    Returns:
        What became of the requests, and the trace.

    Raises:
        RuntimeError: a request failed.
    """
    config = CDBConfig(
        exit_rule="replay",
        exit_depths=workload.depths,
        max_num_seqs=settings.max_num_seqs,
        refill=settings.refill,
        min_coda_batch=settings.min_coda_batch,
        prefill_chunk_size=settings.prefill_chunk_size,
        trace=trace,
    )
    engine = Engine(adapter, config.resolve(adapter))
    requests = greedy_requests(workload.prompts, workload.new_tokens)
    served = Served(settings.max_num_seqs, arrivals, workload.new_tokens)
    origin, coming = time.perf_counter(), 0
    while True:
        began = time.perf_counter() - origin
        while coming < len(requests) and arrivals[coming] <= began:
            engine.add_request(requests[coming])
            coming += 1
        counts = engine.stats.tokens
        launch = engine.step()
        ended = time.perf_counter() - origin
        if launch is None:
            if coming == len(requests):
                _check(requests)
                return served, engine.stats.trace
            time.sleep(max(0.0, arrivals[coming] - ended))
            continue
        tokens: list[int] = []
        if engine.stats.tokens > counts:
            # Without pieces of prompts every row of the coda got one.
            chunked = settings.prefill_chunk_size is not None
            tokens = [key for key in launch.keys if not chunked or requests[key].tokens]
        served.record(launch, began, ended, tokens, [key for key in tokens if requests[key].ended])


def _check(requests: Sequence[Request]) -> None:
    for request in requests:
        if request.status != "finished":
            raise RuntimeError(f"request {request.key} ended as {request.status}.") from request.error


def with_depths(workload: Workload, depth: int) -> Workload:
    """The same requests, all of whose tokens run `depth` loops."""
    return dataclasses.replace(workload, depths=[[depth] * new for new in workload.new_tokens])
