"""What became of requests that were served, in a simulation or for real, and what users would say of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from ..scheduler import Launch

__all__ = ["PERCENTILES", "Served"]

PERCENTILES = (50, 90, 99)


@dataclass
class Served:
    """Times are seconds on one clock, by request in the order of their arrival.

    Attributes:
        max_num_seqs: W.
        arrivals: when each came.
        admitted: start of its first launch; NaN, as all times below, where that never came.
        first: when its first token was there.
        finished: when its last one was.
        gaps: of each the seconds between tokens that follow each other.
        new_tokens: how many it got.
        launches: how many of each stage.
        row_loops: rows that ran, summed over the launches of the loop.
        seconds: when the last launch ended.
        tokens_at: (time, tokens) of every launch of the coda that gave any.
    """

    max_num_seqs: int
    arrivals: Sequence[float]
    new_tokens: Sequence[int]
    admitted: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)
    launches: Counter = field(default_factory=Counter)
    row_loops: int = 0
    seconds: float = 0.0
    tokens_at: list[tuple[float, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for times in (self.admitted, self.first, self.finished):
            times += [float("nan")] * len(self.arrivals)
        self.gaps += [[] for _ in self.arrivals]
        self._last = [0.0] * len(self.arrivals)  # when its last token so far was there

    def record(
        self, launch: Launch, began: float, ended: float, tokens: Sequence[int], finished: Sequence[int]
    ) -> None:
        """Take in a launch.

        Args:
            launch: what ran; the keys are the numbers of the requests.
            began, ended: when.
            tokens: keys of the requests that it gave a token.
            finished: keys of those whose last one it was.
        """
        self.launches[launch.stage] += 1
        self.seconds = ended
        if launch.stage == "loop":
            self.row_loops += len(launch)
        if launch.stage == "prelude":
            for key in launch.keys:
                if self.admitted[key] != self.admitted[key]:  # NaN: not yet
                    self.admitted[key] = began
        if tokens:
            self.tokens_at.append((ended, len(tokens)))
        for key in tokens:
            if self.first[key] != self.first[key]:
                self.first[key] = ended
            else:
                self.gaps[key].append(ended - self._last[key])
            self._last[key] = ended
        for key in finished:
            self.finished[key] = ended

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def occupancy(self) -> float:
        """Mean width of the loop's launches as a share of W."""
        return self.row_loops / max(1, self.launches["loop"]) / self.max_num_seqs

    def steady(self) -> float | None:
        """Tokens per second from the 2 W-th completion to the last admission; None where the run is too short."""
        ends = numpy.sort(self.finished)
        last = max(self.admitted)
        if len(ends) <= 2 * self.max_num_seqs:
            return None
        begin = ends[2 * self.max_num_seqs - 1]
        if last <= begin:
            return None
        return sum(count for when, count in self.tokens_at if begin < when <= last) / float(last - begin)

    def figures(self) -> dict[str, Any]:
        """Throughput, and what requests waited: `waits` of all of them."""
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "steady_tokens_per_second": self.steady(),
            "occupancy": self.occupancy,
            "launches": dict(self.launches),
            "row_loops": self.row_loops,
            **self.waits(range(len(self.arrivals))),
        }

    def waits(self, keys: Sequence[int]) -> dict[str, dict[str, float] | None]:
        """What some requests waited: percentiles and the most, in seconds; None where there is nothing to wait for.

        `queue` is the time until the first launch, `ttft` until the first token; `tpot` the time for each token after
        the first, of requests that have any; `inter_token` the time between two tokens, of all such pairs;
        `normalised_latency` the time until the last token, by tokens. What a request did not live to see is left out.
        """
        own = numpy.asarray(keys, dtype=int)
        arrivals, new, admitted, first, finished = (
            numpy.asarray(values, dtype=float)[own]
            for values in (self.arrivals, self.new_tokens, self.admitted, self.first, self.finished)
        )
        several = new > 1
        times = {
            "queue": admitted - arrivals,
            "ttft": first - arrivals,
            "tpot": (finished - first)[several] / (new - 1)[several],
            "inter_token": numpy.array([gap for key in keys for gap in self.gaps[key]]),
            "normalised_latency": (finished - arrivals) / new,
        }
        return {name: _percentiles(values[~numpy.isnan(values)]) for name, values in times.items()}


def _percentiles(values: numpy.ndarray) -> dict[str, float] | None:
    if not len(values):
        return None
    found = {f"p{q}": float(value) for q, value in zip(PERCENTILES, numpy.percentile(values, PERCENTILES), strict=True)}
    return {**found, "max": float(values.max())}
