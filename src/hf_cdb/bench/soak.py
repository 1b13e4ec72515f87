"""`hf-cdb bench soak`: many requests with random options, cancels and faults; none lost, none mixed, memory flat."""

import argparse
import gc
import random
import time
import tracemalloc
from collections import Counter, deque
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from ..adapters import adapter_for
from ..jobs import CDBGenerationOutput, sequence_names
from ..manager import CDBManager
from .models import add_model_arguments, load_model
from .report import Report, add_run_arguments, markdown_table, set_threads

__all__ = ["Soak", "SoakFault", "add_arguments"]

# What requests bring, by name. Settings of cdb among them are those that `add_request` takes.
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "hot": {"do_sample": True, "temperature": 3.0},
    "pair": {"do_sample": True, "num_return_sequences": 2},
    "penalty": {"repetition_penalty": 1.5},
    "shallow": {"exit_threshold": 0.2},
    "full": {"exit_rule": "never"},
    "confidence": {"exit_rule": "confidence", "exit_threshold": 0.5},
    "latent": {"exit_rule": "latent-diff", "exit_threshold": 0.3},
    "bounded": {"min_depth": 2, "max_depth": 3},
}
_OF_CDB = ("exit_rule", "exit_threshold", "min_depth", "max_depth")
# What becomes of a request, and how often.
FATES = {"finish": 60, "stream": 10, "cancel": 10, "processor": 8, "handler": 5, "late": 4, "refused": 3}
_PATIENCE = 120.0  # seconds without any output that mean one is lost


class SoakFault(Exception):
    """What a soak raises on purpose."""


@dataclass(frozen=True)
class Case:
    """A request; equal ones have the same tokens."""

    prompt: tuple[int, ...]
    new_tokens: int
    kind: str
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        return {"max_new_tokens": self.new_tokens, **KINDS[self.kind]}

    @property
    def sampled(self) -> bool:
        return KINDS[self.kind].get("do_sample", False)

    @property
    def sequences(self) -> int:
        return KINDS[self.kind].get("num_return_sequences", 1)


class Soak:
    """Sends requests to a manager and holds every output against the request's run alone.

    Args:
        model: without ends of sequence (`load_model`).
        settings: of the manager.
        cases: different requests; each is run alone once, and sent many times.
        seed: of everything that is drawn.
        in_flight: requests sent and not ended at most.

    Attributes:
        ends: how the sequences ended: "tokens", or the name of the cause.
        samples: rows of the table of memory, see `sample`.
    """

    def __init__(
        self, model: PreTrainedModel, settings: dict[str, Any], cases: int = 150, seed: int = 0, in_flight: int = 200
    ):
        self.model, self.settings, self.in_flight = model, settings, in_flight
        self.ends: Counter[str] = Counter()
        self.samples: list[dict[str, Any]] = []
        self._choose = random.Random(seed)
        self._victims = random.Random(seed)  # apart, for who can be cancelled is a matter of time
        vocab = adapter_for(model).vocab_size
        self._cases = [self._draw_case(vocab) for _ in range(cases)]
        self._alone: dict[Case, list[tuple[list[int], list[int]]]] = {}
        self._pending: dict[str, tuple[Case, int, str, int]] = {}  # sequence -> case, which of its sequences, fate, at
        self._handled: deque[CDBGenerationOutput] = deque()
        self._began = time.perf_counter()

    def _draw_case(self, vocab: int) -> Case:
        choose = self._choose
        prompt = tuple(choose.randrange(1, vocab) for _ in range(choose.randint(1, 24)))
        return Case(prompt, choose.randint(1, 16), choose.choice(list(KINDS)), choose.randrange(2**40))

    def run(self, requests: int, fault_every: int, sample_every: int) -> None:
        """Send so many requests; every so many the model raises and the manager is started again.

        Raises:
            RuntimeError: an output was lost, came twice, or differs from what the request gives alone.
        """
        for case in self._cases:
            self.alone(case)
        self._manager = CDBManager(self.model, cdb=self.settings)
        with self._manager:
            for number in range(requests):
                if number % sample_every == 0:
                    self.sample(number)
                if fault_every and number % fault_every == fault_every // 2:
                    self._break_model()
                self._send(number)
                while len(self._pending) >= self.in_flight:
                    self._take()
                while self._take(wait=False):
                    pass
            self.sample(requests)

    def sample(self, requests: int) -> None:
        """Wait until nothing is in flight, and note what memory is held."""
        while self._pending:
            if not self._take():
                raise RuntimeError(f"{len(self._pending)} outputs never came: {list(self._pending)[:5]} ...")
        gc.collect()
        self.samples.append(
            {
                "requests": requests,
                "seconds": time.perf_counter() - self._began,
                "RSS MB": psutil.Process().memory_info().rss / 2**20,
                "Python MB": tracemalloc.get_traced_memory()[0] / 2**20,
                "reserved for keys and values MB": self._manager.reserved_bytes / 2**20,
            }
        )

    def _send(self, number: int) -> None:
        case = self._choose.choice(self._cases)
        fate = self._choose.choices(list(FATES), list(FATES.values()))[0]
        if case.sequences > 1 and fate in ("processor", "handler"):
            fate = "finish"
        at, name = self._choose.randrange(case.new_tokens), f"soak-{number}"
        arguments: dict[str, Any] = {"streaming": fate in ("stream", "handler"), **case.options}
        if case.sampled:
            arguments["seed"] = case.seed
        if fate == "processor":
            arguments["logits_processor"] = [_raises_at(at)]
        if fate == "late":
            arguments["deadline"] = self._choose.choice([1e-6, 0.05])
        if fate == "refused":
            self._send_refused(case, name)
            return
        if fate == "handler":
            self._manager.register_result_handler(name, self._handler_raising_at(at))
        self._add(case, name, arguments)
        for index, sequence in enumerate(sequence_names(name, case.sequences)):
            self._pending[sequence] = case, index, fate, at
        doomed = [name for name, (_, _, fate, _) in self._pending.items() if fate == "cancel"]
        if doomed and self._victims.random() < 0.2:
            self._manager.cancel_request(self._victims.choice(doomed))

    def _add(self, case: Case, name: str, arguments: dict[str, Any]) -> None:
        try:
            self._manager.add_request(case.prompt, name, **arguments)
        except RuntimeError as error:
            if not isinstance(error.__cause__, SoakFault):
                raise
            while self._take():
                pass
            self._manager.start()
            self._manager.add_request(case.prompt, name, **arguments)

    def _send_refused(self, case: Case, name: str) -> None:
        # Of a request with a handler the name is free before its output is taken here.
        taken = next((name for name, (_, _, fate, _) in self._pending.items() if fate != "handler"), 5)
        for wrong in ({"input_ids": [-1]}, {"exit_threshold": "high"}, {"request_id": taken}):
            try:
                self._manager.add_request(**{"input_ids": case.prompt, "request_id": name, **wrong})
            except (ValueError, RuntimeError):  # the second, where the model has just failed
                self.ends["refused"] += 1
            else:
                raise RuntimeError(f"request {name} with {wrong} was not refused.")

    def _handler_raising_at(self, at: int) -> Any:
        def handle(output: CDBGenerationOutput) -> None:
            if output.is_finished():
                self._handled.append(output)
            if len(output.generated_tokens) > at:
                raise SoakFault("handler")

        return handle

    def _break_model(self) -> None:
        """Its next loop raises."""
        adapter = self._manager._engine.adapter

        def loop(*args: Any) -> torch.Tensor:
            del adapter.loop
            raise SoakFault("model")

        adapter.loop = loop

    def _take(self, wait: bool = True) -> bool:
        """Take an output and check it; False where none is there, or comes in time."""
        ends = time.monotonic() + (_PATIENCE if wait else 0)
        output = None
        while output is None:
            wait_for = 0.05 if wait else 0  # not longer: a handler may be called meanwhile
            output = self._handled.popleft() if self._handled else self._manager.get_result(timeout=wait_for)
            over = time.monotonic() >= ends or not self._manager.is_running()
            if output is None and over and not self._handled:
                return False
        if output.request_id not in self._pending:
            raise RuntimeError(f"an output of {output.request_id}, which has ended or was never sent.")
        case, index, fate, at = self._pending[output.request_id]
        self._check(output, case, index, fate, at)
        if output.is_finished():
            del self._pending[output.request_id]
            self.ends["tokens" if output.cause is None else f"{type(output.cause).__name__} ({fate})"] += 1
        return True

    def _check(self, output: CDBGenerationOutput, case: Case, index: int, fate: str, at: int) -> None:
        tokens, depths = self.alone(case)[index]
        length = len(output.generated_tokens)
        right = output.generated_tokens == tokens[:length] and output.exit_depths == depths[:length]
        right = right and output.prompt_ids == list(case.prompt)
        cause = output.cause
        if output.is_finished() and cause is None:
            right = right and length == len(tokens) and fate != "processor"
        if cause is not None and str(cause) != "model":
            expected = {"cancel": CancelledError, "processor": SoakFault, "handler": SoakFault, "late": TimeoutError}
            right = right and isinstance(cause, expected.get(fate, ()))
            right = right and (fate != "processor" or length == at)
        if not right:
            raise RuntimeError(f"{case} with fate {fate} gave {output}, and alone {tokens}, {depths}.")

    def alone(self, case: Case) -> list[tuple[list[int], list[int]]]:
        """Tokens and depths of every sequence of a case that `generate` gives."""
        if case not in self._alone:
            options = case.options
            own = {name: options.pop(name) for name in _OF_CDB if name in options}
            if "exit_rule" in own:
                own.setdefault("exit_threshold", None)  # that of the settings belongs to another rule
            cdb = {**self.settings, **own, "max_num_seqs": 1, **({"seeds": [case.seed]} if case.sampled else {})}
            ids = torch.tensor([case.prompt], device=self.model.device)
            output = self.model.generate(ids, cdb=cdb, return_dict_in_generate=True, **options)
            new = output.sequences[:, len(case.prompt) :]
            self._alone[case] = list(zip(new.tolist(), output.exit_depths.tolist(), strict=True))
        return self._alone[case]


def _raises_at(index: int) -> Any:
    """A logits processor that raises at this token."""
    calls = []

    def process(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls.append(None)
        if len(calls) > index:
            raise SoakFault("processor")
        return scores

    return process


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, default="tiny-ouro")
    add_run_arguments(parser)
    parser.set_defaults(run=run, dtype="float64")  # in which no near tie depends on who shares a launch
    parser.add_argument("--requests", type=int, default=10_000, help="how many (default %(default)s)")
    parser.add_argument("--cases", type=int, default=150, help="how many different ones (default %(default)s)")
    parser.add_argument("--fault-every", type=int, default=997, help="requests between faults of the model; 0: none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write settings and all figures to this file")


def run(arguments: argparse.Namespace) -> None:
    set_threads(arguments.threads)
    model = load_model(arguments.model, arguments.dtype, arguments.device)
    soak = Soak(model, {"prefill_chunk_size": 8}, arguments.cases, arguments.seed)
    tracemalloc.start()
    try:
        soak.run(arguments.requests, arguments.fault_every, max(1, arguments.requests // 10))
    finally:
        tracemalloc.stop()
    report = Report(arguments, model)
    report.add("memory", soak.samples)
    report.add("ends", dict(soak.ends))
    report.write(arguments.json)
    columns = {name: "d" if name == "requests" else ".0f" if name == "seconds" else ".2f" for name in soak.samples[0]}
    print(markdown_table(columns, soak.samples))
    print()
    print(markdown_table({"ended with": "", "sequences": "d"}, _ends(soak)))
    print("\nEvery sequence ended once: with what it gives alone, or with the first tokens of that and its cause.")


def _ends(soak: Soak) -> list[dict[str, Any]]:
    return [{"ended with": end, "sequences": count} for end, count in soak.ends.most_common()]
