import openai
import pytest

from .server import load_ouro, load_ouro_tokenizer, make_service, serving


@pytest.fixture(scope="package")
def reference():
    """A model for runs without a server: the server's own belongs to its thread."""
    return load_ouro()


@pytest.fixture(scope="package")
def tokenizer():
    return load_ouro_tokenizer()


@pytest.fixture(scope="module")
def service():
    return make_service(load_ouro())


@pytest.fixture(scope="module")
def address(service):
    with serving(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client
