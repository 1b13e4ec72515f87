"""Keys and values of the core in memory that follows depth: an entry for every loop that a position ran, no more.

A request has an array for every loop, its *slot*, and one for the tokens that left early:

* the slot of loop t holds, in order, the positions that ran loop t, without those that have left by loop t;
* the early array holds, by depth, one entry for each token that left before the last loop: that of the loop it left at.

What a query at loop t reads is then the first `early[t]` entries of the early array and all of slot t: one entry for
every position. Leaving at loop d takes the token's entry out of slot d and puts it behind those that left at d; each
deeper class makes room by moving its first entries behind its last ones, since in a class order does not matter.
"""

import mmap
from collections.abc import Mapping

import numpy
import torch

from .lazy_pool import LazyPool
from .pool import Pool
from .spans import Spans
from .transfer import to_device

__all__ = ["SlotArrays"]

# Where memory is not mapped by the page, arrays grow by a share of what they hold, so that copying is worth so many
# entries for each new one, and at least by STEP; a pool that is packed anew has a share of free rows, and is packed
# when it has more than twice that share.
GROWTH = 1 / 8
STEP = 8
SPARE = 1 / 12


class SlotArrays:
    """The arrays of all requests in one pool, by number of the request.

    Rows of the pool are as wide as all keys and values of a position. In the arrays of a short request a row is an
    entry, `[2, kv heads, head dim]`; the memory of others is `[2, kv heads, room, head dim]`. See `Segment`.

    Args:
        pool: without segments of others. In a `LazyPool` an array has room for all positions from the start; in others
            it grows, and moves when it does.
        loops: of the deepest request, R.
        heads: of keys and of values, together.

    Attributes:
        first, room, used, most: int64 `[requests, R + 1]`, by array the first row in the pool, the rows held, the
            entries, and the most that there ever were; the slot of loop t is array t - 1, the early array is the last.
        early: int64 `[requests, R + 1]`, by loop how many tokens have left by then; at R as many as at R - 1, since
            what ran the last loop stays in its slot.
        positions: int32 `[rows of the pool]`, the positions whose entries lie there.
        capacity, short: int64 and bool `[requests]`, as given to `add`.
    """

    def __init__(self, pool: Pool, loops: int, heads: int):
        self.pool, self.loops, self.heads = pool, loops, heads
        self._lazy = isinstance(pool, LazyPool)
        self.first, self.room, self.used, self.most, self.early = numpy.zeros((5, 0, loops + 1), dtype=numpy.int64)
        self.capacity = numpy.zeros(0, dtype=numpy.int64)
        self.short = numpy.zeros(0, dtype=bool)
        self.positions = numpy.zeros(0, dtype=numpy.int32)
        self._idle: list[int] = []  # numbers without a request

    @property
    def entries(self) -> int:
        """Entries of all requests."""
        return int(self.used.sum())

    @property
    def held(self) -> int:
        """Rows of the pool that they hold, what they may still grow into included."""
        return int(self.room.sum())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of memory that they take: the pages that have entries, or all of the pool."""
        if not self._lazy:
            return self.pool.reserved_bytes
        layers, _, width = self.pool.tensor.shape
        # Of a short request an array is one stretch of memory, of others each head is one.
        stretches = numpy.where(self.short, 1, self.heads)[:, None]
        bytes_ = self.most * (width * self.pool.tensor.dtype.itemsize) // stretches
        return int((-(-bytes_ // mmap.PAGESIZE) * stretches).sum()) * mmap.PAGESIZE * layers

    def add(self, capacity: int, short: bool) -> int:
        """The number of a new request, of at most `capacity` positions; it takes rows as it needs them."""
        if not self._idle:
            count = len(self.capacity)
            more = max(1, count)
            self._idle = list(range(count, count + more))[::-1]
            for name in ("first", "room", "used", "most", "early", "capacity", "short"):
                table = getattr(self, name)
                setattr(self, name, numpy.concatenate((table, numpy.zeros((more, *table.shape[1:]), table.dtype))))
        number = self._idle.pop()
        self.capacity[number], self.short[number] = capacity, short
        return number

    def drop(self, number: int) -> None:
        """Give back all that a request holds."""
        for column in range(self.loops + 1):
            self._release(number, column)
        self._idle.append(number)

    def _release(self, number: int, column: int) -> None:
        """Give back an array, and forget what was in it."""
        if self.room[number, column]:
            self.pool.release(int(self.first[number, column]), int(self.room[number, column]))
        for table in (self.first, self.room, self.used, self.most):
            table[number, column] = 0
        if column == self.loops:
            self.early[number] = 0

    def copy_front(self, source: int, target: int, count: int) -> None:
        """Give a new request the first `count` positions of another, which ran all its loops there: as a slot is in
        order, and nothing of them has left, they lie in front in every one."""
        columns = numpy.flatnonzero(self.used[source, : self.loops])
        sizes = numpy.full_like(columns, count)
        self._make_room(numpy.full_like(columns, target), columns, sizes)
        self.used[target, columns] = self.most[target, columns] = count
        for column in columns.tolist():
            self.array(target, column).copy_(self.array(source, column)[:, :, :count])
        indices = numpy.arange(count)
        self.positions[self.first[target, columns, None] + indices] = indices

    def keep_front(self, number: int, count: int) -> None:
        """Give back what a request holds beyond its first `count` positions, which ran all its loops; slot after slot,
        so that little more memory is taken meanwhile."""
        self._release(number, self.loops)
        self.capacity[number] = count
        columns = numpy.flatnonzero(self.used[number])
        self.used[number, columns] = count
        rows = int(self._rooms(numpy.array([number]), numpy.array([count]))[0])
        for column in columns.tolist():
            self._resize(number, column, rows, rows)

    def held_by(self, number: int) -> tuple[int, int]:
        """How many positions of a request have run loop 1, and how many entries they have."""
        return int(self.used[number, 0] + self.early[number, 1]), int(self.used[number].sum())

    def save(self, number: int) -> tuple[dict[int, torch.Tensor], dict[int, numpy.ndarray], numpy.ndarray]:
        """A copy of what a request has, as `restore` takes it: by array that has entries these, `[layers, 2 * kv heads,
        entries, head dim]`, and their positions, int32; and its line of `early`."""
        columns = numpy.flatnonzero(self.used[number]).tolist()
        first, used = self.first[number], self.used[number]
        placed = {column: self.positions[first[column] : first[column] + used[column]].copy() for column in columns}
        return {column: self.array(number, column).clone() for column in columns}, placed, self.early[number].copy()

    def restore(
        self,
        number: int,
        entries: Mapping[int, torch.Tensor],
        placed: Mapping[int, numpy.ndarray],
        early: numpy.ndarray,
    ) -> None:
        """Put what was saved into the arrays of a request that has nothing yet."""
        columns = numpy.array([*entries], dtype=numpy.int64)
        sizes = numpy.array([len(placed[column]) for column in entries], dtype=numpy.int64)
        numbers = numpy.full_like(columns, number)
        self._make_room(numbers, columns, sizes)
        self.used[numbers, columns] = self.most[numbers, columns] = sizes
        for column, own in entries.items():
            self.array(number, column).copy_(own, non_blocking=True)
            first = self.first[number, column]
            self.positions[first : first + len(placed[column])] = placed[column]
        self.early[number] = early

    def extend(self, numbers: numpy.ndarray, spans: Spans) -> numpy.ndarray:
        """Make room for the entries of a launch, behind those of earlier positions; doing it again changes nothing.

        The tensor of the pool may be another one afterwards, and arrays may lie elsewhere.

        Args:
            numbers: by span, of its request.
            spans: of the launch. All earlier positions of each have run its loop, or left before.

        Returns:
            int64 `[spans]`, the index in the slot of its loop where the entries of each begin.
        """
        columns = spans.loop - 1
        begin = self.used[numbers, columns]
        held = numpy.flatnonzero((begin > 0) & (spans.lengths > 0))
        newest = self.positions[(self.first[numbers, columns] + begin - 1)[held]]
        for index in held[newest >= spans.start[held]]:  # they are there already
            first = self.first[numbers[index], columns[index]]
            begin[index] = self.positions[first : first + begin[index]].searchsorted(spans.start[index])
        sizes = begin + spans.lengths
        self._make_room(numbers, columns, sizes)
        self.used[numbers, columns] = sizes
        self.most[numbers, columns] = numpy.maximum(self.most[numbers, columns], sizes)
        rows = spans.by_token(self.first[numbers, columns] + begin - spans.first) + numpy.arange(spans.tokens)
        self.positions[rows] = spans.positions()
        return begin

    def leave(self, numbers: numpy.ndarray, positions: numpy.ndarray, depths: numpy.ndarray) -> None:
        """Tokens have left: after loop `depths` of their request, which may be several positions of one request.

        All moves of the entries of all requests are one indexed copy for all layers; one for each depth and request
        where a request is named more than once, or where a later position has run the loop.
        """
        early = depths < self.loops
        if not early.all():
            numbers, positions, depths = numbers[early], positions[early], depths[early]
        if not len(numbers):
            return
        newest = self.used[numbers, depths - 1] - 1
        once = len(numbers) == 1 or len(set(numbers.tolist())) == len(numbers)
        if once and (self.positions[self.first[numbers, depths - 1] + newest] == positions).all():
            self._leave(numbers, depths, numpy.ones_like(numbers), newest)
            return
        for number, depth in sorted({*zip(numbers.tolist(), depths.tolist(), strict=True)}):
            first, used = self.first[number, depth - 1], self.used[number, depth - 1]
            leaving = numpy.isin(
                self.positions[first : first + used], positions[(numbers == number) & (depths == depth)]
            )
            stay, indices = numpy.flatnonzero(~leaving), numpy.flatnonzero(leaving)
            closed = numpy.stack((stay, numpy.arange(len(stay))))  # the others close up, in order
            own = (numpy.array([x]) for x in (number, depth, len(indices)))
            self._leave(*own, indices, closed[:, stay > closed[1]])

    def _leave(
        self,
        numbers: numpy.ndarray,
        depths: numpy.ndarray,
        counts: numpy.ndarray,
        indices: numpy.ndarray,
        closed: numpy.ndarray | None = None,
    ) -> None:
        """Move `counts` entries of every request, all different, from `indices` of its slot to the early array, and of
        the slot, where there is only one request, entries `closed[0]` to `closed[1]`."""
        last = numpy.full_like(numbers, self.loops)
        self._make_room(numbers, last, self.used[numbers, -1] + counts)
        early, deeper = self.early[numbers], numpy.arange(1, self.loops) > depths[:, None]
        begin, end = early[:, :-2], early[:, 1:-1]  # of the classes 1 to R - 1
        moving = numpy.where(deeper, numpy.minimum(counts[:, None], end - begin), 0)
        goals = early[numpy.arange(len(numbers)), depths]
        own, owner = numbers.repeat(counts), numbers.repeat(moving.sum(1))
        source = [(own, depths.repeat(counts) - 1, indices), (owner, last[0], _ranges(begin, moving))]
        goal = [
            (own, last[0], _ranges(goals, counts)),
            (owner, last[0], _ranges(end + counts[:, None] - moving, moving)),
        ]
        if closed is not None:
            source.append((numbers[0], depths[0] - 1, closed[0]))
            goal.append((numbers[0], depths[0] - 1, closed[1]))
        self._move(*(self._joined(parts) for parts in (source, goal)))
        self.early[numbers] += counts[:, None] * (numpy.arange(self.loops + 1) >= depths[:, None])
        self.used[numbers, depths - 1] -= counts
        self.used[numbers, -1] += counts
        self.most[numbers, -1] += counts

    @staticmethod
    def _joined(parts: list[tuple]) -> tuple[numpy.ndarray, ...]:
        wide = [numpy.broadcast_arrays(*part) for part in parts]
        return tuple(numpy.concatenate(column) for column in zip(*wide, strict=True))

    def rows(self, numbers: numpy.ndarray, columns: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
        """Rows of the pool where entries lie; of requests that are not short, the rows that stand for them in
        `positions`."""
        return self.first[numbers, columns] + indices

    def head_rows(self, numbers: numpy.ndarray, columns: numpy.ndarray, indices: numpy.ndarray) -> numpy.ndarray:
        """`[entries, 2 * kv heads]`: where they lie in a view of the pool with a row for each head."""
        first, room = self.first[numbers, columns][..., None], self.room[numbers, columns][..., None]
        heads = numpy.arange(self.heads)
        by_head = first * self.heads + heads * room + indices[..., None]
        by_position = (first + indices[..., None]) * self.heads + heads
        return numpy.where(self.short[numbers][..., None], by_position, by_head)

    def array(self, number: int, column: int) -> torch.Tensor:
        """The entries of one array, `[layers, 2 * kv heads, used, head dim]`: a view."""
        first, room, used = (int(table[number, column]) for table in (self.first, self.room, self.used))
        rows = self.pool.tensor.narrow(1, first, room)
        layers, _, width = rows.shape
        if self.short[number]:
            return rows.view(layers, room, self.heads, width // self.heads).transpose(1, 2).narrow(2, 0, used)
        return rows.view(layers, self.heads, room, width // self.heads).narrow(2, 0, used)

    def _move(self, source: tuple[numpy.ndarray, ...], goal: tuple[numpy.ndarray, ...]) -> None:
        """Copy entries `(numbers, columns, indices)`; all are read before any is written."""
        rows, goals = self.rows(*source), self.rows(*goal)
        self.positions[goals] = self.positions[rows]
        pool = self.pool.tensor
        if not self.short[source[0]].all():
            rows, goals = self.head_rows(*source).ravel(), self.head_rows(*goal).ravel()
            pool = pool.view(len(pool), -1, pool.shape[2] // self.heads)
        rows, goals = (to_device(torch.from_numpy(x), pool.device) for x in (rows, goals))
        pool.index_copy_(1, goals, pool.index_select(1, rows))

    def _make_room(self, numbers: numpy.ndarray, columns: numpy.ndarray, sizes: numpy.ndarray) -> None:
        """Let arrays hold `sizes` entries."""
        lacking = numpy.flatnonzero(sizes > self.room[numbers, columns])
        if not len(lacking):
            return
        numbers, columns, sizes = numbers[lacking], columns[lacking], sizes[lacking]
        wanted = self._rooms(numbers, sizes)
        more = int(wanted.sum())
        if not self._lazy and self.pool.tensor.shape[1] > (1 + 2 * SPARE) * (self.held + more):
            self._pack(more)
        for number, column, rows in zip(numbers.tolist(), columns.tolist(), wanted.tolist(), strict=True):
            if rows > self.room[number, column]:  # a launch may name one request several times
                self._resize(number, column, rows, more)
            more -= rows

    def _rooms(self, numbers: numpy.ndarray, sizes: numpy.ndarray) -> numpy.ndarray:
        """Rows to take for arrays of `sizes` entries: for all that there may ever be, where that takes no memory."""
        if self._lazy:
            stretch = numpy.where(self.short[numbers], self.heads, 1) * (self.pool.tensor.shape[2] // self.heads)
            return self.pool.whole_pages(self.capacity[numbers], stretch)
        wanted = sizes + numpy.maximum(STEP, (sizes * GROWTH).astype(numpy.int64))
        return numpy.minimum(self.capacity[numbers], -(-wanted // STEP) * STEP)

    def _resize(self, number: int, column: int, rows: int, more: int) -> None:
        """Move an array to where it has `rows` rows; `more` with those that are going to be asked for after it."""
        first = self.pool.take(rows)
        if first is None:
            self._pack(more)
            first = self.pool.take(rows)
        before, room, used = (int(table[number, column]) for table in (self.first, self.room, self.used))
        old = self.array(number, column)
        self.first[number, column], self.room[number, column], self.most[number, column] = first, rows, used
        self.array(number, column).copy_(old)
        self.positions[first : first + used] = self.positions[before : before + used]
        if room:
            self.pool.release(before, room)

    def _pack(self, more: int) -> None:
        """Close the gaps of the pool, and leave room for `more` rows and some to spare: as much again where that takes
        no memory."""
        arrays = list(zip(*(x.tolist() for x in numpy.nonzero(self.room)), strict=True))
        old, recorded, spare = [self.array(*at) for at in arrays], self.positions, 1 if self._lazy else SPARE
        self.pool.renew(int((self.held + more) * (1 + spare)) + 1)
        self.positions = numpy.zeros(self.pool.tensor.shape[1], dtype=numpy.int32)
        for at, entries in zip(arrays, old, strict=True):
            before, used = int(self.first[at]), int(self.used[at])
            first = self.first[at] = self.pool.take(int(self.room[at]))
            self.array(*at).copy_(entries)
            self.most[at] = used
            self.positions[first : first + used] = recorded[before : before + used]


def _ranges(starts: numpy.ndarray, lengths: numpy.ndarray) -> numpy.ndarray:
    """`starts[i], starts[i] + 1, ...`, `lengths[i]` of them, one after the other, for arrays of any shape."""
    starts, lengths = starts.ravel(), lengths.ravel()
    ends = lengths.cumsum()
    return (starts - ends + lengths).repeat(lengths) + numpy.arange(ends[-1] if len(ends) else 0)
