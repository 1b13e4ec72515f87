"""What depth batching would gain on cards that are not here: the real scheduler against their rooflines."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..kv_policy import POLICIES
from ..stats import flop_bound
from ..trace import Trace
from .costs import CostTable
from .launches import DecodeTime, decode_time
from .report import Report, add_output_arguments, check_outputs, markdown_table, rate_text, save_plot
from .roofline import CARDS, PUBLISHED, Shape
from .served import PERCENTILES, Served
from .serving import with_depths
from .simulation import Settings, simulate
from .workloads import LIVE, Workload, add_workload_arguments, check_workload, make_workload, resolve_workload

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    models = f"{', '.join(PUBLISHED)}, an embedded checkpoint, a folder or a Hub id; weights are not read"
    parser.add_argument("--model", default="ouro-1.4b", help=f"{models} (default %(default)s)")
    parser.add_argument("--card", choices=tuple(CARDS), nargs="+", default=["h100"], help="(default h100)")
    parser.add_argument("--width", type=int, nargs="+", default=[64], help="rows in flight, W (default 64)")
    parser.add_argument("--coda", type=int, default=1, help="min_coda_batch (default %(default)s)")
    parser.add_argument("--kv-policy", choices=("auto", *POLICIES), default="auto", help="(default %(default)s)")
    parser.add_argument("--kv-slots", type=int, help="of first_then_shared and modular")
    parser.add_argument("--max-depth", type=int, help="loops at most, R (default: the model's)")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the card, used (default %(default)s)")
    parser.add_argument("--reached", type=float, default=1.0, help="share of the card's peaks (default %(default)s)")
    parser.add_argument("--launch-us", type=float, default=0.0, help="the host's microseconds a launch (default 0)")
    parser.add_argument("--row-us", type=float, default=0.0, help="and for each row of it (default 0)")
    add_workload_arguments(parser, prompt="128", new="128")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (default %(default)s)")
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> dict:
    """Simulate full depth and depth batching for every card and width, print a line for each, and write.

    Raises:
        ValueError: arguments out of their range, or a request that does not fit on a card.
        FileNotFoundError: a file that is not there.
    """
    _check(arguments)
    shape = Shape.of(arguments.model, arguments.kv_policy, arguments.kv_slots, arguments.max_depth)
    workload = make_workload(arguments, 8 * max(arguments.width), shape.full_depth, None)
    rows = []
    for name in arguments.card:
        room = shape.positions_that_fit(CARDS[name], arguments.memory_share)
        _check_room(arguments, name, room, shape, workload)
        costs = shape.costs(CARDS[name], arguments.reached, arguments.launch_us * 1e-6, arguments.row_us * 1e-6)
        for width in sorted(set(arguments.width)):
            settings = Settings(width, min_coda_batch=arguments.coda, max_kv_positions=room)
            rows.append({"card": name, **_predicted(costs, settings, shape, workload)})
    _print(arguments, shape, workload, rows)
    report = Report(arguments, None, workload.summary(), resolve_workload(arguments, workload, shape.full_depth))
    report.add("shape", asdict(shape))
    report.add("cards", {name: asdict(CARDS[name]) for name in arguments.card})
    report.add("predicted", rows)
    report.write(arguments.json)
    save_plot(arguments.plot, lambda _, axes: _draw(axes, rows), panels=2)
    return report.content


def _check(arguments: argparse.Namespace) -> None:
    for name, least in (("width", min(arguments.width)), ("coda", arguments.coda)):
        if least < 1:
            raise ValueError(f"{name}={least}: choose at least 1.")
    for name in ("memory_share", "reached"):
        if not 0 < getattr(arguments, name) <= 1:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose a share, more than 0 and at most 1.")
    for name in ("launch_us", "row_us"):
        if not 0 <= getattr(arguments, name) < float("inf"):
            raise ValueError(f"{name}={getattr(arguments, name)}: choose microseconds, 0 or more.")
    if arguments.mix == LIVE:
        raise ValueError(f"mix={LIVE!r}: no model runs whose rule could decide. Name a mix, or --trace.")
    if arguments.data is not None:
        raise ValueError(f"data={str(arguments.data)!r}: no tokenizer is here to count texts. Give --lengths instead.")
    check_workload(arguments)
    check_outputs(json=arguments.json, plot=arguments.plot)


def _check_room(arguments: argparse.Namespace, card: str, room: int, shape: Shape, workload: Workload) -> None:
    longest = max(_positions(workload))
    if room < longest:
        raise ValueError(
            f"card={card!r}: {room} positions of {shape.kv_position} bytes fit beside {arguments.model}'s weights into "
            f"memory_share={arguments.memory_share}, and a request has {longest}. Name shorter requests, another "
            "--kv-policy or a larger card."
        )


def _positions(workload: Workload) -> list[int]:
    """By request what its keys and values take; the last token's are never needed."""
    return [len(prompt) + new - 1 for prompt, new in zip(workload.prompts, workload.new_tokens, strict=True)]


def _predicted(costs: CostTable, settings: Settings, shape: Shape, workload: Workload) -> dict[str, Any]:
    """Figures of depth batching, beside those of full depth on the same card with the same settings."""
    full, full_token = _served(costs, settings, with_depths(workload, shape.full_depth))
    mixed, mixed_token = _served(costs, settings, workload)
    decoded = [depth for row in workload.depths for depth in row[1:]]
    positions = _positions(workload)
    found = {
        "W": settings.max_num_seqs,
        "rows_that_fit": int(settings.max_kv_positions * len(positions) // sum(positions)),
        "full_depth": full.figures(),
        "cdb": mixed.figures(),
        "speedup": full.seconds / mixed.seconds,
    }
    if None in (full_token, mixed_token) or not decoded:
        return {**found, "mean_depth": None, "flop_bound": None, "decode_speedup": None, "decode_share": None}
    depth = sum(decoded) / len(decoded)
    bound = flop_bound(shape.prelude + shape.coda, shape.loop, shape.full_depth, depth)
    gain = full_token.per_token(shape.full_depth) / mixed_token.per_token(depth)
    return {**found, "mean_depth": depth, "flop_bound": bound, "decode_speedup": gain, "decode_share": gain / bound}


def _served(costs: CostTable, settings: Settings, workload: Workload) -> tuple[Served, DecodeTime | None]:
    """Requests that are all there from the start, and seconds per row of the launches that only decode."""
    trace = Trace()
    prompts = [len(prompt) for prompt in workload.prompts]
    served = simulate(costs, settings, prompts, workload.depths, [0.0] * len(workload), trace)
    return served, decode_time(trace, settings.max_num_seqs)


def _print(arguments: argparse.Namespace, shape: Shape, workload: Workload, rows: list[dict]) -> None:
    summary = workload.summary()
    print(
        f"A prediction, nothing was measured. {arguments.model}, bfloat16, {shape.kv_policy}, "
        f"{shape.full_depth} loops, {shape.kv_position / 1024:g} KiB a position; {len(workload)} requests of "
        f"{summary['prompt']['mean']:.0f} + {summary['new_tokens']['mean']:.0f} tokens, all at once.\n"
    )
    columns = {"card": "", "W": "d", "rows that fit": "d", "occupancy": ".2f"}
    columns |= {"full depth, tokens/s": "", "cdb, tokens/s": "", "8 cards, cdb": "", "speed-up": ".2f"}
    columns |= {"mean depth": ".2f", "FLOP bound": ".2f", "decode speed-up": ".2f", "decode share": ".2f"}
    columns |= {"TPOT full p50": ".2f", **{f"p{q}": ".2f" for q in PERCENTILES}}
    print(markdown_table(columns, [_line(row) for row in rows]))
    print(
        "\nSpeed-up: of whole runs, prompts and ends included; decode speed-up and share: per decoded token, over the "
        "FLOP bound.\nTPOT: ms a token. 8 cards: a replica of the model on each."
    )


def _line(row: Mapping[str, Any]) -> dict[str, Any]:
    full, mixed = row["full_depth"], row["cdb"]
    rate = mixed["tokens_per_second"]
    line = {
        "card": row["card"],
        "W": row["W"],
        "rows that fit": row["rows_that_fit"],
        "occupancy": mixed["occupancy"],
        "full depth, tokens/s": rate_text(full["tokens_per_second"]),
        "cdb, tokens/s": rate_text(rate),
        "8 cards, cdb": rate_text(8 * rate),
        "speed-up": row["speedup"],
        "mean depth": row["mean_depth"],
        "FLOP bound": row["flop_bound"],
        "decode speed-up": row["decode_speedup"],
        "decode share": row["decode_share"],
    }
    if mixed["tpot"] is not None:
        line["TPOT full p50"] = 1e3 * full["tpot"]["p50"]
        line |= {f"p{q}": 1e3 * mixed["tpot"][f"p{q}"] for q in PERCENTILES}
    return line


def _draw(axes: Any, rows: list[dict]) -> None:
    for card in dict.fromkeys(row["card"] for row in rows):
        own = [row for row in rows if row["card"] == card]
        widths = [row["W"] for row in own]
        axes[0].plot(widths, [row["speedup"] for row in own], "o-", label=card)
        axes[1].plot(widths, [row["cdb"]["tokens_per_second"] for row in own], "o-", label=f"{card}, cdb")
        axes[1].plot(widths, [row["full_depth"]["tokens_per_second"] for row in own], "o:", label=f"{card}, full depth")
    axes[0].set(ylabel="speed-up over full depth, predicted")
    axes[1].set(ylabel="tokens per second, predicted", yscale="log")
    for part in axes:
        part.set_xscale("log", base=2)
        part.set_xlabel("rows in flight, W")
        part.legend(fontsize="small")
