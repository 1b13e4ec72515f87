import pytest
import torch

from hf_cdb.training.batches import Line, PackedBatches, block_mask, encode_lines, pack_lines
from hf_cdb.training.tasks import TASKS, Example, split_of

from .tokens import tokenizer

TEXTS = ["one two", "Whom shall he teach knowledge? and whom shall he make to understand doctrine?", "Amen"]


def decode(ids):
    return tokenizer().decode(ids)


def test_a_line_by_hand():
    (line,) = encode_lines(tokenizer(), [Example("add", "add:7+5=", "12", 1)])
    pieces = ["<bos>", "add", ":", "7", "+", "5", "=", "1", "2", "<eos>"]
    ids = tokenizer().convert_tokens_to_ids(pieces)
    assert line == Line(ids[:-1], ids[1:], answer_start=6)
    assert decode(line.targets[line.answer_start :]) == "12<eos>"


def test_packing_by_hand():
    lines = [Line([1, 5, 6], [5, 6, 2], 1), Line([1, 7], [7, 2], 1), Line([1, 8, 9], [8, 9, 2], 2)]
    packed = pack_lines(lines, 6, pad=0, prompt_weight=0.5)
    assert packed["input_ids"].tolist() == [[1, 5, 6, 1, 7, 0], [1, 8, 9, 0, 0, 0]]
    assert packed["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 0, 0, 0]]
    assert packed["segments"].tolist() == [[0, 0, 0, 1, 1, -1], [0, 0, 0, -1, -1, -1]]
    assert packed["targets"].tolist() == [[5, 6, 2, 7, 2, -100], [8, 9, 2, -100, -100, -100]]
    assert packed["weights"].tolist() == [[0.5, 1, 1, 0.5, 1, 0], [0.5, 0.5, 1, 0, 0, 0]]
    assert {name: values.dtype for name, values in packed.items()} == {
        "input_ids": torch.int64,
        "position_ids": torch.int64,
        "segments": torch.int64,
        "targets": torch.int64,
        "weights": torch.float32,
    }


def test_packing_into_a_number_of_rows():
    lines = [Line([1, 5, 6], [5, 6, 2], 1)] * 5
    assert torch.equal(pack_lines(iter(lines), 4, pad=0, rows=2)["segments"], torch.tensor([[0, 0, 0, -1]] * 2))
    few = pack_lines(lines[:1], 4, pad=0, rows=2)
    assert few["input_ids"].tolist() == [[1, 5, 6, 0], [0, 0, 0, 0]]
    with pytest.raises(ValueError, match=r"length=2.*3 tokens"):
        pack_lines(lines, 2, pad=0)


def test_mask_by_hand():
    mask = block_mask(torch.tensor([[0, 0, 1, -1, -1]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask.dtype == torch.bool
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 1, 1],
    ]


def test_windows_of_the_text():
    batches = PackedBatches(tokenizer(), length=20, text_rows=30, task_rows=0, texts=TEXTS)
    stream = [[1, *tokenizer()(text, add_special_tokens=False).input_ids] for text in TEXTS]
    inputs = [(text, place, token) for text, ids in enumerate(stream) for place, token in enumerate(ids)]
    seen = set()
    for step in range(12):
        batch = batches.batch(step)
        assert batch["input_ids"].shape == (30, 20)
        assert bool((batch["weights"] == 1).all())
        for row in range(30):
            ids = batch["input_ids"][row].tolist()
            (start,) = (k for k in range(len(inputs) - 19) if [token for _, _, token in inputs[k : k + 20]] == ids)
            seen.add(start)
            window = inputs[start : start + 20]
            first = window[0]
            for column, (text, place, _) in enumerate(window):
                assert batch["segments"][row, column] == text - first[0]
                assert batch["position_ids"][row, column] == place - (first[1] if text == first[0] else 0)
                target = stream[text][place + 1] if place + 1 < len(stream[text]) else tokenizer().eos_token_id
                assert batch["targets"][row, column] == target
    assert {0, len(inputs) - 20} <= seen


def test_lines_in_a_batch():
    batch = PackedBatches(tokenizer(), length=64, text_rows=0, task_rows=12).batch(0)
    drawn = set()
    for ids, positions, segments, targets, weights in zip(*batch.values(), strict=True):
        for segment in range(int(segments.max()) + 1):
            here = segments == segment
            size = int(here.sum())
            assert positions[here].tolist() == list(range(size))
            assert targets[here][:-1].tolist() == ids[here][1:].tolist()
            text = decode(ids[here])
            prompt, answer = text.removeprefix("<bos>").split("=")
            assert split_of(prompt + "=") == "train"
            assert decode(targets[here][weights[here] == 1]) == answer + "<eos>"
            learned = len(tokenizer().tokenize(answer)) + 1
            assert weights[here].tolist() == pytest.approx([0.1] * (size - learned) + [1.0] * learned)
            drawn.add(prompt.partition(":")[0])
        padding = segments == -1
        assert targets[padding].eq(-100).all()
        assert weights[padding].eq(0).all()
        assert ids[padding].eq(0).all()
    assert drawn == set(TASKS)


def test_a_batch_depends_on_seed_and_step_alone():
    first = PackedBatches(tokenizer(), length=40, text_rows=2, task_rows=3, seed=7, texts=TEXTS)
    first.batch(0)
    third = first.batch(2)
    again = PackedBatches(tokenizer(), length=40, text_rows=2, task_rows=3, seed=7, texts=TEXTS).batch(2)
    assert all(torch.equal(third[name], again[name]) for name in third)
    assert not torch.equal(third["input_ids"], first.batch(1)["input_ids"])
    other = PackedBatches(tokenizer(), length=40, text_rows=2, task_rows=3, seed=8, texts=TEXTS).batch(2)
    assert not torch.equal(third["input_ids"][:2], other["input_ids"][:2])
    assert not torch.equal(third["input_ids"][2:], other["input_ids"][2:])


def test_shares_of_the_tasks():
    batches = PackedBatches(
        tokenizer(), length=128, text_rows=0, task_rows=60, task_shares={"parity": 3, "chain": 1, "hops": 0}
    )
    text = decode(batches.batch(0)["input_ids"].flatten())
    assert text.count("hops") + text.count("copy") == 0
    assert text.count("parity") / text.count("chain") == pytest.approx(3, rel=0.25)


def test_the_prompt_weighs_what_is_asked():
    batch = PackedBatches(tokenizer(), text_rows=0, task_rows=1, prompt_weight=0.25).batch(0)
    assert set(batch["weights"].flatten().tolist()) == {0.0, 0.25, 1.0}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"text_rows": 0, "task_rows": 0}, "text_rows=0, task_rows=0"),
        ({"text_rows": -1}, "text_rows=-1"),
        ({"prompt_weight": -0.1}, "prompt_weight=-0.1"),
        ({"task_shares": {"sorting": 1}}, "sorting unknown.*copy"),
        ({"task_shares": {"copy": 0}}, "task_shares"),
        ({"task_shares": {}}, "task_shares"),
        ({"texts": ["Amen"]}, "length=128"),
    ],
)
def test_settings_that_make_no_batch(settings, words):
    with pytest.raises(ValueError, match=words):
        PackedBatches(tokenizer(), **settings)
