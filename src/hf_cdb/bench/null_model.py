"""A looped "model" that computes nothing, so that what remains is the engine."""

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..adapters import LoopAdapter
from ..attention import depth_attention
from .part_clock import PartClock

__all__ = ["NullAdapter", "NullSampler"]


class _NullModel(nn.Module):
    """Nothing but a config and a place."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.config = PreTrainedConfig()


class NullAdapter(LoopAdapter):
    """Stages that hand out slices of tensors made beforehand.

    The loop has one attention layer of one head of size 1, which goes through the cache and the attention function as
    every layer does. What the first layer of a launch computes once for all of them, the places and the masks, is
    engine time; the writes and the attention itself are the model's.

    Args:
        rows: rows in flight at most.
        hidden: width of a state.
        depth: full depth.
        tokens: of a launch at most.
        seed: of the hazards, which are different in every call: rows leave at mixed depths.
    """

    has_gate = True
    core_layers = kv_heads = head_dim = 1
    vocab_size = 2

    def __init__(self, rows: int, hidden: int, depth: int, tokens: int, seed: int):
        super().__init__(_NullModel())
        self.full_depth = depth
        self.clock = PartClock()
        self._states = torch.zeros(1, tokens, hidden)
        self._logits = torch.zeros(rows, self.vocab_size)
        self._entries = torch.zeros(1, 1, tokens, 1)
        # Of hazards from 0.12 to 0.88; half of the rows reach 0.5 after one loop, most after two. Another stretch of
        # them is handed out every time.
        self._hazards = 4 * torch.rand(2 * rows, generator=torch.Generator().manual_seed(seed)) - 2
        self._calls = 0

    def layer_inputs(self, position_ids, cache, **extra):
        return {"cache": cache}

    def prelude(self, input_ids, inputs_embeds, layer_inputs):
        return self._states[:, : input_ids.shape[1]]

    def start(self, embeds, position_ids):
        return embeds

    def loop(self, state, embeds, layer_inputs):
        cache, entries = layer_inputs["cache"], self._entries[:, :, : state.shape[1]]
        cache.update(entries, entries, 0)
        self.clock.enter("addressing")
        for pack in cache.places.packs:
            pack.mask(None)
        self.clock.leave()
        depth_attention(self.model, entries, entries, entries, None, 1.0, cache)
        return self._states[:, : state.shape[1]]

    def coda(self, state, layer_inputs, keep=None):
        return self._logits[: state.shape[1] if keep is None else len(keep)]

    def gate_logits(self, state):
        self._calls += 1
        first = 7 * self._calls % len(state)
        return self._hazards[first : first + len(state)]

    def parameter_counts(self):
        return 1, 1


class NullSampler:
    """Chooses token 0 for everyone."""

    def choose(self, rows, logits):
        return [0] * len(rows)
