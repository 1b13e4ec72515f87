"""A manager in an event loop: outputs are awaited, and what is not awaited to its end is cancelled."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import torch

from .jobs import CDBGenerationOutput, Job

__all__ = ["AsyncFront"]


class AsyncFront:
    """The part of `CDBManager` that is awaited; it needs `_add`, `register_result_handler` and `cancel_request`."""

    async def generate_async(
        self, input_ids: Sequence[int] | torch.Tensor, *, request_id: str | None = None, **kwargs
    ) -> CDBGenerationOutput:
        """The last output of a request of one sequence, see `add_request`; cancelled with the task that awaits it."""
        job = self._add(input_ids, request_id, kwargs, most=1)
        async with aclosing(self._outputs_of(job)) as outputs:
            async for output in outputs:
                last = output
        return last

    async def stream_async(
        self,
        input_ids: Sequence[int] | torch.Tensor,
        *,
        request_id: str | None = None,
        streaming: bool = True,
        **kwargs,
    ) -> AsyncIterator[CDBGenerationOutput]:
        """The outputs of a request and of its children as they come, see `add_request`; one that is not read to its
        end is cancelled."""
        job = self._add(input_ids, request_id, {"streaming": streaming, **kwargs})
        async with aclosing(self._outputs_of(job)) as outputs:
            async for output in outputs:
                yield output

    async def _outputs_of(self, job: Job) -> AsyncIterator[CDBGenerationOutput]:
        newest: dict[str, CDBGenerationOutput] = {}  # as in the outbox: who reads slowly is given fewer
        came = asyncio.Event()

        def take(output: CDBGenerationOutput) -> None:
            newest[output.request_id] = output
            came.set()

        left = set(job.names)
        try:
            for name in job.names:
                self.register_result_handler(name, take)
            while left:
                await came.wait()
                came.clear()
                while newest:
                    output = newest.pop(next(iter(newest)))
                    if output.is_finished():
                        left.remove(output.request_id)
                    yield output
        finally:
            for name in left:
                self.cancel_request(name)
