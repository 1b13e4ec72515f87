"""Exit thresholds that were calibrated for a model, kept in `generation_config.cdb_calibrated`."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["SETTINGS", "Calibrated", "calibrated_threshold", "remember"]

# Settings that a threshold keeps its promise under; the others do not change what a row generates.
SETTINGS = ("exit_rule", "lookahead", "kv_policy", "kv_slots", "min_depth", "max_depth")


@dataclass(frozen=True)
class Calibrated:
    """A threshold, and what it was found to keep.

    Attributes:
        quality: 1 less the limit of the expected loss.
        exit_threshold: on the rule's scale.
        exit_rule, lookahead, kv_policy, kv_slots, min_depth, max_depth: what it holds for, as resolved for the model.
        loss: what was lost against full depth, "score" or "agreement", see `hf_cdb.calibration`.
        confidence: of the statement that the expected loss is below the limit.
        data: what the examples were of.
        examples: how many.
        mean_depth: loops per generated token on them.
        held_out: on other examples: their number `examples`, the mean `loss` with its interval `low`, `high` of the
            same confidence, and `mean_depth`.
        full_score: mean score at full depth on the examples; None where the loss is no score.
    """

    quality: float
    exit_threshold: float
    exit_rule: str
    lookahead: int
    kv_policy: str
    kv_slots: int | None
    min_depth: int
    max_depth: int
    loss: str
    confidence: float
    data: str
    examples: int
    mean_depth: float
    held_out: dict[str, Any]
    full_score: float | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """What it holds for."""
        return {name: getattr(self, name) for name in SETTINGS}

    @property
    def measure(self) -> tuple[str, str]:
        """What its quality is of: qualities of another loss or other data cannot be held against it."""
        return self.loss, self.data


def calibrated_threshold(generation_config: Any, quality: float, settings: Mapping[str, Any]) -> float:
    """The threshold of the lowest calibrated quality that is at least the one asked for.

    Of several losses or data that were calibrated with these settings the last one says what quality means.

    Args:
        generation_config: the model's.
        quality: asked for; what was calibrated for a higher one keeps it too.
        settings: those of the call, by the names in `SETTINGS`, as resolved for the model.

    Raises:
        ValueError: nothing was calibrated, or not for these settings, or not for so high a quality.
    """
    entries = _entries(generation_config)
    command = f"`hf-cdb calibrate MODEL --quality {quality} --save`"
    if not entries:
        raise ValueError(
            f"quality={quality}: nothing was calibrated for this model. Run {command}, or set exit_threshold."
        )
    fitting = [entry for entry in entries if entry.settings == dict(settings)]
    if not fitting:
        differences = [
            {name: value for name, value in entry.settings.items() if value != settings[name]} for entry in entries
        ]
        nearest = min(differences, key=len)
        asked = _text({name: settings[name] for name in nearest})
        raise ValueError(
            f"quality={quality} with {asked}: calibrated was {_text(nearest)}, and its threshold promises nothing for "
            f"other settings. Use those, calibrate with yours, or set exit_threshold."
        )
    alike = [entry for entry in fitting if entry.measure == fitting[-1].measure]
    enough = [entry for entry in alike if entry.quality >= quality]
    if not enough:
        highest = max(alike, key=lambda entry: entry.quality)
        raise ValueError(
            f"quality={quality}: the highest that was calibrated for these settings is {highest.quality} "
            f"({highest.loss}, on {highest.data}). Ask for no more, or calibrate it: {command}."
        )
    return min(enough, key=lambda entry: entry.quality).exit_threshold


def remember(model: Any, found: Calibrated) -> None:
    """Put a calibrated threshold into the model's generation config, and make it what `cdb=True` uses.

    It takes the place of one for the same quality, settings, loss and data; others stay. Saved settings that do not
    concern exits stay too.
    """
    config = model.generation_config
    key = (found.quality, found.settings, found.measure)
    kept = [entry for entry in _entries(config) if (entry.quality, entry.settings, entry.measure) != key]
    config.cdb_calibrated = [dataclasses.asdict(entry) for entry in (*kept, found)]
    cdb = getattr(config, "cdb", None)
    saved = {**(_plain(getattr(config, "cdb_config", None))), **(_plain(cdb))}
    others = {name: value for name, value in saved.items() if name not in (*SETTINGS, "exit_threshold", "exit_depths")}
    chosen = {name: value for name, value in found.settings.items() if value is not None}
    config.cdb_config = {**others, **chosen, "quality": found.quality}
    if cdb is not None and not isinstance(cdb, bool):
        config.cdb = True  # its settings are in cdb_config now
    config._from_model_config = False  # or the file would lose its extra keys on the next load


def _plain(settings: Any) -> dict[str, Any]:
    """Settings in either form; none of True, False and None."""
    if settings is None or isinstance(settings, bool):
        return {}
    return dict(settings) if isinstance(settings, Mapping) else settings.to_dict()


def _entries(generation_config: Any) -> list[Calibrated]:
    saved = getattr(generation_config, "cdb_calibrated", None) or []
    try:
        return [Calibrated(**entry) for entry in saved]
    except TypeError as error:
        raise ValueError(
            f"generation_config.cdb_calibrated={saved!r} is not what `hf-cdb calibrate --save` writes ({error}). "
            "Calibrate again, or take it out."
        ) from None


def _text(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
