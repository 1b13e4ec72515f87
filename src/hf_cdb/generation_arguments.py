"""Which arguments of `generate` continuous depth batching takes or refuses."""

import dataclasses
import difflib
import inspect
from typing import Any

from transformers import GenerationConfig
from transformers.generation import GenerationMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.utils import logging

from .config import CDBConfig, saved_settings

__all__ = [
    "IDLE_OPTIONS",
    "REFUSED",
    "check_compile",
    "check_guidance",
    "check_names",
    "check_on_token",
    "check_options",
    "check_replays",
    "check_saved",
    "refuse",
    "refuse_early",
    "refuse_unread",
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
    "compile_config": "loops are compiled by a setting of cdb, as a whole: cdb={'compile': True}",
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
# Options that choose a decoding mode other than greedy search and sampling, and the value that does not.
_MODES = {
    "num_beams": 1,
    "constraints": None,
    "force_words_ids": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": False,
}
_SETTINGS = tuple(field.name for field in dataclasses.fields(CDBConfig))
_OURS = ("cdb", "cdb_config", "on_token")
# Arguments of the forward that the engine reads, or that generate itself adds.
_READ = ("inputs_embeds", "attention_mask", "init_scale", "init_seed")
_ADDED = ("position_ids", "use_cache", "logits_to_keep", "tokenizer", "synced_gpus", "streamer")


def refuse(name: str, value: Any) -> None:
    """Raise the error for an argument that cdb does not support."""
    reason = f": {REFUSED[name]}" if name in REFUSED else ""
    raise ValueError(
        f"{name}={_short(value)} is not supported with cdb{reason}. Leave it out, or generate with cdb=False."
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"<{type(value).__name__}>"


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
        _refuse_mode(generation_config, mode)
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


def _refuse_mode(generation_config: GenerationConfig, mode: GenerationMode) -> None:
    """Name the options that ask for a decoding mode that cdb does not have."""
    values = {name: (getattr(generation_config, name, None), off) for name, off in _MODES.items()}
    asked = {name: value for name, (value, off) in values.items() if value not in (None, False, off)}
    if mode != GenerationMode.CONTRASTIVE_SEARCH and len(asked) > 1:
        asked.pop("penalty_alpha", None)  # without top_k, or beside another mode, nothing reads it
    off = ", ".join(f"{name}={_MODES[name]}" for name in asked)
    raise ValueError(
        f"{' and '.join(f'{name}={_short(value)}' for name, value in asked.items())} asks for the decoding mode "
        f"{mode.value!r}, which is not supported with cdb: it moves rows between positions, or runs several tokens of "
        "one at once, which a depth cache does not follow. Use greedy search or sampling: leave it out, or pass "
        f"{off} where generation_config holds it. Else generate with cdb=False."
    )


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
    if near and meant not in (None, *_OURS) and _likeness(name, meant) > _likeness(name, near[0]):
        near = []
    if near or name.startswith("cdb") or meant == "cdb_config":
        example = f"{near[0]!r}: ..." if near else "..."
        return f" Settings of cdb go into its dict: cdb={{{example}}}; they are {', '.join(_SETTINGS)}."
    return f" Did you mean {meant!r}?" if meant else ""


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()


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


def check_compile(generation_config: GenerationConfig, config: CDBConfig) -> None:
    """Refuse to compile and not to compile."""
    if config.compile and generation_config.disable_compile:
        raise ValueError(
            f"disable_compile={generation_config.disable_compile!r} beside compile=True of cdb: one says that nothing "
            "is compiled, the other that loops are. Leave one out."
        )


def check_replays(stops: Any, generation_config: GenerationConfig) -> None:
    """Refuse to tell of tokens that may be taken back."""
    if stops.replays and (generation_config._on_token is not None or generation_config._only_prepare):
        raise ValueError(
            "on_token and generate_stream tell of tokens at once, but a stopping criterion of this call looks at all "
            "rows together and may take some back. Return a tensor with an entry for every row, each decided by its "
            "own row, or generate without telling."
        )


def check_saved(generation_config: GenerationConfig, cdb: Any, named: Any) -> None:
    """Look at settings that the call does not run with, too.

    Args:
        cdb: of the call.
        named: `cdb_config` where the call itself names it.

    Raises:
        ValueError: the call names settings that nothing reads, or that do not exist.
    """
    off = cdb is None or cdb is False
    if named is not None and (off or isinstance(cdb, CDBConfig)):
        why = f"cdb={cdb!r}, which is off" if off else "cdb=CDBConfig(...), which replaces them"
        raise ValueError(
            f"cdb_config={named!r} beside {why}: nothing would read it. Pass the settings as cdb={{...}}, or cdb=True "
            "beside them."
        )
    if off:
        try:
            CDBConfig.create(True, saved_settings(generation_config))
        except ValueError as error:
            logger.warning_once(
                "The settings of cdb in generation_config are not read, since cdb is off, but with cdb they would be "
                f"refused: {error}"
            )


def check_on_token(on_token: Any, cdb: bool) -> None:
    """Refuse a callback that cannot be called, or that stock generation would never call."""
    if not callable(on_token):
        raise ValueError(f"on_token={on_token!r} cannot be called. Pass a function of (row, token, depth).")
    if not cdb:
        raise ValueError(
            f"on_token={on_token!r} is called by cdb only, and cdb is off. Pass cdb=True, or a streamer instead."
        )


def refuse_unread(model_kwargs: dict[str, Any]) -> None:
    """Refuse arguments of the model's forward that the engine would not see."""
    for name, value in model_kwargs.items():
        if value is not None and name not in (*_READ, *_ADDED):
            refuse(name, value)
