"""The loop as one compiled graph gives what it gives layer by layer."""

import shutil

import numpy
import pytest
import torch
from torch._dynamo.utils import counters

from hf_cdb import CDBConfig, core_loop
from hf_cdb.adapters import adapter_for
from hf_cdb.core_loop import SCRATCH, CompiledLoop, bucket
from hf_cdb.engine import Engine
from hf_cdb.spans import Spans

from .test_engine import LENGTHS, THRESHOLDS, model_of
from .tiny import assert_close, left_pad, prompts, random_ouro

IDS, MASK = left_pad(prompts(*LENGTHS))


@pytest.fixture(autouse=True)
def _forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    core_loop._FAILED.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def traced(monkeypatch):
    """Graphs are traced and run as they were traced, which takes a second in place of twenty."""

    def graph(captured):
        return torch.compile(core_loop._loop, backend="eager", fullgraph=True, dynamic=True)

    monkeypatch.setattr(core_loop, "_graph", graph)


@pytest.fixture
def captured(monkeypatch, traced):
    """Widths of the graphs that ran: launches are padded as they are where graphs are captured."""
    widths, run = [], CompiledLoop._run_graph

    def run_and_note(self, spans, positions, state, embeds):
        assert len(spans) == positions.shape[1] == state.shape[1]
        widths.append((len(spans), spans.keys.count(SCRATCH)))
        return run(self, spans, positions, state, embeds)

    monkeypatch.setattr(CompiledLoop, "_run_graph", run_and_note)
    monkeypatch.setattr("hf_cdb.stages.CompiledLoop", lambda *parts: CompiledLoop(*parts[:-1], captured=True))
    return widths


def generate(model, name, **settings):
    settings = {"exit_rule": "confidence", "exit_threshold": THRESHOLDS["confidence"][name], **settings}
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(IDS, attention_mask=MASK, cdb=settings, **options)


def assert_same(output, expected, tolerance=1e-6):
    assert torch.equal(output.sequences, expected.sequences)
    assert torch.equal(output.exit_depths, expected.exit_depths)
    for left, right in zip(output.logits, expected.logits, strict=True):
        assert_close(left, right, tolerance)


PIECES = {"max_num_seqs": 2, "prefill_chunk_size": 7, "kv_policy": "modular"}
AHEAD = {"lookahead": 1, "refill": False}
CASES = [("ouro-gqa", {}), ("ouro-gqa", PIECES), ("huginn", AHEAD), ("dory", {})]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=str)
def test_a_graph_equals_the_layers(name, settings, traced):
    model = model_of(name)
    output = generate(model, name, compile=True, **settings)
    assert counters["stats"]["unique_graphs"] > 0
    assert model not in core_loop._FAILED
    assert_same(output, generate(model, name, **settings))


@pytest.mark.parametrize(("name", "settings"), [("ouro-gqa", {}), ("huginn", PIECES), ("ouro", AHEAD)], ids=str)
def test_padded_launches_equal_the_others(name, settings, captured):
    model = model_of(name)
    output = generate(model, name, compile=True, **settings)
    assert any(padding for _, padding in captured) or settings.get("max_num_seqs") == 2
    assert all(width == bucket(width - padding) for width, padding in captured)
    assert_same(output, generate(model, name, **settings))


def test_one_graph_serves_all_widths_and_calls(traced):
    """One for a single position, one for more; those of the next call are known."""
    model = model_of("ouro")
    generate(model, "ouro", compile=True)
    made = counters["stats"]["unique_graphs"]
    assert made <= 2
    generate(model, "ouro", compile=True, max_num_seqs=3)
    assert counters["stats"]["unique_graphs"] == made


def test_prepacked_weights_in_a_graph(traced, monkeypatch):
    """They are multiplied with as outside of one, and new weights are seen without another graph."""
    monkeypatch.setattr("hf_cdb.prepack.LEAST_ELEMENTS", 1)
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    for _ in range(2):
        expected = generate(model, "ouro", prepack_weights=True)
        assert_same(generate(model, "ouro", prepack_weights=True, compile=True), expected, 1e-4)
        made = counters["stats"]["unique_graphs"]
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(-1)
    assert made <= 2
    assert model not in core_loop._FAILED


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_for_real():
    """One small graph: compiling takes most of a minute on a busy machine."""
    model = random_ouro(eos_token_id=None, pad_token_id=0, num_hidden_layers=1)
    output = generate(model, "ouro", exit_rule="argmax-stability", exit_threshold=4, compile=True)
    assert model not in core_loop._FAILED
    assert counters["stats"]["unique_graphs"] == 1
    assert_same(output, generate(model, "ouro", exit_rule="argmax-stability", exit_threshold=4), 1e-4)


def test_what_cannot_be_compiled_runs_as_it_stands(traced, caplog):
    """A warning says so, once; the model is not tried again."""
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    expected = generate(model, "ouro")
    hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    for _ in range(2):
        assert_same(generate(model, "ouro", compile=True), expected)
    hook.remove()
    warnings = [record.message for record in caplog.records if "compile=True" in record.message]
    assert len(warnings) == 1
    assert "OuroForCausalLM runs without being compiled" in warnings[0]


def test_an_error_of_the_model_comes_out_as_it_is(traced):
    model = random_ouro(eos_token_id=None, pad_token_id=0)

    def boom(*_):
        raise ArithmeticError("boom")

    model.model.layers[1].mlp.register_forward_hook(boom)
    with pytest.raises(ArithmeticError, match="boom"):
        generate(model, "ouro", compile=True)
    assert model.config._attn_implementation == "sdpa"


def test_buckets_by_hand():
    assert [bucket(rows) for rows in (1, 2, 3, 4, 5, 8, 9, 16, 17, 24, 25, 64, 65)] == [
        *(1, 2, 4, 4, 8, 8, 16, 16, 24, 24, 32, 64, 72)
    ]


def test_padding_by_hand():
    spans = Spans([4, 9, 2], numpy.array([3, 5, 0]), numpy.array([4, 6, 1]), loop=numpy.array([2, 1, 4]))
    positions, state = torch.tensor([[3, 5, 0]]), torch.ones(1, 3, 2)
    padded, positions, state, embeds = core_loop._pad(spans, positions, state, None)
    assert padded.keys == [4, 9, 2, SCRATCH]
    assert padded.start.tolist() == [3, 5, 0, 0]
    assert padded.end.tolist() == [4, 6, 1, 1]
    assert padded.loop.tolist() == [2, 1, 4, 1]
    assert positions.tolist() == [[3, 5, 0, 0]]
    assert state.tolist() == [[[1, 1]] * 3 + [[0, 0]]]
    assert embeds is None


def test_only_cuda_captures():
    """On the CPU nothing is padded, and no scratch is held."""
    adapter = adapter_for(model_of("ouro"))
    engine = Engine(adapter, CDBConfig(compile=True, exit_rule="never").resolve(adapter))
    assert not engine._stages.core.captured
    assert engine.cache.core_bytes == 0


def test_to_compile_and_not_to_compile_is_refused():
    with pytest.raises(ValueError, match=r"disable_compile=True beside compile=True of cdb"):
        model_of("ouro").generate(IDS, attention_mask=MASK, disable_compile=True, cdb={"compile": True})


def test_a_switch_is_true_or_false():
    for value in ("auto", 1, None):
        with pytest.raises(ValueError, match=f"compile={value!r}: choose True or False"):
            CDBConfig(compile=value)
