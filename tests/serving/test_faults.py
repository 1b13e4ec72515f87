"""What clients do wrong, and what goes wrong in the model, is told to whom it concerns and to no other."""

import asyncio
import gzip
import json
import re
import socket
import threading
import time

import httpx
import openai
import pytest

from hf_cdb.serving.bodies import CompletionBody
from hf_cdb.serving.generation import RefusedError

from .server import NAME, figures, load_ouro, make_service, serving, wait_until

ENDLESS = {"model": NAME, "prompt": "In the beginning", "max_tokens": 900, "ignore_eos": True}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "add:1+1="}]

GARBAGE = [
    (TEXT, b"{", 422, "no JSON: Expecting property name .* at character 1"),
    (TEXT, b"", 422, "body"),
    (TEXT, b"[1]", 422, "dictionary"),
    (TEXT, b"\xff\xfe", 422, "JSON"),
    (TEXT, b'{"prompt": "\xe4"}', 422, "no JSON .*: 'utf-8' codec can't decode byte 0xe4"),
    (TEXT, gzip.compress(b'{"prompt": "a"}'), 422, "no JSON .*: 'utf-8' codec can't decode byte 0x8b"),
    (TEXT, {}, 422, "prompt: Field required"),
    (TEXT, {"prompt": ""}, 422, "prompt"),
    (TEXT, {"prompt": []}, 422, "prompt"),
    (TEXT, {"prompt": [[]]}, 422, "prompt"),
    (TEXT, {"prompt": [-1]}, 422, "prompt"),
    (TEXT, {"prompt": [True]}, 422, "prompt"),
    (TEXT, {"prompt": [5, 512]}, 400, "512"),
    (TEXT, {"prompt": [10**30]}, 422, "prompt"),
    (TEXT, {"prompt": "a", "temprature": 1}, 422, "temprature"),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 422, "max_tokens: .* greater than 0"),
    (TEXT, {"prompt": "a", "max_tokens": "many"}, 422, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1025}, 400, "max_tokens=1025"),
    (TEXT, {"prompt": [5] * 1024}, 400, "1024 tokens"),
    (TEXT, {"prompt": "a", "temperature": -1}, 422, "temperature"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 422, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 422, "top_p"),
    (TEXT, {"prompt": "a", "n": 0}, 422, "n: "),
    (TEXT, {"prompt": "a", "n": 2}, 400, "num_return_sequences"),
    (TEXT, {"prompt": "a", "seed": 2**63}, 422, "seed"),
    (TEXT, {"prompt": "a", "stop": ""}, 422, "stop"),
    (TEXT, {"prompt": "a", "logprobs": 1}, 422, "logprobs"),
    (TEXT, {"prompt": "a", "echo": True}, 422, "echo"),
    (TEXT, {"prompt": "a", "presence_penalty": 0.5}, 422, "presence_penalty"),
    (TEXT, {"prompt": "a", "logit_bias": {"512": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "model": "other"}, 404, "'other' is not served"),
    (TEXT, {"prompt": "a", "cdb": {"depth": 1}}, 422, "cdb.depth"),
    (TEXT, {"prompt": "a", "cdb": {"max_depth": 5}}, 400, "max_depth=5"),
    (TEXT, {"prompt": "a", "cdb": {"min_depth": 0}}, 422, "cdb.min_depth"),
    (TEXT, {"prompt": "a", "cdb": {"min_depth": 3, "max_depth": 2}}, 400, "min_depth=3"),
    (TEXT, {"prompt": "a", "cdb": {"exit_rule": "gates"}}, 400, "gates"),
    (TEXT, {"prompt": "a", "cdb": {"exit_depths": [4, 1]}, "max_tokens": 3}, 400, "exit_depths"),
    (TEXT, {"prompt": "a", "cdb": {"deadline": 0}}, 422, "cdb.deadline"),
    (TEXT, {"prompt": "a", "cdb": {"priority": "high"}}, 422, "cdb.priority"),
    (CHAT, {"messages": []}, 422, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, 422, "content"),
    (CHAT, {"messages": [{"role": "emperor", "content": "a"}]}, 400, "emperor"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "content"),
    (CHAT, {"messages": USER, "tools": []}, 422, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, 422, "response_format"),
    (TEXT, {"prompt": "a", "temperature": 1e9}, 422, "temperature"),
    (TEXT, {"prompt": "a", "stop": ["a"] * 17}, 422, "stop"),
    (TEXT, {"prompt": "a", "logit_bias": {"5": 1e300}}, 422, "logit_bias"),
    (TEXT, {"prompt": "a", "temprature": None}, 422, "temprature"),
    (TEXT, {"prompt": "a" * 10**5}, 400, "tokens"),
    (TEXT, {"prompt": "\ud800 abc"}, 422, "prompt"),
    (TEXT, {"prompt": "a", "\ud800": 1}, 422, "ud800"),
    (CHAT, {"messages": [{"role": "x\ud800y", "content": "a"}]}, 400, "ud800"),
    (TEXT, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "top_k": 10**30}, 422, "top_k"),
    (TEXT, {"prompt": "a", "min_tokens": True}, 422, "min_tokens"),
    (TEXT, {"prompt": "a", "min_tokens": 10**400}, 422, "min_tokens"),
    (TEXT, b'{"prompt": "a", "repetition_penalty": Infinity}', 422, "repetition_penalty"),
    (TEXT, b'{"prompt": "a", "logit_bias": {"5": NaN}}', 422, "logit_bias"),
    (TEXT, b'{"prompt": "a", "cdb": {"deadline": 1e400}}', 422, "cdb.deadline"),
    (TEXT, b'{"prompt": "a", "cdb": {"priority": 1' + b"0" * 5000 + b"}}", 422, "4300 digits"),
    (TEXT, {"prompt": "a", "cdb": {"priority": True}}, 422, "cdb.priority"),
    (TEXT, {"prompt": "a", "cdb": {"max_depth": 10**400}}, 422, "cdb.max_depth"),
    (TEXT, {"prompt": "a", "cdb": {"exit_threshold": True}}, 422, "cdb.exit_threshold"),
    (TEXT, {"prompt": "a", "cdb": {"exit_depths": [4, 10**30]}, "max_tokens": 2}, 422, "exit_depths"),
    (TEXT, b'{"prompt": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", 422, "no JSON .*: maximum recursion"),
    (TEXT, {"prompt": "a", "stop": 5}, 422, "stop"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": 1}}, 422, "include_usage"),
    ("/v1/embeddings", {"input": "a"}, 404, "Not Found"),
]  # fmt: skip


def test_garbage_is_refused_and_disturbs_nobody(service, address, client):
    asked = {"model": NAME, "prompt": "In the beginning", "max_tokens": 80, "extra_body": {"ignore_eos": True}}
    alone = client.completions.create(**asked).choices[0].text
    stream, parts = client.completions.create(**asked, stream=True), []
    listening = threading.Thread(target=lambda: parts.extend(chunk.choices[0].text for chunk in stream))
    listening.start()
    with httpx.Client(base_url=address) as http:
        for path, body, status, reason in GARBAGE:
            content = body if type(body) is bytes else json.dumps(body).encode()  # escapes halves of characters
            answer = http.post(path, content=content, headers={"content-type": "application/json"})
            assert answer.status_code == status, (body, answer.text)
            assert re.search(reason, answer.json()["error"]["message"]), (body, answer.text)
    listening.join()
    assert "".join(parts) == alone
    wait_until(lambda: len(service.manager) == 0)


def test_a_sequence_that_fails_by_itself(client):
    """Divided by so little, scores are infinite, and no token can be drawn."""
    with pytest.raises(openai.BadRequestError, match="cannot be drawn"):
        client.completions.create(model=NAME, prompt="a", max_tokens=3, temperature=1e-300)
    assert client.completions.create(model=NAME, prompt="a", max_tokens=3).choices[0].text


def test_nulls_are_what_is_left_out(address):
    fields = ("n", "stop", "stream", "stream_options", "seed", "logprobs", "cdb", "model", "ignore_eos")
    asked = {"prompt": "a", "max_tokens": 3}
    answers = [httpx.post(address + TEXT, json={**asked, **more}).json() for more in ({}, dict.fromkeys(fields))]
    assert answers[0]["choices"] == answers[1]["choices"]


def test_openai_names_the_errors(client):
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.UnprocessableEntityError, match="max_tokens"):
        client.completions.create(model=NAME, prompt="a", max_tokens=-1)


@pytest.mark.parametrize("chunked", [False, True], ids=["length-given", "chunked"])
def test_a_huge_body_is_refused(address, chunked):
    body = b'{"prompt": "' + b"a" * 5 * 2**20 + b'"}'
    content = iter([body[: 2**20]] * 5) if chunked else body
    answer = httpx.post(address + TEXT, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert "max_body" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_its_request(service, address, stream):
    before = figures(address)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2]))) as raw:
        body = httpx.Request("POST", address + TEXT, json={**ENDLESS, "stream": stream}).content
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        raw.sendall(f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: service.manager.running == 1)
        if stream:
            raw.recv(100)
    wait_until(lambda: len(service.manager) == 0)
    after = figures(address)
    assert after["hf_cdb_sequences_total[cancelled]"] == before["hf_cdb_sequences_total[cancelled]"] + 1
    assert after["hf_cdb_sequences_total[finished]"] == before["hf_cdb_sequences_total[finished]"]
    assert after["hf_cdb_kv_bytes"] == 0


def test_a_slow_reader_delays_nobody(service, address, client):
    with httpx.stream("POST", address + TEXT, json={**ENDLESS, "max_tokens": 60, "stream": True}) as slow:
        wait_until(lambda: len(service.manager) == 0)  # its request is through before anything is read
        client.completions.create(model=NAME, prompt="a", max_tokens=3)
        assert slow.read().endswith(b"data: [DONE]\n\n")


def test_a_deadline(client):
    asked = {**ENDLESS, "cdb": {"deadline": 0.2}}
    with pytest.raises(openai.APIStatusError, match=r"deadline=0\.2") as error:
        client.post("/completions", body=asked, cast_to=object)
    assert error.value.status_code == 504
    assert error.value.response.headers["x-should-retry"] == "false"


def test_a_full_queue_refuses():
    with serving(make_service(load_ouro(), max_queue=2)) as address, httpx.Client(base_url=address) as http:
        several = {**ENDLESS, "n": 3, "temperature": 1}
        assert http.post(TEXT, json=several).status_code == 429
        with http.stream("POST", TEXT, json={**several, "n": 2, "stream": True}):
            refused = http.post(TEXT, json={"prompt": "a"})
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        wait_until(lambda: http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200)


def test_a_model_that_fails_and_the_restart():
    model = load_ouro()
    with serving(make_service(model, restarts=1)) as address, httpx.Client(base_url=address, timeout=30) as http:
        small = {"prompt": "a", "max_tokens": 2}
        wanted = http.post(TEXT, json=small).json()["choices"]
        for after in ("next request", "Restart the server"):
            with http.stream("POST", TEXT, json={**ENDLESS, "stream": True}) as stream:
                lines = stream.iter_lines()
                assert "choices" in next(lines)
                hook = model.model.register_forward_pre_hook(_fail)
                hooks = [layer.register_forward_pre_hook(_fail) for layer in model.model.layers]
                assert "out of memory" in [line for line in lines if line][-1]
            for one in (hook, *hooks):
                one.remove()
            health = http.get("/health")
            assert health.status_code == 503
            assert after in health.json()["reason"]
            again = http.post(TEXT, json=small)
            if after == "next request":
                assert again.json()["choices"] == wanted
                assert http.get("/health").status_code == 200
                assert figures(address)["hf_cdb_restarts_total"] == 1
            else:
                assert (again.status_code, "out of memory" in again.text) == (503, True)


def test_who_reads_late_is_told_that_the_model_failed():
    """Though another request has started it again by then."""
    service = make_service(load_ouro())
    layer = service.manager.model.model.layers[0]

    async def serve():
        late = await service.generate(CompletionBody(**ENDLESS, stream=True), time.perf_counter())
        outputs = late.new_outputs()
        await anext(outputs)
        hook = layer.register_forward_pre_hook(_fail)
        while service.fatal_error is None or service.manager.is_running():
            await asyncio.sleep(0.01)
        hook.remove()
        other = await service.generate(CompletionBody(prompt="a", max_tokens=2), time.perf_counter())
        assert [output.error async for _, output in other.new_outputs()] == [None]
        with pytest.raises(RefusedError, match=r"the model has failed: .*out of memory") as caught:
            [output async for output in outputs]
        late.close()
        other.close()
        return caught.value.status

    service.start()
    try:
        assert asyncio.run(serve()) == 503
    finally:
        service.stop()


def _fail(*_):
    raise RuntimeError("out of memory")


def test_answers_under_way_are_finished_at_the_end():
    service, parts = make_service(load_ouro()), []
    with serving(service) as address:
        stream = httpx.Client(timeout=30).stream(
            "POST", address + TEXT, json={**ENDLESS, "max_tokens": 60, "stream": True}
        )
        answer = stream.__enter__()
        thread = threading.Thread(target=lambda: parts.append(answer.read()))
        thread.start()
        time.sleep(0.05)
    thread.join()
    assert parts[0].endswith(b"data: [DONE]\n\n")
    assert not service.manager.is_running()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health")


def test_answers_that_take_longer_than_the_grace_are_told_so():
    service, ends = make_service(load_ouro()), {}

    def read(address, stream):
        body = {**ENDLESS, "stream": stream}
        with httpx.stream("POST", address + TEXT, json=body, timeout=30) as answer:
            last = [line for line in answer.iter_lines() if line][-1]
            ends[stream] = answer.status_code, json.loads(last.removeprefix("data: "))["error"]["code"]

    with serving(service, grace=0) as address:
        threads = [threading.Thread(target=read, args=(address, stream)) for stream in (True, False)]
        for thread in threads:
            thread.start()
        wait_until(lambda: service.manager.running == 2)
    for thread in threads:
        thread.join()
    assert ends == {True: (200, 503), False: (503, 503)}
    assert (service.manager.is_running(), len(service.manager), service.manager.kv_bytes) == (False, 0, 0)
