"""Two replicas behind one endpoint of Ray Serve, one of which dies under load."""

import json
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, wait

import psutil
import pytest

from ..requests import alone
from .server import load_ouro, load_ouro_tokenizer

ray = pytest.importorskip("ray", reason="ray is an extra of its own: pip install 'hf-cdb[ray]'")

from ray import serve  # noqa: E402

from hf_cdb.ray_serving import ReplicaSettings, application  # noqa: E402

PORT = 8123
PROMPTS = [f"In the beginning {number}" for number in range(40)]
PATIENCE = 240  # seconds until a test gives up


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


def asked(endpoint, prompt, **fields):
    body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "temperature": 0, **fields}
    return urllib.request.Request(
        f"{endpoint}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )


def complete(endpoint, prompt, **fields):
    """Status and text, or the error's body."""
    try:
        with urllib.request.urlopen(asked(endpoint, prompt, **fields), timeout=PATIENCE) as answer:
            return answer.status, json.load(answer)["choices"][0]["text"]
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def replicas():
    """Processes of replicas that this one's Ray has started."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            # While one works the name of the method follows.
            if "".join(process.cmdline()).startswith("ray::ServeReplica:hf-cdb:replica"):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def wait_for_replicas():
    start = time.monotonic()
    while len(replicas()) < 2:
        assert time.monotonic() < start + PATIENCE
        time.sleep(0.05)


def test_every_request_is_answered_though_a_replica_dies(endpoint):
    killed, *_ = before = replicas()
    assert len(before) == 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(complete, endpoint, prompt) for prompt in PROMPTS]
        wait([answers[0]], timeout=PATIENCE)
        left = sum(not answer.done() for answer in answers)
        killed.kill()
        start = time.monotonic()
        answers = [answer.result(timeout=PATIENCE) for answer in answers]
    done = time.monotonic() - start
    wait_for_replicas()
    print(f"{left} of {len(PROMPTS)} open at the kill, all answered {done:.1f} s later", end=", ")
    print(f"two processes of replicas again {time.monotonic() - start:.1f} s later")
    assert left > 0
    model, tokenizer = load_ouro(), load_ouro_tokenizer()
    for prompt, (status, text) in zip(PROMPTS, answers, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        [(tokens, _)] = alone(model, ids, {"exit_threshold": 0.3}, max_new_tokens=60, eos_token_id=512)
        assert (status, text) == (200, tokenizer.decode(tokens, skip_special_tokens=True))


def test_a_stream_whose_replica_dies_ends_with_the_cause(endpoint):
    before = replicas()
    with urllib.request.urlopen(asked(endpoint, PROMPTS[0], stream=True, max_tokens=200), timeout=PATIENCE) as events:
        assert json.loads(events.readline().removeprefix(b"data: "))["choices"][0]["text"]
        for process in before:  # one of which has it
            process.kill()
        last = [line for line in events.read().split(b"\n") if line][-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == 503
    assert "the replica that answered has died" in error["message"]
    assert complete(endpoint, PROMPTS[0])[0] == 200  # by those that Ray starts


def test_refusals_pass_through(endpoint):
    assert complete(endpoint, PROMPTS[0], temprature=1)[0] == 422
    status, text = complete(endpoint, "x" * 5 * 2**20)
    assert status == 413
    assert "max_body=4194304" in text
    with urllib.request.urlopen(f"{endpoint}/v1/models", timeout=PATIENCE) as answer:
        assert json.load(answer)["data"][0]["id"] == "tiny-ouro"


def test_settings():
    with pytest.raises(ValueError, match="no_such_setting"):
        application(ReplicaSettings(model="tiny-ouro", cdb={"no_such_setting": 1}))
    with pytest.raises(ValueError, match="replicas"):
        ReplicaSettings(model="tiny-ouro", replicas="0")
