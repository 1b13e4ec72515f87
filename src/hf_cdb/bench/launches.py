"""What the launches of a run say: seconds per decoded token, seconds that prompts took, the steady state.

In the engine the first pass of a prompt loops beside rows that decode, in the same launches. So that prefill and
decoding can be told apart all the same, one rule holds everywhere:

* A **decode launch** is one in which no prompt takes part while all W places are busy.
* A decoded token passes the prelude once, the core as often as its depth says, and the coda once. What it costs is
  the sum of that many times the **seconds per row** of the decode launches of each stage. So launches that are left
  out, in which decoding rows ran too, shift nothing.
* The seconds of **prefill** are those of the launches with prompts in them, less what their decoding rows would have
  cost in decode launches.
* The **steady state** of a run begins when 2 W requests have finished and ends when the last one is given a place
  (arXiv 2608.09444).
"""

from collections import Counter
from dataclasses import dataclass

from ..trace import STAGES, Trace, TracedLaunch

__all__ = ["DecodeTime", "Steady", "decode_time", "prefill_seconds", "steady_state"]


@dataclass(frozen=True)
class DecodeTime:
    """Seconds per row of the decode launches, by stage."""

    prelude: float
    loop: float
    coda: float

    def per_token(self, depth: float) -> float:
        """Seconds of a token that runs so many loops; a mean of depths gives the mean of seconds."""
        return self.prelude + depth * self.loop + self.coda


def prompt_rows(trace: Trace) -> list[int]:
    """By launch, how many of its rows are prompts.

    A row decodes from its first prelude after a coda on; a prompt in pieces goes from piece to piece of one stage.
    """
    through: set[int] = set()
    decoding: set[int] = set()
    counts = []
    for launch in trace:
        if launch.stage == "prelude":
            decoding.update(key for key in launch.rows if key in through)
        elif launch.stage == "coda":
            through.update(launch.rows)
        counts.append(sum(key not in decoding for key in launch.rows))
    return counts


def new_tokens(trace: Trace) -> list[int]:
    """By launch, how many tokens came out: those of a coda after which the row does not go through another piece."""
    after: dict[int, str] = {}
    counts = []
    for launch in reversed(trace):
        counts.append(sum(after.get(key) != "coda" for key in launch.rows) if launch.stage == "coda" else 0)
        after.update(dict.fromkeys(launch.rows, launch.stage))
    return counts[::-1]


def decode_time(trace: Trace, width: int) -> DecodeTime | None:
    """Seconds per row of the decode launches; None where a stage has none.

    Args:
        width: W, the places.
    """
    rows, seconds = Counter(), Counter()
    for launch, prompts in zip(trace, prompt_rows(trace), strict=True):
        if not prompts and _in_flight(launch) == width:
            rows[launch.stage] += launch.width
            seconds[launch.stage] += launch.duration
    if any(rows[stage] == 0 for stage in STAGES):
        return None
    return DecodeTime(**{stage: seconds[stage] / rows[stage] for stage in STAGES})


def prefill_seconds(trace: Trace, decode: DecodeTime) -> float:
    """Seconds of the launches with prompts in them, less those of the rows that decode there; never negative."""
    extra = 0.0
    for launch, prompts in zip(trace, prompt_rows(trace), strict=True):
        if prompts:
            extra += launch.duration - (launch.width - prompts) * getattr(decode, launch.stage)
    return max(0.0, extra)


@dataclass(frozen=True)
class Steady:
    """The steady state of a run.

    Attributes:
        seconds: its length.
        tokens: tokens that came out in it.
        occupancy: mean width of its loop launches as a share of W.
    """

    seconds: float
    tokens: int
    occupancy: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def steady_state(trace: Trace, width: int) -> Steady | None:
    """The steady state, or None where the last request is admitted before 2 W have finished.

    Args:
        width: W, the places.
    """
    admitted: dict[int, int] = {}
    ended: dict[int, int] = {}
    for index, launch in enumerate(trace):
        for key in launch.rows:
            admitted.setdefault(key, index)
            ended[key] = index
    finishes = sorted(ended.values())
    if len(finishes) < 2 * width:
        return None
    first, last = finishes[2 * width - 1] + 1, max(admitted.values())
    inside = trace[first:last]
    loops = [launch.width for launch in inside if launch.stage == "loop"]
    if not loops:
        return None
    tokens = sum(new_tokens(trace)[first:last])
    return Steady(trace[last].start - trace[first].start, tokens, sum(loops) / len(loops) / width)


def _in_flight(launch: TracedLaunch) -> int:
    return launch.entering + launch.looping + launch.left
