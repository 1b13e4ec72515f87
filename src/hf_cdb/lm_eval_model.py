"""The model `hf-cdb` of the evaluation harness lm_eval, which hands all prompts of a task to one engine.

    python -m hf_cdb.lm_eval_model --model hf-cdb --model_args pretrained=DIR,exit_threshold=0.6 --tasks TASK

Importing the module registers the model, so `lm_eval.simple_evaluate(model="hf-cdb", ...)` works too. It needs the
extra `eval` of this package.
"""

import dataclasses
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from .adapters import adapter_for
from .config import CDBConfig, saved_settings
from .generation import enable_cdb
from .stats import CDBStats

__all__ = ["CDBHarnessModel"]


@register_model("hf-cdb")
class CDBHarnessModel(HFLM):
    """As the harness's own `hf`, generating with cdb.

    `batch_size` is for other requests than generation: of those every prompt with the same `gen_kwargs` goes into one
    call, and `max_num_seqs` says how many are in flight. A row ends at its own stop sequence; `hf` waits for all rows
    of the batch.

    Args:
        pretrained: folder or name of a looped model, or the model.
        cdb: True, or a dict of settings; the settings can be given by their own names too, as in
            `--model_args pretrained=DIR,exit_rule=gate,exit_threshold=0.6`.
        **kwargs: settings of `CDBConfig`, and arguments of `hf`.

    Attributes:
        cdb_stats: counts of every call of `generate` so far.

    Raises:
        ValueError: a setting that does not exist or that the model cannot follow.
    """

    def __init__(self, pretrained: Any, cdb: Any = True, **kwargs):
        names = {field.name for field in dataclasses.fields(CDBConfig)}
        given = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
        super().__init__(pretrained, **kwargs)
        enable_cdb(self.model)
        base = CDBConfig.create(cdb, saved_settings(self.model.generation_config))
        self.cdb_config = dataclasses.replace(base, **given)
        self._resolved = self.cdb_config.resolve(adapter_for(self.model))
        self.cdb_stats: list[CDBStats] = []

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
        with torch.autocast(
            device_type=self.device.type,
            dtype=self.mixed_precision_dtype,
            enabled=self.mixed_precision_dtype is not None,
        ):
            output = self.model.generate(
                input_ids=context,
                max_length=max_length,
                tokenizer=self.tokenizer,
                pad_token_id=self.tokenizer.pad_token_id,
                eos_token_id=sorted(ends),
                return_dict_in_generate=True,
                **{"cdb": self.cdb_config, **generation_kwargs},
            )
        if getattr(output, "stats", None) is not None:
            self.cdb_stats.append(output.stats)
        return output.sequences

    def _loglikelihood_tokens(self, *args, **kwargs):
        if self._resolved.exit_rule.name != "never":
            raise ValueError(
                f"exit_rule={self._resolved.exit_rule.name!r} does not act on loglikelihood requests: they score a "
                "given text in one pass at full depth. Evaluate a task that generates, or pass exit_rule=never."
            )
        return super()._loglikelihood_tokens(*args, **kwargs)

    def get_model_info(self) -> dict:
        """As the harness's, and under `cdb` the settings, and the tokens and mean depth of all generation so far."""
        tokens = sum(stats.tokens for stats in self.cdb_stats)
        loops = sum(stats.tokens * stats.mean_depth for stats in self.cdb_stats)
        rule = self._resolved.exit_rule
        settings = {f.name: getattr(self.cdb_config, f.name) for f in dataclasses.fields(self.cdb_config)}
        ran = {
            "exit_rule": rule.name,
            "exit_threshold": rule.threshold,
            "max_depth": self._resolved.max_depth,
            "kv_policy": self._resolved.kv_policy,
            "tokens": tokens,
            "mean_depth": loops / tokens if tokens else None,
        }
        return {**super().get_model_info(), "cdb": {**settings, **ran}}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
