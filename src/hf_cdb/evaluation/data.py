"""Rows of a task, through `datasets`: files, builders of this package, or the Hub."""

import re
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from ..bench.conversations import LAYOUTS as CONVERSATIONS
from ..training.tasks import as_dataset
from ..training.text import chapters

__all__ = ["BUILDERS", "LAYOUTS", "load_rows"]

_SUFFIXES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_KEYS = ("path", "name", "split", "revision", "files", "skip")


def _tasks(split: str = "test", count: int = 64, seed: int = 0) -> Dataset:
    """`count` examples of every exact-match task of this package, the tasks in turn: task, level, prompt, answer."""
    rows = as_dataset(split, count, seed)
    kinds = len(rows) // count
    # So that the first rows of a limit hold all tasks alike.
    return rows.select([kind * count + place for place in range(count) for kind in range(kinds)])


def _bible(split: str = "held-out") -> Dataset:
    """Chapters of the King James Bible: text."""
    return Dataset.from_dict({"text": chapters(split)})


BUILDERS: dict[str, Callable[..., Dataset]] = {"tasks": _tasks, "bible": _bible}


def _conversation(layout: str) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def columns(row: Mapping[str, Any]) -> dict[str, Any]:
        prompt, reference = CONVERSATIONS[layout][1](row)
        return {"prompt": prompt, "reference": reference}

    return columns


def _hellaswag(row: Mapping[str, Any]) -> dict[str, Any]:
    """Context and endings without the marks of WikiHow, as the evaluation harness cleans them."""

    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    return {
        "prompt": clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"),
        "choices": [clean(ending) for ending in row["endings"]],
        "answer": int(row["label"]),
    }


# Name -> what makes further columns of a row. Rows without a prompt or a reference in them are left out.
LAYOUTS: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    **{name: _conversation(name) for name in CONVERSATIONS},
    "hellaswag": _hellaswag,
}


def load_rows(data: str | Mapping[str, Any], layout: str | None = None, limit: int | None = None) -> list[dict]:
    """The rows of a data set, in its order.

    Args:
        data: a file or folder, or a mapping: `{path}` of one; `{path, name, split, revision, files}` for
            `datasets.load_dataset`, where the split is "test" unless given; `{builder: tasks, split, count, seed}` or
            `{builder: bible, split}` for what comes with this package. `skip`, beside a path, leaves out the first so
            many rows.
        layout: see `LAYOUTS`.
        limit: rows at most.

    Raises:
        ValueError: an unknown key, builder, layout or kind of file; a file that cannot be read; or no row.
        FileNotFoundError: no such file, and no such data set that the Hub gives.
    """
    given = {"path": data} if isinstance(data, str) else dict(data)
    if layout is not None and layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown: choose one of {', '.join(LAYOUTS)}.")
    if "builder" in given:
        dataset, skip = _build(given), 0
    else:
        unknown = [key for key in given if key not in _KEYS]
        if unknown or "path" not in given:
            raise ValueError(f"data={data!r}: give path, and of {', '.join(_KEYS[1:])} what it needs; or builder.")
        skip = given.pop("skip", 0)
        if isinstance(skip, bool) or not isinstance(skip, int) or skip < 0:
            raise ValueError(f"data={data!r}: skip={skip!r} has to be an integer of at least 0.")
        dataset = _load(**given)
    rows = []
    for row in islice(dataset, skip, None):
        if limit is not None and len(rows) == limit:
            break
        more = LAYOUTS[layout](row) if layout is not None else {}
        if all(value not in (None, "") for value in more.values()):
            rows.append({**row, **more})
    if not rows:
        raise ValueError(f"data={data!r} has no row{'' if layout is None else f' of layout {layout!r}'}.")
    return rows


def _build(given: dict[str, Any]) -> Dataset:
    name = given.pop("builder")
    if name not in BUILDERS:
        raise ValueError(f"builder={name!r} is unknown: choose one of {', '.join(BUILDERS)}.")
    try:
        return BUILDERS[name](**given)
    except TypeError as error:
        raise ValueError(f"builder {name!r} with {given}: {error}.") from error


def _load(path: str, split: str | None = None, files: str | None = None, **options: Any) -> Dataset:
    file = Path(path)
    local = file.suffix in _SUFFIXES or file.is_dir()
    if local and (split or files or options):
        raise ValueError(
            f"data: {path!r} lies here and has no split, files, name or revision to choose. Name it alone."
        )
    if file.is_dir():
        return load_from_disk(path)
    if local:
        return _read(file)
    if file.is_file():
        raise ValueError(f"data={path!r}: files are read of {', '.join(_SUFFIXES)}. Save it as one of them.")
    try:
        return load_dataset(path, data_files=files, split=split or "test", **options)
    except (FileNotFoundError, ConnectionError) as error:
        raise FileNotFoundError(
            f"data={path!r} is no file or folder here, and the Hub gives no data set of this name: {error}"
        ) from error


def _read(file: Path) -> Dataset:
    if not file.is_file():
        raise FileNotFoundError(f"data={str(file)!r}: there is no such file.")
    if not file.stat().st_size:
        raise ValueError(f"data={str(file)!r} has no row: the file is empty.")
    kind = _SUFFIXES[file.suffix]
    try:
        return load_dataset(kind, data_files=str(file), split="train")  # its name for all of a file
    except (DatasetGenerationError, StopIteration, ValueError) as error:
        raise ValueError(f"data={str(file)!r} cannot be read as {kind}: {error.__cause__ or error!r}") from error
