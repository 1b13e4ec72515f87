"""Systems measured in turn, and ratios within the turns."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Spread", "in_turns"]

Measured = TypeVar("Measured")


def in_turns(
    systems: Mapping[str, Callable[[], Measured]], turns: int, warm_up: Callable[[str], object] | None = None
) -> dict[str, list[Measured]]:
    """Run all systems one after the other, and again, `turns` times (A B C, A B C, ...).

    What slows the machine down for a while then slows down all of them.

    Args:
        warm_up: called with the name of every system before the first turn.

    Raises:
        ValueError: less than one turn.
    """
    if turns < 1:
        raise ValueError(f"turns={turns}: choose at least 1.")
    for name in systems:
        if warm_up is not None:
            warm_up(name)
    found: dict[str, list[Measured]] = {name: [] for name in systems}
    for _ in range(turns):
        for name, run in systems.items():
            found[name].append(run())
    return found


@dataclass(frozen=True)
class Spread:
    """A figure measured in several turns.

    Attributes:
        values: one per turn.
    """

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        """None where a turn has no value, or there are no turns."""
        values = tuple(values)
        return cls(values) if values and None not in values else None

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        """The median and, of several turns, the range."""
        if len(self.values) == 1:
            return f"{self.median:.3g}"
        return f"{self.median:.3g} ({min(self.values):.3g}-{max(self.values):.3g})"

    def to_dict(self) -> dict[str, float | list[float]]:
        """Ready for JSON."""
        return {
            "median": self.median,
            "least": min(self.values),
            "most": max(self.values),
            "values": list(self.values),
        }
