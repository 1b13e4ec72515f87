"""A processor for every row: copies as `copy.deepcopy` makes them, for rows in flight only, and large tables shared."""

import copy
import functools
import threading
import types
import weakref

import numpy
import psutil
import pytest
import torch
from torch import nn
from transformers import LogitsProcessor, StoppingCriteria
from transformers.utils import logging

from hf_cdb.noise import Noise
from hf_cdb.row_copies import Copier

from .test_generation import EARLY, IDS, MASK
from .tiny import left_pad, prompts


class Holder:
    def __init__(self, **things):
        vars(self).update(things)

    def look(self, *_):
        return vars(self)


class Counted(Holder):
    """Copied in a way of its own."""

    def __deepcopy__(self, memo):
        return Counted(copies="own")


class Colour(Holder):
    __slots__ = ("slot",)


def of_closure():
    seen = []
    return lambda: seen


def zoo() -> Holder:
    shared = [1, [2]]
    thing = Holder(
        list=shared,
        again=shared,
        table={(1, 2): [3], "a" * 100: {4}},
        tuples=((1, 2), (1, [2])),
        array=numpy.arange(4),
        objects=numpy.array([[1], None, "a"], dtype=object),
        tensor=torch.arange(6.0).reshape(2, 3).T,
        bools=torch.tensor([True, False]),
        empty=torch.empty(0),
        none=torch.empty(0),
        function=of_closure(),
        module=copy,
        cls=Colour,
        generator=torch.Generator().manual_seed(3),
        partial=functools.partial(sorted, reverse=True),
        model=nn.Linear(2, 2),
    )
    thing.itself, thing.bound = thing, thing.look
    return thing


def differences(one, other, path="thing", seen=None):
    """Where two graphs of objects differ in type, value or links; a list of paths."""
    seen = {} if seen is None else seen
    if isinstance(one, int | float | str | bytes):
        return [] if one == other else [path]
    if id(one) in seen:
        return [] if seen[id(one)][1] is other else [f"{path}: another link"]
    seen[id(one)] = one, other  # kept, so that an id stands for one object
    if type(one) is not type(other):
        return [path]
    if isinstance(one, nn.Module | type | types.FunctionType | types.ModuleType):
        return [] if one is other else [path]
    if isinstance(one, functools.partial):
        return [] if (one.func, one.args, one.keywords) == (other.func, other.args, other.keywords) else [path]
    if isinstance(one, torch.Generator):
        return [] if torch.equal(one.get_state(), other.get_state()) else [path]
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) and one.stride() == other.stride() else [path]
    if isinstance(one, numpy.ndarray):
        return differences(one.tolist(), other.tolist(), path, seen)
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return [found for left, right in pairs for found in differences(left, right, f"{path}[{left[0]!r:.20}]", seen)]
    if isinstance(one, list | tuple):
        pairs = enumerate(zip(one, other, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f"{path}[{index}]", seen)]
    if isinstance(one, types.MethodType):
        return differences(one.__self__, other.__self__, f"{path}.__self__", seen)
    if hasattr(one, "__dict__") and vars(one):
        return differences(vars(one), vars(other), path, seen)
    return [] if one is other or one == other else [path]


@pytest.mark.parametrize("change", [lambda thing: None, lambda thing: vars(thing).update(own=Counted(copies="none"))])
def test_copies_are_deep_copies(change):
    """In values, in what is shared, and in links within; by pickle, and where a part has a `__deepcopy__`."""
    thing = zoo()
    change(thing)
    deep = copy.deepcopy(thing, {id(thing.model): thing.model, id(copy): copy})
    copier = Copier(thing)
    assert (copier.nbytes is None) == hasattr(thing, "own")
    thing.list.append(5)  # copies are of the object as it was
    first, second = copier(), copier()
    for one in (first, second):
        assert differences(deep, one) == []
        assert one.list is one.again is not thing.list
        assert one.bound.__self__ is one.itself is one
    first.list.append(6)
    first.table[1, 2].append(7)
    first.array[0] = 8
    first.tensor[0] = 9
    first.tensor.numpy()[1] = 10
    assert differences(deep, second) == []
    assert differences(deep, copier()) == []
    assert thing.tensor[:2].tolist() == [[0, 3], [1, 4]]


def test_tensors_that_share_memory_still_do_in_a_copy():
    table = torch.zeros(4)
    own = Copier(Holder(table=table, part=table[:2]))()
    own.part += 1
    assert own.table.tolist() == [1, 1, 0, 0]
    assert table.tolist() == [0] * 4
    wide = Copier(Holder(wide=torch.zeros(1).expand(3)))()
    wide.wide[:1] += 1
    assert wide.wide.tolist() == [1] * 3


def test_a_method_is_found_by_its_object_not_its_name():
    class Renamed(Holder):
        pass

    Renamed.other = Holder.look
    own = Copier(Renamed(a=[1]).other)()
    own.__self__.a.append(2)
    assert own() == {"a": [1, 2]}


def test_what_cannot_be_copied_raises_as_a_deep_copy_does():
    with pytest.raises(TypeError, match="lock"):
        Copier(Holder(lock=threading.Lock()))
    function = of_closure()
    assert Copier(function)() is function


def test_a_large_tensor_is_not_copied_until_it_is_written():
    table = torch.from_numpy(numpy.ones((1000, 2000), dtype=numpy.float32))  # 8 MB
    copier = Copier(Holder(table=table))
    process = psutil.Process()
    before = process.memory_info().rss
    copies = [copier() for _ in range(60)]
    assert sum(float(one.table[3, 5:9].sum()) for one in copies) == 60 * 4
    assert process.memory_info().rss - before < 60 * 2**20  # of 480
    copies[0].table[3] = 0
    assert copies[1].table.sum() == table.sum() == 2_000_000


class Watched:
    """Counts how many of its copies live."""

    def __init__(self, answer):
        self.answer, self.alive, self.most = answer, _Alive(), []

    def __call__(self, ids, scores):
        self.alive.look(self)
        return self.answer(ids, scores)


class _Alive:
    def __init__(self):
        self.those, self.most = weakref.WeakSet(), 0

    def __deepcopy__(self, memo):
        return self

    def look(self, one):
        self.those.add(one)
        self.most = max(self.most, len(self.those))


class WatchedProcessor(Watched, LogitsProcessor):
    pass


class WatchedCriterion(Watched, StoppingCriteria):
    pass


def test_copies_live_as_long_as_their_rows(ouro, monkeypatch):
    """12 rows, of which two are in flight: no more copies than that at a time, and no noise for rows that are gone."""
    released = []
    release = Noise.release
    monkeypatch.setattr(Noise, "release", lambda self, row: (released.append(row), release(self, row)))
    processor = WatchedProcessor(lambda ids, scores: scores)
    criterion = WatchedCriterion(lambda ids, scores: ids[:, -1] % 5 == 0)
    ids, mask = left_pad(prompts(*range(1, 13)))
    options = {"do_sample": True, "max_new_tokens": 5}
    ouro.generate(
        ids,
        attention_mask=mask,
        cdb={**EARLY, "max_num_seqs": 2},
        logits_processor=[processor],
        stopping_criteria=[criterion],
        **options,
    )
    assert 1 <= processor.alive.most <= 2
    assert 1 <= criterion.alive.most <= 2
    assert sorted(released) == list(range(12))


def test_a_large_table_is_told_of(ouro, monkeypatch):
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.row_copies"), "warning_once", said.append)

    class Table(LogitsProcessor):
        def __init__(self, table):
            self.table = table

        def __call__(self, ids, scores):
            return scores

    def run(table):
        said.clear()
        options = {"max_new_tokens": 1, "do_sample": False, "logits_processor": [Table(table)]}
        ouro.generate(IDS, attention_mask=MASK, cdb=EARLY, **options)
        return said

    assert run({state: [state] for state in range(20)}) == []
    assert run(torch.zeros(400, 400)) == []
    (warning,) = run({state: [state] * 3 for state in range(30_000)})
    assert "logits_processor Table is copied for every row" in warning
    assert "__deepcopy__" in warning
