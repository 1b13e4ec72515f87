"""Traces: what every launch ran, what stood in the queues, when, and for how long. Imports no torch."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .scheduler import Launch

__all__ = ["FORMATS", "STAGES", "StageTime", "Trace", "TracedLaunch"]

STAGES = ("prelude", "loop", "coda")
FORMATS = {".jsonl": "jsonl", ".json": "chrome"}
QUEUES = ("waiting", "entering", "looping", "left")


@dataclass(frozen=True)
class TracedLaunch:
    """One launch.

    Attributes:
        stage: "prelude", "loop" or "coda".
        rows: keys of the requests in it.
        depths: by row, as in `Launch`: for "loop" the loop it runs, else the loops it has run.
        tokens: positions that run, all rows together; more than rows where a prompt is among them.
        context: positions that the rows attend to, their own included, all rows together.
        waiting: requests without a place, when the launch was chosen.
        entering, looping, left: rows that were ready for the prelude, the loop and the coda then, its own included.
        start: seconds from the start of the first launch.
        duration: seconds, from choosing the launch to its results having been taken in; with lookahead on a device
            those of a loop come later.
    """

    stage: str
    rows: tuple[int, ...]
    depths: tuple[int, ...]
    tokens: int
    context: int
    waiting: int
    entering: int
    looping: int
    left: int
    start: float
    duration: float

    @property
    def width(self) -> int:
        """Rows."""
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; the width comes on top, for readers of the file."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        rows, depths = list(self.rows), list(self.depths)
        return {"stage": found.pop("stage"), "width": self.width, **found, "rows": rows, "depths": depths}

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any]) -> "TracedLaunch":
        """What `to_dict` gave.

        Raises:
            ValueError: an entry is missing, or is not what it should be.
        """
        try:
            found = {field.name: entry[field.name] for field in fields(cls)}
            found |= {name: tuple(map(int, found[name])) for name in ("rows", "depths")}
            found |= {name: int(found[name]) for name in ("tokens", "context", *QUEUES)}
            found |= {name: float(found[name]) for name in ("start", "duration")}
        except KeyError as error:
            raise ValueError(f"a launch without {error.args[0]!r}.") from error
        except TypeError as error:
            raise ValueError(f"a launch with an entry of another kind: {error}.") from error
        if found["stage"] not in STAGES:
            raise ValueError(f"stage={found['stage']!r}: a launch runs one of {', '.join(STAGES)}.")
        return cls(**found)


@dataclass(frozen=True)
class StageTime:
    """Launches of one stage together.

    Attributes:
        launches: how many.
        seconds: their durations.
        mean_width: rows of a launch.
        tokens: positions that ran.
    """

    launches: int
    seconds: float
    mean_width: float
    tokens: int


class Trace(Sequence[TracedLaunch]):
    """The launches of a run, in order; `CDBConfig(trace=True)` leaves one in `stats.trace`."""

    def __init__(self, launches: Iterable[TracedLaunch] = ()):
        self._launches = list(launches)
        self._origin: float | None = None

    def __len__(self) -> int:
        return len(self._launches)

    def __iter__(self) -> Iterator[TracedLaunch]:
        return iter(self._launches)

    def __getitem__(self, index):
        return self._launches[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and self._launches == other._launches

    __hash__ = None

    def record(
        self, launch: Launch, queues: Mapping[str, int], tokens: int, context: int, began: float, ended: float
    ) -> None:
        """Add a launch that has run.

        Args:
            launch: what ran.
            queues: `Scheduler.queues` when it was chosen.
            tokens, context: see `TracedLaunch`.
            began, ended: seconds on one clock, whose zero does not matter.
        """
        if self._origin is None:
            self._origin = began
        start, duration = began - self._origin, ended - began
        self._launches.append(
            TracedLaunch(
                launch.stage, launch.keys, launch.depths, tokens, context, **queues, start=start, duration=duration
            )
        )

    @property
    def seconds(self) -> float:
        """From the start of the first launch to the end of the last."""
        return self[-1].start + self[-1].duration if self._launches else 0.0

    def by_stage(self) -> dict[str, StageTime]:
        """What each stage that ran took in all."""
        found = {}
        for stage in STAGES:
            own = [launch for launch in self if launch.stage == stage]
            if own:
                seconds, width = (sum(getattr(launch, name) for launch in own) for name in ("duration", "width"))
                tokens = sum(launch.tokens for launch in own)
                found[stage] = StageTime(len(own), seconds, width / len(own), tokens)
        return found

    def save(self, path: str | Path, format: str | None = None) -> None:
        """Write the launches to a file.

        Args:
            path: the file.
            format: "jsonl": a line of JSON a launch; "chrome": what `chrome://tracing` and Perfetto show, a line for
                each stage and the lengths of the queues above; None goes by the suffix, `.jsonl` or `.json`.

        Raises:
            ValueError: the format is unknown, or the suffix says none.
        """
        path = Path(path)
        if format is None:
            format = FORMATS.get(path.suffix)
            if format is None:
                raise ValueError(
                    f"path={str(path)!r}: the suffix {path.suffix!r} names no format of a trace. Use .jsonl or .json "
                    "(Chrome), or pass format='jsonl' or 'chrome'."
                )
        if format not in FORMATS.values():
            raise ValueError(f"format={format!r} is unknown. Choose 'jsonl' or 'chrome'.")
        if format == "jsonl":
            text = "".join(json.dumps(launch.to_dict()) + "\n" for launch in self)
        else:
            text = json.dumps({"traceEvents": list(self._events()), "displayTimeUnit": "ms"})
        path.write_text(text, encoding="utf-8")

    def _events(self) -> Iterator[dict[str, Any]]:
        """Chrome's trace events, times in microseconds: names of the lines, then launches and queues."""
        for line, stage in enumerate(STAGES):
            yield {"name": "thread_name", "ph": "M", "pid": 0, "tid": line, "args": {"name": stage}}
            yield {"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": line, "args": {"sort_index": line}}
        for launch in self:
            arguments = launch.to_dict()
            stage, start = arguments.pop("stage"), 1e6 * arguments.pop("start")
            event = {"name": stage, "ph": "X", "ts": start, "dur": 1e6 * arguments.pop("duration")}
            yield {**event, "pid": 0, "tid": STAGES.index(stage), "args": arguments}
            queues = {name: arguments[name] for name in QUEUES}
            yield {"name": "queues", "ph": "C", "ts": start, "pid": 0, "args": queues}

    @classmethod
    def load(cls, path: str | Path) -> "Trace":
        """Read what `save` wrote, in either format.

        Raises:
            ValueError: the file holds something else.
        """
        path = Path(path)
        try:
            entries = _entries(path.read_text(encoding="utf-8"))
            return cls(TracedLaunch.from_dict(entry) for entry in entries)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no trace that `stats.save_trace` wrote: {error}") from error


def _entries(text: str) -> list[dict[str, Any]]:
    """The launches in the text of a file, of either format, in whatever way its JSON is laid out.

    Raises:
        ValueError, KeyError, TypeError: it has another form.
    """
    if not text.strip():
        raise ValueError("it is empty.")
    try:
        whole = json.loads(text)
    except json.JSONDecodeError:
        whole = None  # several lines of JSON, or none
    if isinstance(whole, dict) and "traceEvents" in whole:
        return [
            {"stage": e["name"], "start": e["ts"] / 1e6, "duration": e["dur"] / 1e6, **e["args"]}
            for e in whole["traceEvents"]
            if e["ph"] == "X"
        ]
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            entries += [json.loads(line)] if line.strip() else []
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} is no JSON: {error}.") from None
    return entries
