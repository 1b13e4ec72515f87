"""Transformers' entry points for requests that come and go, with cdb."""

import dataclasses
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from .adapters import adapter_for
from .config import CDBConfig, saved_settings
from .jobs import CDBGenerationOutput, refusal
from .manager import CDBManager
from .request_arguments import check_kind, check_prompts, shown
from .request_maker import OF_CALLS

__all__ = ["CDBBatchingMixin"]

logger = logging.get_logger(__name__)

# Settings of Transformers' that mean the same as one of ours.
_HONOURED = ("max_queue_size", "per_request_processors")  # the second: processors are each request's own anyway
_SAME = {"max_requests_per_batch": "max_num_seqs", "max_memory_percent": "max_kv_memory"}


class CDBBatchingMixin:
    """`init_continuous_batching`, its context manager and `generate_batch`, with the argument `cdb`."""

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: Any = None,
        *,
        cdb: Any = None,
    ):
        """A manager; a `CDBManager` with cdb, else Transformers' own.

        Args:
            generation_config: defaults of all requests.
            continuous_batching_config: with cdb its `max_queue_size` is taken, and its `max_requests_per_batch` and
                `max_memory_percent` where `cdb` does not set `max_num_seqs` and `max_kv_memory`.
            workload_hints: sizes for Transformers' manager; with cdb nothing needs them.
            cdb: as for `generate`; None is what `generation_config.cdb` says.
        """
        cdb = self._cdb_of(generation_config) if cdb is None else cdb
        if cdb is None or cdb is False:
            return super().init_continuous_batching(generation_config, continuous_batching_config, workload_hints)
        given = ContinuousBatchingConfig() if continuous_batching_config is None else continuous_batching_config
        if not isinstance(given, ContinuousBatchingConfig):
            raise ValueError(
                f"continuous_batching_config={shown(given)}: give a ContinuousBatchingConfig, or leave it out."
            )
        manager = CDBManager(self, generation_config, _with_settings(cdb, given), given.max_queue_size)
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if not isinstance(kept, CDBManager):
            return manager
        if kept.is_like(manager):
            return kept
        logger.warning("The manager that was kept has other settings than the one that is asked for, and is dropped.")
        self.destroy_cached_continuous_batching_manager()
        return manager

    def destroy_cached_continuous_batching_manager(self) -> None:
        """End and forget the manager that was kept for a next session."""
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if not isinstance(kept, CDBManager):
            super().destroy_cached_continuous_batching_manager()
            return
        kept.destroy()
        del self._cached_continuous_batching_manager

    @contextmanager
    def continuous_batching_context_manager(
        self, generation_config: GenerationConfig | None = None, block: bool = True, timeout: float | None = None, *,
        continuous_batching_config: ContinuousBatchingConfig | None = None, persistent_manager: bool = False,
        warmup: bool = True, workload_hints: Any = None, cdb: Any = None,
    ) -> Generator:  # fmt: skip
        """As Transformers', with the argument `cdb`; see `init_continuous_batching`. With cdb nothing needs a warm-up,
        and an error inside of the context ends all requests."""
        cdb = self._cdb_of(generation_config) if cdb is None else cdb
        options = {"continuous_batching_config": continuous_batching_config, "workload_hints": workload_hints}
        if cdb is None or cdb is False:
            options |= {"persistent_manager": persistent_manager, "warmup": warmup}
            with super().continuous_batching_context_manager(generation_config, block, timeout, **options) as manager:
                yield manager
            return
        manager = self.init_continuous_batching(generation_config, cdb=cdb, **options)
        manager.start()
        try:
            yield manager
        except BaseException:
            manager.stop(block, timeout, hard_stop=True)
            raise
        manager.stop(block, timeout, keep_for_next_session=persistent_manager)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        *,
        cdb: Any = None,
        **kwargs,
    ) -> dict[str, CDBGenerationOutput]:
        """As Transformers' `generate_batch`, and with cdb:

        Args:
            cdb: as for `generate`; None is what `generation_config.cdb` says. `seeds`, `token_limits` and `exit_depths`
                have an entry for every prompt.
            warmup: nothing needs it.
            **kwargs: everything that `CDBManager.add_request` takes, for all prompts.

        Returns:
            Last outputs by name, in the order of the prompts, each behind its children. One that fails has an `error`,
            and a prompt that is refused is one that fails.

        Raises:
            ValueError: all prompts are refused.
        """
        cdb = self._cdb_of(generation_config) if cdb is None else cdb
        if cdb is None or cdb is False:
            return super().generate_batch(
                inputs, generation_config, continuous_batching_config, record_timestamps, progress_bar,
                persistent_manager, warmup, **kwargs,
            )  # fmt: skip
        for name in ("request_id", "streaming"):
            if kwargs.get(name):
                raise ValueError(f"{name}={kwargs[name]!r}: generate_batch names requests, and gives last outputs.")
        check_prompts(inputs)
        told = {"progress_bar": progress_bar, "persistent_manager": persistent_manager}
        for name, value in {"generation_config": generation_config, **told}.items():
            check_kind(name, value)
        config = generation_config or self.generation_config
        adapter = adapter_for(self)
        settings = CDBConfig.create(cdb, saved_settings(config, adapter), adapter)
        cdb, of_prompts = _split(settings, len(inputs))
        options = {"continuous_batching_config": continuous_batching_config, "persistent_manager": persistent_manager}
        outputs: dict[str, CDBGenerationOutput] = {}
        refused: list[Exception] = []
        with self.continuous_batching_context_manager(generation_config, cdb=cdb, **options) as manager:
            jobs: list[list[str]] = []
            for prompt, own in zip(inputs, of_prompts, strict=True):
                try:
                    if "max_new_tokens" in own and kwargs.get("max_new_tokens") is not None:
                        own["max_new_tokens"] = min(own["max_new_tokens"], kwargs["max_new_tokens"])
                    job = manager.make_job(prompt, record_timestamps=record_timestamps, **{**kwargs, **own})
                    manager.submit_job(job, patience=None)
                    jobs.append([*job.names[1:], job.names[0]])
                except (ValueError, RuntimeError) as error:
                    name = manager.new_name()
                    refused.append(error)
                    jobs.append([name])
                    outputs[name] = refusal(name, prompt, error)
            if refused and len(refused) == len(inputs):  # then it is about the arguments
                raise refused[0]
            names = [name for job in jobs for name in job]
            progress_bar = progress_bar or settings.progress
            for name in tqdm(names, f"Solving {len(names)} requests", unit="request", disable=not progress_bar):
                if name not in outputs:
                    outputs[name] = manager.get_result(name)
        failed = [name for name in names if outputs[name].error is not None]
        if failed:
            logger.error(f"Requests {failed} failed; see their `error`.")
        return {name: outputs[name] for name in names}


def _split(settings: CDBConfig, prompts: int) -> tuple[CDBConfig, list[dict[str, Any]]]:
    """Settings for a manager, and for every prompt what its request has of its own.

    Raises:
        ValueError: one of them does not have an entry for every prompt.
    """
    own: list[dict[str, Any]] = [{} for _ in range(prompts)]
    for name, of_request in OF_CALLS.items():
        values = getattr(settings, name)
        if values is None:
            continue
        if len(values) != prompts:
            raise ValueError(f"{name} has {len(values)} entries, but there are {prompts} prompts. Give one for each.")
        for arguments, value in zip(own, values, strict=True):
            arguments[of_request] = value
    rule = "auto" if settings.exit_depths is not None else settings.exit_rule
    return dataclasses.replace(settings, exit_rule=rule, progress=False, **dict.fromkeys(OF_CALLS)), own


def _with_settings(cdb: Any, given: ContinuousBatchingConfig) -> Any:
    """The settings of cdb, with those of Transformers' config that mean the same; warns of others, which nothing
    reads."""
    taken, defaults = {}, ContinuousBatchingConfig()
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if value == getattr(defaults, field.name) or field.name in _HONOURED:
            continue
        if field.name in _SAME:
            taken[_SAME[field.name]] = value
        else:
            logger.warning_once(
                f"continuous_batching_config.{field.name}={value!r} has no effect with cdb, whose cache and schedule "
                "are of another kind; see CDBConfig for its settings."
            )
    if isinstance(cdb, CDBConfig):
        return dataclasses.replace(cdb, **{name: taken[name] for name in taken.keys() - cdb.changed().keys()})
    return {**taken, **({} if cdb is True else cdb)} if taken else cdb
