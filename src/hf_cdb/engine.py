"""The engine: schedule a launch, run it, commit it. Knows no generation config and no tokenizer."""

import time
from typing import Any

import torch

from .adapters import LoopAdapter
from .batch import Batch
from .config import CDBConfig
from .failures import errors_of_requests
from .memory import kv_budget, whole_memory
from .prefill_exits import PrefillExits
from .prefix_reuse import KEPT_SHARE, PrefixReuse
from .request import Request
from .resumption import check_resumption
from .row_memory import RowMemory
from .row_rules import RowRules
from .row_states import RowStates
from .scheduler import Launch, Scheduler
from .signals import Signal, Signals
from .spans import Spans
from .stages import Stages
from .stats import CDBStats
from .trace import Trace
from .transfer import to_device

__all__ = ["Engine"]


class Engine:
    """Runs requests to their end, one launch at a time.

    Args:
        adapter: the model's stages.
        config: resolved for that adapter (`CDBConfig.resolve`).

    Attributes:
        stats: what has run so far.
        cache: keys and values of the requests in flight.
    """

    def __init__(self, adapter: LoopAdapter, config: CDBConfig):
        self.adapter, self.config = adapter, config
        self.rule = config.exit_rule
        self._rules = RowRules(self.rule, adapter, config.max_num_seqs)
        self._stages = Stages(adapter, config)
        self.cache = self._stages.cache
        budget = kv_budget(config.max_kv_memory, adapter.device)
        self._reuse: PrefixReuse | None = None
        if config.prefix_reuse:
            self._reuse = PrefixReuse(self.cache, kv_budget(KEPT_SHARE, adapter.device) if budget is None else budget)
        self.scheduler = Scheduler(
            config.max_num_seqs,
            refill=config.refill,
            min_coda_batch=config.min_coda_batch,
            lookahead=config.lookahead,
            budget=budget,
            prefill_chunk_size=config.prefill_chunk_size,
            max_prefill_tokens=config.max_prefill_tokens,
            max_overtakes=config.max_overtakes,
            prefixes=None if self._reuse is None else self._reuse.prefixes,
        )
        once, per_loop = adapter.parameter_counts()
        self.stats = CDBStats(
            config.max_depth,
            config.max_num_seqs,
            once,
            per_loop,
            coda=adapter.coda_parameter_count(),
            trace=Trace() if config.trace else None,
        )
        self._memory = RowMemory(self.cache, self.scheduler, self.stats, config)
        whole = whole_memory(adapter.device)
        self._most = whole if budget is None else min(whole, budget)  # bytes for one request
        self._requests: dict[int, Request] = {}
        self._ended: list[Request] = []
        self._states = RowStates()
        self._prefill_exits = PrefillExits(self._rules, self._stages, self.stats, config.lookahead)
        self._signals = Signals(config.max_num_seqs, adapter.device)
        self._pending: Signal | None = None  # with lookahead: of the last loop, not yet read

    def add_request(self, request: Request) -> None:
        """Queue a request.

        One that has tokens and their depths goes on after them. Its prompt and all tokens but the last run again in one
        pass, each position at the depth that it had, so that keys, values and what follows are those of a request
        that never stopped.

        Raises:
            ValueError: its key is in use, `check` refuses it, or it cannot go on after its tokens: no run of it could
                have left them or their depths, or they cannot run again in one pass.
        """
        request.max_depth = request.max_depth or self.config.max_depth
        request.min_depth = request.min_depth or self.config.min_depth
        request.rule = request.rule or self.rule
        if request.prefill_exit is None:
            request.prefill_exit = self.config.prefill_exit
        if request.tokens or request.exit_depths:
            check_resumption(request, self.config, self.adapter.vocab_size)
        self._rules.bind(request.rule)
        most = self.check(request)
        self.scheduler.add(
            request.key,
            request.max_depth,
            min_depth=request.min_depth,
            prompt=request.prefill_length,
            cost=self._memory.needed(request) if self._memory.bounded else most,
            priority=request.priority,
            deadline=request.deadline,
            most=most,
        )
        if self._reuse is not None:
            self._reuse.add(request)
        self._requests[request.key] = request

    def check(self, request: Request) -> int:
        """Bytes that the keys and values of a request take at its end. May be called by any thread.

        Raises:
            ValueError: they could never fit into `max_kv_memory`, or into the memory of the device.
        """
        positions = self.cache.positions(request.capacity)
        cost = positions * self.cache.bytes_per_position()
        if cost > self._most:
            bounded = self._most == self.scheduler.budget
            room = f"max_kv_memory={self.config.max_kv_memory}" if bounded else "the memory"
            raise ValueError(
                f"{room} is {self._most} bytes, but a prompt of {request.prompt_length} with {request.max_new_tokens} "
                f"new tokens needs {cost}: {positions} positions of {self.cache.bytes_per_position()} bytes. Allow "
                "more, or shorten the prompt or max_new_tokens."
            )
        return cost

    def refresh_weights(self) -> None:
        """To be called after the model's weights have changed; until then launches may use copies of the old ones, and
        prompts what the old ones computed."""
        self._stages.refresh_weights()
        if self._reuse is not None:
            self._reuse.clear()

    def cancel(self, key: int) -> None:
        """End a request where it is; its tokens so far stay in it.

        Raises:
            KeyError: no request under this key is waiting or running.
        """
        if key not in self._requests:
            raise KeyError(f"key={key} names no request that is waiting or running: it has ended, or never was added.")
        self._end(self._requests[key], "cancelled")
        self.scheduler.cancel(key)

    def results(self) -> list[Request]:
        """The requests that have ended since the last call, in the order in which they ended."""
        ended, self._ended = self._ended, []
        return ended

    def fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error, or mark one that has ended; its tokens so far stay in it."""
        request.error = error
        self._end(request, "failed")
        self.scheduler.cancel(request.key)

    def close(self) -> None:
        """Cancel every request that is left: no keys or values stay behind."""
        for key in list(self._requests):
            self.cancel(key)
        if self._reuse is not None:
            self._reuse.clear()

    @torch.no_grad()
    def step(self) -> Launch | None:
        """Run one launch; None when no request is left.

        What a request's own processors and criteria raise ends that request as "failed". Any other error belongs to no
        single one: all that are left fail with it, and it is raised; the engine takes new requests after it.
        """
        trace = self.stats.trace
        began = 0.0 if trace is None else time.perf_counter()
        launch = self.scheduler.next()
        if launch is None:
            return None
        queues = None if trace is None else self.scheduler.queues
        try:
            if launch.preempted:
                self._memory.preempt([self._requests[key] for key in launch.preempted])
            if self._reuse is not None and self._reuse.pending:
                self._copy_prefixes(self._reuse)
            batch = self._batch(launch)
            flags = self._run_ahead(batch) if self.config.lookahead else self._run_and_read(batch)
        except BaseException as error:
            self._pending = None
            if self._reuse is not None:
                self._reuse.clear()
            for request in list(self._requests.values()):
                self.fail(request, error)
            for key in launch.keys:
                self.scheduler.cancel(key)  # some may have ended in this very launch
            self.scheduler.commit(launch)
            raise
        self.stats.record(launch)
        grows = self._memory.bounded and launch.stage == "coda"
        self.scheduler.commit(launch, flags, self._memory.costs(batch.rows) if grows else None)
        if trace is not None:
            spans = batch.spans
            trace.record(launch, queues, spans.tokens, int(spans.end.sum()), began, time.perf_counter())
        return launch

    def _run_and_read(self, batch: Batch) -> list[bool] | None:
        """Run a launch and wait for its signal: the next launch depends on it."""
        outcome = self._run_stage(batch)
        return outcome.read() if isinstance(outcome, Signal) else outcome

    def _run_ahead(self, batch: Batch) -> list[bool] | None:
        """With lookahead: run a launch, and only now wait for the signal of the loop before it, which decides about
        the launch after this one. A device computes meanwhile."""
        outcome = self._run_stage(batch)
        if self._pending is not None:
            self.scheduler.signal(self._pending.launch, self._pending.read())
        self._pending = outcome if isinstance(outcome, Signal) else None
        return None if isinstance(outcome, Signal) else outcome

    def _run_stage(self, batch: Batch) -> Signal | list[bool] | None:
        """A loop gives a signal; a coda gives the rows that are finished, and waits for their tokens."""
        return {"prelude": self._prelude, "loop": self._loop, "coda": self._coda}[batch.launch.stage](batch)

    def run(self) -> None:
        """Run until no request is left."""
        while self.step() is not None:
            pass

    def _batch(self, launch: Launch) -> Batch:
        return Batch(launch, self._requests, self.adapter.device, self._memory.one_by_one)

    def _prelude(self, batch: Batch) -> None:
        """New prompts and new tokens enter: embeddings, the layers before the loop, the start state."""
        if self._memory.bounded:
            self._enter(batch.rows)
        elif batch.prompts:
            self._enter([batch.rows[index] for index in batch.prompts])
        embeds, start = self._stages.prelude(batch)
        if batch.prompts:
            self._prefill_exits.begin(batch, embeds, start)
        if self.adapter.reads_embeds:
            self._states.write("embeds", batch, embeds)
            if batch.prompts and start.data_ptr() == embeds.data_ptr():
                start = start.clone()  # pieces of a prompt are written in place
        self._states.write("state", batch, start)
        if batch.deciding:
            if len(batch.deciding) < len(batch):
                tokens = batch.tensor(batch.spans.first[batch.deciding])
                embeds, start = embeds[tokens], start[tokens]
            places = batch.places_of(batch.deciding)
            self._rules.begin([batch.rows[index] for index in batch.deciding], places, embeds, start)

    def _enter(self, rows: list[Request]) -> None:
        """Room for the keys and values of requests that enter the prelude, and how the prompts that begin leave."""
        for row in self._memory.enter(rows):
            row.ragged = self._prefill_exits.plan(row)

    def _copy_prefixes(self, reuse: PrefixReuse) -> None:
        """Rows whose prompts begin like others get what those have computed."""
        reuse.free()
        self._enter(reuse.targets(self._requests))
        self.stats.reused_positions += reuse.copy()

    def _loop(self, batch: Batch) -> Signal:
        """Every row runs one loop more, each at its own depth; then the rule looks at the rows that decode."""
        if not batch.spans.tokens:  # all positions of these prompts have left
            return self._signals.send(batch.launch, [], [])
        previous = self._states.read("state", batch)
        embeds = self._states.read("embeds", batch) if self.adapter.reads_embeds else None
        state = self._stages.loop(batch, previous, embeds)
        self._states.write("state", batch, state)
        if batch.ragged:
            self._prefill_exits.leave(batch, previous, state)
        if self.cache.grows:
            self._memory.measure()
        signal = self._decide(batch, previous, state)
        if batch.again:
            reached = [depth + self.config.lookahead for depth in batch.launch.depths]
            signal.leaving = [index for index in batch.again if reached[index] >= batch.rows[index].depth_under_way]
        return signal

    def _decide(self, batch: Batch, previous: torch.Tensor, state: torch.Tensor) -> Signal:
        """Which rows their rules let go. Of prompts nothing is asked here, and the last loop's signal is never read."""
        depths = batch.launch.depths
        deciding = [index for index in batch.deciding if depths[index] < batch.rows[index].max_depth]
        rows, places, spans = [batch.rows[index] for index in deciding], batch.places, batch.spans
        if all(row.rule.name == "never" for row in rows):
            return self._signals.send(batch.launch, [], [])
        if len(deciding) < len(batch):
            places = batch.places_of(deciding)
            depths = [depths[index] for index in deciding]
            tokens = batch.tensor(spans.first[deciding])
            if any(row.rule.reads_previous for row in rows):
                previous = previous.index_select(0, tokens)
            if any(row.rule.reads_state for row in rows):
                state, spans = state.index_select(0, tokens), spans.take(deciding)
        said = self._rules.leave(rows, places, depths, previous, state, lambda: self._ask(spans, state))
        return self._signals.send(batch.launch, deciding, said)

    def _ask(self, spans: Spans, state: torch.Tensor) -> torch.Tensor:
        """Logits of rows that a rule looks at."""
        self.stats.asked["launches"] += 1
        self.stats.asked["rows"] += len(spans)
        return self._stages.coda(spans, state)

    def _coda(self, batch: Batch) -> list[bool]:
        """Rows that left: the layers after the loop, the head, the next token."""
        spans, rows = batch.spans, batch.rows
        # Of a prompt in pieces only the last one gives a token, and of what runs again none.
        ends, resumed = batch.deciding, []
        if batch.prompts:
            resumed = self._prompts_through(batch)
            without = {*resumed, *batch.again}
            ends = [index for index, row in enumerate(rows) if spans.end[index] == row.end and index not in without]
        keep = None if len(ends) == spans.tokens else batch.tensor(spans.last[ends])
        logits = self._stages.coda(spans, self._states.read("state", batch), keep)
        self._choose(rows if len(ends) == len(rows) else [rows[index] for index in ends], logits)
        finished = [False] * len(rows)
        left: list[tuple[int, int, int]] = []  # key, position, depth
        for index in ends:
            row, depth = rows[index], batch.launch.depths[index]
            if row.error is None:
                self.stats.depths[depth] += 1
                row.exit_depths.append(depth)
            finished[index] = self._ends(row)
            if finished[index]:
                continue
            if len(row.tokens) > 1:
                left.append((row.key, row.start, depth))
            else:
                row.release()
            row.advance()
        left += [(rows[index].key, rows[index].start, batch.launch.depths[index]) for index in batch.again]
        if left:
            self.cache.leave(*zip(*left, strict=True))
        for index in resumed:
            rows[index].release()
        for index in (*resumed, *batch.again):
            rows[index].advance()
            rows[index].again &= rows[index].start < rows[index].length - 1
        return finished

    def _prompts_through(self, batch: Batch) -> list[int]:
        """Note the depths of the prompts whose last piece this is. Returns those that ran again, whose rows have
        tokens."""
        resumed = []
        for index in batch.prompts:
            row = batch.rows[index]
            if batch.spans.end[index] < row.end:
                continue
            if row.tokens:
                resumed.append(index)
            elif row.ragged is None:
                self.stats.prompt_depths[row.max_depth] += row.end
            else:
                row.prompt_depths = row.ragged.depths.tolist()
                self.stats.prompt_depths.update(row.prompt_depths)
        return resumed

    def _choose(self, rows: list[Request], logits: torch.Tensor) -> None:
        """Choose a token for every row; one whose processors raised has an error instead."""
        groups: dict[Any, list[int]] = {}
        for index, row in enumerate(rows):
            groups.setdefault(getattr(row.sampler, "key", None) or id(row.sampler), []).append(index)
        for indices in groups.values():
            chosen = [rows[index] for index in indices]
            part = logits if len(indices) == len(rows) else logits[to_device(torch.tensor(indices), logits.device)]
            for row, token in zip(chosen, chosen[0].sampler.choose(chosen, part), strict=True):
                if row.error is None:
                    row.tokens.append(token)

    def _ends(self, row: Request) -> bool:
        """End a row that has its last token, or an error."""
        try:
            done = row.error is not None or len(row.tokens) >= row.max_new_tokens
            done = done or (row.stop is not None and row.stop(row))
        except errors_of_requests() as error:
            row.error, done = error, True
        if done:
            self._end(row, "finished" if row.error is None else "failed")
        return done

    def _end(self, row: Request, status: str) -> None:
        row.status = status
        row.release()
        if self._reuse is not None:
            self._reuse.end(row)
        self._memory.end(row)
        self._requests.pop(row.key, None)
        self._ended.append(row)
