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

from datasets import DatasetDict, load_from_disk

from .json_file import read_json

__all__ = ["LAYOUTS", "read_conversations"]

_SPEAKERS = {"human": "human", "user": "human", "gpt": "gpt", "assistant": "gpt"}


def read_conversations(path: Path, layout: str | None = None) -> list[tuple[str, str]]:
    """Pairs (prompt, answer), in the order of the file; records without one of the two are left out.

    Args:
        layout: "sharegpt", "alpaca" or "arxiv"; None finds out by the fields of the first record that has one's.

    Raises:
        FileNotFoundError: no such file.
        ValueError: fields of no known layout, or no record with a prompt and an answer.
    """
    records = _records(path)
    if layout is None:
        found = (name for record in records for name, (needed, _) in LAYOUTS.items() if needed <= record.keys())
        layout = next(found, None)
        if layout is None:
            fields = sorted(map(str, records[0])) if records else []
            known = "; ".join(f"{name}: {', '.join(sorted(needed))}" for name, (needed, _) in LAYOUTS.items())
            raise ValueError(f"data={str(path)!r}: its records have the fields {fields}. Known are {known}.")
    pairs = [LAYOUTS[layout][1](record) for record in records]
    pairs = [pair for pair in pairs if all(isinstance(text, str) and text.strip() for text in pair)]
    if not pairs:
        raise ValueError(f"data={str(path)!r}: no record has a prompt and an answer in the layout {layout!r}.")
    return pairs


def _records(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        saved = load_from_disk(str(path))
        if isinstance(saved, DatasetDict):
            parts = ", ".join(saved)
            raise ValueError(f"data={str(path)!r} holds several data sets. Name the folder of one in it: {parts}.")
        return list(saved)
    records = read_json(path, "data")
    if not isinstance(records, list):
        raise ValueError(f"data={str(path)!r} is no list of records.")
    return [record for record in records if isinstance(record, dict)]


def _sharegpt(record: dict[str, Any]) -> tuple[Any, Any]:
    turns = record.get("conversations")
    for turn, answer in pairwise(turns if isinstance(turns, list) else []):
        if (_speaker(turn), _speaker(answer)) == ("human", "gpt"):
            return turn.get("value"), answer.get("value")
    return None, None


def _speaker(turn: Any) -> str | None:
    name = turn.get("from") if isinstance(turn, dict) else None
    return _SPEAKERS.get(name) if isinstance(name, str) else None


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
