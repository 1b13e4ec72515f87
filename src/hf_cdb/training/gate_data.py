"""The token rows that an exit head is trained and judged on, from a file, a data set or the package's own data."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from .tasks import TASKS, examples
from .text import chapters
from .text_file import naming

__all__ = ["GateData", "Row", "read_gate_data"]

logger = logging.get_logger(__name__)

HELD_OUT_EVERY = 5
_BLOCK = 16_384  # characters of a text file, about
_WAYS = (
    "a .txt file, a .jsonl file or a `datasets` folder with the column text, the columns prompt and answer, or the "
    "column input_ids (and weights, one a token, if wanted), or builtin"
)


@dataclass
class Row:
    """Tokens that attend to each other; every one but the first is predicted.

    Attributes:
        ids: token ids.
        weights: importance of the prediction of each token; the first one's counts for nothing.
        sizes: bytes of text that each token stands for; None where they are not known or not of running text.
    """

    ids: list[int]
    weights: list[float]
    sizes: list[int] | None = None


@dataclass
class GateData:
    """Rows to train on, and rows held out for the report."""

    train: list[Row]
    held_out: list[Row]


def read_gate_data(
    source: str,
    tokenizer: Any,
    *,
    tokens: int,
    held_out_tokens: int,
    length: int = 128,
    prompt_weight: float = 0.1,
    answer_weight: float = 1.0,
    seed: int = 0,
) -> GateData:
    """Rows of `length` tokens at most, as many as the limits allow.

    Text is cut into windows; a prompt and its answer are one row, ended by the tokenizer's end of sequence. Of a
    user's data every 5th row is held out. `builtin` takes text and tasks in equal parts, and holds out the splits that
    the package does not train on.

    Args:
        source: a path, or "builtin".
        tokenizer: of the model; None will do where the data holds `input_ids`.
        tokens, held_out_tokens: limits.
        length: tokens of a row, at least 2.
        prompt_weight, answer_weight: of the tokens of prompts and of answers; those of text have 1.
        seed: of the tasks that builtin draws.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: the data is empty, has none of the columns or values of the wrong kind, or needs a tokenizer that
            is not there.
    """
    if length < 2:
        raise ValueError(f"length={length}: a row needs a token to read and one to predict. Choose at least 2.")
    for name, weight in (("prompt_weight", prompt_weight), ("answer_weight", answer_weight)):
        if not 0 <= weight < math.inf:
            raise ValueError(f"{name}={weight!r} is no weight. Choose 0 (does not count) or more; text has 1.")
    reader = _Reader(tokenizer, length, prompt_weight, answer_weight)
    if source == "builtin":
        train = _take(_interleave(reader, "train", "train", 2048, seed), tokens)
        held_out = _take(_interleave(reader, "held-out", "validation", 512, seed), held_out_tokens)
    else:
        rows = (row for record in _records(source) for row in reader.rows(record))
        train, held_out = _split(rows, tokens, held_out_tokens)
    if not train or not held_out:
        raise ValueError(
            f"data={source!r} gives {len(train) + len(held_out)} rows of two tokens or more, of which every "
            f"{HELD_OUT_EVERY}th is held out: too few. Give more data, or a smaller length than {length}."
        )
    for name, part, wanted in (("tokens", train, tokens), ("held_out_tokens", held_out, held_out_tokens)):
        found = sum(len(row.ids) for row in part)
        if found < wanted:
            logger.warning(f"data={source!r} gives {found} of {name}={wanted}.")
    return GateData(train, held_out)


class _Reader:
    """Makes rows of records."""

    def __init__(self, tokenizer: Any, length: int, prompt_weight: float, answer_weight: float):
        self.tokenizer, self.length = tokenizer, length
        self.prompt_weight, self.answer_weight = prompt_weight, answer_weight

    def rows(self, record: dict[str, Any]) -> Iterator[Row]:
        """Rows of a record with text, prompt and answer, or input_ids."""
        if "input_ids" in record:
            ids = [int(token) for token in record["input_ids"]]
            weights = [float(weight) for weight in record.get("weights") or [1.0] * len(ids)]
            if len(weights) != len(ids):
                raise ValueError(f"weights has {len(weights)} numbers for {len(ids)} input_ids: give one a token.")
            return self._windows(ids, weights, None)
        if "text" in record:
            ids, sizes = self._encode(record["text"], "text")
            return self._windows(ids, [1.0] * len(ids), sizes)
        return self._answer(record["prompt"], record["answer"])

    def _answer(self, prompt: str, answer: str) -> Iterator[Row]:
        if not answer:
            raise ValueError(
                f"answer={answer!r} of prompt={prompt!r}: nothing follows. Give an answer for each prompt."
            )
        asked, _ = self._encode(prompt, "prompt")
        told, _ = self._encode(answer, "answer", add_special_tokens=False)
        end = self.tokenizer.eos_token_id
        if end is not None:
            # Tokenizers that end what they encode would end the prompt.
            asked = asked[:-1] if asked and asked[-1] == end else asked
            told.append(end)
        ids, weights = asked + told, [self.prompt_weight] * len(asked) + [self.answer_weight] * len(told)
        return self._windows(ids, weights, None)

    def _windows(self, ids: list[int], weights: list[float], sizes: list[int] | None) -> Iterator[Row]:
        for start in range(0, len(ids), self.length):
            part = slice(start, start + self.length)
            if len(ids[part]) > 1:
                yield Row(ids[part], weights[part], None if sizes is None else sizes[part])

    def _encode(self, text: Any, name: str, **options) -> tuple[list[int], list[int] | None]:
        """Token ids, and bytes of each where the tokenizer knows where its tokens lie."""
        if not isinstance(text, str):
            raise ValueError(f"{name}={text!r} is no text. Give a string in every row.")
        if self.tokenizer is None:
            raise ValueError(
                f"column {name!r} needs a tokenizer, and the model has none. Give token ids in the column input_ids."
            )
        fast = self.tokenizer.is_fast
        encoded = self.tokenizer(text, return_offsets_mapping=fast, verbose=False, **options)
        if not fast:
            return encoded["input_ids"], None
        sizes, seen = [], 0
        for start, end in encoded["offset_mapping"]:
            # Tokens that share a character: it counts for the first.
            sizes.append(len(text[max(start, seen) : end].encode()))
            seen = max(seen, end)
        return encoded["input_ids"], sizes


def _interleave(reader: _Reader, text_split: str, task_split: str, count: int, seed: int) -> Iterator[Row]:
    """Text and `count` examples of each task by turns, whichever has fewer tokens so far, until one of them ends."""
    text = (row for chapter in _spread(chapters(text_split)) for row in reader.rows({"text": chapter}))
    drawn = [examples(task, task_split, count, seed) for task in TASKS]
    tasks = (
        row
        for group in zip(*drawn, strict=True)
        for example in group
        for row in reader.rows({"prompt": example.prompt, "answer": example.answer})
    )
    sources, counts = (text, tasks), [0, 0]
    while True:
        turn = counts.index(min(counts))
        row = next(sources[turn], None)
        if row is None:
            return
        counts[turn] += len(row.ids)
        yield row


def _spread(items: list[str]) -> list[str]:
    """All items, neighbours far apart, so that the first few come from everywhere."""
    step = max(1, round(len(items) ** 0.5))
    return [item for first in range(step) for item in items[first::step]]


def _split(rows: Iterable[Row], tokens: int, held_out_tokens: int) -> tuple[list[Row], list[Row]]:
    """Rows to train on and every 5th to hold out, up to their limits."""
    train, held_out = [], []
    missing = [tokens, held_out_tokens]
    for number, row in enumerate(rows, 1):
        held = number % HELD_OUT_EVERY == 0
        if missing[held] > 0:
            (held_out if held else train).append(row)
            missing[held] -= len(row.ids)
        if max(missing) <= 0:
            break
    return train, held_out


def _take(rows: Iterable[Row], tokens: int) -> list[Row]:
    taken, count = [], 0
    for row in rows:
        if count >= tokens:
            break
        taken.append(row)
        count += len(row.ids)
    return taken


def _records(source: str) -> Iterable[dict[str, Any]]:
    """Records of a user's data, each with the columns of one of the three ways."""
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"data={source!r} is no file or folder. Give {_WAYS}.")
    readers: dict[str, Callable[[Path], Iterable[dict[str, Any]]]] = {".txt": _text_file, ".jsonl": _json_lines}
    read = _data_set if path.is_dir() else readers.get(path.suffix)
    if read is None:
        raise ValueError(f"data={source!r} has the ending {path.suffix!r}. Give {_WAYS}.")
    return _checked(read(path), source)


def _checked(records: Iterable[dict[str, Any]], source: str) -> Iterator[dict[str, Any]]:
    number = 0
    for number, record in enumerate(records, 1):
        if not isinstance(record, dict):
            raise ValueError(f"data={source!r}, row {number} is {record!r}, no object with columns. Give {_WAYS}.")
        if not ("text" in record or "input_ids" in record or {"prompt", "answer"} <= set(record)):
            lacks = " but no answers" if "prompt" in record else ""
            raise ValueError(
                f"data={source!r}, row {number} has the columns {', '.join(record) or 'none'}{lacks}. Give {_WAYS}."
            )
        yield record
    if not number:
        raise ValueError(f"data={source!r} is empty. Give {_WAYS}.")


def _text_file(path: Path) -> Iterator[dict[str, Any]]:
    """Blocks of whole lines, so that of a long file no more is read and tokenised than is wanted."""
    with path.open(encoding="utf-8") as file, naming(path, "data"):
        while lines := file.readlines(_BLOCK):
            text = "".join(lines)
            if text.strip():
                yield {"text": text}


def _json_lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file, naming(path, "data"):
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"data={str(path)!r}, line {number} is no JSON ({error}). Write one object a line."
                ) from error


def _data_set(path: Path) -> Iterable[dict[str, Any]]:
    from datasets import DatasetDict, load_from_disk

    data = load_from_disk(path)
    if isinstance(data, DatasetDict):
        raise ValueError(
            f"data={str(path)!r} holds the splits {', '.join(data)}. Name one of them: {path / next(iter(data))}."
        )
    return data
