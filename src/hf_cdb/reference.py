"""Continuous-depth generation of a single row, straight from the definitions: the oracle that the engine is held to.

Slow and obvious on purpose: no batching, keys and values kept as one small tensor per position. Exit rules and KV
policies are written out here once more and shared with nothing, so that a mistake elsewhere cannot hide in both places.

Loops count from 1. The prompt runs loop by loop over all its positions, at full depth R, and yields token 0. With
`prefill_exit` its positions but the last leave by the rule, as tokens do. Each later token runs alone; after loop t < R
the exit rule looks at its state, and the token leaves at depth t, or at t + 1 with lookahead. Later tokens that go
deeper need its keys and values there: on leaving at depth d every slot that the token never wrote is filled from the
slot of loop d (arXiv 2608.09444).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache

from .adapters import LoopAdapter, adapter_for
from .exit_heads import find_exit_head

__all__ = ["ReferenceOutput", "reference_generate"]

# arXiv 2502.05171 for all but the last.
_DEFAULT_THRESHOLDS = {
    "latent-diff": 0.03,
    "cosine": 1e-3,
    "entropy-diff": 1e-3,
    "kl": 1e-3,
    "minp-kl": 1e-5,
    "argmax-stability": 5,
    "confidence": 0.9,
}
_RULES = (*_DEFAULT_THRESHOLDS, "gate", "preloop", "never", "replay")
_LEAVE_AT_OR_ABOVE = (
    "gate",
    "preloop",
    "argmax-stability",
    "confidence",
)  # the other rules leave below their threshold


@dataclass
class ReferenceOutput:
    """What `reference_generate` returns.

    Attributes:
        tokens: the new tokens, an end of sequence included.
        exit_depths: loops run for each of them.
        logits: `[new tokens, vocab]`, what each was chosen from, in the dtype of the model's logits.
        signals: for each token the value of the exit rule after every loop it was asked in; empty for token 0 and for
            the rules "never" and "replay". The distance to the threshold tells how close a decision was.
        prompt_depths: loops run for each position of the prompt.
    """

    tokens: list[int]
    exit_depths: list[int]
    logits: torch.Tensor
    signals: list[list[float]]
    prompt_depths: list[int]


@torch.no_grad()
def reference_generate(
    model: nn.Module,
    prompt: torch.Tensor,
    max_new_tokens: int,
    *,
    exit_rule: str | Callable[..., bool] = "auto",
    exit_threshold: float | None = None,
    min_depth: int = 1,
    max_depth: int | None = None,
    lookahead: int = 0,
    prefill_exit: bool = False,
    kv_policy: str = "auto",
    kv_slots: int | None = None,
    exit_depths: Sequence[int] | None = None,
    eos_token_ids: Iterable[int] = (),
    choose: Callable[[int, torch.Tensor], int] | None = None,
    **start_options,
) -> ReferenceOutput:
    """Generate from one prompt.

    Args:
        model: a model with an adapter, in evaluation mode, whose attention implementation reads an additive mask
            ("eager" or "sdpa").
        prompt: int64 token ids `[positions]` without padding, or embeddings `[positions, width]`.
        max_new_tokens: tokens to generate, at least 1.
        exit_rule: "gate", "preloop", "latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability",
            "confidence", "never", "replay", or "auto": the gate where the model has one of its own, else "latent-diff".
            Or a function `(loop, previous_state, state, logits) -> bool` of loops from 1, states `[width]` and a
            function without arguments that returns the logits `[vocab]`.
        exit_threshold: default the published one of the rule, or the checkpoint's own for its gate; 0.5 for a trained
            head otherwise.
        min_depth: least depth to leave at.
        max_depth: R, the full depth; default the model's own.
        lookahead: 1 if a signal after loop t means depth t + 1.
        prefill_exit: positions of the prompt leave by the rule, all but the last; for "last_exited".
        kv_policy: "last_exited", "shared", "first_then_shared", "modular", or "auto": the adapter's.
        kv_slots: slots k of the last two, default 2.
        exit_depths: depth of every new token, for "replay"; the first is R.
        eos_token_ids: tokens to stop after.
        choose: `(token index, logits [vocab]) -> token`, default the largest logit.
        **start_options: handed to `adapter.start`.
    """
    adapter = adapter_for(model)
    full_depth = adapter.full_depth if max_depth is None else max_depth
    if full_depth > adapter.full_depth and not adapter.may_deepen:
        raise ValueError(f"max_depth={max_depth}, but this model runs at most {adapter.full_depth} loops.")
    if exit_rule == "auto":
        exit_rule = "gate" if adapter.has_gate else "latent-diff"
    if not callable(exit_rule) and exit_rule not in _RULES:
        raise ValueError(f"exit_rule={exit_rule!r} is none of {', '.join(_RULES)}.")
    head = _trained_head(model, exit_rule, lookahead)
    if exit_threshold is None:
        exit_threshold = adapter.default_threshold if exit_rule == "gate" else _DEFAULT_THRESHOLDS.get(exit_rule)
        exit_threshold = 0.5 if exit_threshold is None and head is not None else exit_threshold
    if (exit_rule == "replay") != (exit_depths is not None):
        raise ValueError("exit_rule='replay' and exit_depths belong together.")
    if exit_depths is not None:
        exit_depths = [int(depth) for depth in exit_depths]
        least = min(1 + lookahead, full_depth)
        in_range = all(least <= depth <= full_depth for depth in exit_depths)
        if not in_range or exit_depths[0] != full_depth or len(exit_depths) < max_new_tokens:
            raise ValueError(f"{exit_depths=} needs {max_new_tokens} of {least} to {full_depth}, first {full_depth}.")

    policy = adapter.default_kv_policy if kv_policy == "auto" else kv_policy
    if prefill_exit and (policy != "last_exited" or exit_rule == "replay"):
        raise ValueError(f"prefill_exit=True has no meaning for kv_policy={policy!r}, exit_rule={exit_rule!r}.")
    slots = [_slot(policy, loop, kv_slots) for loop in range(1, full_depth + 1)]
    row = _Row(adapter, slots, start_options)
    tokens, depths, all_logits, signals = [], [], [], []
    for index in range(max_new_tokens):
        if index == 0:
            leaving = prefill_exit and exit_rule != "never"
            make = partial(_Rule, exit_rule, exit_threshold, adapter, head, lookahead) if leaving else None
            logits, prompt_depths = row.run_prompt(prompt, make, min_depth, lookahead)
            depth, values = full_depth, []
        elif exit_rule in ("never", "replay"):
            logits, depth, values = row.run_token(tokens[-1], full_depth if exit_depths is None else exit_depths[index])
        else:
            rule = _Rule(exit_rule, exit_threshold, adapter, head, lookahead)  # a rule starts anew for every token
            logits, depth, values = row.run_token(tokens[-1], full_depth, rule, min_depth, lookahead)
        tokens.append(int(logits.argmax()) if choose is None else int(choose(index, logits)))
        depths.append(depth)
        all_logits.append(logits)
        signals.append(values)
        if tokens[-1] in tuple(eos_token_ids):
            break
    return ReferenceOutput(tokens, depths, torch.stack(all_logits), signals, prompt_depths)


def _trained_head(model: nn.Module, rule: str | Callable[..., bool], lookahead: int) -> nn.Module | None:
    """The head that "gate" and "preloop" read; None for the model's own gate and for the other rules."""
    wanted = {"gate": ("lookahead", "same-step") if lookahead else ("same-step",), "preloop": ("preloop",)}
    for kind in wanted.get(rule, ()) if isinstance(rule, str) else ():
        head = find_exit_head(model, kind)
        if head is not None:
            return head
    if rule == "preloop":
        raise ValueError("exit_rule='preloop', but the model has no preloop head.")
    return None


def _slot(policy: str, loop: int, kv_slots: int | None) -> int:
    """KV slot, from 0, that loop `loop`, from 1, writes and reads."""
    k = 2 if kv_slots is None else kv_slots
    slots = {"last_exited": loop - 1, "shared": 0, "first_then_shared": min(loop - 1, k - 1), "modular": (loop - 1) % k}
    if policy not in slots:
        raise ValueError(f"kv_policy={policy!r} is none of {', '.join(slots)}.")
    return slots[policy]


class _Store(Cache):
    """Keys and values of one row, one entry per position.

    Attributes:
        loop, positions: what is being computed, positions in rising order; the row sets them.
        entries: (section, layer, slot) -> position -> key, value `[1, kv_heads, 1, head_dim]`; one slot outside loops.
    """

    def __init__(self, adapter: LoopAdapter, slots: list[int]):
        super().__init__(layers=[])
        self.adapter, self.slots = adapter, slots
        self.loop, self.positions = 1, []
        self.entries: dict[tuple[str, int, int], dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *args, **kwargs):
        """Store `[1, kv_heads, tokens, head_dim]` over what these positions left in the slot, and return the slot."""
        section, layer = self.adapter.section(layer_idx)
        slot = self.slots[self.loop - 1] if section == "core" else 0
        entries = self.entries.setdefault((section, layer, slot), {})
        for index, position in enumerate(self.positions):
            entries[position] = key[:, :, index : index + 1], value[:, :, index : index + 1]
        keys, values = zip(*(entries[position] for position in range(self.positions[-1] + 1)), strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def leave(self, position: int, depth: int) -> None:
        """Fill every slot that the token at `position` never wrote from the slot of loop `depth`, its last."""
        for layer in range(self.adapter.core_layers):
            entry = self.entries["core", layer, self.slots[depth - 1]][position]
            for slot in self.slots:
                self.entries.setdefault(("core", layer, slot), {}).setdefault(position, entry)


class _Row:
    """One row: its keys and values, and how its prompt and its tokens run."""

    def __init__(self, adapter: LoopAdapter, slots: list[int], start_options: dict[str, Any]):
        self.adapter, self.start_options = adapter, start_options
        self.full_depth = len(slots)
        self.store = _Store(adapter, slots)

    def run_prompt(
        self,
        prompt: torch.Tensor,
        make_rule: "Callable[[], _Rule] | None" = None,
        min_depth: int = 1,
        lookahead: int = 0,
    ) -> tuple[torch.Tensor, list[int]]:
        """Run all positions, at full depth or until their rules let them leave: logits `[vocab]` of the last, depths.

        Args:
            make_rule: gives the rule of one position; None: all run at full depth.
        """
        prompt = prompt.to(self.adapter.device)[None]
        inputs, embeds, state = self._begin(*((None, prompt) if prompt.is_floating_point() else (prompt, None)))
        positions = self.store.positions
        depths = [self.full_depth] * len(positions)
        rules = {} if make_rule is None else {position: make_rule() for position in positions[:-1]}
        # Depth-major, so that under a shared slot a position reads the others' entries of its own loop.
        for loop in range(1, self.full_depth + 1):
            self.store.loop = loop
            running = [position for position in positions if depths[position] >= loop]
            previous, state = state, state.clone()
            own = inputs if running == positions else self._inputs(running)
            state[:, running] = self.adapter.loop(previous[:, running], embeds[:, running], own)
            logits = cache(partial(self._prompt_logits, state))  # all positions have their last state so far
            for position in running if loop < self.full_depth else []:
                rule = rules.get(position)
                if rule is not None:
                    of_position = previous[0, position], state[0, position]
                    _, leaves = rule(loop, *of_position, lambda of=logits, p=position: of()[p], embeds[0, position])
                    if leaves and loop + lookahead >= min_depth:
                        depths[position] = loop + lookahead
                        del rules[position]
                if depths[position] == loop:
                    self.store.leave(position, loop)
        last = torch.tensor([len(positions) - 1], device=self.adapter.device)
        return self._prompt_logits(state, last)[0], depths

    def _prompt_logits(self, state: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """Logits `[kept, vocab]` of the prompt. The coda's layers write the entries of all positions each time."""
        return self.adapter.coda(state, self._inputs(list(range(state.shape[1]))), keep)

    def run_token(
        self, token: int, max_depth: int, rule: "_Rule | None" = None, min_depth: int = 1, lookahead: int = 0
    ) -> tuple[torch.Tensor, int, list[float]]:
        """Run one token until its rule lets it leave, or to `max_depth`: logits `[vocab]`, depth, the rule's values."""
        inputs, embeds, state = self._begin(torch.tensor([[token]], device=self.adapter.device), None)
        depth, decided, values, loop = max_depth, rule is None, [], 0
        while loop < depth:
            loop += 1
            self.store.loop = loop
            previous, state = state, self.adapter.loop(state, embeds, inputs)
            if not decided and loop < max_depth:
                value, leaves = rule(
                    loop, previous[0, 0], state[0, 0], partial(self._logits, state, inputs), embeds[0, 0]
                )
                values.append(value)
                if leaves and loop + lookahead >= min_depth:
                    depth, decided = loop + lookahead, True
        self.store.leave(self.store.positions[0], depth)
        return self._logits(state, inputs), depth, values

    def _begin(self, ids: torch.Tensor | None, embeds: torch.Tensor | None) -> tuple[dict, torch.Tensor, torch.Tensor]:
        """Everything before loop 1, for the next positions: what the layers are given, prelude output, start state."""
        first = self.store.positions[-1] + 1 if self.store.positions else 0
        positions = list(range(first, first + (ids if embeds is None else embeds).shape[1]))
        inputs = self._inputs(positions)
        embeds = self.adapter.prelude(ids, embeds, inputs)
        position_ids = torch.tensor([positions], device=self.adapter.device)
        return inputs, embeds, self.adapter.start(embeds, position_ids, **self.start_options)

    def _inputs(self, positions: list[int]) -> dict[str, Any]:
        """What the layers are given; what they run from now on are these positions."""
        self.store.positions = positions
        position_ids = torch.tensor([positions], device=self.adapter.device)
        return self.adapter.layer_inputs(position_ids, self.store, attention_mask=self._mask(position_ids[0]))

    def _logits(self, state: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """Logits `[vocab]` of one token. The coda's layers write their entries each time; the last ones stay."""
        return self.adapter.coda(state, inputs)[0]

    def _mask(self, queries: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """Additive causal mask `[1, 1, queries, keys]`, by layer type where some see `sliding_window` positions only.

        Given even where "sdpa" would find out by itself, because "eager" does not.
        """
        config = self.adapter.model.config
        distance = queries[:, None] - torch.arange(int(queries[-1]) + 1, device=queries.device)
        zeros = torch.zeros(distance.shape, dtype=self.adapter.dtype, device=queries.device)
        full = zeros.masked_fill(distance < 0, -math.inf)[None, None]
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return full
        sliding = full.masked_fill(distance >= config.sliding_window, -math.inf)
        return {"full_attention": full, "sliding_attention": sliding}


class _Rule:
    """One exit rule during one token, with what it remembers of the loops before; computed in at least float32.

    Rules and their first values are those of arXiv 2502.05171, the gate that of arXiv 2510.25741.
    """

    def __init__(
        self,
        name: str | Callable[..., bool],
        threshold: float | None,
        adapter: LoopAdapter,
        head: nn.Module | None = None,
        lookahead: int = 0,
    ):
        self.name, self.threshold, self.adapter = name, threshold, adapter
        self.head, self.lookahead = head, lookahead
        self.cdf, self.survival, self.entropy = 0.0, 1.0, 100.0
        self.log_p, self.token, self.unchanged = None, None, 0

    def __call__(
        self, loop: int, previous: torch.Tensor, state: torch.Tensor, logits: Callable, embeds: torch.Tensor
    ) -> tuple[float, bool]:
        """Value of the rule after `loop`, and whether it says to leave.

        Arguments as a user's rule gets them, and the prelude's output `[width]`.
        """
        if callable(self.name):
            leaves = bool(self.name(loop, previous, state, logits))
            return float(leaves), leaves
        value = float(self._value(loop, previous, state, logits, embeds))
        if self.name in ("gate", "preloop") and self.threshold >= 1:
            return value, False  # a sum of probabilities can round up to 1 too early
        return value, value >= self.threshold if self.name in _LEAVE_AT_OR_ABOVE else value < self.threshold

    def _value(
        self, loop: int, previous: torch.Tensor, state: torch.Tensor, logits: Callable, embeds: torch.Tensor
    ) -> float | torch.Tensor:
        match self.name:
            case "gate":
                # Hazard sigmoid(x) of leaving now, if not left before; 1 - sigmoid(x) = sigmoid(-x).
                if self.head is None:
                    x = self.adapter.gate_logits(state)
                else:  # one row of weights; a bias for each loop, the last one for all loops beyond
                    weight, bias = self.head.weight.to(_wide(state)), self.head.bias.to(_wide(state))
                    x = weight[0] @ _wide(state) + bias[min(loop, len(bias)) - 1]
                self.cdf += float(x.sigmoid()) * self.survival
                self.survival *= float((-x).sigmoid())
                return self.cdf
            case "preloop":
                # Probability of the depths up to the one that leaving now would give.
                weight, bias = self.head.weight.to(_wide(embeds)), self.head.bias.to(_wide(embeds))
                return (weight @ _wide(embeds) + bias).softmax(-1)[: loop + self.lookahead].sum()
            case "latent-diff":
                return (_wide(state) - _wide(previous)).norm() / _wide(state).norm()
            case "cosine":
                # 0/0 = NaN for a zero state, and NaN is below no threshold.
                state, previous = _wide(state), _wide(previous)
                return 1 - state @ previous / (state.norm() * previous.norm())
            case "entropy-diff":
                p = _wide(logits()).softmax(-1)
                before, self.entropy = self.entropy, float(-(p * (p + 1e-10).log()).sum())
                return abs(self.entropy - before)
            case "kl" | "minp-kl":
                log_p = _wide(logits()).log_softmax(-1)
                uniform = torch.full_like(log_p, -math.log(len(log_p)))
                if self.name == "minp-kl":
                    kept = log_p.exp() >= 0.1 * log_p.exp().max()
                    log_p = torch.where(kept, log_p, uniform).log_softmax(-1)
                before, self.log_p = uniform if self.log_p is None else self.log_p, log_p
                return (before.exp() * (before - log_p)).sum()
            case "argmax-stability":
                before, self.token = self.token, int(logits().argmax())
                self.unchanged = self.unchanged + 1 if self.token == before else 0
                return self.unchanged
            case "confidence":
                return _wide(logits()).softmax(-1).max()


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()
