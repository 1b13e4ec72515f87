"""What values the settings may have, and which contradict each other, whatever the model."""

import difflib
import numbers
from typing import Any

import numpy
import torch

from .exits import RULES, ExitRule, make_rule
from .kv_policy import POLICIES
from .room import PREEMPTIONS

__all__ = ["LAYOUTS", "checked_settings", "is_integer", "nearest"]

LAYOUTS = ("dense", "compact", "auto")


def checked_settings(config: Any) -> dict[str, Any]:
    """The values of a `CDBConfig` that are given in other types than the ones they are kept in, by name.

    Raises:
        ValueError: a value out of its range, or two that contradict each other.
    """
    found: dict[str, Any] = {"max_overtakes": _integer(config, "max_overtakes", least=0)}
    for name in ("min_depth", "max_num_seqs", "min_coda_batch"):
        found[name] = _integer(config, name)
    for name in ("max_depth", "kv_slots", "prefill_chunk_size", "max_prefill_tokens"):
        if getattr(config, name) is not None:
            found[name] = _integer(config, name)
    for name in ("refill", "prefill_exit", "compile", "trace", "progress"):
        if not isinstance(getattr(config, name), bool):
            raise ValueError(f"{name}={getattr(config, name)!r}: choose True or False.")
    for name in ("prefix_reuse", "prepack_weights"):
        if not isinstance(getattr(config, name), bool) and getattr(config, name) != "auto":
            raise ValueError(f"{name}={getattr(config, name)!r}: choose True, False or 'auto'.")
    if isinstance(config.lookahead, bool) or config.lookahead not in (0, 1):
        raise ValueError(f"lookahead={config.lookahead!r}: a decision takes effect 0 or 1 loops later. Choose 0 or 1.")
    if config.max_depth is not None and config.min_depth > config.max_depth:
        raise ValueError(
            f"min_depth={config.min_depth} exceeds max_depth={config.max_depth}: no depth lies between. Lower it."
        )
    _check_rule(config)
    _check_policy(config)
    if config.max_kv_memory is not None:
        found["max_kv_memory"] = _bytes_or_share("max_kv_memory", config.max_kv_memory)
    _check_memory(config)
    if config.exit_depths is not None:
        found["exit_depths"] = _rows_of_integers("exit_depths", config.exit_depths)
    if config.seeds is not None:
        seeds = _plain(config.seeds)
        if not isinstance(seeds, list | tuple) or not all(is_integer(seed) for seed in seeds):
            raise ValueError(f"seeds={config.seeds!r}: choose one integer per prompt.")
        found["seeds"] = tuple(int(seed) for seed in seeds)
    if config.token_limits is not None:
        limits = _plain(config.token_limits)
        if not isinstance(limits, list | tuple) or not all(is_integer(limit) and limit > 0 for limit in limits):
            raise ValueError(f"token_limits={config.token_limits!r}: choose one positive integer per prompt.")
        found["token_limits"] = tuple(int(limit) for limit in limits)
    return found


def _integer(config: Any, name: str, least: int = 1) -> int:
    value = getattr(config, name)
    if not is_integer(value) or value < least:
        raise ValueError(f"{name}={value!r}: choose an integer of at least {least}.")
    return int(value)


def _check_rule(config: Any) -> None:
    rule = config.exit_rule
    threshold = config.exit_threshold
    if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, numbers.Real)):
        raise ValueError(
            f"exit_threshold={threshold!r}: choose one number, on the scale of the exit rule, or None for the "
            "rule's own default."
        )
    if config.quality is not None:
        _check_quality(config)
    if isinstance(rule, ExitRule):
        if config.exit_threshold is not None:
            raise ValueError(
                f"exit_threshold={config.exit_threshold} beside a rule object: the object {rule.name!r} has its own "
                "threshold. Set it there."
            )
    elif rule not in ("auto", *RULES):
        raise ValueError(
            f"exit_rule={rule!r} is unknown{nearest(rule, RULES)} Choose one of auto, {', '.join(RULES)}, or pass "
            "an ExitRule."
        )
    elif rule in ("never", "replay") and config.exit_threshold is not None:
        raise ValueError(f"exit_threshold={config.exit_threshold} has no meaning for exit_rule={rule!r}. Drop it.")
    elif rule not in ("auto", "preloop", "replay"):
        make_rule(rule, config.exit_threshold)
    if (rule == "replay") != (config.exit_depths is not None):
        raise ValueError(
            f"exit_rule={rule!r} with exit_depths={'given' if config.exit_depths is not None else None}: the depths "
            "to replay and exit_rule='replay' need each other. Pass both or none."
        )
    if rule == "replay" and config.prefill_exit:
        raise ValueError(
            "prefill_exit=True beside exit_rule='replay': exit_depths has depths of new tokens and none of the "
            "prompt, which runs at full depth. Set prefill_exit=False."
        )


def _check_quality(config: Any) -> None:
    quality, rule = config.quality, config.exit_rule
    if isinstance(quality, bool) or not isinstance(quality, numbers.Real) or not 0 < quality < 1:
        raise ValueError(
            f"quality={quality!r}: choose a number between 0 and 1, such as 0.99; all of it is exit_rule='never'."
        )
    if config.exit_threshold is not None:
        raise ValueError(
            f"quality={quality} beside exit_threshold={config.exit_threshold}: the quality stands for a threshold "
            "that was calibrated. Give one of them."
        )
    if isinstance(rule, ExitRule) or rule in ("never", "replay"):
        raise ValueError(
            f"quality={quality} beside exit_rule={rule!r}: it stands for the threshold of a rule by name. Drop it, "
            "or choose another rule."
        )
    if config.prefill_exit:
        raise ValueError(
            f"quality={quality} beside prefill_exit=True: it was calibrated with prompts at full depth. Give an "
            "exit_threshold, or set prefill_exit=False."
        )


def _check_policy(config: Any) -> None:
    if config.kv_policy not in ("auto", *POLICIES):
        raise ValueError(
            f"kv_policy={config.kv_policy!r} is unknown{nearest(config.kv_policy, POLICIES)} Choose one of auto, "
            f"{', '.join(POLICIES)}."
        )
    if config.kv_slots is not None and config.kv_policy not in ("first_then_shared", "modular"):
        raise ValueError(
            f"kv_slots={config.kv_slots} has no meaning for kv_policy={config.kv_policy!r}, whose number of slots is "
            "given. Drop it, or choose first_then_shared or modular."
        )
    if config.kv_layout not in LAYOUTS:
        raise ValueError(
            f"kv_layout={config.kv_layout!r} is unknown{nearest(config.kv_layout, LAYOUTS)} Choose one of "
            f"{', '.join(LAYOUTS)}."
        )


def _bytes_or_share(name: str, value: Any) -> int | float:
    if is_integer(value) and value > 0:
        return int(value)
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral) and 0 < value <= 1:
        return float(value)
    raise ValueError(
        f"{name}={value!r}: choose bytes (a positive integer) or a share of the free memory (a float in (0, 1])."
    )


def _check_memory(config: Any) -> None:
    memory = config.max_kv_memory
    if config.preemption not in PREEMPTIONS:
        raise ValueError(
            f"preemption={config.preemption!r} is unknown{nearest(config.preemption, PREEMPTIONS)} Choose one of "
            f"{', '.join(PREEMPTIONS)}."
        )
    if config.preemption != "offload" and memory is None:
        raise ValueError(
            f"preemption={config.preemption!r} without max_kv_memory: every row has its room from the start, and "
            "none is ever preempted. Set max_kv_memory, or drop it."
        )
    if config.max_overtakes and memory is None:
        raise ValueError(
            f"max_overtakes={config.max_overtakes} without max_kv_memory: no prompt ever waits for room, so none can "
            "be overtaken. Set max_kv_memory, or drop it."
        )


def is_integer(value: Any) -> bool:
    """Whether it is an integer, numpy's included."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """Lists in place of a tensor or an array."""
    return value.tolist() if isinstance(value, torch.Tensor | numpy.ndarray) else value


def _rows_of_integers(name: str, value: Any) -> tuple[tuple[int, ...], ...]:
    try:
        rows = tuple(tuple(_plain(row)) for row in _plain(value))
    except TypeError:
        rows = ((None,),)
    if not all(is_integer(depth) for row in rows for depth in row):
        raise ValueError(
            f"{name}={str(value)[:60]}: a depth for each row and new token is wanted. Pass integers "
            "[rows, new tokens], as nested lists or a tensor."
        )
    return tuple(tuple(int(depth) for depth in row) for row in rows)


def nearest(name: Any, names: Any) -> str:
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."
