"""What a manager was asked for, and what it tells of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from .generation_run import GenerationRun
from .request import Request

__all__ = ["CHILD", "CDBGenerationOutput", "Job", "parent_of", "refusal", "sequence_names"]

CHILD = "__child#"  # between a request and the number of a child, as Transformers names them


@dataclass
class CDBGenerationOutput(GenerationOutput):
    """As Transformers' output of a request, and:

    Attributes:
        exit_depths: loops run for each of `generated_tokens`.
        cause: what made it fail; `error` is its text.
    """

    exit_depths: list[int] = field(default_factory=list)
    cause: BaseException | None = None

    @property
    def mean_depth(self) -> float:
        """Loops per generated token; nan without tokens."""
        return sum(self.exit_depths) / len(self.exit_depths) if self.exit_depths else float("nan")


def sequence_names(request_id: str, sequences: int) -> list[str]:
    """The names of a request's sequences: its own, and those of its children."""
    return [request_id] + [f"{request_id}{CHILD}{index}" for index in range(sequences - 1)]


def parent_of(name: str) -> str:
    """The request that a sequence belongs to."""
    return name.partition(CHILD)[0]


def refusal(request_id: str, prompt: Any, error: Exception) -> CDBGenerationOutput:
    """The output of a request that was refused."""
    prompt = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt if isinstance(prompt, list) else []
    return CDBGenerationOutput(request_id, prompt, error=_text(error), status=RequestStatus.FAILED, cause=error)


class Job:
    """One call of `add_request`: one sequence, or several of one prompt. Times are of `time.perf_counter`.

    Args:
        request_id: of the first sequence; the others are its children.
        run: the prepared call.
        streaming: tell of every token.
        record_timestamps: note when every token came.
        deadline: seconds from `created` until which it has to be done; None is any time.
        created: when it was asked for.

    Attributes:
        names, rows: of the sequences.
        started: when its first launch had run; -1 before.
    """

    def __init__(
        self,
        request_id: str,
        run: GenerationRun,
        streaming: bool = False,
        record_timestamps: bool = False,
        deadline: float | None = None,
        created: float | None = None,
    ):
        self.request_id, self.run, self.streaming = request_id, run, streaming
        self.created = time.perf_counter() if created is None else created
        self.deadline = deadline
        self.started = -1.0
        self.rows: Sequence[Request] = run.requests
        self.names = sequence_names(request_id, len(self.rows))
        self._prompt = [] if self.rows[0].prompt_ids is None else self.rows[0].prompt_ids.tolist()
        self._timestamps: list[list[float]] | None = [[] for _ in self.rows] if record_timestamps else None
        self._told = [0] * len(self.rows)
        self._left = set(range(len(self.rows)))

    @property
    def left(self) -> list[int]:
        """The sequences whose last output has not been made."""
        return sorted(self._left)

    def named(self, name: str) -> Sequence[Request]:
        """What a name stands for: all sequences for the request's own, one for a child's, none for another."""
        if name == self.request_id:
            return self.rows
        return [row for own, row in zip(self.names, self.rows, strict=True) if own == name]

    def new_token(self, row: int) -> bool:
        """Whether a sequence has got a token since this was asked last."""
        if len(self.rows[row].tokens) == self._told[row]:
            return False
        self._told[row] = len(self.rows[row].tokens)
        if self._timestamps is not None:
            self._timestamps[row].append(time.perf_counter())
        return True

    def output(self, row: int) -> CDBGenerationOutput:
        """What is known of a sequence now."""
        request, now = self.rows[row], time.perf_counter()
        if request.ended:
            status = RequestStatus.FINISHED if request.error is None else RequestStatus.FAILED
            self._left.discard(row)
        else:
            status = RequestStatus.DECODING if request.tokens else RequestStatus.PENDING
        return CDBGenerationOutput(
            self.names[row],
            prompt_ids=self._prompt,
            generated_tokens=list(request.tokens),
            error=None if request.error is None else _text(request.error),
            status=status,
            created_time=self.created,
            lifespan=(self.started, now if request.ended else -1.0),
            timestamps=None if self._timestamps is None else list(self._timestamps[row]),
            exit_depths=list(request.exit_depths),
            cause=request.error,
        )


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
