"""Random combinations of options, prompts and settings: every row gives the tokens and depths that it gives alone.

With exits off the same combinations give stock's tokens. A failure names the seed of its combination; `check(seed)`
and `check_stock(seed)` run it again.
"""

import functools
import random

import pytest
import torch
from transformers import SynthIDTextWatermarkingConfig, WatermarkingConfig

from hf_cdb import RowsFailedError, enable_cdb

from .dory import random_dory
from .test_engine import THRESHOLDS
from .tiny import left_pad, prompts, random_huginn, random_ouro

# Of limits that were drawn: a minimum above the maximum.
pytestmark = pytest.mark.filterwarnings("ignore:Unfeasible length constraints:UserWarning")

COMBINATIONS = 200
BLOCK = 20  # per test
MAKE = {"ouro": random_ouro, "huginn": random_huginn, "dory": random_dory}
ENDS = list(range(1, 50, 6))

# Every option with the values that it may take in a combination.
PROCESSING = {
    "repetition_penalty": [1.3, 4.0],
    "encoder_repetition_penalty": [0.7, 3.0],
    "no_repeat_ngram_size": [1, 2],
    "encoder_no_repeat_ngram_size": [1, 2],
    "bad_words_ids": [[[3], [7, 8]], [[token] for token in range(0, 50, 3)]],
    "sequence_bias": [{(4,): 5.0, (2, 9): -3.0}],
    "suppress_tokens": [[1, 2, 3], list(range(20, 45))],
    "begin_suppress_tokens": [list(range(5, 30))],
    "forced_eos_token_id": [7],
    "exponential_decay_length_penalty": [(2, 1.5)],
    "min_new_tokens": [3],
    "min_length": [9],
    "guidance_scale": [1.5],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
    "watermarking_config": [
        WatermarkingConfig(bias=4.0),
        WatermarkingConfig(bias=4.0, seeding_scheme="selfhash"),
        SynthIDTextWatermarkingConfig(keys=[654, 400], ngram_len=3, sampling_table_size=64),
    ],
}
SAMPLING = {
    "temperature": [0.5, 1.8],
    "top_k": [0, 1, 7],
    "top_p": [0.4, 0.9],
    "min_p": [0.1],
    "top_h": [0.4],
    "typical_p": [0.5],
    "epsilon_cutoff": [0.02],
    "eta_cutoff": [0.05],
    "num_return_sequences": [2],
}
SETTINGS = {
    "kv_policy": ["last_exited", "shared", "first_then_shared", "modular"],
    "max_num_seqs": [1, 2, 3, 64],
    "refill": [True, False],
    "min_coda_batch": [1, 2, 4],
    "lookahead": [0, 1],
    "min_depth": [1, 2],
    "prefill_chunk_size": [None, 1, 3],
    "max_prefill_tokens": [None, 1, 4],
}


class EveryThird:
    """A user's processor with a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        return scores if self.calls % 3 else scores.masked_fill(torch.arange(50) % 2 == 1, -torch.inf)


def by_sum(ids, scores):
    """A user's stopping criterion."""
    return ids.sum(1) % 6 == 0


def allowed(prompt, ids):
    return [token for token in range(50) if (token + int(ids[-1])) % 4 != 0]


@functools.cache
def model_of(family):
    model = enable_cdb(MAKE[family]().double())
    model.generation_config.update(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    return model


def combination(seed):
    """Family, prompts, options of generate, settings of cdb and seeds of the prompts."""
    choose = random.Random(seed)
    family = choose.choice(list(MAKE))
    rows = prompts(*(choose.randint(1, 12) for _ in range(choose.randint(2, 4))), seed=seed)
    options = {"max_new_tokens": choose.randint(1, 7), "do_sample": choose.random() < 0.5}
    for name in choose.sample(list(PROCESSING), choose.randint(0, 3)):
        options[name] = choose.choice(PROCESSING[name])
    if options["do_sample"]:
        for name in choose.sample(list(SAMPLING), choose.randint(0, 3)):
            options[name] = choose.choice(SAMPLING[name])
    needs_ends = {"exponential_decay_length_penalty", "min_new_tokens", "min_length"} & options.keys()
    if needs_ends or choose.random() < 0.4:
        options["eos_token_id"] = choose.sample(ENDS, choose.randint(1, 5))
    settings = {name: choose.choice(values) for name, values in SETTINGS.items()}
    rules = [rule for rule, thresholds in THRESHOLDS.items() if family in thresholds]
    settings["exit_rule"] = choose.choice(rules)
    settings["exit_threshold"] = THRESHOLDS[settings["exit_rule"]][family]
    extra = {
        "logits_processor": lambda: [EveryThird()],
        "stopping_criteria": lambda: [by_sum],
        "prefix_allowed_tokens_fn": lambda: allowed,
    }
    chosen = {name: make for name, make in extra.items() if choose.random() < 0.15}
    return family, rows, options, chosen, settings, [choose.randrange(2**40) for _ in rows]


def outcome(call):
    """The output of a call and the rows that failed in it."""
    try:
        return call(), set()
    except RowsFailedError as error:
        return error.output, set(error.errors)


def check(seed):
    """Run combination `seed` together and row by row; what differs, or None."""
    family, rows, options, extra, settings, seeds = combination(seed)
    ids, mask = left_pad(rows)
    copies = options.get("num_return_sequences", 1)

    def run(lines, **schedule):
        return model_of(family).generate(
            ids[lines],
            attention_mask=mask[lines],
            return_dict_in_generate=True,
            cdb={**settings, "seeds": [seeds[line] for line in lines], **schedule},
            **options,
            **{name: make() for name, make in extra.items()},
        )

    together, failed = outcome(lambda: run(list(range(len(rows)))))
    for row in range(len(rows)):
        alone, failed_alone = outcome(functools.partial(run, [row], max_num_seqs=1))
        new = alone.exit_depths.shape[1]
        lines = slice(row * copies, (row + 1) * copies)
        tokens, depths = together.sequences[lines, ids.shape[1] :], together.exit_depths[lines]
        same = torch.equal(tokens[:, :new], alone.sequences[:, ids.shape[1] :])
        same = same and failed_alone == {line - lines.start for line in failed if lines.start <= line < lines.stop}
        if not same or not torch.equal(depths[:, :new], alone.exit_depths) or depths[:, new:].any():
            return (
                f"seed {seed}, row {row} of {[len(r) for r in rows]}: {family}, {options}, {list(extra)}, {settings}: "
                f"tokens {tokens.tolist()} against {alone.sequences[:, ids.shape[1] :].tolist()}, depths "
                f"{depths.tolist()} against {alone.exit_depths.tolist()}"
            )
    return None


def check_stock(seed):
    """Run combination `seed` with exits off, and as stock generate does; what differs, or None."""
    family, rows, options, extra, _, _ = combination(seed)
    ids, mask = left_pad(rows)
    results = []
    for cdb in (False, {"exit_rule": "never"}):
        torch.manual_seed(seed)
        # Without any end token stock goes on writing into rows that a criterion has ended.
        arguments = {"eos_token_id": 999, **options, **{name: make() for name, make in extra.items()}}
        try:
            results.append(model_of(family).generate(ids, attention_mask=mask, cdb=cdb, **arguments).tolist())
        except (RuntimeError, ValueError):  # nothing was left to draw from: stock ends the call, cdb the row
            results.append(None)
    return None if results[0] == results[1] else f"seed {seed}: {family}, {options}, {list(extra)}: {results}"


@pytest.mark.parametrize("first", range(0, COMBINATIONS, BLOCK))
def test_random_combinations_equal_their_rows_alone(first):
    found = [difference for seed in range(first, first + BLOCK) if (difference := check(seed)) is not None]
    assert not found, f"{len(found)} of {BLOCK} differ: " + "\n".join(found)


@pytest.mark.parametrize("first", range(0, COMBINATIONS, BLOCK))
def test_random_combinations_equal_stock_with_exits_off(first):
    found = [difference for seed in range(first, first + BLOCK) if (difference := check_stock(seed)) is not None]
    assert not found, f"{len(found)} of {BLOCK} differ: " + "\n".join(found)


def test_the_combinations_reach_every_option():
    seen = [combination(seed) for seed in range(COMBINATIONS)]
    for name, values in {**PROCESSING, **SAMPLING}.items():
        assert {str(case[2][name]) for case in seen if name in case[2]} == {str(value) for value in values}, name
    assert {case[0] for case in seen} == set(MAKE)
    assert {case[4]["exit_rule"] for case in seen} == set(THRESHOLDS)
    assert {name for case in seen for name in case[3]} == {
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
    }
