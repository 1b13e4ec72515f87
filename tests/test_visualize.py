"""Pictures of depth against hand-worked rows and schedules."""

import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import hf_cdb
from hf_cdb.trace import Trace, TracedLaunch
from hf_cdb.visualize import depth_figure, depth_html, schedule_figure, schedule_grid
from hf_cdb.visualize.colours import _luminance, depth_colours, ink_on
from hf_cdb.visualize.rows import token_text, visible_text

# Two rows: a prompt of two tokens, then three and one new tokens.
SEQUENCES = [["In", " the", " beginning", "\n", "<script>alert('&')</script>"], ["", "x", "y", "", ""]]
DEPTHS = [[4, 1, 2], [4, 0, 0]]


class Page(HTMLParser):
    """Every tag of a page with its attributes, in order, and all text; raises where tags are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self._open = [], [], []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, text):
        self.words.append(text)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(hf_cdb.tiny_checkpoint("ouro"))


def tokens_of(page):
    """Title and colour of every token's box."""
    spans = [attributes for tag, attributes in page.tags if tag == "span" and "token" in attributes.get("title", "")]
    return [(span["title"], re.search("background:(#......)", span["style"])[1]) for span in spans]


def test_every_token_has_its_depth_and_colour():
    page = Page(depth_html(None, SEQUENCES, DEPTHS)._repr_html_())
    shallow, second, _, deep = depth_colours(4)
    assert tokens_of(page) == [
        ("token 0, depth 4 of 4", deep),
        ("token 1, depth 1 of 4", shallow),
        ("token 2, depth 2 of 4", second),
        ("token 0, depth 4 of 4", deep),
    ]
    text = "".join(page.words)
    assert "row 0 In·the·beginning4⏎1<script>alert('&')</script>2\n" in text
    assert "row 1 ∅xy4\n" in text
    assert (
        "4 tokens, 2.75 of 4 loops in the mean. Tokens by depth: 1\xa0×\xa01 2\xa0×\xa01 3\xa0×\xa00 4\xa0×\xa02"
        in text
    )
    assert page.tags[0][1]["role"] == "figure"
    assert page.tags[0][1]["aria-label"] == "4 tokens, 2.75 of 4 loops in the mean"


def test_text_cannot_break_out():
    hostile = "</span><img src=x onerror='a'>\""
    page = Page(str(depth_html(None, [[hostile, hostile]], [[1]], titles=[hostile])))
    assert {tag for tag, _ in page.tags} == {"div", "span", "sub", "b"}
    assert "".join(page.words).count(hostile.replace(" ", "·")) == 2
    assert hostile in "".join(page.words)  # the title


def test_rows_without_tokens_and_no_rows():
    assert "no tokens" in depth_html(None, [["a", "b"]], [[0, 0]]).text
    assert "No tokens" in depth_html(None, [], []).text
    assert "No tokens" in depth_html(None, [["a"]], torch.zeros(1, 0).long()).text


def test_depths_are_spread_over_all_loops_of_the_model():
    page = Page(depth_html(None, [["a", "b"]], [[1, 2]], full_depth=8).text)
    assert [colour for _, colour in tokens_of(page)] == depth_colours(8)[:2]


def test_a_page_of_its_own(tmp_path):
    depth_html(None, [["ä"]], [[1]]).save(tmp_path / "depths.html")
    page = Page((tmp_path / "depths.html").read_text(encoding="utf-8"))
    assert ("meta", {"charset": "utf-8"}) in page.tags
    assert "ä" in page.words


def test_blanks_and_hidden_characters():
    assert visible_text(" a\tb\n") == "·a⇥b⏎"
    assert visible_text("\u202e\u200d\x1b") == "[202e][200d][001b]"
    assert visible_text("\u0301") == "◌\u0301"
    assert visible_text("") == "∅"


def test_tokens_of_a_byte_level_vocabulary(tokenizer):
    """An emoji of four bytes falls into tokens of a byte each; special tokens keep their names."""
    ids = tokenizer(" the 🙂", add_special_tokens=False)["input_ids"]
    text = [token_text(tokenizer, token) for token in ids]
    assert "".join(text[:-4]) == " the "
    assert text[-4:] == ["[f0]", "[9f]", "[99]", "[82]"]
    assert token_text(tokenizer, tokenizer.eos_token_id) == "<eos>"


def test_tokens_of_a_vocabulary_that_drops_the_first_blank():
    """Metaspace and byte fallback, as in Llama's tokenizer: decoding a token alone would lose its blank."""
    words = ["<unk>", "<s>", "▁the", "re", "<0x0A>", "<0xF0>"]
    backend = Tokenizer(models.BPE({word: id for id, word in enumerate(words)}, [], byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")
    assert tokenizer.decode([2]) == "the"
    assert [token_text(tokenizer, token) for token in range(6)] == ["<unk>", "<s>", " the", "re", "\n", "[f0]"]


def test_padding_before_a_prompt_is_left_out(tokenizer):
    inputs = tokenizer(["In", "In the beginning"], padding=True, padding_side="left", return_tensors="pt")
    page = Page(depth_html(tokenizer, inputs["input_ids"], torch.zeros(2, 0).long()).text)
    assert "row 0 <bos>In no tokens" in "".join(page.words)


@pytest.mark.parametrize("full_depth", [1, 2, 4, 8, 32])
def test_colours_darken_and_their_text_can_be_read(full_depth):
    """Contrast 4.5 : 1 is what WCAG 2.2 asks of small text."""
    colours = depth_colours(full_depth)
    light = [_luminance(colour) for colour in colours]
    assert len(set(colours)) == full_depth
    assert light == sorted(light, reverse=True)
    for colour, own in zip(colours, light, strict=True):
        pair = sorted((own, _luminance(ink_on(colour))))
        assert (pair[1] + 0.05) / (pair[0] + 0.05) >= 4.5


def test_luminance_of_known_colours():
    """White 1, black 0, and mid grey #808080 at ((128 / 255 + 0.055) / 1.055) ** 2.4."""
    assert [_luminance(colour) for colour in ("#ffffff", "#000000", "#808080")] == pytest.approx([1, 0, 0.2158605])


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        (([["a"]], [[1], [1]]), {}, "sequences has 1 rows and exit_depths 2"),
        (([["a"]], [[1, 1]]), {}, r"sequences\[0\] has 1 tokens and exit_depths\[0\] 2 depths"),
        (([["a"]], [[5]]), {"full_depth": 4}, r"exit_depths\[0\] holds 5.*full_depth=4"),
        (([["a"]], [[-1]]), {}, r"exit_depths\[0\] holds -1"),
        (([["a"]], [[1.5]]), {}, r"exit_depths\[0\] holds 1.5"),
        (([["a"]], [["1"]]), {}, r"exit_depths\[0\] holds '1'"),
        (([[7]], [[1]]), {}, "tokenizer=None, but sequences holds token ids"),
        ((["a"], [[1]]), {}, "sequences: pass a row for every sequence"),
        (([["a"]], [1]), {}, "exit_depths: pass a row for every sequence"),
        (([["a"]], [[1]]), {"titles": []}, r"titles=\[\]: 0 for 1 rows"),
        (([["a"]], [[0]]), {"full_depth": 0}, "full_depth=0"),
    ],
)
def test_what_does_not_belong_together_is_refused(arguments, options, words):
    with pytest.raises(ValueError, match=words):
        depth_html(None, *arguments, **options)


def test_the_figure_shows_tokens_depths_and_gaps():
    figure = depth_figure(None, SEQUENCES, DEPTHS)
    axes, bar = figure.axes
    assert axes.images[0].get_array().filled(0).tolist() == [[4, 1, 2], [4, 0, 0]]
    assert [(text.get_position(), text.get_text()) for text in axes.texts] == [
        ((0, 0), "·beginning"),
        ((1, 0), "⏎"),
        ((2, 0), "<script>alert…"),
        ((0, 1), "y"),
    ]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["row 0", "row 1"]
    assert bar.get_yticks().tolist() == [1, 2, 3, 4]
    figure.canvas.draw()


def test_odd_figures_can_be_drawn():
    """One depth alone, dollar signs that open a formula, and a title of one."""
    depth_figure(None, [["$x$", "$\\frac"]], [[1, 1]], titles=["$"]).canvas.draw()
    with pytest.raises(ValueError, match="no token to draw"):
        depth_figure(None, [["a"]], [[0]])


def launches(*entries):
    """A trace of launches given as (stage, rows, depths)."""
    return Trace(
        TracedLaunch(stage, rows, depths, len(rows), len(rows), 0, 0, 0, 0, float(place), 1.0)
        for place, (stage, rows, depths) in enumerate(entries)
    )


REFILL = launches(
    ("prelude", (0, 7), (0, 0)),
    ("loop", (0, 7), (1, 1)),
    ("loop", (7, 0), (2, 2)),
    ("coda", (0,), (2,)),
    ("loop", (7,), (3,)),
    ("loop", (3,), (1,)),
)


def test_the_grid_of_a_schedule():
    assert schedule_grid(REFILL).tolist() == [[1, 2, 0, 0], [0, 0, 0, 1], [1, 2, 3, 0]]


def test_schedules_side_by_side_share_their_scales():
    short = launches(("loop", (0,), (1,)))
    figure = schedule_figure({"refill": REFILL, "no $refill": short})
    left, right, bar = figure.axes
    assert left.get_title() == "refill: 4 launches, 1.5 rows each"
    assert right.get_title() == "no $refill: 1 launches, 1.0 rows each"
    assert left.get_xlim() == right.get_xlim() == (-0.5, 3.5)
    assert left.get_ylim() == right.get_ylim() == (2.5, -0.5)
    assert bar.get_yticks().tolist() == [1, 2, 3]
    figure.canvas.draw()
    assert schedule_figure({"deep": REFILL}, full_depth=32).axes[1].get_yticks().tolist() == [
        1,
        5,
        9,
        13,
        17,
        21,
        25,
        29,
    ]


@pytest.mark.parametrize(
    ("traces", "options", "words"),
    [
        ({}, {}, "traces={}: pass a title and a trace"),
        (REFILL, {}, "pass a title and a trace"),
        ({"a": None}, {}, r"traces\['a'\]=None is no trace. Generate with cdb={'trace': True}"),
        ({"a": Trace()}, {}, r"traces\['a'\] has no launch of the core"),
        ({"a": REFILL}, {"full_depth": 2}, "full_depth=2: a launch ran loop 3"),
    ],
)
def test_what_is_no_schedule_is_refused(traces, options, words):
    with pytest.raises(ValueError, match=words):
        schedule_figure(traces, **options)


def test_without_matplotlib_figures_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"hf-cdb\[bench\]"):
        depth_figure(None, SEQUENCES, DEPTHS)
    with pytest.raises(ImportError, match=r"hf-cdb\[bench\]"):
        schedule_figure({"refill": REFILL})
    assert depth_html(None, SEQUENCES, DEPTHS).text


def test_a_real_run(tokenizer):
    """Depths, text and schedule of a run of the embedded checkpoint are those of its output."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_cdb.tiny_checkpoint("ouro"), dtype=torch.float32)
    inputs = tokenizer(["In the beginning", "add:458+367="], padding=True, padding_side="left", return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=6, do_sample=False, cdb={"trace": True}, return_dict_in_generate=True
    )
    page = Page(depth_html(tokenizer, output.sequences, output.exit_depths).text)
    depths = [int(re.search(r"depth (\d) of 4", title)[1]) for title, _ in tokens_of(page)]
    assert depths == [depth for row in output.exit_depths.tolist() for depth in row if depth]
    grid = schedule_grid(output.stats.trace)
    assert (grid > 0).sum() == output.stats.rows["loop"] == output.exit_depths.sum()
