import hashlib
import lzma
import re
from importlib import resources

import pytest

from hf_cdb.training.text import chapters


def test_the_file_is_the_one_that_the_notes_describe():
    folder = resources.files("hf_cdb.training")
    packed = folder.joinpath("kjv.txt.xz").read_bytes()
    notes = folder.joinpath("kjv.md").read_text()
    assert hashlib.sha256(packed).hexdigest() in notes
    assert hashlib.sha256(lzma.decompress(packed)).hexdigest() in notes


def test_every_20th_chapter_is_held_out():
    train, held_out = chapters("train"), chapters("held-out")
    assert (len(train), len(held_out)) == (1130, 59)
    assert not set(train) & set(held_out)
    # Genesis has 50 chapters, Exodus 40: the 20th, the 40th and the 60th of the book.
    assert [text.partition("\n")[0] for text in held_out[:3]] == ["Genesis 20", "Genesis 40", "Exodus 10"]


def test_form_of_a_chapter():
    train = chapters("train")
    assert train[0].startswith("Genesis 1\n1 In the beginning God created the heaven and the earth.\n2 And the earth")
    assert train[-1].endswith("\n21 The grace of our Lord Jesus Christ be with you all. Amen.\n")
    verses = 0
    for text in (*train, *chapters("held-out")):
        name, *lines, end = text.split("\n")
        assert re.fullmatch(r"[1-3]?[A-Za-z ]+ \d+", name)
        assert end == ""
        assert [line.partition(" ")[0] for line in lines] == [str(number) for number in range(1, len(lines) + 1)]
        verses += len(lines)
    assert verses == 31102


def test_an_unknown_split():
    with pytest.raises(ValueError, match=r"split='test'.*'held-out'"):
        chapters("test")
