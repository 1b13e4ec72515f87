"""The settings of continuous depth batching: one frozen dataclass, validated once."""

import dataclasses
import difflib
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from transformers.utils import logging

from .adapters import LoopAdapter
from .calibrated import SETTINGS, calibrated_threshold
from .exit_heads import ExitHead, head_for
from .exits import RULES, ArgmaxStability, ExitRule, make_rule
from .kv_policy import POLICIES
from .room import PREEMPTIONS

__all__ = ["CDBConfig", "is_integer", "least_depth", "rule_name", "saved_settings"]

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class CDBConfig:
    """Settings of `generate(..., cdb=CDBConfig(...))`; a dict of the same names works too.

    Args:
        max_depth: loops at most, R: of every prompt, and the slots of `last_exited`. Default the model's own number.
        min_depth: loops at least.
        exit_rule: `gate`, `preloop`, `latent-diff`, `entropy-diff`, `kl`, `minp-kl`, `cosine`, `argmax-stability`,
            `confidence`, `never`, `replay`, an `ExitRule`, or `auto`: the gate where the model has one, else
            latent-diff.
        exit_threshold: on the rule's own scale; default the rule's, and for a gate the checkpoint's.
        quality: in place of a threshold, 1 less the expected loss against full depth, in points: the threshold that
            `hf-cdb calibrate` found for it with these settings, or the one for the next higher quality.
        lookahead: 1: a decision takes effect one loop later.
        kv_policy: which keys and values stand for the loops that a token did not run: `last_exited`, `shared`,
            `first_then_shared`, `modular`, or `auto`: the exact one for the model.
        kv_slots: slots of `first_then_shared` and `modular`, default 2.
        max_num_seqs: rows in flight at most.
        min_coda_batch: rows that must have left before a coda runs; without refill all rows of a cohort do.
        refill: give a finished row's place to the next prompt at once; False: cohorts in lockstep.
        prefill_chunk_size: positions of a prompt per launch at most; None is the whole prompt.
        max_prefill_tokens: positions of all prompts per launch of the loop at most, and as many between two of them in
            the prelude and in the coda, so that rows that decode wait little for long prompts; None is no limit.
        prefill_exit: positions of a prompt leave by the exit rule, as tokens do, all but the last one; False: all run
            to full depth. Not exact but a choice for speed, and only with `last_exited`. Rules that need logits run the
            coda for every position and loop.
        max_kv_memory: bytes that the keys and values of rows in flight hold at most (an integer), or a share of the
            free memory (a float up to 1). A row then holds what it has and a step ahead, and where that is short the
            rows that came last are preempted.
        preemption: how rows come back that were preempted: "offload", their keys and values wait in the memory of the
            host; "recompute", their prompt and tokens run again, at the depths that they had.
        max_overtakes: prompts that may start before the first one in the line while that has to wait for room in
            `max_kv_memory`; 0: strictly in order.
        prefix_reuse: compute what prompts share at their beginning once, and copy it: True, False, or "auto": where
            the KV policy allows it, as `last_exited` does.
        exit_depths: for `replay`, a depth per row and new token; the first of every row is R.
        seeds: for sampling, a seed per prompt, which alone decides the row's noise.
        token_limits: new tokens at most, for every prompt, beside the limit of the call; a row that reaches its own
            ends as any other does.
        prepack_weights: on the CPU, keep a copy of the weights in the order that multiplies fastest: True, False, or
            "auto": where the processor gains by it and a quarter of the free memory holds the copy.
        compile: run each loop as one graph of `torch.compile`; compiling takes from seconds to a minute, once a model
            and process.
        trace: record every launch in `stats.trace`, with the queues and times; `stats.save_trace` writes a file.
        progress: show a bar of finished rows.

    Raises:
        ValueError: a value out of its range, or two that contradict each other.
    """

    max_depth: int | None = None
    min_depth: int = 1
    exit_rule: str | ExitRule = "auto"
    exit_threshold: float | None = None
    quality: float | None = None
    lookahead: int = 0
    kv_policy: str = "auto"
    kv_slots: int | None = None
    max_num_seqs: int = 64
    min_coda_batch: int = 1
    refill: bool = True
    prefill_chunk_size: int | None = None
    max_prefill_tokens: int | None = None
    prefill_exit: bool = False
    max_kv_memory: int | float | None = None
    preemption: str = "offload"
    max_overtakes: int = 0
    prefix_reuse: bool | str = "auto"
    exit_depths: Any = None
    seeds: Sequence[int] | None = None
    token_limits: Sequence[int] | None = None
    prepack_weights: bool | str = "auto"
    compile: bool = False
    trace: bool = False
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("min_depth", "max_num_seqs", "min_coda_batch"):
            self._take_integer(name)
        self._take_integer("max_overtakes", least=0)
        for name in ("max_depth", "kv_slots", "prefill_chunk_size", "max_prefill_tokens"):
            if getattr(self, name) is not None:
                self._take_integer(name)
        for name in ("refill", "prefill_exit", "compile", "trace", "progress"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: choose True or False.")
        for name in ("prefix_reuse", "prepack_weights"):
            if not isinstance(getattr(self, name), bool) and getattr(self, name) != "auto":
                raise ValueError(f"{name}={getattr(self, name)!r}: choose True, False or 'auto'.")
        if isinstance(self.lookahead, bool) or self.lookahead not in (0, 1):
            raise ValueError(
                f"lookahead={self.lookahead!r}: a decision takes effect 0 or 1 loops later. Choose 0 or 1."
            )
        if self.max_depth is not None and self.min_depth > self.max_depth:
            raise ValueError(
                f"min_depth={self.min_depth} exceeds max_depth={self.max_depth}: no depth lies between. Lower it."
            )
        self._check_rule()
        self._check_policy()
        memory = self.max_kv_memory
        if memory is not None and (
            isinstance(memory, bool)
            or not ((isinstance(memory, int) and memory > 0) or (isinstance(memory, float) and 0 < memory <= 1))
        ):
            raise ValueError(
                f"max_kv_memory={memory!r}: choose bytes (a positive integer) or a share of the free memory (a float "
                "in (0, 1])."
            )
        if self.preemption not in PREEMPTIONS:
            raise ValueError(
                f"preemption={self.preemption!r} is unknown{_nearest(self.preemption, PREEMPTIONS)} Choose one of "
                f"{', '.join(PREEMPTIONS)}."
            )
        if self.preemption != "offload" and memory is None:
            raise ValueError(
                f"preemption={self.preemption!r} without max_kv_memory: every row has its room from the start, and "
                "none is ever preempted. Set max_kv_memory, or drop it."
            )
        if self.max_overtakes and memory is None:
            raise ValueError(
                f"max_overtakes={self.max_overtakes} without max_kv_memory: no prompt ever waits for room, so none can "
                "be overtaken. Set max_kv_memory, or drop it."
            )
        if self.exit_depths is not None:
            object.__setattr__(self, "exit_depths", _rows_of_integers("exit_depths", self.exit_depths))
        if self.seeds is not None:
            seeds = _plain(self.seeds)
            if not isinstance(seeds, list | tuple) or not all(is_integer(seed) for seed in seeds):
                raise ValueError(f"seeds={self.seeds!r}: choose one integer per prompt.")
            object.__setattr__(self, "seeds", tuple(int(seed) for seed in seeds))
        if self.token_limits is not None:
            limits = _plain(self.token_limits)
            if not isinstance(limits, list | tuple) or not all(is_integer(limit) and limit > 0 for limit in limits):
                raise ValueError(f"token_limits={self.token_limits!r}: choose one positive integer per prompt.")
            object.__setattr__(self, "token_limits", tuple(int(limit) for limit in limits))

    def _take_integer(self, name: str, least: int = 1) -> None:
        value = getattr(self, name)
        if not is_integer(value) or value < least:
            raise ValueError(f"{name}={value!r}: choose an integer of at least {least}.")
        object.__setattr__(self, name, int(value))

    def _check_rule(self) -> None:
        rule = self.exit_rule
        threshold = self.exit_threshold
        if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, numbers.Real)):
            raise ValueError(
                f"exit_threshold={threshold!r}: choose one number, on the scale of the exit rule, or None for the "
                "rule's own default."
            )
        if self.quality is not None:
            self._check_quality()
        if isinstance(rule, ExitRule):
            if self.exit_threshold is not None:
                raise ValueError(
                    f"exit_threshold={self.exit_threshold} beside a rule object: the object {rule.name!r} has its own "
                    "threshold. Set it there."
                )
        elif rule not in ("auto", *RULES):
            raise ValueError(
                f"exit_rule={rule!r} is unknown{_nearest(rule, RULES)} Choose one of auto, {', '.join(RULES)}, or pass "
                "an ExitRule."
            )
        elif rule in ("never", "replay") and self.exit_threshold is not None:
            raise ValueError(f"exit_threshold={self.exit_threshold} has no meaning for exit_rule={rule!r}. Drop it.")
        elif rule not in ("auto", "preloop", "replay"):
            make_rule(rule, self.exit_threshold)
        if (rule == "replay") != (self.exit_depths is not None):
            raise ValueError(
                f"exit_rule={rule!r} with exit_depths={'given' if self.exit_depths is not None else None}: the depths "
                "to replay and exit_rule='replay' need each other. Pass both or none."
            )
        if rule == "replay" and self.prefill_exit:
            raise ValueError(
                "prefill_exit=True beside exit_rule='replay': exit_depths has depths of new tokens and none of the "
                "prompt, which runs at full depth. Set prefill_exit=False."
            )

    def _check_quality(self) -> None:
        quality, rule = self.quality, self.exit_rule
        if isinstance(quality, bool) or not isinstance(quality, numbers.Real) or not 0 < quality < 1:
            raise ValueError(
                f"quality={quality!r}: choose a number between 0 and 1, such as 0.99; all of it is exit_rule='never'."
            )
        if self.exit_threshold is not None:
            raise ValueError(
                f"quality={quality} beside exit_threshold={self.exit_threshold}: the quality stands for a threshold "
                "that was calibrated. Give one of them."
            )
        if isinstance(rule, ExitRule) or rule in ("never", "replay"):
            raise ValueError(
                f"quality={quality} beside exit_rule={rule!r}: it stands for the threshold of a rule by name. Drop it, "
                "or choose another rule."
            )
        if self.prefill_exit:
            raise ValueError(
                f"quality={quality} beside prefill_exit=True: it was calibrated with prompts at full depth. Give an "
                "exit_threshold, or set prefill_exit=False."
            )

    def _check_policy(self) -> None:
        if self.kv_policy not in ("auto", *POLICIES):
            raise ValueError(
                f"kv_policy={self.kv_policy!r} is unknown{_nearest(self.kv_policy, POLICIES)} Choose one of auto, "
                f"{', '.join(POLICIES)}."
            )
        if self.kv_slots is not None and self.kv_policy not in ("first_then_shared", "modular"):
            raise ValueError(
                f"kv_slots={self.kv_slots} has no meaning for kv_policy={self.kv_policy!r}, whose number of slots is "
                "given. Drop it, or choose first_then_shared or modular."
            )

    @classmethod
    def create(
        cls,
        value: Any,
        saved: "Mapping[str, Any] | CDBConfig | None" = None,
        adapter: LoopAdapter | None = None,
    ) -> "CDBConfig":
        """Settings from what `generate(cdb=...)` was given.

        Args:
            value: True: the saved settings; a dict: merged into them; a CDBConfig: replaces them. A dict that names
                another exit rule than the saved one does without the saved threshold, quality and depths, which belong
                to that rule; a threshold takes the place of a saved quality, and a quality that of a saved threshold.
            saved: see `saved_settings`.
            adapter: tells which rule "auto" is, so that the same rule under both names keeps its threshold.

        Raises:
            ValueError: none of these, or a name that does not exist.
        """
        if isinstance(value, cls):
            return value
        if value is not True and not isinstance(value, Mapping):
            raise ValueError(f"cdb={value!r}: pass True, False, a dict of settings or a CDBConfig.")
        saved = dict(saved.changed() if isinstance(saved, cls) else saved or {})
        given = dict(value) if isinstance(value, Mapping) else {}
        rules = [rule_name(settings.get("exit_rule", "auto"), adapter) for settings in (given, saved)]
        if "exit_rule" in given and rules[0] != rules[1]:
            for name in ("exit_threshold", "quality", "exit_depths"):
                saved.pop(name, None)
        for name, other in (("exit_threshold", "quality"), ("quality", "exit_threshold")):
            if given.get(name) is not None:
                saved.pop(other, None)
        settings = {**saved, **given}
        names = [field.name for field in dataclasses.fields(cls)]
        for name in settings:
            if name not in names:
                raise ValueError(
                    f"{name!r} is no setting of cdb{_nearest(name, names)} Settings are {', '.join(names)}."
                )
        return cls(**settings)

    @classmethod
    def plain(cls, settings: "Mapping[str, Any] | CDBConfig") -> dict[str, Any]:
        """What a dict or a config names, checked and ready for JSON.

        Raises:
            ValueError: as `create` and `to_dict`.
        """
        config = cls.create(settings)
        plain = config.to_dict()
        names = plain if isinstance(settings, cls) else settings
        return {name: getattr(config, name) for name in names}

    def changed(self) -> dict[str, Any]:
        """The settings that differ from the defaults."""
        fields = dataclasses.fields(self)
        return {f.name: getattr(self, f.name) for f in fields if getattr(self, f.name) != f.default}

    def to_dict(self) -> dict[str, Any]:
        """The settings that differ from the defaults, ready for `generation_config.cdb_config`.

        Raises:
            ValueError: the exit rule is an object, which JSON cannot hold.
        """
        if isinstance(self.exit_rule, ExitRule):
            raise ValueError(
                f"exit_rule={self.exit_rule!r} is an object and cannot be saved. Save a rule's name, or pass the "
                "object in every call."
            )
        return self.changed()

    def calibrated_for(self, adapter: LoopAdapter) -> dict[str, Any]:
        """What a calibrated threshold holds for, by the names of `calibrated.SETTINGS`, with the model's defaults."""
        policy = adapter.default_kv_policy if self.kv_policy == "auto" else self.kv_policy
        slots = (self.kv_slots or 2) if policy in ("first_then_shared", "modular") else None
        depth = adapter.full_depth if self.max_depth is None else self.max_depth
        rule = rule_name(self.exit_rule, adapter)
        return dict(zip(SETTINGS, (rule, self.lookahead, policy, slots, self.min_depth, depth), strict=True))

    def resolve(self, adapter: LoopAdapter) -> "CDBConfig":
        """The same settings with every default that the model decides filled in; warns once of doubtful ones.

        Raises:
            ValueError: a setting that this model cannot follow.
        """
        depth = adapter.full_depth if self.max_depth is None else self.max_depth
        name = type(adapter.model).__name__
        if depth > adapter.full_depth and not adapter.may_deepen:
            raise ValueError(
                f"max_depth={depth} exceeds the {adapter.full_depth} loops that {name} was trained for, and more have "
                f"no meaning for it. Choose at most {adapter.full_depth}."
            )
        if self.min_depth > depth:
            raise ValueError(f"min_depth={self.min_depth} exceeds the {depth} loops of {name}. Lower it.")
        rule = rule_name(self.exit_rule, adapter)
        policy = adapter.default_kv_policy if self.kv_policy == "auto" else self.kv_policy
        threshold = self.exit_threshold
        if self.quality is not None:
            settings = self.calibrated_for(adapter)
            threshold = calibrated_threshold(getattr(adapter.model, "generation_config", None), self.quality, settings)
        elif threshold is None and rule == "gate":
            threshold = adapter.default_threshold
        if not isinstance(rule, ExitRule):
            rule = make_rule(rule, threshold, self.exit_depths, self._head(rule, adapter))
        rule.configure(adapter, depth, self.lookahead)
        if policy == "shared" and adapter.model_type == "ouro":
            logger.warning_once(
                "kv_policy='shared' ruins Ouro's answers: one shared slot was measured at 0.23 on GSM8K against 77.86 "
                "with a slot per loop (arXiv 2608.09444). Use last_exited unless your own evaluation says otherwise."
            )
        if self.prefill_exit and policy != "last_exited":
            raise ValueError(
                f"prefill_exit=True with kv_policy={policy!r}: loops share slots, so deeper loops would write over the "
                "entries that positions which have left are read by. Choose kv_policy='last_exited', or set "
                "prefill_exit=False."
            )
        if self.prefill_exit and adapter.model_type == "ouro":
            logger.warning_once(
                "prefill_exit=True costs Ouro answers: the embedded tiny-ouro loses half of its exact matches by it "
                "(docs/memory.md). Leave it off unless your own evaluation says otherwise."
            )
        reason = self._why_nothing_leaves(rule, depth, name)
        if reason is not None:
            logger.warning_once(f"Nothing can leave early: {reason}")
        return dataclasses.replace(
            self,
            max_depth=depth,
            exit_rule=rule,
            exit_threshold=None,
            quality=None,
            exit_depths=None,
            kv_policy=policy,
            prefix_reuse=self._reuses_prefixes(policy),
        )

    def _reuses_prefixes(self, policy: str) -> bool:
        """Whether prompts share what they have in common under this KV policy."""
        if self.prefix_reuse is True and self.prefill_exit:
            raise ValueError(
                "prefix_reuse=True with prefill_exit=True: positions leave at depths of their own, so prompts have "
                "nothing in common. Leave one of them out."
            )
        if policy == "last_exited" or self.prefix_reuse is not True:
            return policy == "last_exited" and self.prefix_reuse is not False
        raise ValueError(
            f"prefix_reuse=True with kv_policy={policy!r}: loops share entries there, and another prompt would read in "
            "its first loop what the last one left. Leave it out, or choose kv_policy='last_exited'."
        )

    def described(self, adapter: LoopAdapter) -> dict[str, Any]:
        """All settings by name, with what the model decides filled in; an exit rule by its name and threshold.

        Raises:
            ValueError: as `resolve`.
        """
        resolved = self.resolve(adapter)
        return {
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "exit_rule": resolved.exit_rule.name,
            "exit_threshold": resolved.exit_rule.threshold,
            "quality": None,  # the threshold is what it stood for
            "max_depth": resolved.max_depth,
            "kv_policy": resolved.kv_policy,
        }

    def _why_nothing_leaves(self, rule: ExitRule, depth: int, name: str) -> str | None:
        """The reason and the way out where every token would run `depth` loops though exits are on."""
        if rule.name in ("never", "replay"):
            return None
        if rule.name in ("gate", "preloop") and rule.threshold >= 1:
            whose = f"which {name}'s checkpoint names" if self.exit_threshold is None else "as asked"
            return (
                f"the exit threshold is {rule.threshold}, {whose}. Pass cdb={{'exit_threshold': 0.5}} or another value "
                "below 1; lower leaves earlier."
            )
        least = max(self.min_depth, 2 if self.lookahead else 1)
        if isinstance(rule, ArgmaxStability):
            least = max(least, int(rule.threshold) + 1 + self.lookahead)
        if least < depth:
            return None
        return (
            f"with exit_rule={rule.name!r}, threshold {rule.threshold}, min_depth={self.min_depth} and "
            f"lookahead={self.lookahead} a token runs at least {least} loops, and {depth} at most. Lower what asks for "
            "more, or pass exit_rule='never' if full depth is meant."
        )

    def _head(self, rule: str, adapter: LoopAdapter) -> ExitHead | None:
        """The trained head that the rule of this name reads; None where it reads none, or the model's own gate."""
        if rule == "preloop":
            return head_for(adapter, "preloop")
        if rule != "gate":
            return None
        head = head_for(adapter, "lookahead") if self.lookahead else None
        head = head_for(adapter, "same-step") if head is None else head
        if head is None and not adapter.has_gate:
            name = type(adapter.model).__name__
            raise ValueError(
                f"exit_rule='gate' with lookahead={self.lookahead}: {name} has no exit gate of its own and no trained "
                "head for that. Train one with `hf-cdb train gate MODEL`, give one by hf_cdb.attach_exit_head(model, "
                "head), set lookahead=1 if a lookahead head is all there is, or choose latent-diff, confidence or "
                "another rule that needs none."
            )
        return head


def saved_settings(generation_config: Any, adapter: LoopAdapter | None = None) -> Mapping[str, Any] | CDBConfig | None:
    """The settings that a generation config names: `cdb_config`, and over it what `cdb` itself holds.

    Args:
        adapter: see `CDBConfig.create`.

    Raises:
        ValueError: one of them holds no settings, or names one that does not exist.
    """
    cdb, saved = (getattr(generation_config, name, None) for name in ("cdb", "cdb_config"))
    if saved is not None and not isinstance(saved, Mapping | CDBConfig):
        raise ValueError(f"generation_config.cdb_config={saved!r}: put a dict of settings or a CDBConfig there.")
    return saved if cdb is None or isinstance(cdb, bool) else CDBConfig.create(cdb, saved, adapter)


def rule_name(rule: Any, adapter: LoopAdapter | None) -> Any:
    """An exit rule by its own name: of "auto" the one that it is for this model; it stays where none is given."""
    if rule != "auto" or adapter is None:
        return rule
    return "gate" if adapter.has_gate else "latent-diff"


def least_depth(min_depth: int, max_depth: int, lookahead: int) -> int:
    """Loops that a token runs at least: with lookahead none leaves after its first."""
    return min(max(min_depth, 1 + lookahead), max_depth)


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
        raise ValueError(f"{name}: pass integers [rows, new tokens], as nested lists or a tensor.")
    return tuple(tuple(int(depth) for depth in row) for row in rows)


def _nearest(name: Any, names: Any) -> str:
    near = difflib.get_close_matches(str(name), list(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else "."
