"""What depth batching would gain on cards that are not here: the real scheduler against a roofline."""

import argparse
from dataclasses import asdict, replace
from typing import Any

from ..kv_policy import POLICIES
from ..stats import flop_bound
from .report import Report, add_output_arguments, check_outputs, markdown_table, rate_text, save_plot
from .roofline import CARDS, SHAPES, Shape
from .serving import with_depths
from .simulation import Settings, simulate
from .workloads import LIVE, Workload, add_workload_arguments, check_workload, make_workload, resolve_workload

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=SHAPES, default="ouro-1.4b", help="whose sizes (default %(default)s)")
    parser.add_argument("--card", choices=tuple(CARDS), nargs="+", default=["h100"], help="values (default h100)")
    parser.add_argument("--width", type=int, nargs="+", default=[64], help="rows in flight, W (default 64)")
    parser.add_argument("--coda", type=int, nargs="+", default=[1], help="values of min_coda_batch (default 1)")
    parser.add_argument("--kv-policy", choices=POLICIES, default="last_exited", help="(default %(default)s)")
    parser.add_argument("--kv-slots", type=int, help="of first_then_shared and modular")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of the card, for all (default %(default)s)")
    parser.add_argument("--reached", type=float, default=1.0, help="share of the card's peaks (default %(default)s)")
    parser.add_argument("--launch-us", type=float, default=0.0, help="microseconds a launch (default %(default)s)")
    add_workload_arguments(parser, prompt="128", new="128")
    parser.add_argument("--seed", type=int, default=0, help="of the workload (default %(default)s)")
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> dict:
    """Simulate every combination, print a line for each, and write.

    Raises:
        ValueError: arguments out of their range, or rows that do not fit on the card.
        FileNotFoundError: a file that is not there.
    """
    _check(arguments)
    shape = Shape.of(arguments.model, arguments.kv_policy, arguments.kv_slots)
    workload = make_workload(arguments, 8 * max(arguments.width), shape.full_depth, None)
    positions = max(len(row) + new - 1 for row, new in zip(workload.prompts, workload.new_tokens, strict=True))
    rows = []
    for name in arguments.card:
        fit = shape.rows_that_fit(CARDS[name], positions, arguments.memory_share)
        costs = shape.costs(CARDS[name], arguments.reached, arguments.launch_us * 1e-6)
        for width in sorted(set(arguments.width)):
            if width > fit:
                raise ValueError(
                    f"width={width} rows of {positions} positions do not fit on {name}: {fit} do, at "
                    f"{shape.kv_position} bytes a position. Name fewer, shorter requests, or another --kv-policy."
                )
            for coda in sorted(set(arguments.coda)):
                settings = Settings(width, min_coda_batch=coda)
                rows.append({"card": name, "fit": fit, **_predicted(costs, settings, shape, workload)})
    _print(arguments, shape, workload, rows)
    report = Report(arguments, None, workload.summary(), resolve_workload(arguments, workload, shape.full_depth))
    report.add("shape", asdict(shape))
    report.add("cards", {name: asdict(CARDS[name]) for name in arguments.card})
    report.add("predicted", rows)
    report.write(arguments.json)
    save_plot(arguments.plot, lambda _, axes: _draw(axes, rows), panels=2)
    return report.content


def _check(arguments: argparse.Namespace) -> None:
    for name in ("width", "coda"):
        if min(getattr(arguments, name)) < 1:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose at least 1.")
    for name in ("memory_share", "reached"):
        if not 0 < getattr(arguments, name) <= 1:
            raise ValueError(f"{name}={getattr(arguments, name)}: choose a share, more than 0 and at most 1.")
    if not 0 <= arguments.launch_us < float("inf"):
        raise ValueError(f"launch_us={arguments.launch_us}: choose microseconds, 0 or more.")
    if arguments.kv_slots is not None and arguments.kv_policy not in ("first_then_shared", "modular"):
        raise ValueError(
            f"kv_slots={arguments.kv_slots} has no meaning for kv_policy={arguments.kv_policy!r}. Leave it out."
        )
    if arguments.kv_slots is not None and arguments.kv_slots < 1:
        raise ValueError(f"kv_slots={arguments.kv_slots}: choose at least 1.")
    if arguments.mix == LIVE:
        raise ValueError(f"mix={LIVE!r}: no model runs whose rule could decide. Name a mix, or --trace.")
    if arguments.data is not None:
        raise ValueError("--data: no model is loaded whose tokenizer could count texts. Give lengths by --lengths.")
    check_workload(arguments)
    check_outputs(json=arguments.json, plot=arguments.plot)


def _predicted(costs: Any, settings: Settings, shape: Shape, workload: Workload) -> dict[str, Any]:
    """Figures of depth batching, beside those of full depth on the same card with the same rows in flight."""
    full, mixed = (
        simulate(costs, own, [len(prompt) for prompt in work.prompts], work.depths, [0.0] * len(work)).figures()
        for own, work in (
            (replace(settings, min_coda_batch=1), with_depths(workload, shape.full_depth)),
            (settings, workload),
        )
    )
    decoded = [depth for row in workload.depths for depth in row[1:]]
    mean_depth = sum(decoded) / max(1, len(decoded))
    bound = flop_bound(shape.prelude + shape.coda, shape.loop, shape.full_depth, mean_depth)
    return {
        "W": settings.max_num_seqs,
        "coda": settings.min_coda_batch,
        "mean_depth": mean_depth,
        "flop_bound": bound,
        "full": full,
        "mixed": mixed,
        "speed-up": mixed["tokens_per_second"] / full["tokens_per_second"],
    }


def _print(arguments: argparse.Namespace, shape: Shape, workload: Workload, rows: list[dict]) -> None:
    summary = workload.summary()
    print(
        f"A prediction, nothing was measured: {arguments.model}, bfloat16, kv_policy={arguments.kv_policy}, "
        f"{shape.kv_position / 1024:.0f} KiB a position; {len(workload)} requests of "
        f"{summary['prompt']['mean']:.0f} + {summary['new_tokens']['mean']:.0f} tokens, all at once.\n"
    )
    columns = {"card": "", "rows that fit": "d", "W": "d", "coda": "d", "mean depth": ".2f", "FLOP bound": ".2f"}
    columns |= {"full depth, tokens/s": "", "cdb, tokens/s": "", "speed-up": ".2f", "of the bound": ".2f"}
    columns |= {"8 cards, tokens/s": "", "TPOT p50": ".2f", "TPOT p99": ".2f", "full depth's": ".2f"}
    lines = []
    for row in rows:
        line = {"card": row["card"], "rows that fit": row["fit"], "W": row["W"], "coda": row["coda"]}
        line |= {"mean depth": row["mean_depth"], "FLOP bound": row["flop_bound"], "speed-up": row["speed-up"]}
        line |= {"of the bound": row["speed-up"] / row["flop_bound"]}
        rates = {"full depth": row["full"]["tokens_per_second"], "cdb": row["mixed"]["tokens_per_second"]}
        line |= {f"{name}, tokens/s": rate_text(rate) for name, rate in rates.items()}
        line["8 cards, tokens/s"] = rate_text(8 * rates["cdb"])
        mixed, full = row["mixed"]["tpot"], row["full"]["tpot"]
        if mixed is not None:
            line |= {f"TPOT {q}": 1e3 * mixed[q] for q in ("p50", "p99")} | {"full depth's": 1e3 * full["p50"]}
        lines.append(line)
    print(markdown_table(columns, lines))
    print("\nTPOT in ms. Eight cards: a replica of the model on each. Speed-ups are of whole runs, prompts included.")


def _draw(axes: Any, rows: list[dict]) -> None:
    names = sorted({(row["card"], row["coda"]) for row in rows})
    for card, coda in names:
        own = [row for row in rows if (row["card"], row["coda"]) == (card, coda)]
        widths = [row["W"] for row in own]
        axes[0].plot(widths, [row["speed-up"] for row in own], "o-", label=f"{card}, coda {coda}")
        axes[1].plot(widths, [row["mixed"]["tokens_per_second"] for row in own], "o-", label=f"{card}, coda {coda}")
    axes[0].set(ylabel="speed-up over full depth, predicted")
    axes[1].set(ylabel="tokens per second, predicted")
    for part in axes:
        part.set_xscale("log", base=2)
        part.set_xlabel("rows in flight, W")
        part.legend(fontsize="small")
