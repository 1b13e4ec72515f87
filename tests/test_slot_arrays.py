"""The arrays hold what a plain table of positions and loops holds, whatever order requests append and leave in."""

import mmap
import random

import numpy
import psutil
import pytest
import torch

from hf_cdb.lazy_pool import LazyPool
from hf_cdb.pool import Pool
from hf_cdb.slot_arrays import SlotArrays
from hf_cdb.spans import Spans

LOOPS, HEADS, SIZE, LAYERS = 4, 2, 3, 2
KINDS = {"lazy": LazyPool, "growing": Pool}


def make(kind, loops=LOOPS, size=SIZE):
    return SlotArrays(KINDS[kind](LAYERS, HEADS * size, torch.float64, torch.device("cpu")), loops, HEADS)


class Table:
    """What every position of a request has, and where it left: the truth, in a dict."""

    def __init__(self, arrays, name, capacity, short):
        self.arrays, self.name, self.capacity = arrays, name, capacity
        self.number, self.depths, self.loop = arrays.add(capacity, short), [], 0
        self.prompt, self.copied = 0, []  # positions of the prompt; whose the first of them are

    def value(self, position, loop):
        return 1e6 * (self.copied[position] if position < len(self.copied) else self.name) + 1e2 * position + loop

    def copy(self, source, count):
        """Begin with what another request has."""
        self.arrays.copy_front(source.number, self.number, count)
        self.copied = [*source.copied, *[source.name] * count][:count]
        self.depths = [LOOPS] * count

    def keep(self, count):
        """End, but for the beginning of the prompt."""
        self.arrays.keep_front(self.number, count)
        self.depths, self.loop, self.prompt = [LOOPS] * count, 0, count

    def check(self, loop, end):
        """What a query at `loop` reads: one entry for each of `end` positions, of the loop or of an earlier exit."""
        arrays, number = self.arrays, self.number
        early = int(arrays.early[number, loop])
        read, recorded = [], []
        for column, count in ((LOOPS, early), (loop - 1, end - early)):
            first = arrays.first[number, column]
            recorded += arrays.positions[first : first + count].tolist()
            if count:
                read.append(arrays.array(number, column)[:, :, :count])
        entries = torch.cat(read, dim=2)
        assert sorted(recorded) == list(range(end))
        depths = self.depths + [LOOPS] * (end - len(self.depths))
        for index, position in enumerate(recorded):
            expected = self.value(position, min(loop, depths[position]))
            assert (entries[:, :, index] == expected).all(), (position, loop)
        slot = recorded[early:]
        assert slot == sorted(slot)  # a slot stays in order


def run(arrays, tables, starts, ends, loops):
    """A launch: its entries are stored where the arrays say."""
    numbers = numpy.array([table.number for table in tables])
    spans = Spans(numbers, *(numpy.array(x) for x in (starts, ends, loops)))
    arrays.extend(numbers, spans)
    arrays.extend(numbers, spans)  # again, as after a graph that failed
    for table, start, end, loop in zip(tables, starts, ends, loops, strict=True):
        array = arrays.array(table.number, loop - 1)
        assert array.shape[2] == end - arrays.early[table.number, loop]
        for position in range(start, end):
            array[:, :, position - int(arrays.early[table.number, loop])] = table.value(position, loop)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_random_requests_against_a_plain_table(kind, seed):
    """Short and long requests at any loops, whose tokens leave alone and together; some end, others come, and begin
    with what is there of others or was kept of them."""
    rng, arrays, alive, kept, names = random.Random(seed), make(kind), [], [], iter(range(1, 1000))
    for _ in range(120):
        if len(alive) < 5 and rng.random() < 0.4:
            table = Table(arrays, next(names), rng.randint(4, 40), rng.random() < 0.5)
            table.prompt = prompt = rng.randint(2, table.capacity - 2)
            chunk = rng.randint(1, 9)
            if (alive or kept) and rng.random() < 0.6:
                source = rng.choice([*alive, *kept])
                table.copy(source, rng.randint(1, min(prompt - 1, source.prompt)))
            copied = len(table.copied)
            for loop in range(1, LOOPS + 1):
                for start in range(copied, prompt, chunk):
                    end = min(start + chunk, prompt)
                    run(arrays, [table], [start], [end], [loop])
                    table.check(loop, end)
            table.depths = [LOOPS] * prompt
            alive.append(table)
        chosen = [table for table in alive if rng.random() < 0.7]
        if not chosen:
            continue
        ends = [len(table.depths) + 1 for table in chosen]
        loops = [table.loop + 1 for table in chosen]
        run(arrays, chosen, [end - 1 for end in ends], ends, loops)
        for table, end, loop in zip(chosen, ends, loops, strict=True):
            table.check(loop, end)
            table.loop = loop
        leaving = [table for table in chosen if table.loop == LOOPS or rng.random() < 0.4]
        parts = [(t.number, len(t.depths), t.loop) for t in leaving]
        if parts:
            arrays.leave(*(numpy.array(x) for x in zip(*parts, strict=True)))
        for table in leaving:
            table.depths.append(table.loop)
            table.loop = 0
            table.check(LOOPS, len(table.depths))
        for table in [t for t in alive if len(t.depths) == t.capacity or rng.random() < 0.05]:
            alive.remove(table)
            if rng.random() < 0.5:
                arrays.drop(table.number)
            else:
                table.keep(rng.randint(1, table.prompt))
                kept.append(table)
            if len(kept) > 3:
                arrays.drop(kept.pop(rng.randrange(3)).number)
        assert arrays.entries == sum(sum(t.depths) + t.loop for t in [*alive, *kept])
        for table, loop in ((table, loop) for table in kept for loop in range(1, LOOPS + 1)):
            table.check(loop, table.prompt)
    for table in [*alive, *kept]:
        arrays.drop(table.number)
    assert arrays.entries == arrays.held == 0
    assert arrays.pool._free == [(0, arrays.pool.tensor.shape[1])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("short", [True, False])
def test_several_positions_of_a_request_leave(kind, short):
    """Of a prompt, from the middle, at several depths at once and one after the other."""
    rng, arrays = random.Random(1), make(kind)
    other = Table(arrays, 2, 30, not short)
    table = Table(arrays, 1, 30, short)
    run(arrays, [table, other], [0, 0], [20, 4], [1, 1])
    depths, running = [LOOPS] * 20, list(range(20))
    for loop in range(1, LOOPS):
        # Those that go on have run loop 2 and 3 as well; each was appended in order.
        leaving = sorted(rng.sample(running, 4))
        arrays.leave(numpy.full(4, table.number), numpy.array(leaving), numpy.full(4, loop))
        for position in leaving:
            depths[position] = loop
        running = [position for position in running if position not in leaving]
        column, size = loop, len(running)
        numbers = numpy.array([table.number])
        # Positions that are not consecutive take the places of a span that is.
        arrays.extend(numbers, Spans(numbers, numpy.array([20 - size]), numpy.array([20]), numpy.array([loop + 1])))
        first = arrays.first[table.number, column]
        arrays.positions[first : first + size] = running
        for index, position in enumerate(running):
            arrays.array(table.number, column)[:, :, index] = table.value(position, loop + 1)
    table.depths = depths
    table.check(LOOPS, 20)
    assert arrays.used[table.number].tolist() == [16, 12, 8, 8, 12]
    assert arrays.entries == sum(depths) + 4


def test_one_loop_has_nothing_to_leave():
    arrays = make("growing", loops=1)
    number = arrays.add(3, True)
    spans = Spans([number], numpy.array([0]), numpy.array([2]), numpy.array([1]))
    arrays.extend(numpy.array([number]), spans)
    arrays.leave(numpy.array([number]), numpy.array([1]), numpy.array([1]))
    assert arrays.used.tolist() == [[2, 0]]


def test_a_growing_pool_stays_tight():
    """Reserved at most 1.3 times what is used, gaps, slack and all, while requests come, grow and go."""
    rng, arrays, alive, ratios = random.Random(0), make("growing"), [], []
    for name in range(40):
        table = Table(arrays, name, 400, rng.random() < 0.5)
        prompt = rng.randint(100, 300)
        for loop in range(1, LOOPS + 1):
            run(arrays, [table], [0], [prompt], [loop])
        table.depths = [LOOPS] * prompt
        alive.append(table)
        if len(alive) > 8:
            arrays.drop(alive.pop(rng.randrange(8)).number)
        for _ in range(10):
            depths = [rng.randint(1, LOOPS) for _ in alive]
            ends = [len(t.depths) + 1 for t in alive]
            for loop in range(1, LOOPS + 1):
                still = [(t, end) for t, end, depth in zip(alive, ends, depths, strict=True) if depth >= loop]
                if still:
                    tables, last = zip(*still, strict=True)
                    run(arrays, tables, [end - 1 for end in last], last, [loop] * len(tables))
            parts = [(t.number, len(t.depths), depth) for t, depth in zip(alive, depths, strict=True)]
            arrays.leave(*(numpy.array(x) for x in zip(*parts, strict=True)))
            for table, depth in zip(alive, depths, strict=True):
                table.depths.append(depth)
        ratios.append(arrays.reserved_bytes / (arrays.entries * arrays.pool.row_bytes))
    for table in alive:
        table.check(LOOPS, len(table.depths))
    assert sum(ratios) / len(ratios) < 1.25
    assert sorted(ratios)[len(ratios) * 9 // 10] < 1.3


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_has_no_slack(kind):
    """Rows for the positions that stay and no others; to the page, in memory that is mapped so."""
    arrays = make(kind, size=mmap.PAGESIZE // 8)  # an entry of a head is a page
    for short in (True, False):
        table = Table(arrays, 1, 100, short)
        for loop in range(1, LOOPS + 1):
            run(arrays, [table], [0], [50], [loop])
        table.depths = [LOOPS] * 50
        run(arrays, [table], [50], [51], [1])
        arrays.leave(numpy.array([table.number]), numpy.array([50]), numpy.array([1]))
        table.keep(20)
        table.check(LOOPS, 20)
        assert arrays.held == LOOPS * 20
        if kind == "lazy":
            assert arrays.reserved_bytes == LOOPS * 20 * arrays.pool.row_bytes
        arrays.drop(table.number)
        assert arrays.entries == arrays.held == 0


@pytest.mark.skipif(not LazyPool.serves(torch.device("cpu")), reason="this system does not map memory by the page")
def test_a_lazy_pool_takes_what_is_written():
    """Seen from outside: room for 64 MB, of which an eighth is written, and goes back when the request ends."""
    arrays = make("lazy", size=512)  # 16 KB an entry
    before = psutil.Process().memory_info().rss
    spans = Spans([0], numpy.array([0]), numpy.array([512]), numpy.array([1]))
    for short in (True, False):
        number = arrays.add(4096, short)
        arrays.extend(numpy.array([number]), spans)
        arrays.array(number, 0).fill_(1)
        grown = psutil.Process().memory_info().rss - before
        assert arrays.reserved_bytes == 512 * 16384
        assert grown == pytest.approx(512 * 16384, rel=0.15)
        arrays.drop(number)
        assert arrays.reserved_bytes == 0
        assert psutil.Process().memory_info().rss - before < 2 << 20
