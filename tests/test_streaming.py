"""Tokens while they come: streamers of the library, callbacks, the iterator, the bar."""

import asyncio
import itertools
import threading

import pytest
import torch
from transformers import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

from hf_cdb import RowsFailedError, StreamPiece
from hf_cdb.streaming import TextPieces

from .test_generation import EARLY, IDS, MASK, generate, letter_tokenizer, refused
from .tiny import prompts

ONE = prompts(6)[0][None]
OFF = {"exit_rule": "never"}


def assert_left_clean(model, engines, before):
    """Nothing of the calls is held, and the model generates as before."""
    for engine in engines:
        assert engine.cache.core_bytes == engine.cache.outer_bytes == 0
        assert len(engine.scheduler) == 0
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(generate(model, EARLY), before)


class Recorder(BaseStreamer):
    """What a streamer is given, and in which order; raises on request."""

    def __init__(self, fail_at=None):
        self.given, self.fail_at = [], fail_at

    def put(self, value):
        if len(self.given) == self.fail_at:
            raise OSError("the pipe is closed")
        self.given.append(value.tolist())

    def end(self):
        self.given.append("end")


def test_a_streamer_is_given_what_stock_gives_it(model):
    """Prompt, tokens, end, in shape too."""
    ours, stock = Recorder(), Recorder()
    generate(model, OFF, ONE, None, streamer=ours)
    generate(model, False, ONE, None, streamer=stock)
    assert ours.given == stock.given
    assert len(ours.given) == 1 + 8 + 1


def test_text_streamer(ouro, capsys):
    for options in ({}, {"skip_prompt": True}):
        printed = []
        for cdb in (OFF, False):
            generate(ouro, cdb, ONE, None, streamer=TextStreamer(letter_tokenizer(), **options))
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]
        assert printed[0].endswith("\n")


def test_text_iterator_streamer(ouro):
    """Pieces arrive in the reader's thread, and together are the text."""
    tokenizer = letter_tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(target=generate, args=(ouro, EARLY, ONE, None), kwargs={"streamer": streamer})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == tokenizer.decode(generate(ouro, EARLY, ONE, None)[0, 6:])


def test_async_text_iterator_streamer(ouro):
    tokenizer = letter_tokenizer()

    async def read():
        streamer = AsyncTextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
        task = asyncio.create_task(asyncio.to_thread(generate, ouro, EARLY, ONE, None, streamer=streamer))
        text = "".join([piece async for piece in streamer])
        await task
        return text

    assert asyncio.run(read()) == tokenizer.decode(generate(ouro, EARLY, ONE, None)[0, 6:])


def test_a_streamer_follows_one_row(ouro):
    refused(["streamer=", "3", "on_token", "generate_stream"], lambda: generate(ouro, EARLY, streamer=Recorder()))
    refused(
        ["streamer=", "2"],
        lambda: generate(ouro, EARLY, ONE, None, streamer=Recorder(), do_sample=True, num_return_sequences=2),
    )


@pytest.mark.parametrize("fail_at", [0, 1, 4])
def test_a_streamer_that_raises_ends_the_call(model, engines, fail_at):
    """With its own error, and nothing more is put into it."""
    before = generate(model, EARLY)
    streamer = Recorder(fail_at)
    with pytest.raises(OSError, match="the pipe is closed"):
        generate(model, EARLY, ONE, None, streamer=streamer)
    assert len(streamer.given) == fail_at
    assert_left_clean(model, engines, before)


def test_the_reader_of_a_streamer_is_told_when_the_model_fails(ouro):
    """Or it would wait for ever."""
    streamer = Recorder()
    calls = []

    def boom(*_):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("boom")

    handle = ouro.model.layers[0].register_forward_pre_hook(boom)
    with pytest.raises(RuntimeError, match="boom"):
        generate(ouro, OFF, ONE, None, streamer=streamer)
    handle.remove()
    assert streamer.given[0] == ONE.tolist()
    assert streamer.given[-1] == "end"


REFUSALS = {
    "a setting": ({"exit_treshold": 0.5}, {}),
    "an option": (EARLY, {"num_beams": 2}),
    "an early argument": (EARLY, {"output_attentions": True}),
    "a name": (EARLY, {"max_new_token": 4}),
    "a callback": (EARLY, {"on_token": 3}),
    "rows": (EARLY, {"do_sample": True, "num_return_sequences": 2}),
    "a mask": (EARLY, {"mask": torch.zeros_like(ONE)}),
    "a processor": (EARLY, {"logits_processor": [3]}),
}


@pytest.mark.parametrize("refusal", REFUSALS)
def test_the_reader_of_a_streamer_is_told_when_the_call_is_refused(ouro, refusal):
    """Once, and a thread that reads comes to its end without a timeout."""
    cdb, options = REFUSALS[refusal]
    options = {"mask": None, **options}
    for streamer in (Recorder(), TextIteratorStreamer(letter_tokenizer())):
        with pytest.raises((ValueError, RowsFailedError)):
            generate(ouro, cdb, ONE, streamer=streamer, **options)
        if isinstance(streamer, Recorder):
            assert streamer.given.count("end") == 1
            assert streamer.given[-1] == "end"
            continue
        read = threading.Thread(target=lambda streamer=streamer: list(streamer), daemon=True)
        read.start()
        read.join(timeout=60)
        assert not read.is_alive()


def test_a_streamer_beside_the_iterator_is_refused(ouro):
    refused(["streamer=", "generate_stream"], lambda: stream(ouro, EARLY, ONE, None, streamer=Recorder()))


@pytest.mark.parametrize("settings", [EARLY, {**EARLY, "max_num_seqs": 2}, {**OFF, "prefill_chunk_size": 2}])
def test_on_token_is_told_every_token_of_every_row(model, settings):
    told = [[] for _ in range(3)]
    output = generate(
        model,
        settings,
        return_dict_in_generate=True,
        on_token=lambda row, token, depth: told[row].append((token, depth)),
    )
    for row in range(3):
        expected = zip(output.sequences[row, 9:].tolist(), output.exit_depths[row].tolist(), strict=True)
        assert told[row] == list(expected)


def test_on_token_is_told_at_once(ouro):
    """Tokens of rows at different depths come in the order in which they are chosen, not row by row."""
    rows = []
    generate(ouro, EARLY, on_token=lambda row, token, depth: rows.append(row))
    assert rows != sorted(rows)
    assert sorted(rows) == [row for row in range(3) for _ in range(8)]


def test_on_token_that_cannot_work(ouro):
    refused(["on_token=3", "function"], lambda: generate(ouro, EARLY, on_token=3))
    for cdb in (False, None):
        refused(["on_token=", "cdb=True", "streamer"], lambda cdb=cdb: generate(ouro, cdb, on_token=print))


def stream(model, cdb, ids=IDS, mask=MASK, **kwargs):
    kwargs = {"max_new_tokens": 8, "do_sample": False, **kwargs}
    return model.generate_stream(ids, attention_mask=mask, cdb=cdb, **kwargs)


@pytest.mark.parametrize("settings", [EARLY, {**EARLY, "max_num_seqs": 2}])
def test_the_iterator_gives_the_tokens_of_generate(model, settings):
    output = generate(model, settings, return_dict_in_generate=True)
    ids, texts, depths = ([[] for _ in range(3)] for _ in range(3))
    for row, token, depth in stream(model, settings):
        ids[row].append(token)
        depths[row].append(depth)
    tokenizer = letter_tokenizer()
    for piece in stream(model, settings, tokenizer=tokenizer):
        assert isinstance(piece, StreamPiece)
        texts[piece.row].append(piece.piece)
    assert ids == output.sequences[:, 9:].tolist()
    assert depths == output.exit_depths.tolist()
    assert ["".join(row) for row in texts] == tokenizer.batch_decode(output.sequences[:, 9:])


def test_the_iterator_returns_the_output(ouro):
    pieces = stream(ouro, EARLY, return_dict_in_generate=True, output_scores=True)
    assert len(list(itertools.islice(pieces, 24))) == 24
    with pytest.raises(StopIteration) as end:
        next(pieces)
    expected = generate(ouro, EARLY, return_dict_in_generate=True, output_scores=True)
    assert torch.equal(end.value.value.sequences, expected.sequences)
    assert torch.equal(end.value.value.scores[3], expected.scores[3])


def test_the_iterator_is_lazy_and_checks_at_once(ouro, engines):
    pieces = stream(ouro, EARLY)
    assert engines[-1].cache.reserved_bytes == 0
    next(pieces)
    assert 0 < engines[-1].stats.tokens < 24
    refused(["cdb=False", "streamer"], lambda: stream(ouro, False))
    refused(["cdb_threshold"], lambda: stream(ouro, EARLY, cdb_threshold=1))
    refused(["'exit_treshold'"], lambda: stream(ouro, {"exit_treshold": 1}))


def test_the_iterator_without_a_saved_default_uses_cdb(ouro):
    plain = [piece[:2] for piece in stream(ouro, OFF)]
    assert [piece[:2] for piece in stream(ouro, None)] == plain  # the gate's own threshold is 1
    ouro.generation_config.cdb = EARLY
    assert list(stream(ouro, None)) == list(stream(ouro, EARLY))


def test_a_consumer_that_goes_away(model, engines):
    """Closing the iterator and dropping it free what the rows held."""
    before = generate(model, EARLY)
    pieces = stream(model, {**EARLY, "max_num_seqs": 2})
    for _ in range(5):
        next(pieces)
    assert engines[-1].cache.core_bytes > 0
    pieces.close()
    assert_left_clean(model, engines, before)
    for _ in stream(model, EARLY):
        break
    assert_left_clean(model, engines, before)


def test_two_iterators_and_plain_generate_take_turns(model):
    """Between two pieces the model is nobody's."""
    expected = [list(stream(model, settings)) for settings in (EARLY, OFF)]
    stock = generate(model, False)
    first, second = stream(model, EARLY), stream(model, OFF)
    got = [[], []]
    for left, right in zip(first, second, strict=True):
        got[0].append(left)
        got[1].append(right)
        if len(got[0]) % 8 == 0:
            assert torch.equal(generate(model, False), stock)
    assert got == expected


def test_text_of_characters_and_words_that_take_several_tokens():
    """Bytes of one character wait for each other; the space before the first word is dropped as `decode` does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    spelt.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelt.decoder = decoders.ByteLevel()
    words = Tokenizer(models.WordLevel({"▁up": 0, "▁and": 1, "!": 2, "<e>": 3}, unk_token="!"))
    words.decoder = decoders.Metaspace()
    words.add_special_tokens(["<e>"])

    def pieces(tokenizer, tokens, **kwargs):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        texts = TextPieces(tokenizer, **kwargs)
        return [texts.push(token, last=index == len(tokens) - 1) for index, token in enumerate(tokens)]

    tokens = spelt.encode("né €5").ids
    assert pieces(spelt, tokens) == ["n", "", "é", " ", "", "", "€", "5"]
    assert pieces(spelt, tokens[:2]) == ["n", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(words, [0, 1, 2, 3, 0]) == ["up", " and", "!", "", " up"]
    assert pieces(words, [0, 3], skip_special_tokens=False)[1].strip() == "<e>"


def test_progress_bar(ouro, capsys):
    generate(ouro, {**EARLY, "max_num_seqs": 2})
    assert capsys.readouterr().err == ""
    generate(ouro, {**EARLY, "max_num_seqs": 2, "progress": True})
    bar = capsys.readouterr().err
    assert "3/3" in bar
    assert "tokens=24" in bar
    refused(["progress=1"], lambda: generate(ouro, {"progress": 1}))


def test_streaming_pieces_of_a_sampled_batch(ouro):
    """Rows are those of the output: a prompt's return sequences count on their own."""
    options = {"do_sample": True, "num_return_sequences": 2}
    settings = {**EARLY, "seeds": [1, 2, 3]}
    output = generate(ouro, settings, **options)
    rows = [[] for _ in range(6)]
    for row, token, _ in stream(ouro, settings, **options):
        rows[row].append(token)
    assert rows == output[:, 9:].tolist()


def test_a_streamer_may_raise_stop_iteration(ouro, engines):
    class Done(BaseStreamer):
        def __init__(self):
            self.tokens = 0

        def put(self, value):
            self.tokens += 1
            if self.tokens == 3:
                raise StopIteration("enough")

        def end(self):
            raise AssertionError("it is called again")

    for cdb in (False, EARLY):
        with pytest.raises(StopIteration, match="enough"):
            ouro.generate(IDS[1:2], max_new_tokens=6, do_sample=False, cdb=cdb, streamer=Done())
    assert len(engines[-1].scheduler) == engines[-1].cache.core_bytes == 0


def test_the_iterator_beside_a_saved_default_that_is_off(ouro):
    ouro.generation_config.cdb = False
    with pytest.raises(ValueError, match=r"generation_config\.cdb=False: generate_stream"):
        stream(ouro, None)
    assert len(list(stream(ouro, True))) == len(list(stream(ouro, EARLY)))
