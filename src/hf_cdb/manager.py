"""Requests that come and go: `model.init_continuous_batching(cdb=True)`."""

import asyncio
import concurrent.futures
import copy
import dataclasses
import itertools
import math
import numbers
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from .adapters import adapter_for
from .config import CDBConfig, saved_settings
from .engine import Engine
from .exits import RULES, ExitRule
from .generation_run import GenerationRun, prepare_run
from .jobs import CDBGenerationOutput, Job, parent_of
from .model_checks import check_model, compute_as_wrapped
from .outbox import Outbox
from .request import Request
from .stats import CDBStats
from .worker import Worker

__all__ = ["CDBManager"]

logger = logging.get_logger(__name__)

# What belongs to the prompts of one call, and what add_request has in its place.
_OF_CALLS = {"seeds": "seed", "token_limits": "max_new_tokens", "exit_depths": "exit_depths"}
# Settings of cdb that may differ from request to request; the others belong to the engine that all share.
_OF_REQUESTS = ("max_depth", "min_depth", "exit_rule", "exit_threshold", "exit_depths")


class CDBManager:
    """Serves requests as they come, in a thread of its own, by continuous depth batching.

    Names and meaning are those of Transformers' `ContinuousBatchingManager` wherever both have the thing. Methods may
    be called by any thread.

        with model.init_continuous_batching(cdb=True) as manager:
            manager.add_request([5, 6, 7], max_new_tokens=20)
            for output in manager:
                ...

    Args:
        model: a looped model that `generate(cdb=True)` takes.
        generation_config: defaults of all requests; the model's own where none is given.
        cdb: as for `generate`: True, a dict of settings or a `CDBConfig`.
        max_queue_size: requests that have not ended at most, beyond which `add_request` waits; 0 is no limit.

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
        adapter = adapter_for(model)
        check_model(adapter)
        compute_as_wrapped(adapter)
        self.model = adapter.model
        self.generation_config = generation_config or self.model.generation_config
        self._settings = CDBConfig.create(cdb, saved_settings(self.generation_config, adapter), adapter)
        for name, own in _OF_CALLS.items():
            if getattr(self._settings, name) is not None:
                raise ValueError(
                    f"{name}={getattr(self._settings, name)!r} belongs to the prompts of one call, and a manager has "
                    f"none. Give {own} to add_request."
                )
        self.config = self._settings.resolve(adapter)
        self.max_queue_size = max_queue_size
        self._engine = Engine(adapter, self.config)
        self._outbox = Outbox()
        self._worker = Worker(self._engine, self._outbox)
        self._rules: weakref.WeakValueDictionary[tuple, ExitRule] = weakref.WeakValueDictionary()
        self._shared(self.config.exit_rule)
        self._numbers = itertools.count()
        self._preparing = threading.Lock()

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
        """Sequences that have not started."""
        return self._engine.scheduler.waiting

    @property
    def running(self) -> int:
        """Sequences in flight."""
        return self._engine.scheduler.in_flight

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of what is in flight."""
        return self._engine.cache.core_bytes + self._engine.cache.outer_bytes

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._worker)

    def __enter__(self) -> "CDBManager":
        self.start()
        return self

    def __exit__(self, kind: Any, *error) -> None:
        self.stop(hard_stop=kind is not None)

    def is_running(self) -> bool:
        """Whether the thread runs."""
        return self._worker.alive

    def start(self) -> None:
        """Start the thread; also again after `stop`, or after it has died."""
        if self.is_running():
            logger.warning("The manager runs already.")
            return
        self._worker.start()

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
            block: wait for it.
            timeout: seconds to wait at most; None is as long as it takes.
            keep_for_next_session: have the model hand out this manager when it is asked for one again.
            hard_stop: end at once; requests that are left fail.

        Raises:
            RuntimeError: it is paused, and would wait for ever.
        """
        if self._worker.paused_by:
            raise RuntimeError("a manager that is paused cannot stop. Leave `pause` first.")
        if keep_for_next_session:
            self.model._cached_continuous_batching_manager = self
        self._worker.stop(hard_stop)
        if block:
            self.join(timeout=timeout)

    def join(self, stop_trigger_time: float | None = None, timeout: float | None = None) -> None:
        """Wait for the thread to end.

        Args:
            stop_trigger_time: not read; Transformers' manager logs with it.
            timeout: seconds to wait at most.
        """
        if not self._worker.join(timeout):
            logger.warning(f"The manager has not ended in timeout={timeout} seconds.")

    def destroy(self) -> None:
        """End at once, if it runs."""
        if self.is_running():
            self.stop(hard_stop=True)

    def pause(self) -> AbstractContextManager[None]:
        """While this context is open no launch runs, and the model may be used or changed; nothing is lost.

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
        *,
        seed: int | None = None,
        deadline: float | None = None,
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
            deadline: seconds from now; where it has not ended by then it fails with a TimeoutError.
            **kwargs: `max_depth` (at most the manager's), `min_depth`, `exit_rule`, `exit_threshold`, `exit_depths` (a
                list, for this prompt) as in `CDBConfig`, and everything that `generate` takes for a prompt of its own:
                `do_sample`, `temperature`, `logits_processor`, `stop_strings` with `tokenizer`, ...

        Returns:
            The name of the request. With `num_return_sequences` beyond 1 the other sequences' outputs are named
            `<name>__child#0` and so on.

        Raises:
            ValueError: what `generate` refuses, a name in use, or a request that can never fit into `max_kv_memory`.
            RuntimeError: the manager is stopping, or has died.
            queue.Full: there are `max_queue_size` requests, and for ten seconds none has ended.
        """
        if deadline is not None and (not isinstance(deadline, numbers.Real) or not 0 < deadline < math.inf):
            raise ValueError(f"deadline={deadline!r}: choose seconds from now, a positive number, or None.")
        settings = {name: kwargs.pop(name) for name in _OF_REQUESTS if kwargs.get(name) is not None}
        for name, value in (("max_new_tokens", max_new_tokens), ("eos_token_id", eos_token_id)):
            if value is not None:
                kwargs[name] = value
        run = self._prepare(input_ids, seed, settings, kwargs)
        name = self.new_name() if request_id is None else request_id
        job = Job(name, run, streaming, record_timestamps, deadline)
        if self.max_queue_size and not self._worker.wait_for_room(self.max_queue_size, timeout=10):
            raise queue.Full(
                f"request {name!r}: there are max_queue_size={self.max_queue_size} requests, and for 10 seconds none "
                "has ended. Try again later, or allow more."
            )
        self._worker.submit(job)
        return name

    def new_name(self) -> str:
        """A name that `add_request` would make up."""
        return f"req_{next(self._numbers)}"

    def add_requests(self, inputs: Sequence[Sequence[int]], *args, **kwargs) -> list[str]:
        """Queue several prompts with the same arguments, see `add_request`; their names."""
        return [self.add_request(input_ids, None, *args, **kwargs) for input_ids in inputs]

    def cancel_request(self, request_id: str) -> None:
        """End a request where it is. Its last output has the tokens so far and the error `CancelledError`."""
        self._worker.end(request_id, concurrent.futures.CancelledError("by cancel_request."))

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> CDBGenerationOutput | None:
        """Take the next output, of this request or of any.

        Args:
            request_id: of one request only.
            timeout: seconds to wait at most; None is as long as outputs may come.

        Returns:
            None where none came in time, or none can come because the manager does not run.
        """
        return self._outbox.get(request_id, timeout)

    def __iter__(self) -> Iterator[CDBGenerationOutput]:
        """Outputs as they come, until the manager has ended and none is left."""
        while self.is_running() or len(self._outbox):
            output = self.get_result(timeout=0.1)
            if output is not None:
                yield output

    def request_id_iter(self, request_id: str) -> Iterator[CDBGenerationOutput]:
        """The outputs of one request as they come, to its last one."""
        parent = parent_of(request_id)
        while True:
            coming = parent in self._worker
            output = self.get_result(request_id, timeout=0.1)
            if output is not None:
                yield output
            if (output is None and not coming) or (output is not None and output.is_finished()):
                return

    def register_result_handler(self, request_id: str, callback: Callable[[CDBGenerationOutput], Any]) -> None:
        """Have outputs of a request handed to `callback`: in the event loop that is running where this is called, and
        without one in the manager's thread. May be called before `add_request`. Ends with the last output.

        A callback that raises fails its request. One that is slow is given fewer outputs, the latest ones.
        """
        self._outbox.register(request_id, callback, self._worker.end)

    async def generate_async(self, input_ids: Sequence[int] | torch.Tensor, **kwargs) -> CDBGenerationOutput:
        """The last output of a request, see `add_request`; cancelled with the task that awaits it."""
        async for output in self.stream_async(input_ids, streaming=False, **kwargs):
            last = output
        return last

    async def stream_async(
        self, input_ids: Sequence[int] | torch.Tensor, *, streaming: bool = True, **kwargs
    ) -> AsyncIterator[CDBGenerationOutput]:
        """The outputs of a request as they come, see `add_request`; one that is not read to its end is cancelled."""
        outputs: asyncio.Queue[CDBGenerationOutput] = asyncio.Queue()
        name = self.add_request(input_ids, streaming=streaming, **kwargs)
        self.register_result_handler(name, outputs.put_nowait)
        try:
            while True:
                output = await outputs.get()
                yield output
                if output.is_finished():
                    return
        finally:
            self.cancel_request(name)

    def _prepare(
        self, input_ids: Any, seed: int | None, settings: dict[str, Any], kwargs: dict[str, Any]
    ) -> GenerationRun:
        """What `generate` would run for this prompt."""
        prompt = torch.as_tensor(input_ids, device=self._engine.adapter.device)
        if prompt.ndim != 1 or prompt.is_floating_point() or not len(prompt):
            raise ValueError(f"input_ids={input_ids!r}: give the token ids of one prompt, a list of integers.")
        if "exit_depths" in settings:
            settings = {"exit_rule": "replay", **settings, "exit_depths": [settings["exit_depths"]]}
        if settings.get("exit_rule", self._settings.exit_rule) != self._settings.exit_rule:
            settings = {"exit_threshold": None, **settings}  # a threshold belongs to its rule
        generation_config = copy.deepcopy(kwargs.pop("generation_config", None) or self.generation_config)
        kwargs = generation_config.update(**kwargs)
        if seed is None and generation_config.do_sample:
            seed = int(torch.randint(2**62, ()))
        config = dataclasses.replace(self._settings, **settings, seeds=None if seed is None else [seed])
        with self._preparing:  # nobody has promised that generate is safe in several threads at once
            run = prepare_run(self.model, prompt[None], generation_config=generation_config, cdb=config, **kwargs)
        if run.config.max_depth > self.config.max_depth:
            raise ValueError(
                f"max_depth={run.config.max_depth} exceeds the manager's own {self.config.max_depth}, to which its "
                "cache is made. Give that to the manager."
            )
        for request in run.requests:
            self._complete(request, run.config)
        return run

    def _complete(self, request: Request, config: CDBConfig) -> None:
        """Settings of its own, and a check that it can ever run."""
        request.min_depth, request.max_depth = config.min_depth, config.max_depth
        request.rule = self._shared(config.exit_rule)
        self._engine.check(request)

    def _shared(self, rule: ExitRule) -> ExitRule:
        """One rule for all requests that ask for the same, so that it decides about all of them at once."""
        if type(rule) not in RULES.values() or rule.name == "replay":
            return rule
        return self._rules.setdefault((type(rule), rule.threshold, getattr(rule, "head", None)), rule)
