"""Real clients get what `generate` gives."""

import concurrent.futures
import json
import shutil
import subprocess

import httpx
import pytest

from .server import NAME

PROMPT = "In the beginning"
TASK = [{"role": "user", "content": "sort:KDBHCA="}]


@pytest.fixture(scope="module")
def generated(reference, tokenizer):
    """The texts and depths that `generate` gives for a prompt."""

    def generate(prompt=PROMPT, tokens=16, seed=None, cdb=(), **kwargs):
        ids = tokenizer(prompt, return_tensors="pt").input_ids if isinstance(prompt, str) else prompt
        settings = {**dict(cdb), **({} if seed is None else {"seeds": [seed]})}
        options = {"do_sample": seed is not None, "return_dict_in_generate": True, **kwargs}
        output = reference.generate(ids, max_new_tokens=tokens, cdb=settings or True, **options)
        texts = tokenizer.batch_decode(output.sequences[:, ids.shape[1] :], skip_special_tokens=True)
        return texts, output.exit_depths

    return generate


def text_of(stream):
    """All text of a stream of one sequence, and why it ended."""
    choices = [chunk.choices[0] for chunk in stream]
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    parts = [choice.text if hasattr(choice, "text") else choice.delta.content for choice in choices]
    return "".join(parts), choices[-1].finish_reason


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"seed": 5, "temperature": 0.8}, {"seed": 5, "temperature": 0.8}),
        ({"seed": 6, "top_p": 0.7}, {"seed": 6, "top_p": 0.7}),
        (
            {
                "extra_body": {
                    "repetition_penalty": 1.3,
                    "min_tokens": 12,
                    "cdb": {"exit_threshold": 0.3, "min_depth": 2, "priority": 3},
                }
            },
            {"repetition_penalty": 1.3, "min_new_tokens": 12, "cdb": {"exit_threshold": 0.3, "min_depth": 2}},
        ),
        (
            {"logit_bias": {"40": 30, "7": -4}, "extra_body": {"cdb": {"exit_rule": "confidence", "max_depth": 3}}},
            {"sequence_bias": {(40,): 30.0, (7,): -4.0}, "cdb": {"exit_rule": "confidence", "max_depth": 3}},
        ),
        (
            {"seed": 1, "extra_body": {"top_k": 5, "min_p": 0.1, "cdb": {"exit_rule": "never"}}},
            {"seed": 1, "top_k": 5, "min_p": 0.1, "cdb": {"exit_rule": "never"}},
        ),
    ],
)
def test_the_text_is_that_of_generate(client, generated, fields, kwargs):
    (wanted,), depths = generated(**kwargs)
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 16, **fields}
    answer = client.completions.create(**asked)
    tokens = int((depths > 0).sum())
    assert answer.choices[0].text == wanted
    assert answer.choices[0].finish_reason == ("length" if tokens == 16 else "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (9, tokens)
    assert answer.usage.mean_depth == pytest.approx(depths.sum().item() / tokens)
    assert text_of(client.completions.create(**asked, stream=True)) == (wanted, answer.choices[0].finish_reason)


def test_a_chat(client, generated, tokenizer):
    ids = tokenizer.apply_chat_template(TASK, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    (wanted,), _ = generated(ids["input_ids"], tokens=20)
    asked = {"model": NAME, "messages": TASK, "max_completion_tokens": 20}
    answer = client.chat.completions.create(**asked)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (wanted, "stop")
    assert wanted == "ABCDHK"
    stream = client.chat.completions.create(**asked, stream=True)
    assert text_of(stream) == (wanted, "stop")
    parts = [{"type": "text", "text": "sort:KDB"}, {"type": "text", "text": "HCA="}]
    asked["messages"] = [{"role": "user", "content": parts}]
    assert client.chat.completions.create(**asked).choices[0].message.content == wanted


def test_stop_strings_end_the_text_before_them(client, generated):
    (whole,), _ = generated(tokens=40)
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 40}
    across = PROMPT[-1] + whole[:2]  # begins in the prompt, so the answer does not hold it
    for stop in ("spake", [" Moses", "\n2 "], "not there", across):
        found = [whole.find(one) for one in ([stop] if isinstance(stop, str) else stop) if one in whole]
        wanted = whole[: min(found)] if found else whole
        answer = client.completions.create(**asked, stop=stop)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (wanted, "stop" if found else "length")
        assert text_of(client.completions.create(**asked, stop=stop, stream=True)) == (
            wanted,
            answer.choices[0].finish_reason,
        )
        assert (answer.usage.completion_tokens < 40) == bool(found)


def test_several_sequences_of_several_prompts(client, generated, tokenizer):
    asked = {"model": NAME, "prompt": [PROMPT, "Blessed are"], "max_tokens": 12, "n": 3, "seed": 4, "temperature": 1}
    wanted = [text for p in asked["prompt"] for text in generated(p, 12, 4, num_return_sequences=3)[0]]
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == wanted
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len(set(wanted)) > 3
    texts = [""] * 6
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == wanted
    asked["prompt"] = tokenizer(asked["prompt"]).input_ids
    assert [choice.text for choice in client.completions.create(**asked).choices] == wanted


def test_a_seed_repeats_and_no_seed_does_not(client):
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 24, "temperature": 1.5}
    same, again = (client.completions.create(**asked, seed=-3).choices[0].text for _ in range(2))
    other, another = (client.completions.create(**asked).choices[0].text for _ in range(2))
    assert same == again
    assert other != another


def test_usage_of_a_stream(client):
    asked = {"model": NAME, "prompt": PROMPT, "max_tokens": 4, "stream": True}
    depths = {"cdb": {"exit_depths": [4, 1, 2, 1]}}
    *_, last = client.completions.create(**asked, stream_options={"include_usage": True}, extra_body=depths)
    assert not last.choices
    assert (last.usage.total_tokens, last.usage.mean_depth) == (13, 2.0)
    assert all(chunk.choices for chunk in client.completions.create(**asked, extra_body=depths))
    options = {"stream_options": {"continuous_usage_stats": True}}
    counts = [chunk.usage.completion_tokens for chunk in client.completions.create(**asked, extra_body=options)]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_without_a_limit_the_text_fills_the_context(client, tokenizer):
    long = tokenizer.decode(list(range(40, 240)) * 5)
    prompt = tokenizer(long).input_ids[:1010]
    answer = client.completions.create(model=NAME, prompt=prompt, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (14, "length")


def test_many_clients_at_once_get_what_each_gets_alone(client, generated):
    prompts = [f"{first} {second}" for first in ("And", "The", "For") for second in ("king", "LORD", "people", "sea")]

    def ask(prompt):
        stream = client.completions.create(model=NAME, prompt=prompt, max_tokens=10, stream=True)
        return text_of(stream)[0]

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == [generated(prompt, 10)[0][0] for prompt in prompts]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(address, generated):
    (wanted,), _ = generated(tokens=6)
    body = {"prompt": PROMPT, "max_tokens": 6}
    command = ["curl", "--silent", "--show-error", f"{address}/v1/completions", "--json"]
    done = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == wanted
    body["stream"] = True
    done = subprocess.run([*command, json.dumps(body)], capture_output=True, text=True, check=True)
    *events, end = [line.removeprefix("data: ") for line in done.stdout.splitlines() if line]
    assert end == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == wanted


def test_the_request_that_guidellm_sends(address):
    """Of guidellm 0.8.1, run as docs/serving.md says, with and without `output_tokens`."""
    body = {
        "model": NAME,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 8,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Finish medical want"}]}],
    }
    for more in ({}, {"ignore_eos": True}):
        answer = httpx.post(f"{address}/v1/chat/completions", json={**body, **more}, timeout=30)
        *_, usage, end = [line for line in answer.text.splitlines() if line]
        assert (answer.status_code, end) == (200, "data: [DONE]")
        assert '"usage": {"prompt_tokens": ' in usage


def test_models(client):
    assert [model.id for model in client.models.list()] == [NAME]
