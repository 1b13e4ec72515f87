"""Cost tables: how long a launch takes, by its stage, its width and what it attends to. Imports no torch."""

import json
import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..trace import STAGES
from .json_file import read_json

__all__ = ["UNTOLD", "CostTable", "StageCost", "coda_width"]

UNTOLD = "context_untold"  # under which `CostTable.about` names the stages whose context has no cost of its own


@dataclass(frozen=True)
class StageCost:
    """Seconds of a launch of one stage: linear between the widths that are given, and so much for every position read.

    Below the first width a launch costs what that one does, the floor; beyond the last it goes on as before it.

    Attributes:
        widths: at least two, increasing, from 1 on; see `CostTable.width`.
        seconds: of a launch of each, positive and nowhere decreasing.
        per_context: seconds for each position that the rows attend to.

    Raises:
        ValueError: a value that is none of these.
    """

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    per_context: float = 0.0

    def __post_init__(self) -> None:
        widths, seconds = tuple(self.widths), tuple(self.seconds)
        object.__setattr__(self, "widths", widths)
        object.__setattr__(self, "seconds", seconds)
        if len(widths) < 2 or len(widths) != len(seconds):
            raise ValueError(
                f"widths={list(widths)} and seconds={list(seconds)}: give at least two widths, and seconds for each."
            )
        if not all(_is_number(width) and width >= 1 for width in widths) or sorted(set(widths)) != list(widths):
            raise ValueError(f"widths={list(widths)}: give increasing numbers of at least 1.")
        if not all(_is_number(value) and value > 0 for value in seconds) or sorted(seconds) != list(seconds):
            raise ValueError(
                f"seconds={list(seconds)}: give positive numbers, none below the one before it: a wider launch is "
                "never cheaper. Where noise says otherwise, raise it to its neighbour."
            )
        if not _is_number(self.per_context) or self.per_context < 0:
            raise ValueError(f"per_context={self.per_context!r}: give seconds for a position, 0 or more.")

    def __call__(self, width: float, context: float = 0.0) -> float:
        """Seconds of a launch of `width` that reads `context` positions in all."""
        right = min(max(bisect_right(self.widths, width), 1), len(self.widths) - 1)
        (w0, w1), (s0, s1) = self.widths[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        grown = max(width - w0, 0) * (s1 - s0) / (w1 - w0)
        return s0 + grown + self.per_context * context


@dataclass(frozen=True)
class CostTable:
    """What the launches of one model on one machine cost; measured, or made up for hardware that is not here.

    Attributes:
        full_depth: the model's loops, R.
        prelude, loop, coda: seconds of a launch.
        host_per_launch, host_per_row: seconds that the engine takes beside that, which a decision with lookahead lets
            it spend while the device computes; `hf-cdb bench overhead` measures them. 0 where the stages' seconds are
            those of whole steps.
        about: where the figures come from, for people.
        coda_layers_share: of the coda's parameters, those of its layers, which every token of a prompt runs; the head
            runs on one token a row. 0 where the coda has no layers.

    Raises:
        ValueError: a value out of its range.
    """

    full_depth: int
    prelude: StageCost
    loop: StageCost
    coda: StageCost
    host_per_launch: float = 0.0
    host_per_row: float = 0.0
    about: Mapping[str, Any] = field(default_factory=dict)
    coda_layers_share: float = 0.0

    def __post_init__(self) -> None:
        if isinstance(self.full_depth, bool) or not isinstance(self.full_depth, int) or self.full_depth < 1:
            raise ValueError(f"full_depth={self.full_depth!r}: give the model's loops, an integer of at least 1.")
        for name in ("host_per_launch", "host_per_row"):
            if not _is_number(getattr(self, name)) or getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: give seconds, 0 or more.")
        if not isinstance(self.about, Mapping):
            raise ValueError(f"about={self.about!r}: give names and what to know, such as {{'model': 'tiny-ouro'}}.")
        share = self.coda_layers_share
        if not _is_number(share) or not 0 <= share <= 1:
            raise ValueError(f"coda_layers_share={share!r}: give a share of the coda's parameters, from 0 to 1.")

    def width(self, stage: str, tokens: int, ending: int) -> float:
        """What the cost of a launch goes by: its tokens; for the coda tokens of the layers and rows of the head, by
        their shares of its parameters.

        Args:
            stage: "prelude", "loop" or "coda".
            tokens: positions that run.
            ending: rows that get a token.
        """
        return coda_width(tokens, ending, self.coda_layers_share) if stage == "coda" else tokens

    @property
    def caveat(self) -> str | None:
        """What to know before the table is used for other requests than those that it was fitted to."""
        untold = self.about.get(UNTOLD)
        if not untold:
            return None
        return (
            f"Costs of {', '.join(untold)}: the context rose with the width in every launch, so what it costs by "
            "itself is unknown. It is in the seconds of the widths, which hold at such contexts only."
        )

    def tells_context(self, stage: str) -> bool:
        """Whether the launches that the table was fitted to tell what the context of a stage costs."""
        return stage not in self.about.get(UNTOLD, ())

    def __call__(self, stage: str, width: float, rows: int, context: int, overlapped: bool = False) -> float:
        """Seconds of a launch.

        Args:
            stage: "prelude", "loop" or "coda".
            width: see `width`.
            rows: for the host.
            context: positions that the rows attend to, in all.
            overlapped: the host works while the device computes, so that the slower one counts.
        """
        device = getattr(self, stage)(width, context)
        host = self.host_per_launch + self.host_per_row * rows
        return max(device, host) if overlapped else device + host

    def save(self, path: Path) -> None:
        """Write the table as JSON. Folders on the way are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "CostTable":
        """The table in a file that `save` or somebody else wrote.

        Raises:
            FileNotFoundError: no such file.
            ValueError: it holds something else, or values out of their range.
        """
        content = read_json(path, "costs")
        try:
            stages = {stage: StageCost(**content.pop(stage)) for stage in STAGES}
            return cls(**content, **stages)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"costs={str(path)!r} holds no cost table ({error}): it needs full_depth, and for each of "
                f"{', '.join(STAGES)} widths, seconds and, where attention counts, per_context."
            ) from error


def coda_width(tokens: int, ending: int, layers_share: float) -> float:
    """The width of a launch of the coda, see `CostTable.width`."""
    return ending + layers_share * (tokens - ending)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
