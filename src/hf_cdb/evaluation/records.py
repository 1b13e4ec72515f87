"""What a run leaves: `results.json`, and beside it `records.jsonl`, a line for every example and system.

`results.json`:

    {
      "schema": 1,
      "model":       sizes of the model, as in `bench.report.model_sizes`, with "name" and "revision"
      "settings":    the evaluation's configuration, resolved; it makes the same run again
      "chat_template": the tokenizer's, where a task is a chat; else null
      "processes":   that shared the examples
      "environment": versions, processor, accelerator
      "tasks":       [{"name", "kind", "examples", "metrics"}]
      "systems": [
        {
          "name":              "stock", "engine", "default", ...
          "cdb":               the resolved settings, or null for stock
          "scores":            {"TASK/METRIC": SCORE}
          "groups":            {"TASK/METRIC": {group: SCORE}}, without intervals of differences
          "mean_depth":        loops per token, over all tokens that were generated, read or scored
          "depths":            {loop: tokens that left after it}
          "loops_ratio":       full depth over mean_depth
          "flop_bound":        largest speed-up over full depth that the depths allow (arXiv 2608.09444)
          "tokens":            generated tokens
          "tokens_per_second": of them, prompts included in the time; null where the system generated nothing
          "tasks":             {name: {"mean_depth", "depths", "tokens", "tokens_per_second", "flop_bound"}}
        }
      ],
      "depth_curve": {text task: {depth: {"bits_per_byte": SCORE, "perplexity": float}}}, all tokens at that depth
      "signal":      {text task: {system: {"rule", "threshold", "auc", "bins": [{"low", "high", "count",
                      "agreement"}], "not_finite"}}}: agreement with full depth by what the exit rule compares with
                      its threshold, see the metric "calibration"
    }

    SCORE = {"mean", "low", "high", "count", "difference": {"mean", "low", "high"} or null}

`low` and `high` bound a 95 % interval, from a percentile bootstrap over examples (texts). `difference` is to the system
"stock", paired by example; null for stock itself.

A record holds what is needed to run it again, `rerun.rerun`:

    {"task", "system", "id", "kind", "group", "prompt", "reference", "seconds", "scores": {metric: value},
     "run": {"model", "revision", "dtype", "device", "attention", "batch_size", "seed", "limit", "cdb", "max_depth",
             "data", "template", "chat", "chat_template_sha256", "system_prompt", "chat_options", "shots", "metrics",
             "stop", "max_new_tokens", "add_special_tokens", "length", "context", "versions"}}

and by kind
    generate:      "completion", "tokens": [ids], "depths": [loops], "ended": whether it ended before max_new_tokens
    loglikelihood: "choices", "answer", "loglikelihoods": [nats], "depths": {loop: scored tokens}
    text:          "bits", "bytes", "tokens": scored, "agreement", "depths": {loop: tokens}; of stock "bits_by_depth",
                   and where asked "signal": {"scores", "agrees"}, a score null where it is not finite

`seconds` is the record's share of the time of what was computed together, by generated tokens.
"""

import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Key", "RecordFile", "key_of"]

Key = tuple[str, str, str]


def key_of(record: dict[str, Any]) -> Key:
    """(task, system, id), which tells a record from all others of a run."""
    return record["task"], record["system"], record["id"]


class RecordFile:
    """Records of a run, which outlive a killed process.

    While a run goes on, every process appends to a file of its own, `records-RANK.jsonl`; `merge` makes one of them.

    Args:
        folder: shared by all processes.
        rank: of this process, or what else names it among all.
        key: tells a record from all others of a run.
    """

    def __init__(self, folder: Path, rank: int | str = 0, key: Callable[[dict[str, Any]], Hashable] = key_of):
        self.folder, self._key = folder, key
        self._own = folder / f"records-{rank}.jsonl"

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write records; once this returns they outlive the process and its machine."""
        lines = "".join(json.dumps(record) + "\n" for record in records)
        with self._own.open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def repair(self) -> None:
        """Cut off the piece of a line that a killed process may have left at the end of this process's file."""
        if self._own.exists():
            content = self._own.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                self._own.write_bytes(content[:whole])

    def read(self) -> dict[Hashable, dict[str, Any]]:
        """All records of all processes, by key; lines that were cut off by a kill are left out."""
        return {self._key(record): record for file in self._files() for record in _lines(file)}

    def merge(self, order: Iterable[Hashable]) -> list[dict[str, Any]]:
        """Put the records into `records.jsonl` in this order, in place of the files of the processes.

        Raises:
            ValueError: one is missing.
        """
        found, order = self.read(), list(order)
        if missing := [key for key in order if key not in found]:
            raise ValueError(
                f"output={str(self.folder)!r} lacks {len(missing)} of {len(order)} records, the first {missing[0]}. "
                "All processes have to write into the same folder: name one that they share."
            )
        records = [found[key] for key in order]
        whole = self.folder / "records.jsonl"
        fresh = whole.with_suffix(".new")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        fresh.replace(whole)
        for file in self.folder.glob("records-*.jsonl"):
            file.unlink()
        return records

    def _files(self) -> list[Path]:
        whole = self.folder / "records.jsonl"
        return [*([whole] if whole.exists() else []), *sorted(self.folder.glob("records-*.jsonl"))]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        yield from (json.loads(line) for line in lines if line.endswith("\n"))
