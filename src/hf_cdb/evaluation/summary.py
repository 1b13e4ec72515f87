"""The results of a run from its records: nothing else is kept between the two."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..stats import flop_bound
from .bootstrap import interval
from .config import STOCK, EvaluationConfig, System
from .metrics import load_metric
from .tasks import Task

__all__ = ["Column", "columns_of", "paired_difference", "summarise"]

Records = Sequence[Mapping[str, Any]]


class Column:
    """A metric of one system on one task: a value per example, or a ratio of two.

    Args:
        values, weights: as of `bootstrap.interval`; None among the values for examples that have none.
        transform: increasing, of the ratio.
        paired: whether the difference to the same column of stock means something.
    """

    def __init__(
        self,
        values: Sequence[float | None],
        weights: Sequence[float] | None = None,
        transform: Callable[[float], float] | None = None,
        paired: bool = True,
    ):
        self.values, self.weights, self.transform, self.paired = values, weights, transform, paired

    def score(self, **bootstrap: Any) -> dict[str, Any] | None:
        """Mean and interval; None where no example has a value."""
        values = [value for value in self.values if value is not None]
        if not values:
            return None
        found = interval(values, self.weights, **bootstrap)
        if self.transform is not None:
            found |= {name: self.transform(found[name]) for name in ("mean", "low", "high")}
        return found


def paired_difference(own: Column, base: Column, **bootstrap: Any) -> dict[str, Any] | None:
    """Own less base, example by example; None where that is not defined."""
    if not own.paired or own.transform is not None:
        return None
    differences = [left - right for left, right in zip(own.values, base.values, strict=True)]
    return interval(differences, own.weights, **bootstrap)


def columns_of(kind: str, records: Records, stock: Records) -> dict[str, Column]:
    """The metrics of a system on a task of this kind; `stock` are the records of the same examples."""
    if kind == "text":
        bits, sizes = [r["bits"] for r in records], [r["bytes"] for r in records]
        tokens = [r["tokens"] for r in records]
        return {
            "bits_per_byte": Column(bits, sizes),
            "perplexity": Column(bits, tokens, lambda value: 2**value),
            "agreement": Column([r["agreement"] * r["tokens"] for r in records], tokens),
        }
    columns = {name: Column([r["scores"][name] for r in records]) for name in records[0]["scores"]}
    if kind == "generate":
        ids = [r["tokens"] for r in records]
        lengths = load_metric("length").scores([len(row) for row in ids], [r["ended"] for r in records])
        columns |= {name: Column([score[name] for score in lengths]) for name in lengths[0]}
        if records is not stock:
            agreements = load_metric("token_agreement").scores(ids, [r["tokens"] for r in stock])
            columns |= {name: Column([one[name] for one in agreements], paired=False) for name in agreements[0]}
    return columns


def summarise(
    config: EvaluationConfig,
    sizes: Mapping[str, Any],
    coda: int,
    tasks: Sequence[Task],
    systems: Sequence[System],
    records: Records,
) -> dict[str, Any]:
    """`systems`, `depth_curve` and `signal` of `results.json`, see `records`.

    Args:
        sizes: of `bench.report.model_sizes`.
        coda: parameters of the layers after the loop and the head.
        systems: "stock", which gives full depth, first.
        records: of all tasks and systems, examples in order.
    """
    of: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for record in records:
        of[record["task"], record["system"]].append(record)
    bootstrap = {"seed": config.seed, "draws": config.draws}
    bound = {
        "once": sizes["parameters_once"],
        "per_loop": sizes["parameters_per_loop"],
        "full_depth": systems[0].max_depth,
    }
    rows = []
    for system in systems:
        row: dict[str, Any] = {"name": system.name, "cdb": system.described, "scores": {}, "groups": {}}
        parts, depths, asks, timed = {}, Counter(), 0, []
        for task in tasks:
            own, stock = of[task.name, system.name], of[task.name, STOCK]
            if not own:
                continue
            columns = columns_of(task.kind, own, stock)
            base = columns_of(task.kind, stock, stock)
            for metric, column in columns.items():
                score = column.score(**bootstrap)
                if score is None:
                    continue
                other = base.get(metric) if system.name != STOCK else None
                score["difference"] = other and paired_difference(column, other, **bootstrap)
                row["scores"][f"{task.name}/{metric}"] = score
            row["groups"] |= _groups(task, own, bootstrap)
            spent, asked = _depths(own, system), _asks(own, system)
            parts[task.name] = {**_cost(spent, bound, coda * asked), **_speed(own if task.kind == "generate" else [])}
            depths, asks = depths + spent, asks + asked
            timed += own if task.kind == "generate" else []
        if not parts:  # none of the tasks that run lists it
            continue
        rows.append({**row, **_cost(depths, bound, coda * asks), **_speed(timed), "tasks": parts})
    return {
        "systems": rows,
        "depth_curve": {t.name: _depth_curve(of[t.name, STOCK], bootstrap) for t in tasks if t.kind == "text"},
        "signal": {t.name: _signals(t, systems, of) for t in tasks if t.spec.signal},
    }


def _groups(task: Task, records: Records, bootstrap: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Scores of answers by the groups of a task, where it has any."""
    groups: dict[str, dict[str, Any]] = {}
    for group in dict.fromkeys(r["group"] for r in records if r["group"]):
        members = [r for r in records if r["group"] == group]
        for metric in members[0].get("scores", ()):  # texts have none of their own
            score = interval([r["scores"][metric] for r in members], **bootstrap)
            groups.setdefault(f"{task.name}/{metric}", {})[group] = score
    return groups


def _depths(records: Records, system: System) -> Counter:
    """Tokens by the loop that they left after."""
    spent: Counter = Counter()
    for record in records:
        depths = record["depths"]
        if depths is None:  # stock generation
            spent[system.max_depth] += len(record["tokens"])
        elif isinstance(depths, Mapping):
            spent.update({int(depth): count for depth, count in depths.items()})
        else:
            spent.update(depths)
    return spent


def _asks(records: Records, system: System) -> int:
    """How often the exit rule ran the coda: after every loop but the last possible one, and never for a prompt."""
    if not system.asks:
        return 0
    # The first token of an answer is the prompt's.
    rows = [{**r, "depths": r["depths"][1:]} if isinstance(r["depths"], list) else r for r in records]
    return sum(min(depth, system.max_depth - 1) * count for depth, count in _depths(rows, system).items())


def _cost(depths: Counter, bound: Mapping[str, int], asked: int) -> dict[str, Any]:
    """What the depths come to; `asked` are the parameters that the exit rule ran, all tokens together."""
    tokens = sum(depths.values())
    mean = sum(depth * count for depth, count in depths.items()) / tokens
    return {
        "mean_depth": mean,
        "depths": {str(depth): depths[depth] for depth in sorted(depths)},
        "loops_ratio": bound["full_depth"] / mean,
        "flop_bound": flop_bound(**bound, mean_depth=mean, asked=asked / tokens),
    }


def _speed(records: Records) -> dict[str, Any]:
    tokens = sum(len(record["tokens"]) for record in records)
    seconds = sum(record["seconds"] for record in records)
    return {"tokens": tokens, "tokens_per_second": tokens / seconds if tokens else None}


def _depth_curve(records: Records, bootstrap: Mapping[str, Any]) -> dict[str, Any]:
    sizes, tokens = [r["bytes"] for r in records], sum(r["tokens"] for r in records)
    curve = {}
    for depth in records[0]["bits_by_depth"]:
        bits = [record["bits_by_depth"][depth] for record in records]
        score = interval(bits, sizes, **bootstrap)
        curve[depth] = {"bits_per_byte": score, "perplexity": 2 ** (sum(bits) / tokens)}
    return curve


def _signals(task: Task, systems: Sequence[System], of: Mapping[tuple[str, str], Records]) -> dict[str, Any]:
    found = {}
    for system in systems:
        if system.name in task.spec.signal:
            parts = [record["signal"] for record in of[task.name, system.name]]
            scores = [score for part in parts for score in part["scores"]]
            agrees = [agree for part in parts for agree in part["agrees"]]
            rule = {"rule": system.described["exit_rule"], "threshold": system.described["exit_threshold"]}
            found[system.name] = {
                **rule,
                **load_metric("calibration").compute(
                    predictions=[math.nan if score is None else score for score in scores], references=agrees
                ),
            }
    return found
