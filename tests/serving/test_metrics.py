"""Figures of `/metrics` after known requests."""

import openai
import pytest

from .server import NAME, figures


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


def test_refusals_are_counted(client, address):
    before = figures(address)["hf_cdb_refused_requests_total"]
    for wrong in ({"model": "other"}, {"max_tokens": -1}):
        with pytest.raises(openai.APIStatusError):
            client.completions.create(**{"model": NAME, "prompt": "a", **wrong})
    assert figures(address)["hf_cdb_refused_requests_total"] == before + 2
