"""Texts of streams, by hand."""

import pytest

from hf_cdb.serving.texts import StoppedText


class Letters:
    """A tokenizer whose ids are characters."""

    def decode(self, ids, **_):
        return "".join(map(chr, ids))


def pieces(text, stops, steps=None):
    """What is told when the letters come one by one, or so many in every step."""
    told, ids = StoppedText(Letters(), stops), list(map(ord, text))
    ends = range(1, len(ids) + 1) if steps is None else steps
    return [told.push(ids[:end], last=end == len(ids)) for end in ends], told.stopped


@pytest.mark.parametrize(
    ("text", "stops", "wanted", "stopped"),
    [
        ("abc", [], ["a", "b", "c"], False),
        ("abcd", ["bc"], ["a", "", "", ""], True),
        ("abd", ["bc"], ["a", "", "bd"], False),
        ("aab", ["ab"], ["", "a", ""], True),
        ("ababc", ["abc"], ["", "", "ab", "", ""], True),
        ("xay", ["a", "ay"], ["x", "", ""], True),
        ("ab", ["abc"], ["", "ab"], False),
        ("abc", ["c", "b"], ["a", "", ""], True),
    ],
)
def test_text_is_held_back_while_it_may_become_a_stop(text, stops, wanted, stopped):
    assert pieces(text, stops) == (wanted, stopped)


def test_tokens_may_come_several_at_a_time():
    assert pieces("one STOP two", ["STOP"], [2, 6, 12]) == (["on", "e ", ""], True)
    assert pieces("one two", ["STOP"], [7]) == (["one two"], False)
