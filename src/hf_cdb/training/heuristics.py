"""Guesses at the tasks that need no depth: what a model has to beat before its score means anything.

All take the training examples of the task and a prompt, and return an answer.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tasks import Example

__all__ = [
    "each_operation",
    "most_frequent",
    "pairs_in_order",
    "parity_of_each",
    "the_input",
    "without_carries",
]


def _body(prompt: str) -> str:
    """What stands between the task's name and "="."""
    return prompt.partition(":")[2].removesuffix("=")


def most_frequent(train: "Sequence[Example]", prompt: str) -> str:
    """The answer that the training examples have most often; of equals, the first in the alphabet."""
    counts = Counter(example.answer for example in train)
    return min(counts, key=lambda answer: (-counts[answer], answer))


def the_input(train: "Sequence[Example]", prompt: str) -> str:
    """The letters as they stand."""
    return _body(prompt)


def without_carries(train: "Sequence[Example]", prompt: str) -> str:
    """Every column by itself, modulo 10."""
    left, right = _body(prompt).split("+")
    width = max(len(left), len(right))
    columns = zip(left.zfill(width), right.zfill(width), strict=True)
    return "".join(str((int(a) + int(b)) % 10) for a, b in columns)


def parity_of_each(train: "Sequence[Example]", prompt: str) -> str:
    """Whether each digit is odd, whatever came before it."""
    return "".join(str(int(digit) % 2) for digit in _body(prompt))


def each_operation(train: "Sequence[Example]", prompt: str) -> str:
    """Each operation on the digit that stands before it."""
    body = _body(prompt)
    pairs = zip(body[:-2:2], body[1::2], body[2::2], strict=True)
    return "".join(str((int(a) + (int(b) if sign == "+" else -int(b))) % 10) for a, sign, b in pairs)


def pairs_in_order(train: "Sequence[Example]", prompt: str) -> str:
    """The successor of the first letter, then those of the pairs that stand behind it, from the front again."""
    pairs, _, query = _body(prompt).partition(":")
    sources, targets = zip(*pairs.split(","), strict=True)
    place = sources.index(query[0])
    return "".join(targets[(place + hop) % len(targets)] for hop in range(int(query[1])))
