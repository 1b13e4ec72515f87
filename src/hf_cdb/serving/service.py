"""Requests of clients on their way through the manager. Knows no HTTP."""

import asyncio
import concurrent.futures
import functools
import queue
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria
from transformers.utils import logging

from ..adapters import adapter_for
from ..jobs import CDBGenerationOutput, Job
from ..manager import CDBManager
from .bodies import Body, ChatBody, CompletionBody
from .metrics import Metrics

__all__ = ["Generation", "RefusedError", "Service"]

logger = logging.get_logger(__name__)

DEFAULT_TOKENS = 1024  # where a request names no limit, as in Transformers' server


class RefusedError(Exception):
    """Why a request is not served, and the status that HTTP has for it."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Service:
    """One model, its tokenizer and its manager.

    Args:
        model, tokenizer: of one checkpoint.
        name: what clients call the model.
        manager: of that model; it is started with the service.
        max_queue: sequences that have not ended at most, beyond which requests are refused.
        restarts: how often the manager is started again after an error of the model has ended its thread.

    Attributes:
        stopping: `stop` has been called; what fails from then on fails for that.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        manager: CDBManager,
        max_queue: int = 1024,
        restarts: int = 3,
    ):
        self.tokenizer, self.name, self.manager = tokenizer, name, manager
        self.max_queue, self.restarts = max_queue, restarts
        self.metrics = Metrics(manager)
        self.vocab_size = adapter_for(model).vocab_size
        self.context = model.config.get_text_config().max_position_embeddings
        ends = manager.generation_config.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [ends])
        self._open = 0
        self.stopping = False

    def start(self) -> None:
        self.stopping = False
        self.manager.start()

    def stop(self) -> None:
        """End at once; what is left fails."""
        self.stopping = True  # before anything fails of it
        self.manager.stop(hard_stop=True)

    @property
    def fatal_error(self) -> BaseException | None:
        """What has ended the manager's thread; None while it runs."""
        return self.manager.fatal_error

    def prompts(self, body: Body) -> list[list[int]]:
        """Token ids of every prompt of a request.

        Raises:
            RefusedError: no such model, messages that its template refuses, or a bias for ids that it does not have.
        """
        if body.model is not None and body.model != self.name:
            raise RefusedError(404, f"model={body.model!r} is not served here. There is {self.name!r}.")
        for token in body.logit_bias or ():
            if not token.isdecimal() or len(token) > 9 or int(token) >= self.vocab_size:
                raise RefusedError(
                    400, f"logit_bias names {token[:20]!r}: the model has ids 0 to {self.vocab_size - 1}."
                )
        return [self._chat(body)] if isinstance(body, ChatBody) else self._texts(body)

    def _texts(self, body: CompletionBody) -> list[list[int]]:
        try:
            return [self.tokenizer(prompt).input_ids if isinstance(prompt, str) else prompt for prompt in body.prompts]
        except (TypeError, UnicodeError) as error:  # halves of characters, as JSON may hold them
            raise RefusedError(400, f"prompt: the tokenizer cannot read it: {error}") from error

    def _chat(self, body: ChatBody) -> list[int]:
        messages = [{"role": message.role, "content": message.text} for message in body.messages]
        try:
            chat = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # templates raise what they like about messages that they do not take
            raise RefusedError(400, f"the model's chat template refuses these messages: {error}") from error
        return chat["input_ids"]

    def limit(self, body: Body, prompt: Sequence[int]) -> int:
        """New tokens of a prompt at most.

        Raises:
            RefusedError: they do not fit behind it.
        """
        room = self.context - len(prompt)
        if room < 1 or (body.limit or 1) > room:
            raise RefusedError(
                400,
                f"the prompt has {len(prompt)} tokens and max_tokens={body.limit}, but the model was trained for "
                f"{self.context} together. Shorten one of them.",
            )
        return body.limit or min(DEFAULT_TOKENS, room)

    async def generate(self, body: Body, arrived: float) -> "Generation":
        """Queue what a request asks for.

        Args:
            arrived: when it came, of `time.perf_counter`: its deadline and its times count from then.

        Raises:
            RefusedError: it cannot be served.
        """
        try:
            prompts = await asyncio.to_thread(self.prompts, body)  # a long text takes seconds
            limits = [self.limit(body, prompt) for prompt in prompts]
            self._check_room(len(prompts) * body.n)
            self._revive()
            generation = Generation(self, body, prompts, limits, arrived)
            self._open += len(generation)
            try:
                await generation.submit()
            except BaseException:
                generation.close()
                raise
        except RefusedError:
            self.metrics.refused()
            raise
        return generation

    def _check_room(self, sequences: int) -> None:
        if self._open + sequences > self.max_queue:
            raise RefusedError(
                429,
                f"there are {self._open} sequences, and {sequences} more exceed max_queue={self.max_queue}. Try again "
                "later.",
            )

    def _revive(self) -> None:
        """Start the manager again where an error of the model has ended it."""
        if self.fatal_error is None or self.manager.is_running():
            return
        if not self.restarts:
            raise RefusedError(503, f"the model has failed: {self.fatal_error!r}. Restart the server.")
        self.restarts -= 1
        logger.warning(f"The model has failed with {self.fatal_error!r}; the manager is started again.")
        self.manager.start()
        self.metrics.restarted()

    def closed(self, generation: "Generation") -> None:
        """Told of every generation once."""
        self._open -= len(generation)

    def finish_reason(self, output: CDBGenerationOutput, limit: int, stopped: bool, ignore_eos: bool) -> str:
        """Why a sequence ended, in OpenAI's words."""
        tokens = output.generated_tokens
        ended = stopped or len(tokens) < limit or (not ignore_eos and tokens[-1] in self._ends)
        return "stop" if ended else "length"


class Generation:
    """The sequences of one request of a client: `n` of every prompt.

    Attributes:
        prompts, limits: token ids and new tokens at most, by prompt.
        arrived: when the request came.
        outputs: the newest of every sequence that has any.
    """

    def __init__(self, service: Service, body: Body, prompts: list[list[int]], limits: list[int], arrived: float):
        self.service, self.body, self.prompts, self.limits = service, body, prompts, limits
        self.arrived = arrived
        self.outputs: dict[int, CDBGenerationOutput] = {}
        self._jobs: list[Job] = []  # queued
        self._left: set[int] = set()
        self._new: set[int] = set()
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
                    raise self._failure(output)
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
