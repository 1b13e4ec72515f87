"""Which arguments of `generate` continuous depth batching takes, translates or refuses."""

import dataclasses
from typing import Any

from .adapters import LoopAdapter
from .config import CDBConfig

__all__ = [
    "UNSUPPORTED_SETTINGS",
    "refuse",
    "refuse_early",
    "refuse_unread",
    "take_official_arguments",
]

# Settings of a GenerationConfig that ask for what the engine does not do.
UNSUPPORTED_SETTINGS = (
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
    "token_healing",
    "prefill_chunk_size",
)
# Arguments of the forward that the engine reads, or that generate itself adds.
_READ = ("inputs_embeds", "attention_mask", "init_scale", "init_seed")
_ADDED = ("position_ids", "use_cache", "logits_to_keep", "tokenizer", "synced_gpus", "streamer")


def refuse(name: str, value: Any) -> None:
    """Raise the error for an argument that cdb does not support."""
    raise ValueError(f"{name}={value!r} is not supported with cdb. Leave it out, or generate with cdb=False.")


def refuse_early(kwargs: dict[str, Any]) -> None:
    """Refuse what stock generate would act on before any hook of this class runs."""
    for name in ("cache", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} cannot be passed with cdb: keys and values of rows at different depths live in a cache of "
                "the engine's own. Continue a chat by its text, or generate with cdb=False."
            )
    for name in ("custom_generate", "assistant_model", "synced_gpus", "output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            refuse(name, kwargs[name])
    if kwargs.get("position_ids") is not None:
        raise ValueError(
            "position_ids cannot be passed with cdb: positions count the tokens that attention_mask keeps. Leave them "
            "out, or generate with cdb=False."
        )
    if kwargs.get("cache_implementation") is not None:
        refuse("cache_implementation", kwargs["cache_implementation"])


def take_official_arguments(config: CDBConfig, adapter: LoopAdapter, model_kwargs: dict[str, Any]) -> CDBConfig:
    """Settings that the models' own keywords ask for beside cdb, taken out of `model_kwargs`.

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
    for name in ("exit_at_step", "early_exit_step"):
        if model_kwargs.get(name) is not None:
            step = model_kwargs.pop(name)
            if config.exit_rule not in ("auto", "never"):
                raise ValueError(
                    f"{name}={step} and exit_rule={config.exit_rule!r} contradict each other: a fixed step leaves "
                    "nothing to decide. Drop one."
                )
            wanted["max_depth"] = (name, step + 1)
            config = dataclasses.replace(config, exit_rule="never", exit_threshold=None)
    if model_kwargs.pop("use_weighted_exit", False):
        raise ValueError(
            "use_weighted_exit=True needs the states of all loops, which cdb exists to skip. Drop it, or cdb=False."
        )
    for setting, (name, value) in wanted.items():
        present = getattr(config, setting)
        unset = "auto" if setting in ("exit_rule", "kv_policy") else None
        if present not in (unset, value):
            raise ValueError(
                f"{name}={value!r} and cdb's {setting}={present!r} contradict each other: they are one setting. Give "
                "one of them."
            )
        config = dataclasses.replace(config, **{setting: value})
    return config


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
