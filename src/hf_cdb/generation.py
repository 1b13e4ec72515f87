"""Continuous depth batching inside `generate`: `model.generate(..., cdb=True)`."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerationMixin, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .adapters import LoopAdapter, adapter_for
from .config import CDBConfig
from .engine import Engine
from .exits import Replay
from .request import Request
from .sampling import Noise, Sampler, check_criteria, check_processors, derive_seed
from .stats import CDBStats

__all__ = ["CDBGenerationMixin", "GenerateCDBOutput", "enable_cdb"]

logger = logging.get_logger(__name__)

# Settings of a GenerationConfig that ask for what the engine does not do.
_UNSUPPORTED_SETTINGS = (
    "cache_implementation",
    "output_attentions",
    "output_hidden_states",
    "token_healing",
    "prefill_chunk_size",
)
# Arguments of the forward that the engine reads, or that generate itself adds.
_READ = ("inputs_embeds", "attention_mask", "init_scale", "init_seed")
_ADDED = ("position_ids", "use_cache", "logits_to_keep", "tokenizer", "synced_gpus", "streamer")

# generate repeats tensors with the rows of beams and num_return_sequences; these mean the same for all rows.
_SCALARS = ("num_steps", "init_scale", "init_seed", "exit_threshold", "exit_at_step")


@dataclass
class GenerateCDBOutput(GenerateDecoderOnlyOutput):
    """Output of `generate(..., cdb=True, return_dict_in_generate=True)`.

    Attributes:
        sequences: int64 `[batch, prompt + new tokens]`, finished rows filled with the pad token.
        scores, logits: with `output_scores` and `output_logits`, a float32 `[batch, vocab]` per new token, after and
            before the processors. Finished rows have logits 0, and scores of -inf but for 0 at the pad token.
        exit_depths: int64 `[batch, new tokens]`, loops run for each token, from 1; 0 where the row has none.
        stats: counts of the run.
    """

    exit_depths: torch.Tensor | None = None
    stats: CDBStats | None = None


class CDBGenerationMixin(GenerationMixin):
    """`generate` with the argument `cdb`; without it the library's own, unchanged."""

    @torch.no_grad()
    def generate(self, *args, cdb: Any = None, **kwargs):
        """As `GenerationMixin.generate`, and:

        Args:
            cdb: True, a dict of settings or a `CDBConfig` for continuous depth batching; False for stock generation;
                None for what `generation_config.cdb` says.
        """
        if cdb is not None:
            kwargs["cdb"] = cdb
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError(
                "cache_implementation='paged' has one entry per layer, but a looped model needs one per loop and "
                "layer. Generate with cdb=True, which schedules requests as they come, or leave it out."
            )
        if self._wants_cdb(cdb, kwargs.get("generation_config")):
            _refuse_arguments(kwargs)
        return super().generate(*args, **kwargs)

    def save_pretrained(self, *args, **kwargs):
        if getattr(self.generation_config, "cdb", None) is not None:
            # Marked as made from the model config, the file would lose its extra keys on the next load.
            self.generation_config._from_model_config = False
        return super().save_pretrained(*args, **kwargs)

    def _wants_cdb(self, cdb: Any, generation_config: Any) -> bool:
        if cdb is None:
            cdb = getattr(generation_config, "cdb", None)
        if cdb is None:
            cdb = getattr(self.generation_config, "cdb", None)
        return cdb is not None and cdb is not False

    def _prepare_generation_config(self, generation_config, **kwargs):
        cdb = kwargs.pop("cdb", None)
        for name in _SCALARS:
            if isinstance(kwargs.get(name), torch.Tensor) and kwargs[name].numel() == 1:
                kwargs[name] = kwargs[name].item()
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        if cdb is None:
            cdb = getattr(generation_config, "cdb", None)
        generation_config._cdb = None
        if cdb is not None and cdb is not False:
            adapter = adapter_for(self)
            saved = getattr(generation_config, "cdb_config", None)
            config = _take_official_arguments(CDBConfig.create(cdb, saved), adapter, model_kwargs)
            generation_config._cdb = (adapter, config.resolve(adapter))
        return generation_config, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if generation_config._cdb is None:
            return
        if generation_mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise ValueError(
                f"generation mode {generation_mode.value!r} is not supported with cdb: it moves rows between "
                "positions, which a depth cache does not follow. Use greedy search or sampling, or cdb=False."
            )
        for name in _UNSUPPORTED_SETTINGS:
            if getattr(generation_config, name, None):
                _refuse(name, getattr(generation_config, name))
        if generation_config.use_cache is False:
            raise ValueError(
                "use_cache=False is not supported with cdb: rows at different depths read each other's past from a "
                "cache, and nothing could be recomputed at the depths it had. Leave it out, or generate with cdb=False."
            )
        for name in ("streamer", "synced_gpus"):
            if generation_mode_kwargs.get(name):
                _refuse(name, generation_mode_kwargs[name])

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if generation_config._cdb is None:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        return None

    def _get_logits_processor(self, generation_config, *args, **kwargs):
        if getattr(generation_config, "_cdb", None) is None:
            return super()._get_logits_processor(generation_config, *args, **kwargs)
        # Kept to build every row a list of its own once the rows are known.
        generation_config._processor_arguments = (args, kwargs)
        return LogitsProcessorList()

    def _get_stopping_criteria(self, generation_config, stopping_criteria=None, tokenizer=None, **kwargs):
        end = getattr(tokenizer, "eos_token_id", None)
        ids = generation_config._eos_token_tensor
        ids = [] if ids is None else ids.flatten().tolist()
        if end is not None and end not in ids:
            logger.warning_once(
                f"The tokenizer ends a sequence with {tokenizer.eos_token!r} (id {end}), but generation stops at "
                f"eos_token_id={ids} only. Pass eos_token_id={[*ids, end]}, or set it in "
                "model.generation_config."
            )
        return super()._get_stopping_criteria(generation_config, stopping_criteria, tokenizer=tokenizer, **kwargs)

    def _sample(self, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        if generation_config._cdb is None:
            return super()._sample(input_ids, logits_processor, stopping_criteria, generation_config, **kwargs)
        adapter, config = generation_config._cdb
        check_criteria(stopping_criteria)
        processors = self._row_processors(generation_config, len(input_ids))
        noise = _make_noise(config, len(input_ids), adapter) if generation_config.do_sample else None
        sampler = Sampler(
            processors,
            input_ids,
            generation_config.do_sample,
            noise,
            keep_scores=bool(generation_config.output_scores and generation_config.return_dict_in_generate),
            keep_logits=bool(generation_config.output_logits and generation_config.return_dict_in_generate),
        )
        requests = _make_requests(input_ids, generation_config, config, sampler, stopping_criteria, kwargs)
        engine = Engine(adapter, config)
        for request in requests:
            engine.add_request(request)
        engine.run()
        return _gather(input_ids, requests, generation_config, engine.stats)

    def _row_processors(self, generation_config, rows: int) -> list[LogitsProcessorList]:
        """A list of processors for every row, as stock generate would build it for the row alone."""
        args, kwargs = generation_config._processor_arguments
        if kwargs.get("prefix_allowed_tokens_fn") is not None:
            _refuse("prefix_allowed_tokens_fn", kwargs["prefix_allowed_tokens_fn"])
        if kwargs.get("logits_processor"):
            _refuse("logits_processor", kwargs["logits_processor"])
        if kwargs.get("negative_prompt_ids") is not None:
            _refuse("negative_prompt_ids", "...")
        whole = super()._get_logits_processor(generation_config, *args, **kwargs)
        check_processors(whole)
        if not whole:
            return [whole] * rows
        prompts = kwargs["encoder_input_ids"]
        copies = rows // len(prompts)
        lists = []
        for row in range(rows):
            own = {**kwargs, "encoder_input_ids": prompts[row // copies : row // copies + 1]}
            own["model_kwargs"] = {
                name: value[row : row + 1] if isinstance(value, torch.Tensor) and len(value) == rows else value
                for name, value in kwargs["model_kwargs"].items()
            }
            lists.append(super()._get_logits_processor(generation_config, *args, **own))
        return lists


def enable_cdb(model: GenerationMixin) -> GenerationMixin:
    """Give a loaded looped model the argument `cdb` of `generate`. Returns the model itself.

    Ouro and Huginn of this package have it already. The model keeps its class name and module, so saving, loading
    and weight conversions see no difference.

    Raises:
        ValueError: no adapter is registered for the model's type.
    """
    adapter_for(model)
    if not isinstance(model, CDBGenerationMixin):
        cls = type(model)
        model.__class__ = type(
            cls.__name__, (CDBGenerationMixin, cls), {"__module__": cls.__module__, "__reduce_ex__": _reduce}
        )
    return model


def _reduce(self, protocol):
    # The class made by enable_cdb has no name that pickle could import: the parent is stored and enabled again.
    parent = type(self).__mro__[2]
    return _restore, (parent, self.__dict__)


def _restore(cls: type, state: dict):
    model = cls.__new__(cls)
    model.__dict__.update(state)
    return enable_cdb(model)


def _refuse(name: str, value: Any) -> None:
    raise ValueError(f"{name}={value!r} is not supported with cdb. Leave it out, or generate with cdb=False.")


def _refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Refuse what stock generate would act on before any hook of this class runs."""
    for name in ("cache", "past_key_values"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"{name} cannot be passed with cdb: keys and values of rows at different depths live in a cache of "
                "the engine's own. Continue a chat by its text, or generate with cdb=False."
            )
    for name in ("custom_generate", "assistant_model", "synced_gpus", "output_attentions", "output_hidden_states"):
        if kwargs.get(name):
            _refuse(name, kwargs[name])
    if kwargs.get("position_ids") is not None:
        raise ValueError(
            "position_ids cannot be passed with cdb: positions count the tokens that attention_mask keeps. Leave them "
            "out, or generate with cdb=False."
        )
    if kwargs.get("cache_implementation") is not None:
        _refuse("cache_implementation", kwargs["cache_implementation"])


def _take_official_arguments(config: CDBConfig, adapter: LoopAdapter, model_kwargs: dict[str, Any]) -> CDBConfig:
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


def _make_noise(config: CDBConfig, rows: int, adapter: LoopAdapter) -> Noise:
    shared = rows if rows <= config.max_num_seqs else None
    return Noise(shared, adapter.vocab_size, adapter.device)


def _make_requests(
    input_ids: torch.Tensor,
    generation_config: Any,
    config: CDBConfig,
    sampler: Sampler,
    stopping_criteria: Any,
    model_kwargs: dict[str, Any],
) -> list[Request]:
    """One request per row: its prompt without padding, its limits, its seed."""
    rows = len(input_ids)
    copies = generation_config.num_return_sequences
    embeds = model_kwargs.get("inputs_embeds")
    mask = model_kwargs.get("attention_mask")
    for name, value in model_kwargs.items():
        if value is not None and name not in (*_READ, *_ADDED):
            _refuse(name, value)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    _check_per_row(config, rows, copies, max_new_tokens)
    requests = []
    for row in range(rows):
        keep = slice(None) if mask is None else mask[row].bool()
        prompt = input_ids[row][keep] if embeds is None else None
        prompt_embeds = embeds[row][keep] if embeds is not None else None
        if len(prompt if embeds is None else prompt_embeds) == 0:
            raise ValueError(
                f"row {row} has no token: its attention_mask is 0 everywhere. Give every prompt at least one token."
            )
        seed = None if config.seeds is None else derive_seed(config.seeds[row // copies], row % copies)
        requests.append(
            Request(
                key=row,
                row=row,
                seed=seed,
                prompt_ids=prompt,
                prompt_embeds=prompt_embeds,
                max_new_tokens=max_new_tokens,
                sampler=sampler,
                stop=_stop(stopping_criteria, sampler, generation_config),
                start_options=_start_options(model_kwargs, row),
            )
        )
    return requests


def _check_per_row(config: CDBConfig, rows: int, copies: int, max_new_tokens: int) -> None:
    prompts = rows // copies
    if config.seeds is not None and len(config.seeds) != prompts:
        raise ValueError(f"seeds has {len(config.seeds)} entries, but there are {prompts} prompts. Give one for each.")
    if isinstance(config.exit_rule, Replay):
        _check_replay(config, rows, copies, max_new_tokens)


def _check_replay(config: CDBConfig, rows: int, copies: int, max_new_tokens: int) -> None:
    """Refuse depths that do not fit the call; repeat them for the return sequences of a prompt."""
    rule, prompts = config.exit_rule, rows // copies
    if len(rule.depths) != prompts:
        raise ValueError(
            f"exit_depths has {len(rule.depths)} rows, but there are {prompts} prompts. Give one row for each; the "
            "return sequences of a prompt share it."
        )
    rule.depths = [depths for depths in rule.depths for _ in range(copies)]
    least = max(config.min_depth, 2 if config.lookahead and config.max_depth > 1 else 1)
    for row, depths in enumerate(rule.depths):
        if len(depths) < max_new_tokens:
            raise ValueError(
                f"exit_depths row {row} has {len(depths)} depths, but up to {max_new_tokens} tokens may come. Give a "
                "depth for each."
            )
        if depths[0] != config.max_depth:
            raise ValueError(
                f"exit_depths row {row} begins with {depths[0]}, but the prompt runs at full depth and so does its "
                f"token. Begin with {config.max_depth}."
            )
        wrong = [depth for depth in depths if not least <= depth <= config.max_depth]
        if wrong:
            raise ValueError(
                f"exit_depths row {row} holds {wrong[0]}; with min_depth={config.min_depth} and "
                f"lookahead={config.lookahead} depths lie between {least} and {config.max_depth}."
            )


def _start_options(model_kwargs: dict[str, Any], row: int) -> dict[str, Any]:
    """Arguments of the start state for one row; a tensor of seeds has one per row."""
    options = {}
    if model_kwargs.get("init_scale") is not None:
        options["init_scale"] = model_kwargs["init_scale"]
    seed = model_kwargs.get("init_seed")
    if seed is not None:
        options["init_seed"] = int(seed[row] if isinstance(seed, torch.Tensor) and seed.ndim else seed)
    return options


def _stop(criteria: Any, sampler: Sampler, generation_config: Any):
    """Whether a request ends after its last token; its length limit is its own business."""
    end = generation_config._eos_token_tensor
    end = set() if end is None else set(end.flatten().tolist())
    # Stop strings look at the row's padded history, as a batch of one.
    others = StoppingCriteriaList(c for c in criteria if not isinstance(c, (MaxLengthCriteria, EosTokenCriteria)))

    def stop(request: Request) -> bool:
        if request.tokens[-1] in end:
            return True
        return bool(others) and bool(others(sampler.history(request)[None], None).item())

    return stop


def _gather(
    input_ids: torch.Tensor, requests: list[Request], generation_config: Any, stats: CDBStats
) -> GenerateCDBOutput | torch.Tensor:
    """Pad rows to the longest, as stock generate leaves them."""
    pad = generation_config._pad_token_tensor
    pad = int(pad) if pad is not None else 0
    longest = max(len(request.tokens) for request in requests)
    new = input_ids.new_full((len(requests), longest), pad)
    depths = input_ids.new_zeros((len(requests), longest))
    for row, request in enumerate(requests):
        new[row, : len(request.tokens)] = new.new_tensor(request.tokens)
        depths[row, : len(request.tokens)] = depths.new_tensor(request.exit_depths)
    sequences = torch.cat((input_ids, new), dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    scores = logits = None
    if generation_config.output_scores:
        line = requests[0].scores[0].new_full((requests[0].scores[0].shape[-1],), -torch.inf)
        line[pad] = 0.0
        scores = _stack([request.scores for request in requests], longest, line)
    if generation_config.output_logits:
        logits = _stack([request.logits for request in requests], longest, torch.zeros_like(requests[0].logits[0]))
    return GenerateCDBOutput(sequences=sequences, scores=scores, logits=logits, exit_depths=depths, stats=stats)


def _stack(rows: list[list[torch.Tensor]], length: int, fill: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A `[batch, vocab]` per token; rows that ended give `fill`."""
    return tuple(torch.stack([row[step] if step < len(row) else fill for row in rows]) for step in range(length))
