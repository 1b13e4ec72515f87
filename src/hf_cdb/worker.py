"""The thread of a manager: it alone touches the engine, and runs what others hand in."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers.utils import logging

from .engine import Engine
from .jobs import Job, parent_of
from .outbox import Outbox
from .request import Request
from .scheduler import Launch

__all__ = ["Worker"]

logger = logging.get_logger(__name__)

_RUN, _FLUSH, _STOP = range(3)


class Worker:
    """Runs jobs until it is told to stop. An error of the model ends all jobs with it, and the thread; `start` again.

    Args:
        engine: with nothing in it.
        outbox: where outputs go.

    Attributes:
        fatal_error: what ended the thread; None while there is nothing of that kind.
    """

    def __init__(self, engine: Engine, outbox: Outbox):
        self.engine, self.outbox = engine, outbox
        self.fatal_error: BaseException | None = None
        self._starting = threading.Lock()
        self._changed = threading.Condition()  # what follows is changed and waited for under it
        self._thread: threading.Thread | None = None
        self._working = False  # the thread looks at what is handed in
        self._mode = _RUN
        self._new: deque[Job] = deque()
        self._ending: deque[tuple[Sequence[Request], BaseException]] = deque()  # from outside, with the cause
        self._jobs: dict[str, Job] = {}  # all that have not ended, by the name that the caller gave
        self._pauses: list[int] = []  # of which threads
        self._paused = False
        # The thread's own.
        self._rows: dict[int, tuple[Job, int]] = {}  # by the engine's key: job, and which of its sequences
        self._key = 0

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_caller(self) -> bool:
        """Whether this is asked by the thread itself: by a result handler."""
        return threading.current_thread() is self._thread

    @property
    def is_paused_by_caller(self) -> bool:
        return threading.get_ident() in self._pauses

    def start(self) -> bool:
        """Start the thread, again after it has ended; False where it runs.

        Raises:
            RuntimeError: it is stopping, or starts itself.
        """
        if self.is_caller:
            raise RuntimeError("a result handler cannot start the manager that calls it. Start it elsewhere.")
        with self._starting:
            if self._working and self.fatal_error is None:
                if self._mode == _RUN:
                    return False
                raise RuntimeError("the manager is stopping. Wait for it with `join`, then start it.")
            self.join()  # one that has died may still be telling its requests
            thread = threading.Thread(target=self._work, name="hf-cdb-manager", daemon=True)
            with self._changed:  # the thread waits for it
                thread.start()
                self._thread, self.fatal_error, self._mode, self._working = thread, None, _RUN, True
                self.outbox.open()
            return True

    def stop(self, hard: bool) -> None:
        """Have the thread end: after all jobs, or `hard` at once, which fails those that are left."""
        with self._changed:
            self._mode = max(self._mode, _STOP if hard else _FLUSH)
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; whether it has ended. The thread itself does not wait."""
        thread = self._thread  # another may be started as soon as it has ended
        if thread is not None and not self.is_caller:
            thread.join(timeout)
        return thread is None or not thread.is_alive()

    def abandon(self) -> None:
        """End at once. Python may not leave a thread behind in the middle of a launch."""
        self.stop(hard=True)
        self.join(timeout=5)

    def submit(self, job: Job, most_waiting: int = 0, timeout: float | None = 0) -> None:
        """Hand a job in; it may wait for `start`.

        Args:
            most_waiting: jobs at most that no launch has run for; 0 is no limit.
            timeout: seconds to wait for room at most; None is for ever.

        Raises:
            ValueError: its name is that of a job that has not ended, or whose output nobody has fetched.
            RuntimeError: the thread is stopping, or has died.
            queue.Full: there was no room.
        """
        with self._changed:
            self._check(job)
            if most_waiting and not self._changed.wait_for(lambda: self._has_room(most_waiting), timeout):
                raise queue.Full(
                    f"request {job.request_id!r}: max_queue_size={most_waiting} requests wait, and none has begun for "
                    f"{timeout} seconds. Try again later, or allow more."
                )
            self._check(job)
            self.outbox.expect(job.names)
            self._jobs[job.request_id] = job
            self._new.append(job)
            self._changed.notify_all()

    def _check(self, job: Job) -> None:
        if self.fatal_error is not None:
            raise RuntimeError(
                f"request {job.request_id!r} is refused: the manager has died of {self.fatal_error!r}. Start it again."
            ) from self.fatal_error
        if self._mode != _RUN:
            raise RuntimeError(f"request {job.request_id!r} is refused: the manager is stopping. Start it again.")
        old = self._jobs.get(job.request_id)
        if old is not None and old.left:
            raise ValueError(
                f"request_id={job.request_id!r} names a request that has not ended. Choose another, or leave it out."
            )

    def _has_room(self, most_waiting: int) -> bool:
        """Whether a job could be taken, or is refused for another reason."""
        waiting = sum(job.started < 0 for job in self._jobs.values())
        return waiting < most_waiting or self.fatal_error is not None or self._mode != _RUN

    def end(self, name: str, cause: BaseException) -> None:
        """End sequences from outside: all of a job, or the one of this name. Nothing happens where none is left."""
        with self._changed:
            job = self._jobs.get(parent_of(name))
            if job is not None:
                self._ending.append((job.named(name), cause))
                self._changed.notify_all()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While open, no launch runs; begins when the one that ran has ended. Weights may be changed meanwhile.

        Raises:
            RuntimeError: the thread does not run, ends before it could pause, or asks for a pause itself, which would
                wait for ever.
        """
        with self._changed:
            if not self._working or self.is_caller:
                raise RuntimeError("only a manager that runs can be paused, and not by its own thread (a handler).")
            self._pauses.append(threading.get_ident())
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._paused or not self._working)
                if not self._paused:
                    raise RuntimeError("the manager ended before it could pause.") from self.fatal_error
            except BaseException:
                self._leave_pause()
                raise
        try:
            yield
        finally:
            with self._changed:
                self._leave_pause()

    def _leave_pause(self) -> None:
        self._pauses.remove(threading.get_ident())
        self._changed.notify_all()

    def _work(self) -> None:
        cause: BaseException = RuntimeError("the manager was stopped before this request had ended.")
        try:
            if self.engine.adapter.device.index is not None and self.engine.adapter.device.type == "cuda":
                torch.cuda.set_device(self.engine.adapter.device)  # of this thread
            self.engine.refresh_weights()  # they may have changed while nothing ran
            while self._take_in():
                self._run()
        except BaseException as error:  # nobody else would tell those who wait
            cause = error
            with self._changed:
                self.fatal_error = error
            logger.error(f"The manager has died, and its requests have failed: {error!r}")
        finally:
            try:
                self._end_all(cause)
            finally:
                self.outbox.close()
                with self._changed:
                    self._working = self._paused = False
                    self._changed.notify_all()

    def _take_in(self) -> bool:
        """Wait for something to run; False when it is time to end."""
        with self._changed:
            while True:
                self._paused = bool(self._pauses)
                if self._paused:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._pauses)
                    self.engine.refresh_weights()
                    continue
                if self._mode == _STOP:
                    return False
                if self._new or self._ending or self._rows:
                    break
                if self._mode == _FLUSH:
                    return False
                self._changed.wait()
            new, ending = list(self._new), list(self._ending)
            self._new.clear()
            self._ending.clear()
        for job in new:
            self._queue(job)
        for rows, cause in ending:
            self._end(rows, cause)
        self._end_late()
        return True

    def _queue(self, job: Job) -> None:
        refused = []
        for index, request in enumerate(job.rows):
            request.key, self._key = self._key, self._key + 1
            self._rows[request.key] = job, index
            try:
                self.engine.add_request(request)
            except BaseException as error:  # of an exit rule of its own, whatever it is
                request.status, request.error = "failed", error
                refused.append(request)
        for request in refused:
            self._finish(request)

    def _end_late(self) -> None:
        for key in self.engine.scheduler.overdue(time.perf_counter()):
            job, row = self._rows[key]
            self._end([job.rows[row]], TimeoutError(f"deadline={job.deadline}: so many seconds have passed."))

    def _end(self, rows: Sequence[Request], cause: BaseException) -> None:
        """End what is left of these."""
        for request in rows:
            if not request.ended:
                request.error = cause
                self.engine.cancel(request.key)
        self._deliver_ended()

    def _run(self) -> None:
        launch = self.engine.step()
        if launch is not None:
            self._look_at(launch)
        self._deliver_ended()

    def _look_at(self, launch: Launch) -> None:
        """Tell of new tokens, and let criteria of whole jobs end them."""
        if launch.stage == "loop":
            return
        mine = [self._rows[key] for key in launch.keys]
        if launch.stage == "prelude":
            self._note_started([job for job, _ in mine if job.started < 0])
            return
        for job in dict.fromkeys(job for job, _ in mine):
            job.run.stops.after_tokens(self.engine, job.rows)
        told = [(job, row) for job, row in mine if job.new_token(row)]
        for job, row in told:
            if job.streaming and not job.rows[row].ended:
                self._deliver(job, row)

    def _note_started(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        with self._changed:
            for job in jobs:
                job.started = time.perf_counter()
            self._changed.notify_all()  # who waits for room

    def _deliver_ended(self) -> None:
        for request in self.engine.results():
            self._finish(request)

    def _finish(self, request: Request) -> None:
        job, row = self._rows.pop(request.key)
        request.sampler.release(request.row)
        job.run.stops.release(request.row)
        self._deliver(job, row)
        if not job.left:
            with self._changed:
                if self._jobs.get(job.request_id) is job:  # else its name is taken again already
                    del self._jobs[job.request_id]
                self._changed.notify_all()

    def _deliver(self, job: Job, row: int) -> None:
        """Hand an output on. A handler that raises ends what it was to be told of, and nothing else, whatever it is."""
        try:
            self.outbox.put(job.output(row))
        except BaseException as error:
            name = job.names[row]
            logger.warning(f"The result handler of request {name!r} raised {error!r} and is called no more.")
            if not job.rows[row].ended:
                self._end(job.named(name), error)

    def _end_all(self, cause: BaseException) -> None:
        """End every job, and give the memory back."""
        with self._changed:
            self._new.clear()
            self._ending.clear()
            jobs = list(self._jobs.values())
        try:
            for job in jobs:
                for row in job.rows:
                    row.error = row.error if row.ended else cause
            self.engine.close()
            self.engine.results()
            self.engine.cache.release()
        finally:
            self._rows.clear()
            for job in jobs:
                for row in job.left:
                    if not job.rows[row].ended:  # it has never reached the engine
                        job.rows[row].status = "cancelled"
                    self._deliver(job, row)
            with self._changed:
                self._jobs.clear()
                self._changed.notify_all()
