import random
from collections import Counter
from itertools import pairwise

import pytest

from hf_cdb.training.tasks import SPLITS, TASKS, Example, as_dataset, carries, examples, heuristic_scores, split_of


def answer_of(prompt):
    """The answer, from the words of the description alone."""
    name, _, body = prompt.removesuffix("=").partition(":")
    if name == "copy":
        return body
    if name == "reverse":
        return "".join(reversed(body))
    if name == "sort":
        return "".join(letter * body.count(letter) for letter in "ABCDEFGHIJKLMNOP")
    if name == "add":
        return str(eval(body))
    if name == "parity":
        return "".join(str(sum(body[: k + 1].count(odd) for odd in "13579") % 2) for k in range(len(body)))
    if name == "chain":
        return "".join(str(eval(body[: k + 1]) % 10) for k in range(2, len(body), 2))
    pairs, query = body.split(":")
    letter, way = query[0], ""
    for _ in range(int(query[1])):
        (letter,) = (pair[1] for pair in pairs.split(",") if pair[0] == letter)
        way += letter
    return way


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [
        ("copy:PEAK=", "PEAK"),
        ("reverse:ABCDD=", "DDCBA"),
        ("sort:DBAB=", "ABBD"),
        ("add:95+17=", "112"),
        ("parity:0712=", "0100"),
        ("parity:50001=", "11110"),
        ("chain:7+5-3=", "29"),
        ("chain:2-5-9=", "78"),
        ("hops:AC,EB,CD,BA,DE:C3=", "DEB"),
    ],
)
def test_the_truth_of_these_tests(prompt, answer):
    assert answer_of(prompt) == answer


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_right(name):
    rng = random.Random(1)
    for _ in range(300):
        example = TASKS[name].draw(rng)
        assert example.task == name
        assert example.prompt.startswith(f"{name}:")
        assert example.answer == answer_of(example.prompt)
        assert example.level in TASKS[name].levels


def test_carries():
    assert [carries(12, 34), carries(15, 27), carries(95, 17), carries(999, 11), carries(5, 0)] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("copy", lambda body: len(body)),
        ("reverse", lambda body: len(body)),
        ("sort", lambda body: len(body)),
        ("add", lambda body: carries(*map(int, body.split("+")))),
        ("parity", lambda body: len(body)),
        ("chain", lambda body: body.count("+") + body.count("-")),
        ("hops", lambda body: int(body[-1])),
    ],
)
def test_examples_are_different_balanced_and_of_their_split(name, level):
    count = 512
    drawn = examples(name, "test", count)
    assert len({example.prompt for example in drawn}) == count
    assert {split_of(example.prompt) for example in drawn} == {"test"}
    levels = Counter(example.level for example in drawn)
    assert set(levels) == set(TASKS[name].levels)
    assert max(levels.values()) - min(levels.values()) <= 1
    assert all(example.level == level(example.prompt[len(name) + 1 : -1]) for example in drawn)
    # In random order: levels do not come in blocks.
    assert sum(a.level != b.level for a, b in pairwise(drawn)) > count / 3


@pytest.mark.parametrize("name", TASKS)
def test_splits_do_not_overlap(name):
    prompts = {split: {example.prompt for example in examples(name, split, 512, seed=3)} for split in SPLITS}
    assert not prompts["train"] & prompts["validation"]
    assert not prompts["train"] & prompts["test"]
    assert not prompts["validation"] & prompts["test"]


def test_shares_of_the_splits():
    rng = random.Random(0)
    counts = Counter(split_of(TASKS["copy"].draw(rng).prompt) for _ in range(5000))
    assert counts["validation"] == pytest.approx(500, abs=100)
    assert counts["test"] == pytest.approx(500, abs=100)


def test_a_seed_means_the_same_for_ever():
    assert [example.prompt for example in examples("hops", "test", 3, seed=5)] == [
        "hops:KH,HL,GI,LG,IK:H2=",
        "hops:CI,MC,IO,FM,OF:O3=",
        "hops:NM,MD,AN,OA,DO:D4=",
    ]
    assert examples("hops", "test", 3, seed=6) != examples("hops", "test", 3, seed=5)


def test_hops_meet_no_letter_twice_and_do_not_leak():
    rng = random.Random(2)
    for _ in range(300):
        example = TASKS["hops"].draw(rng)
        pairs, query = example.prompt.removeprefix("hops:").removesuffix("=").split(":")
        sources, targets = zip(*pairs.split(","), strict=True)
        assert sorted(sources) == sorted(targets)
        assert len(set(sources)) == len(sources)
        # Every letter but the start occurs twice in the prompt.
        assert {pairs.count(letter) for letter in sources} == {2}
        assert len({query[0], *example.answer}) == 1 + len(example.answer)
    # No place in the list of pairs holds the last letter more often than another.
    drawn = [x for x in examples("hops", "train", 2000) if x.prompt.count(",") == 4]
    places = Counter(
        next(place for place, pair in enumerate(x.prompt[5:19].split(",")) if pair[1] == x.answer[-1]) for x in drawn
    )
    assert max(places.values()) / len(drawn) == pytest.approx(1 / 5, abs=0.05)


def test_heuristics_by_hand():
    def score(task, train, test):
        train = [Example(task, prompt, answer_of(prompt), 0) for prompt in train]
        return heuristic_scores(train, [Example(task, prompt, answer_of(prompt), 0) for prompt in test])[task]

    assert score("copy", ["copy:AB=", "copy:CD=", "copy:CD="], ["copy:CD=", "copy:AB="]) == {"most frequent": 0.5}
    assert score("reverse", [], ["reverse:ABBA=", "reverse:ABAB="]) == {"the input": 0.5}
    assert score("sort", [], ["sort:AABC=", "sort:BAAA="]) == {"the input": 0.5}
    assert score("add", [], ["add:12+300=", "add:15+15=", "add:50+50="]) == {"without carries": 1 / 3}
    assert score("parity", [], ["parity:12=", "parity:2041=", "parity:22=", "parity:11="]) == {"each digit alone": 0.5}
    chain = score("chain", [], ["chain:5+2-1=", "chain:0+2-5=", "chain:8-8-3="])
    assert chain == {"each operation alone": 1 / 3}
    hops = score("hops", [], ["hops:AB,BC,CD,DA:B3=", "hops:AB,CD,BC,DA:A2="])
    assert hops == {"pairs in their order": 0.5}


def test_no_heuristic_solves_a_task():
    for name in TASKS:
        train, test = examples(name, "train", 2000), examples(name, "test", 512)
        assert max(heuristic_scores(train, test)[name].values()) < 0.3


def test_dataset():
    data = as_dataset("validation", 3, seed=1)
    assert data.column_names == ["task", "level", "prompt", "answer"]
    assert data["task"] == [name for name in TASKS for _ in range(3)]
    row, example = data[0], examples("copy", "validation", 3, seed=1)[0]
    assert row == {"task": "copy", "level": example.level, "prompt": example.prompt, "answer": example.answer}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("sorting", "test", 3), ["'sorting'", "sort"]),
        (("sort", "dev", 3), ["'dev'", "validation"]),
        (("sort", "test", 0), ["count=0"]),
        (("sort", "test", 2.0), ["count=2.0"]),
        (("chain", "test", 2400), ["count=2400", "'chain'", "'test'", "level 2", "fewer"]),
    ],
)
def test_examples_that_cannot_be_drawn(arguments, words):
    with pytest.raises(ValueError, match=r"count|unknown") as caught:
        examples(*arguments)
    assert all(word in str(caught.value) for word in words), caught.value
