"""Continuous depth batching inside `generate`: `model.generate(..., cdb=True)`."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers.generation import GenerationMixin
from transformers.utils import logging

from .adapters import adapter_for
from .batching import CDBBatchingMixin
from .config import CDBConfig, saved_settings
from .criteria import Stops
from .exit_heads import FOLDER as HEADS_FOLDER
from .exit_heads import save_exit_heads
from .generation_arguments import (
    check_compile,
    check_guidance,
    check_names,
    check_on_token,
    check_options,
    check_replays,
    check_saved,
    refuse,
    refuse_early,
)
from .generation_output import GenerateCDBOutput, RowsFailedError
from .generation_requests import make_noise, make_requests
from .generation_run import GenerationRun, prepare_run
from .model_checks import check_model, compute_as_wrapped
from .official_arguments import take_official_arguments
from .processors import key_of_scores_only, processors_of_rows
from .sampling import Sampler
from .streaming import OneRowStreamer, StreamPiece

__all__ = ["CDBGenerationMixin", "GenerateCDBOutput", "RowsFailedError", "enable_cdb"]

logger = logging.get_logger(__name__)

_SIGNATURE = inspect.signature(GenerationMixin.generate)
# generate repeats tensors with the rows of beams and num_return_sequences; these mean the same for all rows.
_SCALARS = ("num_steps", "init_scale", "init_seed", "exit_threshold", "exit_at_step")


class CDBGenerationMixin(CDBBatchingMixin, GenerationMixin):
    """`generate` with the argument `cdb`; without it the library's own, unchanged."""

    @torch.no_grad()
    def generate(self, *args, cdb: Any = None, on_token: Callable[[int, int, int], Any] | None = None, **kwargs):
        """As `GenerationMixin.generate`, and:

        Args:
            cdb: True, a dict of settings or a `CDBConfig` for continuous depth batching; False for stock generation;
                None for what `generation_config.cdb` says.
            on_token: with cdb, called with (row, token id, exit depth) as soon as a row has a token; what it returns
                is not read. Rows are those of the output.

        Raises:
            RowsFailedError: with cdb, what belongs to a row alone raised there: a logits processor, a stopping
                criterion, `on_token`. The other rows are finished, and the error holds them.
            ValueError: an argument or a setting that cdb cannot follow.
        """
        kwargs = {**_named(self, args, kwargs), **kwargs}
        if cdb is None:
            cdb = self._cdb_of(kwargs.get("generation_config"))
        if cdb is not None:
            kwargs["cdb"] = cdb
        wanted = cdb is not None and cdb is not False
        streamer = kwargs.get("streamer") if wanted else None
        if streamer is None:
            return self._generate(wanted, on_token, kwargs)
        kwargs["streamer"] = streamer = OneRowStreamer(streamer)
        try:
            return self._generate(wanted, on_token, kwargs)
        except BaseException:
            streamer.end()  # also where nothing has run: who reads from it must not wait for ever
            raise

    def _generate(self, wanted: bool, on_token: Callable | None, kwargs: dict[str, Any]):
        """Refuse what stock generate would act on before any hook of this class, then let it run."""
        if kwargs.get("cache_implementation") == "paged":
            raise ValueError(
                "cache_implementation='paged' has one entry per layer, but a looped model needs one per loop and "
                "layer. Generate with cdb=True, which schedules requests as they come, or leave it out."
            )
        if on_token is not None:
            check_on_token(on_token, wanted)
            kwargs["on_token"] = on_token
        if wanted:
            refuse_early(kwargs)
        return super().generate(**kwargs)

    def generate_stream(
        self, *args, tokenizer: Any = None, skip_special_tokens: bool = True, cdb: Any = None, **kwargs
    ) -> Iterator[StreamPiece]:
        """Generate with cdb, and give every token of every row as soon as it is there.

        Nothing runs in the background: the engine moves on when the next piece is asked for. Closing the iterator, or
        dropping it, ends the call. Arguments are checked at once, as `generate` checks them.

        Args:
            tokenizer: makes pieces text, and finds `stop_strings`; without one pieces are token ids.
            skip_special_tokens: leave them out of the text.
            cdb: as for `generate`; None is True where `generation_config` says nothing.

        Returns:
            An iterator of `StreamPiece`, (row, piece, depth). Its own value, which `yield from` gives, is what
            `generate` returns.

        Raises:
            ValueError: cdb=False, or what `generate` refuses.
            RowsFailedError: from the iterator after the last piece; rows failed.
        """
        named = {**_named(self, args, kwargs), **kwargs}
        saved = self._cdb_of(named.get("generation_config")) if cdb is None else None
        if cdb is None:
            cdb = True if saved is None else saved
        if named.get("streamer") is not None:
            raise ValueError(
                f"streamer={named['streamer']!r} beside generate_stream: an iterator that is never asked would leave "
                "its reader waiting. Iterate, or pass the streamer to generate."
            )
        if cdb is False:
            raise ValueError(
                f"{'cdb' if saved is None else 'generation_config.cdb'}=False: generate_stream steps an engine, which "
                "stock generation has not. Pass cdb=True, or a streamer to generate."
            )
        run = prepare_run(self, *args, tokenizer=tokenizer, cdb=cdb, **kwargs)
        return run.open().stream(tokenizer, skip_special_tokens)

    def save_pretrained(self, save_directory, is_main_process: bool = True, *args, **kwargs):
        """As the library's, and writes the model's trained exit heads into the folder `exit_heads` there.

        Raises:
            ValueError: settings of cdb in the generation config that do not exist, or that JSON cannot hold.
        """
        for name in ("cdb", "cdb_config"):
            settings = getattr(self.generation_config, name, None)
            if settings is not None:
                # Marked as made from the model config, the file would lose its extra keys on the next load.
                self.generation_config._from_model_config = False
                if not isinstance(settings, bool):
                    setattr(self.generation_config, name, CDBConfig.plain(settings))
        if is_main_process:
            save_exit_heads(self, save_directory)
        return super().save_pretrained(save_directory, is_main_process, *args, **kwargs)

    def _get_files_timestamps(self, working_dir):
        # What is older than these is not uploaded, and the heads were written just before.
        timestamps = super()._get_files_timestamps(working_dir)
        timestamps.pop(HEADS_FOLDER, None)
        return timestamps

    def _cdb_of(self, generation_config: Any) -> Any:
        """What the generation config of the call says of `cdb`, or else the model's own; None where neither does."""
        cdb = getattr(generation_config, "cdb", None)
        if cdb is None:
            cdb = getattr(self.generation_config, "cdb", None)
        if cdb and getattr(generation_config, "is_assistant", None):
            logger.warning_once(
                f"generation_config.cdb={cdb!r} of {type(self).__name__} is left out while it drafts as an assistant, "
                "which takes steps back in its cache, as a depth cache cannot."
            )
            return False
        return cdb

    def _prepare_generation_config(self, generation_config, **kwargs):
        cdb, on_token = kwargs.pop("cdb", None), kwargs.pop("on_token", None)
        only_prepare = kwargs.pop("_only_prepare", False)
        named = kwargs.pop("cdb_config", None)
        for name in _SCALARS:
            if isinstance(kwargs.get(name), torch.Tensor) and kwargs[name].numel() == 1:
                kwargs[name] = kwargs[name].item()
        generation_config, model_kwargs = super()._prepare_generation_config(generation_config, **kwargs)
        cdb = self._cdb_of(generation_config) if cdb is None else cdb
        if named is not None:
            generation_config.cdb_config = named
        check_saved(generation_config, cdb, named)
        generation_config._cdb = None
        if cdb is None:
            check_names(self, model_kwargs, of_cdb=True)
        elif cdb is not False:
            adapter = adapter_for(self)
            check_model(adapter)
            compute_as_wrapped(adapter)
            check_options(generation_config)
            config = CDBConfig.create(cdb, saved_settings(generation_config, adapter), adapter)
            given = {**_settings(named), **_settings(cdb)}
            config = take_official_arguments(config, adapter, model_kwargs, given)
            check_names(self, model_kwargs)
            check_compile(generation_config, config)
            generation_config._cdb = (adapter, config.resolve(adapter))
            generation_config._on_token, generation_config._only_prepare = on_token, only_prepare
        return generation_config, model_kwargs

    def _validate_generation_mode(self, generation_mode, generation_config, generation_mode_kwargs):
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        if generation_config._cdb is not None and generation_mode_kwargs.get("synced_gpus"):
            refuse("synced_gpus", generation_mode_kwargs["synced_gpus"])

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs):
        if generation_config._cdb is None:
            return super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)
        return None

    def _get_logits_processor(self, generation_config, *args, **kwargs):
        if getattr(generation_config, "_cdb", None) is not None:
            check_guidance(generation_config, kwargs)
        return super()._get_logits_processor(generation_config, *args, **kwargs)

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
        copies, pad = generation_config.num_return_sequences, generation_config._pad_token_tensor
        keep_scores = bool(generation_config.output_scores and generation_config.return_dict_in_generate)
        processors = processors_of_rows(logits_processor, input_ids, copies, adapter.vocab_size)
        stops = Stops(stopping_criteria, input_ids, adapter.vocab_size, keep_scores, 0 if pad is None else int(pad))
        check_replays(stops, generation_config)
        noise = make_noise(config, len(input_ids), adapter) if generation_config.do_sample else None
        sampler = Sampler(
            processors,
            input_ids,
            generation_config.do_sample,
            noise,
            keep_scores=keep_scores,
            keep_logits=bool(generation_config.output_logits and generation_config.return_dict_in_generate),
            alike=key_of_scores_only(logits_processor),
        )
        requests = make_requests(input_ids, generation_config, config, sampler, stops, kwargs)
        run = GenerationRun(
            adapter,
            config,
            requests,
            input_ids,
            generation_config,
            stops,
            on_token=generation_config._on_token,
            streamer=kwargs.get("streamer"),
        )
        return run if generation_config._only_prepare else run.open().finish()


def _settings(given: Any) -> dict[str, Any]:
    """The settings that an argument of the call names."""
    return dict(given) if isinstance(given, Mapping) else given.changed() if isinstance(given, CDBConfig) else {}


def _named(model: GenerationMixin, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional arguments of `generate` by their names."""
    named = _SIGNATURE.bind_partial(model, *args).arguments
    named.pop("self")
    twice = sorted(named.keys() & kwargs.keys())
    if twice:
        raise TypeError(f"generate got two values for {twice[0]!r}: one by position and one by name. Give one.")
    return named


def enable_cdb(model: GenerationMixin) -> GenerationMixin:
    """Give a loaded looped model the argument `cdb` of `generate`. Returns the model itself.

    Ouro and Huginn of this package have it already. The model keeps its class name and module, so saving, loading
    and weight conversions see no difference. Of a model that PEFT has wrapped, the one inside is enabled.

    Raises:
        ValueError: no adapter is registered for the model's type, or it has no head.
    """
    inner = adapter_for(model).model
    if not isinstance(inner, GenerationMixin):
        raise ValueError(
            f"model={type(inner).__name__} has no language modelling head and cannot generate. Load it with "
            "AutoModelForCausalLM."
        )
    if not isinstance(inner, CDBGenerationMixin):
        cls = type(inner)
        inner.__class__ = type(
            cls.__name__, (CDBGenerationMixin, cls), {"__module__": cls.__module__, "__reduce_ex__": _reduce}
        )
    return model


def _reduce(self, protocol):
    # The class made by enable_cdb has no name that pickle could import: the parent is stored and enabled again.
    parent = type(self).__bases__[1]
    return _restore, (parent, self.__dict__)


def _restore(cls: type, state: dict):
    model = cls.__new__(cls)
    model.__dict__.update(state)
    return enable_cdb(model)
