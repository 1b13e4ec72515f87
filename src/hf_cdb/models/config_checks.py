"""Checks of configuration values that both models share. They raise plain ValueErrors."""

import math
from typing import Any

__all__ = [
    "check_choice",
    "check_divides",
    "check_heads",
    "check_integers",
    "check_number",
    "check_rotary",
    "take_aliases",
]


def check_integers(config: Any, *names: str, minimum: int = 1) -> None:
    """Refuse attributes `names` that are not integers of at least `minimum`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{name}={value!r}: {type(config).__name__} needs an integer of at least {minimum} here.")


def check_number(config: Any, name: str, low: float, high: float = math.inf, above: bool = False) -> None:
    """Refuse an attribute that is no finite number from `low` (with `above`: above it) to `high`."""
    value = getattr(config, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or not (value > low if above else value >= low) or value > high:
        least = f"above {low}" if above else f"of at least {low}"
        most = f" and at most {high}" if high < math.inf else ""
        raise ValueError(f"{name}={value!r}: {type(config).__name__} needs a finite number {least}{most} here.")


def check_rotary(config: Any) -> None:
    """Complete `config.rope_parameters`, and refuse what no rotary embedding can be made from."""
    settings = config.rope_parameters
    kind = settings.setdefault("rope_type", settings.get("type") or "default")
    theta = settings.get("rope_theta")
    if isinstance(theta, bool) or not isinstance(theta, (int, float)) or not 0 < theta < math.inf:
        raise ValueError(
            f"rope_parameters={settings!r}: rope_theta has to be a positive number. Give it beside the other settings."
        )
    if kind == "default":
        return
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # imports torch

    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(
            f"rope_parameters={settings!r}: rope_type is none of default, {', '.join(ROPE_INIT_FUNCTIONS)}."
        )
    try:
        ROPE_INIT_FUNCTIONS[kind](config, None)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"rope_parameters={settings!r} does not work: {type(error).__name__}: {error}. See Transformers' "
            f"documentation of the rotary embedding {kind!r} for the settings it needs."
        ) from error


def check_divides(config: Any, whole: str, part: str) -> None:
    """Refuse a config whose attribute `whole` is no multiple of its attribute `part`."""
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"{whole}={getattr(config, whole)} is not a multiple of {part}={getattr(config, part)}: every one of the "
            f"{part.removeprefix('num_').replace('_', ' ')} needs the same share. Change one of the two."
        )


def check_heads(config: Any) -> None:
    """Refuse head counts and sizes that cannot be rotated in pairs or shared evenly."""
    check_divides(config, "num_attention_heads", "num_key_value_heads")
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim} is odd, but rotary embeddings turn pairs. Choose an even size.")


def check_choice(config: Any, name: str, supported: tuple, reason: str) -> None:
    """Refuse a value of attribute `name` outside `supported`."""
    value = getattr(config, name)
    if value not in supported:
        raise ValueError(
            f"{name}={value!r} is not supported by {type(config).__name__}, only {', '.join(map(repr, supported))}: "
            f"{reason}"
        )


def take_aliases(config: Any, kwargs: dict[str, Any]) -> None:
    """Move values given under the names of `config.attribute_map` from `kwargs` to the attributes they stand for.

    Derived values need them before the base class would set them.

    Raises:
        ValueError: both names were given, with different values.
    """
    defaults = {name: field.default for name, field in type(config).__dataclass_fields__.items()}
    for alias, name in type(config).attribute_map.items():
        if alias in kwargs:
            value, present = kwargs.pop(alias), getattr(config, name)
            if present != defaults[name] and value != present:
                raise ValueError(
                    f"{alias}={value!r} and {name}={present!r} are two names of one setting, with different values. "
                    "Give one."
                )
            setattr(config, name, value)
