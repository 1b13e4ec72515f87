"""`hf-cdb serve MODEL`: an OpenAI-compatible server."""

import argparse
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..bench.models import DTYPES
from ..cdb_arguments import add_cdb_arguments, cdb_settings
from ..checkpoints import EMBEDDED, model_path
from ..generation import enable_cdb

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help=f"{', '.join(EMBEDDED)}, a folder or a Hub id")
    parser.add_argument("--name", help="what clients call the model (default: MODEL)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda (default %(default)s)")
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of the weights (default: float32 on the CPU, else the checkpoint's)"
    )
    parser.add_argument("--threads", type=int, help="torch threads (default torch's)")
    add_cdb_arguments(parser)
    parser.add_argument(
        "--max-queue", type=int, default=1024, help="sequences at most; more are refused (default %(default)s)"
    )
    parser.add_argument(
        "--max-body", type=int, default=4 * 2**20, help="bytes of a request at most (default %(default)s)"
    )
    parser.add_argument(
        "--restarts", type=int, default=3, help="times to go on after the model has failed (default %(default)s)"
    )
    parser.add_argument(
        "--grace", type=int, default=30, help="seconds to finish what runs when told to end (default %(default)s)"
    )
    parser.add_argument(
        "--log-level", default="info", choices=("critical", "error", "warning", "info", "debug"), help="of the server"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Load the model and serve until SIGTERM or SIGINT.

    Raises:
        ValueError: arguments out of their range, or packages that are not there.
        OSError: no such model.
    """
    settings = _check(arguments)
    try:
        import uvicorn  # noqa: F401 (named where it is missing)

        from .server import Server
        from .service import Service
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed. Install it by `pip install 'hf-cdb[serve]'`.") from error
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    folder = model_path(arguments.model)
    dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "auto")
    model = enable_cdb(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(arguments.device).eval())
    manager = model.init_continuous_batching(cdb=settings or True)
    service = Service(
        model,
        AutoTokenizer.from_pretrained(folder),
        arguments.name or arguments.model,
        manager,
        arguments.max_queue,
        arguments.restarts,
    )
    place = {"host": arguments.host, "port": arguments.port}
    Server(service, arguments.max_body, arguments.grace, log_level=arguments.log_level, **place).run()


def _check(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of cdb that are asked for; what can be refused before a model is loaded is."""
    least = {"port": 0, "max_queue": 1, "max_body": 1, "restarts": 0, "grace": 0, "threads": 1}
    for name, lowest in least.items():
        value = getattr(arguments, name)
        if value is not None and value < lowest:
            raise ValueError(f"{name}={value}: choose at least {lowest}.")
    return cdb_settings(arguments)
