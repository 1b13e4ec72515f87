"""Requests of clients on their way through the manager. Knows no HTTP."""

import asyncio
import concurrent.futures
import functools
import queue
import uuid
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from transformers import StopStringCriteria

from ..jobs import CDBGenerationOutput, Job
from .bodies import Body

if TYPE_CHECKING:
    from .service import Service

__all__ = ["Generation", "RefusedError"]


class RefusedError(Exception):
    """Why a request is not served, and the status that HTTP has for it."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Generation:
    """The sequences of one request of a client: `n` of every prompt.

    Attributes:
        prompts, limits: token ids and new tokens at most, by prompt.
        arrived: when the request came.
        outputs: the newest of every sequence that has any.
    """

    def __init__(self, service: "Service", body: Body, prompts: list[list[int]], limits: list[int], arrived: float):
        self.service, self.body, self.prompts, self.limits = service, body, prompts, limits
        self.arrived = arrived
        self.outputs: dict[int, CDBGenerationOutput] = {}
        self._jobs: list[Job] = []  # queued
        self._left: set[int] = set()
        self._new: set[int] = set()
        self._failures: dict[int, RefusedError] = {}  # by sequence
        self._some_new = asyncio.Event()
        self._closed = self._failed = False

    def __len__(self) -> int:
        """Sequences."""
        return len(self.prompts) * self.body.n

    async def submit(self) -> None:
        """Queue the prompts once all of them have been checked.

        Raises:
            RefusedError: one cannot be served.
        """
        # Finding the tokens of stop strings takes long in a large vocabulary, and others' answers must go on.
        adding = asyncio.ensure_future(asyncio.to_thread(self._add))
        adding.add_done_callback(self._added)
        try:
            await asyncio.shield(adding)
        except (ValueError, RuntimeError, queue.Full) as error:
            self._failed = True
            kinds = {ValueError: 400, queue.Full: 429}
            status = next((kinds[kind] for kind in kinds if isinstance(error, kind)), 503)
            raise RefusedError(status, str(error)) from error

    def _add(self) -> None:
        manager, body = self.service.manager, self.body
        options = {"streaming": body.stream, "record_timestamps": True, "created": self.arrived}
        options |= body.options(self.service.vocab_size)
        jobs = []
        for prompt, limit in zip(self.prompts, self.limits, strict=True):
            name = f"served-{uuid.uuid4().hex}"
            jobs.append(manager.make_job(prompt, name, max_new_tokens=limit, **options, **self._stops(len(prompt))))
        for job in jobs:
            manager.submit_job(job)
            self._jobs.append(job)

    def _added(self, adding: asyncio.Future) -> None:
        """Listen to the sequences; where the client has gone meanwhile, or some could not be queued, end them."""
        for prompt, job in enumerate(self._jobs):
            for index, sequence in enumerate(job.names, prompt * self.body.n):
                self._left.add(index)
                self.service.manager.register_result_handler(sequence, functools.partial(self._put, index))
        if self._closed:
            self._end_what_is_left()

    def _stops(self, prompt_length: int) -> dict[str, Any]:
        """What ends a sequence at its stop strings. Only the answer is looked at: `stop_strings` of `generate` would
        also find one that begins in the prompt."""
        if not self.body.stops:
            return {}
        stop = StopStringCriteria(self.service.tokenizer, self.body.stops)
        return {"stopping_criteria": [lambda ids, scores: stop(ids[:, prompt_length:], scores)]}

    def _put(self, index: int, output: CDBGenerationOutput) -> None:
        self.outputs[index] = output
        if output.error is not None:  # now: when it is read, the manager may have been started again
            self._failures[index] = self._failure(output)
        self._new.add(index)
        self._some_new.set()

    async def new_outputs(self) -> AsyncIterator[tuple[int, CDBGenerationOutput]]:
        """Number of a sequence and its newest output, until all have ended. A slow reader gets fewer of them.

        Raises:
            RefusedError: a sequence failed.
        """
        while self._left:
            await self._some_new.wait()
            self._some_new.clear()
            new, self._new = sorted(self._new), set()
            for index in new:
                output = self.outputs[index]
                if output.is_finished():
                    self._left.discard(index)
                    self.service.metrics.ended(output)
                if output.error is not None:
                    self._failed = True
                    raise self._failures[index]
                yield index, output

    def _failure(self, output: CDBGenerationOutput) -> RefusedError:
        if self.service.fatal_error is not None:
            return RefusedError(503, f"the model has failed: {output.error}")
        if isinstance(output.cause, TimeoutError):
            return RefusedError(504, output.error)
        if isinstance(output.cause, concurrent.futures.CancelledError) or self.service.stopping:
            return RefusedError(503, f"the request was ended: {output.error}")
        return RefusedError(400 if isinstance(output.cause, ValueError) else 500, output.error)

    def close(self) -> None:
        """End what is left. May be called again."""
        if self._closed:
            return
        self._closed = True
        self.service.closed(self)
        self._end_what_is_left()

    def _end_what_is_left(self) -> None:
        for index in self._left:
            output = self.outputs.get(index)
            if output is not None and output.is_finished():  # nobody has read it
                self.service.metrics.ended(output)
            else:  # with a sequence that failed the whole request has
                self.service.metrics.ended_early("failed" if self._failed else "cancelled")
        for job in self._jobs:
            self.service.manager.cancel_request(job.request_id)

    def usage(self) -> dict[str, Any]:
        """Tokens, each prompt counted once, and loops per generated token."""
        prompt = sum(map(len, self.prompts))
        depths = [depth for output in self.outputs.values() for depth in output.exit_depths]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": len(depths),
            "total_tokens": prompt + len(depths),
            "mean_depth": sum(depths) / max(1, len(depths)),
        }
