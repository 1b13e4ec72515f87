"""From the arguments of one request of a manager to what the engine runs."""

import copy
import dataclasses
import threading
import weakref
from typing import Any

import torch
from transformers import GenerationConfig

from .config import CDBConfig
from .engine import Engine
from .exits import RULES, ExitRule
from .generation_run import GenerationRun, prepare_run
from .request_arguments import check_kind, check_options, shown

__all__ = ["OF_CALLS", "RequestMaker"]

# What belongs to the prompts of one call, and what add_request has in its place.
OF_CALLS = {"seeds": "seed", "token_limits": "max_new_tokens", "exit_depths": "exit_depths"}
# Settings of cdb that may differ from request to request; the others belong to the engine that all share.
_OF_REQUESTS = ("max_depth", "min_depth", "exit_rule", "exit_threshold", "prefill_exit", "exit_depths")
_OF_ENGINE = tuple(f.name for f in dataclasses.fields(CDBConfig) if f.name not in (*_OF_REQUESTS, *OF_CALLS))
# Arguments of generate that mean nothing for a request, and what to use.
_ELSEWHERE = {
    "cdb": "The settings of a request stand by their own names: " + ", ".join(_OF_REQUESTS) + ".",
    "cdb_config": "The settings of a request stand by their own names: " + ", ".join(_OF_REQUESTS) + ".",
    "attention_mask": "A prompt has no padding here: give the ids that count.",
    "inputs": "The prompt is the first argument, or input_ids.",
    "inputs_embeds": "Give token ids; for embeddings call generate.",
    "streamer": "Pass streaming=True, and register_result_handler or request_id_iter.",
    "on_token": "Pass streaming=True, and register_result_handler or request_id_iter.",
    "return_dict_in_generate": "Outputs are CDBGenerationOutput.",
    "output_scores": "Outputs hold tokens and depths; for scores call generate.",
    "output_logits": "Outputs hold tokens and depths; for logits call generate.",
}


class RequestMaker:
    """Checks requests and makes them ready. May be used by any thread.

    Args:
        engine: that all requests share; nothing of it is changed.
        generation_config: defaults of all requests.
        settings: of cdb, not resolved.

    Raises:
        ValueError: a default that no request could have.
    """

    def __init__(self, engine: Engine, generation_config: GenerationConfig, settings: CDBConfig):
        self._engine, self._generation_config, self._settings = engine, generation_config, settings
        self._vocabulary = engine.adapter.model.get_input_embeddings().num_embeddings
        for name, value in vars(generation_config).items():  # defaults, which the first request must not find wrong
            check_kind(name, value, self._vocabulary)
        self._rules: weakref.WeakValueDictionary[tuple, ExitRule] = weakref.WeakValueDictionary()
        self._shared(engine.rule)
        self._lock = threading.Lock()  # nobody has promised that generate is safe in several threads at once

    def make(self, input_ids: Any, seed: int | None, kwargs: dict[str, Any]) -> GenerationRun:
        """What `generate` would run for this prompt, with rules and depths of its own.

        Args:
            input_ids, seed: see `CDBManager.add_request`.
            kwargs: its further arguments but those of the schedule; they are taken out.

        Raises:
            ValueError: as `CDBManager.add_request`.
        """
        prompt = _as_prompt(input_ids).to(self._engine.adapter.device)
        least, most = (int(end) for end in prompt.aminmax())
        if least < 0 or most >= self._vocabulary:  # the model would raise, and all requests would fail with it
            wrong = least if least < 0 else most
            raise ValueError(f"input_ids hold {wrong}, but tokens lie between 0 and {self._vocabulary - 1}.")
        generation_config = kwargs.pop("generation_config", None)
        check_kind("generation_config", generation_config)
        check_kind("seed", seed)
        self._check_arguments(generation_config, kwargs)
        config = self._settings_of(seed, kwargs)
        configs = (self._engine.adapter.model.generation_config, generation_config or self._generation_config)
        layers = (*map(vars, configs), kwargs)  # as generate takes what one leaves out from the one before
        check_options({k: v for layer in layers for k, v in layer.items() if v is not None}, self._vocabulary)
        # Not a deep copy: generate makes one of its own.
        generation_config = copy.copy(generation_config or self._generation_config)
        generation_config.return_dict_in_generate = False
        kwargs = generation_config.update(**kwargs)
        if seed is None and generation_config.do_sample:
            config = dataclasses.replace(config, seeds=[int(torch.randint(2**62, ()))])
        with self._lock:
            # Without a mask `generate` would take ids of padding for padding, and a prompt here has none.
            options = {"attention_mask": torch.ones_like(prompt)[None], "generation_config": generation_config}
            run = prepare_run(self._engine.adapter.model, prompt[None], cdb=config, **options, **kwargs)
            self._check_settings(run.config)
            rule = self._shared(run.config.exit_rule)
        for request in run.requests:
            request.min_depth, request.max_depth, request.rule = run.config.min_depth, run.config.max_depth, rule
            request.prefill_exit = run.config.prefill_exit
            self._engine.check(request)
        return run

    def _check_arguments(self, generation_config: GenerationConfig | None, kwargs: dict[str, Any]) -> None:
        """Refuse what nothing would read; takes out of `kwargs` what is not for `generate`."""
        for name, instead in _ELSEWHERE.items():
            value = kwargs.pop(name, None)
            if value is not None and value is not False:
                raise ValueError(f"{name}={shown(value)} has no meaning for one request. {instead}")
        hidden = next((name for name in kwargs if name.startswith("_")), None)
        if hidden is not None:
            raise ValueError(f"{hidden!r} is no argument of a request. Leave it out.")
        for name in (*_OF_ENGINE, "seeds", "token_limits"):
            if kwargs.get(name) is not None:
                instead = f"Give {OF_CALLS[name]}." if name in OF_CALLS else "Give it to the manager, in its cdb."
                raise ValueError(f"{name}={shown(kwargs[name])} is no setting of one request. {instead}")
        for name in ("cdb", "cdb_config"):
            value = getattr(generation_config, name, None)
            if value not in (None, True, getattr(self._generation_config, name, None)):
                raise ValueError(f"generation_config.{name}={value!r} has no effect here. {_ELSEWHERE[name]}")

    def _settings_of(self, seed: int | None, kwargs: dict[str, Any]) -> CDBConfig:
        """The manager's settings with those of a request, which are taken out of its arguments."""
        given = {name: kwargs.pop(name, None) for name in _OF_REQUESTS}
        own = {name: value for name, value in given.items() if value is not None}
        for name, value in own.items():
            check_kind(name, value)
        if "exit_depths" in own:
            own = {"exit_rule": "replay", "prefill_exit": False, **own, "exit_depths": [own["exit_depths"]]}
        if seed is not None:
            own["seeds"] = [seed]
        return CDBConfig.create(own, self._settings, self._engine.adapter)

    def _check_settings(self, config: CDBConfig) -> None:
        """Refuse what a model's own keywords ask of the engine that all requests share."""
        for name in _OF_ENGINE:
            own, shared = getattr(config, name), getattr(self._engine.config, name)
            if own != shared:
                raise ValueError(f"the request asks for {name}={own!r}, but the manager has {shared!r} for all.")
        most = self._engine.config.max_depth
        if config.max_depth > most:
            raise ValueError(
                f"max_depth={config.max_depth} exceeds the manager's own {most}, to which its cache is made. Give that "
                "to the manager."
            )

    def _shared(self, rule: ExitRule) -> ExitRule:
        """One rule for all requests that ask for the same, so that it decides about all of them at once."""
        if type(rule) not in RULES.values() or rule.name == "replay":
            return rule
        return self._rules.setdefault((type(rule), rule.threshold, getattr(rule, "head", None)), rule)


def _as_prompt(input_ids: Any) -> torch.Tensor:
    """The token ids of one prompt, int64 `[positions]`, whatever integers they are given as."""
    try:
        prompt = torch.as_tensor(input_ids)
    except Exception:  # PyTorch raises errors of many kinds
        prompt = torch.empty(0)
    kinds = (prompt.is_floating_point(), prompt.is_complex(), prompt.dtype == torch.bool)
    if prompt.ndim != 1 or any(kinds) or prompt.is_meta or prompt.layout != torch.strided or not len(prompt):
        raise ValueError(f"input_ids={shown(input_ids)}: give the token ids of one prompt, a list of integers.")
    return prompt.long()
