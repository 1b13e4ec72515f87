"""Traffic of several classes: who comes when, with what prompt, how urgent."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy

from .lengths import draw_lengths
from .mixes import depth_shares, draw_depths

__all__ = ["Traffic", "TrafficClass", "draw_traffic"]

_FORM = "NAME,share=.9,prompt=64-256,new=64,priority=0,deadline=SECONDS, of which share, prompt and new are needed"


@dataclass(frozen=True)
class TrafficClass:
    """Requests of one kind.

    Attributes:
        name: for tables.
        share: of all requests; of several classes they count in proportion.
        prompt, new: tokens, see `draw_lengths`.
        priority: of every request.
        deadline: seconds from a request's arrival to its last token; None is no deadline.
    """

    name: str
    share: float
    prompt: str
    new: str
    priority: int = 0
    deadline: float | None = None

    @classmethod
    def parse(cls, text: str) -> "TrafficClass":
        """A class from the form of the command line.

        Raises:
            ValueError: it has another form, or values out of their range.
        """
        name, *parts = text.split(",")
        try:
            given = dict(part.split("=", 1) for part in parts)
            kinds = {"share": float, "prompt": str, "new": str, "priority": int, "deadline": float}
            if not name or "=" in name or len(given) < len(parts):
                raise ValueError
            found = cls(name, **{key: kinds[key](value) for key, value in given.items()})
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"class {text!r}: write {_FORM}.") from None
        for key in ("share", "deadline"):
            value = getattr(found, key)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"class {text!r}: {key}={value} is no positive number.")
        for spec in (found.prompt, found.new):
            draw_lengths(spec, 0, numpy.random.default_rng())
        return found


@dataclass(frozen=True)
class Traffic:
    """Requests in the order in which they come.

    Attributes:
        classes: the number of each one's class.
        prompts: tokens of each one's prompt.
        depths: for each a depth per new token, the first of them full depth.
        priorities: of each.
        deadlines: of each, in seconds on the clock of the arrivals.
    """

    classes: list[int]
    prompts: list[int]
    depths: list[list[int]]
    priorities: list[int]
    deadlines: list[float | None]

    def of_class(self, number: int) -> list[int]:
        """The requests of a class."""
        return [key for key, its in enumerate(self.classes) if its == number]


def draw_traffic(
    classes: Sequence[TrafficClass], arrivals: Sequence[float], mix: str, full_depth: int, seed: int
) -> Traffic:
    """A request for every arrival, its class drawn by the shares; the same for the same arguments.

    Args:
        classes: one at least.
        arrivals: seconds.
        mix: of the depths, see `depth_shares`.
        full_depth: R.
    """
    shares = numpy.array([one.share for one in classes])
    drawn = numpy.random.default_rng([seed, 5]).choice(len(classes), size=len(arrivals), p=shares / shares.sum())
    depth_of = depth_shares(mix, full_depth)
    prompts, depths = [0] * len(arrivals), [[]] * len(arrivals)
    for number, one in enumerate(classes):
        # A stream of random numbers for each class and purpose, so that another class leaves its requests as they are.
        prompt_rng, new_rng, depth_rng = (numpy.random.default_rng([seed, 6, number, part]) for part in range(3))
        own = numpy.flatnonzero(drawn == number)
        lengths = draw_lengths(one.prompt, len(own), prompt_rng)
        rows = draw_depths(depth_of, draw_lengths(one.new, len(own), new_rng), full_depth, depth_rng)
        for key, length, row in zip(own.tolist(), lengths, rows, strict=True):
            prompts[key], depths[key] = length, row
    own = [classes[number] for number in drawn]
    deadlines = [None if one.deadline is None else came + one.deadline for one, came in zip(own, arrivals, strict=True)]
    return Traffic(drawn.tolist(), prompts, depths, [one.priority for one in own], deadlines)
