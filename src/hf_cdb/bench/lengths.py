"""Lengths of prompts and outputs: fixed, drawn, or read from a file."""

import math
from pathlib import Path

import numpy

from .json_file import read_json

__all__ = ["draw_lengths", "read_lengths"]

_LONGEST = 10_000_000  # tokens: beyond every model's context


def draw_lengths(spec: str, count: int, rng: numpy.random.Generator) -> list[int]:
    """Lengths of at least 1.

    Args:
        spec: `64` (all the same), `16-64` (uniform, both ends included), or `lognormal:MEDIAN:SIGMA:MOST`, where sigma
            is that of the logarithm and nothing is longer than MOST.
        count: how many.

    Raises:
        ValueError: none of these.
    """
    try:
        if spec.startswith("lognormal:"):
            median, sigma, most = (float(part) for part in spec.split(":")[1:])
            if not (1 <= median <= most <= _LONGEST and 0 < sigma < math.inf):
                raise ValueError
            drawn = rng.lognormal(math.log(median), sigma, size=count)
            return numpy.clip(numpy.rint(drawn), 1, most).astype(int).tolist()
        first, last = (int(part) for part in (spec.split("-") if "-" in spec else (spec, spec)))
        if not 1 <= first <= last <= _LONGEST:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"length {spec!r}: give a number of tokens such as 64, a range such as 16-64, or "
            f"lognormal:MEDIAN:SIGMA:MOST, such as lognormal:128:0.8:1024; at most {_LONGEST}."
        ) from None
    return rng.integers(first, last, size=count, endpoint=True).tolist()


def read_lengths(path: Path) -> tuple[list[int], list[int]]:
    """Lengths of prompts and of outputs from a JSON list of pairs `[input, output]`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: something else in it.
    """
    pairs = read_json(path, "lengths")
    good = isinstance(pairs, list) and len(pairs) > 0
    if not good or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int and n >= 1 for n in pair) for pair in pairs
    ):
        raise ValueError(
            f"lengths={str(path)!r} does not hold a JSON list of pairs [input, output] of positive integers."
        )
    inputs, outputs = zip(*pairs, strict=True)
    return list(inputs), list(outputs)
