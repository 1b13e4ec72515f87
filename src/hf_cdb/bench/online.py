"""Ways to serve requests that come over time: the library's manager, the engine, and the manager around it."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from ..adapters import adapter_for
from .paged import last_outputs, paged_manager
from .served import Served
from .serving import serve_arrivals, with_depths
from .simulation import Settings
from .workloads import Workload

__all__ = ["ONLINE", "OWN_THREAD", "serve_online"]

# Name -> what it is.
ONLINE = {
    "stock": "Transformers' manager at full depth",
    "full": "the engine at full depth",
    "no-refill": "the engine in cohorts",
    "refill": "the engine",
    "manager": "the engine in the thread of a CDBManager",
}
OWN_THREAD = ("stock", "manager")


def serve_online(
    name: str,
    model: PreTrainedModel,
    settings: Settings,
    workload: Workload,
    arrivals: Sequence[float],
    processor_time: bool = False,
) -> Served:
    """Serve a workload whose depths are given, greedily, by a system of `ONLINE`.

    Args:
        settings: of the engine.
        arrivals: seconds from the start, in order. Requests come when they are due, whatever has become of others.
        processor_time: see `serve_arrivals`; not for systems of `OWN_THREAD`.

    Raises:
        RuntimeError: a request failed.
    """
    width = settings.max_num_seqs
    if name == "stock":
        with paged_manager(model, workload.prompts, workload.new_tokens, width) as manager:
            return _through(manager, width, workload, arrivals)
    if name == "manager":
        names = ("max_num_seqs", "min_coda_batch", "prefill_chunk_size")
        cdb = {"exit_rule": "never", "prefix_reuse": False, **{name: getattr(settings, name) for name in names}}
        with model.init_continuous_batching(cdb=cdb) as manager:
            return _through(manager, width, workload, arrivals, replay=True)
    if name == "full":
        workload = with_depths(workload, workload.depths[0][0])
    settings = dataclasses.replace(settings, refill=name != "no-refill")
    return serve_arrivals(adapter_for(model), settings, workload, arrivals, processor_time=processor_time)[0]


def _through(manager: Any, width: int, workload: Workload, arrivals: Sequence[float], replay: bool = False) -> Served:
    """Hand the requests to a manager as a client would."""
    origin = time.perf_counter()
    for index, due in enumerate(arrivals):
        time.sleep(max(0.0, origin + due - time.perf_counter()))
        options = {"exit_depths": workload.depths[index]} if replay else {}
        manager.add_request(
            workload.prompts[index],
            request_id=str(index),
            max_new_tokens=workload.new_tokens[index],
            record_timestamps=True,
            **options,
        )
    outputs = last_outputs(manager, len(workload))
    admitted = [output.lifespan[0] - origin for output in outputs]
    tokens = [[when - origin for when in output.timestamps] for output in outputs]
    return Served.from_tokens(width, arrivals, admitted, tokens)
