"""Prompts and answers from files laid out as ShareGPT, Alpaca and the arXiv summaries are.

The files are JSON (one list of records), JSONL (a record a line), or a folder saved by `datasets`. Of the records:

* `sharegpt`: `{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}`; the first
  human turn is the prompt and the turn after it the answer. `user` and `assistant` are the same as `human` and `gpt`.
* `alpaca`: `{"instruction": ..., "input": ..., "output": ...}`; `input` may be empty or missing, else it stands below
  the instruction.
* `arxiv`: `{"article": ..., "abstract": ...}`.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

from datasets import load_from_disk

from .json_file import read_json

__all__ = ["LAYOUTS", "read_conversations"]

_SPEAKERS = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt"}


def read_conversations(path: Path, layout: str | None = None) -> list[tuple[str, str]]:
    """Pairs (prompt, answer), in the order of the file; records without one of the two are left out.

    Args:
        layout: "sharegpt", "alpaca" or "arxiv"; None finds out by the fields of the first record.

    Raises:
        FileNotFoundError: no such file.
        ValueError: fields of no known layout, or no record with a prompt and an answer.
    """
    records = _records(path)
    if layout is None:
        fields = set(records[0]) if records else set()
        found = [name for name, (needed, _) in LAYOUTS.items() if needed <= fields]
        if not found:
            known = "; ".join(f"{name}: {', '.join(sorted(needed))}" for name, (needed, _) in LAYOUTS.items())
            raise ValueError(f"data={str(path)!r}: its records have the fields {sorted(fields)}. Known are {known}.")
        layout = found[0]
    pairs = [LAYOUTS[layout][1](record) for record in records]
    pairs = [pair for pair in pairs if all(isinstance(text, str) and text.strip() for text in pair)]
    if not pairs:
        raise ValueError(f"data={str(path)!r}: no record has a prompt and an answer in the layout {layout!r}.")
    return pairs


def _records(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        return list(load_from_disk(str(path)))
    records = read_json(path, "data")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"data={str(path)!r} is no list of records.")
    return records


def _sharegpt(record: dict[str, Any]) -> tuple[Any, Any]:
    turns = record.get("conversations") or []
    for turn, answer in pairwise(turns):
        if _SPEAKERS.get(turn.get("from")) == "human" and _SPEAKERS.get(answer.get("from")) == "gpt":
            return turn.get("value"), answer.get("value")
    return None, None


def _alpaca(record: dict[str, Any]) -> tuple[Any, Any]:
    instruction, more = record.get("instruction"), record.get("input")
    return f"{instruction}\n\n{more}" if instruction and more else instruction, record.get("output")


def _arxiv(record: dict[str, Any]) -> tuple[Any, Any]:
    return record.get("article"), record.get("abstract")


# Name -> (fields that tell it, what makes a pair of a record).
LAYOUTS = {
    "sharegpt": ({"conversations"}, _sharegpt),
    "alpaca": ({"instruction", "output"}, _alpaca),
    "arxiv": ({"article", "abstract"}, _arxiv),
}
