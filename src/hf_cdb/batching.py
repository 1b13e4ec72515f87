"""Transformers' entry points for requests that come and go, with cdb."""

import dataclasses
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.utils import logging

from .config import CDBConfig
from .jobs import CDBGenerationOutput, refusal, sequence_names
from .manager import CDBManager

__all__ = ["CDBBatchingMixin"]

logger = logging.get_logger(__name__)

# Settings of Transformers' that mean the same as one of ours.
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
        kept = getattr(self, "_cached_continuous_batching_manager", None)
        if isinstance(kept, CDBManager):
            return kept
        given = continuous_batching_config or ContinuousBatchingConfig()
        return CDBManager(self, generation_config, _with_settings(cdb, given), given.max_queue_size)

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
        """As Transformers', with the argument `cdb`; see `init_continuous_batching`."""
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
        finally:
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
            cdb: as for `generate`; None is what `generation_config.cdb` says.
            **kwargs: everything that `CDBManager.add_request` takes, for all prompts.

        Returns:
            Outputs by name, in the order of the prompts. One that fails has an `error`, and a prompt that is refused
            is one that fails.

        Raises:
            ValueError: all prompts are refused.
        """
        cdb = self._cdb_of(generation_config) if cdb is None else cdb
        if cdb is None or cdb is False:
            return super().generate_batch(
                inputs, generation_config, continuous_batching_config, record_timestamps, progress_bar,
                persistent_manager, warmup, **kwargs,
            )  # fmt: skip
        config = generation_config or self.generation_config
        copies = kwargs.get("num_return_sequences") or config.num_return_sequences or 1
        options = {"continuous_batching_config": continuous_batching_config, "persistent_manager": persistent_manager}
        with self.continuous_batching_context_manager(generation_config, cdb=cdb, **options) as manager:
            outputs: dict[str, CDBGenerationOutput | None] = {}
            refused: list[ValueError] = []
            for prompt in inputs:
                name = manager.new_name()
                try:
                    manager.add_request(prompt, name, record_timestamps=record_timestamps, **kwargs)
                    outputs |= dict.fromkeys(sequence_names(name, copies))
                except ValueError as error:
                    refused.append(error)
                    outputs[name] = refusal(name, prompt, error)
            if refused and len(refused) == len(inputs):  # then it is about the arguments
                raise refused[0]
            for name in tqdm(outputs, unit="sequence", disable=not progress_bar):
                if outputs[name] is None:
                    outputs[name] = manager.get_result(name)
        return outputs


def _with_settings(cdb: Any, given: ContinuousBatchingConfig) -> Any:
    """The settings of cdb, with those of Transformers' config that mean the same; warns of others, which nothing
    reads."""
    taken, defaults = {}, ContinuousBatchingConfig()
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        if value == getattr(defaults, field.name) or field.name == "max_queue_size":
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
