"""The rows that exit heads are trained on."""

import pytest
from datasets import Dataset

from hf_cdb.training.gate_data import read_gate_data
from hf_cdb.training.tasks import split_of
from hf_cdb.training.text import chapters

from ..models.test_generate import tiny_tokenizer
from ..test_exit_heads import refused
from .tokens import tokenizer


def read(source, tokenizer=None, **kwargs):
    return read_gate_data(str(source), tokenizer, **{"tokens": 1000, "held_out_tokens": 1000, "length": 4, **kwargs})


def test_text_and_its_bytes(tmp_path):
    file = tmp_path / "some.txt"
    file.write_text("w3 w44 w5 w6 w7\nw8 w9 w10 w11 w12\n" * 2)
    data = read(file, tiny_tokenizer())
    rows = [*data.train, *data.held_out]
    assert [row.ids for row in rows] == [[3, 44, 5, 6], [7, 8, 9, 10], [11, 12, 3, 44], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert rows[0].sizes == [2, 3, 2, 2]
    assert len(data.held_out) == 1
    assert len(read(file, tiny_tokenizer(), tokens=5).train) == 2


def test_prompts_and_answers(tmp_path):
    file = tmp_path / "some.jsonl"
    file.write_text('{"prompt": "w3 w4", "answer": "w5"}\n' * 5)
    row = read(file, tiny_tokenizer(), prompt_weight=0.25, answer_weight=3.0).train[0]
    assert (row.ids, row.weights, row.sizes) == ([3, 4, 5, 1], [0.25, 0.25, 3.0, 3.0], None)


def test_token_ids_and_weights_of_a_data_set(tmp_path):
    Dataset.from_dict({"input_ids": [[1, 2, 3]] * 5, "weights": [[0.0, 1.0, 4.0]] * 5}).save_to_disk(tmp_path / "set")
    row = read(tmp_path / "set").held_out[0]
    assert (row.ids, row.weights) == ([1, 2, 3], [0.0, 1.0, 4.0])


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_data_that_is_no_utf_8_is_named(tmp_path, name):
    """Also where the odd byte comes after much that is fine."""
    line = b'{"text": "w3 w4 w5 w6"}\n'
    (tmp_path / name).write_bytes(line * 2000 + '{"text": "é"}\n'.encode("latin-1"))
    options = {"tokens": 10**6, "held_out_tokens": 10**6}
    refused([f"{name}' is no UTF-8", "0xe9"], lambda: read(tmp_path / name, tiny_tokenizer(), **options))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", "x", ["'.csv'", ".jsonl"]),
        ("a.txt", " \n", ["is empty"]),
        ("a.jsonl", "", ["is empty"]),
        ("a.jsonl", '{"prompt": "w3"}', ["row 1", "prompt but no answers"]),
        ("a.jsonl", '{"words": "w3"}', ["columns words", "text"]),
        ("a.jsonl", '{"prompt": "w3", "answer": ""}', ["answer=''", "'w3'"]),
        ("a.jsonl", '{"text": 3}', ["text=3"]),
        ("a.jsonl", "[3]", ["row 1 is [3]"]),
        ("a.jsonl", "{", ["line 1", "no JSON"]),
        ("a.jsonl", '{"input_ids": [1, 2], "weights": [1.0]}', ["1 numbers for 2"]),
        ("a.jsonl", '{"input_ids": [1, 2]}', ["1 rows", "too few"]),
    ],
)
def test_data_that_cannot_be_used(tmp_path, name, content, words):
    (tmp_path / name).write_text(content)
    refused(words, lambda: read(tmp_path / name, tiny_tokenizer()))


def test_data_that_is_not_there_or_cannot_be_read(tmp_path):
    refused(["nowhere.txt", "builtin"], lambda: read(tmp_path / "nowhere.txt"), FileNotFoundError)
    (tmp_path / "a.txt").write_text("w3 w4")
    refused(["'text'", "input_ids"], lambda: read(tmp_path / "a.txt"))
    refused(["answer_weight=-1"], lambda: read(tmp_path / "a.txt", answer_weight=-1))
    refused(["length=1"], lambda: read(tmp_path / "a.txt", length=1))


def test_builtin_data_is_half_text_and_holds_out_what_the_package_holds_out():
    data = read("builtin", tokenizer(), tokens=4000, length=128)
    for rows, wanted in ((data.train, 4000), (data.held_out, 1000)):
        assert wanted <= sum(len(row.ids) for row in rows) < wanted + 128
        text = sum(len(row.ids) for row in rows if row.sizes is not None)
        assert abs(text / wanted - 0.5) < 0.1
    texts = [tokenizer().decode(row.ids, skip_special_tokens=True) for row in data.held_out]
    book = "".join(chapters("held-out"))
    for row, text in zip(data.held_out, texts, strict=True):
        assert text in book if row.sizes else split_of(text.partition("=")[0] + "=") == "validation"
