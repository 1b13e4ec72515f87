"""Throughput of the engine at full depth, without refill and with refill, and of stock generate.

A random Ouro of about 20 M core parameters, float32, one thread. Depths are replayed, so the figures are about the
engine and not about a model's taste. All systems run the same requests, one after the other and again in turn
(A B C D, A B C D, ...); ratios are taken within a turn and their median is shown.
"""

import argparse
import json
import statistics
import time

import torch

from .. import OuroConfig, OuroForCausalLM
from ..stats import CDBStats

__all__ = ["add_arguments", "run"]

MIX = {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", type=int, default=16, help="rows in flight, W (default 16)")
    parser.add_argument("--requests", type=int, help="requests (default 8 W)")
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt (default 8)")
    parser.add_argument("--new", type=int, default=32, help="new tokens of a request (default 32)")
    parser.add_argument("--coda", type=int, default=1, help="min_coda_batch of the cdb systems (default 1)")
    parser.add_argument("--turns", type=int, default=3, help="turns of all systems (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="also write the figures to this file")
    parser.set_defaults(run=run)


def random_ouro_20m() -> OuroForCausalLM:
    """Hidden 512, intermediate 1408, 6 layers, 8 heads, vocabulary 8192, 4 loops: 19 M parameters in the core."""
    torch.manual_seed(0)
    config = OuroConfig(
        vocab_size=8192,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=8192,
    )
    model = OuroForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    return model


def draw_depths(requests: int, new: int, generator: torch.Generator) -> torch.Tensor:
    """Depths `[requests, new]` of the mix; the first of every row is full depth, as the prompt gives it."""
    shares = torch.tensor(list(MIX.values()))
    drawn = torch.multinomial(shares, requests * new, replacement=True, generator=generator)
    depths = torch.tensor(list(MIX))[drawn].view(requests, new)
    depths[:, 0] = max(MIX)
    return depths


def run(arguments: argparse.Namespace) -> dict:
    """Run the benchmark, print its table and return the figures."""
    torch.set_num_threads(arguments.threads)
    width = arguments.width
    requests = arguments.requests or 8 * width
    model = random_ouro_20m()
    generator = torch.Generator().manual_seed(arguments.seed)
    ids = torch.randint(1, 8192, (requests, arguments.prompt), generator=generator)
    replay = {"exit_rule": "replay", "exit_depths": draw_depths(requests, arguments.new, generator)}
    replay["min_coda_batch"] = arguments.coda
    options = {"max_new_tokens": arguments.new, "do_sample": False, "return_dict_in_generate": True}

    def stock() -> None:
        for batch in ids.split(width):
            model.generate(batch, attention_mask=torch.ones_like(batch), cdb=False, **options)

    def engine(**settings) -> CDBStats:
        settings = {"max_num_seqs": width, **settings}
        return model.generate(ids, attention_mask=torch.ones_like(ids), cdb=settings, **options).stats

    systems = {
        "stock generate, full depth": stock,
        "engine, full depth": lambda: engine(exit_rule="never"),
        "cdb, no refill": lambda: engine(refill=False, **replay),
        "cdb, refill": lambda: engine(**replay),
    }
    warm = {"max_new_tokens": 2, "do_sample": False}
    model.generate(ids[:width], attention_mask=torch.ones_like(ids[:width]), cdb=False, **warm)

    seconds: dict[str, list[float]] = {name: [] for name in systems}
    stats: dict[str, CDBStats | None] = {}
    for _ in range(arguments.turns):
        for name, system in systems.items():
            begin = time.perf_counter()
            stats[name] = system()
            seconds[name].append(time.perf_counter() - begin)
    return _report(arguments, requests, seconds, stats)


def _report(arguments: argparse.Namespace, requests: int, seconds: dict, stats: dict) -> dict:
    tokens = requests * arguments.new
    base = "engine, full depth"
    rows = {}
    for name, times in seconds.items():
        ratios = [reference / own for reference, own in zip(seconds[base], times, strict=True)]
        counts = stats[name].to_dict() if stats[name] is not None else {}
        rows[name] = {
            "tokens_per_second": tokens / statistics.median(times),
            "speedup": statistics.median(ratios),
            "speedup_range": [min(ratios), max(ratios)],
            "seconds": times,
            **counts,
        }
    print(f"random-ouro-20m, float32, {arguments.threads} thread(s), W = {arguments.width}, {requests} requests of")
    print(f"{arguments.prompt} + {arguments.new} tokens, replayed depths {MIX}, {arguments.turns} turns,")
    print(f"min_coda_batch {arguments.coda}\n")
    print("| system | tokens/s | speed-up | range | mean depth | FLOP bound | occupancy | loop launches |")
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        low, high = row["speedup_range"]
        counts = "| | | |"
        if "mean_depth" in row:
            counts = (
                f"{row['mean_depth']:.2f} | {row['flop_bound']:.2f} | {row['occupancy']:.2f} | "
                f"{row['launches']['loop']} |"
            )
        speed = f"{row['tokens_per_second']:.0f} | {row['speedup']:.2f} | {low:.2f}-{high:.2f}"
        print(f"| {name} | {speed} | {counts}")
    result = {
        "settings": {key: value for key, value in vars(arguments).items() if key not in ("run", "json")},
        "versions": {"torch": torch.__version__},
        "systems": rows,
    }
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    return result
