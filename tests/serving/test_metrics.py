"""Figures of `/metrics` after known requests."""

import time

import httpx
import openai
import pytest
from transformers import AutoModelForCausalLM

from hf_cdb import CDBManager, tiny_checkpoint
from hf_cdb.serving.metrics import Metrics

from .server import NAME, figures, figures_in, wait_until


def test_figures_after_known_requests(client, address):
    def ask(depths, **more):
        extra = {"ignore_eos": True, "cdb": {"exit_depths": depths}}
        return client.completions.create(model=NAME, prompt="In the", max_tokens=len(depths), extra_body=extra, **more)

    assert figures(address)["hf_cdb_exit_depth_count"] == 0
    prompt = ask([4, 1, 1, 2]).usage.prompt_tokens
    ask([4])
    *_, last = ask([4, 3], stream=True)
    assert last.choices[0].finish_reason == "length"
    found = figures(address)
    buckets = {"1.0": 2, "2.0": 3, "3.0": 4, "4.0": 7, "+Inf": 7}
    assert {le: found[f"hf_cdb_exit_depth_bucket[{le}]"] for le in buckets} == buckets
    assert (found["hf_cdb_exit_depth_count"], found["hf_cdb_exit_depth_sum"]) == (7, 19)
    assert found["hf_cdb_sequences_total[finished]"] == 3
    assert found["hf_cdb_sequences_total[failed]"] == found["hf_cdb_sequences_total[cancelled]"] == 0
    assert found["hf_cdb_prompt_tokens_total"] == 3 * prompt
    for name in ("queue", "time_to_first_token", "request"):
        assert found[f"hf_cdb_{name}_seconds_count"] == 3
    assert found["hf_cdb_time_per_output_token_seconds_count"] == 2  # one had a single token
    assert found["hf_cdb_queue_seconds_sum"] <= found["hf_cdb_time_to_first_token_seconds_sum"]
    assert found["hf_cdb_time_to_first_token_seconds_sum"] <= found["hf_cdb_request_seconds_sum"]
    assert found["hf_cdb_waiting_sequences"] == found["hf_cdb_running_sequences"] == found["hf_cdb_kv_bytes"] == 0
    assert found["hf_cdb_kv_reserved_bytes"] > 0
    # One row of 64 in every launch of the loop.
    assert found["hf_cdb_occupancy"] == pytest.approx(1 / 64)
    assert found["hf_cdb_mean_depth"] == pytest.approx(19 / 7)
    assert 1 < found["hf_cdb_flop_bound"] < 4
    assert 0 < found["hf_cdb_realised_share"] <= 1
    assert found["hf_cdb_refused_requests_total"] == 0
    for name in ("preemptions", "recomputed_positions", "reused_positions"):
        assert found[f"hf_cdb_{name}_total"] == 0


def test_what_is_short_and_what_is_shared_is_counted():
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("ouro"))
    prompt = [1 + index % 60 for index in range(100)]
    with CDBManager(model, cdb={"exit_rule": "never"}) as manager:
        for last in (61, 62, 63):
            name = manager.add_request([*prompt, last], max_new_tokens=2)
            while not manager.get_result(name, timeout=20).is_finished():
                pass
        found = figures_in(Metrics(manager).text().decode())
        # The first one's prompt is remembered by its ids, the second one's is kept.
        assert found["hf_cdb_reused_positions_total"] == 100
        manager.stats.pressure.update(preemptions=2, recomputed_positions=7)
        found = figures_in(Metrics(manager).text().decode())
    assert (found["hf_cdb_preemptions_total"], found["hf_cdb_recomputed_positions_total"]) == (2, 7)


def test_refusals_are_counted(client, address):
    before = figures(address)["hf_cdb_refused_requests_total"]
    for wrong in ({"model": "other"}, {"max_tokens": -1}):
        with pytest.raises(openai.APIStatusError):
            client.completions.create(**{"model": NAME, "prompt": "a", **wrong})
    assert figures(address)["hf_cdb_refused_requests_total"] == before + 2


def test_every_refusal_is_counted(address):
    def refused():
        return figures(address)["hf_cdb_refused_requests_total"]

    before = refused()
    path = f"{address}/v1/completions"
    answers = [
        httpx.post(path, content=b'"' + b"a" * 5 * 2**20 + b'"', headers={"content-type": "application/json"}),
        httpx.post(f"{address}/v1/embeddings", json={}),
        httpx.get(path),
        httpx.post(path, json={"prompt": "a", "cdb": {"max_depth": 99}}),
        httpx.post(path, json={"prompt": [[5], [5] * 1024]}),
        httpx.post(path, content=b"{"),
    ]
    assert [answer.status_code for answer in answers] == [413, 404, 405, 400, 400, 422]
    assert refused() == before + len(answers)


def test_what_ends_with_a_sibling_that_failed_has_failed(service, address, monkeypatch):
    """Two prompts of one request: the second raises while the first goes on."""
    make = service.manager.make_job

    def raises(ids, scores):
        raise KeyError("own")

    def make_job(prompt, *args, **kwargs):
        return make(prompt, *args, **kwargs, **({"logits_processor": [raises]} if prompt == [6] else {}))

    monkeypatch.setattr(service.manager, "make_job", make_job)
    before = figures(address)
    body = {"prompt": [[5], [6]], "max_tokens": 900, "ignore_eos": True, "n": 2, "temperature": 1}
    answer = httpx.post(f"{address}/v1/completions", json=body)
    assert (answer.status_code, "KeyError" in answer.text) == (500, True)
    wait_until(lambda: len(service.manager) == 0)
    after = figures(address)
    counted = {name: after[name] - before[name] for name in before if name.startswith("hf_cdb_sequences_total")}
    assert counted == {
        "hf_cdb_sequences_total[finished]": 0,
        "hf_cdb_sequences_total[failed]": 4,
        "hf_cdb_sequences_total[cancelled]": 0,
    }
    assert after["hf_cdb_refused_requests_total"] == before["hf_cdb_refused_requests_total"]


def test_times_and_deadlines_begin_with_the_arrival(service, address, monkeypatch):
    """Not when there is a thread to prepare the request in."""
    prompts = service.prompts
    monkeypatch.setattr(service, "prompts", lambda body: (time.sleep(0.3), prompts(body))[1])
    before = figures(address)
    ask = {"prompt": "a", "max_tokens": 1}
    assert httpx.post(f"{address}/v1/completions", json=ask).status_code == 200
    after = figures(address)
    for name in ("queue", "time_to_first_token", "request"):
        assert after[f"hf_cdb_{name}_seconds_sum"] - before[f"hf_cdb_{name}_seconds_sum"] >= 0.3
    late = httpx.post(f"{address}/v1/completions", json={**ask, "cdb": {"deadline": 0.2}})
    assert (late.status_code, "deadline=0.2" in late.text) == (504, True)
