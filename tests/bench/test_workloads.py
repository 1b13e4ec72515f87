import argparse
import json
from collections import Counter

import numpy
import pytest
from datasets import Dataset, DatasetDict

from hf_cdb.bench.conversations import read_conversations
from hf_cdb.bench.lengths import draw_lengths, read_lengths
from hf_cdb.bench.mixes import MIXES, check_mix, default_mix, depth_shares, draw_depths
from hf_cdb.bench.models import load_tokenizer
from hf_cdb.bench.workloads import Workload, add_workload_arguments, make_workload


def rng():
    return numpy.random.default_rng(0)


def workload(*words, requests=6, full_depth=4, tokenizer=None, seed=0):
    parser = argparse.ArgumentParser()
    add_workload_arguments(parser)
    arguments = parser.parse_args([str(word) for word in words], argparse.Namespace(seed=seed))
    return make_workload(arguments, requests, full_depth, 50, tokenizer)


class TestMixes:
    @pytest.mark.parametrize(
        ("mix", "full_depth", "shares"),
        [
            ("full", 4, {4: 1}),
            ("shallow", 4, {1: 1}),
            ("bimodal", 4, {1: 0.5, 4: 0.5}),
            ("clustered", 16, {1: 0.8, 16: 0.2}),
            ("shallow-heavy", 4, {1: 0.4, 2: 0.3, 3: 0.2, 4: 0.1}),
            ("deep-heavy", 4, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}),
            ("shallow-heavy", 16, {4: 0.4, 8: 0.3, 12: 0.2, 16: 0.1}),
            ("shallow-heavy", 2, {1: 0.7, 2: 0.3}),
            ("bimodal", 1, {1: 1}),
            ("1:.25,3:.75", 4, {1: 0.25, 3: 0.75}),
        ],
    )
    def test_shares(self, mix, full_depth, shares):
        assert depth_shares(mix, full_depth) == pytest.approx(shares)

    def test_poisson_lognormal_equals_draws_of_its_definition(self):
        shares = depth_shares("poisson-lognormal:6", 16)
        draws = rng()
        rates = draws.lognormal(numpy.log(5) - 0.5**2 / 2, 0.5, size=200_000)
        depths = numpy.minimum(draws.poisson(rates) + 1, 16)
        counts = Counter(depths.tolist())
        assert sum(shares.values()) == pytest.approx(1)
        for depth, share in shares.items():
            assert share == pytest.approx(counts[depth] / 200_000, abs=4e-3)
        assert sum(depth * share for depth, share in shares.items()) == pytest.approx(6, abs=0.1)

    @pytest.mark.parametrize(
        ("mix", "words"),
        [
            ("bimodel", "Did you mean bimodal"),
            ("1:.5,5:.5", "depth 5, but the model has loops 1 to 4"),
            ("1:.5,2:.4", "add up to 0.9"),
            ("1:1.5,2:-.5", r"the share of depth 2 is -0\.5. Give shares of at least 0"),
            ("1:nan,2:1", "the share of depth 1 is nan"),
            ("poisson-lognormal:1", "between 1 and 4"),
            ("poisson-lognormal:x", "between 1 and 4"),
        ],
    )
    def test_refusals(self, mix, words):
        with pytest.raises(ValueError, match=words):
            depth_shares(mix, 4)

    @pytest.mark.parametrize("mix", [*MIXES, "poisson-lognormal:40", "1:.5,50:.5"])
    def test_what_some_model_could_follow(self, mix):
        check_mix(mix)

    @pytest.mark.parametrize(
        ("mix", "words"),
        [
            ("full:4", "is no mix of depths"),
            ("0:1", "depth 0, but the model has loops from 1 on"),
            ("1:.5,50:.4", "add up to 0.9"),
            ("poisson-lognormal:1", "between 1 and full depth"),
        ],
    )
    def test_what_none_could(self, mix, words):
        with pytest.raises(ValueError, match=words):
            check_mix(mix)

    def test_drawn_depths_begin_at_full_depth_and_follow_the_shares(self):
        rows = draw_depths({1: 0.75, 2: 0.25}, [1, 4001], 4, rng())
        assert rows[0] == [4]
        assert rows[1][0] == 4
        assert len(rows[1]) == 4001
        assert rows[1][1:].count(1) / 4000 == pytest.approx(0.75, abs=0.03)
        assert set(rows[1][1:]) == {1, 2}

    def test_default(self):
        assert (default_mix(4), default_mix(16)) == ("shallow-heavy", "poisson-lognormal:6")


class TestLengths:
    def test_forms(self):
        assert draw_lengths("7", 3, rng()) == [7, 7, 7]
        assert sorted(set(draw_lengths("3-5", 100, rng()))) == [3, 4, 5]
        drawn = draw_lengths("lognormal:100:0.5:300", 4001, rng())
        assert numpy.median(drawn) == pytest.approx(100, rel=0.05)
        assert numpy.log(drawn).std() == pytest.approx(0.5, rel=0.1)
        assert max(drawn) == 300

    @pytest.mark.parametrize(
        "spec",
        [
            "0",
            "5-3",
            "x",
            "",
            "lognormal:100",
            "lognormal:100:0:300",
            "lognormal:9:1:5",
            "16-",
            "-16",
            "1-2-3",
            "lognormal:8:1000:inf",
            "lognormal:8:inf:9",
            "100000000",
        ],
    )
    def test_refusals(self, spec):
        with pytest.raises(ValueError, match="give a number of tokens"):
            draw_lengths(spec, 3, rng())

    def test_a_file(self, tmp_path):
        path = tmp_path / "lengths.json"
        path.write_text("[[3, 5], [2, 8], [1, 1]]")
        assert read_lengths(path) == ([3, 2, 1], [5, 8, 1])
        made = workload("--lengths", path, "--requests", 2)
        assert [len(prompt) for prompt in made.prompts] == [3, 2]
        assert made.new_tokens == [5, 8]

    @pytest.mark.parametrize("text", ["[]", "{}", "[[1]]", "[[1, 0]]", "[[1, 2.5]]", "[[1, 2]", "[[true, 2]]"])
    def test_a_file_of_something_else(self, tmp_path, text):
        path = tmp_path / "lengths.json"
        path.write_text(text)
        with pytest.raises(ValueError, match="lengths="):
            read_lengths(path)


RECORDS = {
    "sharegpt": [
        {"id": "a", "conversations": [{"from": "gpt", "value": "Hello"}, {"from": "human", "value": "Why?"},
                                      {"from": "gpt", "value": "Because."}]},
        {"id": "b", "conversations": [{"from": "human", "value": "Left alone"}]},
        {"id": "c", "conversations": [{"from": "user", "value": "Who?"}, {"from": "assistant", "value": "I."}]},
    ],
    "alpaca": [
        {"instruction": "Add.", "input": "1 2", "output": "3"},
        {"instruction": "Sing.", "input": "", "output": "La"},
        {"instruction": "Wait.", "input": "", "output": " "},
    ],
    "arxiv": [{"article": "Long text", "abstract": "Short text", "section_names": "Intro"}],
}  # fmt: skip
PAIRS = {
    "sharegpt": [("Why?", "Because."), ("Who?", "I.")],
    "alpaca": [("Add.\n\n1 2", "3"), ("Sing.", "La")],
    "arxiv": [("Long text", "Short text")],
}


class TestConversations:
    @pytest.mark.parametrize("layout", list(RECORDS))
    @pytest.mark.parametrize("form", ["json", "jsonl", "folder"])
    def test_layouts(self, layout, form, tmp_path):
        path = tmp_path / f"data.{form}"
        if form == "json":
            path.write_text(json.dumps(RECORDS[layout]))
        elif form == "jsonl":
            path.write_text("\n".join(map(json.dumps, RECORDS[layout])))
        else:
            Dataset.from_list(RECORDS[layout]).save_to_disk(path)
        assert read_conversations(path) == PAIRS[layout]
        assert read_conversations(path, layout) == PAIRS[layout]

    def test_refusals(self, tmp_path):
        path = tmp_path / "data.json"
        path.write_text('[{"text": "x"}]')
        with pytest.raises(ValueError, match=r"fields \['text'\]. Known are sharegpt: conversations"):
            read_conversations(path)
        with pytest.raises(ValueError, match="no record has a prompt and an answer"):
            read_conversations(path, "alpaca")
        path.write_text('{"text": "x"}\n{"text": "y"}')
        with pytest.raises(ValueError, match=r"is no JSON.*end in \.jsonl"):
            read_conversations(path)

    @pytest.mark.parametrize(
        "broken",
        [
            {"conversations": ["hi", "there"]},
            {"conversations": "text"},
            {"conversations": [{"from": ["x"], "value": "a"}, {"from": "gpt", "value": "b"}]},
            {"conversations": None},
            {"id": 3},
            None,
        ],
    )
    def test_records_of_another_form_are_left_out(self, broken, tmp_path):
        """Also the first one, whose fields would tell the layout."""
        path = tmp_path / "data.jsonl"
        path.write_text("\n".join(map(json.dumps, [broken, *RECORDS["sharegpt"]])))
        assert read_conversations(path) == PAIRS["sharegpt"]

    def test_files_of_another_form_say_what_is_wrong(self, tmp_path):
        path = tmp_path / "data.jsonl"
        path.write_text('{"instruction": "a", "output": "b"}\n\n{"instruction": \n')
        with pytest.raises(ValueError, match=r"line 3 of data=.*is no JSON"):
            read_conversations(path)
        path.write_bytes(b"\xff\xfe")
        with pytest.raises(ValueError, match=r"data=.*is no text in UTF-8"):
            read_conversations(path)
        DatasetDict({"train": Dataset.from_list(RECORDS["alpaca"])}).save_to_disk(tmp_path / "parts")
        with pytest.raises(ValueError, match=r"several data sets\. Name the folder of one in it: train"):
            read_conversations(tmp_path / "parts")

    def test_a_workload_of_texts(self, tmp_path):
        path = tmp_path / "data.json"
        path.write_text(json.dumps([{"article": "abc " * 40, "abstract": "In the beginning"}] * 3))
        tokenizer = load_tokenizer("tiny-ouro")
        parser = argparse.ArgumentParser()
        add_workload_arguments(parser)
        arguments = parser.parse_args(
            ["--data", str(path), "--longest", "20", "--requests", "2"], argparse.Namespace(seed=0)
        )
        made = make_workload(arguments, 6, 4, len(tokenizer), tokenizer)
        assert made.prompts == [tokenizer("abc " * 40).input_ids[:20]] * 2
        assert made.new_tokens == [len(tokenizer("In the beginning", add_special_tokens=False).input_ids)] * 2
        with pytest.raises(ValueError, match="needs a tokenizer"):
            make_workload(arguments, 6, 4, 50)


class TestWorkloads:
    def test_what_was_asked_for(self):
        made = workload("--prompt", "3-5", "--new", "2", "--mix", "shallow")
        assert {len(prompt) for prompt in made.prompts} <= {3, 4, 5}
        assert made.depths == [[4, 1]] * 6
        assert made.tokens == 12
        assert made.summary()["mean_depth"] == 2.5
        assert made.summary()["new_tokens"] == {"mean": 2, "least": 2, "most": 2}
        assert all(1 <= token < 50 for prompt in made.prompts for token in prompt)

    def test_equal_arguments_make_equal_workloads(self):
        first = workload("--new", "9")
        assert first.checksum() == workload("--new", "9").checksum()
        for other in (workload("--new", "9", seed=1), workload("--new", "8"), workload("--new", "9", "--mix", "full")):
            assert other.checksum() != first.checksum()
        # Other depths leave the prompts as they are.
        assert workload("--new", "9", "--mix", "full").prompts == first.prompts

    def test_the_checksum_is_that_of_the_canonical_json(self):
        # printf '{"prompts":[[1,2]],"new_tokens":[2],"depths":[[4,1]]}' | sha256sum
        made = Workload([[1, 2]], [2], [[4, 1]])
        assert made.checksum() == "1f9f4292ac7c990b0b3af133bbcfb8fcfb72e38ab75704578f28a5816e2386e8"

    def test_requests_of_a_file_are_read_from_any_on(self, tmp_path):
        path = tmp_path / "lengths.json"
        path.write_text("[[3, 5], [2, 8], [1, 1]]")
        parser = argparse.ArgumentParser()
        add_workload_arguments(parser)
        arguments = parser.parse_args(["--lengths", str(path)], argparse.Namespace(seed=0))
        assert make_workload(arguments, 6, 4, 50, skip=1).new_tokens == [8, 1]
        assert len(make_workload(arguments, 6, 4, 50, skip=3)) == 0

    def test_live(self):
        assert workload("--mix", "live").depths is None

    def test_a_record_is_replayed(self, tmp_path):
        live = workload("--mix", "live", "--new", "2-4", requests=3)
        depths = [[4] + [2] * (count - 1) for count in live.new_tokens]
        live.save(tmp_path / "new" / "trace.json", depths, model="tiny")
        again = workload("--trace", tmp_path / "new" / "trace.json")
        assert (again.prompts, again.new_tokens, again.depths) == (live.prompts, live.new_tokens, depths)
        assert len(workload("--trace", tmp_path / "new" / "trace.json", "--requests", 2)) == 2

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({"prompts": [[1]]}, "no record of depths"),
            ({"prompts": [[1]], "depths": []}, "no record of depths"),
            ([1], "no record of depths"),
            ({"prompts": [[1]], "depths": [[8, 1]]}, "does not have this one's 4 loops"),
            ({"prompts": [[1]], "depths": [[4, 5]]}, "does not have this one's 4 loops"),
            ({"prompts": [["a"]], "depths": [[4]]}, "no record of depths"),
            ({"prompts": [[2.5]], "depths": [[4]]}, "no record of depths"),
            ({"prompts": [[1]], "depths": [[4, 1.5]]}, "no record of depths"),
            ({"prompts": "a", "depths": [[4]]}, "no record of depths"),
            ({"prompts": [[]], "depths": [[4]]}, "no record of depths"),
            ({"prompts": [[50]], "depths": [[4, 1]]}, "beyond the model's vocabulary of 50"),
        ],
    )
    def test_records_that_do_not_fit(self, tmp_path, content, words):
        path = tmp_path / "trace.json"
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=words):
            workload("--trace", path)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--lengths", "a", "--trace", "b"], "--lengths and --trace both"),
            (["--trace", "b", "--mix", "full"], "mix='full' beside --trace"),
            (["--requests", "0"], "requests=0"),
            (["--longest", "0"], "longest=0"),
        ],
    )
    def test_contradictions(self, words, message):
        with pytest.raises(ValueError, match=message):
            workload(*words)
