import json

import pytest

from hf_cdb.bench import systems
from hf_cdb.bench.comparison import compare, prefill_adjusted_bound
from hf_cdb.bench.models import load_model
from hf_cdb.bench.systems import Run, differ_in_depth_alone
from hf_cdb.bench.workloads import Workload
from hf_cdb.cli import main
from hf_cdb.stats import CDBStats

from .test_launches import trace


def test_the_prefill_adjusted_bound():
    # Every token decoded, no prefill: the FLOP bound itself.
    assert prefill_adjusted_bound(1.6, 0.0, 0.0) == pytest.approx(1.6)
    # By hand: w = (1 / 1.6 - 0.1) / 0.9 = 0.58333, bound = 1 / (0.25 + 0.75 * 0.58333) = 1.45455.
    assert prefill_adjusted_bound(1.6, 0.25, 0.1) == pytest.approx(16 / 11)
    # Nothing can be gained where all is prefill.
    assert prefill_adjusted_bound(1.6, 1.0, 0.1) == 1


def engine_run(seconds, depth, launches, width=1, full_depth=2):
    traced = trace(*launches, in_flight=width)
    stats = CDBStats(full_depth=full_depth, max_num_seqs=width, once=100, per_loop=100, trace=traced)
    stats.depths.update([2, depth])
    return Run(seconds, [[5, 6]], [[2, depth]], stats)


def test_shares_by_hand():
    """One request of two tokens: its prompt takes 10 s in both runs, a loop of a decoded token 3 s."""
    prompt = [("prelude", (0,), 1.0), ("loop", (0,), 4.0), ("loop", (0,), 4.0), ("coda", (0,), 1.0)]
    full = engine_run(18.0, 2, [*prompt, ("prelude", (0,), 1.0), *[("loop", (0,), 3.0)] * 2, ("coda", (0,), 1.0)])
    shallow = engine_run(15.0, 1, [*prompt, ("prelude", (0,), 1.0), ("loop", (0,), 3.0), ("coda", (0,), 1.0)])
    runs = {"full": [full], "refill": [shallow], "stock": [Run(20.0, [[5, 6]])]}
    row = compare("refill", runs, Workload([[1]], [2], [[2, 1]]))
    assert row["tokens_per_second"] == pytest.approx(2 / 15)
    assert row["speedup"].values == (18 / 15,)
    assert row["speedup_over_stock"].values == (20 / 15,)
    # A decoded token: 8 s at full depth, 5 s at depth 1. Its FLOP bound: (100 + 200) / (100 + 100).
    assert row["decode_speedup"].median == pytest.approx(8 / 5)
    assert row["decode_flop_bound"].median == pytest.approx(1.5)
    assert row["decode_share"].median == pytest.approx(1.6 / 1.5)
    # Prefill is 10 of 18 s; over both tokens the FLOP bound is 300 / 250, so w = (250 / 300 - 1 / 2) / (1 / 2) = 2 / 3.
    assert row["prefill_share"].median == pytest.approx(10 / 18)
    bound = 1 / (10 / 18 + 8 / 18 * 2 / 3)
    assert row["prefill_adjusted_bound"].median == pytest.approx(bound)
    assert row["end_to_end_share"].median == pytest.approx(1.2 / bound)
    assert row["tokens_as_full_depth"] == 1
    assert row["steady_speedup"] is None  # too few requests
    assert "decode_share" not in compare("full", runs, Workload([[1]], [2], None))


@pytest.mark.parametrize(("width", "full_depth"), [(2, 2), (1, 1)])
def test_no_shares_beside_a_reference_of_another_width_or_full_depth(width, full_depth):
    """A launch of two rows that takes as long as one of one row would look like a gain of depth."""
    launches = [("prelude", (0,), 1.0), ("loop", (0,), 4.0), ("loop", (0,), 4.0), ("coda", (0,), 1.0)] * 2
    full, other = engine_run(20.0, 2, launches), engine_run(10.0, 2, launches, width, full_depth)
    workload = Workload([[1]], [2], [[2, 2]])
    row = compare("a=1", {"full": [full], "a=1": [other]}, workload)
    assert row["speedup"].values == (2.0,)
    assert row["decode_speedup"].values == (1.0,)
    assert row["decode_share"] is row["end_to_end_share"] is row["prefill_adjusted_bound"] is None
    row = compare("a=1", {"full": [full], "a=1": [engine_run(10.0, 2, launches)]}, workload)
    assert row["decode_share"].values == (1.0,)
    assert None not in (row["end_to_end_share"], row["prefill_adjusted_bound"])


def test_no_bound_over_another_full_depth():
    """Of two loops at most the bound is one over two loops, and the ratios beside it would be over four."""
    launches = [("prelude", (0,), 1.0), ("loop", (0,), 4.0), ("coda", (0,), 1.0)] * 2
    runs = {"full": [engine_run(20.0, 2, launches, full_depth=4)], "a=1": [engine_run(10.0, 2, launches)]}
    row = compare("a=1", runs, Workload([[1]], [2], None))
    assert row["flop_bound"] is None
    assert row["speedup"].values == (2.0,)
    assert compare("full", runs, Workload([[1]], [2], None))["flop_bound"] == pytest.approx(500 / 300)


def test_no_shares_where_more_than_depth_is_set_otherwise():
    launches = [("prelude", (0,), 1.0), ("loop", (0,), 4.0), ("coda", (0,), 1.0)] * 2
    runs = {"full": [engine_run(20.0, 2, launches)], "a=1": [engine_run(10.0, 2, launches)]}
    workload = Workload([[1]], [2], None)
    assert compare("a=1", runs, workload)["decode_share"] is not None
    row = compare("a=1", runs, workload, in_depth_alone=False)
    assert row["decode_share"] is row["end_to_end_share"] is row["prefill_adjusted_bound"] is None
    assert row["flop_bound"] == 1  # it says what the depths allow, whatever runs them


@pytest.mark.parametrize(
    ("changed", "alike"),
    [
        ({}, True),
        ({"kv_policy": "shared", "min_coda_batch": 4}, True),
        ({"prepack_weights": "auto"}, True),  # its default
        ({"prepack_weights": False}, False),
        ({"lookahead": 1}, False),  # what it hides of the host is no merit of depth
        ({"compile": True, "max_num_seqs": 4}, False),
    ],
)
def test_what_concerns_depth_alone(changed, alike):
    assert differ_in_depth_alone({"exit_rule": "gate", **changed}, {"exit_rule": "never"}) == alike


def test_the_reference_has_the_settings_that_do_not_concern_depth(monkeypatch):
    """All but what needs exits."""
    configs = []
    monkeypatch.setattr(systems, "serve_engine", lambda model, workload, config: configs.append(config))
    settings = {"prepack_weights": False, "lookahead": 1, "max_prefill_tokens": 8, "max_depth": 3}
    exits = {"exit_rule": "gate", "exit_threshold": 0.5, "min_depth": 2, "min_coda_batch": 4}
    systems.serve("full", load_model("tiny-ouro"), Workload([[1]], [2], None), 2, {**settings, **exits})
    (config,) = configs
    assert {name: getattr(config, name) for name in settings} == settings
    assert (config.exit_rule, config.exit_threshold, config.min_depth, config.min_coda_batch) == ("never", None, 1, 1)


SHORT = ["--width", "2", "--requests", "4", "--prompt", "2-3", "--new", "3-4", "--turns", "1"]


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures are an extra, hf-cdb[bench]")
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]
    assert main(["bench", "throughput", "--model", "tiny-ouro", *SHORT, *files]) == 0
    printed = capsys.readouterr().out
    for name in ("stock generate", "stock generate_batch", "engine, exits off", "cdb, no refill", "cdb, refill"):
        assert f"| {name} |" in printed
    content = json.loads((tmp_path / "a.json").read_text())
    assert len(content["workload"]["checksum"]) == 64
    assert (content["settings"]["mix"], content["settings"]["kv_policy"]) == ("shallow-heavy", "last_exited")
    resolved = {name: content["settings"][name] for name in ("min_coda_batch", "lookahead", "exit_rule", "min_depth")}
    assert resolved == {"min_coda_batch": 1, "lookahead": 0, "exit_rule": "replay", "min_depth": 1}
    cdb = content["settings"]["cdb"]
    assert (cdb["max_num_seqs"], cdb["max_depth"], cdb["prepack_weights"], cdb["quality"]) == (2, 4, "auto", None)
    assert content["settings"]["longest"] is None  # there are no texts to cut
    rows = {row["system"]: row for row in content["systems"]}
    assert rows["cdb, refill"]["decode_share"]["median"] > 0
    assert rows["stock generate"]["tokens_as_full_depth"] == 1
    assert rows["cdb, refill"]["mean_depth"] == content["workload"]["mean_depth"]
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_a_recorded_run_is_replayed(tmp_path, capsys):
    record = tmp_path / "depths.json"
    live = ["--mix", "live", "--record", str(record), "--json", str(tmp_path / "a.json"), "--systems", "refill"]
    assert main(["bench", "quick", "--model", "tiny-huginn", *SHORT, *live]) == 0
    again = ["--trace", str(record), "--json", str(tmp_path / "b.json"), "--systems", "refill", "no-refill"]
    assert main(["bench", "quick", "--model", "tiny-huginn", "--width", "2", "--turns", "1", *again]) == 0
    first, second = (json.loads((tmp_path / name).read_text())["systems"] for name in ("a.json", "b.json"))
    assert first[1]["mean_depth"] == second[1]["mean_depth"] == second[2]["mean_depth"] < 8
    assert "recorded in depths.json" in capsys.readouterr().out


def test_other_settings_are_compared_in_the_same_turns(tmp_path, capsys):
    also = ["--also", "kv_policy=shared", "--also", "min_coda_batch=2", "max_num_seqs=4", "--systems", "refill"]
    assert main(["bench", "quick", "--model", "tiny-ouro", *SHORT, *also, "--json", str(tmp_path / "a.json")]) == 0
    assert "| cdb, refill, min_coda_batch=2 max_num_seqs=4 |" in capsys.readouterr().out
    full, refill, shared, wide = json.loads((tmp_path / "a.json").read_text())["systems"]
    assert full["kv_bytes"] == refill["kv_bytes"]
    assert shared["system"] == "cdb, refill, kv_policy=shared"
    assert shared["kv_bytes"] * 4 == refill["kv_bytes"]  # a slot in place of one for each loop
    assert max(int(rows) for rows in wide["stats"]["widths"]["loop"]) == 4
    assert wide["decode_share"] is wide["end_to_end_share"] is wide["prefill_adjusted_bound"] is None
    assert wide["speedup"]["median"] > 0 < shared["decode_share"]["median"]
    assert max(int(rows) for rows in refill["stats"]["widths"]["loop"]) == 2
    assert shared["speedup_over_refill"]["median"] == pytest.approx(
        refill["seconds"]["median"] / shared["seconds"]["median"]
    )


def test_lookahead_runs_replayed_depths_as_they_are(tmp_path):
    path = tmp_path / "a.json"
    given = ["--mix", "2:.5,4:.5", "--lookahead", "1", "--systems", "refill", "--json", str(path)]
    assert main(["bench", "quick", "--model", "tiny-ouro", *SHORT, *given]) == 0
    content = json.loads(path.read_text())
    assert content["settings"]["lookahead"] == 1
    assert content["systems"][1]["mean_depth"] == content["workload"]["mean_depth"]


def _no_model(*arguments):
    raise AssertionError("the arguments could have been refused before")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--also", "kv_polcy=shared"], "did you mean 'kv_policy'"),
        (["--also", "kv_policy"], "give a setting and its value"),
        (["--also", "refill=false"], "decides refill itself"),
        (["--also", "exit_threshold=0.5"], "Pass --mix live"),
        (["--also", "kv_policy=["], "also='kv_policy=[': '[' is no value in YAML"),
        (["--also", "token_limits=[2,2]"], "decides token_limits itself"),
        (["--also", "quality=0.9"], "quality=0.9 has no meaning for depths that are replayed"),
        (["--min-coda-batch", "2", "--systems", "stock"], "min_coda_batch=2 has no effect on systems=stock"),
        (["--device", "foo"], "device='foo' cannot be used here"),
        (["--device", "meta"], "device='meta' computes nothing"),
        (["--json", "."], "json='.' is a folder"),
        (["--record", "."], "record='.' is a folder"),
        (["--longest", "5"], "longest='5' has no effect without --data"),
        (["--data-layout", "arxiv"], "data_layout='arxiv' has no effect without --data"),
        (["--lengths", "a.json", "--new", "xyz"], "new='xyz' has no effect beside --lengths"),
        (["--trace", "a.json", "--prompt", "100"], "prompt='100' has no effect beside --trace"),
        (["--requests", "100000000"], "requests=100000000: choose at least 1 and at most"),
        (["--mix", "1:.4,1:.6"], "names depth 1 twice"),
        (["--width", "0"], "width=0"),
        (["--turns", "0"], "turns=0"),
        (["--also", "kv_policy=nonsense"], "kv_policy='nonsense' is unknown"),
        (["--also", "max_depth=2"], "max_depth=2 has no meaning for depths that are replayed"),
        (["--min-coda-batch", "0"], "min_coda_batch=0"),
        (["--mix", "bimodel"], "Did you mean bimodal"),
        (["--mix", "1:-1,2:2"], "the share of depth 1 is -1"),
        (["--trace", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--data", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--prompt", "x"], "length 'x'"),
        (["--plot", "a.jpg"], "ends in .png"),
        (["--exit-rule", "gate"], "Pass --mix live"),
        (["--record", "a.json", "--systems", "stock"], "Add it to --systems"),
    ],
)
def test_errors_are_one_line_and_come_before_the_model(words, message, capsys, monkeypatch):
    monkeypatch.setattr("hf_cdb.bench.throughput.load_model", _no_model)
    assert main(["bench", "throughput", "--model", "tiny-ouro", *words]) == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
