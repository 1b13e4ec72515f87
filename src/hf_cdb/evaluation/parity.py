"""Gates for releases: the engine at full depth is stock generation, and the default keeps quality."""

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..bench.json_file import read_json
from .command import add_config_arguments, config_of
from .config import DEFAULT, ENGINE, STOCK, EvaluationConfig
from .report import LOWER_IS_BETTER
from .run import evaluate
from .summary import columns_of, paired_difference

__all__ = ["add_arguments", "check_engine", "check_quality", "run"]

# Of the bits of a text, as a share: the engine sums in another order than a plain pass.
_ROUNDING = 1e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)
    parser.add_argument("--system", default=DEFAULT, help="whose quality is held against stock's (default %(default)s)")


def run(arguments: argparse.Namespace) -> list[str]:
    """Evaluate stock, engine and the one system, print what was compared, and give what fails.

    In processes other than the first nothing fails.

    Raises:
        ValueError: a configuration without tolerances, without the system, or with a task that one of those that are
            compared does not run.
    """
    config = config_of(arguments)
    if not config.tolerances:
        raise ValueError(
            f"config={arguments.config!r} has no tolerances: name a metric, as in tasks/exact_match: 0.01."
        )
    config = config.with_system(arguments.system)
    _check_systems(config, arguments.system)
    if evaluate(config, arguments.output) is None:
        return []
    records = read_json(Path(arguments.output) / "records.jsonl", "output")
    failures = check_engine(records)
    print(f"engine at full depth against stock: {len(failures)} differences in {_count(records, ENGINE)} records")
    for line, failure in check_quality(records, config, arguments.system):
        print(line)
        failures += [] if failure is None else [failure]
    return failures


def _check_systems(config: EvaluationConfig, system: str) -> None:
    """Refuse tasks on which a gate would compare nothing."""
    held = {key.partition("/")[0] for key in config.tolerances}
    for spec in config.task_specs:
        needed = [ENGINE, system] if spec.name in held else [ENGINE]
        if missing := [name for name in needed if spec.systems is not None and name not in spec.systems]:
            raise ValueError(
                f"systems of task {spec.name!r}: {missing[0]!r} is missing, which the gate holds against "
                "stock. Add it, or name the other tasks with --task."
            )


def _count(records: Sequence[Mapping[str, Any]], system: str) -> int:
    return sum(record["system"] == system for record in records)


def check_engine(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Records of the engine at full depth that are not those of stock, each told in a line.

    Tokens of answers and right choices have to be the same, bits of texts the same within rounding.
    """
    stock = {(r["task"], r["id"]): r for r in records if r["system"] == STOCK}
    failures = []
    for record in records:
        if record["system"] != ENGINE:
            continue
        other = stock[record["task"], record["id"]]
        where = f"task {record['task']}, example {record['id']}: engine at full depth"
        if record["kind"] == "text":
            if abs(record["bits"] - other["bits"]) > _ROUNDING * other["bits"]:
                failures.append(f"{where} takes {record['bits']:.3f} bits, stock {other['bits']:.3f}")
        elif record["kind"] == "generate":
            if record["tokens"] != other["tokens"]:
                failures.append(f"{where} gives {record['completion']!r}, stock {other['completion']!r}")
        elif record["scores"] != other["scores"]:
            failures.append(f"{where} scores {record['scores']}, stock {other['scores']}")
    return failures


def check_quality(
    records: Sequence[Mapping[str, Any]], config: EvaluationConfig, system: str = DEFAULT
) -> list[tuple[str, str | None]]:
    """A line for every tolerance, and what fails where a system loses more than it.

    A loss fails when it exceeds the tolerance with 95 % confidence: the one-sided bound of the paired bootstrap, over
    the differences of all examples, lies beyond it. Few examples show little: the line holds the interval.

    Raises:
        ValueError: records without the system on a task that has a tolerance.
    """
    of: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        of[record["task"]][record["system"]].append(record)
    found = []
    for key, tolerance in config.tolerances.items():
        task, _, metric = key.partition("/")
        own, stock = of[task][system], of[task][STOCK]
        if not own:
            raise ValueError(f"tolerances: {key!r} cannot be held, for {system!r} ran nothing of task {task!r}.")
        column, base = (columns_of(own[0]["kind"], rows, stock)[metric] for rows in (own, stock))
        # Nine in ten samples lie between the two, so that one in twenty lies beyond either.
        bootstrap = {"seed": config.seed, "draws": config.draws, "level": 0.90}
        difference = paired_difference(column, base, **bootstrap)
        sign = -1 if metric in LOWER_IS_BETTER else 1
        scale = base.score(**bootstrap)["mean"] if metric == "bits_per_byte" else 1.0
        change, *bounds = (sign * difference[name] / scale for name in ("mean", "low", "high"))
        line = (
            f"{key}: {system} against stock {change:+.4f}, 90 % between {min(bounds):+.4f} and {max(bounds):+.4f}, "
            f"tolerance {-tolerance:+.4f}, {difference['count']} examples"
        )
        found.append((line, f"{line}: a larger loss" if max(bounds) < -tolerance else None))
    return found
