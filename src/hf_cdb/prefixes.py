"""Which prompts begin alike, and from where the entries of what they share can be copied. Pure Python."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter

__all__ = ["LEAST", "Copy", "Prefixes", "Prompt"]

LEAST = 64  # positions that are worth a copy, or a wait
WAIT = 2  # a prompt waits for no other that is more than so many times as long as itself
TOKEN = 4  # bytes of an id
REMEMBERED = 1 << 20  # positions of ended prompts, whose ids are remembered


@dataclass(slots=True, eq=False)
class Prompt:
    """The ids of a prompt behind its kind: what differs in kind shares nothing.

    Attributes:
        key: of its request, or of what is kept.
        ids: the kind, then `TOKEN` bytes for every id.
        head: bytes of the kind.
        index: where it stands; None for what has gone.
        follows: the prompt that it waits for.
    """

    key: Hashable
    ids: bytes
    head: int
    index: "_Index | None" = None
    follows: "Prompt | None" = None

    @property
    def positions(self) -> int:
        return (len(self.ids) - self.head) // TOKEN

    def shares(self, other: "Prompt") -> int:
        """Positions from the first on that are equal in both."""
        low, high = 0, min(len(self.ids), len(other.ids))
        while low < high:  # invariant: the first `low` bytes are equal
            middle = (low + high + 1) // 2
            if self.ids[low:middle] == other.ids[low:middle]:
                low = middle
            else:
                high = middle - 1
        return max(0, low - self.head) // TOKEN


@dataclass(frozen=True)
class Copy:
    """Positions `[0, positions)` of `source` are to be copied to `target`; both are keys."""

    source: Hashable
    target: Hashable
    positions: int


class _Index:
    """Prompts in lexicographic order: of all, the one that shares most with another stands next to it."""

    def __init__(self):
        self._prompts: list[Prompt] = []

    def add(self, prompt: Prompt) -> None:
        prompt.index = self
        insort(self._prompts, prompt, key=attrgetter("ids"))

    def remove(self, prompt: Prompt) -> None:
        first = bisect_left(self._prompts, prompt.ids, key=attrgetter("ids"))
        del self._prompts[self._prompts.index(prompt, first)]
        prompt.index = None

    def longest(self, prompt: Prompt) -> tuple[int, Prompt | None]:
        """How many positions are shared at most, and with which prompt; 0 and None where nothing is."""
        at = bisect_left(self._prompts, prompt.ids, key=attrgetter("ids"))
        best: tuple[int, Prompt | None] = 0, None
        for other in self._prompts[max(0, at - 1) : at + 1]:
            shared = prompt.shares(other)
            if shared > best[0]:
                best = shared, other
        return best


class Prefixes:
    """The prompts of requests that have not ended, and prefixes that outlive theirs.

    A prompt that shares `LEAST` positions or more with one that is through is given a copy of their entries. It waits
    for one that is under way, where that brings so much more. What it waits for runs, so nobody waits in a circle; and
    when that one is through, or ends or is preempted before, the waiting prompt decides anew.

    When a request ends, the part of its prompt that others share is kept, unless another source has it: others that
    have not begun, or that came before and are remembered by their ids. So what is asked for once only is never kept
    (as in 2Q, Johnson and Shasha 1994). What is kept is dropped when room is needed, the least recently used first.

    Args:
        bytes_of: bytes that so many positions take.
        most: bytes that are kept at most.

    Attributes:
        kept_bytes: what is kept now.
        copies, dropped: what is to be done before the next launch: keys of kept prefixes to free, and then copies.
    """

    def __init__(self, bytes_of: Callable[[int], int], most: int):
        self._bytes_of, self._most = bytes_of, most
        self._wanting, self._running, self._ready = _Index(), _Index(), _Index()
        self._prompts: dict[int, Prompt] = {}
        self._kept: dict[Hashable, Prompt] = {}  # the least recently used one first
        self._made = 0
        self._remembered: deque[Prompt] = deque()
        self._positions_remembered = 0
        self.kept_bytes = 0
        self.copies: list[Copy] = []
        self.dropped: list[Hashable] = []

    def add(self, key: int, ids: bytes, kind: tuple = ()) -> None:
        """Take in the prompt of a request that waits.

        Args:
            key: of the request; prompts that were not taken in start at 0.
            ids: `TOKEN` bytes a token.
            kind: what the entries depend on beside the ids.
        """
        head = repr(kind).encode() + b"\0"  # with an end, so that no kind begins like another
        self._prompts[key] = prompt = Prompt(key, head + ids, len(head))
        self._wanting.add(prompt)

    @property
    def pinned(self) -> int:
        """Bytes of what is kept that the next launch begins by copying."""
        sources = {copy.source for copy in self.copies} & self._kept.keys()
        return sum(self._bytes_of(self._kept[key].positions) for key in sources)

    def start(self, key: int, room: float | None = None) -> int | None:
        """The position at which a prompt begins to run; what is before it is in `copies`. None: it waits.

        To be asked again for one that waits, before every launch.

        Args:
            room: bytes that are left to what is kept; None is as much as now. At least `pinned`.
        """
        prompt = self._prompts.get(key)
        if room is not None and self.kept_bytes > room:
            if prompt is not None:
                self._touch(self._ready.longest(prompt)[1])
            self._drop(room)
        if prompt is None or (prompt.follows is not None and prompt.follows.index is self._running):
            return 0 if prompt is None else None
        shared, source = self._ready.longest(prompt)
        coming, donor = self._running.longest(prompt)
        shared, coming = (min(positions, prompt.positions - 1) for positions in (shared, coming))
        if coming - shared >= LEAST and donor.positions <= WAIT * prompt.positions:
            prompt.follows = donor
            return None
        prompt.follows = None
        self._move(prompt, self._running)
        if shared < LEAST:
            return 0
        self._touch(source)
        self.copies.append(Copy(source.key, key, shared))
        return shared

    def through(self, key: int) -> None:
        """The prompt has run: its entries can be copied."""
        prompt = self._prompts.get(key)
        if prompt is not None and prompt.index is self._running:
            self._move(prompt, self._ready)

    def withdraw(self, key: int) -> None:
        """The entries of a request are lost, and it waits again."""
        prompt = self._prompts.get(key)
        if prompt is not None:
            self._move(prompt, self._wanting)
            prompt.follows = None
            self.copies = [copy for copy in self.copies if key not in (copy.source, copy.target)]

    def end(self, key: int, through: bool) -> Copy | None:
        """A request has ended.

        Args:
            through: its prompt has run.

        Returns:
            What is to be kept of its entries, and under which key; None for nothing.
        """
        prompt = self._prompts.pop(key, None)
        if prompt is None:
            return None
        waited = prompt.index is self._wanting
        had_entries = prompt.index is self._ready or (through and prompt.index is self._running)
        prompt.index.remove(prompt)
        self.copies = [copy for copy in self.copies if key not in (copy.source, copy.target)]
        kept = self._keep(prompt) if had_entries else None
        if not waited:
            self._remember(prompt)
        return kept

    def clear(self) -> None:
        """Nothing that has been computed so far may be copied any more."""
        self.copies = []
        self._drop(0)
        for prompt in self._prompts.values():
            if prompt.index is not self._wanting:
                self._move(prompt, self._wanting)

    def _keep(self, prompt: Prompt) -> Copy | None:
        wanted, _ = self._wanting.longest(prompt)
        covered, _ = self._ready.longest(prompt)
        nbytes = self._bytes_of(wanted)
        if wanted - covered < LEAST or nbytes > self._most:
            return None
        self._made += 1
        kept = Prompt(f"prefix {self._made}", prompt.ids[: prompt.head + TOKEN * wanted], prompt.head)
        for shorter in [other for other in self._kept.values() if kept.ids.startswith(other.ids)]:
            self._let_go(shorter)
        self._drop(self._most - nbytes)
        self._ready.add(kept)
        self._kept[kept.key] = kept
        self.kept_bytes += nbytes
        return Copy(prompt.key, kept.key, wanted)

    def _remember(self, prompt: Prompt) -> None:
        self._wanting.add(prompt)
        self._remembered.append(prompt)
        self._positions_remembered += prompt.positions
        while self._positions_remembered > REMEMBERED:
            oldest = self._remembered.popleft()
            self._wanting.remove(oldest)
            self._positions_remembered -= oldest.positions

    def _drop(self, room: float) -> None:
        """Drop what is kept until it takes `room` bytes at most, but nothing that a launch is about to copy."""
        if self.kept_bytes <= room:
            return
        pinned = {copy.source for copy in self.copies}
        for prompt in [prompt for prompt in self._kept.values() if prompt.key not in pinned]:
            self._let_go(prompt)
            if self.kept_bytes <= room:
                return

    def _let_go(self, prompt: Prompt) -> None:
        del self._kept[prompt.key]
        prompt.index.remove(prompt)
        self.kept_bytes -= self._bytes_of(prompt.positions)
        self.dropped.append(prompt.key)

    def _touch(self, prompt: Prompt | None) -> None:
        if prompt is not None and prompt.key in self._kept:
            self._kept[prompt.key] = self._kept.pop(prompt.key)

    @staticmethod
    def _move(prompt: Prompt, index: _Index) -> None:
        prompt.index.remove(prompt)
        index.add(prompt)
