"""Settings are validated once, and refused with the name, the value, the reason and the way out."""

import numpy
import pytest
import torch

from hf_cdb import CDBConfig, ExitRule
from hf_cdb.adapters import adapter_for
from hf_cdb.exits import RULES, Gate, Never, Preloop

from .tiny import random_huginn, random_ouro


def refused(words, run):
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the words are checked below)
        run()
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, f"{missing} not in: {error.value}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_depth": 0}, ["min_depth=0", "at least 1"]),
        ({"max_depth": 2.0}, ["max_depth=2.0", "integer"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0"]),
        ({"max_num_seqs": True}, ["max_num_seqs=True"]),
        ({"min_coda_batch": -1}, ["min_coda_batch=-1"]),
        ({"prefill_chunk_size": 0}, ["prefill_chunk_size=0"]),
        ({"max_prefill_tokens": 0}, ["max_prefill_tokens=0", "at least 1"]),
        ({"max_overtakes": -1}, ["max_overtakes=-1", "at least 0"]),
        ({"max_overtakes": 2}, ["max_overtakes=2", "max_kv_memory"]),
        ({"min_depth": 3, "max_depth": 2}, ["min_depth=3", "max_depth=2"]),
        ({"lookahead": 2}, ["lookahead=2", "0 or 1"]),
        ({"refill": 1}, ["refill=1", "True or False"]),
        ({"exit_rule": "latentdiff"}, ["exit_rule='latentdiff'", "'latent-diff'"]),
        ({"exit_rule": "gate", "exit_threshold": 0.0}, ["exit_threshold=0.0", "(0, 1]"]),
        ({"exit_rule": "gate", "exit_threshold": 1.5}, ["exit_threshold=1.5", "gate"]),
        ({"exit_rule": "confidence", "exit_threshold": 2}, ["exit_threshold=2", "confidence"]),
        ({"exit_rule": "latent-diff", "exit_threshold": -0.1}, ["exit_threshold=-0.1", "positive"]),
        ({"exit_rule": "kl", "exit_threshold": float("nan")}, ["exit_threshold=nan"]),
        ({"exit_rule": "argmax-stability", "exit_threshold": 2.5}, ["exit_threshold=2.5", "integer"]),
        ({"exit_rule": "never", "exit_threshold": 0.5}, ["exit_threshold=0.5", "never"]),
        ({"exit_rule": "replay"}, ["replay", "exit_depths"]),
        ({"exit_depths": [[4]]}, ["exit_depths", "replay"]),
        ({"exit_rule": "replay", "exit_depths": [4, 1]}, ["exit_depths", "[rows, new tokens]"]),
        ({"exit_rule": "replay", "exit_depths": [[4, 1.5]]}, ["exit_depths", "integers"]),
        ({"exit_rule": Never(), "exit_threshold": 0.5}, ["exit_threshold=0.5", "'never'", "own"]),
        ({"kv_policy": "last_exit"}, ["kv_policy='last_exit'", "'last_exited'"]),
        ({"kv_policy": "shared", "kv_slots": 2}, ["kv_slots=2", "kv_policy='shared'"]),
        ({"kv_slots": 2}, ["kv_slots=2", "kv_policy='auto'"]),
        ({"max_kv_memory": 0}, ["max_kv_memory=0"]),
        ({"max_kv_memory": 1.5}, ["max_kv_memory=1.5", "share"]),
        ({"max_kv_memory": True}, ["max_kv_memory=True", "share"]),
        ({"max_kv_memory": numpy.int64(-1)}, ["max_kv_memory=np.int64(-1)", "bytes"]),
        ({"max_kv_memory": float("nan")}, ["max_kv_memory=nan", "share"]),
        ({"max_kv_memory": "1G"}, ["max_kv_memory='1G'", "bytes"]),
        ({"preemption": "swap", "max_kv_memory": 9}, ["preemption='swap'", "offload, recompute"]),
        ({"preemption": "recompute"}, ["preemption='recompute'", "without max_kv_memory"]),
        ({"seeds": ["a"]}, ["seeds"]),
        ({"seeds": 5}, ["seeds=5", "one integer per prompt"]),
        ({"exit_rule": "gate", "exit_threshold": "0.5"}, ["exit_threshold='0.5'", "number"]),
        ({"exit_threshold": "auto"}, ["exit_threshold='auto'", "None"]),
        ({"exit_threshold": [0.5]}, ["exit_threshold=[0.5]", "number"]),
        ({"exit_rule": "argmax-stability", "exit_threshold": float("inf")}, ["exit_threshold=inf", "integer"]),
        ({"exit_rule": "argmax-stability", "exit_threshold": float("nan")}, ["exit_threshold=nan", "integer"]),
        ({"exit_rule": "replay", "exit_depths": 4}, ["exit_depths", "[rows, new tokens]"]),
    ],
)
def test_settings_that_cannot_work(settings, words):
    refused(words, lambda: CDBConfig(**settings))


def test_settings_that_a_model_cannot_follow():
    ouro, huginn = adapter_for(random_ouro()), adapter_for(random_huginn())
    refused(["max_depth=5", "4 loops", "at most 4"], lambda: CDBConfig(max_depth=5).resolve(ouro))
    assert CDBConfig(max_depth=50).resolve(huginn).max_depth == 50
    refused(["min_depth=7", "6 loops"], lambda: CDBConfig(min_depth=7).resolve(huginn))
    refused(["exit_rule='gate'", "no exit gate"], lambda: CDBConfig(exit_rule="gate").resolve(huginn))
    refused(["preloop", "head"], lambda: CDBConfig(exit_rule="preloop").resolve(ouro))


def test_defaults_that_the_model_decides():
    ouro = CDBConfig().resolve(adapter_for(random_ouro(early_exit_threshold=0.7)))
    assert (ouro.max_depth, ouro.kv_policy) == (4, "last_exited")
    assert isinstance(ouro.exit_rule, Gate)
    assert ouro.exit_rule.threshold == 0.7
    huginn = CDBConfig().resolve(adapter_for(random_huginn()))
    assert (huginn.max_depth, huginn.exit_rule.name, huginn.exit_rule.threshold) == (6, "latent-diff", 0.03)
    for name, default in {
        "entropy-diff": 1e-3,
        "kl": 1e-3,
        "minp-kl": 1e-5,
        "cosine": 1e-3,
        "argmax-stability": 5,
    }.items():
        assert RULES[name].default_threshold == default
    assert RULES["confidence"].default_threshold == 0.9


def test_the_layout_that_auto_is():
    """Compact where memory is bounded, the policy has a slot per loop, and it has been measured: on the CPU."""
    ouro, bounded = adapter_for(random_ouro()), {"kv_layout": "auto", "max_kv_memory": 0.5}
    assert CDBConfig().resolve(ouro).kv_layout == "dense"
    assert CDBConfig(max_kv_memory=0.5).resolve(ouro).kv_layout == "dense"
    assert CDBConfig(kv_layout="auto").resolve(ouro).kv_layout == "dense"
    assert CDBConfig(**bounded).resolve(ouro).kv_layout == "compact"
    assert CDBConfig(**bounded).described(ouro)["kv_layout"] == "compact"
    for policy in ("shared", "first_then_shared", "modular"):
        assert CDBConfig(**bounded, kv_policy=policy).resolve(ouro).kv_layout == "dense"
    assert CDBConfig(**bounded).resolve(adapter_for(random_ouro().to("meta"))).kv_layout == "dense"


def test_true_a_dict_and_a_config():
    saved = {"exit_threshold": 0.4, "max_num_seqs": 8}
    assert CDBConfig.create(True) == CDBConfig()
    assert CDBConfig.create(True, saved) == CDBConfig(**saved)
    assert CDBConfig.create({"max_num_seqs": 2}, saved) == CDBConfig(exit_threshold=0.4, max_num_seqs=2)
    assert CDBConfig.create(CDBConfig(lookahead=1), saved) == CDBConfig(lookahead=1)
    refused(["'exit_treshold'", "'exit_threshold'"], lambda: CDBConfig.create({"exit_treshold": 0.5}))
    refused(["cdb='yes'"], lambda: CDBConfig.create("yes"))


def test_another_rule_leaves_the_saved_threshold_behind():
    """A threshold is on its rule's scale, so that of the saved rule says nothing about another one."""
    saved = {"exit_rule": "confidence", "exit_threshold": 0.1, "max_num_seqs": 8}
    assert CDBConfig.create({"exit_rule": "never"}, saved) == CDBConfig(exit_rule="never", max_num_seqs=8)
    assert CDBConfig.create({"exit_rule": "latent-diff"}, saved).exit_threshold is None
    assert CDBConfig.create({"exit_rule": "argmax-stability"}, saved).exit_threshold is None
    assert CDBConfig.create({"exit_rule": "confidence"}, saved).exit_threshold == 0.1
    assert CDBConfig.create({"exit_threshold": 0.3}, saved).exit_rule == "confidence"
    assert CDBConfig.create({"exit_rule": "never"}, {"exit_threshold": 0.4}) == CDBConfig(exit_rule="never")
    assert CDBConfig.create({"lookahead": 1}, CDBConfig(**saved)) == CDBConfig(**saved, lookahead=1)


class Gated:
    has_gate = True


class Gateless:
    has_gate = False


@pytest.mark.parametrize(("adapter", "rule"), [(Gated(), "gate"), (Gateless(), "latent-diff")])
def test_auto_is_the_rule_that_it_stands_for(adapter, rule):
    """The same rule under its other name keeps the saved threshold, another one does not."""
    named, unnamed = {"exit_rule": rule, "exit_threshold": 0.1}, {"exit_threshold": 0.1}
    for saved, given in ((named, "auto"), (unnamed, rule), (unnamed, "auto"), (named, rule)):
        assert CDBConfig.create({"exit_rule": given}, saved, adapter) == CDBConfig(exit_rule=given, exit_threshold=0.1)
    for saved in (named, unnamed):
        assert CDBConfig.create({"exit_rule": "confidence"}, saved, adapter).exit_threshold is None
        assert CDBConfig.create({"exit_rule": "never"}, saved, adapter) == CDBConfig(exit_rule="never")
    other = {"exit_rule": "confidence", "exit_threshold": 0.1}
    assert CDBConfig.create({"exit_rule": "auto"}, other, adapter).exit_threshold is None


def test_integers_of_numpy_are_integers():
    config = CDBConfig(
        max_num_seqs=numpy.int64(4),
        exit_rule="replay",
        exit_depths=numpy.array([[4, 1]]),
        seeds=numpy.array([3]),
    )
    assert config == CDBConfig(max_num_seqs=4, exit_rule="replay", exit_depths=[[4, 1]], seeds=[3])
    assert CDBConfig(exit_threshold=numpy.float32(0.5)).exit_threshold == 0.5
    for given, kept in ((numpy.int64(7), 7), (numpy.float32(0.5), 0.5), (1, 1), (1.0, 1.0)):
        memory = CDBConfig(max_kv_memory=given).max_kv_memory
        assert (memory, type(memory)) == (kept, type(kept))


def test_to_dict_round_trips_and_refuses_objects():
    config = CDBConfig(exit_rule="replay", exit_depths=torch.tensor([[4, 1]]), seeds=[3], refill=False)
    assert CDBConfig(**config.to_dict()) == config
    assert CDBConfig().to_dict() == {}
    refused(["exit_rule", "object"], CDBConfig(exit_rule=Never()).to_dict)


def test_nothing_can_leave_early_is_said_once(caplog):
    import transformers

    transformers.utils.logging.enable_propagation()
    try:
        for _ in range(2):
            CDBConfig().resolve(adapter_for(random_ouro()))
        assert caplog.text.count("Nothing can leave early") == 1
        caplog.clear()
        CDBConfig(exit_rule="never").resolve(adapter_for(random_ouro()))
        CDBConfig(exit_threshold=0.9).resolve(adapter_for(random_ouro()))
        assert "Nothing can leave early" not in caplog.text
        CDBConfig(exit_rule="never", kv_policy="shared").resolve(adapter_for(random_ouro()))
        assert "ruins Ouro's answers" in caplog.text
    finally:
        transformers.utils.logging.disable_propagation()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"exit_rule": "argmax-stability"}, ["argmax-stability", "at least 6 loops"]),
        ({"exit_rule": "confidence", "min_depth": 4}, ["min_depth=4"]),
        ({"exit_rule": "confidence", "max_depth": 1}, ["and 1 at most"]),
        ({"exit_rule": "confidence", "max_depth": 2, "lookahead": 1}, ["lookahead=1", "at least 2"]),
        ({"exit_rule": "argmax-stability", "exit_threshold": 2, "lookahead": 1}, ["at least 4"]),
        ({"exit_threshold": 1.0}, ["threshold is 1.0, as asked"]),
        ({}, ["threshold is 1.0, which OuroForCausalLM's checkpoint names"]),
    ],
)
def test_why_nothing_can_leave_early_is_said(settings, words, monkeypatch):
    said = []
    monkeypatch.setattr("hf_cdb.config.logger.warning_once", said.append)
    CDBConfig(**settings).resolve(adapter_for(random_ouro()))
    assert len(said) == 1
    assert all(word in said[0] for word in ["Nothing can leave early", *words]), said


@pytest.mark.parametrize(
    "settings",
    [
        {"exit_rule": "argmax-stability", "exit_threshold": 2},
        {"exit_rule": "confidence", "min_depth": 3},
        {"exit_rule": "confidence", "max_depth": 3, "lookahead": 1},
        {"exit_rule": "never", "min_depth": 4},
    ],
)
def test_nothing_is_said_where_something_can_leave(settings, monkeypatch):
    said = []
    monkeypatch.setattr("hf_cdb.config.logger.warning_once", said.append)
    CDBConfig(**settings).resolve(adapter_for(random_ouro()))
    assert not said


def test_frequencies_that_follow_the_longest_row_are_refused():
    scaling = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    refused(["rope_type='dynamic'", "neighbours", "yarn"], lambda: adapter_for(random_ouro(rope_parameters=scaling)))


def test_the_gate_remembers_in_float32():
    rule = Gate(0.5)
    model = random_ouro().bfloat16()
    rule.configure(adapter_for(model), 4, 0)
    rule.bind(adapter_for(model), 2)
    state = torch.zeros(2, 32, dtype=torch.bfloat16)
    rule.begin(torch.tensor([0, 1]), state, state, [(0, 1), (1, 1)])
    assert {memory.dtype for memory in rule._memory.values()} == {torch.float32}


def test_a_preloop_threshold_of_one_is_the_last_depth():
    """Also where the probabilities before it round up to one."""
    certain = lambda embeds: torch.tensor([0.0, 200.0, 0.0, 0.0]).expand(len(embeds), -1)  # noqa: E731
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    for threshold, depth in ((0.999, 2), (1.0, 4)):
        output = model.generate(
            torch.tensor([[5, 6, 7]]),
            max_new_tokens=3,
            do_sample=False,
            return_dict_in_generate=True,
            cdb={"exit_rule": Preloop(certain, threshold)},
        )
        assert output.exit_depths.tolist() == [[4, depth, depth]]


def test_a_preloop_head_fixes_the_depth():
    """Probabilities by hand: .1 .2 .3 .4, so thresholds .1 .3 .6 1 give depths 1 2 3 4."""
    head = lambda embeds: torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(len(embeds), -1)  # noqa: E731
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    ids = torch.tensor([[5, 6, 7]])
    for threshold, depth in ((0.09, 1), (0.29, 2), (0.59, 3), (0.61, 4), (1.0, 4)):
        rule = Preloop(head, threshold)
        output = model.generate(
            ids, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, cdb={"exit_rule": rule}
        )
        assert output.exit_depths.tolist() == [[4, depth, depth, depth]]


def test_a_rule_of_the_user_s_own():
    class EveryOther(ExitRule):
        """Tokens of even index leave after loop 1, the others after loop 3; sees each token's states."""

        name = "every-other"
        seen: list = []  # noqa: RUF012

        def begin(self, places, embeds, start, tokens):
            super().begin(places, embeds, start, tokens)
            for place, (_, index) in zip(places.tolist(), tokens, strict=True):
                self.memory("index", torch.zeros(1, dtype=torch.long), 0)[place] = index

        def leave(self, places, depths, previous, state, logits):
            self.seen.append((tuple(depths), tuple(state.shape), logits().shape))
            wanted = torch.where(self._memory["index"][places] % 2 == 0, 1, 3)
            return torch.tensor(depths) >= wanted

    rule = EveryOther()
    output = random_ouro(eos_token_id=None, pad_token_id=0).generate(
        torch.tensor([[5, 6], [7, 8]]),
        max_new_tokens=5,
        do_sample=False,
        return_dict_in_generate=True,
        cdb={"exit_rule": rule},
    )
    assert output.exit_depths.tolist() == [[4, 3, 1, 3, 1]] * 2
    assert ((1, 1), (2, 32), (2, 50)) in rule.seen
