"""Tokens while they come: the library's streamers for one row, pieces of text for every row of a batch."""

from typing import Any, NamedTuple

import torch
from transformers.generation.streamers import BaseStreamer

__all__ = ["OneRowStreamer", "StreamPiece", "TextPieces"]

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what bytes of a character decode to before its last one is there


class StreamPiece(NamedTuple):
    """A token that a row got.

    Attributes:
        row: of the batch; prompts are repeated for `num_return_sequences`.
        piece: the text that the token adds, "" where it completes no character; without a tokenizer the token's id.
        depth: loops run for it.
    """

    row: int
    piece: str | int
    depth: int


class TextPieces:
    """Text of one row, token by token; the pieces together are the text of all tokens.

    Args:
        tokenizer: decodes.
        skip_special_tokens: leave them out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True):
        self.tokenizer, self.skip_special_tokens = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        # Only the tokens from `_context` on are decoded: those before `_told` gave text already, and decide how the
        # ones after them begin (many tokenizers drop the space before the first word).
        self._context = self._told = 0

    def push(self, token: int, last: bool = False) -> str:
        """The text that `token` adds; nothing is held back with the `last` one."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._told])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_INCOMPLETE) and not last:
            return ""
        if len(text) > len(before):
            self._context, self._told = self._told, len(self._tokens)
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            tokens, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False
        )


class OneRowStreamer(BaseStreamer):
    """A streamer of the library's kind, which has no way to tell rows apart.

    Args:
        streamer: is given the prompt `[1, positions]`, then every token `[1]`, then the end.
    """

    def __init__(self, streamer: BaseStreamer):
        self.streamer = streamer
        self._over = False  # it has been told of the end, or has raised

    def put(self, value: torch.Tensor) -> None:
        """Hand on the prompt or a token.

        Raises:
            ValueError: there is more than one row.
        """
        if value.ndim > 1 and len(value) > 1:
            raise ValueError(
                f"streamer={self.streamer!r} follows one row, but there are {len(value)}, whose tokens come in no "
                "common order with cdb. Pass on_token=..., or iterate over model.generate_stream(...)."
            )
        self._over = True
        self.streamer.put(value)
        self._over = False

    def end(self) -> None:
        """Tell the streamer, once, that no token follows; one that raised is not called again."""
        if not self._over:
            self._over = True
            self.streamer.end()
