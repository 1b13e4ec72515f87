"""Prompts that begin alike compute that part once: the engine's side of `Prefixes`."""

from collections.abc import Mapping

import torch

from .cache import DepthCache
from .prefixes import LEAST, Prefixes
from .request import Request

__all__ = ["KEPT_SHARE", "PrefixReuse"]

KEPT_SHARE = 0.1  # of the free memory, for prefixes that are kept where no budget bounds them


class PrefixReuse:
    """Takes prompts in, copies entries, and keeps those of requests that end.

    Only for `last_exited`: there the entries of a prompt's position depend on the ids up to it, and on nothing else of
    the request but its full depth (the layers after the loop write what came out of it) and its start state. Under the
    sharing policies a later part at loop t would read what loop R left.

    Args:
        cache: of the engine.
        most: bytes that are kept at most.

    Attributes:
        prefixes: for the scheduler.
    """

    def __init__(self, cache: DepthCache, most: int):
        self._cache = cache
        self.prefixes = Prefixes(lambda positions: cache.positions(positions) * cache.bytes_per_position(), most)

    def add(self, request: Request) -> None:
        """Take in the prompt of a request; not one of embeddings, nor one too short to share anything, nor one whose
        positions leave at depths of their own, nor one that brings tokens."""
        if request.prompt_ids is None or request.prompt_length <= LEAST or request.prefill_exit or request.tokens:
            return
        options = sorted(request.start_options.items())
        if not all(isinstance(value, int | float | str | None) for _, value in options):
            return  # equal by their texts would not mean equal
        kind = (request.max_depth, *options)
        self.prefixes.add(request.key, request.prompt_ids.to("cpu", torch.int32).numpy().tobytes(), kind)

    @property
    def pending(self) -> bool:
        """Whether `free` and `copy` have anything to do."""
        return bool(self.prefixes.copies or self.prefixes.dropped)

    def free(self) -> None:
        """Give back what is kept no more."""
        for key in self.prefixes.dropped:
            self._cache.free(key)
        self.prefixes.dropped.clear()

    def targets(self, requests: Mapping[int, Request]) -> list[Request]:
        """Those that need room for a copy."""
        return [requests[copy.target] for copy in self.prefixes.copies]

    def copy(self) -> int:
        """Copy what the next launch goes on from, into room that is there; how many positions."""
        copies, self.prefixes.copies = self.prefixes.copies, []
        for copy in copies:
            self._cache.copy_prefix(copy.source, copy.target, copy.positions)
        return sum(copy.positions for copy in copies)

    def end(self, request: Request) -> None:
        """A request ends; what is kept of it is left in the cache, under another key."""
        # One that was preempted has tokens before its prompt is through again; `Scheduler` tells when it is.
        kept = self.prefixes.end(request.key, through=bool(request.tokens) and not request.preemptions)
        self.free()
        if kept is not None:
            self._cache.keep_prefix(kept.source, kept.target, kept.positions)

    def clear(self) -> None:
        """Forget and give back all that has been computed."""
        self.prefixes.clear()
        self.free()
