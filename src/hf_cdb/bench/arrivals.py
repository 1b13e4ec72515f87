"""When requests come: Poisson, in bursts, or as a file recorded it."""

from pathlib import Path

from .json_file import read_json
from .serving import draw_arrivals

__all__ = ["check_arrivals", "make_arrivals"]


def make_arrivals(spec: str, requests: int, rate: float, seed: int) -> list[float]:
    """Seconds from the start, in order. With one seed the same at every rate, but for the scale.

    Args:
        spec: `poisson`; `burst:K`, where groups of K come at once and the groups are Poisson; or a file, a JSON list of
            seconds, of which the first `requests` are stretched to the rate.
        rate: requests a second in the mean.

    Raises:
        ValueError: none of these, or a file that holds something else, or too little.
        FileNotFoundError: no such file.
    """
    size, recorded = check_arrivals(spec)
    if recorded is None:
        groups = draw_arrivals(-(-requests // size), rate / size, seed)
        return [groups[index // size] for index in range(requests)]
    if len(recorded) < requests:
        raise ValueError(
            f"arrivals={spec!r} holds {len(recorded)} times, but there are {requests} requests. Ask for no more by "
            "--requests."
        )
    times = [time - recorded[0] for time in recorded[:requests]]
    if times[-1] == 0:
        return times
    stretch = requests / rate / times[-1]
    return [time * stretch for time in times]


def check_arrivals(spec: str) -> tuple[int, list[float] | None]:
    """How many come at once, and the recorded times where `spec` is a file.

    Raises:
        ValueError, FileNotFoundError: as `make_arrivals`.
    """
    if spec == "poisson":
        return 1, None
    if spec.startswith("burst:"):
        size = spec.removeprefix("burst:")
        if not size.isdecimal() or int(size) < 1:
            raise ValueError(f"arrivals={spec!r}: give the requests of a burst, at least 1, as in burst:8.")
        return int(size), None
    times = read_json(Path(spec), "arrivals")
    good = isinstance(times, list) and len(times) > 0 and all(type(time) in (int, float) for time in times)
    if not good or any(not 0 <= time < float("inf") for time in times) or times != sorted(times):
        raise ValueError(f"arrivals={spec!r} does not hold a JSON list of seconds in order.")
    return 1, times
