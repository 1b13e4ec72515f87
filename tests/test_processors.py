"""Logits processors of users, and sampling: every row by itself, with stock's view of its history."""

import functools
import threading

import pytest
import torch
from torch import nn
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.utils import logging

from hf_cdb import CDBConfig, RowsFailedError
from hf_cdb.adapters import adapter_for
from hf_cdb.engine import Engine
from hf_cdb.noise import Noise
from hf_cdb.request import Request
from hf_cdb.sampling import Sampler

from .tiny import left_pad, prompts, random_ouro
from .toy import ToyModel, predict, toy_prompt

IDS, MASK = left_pad(prompts(3, 9, 6))
EARLY = {"exit_rule": "confidence", "exit_threshold": 0.1}
NEVER = {"exit_rule": "never"}


def generate(model, cdb, rows=slice(None), seed=5, **options):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 7, "do_sample": False, **options}
    return model.generate(IDS[rows], attention_mask=MASK[rows], cdb=cdb, **options)


def agrees(model, make, **options):
    """A processor gives stock's tokens with exits off, and with exits on those of each row alone."""
    stock = generate(model, False, logits_processor=[make()], **options)
    for width in (1, 64):
        ours = generate(model, {**NEVER, "max_num_seqs": width}, logits_processor=[make()], **options)
        assert torch.equal(ours, stock)
    assert not torch.equal(stock, generate(model, False, **options)), "the processor changes nothing"
    options["return_dict_in_generate"] = True
    together = generate(model, {**EARLY, "max_num_seqs": 2}, logits_processor=[make()], **options)
    for row in range(3):
        alone = generate(model, EARLY, slice(row, row + 1), logits_processor=[make()], **options)
        assert torch.equal(together.sequences[row], alone.sequences[0])
        assert torch.equal(together.exit_depths[row], alone.exit_depths[0])


def forbid_last_but_one(ids, scores):
    """Reads the history: no token comes again after one other."""
    return scores.scatter(1, ids[:, -2:-1], -torch.inf)


class EveryThird(LogitsProcessor):
    """Keeps a state: its calls are counted, and every third may take even tokens only."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls % 3 == 0:
            scores = scores.clone()
            scores[:, 1::2] = -torch.inf
        return scores


class Drifting(LogitsProcessor):
    """Keeps a tensor with a line per row, made in the first call."""

    def __init__(self):
        self.sum = None

    def __call__(self, ids, scores):
        self.sum = scores if self.sum is None else self.sum + scores
        return scores - 0.3 * self.sum


class InPlace(LogitsProcessor):
    def __call__(self, ids, scores):
        scores[:, ids.shape[1] % 50] = -torch.inf
        scores[:, :20] -= 2
        return scores


@pytest.mark.parametrize("make", [lambda: forbid_last_but_one, EveryThird, Drifting, InPlace])
def test_a_user_s_processor_sees_each_row_as_if_alone(model, make):
    """F-04: the whole history, padding included as in stock generate; and a state of the row's own."""
    agrees(model, make)


def test_a_processor_sees_exactly_what_stock_shows_it(ouro):
    seen = {}

    def record(ids, scores):
        for line in ids.tolist():
            shown.add(tuple(line))
        return scores

    for cdb in (False, NEVER):
        seen[bool(cdb)] = shown = set()
        generate(ouro, cdb, logits_processor=[record])
    assert seen[False] <= seen[True]
    # Beyond that it was tried on the prompts, with a token more at the most.
    assert all(len(line) <= IDS.shape[1] + 1 for line in seen[True] - seen[False])


def test_state_is_a_row_s_own_in_a_batch_and_the_user_s_for_one_row(ouro):
    processor = EveryThird()
    generate(ouro, EARLY, logits_processor=LogitsProcessorList([processor]))
    assert processor.calls == 0
    generate(ouro, EARLY, slice(1), logits_processor=LogitsProcessorList([processor]))
    assert processor.calls == 7


class HoldsParts(LogitsProcessor):
    def __init__(self):
        torch.manual_seed(1)
        self.head = nn.Linear(50, 50, bias=False)
        self.offset = torch.ones(1, 50)

    def __call__(self, ids, scores):
        return scores + self.head(scores) * self.offset


def test_models_that_a_processor_holds_are_not_copied(model, monkeypatch):
    monkeypatch.setattr(nn.Linear, "__deepcopy__", _refuse_copy, raising=False)
    agrees(model, HoldsParts)


def _refuse_copy(self, memo):
    raise AssertionError("a model was copied")


class PerRowBias(LogitsProcessor):
    def __init__(self):
        self.bias = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))

    def __call__(self, ids, scores):
        return scores + self.bias


class Locked(LogitsProcessor):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, ids, scores):
        return scores


class OnlyTogether(LogitsProcessor):
    def __call__(self, ids, scores):
        if len(ids) != 3:
            raise IndexError("three rows are needed")
        return scores


def counting():
    """A function with a state, in a variable of the function around it."""
    calls = 0

    def count(ids, scores):
        nonlocal calls
        calls += 1
        return scores if calls % 3 else -scores

    return count


@pytest.mark.parametrize(
    ("processor", "words"),
    [
        (lambda ids, scores: scores - scores.mean(0), ["<lambda>", "something else"]),
        (lambda ids, scores: scores + torch.rand(len(ids), 1), ["<lambda>", "something else"]),
        (PerRowBias(), ["PerRowBias", "alone it returns (3, 50)"]),
        (OnlyTogether(), ["OnlyTogether", "row 0 of them alone it raises IndexError('three rows are needed')"]),
        (counting(), ["count", "a state that all rows would share"]),
        (Locked(), ["Locked", "cannot be copied", "__deepcopy__"]),
    ],
    ids=["mean", "random", "bias", "together", "counter", "lock"],
)
def test_processors_that_mix_rows_are_refused(ouro, processor, words):
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="logits_processor") as caught:
        ouro.generate(IDS, attention_mask=MASK, max_new_tokens=4, cdb=EARLY, logits_processor=[processor])
    missing = [word for word in [*words, "cdb=False"] if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert torch.equal(torch.get_rng_state(), before)


def test_a_trial_shifts_no_noise(model):
    def draws_in_the_trial(ids, scores):  # where alone it is shown rows together
        if len(ids) > 1:
            torch.rand(7)
        return scores

    ours = generate(model, NEVER, do_sample=True, logits_processor=[draws_in_the_trial])
    assert torch.equal(ours, generate(model, False, do_sample=True))


@pytest.mark.parametrize("copies", [1, 2])
def test_prefix_allowed_tokens(model, copies):
    """The function is told the prompt that it is about, and the row's padded history."""

    def allowed(prompt, ids):
        assert prompt in range(3)
        assert torch.equal(ids[:9], IDS[prompt])
        return [token for token in range(50) if (token + len(ids) + int(ids[-1])) % 3 == prompt]

    options = {"prefix_allowed_tokens_fn": allowed, "do_sample": True, "num_return_sequences": copies}
    stock = generate(model, False, **options)
    assert torch.equal(generate(model, NEVER, **options), stock)
    early = generate(model, {**EARLY, "max_num_seqs": 2}, **options)
    for row, line in enumerate(early.tolist()):
        for end in range(9, 16):
            assert line[end] in allowed(row // copies, torch.tensor(line[:end]))


def test_a_prefix_that_allows_nothing_fails_its_row(ouro):
    def allowed(prompt, ids):
        return [] if prompt == 1 and len(ids) == 11 else [4, 5]

    with pytest.raises(RowsFailedError, match=r"row 1.*allows no token for prompt 1 after 11 positions") as caught:
        generate(ouro, EARLY, prefix_allowed_tokens_fn=allowed)
    assert caught.value.output[[0, 2], 9:].unique().tolist() <= [4, 5]
    assert caught.value.output[1, 11:].tolist() == [0] * 5


def test_a_user_s_own_of_a_built_in_kind_takes_precedence(model):
    """As in stock: with its lengths per row, and in place of the one that the arguments name."""

    def make():
        return RepetitionPenaltyLogitsProcessor(8.0, prompt_ignore_length=torch.tensor([7, 4, 5]))

    options = {"logits_processor": [make()], "repetition_penalty": 1.1}
    stock = generate(model, False, **options)
    assert torch.equal(generate(model, NEVER, **options), stock)
    assert not torch.equal(stock, generate(model, False, repetition_penalty=1.1))


def test_a_processor_of_a_wrong_shape_fails_its_row(ouro):
    def cut(ids, scores):
        return scores[:, :-1] if ids.shape[1] == 11 and int(ids[0, 0]) == int(IDS[1, 0]) else scores

    with pytest.raises(RowsFailedError, match=r"row 1.*returned.*49.*for scores \(1, 50\)") as caught:
        generate(ouro, EARLY, logits_processor=[cut])
    assert torch.equal(caught.value.output[[0, 2]], generate(ouro, EARLY)[[0, 2]])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_drawn_fails_its_row(ouro, value):
    """Stock sampling raises here; greedy decoding takes the largest score in both."""

    def spoil(ids, scores):
        spoilt = ids[:, 0] == IDS[1, 0] if ids.shape[1] == 11 else torch.zeros(len(ids), dtype=torch.bool)
        return scores.masked_fill(spoilt[:, None], value)

    with pytest.raises(RuntimeError):
        generate(ouro, False, do_sample=True, logits_processor=[spoil])
    settings = {**EARLY, "seeds": [1, 2, 3]}
    with pytest.raises(RowsFailedError, match=r"token 2 of row 1 cannot be drawn.*remove_invalid_values") as caught:
        generate(ouro, settings, do_sample=True, logits_processor=[spoil])
    whole = generate(ouro, settings, do_sample=True)
    assert torch.equal(caught.value.output[[0, 2]], whole[[0, 2]])


def test_a_built_in_that_raises_fails_its_row(ouro, monkeypatch):
    """Top-H raises for scores that are -inf everywhere, though it runs on the block of all rows."""
    # torch.compile, which other tests use, turns these checks off for the whole process.
    monkeypatch.setattr(torch.distributions.Distribution, "_validate_args", True)

    def spoil(ids, scores):
        spoilt = ids[:, 0] == IDS[1, 0] if ids.shape[1] == 11 else torch.zeros(len(ids), dtype=torch.bool)
        return scores.masked_fill(spoilt[:, None], -torch.inf)

    options = {"do_sample": True, "top_h": 0.5}
    with pytest.raises(ValueError, match="invalid values"):
        generate(ouro, False, logits_processor=[spoil], **options)
    settings = {**EARLY, "seeds": [1, 2, 3]}
    recorded = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    with pytest.raises(RowsFailedError, match="row 1") as caught:
        generate(ouro, settings, logits_processor=[spoil], **options, **recorded)
    output, whole = caught.value.output, generate(ouro, settings, **options)
    assert torch.equal(output.sequences[[0, 2]], whole[[0, 2]])
    assert output.sequences[1, :11].tolist() == whole[1, :11].tolist()
    for scores in output.scores[2:]:
        assert scores[1, 0] == 0
        assert (scores[1, 1:] == -torch.inf).all()


def test_guidance_leaves_the_model_as_it_was(ouro, monkeypatch):
    said = []
    monkeypatch.setattr(logging.get_logger("hf_cdb.generation_arguments"), "warning_once", said.append)
    before = ouro.config._attn_implementation
    generate(ouro, EARLY, guidance_scale=2.0)
    assert ouro.config._attn_implementation == before
    assert len(said) == 1
    assert "guidance_scale=2.0" in said[0]
    for name in ("negative_prompt_ids", "negative_prompt_attention_mask"):
        with pytest.raises(ValueError, match=rf"{name}.*guidance_scale=None"):
            generate(ouro, EARLY, **{name: IDS})


@pytest.mark.parametrize("more", [{}, {"min_coda_batch": 3}, {"refill": False}, {"prefill_chunk_size": 2}])
@pytest.mark.parametrize("ends", [None, list(range(1, 50, 7))])
def test_sampling_is_stock_s_under_any_schedule(model, more, ends):
    """Promise 1, and the generator is left where stock leaves it."""
    options = {"do_sample": True, "top_k": 0, "temperature": 1.3, "num_return_sequences": 2, "eos_token_id": ends}
    stock = generate(model, False, **options)
    after = torch.rand(3)
    assert torch.equal(generate(model, {**NEVER, **more}, **options), stock)
    assert torch.equal(torch.rand(3), after)


@pytest.mark.parametrize("peak", [0.0, 6.0])
def test_requests_of_every_kind_share_an_engine(peak):
    """F-01: each is greedy, or samples at its own temperature, as it was asked to and as it does alone."""
    model = ToyModel(peak=peak)
    adapter = adapter_for(model)
    prompt = toy_prompt(1, 3, 4)
    temperatures = {"greedy": None, "sampled": 1.0, "hot": 4.0, "cold": 1e-6}

    def run(kinds):
        engine = Engine(adapter, CDBConfig().resolve(adapter))
        requests = []
        for key, kind in enumerate(kinds):
            sampled = temperatures[kind] is not None
            processors = [TemperatureLogitsWarper(temperatures[kind])] if sampled else []
            noise = Noise(None, adapter.vocab_size, torch.device("cpu")) if sampled else None
            sampler = Sampler([processors], [prompt], do_sample=sampled, noise=noise)
            requests.append(Request(key, 20, sampler, prompt_ids=prompt, seed=9))
            engine.add_request(requests[-1])
        engine.run()
        return {kind: request.tokens for kind, request in zip(kinds, requests, strict=True)}

    together = run(list(temperatures))
    assert together == {kind: run([kind])[kind] for kind in temperatures}
    assert together["greedy"] == together["cold"] == predict(model.config, prompt.tolist(), 20).tokens
    assert len(set(together["hot"])) > 10
    assert together["sampled"] != together["greedy"]
    # Where all logits are the same no temperature changes them.
    assert (together["sampled"] == together["hot"]) == (peak == 0)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 2, "max_new_tokens": 30},
        {"min_new_tokens": 4, "eos_token_id": list(range(1, 50, 4))},
        {"sequence_bias": {(4,): 20.0, (4, 9): 40.0, (1, 2, 3): -3.0}},
    ],
    ids=lambda options: next(iter(options)),
)
def test_processors_that_need_the_history_have_it(model, options):
    """F-04: a ragged batch gives what stock gives each row by itself."""
    name = next(iter(options))
    ours = generate(model, {**NEVER, "max_num_seqs": 2}, **options)
    differs = False
    for row in range(3):
        alone = generate(model, False, slice(row, row + 1), **options)
        without = generate(model, False, slice(row, row + 1), **{k: v for k, v in options.items() if k != name})
        assert torch.equal(ours[row, : alone.shape[1]], alone[0])
        assert not ours[row, alone.shape[1] :].any()
        differs = differs or not torch.equal(alone, without)
    assert differs, "the processor changes nothing"


@pytest.mark.parametrize(
    "options",
    [
        {"encoder_repetition_penalty": 6.0},
        {"encoder_no_repeat_ngram_size": 1},
        {"guidance_scale": 2.0},
        {"guidance_scale": 2.0, "negative_prompt_ids": IDS.roll(1, dims=0)},
    ],
    ids=" and ".join,
)
def test_what_belongs_to_prompts_goes_to_all_their_return_sequences(model, options):
    """Each is as alone with its prompt, and as in stock."""
    settings = {**EARLY, "seeds": [1, 2, 3]}
    sampling = {"do_sample": True, "num_return_sequences": 2, "top_k": 5}
    together = generate(model, settings, **sampling, **options)
    for row in range(3):
        own = {
            name: value[row : row + 1] if name == "negative_prompt_ids" else value for name, value in options.items()
        }
        alone = generate(model, {**EARLY, "seeds": [row + 1]}, slice(row, row + 1), **sampling, **own)
        assert torch.equal(alone, together[2 * row : 2 * row + 2])
    if "negative_prompt_ids" in options:  # stock takes one for every row only
        with pytest.raises(RuntimeError):
            generate(model, False, **sampling, **options)
        options = {**options, "negative_prompt_ids": torch.cat((IDS, IDS.roll(1, dims=1)))}
    stock = generate(model, False, **sampling, **options)
    assert torch.equal(generate(model, NEVER, **sampling, **options), stock)


@pytest.mark.parametrize("form", ["method", "partial", "list"])
def test_models_that_a_processor_leads_to_are_shared(form):
    model, seen = random_ouro(eos_token_id=None, pad_token_id=0), set()

    class Holder:
        def __init__(self, models):
            self.models = models

        def look(self, ids, scores):
            seen.update(map(id, self.models))
            return scores

    def look(models, ids, scores):
        seen.update(map(id, models))
        return scores

    holder = Holder([model])
    holder.__class__.__call__ = Holder.look
    processor = {"method": holder.look, "partial": functools.partial(look, [model]), "list": holder}[form]
    ids = torch.tensor([[3, 4], [5, 6]])
    model.generate(ids, max_new_tokens=2, do_sample=False, cdb={"exit_rule": "never"}, logits_processor=[processor])
    assert seen == {id(model)}


def test_a_processor_that_raises_for_a_late_row_only(model):
    """The trial gives all rows together; what raises there for one row is that row's failure, not all rows'."""
    ids, mask = left_pad(prompts(3, 4, 5, 6, 7, 8))
    ids[ids == 49] = 48
    ids[4, -1] = 49

    def picky(ids, scores):
        if (ids[:, 7] == 49).any():
            raise KeyError("49")
        return scores

    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "cdb": EARLY}
    whole = model.generate(ids, **options)
    with pytest.raises(RowsFailedError) as caught:
        model.generate(ids, logits_processor=[picky], **options)
    assert list(caught.value.errors) == [4]
    others = [0, 1, 2, 3, 5]
    assert torch.equal(caught.value.output[others], whole[others])


def test_negative_prompts_that_do_not_fit(ouro, engines):
    ids, mask = left_pad(prompts(3, 9, 6))
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "guidance_scale": 2.0, "cdb": EARLY}
    for shape in ((6, 4), (2, 4), (3, 0), (4,)):
        negative = torch.ones(shape, dtype=torch.long)
        with pytest.raises(ValueError, match=r"negative_prompt_ids has shape .* there are 3 prompts") as caught:
            ouro.generate(ids, negative_prompt_ids=negative, **options)
        assert str(shape) in str(caught.value)
    for ids_of, mask_of in ((torch.ones(3, 4).long(), (3, 2)), (torch.ones(3, 4).long(), (1, 4)), (None, (3, 4))):
        more = {"negative_prompt_ids": ids_of, "negative_prompt_attention_mask": torch.ones(mask_of).long()}
        with pytest.raises(ValueError, match="negative_prompt_attention_mask has shape") as caught:
            ouro.generate(ids, **more, **options)
        assert str(mask_of) in str(caught.value)
    embeds = ouro.get_input_embeddings()(ids).detach()
    with pytest.raises(ValueError, match=r"guidance_scale without negative_prompt_ids .* inputs_embeds"):
        ouro.generate(inputs_embeds=embeds, **options)
    assert not engines


def test_one_negative_prompt_for_all(model):
    """The truth is stock's, given the line once for each row."""
    ids, mask = left_pad(prompts(3, 9, 6))
    negative = prompts(4, seed=2)[0][None]
    options = {"attention_mask": mask, "max_new_tokens": 4, "do_sample": False, "guidance_scale": 2.0}
    stock = model.generate(ids, negative_prompt_ids=negative.repeat(3, 1), cdb=False, **options)
    never = {"exit_rule": "never"}
    for lines in (negative, negative.repeat(3, 1)):
        assert torch.equal(model.generate(ids, negative_prompt_ids=lines, cdb=never, **options), stock)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scores_in_another_dtype(model, dtype):
    """A processor may return them in any; the largest is stock's choice."""

    def convert(ids, scores):
        return scores.to(dtype)

    options = {"logits_processor": [convert]}
    assert torch.equal(generate(model, NEVER, **options), generate(model, False, **options))
