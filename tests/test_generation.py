"""`generate(cdb=...)`: what a user of generate expects of it."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig, LlamaConfig, LlamaForCausalLM, pipeline
from transformers.utils import logging

from hf_cdb import CDBConfig, CDBGenerationMixin, GenerateCDBOutput, diagnose, enable_cdb
from hf_cdb.exits import Replay

from .dory import random_dory
from .models.test_generate import tiny_tokenizer
from .tiny import RANDOM, assert_close, left_pad, prompts, random_huginn, random_ouro

IDS, MASK = left_pad(prompts(3, 9, 6))
EARLY = {"exit_rule": "confidence", "exit_threshold": 0.1}


def generate(model, cdb, ids=IDS, mask=MASK, **kwargs):
    kwargs = {"max_new_tokens": 8, "do_sample": False, **kwargs}
    return model.generate(ids, attention_mask=mask, cdb=cdb, **kwargs)


def refused(words, run, error=ValueError):
    with pytest.raises(error) as caught:
        run()
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_false_and_none_are_stock_to_the_bit(model):
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False, **options)
    for cdb in (False, None):
        output = generate(model, cdb, **options)
        assert type(output) is type(plain)
        assert not isinstance(output, GenerateCDBOutput)
        assert torch.equal(output.sequences, plain.sequences)
        for left, right in zip(output.scores, plain.scores, strict=True):
            assert torch.equal(left, right)


def test_saved_defaults(model, tmp_path):
    wanted = generate(model, EARLY)
    model.generation_config.cdb = True
    model.generation_config.cdb_config = EARLY
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    for saved in (model, loaded):
        assert torch.equal(generate(saved, None), wanted)
        assert torch.equal(generate(saved, True), wanted)
        assert torch.equal(generate(saved, {"max_num_seqs": 2}), wanted)
        full = generate(saved, CDBConfig(exit_rule="never"))
        assert torch.equal(full, generate(saved, False))
        assert not torch.equal(full, wanted)
    config = GenerationConfig(cdb=True, cdb_config=EARLY, max_new_tokens=8, do_sample=False, pad_token_id=0)
    model.generation_config.cdb = model.generation_config.cdb_config = None
    assert torch.equal(model.generate(IDS, attention_mask=MASK, generation_config=config), wanted)


def test_saved_settings_alone_wait_for_cdb(model, tmp_path):
    """`cdb_config` without `cdb`, as the embedded checkpoints have it: plain generate stays plain."""
    plain, wanted = generate(model, False), generate(model, EARLY)
    model.generation_config.cdb_config = EARLY
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(generate(loaded, None), plain)
    assert torch.equal(generate(loaded, True), wanted)


def test_output_without_and_with_a_dict(model):
    sequences = generate(model, EARLY)
    output = generate(model, EARLY, return_dict_in_generate=True, output_scores=True, output_logits=True)
    assert isinstance(output, GenerateCDBOutput)
    assert torch.equal(output.sequences, sequences)
    assert output.exit_depths.shape == (3, 8)
    assert output.stats.tokens == 24
    assert output.stats.mean_depth == pytest.approx(output.exit_depths.double().mean().item())
    for step in range(8):
        assert torch.equal(output.scores[step].argmax(-1), sequences[:, 9 + step])
        assert torch.equal(output.scores[step], output.logits[step])
    scores = model.compute_transition_scores(sequences, output.scores, normalize_logits=True)
    assert scores.shape == (3, 8)
    assert (scores <= 0).all()


def test_rows_that_end_early_are_filled(model):
    free = generate(model, {"exit_rule": "never"})[:, 9:]
    stop = int(free[1, 2])
    options = {
        "eos_token_id": [stop, 999],
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
    }
    stock = generate(model, False, **options)
    output = generate(model, {"exit_rule": "never"}, **options)
    assert torch.equal(output.sequences, stock.sequences)
    lengths = [next((step + 1 for step, token in enumerate(row) if token == stop), 8) for row in free.tolist()]
    assert output.exit_depths.count_nonzero(dim=1).tolist() == lengths
    for row, length in enumerate(lengths):
        for step in range(len(output.scores)):
            if step < length:
                assert_close(output.scores[step][row], stock.scores[step][row], 1e-6)
            else:
                assert output.scores[step][row, 0] == 0
                assert (output.scores[step][row, 1:] == -torch.inf).all()
                assert (output.logits[step][row] == 0).all()


def test_stop_strings(model):
    """G-05: a stop string ends the row that holds it and no other, and does not match across rows."""
    tokenizer = letter_tokenizer()
    free = generate(model, {"exit_rule": "never"})[:, 9:]
    # without any end id stock generate would go on writing into rows that have ended
    options = {"stop_strings": [tokenizer.decode(free[2, 2:4])], "tokenizer": tokenizer, "eos_token_id": 999}
    stock, ours = generate(model, False, **options), generate(model, {"exit_rule": "never"}, **options)
    assert torch.equal(stock, ours)
    assert (ours[2, 9 + 4 :] == 0).all()


def letter_tokenizer():
    """50 tokens, one character each."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({chr(ord("A") + i): i for i in range(50)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_inputs_embeds(model):
    embeds = model.get_input_embeddings()(IDS)
    by_ids = generate(model, EARLY)
    by_embeds = model.generate(inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=8, do_sample=False, cdb=EARLY)
    assert torch.equal(by_embeds, by_ids[:, 9:])
    chunked = model.generate(
        inputs_embeds=embeds,
        attention_mask=MASK,
        max_new_tokens=8,
        do_sample=False,
        cdb={**EARLY, "prefill_chunk_size": 2, "max_num_seqs": 2},
    )
    assert torch.equal(chunked, by_embeds)


def test_one_row_and_many_rows(model):
    one = generate(model, EARLY, IDS[:1, 6:], MASK[:1, 6:])
    many = generate(model, {**EARLY, "max_num_seqs": 8}, IDS[:1, 6:].expand(40, -1), None, max_new_tokens=8)
    assert torch.equal(many, one.expand(40, -1))


def test_sampling_follows_the_seeds_of_the_rows(model):
    settings = {**EARLY, "seeds": [4, 5, 6]}
    options = {"do_sample": True, "num_return_sequences": 2}
    first = generate(model, settings, **options)
    torch.manual_seed(123)
    assert torch.equal(generate(model, {**settings, "max_num_seqs": 2}, **options), first)
    assert not torch.equal(first[0], first[1])
    alone = generate(model, {**EARLY, "seeds": [5]}, IDS[1:2], MASK[1:2], **options)
    assert torch.equal(alone, first[2:4])
    assert not torch.equal(generate(model, {**settings, "seeds": [7, 8, 9]}, **options), first)


def test_sampling_beyond_the_rows_in_flight_repeats_with_its_seed(model):
    def run(width):
        torch.manual_seed(2)
        return generate(model, {**EARLY, "max_num_seqs": width}, do_sample=True)

    assert torch.equal(run(1), run(2))


@pytest.mark.parametrize("seed_of_row", [[3, 1, 8], [3, 3, 3]])
def test_start_noise_of_huginn_is_a_row_s_own(seed_of_row):
    """E-03: with a seed per request the result does not depend on neighbours or their order."""
    model = RANDOM["huginn"](eos_token_id=None, pad_token_id=0).double()
    noise = {"init_scale": 1.0, "init_seed": torch.tensor(seed_of_row)}
    settings = {"exit_rule": "latent-diff", "exit_threshold": 0.6}
    together = generate(model, settings, return_dict_in_generate=True, **noise)
    for row in range(3):
        alone = generate(
            model,
            settings,
            IDS[row : row + 1],
            MASK[row : row + 1],
            return_dict_in_generate=True,
            init_scale=1.0,
            init_seed=seed_of_row[row],
        )
        assert torch.equal(alone.sequences[0], together.sequences[row])
        assert torch.equal(alone.exit_depths[0], together.exit_depths[row])
    order = [2, 0, 1]
    shuffled = generate(
        model, settings, IDS[order], MASK[order], init_scale=1.0, init_seed=torch.tensor(seed_of_row)[order]
    )
    assert torch.equal(shuffled, together.sequences[order])
    stock = generate(model, False, **noise)
    assert torch.equal(generate(model, {"exit_rule": "never"}, **noise), stock)


def test_decoding_equals_recompute_at_every_step():
    """B-01: with one slot per layer the text breaks down after about two tokens."""
    for make in RANDOM.values():
        model = make(eos_token_id=None, pad_token_id=0).double()
        options = {"return_dict_in_generate": True, "output_logits": True}
        recomputed = generate(model, False, use_cache=False, **options)
        output = generate(model, {"exit_rule": "never"}, **options)
        assert torch.equal(output.sequences, recomputed.sequences)
        for left, right in zip(output.logits, recomputed.logits, strict=True):
            assert_close(left, right, 1e-6)


def test_batch_sizes_agree_in_float32_and_near_ties_excuse_bfloat16():
    """E-01: rounding depends on the shape of the batch."""
    for make in RANDOM.values():
        model = make(eos_token_id=None, pad_token_id=0)
        ids = prompts(7)[0][None]
        options = {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True}
        for dtype in (torch.float32, torch.bfloat16):
            model.to(dtype)
            alone = generate(model, EARLY, ids, None, **options)
            for rows in (2, 4, 8):
                batch = generate(model, EARLY, ids.expand(rows, -1), None, **options)
                if dtype == torch.float32:
                    assert torch.equal(batch.sequences, alone.sequences.expand(rows, -1))
                    assert torch.equal(batch.exit_depths, alone.exit_depths.expand(rows, -1))
                    continue
                for row in range(rows):
                    same_depths = torch.equal(batch.exit_depths[row], alone.exit_depths[0])
                    differs = (batch.sequences[row] != alone.sequences[0]).nonzero().flatten()
                    if len(differs) and same_depths:
                        best = alone.logits[differs[0] - 7][0].topk(2).values
                        assert (best[0] - best[1]) / best[0].abs() < 0.05


def test_depth_follows_the_threshold():
    """D-02: a knob that changes nothing in the evaluation."""
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    depths = {}
    for threshold in (0.01, 0.3, 0.6, 0.9, 1.0):
        settings = {"exit_rule": "gate", "exit_threshold": threshold}
        output = generate(model, settings, return_dict_in_generate=True)
        depths[threshold] = output.exit_depths[:, 1:].double().mean().item()
        assert output.stats.mean_depth == pytest.approx(output.exit_depths.double().mean().item())
    assert depths[0.01] == 1
    assert depths[1.0] == 4
    assert list(depths.values()) == sorted(depths.values())
    assert len(set(depths.values())) == 5
    shallow = generate(model, {"exit_rule": "gate", "exit_threshold": 0.01})
    assert not torch.equal(shallow, generate(model, {"exit_rule": "never"}))


def test_keywords_of_ouro_beside_cdb():
    """J-01: known arguments work or are refused with a hint."""
    model = random_ouro(eos_token_id=None, pad_token_id=0).double()
    by_keyword = generate(model, True, exit_threshold=0.5)
    assert torch.equal(by_keyword, generate(model, {"exit_threshold": 0.5}))
    for step in range(4):
        fixed = generate(model, True, exit_at_step=step)
        assert torch.equal(fixed, generate(model, False, exit_at_step=step))
    refused(
        ["exit_threshold=0.5", "exit_threshold=0.7"],
        lambda: generate(model, {"exit_threshold": 0.7}, exit_threshold=0.5),
    )
    refused(["exit_at_step=1", "gate"], lambda: generate(model, {"exit_rule": "gate"}, exit_at_step=1))
    refused(["use_weighted_exit"], lambda: generate(model, True, use_weighted_exit=True))


def test_keywords_of_huginn_beside_cdb():
    model = random_huginn(eos_token_id=None, pad_token_id=0).double()
    settings = {"exit_rule": "cosine", "exit_threshold": 0.2, "max_depth": 8}
    wanted = generate(model, settings)
    assert torch.equal(generate(model, True, criterion="cosine", exit_threshold=0.2, num_steps=8), wanted)
    assert torch.equal(generate(model, True, criterion="cosine", exit_threshold=0.2, num_steps=torch.tensor(8)), wanted)
    shared = generate(model, {**settings, "kv_policy": "shared"})
    lookup = {"cache_lookup_strategy": "latest-m2-compress-s2"}
    assert torch.equal(generate(model, settings, **lookup), shared)
    refused(["num_steps=4", "max_depth=8"], lambda: generate(model, settings, num_steps=4))
    refused(
        ["cache_lookup_strategy='full'", "kv_policy"], lambda: generate(model, settings, cache_lookup_strategy="full")
    )


def test_arguments_of_the_forward_that_the_engine_does_not_read():
    model = random_huginn(eos_token_id=None, pad_token_id=0)
    refused(["input_states", "cdb=False"], lambda: generate(model, True, input_states=torch.zeros(3, 9, 32)))


def test_arguments_that_are_not_known(model):
    refused(["cdb_threshold"], lambda: generate(model, True, cdb_threshold=0.5))
    refused(["'exit_treshold'", "'exit_threshold'"], lambda: generate(model, {"exit_treshold": 0.5}))
    refused(["cdb=3"], lambda: generate(model, 3))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_beams": 2}, ["beam", "cdb=False"]),
        ({"prompt_lookup_num_tokens": 2}, ["assisted", "cdb=False"]),
        ({"assistant_model": "self"}, ["assistant_model", "cdb=False"]),
        ({"cache": DynamicCache()}, ["cache", "text"]),
        ({"past_key_values": DynamicCache()}, ["past_key_values", "text"]),
        ({"cache_implementation": "static"}, ["cache_implementation='static'"]),
        ({"output_attentions": True}, ["output_attentions=True"]),
        ({"output_hidden_states": True}, ["output_hidden_states=True"]),
        ({"custom_generate": "somebody/something"}, ["custom_generate"]),
        ({"synced_gpus": True}, ["synced_gpus=True"]),
        ({"use_cache": False}, ["use_cache=False"]),
        ({"prefill_chunk_size": 4}, ["prefill_chunk_size=4"]),
        ({"position_ids": torch.arange(9).expand(3, -1)}, ["position_ids", "attention_mask"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_not_supported_is_refused(model, arguments, words):
    if arguments.get("assistant_model"):
        arguments = {"assistant_model": model}
    refused(words, lambda: generate(model, True, **arguments))


@pytest.mark.parametrize(
    ("depths", "words"),
    [
        ([[4] * 8] * 2, ["2 rows", "3 prompts"]),
        ([[4] * 7] * 3, ["row 0", "7 depths", "8 tokens"]),
        ([[4] * 8, [3] + [4] * 7, [4] * 8], ["row 1", "begins with 3", "Begin with 4"]),
        ([[4, 0] + [4] * 6] * 3, ["row 0", "holds 0", "1 and 4"]),
        ([[4, 5] + [4] * 6] * 3, ["holds 5"]),
    ],
)
def test_depths_that_cannot_be_replayed(depths, words):
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    refused(words, lambda: generate(model, {"exit_rule": "replay", "exit_depths": depths}))


def test_replay_with_lookahead_and_return_sequences():
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    depths = [[4, 2, 3, 4, 2, 2, 3, 4], [4, 3, 3, 2, 2, 4, 4, 2], [4] * 8]
    settings = {"exit_rule": "replay", "exit_depths": depths, "lookahead": 1}
    options = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    output = generate(model, settings, **options)
    assert output.exit_depths.tolist() == [row for row in depths for _ in range(2)]
    shallow = [[4, 1] + [4] * 6] * 3
    refused(["holds 1", "lookahead=1"], lambda: generate(model, {**settings, "exit_depths": shallow}))


def test_an_empty_row_is_refused(model):
    mask = MASK.clone()
    mask[0] = 0
    refused(["row 0", "attention_mask"], lambda: generate(model, EARLY, mask=mask))


def test_pipeline(model):
    pipe = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer())
    texts = ["w5 w6 w7", "w9 w4 w3 w11 w40 w8"]
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    batched = pipe(texts, batch_size=2, cdb=EARLY, **options)
    for text, result in zip(texts, batched, strict=True):
        assert result[0] == pipe(text, cdb=EARLY, **options)[0]
    assert pipe(texts, batch_size=2, cdb={"exit_rule": "never"}, **options) == pipe(texts, batch_size=2, **options)


@pytest.mark.parametrize("before", ["eager", "sdpa"])
def test_the_model_is_left_as_it_was(model, before):
    model.set_attn_implementation(before)
    training = model.training
    generate(model, EARLY)
    assert model.config._attn_implementation == before
    assert model.training == training
    handle = model.get_output_embeddings().register_forward_pre_hook(_boom)
    with pytest.raises(RuntimeError, match="boom"):
        generate(model, EARLY)
    handle.remove()
    assert model.config._attn_implementation == before
    assert torch.equal(generate(model, EARLY), generate(model, EARLY))


def _boom(*_):
    raise RuntimeError("boom")


def test_trace_records_every_launch(model):
    output = generate(model, {**EARLY, "trace": True, "max_num_seqs": 2}, return_dict_in_generate=True)
    trace = output.stats.trace
    assert len(trace) == sum(output.stats.launches.values())
    assert sum(len(launch.rows) for launch in trace if launch.stage == "loop") == output.stats.rows["loop"]
    first = trace[0]
    assert (first.stage, first.rows, first.depths, first.waiting) == ("prelude", (0, 1), (0, 0), 1)
    assert generate(model, EARLY, return_dict_in_generate=True).stats.trace is None


def test_enable_cdb_on_a_model_of_transformers(tmp_path):
    model = random_dory(eos_token_id=None, pad_token_id=0)
    plain = model.generate(IDS, attention_mask=MASK, max_new_tokens=6, do_sample=False)
    enabled = enable_cdb(model)
    assert enabled is model
    assert enable_cdb(model) is model
    assert isinstance(model, CDBGenerationMixin)
    assert type(model).__name__ == "DoryForCausalLM"
    settings = {"exit_rule": "never"}
    assert torch.equal(generate(model, settings, max_new_tokens=6), plain)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(generate(twin, settings, max_new_tokens=6), plain)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert not isinstance(loaded, CDBGenerationMixin)
    assert torch.equal(generate(enable_cdb(loaded), settings, max_new_tokens=6), plain)


def test_enable_cdb_refuses_what_could_not_generate():
    refused(["model=DoryModel", "head", "AutoModelForCausalLM"], lambda: enable_cdb(random_dory().model))


def test_a_model_that_is_not_looped_is_refused():
    """J-01: with the way out."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    for run in (enable_cdb, lambda model: diagnose(model, IDS)):
        refused(["LlamaForCausalLM", "'llama'", "register_adapter"], lambda run=run: run(llama))
    # No class of the library is changed, so this message is the library's.
    refused(["not used by the model", "['cdb']"], lambda: llama.generate(IDS, cdb=True))


def test_offloaded_layers(model):
    """Hooks of accelerate are reached, because modules are called."""
    from accelerate import cpu_offload

    expected = generate(model, EARLY)
    offloaded = cpu_offload(model, execution_device="cpu")
    assert all(parameter.is_meta for parameter in offloaded.parameters())
    assert torch.equal(generate(offloaded, EARLY), expected)


def test_keywords_of_the_call_go_before_what_is_saved():
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    wanted = generate(model, {"exit_threshold": 0.7})
    fixed = generate(model, {}, exit_at_step=1)
    model.generation_config.cdb_config = {"exit_threshold": 0.4}
    assert torch.equal(generate(model, True, exit_threshold=0.7), wanted)
    assert torch.equal(generate(model, True, exit_at_step=1), fixed)
    assert not torch.equal(generate(model, True), wanted)
    model.generation_config.cdb_config = {"exit_rule": "confidence", "exit_threshold": 0.1}
    huginn = random_huginn(eos_token_id=None, pad_token_id=0)
    expected = generate(huginn, {"exit_rule": "kl"})
    huginn.generation_config.cdb_config = {"exit_rule": "confidence", "exit_threshold": 0.1}
    assert torch.equal(generate(huginn, True, criterion="kl"), expected)


@pytest.mark.parametrize(
    ("cdb", "keywords", "words"),
    [
        ({"exit_threshold": 0.5}, {"exit_at_step": 1}, ["exit_at_step=1", "exit_threshold=0.5"]),
        ({}, {"exit_at_step": -1}, ["exit_at_step=-1", "0 to 3"]),
        ({}, {"exit_at_step": 4}, ["exit_at_step=4", "4 loops"]),
        ({}, {"exit_at_step": 1, "early_exit_step": 2}, ["exit_at_step=1 and early_exit_step=2"]),
    ],
)
def test_steps_that_contradict_or_do_not_exist(cdb, keywords, words):
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    refused(words, lambda: generate(model, cdb, **keywords))


def test_seeds_of_the_start_state_in_every_form_that_the_model_takes():
    model = random_huginn(eos_token_id=None, pad_token_id=0)
    options = {"init_scale": 1.0}
    wanted = generate(model, {"exit_rule": "never"}, init_seed=torch.tensor([3, 1, 8]), **options)
    assert torch.equal(generate(model, {"exit_rule": "never"}, init_seed=[3, 1, 8], **options), wanted)
    for seed in (torch.tensor([3, 1]), 3.5, [True, False, True]):
        refused(["init_seed="], lambda seed=seed: generate(model, {"exit_rule": "never"}, init_seed=seed, **options))


def test_a_rule_that_replays_may_be_used_again():
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    rule = Replay([[4, 1, 2, 3, 4, 1, 2, 3]] * 3)
    options = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True}
    for _ in range(2):
        assert generate(model, {"exit_rule": rule}, **options).exit_depths.tolist() == [rule.depths[0]] * 6
    assert generate(model, {"exit_rule": rule}, return_dict_in_generate=True).exit_depths.tolist() == rule.depths


def test_seeds_without_sampling_are_said_to_have_no_effect(monkeypatch):
    said = []
    monkeypatch.setattr("hf_cdb.generation_requests.logger.warning_once", said.append)
    model = random_ouro(eos_token_id=None, pad_token_id=0)
    generate(model, {"exit_rule": "never", "seeds": [1, 2, 3]})
    assert said == ["seeds has no effect: nothing is drawn with do_sample=False."]


def test_a_pad_token_beyond_the_vocabulary_has_no_score():
    model = random_ouro(pad_token_id=0)
    end = int(generate(model, {"exit_rule": "never"})[0, IDS.shape[1]])
    options = {"pad_token_id": 60, "eos_token_id": end, "return_dict_in_generate": True, "output_scores": True}
    output = generate(model, {"exit_rule": "never"}, **options)
    assert output.sequences[0, -1] == 60
    assert (output.scores[-1][0] == -torch.inf).all()


@pytest.mark.parametrize("saved", [None, {"exit_rule": "never", "max_num_seqs": 2}])
def test_cdb_config_as_an_argument(ouro, saved):
    """It takes the place of the saved settings, with or without such; it is refused where nothing reads it."""
    ouro.generation_config.cdb_config = saved
    expected = generate(ouro, EARLY)
    assert not torch.equal(expected, generate(ouro, False))
    assert torch.equal(generate(ouro, True, cdb_config=EARLY), expected)
    assert torch.equal(generate(ouro, {"max_num_seqs": 1}, cdb_config=EARLY), expected)
    for cdb in (None, False):
        refused(["cdb_config=", f"cdb={cdb}", "cdb=True"], lambda cdb=cdb: generate(ouro, cdb, cdb_config=EARLY))
    refused(["cdb_config=", "CDBConfig"], lambda: generate(ouro, CDBConfig(), cdb_config=EARLY))
    refused(["'exit_treshold'", "'exit_threshold'"], lambda: generate(ouro, True, cdb_config={"exit_treshold": 0.5}))
    refused(["cdb_config=5", "dict"], lambda: generate(ouro, True, cdb_config=5))
    assert ouro.generation_config.cdb_config == saved


def test_saved_settings_that_do_not_exist_are_told_of_while_cdb_is_off(ouro, monkeypatch):
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.generation_arguments"), "warning_once", said.append)
    plain = generate(ouro, None)
    assert not said
    ouro.generation_config.cdb_config = {"exit_treshold": 0.5}
    assert torch.equal(generate(ouro, None), plain)
    assert len(said) == 1
    assert "'exit_treshold'" in said[0]


def test_the_same_rule_keeps_its_saved_threshold(ouro):
    expected = generate(ouro, {"exit_rule": "gate", "exit_threshold": 0.4})
    assert not torch.equal(expected, generate(ouro, {"exit_rule": "never"}))
    for saved in ({"exit_rule": "gate", "exit_threshold": 0.4}, {"exit_threshold": 0.4}):
        ouro.generation_config.cdb_config = saved
        for rule in ("gate", "auto"):
            assert torch.equal(generate(ouro, {"exit_rule": rule}), expected)


def test_an_assistant_with_saved_cdb_drafts_with_stock_generation(model, monkeypatch):
    """Drafts change nothing of what the model says."""
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.generation"), "warning_once", said.append)
    assistant = type(model)(model.config).to(model.dtype).eval()
    assistant.load_state_dict(model.state_dict())
    assistant.generation_config = copy.deepcopy(model.generation_config)
    assistant.generation_config.cdb = EARLY
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": 999}
    plain = model.generate(IDS[1:2], **options)
    assert torch.equal(model.generate(IDS[1:2], assistant_model=assistant, **options), plain)
    assert said
    assert "generation_config.cdb=" in said[0]
    model.generation_config.cdb = EARLY  # of which the assistant is given a copy
    assert torch.equal(model.generate(IDS[1:2], cdb=False, assistant_model=assistant, **options), plain)


def test_contradicting_keywords_are_named_with_what_was_given(ouro):
    def call(cdb=True, **keywords):
        return lambda: generate(ouro, cdb, **keywords)

    refused(["exit_at_step=1", "2 loops", "max_depth=3"], call({"max_depth": 3}, exit_at_step=1))
    refused(["exit_at_step=1", "exit_threshold=0.5", "Drop one"], call(exit_at_step=1, exit_threshold=0.5))
    refused(["exit_at_step=1", "cdb's exit_threshold=0.5"], call({"exit_threshold": 0.5}, exit_at_step=1))
    huginn = RANDOM["huginn"](eos_token_id=None, pad_token_id=0)
    refused(
        ["criterion='none'", "latent-diff", "'never' means full depth"],
        lambda: generate(huginn, True, criterion="none"),
    )
    assert torch.equal(generate(huginn, True, criterion="never"), generate(huginn, {"exit_rule": "never"}))


@pytest.mark.parametrize("saved", [5, ["exit_threshold"], "exit_threshold=0.5"])
def test_saved_settings_that_are_none(ouro, saved):
    ouro.generation_config.cdb_config = saved
    refused(["generation_config.cdb_config=", repr(saved), "dict"], lambda: generate(ouro, True))


@pytest.mark.parametrize("copies", [1, 2])
def test_token_limits_of_the_rows(model, copies):
    """A row with a limit of its own has the first tokens of the row without; then comes padding."""
    options = {"max_new_tokens": 7, "num_return_sequences": copies, "do_sample": True, "return_dict_in_generate": True}
    settings = {**EARLY, "seeds": [4, 5, 6], "max_num_seqs": 2}
    free = generate(model, settings, **options)
    bound = generate(model, {**settings, "token_limits": [3, 9, 1]}, **options)
    assert bound.sequences.shape == free.sequences.shape
    for row, limit in enumerate(limit for limit in (3, 7, 1) for _ in range(copies)):
        end = IDS.shape[1] + limit
        assert torch.equal(bound.sequences[row, :end], free.sequences[row, :end])
        assert (bound.sequences[row, end:] == 0).all()
        assert torch.equal(bound.exit_depths[row, :limit], free.exit_depths[row, :limit])
        assert (bound.exit_depths[row, limit:] == 0).all()
        assert bound.row_stats[row].tokens == limit


def test_token_limits_that_do_not_fit(model):
    refused(["token_limits has 2 entries", "3 prompts"], lambda: generate(model, {**EARLY, "token_limits": [3, 4]}))
    for wrong in ([3, 0, 1], 5, [2.5, 1, 1]):
        refused(["token_limits=", "one positive integer per prompt"], lambda: CDBConfig(token_limits=wrong))  # noqa: B023
