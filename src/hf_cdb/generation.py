"""Continuous depth batching inside `generate`: `model.generate(..., cdb=True)`."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation import GenerationMixin, LogitsProcessorList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import logging

from .adapters import adapter_for
from .config import CDBConfig
from .engine import Engine
from .exit_heads import FOLDER as HEADS_FOLDER
from .exit_heads import save_exit_heads
from .generation_arguments import UNSUPPORTED_SETTINGS, refuse, refuse_early, take_official_arguments
from .generation_requests import make_noise, make_requests
from .request import Request
from .sampling import Sampler, check_criteria, check_processors
from .stats import CDBStats

__all__ = ["CDBGenerationMixin", "GenerateCDBOutput", "enable_cdb"]

logger = logging.get_logger(__name__)

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
            refuse_early(kwargs)
        return super().generate(*args, **kwargs)

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        """As the library's, and writes the model's trained exit heads into the folder `exit_heads` there."""
        if any(getattr(self.generation_config, name, None) is not None for name in ("cdb", "cdb_config")):
            # Marked as made from the model config, the file would lose its extra keys on the next load.
            self.generation_config._from_model_config = False
        if is_main_process:
            save_exit_heads(self, save_directory)
        return super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _get_files_timestamps(self, working_dir):
        # What is older than these is not uploaded, and the heads were written just before.
        timestamps = super()._get_files_timestamps(working_dir)
        timestamps.pop(HEADS_FOLDER, None)
        return timestamps

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
            config = take_official_arguments(CDBConfig.create(cdb, saved), adapter, model_kwargs)
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
        for name in UNSUPPORTED_SETTINGS:
            if getattr(generation_config, name, None):
                refuse(name, getattr(generation_config, name))
        if generation_config.use_cache is False:
            raise ValueError(
                "use_cache=False is not supported with cdb: rows at different depths read each other's past from a "
                "cache, and nothing could be recomputed at the depths it had. Leave it out, or generate with cdb=False."
            )
        for name in ("streamer", "synced_gpus"):
            if generation_mode_kwargs.get(name):
                refuse(name, generation_mode_kwargs[name])

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
        noise = make_noise(config, len(input_ids), adapter) if generation_config.do_sample else None
        sampler = Sampler(
            processors,
            input_ids,
            generation_config.do_sample,
            noise,
            keep_scores=bool(generation_config.output_scores and generation_config.return_dict_in_generate),
            keep_logits=bool(generation_config.output_logits and generation_config.return_dict_in_generate),
        )
        requests = make_requests(input_ids, generation_config, config, sampler, stopping_criteria, kwargs)
        engine = Engine(adapter, config)
        for request in requests:
            engine.add_request(request)
        engine.run()
        return _gather(input_ids, requests, generation_config, engine.stats)

    def _row_processors(self, generation_config, rows: int) -> list[LogitsProcessorList]:
        """A list of processors for every row, as stock generate would build it for the row alone."""
        args, kwargs = generation_config._processor_arguments
        if kwargs.get("prefix_allowed_tokens_fn") is not None:
            refuse("prefix_allowed_tokens_fn", kwargs["prefix_allowed_tokens_fn"])
        if kwargs.get("logits_processor"):
            refuse("logits_processor", kwargs["logits_processor"])
        if kwargs.get("negative_prompt_ids") is not None:
            refuse("negative_prompt_ids", kwargs["negative_prompt_ids"])
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
        ValueError: no adapter is registered for the model's type, it has no head, or another library has wrapped it.
    """
    name = type(model).__name__
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        raise ValueError(
            f"model is wrapped by PEFT ({name}), whose calls would go past the wrapped layers' names. Enable cdb first "
            "and wrap then: get_peft_model(hf_cdb.enable_cdb(model), ...)."
        )
    adapter_for(model)
    if not isinstance(model, GenerationMixin):
        raise ValueError(
            f"model={name} has no language modelling head and cannot generate. Load it with AutoModelForCausalLM."
        )
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
