"""The thread of a manager: it alone touches the engine, and runs what others hand in."""

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

from .engine import Engine
from .jobs import Job
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
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._new: deque[Job] = deque()
        self._ending: deque[tuple[Job, BaseException]] = deque()  # to be ended from outside, with the cause
        self._jobs: dict[str, Job] = {}  # all that have not ended, by the name that the caller gave
        self._rows: dict[int, tuple[Job, int]] = {}  # by the engine's key: job, and which of its sequences
        self._due: list[tuple[float, int, Job]] = []  # a heap of jobs with a deadline
        self._key = 0
        self._mode = _RUN
        self._pauses, self._paused = 0, False

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._jobs

    def __len__(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        with self._changed:
            self.fatal_error, self._mode = None, _RUN
            self.outbox.open()
            self._thread = threading.Thread(target=self._work, name="hf-cdb-manager", daemon=True)
            self._thread.start()

    def stop(self, hard: bool) -> None:
        """Have the thread end: after all jobs, or `hard` at once, which fails those that are left."""
        with self._changed:
            self._mode = max(self._mode, _STOP if hard else _FLUSH)
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread; whether it has ended."""
        if self._thread is not None:
            self._thread.join(timeout)
        return not self.alive

    def submit(self, job: Job) -> None:
        """Hand a job in; it may wait for `start`.

        Raises:
            ValueError: its name is that of a job that has not ended.
            RuntimeError: the thread is stopping, or has died.
        """
        with self._changed:
            if self.fatal_error is not None:
                raise RuntimeError(
                    f"request {job.request_id!r} is refused: the manager has died of {self.fatal_error!r}. Start it "
                    "again."
                ) from self.fatal_error
            if self._mode != _RUN:
                raise RuntimeError(f"request {job.request_id!r} is refused: the manager is stopping. Start it again.")
            if job.request_id in self._jobs:
                raise ValueError(
                    f"request_id={job.request_id!r} names a request that has not ended. Choose another, or leave it "
                    "out."
                )
            self._jobs[job.request_id] = job
            self._new.append(job)
            self._changed.notify_all()

    def wait_for_room(self, most: int, timeout: float) -> bool:
        """Wait until there are fewer than `most` jobs; False where that takes longer than `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._jobs) < most or self.fatal_error is not None, timeout)

    def end(self, request_id: str, cause: BaseException) -> bool:
        """End a job from outside; False where none of this name is left."""
        with self._changed:
            job = self._jobs.get(request_id)
            if job is None:
                return False
            self._ending.append((job, cause))
            self._changed.notify_all()
            return True

    @contextmanager
    def pause(self) -> Iterator[None]:
        """While open, no launch runs; begins when the one that ran has ended. Weights may be changed meanwhile.

        Raises:
            RuntimeError: the thread does not run, or asks for a pause itself, which would wait for ever.
        """
        if not self.alive or threading.current_thread() is self._thread:
            raise RuntimeError("only a manager that runs can be paused, and not by its own thread (a result handler).")
        with self._changed:
            self._pauses += 1
            self._changed.wait_for(lambda: self._paused or not self.alive)
        try:
            yield
        finally:
            with self._changed:
                self._pauses -= 1
                self._changed.notify_all()

    @property
    def paused_by(self) -> int:
        """How many hold a pause."""
        return self._pauses

    def _work(self) -> None:
        try:
            while self._take_in():
                self._run()
            self._end_all(RuntimeError("the manager was stopped before this request had ended."))
        except BaseException as error:  # nobody else would tell those who wait
            with self._changed:
                self.fatal_error = error
            self._end_all(error)
        finally:
            self.outbox.close()

    def _take_in(self) -> bool:
        """Wait for something to run; False when it is time to end."""
        with self._changed:
            while True:
                self._paused = self._pauses > 0
                if self._paused:
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: not self._pauses)
                    self.engine.refresh_weights()
                    continue
                if self._mode == _STOP:
                    return False
                new, ending = list(self._new), list(self._ending)
                self._new.clear()
                self._ending.clear()
                if new or ending or self._rows:
                    break
                if self._mode == _FLUSH:
                    return False
                self._changed.wait()
        for job in new:
            self._queue(job)
        for job, cause in ending:
            self._end(job, cause)
        while self._due and time.perf_counter() >= self._due[0][0]:
            job = heapq.heappop(self._due)[-1]
            self._end(job, TimeoutError(f"deadline={job.deadline}: so many seconds have passed."))
        return True

    def _queue(self, job: Job) -> None:
        for index, request in enumerate(job.rows):
            request.key, self._key = self._key, self._key + 1
            self._rows[request.key] = job, index
            self.engine.add_request(request)
        if job.due is not None:
            heapq.heappush(self._due, (job.due, self._key, job))

    def _end(self, job: Job, cause: BaseException) -> None:
        """End what is left of a job."""
        job.cause = cause
        for request in job.rows:
            if not request.ended:
                self.engine.cancel(request.key)
        self._deliver_ended()

    def _run(self) -> None:
        launch = self.engine.step()
        if launch is not None:
            self._look_at(launch)
        self._deliver_ended()

    def _look_at(self, launch: Launch) -> None:
        """Tell of new tokens, and let criteria of whole jobs end them."""
        mine = [self._rows[key] for key in launch.keys if key in self._rows]
        if launch.stage == "prelude":
            for job, _ in mine:
                if job.started < 0:
                    job.started = time.perf_counter()
        if launch.stage != "coda":
            return
        for job in dict.fromkeys(job for job, _ in mine):
            job.run.stops.after_tokens(self.engine, job.rows)
        for job, row in mine:
            if job.new_token(row) and job.streaming and not job.rows[row].ended:
                self._deliver(job, row)

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
                self._jobs.pop(job.request_id, None)
                self._changed.notify_all()

    def _deliver(self, job: Job, row: int) -> None:
        """Hand an output on; a handler that raises ends its own job."""
        try:
            self.outbox.put(job.output(row))
        except Exception as error:
            logger.warning(f"The result handler of request {job.names[row]!r} raised {error!r} and is called no more.")
            if not job.rows[row].ended:
                self._end(job, error)

    def _end_all(self, cause: BaseException) -> None:
        with self._changed:
            self._new.clear()
            self._ending.clear()
            jobs = list(self._jobs.values())
        self.engine.close()
        self.engine.results()
        self._rows.clear()
        self._due.clear()
        for job in jobs:
            job.cause = cause
            for row in job.left:
                if not job.rows[row].ended:  # it has never reached the engine
                    job.rows[row].status = "cancelled"
                self._deliver(job, row)
        with self._changed:
            self._jobs.clear()
            self._changed.notify_all()
