"""What an evaluation may ask for, and what is refused before anything runs."""

import math
import re

import pytest

from hf_cdb.evaluation.config import load_config
from hf_cdb.evaluation.run import evaluate

from .small import small_config, write_config


def test_exit_rules_are_refused_where_they_do_not_act(tmp_path):
    """D-02, the other side."""
    config = small_config(tmp_path)
    config.tasks[1]["systems"] = None
    with pytest.raises(ValueError, match=r"system 'default' cannot run task 'arc': exit_rule='gate' does not act"):
        evaluate(config, tmp_path / "out", progress=False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": "int8"}, "dtype='int8': choose one of float32"),
        ({"tasks": []}, "name at least one task"),
        ({"batch_size": 0}, "batch_size=0: choose at least 1"),
        ({"cdb": {"engine": True}}, "cdb names a system 'engine', which always runs"),
        ({"cdb": {"x": {"exit_treshold": 1}}}, "system 'x': 'exit_treshold' is no setting of cdb"),
        ({"cdb": {"x": False}}, "system 'x': False: give settings of cdb, or true"),
        ({"sweeps": [3]}, "sweeps: 3 is no mapping"),
        ({"sweeps": [{"exit_rule": ["never", "never"]}]}, "the system 'never' comes twice"),
        ({"tolerances": {"tasks/exact_match": -1}}, "tolerances: tasks/exact_match=-1"),
        ({"tolerances": {"tasks/exact_match": math.nan}}, "tolerances: tasks/exact_match=nan: choose a finite"),
        ({"tolerances": {"tasks/exact_match": math.inf}}, "tolerances: tasks/exact_match=inf: choose a finite"),
        *(
            (
                {"tolerances": {key: 0.1}},
                f"{key!r} is no quality of a task. There are tasks/exact_match, tasks/cut_off,",
            )
            for key in (
                "tt/exact_match",
                "tasks/exact_mtach",
                "tasks/token_agreement",
                "tasks/length",
                "psalm/perplexity",
            )
        ),
        ({"max_depth": 9}, "max_depth=9"),
    ],
)
def test_what_cannot_work_is_refused(change, words, tmp_path):
    with pytest.raises(ValueError, match=re.escape(words)):
        evaluate(small_config(tmp_path, **change), tmp_path / "out", progress=False)


def test_task_systems_are_checked(tmp_path):
    for place, change, words in [
        (0, {"systems": ["stock", "gate"]}, "'gate' is none of the systems stock, engine, default, depth 1"),
        (0, {"systems": ["engine"]}, "'stock' is missing"),
        (2, {"signal": ["engine"]}, "'engine' has no exit rule there"),
    ]:
        config = small_config(tmp_path)
        config.tasks[place] |= change
        with pytest.raises(ValueError, match=re.escape(words)):
            evaluate(config, tmp_path / "out", progress=False)


def test_arguments_of_the_file(tmp_path):
    tolerances = {"tasks/exact_match": 0.1, "arc/accuracy": 0.2}
    path = write_config(small_config(tmp_path, tolerances=tolerances), tmp_path / "config.yaml")
    config = load_config(path, ["seed=3"], model="tiny-huginn", tasks=["arc"], limit=2)
    assert (config.seed, config.model, config.limit) == (3, "tiny-huginn", 2)
    assert config.tolerances == {"arc/accuracy": 0.2}
    with pytest.raises(ValueError, match=r"tolerances: 'ar/accuracy' is no quality of a task"):
        load_config(path, ["tolerances={ar/accuracy: 0.2}"], tasks=["arc"])
    assert [spec.name for spec in config.task_specs] == ["arc"]
    with pytest.raises(ValueError, match=r"data: there is no task 'gsm8k'\. Tasks are tasks, arc, psalm"):
        load_config(path, data={"gsm8k": "x.jsonl"})
    with pytest.raises(ValueError, match=r"the key 'sead' is unknown\. Did you mean 'seed'"):
        load_config(path, ["sead=3"])


def test_sweeps_are_products(tmp_path):
    sweep = {"exit_rule": "gate", "exit_threshold": [0.3, 0.5], "kv_policy": ["last_exited", "shared"], "lookahead": 1}
    systems = small_config(tmp_path, cdb={}, sweeps=[sweep]).settings()
    assert list(systems) == [
        "engine",
        "gate 0.3 kv_policy=last_exited lookahead=1",
        "gate 0.3 kv_policy=shared lookahead=1",
        "gate 0.5 kv_policy=last_exited lookahead=1",
        "gate 0.5 kv_policy=shared lookahead=1",
    ]
    assert systems["gate 0.5 kv_policy=shared lookahead=1"] == {
        "exit_rule": "gate",
        "exit_threshold": 0.5,
        "kv_policy": "shared",
        "lookahead": 1,
    }
