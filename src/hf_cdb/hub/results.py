"""What an evaluation measured, for the metadata of a model card, and depths as a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..bench.json_file import read_json
from ..bench.report import markdown_table

__all__ = ["check_model", "depth_histogram", "eval_results", "load_results"]

_SCHEMA = 1
# Systems of an evaluation whose scores go into the metadata: full depth, and what the model is shipped with.
_INDEXED = ("stock", "default")
_SIZES = ("class", "loops", "parameters", "parameters_per_loop", "kv_heads", "head_dim", "vocab_size")
_BAR = 40  # signs of the longest bar


def load_results(results: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """The `results.json` of an evaluation, see `hf_cdb.evaluation.records`, from its path or as it was read.

    Raises:
        FileNotFoundError: no such file.
        ValueError: it is something else, or of another schema.
    """
    if isinstance(results, str | Path):
        results = read_json(Path(results), "results")
    if not isinstance(results, Mapping) or results.get("schema") != _SCHEMA:
        found = results.get("schema") if isinstance(results, Mapping) else type(results).__name__
        raise ValueError(
            f"results: schema {found!r} is unknown. Pass the results.json that `hf-cdb eval` wrote, schema {_SCHEMA}."
        )
    missing = sorted({"model", "tasks", "systems", "depth_curve", "signal"} - set(results))
    if missing or not results["systems"]:
        raise ValueError(
            f"results has no {' and '.join(missing or ['systems'])}. Let the evaluation end, then pass it."
        )
    return results


def check_model(results: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Refuse results of a model of another class or other sizes.

    Args:
        results: as of `load_results`.
        sizes: `bench.report.model_sizes` of the model.

    Raises:
        ValueError: they are.
    """
    for name, found in results["model"].items():
        if name in _SIZES and found != sizes[name]:
            raise ValueError(
                f"results are of a model with {name} {found!r}, and that of this one is {sizes[name]!r}. Pass its own."
            )


def eval_results(results: Mapping[str, Any]) -> list[EvalResult]:
    """Entries of `model-index`: every score of the systems "stock" and "default", with the mean depth it was had at.

    Raises:
        ValueError: neither is among the systems.
    """
    systems = [system for system in results["systems"] if system["name"] in _INDEXED]
    if not systems:
        names = [system["name"] for system in results["systems"]]
        raise ValueError(f"results: none of the systems {names} is {' or '.join(_INDEXED)}, whose scores a card lists.")
    entries = []
    for system in systems:
        for path, score in system["scores"].items():
            task, _, metric = path.partition("/")
            depth = f"{system['tasks'][task]['mean_depth']:.2f} of {results['model']['loops']} loops"
            entries.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=task,
                    dataset_name=task,
                    metric_type=metric.partition(":")[0],
                    metric_name=f"{metric}, {system['name']}, {depth}",
                    metric_value=score["mean"],
                )
            )
    return entries


def depth_histogram(depths: Mapping[Any, int], full_depth: int) -> str:
    """A Markdown table of how many tokens left after each loop, with bars.

    Args:
        depths: loop -> tokens, as `stats.depths`; loops may be text, as JSON has them.
        full_depth: loops at most.

    Raises:
        ValueError: no tokens, or a loop that the model does not have.
    """
    counts = {int(depth): count for depth, count in depths.items()}
    wrong = sorted(depth for depth in counts if not 1 <= depth <= full_depth)
    if wrong or not sum(counts.values()):
        what = f"loop {wrong[0]} is none of the {full_depth} that the model has" if wrong else "there are no tokens"
        raise ValueError(f"depths={dict(depths)}: {what}. Pass the `stats.depths` of a run of this model.")
    total, most = sum(counts.values()), max(counts.values())
    rows = [
        {
            "loops": str(depth),
            "tokens": counts.get(depth, 0),
            "share": counts.get(depth, 0) / total,
            "": "█" * round(_BAR * counts.get(depth, 0) / most),
        }
        for depth in range(1, full_depth + 1)
    ]
    mean = sum(depth * count for depth, count in counts.items()) / total
    table = markdown_table({"loops": "", "tokens": ",d", "share": ".1%", "": ""}, rows)
    return f"{total:,} tokens, {mean:.2f} of {full_depth} loops in the mean.\n\n{table}"
