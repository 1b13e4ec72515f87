"""A request and its life: waiting, running, finished, cancelled or failed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .exits import ExitRule
from .ragged import RaggedPrompt
from .saved_kv import SavedArrays, SavedKV

__all__ = ["Request"]


@dataclass(eq=False)
class Request:
    """One sequence to continue.

    Attributes:
        key: unique among all requests of an engine.
        row, seed: which line of the noise is its own, see `Noise`.
        prompt_ids: int64 `[positions]` without padding, or None where embeddings are given.
        prompt_embeds: `[positions, width]`, or None.
        max_new_tokens: tokens at most.
        sampler: chooses its tokens.
        stop: called with the request after every token; True ends it.
        start_options: arguments of the adapter's `start`.
        min_depth, max_depth, rule, prefill_exit: None for the engine's, which fills them in. `max_depth` is the depth
            of the prompt as well, and at most that of the engine.
        priority, deadline: see `Scheduler.add`.
        tokens, exit_depths: what came out so far. A request that is added with some goes on after them.
        prompt_depths: loops that each position of the prompt ran, where they left by the rule; else None. Needed beside
            `tokens` as well.
        preemptions: how often it had to give up its place.
        scores, logits: float32 `[vocab]` for each token, where the sampler keeps them.
        status: "waiting", "running", "finished", "cancelled" or "failed".
        error: why it failed.
    """

    key: int
    max_new_tokens: int
    sampler: Any
    prompt_ids: torch.Tensor | None = None
    prompt_embeds: torch.Tensor | None = None
    row: int = 0
    seed: int | None = None
    stop: Callable[["Request"], bool] | None = None
    start_options: dict[str, Any] = field(default_factory=dict)
    min_depth: int | None = None
    max_depth: int | None = None
    rule: ExitRule | None = None
    prefill_exit: bool | None = None
    priority: int = 0
    deadline: float | None = None
    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    prompt_depths: list[int] | None = None
    scores: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    status: str = "waiting"
    error: BaseException | None = None
    preemptions: int = 0

    # What the engine carries from launch to launch: the positions under way, the prelude's output and the state.
    start: int = 0
    end: int = 0
    embeds: torch.Tensor | None = None
    state: torch.Tensor | None = None
    ragged: RaggedPrompt | None = None  # where positions of the prompt leave the loop one by one
    saved: SavedKV | SavedArrays | None = None  # keys and values of one that was preempted
    again: bool = False  # of one that was preempted: what it had runs again, token by token

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids if self.prompt_embeds is None else self.prompt_embeds)

    @property
    def prefill_length(self) -> int:
        """Positions that run before the next token: the prompt, and but for the last the tokens of a request that was
        added with some, or comes back with them."""
        return self.prompt_length + (0 if self.again else max(0, len(self.tokens) - 1))

    @property
    def capacity(self) -> int:
        """Positions whose keys and values are ever read: the last token's are not."""
        return self.prompt_length + self.max_new_tokens - 1

    @property
    def length(self) -> int:
        """Positions of its prompt and its tokens."""
        return self.prompt_length + len(self.tokens)

    @property
    def token_under_way(self) -> int:
        """Which of its tokens runs, when the prompt is through: the last one, or an earlier one `again`."""
        return self.start - self.prompt_length

    @property
    def depth_under_way(self) -> int:
        """The depth that this token had when it ran first."""
        return self.exit_depths[self.token_under_way + 1]

    @property
    def ended(self) -> bool:
        """Whether no more tokens come."""
        return self.status not in ("waiting", "running")

    def advance(self) -> None:
        """The positions under way are through; the next token's is next."""
        self.start, self.end = self.end, self.end + 1

    def release(self) -> None:
        """Drop the tensors that only a running request needs."""
        self.embeds = self.state = self.ragged = None
