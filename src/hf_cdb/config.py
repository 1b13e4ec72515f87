"""The settings of continuous depth batching: one frozen dataclass, validated once."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.utils import logging

from .adapters import LoopAdapter
from .calibrated import SETTINGS, calibrated_threshold
from .exit_heads import ExitHead, head_for
from .exits import ArgmaxStability, ExitRule, make_rule
from .setting_checks import checked_settings, nearest

__all__ = ["CDBConfig", "least_depth", "rule_name", "saved_settings"]

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
        kv_layout: `dense`: room for every loop of every position; `compact`, for `last_exited`: only for the loops that
            are run, at the price of a second stretch of memory to read for tokens that left early; `auto`: compact
            where `max_kv_memory` is set, the policy is `last_exited` and the model is on the CPU, else dense. Results
            are the same.
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
            last rows of the line are preempted.
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
    kv_layout: str = "dense"
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
        for name, value in checked_settings(self).items():
            object.__setattr__(self, name, value)

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
                    f"{name!r} is no setting of cdb{nearest(name, names)} Settings are {', '.join(names)}."
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
            kv_layout=self._resolved_layout(policy, adapter),
            prefix_reuse=self._reuses_prefixes(policy),
        )

    def _resolved_layout(self, policy: str, adapter: LoopAdapter) -> str:
        """The layout under this KV policy, "auto" resolved: compact where memory is what rows wait for, and where it
        has been measured."""
        if self.kv_layout == "compact" and policy != "last_exited":
            raise ValueError(
                f"kv_layout='compact' with kv_policy={policy!r}: loops that share a slot overwrite each other's "
                "entries, so there are none to leave out. Choose kv_layout='dense', or kv_policy='last_exited'."
            )
        if self.kv_layout != "auto":
            return self.kv_layout
        pays = self.max_kv_memory is not None and policy == "last_exited" and adapter.device.type == "cpu"
        return "compact" if pays else "dense"

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
            "kv_layout": resolved.kv_layout,
            "prefix_reuse": resolved.prefix_reuse,
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
