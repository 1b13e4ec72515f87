"""Requests with exit rules, depths and sampling of their own in the same launches: each gives what it gives alone."""

import random

import pytest

from hf_cdb.adapters import adapter_for
from hf_cdb.manager import CDBManager

from .requests import alone, assert_clean, last, told
from .test_engine import THRESHOLDS
from .test_random_options import MAKE, SETTINGS, model_of
from .tiny import prompts

COMBINATIONS = 24
BLOCK = 6  # per test


def combination(seed):
    """Family, settings of the manager, and for every request its prompt, its own settings, and options."""
    choose = random.Random(seed)
    family = choose.choice(list(MAKE))
    settings = {name: choose.choice(values) for name, values in SETTINGS.items() if name != "min_depth"}
    rules = [rule for rule, thresholds in THRESHOLDS.items() if family in thresholds]
    settings |= threshold_of(choose.choice(rules), family)
    full = adapter_for(model_of(family)).full_depth
    requests = []
    for prompt in prompts(*(choose.randint(1, 9) for _ in range(choose.randint(3, 6))), seed=seed):
        own, options = {}, {"max_new_tokens": choose.randint(1, 6)}
        if choose.random() < 0.7:
            own |= threshold_of(choose.choice([*rules, "never"]), family)
        if choose.random() < 0.3 and full > 1 and family != "dory":
            own["max_depth"] = choose.randint(2, full)
        if choose.random() < 0.3:
            own["min_depth"] = 2
        if choose.random() < 0.15:
            depths = own.get("max_depth", full)
            least = max(2 if settings["lookahead"] else 1, own.get("min_depth", 1))
            own["exit_depths"] = [depths] + [choose.randint(least, depths) for _ in range(6)]
            own.pop("exit_rule", None), own.pop("exit_threshold", None)
        if choose.random() < 0.5:
            options |= {"do_sample": True, "temperature": choose.choice([0.7, 2.0])}
        if choose.random() < 0.2:
            options["repetition_penalty"] = 2.0
        requests.append((prompt.tolist(), own, options, choose.randrange(2**40)))
    return family, settings, requests


def threshold_of(rule, family):
    return {"exit_rule": rule} | ({} if rule == "never" else {"exit_threshold": THRESHOLDS[rule][family]})


def run_alone(family, settings, prompt, own, options, seed):
    own = dict(own)
    if "exit_depths" in own:
        own |= {"exit_rule": "replay", "exit_threshold": None, "exit_depths": [own["exit_depths"]]}
    if own.get("exit_rule", settings["exit_rule"]) != settings["exit_rule"]:
        own.setdefault("exit_threshold", None)
    seeds = {"seeds": [seed]} if options.get("do_sample") else {}
    return alone(model_of(family), prompt, {**settings, **own, **seeds, "max_num_seqs": 1}, **options)[0]


def check(seed):
    """Run combination `seed` together and each request alone; what differs, in words."""
    family, settings, requests = combination(seed)
    with CDBManager(model_of(family), cdb=settings) as manager:
        with manager.pause():  # so that they share launches
            names = [
                manager.add_request(prompt, seed=own_seed if options.get("do_sample") else None, **own, **options)
                for prompt, own, options, own_seed in requests
            ]
        outputs = [told(last(manager, name)) for name in names]
    assert_clean(manager)
    for output, request in zip(outputs, requests, strict=True):
        wanted = run_alone(family, settings, *request)
        if output != wanted:
            yield f"seed {seed}: {family}, {settings}, {request}: {output} against {wanted}"


@pytest.mark.parametrize("first", range(0, COMBINATIONS, BLOCK))
def test_requests_with_different_rules_equal_their_runs_alone(first):
    found = [difference for seed in range(first, first + BLOCK) for difference in check(seed)]
    assert not found, "\n".join(found)


def test_the_combinations_mix_rules():
    together = [{str(own.get("exit_rule")) for _, own, _, _ in combination(seed)[2]} for seed in range(COMBINATIONS)]
    assert sum(len(rules) > 1 for rules in together) > COMBINATIONS // 2
    assert set().union(*together) >= {*THRESHOLDS, "never", "None"}
