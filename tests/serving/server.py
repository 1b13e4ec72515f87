"""A server in a thread of the test's own process, and what tests ask it."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_cdb import tiny_checkpoint
from hf_cdb.serving.server import Server
from hf_cdb.serving.service import Service

NAME = "tiny-ouro"


def load_ouro():
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint("ouro"), dtype="float32").eval()


def load_ouro_tokenizer():
    return AutoTokenizer.from_pretrained(tiny_checkpoint("ouro"))


def make_service(model, cdb=True, **options) -> Service:
    return Service(model, load_ouro_tokenizer(), NAME, model.init_continuous_batching(cdb=cdb), **options)


@contextmanager
def serving(service: Service, grace: int = 60) -> Iterator[str]:
    """The address of a server that runs while this is open."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = Server(service, 4 * 2**20, grace, log_level="warning")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        wait_until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends, "it has not come true"
        time.sleep(0.01)


def figures(address: str) -> dict[str, float]:
    """What `/metrics` says, by name and labels."""
    return figures_in(httpx.get(f"{address}/metrics").text)


def figures_in(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {
        sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }
