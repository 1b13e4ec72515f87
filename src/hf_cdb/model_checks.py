"""Is the model what the engine would run? It calls the stages one by one, and the forward of the whole model never."""

import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING
from transformers.utils import logging

from .adapters import LoopAdapter

__all__ = ["check_model", "compute_as_wrapped", "learns_prompts"]

logger = logging.get_logger(__name__)

_STAGES = ("prelude", "start", "loop", "coda", "gate_logits")
# Whose code may stand around a forward: autocast, which `compute_as_wrapped` honours; what makes outputs float32, as
# the engine does; and what brings offloaded weights, which accelerate hooks to every layer as well.
_AUTOCAST, _COMPILER = "torch.amp.autocast_mode", "torch._dynamo.eval_frame"
_HONOURED = (_AUTOCAST, _COMPILER, "accelerate.utils.operations", "accelerate.hooks")


def check_model(adapter: LoopAdapter) -> None:
    """Refuse a model that the engine would run, but not as it is meant.

    Raises:
        ValueError: it has no weights; or something acts in a forward that the engine never calls: that of the whole
            model or of its body.
    """
    model = adapter.model
    name = type(model).__name__
    if adapter.device.type == "meta":
        raise ValueError(
            f"{name} has no weights: its parameters are on the meta device, and no hook brings them. "
            "Load a checkpoint with from_pretrained, or offload it with accelerate."
        )
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and (learns_prompts(model) or getattr(prepare, "__self__", None) is None):
        by = getattr(prepare, "__qualname__", type(prepare).__name__)
        raise ValueError(
            f"{name}.prepare_inputs_for_generation was replaced by {by}, as PEFT's prompt and prefix tuning do it, and "
            "the engine prepares its inputs itself. Generate with cdb=False. Of prompt tuning the virtual tokens may "
            "also be part of the prompt: peft_model.get_base_model().generate(inputs_embeds=torch.cat(("
            "peft_model.get_prompt(rows), embeddings of the tokens), dim=1), attention_mask=..., cdb=...)."
        )
    _check_adapter_names(model)
    _check_whole_pass(model, MODEL_FOR_CAUSAL_LM_MAPPING)
    body = getattr(model, "base_model", model)
    if body is not model:
        _check_whole_pass(body, MODEL_MAPPING)
        if any(_home(link) == _AUTOCAST for link in _around_forward(body)):
            _refuse_whole_pass(body, "an autocast of its own around its forward")


def learns_prompts(model: nn.Module) -> bool:
    """Whether the call comes from a PEFT model that puts virtual tokens where stock `generate` prepares its inputs."""
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False)


def compute_as_wrapped(adapter: LoopAdapter) -> None:
    """Let the stages of `adapter` compute in the mixed precision that is wrapped around the model's forward.

    `Accelerator.prepare` with `mixed_precision` wraps it so. The processors of a call stay outside, as in stock.
    """
    contexts = [context for link in _around_forward(adapter.model) for context in _autocasts(link)]
    for context in reversed(contexts):  # the outermost is entered first
        for stage in _STAGES:
            # A copy, since an autocast remembers what to restore: one that is entered twice would forget.
            setattr(adapter, stage, copy.copy(context)(getattr(adapter, stage)))


def _check_adapter_names(model: nn.Module) -> None:
    """Refuse PEFT's `adapter_names`, which it hands to its layers by hooks for the time of a call."""
    found = [
        (module, key, hook.keywords["adapter_names"])
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
        if "adapter_names" in getattr(hook, "keywords", {})
    ]
    names = found[0][2] if found else []
    if len(names) <= 1:
        return
    for module, key, _ in found:  # where a call raises PEFT leaves its hooks behind, for all calls to come
        module._forward_pre_hooks.pop(key)
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    raise ValueError(
        f"adapter_names={list(names)} is not supported with cdb: PEFT's layers count the rows that they are given, and "
        "a launch has its rows behind each other in one. Generate once for each adapter, after set_adapter, or with "
        "cdb=False."
    )


def _check_whole_pass(module: nn.Module, official: Any) -> None:
    """Refuse what acts on or in the forward of a module that the engine does not call as a whole.

    Args:
        official: the library's table from configs to the classes that the adapters are written for.
    """
    for kind, hooks in (("hook", module._forward_hooks), ("pre-hook", module._forward_pre_hooks)):
        for hook in hooks.values():
            _refuse_whole_pass(module, f"a forward {kind}, {getattr(hook, '__qualname__', type(hook).__name__)}")
    for link in _around_forward(module):
        if _home(link) not in _HONOURED:
            code = getattr(getattr(link, "__func__", link), "__code__", None)  # __name__ may be that of what it wraps
            name = type(link).__name__ if code is None else code.co_name
            _refuse_whole_pass(module, f"its forward replaced by {name} of {_home(link)}")
        if _home(link) == "accelerate.hooks":
            for hook in _members(module._hf_hook):
                if not type(hook).__module__.startswith("accelerate."):
                    _refuse_whole_pass(module, f"a hook of accelerate's kind, {type(hook).__name__}")
    if module._compiled_call_impl is not None or any(_home(link) == _COMPILER for link in _around_forward(module)):
        logger.warning_once(
            f"The forward of {type(module).__name__} is compiled, which has no effect with cdb: the stages are called "
            "one by one, with rows of changing number and length."
        )
    expected = official.get(type(getattr(module, "config", None)), None)
    if isinstance(expected, type) and isinstance(module, expected) and type(module).forward is not expected.forward:
        owner = next(cls for cls in type(module).__mro__ if "forward" in vars(cls))
        _refuse_whole_pass(module, f"the forward of {owner.__name__} and not that of {expected.__name__}")


def _refuse_whole_pass(module: nn.Module, has: str) -> None:
    raise ValueError(
        f"{type(module).__name__} has {has}. With cdb it would not act: the engine runs the model loop by loop and "
        "never calls that forward. Change the layers, norms or head, which are called, or generate with cdb=False."
    )


def _around_forward(module: nn.Module) -> Iterator[Any]:
    """What stands around the forward of the module's class, the outermost first; last what replaces it, if so."""
    own = list(_unwrapped(type(module).forward))  # accelerate unwraps the decorators in the class as well
    for link in _unwrapped(module.forward):
        if getattr(link, "__func__", link) in own:
            return
        yield link


def _unwrapped(function: Any) -> Iterator[Any]:
    """The function, what it wraps, what that wraps, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _home(link: Any) -> str:
    """The module whose code a wrapper is; functools.wraps has written over its __module__."""
    function = link.func if isinstance(link, functools.partial) else getattr(link, "__func__", link)
    return getattr(function, "__globals__", {}).get("__name__") or type(function).__module__


def _autocasts(link: Any) -> list[torch.autocast]:
    function = getattr(link, "__func__", link)
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, torch.autocast)]


def _members(hook: Any) -> list[Any]:
    return [member for inner in hook.hooks for member in _members(inner)] if hasattr(hook, "hooks") else [hook]
