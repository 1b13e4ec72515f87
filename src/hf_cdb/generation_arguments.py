"""Which arguments of `generate` continuous depth batching takes, translates or refuses."""

import dataclasses
import difflib
import inspect
from collections.abc import Collection
from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .adapters import LoopAdapter
from .config import CDBConfig

__all__ = [
    "IDLE_OPTIONS",
    "REFUSED",
    "check_guidance",
    "check_model",
    "check_names",
    "check_on_token",
    "check_options",
    "check_replays",
    "learns_prompts",
    "refuse",
    "refuse_early",
    "refuse_unread",
    "take_official_arguments",
]

logger = logging.get_logger(__name__)

_CACHE = "keys and values of rows at different depths live in a cache of the engine's own"
# Arguments and options that ask for what the engine does not do, and why it does not.
REFUSED = {
    "cache": f"{_CACHE}; a chat continues by its text",
    "past_key_values": f"{_CACHE}; a chat continues by its text",
    "cache_implementation": _CACHE,
    "cache_config": _CACHE,
    "max_cache_len": _CACHE,
    "custom_generate": "it replaces the decoding loop, and cdb is one",
    "assistant_model": "its drafts are checked at one depth for all of them",
    "assistant_tokenizer": "there is no assistant",
    "is_assistant": "an assistant takes steps back in its cache, which a depth cache cannot",
    "synced_gpus": "rows end at different times, and no process runs on for the others",
    "output_attentions": "rows of one launch are at different depths, and attention never forms the weights",
    "output_hidden_states": "rows of one launch are at different depths",
    "position_ids": "positions count the tokens that attention_mask keeps",
    "token_healing": "it decodes a prompt again before any row has started, which is untested here",
    "prefill_chunk_size": "cdb has a setting of that name, for pieces of one row's prompt: "
    "cdb={'prefill_chunk_size': ...}",
    "compile_config": "rows of one launch change their number and lengths all the time, and nothing is compiled",
    "continuous_batching_config": "it belongs to generate_batch, and cdb schedules by itself: see max_num_seqs and "
    "max_kv_memory",
}
# Options of decoding modes that cdb does not have. Stock greedy search and sampling do not read them either.
IDLE_OPTIONS = {
    "early_stopping": "beam search",
    "length_penalty": "beam search",
    "num_beam_groups": "beam search",
    "diversity_penalty": "beam search",
    "penalty_alpha": "contrastive search",
    "low_memory": "contrastive search",
    "num_assistant_tokens": "assisted decoding",
    "num_assistant_tokens_schedule": "assisted decoding",
    "assistant_confidence_threshold": "assisted decoding",
    "max_matching_ngram_size": "prompt lookup",
    "assistant_lookbehind": "assisted decoding",
    "target_lookbehind": "assisted decoding",
    "assistant_ensemble_weight": "assisted decoding",
    "speculation_type": "assisted decoding",
    "decoder_start_token_id": "models with an encoder",
}
_SETTINGS = tuple(field.name for field in dataclasses.fields(CDBConfig))
_OURS = ("cdb", "cdb_config", "on_token")
# Arguments of the forward that the engine reads, or that generate itself adds.
_READ = ("inputs_embeds", "attention_mask", "init_scale", "init_seed")
_ADDED = ("position_ids", "use_cache", "logits_to_keep", "tokenizer", "synced_gpus", "streamer")


def refuse(name: str, value: Any) -> None:
    """Raise the error for an argument that cdb does not support."""
    reason = f": {REFUSED[name]}" if name in REFUSED else ""
    text = repr(value)
    if len(text) > 80:
        text = f"<{type(value).__name__}>"
    raise ValueError(f"{name}={text} is not supported with cdb{reason}. Leave it out, or generate with cdb=False.")


def refuse_early(kwargs: dict[str, Any]) -> None:
    """Refuse what stock generate would act on before any hook of this class runs."""
    for name in ("cache", "past_key_values", "position_ids", "cache_implementation"):
        if kwargs.get(name) is not None:
            refuse(name, kwargs[name])
    for name in ("custom_generate", "assistant_model", "synced_gpus", "output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            refuse(name, kwargs[name])


def check_options(generation_config: GenerationConfig) -> None:
    """Refuse decoding modes and options that cdb does not have; warn of options that nothing reads in those it has."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"generation mode {mode.value!r} is not supported with cdb: it moves rows between positions, or runs "
            "several tokens of one at once, which a depth cache does not follow. Use greedy search or sampling, or "
            "cdb=False."
        )
    for name in REFUSED:
        if getattr(generation_config, name, None):
            refuse(name, getattr(generation_config, name))
    if generation_config.use_cache is False:
        raise ValueError(
            "use_cache=False is not supported with cdb: rows at different depths read each other's past from a "
            "cache, and nothing could be recomputed at the depths it had. Leave it out, or generate with cdb=False."
        )
    defaults = generation_config._get_default_generation_params()
    for name, modes in IDLE_OPTIONS.items():
        value = getattr(generation_config, name, None)
        if value is not None and value != defaults.get(name):
            logger.warning_once(f"{name}={value!r} has no effect: it belongs to {modes}.")


def check_names(model: GenerationMixin, model_kwargs: dict[str, Any], of_cdb: bool = False) -> None:
    """Refuse names that neither generate nor the model knows, with the name that may be meant.

    Args:
        of_cdb: only where that is one of cdb's; the others stock `generate` refuses in its own words.
    """
    for name, value in model_kwargs.items():
        try:
            model._validate_model_kwargs({name: value})
        except ValueError as error:
            if of_cdb and not (name.startswith("cdb") or name in _SETTINGS or _meant(model, name) in _OURS):
                continue
            raise ValueError(f"{error}.{_hint(model, name)}") from None


def _hint(model: GenerationMixin, name: str) -> str:
    near = difflib.get_close_matches(name.removeprefix("cdb_"), _SETTINGS, n=1)
    meant = _meant(model, name)
    if near or name.startswith("cdb") or meant == "cdb_config":
        example = f"{near[0]!r}: ..." if near else "..."
        return f" Settings of cdb go into its dict: cdb={{{example}}}; they are {', '.join(_SETTINGS)}."
    return f" Did you mean {meant!r}?" if meant else ""


def _meant(model: GenerationMixin, name: str) -> str | None:
    options = [option for option in vars(GenerationConfig()) if not option.startswith("_")]
    arguments = [*inspect.signature(GenerationMixin.generate).parameters, *inspect.signature(model.forward).parameters]
    return next(iter(difflib.get_close_matches(name, [*options, *arguments, *_OURS], n=1)), None)


def check_guidance(generation_config: GenerationConfig, arguments: dict[str, Any]) -> None:
    """Refuse a negative prompt that nothing reads; say what guidance costs."""
    scale = generation_config.guidance_scale
    if scale is not None and scale != 1:
        logger.warning_once(
            f"guidance_scale={scale}: the second pass of guidance runs row by row at the model's full depth, so cdb "
            "makes only the first one shorter."
        )
        return
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} beside guidance_scale={scale}: without guidance nothing reads it. Set guidance_scale, or "
                "leave it out."
            )


def check_replays(stops: Any, generation_config: GenerationConfig) -> None:
    """Refuse to tell of tokens that may be taken back."""
    if stops.replays and (generation_config._on_token is not None or generation_config._lazy):
        raise ValueError(
            "on_token and generate_stream tell of tokens at once, but a stopping criterion of this call looks at all "
            "rows together and may take some back. Return a tensor with an entry for every row, each decided by its "
            "own row, or generate without telling."
        )


def check_on_token(on_token: Any, cdb: bool) -> None:
    """Refuse a callback that cannot be called, or that stock generation would never call."""
    if not callable(on_token):
        raise ValueError(f"on_token={on_token!r} cannot be called. Pass a function of (row, token, depth).")
    if not cdb:
        raise ValueError(
            f"on_token={on_token!r} is called by cdb only, and cdb is off. Pass cdb=True, or a streamer instead."
        )


def check_model(adapter: LoopAdapter) -> None:
    """Refuse a model that the engine would run, but not as it is meant."""
    model = adapter.model
    if adapter.device.type == "meta":
        raise ValueError(
            f"{type(model).__name__} has no weights: its parameters are on the meta device, and no hook brings them. "
            "Load a checkpoint with from_pretrained, or offload it with accelerate."
        )
    prepare = vars(model).get("prepare_inputs_for_generation")
    if prepare is not None and (learns_prompts(model) or getattr(prepare, "__self__", None) is None):
        raise ValueError(
            f"{type(model).__name__}.prepare_inputs_for_generation={prepare!r} was replaced, as PEFT's prompt and "
            "prefix tuning do it, and the engine prepares its inputs itself. Generate with cdb=False. Of prompt tuning "
            "the virtual tokens may also be part of the prompt: peft_model.get_base_model().generate(inputs_embeds="
            "torch.cat((peft_model.get_prompt(rows), embeddings of the tokens), dim=1), attention_mask=..., cdb=...)."
        )


def learns_prompts(model: GenerationMixin) -> bool:
    """Whether the call comes from a PEFT model that puts virtual tokens where stock `generate` prepares its inputs."""
    owner = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    return getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False)


def take_official_arguments(
    config: CDBConfig, adapter: LoopAdapter, model_kwargs: dict[str, Any], given: Collection[str] = ()
) -> CDBConfig:
    """Settings that the models' own keywords ask for beside cdb, taken out of `model_kwargs`.

    Args:
        config: the settings of the call.
        adapter: the model's.
        model_kwargs: arguments of the call that are the model's.
        given: settings that the call itself names; a keyword of the call goes before all others.

    Raises:
        ValueError: a keyword contradicts a setting, or asks for something that stopping early cannot give.
    """
    wanted: dict[str, tuple[str, Any]] = {}
    if model_kwargs.get("exit_threshold") is not None:
        wanted["exit_threshold"] = ("exit_threshold", model_kwargs.pop("exit_threshold"))
    if model_kwargs.get("criterion") is not None:
        wanted["exit_rule"] = ("criterion", model_kwargs.pop("criterion"))
    if model_kwargs.get("num_steps") is not None:
        wanted["max_depth"] = ("num_steps", model_kwargs.pop("num_steps"))
    if model_kwargs.get("cache_lookup_strategy") is not None:
        policy = _policy_of_lookup(model_kwargs.pop("cache_lookup_strategy"), adapter.core_layers)
        wanted["kv_policy"] = ("cache_lookup_strategy", policy)
    steps = {name: model_kwargs.pop(name) for name in _STEPS if model_kwargs.get(name) is not None}
    if len(steps) > 1:
        raise ValueError(f"{' and '.join(f'{k}={v}' for k, v in steps.items())} both name the exit. Pass one of them.")
    for name, step in steps.items():
        for setting in ("exit_rule", "exit_threshold"):
            if setting in given and getattr(config, setting) not in (None, "auto", "never"):
                raise ValueError(
                    f"{name}={step} and {setting}={getattr(config, setting)!r} contradict each other: a fixed step "
                    "leaves nothing to decide. Drop one."
                )
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < adapter.full_depth:
            raise ValueError(
                f"{name}={step!r} does not exist: steps count from 0 and this model has {adapter.full_depth} "
                f"loops. Choose an integer from 0 to {adapter.full_depth - 1}."
            )
        wanted["max_depth"] = (name, step + 1)
        config = dataclasses.replace(config, exit_rule="never", exit_threshold=None)
    if model_kwargs.pop("use_weighted_exit", False):
        raise ValueError(
            "use_weighted_exit=True needs the states of all loops, which cdb exists to skip. Drop it, or cdb=False."
        )
    changes: dict[str, Any] = {}
    for setting, (name, value) in wanted.items():
        present = getattr(config, setting)
        unset = "auto" if setting in ("exit_rule", "kv_policy") else None
        if setting in given and present not in (unset, value):
            raise ValueError(
                f"{name}={value!r} and cdb's {setting}={present!r} contradict each other: they are one setting. Give "
                "one of them."
            )
        changes[setting] = value
    if changes.get("exit_rule", config.exit_rule) != config.exit_rule and "exit_threshold" not in given:
        changes.setdefault("exit_threshold", None)  # that of the saved rule is on another scale
    return dataclasses.replace(config, **changes)


_STEPS = ("exit_at_step", "early_exit_step")


def _policy_of_lookup(strategy: str, core_layers: int) -> str:
    """The KV policy that a lookup of the published Huginn code names.

    "latest-m<k>" falls back to the deepest entry of the same core layer where k is their number; "-compress-s<k>"
    folds all loops into one slot per layer.
    """
    names = {
        f"latest-m{core_layers}": "last_exited",
        f"latest-m{core_layers}-compress-s{core_layers}": "shared",
    }
    if strategy not in names:
        raise ValueError(
            f"cache_lookup_strategy={strategy!r} has no counterpart with cdb; {' and '.join(names)} are the kv_policy "
            f"{' and '.join(names.values())}. Set kv_policy in cdb instead."
        )
    return names[strategy]


def refuse_unread(model_kwargs: dict[str, Any]) -> None:
    """Refuse arguments of the model's forward that the engine would not see."""
    for name, value in model_kwargs.items():
        if value is not None and name not in (*_READ, *_ADDED):
            refuse(name, value)
