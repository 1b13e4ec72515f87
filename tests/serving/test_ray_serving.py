"""Two replicas behind one endpoint of Ray Serve, one of which dies under load."""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from ..requests import alone
from .server import load_ouro, load_ouro_tokenizer

ray = pytest.importorskip("ray", reason="ray is an extra of its own: pip install 'hf-cdb[ray]'")

from ray import serve  # noqa: E402

from hf_cdb.ray_serving import ReplicaSettings, application  # noqa: E402

PORT = 8123
PROMPTS = [f"In the beginning {number}" for number in range(40)]
PATIENCE = 120  # seconds until a test gives up


@pytest.fixture(scope="module")
def endpoint():
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        settings = ReplicaSettings(model="tiny-ouro", replicas=2, num_cpus=0.5, cdb='{"exit_threshold": 0.3}')
        serve.run(application(settings), name="hf-cdb")
        yield f"http://127.0.0.1:{PORT}"
    finally:
        serve.shutdown()
        ray.shutdown()


def complete(endpoint, prompt):
    """Status and text, or the error's body."""
    body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    request = urllib.request.Request(
        f"{endpoint}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def replicas():
    """Processes of replicas that this one's Ray has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[:1] == ["ray::ServeReplica:hf-cdb:replica"]:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def test_every_request_is_answered_though_a_replica_dies(endpoint):
    model, tokenizer = load_ouro(), load_ouro_tokenizer()
    killed, *_ = before = replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(complete, endpoint, prompt) for prompt in PROMPTS]
        until = time.monotonic() + PATIENCE
        while not any(answer.done() for answer in answers) and time.monotonic() < until:
            time.sleep(0.005)
        assert not all(answer.done() for answer in answers)
        killed.kill()
        answers = [answer.result(timeout=PATIENCE) for answer in answers]
    failed = [text for status, text in answers if status != 200]
    print(f"{len(failed)} of {len(answers)} failed, such as with {failed[:1]}")
    assert len(failed) < len(answers)
    assert all(failed)
    for prompt, (status, text) in zip(PROMPTS, answers, strict=True):
        if status == 200:
            ids = tokenizer(prompt)["input_ids"]
            [(tokens, _)] = alone(model, ids, {"exit_threshold": 0.3}, max_new_tokens=100, eos_token_id=512)
            assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    start = time.monotonic()
    while len(replicas()) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    print(f"two replicas again after {time.monotonic() - start:.1f} s")
    assert len(replicas()) == 2
    assert complete(endpoint, PROMPTS[0])[0] == 200
