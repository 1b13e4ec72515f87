"""The oracle against stock generate, the golden data of the published code, and cases worked out by hand."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_cdb import reference
from hf_cdb.adapters import adapter_for
from hf_cdb.reference import reference_generate

from .dory import random_dory
from .tiny import DATA, assert_close, load_golden, prompts, random_huginn, random_ouro
from .toy import ToyModel, predict, toy_prompt

ROUNDING = 5e-5
IMPLEMENTATIONS = ["eager", "sdpa"]
POLICIES = [
    ("last_exited", None),
    ("shared", None),
    ("first_then_shared", None),
    ("first_then_shared", 3),
    ("modular", None),
    ("modular", 3),
]
OFFICIAL_LOOKUPS = {"latest-m4": "last_exited", "latest-m4-compress-s4": "shared"}


# Full depth: stock generate and the uncached forward.


def check_full_depth(model, prompt, tolerance, forward=None, new_tokens=12, **settings):
    """The oracle without exits equals uncached generate, and its logits one forward over all positions."""
    forward = forward or {}
    output = reference_generate(model, prompt, new_tokens, exit_rule="never", **settings)
    stock = model.generate(
        prompt[None], max_new_tokens=new_tokens, do_sample=False, use_cache=False, eos_token_id=None, **forward
    )
    assert output.tokens == stock[0, len(prompt) :].tolist()
    assert output.signals == [[]] * new_tokens
    with torch.no_grad():
        logits = model(stock[:, :-1], use_cache=False, **forward).logits[0, len(prompt) - 1 :]
    assert output.logits.dtype == logits.dtype
    assert_close(output.logits, logits, tolerance)
    return output


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("kv_heads", [2, 1])
def test_ouro_at_full_depth(kv_heads, implementation):
    model = random_ouro(3, num_key_value_heads=kv_heads, attn_implementation=implementation).double()
    for prompt in prompts(1, 5, 17):
        assert check_full_depth(model, prompt, 1e-9).exit_depths == [4] * 12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_huginn_at_full_depth(steps, implementation):
    model = random_huginn(3, attn_implementation=implementation).double()
    for prompt in prompts(1, 5, 17):
        output = check_full_depth(model, prompt, 1e-9, {"num_steps": steps}, max_depth=steps)
        assert output.exit_depths == [steps] * 12


def test_huginn_from_noise():
    model = random_huginn(3).double()
    for prompt in prompts(1, 5):
        noise = {"init_scale": 1.0, "init_seed": 7}
        noisy = check_full_depth(model, prompt, 1e-9, noise, **noise)
        assert (noisy.logits - reference_generate(model, prompt, 12, exit_rule="never").logits).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_dory_at_full_depth(implementation):
    """Prompts within and beyond the window. Head and norms of dory compute in float32, its eager softmax too."""
    model = random_dory(3, attn_implementation=implementation).double()
    for prompt in prompts(1, 5, 8, 17, 30):
        check_full_depth(model, prompt, {"sdpa": 1e-6, "eager": 1e-4}[implementation])


def test_dory_with_the_last_loop_cached_is_the_shared_policy():
    model = random_dory(3, recurrent_kv_cache_mode="last_loop").double()
    for prompt in prompts(1, 5, 17):
        output = reference_generate(model, prompt, 12, exit_rule="never")
        stock = model.generate(
            prompt[None],
            max_new_tokens=12,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
        assert output.tokens == stock.sequences[0, len(prompt) :].tolist()
        assert_close(output.logits, torch.cat(stock.logits), 1e-6)
        per_loop = reference_generate(model, prompt, 12, exit_rule="never", kv_policy="last_exited")
        assert (output.logits - per_loop.logits).abs().max() > 1e-3


@pytest.mark.parametrize("make", [random_ouro, random_huginn, random_dory])
def test_embeddings_as_a_prompt(make):
    model = make(3)
    for ids in prompts(1, 9):
        expected = reference_generate(model, ids, 4, exit_rule="never")
        embeds = model.get_input_embeddings()(ids).detach()
        output = reference_generate(model, embeds, 4, exit_rule="never")
        assert output.tokens == expected.tokens
        assert torch.equal(output.logits, expected.logits)


# Golden data of the published Huginn code.


@pytest.fixture(scope="module")
def golden():
    record = json.loads((DATA / "huginn-tiny" / "golden.json").read_text())
    return load_golden("huginn-tiny"), record, load_file(DATA / "huginn-tiny" / "golden.safetensors")


def adaptive_runs(criterion):
    """Ids of the runs with a counterpart here: prompt at full depth, no decision within rounding of its threshold."""
    runs = json.loads((DATA / "huginn-tiny" / "golden.json").read_text())["adaptive"]["runs"]
    return [
        run
        for run in runs
        if run["criterion"] == criterion
        and run["do_not_exit_in_prefill"]
        and run["cache_lookup_strategy"] in OFFICIAL_LOOKUPS
        and run["id"] not in ("adaptive.39", "adaptive.52")
    ]


@pytest.mark.parametrize("criterion", ["latent-diff", "cosine", "entropy-diff", "kl", "minp-kl", "argmax-stability"])
def test_golden_adaptive_runs(golden, criterion):
    model, _, tensors = golden
    runs = adaptive_runs(criterion)
    assert len(runs) >= 5
    for run in runs:
        output = reference_generate(
            model,
            tensors[f"{run['prompt']}.input_ids"],
            12,
            exit_rule=criterion,
            exit_threshold=run["threshold_value"],
            max_depth=16,
            kv_policy=OFFICIAL_LOOKUPS[run["cache_lookup_strategy"]],
        )
        assert output.tokens == run["tokens"], run["id"]
        assert output.exit_depths == run["steps"], run["id"]
        recorded = tensors[f"{run['id']}.exit_values"]
        for token, values in enumerate(output.signals):
            expected = recorded[token, : len(values)]
            assert torch.equal(torch.tensor(values).isnan(), expected.isnan()), (run["id"], token)
            assert_close(torch.tensor(values).nan_to_num(), expected.nan_to_num(), ROUNDING, f"{run['id']} {token}")


@torch.no_grad()
def test_golden_prompts_fed_token_by_token(golden):
    """Every position of these prompts exits on its own, which `reference_generate` never does; its single steps do."""
    model, record, tensors = golden
    adapter = adapter_for(model)
    runs = [run for run in record["tokenwise_adaptive"]["runs"] if run["cache_lookup_strategy"] == "latest-m4"]
    assert len(runs) == 6
    for run in runs:
        row = reference._Row(adapter, slots=list(range(16)), start_options={})
        steps = [
            row.run_token(token, 16, reference._Rule(run["criterion"], run["exit_threshold"], adapter))
            for token in tensors[f"{run['prompt']}.input_ids"].tolist()
        ]
        assert [depth for _, depth, _ in steps] == run["compute_steps"], run["id"]
        assert_close(torch.stack([logits for logits, _, _ in steps]), tensors[f"{run['id']}.logits"], ROUNDING)


def test_golden_compressed_cache_at_other_depths(golden):
    model, record, tensors = golden
    other = record["greedy_other_depths"]
    for steps, runs in other["tokens"].items():
        ids = tensors[f"{other['prompt']}.input_ids"]
        output = reference_generate(model, ids, 16, exit_rule="never", max_depth=int(steps), kv_policy="shared")
        assert output.tokens == runs["latest-m4-compress-s4"], steps
        assert (output.tokens != runs["full"]) == (steps in "234"), steps
        key = f"{other['prompt']}.greedy.latest-m4-compress-s4.steps{steps}.logits"
        if key in tensors:
            assert_close(output.logits, tensors[key], 3e-4, key)


def test_default_thresholds_are_the_published_ones(golden):
    published = golden[1]["adaptive"]["auto_thresholds"]
    assert {**published, "confidence": 0.9} == reference._DEFAULT_THRESHOLDS


# When a token leaves.


class LeaveAfter:
    """A user's rule that says leave after the given loops, and writes down when it is asked."""

    def __init__(self, *loops):
        self.loops, self.asked = loops, []

    def __call__(self, loop, previous_state, state, logits):
        assert (previous_state[1], state[1]) == (loop - 1, loop)  # the toy counts its loops in channel 1
        assert logits().shape == (200,)
        self.asked.append(loop)
        return loop in self.loops


@pytest.mark.parametrize(
    ("says", "settings", "depth", "asked"),
    [
        ([2], {}, 2, [1, 2]),
        ([], {}, 4, [1, 2, 3]),  # the signal after the last loop is never read
        ([1], {"min_depth": 2}, 4, [1, 2, 3]),  # said too early and not again
        ([1, 3], {"min_depth": 2}, 3, [1, 2, 3]),
        ([1], {"lookahead": 1}, 2, [1]),
        ([3], {"lookahead": 1}, 4, [1, 2, 3]),
        ([1], {"lookahead": 1, "min_depth": 2}, 2, [1]),  # a signal at min_depth - 1 counts
        ([1, 2], {"lookahead": 1, "min_depth": 3}, 3, [1, 2]),
        ([1], {"lookahead": 1, "min_depth": 3}, 4, [1, 2, 3]),
        ([2], {"max_depth": 3}, 2, [1, 2]),
        ([3], {"max_depth": 3}, 3, [1, 2]),
        ([1], {"max_depth": 1, "lookahead": 1}, 1, []),
    ],
)
def test_depth_that_follows_from_signals(says, settings, depth, asked):
    rule = LeaveAfter(*says)
    output = reference_generate(ToyModel(), toy_prompt(3, 1, 4), 3, exit_rule=rule, **settings)
    full = settings.get("max_depth", 4)
    assert output.exit_depths == [full, depth, depth]
    assert rule.asked == asked * 2
    assert output.signals == [[], *[[float(loop in says) for loop in asked]] * 2]


def test_scripted_gate_depths_with_min_depth_and_lookahead():
    """The CDF stays above the threshold once it is, so here an early signal is not lost."""
    model = ToyModel()
    prompt = toy_prompt(3, 1)  # then come the digits 4, 7, 0, 3, 6, 9
    assert reference_generate(model, prompt, 7).exit_depths == [4, 4, 2, 4, 3, 3, 4]
    assert reference_generate(model, prompt, 7, min_depth=3).exit_depths == [4, 4, 3, 4, 3, 3, 4]
    assert reference_generate(model, prompt, 7, lookahead=1).exit_depths == [4, 4, 3, 4, 4, 4, 4]
    assert reference_generate(model, prompt, 7, lookahead=1, min_depth=3).exit_depths == [4, 4, 3, 4, 4, 4, 4]
    assert reference_generate(model, prompt, 7, max_depth=2).exit_depths == [2] * 7
    assert reference_generate(model, prompt, 7, exit_threshold=1.0).exit_depths == [4] * 7


@torch.no_grad()
@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.8])
def test_ouro_gate_equals_the_exit_distribution_of_the_forward(threshold):
    """The first token that may leave reads a past of full depth, as the plain forward does."""
    depths = set()
    for seed in range(4):
        model = random_ouro(seed).double()
        for prompt in prompts(1, 5, 17, seed=seed):
            output = reference_generate(model, prompt, 2, exit_threshold=threshold)
            ids = torch.cat([prompt, torch.tensor(output.tokens[:1])])[None]
            forward = model(ids, exit_threshold=threshold)
            depth = int(forward.exit_steps[0, -1]) + 1
            assert output.exit_depths == [4, depth]
            cdf = forward.exit_pdf[0, -1].cumsum(-1)
            assert_close(torch.tensor(output.signals[1]), cdf[: min(depth, 3)], 1e-6)
            assert_close(output.logits[1], forward.logits[0, -1], 1e-9)
            depths.add(depth)
    assert len(depths) > 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_threshold_one_never_leaves_early(dtype):
    model = random_ouro(0).to(dtype)
    model.model.early_exit_gate.bias.data.fill_(50.0)
    prompt = prompts(5)[0]
    assert reference_generate(model, prompt, 3).exit_depths == [4, 4, 4]
    assert reference_generate(model, prompt, 3, exit_threshold=0.999).exit_depths == [4, 1, 1]


def toy_run(**settings):
    config = {key: settings.pop(key) for key in ("peak", "loops") if key in settings}
    return reference_generate(ToyModel(**config), toy_prompt(3, 1, 4), 2, **settings)


@pytest.mark.parametrize(("threshold", "loops", "depth"), [(None, 8, 6), (1, 8, 2), (3, 8, 4), (0, 8, 1), (None, 5, 5)])
def test_argmax_stability_counts_unchanged_comparisons(threshold, loops, depth):
    """The toy's largest logit is the same after every loop; the first comparison is with nothing."""
    output = toy_run(exit_rule="argmax-stability", exit_threshold=threshold, loops=loops)
    assert output.exit_depths == [loops, depth]
    assert output.signals[1] == list(range(min(depth, loops - 1)))


@pytest.mark.parametrize(("peak", "threshold", "depth"), [(7.6, None, 1), (7.4, None, 4), (7.4, 0.85, 1)])
def test_confidence(peak, threshold, depth):
    """One logit `peak` above 199 others: a probability of 0.9 at log(9 * 199) = 7.49."""
    output = toy_run(exit_rule="confidence", exit_threshold=threshold, peak=peak)
    assert output.exit_depths == [4, depth]
    assert output.signals[1][0] == pytest.approx(1 / (1 + 199 * math.exp(-peak)), abs=1e-3)


def test_first_values_of_the_rules_that_compare_distributions():
    """All 200 logits equal but for `peak`, so every later comparison finds no change."""
    flat = toy_run(exit_rule="entropy-diff", peak=0.0)
    assert flat.signals[1][0] == pytest.approx(100 - math.log(200), abs=1e-3)
    assert flat.exit_depths == [4, 2]
    assert toy_run(exit_rule="kl", peak=0.0).exit_depths == [4, 1]
    # Probabilities that underflow to zero add nothing to the entropy.
    assert toy_run(exit_rule="entropy-diff", peak=1000.0).signals[1] == [pytest.approx(100), pytest.approx(0)]

    # p_0 is uniform; log p_1 is 0 at the peak and -100 elsewhere.
    peaked = toy_run(exit_rule="kl", peak=100.0)
    assert peaked.signals[1][0] == pytest.approx(100 * 199 / 200 - math.log(200), abs=1e-2)
    assert peaked.exit_depths == [4, 2]

    # 199 probabilities become 1 / 200 beside the 1 of the peak: their sum is 1.995.
    raised = toy_run(exit_rule="minp-kl", peak=100.0)
    assert raised.signals[1][0] == pytest.approx(math.log(1.995) - math.log(200) / 200, abs=1e-6)
    assert raised.exit_depths == [4, 2]


def test_first_values_of_the_rules_that_compare_states():
    """From a zero state the relative change is 1 and the cosine undefined, which is below no threshold."""
    model, prompt = random_huginn(0).double(), prompts(5)[0]
    latent = reference_generate(model, prompt, 2, exit_rule="latent-diff", exit_threshold=1.5)
    assert latent.exit_depths == [6, 1]
    assert latent.signals[1] == [pytest.approx(1.0)]
    cosine = reference_generate(model, prompt, 2, exit_rule="cosine", exit_threshold=1.5)
    assert cosine.exit_depths == [6, 2]
    assert math.isnan(cosine.signals[1][0])


def test_auto_is_the_gate_or_else_latent_diff():
    prompt = prompts(5)[0]
    ouro = random_ouro(1, early_exit_threshold=0.5)
    assert adapter_for(ouro).default_threshold == 0.5
    gated = reference_generate(ouro, prompt, 8, exit_rule="gate", exit_threshold=0.5)
    assert_same(reference_generate(ouro, prompt, 8), gated)
    for make in (random_huginn, random_dory):
        model = make(1)
        latent = reference_generate(model, prompt, 8, exit_rule="latent-diff", exit_threshold=0.03)
        assert_same(reference_generate(model, prompt, 8, kv_policy="last_exited"), latent)


def assert_same(output, expected):
    assert output.tokens == expected.tokens
    assert output.exit_depths == expected.exit_depths
    assert output.signals == expected.signals
    assert torch.equal(output.logits, expected.logits)


# What an older token leaves to read.


@pytest.mark.parametrize(
    ("policy", "kv_slots", "left_at", "loops_read"),
    [
        ("last_exited", None, 1, [1, 1, 1, 1]),
        ("last_exited", None, 2, [1, 2, 2, 2]),
        ("last_exited", None, 4, [1, 2, 3, 4]),
        ("shared", None, 1, [1, 1, 1, 1]),
        ("shared", None, 3, [3, 3, 3, 3]),
        ("first_then_shared", None, 1, [1, 1, 1, 1]),
        ("first_then_shared", None, 3, [1, 3, 3, 3]),
        ("first_then_shared", 1, 3, [3, 3, 3, 3]),
        ("first_then_shared", 3, 2, [1, 2, 2, 2]),
        ("first_then_shared", 3, 4, [1, 2, 4, 4]),
        ("modular", None, 1, [1, 1, 1, 1]),
        ("modular", None, 2, [1, 2, 1, 2]),
        ("modular", None, 3, [3, 2, 3, 2]),
        ("modular", None, 4, [3, 4, 3, 4]),
        ("modular", 3, 2, [1, 2, 2, 1]),
        ("modular", 3, 4, [4, 2, 3, 4]),
    ],
)
def test_loops_that_a_full_depth_token_reads(monkeypatch, policy, kv_slots, left_at, loops_read):
    read = []

    def recording(module, query, key, value, *args, **kwargs):
        read.append((module.layer_idx, value[0, 0].tolist()))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "recording", recording)
    reference_generate(
        ToyModel(attn_implementation="recording"),
        toy_prompt(5, 1),
        3,
        exit_rule="replay",
        exit_depths=[4, left_at, 4],
        kv_policy=policy,
        kv_slots=kv_slots,
    )
    # The last token's layers: one before the loops, two in each of four, one after them. Its past: a prompt of one
    # token, which ran all loops, and the token that left.
    prompt_reads = {"last_exited": [1, 2, 3, 4], "shared": [4, 4, 4, 4]}.get(policy)
    layers = read[-10:]
    assert [layer for layer, _ in layers] == [0, *[1, 2] * 4, 3]
    assert layers[0][1] == [[5, 0, 0, 0], [5, 1, 0, 0], [5, 2, 0, 0]]
    assert layers[-1][1] == [[5, 0, 4, 3], [5, 1, left_at, 3], [5, 2, 4, 3]]
    for idx, (layer, entries) in enumerate(layers[1:-1]):
        loop = idx // 2 + 1
        if prompt_reads:
            assert entries[0] == [5, 0, prompt_reads[loop - 1], layer]
        assert entries[1:] == [[5, 1, loops_read[loop - 1], layer], [5, 2, loop, layer]]


@pytest.mark.parametrize(("policy", "kv_slots"), POLICIES)
def test_scripted_toy(policy, kv_slots):
    """Tokens, depths and what every layer read, as predicted without a model."""
    model = ToyModel()
    for prompt in (toy_prompt(7, 1), toy_prompt(7, 1, 5, 2, 2), toy_prompt(12, *[3, 8, 0, 6] * 4)):
        output = reference_generate(model, prompt, 14, kv_policy=policy, kv_slots=kv_slots)
        script = predict(model.config, prompt.tolist(), 14, policy, kv_slots or 2)
        assert output.tokens == script.tokens
        assert output.exit_depths == script.exit_depths
        assert {1, 2, 3, 4} == set(output.exit_depths)
        assert_close(output.logits, torch.stack(script.logits), 1e-12)
        depths = [4, 3, 1, 1, 4, 2, 3, 4]
        replay = {"exit_rule": "replay", "exit_depths": depths}
        output = reference_generate(model, prompt, 8, kv_policy=policy, kv_slots=kv_slots, **replay)
        script = predict(model.config, prompt.tolist(), 8, policy, kv_slots or 2, depths)
        assert output.exit_depths == depths
        assert_close(output.logits, torch.stack(script.logits), 1e-12)


def test_wrong_reads_of_the_toy_show():
    model, prompt = ToyModel(), toy_prompt(7, 1, 5, 2, 2)
    right = torch.stack(predict(model.config, prompt.tolist(), 14).logits)
    for other, kv_slots in POLICIES[1:]:
        wrong = reference_generate(model, prompt, 14, kv_policy=other, kv_slots=kv_slots).logits
        assert (wrong - right).abs().max() > 1e-4, (other, kv_slots)
    assert_close(run_with_one_entry_changed(model, prompt, "value", 0.0), right[1], 1e-12)
    for which in ("key", "value"):
        for channel in range(4):
            change = torch.eye(4, dtype=torch.float64)[channel]
            wrong = run_with_one_entry_changed(model, prompt, which, change)
            assert (wrong - right[1]).abs().max() > 1e-6, (which, channel)


@torch.no_grad()
def run_with_one_entry_changed(model, prompt, which, change):
    """Logits of token 1 where the prompt's last token left another key or value in loop 1 of the first core layer."""
    row = reference._Row(adapter_for(model), slots=[0, 1, 2, 3], start_options={})
    first = int(row.run_prompt(prompt)[0].argmax())
    entries = row.store.entries["core", 0, 0]
    key, value = entries[len(prompt) - 1]
    entries[len(prompt) - 1] = ((value + change).sin(), value) if which == "key" else (key, value + change)
    return row.run_token(first, model.config.depths[first % 10])[0]


@pytest.mark.parametrize(("policy", "kv_slots"), POLICIES)
@pytest.mark.parametrize("make", [random_ouro, random_huginn, random_dory])
def test_replay_of_recorded_depths(make, policy, kv_slots):
    model, prompt = make(2).double(), prompts(11)[0]
    settings = {"kv_policy": policy, "kv_slots": kv_slots}

    def rule(loop, previous_state, state, logits):
        return int(logits().argmax()) % 4 < loop

    output = reference_generate(model, prompt, 10, exit_rule=rule, **settings)
    assert len(set(output.exit_depths[1:])) > 1
    depths = torch.tensor(output.exit_depths)
    replay = reference_generate(model, prompt, 10, exit_rule="replay", exit_depths=depths, **settings)
    assert replay.tokens == output.tokens
    assert replay.exit_depths == output.exit_depths
    assert torch.equal(replay.logits, output.logits)
    assert replay.signals == [[]] * 10


# Ends and refusals.


def test_end_of_sequence_and_choice():
    model, prompt = ToyModel(), toy_prompt(3, 1)
    assert reference_generate(model, prompt, 6).tokens == [34, 37, 30, 33, 36, 39]
    assert reference_generate(model, prompt, 6, eos_token_ids=[99, 30]).tokens == [34, 37, 30]
    assert reference_generate(model, prompt, 6, eos_token_ids=[34]).tokens == [34]
    forced = [52, 41, 77]
    seen = []

    def choose(index, logits):
        seen.append(int(logits.argmax()))
        return forced[index]

    assert reference_generate(model, prompt, 3, choose=choose).tokens == forced
    assert seen == [34, 55, 44]


@pytest.mark.parametrize(
    "settings",
    [
        {"exit_rule": "replay"},
        {"exit_depths": [4, 1, 1]},
        {"exit_rule": "replay", "exit_depths": [3, 1, 1]},
        {"exit_rule": "replay", "exit_depths": [4, 1]},
        {"exit_rule": "replay", "exit_depths": [4, 0, 1]},
        {"exit_rule": "replay", "exit_depths": [4, 5, 1]},
        {"exit_rule": "replay", "exit_depths": [4, 2, 1], "lookahead": 1},
        {"exit_rule": "latent_diff"},
        {"kv_policy": "last"},
        {"max_depth": 5},
    ],
)
def test_refused(settings):
    with pytest.raises(ValueError, match=r"exit_|kv_policy|max_depth"):
        reference_generate(ToyModel(), toy_prompt(3, 1), 3, **settings)
