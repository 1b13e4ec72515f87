"""The parts of the study, each a table."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
from tqdm import tqdm

from ..adapters import adapter_for
from ..config import CDBConfig
from ..exit_heads import head_for
from ..exits import RULES, ExitRule, Gate
from ..kv_policy import POLICIES
from ..training.measure import Score
from .disturbed import Disturbed, Settling, threshold_at
from .material import CLASSES, Material
from .reading import Reading, fixed_depths, mixed, read

__all__ = ["Study", "Table"]

_FIGURES = {
    "data": "",
    "loops": ".2f",
    "tokens lost": ".4f",
    "±": ".4f",
    "mixed depths lose": ".4f",
    "extra bits": "+.4f",
    "± bits": ".4f",
    "exact match lost": "+.4f",
    "± match": ".4f",
}
_ERRORS = (
    *((noise, 0.0) for noise in (0.0, 0.25, 0.5, 1.0, 2.0)),
    *((0.0, bias) for bias in (-1.0, -0.5, 0.5, 1.0)),
)
NOISE = 1.0  # of the tables that look at one level of it


@dataclass(frozen=True)
class Table:
    """One part of the study.

    Attributes:
        name: for files.
        title: for readers.
        columns: heading -> format of its numbers.
        rows: heading -> value.
    """

    name: str
    title: str
    columns: dict[str, str]
    rows: list[dict[str, Any]]


class Study:
    """A model on its material.

    Args:
        model: one with an adapter.
        base: the setting that is looked at: an exit rule with a score, by name, its threshold, and all else that
            `hf_cdb.calibrated.SETTINGS` names and that is not the default; every part varies it in its own way.
        materials: "tasks" and "text".
        seed: of the noise.
        progress: show bars.
    """

    def __init__(
        self,
        model: Any,
        base: Mapping[str, Any],
        materials: Mapping[str, Material],
        seed: int = 0,
        progress: bool = True,
    ):
        self.model, self.base, self.materials = model, dict(base), materials
        self.common = {name: value for name, value in self.base.items() if name not in ("exit_rule", "exit_threshold")}
        self.lookahead = self.base.get("lookahead", 0)
        self.seed, self.progress = seed, progress
        self.adapter = adapter_for(model)

    @functools.cached_property
    def curves(self) -> dict[str, list[Reading]]:
        """All tokens at depth 1, 2, ... of every material."""
        full = self.adapter.full_depth
        return {name: fixed_depths(self.model, material, full) for name, material in self.materials.items()}

    @functools.cached_property
    def spread(self) -> float:
        """Of the base rule's signal on text: the unit of errors."""
        return self._listen(self._rule(self.base), self.lookahead).spread

    def noise(self) -> Table:
        """The base setting with noise, and with a bias, on its signal."""
        settings = {error: {**self.common, "exit_rule": self._disturbed(*error)} for error in _ERRORS}
        title = f"Errors of the exit signal, in units of its spread ({self.spread:.3g})"
        return self._table("noise", title, {"noise": "g", "bias": "+g"}, settings)

    def rules(self) -> Table:
        """Every exit rule, at the threshold that should give the base setting's mean depth on text."""
        aim = read(self.model, self.materials["text"], self.base).mean_depth
        settings: dict[tuple[str, int], dict[str, Any]] = {}
        for name, lookahead, rule in self._scored_rules():
            rule.threshold = self._aimed(rule, lookahead, aim)
            cdb = {**self.common, "exit_rule": rule, "lookahead": lookahead}
            settings[(f"{name} {rule.threshold:.3g}", lookahead)] = cdb
        unscored = {"argmax-stability": (1, 2), "preloop": (0.5,) if head_for(self.adapter, "preloop") else ()}
        for name, thresholds in unscored.items():
            for threshold in thresholds:
                cdb = {**self.common, "exit_rule": name, "exit_threshold": threshold, "lookahead": 0}
                settings[(f"{name} {threshold}", 0)] = cdb
        title = f"Exit rules, aimed at {aim:.2f} loops per token of text"
        return self._table("rules", title, {"rule": "", "lookahead": "d"}, settings)

    def policies(self) -> Table:
        """KV policies with exits off and with the base setting, without and with lookahead."""
        settings: dict[tuple[str, str, int], dict[str, Any]] = {}
        for policy in POLICIES:
            slots = self.base.get("kv_slots") if policy == self.base.get("kv_policy") else None
            own = {"kv_policy": policy, "kv_slots": slots}
            settings[(policy, "never", 0)] = {**self.common, **own, "exit_rule": "never", "lookahead": 0}
            for lookahead in (0, 1):
                settings[(policy, self.base["exit_rule"], lookahead)] = {**self.base, **own, "lookahead": lookahead}
        return self._table("policies", "KV policies", {"kv policy": "", "rule": "", "lookahead": "d"}, settings)

    def places(self) -> Table:
        """The base setting, undisturbed and with noise, by position in the output and by class of token."""
        settings = {"": self.base, " with noise": {**self.common, "exit_rule": self._disturbed(NOISE, 0.0)}}
        columns = {"data": "", "part": "", "tokens": "d"}
        for suffix in settings:
            columns |= {f"loops{suffix}": ".2f", f"tokens lost{suffix}": ".4f", f"±{suffix}": ".4f"}
        rows = []
        for name, material in self.materials.items():
            readings = {suffix: read(self.model, material, cdb) for suffix, cdb in settings.items()}
            some = readings[""]
            quarters = numpy.array_split(numpy.unique(some.position), 4)
            parts = {
                f"position {part[0]}-{part[-1]}": numpy.isin(some.position, part) for part in quarters if len(part)
            }
            parts |= {kind: some.token_class == kind for kind in CLASSES}
            for part, chosen in parts.items():
                if chosen.any():
                    rows.append({"data": name, "part": part, "tokens": int(chosen.sum()), **_by_part(readings, chosen)})
        return Table("places", f"Where tokens are lost, undisturbed and at noise {NOISE:g}", columns, rows)

    def figures(self, name: str, reading: Reading) -> dict[str, Any]:
        """The figures of one reading of one material; "mixed depths" are what
        fixed depths lose, mixed by a coin to as many loops."""
        lost, extra = reading.disagreement(), reading.extra()
        row = {
            "data": name,
            "loops": reading.mean_depth,
            "tokens lost": lost.mean,
            "±": _half_width(lost),
            "mixed depths lose": mixed(self.curves[name], reading.mean_depth, lambda one: one.disagreement().mean),
            "extra bits": extra.mean,
            "± bits": _half_width(extra),
        }
        if name == "tasks":
            score = reading.score_loss()
            row |= {"exact match lost": score.mean, "± match": _half_width(score)}
        return row

    def _table(self, name: str, title: str, keys: dict[str, str], settings: Mapping[tuple, dict[str, Any]]) -> Table:
        """All settings on all materials; `keys` are the headings of what tells settings apart."""
        rows = []
        for key, cdb in tqdm(settings.items(), desc=name, disable=not self.progress):
            named = dict(zip(keys, key, strict=True))
            for data, material in self.materials.items():
                rows.append({**named, **self.figures(data, read(self.model, material, cdb))})
        return Table(name, title, {**keys, **_FIGURES}, rows)

    def _scored_rules(self) -> list[tuple[str, int, ExitRule]]:
        """Rules with a score that this model can run: what to call each, its lookahead, and one of it."""
        found: list[tuple[str, int, ExitRule]] = []
        if self.adapter.has_gate:
            found.append(("gate of the model", 0, Gate(0.5)))
        for kind, lookahead in (("same-step", 0), ("lookahead", 1)):
            if (head := head_for(self.adapter, kind)) is not None:
                found.append((f"gate, {kind} head", lookahead, Gate(0.5, head)))
        scored = [name for name in RULES if name not in ("never", "gate", "preloop", "replay", "argmax-stability")]
        return [*found, *((name, 0, RULES[name]()) for name in scored)]

    def _rule(self, cdb: Mapping[str, Any]) -> ExitRule:
        return CDBConfig(**cdb).resolve(self.adapter).exit_rule

    def _disturbed(self, noise: float, bias: float) -> Disturbed:
        return Disturbed(self._rule(self.base), noise, bias, unit=self.spread, seed=self.seed)

    def _listen(self, rule: ExitRule, lookahead: int) -> Settling:
        """What a rule says of the text at full depth."""
        listening = Settling(rule)
        cdb = {**self.common, "exit_rule": listening, "lookahead": lookahead, "min_depth": 1}
        read(self.model, self.materials["text"], cdb)
        return listening

    def _aimed(self, rule: ExitRule, lookahead: int, mean_depth: float) -> float:
        """The threshold at which tokens would run so many loops, by what the rule says of them at full depth."""
        heard = numpy.nan_to_num(self._listen(rule, lookahead).heard, nan=-numpy.inf)
        best = numpy.maximum.accumulate(heard, axis=1)  # it leaves after the first loop that passes the threshold
        values = numpy.unique(best[numpy.isfinite(best)])
        bounds = self.base.get("min_depth", 1), self.base.get("max_depth") or self.adapter.full_depth

        def depth_at(value: float) -> float:
            depths = 1 + lookahead + (best < value).sum(axis=1)
            return float(numpy.clip(depths, *bounds).mean())

        low, high = 0, len(values) - 1
        while low < high:  # depth grows with the threshold
            middle = (low + high) // 2
            low, high = (low, middle) if depth_at(values[middle]) >= mean_depth else (middle + 1, high)
        return threshold_at(rule, float(values[low]))


def _by_part(readings: Mapping[str, Reading], chosen: numpy.ndarray) -> dict[str, Any]:
    row = {}
    for suffix, reading in readings.items():
        lost = reading.disagreement(chosen)
        row |= {
            f"loops{suffix}": float(reading.depth[chosen].mean()),
            f"tokens lost{suffix}": lost.mean,
            f"±{suffix}": _half_width(lost),
        }
    return row


def _half_width(score: Score) -> float | None:
    """Of a 95 % interval; None where one item alone has none."""
    return None if math.isnan(score.standard_error) else score.half_width_95
