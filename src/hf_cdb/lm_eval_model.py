"""The model `hf-cdb` of the evaluation harness lm_eval, which hands all prompts of a task to one engine.

    python -m hf_cdb.lm_eval_model --model hf-cdb --model_args pretrained=DIR,exit_threshold=0.6 --tasks TASK

Importing the module registers the model, so `lm_eval.simple_evaluate(model="hf-cdb", ...)` works too. It needs the
extra `eval` of this package.
"""

import dataclasses
import logging
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .adapters import adapter_for
from .checkpoints import model_path
from .config import CDBConfig, saved_settings
from .generation import enable_cdb
from .stats import CDBStats

__all__ = ["CDBHarnessModel"]

logger = logging.getLogger("lm_eval.hf_cdb")  # below the harness's own, the only one that its command sets up


@register_model("hf-cdb")
class CDBHarnessModel(HFLM):
    """As the harness's own `hf`, generating with cdb.

    `batch_size` is for other requests than generation: of those every prompt with the same `gen_kwargs` goes into one
    call, and `max_num_seqs` says how many are in flight. A row ends at its own stop sequence; `hf` waits for all rows
    of the batch.

    Args:
        pretrained: "tiny-ouro", "tiny-huginn", a folder or Hub id of a looped model, or the model.
        cdb: True, or a dict of settings; the settings can be given by their own names too, as in
            `--model_args pretrained=DIR,exit_rule=gate,exit_threshold=0.6`.
        **kwargs: settings of `CDBConfig`, and arguments of `hf`.

    Attributes:
        cdb_config: the settings of the model; `cdb` in the `gen_kwargs` of a task is merged into them.
        cdb_stats: counts of every call of `generate` so far that cdb ran.

    Raises:
        ValueError: a setting that does not exist or that the model cannot follow.
    """

    def __init__(self, pretrained: Any, cdb: Any = True, **kwargs):
        names = {field.name for field in dataclasses.fields(CDBConfig)}
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        super().__init__(model_path(pretrained) if isinstance(pretrained, str) else pretrained, **kwargs)
        enable_cdb(self.model)
        self._adapter = adapter_for(self.model)
        saved = saved_settings(self.model.generation_config, self._adapter)
        self.cdb_config = CDBConfig.create(given, CDBConfig.create(cdb, saved, self._adapter), self._adapter)
        self._resolved = self.cdb_config.resolve(self._adapter)
        self.cdb_stats: list[CDBStats] = []
        self._ran: list[tuple[dict[str, Any], list[CDBStats]]] = []  # settings, and the counts of all calls with them

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The answer to every request, in their order."""
        before = self.batch_size_per_gpu
        self.batch_size_per_gpu = max(1, len(requests))
        try:
            return super().generate_until(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = before

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs
    ) -> torch.Tensor:
        cdb = self._config_of_task(generation_kwargs.pop("cdb", None))
        if not generation_kwargs.get("do_sample"):
            generation_kwargs = {**generation_kwargs, "do_sample": False}
            generation_kwargs.pop("temperature", None)
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), self.eot_token_id} - {None}
        # The harness adds the text of the end token, which need not be text that any token spells.
        end_text = self.tok_decode(self.eot_token_id, skip_special_tokens=False)
        strings = [text for text in stop if text and text != end_text]
        if strings:
            generation_kwargs["stop_strings"] = strings
        with self._autocast():
            output = self.model.generate(
                input_ids=context,
                max_length=max_length,
                tokenizer=self.tokenizer,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=sorted(ends),
                return_dict_in_generate=True,
                cdb=cdb,
                **generation_kwargs,
            )
        stats = getattr(output, "stats", None)
        if stats is None:
            self._record({"requests": "generate_until", "cdb": False})
        else:
            self.cdb_stats.append(stats)
            self._record({"requests": "generate_until", **cdb.described(self._adapter)}, stats)
        return output.sequences

    def _config_of_task(self, cdb: Any) -> CDBConfig | bool:
        """What `cdb` in the `gen_kwargs` of a task comes to: a dict is merged into the settings of the model."""
        if cdb is None or cdb is True:
            return self.cdb_config
        return False if cdb is False else CDBConfig.create(cdb, self.cdb_config, self._adapter)

    def _loglikelihood_tokens(self, *args, **kwargs):
        if self._resolved.exit_rule.name != "never":
            raise ValueError(
                f"exit_rule={self._resolved.exit_rule.name!r} does not act on loglikelihood requests: they score a "
                "given text in one pass in which every token runs the same number of loops. Evaluate a task that "
                "generates, or pass exit_rule=never, with max_depth=... for that number."
            )
        self._adapter.plain_arguments(self._resolved.max_depth)  # refuses a depth before anything runs
        depth = {"mean_depth": self._resolved.max_depth}
        self._record({"requests": "loglikelihood", **self.cdb_config.described(self._adapter), **depth})
        return super()._loglikelihood_tokens(*args, **kwargs)

    def _model_call(self, inps: torch.Tensor) -> torch.Tensor:
        """Logits `[batch, positions, vocab]` of one pass in which every token runs `max_depth` loops."""
        depth = self._adapter.plain_arguments(self._resolved.max_depth)
        with torch.no_grad(), self._autocast():
            return self.model(inps, **depth).logits

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        )

    def _record(self, settings: dict[str, Any], stats: CDBStats | None = None) -> None:
        counts = next((counts for ran, counts in self._ran if ran == settings), None)
        if counts is None:
            counts = []
            self._ran.append((settings, counts))
        counts += [] if stats is None else [stats]

    def get_model_info(self) -> dict:
        """As the harness's, and under `cdb` the tokens and mean depth of all generation with cdb so far, and in `runs`
        the settings that requests ran with, each with its own tokens and mean depth. The harness asks for it when all
        has run, so the mean depths are logged too."""
        runs = [{**settings, **(_counts(stats) if stats else {})} for settings, stats in self._ran]
        for run in runs:
            if run.get("mean_depth") is not None:
                logger.info("%(requests)s with exit_rule=%(exit_rule)s: mean depth %(mean_depth).3f", run)
        return {**super().get_model_info(), "cdb": {**_counts(self.cdb_stats), "runs": runs}}


def _counts(stats: list[CDBStats]) -> dict[str, Any]:
    tokens = sum(one.tokens for one in stats)
    loops = sum(one.tokens * one.mean_depth for one in stats)
    return {"tokens": tokens, "mean_depth": loops / tokens if tokens else None}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
