"""Combinations of options that contain every pair of values, far fewer than the product."""

import itertools
import random
from typing import Any


def pairwise(options: dict[str, list[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Cases such that any two values of any two options stand together in one of them (greedy, deterministic)."""
    generator = random.Random(seed)
    names = list(options)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(options[a]))
        for j in range(len(options[b]))
    }
    cases = []
    while missing:
        best, best_count = None, -1
        for _ in range(60):
            start = generator.choice(sorted(missing))
            case = {name: generator.randrange(len(options[name])) for name in names} | dict(start)
            count = sum(pair in missing for pair in _pairs(names, case))
            if count > best_count:
                best, best_count = case, count
        missing -= set(_pairs(names, best))
        cases.append({name: options[name][index] for name, index in best.items()})
    return cases


def _pairs(names, case):
    return [((a, case[a]), (b, case[b])) for a, b in itertools.combinations(names, 2)]
