"""Requests that come and go: `model.init_continuous_batching(cdb=True)`."""

import asyncio
import concurrent.futures
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from .adapters import adapter_for
from .async_front import AsyncFront
from .config import CDBConfig, saved_settings
from .engine import Engine
from .jobs import CHILD, CDBGenerationOutput, Job
from .model_checks import check_model, compute_as_wrapped
from .outbox import Outbox
from .request_arguments import check_kind, check_prompts, shown
from .request_maker import OF_CALLS, RequestMaker
from .stats import CDBStats
from .worker import Worker

__all__ = ["CDBManager"]

logger = logging.get_logger(__name__)

_PATIENCE = 10.0  # seconds that Transformers' manager waits for room in its queue


class CDBManager(AsyncFront):
    """Serves requests as they come, in a thread of its own, by continuous depth batching.

    Names and meaning are those of Transformers' `ContinuousBatchingManager` wherever both have the thing. Methods may
    be called by any thread.

        with model.init_continuous_batching(cdb=True) as manager:
            name = manager.add_request([5, 6, 7], max_new_tokens=20, streaming=True)
            for output in manager.request_id_iter(name):
                ...

    Dropping a manager that runs ends it, and its requests with it.

    Args:
        model: a looped model that `generate(cdb=True)` takes.
        generation_config: defaults of all requests; the model's own where none is given.
        cdb: as for `generate`: True, a dict of settings or a `CDBConfig`.
        max_queue_size: requests at most that no launch has run for yet, beyond which `add_request` waits; 0 is no
            limit.

    Attributes:
        config: the resolved settings.
        fatal_error: what ended the thread: an error of the model; all requests have failed with it. None else.
    """

    warmed_up = True  # as Transformers asks: there is nothing that a first request would have to wait for

    def __init__(
        self,
        model: nn.Module,
        generation_config: GenerationConfig | None = None,
        cdb: Any = True,
        max_queue_size: int = 0,
    ):
        check_kind("generation_config", generation_config)
        adapter = adapter_for(model)
        check_model(adapter)
        compute_as_wrapped(adapter)
        self.model = adapter.model
        self.generation_config = generation_config or self.model.generation_config
        self.settings = CDBConfig.create(cdb, saved_settings(self.generation_config, adapter), adapter)
        for name, own in OF_CALLS.items():
            if getattr(self.settings, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self.settings, name)!r} belongs to the prompts of one call, and a manager has "
                    f"none. Give {own} to add_request."
                )
        if self.settings.progress:
            logger.warning_once("progress=True has no effect: a manager has no last request that a bar could end at.")
        if isinstance(max_queue_size, bool) or not isinstance(max_queue_size, int) or max_queue_size < 0:
            raise ValueError(f"max_queue_size={shown(max_queue_size)}: choose a number of requests, or 0 for no limit.")
        self.config = self.settings.resolve(adapter)
        self.max_queue_size = max_queue_size
        self._engine = Engine(adapter, self.config)
        self._outbox = Outbox()
        self._worker = Worker(self._engine, self._outbox)
        self._numbers = itertools.count()
        self._maker = RequestMaker(self._engine, self.generation_config, self.settings)
        weakref.finalize(self, self._worker.abandon)

    @property
    def fatal_error(self) -> BaseException | None:
        return self._worker.fatal_error

    @property
    def background_thread_status(self) -> "CDBManager":
        """Where Transformers' server looks for `fatal_error`."""
        return self

    @property
    def stats(self) -> CDBStats:
        """What the engine has run so far."""
        return self._engine.stats

    @property
    def waiting(self) -> int:
        """Sequences that hold no place: they have not started, or were preempted."""
        return self._engine.scheduler.waiting

    @property
    def running(self) -> int:
        """Sequences in flight."""
        return self._engine.scheduler.in_flight

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of what is in flight, and of prompts that are kept for others."""
        return self._engine.cache.core_bytes + self._engine.cache.outer_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes that keys and values take, with the gaps that ended requests leave; 0 once the thread has ended."""
        return self._engine.cache.reserved_bytes

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._worker)

    def __bool__(self) -> bool:
        return True  # also without requests

    def __enter__(self) -> "CDBManager":
        self.start()
        return self

    def __exit__(self, kind: Any, *error) -> None:
        self.stop(hard_stop=kind is not None)

    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._worker.alive

    def start(self) -> None:
        """Start the thread; also again after `stop`, or after it has died.

        Raises:
            RuntimeError: it is stopping, or a result handler in its own thread asks for it.
        """
        if not self._worker.start():
            logger.warning("The manager runs already.")

    def warmup(self) -> None:
        """Nothing: no graphs are captured beforehand."""

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """End the thread after all requests; outputs that wait can still be fetched.

        Args:
            block: wait for it. A result handler in the manager's own thread does not wait.
            timeout: seconds to wait at most; None is as long as it takes.
            keep_for_next_session: have the model hand out this manager when it is asked for one like it again.
            hard_stop: end after the launch that runs; requests that are left fail.

        Raises:
            RuntimeError: the caller has paused it, and would wait for ever.
        """
        if not self.is_running() and self.fatal_error is None:
            logger.warning("The manager does not run: there is nothing to stop.")
            return
        if self._worker.is_paused_by_caller:
            raise RuntimeError("a manager that is paused cannot stop. Leave `pause` first.")
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self
        self._worker.stop(hard_stop)
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the thread to end. A result handler in the manager's own thread does not wait.

        Args:
            stop_trigger_time: not read; Transformers' manager logs with it.
            timeout: seconds to wait at most.
        """
        if not self._worker.join(timeout) and not self._worker.is_caller:
            logger.warning(f"The manager has not ended in timeout={timeout} seconds.")

    def destroy(self) -> None:
        """Stop, if it runs."""
        if self.is_running():
            self.stop()

    def pause(self) -> AbstractContextManager[None]:
        """While this context is open no launch runs, and the model may be used or changed; nothing is lost.

        Requests that are cancelled, or come to their deadline, end when it is left.

        Raises:
            RuntimeError: on entry; the manager does not run, or the caller is a result handler in its own thread.
        """
        return self._worker.pause()

    def add_request(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **kwargs: Any,
    ) -> str:
        """Queue a prompt. All arguments are checked before this returns.

        Args:
            input_ids: token ids of one prompt.
            request_id: names it in outputs; made up where none is given.
            max_new_tokens: tokens at most.
            streaming: give an output for every token, not only at the end.
            record_timestamps: note when every token came.
            eos_token_id: tokens that end it.
            seed: for sampling; it alone decides what is drawn. Without one it is drawn from PyTorch's generator now.
            deadline: seconds from now; where it has not ended by then it fails with a TimeoutError. Of requests of one
                priority that wait, the earliest deadline starts first.
            priority: an integer, 0 where none is given; higher ones start first, without starving others
                (docs/scheduling.md).
            **kwargs: `max_depth` (at most the manager's), `min_depth`, `exit_rule`, `exit_threshold`, `prefill_exit`,
                `exit_depths` (a list, for this prompt) as in `CDBConfig`, and everything that `generate` takes for a
                prompt of its own: `do_sample`, `temperature`, `logits_processor`, `stop_strings` with `tokenizer`, ...
                `max_time` counts from now.

        Returns:
            The name of the request. With `num_return_sequences` beyond 1 the other sequences' outputs are named
            `<name>__child#0` and so on.

        Raises:
            ValueError: what `generate` refuses; a name in use, or whose last output nobody has fetched; a request that
                can never fit into `max_kv_memory`.
            RuntimeError: the manager is stopping, or has died.
            queue.Full: there are `max_queue_size` requests, and for ten seconds none has begun. In an event loop and in
                a result handler, where waiting would stop everything, at once.
        """
        optional = {"max_new_tokens": max_new_tokens, "eos_token_id": eos_token_id}
        kwargs |= {name: value for name, value in optional.items() if value is not None}
        kwargs |= {"streaming": streaming, "record_timestamps": record_timestamps}
        return self._add(input_ids, request_id, kwargs).request_id

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **kwargs: Any,
    ) -> list[str]:
        """Queue several prompts with the same arguments, see `add_request`: all of them, or none. Returns their
        names."""
        check_prompts(inputs)
        if max_new_tokens is not None:
            kwargs["max_new_tokens"] = max_new_tokens
        jobs = [self.make_job(input_ids, None, streaming, record_timestamps, **kwargs) for input_ids in inputs]
        for count, job in enumerate(jobs):
            try:
                self.submit_job(job)
            except BaseException:
                for submitted in jobs[:count]:
                    self._cancel_unseen(submitted)
                raise
        return [job.request_id for job in jobs]

    def _cancel_unseen(self, job: Job) -> None:
        """End a request of whose name nobody has heard; its outputs go nowhere."""
        for name in job.names:
            self._outbox.register(name, lambda _: None, self._worker.end)
        self.cancel_request(job.request_id)
        self._outbox.forget_all_of(job.request_id)  # where somebody has taken whatever comes

    def new_name(self) -> str:
        """A name that `add_request` would make up."""
        return next(name for name in (f"req_{n}" for n in self._numbers) if not self._outbox.knows(name))

    def cancel_request(self, request_id: str) -> None:
        """End a request where it is, or one of its children alone. Its last output has the tokens so far and the error
        `CancelledError`. Nothing happens where it has ended."""
        self._worker.end(request_id, concurrent.futures.CancelledError("by cancel_request."))

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> CDBGenerationOutput | None:
        """Take the next output, of this request or of any that has no handler.

        Args:
            request_id: of one sequence only.
            timeout: seconds to wait at most; None is as long as outputs may come.

        Returns:
            None where none came in time, or none can come: the manager does not run, or the last one has been fetched.

        Raises:
            RuntimeError: a result handler in the manager's own thread asks for it, and would wait for itself.
        """
        if self._worker.is_caller:
            raise RuntimeError("a result handler is called by the thread that makes outputs, and cannot wait for one.")
        return self._outbox.get(request_id, timeout)

    def __iter__(self) -> Iterator[CDBGenerationOutput]:
        """Outputs as they come, until the manager has been stopped, perhaps by who iterates, and none is left."""
        while (output := self.get_result()) is not None:
            yield output

    def request_id_iter(self, request_id: str) -> Iterator[CDBGenerationOutput]:
        """The outputs of one sequence as they come, to its last one."""
        while (output := self.get_result(request_id)) is not None:
            yield output
            if output.is_finished():
                return

    def register_result_handler(self, request_id: str, callback: Callable[[CDBGenerationOutput], Any]) -> None:
        """Have outputs of a sequence handed to `callback`: in the event loop that is running where this is called, and
        without one in the manager's thread, which waits for it. May be called before `add_request`; an output that
        waits is handed over at once. Ends with the last output, or where `add_request` refuses the name.

        A callback that raises ends its request. One that is slow is given fewer outputs, the latest ones.

        Raises:
            ValueError: the sequence has a handler.
        """
        self._outbox.register(request_id, callback, self._worker.end)

    def _add(self, input_ids: Any, request_id: str | None, kwargs: dict[str, Any], most: int | None = None) -> Job:
        """Queue a request of `most` sequences at most; None is any number."""
        try:
            job = self.make_job(input_ids, request_id, **kwargs)
            if most is not None and len(job.names) > most:
                raise ValueError(f"num_return_sequences={len(job.names)}: choose at most {most}, or use stream_async.")
            self.submit_job(job)
        except BaseException:
            if request_id is not None:
                self._outbox.forget_all_of(request_id)
            raise
        return job

    def make_job(
        self,
        input_ids: Any,
        request_id: str | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        seed: int | None = None,
        deadline: float | None = None,
        priority: int | None = None,
        created: float | None = None,
        **kwargs: Any,
    ) -> Job:
        """What `add_request` would queue: a request that is checked and ready, and belongs to nobody yet.

        Args:
            created: when it came, of `time.perf_counter`; None is now.

        Raises:
            ValueError: as `add_request`.
        """
        told = {"streaming": streaming, "record_timestamps": record_timestamps}
        for name, value in {"deadline": deadline, "priority": priority, "created": created, **told}.items():
            check_kind(name, value)
        if request_id is not None and (not isinstance(request_id, str) or CHILD in request_id):
            raise ValueError(
                f"request_id={shown(request_id)}: choose a string without {CHILD!r}, which names children."
            )
        created = time.perf_counter() if created is None else created
        run = self._maker.make(input_ids, seed, kwargs)
        name = self.new_name() if request_id is None else request_id
        for request in run.requests:
            request.priority = 0 if priority is None else priority
            request.deadline = None if deadline is None else created + deadline
        return Job(name, run, streaming, record_timestamps, deadline, created)

    def submit_job(self, job: Job, patience: float | None = _PATIENCE) -> None:
        """Queue it.

        Args:
            patience: seconds to wait where there are `max_queue_size` requests, see `add_request`; None is for ever.

        Raises:
            RuntimeError, ValueError, queue.Full: as `add_request`.
        """
        try:
            asyncio.get_running_loop()
            patience = 0.0
        except RuntimeError:
            patience = 0.0 if self._worker.is_caller else patience
        self._worker.submit(job, self.max_queue_size, patience)

    def is_like(self, other: "CDBManager") -> bool:
        """Whether it would serve requests as the other does."""
        names = ("settings", "generation_config", "max_queue_size")
        return self.model is other.model and all(getattr(self, name) == getattr(other, name) for name in names)
