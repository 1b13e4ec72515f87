"""Lines of an input file."""

import hashlib
import json

import pytest

from hf_cdb.bench.models import load_tokenizer
from hf_cdb.offline.prompts import read_prompts


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-ouro")


def read(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(text.encode())
    return read_prompts(path)


def test_numbers_ids_and_options(tmp_path):
    text = '{"prompt": "a", "id": "x", "top_k": 5, "seed": null}\n\n{"input_ids": [1]}\r\n{"messages": [], "id": 0}'
    prompts, digest = read(tmp_path, text)
    assert [(prompt.line, prompt.id, prompt.options) for prompt in prompts] == [
        (1, "x", {"top_k": 5}),
        (3, 3, {}),
        (4, 0, {}),
    ]
    assert digest == hashlib.sha256(text.encode()).hexdigest()


def test_ends_of_line_within_a_text(tmp_path):
    """JSON allows U+2028 and U+0085 in strings; only the line feed ends a line."""
    (prompt,), _ = read(tmp_path, '{"prompt": "one\u2028two\u0085three"}\n')
    assert prompt.given == {"prompt": "one\u2028two\u0085three"}
    assert prompt.length == 12 + 13 + 2  # characters; in UTF-8 there are three bytes more


def test_token_ids(tmp_path, tokenizer):
    messages = [{"role": "user", "content": "add: 1+2"}]
    lines = '{"prompt": "And God"}\n{"messages": [{"role": "user", "content": "add: 1+2"}]}\n{"input_ids": [7, 8]}'
    prompts, _ = read(tmp_path, lines)
    assert [prompt.token_ids(tokenizer) for prompt in prompts] == [
        tokenizer("And God")["input_ids"],
        tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"],
        [7, 8],
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "the line is no JSON: Expecting property name"),
        ("[1]", "the line is no JSON object"),
        ("{}", "this one has none of them"),
        ('{"prompt": "a", "input_ids": [1]}', "this one has prompt and input_ids"),
        ('{"prompt": [1, 2]}', r"prompt=\[1, 2\]: give a text; token ids are called input_ids"),
        ('{"prompt": "a", "num_return_sequences": 2}', "num_return_sequences=2 has no meaning for a line: .* Write it"),
        ('{"prompt": "a", "request_id": "b"}', "request_id='b' has no meaning for a line: it has an id"),
        ('{"prompt": "a", "deadline": 5}', "deadline=5 has no meaning for a line: outputs do not depend on time"),
        ('{"prompt": "a", "created": 1}', "created=1 has no meaning for a line: outputs do not depend on time"),
        ('{"prompt": "a", "max_time": 1.5}', "max_time=1.5 has no meaning for a line: .* limit tokens instead"),
        ('{"prompt": "a", "id": NaN}', "id=nan: choose a text or a finite number"),
        ('{"prompt": "a", "id": -1e999}', "id=-inf: choose a text or a finite number"),
        ('{"prompt": "a", "id": true}', "id=True: choose a text or a finite number"),
        ('{"prompt": "a", "id": ' + "[" * 900 + "]" * 900 + "}", r"id=\[\[.*: choose a text or a finite number"),
        ("[" * 100_000, "the line is no JSON: maximum recursion depth exceeded"),
        ("9" * 5000, "the line is no JSON: Exceeds the limit"),
    ],
)
def test_lines_that_are_no_prompts(tmp_path, tokenizer, line, reason):
    (prompt,), _ = read(tmp_path, line)
    with pytest.raises(ValueError, match=reason):
        prompt.token_ids(tokenizer)
    json.dumps(prompt.id, allow_nan=False)  # can stand in the output


@pytest.mark.parametrize(("text", "own"), [('"a"', "a"), ("0", 0), ("-1.5", -1.5), ("null", 1), ("1" * 4000, 1)])
def test_ids(tmp_path, text, own):
    (prompt,), _ = read(tmp_path, f'{{"prompt": "a", "id": {text}}}')
    assert prompt.error is None
    assert prompt.id == (int(text) if len(text) == 4000 else own)


def test_files_that_hold_nothing(tmp_path):
    with pytest.raises(ValueError, match=r"prompts.jsonl' has no line. Write one"):
        read(tmp_path, "\n \n")
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.jsonl' is no text in UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
