"""Requests that draw in the same way are drawn together, and each still draws what it draws alone."""

import pytest
import torch

from hf_cdb.manager import CDBManager
from hf_cdb.sampling import Sampler

from .requests import GATE, alone, assert_clean, last, told
from .test_manager import PROMPTS, shared_model

WARM = {"do_sample": True, "temperature": 1.7, "top_k": 20}
# Options of several requests, and how many calls of a sampler their first tokens take.
MIXES = [
    ([WARM] * 5, 1),
    ([{}] * 4, 1),
    ([{"do_sample": True}] * 3 + [{}] * 3, 2),
    ([WARM, {**WARM, "top_k": 19}, WARM, {**WARM, "min_p": 0.1}], 3),
    ([{**WARM, "top_p": 0.8}] * 2 + [{**WARM, "repetition_penalty": 1.3}] * 2, 3),  # the last look at histories
    ([{"suppress_tokens": [20]}] * 2, 2),  # holds a tensor
]


@pytest.fixture
def calls(monkeypatch):
    """Rows of every call of a sampler."""
    seen, choose = [], Sampler.choose

    def counted(sampler, rows, logits):
        seen.append(len(rows))
        return choose(sampler, rows, logits)

    monkeypatch.setattr(Sampler, "choose", counted)
    return seen


@pytest.mark.parametrize(("options", "groups"), MIXES)
def test_alike_requests_take_one_call_and_give_what_they_give_alone(calls, options, groups):
    settings = {**GATE, "exit_rule": "never", "exit_threshold": None}
    with CDBManager(shared_model(), cdb=settings) as manager:
        with manager.pause():  # so that all have their tokens in the same launches
            seeds = [{"seed": 7 * index} if own.get("do_sample") else {} for index, own in enumerate(options)]
            names = [
                manager.add_request(PROMPTS[index % 6], **own, **seed, **({"num_return_sequences": 2} if seed else {}))
                for index, (own, seed) in enumerate(zip(options, seeds, strict=True))
            ]
        found = [told(last(manager, name)) for name in names]
        children = [
            told(last(manager, f"{name}__child#0")) if seed else None for name, seed in zip(names, seeds, strict=True)
        ]
    assert_clean(manager)
    rows = sum(1 + bool(seed) for seed in seeds)
    assert len(calls) == 8 * groups
    assert sum(calls) == 8 * rows
    for index, (own, seed) in enumerate(zip(options, seeds, strict=True)):
        drawn = {**settings, **({"seeds": [seed["seed"]]} if seed else {})}
        copies = {"num_return_sequences": 2} if seed else {}
        wanted = alone(shared_model(), PROMPTS[index % 6], drawn, **own, **copies)
        assert [found[index], *([children[index]] if seed else [])] == wanted


def test_of_requests_that_are_drawn_together_one_fails_alone(calls):
    """Divided by so little, scores of the one are infinite; another's temperature would be another group."""
    with CDBManager(shared_model(), cdb=GATE) as manager:
        with manager.pause():
            tiny = {"do_sample": True, "temperature": 1e-300}
            names = [manager.add_request(PROMPTS[index], seed=index, **tiny) for index in range(2)]
            other = manager.add_request(PROMPTS[2], seed=5, **WARM)
        assert ["cannot be drawn" in last(manager, name).error for name in names] == [True, True]
        assert told(last(manager, other)) == alone(shared_model(), PROMPTS[2], {**GATE, "seeds": [5]}, **WARM)[0]


@pytest.mark.parametrize(
    "wrong", [lambda scores: scores > 0, lambda scores: scores.to(torch.complex64), lambda scores: scores.to("meta")]
)
@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_of_another_kind_fail_their_request_alone(wrong, do_sample):
    """Together with others' they would be an error of the model."""
    with CDBManager(shared_model(), cdb=GATE) as manager:
        with manager.pause():
            name = manager.add_request(
                PROMPTS[0], do_sample=do_sample, logits_processor=[lambda ids, scores: wrong(scores)]
            )
            other = manager.add_request(PROMPTS[1])
        assert "A logits processor returns scores of the kind it is given" in last(manager, name).error
        assert told(last(manager, other)) == alone(shared_model(), PROMPTS[1])[0]
