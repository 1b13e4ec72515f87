"""What the benchmarks compare: ways to serve one workload with one model."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..adapters import adapter_for
from ..config import CDBConfig, saved_settings
from ..engine import Engine
from ..request import Request
from ..sampling import Sampler
from ..stats import CDBStats
from .models import plain_generation
from .paged import generate_paged
from .workloads import Workload

__all__ = [
    "SYSTEMS",
    "Run",
    "cdb_settings",
    "check_settings",
    "differ_in_depth_alone",
    "greedy_requests",
    "serve",
    "serve_engine",
]

# Name -> what it is called in tables.
SYSTEMS = {
    "stock": "stock generate",
    "generate-batch": "stock generate_batch",
    "full": "engine, exits off",
    "no-refill": "cdb, no refill",
    "refill": "cdb, refill",
}


# Settings that say when rows leave and how they wait for it. Without exits they mean nothing.
_OF_EXITS = {"min_depth", "exit_rule", "exit_threshold", "quality", "min_coda_batch", "exit_depths", "refill"}
# What a token leaves behind for the loops that it did not run is a matter of depth too; W and R a run tells itself.
_OF_DEPTH = _OF_EXITS | {"kv_policy", "kv_slots", "max_num_seqs", "max_depth"}


@dataclass
class Run:
    """A workload served once.

    Attributes:
        seconds: from the first request to the last token.
        tokens: by request its own new tokens; what a batch ran beyond a row's own length is left out.
        depths: by request and token; None for stock generation.
        stats: of the engine; None for stock generation.
    """

    seconds: float
    tokens: list[list[int]]
    depths: list[list[int]] | None = None
    stats: CDBStats | None = None


def serve(name: str, model: PreTrainedModel, workload: Workload, width: int, settings: dict[str, Any]) -> Run:
    """Serve the workload by a system of `SYSTEMS`.

    Args:
        width: W, rows in flight or in a batch.
        settings: of cdb, from `cdb_settings`, whose `max_num_seqs` goes before W; with exits off those about exits are
            left out.
    """
    if name == "stock":
        return _serve_stock(model, workload, width)
    if name == "generate-batch":
        tokens, seconds = generate_paged(model, workload.prompts, workload.new_tokens, width)
        return Run(seconds, tokens)
    if name == "full":
        settings = {key: value for key, value in settings.items() if key not in _OF_EXITS} | {"exit_rule": "never"}
    settings = {"max_num_seqs": width, **settings, "refill": name != "no-refill"}
    # Elsewhere a launch returns before it is done, and its time says nothing.
    return serve_engine(model, workload, CDBConfig(**settings, trace=model.device.type == "cpu"))


def cdb_settings(model: PreTrainedModel, workload: Workload, **asked: Any) -> dict[str, Any]:
    """Settings of the cdb systems: replay where the workload has depths, else the model's saved ones about exits.

    Prompts share nothing unless asked: what stands beside them, and the bounds, count every prompt.

    Args:
        asked: settings that go before these; None is not asked.

    Raises:
        ValueError: settings of an exit rule beside depths to replay, or a lookahead that these depths cannot have.
    """
    asked = {"prefix_reuse": False, **{name: value for name, value in asked.items() if value is not None}}
    check_settings(asked, replayed=workload.depths is not None)
    if workload.depths is None:
        adapter = adapter_for(model)
        settings = CDBConfig.create(asked, saved_settings(model.generation_config, adapter), adapter).changed()
        decided = {"refill", "trace", "progress", "seeds", "token_limits", "max_num_seqs"} - asked.keys()
        return {name: value for name, value in settings.items() if name not in decided}
    if asked.get("lookahead") and min(map(min, workload.depths)) < 2:
        raise ValueError(
            "lookahead=1: a token runs at least 2 loops then, but the workload has depths of 1. Choose a mix without "
            "depth 1, such as --mix 2:.7,3:.2,4:.1, or --mix live."
        )
    return {**asked, "exit_rule": "replay", "exit_depths": workload.depths}


def differ_in_depth_alone(settings: dict[str, Any], others: dict[str, Any]) -> bool:
    """Whether two systems' settings of cdb are the same but for those that concern depth, W and R."""
    configs = [vars(CDBConfig(**one)) for one in (settings, others)]
    return all(configs[0][name] == configs[1][name] for name in configs[0].keys() - _OF_DEPTH)


def check_settings(asked: dict[str, Any], replayed: bool) -> None:
    """Refuse settings of cdb that no model could follow, before one is made.

    Args:
        asked: what the benchmark was asked for, without the saved settings.
        replayed: whether the workload has depths.

    Raises:
        ValueError: settings of an exit rule beside depths to replay.
    """
    rule = sorted(asked.keys() & {"exit_rule", "exit_threshold", "quality", "min_depth", "max_depth", "prefill_exit"})
    if replayed and rule:
        raise ValueError(
            f"{rule[0]}={asked[rule[0]]!r} has no meaning for depths that are replayed. Pass --mix live to let the "
            "model's own rule decide, or leave it out."
        )


def greedy_requests(prompts: Sequence[Sequence[int]], new_tokens: Sequence[int]) -> list[Request]:
    """Requests for an engine, numbered in their order, that take the most probable tokens."""
    ids = [torch.tensor(prompt) for prompt in prompts]
    sampler = Sampler([()] * len(ids), ids, do_sample=False)
    return [
        Request(key=row, row=row, prompt_ids=prompt, max_new_tokens=new, sampler=sampler)
        for row, (prompt, new) in enumerate(zip(ids, new_tokens, strict=True))
    ]


def serve_engine(model: PreTrainedModel, workload: Workload, config: CDBConfig) -> Run:
    """Serve the workload by the engine that `generate(cdb=...)` uses, each request with its own length.

    Raises:
        RuntimeError: a request failed.
    """
    adapter = adapter_for(model)
    begin = time.perf_counter()
    engine = Engine(adapter, config.resolve(adapter))
    requests = greedy_requests(workload.prompts, workload.new_tokens)
    for request in requests:
        engine.add_request(request)
    engine.run()
    seconds = time.perf_counter() - begin
    for request in requests:
        if request.status != "finished":
            raise RuntimeError(f"request {request.key} ended as {request.status}.") from request.error
    return Run(
        seconds,
        [request.tokens for request in requests],
        [request.exit_depths for request in requests],
        engine.stats,
    )


def _serve_stock(model: PreTrainedModel, workload: Workload, width: int) -> Run:
    """Batches of W in the order of the requests, padded on the left, each as long as its longest row."""
    options, pad = plain_generation(model), model.generation_config.pad_token_id
    tokens: list[list[int]] = []
    begin = time.perf_counter()
    for first in range(0, len(workload), width):
        prompts = workload.prompts[first : first + width]
        lengths = workload.new_tokens[first : first + width]
        longest = max(map(len, prompts))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts], device=model.device)
        output = model.generate(ids, attention_mask=mask, max_new_tokens=max(lengths), **options)
        new = output[:, longest:].tolist()
        tokens += [row[:length] for row, length in zip(new, lengths, strict=True)]
    return Run(time.perf_counter() - begin, tokens)
