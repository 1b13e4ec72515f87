"""The models' own keywords beside cdb: which setting each of them means."""

import dataclasses
from collections.abc import Collection
from typing import Any

from .adapters import LoopAdapter
from .config import CDBConfig, rule_name
from .exits import RULES

__all__ = ["take_official_arguments"]

# Settings, and the models' own keywords for them.
_KEYWORDS = {
    "exit_threshold": "exit_threshold",
    "exit_rule": "criterion",
    "max_depth": "num_steps",
    "kv_policy": "cache_lookup_strategy",
}
_DECIDES = ("exit_rule", "exit_threshold", "quality")
_UNDECIDED = (None, "auto", "never")
_STEPS = ("exit_at_step", "early_exit_step")


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
    wanted: dict[str, tuple[str, Any]] = {}  # by setting: the keyword as given, and the value of the setting
    for setting, name in _KEYWORDS.items():
        value = model_kwargs.pop(name, None)
        if value is None:
            continue
        text = f"{name}={value!r}"
        if name == "criterion" and value not in ("auto", *RULES):
            raise ValueError(
                f"{text} is no exit rule. Choose one of auto, {', '.join(RULES)}; 'never' means full depth."
            )
        if name == "cache_lookup_strategy":
            value = _policy_of_lookup(value, adapter.core_layers)
        wanted[setting] = (text, value)
    steps = {name: model_kwargs.pop(name) for name in _STEPS if model_kwargs.get(name) is not None}
    if len(steps) > 1:
        raise ValueError(f"{' and '.join(f'{k}={v}' for k, v in steps.items())} both name the exit. Pass one of them.")
    for name, step in steps.items():
        decided = {setting: f"cdb's {setting}={getattr(config, setting)!r}" for setting in _DECIDES if setting in given}
        decided = {setting: text for setting, text in decided.items() if getattr(config, setting) not in _UNDECIDED}
        decided |= {setting: wanted[setting][0] for setting in _DECIDES if setting in wanted}
        for text in decided.values():
            raise ValueError(
                f"{name}={step} and {text} contradict each other: a fixed step leaves nothing to decide. Drop one."
            )
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < adapter.full_depth:
            raise ValueError(
                f"{name}={step!r} does not exist: steps count from 0 and this model has {adapter.full_depth} "
                f"loops. Choose an integer from 0 to {adapter.full_depth - 1}."
            )
        if "max_depth" in wanted:
            raise ValueError(f"{name}={step} and {wanted['max_depth'][0]} both name the depth. Pass one of them.")
        wanted["max_depth"] = (f"{name}={step}, which is {step + 1} loops,", step + 1)
        config = dataclasses.replace(config, exit_rule="never", exit_threshold=None, quality=None)
    if model_kwargs.pop("use_weighted_exit", False):
        raise ValueError(
            "use_weighted_exit=True needs the states of all loops, which cdb exists to skip. Drop it, or cdb=False."
        )
    changes: dict[str, Any] = {}
    for setting, (text, value) in wanted.items():
        present = getattr(config, setting)
        unset = "auto" if setting in ("exit_rule", "kv_policy") else None
        if setting in given and present not in (unset, value):
            raise ValueError(
                f"{text} and cdb's {setting}={present!r} contradict each other: they are one setting. Give one of them."
            )
        changes[setting] = value
    rule = rule_name(changes.get("exit_rule", config.exit_rule), adapter)
    another = rule != rule_name(config.exit_rule, adapter)
    if another and "exit_threshold" not in given:
        changes.setdefault("exit_threshold", None)  # that of the saved rule is on another scale
    if (another or "exit_threshold" in changes) and "quality" not in given:
        changes["quality"] = None  # the saved one stands for a threshold
    return dataclasses.replace(config, **changes)


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
