"""The recipe of a training run: everything that decides the weights, and what is measured and kept on the way."""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from ..config import CDBConfig
from ..models import HuginnConfig, OuroConfig
from ..models.config_checks import check_choice, check_integers, check_number
from .tasks import TASKS

__all__ = [
    "CheckpointRecipe",
    "DataRecipe",
    "EvaluationRecipe",
    "ObjectiveRecipe",
    "OptimizerRecipe",
    "Recipe",
    "build_config",
    "nearest",
]

CONFIGS: dict[str, type[PreTrainedConfig]] = {"ouro": OuroConfig, "huginn_raven": HuginnConfig}
# Config keys that the tokenizer decides.
_FROM_TOKENIZER = ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
# Sections that change no weight: a run may be resumed with others.
_WITHOUT_EFFECT = ("evaluation", "checkpoint", "log_every", "cdb")


@dataclass(frozen=True)
class DataRecipe:
    """Tokenizer and batches, see `train_tokenizer` and `PackedBatches`.

    Args:
        vocab_size: entries of the tokenizer.
        length: tokens of a row.
        text_rows: rows of text in a batch.
        task_rows: rows of packed task lines in a batch.
        prompt_weight: weight of a prompt's tokens in the loss; text and answers have 1.
        task_shares: relative number of lines by task; default equal shares.
    """

    vocab_size: int = 512
    length: int = 128
    text_rows: int = 10
    task_rows: int = 14
    prompt_weight: float = 0.1
    task_shares: dict[str, float] | None = None

    def __post_init__(self) -> None:
        check_integers(self, "vocab_size", "length")
        check_integers(self, "text_rows", "task_rows", minimum=0)
        check_number(self, "prompt_weight", 0)
        if self.text_rows + self.task_rows == 0:
            raise ValueError("text_rows=0 and task_rows=0: a batch needs a row. Raise one of them.")
        for name, share in (self.task_shares or {}).items():
            if name not in TASKS:
                raise ValueError(f"task_shares names {name!r}, but the tasks are {', '.join(TASKS)}.")
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < math.inf:
                raise ValueError(f"task_shares: {name}={share!r} is no share. Give a number of at least 0.")


@dataclass(frozen=True)
class ObjectiveRecipe:
    """What is minimised, see `objectives.py`.

    Args:
        kind: `loops`, the weighted mean of the losses after every loop (Ouro); `expected`, the loss expected under
            the gate's exit distribution less its entropy (Ouro); `random-depth`, the loss after a random number of
            loops (Huginn).
        loop_weights: for `loops`, relative weight of the loss after each loop; default equal weights.
    """

    kind: str
    loop_weights: list[float] | None = None

    def __post_init__(self) -> None:
        check_choice(self, "kind", ("loops", "expected", "random-depth"), "no other objective is written.")
        weights = self.loop_weights
        if weights is None:
            return
        if self.kind != "loops":
            raise ValueError(f"loop_weights={weights} has no meaning for kind={self.kind!r}. Drop it.")
        numbers = all(isinstance(weight, (int, float)) and not isinstance(weight, bool) for weight in weights)
        if not numbers or not all(0 <= weight < math.inf for weight in weights) or not sum(weights) > 0:
            raise ValueError(f"loop_weights={weights}: give numbers of at least 0, one of them above 0.")


@dataclass(frozen=True)
class OptimizerRecipe:
    """Muon for the matrices of the body, AdamW for all else, and their common schedule; see `optimizers.py`.

    Args:
        muon_lr, adamw_lr: learning rates at the height of the schedule.
        muon_weight_decay, adamw_weight_decay: decoupled weight decay.
        warmup_steps: steps of linear rise.
        flat_until: share of all steps at which the linear fall begins.
        final_fraction: factor that the fall ends at.
        clip_norm: largest norm of the gradient of all parameters; a longer gradient is scaled down to it.
    """

    muon_lr: float = 6e-3
    muon_weight_decay: float = 0.05
    adamw_lr: float = 4e-3
    adamw_weight_decay: float = 0.0
    warmup_steps: int = 60
    flat_until: float = 0.35
    final_fraction: float = 0.02
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("muon_lr", "adamw_lr", "clip_norm"):
            check_number(self, name, 0, above=True)
        for name in ("muon_weight_decay", "adamw_weight_decay"):
            check_number(self, name, 0)
        for name in ("flat_until", "final_fraction"):
            check_number(self, name, 0, high=1)
        check_integers(self, "warmup_steps", minimum=0)


@dataclass(frozen=True)
class EvaluationRecipe:
    """Measurements by depth, on held-out chapters and on the validation split of every task.

    Args:
        every: steps between two of them, 0 for none before the end.
        chapters: held-out chapters; `final_chapters` at the end, None for all.
        examples: examples of every task; `final_examples` at the end.
    """

    every: int = 500
    chapters: int = 4
    examples: int = 64
    final_chapters: int | None = None
    final_examples: int = 256

    def __post_init__(self) -> None:
        check_integers(self, "every", minimum=0)
        check_integers(self, "chapters", "examples", "final_examples")
        if self.final_chapters is not None:
            check_integers(self, "final_chapters")


@dataclass(frozen=True)
class CheckpointRecipe:
    """When the state of the run is saved, to be resumed from.

    Args:
        every_steps: steps between two checkpoints, or None.
        every_minutes: minutes between two checkpoints, or None. With both, whichever comes first.
        keep: newest checkpoints to keep.
    """

    every_steps: int | None = None
    every_minutes: float | None = 5.0
    keep: int = 2

    def __post_init__(self) -> None:
        check_integers(self, "keep")
        if self.every_steps is not None:
            check_integers(self, "every_steps")
        if self.every_minutes is not None:
            check_number(self, "every_minutes", 0, above=True)


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Args:
        model: `model_type` ("ouro" or "huginn_raven") and keys of its config, without those of the tokenizer.
        objective, data, optimizer, evaluation, checkpoint: see their classes.
        steps: optimizer steps.
        seed: of fresh weights, batches and random depths.
        embedding_std: standard deviation of the fresh embedding, default the model's own. Every layer of Ouro adds
            normed output to it, beside which a narrow embedding is lost at first.
        mixed_precision: "no", or "bf16": matrix products in bfloat16.
        attention: attention implementation in training; "eager" is the fastest one at short rows on a CPU.
        compile: compile layers and loss with `torch.compile`; on a CPU it needs a C++ compiler.
        log_every: steps between two lines of the log.
        save_dtype: dtype of the saved weights: "float16", "bfloat16" or "float32".
        cdb: settings to save with the model, which `generate(cdb=True)` then uses; see `hf_cdb.CDBConfig`.

    Raises:
        ValueError: a value that cannot work, with the reason.
    """

    model: dict[str, Any]
    objective: ObjectiveRecipe
    steps: int
    data: DataRecipe = field(default_factory=DataRecipe)
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    evaluation: EvaluationRecipe = field(default_factory=EvaluationRecipe)
    checkpoint: CheckpointRecipe = field(default_factory=CheckpointRecipe)
    seed: int = 0
    embedding_std: float | None = None
    mixed_precision: str = "no"
    attention: str = "sdpa"
    compile: bool = False
    log_every: int = 10
    save_dtype: str = "float16"
    cdb: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_integers(self, "steps", "log_every")
        check_integers(self, "seed", minimum=0)
        if self.embedding_std is not None:
            check_number(self, "embedding_std", 0, above=True)
        check_choice(self, "mixed_precision", ("no", "bf16"), "float16 would need its gradients scaled.")
        check_choice(self, "attention", ("eager", "sdpa"), "rows of packed examples need a mask of four dimensions.")
        check_choice(self, "save_dtype", ("float16", "bfloat16", "float32"), "weights are saved in one of these.")
        if self.cdb is not None:
            CDBConfig.create(self.cdb)
        self._check_model()

    def _check_model(self) -> None:
        model_type = self.model.get("model_type")
        if model_type not in CONFIGS:
            raise ValueError(f"model: model_type={model_type!r} is none of {', '.join(CONFIGS)}. Name one of them.")
        known = {*CONFIGS[model_type].__dataclass_fields__, *CONFIGS[model_type].attribute_map, "rope_theta"}
        for key in self.model:
            if key in _FROM_TOKENIZER:
                raise ValueError(f"model: {key} is the tokenizer's to decide. Drop it; data.vocab_size sets its size.")
            if key != "model_type" and key not in known:
                raise ValueError(f"model: {key!r} is no key of {CONFIGS[model_type].__name__}.{nearest(key, known)}")
        kinds = ("random-depth",) if model_type == "huginn_raven" else ("loops", "expected")
        if self.objective.kind not in kinds:
            raise ValueError(
                f"objective: kind={self.objective.kind!r} does not train {model_type!r}. Choose {' or '.join(kinds)}."
            )
        weights, loops = self.objective.loop_weights, self.model.get("total_ut_steps", OuroConfig.total_ut_steps)
        if weights is not None and len(weights) != loops:
            raise ValueError(f"objective: loop_weights={weights} has {len(weights)} values for {loops} loops.")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as `load_recipe` reads them."""
        return dataclasses.asdict(self)

    def differences(self, other: "Recipe") -> list[str]:
        """Names of the settings, as `section.key`, that differ and change the weights."""
        mine, theirs = (_flatten(recipe.to_dict()) for recipe in (self, other))
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        return [name for name in names if name.split(".")[0] not in _WITHOUT_EFFECT]


def build_config(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The model's config, with sizes and ids from the tokenizer.

    Raises:
        ValueError: values that no model can be built from, or rows longer than its positions.
    """
    settings = {key: value for key, value in recipe.model.items() if key != "model_type"}
    for name in _FROM_TOKENIZER[1:]:
        settings[name] = getattr(tokenizer, name)
    config = CONFIGS[recipe.model["model_type"]](vocab_size=len(tokenizer), **settings)
    if config.max_position_embeddings < recipe.data.length:
        raise ValueError(
            f"data: length={recipe.data.length} exceeds the {config.max_position_embeddings} positions of the model. "
            "Shorten the rows, or raise max_position_embeddings (Huginn: block_size)."
        )
    return config


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def nearest(key: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown `key`: the known one that was meant, or all of them."""
    near = difflib.get_close_matches(key, known, n=1)
    return f" Did you mean {near[0]!r}?" if near else f" Known are {', '.join(sorted(known))}."
