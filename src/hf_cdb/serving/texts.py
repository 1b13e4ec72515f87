"""The text of a sequence while its tokens come, cut before the first stop string as OpenAI's answers are."""

from collections.abc import Sequence
from typing import Any

from ..streaming import TextPieces

__all__ = ["StoppedText"]


class StoppedText:
    """Text that could become a stop string is held back until it is certain.

    Args:
        tokenizer: decodes.
        stops: the text ends before any of them.

    Attributes:
        stopped: one has come.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str]):
        self.stops, self.stopped = stops, False
        self._pieces = TextPieces(tokenizer)
        self._tokens = self._told = 0
        self._text = ""

    def push(self, tokens: Sequence[int], last: bool) -> str:
        """The text that is new.

        Args:
            tokens: all that the sequence has so far.
            last: no more come.
        """
        for index in range(self._tokens, len(tokens)):
            self._text += self._pieces.push(tokens[index], last=last and index == len(tokens) - 1)
        self._tokens = len(tokens)
        end = self._end(last)
        piece, self._told = self._text[self._told : end], end
        return piece

    def _end(self, last: bool) -> int:
        """How much of the text may be told."""
        found = [place for stop in self.stops if (place := self._text.find(stop, self._told)) >= 0]
        if self.stopped or found:
            end = self._told if self.stopped else min(found)
            self.stopped = True
            return end
        if last:
            return len(self._text)
        return len(self._text) - max((self._begun(stop) for stop in self.stops), default=0)

    def _begun(self, stop: str) -> int:
        """Length of the longest end of the text that `stop` begins with."""
        untold = len(self._text) - self._told
        return next((n for n in range(min(len(stop) - 1, untold), 0, -1) if self._text.endswith(stop[:n])), 0)
