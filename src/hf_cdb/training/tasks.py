"""Exact-match tasks whose difficulty is depth: one line each, a prompt that ends in "=" and the answer after it.

A prompt names its task ("sort:DBCA="), so that one model serves all. Letters are capitals, which the tokenizer of this
package never merges: difficulty is the number of steps, not the reading of tokens. A prompt belongs to one split by a
hash of its text, so splits are disjoint whatever is drawn.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import TYPE_CHECKING

from . import heuristics

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["SPLITS", "TASKS", "Example", "Task", "as_dataset", "examples", "heuristic_scores", "split_of"]

SPLITS = ("train", "validation", "test")
LETTERS = ascii_uppercase[:16]
COPY_LENGTHS = range(4, 11)
REVERSE_LENGTHS = range(4, 9)
SORT_LENGTHS = range(4, 9)
ADD_DIGITS = (2, 3)
ADD_CARRIES = range(4)
PARITY_LENGTHS = range(4, 9)
CHAIN_OPERATORS = range(2, 6)
HOPS = range(2, 5)
HOP_LETTERS = (5, 6)

# Draws in vain after which a split is taken to hold no more of a level. To meet the last prompt of a level of n takes n
# draws in the mean; the smallest, chains of two operators, has 4,000.
_PATIENCE = 40_000


@dataclass(frozen=True)
class Example:
    """One line of a task.

    Attributes:
        task: name of the task.
        prompt: text up to and including "=".
        answer: text that is to follow, without the end of sequence.
        level: difficulty on the task's own scale, see `Task.level`.
    """

    task: str
    prompt: str
    answer: str
    level: int


Heuristic = Callable[[Sequence[Example], str], str]


@dataclass(frozen=True)
class Task:
    """A kind of line.

    Attributes:
        name: what its prompts begin with, before ":".
        description: one sentence.
        level: what the difficulty counts.
        levels: its values, drawn equally often.
        compose: `(random numbers, level) -> (body of the prompt, answer)`.
        heuristics: by name, guesses that need no depth: `(training examples, prompt) -> answer`.
    """

    name: str
    description: str
    level: str
    levels: Sequence[int]
    compose: Callable[[random.Random, int], tuple[str, str]] = field(repr=False)
    heuristics: Mapping[str, Heuristic] = field(repr=False)

    def draw(self, rng: random.Random, level: int | None = None) -> Example:
        """A random example, of any split; of a random level unless one is given."""
        level = rng.choice(self.levels) if level is None else level
        body, answer = self.compose(rng, level)
        return Example(self.name, f"{self.name}:{body}=", answer, level)


def _letters(rng: random.Random, length: int) -> str:
    return "".join(rng.choices(LETTERS, k=length))


def _copy(rng: random.Random, level: int) -> tuple[str, str]:
    word = _letters(rng, level)
    return word, word


def _reverse(rng: random.Random, level: int) -> tuple[str, str]:
    word = _letters(rng, level)
    return word, word[::-1]


def _sort(rng: random.Random, level: int) -> tuple[str, str]:
    word = _letters(rng, level)
    return word, "".join(sorted(word))


def carries(left: int, right: int) -> int:
    """Number of columns of `left + right` that carry."""
    count = carry = 0
    while left or right:
        carry = (left % 10 + right % 10 + carry) // 10
        count, left, right = count + carry, left // 10, right // 10
    return count


def _add(rng: random.Random, level: int) -> tuple[str, str]:
    sizes = [(m, n) for m in ADD_DIGITS for n in ADD_DIGITS if max(m, n) >= level]
    m, n = rng.choice(sizes)
    while True:
        left, right = rng.randrange(10 ** (m - 1), 10**m), rng.randrange(10 ** (n - 1), 10**n)
        if carries(left, right) == level:
            return f"{left}+{right}", str(left + right)


def _parity(rng: random.Random, level: int) -> tuple[str, str]:
    digits = rng.choices("0123456789", k=level)
    sums = itertools.accumulate(map(int, digits))
    return "".join(digits), "".join(str(value % 2) for value in sums)


def _chain(rng: random.Random, level: int) -> tuple[str, str]:
    value = rng.randrange(10)
    body, answer = str(value), ""
    for _ in range(level):
        sign, digit = rng.choice("+-"), rng.randrange(10)
        value += digit if sign == "+" else -digit
        body += f"{sign}{digit}"
        answer += str(value % 10)
    return body, answer


def _hops(rng: random.Random, level: int) -> tuple[str, str]:
    # One cycle through all letters: each is a source once and a target once, and no way of fewer hops than letters
    # meets a letter twice.
    cycle = rng.sample(LETTERS, rng.choice(HOP_LETTERS))
    pairs = [source + target for source, target in zip(cycle, cycle[1:] + cycle[:1], strict=True)]
    rng.shuffle(pairs)
    return f"{','.join(pairs)}:{cycle[0]}{level}", "".join(cycle[1 : level + 1])


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "copy",
            "Repeat the letters.",
            "letters",
            COPY_LENGTHS,
            _copy,
            {"most frequent": heuristics.most_frequent},
        ),
        Task(
            "reverse",
            "Write the letters backwards.",
            "letters",
            REVERSE_LENGTHS,
            _reverse,
            {"the input": heuristics.the_input},
        ),
        Task(
            "sort",
            "Write the letters in alphabetical order, repeated ones as often as they occur.",
            "letters",
            SORT_LENGTHS,
            _sort,
            {"the input": heuristics.the_input},
        ),
        Task(
            "add",
            "Add two numbers of two or three digits.",
            "carries",
            ADD_CARRIES,
            _add,
            {"without carries": heuristics.without_carries},
        ),
        Task(
            "parity",
            "Say after every digit whether the sum so far is odd, 1, or even, 0.",
            "digits",
            PARITY_LENGTHS,
            _parity,
            {"each digit alone": heuristics.parity_of_each},
        ),
        Task(
            "chain",
            "Add and subtract digits from left to right, modulo 10, and write every result.",
            "operators",
            CHAIN_OPERATORS,
            _chain,
            {"each operation alone": heuristics.each_operation},
        ),
        Task(
            "hops",
            "Follow a map of letters, given as pairs of letter and successor, and write the letters on the way.",
            "hops",
            HOPS,
            _hops,
            {"pairs in their order": heuristics.pairs_in_order},
        ),
    )
}


def split_of(prompt: str) -> str:
    """Split that a prompt belongs to, the same in every process: 80 % "train", 10 % "validation", 10 % "test"."""
    bucket = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 10
    return {0: "validation", 1: "test"}.get(bucket, "train")


def examples(task: str, split: str, count: int, seed: int = 0) -> list[Example]:
    """Different examples of one split, in random order.

    Levels occur equally often, within one where `count` cannot be divided.

    Args:
        task: a name in `TASKS`.
        split: "train", "validation" or "test".
        count: examples to draw, at least 1.
        seed: the same seed gives the same examples, in every process.

    Raises:
        ValueError: an unknown task or split, or more examples than the split holds.
    """
    if task not in TASKS:
        raise ValueError(f"task={task!r} is unknown: choose one of {', '.join(TASKS)}.")
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown: choose one of {', '.join(SPLITS)}.")
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"count={count!r}: choose an integer of at least 1.")
    kind = TASKS[task]
    rng = random.Random(f"{task}/{split}/{seed}")
    wanted = _quotas(kind, count, rng)
    found: dict[str, Example] = {}
    for level in kind.levels:
        idle = 0
        while wanted[level]:
            example = kind.draw(rng, level)
            idle += 1
            if split_of(example.prompt) == split and example.prompt not in found:
                found[example.prompt] = example
                wanted[level] -= 1
                idle = 0
            elif idle > _PATIENCE:
                raise ValueError(
                    f"count={count} of {task!r} in split {split!r}: even shares need {wanted[level]} more of level "
                    f"{level}, "
                    "but there seem to be no others. Ask for fewer, or extend the task's sizes."
                )
    drawn = list(found.values())
    rng.shuffle(drawn)
    return drawn


def _quotas(task: Task, count: int, rng: random.Random) -> dict[int, int]:
    """How many examples of every level."""
    each, rest = divmod(count, len(task.levels))
    quotas = dict.fromkeys(task.levels, each)
    for level in rng.sample(list(task.levels), rest):  # at random, so that what cannot be divided favours none
        quotas[level] += 1
    return quotas


def as_dataset(split: str, count: int, seed: int = 0) -> "Dataset":
    """`count` examples of every task as a `datasets.Dataset` with the columns task, level, prompt and answer.

    Raises:
        ValueError: as `examples`.
    """
    from datasets import Dataset  # takes seconds to import, and nothing else here needs it

    rows = [example for task in TASKS for example in examples(task, split, count, seed)]
    columns = ("task", "level", "prompt", "answer")
    return Dataset.from_dict({column: [getattr(row, column) for row in rows] for column in columns})


def heuristic_scores(train: Sequence[Example], test: Sequence[Example]) -> dict[str, dict[str, float]]:
    """Share of `test` that each heuristic of its task answers: task -> heuristic -> share.

    Args:
        train: what heuristics may learn from, of the same tasks.
        test: examples to answer.
    """
    scores: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(example.task for example in test):
        known = [example for example in train if example.task == name]
        asked = [example for example in test if example.task == name]
        scores[name] = {
            label: sum(guess(known, example.prompt) == example.answer for example in asked) / len(asked)
            for label, guess in TASKS[name].heuristics.items()
        }
    return scores
