"""Guesses at the tasks that need no depth: what a model has to beat before its score means anything.

All take the training examples of the task and a prompt, and return an answer.
"""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tasks import Example

__all__ = [
    "last_operation",
    "most_frequent",
    "one_hop",
    "parity_of_last",
    "start_letter",
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


def parity_of_last(train: "Sequence[Example]", prompt: str) -> str:
    """Whether the last digit is odd."""
    return ("even", "odd")[int(_body(prompt)[-1]) % 2]


def last_operation(train: "Sequence[Example]", prompt: str) -> str:
    """The last operation alone, on the digit before it."""
    left, sign, right = _body(prompt)[-3:]
    return str((int(left) + (int(right) if sign == "+" else -int(right))) % 10)


def start_letter(train: "Sequence[Example]", prompt: str) -> str:
    """No hop."""
    return _body(prompt)[-2]


def one_hop(train: "Sequence[Example]", prompt: str) -> str:
    """One hop, whatever number was asked for."""
    pairs, _, query = _body(prompt).partition(":")
    return dict(pairs.split(","))[query[0]]
