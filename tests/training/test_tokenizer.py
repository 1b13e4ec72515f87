import random

import pytest
from transformers import AutoTokenizer

from hf_cdb.training.tasks import TASKS
from hf_cdb.training.text import chapters
from hf_cdb.training.tokenizer import train_tokenizer

from .tokens import tokenizer


@pytest.mark.parametrize("text", [chapters("held-out")[3], " a  b\t\n\n c , d's ", "Γένεσις 1\n初めに ‑ é 🙂 ÅÆ"])
def test_any_text_comes_back(text):
    ids = tokenizer()(text).input_ids
    assert ids[0] == tokenizer().bos_token_id
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


def test_vocabulary():
    assert len(tokenizer()) == 512
    ids = [tokenizer().pad_token_id, tokenizer().bos_token_id, tokenizer().eos_token_id]
    assert ids == [0, 1, 2]
    assert tokenizer().padding_side == "left"


def test_tasks_are_read_sign_by_sign():
    rng = random.Random(0)
    for name, task in TASKS.items():
        for _ in range(50):
            example = task.draw(rng)
            body = example.prompt.removeprefix(name)
            assert tokenizer().tokenize(example.prompt + example.answer) == [name, *body, *example.answer]


def test_prose_is_not():
    text = "".join(chapters("held-out"))
    assert len(text) / len(tokenizer()(text).input_ids) > 2.2
    assert tokenizer().tokenize("the LORD God") == ["th", "e", "ĠLORD", "ĠGod"]
    assert tokenizer().tokenize("16 And, 7") == ["1", "6", "ĠAnd", ",", "Ġ", "7"]


def test_chat_template():
    turns = [
        {"role": "user", "content": "copy:ABCD="},
        {"role": "assistant", "content": "ABCD"},
        {"role": "user", "content": "sort:BA="},
    ]
    text = tokenizer().apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == "<bos>copy:ABCD=ABCD<eos><bos>sort:BA="
    ids = tokenizer().apply_chat_template(turns[:1], add_generation_prompt=True).input_ids
    assert ids == tokenizer()("copy:ABCD=").input_ids
    with pytest.raises(Exception, match="role system"):
        tokenizer().apply_chat_template([{"role": "system", "content": ""}], tokenize=False)


def test_the_same_in_every_training_and_after_loading(tmp_path):
    small = {"vocab_size": 300, "lines_per_task": 50}
    first, second = train_tokenizer(**small), train_tokenizer(**small)
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    first.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Jude 1\n1 Jude, the servant"
    assert loaded(text).input_ids == first(text).input_ids
    assert loaded.chat_template == first.chat_template
    assert (loaded.padding_side, loaded.eos_token_id) == ("left", 2)


@pytest.mark.parametrize("size", [258, 300.0, True])
def test_a_size_without_room(size):
    with pytest.raises(ValueError, match=f"vocab_size={size}.*259"):
        train_tokenizer(size)
