"""One call of `generate` on its way through an engine: steps it, tells who listens, gathers the output."""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers.generation.streamers import BaseStreamer

from .adapters import LoopAdapter
from .config import CDBConfig
from .criteria import Stops
from .engine import Engine
from .failures import errors_of_requests
from .generation_output import GenerateCDBOutput, RowsFailedError, gather
from .request import Request
from .streaming import StreamPiece, TextPieces

__all__ = ["GenerationRun", "prepare_run"]


def prepare_run(model: Any, /, *args, **kwargs) -> "GenerationRun":
    """What `model.generate(*args, **kwargs)` would run with cdb: every argument is taken and checked, nothing runs.

    Raises:
        ValueError: as `generate`.
    """
    return type(model).generate(model, *args, _only_prepare=True, **kwargs)


class GenerationRun:
    """The rows of one call; `finish` and `stream` run them in an engine of their own.

    A row fails alone: what its processors, its stopping criteria or `on_token` raise ends that row, and after the
    others are through, `RowsFailedError` says so. What the model or the streamer raises ends the call as it is, and so
    does, in the main thread, what is no `Exception`, such as `KeyboardInterrupt`.

    Args:
        adapter, config: of the engine; the config is resolved.
        requests: one per row; `key` and `row` are its number.
        input_ids, generation_config: for the output.
        stops: ends rows by what all rows decide together.
        on_token: called with (row, token id, exit depth) after every token.
        streamer: for a call of one row: is given every token, and told when there are no more, also where the call
            fails, so that who reads from it is not left waiting.
    """

    def __init__(
        self,
        adapter: LoopAdapter,
        config: CDBConfig,
        requests: list[Request],
        input_ids: torch.Tensor,
        generation_config: Any,
        stops: Stops,
        on_token: Callable[[int, int, int], Any] | None = None,
        streamer: BaseStreamer | None = None,
    ):
        self.adapter, self.config, self.requests = adapter, config, requests
        self.input_ids, self.generation_config, self.stops = input_ids, generation_config, stops
        self.on_token, self.streamer = on_token, streamer

    def open(self) -> "GenerationRun":
        """Make the engine and queue the rows, without running anything. Returns itself."""
        self.engine = Engine(self.adapter, self.config)
        for request in self.requests:
            try:
                self.engine.add_request(request)
            except ValueError as error:
                request.status, request.error = "failed", error
        return self

    def finish(self) -> GenerateCDBOutput | torch.Tensor:
        """Run every row to its end.

        Returns:
            What `generate` returns.

        Raises:
            RowsFailedError: rows failed.
        """
        with contextlib.closing(self._new_tokens()) as requests:
            for request in requests:
                self._tell(request)
        return self._output()

    def stream(self, tokenizer: Any, skip_special_tokens: bool) -> Iterator[StreamPiece]:
        """Every token of every row as soon as it is there. Closing the iterator ends the call.

        Args:
            tokenizer: pieces are text; None: they are token ids.

        Returns:
            By StopIteration: what `generate` returns.

        Raises:
            RowsFailedError: rows failed; raised after the last piece.
        """
        texts = [None if tokenizer is None else TextPieces(tokenizer, skip_special_tokens) for _ in self.requests]
        with contextlib.closing(self._new_tokens()) as requests:
            for request in requests:
                self._tell(request)
                text, token = texts[request.row], request.tokens[-1]
                piece = token if text is None else text.push(token, last=request.status != "running")
                yield StreamPiece(request.row, piece, request.exit_depths[-1])
        return self._output()

    def _new_tokens(self) -> Generator[Request, None, None]:
        """Step the engine; a request for every token that it got, which is its last one."""
        told = [0] * len(self.requests)
        try:
            with tqdm(total=len(self.requests), unit="row", disable=not self.config.progress) as bar:
                while (launch := self.engine.step()) is not None:
                    if launch.stage != "coda":
                        continue
                    self.stops.after_tokens(self.engine, self.requests)
                    for key in launch.keys:
                        request = self.requests[key]
                        if len(request.tokens) > told[key]:  # not so for a piece of a prompt, and a row that failed
                            told[key] = len(request.tokens)
                            yield request
                    for ended in self.engine.results():
                        ended.sampler.release(ended.row)
                        self.stops.release(ended.row)
                    bar.set_postfix(tokens=self.engine.stats.tokens, refresh=False)
                    bar.update(len(self.requests) - len(self.engine.scheduler) - bar.n)
        finally:
            # Who listens may have raised or gone away; then rows are left in the engine.
            self.engine.close()
            if self.streamer is not None:
                self.streamer.end()

    def _tell(self, request: Request) -> None:
        """Outside of `_new_tokens`: Python turns a StopIteration that a streamer raises in a generator into another."""
        token = request.tokens[-1]
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        if self.on_token is not None:
            try:
                self.on_token(request.row, token, request.exit_depths[-1])
            except errors_of_requests() as error:
                self.engine.fail(request, error)

    def _output(self) -> GenerateCDBOutput | torch.Tensor:
        output = gather(self.input_ids, self.requests, self.generation_config, self.engine.stats)
        errors = {request.row: request.error for request in self.requests if request.error is not None}
        if errors:
            raise RowsFailedError(errors, output)
        return output
