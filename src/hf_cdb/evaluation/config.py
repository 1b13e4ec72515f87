"""What an evaluation runs: a model, tasks, and the systems that run them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..adapters import LoopAdapter
from ..bench.models import DTYPES
from ..config import CDBConfig, saved_settings
from ..training.recipe_file import build, read_yaml
from .task_spec import TaskSpec

__all__ = ["STOCK", "EvaluationConfig", "System", "load_config", "make_systems"]

STOCK, ENGINE, DEFAULT = "stock", "engine", "default"


@dataclass(frozen=True)
class System:
    """A way to run the tasks.

    Attributes:
        name: in reports.
        config: settings of cdb, not resolved; None is stock generation at full depth.
        described: the resolved settings, for JSON; None for stock.
        max_depth: loops at most.
        asks: whether the exit rule runs the coda after every loop.
    """

    name: str
    config: CDBConfig | None
    described: dict[str, Any] | None
    max_depth: int
    asks: bool = False

    @property
    def adaptive(self) -> bool:
        """Whether tokens may leave early."""
        return self.described is not None and self.described["exit_rule"] != "never"


@dataclass(frozen=True)
class EvaluationConfig:
    """An evaluation.

    The systems "stock" (the model's own generation at full depth) and "engine" (cdb at full depth) always run.

    Attributes:
        model: "tiny-ouro", "tiny-huginn", a folder or a Hub id.
        tasks: mappings, see `task_spec.TaskSpec`.
        cdb: further systems: name -> settings of cdb, or true for the ones saved with the model.
        sweeps: further systems: mappings of settings, of which lists stand for all their values, combined; such as
            {exit_rule: gate, exit_threshold: [0.3, 0.5], kv_policy: [last_exited, shared]}.
        revision: of a model on the Hub.
        dtype: of the weights.
        device: of torch, such as "cpu" or "cuda".
        max_depth: full depth of all systems, R; default the model's own number of loops.
        batch_size: rows in flight: prompts in a batch of stock generation, `max_num_seqs` of cdb where a system names
            no other, and choices in a pass. Four times as many prompts go to an engine at a time.
        limit: examples of every task at most.
        seed: of the bootstrap.
        draws: of the bootstrap.
        tolerances: for `eval/parity.py`: TASK/METRIC, of `TaskSpec.qualities` -> the largest loss against stock that
            "default" may have; of bits_per_byte as a share of stock's, of others as it is.

    Raises:
        ValueError: values that cannot work together.
    """

    model: str
    tasks: list
    cdb: dict = field(default_factory=dict)
    sweeps: list = field(default_factory=list)
    revision: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    max_depth: int | None = None
    batch_size: int = 64
    limit: int | None = None
    seed: int = 0
    draws: int = 2000
    tolerances: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}.")
        for name, least in (("max_depth", 1), ("batch_size", 1), ("limit", 1), ("seed", 0), ("draws", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value}: choose at least {least}.")
        if not self.tasks:
            raise ValueError("tasks=[]: name at least one task.")
        for name in (STOCK, ENGINE):
            if name in self.cdb:
                raise ValueError(f"cdb names a system {name!r}, which always runs. Give yours another name.")
        for metric, loss in self.tolerances.items():
            if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < math.inf:
                raise ValueError(f"tolerances: {metric}={loss!r}: choose a finite number of at least 0.")
        specs = self.task_specs
        names = [spec.name for spec in specs]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: the names {names} are not all different.")
        qualities = [f"{spec.name}/{metric}" for spec in specs for metric in spec.qualities]
        if unknown := [key for key in self.tolerances if key not in qualities]:
            raise ValueError(f"tolerances: {unknown[0]!r} is no quality of a task. There are {', '.join(qualities)}.")
        self.settings()

    @property
    def task_specs(self) -> list[TaskSpec]:
        """The tasks, checked."""
        return [build(TaskSpec, spec, f"tasks[{place}]") for place, spec in enumerate(self.tasks)]

    def settings(self) -> dict[str, Any]:
        """Settings of cdb by the names of the systems that have any, "engine" first."""
        found = {ENGINE: {"exit_rule": "never"}, **self.cdb}
        for sweep in self.sweeps:
            for name, settings in _combined(sweep):
                if name in found:
                    raise ValueError(f"sweeps: the system {name!r} comes twice. Leave one of the two out.")
                found[name] = settings
        return found

    def with_system(self, name: str) -> "EvaluationConfig":
        """The same with one system beside stock and engine, and without exit signals.

        Raises:
            ValueError: there is no such system.
        """
        settings = self.settings()
        if name not in settings:
            raise ValueError(f"system={name!r}: the systems are {', '.join(settings)}.")
        kept = (STOCK, ENGINE, name)
        tasks = [
            {**spec.to_dict(), "signal": [], "systems": spec.systems and [s for s in spec.systems if s in kept]}
            for spec in self.task_specs
        ]
        return replace(self, cdb={} if name == ENGINE else {name: settings[name]}, sweeps=[], tasks=tasks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which make the same evaluation again."""
        return {**asdict(self), "tasks": [spec.to_dict() for spec in self.task_specs]}


def _combined(sweep: Any) -> list[tuple[str, dict[str, Any]]]:
    """All combinations of a sweep's values, and what to call them: "gate 0.5 lookahead=1"."""
    if not isinstance(sweep, Mapping) or not sweep:
        raise ValueError(f"sweeps: {sweep!r} is no mapping of settings.")
    lists = {key: value if isinstance(value, list) else [value] for key, value in sweep.items()}
    systems = []
    for values in itertools.product(*lists.values()):
        settings = dict(zip(lists, values, strict=True))
        bare = [str(settings[key]) for key in ("exit_rule", "exit_threshold") if key in settings]
        named = [f"{key}={value}" for key, value in settings.items() if key not in ("exit_rule", "exit_threshold")]
        systems.append((" ".join([*bare, *named]), settings))
    return systems


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model: str | None = None,
    tasks: Sequence[str] | None = None,
    data: Mapping[str, str] | None = None,
    limit: int | None = None,
) -> EvaluationConfig:
    """Read an evaluation from a YAML file.

    Args:
        path: the file.
        overrides: `key=value`, values in YAML, as in `dtype=bfloat16`.
        model, limit: in place of the file's.
        tasks: names of those to run; default all.
        data: task -> file of the same columns in place of its data, see `TaskSpec.with_data`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no YAML, unknown keys, or values that cannot work.
    """
    values = read_yaml(path, overrides)
    values |= {name: value for name, value in (("model", model), ("limit", limit)) if value is not None}
    config = build(EvaluationConfig, values, f"config {str(path)!r}")
    specs = {spec.name: spec for spec in config.task_specs}
    data = dict(data or {})
    for argument, names in (("task", tasks or ()), ("data", data)):
        if unknown := [name for name in names if name not in specs]:
            raise ValueError(f"{argument}: there is no task {unknown[0]!r}. Tasks are {', '.join(specs)}.")
    chosen = [specs[name] for name in tasks or specs]
    kept = {key: loss for key, loss in config.tolerances.items() if key.partition("/")[0] in {s.name for s in chosen}}
    values = [spec.with_data(data[spec.name]) if spec.name in data else spec.to_dict() for spec in chosen]
    return replace(config, tasks=values, tolerances=kept)


def make_systems(config: EvaluationConfig, model: Any, adapter: LoopAdapter) -> list[System]:
    """The systems of an evaluation, "stock" first.

    Raises:
        ValueError: settings that do not exist or that the model cannot follow; or a task that a system cannot run.
    """
    saved = saved_settings(model.generation_config, adapter)
    depth = adapter.full_depth if config.max_depth is None else config.max_depth
    adapter.plain_arguments(depth)  # refuses what stock generation cannot run
    systems = [System(STOCK, None, None, depth)]
    common = {"max_num_seqs": config.batch_size, "max_depth": config.max_depth}
    for name, settings in config.settings().items():
        try:
            if settings is not True and not isinstance(settings, Mapping):
                raise ValueError(f"{settings!r}: give settings of cdb, or true for those saved with the model.")
            cdb = CDBConfig.create({**common, **({} if settings is True else settings)}, saved, adapter)
            described, asks = cdb.described(adapter), cdb.resolve(adapter).exit_rule.needs_logits
        except ValueError as error:
            raise ValueError(f"system {name!r}: {error}") from error
        systems.append(System(name, cdb, described, described["max_depth"], asks))
    for spec in config.task_specs:
        _check_task(spec, systems)
    return systems


def _check_task(spec: TaskSpec, systems: Sequence[System]) -> None:
    names = [system.name for system in systems]
    for key in ("systems", "signal"):
        if unknown := [name for name in getattr(spec, key) or () if name not in names]:
            raise ValueError(f"{key} of task {spec.name!r}: {unknown[0]!r} is none of the systems {', '.join(names)}.")
    for name in spec.signal:
        system = systems[names.index(name)]
        if not system.adaptive or (spec.systems is not None and name not in spec.systems):
            raise ValueError(f"signal of task {spec.name!r}: {name!r} has no exit rule there. Name one that has.")
    if spec.systems is not None and STOCK not in spec.systems:
        raise ValueError(f"systems of task {spec.name!r}: {STOCK!r} is missing, which all are compared with. Add it.")
    if spec.kind == "loglikelihood":
        for system in systems:
            if system.adaptive and (spec.systems is None or system.name in spec.systems):
                raise ValueError(
                    f"system {system.name!r} cannot run task {spec.name!r}: exit_rule="
                    f"{system.described['exit_rule']!r} does not act on log-likelihoods, which score given choices in "
                    "one pass in which every token runs the same number of loops. List the task's `systems`, those at "
                    "full depth and those with exit_rule: never and a max_depth."
                )
