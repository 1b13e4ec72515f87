"""Replicas of the server behind one endpoint, by Ray Serve:

    serve run hf_cdb.ray_serving:application model=tiny-ouro replicas=2

Needs the packages of `pip install 'hf-cdb[ray]'`; nothing else imports this.
"""

import json
from typing import Annotated, Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt
from ray import serve
from ray.serve import Application

from .config import CDBConfig
from .evaluation.run import load_model_to_evaluate
from .manager import CDBManager
from .serving.app import build_app
from .serving.service import Service

__all__ = ["ReplicaSettings", "application"]


def _from_json(value: Any) -> Any:
    """`serve run` hands over texts, a Serve config file whatever YAML has."""
    return json.loads(value) if isinstance(value, str) else value


class ReplicaSettings(BaseModel):
    """What `serve run` may be given, as NAME=VALUE, and a Serve config file as `args`.

    Attributes:
        model: "tiny-ouro", "tiny-huginn", a folder or a Hub id; every machine has to have it.
        revision, dtype, device: of the model.
        name: what clients call it; default `model`.
        cdb: settings of cdb, over the saved ones of the model; JSON.
        replicas: processes, each with a model and a manager.
        num_cpus, num_gpus: that Ray keeps for a replica.
        threads: torch threads of a replica.
        max_queue: sequences of a replica at most; more are refused with status 429.
        restarts: how often a replica goes on after an error of the model; then Ray starts another in its place.
        health_check_period: seconds between two looks at whether a replica lives.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    revision: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    name: str | None = None
    cdb: Annotated[dict[str, Any], BeforeValidator(_from_json)] = Field(default_factory=dict)
    replicas: PositiveInt = 1
    num_cpus: NonNegativeFloat = 1.0
    num_gpus: NonNegativeFloat = 0.0
    threads: PositiveInt = 1
    max_queue: PositiveInt = 1024
    restarts: int = Field(default=3, ge=0)
    health_check_period: PositiveFloat = 1.0


class _Replica:
    """What Ray holds of a process."""

    def check_health(self) -> None:
        """Asked by Ray again and again; it ends a replica that raises, and starts another.

        Raises:
            RuntimeError: the model has failed too often.
        """
        service = self._service
        if service.fatal_error is not None and not service.restarts:
            raise RuntimeError(f"the model has failed: {service.fatal_error!r}.")

    def __serve_build_asgi_app__(self) -> FastAPI:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        model, tokenizer = load_model_to_evaluate(settings.model, settings.revision, settings.dtype, settings.device)
        manager = CDBManager(model, cdb=settings.cdb or True)
        name = settings.name or settings.model
        self._service = Service(model, tokenizer, name, manager, settings.max_queue, settings.restarts)
        return build_app(self._service)

    def __init__(self, settings: ReplicaSettings):
        self._settings = settings


def application(settings: ReplicaSettings) -> Application:
    """The server of `hf_cdb.serving` in as many processes as are asked for, for `ray.serve.run` and `serve run`.

    Ray hands a request to the one of two replicas that has fewer. A replica that dies takes the requests along that it
    had begun to answer; Ray hands others on, and starts another replica in its place.

    Raises:
        ValueError: settings of cdb that do not exist, are out of their range or contradict each other.
    """
    CDBConfig.create(settings.cdb)
    deployment = serve.deployment(
        serve.ingress()(_Replica),
        name="hf-cdb",
        num_replicas=settings.replicas,
        max_ongoing_requests=settings.max_queue,
        health_check_period_s=settings.health_check_period,
        ray_actor_options={"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus},
    )
    return deployment.bind(settings)
