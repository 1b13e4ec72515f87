"""Simulated runs are the runs of the engine, launch by launch; times and percentiles by hand."""

import json
import math

import numpy
import pytest

from hf_cdb import CDBConfig
from hf_cdb.adapters import adapter_for
from hf_cdb.bench.cost_fit import fit_costs
from hf_cdb.bench.costs import CostTable, StageCost
from hf_cdb.bench.launches import new_tokens
from hf_cdb.bench.served import Served
from hf_cdb.bench.serving import draw_arrivals, serve_arrivals, with_depths
from hf_cdb.bench.simulation import Settings, simulate
from hf_cdb.bench.workloads import Workload
from hf_cdb.cli import main
from hf_cdb.engine import Engine
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler
from hf_cdb.trace import Trace

from ..pairwise import pairwise
from ..toy import ToyModel, predict, toy_prompt

# A launch of the prelude takes 1 s, of the loop 2 s + 0.5 s a token, of the coda 0.25 s.
HAND = CostTable(2, StageCost((1, 9), (1.0, 1.0)), StageCost((1, 9), (2.5, 6.5)), StageCost((1, 9), (0.25, 0.25)))
ANY = CostTable(4, *[StageCost((1, 2), (1.0, 1.5), 0.01)] * 3)


def shape(trace):
    """What ran, and what stood in the queues, without times."""
    return [{name: value for name, value in x.to_dict().items() if name not in ("start", "duration")} for x in trace]


def random_workload(seed=0, requests=11, full_depth=4):
    rng = numpy.random.default_rng(seed)
    prompts = [rng.integers(1, 200, size=length).tolist() for length in rng.integers(1, 9, size=requests)]
    depths = [
        [full_depth, *rng.integers(1, full_depth + 1, size=new - 1).tolist()] for new in rng.integers(1, 7, requests)
    ]
    return Workload(prompts, [len(row) for row in depths], depths)


CASES = pairwise(
    {
        "max_num_seqs": [1, 2, 3, 5, 64],
        "refill": [True, False],
        "min_coda_batch": [1, 2, 4],
        "prefill_chunk_size": [None, 1, 3],
        "max_prefill_tokens": [None, 1, 5],
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_the_launches_are_those_of_the_engine(case):
    settings, workload = Settings(**case), random_workload()
    _, real = serve_arrivals(adapter_for(ToyModel()), settings, workload, [0.0] * len(workload), trace=True)
    simulated = Trace()
    simulate(ANY, settings, list(map(len, workload.prompts)), workload.depths, [0.0] * len(workload), simulated)
    assert shape(simulated) == shape(real)


@pytest.mark.parametrize("min_coda_batch", [1, 3])
def test_lookahead_is_that_of_the_engine(min_coda_batch):
    """The toy's own gate, whose signal is of the loop that ran, decides one loop late."""
    model, new = ToyModel(), 6
    prompts = [toy_prompt(row + 1, row % 10, (3 * row) % 10) for row in range(5)]
    adapter = adapter_for(model)
    config = CDBConfig(exit_rule="gate", lookahead=1, max_num_seqs=3, min_coda_batch=min_coda_batch, trace=True)
    engine = Engine(adapter, config.resolve(adapter))
    sampler = Sampler([()] * 5, prompts, do_sample=False)
    for row, prompt in enumerate(prompts):
        engine.add_request(Request(key=row, row=row, max_new_tokens=new, sampler=sampler, prompt_ids=prompt))
    engine.run()
    enough = [predict(model.config, prompt.tolist(), new).exit_depths for prompt in prompts]
    settings = Settings(3, min_coda_batch=min_coda_batch, lookahead=1, late_signal=True)
    simulated = Trace()
    simulate(ANY, settings, [2] * 5, enough, [0.0] * 5, simulated)
    assert shape(simulated) == shape(engine.stats.trace)


@pytest.mark.parametrize(("late", "executed"), [(False, [4, 2, 2, 3, 4]), (True, [4, 2, 3, 4, 4])])
def test_depths_with_lookahead(late, executed):
    """Depths 1, 2, 3, 4: a trained head loses the first loop only, a late signal one everywhere but at full depth."""
    run = simulate(ANY, Settings(1, lookahead=1, late_signal=late), [1], [[4, 1, 2, 3, 4]], [0.0])
    assert run.row_loops == sum(executed)


def test_times_by_hand():
    """Two requests, one row in flight: prompts of 3 and 1 tokens, 2 and 1 new ones; the second comes at 4 s."""
    run = simulate(HAND, Settings(1), [3, 1], [[2, 1], [2]], [0.0, 4.0])
    # 1 + 2 * 3.5 + 0.25 = 8.25, and 1 + 2.5 + 0.25 more; then 1 + 2 * 2.5 + 0.25
    assert run.admitted == [0.0, 12.0]
    assert run.first == [8.25, 18.25]
    assert run.finished == [12.0, 18.25]
    assert run.seconds == 18.25
    figures = run.figures()
    assert figures["tokens_per_second"] == pytest.approx(3 / 18.25)
    distribution = ("p50", "p90", "p99", "mean", "max")
    assert figures["queue"] == pytest.approx(dict(zip(distribution, (4.0, 7.2, 7.92, 4.0, 8.0), strict=True)))  # 0, 8
    assert figures["ttft"]["p50"] == pytest.approx((8.25 + 14.25) / 2)
    for name in ("tpot", "inter_token"):  # of the first request alone
        assert figures[name] == pytest.approx(dict.fromkeys(distribution, 3.75))
    assert figures["normalised_latency"]["p50"] == pytest.approx((12.0 / 2 + 14.25) / 2)
    assert figures["launches"] == {"prelude": 3, "loop": 5, "coda": 3}
    assert figures["occupancy"] == 1


def test_deadlines_by_hand():
    """Times as above. The second request is dropped before the first launch that would start after its deadline."""
    for deadline, finished in ((12.0, float("nan")), (12.5, float("nan")), (18.25, 18.25)):
        run = simulate(HAND, Settings(1), [3, 1], [[2, 1], [2]], [0.0, 4.0], deadlines=[None, deadline])
        assert run.finished == pytest.approx([12.0, finished], nan_ok=True)
    assert run.seconds == 18.25
    waits = simulate(HAND, Settings(1), [3, 1], [[2, 1], [2]], [0.0, 4.0], deadlines=[None, 5.0]).distributions([0, 1])
    assert waits["queue"]["max"] == 0  # the other one never started
    assert waits["normalised_latency"]["max"] == 6.0


def test_priorities_and_room_by_hand():
    """Two more come while the first one's prelude runs; the second of them is the more urgent one."""
    requests = [3, 1, 1], [[2, 1], [2], [2]], [0.0, 0.5, 0.6]
    run = simulate(HAND, Settings(1), *requests, priorities=[0, 0, 1])
    assert run.admitted == [0.0, 18.25, 12.0]
    # The first one holds 4 positions, and there is room for 5.
    run = simulate(HAND, Settings(3, max_kv_positions=5), *requests, priorities=[0, 0, 1])
    assert run.admitted[2] == 1.0 < run.admitted[1]


def test_idle_time_passes():
    run = simulate(HAND, Settings(4), [1, 1], [[2], [2]], [0.0, 100.0])
    assert run.first == [6.25, 106.25]


def test_lookahead_hides_the_host():
    stages = (HAND.prelude, HAND.loop, HAND.coda)
    slow = CostTable(2, *stages, host_per_launch=0.5)
    seconds = [simulate(slow, Settings(1, lookahead=lookahead), [1], [[2]], [0.0]).seconds for lookahead in (0, 1)]
    assert seconds == pytest.approx(
        [6.25 + 4 * 0.5, 6.25 + 0.25]
    )  # only the coda is shorter than the host's half second


def test_the_steady_state_by_hand():
    served = Served(1, [0.0] * 5, [1] * 5)
    served.admitted[:] = [0.0, 1.0, 2.0, 4.0, 8.0]
    served.finished[:] = [1.0, 2.0, 4.0, 8.0, 9.0]
    served.tokens_at[:] = [(1.0, 1), (2.0, 1), (4.0, 1), (8.0, 1), (9.0, 1)]
    assert served.steady() == pytest.approx(2 / 6)  # after the second completion until the last admission
    served.max_num_seqs = 3
    assert served.steady() is None


def test_arrivals():
    assert draw_arrivals(3, None, 0) == [0.0, 0.0, 0.0]
    arrivals = draw_arrivals(4000, 5.0, 1)
    assert arrivals == sorted(arrivals) == draw_arrivals(4000, 5.0, 1)
    assert arrivals[-1] == pytest.approx(4000 / 5, rel=0.1)


@pytest.mark.parametrize("processor_time", [False, True])
def test_a_real_run_serves_what_came(processor_time):
    workload = random_workload(seed=2, requests=5)
    adapter, arrivals = adapter_for(ToyModel()), [0.0, 0.0, 0.0, 0.01, 0.5]
    served, _ = serve_arrivals(adapter, Settings(2), workload, arrivals, processor_time=processor_time)
    assert served.admitted[-1] >= 0.5
    assert sum(count for _, count in served.tokens_at) == served.tokens == workload.tokens
    for times in zip(served.arrivals, served.admitted, served.first, served.finished, strict=True):
        assert list(times) == sorted(times)
        assert not any(map(math.isnan, times))
    assert served.row_loops == sum(map(sum, workload.depths))
    assert sum(map(sum, with_depths(workload, 4).depths)) == 4 * workload.tokens


@pytest.fixture
def table(tmp_path):
    ANY.save(tmp_path / "costs.json")
    return tmp_path / "costs.json"


def test_the_command_on_a_table(table, tmp_path, capsys):
    path = tmp_path / "out" / "figures.json"
    sizes = ["--width", "2", "8", "--coda", "1", "3", "--lookahead", "0", "1", "--new", "4-9", "--requests", "30"]
    assert main(["bench", "simulate", "--costs", str(table), *sizes, "--rate", "2", "--json", str(path)]) == 0
    assert "30 requests, 2 a second" in capsys.readouterr().out
    content = json.loads(path.read_text())
    assert content["model"] is None
    assert len(content["systems"]) == 2 * 2 * (1 + 1 + 2)
    unused = ("model", "dtype", "device", "turns", "longest")
    assert {name: content["settings"][name] for name in unused} == dict.fromkeys(unused)
    assert (content["settings"]["mix"], content["settings"]["requests"]) == ("shallow-heavy", 30)
    assert content["costs"]["loop"]["per_context"] == 0.01
    fastest = {}
    for row in content["systems"]:
        assert row["tokens"] == content["systems"][0]["tokens"]
        fastest.setdefault(row["system"], []).append(row["tokens_per_second"])
    assert max(fastest["full depth"]) < max(fastest["no refill"]) < max(fastest["refill"])


def test_what_lookahead_hides_is_no_merit_of_depth(tmp_path, capsys):
    """10 ms of device and 10 ms of host: running ahead halves the time of all systems, and none gains by depth."""
    stage = StageCost((1, 9), (0.01, 0.01))
    CostTable(4, stage, stage, stage, host_per_launch=0.01).save(tmp_path / "costs.json")
    sizes = ["--mix", "full", "--lookahead", "0", "1", "--width", "4", "--new", "8", "--requests", "8"]
    assert main(["bench", "simulate", "--costs", str(tmp_path / "costs.json"), *sizes]) == 0
    lines = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    speedup = lines[0].index("speed-up")
    assert [line[speedup] for line in lines[1:]] == ["1.00"] * 6


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_widths_that_costs_go_by_are_those_of_the_engine(chunk):
    """With layers after the loop that run all tokens; a table is fitted to the engine's launches by the same widths."""
    asked = []

    class Recorded(CostTable):
        def width(self, stage, tokens, ending):
            asked.append(super().width(stage, tokens, ending))
            return asked[-1]

    settings, workload = Settings(3, prefill_chunk_size=chunk), random_workload()
    arrivals = [0.0] * len(workload)
    _, real = serve_arrivals(adapter_for(ToyModel()), settings, workload, arrivals, trace=True)
    costs = Recorded(4, ANY.prelude, ANY.loop, ANY.coda, coda_layers_share=0.5)
    simulate(costs, settings, list(map(len, workload.prompts)), workload.depths, arrivals)
    ends = new_tokens(real)
    assert asked == [
        end + 0.5 * (launch.tokens - end) if launch.stage == "coda" else launch.tokens
        for launch, end in zip(real, ends, strict=True)
    ]
    assert max(ends) < max(launch.tokens for launch in real if launch.stage == "coda")


def test_files_of_any_vocabulary_go_with_a_table(table, tmp_path):
    """Where no model reads the ids, none of them is too large."""
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"prompts": [[10**6, 1], [2]], "depths": [[4, 1], [4]]}))
    assert main(["bench", "simulate", "--costs", str(table), "--trace", str(path)]) == 0


@pytest.mark.parametrize(("requests", "words"), [(2, ""), (6, "predictions rest on those that are checked")])
def test_costs_are_fitted_to_other_requests_of_a_file(requests, words, tmp_path, capsys, monkeypatch):
    path, served = tmp_path / "lengths.json", []
    path.write_text(json.dumps([[1 + k, 2] for k in range(6)]))
    serve = serve_arrivals

    def watched(adapter, settings, workload, *rest):
        served.append([len(prompt) for prompt in workload.prompts])
        return serve(adapter, settings, workload, *rest)

    monkeypatch.setattr("hf_cdb.bench.simulate.serve_arrivals", watched)
    sizes = ["--model", "tiny-ouro", "--width", "2", "--turns", "1", "--lengths", str(path), "--check"]
    assert main(["bench", "simulate", *sizes, "--requests", str(requests)]) == 0
    assert words in capsys.readouterr().out
    checked = list(range(1, 1 + requests))
    assert served[-1] == checked
    assert served[0] == ([3, 4, 5, 6] if requests == 2 else checked)


def test_the_picture(table, tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are an extra, hf-cdb[bench]")
    path = tmp_path / "figures.png"
    sizes = ["--width", "2", "4", "--coda", "1", "2", "--new", "3", "--requests", "9"]
    assert main(["bench", "simulate", "--costs", str(table), *sizes, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_command_on_this_machine(tmp_path, capsys):
    costs, figures = tmp_path / "costs.json", tmp_path / "figures.json"
    sizes = ["--model", "tiny-ouro", "--width", "2", "--prompt", "1-5", "--new", "3", "--requests", "4", "--turns", "1"]
    outputs = ["--check", "--processor-time", "--save-costs", str(costs), "--json", str(figures)]
    assert main(["bench", "simulate", *sizes, *outputs]) == 0
    assert "Prediction beside measurement" in capsys.readouterr().out
    content = json.loads(figures.read_text())
    checked = {(check["system"], check["figure"]) for check in content["check"]}
    assert {("full depth", "tokens per second"), ("refill", "ttft p99, ms")} < checked
    assert CostTable.load(costs).about["model"] == "tiny-ouro"


@pytest.mark.parametrize("width", [1, 4])
def test_one_width_is_enough_to_fit(width, tmp_path):
    """Rows in lockstep: at this W alone every launch of the coda would have as many rows."""
    sizes = ["--model", "tiny-ouro", "--width", str(width), "--prompt", "2", "--new", "3", "--mix", "full"]
    path = tmp_path / "costs.json"
    assert main(["bench", "simulate", *sizes, "--requests", "4", "--turns", "1", "--save-costs", str(path)]) == 0
    assert list(CostTable.load(path).coda.widths) == {1: [1, 2], 4: [2, 4]}[width]


def test_one_request_of_a_file_gives_no_costs(tmp_path, capsys):
    path = tmp_path / "lengths.json"
    path.write_text("[[2, 3]]")
    assert main(["bench", "simulate", "--model", "tiny-ouro", "--width", "1", "--lengths", str(path)]) == 2
    assert "1 request in the file" in capsys.readouterr().err


def test_launches_that_return_early_are_not_timed(capsys):
    assert main(["bench", "simulate", "--device", "cuda"]) == 2
    assert "device='cuda': launches are timed on the CPU only" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mix", "bimodel"], "Did you mean bimodal"),
        (["--new", "0"], "length '0'"),
        (["--lengths", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--costs", "missing.json", "--check"], "No such file or directory: 'missing.json'"),
    ],
)
def test_what_needs_no_model_is_refused_before_it(arguments, words, capsys, monkeypatch):
    def load(*arguments):
        raise AssertionError("the arguments could have been refused before")

    monkeypatch.setattr("hf_cdb.bench.simulate.load_model", load)
    assert main(["bench", "simulate", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_minutes_need_requests_enough(table, tmp_path, capsys):
    path = tmp_path / "lengths.json"
    path.write_text("[[2, 3], [3, 2]]")
    given = ["--costs", str(table), "--lengths", str(path), "--rate", "10", "--minutes", "5"]
    assert main(["bench", "simulate", *given]) == 2
    assert "minutes=5 at rate=10 are 3000 requests, but the file holds 2" in capsys.readouterr().err


def test_costs_from_a_trace(tmp_path, capsys):
    workload = random_workload()
    _, trace = serve_arrivals(adapter_for(ToyModel()), Settings(4), workload, [0.0] * len(workload), trace=True)
    trace.save(tmp_path / "run.jsonl")
    path = tmp_path / "costs.json"
    arguments = ["--fit", str(tmp_path / "run.jsonl"), "--save-costs", str(path), "--new", "4"]
    assert main(["bench", "simulate", *arguments]) == 0
    assert CostTable.load(path) == fit_costs(trace, 4, {"fitted to": ["run.jsonl"]})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", "0"], "width=[0]: choose at least 1"),
        (["--turns", "0"], "turns=0"),
        (["--chunk", "0"], "chunk=0"),
        (["--rate", "-1"], "rate=-1.0: choose a positive"),
        (["--minutes", "3"], "minutes=3.0 goes with --rate"),
        (["--rate", "1000", "--minutes", "1e9"], "requests=6e+13: choose at least 1 and at most"),
        (["--turns", "99"], "turns='99' has no effect beside a cost table"),
        (["--processor-time"], "processor_time='True' has no effect"),
        (["--dtype", "bfloat16"], "dtype='bfloat16' has no effect"),
        (["--device", "cuda"], "device='cuda' has no effect"),
        (["--model", "no/such/model"], "model='no/such/model' has no effect"),
        (["--save-costs", "."], "save_costs='.' is a folder"),
        (["--json", "a.json", "--save-costs", "a.json"], "json and save_costs both name 'a.json'"),
        (["--seed", "-1"], "seed=-1: choose at least 0"),
        (["--processor-time", "--threads", "2"], "--processor-time with threads=2 on cpu"),
        (["--mix", "live"], "runs no model whose rule could decide"),
        (["--mix", "1:-1,2:2"], "the share of depth 1 is -1"),
        (["--trace", "missing.json"], "No such file or directory: 'missing.json'"),
        (["--late-signal"], "--late-signal with lookahead=[0]: without lookahead no signal comes late"),
        (["--check", "--lookahead", "1"], "lookahead=1 beside --check"),
        (["--fit", "run.jsonl"], "--costs and --fit both"),
        (["--check", "--model", "tiny-huginn"], "the cost table is of 4 loops, but tiny-huginn has"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments, words, table, capsys):
    assert main(["bench", "simulate", "--costs", str(table), *arguments]) == 2
    assert words in capsys.readouterr().err
