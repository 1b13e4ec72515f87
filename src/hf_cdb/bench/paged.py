"""Stock continuous batching (`generate_batch`) for looped models at full depth: the fixed-depth peer.

Its paged cache has one entry per layer that the config names. A looped model runs its core layers R times, so it is
shown to the library as a model of so many layers more; what layer l of the core writes in loop t goes to the entry of
layer `t * core layers + l` (loops from 0).
"""

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, PreTrainedModel
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.modeling_outputs import CausalLMOutput

from ..adapters import LoopAdapter, adapter_for

__all__ = ["generate_paged", "last_outputs", "paged_manager"]

PAGE = 32  # positions


def generate_paged(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], width: int
) -> tuple[list[list[int]], float]:
    """Greedy tokens of every prompt, `new_tokens` of each, by the library's continuous batching.

    And the seconds from the first request to the last result: its thread starts before and stops after them.

    Memory is sized to what `width` of the longest requests need, and a batch to their tokens and one long prompt.

    Raises:
        RuntimeError: a request failed.
    """
    with paged_manager(model, prompts, new_tokens, width) as manager:
        begin = time.perf_counter()
        for index, (prompt, new) in enumerate(zip(prompts, new_tokens, strict=True)):
            manager.add_request(list(prompt), request_id=str(index), max_new_tokens=new)
        outputs = last_outputs(manager, len(prompts))
        seconds = time.perf_counter() - begin
    return [output.generated_tokens for output in outputs], seconds


@contextmanager
def paged_manager(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], width: int
) -> Iterator[Any]:
    """The library's manager, greedy, at full depth and without ends of sequence, sized to these requests."""
    longest = max(len(prompt) + new for prompt, new in zip(prompts, new_tokens, strict=True))
    config = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=width * math.ceil(longest / PAGE),
        max_batch_tokens=width + max(map(len, prompts)),
        max_requests_per_batch=width,
        allow_block_sharing=False,
    )
    settings = copy.deepcopy(model.generation_config)
    settings.update(do_sample=False, eos_token_id=-1)
    with _fixed_depth(model).continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=config, timeout=5
    ) as manager:
        yield manager


def last_outputs(manager: Any, requests: int) -> list[GenerationOutput]:
    """The last outputs of requests "0", "1", ..., whichever manager runs them.

    Raises:
        RuntimeError: one failed, or the manager has ended.
    """
    outputs: dict[str, GenerationOutput] = {}
    while len(outputs) < requests:
        output = manager.get_result(timeout=1)
        if output is None:
            if not manager.is_running():
                raise RuntimeError("the manager stopped before all requests were finished; its log says why.")
        elif output.error is not None:
            raise RuntimeError(f"the manager failed on request {output.request_id}: {output.error}")
        elif output.is_finished():
            outputs[output.request_id] = output
    return [outputs[str(index)] for index in range(requests)]


def _fixed_depth(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights, shown as a model without loops."""
    adapter = adapter_for(model)
    view = copy.copy(model)  # shares parameters and layers
    view.__class__ = type(type(model).__name__, (_FixedDepth, type(model)), {"__module__": type(model).__module__})
    view.config = copy.deepcopy(model.config)
    layers = adapter.prelude_layers + adapter.coda_layers + adapter.core_layers * adapter.full_depth
    # Past the attribute map and the checks of the class, which know what its own forward needs.
    view.config.__dict__.update(layer_types=["full_attention"] * layers)
    view._adapter = adapter
    return view


class _FixedDepth:
    """Forward at full depth over a paged cache."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any = None,
        cache: Any = None,
        logits_to_keep: torch.Tensor | None = None,
        **kwargs,
    ) -> CausalLMOutput:
        adapter = self._adapter
        slots = _LoopEntries(cache, adapter)
        layer_inputs = adapter.layer_inputs(position_ids, slots, attention_mask=attention_mask, **kwargs)
        embeds = adapter.prelude(input_ids, None, layer_inputs)
        state = adapter.start(embeds, position_ids)
        for slots.loop in range(adapter.full_depth):
            state = adapter.loop(state, embeds, layer_inputs)
        return CausalLMOutput(logits=adapter.coda(state, layer_inputs, logits_to_keep)[None])


class _LoopEntries:
    """A paged cache as layers of a looped model address it, `loop` being the one that runs."""

    def __init__(self, cache: Any, adapter: LoopAdapter):
        self.cache, self.adapter, self.loop = cache, adapter, 0

    def update(self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]):
        adapter = self.adapter
        section, index = adapter.section(layer_idx)
        entry = {
            "core": self.loop * adapter.core_layers + index,
            "prelude": adapter.full_depth * adapter.core_layers + index,
            "coda": adapter.full_depth * adapter.core_layers + adapter.prelude_layers + index,
        }
        return self.cache.update(key, value, entry[section], kwargs=kwargs)
