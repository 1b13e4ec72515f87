"""What became of requests that were served, in a simulation or for real, and what users would say of it."""

import itertools
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
        new_tokens: how many it got.
        launches: how many of each stage.
        row_loops: rows that ran, summed over the launches of the loop.
        seconds: when the last launch ended.
        tokens_at: (time, tokens) of every launch of the coda that gave any.
        gaps: times between one token of a request and its next, a list for each request.
    """

    max_num_seqs: int
    arrivals: Sequence[float]
    new_tokens: Sequence[int]
    admitted: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    finished: list[float] = field(default_factory=list)
    launches: Counter = field(default_factory=Counter)
    row_loops: int = 0
    seconds: float = 0.0
    tokens_at: list[tuple[float, int]] = field(default_factory=list)
    gaps: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._latest = [float("nan")] * len(self.arrivals)  # token of each request
        for times in (self.admitted, self.first, self.finished):
            times += self._latest
        self.gaps += [[] for _ in self.arrivals]

    @classmethod
    def from_tokens(
        cls,
        max_num_seqs: int,
        arrivals: Sequence[float],
        admitted: Sequence[float],
        tokens: Sequence[Sequence[float]],
    ) -> "Served":
        """What is known from outside, where launches do not show: when requests started, and when each token came."""
        served = cls(max_num_seqs, arrivals, list(map(len, tokens)))
        served.admitted = list(admitted)
        served.first, served.finished = [times[0] for times in tokens], [times[-1] for times in tokens]
        served.seconds = max(served.finished)
        served.tokens_at = [(when, 1) for when in sorted(when for times in tokens for when in times)]
        served.gaps = [[after - before for before, after in itertools.pairwise(times)] for times in tokens]
        return served

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
                self.gaps[key].append(ended - self._latest[key])
            self._latest[key] = ended
        for key in finished:
            self.finished[key] = ended

    @property
    def tokens(self) -> int:
        return sum(self.new_tokens)

    @property
    def occupancy(self) -> float | None:
        """Mean width of the loop's launches as a share of W; None where they are not known."""
        launches = self.launches["loop"]
        return self.row_loops / launches / self.max_num_seqs if launches else None

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

    def waits(self) -> dict[str, numpy.ndarray]:
        """What requests waited, in seconds, an entry each; NaN for what one did not live to see.

        `queue` is the time until the first launch, `ttft` until the first token; `tpot` the mean time of the tokens
        after the first, NaN where there are none; `normalised_latency` the time until the last token, by tokens.
        """
        arrivals, new, admitted, first, finished = (
            numpy.asarray(values, dtype=float)
            for values in (self.arrivals, self.new_tokens, self.admitted, self.first, self.finished)
        )
        return {
            "queue": admitted - arrivals,
            "ttft": first - arrivals,
            "tpot": numpy.where(new > 1, (finished - first) / numpy.maximum(new - 1, 1), numpy.nan),
            "normalised_latency": (finished - arrivals) / new,
        }

    def distributions(self, keys: Sequence[int]) -> dict[str, dict[str, float] | None]:
        """Of the `waits` of some requests, and of the times between their tokens (`inter_token`): percentiles, mean and
        maximum in seconds; None where there is nothing to wait for."""
        times = {name: values[list(keys)] for name, values in self.waits().items()}
        times["inter_token"] = numpy.array([gap for key in keys for gap in self.gaps[key]])
        return {name: _distribution(values) for name, values in times.items()}

    def figures(self) -> dict[str, Any]:
        """Throughput, and the `distributions` of all requests."""
        return {
            "seconds": self.seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens / self.seconds,
            "steady_tokens_per_second": self.steady(),
            "occupancy": self.occupancy,
            "launches": dict(self.launches),
            "row_loops": self.row_loops,
            **self.distributions(range(len(self.arrivals))),
        }


def _distribution(values: numpy.ndarray) -> dict[str, float] | None:
    """Percentiles, mean and maximum; None where there is no value."""
    values = values[~numpy.isnan(values)]
    if not len(values):
        return None
    found = {f"p{q}": float(value) for q, value in zip(PERCENTILES, numpy.percentile(values, PERCENTILES), strict=True)}
    return {**found, "mean": float(values.mean()), "max": float(values.max())}
