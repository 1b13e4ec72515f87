"""F-SCRIPT: a looped "model" without learned weights, whose wrong reads of the cache show in its logits.

A token is `10 * request + digit`. The digit alone says which token follows and after which loop the token leaves; the
request stays the same. Importing the module registers the adapter.

Every layer writes, for every token, the four numbers (request, position, loop, layer) as a value and their sines as a
key. The query is constant, so what a layer reads is a weighted mean of the values with weights that follow from the
keys: a function of the set of entries, and plain enough to predict. The model adds it to its logits. Loop is 0 before
the loops, the loop itself in the core, and the depth that the token left at after them.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_cdb.adapters import LoopAdapter, register_adapter

DIGITS = 10
READ = 4  # channels of an entry, and width of what a layer reads
QUERY = 0.5
FORGET = 0.9  # what a layer leaves of the reads before it, so that their order counts
SHARE = 1e-3  # of the reads in the logits


class ToyConfig(PreTrainedConfig):
    """Attributes:
    depths: loop to leave after, by the digit of the input token.
    peak: logit of the next token; 0 leaves the logits flat but for what was read.
    """

    model_type = "toy"
    vocab_size: int = 200
    loops: int = 4
    depths: list[int] | tuple[int, ...] = (4, 1, 2, 3, 4, 1, 3, 2, 1, 4)
    peak: float = 100.0


def next_token(token: int) -> int:
    return token - token % DIGITS + (token % DIGITS + 3) % DIGITS


def toy_prompt(request: int, *digits: int) -> torch.Tensor:
    """Token ids of one request."""
    return torch.tensor([DIGITS * request + digit for digit in digits])


class ToyLayer(nn.Module):
    """Writes an entry per token, reads through the attention registry, adds what it read to the state."""

    def __init__(self, config: ToyConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.num_key_value_groups, self.scaling, self.is_causal = 1, 1.0, True

    def forward(self, state, position_embeddings, cache=None, attention_mask=None, **kwargs):
        token, loop = state[..., 0], state[..., 1]
        request = (token / DIGITS).floor()
        entry = torch.stack([request, position_embeddings, loop, torch.full_like(loop, self.layer_idx)], dim=-1)
        key, value = entry.sin()[:, None], entry[:, None]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, _plain_attention)
        query = torch.full_like(entry, QUERY)[:, None]
        read, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
        read = read.reshape(entry.shape)
        return torch.cat([state[..., :2], FORGET * state[..., 2:] + read], dim=-1)


def _plain_attention(module, query, key, value, attention_mask, scaling, **kwargs):
    scores = query @ key.transpose(-1, -2) * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1)
    return (weights @ value).transpose(1, 2), weights


class ToyModel(nn.Module):
    """State `[1, tokens, 2 + READ]`: token, loops run, and the decaying sum of what its layers read."""

    def __init__(self, dtype: torch.dtype = torch.float64, **config):
        super().__init__()
        self.config = ToyConfig(**{"attn_implementation": "sdpa", **config})
        self.layers = nn.ModuleList(ToyLayer(self.config, idx) for idx in range(4))
        steps = torch.tensor([next_token(token) for token in range(self.config.vocab_size)])
        self.register_buffer("next_tokens", steps)
        self.register_buffer("depths", torch.tensor(self.config.depths))
        self.register_buffer("anchor", torch.zeros((), dtype=dtype))  # what dtype and device the model is in

    @property
    def dtype(self):
        return self.anchor.dtype

    @property
    def device(self):
        return self.anchor.device


@register_adapter("toy")
class ToyAdapter(LoopAdapter):
    has_gate = True
    default_threshold = 0.5
    prelude_layers, core_layers, coda_layers = 1, 2, 1
    kv_heads, head_dim = 1, READ

    def __init__(self, model):
        super().__init__(model)
        self.vocab_size, self.full_depth = model.config.vocab_size, model.config.loops

    def layer_inputs(self, position_ids, cache, **extra):
        return {"position_embeddings": position_ids.to(self.dtype), "cache": cache, **extra}

    def prelude(self, input_ids, inputs_embeds, layer_inputs):
        """Embeddings are states after no loop: `[1, tokens, 2 + READ]` with the token in channel 0, else zeros."""
        if inputs_embeds is None:
            inputs_embeds = nn.functional.pad(input_ids.to(self.dtype)[..., None], (0, 1 + READ))
        return self.model.layers[0](inputs_embeds, **layer_inputs)

    def loop(self, state, embeds, layer_inputs):
        state = torch.cat([state[..., :1], state[..., 1:2] + 1, state[..., 2:]], dim=-1)
        for layer in self.model.layers[1:3]:
            state = layer(state, **layer_inputs)
        return state

    def coda(self, state, layer_inputs, keep=None):
        state = self.model.layers[3](state, **layer_inputs)[0]
        state = state if keep is None else state[keep]
        following = self.model.next_tokens[state[:, 0].long()]
        logits = self.model.config.peak * nn.functional.one_hot(following, self.vocab_size).to(state.dtype)
        logits[:, :READ] += SHARE * state[:, 2:]
        return logits

    def gate_logits(self, state):
        reached = state[..., 1] >= self.model.depths[state[..., 0].long() % DIGITS]
        return torch.where(reached, 50.0, -50.0)

    def parameter_counts(self):
        return 1, 1


@dataclass
class Script:
    """What a run must give: tokens, depth of each, and the logits `[new tokens, vocab]`, float64."""

    tokens: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)


def loop_read(policy: str, loop: int, depth: int, kv_slots: int = 2) -> int:
    """Which loop's entry of an older token, which left at `depth`, a token in loop `loop` reads.

    The last loop the older token ran in the same slot; its last loop of all if it never wrote to the slot.
    """
    if policy == "last_exited":
        same = [loop]
    elif policy == "shared":
        same = range(1, depth + 1)
    elif policy == "first_then_shared":
        same = [loop] if loop < kv_slots else range(kv_slots, depth + 1)
    elif policy == "modular":
        same = range((loop - 1) % kv_slots + 1, depth + 1, kv_slots)
    return max([other for other in same if other <= depth], default=depth)


def predict(
    config: ToyConfig,
    prompt: list[int],
    max_new_tokens: int,
    policy: str = "last_exited",
    kv_slots: int = 2,
    exit_depths: list[int] | None = None,
    prompt_depths: list[int] | None = None,
) -> Script:
    """Run the script without a model: the tokens, the depths, and the logits that right reads give.

    Args:
        prompt: token ids.
        policy, kv_slots: the KV policy.
        exit_depths: depths of the new tokens that replace the scripted ones.
        prompt_depths: of every position of the prompt, for `last_exited`; None is full depth.
    """
    script, tokens, left_at = Script(), list(prompt), []
    while len(script.tokens) < max_new_tokens:
        first = not script.tokens
        if first:
            depth = config.loops
            left_at = list(prompt_depths or [depth] * len(tokens))
        else:
            depth = config.depths[tokens[-1] % DIGITS] if exit_depths is None else exit_depths[len(script.tokens)]
            left_at.append(depth)

        def loop_of(position, loop, first=first, depths=tuple(left_at)):
            # The prompt runs depth-major, so there everyone reads the loop it is in. Own entries are new anyway.
            if first or position == len(depths) - 1:
                return min(loop, depths[position])
            return loop_read(policy, loop, depths[position], kv_slots)

        layers = [(0, [0] * len(tokens))]
        for loop in range(1, depth + 1):
            layers += [(layer, [loop_of(position, loop) for position in range(len(tokens))]) for layer in (1, 2)]
        layers.append((3, left_at))

        seen = torch.zeros(READ, dtype=torch.float64)
        for layer, loops in layers:
            entries = [(token // DIGITS, place, loops[place], layer) for place, token in enumerate(tokens)]
            seen = FORGET * seen + _mean(entries)
        logits = torch.zeros(config.vocab_size, dtype=torch.float64)
        logits[next_token(tokens[-1])] = config.peak
        logits[:READ] += SHARE * seen
        script.tokens.append(int(logits.argmax()))
        script.exit_depths.append(depth)
        script.logits.append(logits)
        tokens.append(script.tokens[-1])
    return script


def _mean(entries: list[tuple[int, int, int, int]]) -> torch.Tensor:
    """What a layer reads of these entries."""
    weights = [math.exp(QUERY * sum(math.sin(number) for number in entry)) for entry in entries]
    rows = [[number * weight for number in entry] for entry, weight in zip(entries, weights, strict=True)]
    return torch.tensor(rows, dtype=torch.float64).sum(0) / sum(weights)
