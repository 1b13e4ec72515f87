"""Exported folders load and generate where nobody imports the package, and cards say what was measured."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_cdb
from hf_cdb.calibrated import Calibrated, remember
from hf_cdb.cli import main
from hf_cdb.hub import export, model_card
from hf_cdb.hub.results import depth_histogram, eval_results, load_results
from hf_cdb.hub.text import read_text

from .dory import random_dory
from .tiny import random_ouro

CARDS = Path(__file__).parent.parent / "configs" / "cards"
PROMPT = "add:458+367="


def score(mean, low, high, difference=None):
    bounds = dict(zip(("mean", "low", "high"), difference, strict=True)) if difference else None
    return {"mean": mean, "low": low, "high": high, "count": 8, "difference": bounds}


def system(name, scores, mean_depth, depths, **more):
    return {
        "name": name,
        "cdb": None,
        "scores": scores,
        "mean_depth": mean_depth,
        "depths": depths,
        "loops_ratio": 4 / mean_depth,
        "flop_bound": 3.5 / mean_depth,
        "tokens": 40,
        "tokens_per_second": 100.0,
        "tasks": {"sums": {"mean_depth": mean_depth}, "verses": {"mean_depth": mean_depth}},
        **more,
    }


RESULTS = {
    "schema": 1,
    "model": {"loops": 4},
    "tasks": [{"name": "sums", "kind": "generate"}, {"name": "verses", "kind": "text"}],
    "depth_curve": {},
    "signal": {},
    "systems": [
        system(
            "stock", {"sums/exact_match:strict": score(0.875, 0.5, 1.0), "verses/bits_per_byte": score(1.25, 1.2, 1.3)},
            4.0, {"4": 40},
        ),
        system("engine", {"sums/exact_match:strict": score(0.875, 0.5, 1.0, (0.0, 0.0, 0.0))}, 4.0, {"4": 40}),
        system(
            "default", {"sums/exact_match:strict": score(0.75, 0.4, 0.9, (-0.125, -0.25, 0.0))},
            2.5, {"1": 10, "2": 10, "3": 10, "4": 10}, tokens_per_second=None,
        ),
    ],
}  # fmt: skip


def load(name):
    folder = hf_cdb.tiny_checkpoint(name)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval(), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The embedded Ouro as a folder, with everything a card can have."""
    folder = tmp_path_factory.mktemp("hub") / "a-model"
    plot = folder.with_name("my plot.png")
    plot.write_bytes(b"a picture")
    model, tokenizer = load("ouro")
    metadata = {"base_model": "a/base", "license": "apache-2.0", "language": ["en"], "tags": ["toy", "hf_cdb"]}
    export(model, folder, tokenizer=tokenizer, repo_id="me/a-model", results=RESULTS, plot=plot, **metadata)
    return folder


# Both print what was generated as a line of JSON.
SHOW = """
inputs = AutoTokenizer.from_pretrained(folder)("add:458+367=", return_tensors="pt")
options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "cdb": True}
def show(output):
    print(json.dumps([output.sequences.tolist(), output.exit_depths.tolist()]))
"""
IMPORTED = f"""
import json, sys
folder = sys.argv[1]
import hf_cdb
from transformers import AutoModelForCausalLM, AutoTokenizer
{SHOW}
show(AutoModelForCausalLM.from_pretrained(folder).generate(**inputs, **options))
"""
# Also saves the model again: its files have to load without code of this package beside them.
NOT_IMPORTED = f"""
import json, sys
folder, again = sys.argv[1:]
from transformers import AutoModelForCausalLM, AutoTokenizer
assert "hf_cdb" not in sys.modules
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
{SHOW}
show(model.generate(**inputs, custom_generate=folder, trust_remote_code=True, **options))
show(model.generate(**inputs, **options))
model.save_pretrained(again)
"""


def run(code, *arguments, cache):
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_fresh_process_loads_and_generates_both_ways(exported, tmp_path):
    model, tokenizer = load("ouro")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=8, do_sample=False, cdb=True, return_dict_in_generate=True)
    wanted = [expected.sequences.tolist(), expected.exit_depths.tolist()]
    assert run(IMPORTED, exported, cache=tmp_path / "code") == [wanted]
    assert run(NOT_IMPORTED, exported, tmp_path / "again", cache=tmp_path / "code") == [wanted, wanted]
    again = tmp_path / "again"
    assert not list(again.rglob("*.py"))
    assert "auto_map" not in json.loads((again / "config.json").read_text())
    assert (again / "exit_heads" / "same-step.safetensors").is_file()


def test_without_saved_settings_custom_generate_follows_the_model(exported, monkeypatch, tmp_path):
    """For a class that knows cdb, `cdb=None` means what its generation config says: here stock generation."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(exported, trust_remote_code=True)
    inputs = AutoTokenizer.from_pretrained(exported)(PROMPT, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert not hasattr(output, "exit_depths")


def test_custom_generate_for_a_class_of_transformers(monkeypatch, tmp_path):
    """Dory's own `generate` does not know cdb: the exported code brings it, and leaves the model as it was."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code"))
    model = random_dory()
    folder = export(model, tmp_path / "dory")
    assert not (folder / "modeling_hf_cdb.py").exists()
    assert "auto_map" not in json.loads((folder / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder)
    cls, ids = type(model), torch.tensor([[3, 1, 4]])
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    settings = {"exit_rule": "latent-diff", "exit_threshold": 0.4}
    outputs = [
        model.generate(ids, custom_generate=str(folder), trust_remote_code=True, cdb=cdb, **options)
        for cdb in (settings, settings, None)
    ]
    assert type(model) is cls
    expected = hf_cdb.enable_cdb(random_dory()).generate(ids, cdb=settings, **options)
    for output in outputs[:2]:
        assert torch.equal(output.sequences, expected.sequences)
        assert torch.equal(output.exit_depths, expected.exit_depths)
    assert outputs[2].stats.full_depth == 4  # cdb without being asked by name
    card = (folder / "README.md").read_text()
    assert "hf_cdb.enable_cdb(model)" in card
    assert "Without it the model loads and generates at full depth" in card


def test_weights_settings_and_heads_come_back(exported):
    own, _ = load("ouro")
    model = AutoModelForCausalLM.from_pretrained(exported, dtype="auto")
    assert model.dtype == torch.float16
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in model.state_dict().items())
    assert model.generation_config.cdb_config == own.generation_config.cdb_config
    kinds = {file.stem for file in (exported / "exit_heads").glob("*.safetensors")}
    assert kinds == {"same-step", "lookahead", "preloop"}
    assert (exported / "custom_generate" / "requirements.txt").read_text() == f"hf-cdb>={hf_cdb.__version__}\n"


def test_metadata_of_the_card_come_back(exported):
    card = ModelCard.load(exported / "README.md")
    data = card.data.to_dict()
    index = data.pop("model-index")
    assert data == {
        "base_model": "a/base",
        "language": ["en"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["looped-language-model", "adaptive-depth", "hf_cdb", "toy"],
    }
    assert index[0]["name"] == "a-model"
    found = [(r.dataset_name, r.metric_type, r.metric_name, r.metric_value) for r in card.data.eval_results]
    assert found == [
        ("sums", "exact_match", "exact_match:strict, stock, 4.00 of 4 loops", 0.875),
        ("sums", "exact_match", "exact_match:strict, default, 2.50 of 4 loops", 0.75),
        ("verses", "bits_per_byte", "bits_per_byte, stock, 4.00 of 4 loops", 1.25),
    ]
    assert ModelCard(str(card)).data.to_dict() == card.data.to_dict()


def test_the_card_says_how_to_use_it_and_what_was_measured(exported):
    text = (exported / "README.md").read_text()
    for line in (
        "# a-model",
        'path = "me/a-model"',
        "model.generate(**inputs, max_new_tokens=64, custom_generate=path, trust_remote_code=True, cdb=True)",
        '`cdb=True` uses the settings saved with it: `{"exit_rule": "gate", "exit_threshold": 0.6}`.',
        "| default | 2.50 | 1.60 | 1.40 |  | 0.75 [0.4, 0.9] |  |",
        "| default | -0.1250 [-0.2500, +0.0000] |",
        "![Quality against mean depth and speed](quality_speed.png)",
        "## Limits",
    ):
        assert line in text.splitlines(), line
    assert "40 tokens, 2.50 of 4 loops in the mean." in text
    assert (exported / "quality_speed.png").read_bytes() == b"a picture"


def test_a_card_without_results_and_settings():
    card = str(model_card(random_ouro(), "plain"))
    assert "checkpoint's own exit threshold, 1.0: nothing leaves early until you choose less" in card
    assert "model-index" not in card
    assert "## Results" not in card
    assert "## Depths" not in card
    assert "\n\n\n" not in card
    assert card.endswith("differently.\n")


def test_own_depths_come_before_those_of_the_results():
    card = str(model_card(random_ouro(), "plain", results=RESULTS, depths={1: 3, 4: 1}))
    assert "Generated tokens: 4 tokens, 1.75 of 4 loops in the mean." in card


def test_a_histogram_by_hand():
    lines = depth_histogram({"1": 1000, 3: 500}, 4).splitlines()
    assert lines[0] == "1,500 tokens, 1.67 of 4 loops in the mean."
    assert lines[4:] == [
        f"| 1 | 1,000 | 66.7% | {'█' * 40} |",
        "| 2 | 0 | 0.0% |  |",
        f"| 3 | 500 | 33.3% | {'█' * 20} |",
        "| 4 | 0 | 0.0% |  |",
    ]


@pytest.mark.parametrize(
    ("depths", "words"), [({5: 1}, "loop 5 is none of the 4"), ({0: 1}, "loop 0 is none"), ({}, "there are no tokens")]
)
def test_depths_of_another_model_are_refused(depths, words):
    with pytest.raises(ValueError, match=words):
        depth_histogram(depths, 4)


OWN = """---
license: mit
tags:
- own
---

# A title

What it is.

## Data
Words.

```bash
## no heading
```

## Usage
Ask somebody.

## Limits
None.
"""


def test_a_text_brings_metadata_title_and_sections():
    card = model_card(random_ouro(), "name", text=OWN, license="apache-2.0")
    assert card.data.license == "apache-2.0"  # what is passed comes first
    assert card.data.tags == ["looped-language-model", "adaptive-depth", "hf_cdb", "own"]
    headings = [line for line in card.text.splitlines() if line.startswith("#")]
    assert headings == ["# A title", "## Usage", "## Data", "## no heading", "## Limits"]
    assert "\nWhat it is.\n" in card.text
    assert "from_pretrained" not in card.text
    assert "## Limits\nNone.\n\n* Leaving early" in card.text


def test_a_text_without_any_of_it():
    written = read_text("Just words.\nAnd more.")
    assert (written.metadata, written.title, written.description) == ({}, None, "Just words.\nAnd more.")
    assert written.sections == {}


def test_tables_are_read_from_files(tmp_path):
    (tmp_path / "depth.md").write_text("# Title\n\nwords | bars\n\n| a |\n|---|\n| 1 |\n\nmore\n\n| b |\n|---|\n")
    written = read_text("## S\n{{ tables('depth.md') }}", tmp_path)
    assert written.sections == {"S": "| a |\n|---|\n| 1 |\n\n| b |\n|---|"}
    (tmp_path / "words.md").write_text("words\n")
    with pytest.raises(ValueError, match="has no Markdown table"):
        read_text("{{ tables('words.md') }}", tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ tables('depth.md') }}", r"tables\('depth.md'\): this text has no folder"),
        ("{{ unknown }}", r"text: 'unknown' is undefined.*\{% raw %\}"),
        ("{% if %}", "text: .*Jinja"),
        ("## A\n## A", "the section 'A' comes twice"),
        ("---\nlicense: [\n---\nwords", "text: its YAML block cannot be read"),
        ("---\n- a\n---\nwords", "text: its YAML block cannot be read, repo card metadata block should be a dict"),
    ],
)
def test_texts_that_cannot_be_read(text, words):
    with pytest.raises(ValueError, match=words):
        read_text(text)


@pytest.mark.parametrize(
    ("results", "words"),
    [
        ([], "schema 'list' is unknown"),
        ({**RESULTS, "schema": 2}, "schema 2 is unknown"),
        ({"schema": 1, "model": {}, "tasks": []}, "results has no depth_curve and signal and systems"),
        ({**RESULTS, "systems": []}, "results has no systems"),
        ({**RESULTS, "model": {"loops": 8}}, "results are of a model with loops 8, and that of this one is 4"),
        ({**RESULTS, "model": {"loops": 4, "vocab_size": 7}}, "a model with vocab_size 7, and that of this one is"),
        ({**RESULTS, "systems": RESULTS["systems"][1:2]}, r"none of the systems \['engine'\] is stock or default"),
    ],
)
def test_other_results_are_refused(results, words):
    with pytest.raises(ValueError, match=words):
        model_card(random_ouro(), "name", results=results)


def test_results_are_read_from_a_file(tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(RESULTS))
    found = load_results(tmp_path / "results.json")
    assert eval_results(found) == eval_results(RESULTS)
    with pytest.raises(FileNotFoundError):
        load_results(tmp_path / "none.json")


def test_foreign_folders_are_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="is not empty, and no export made it"):
        export(random_ouro(), tmp_path)
    with pytest.raises(FileExistsError, match=r"thesis.tex' is a file"):
        export(random_ouro(), tmp_path / "thesis.tex")
    (tmp_path / "custom_generate").mkdir()
    (tmp_path / "custom_generate" / "generate.py").write_text("def generate(model): ...\n")
    with pytest.raises(FileExistsError, match="no export made it"):
        export(random_ouro(), tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["custom_generate", "thesis.tex"]


def test_nothing_is_written_where_the_card_cannot_be(tmp_path):
    folder = tmp_path / "new"
    for options, error in (
        ({"results": {}}, ValueError),
        ({"text": "{{ unknown }}"}, ValueError),
        ({"plot": tmp_path / "none.png"}, FileNotFoundError),
        ({"plot": Path(__file__)}, ValueError),
        ({"name": "two\nlines"}, ValueError),
        ({"repo_id": " "}, ValueError),
        ({"depths": {9: 1}}, ValueError),
    ):
        with pytest.raises(error):
            export(random_ouro(), folder, **options)
    with pytest.raises(ValueError, match="is not known as a looped model"):
        export(torch.nn.Linear(2, 2), folder)
    assert not folder.exists()


def test_an_export_replaces_an_earlier_one(tmp_path):
    """Heads that the model does not have are no longer beside it, and what others put there stays."""
    model, _ = load("ouro")
    folder = export(model, tmp_path / "model")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    plain = random_ouro()
    export(plain, folder)
    assert not list((folder / "exit_heads").glob("*.safetensors"))
    assert (folder / ".gitattributes").exists()
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, plain.state_dict()[name]) for name, value in loaded.state_dict().items())
    export(loaded, folder)  # into the folder that it came from
    assert AutoModelForCausalLM.from_pretrained(folder).config.hidden_size == 32


def test_nothing_of_an_earlier_export_speaks_of_the_new_model(tmp_path, exported):
    folder = shutil.copytree(exported, tmp_path / "model")
    (folder / "tokenizer notes.md").write_text("mine")
    export(random_dory(), folder)
    left = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    assert left == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer notes.md",
        "custom_generate/generate.py", "custom_generate/requirements.txt",
    }  # fmt: skip
    folder = shutil.copytree(exported, tmp_path / "again")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    export(model, folder, tokenizer=tokenizer, plot=folder / "quality_speed.png")  # all of it its own
    assert {file.name for file in folder.rglob("*")} == {file.name for file in exported.rglob("*")}
    assert AutoTokenizer.from_pretrained(folder)(PROMPT) == tokenizer(PROMPT)


def usage(card):
    """The code of a card's usage."""
    return str(card).partition("```python\n")[2].partition("```")[0]


@pytest.mark.parametrize("name", ['a"b\\', "'; import os #", "日本語", "{{ 7*7 }}"])
def test_any_name_makes_code_that_runs(name, tmp_path):
    card = model_card(random_ouro(), name, tokenizer=False)
    assert f"path = {name!r}" in ast.unparse(ast.parse(usage(card)))
    assert ModelCard(str(card)).text.lstrip().startswith(f"# {name}\n")


def test_the_usage_without_a_tokenizer_runs(tmp_path, capsys):
    folder = export(random_ouro(), tmp_path / "model", repo_id=str(tmp_path / "model"))
    code = usage(ModelCard.load(folder / "README.md"))
    assert "okenizer(" not in code
    exec(code, {})
    assert capsys.readouterr().out.startswith("tensor([[ 1,  2,  3, ")


def test_results_of_a_model_of_another_name(tmp_path):
    model, _ = load("ouro")
    results = {**RESULTS, "model": {"loops": 4, "name": "some/other"}}
    with pytest.warns(UserWarning, match="results are of the model 'some/other', and this one was loaded from"):
        card = model_card(model, "name", results=results)
    assert "Measured: `some/other`." in str(card)


def test_adapters_of_peft_are_to_be_merged_first(tmp_path):
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(random_ouro(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    for model in (wrapped, wrapped.get_base_model()):  # the second holds its layers still
        with pytest.raises(ValueError, match=r"Export model\.merge_and_unload"):
            export(model, tmp_path / "model")
    export(wrapped.merge_and_unload(), tmp_path / "model")


@pytest.mark.parametrize("name", ["ouro", "huginn"])
def test_cards_of_the_embedded_checkpoints_are_made_so(name, tmp_path, capsys):
    """The committed card is what the documented command writes."""
    output, folder = tmp_path / "README.md", Path(hf_cdb.tiny_checkpoint(name))
    shutil.copy(folder / "quality_speed.png", tmp_path)
    arguments = ["--text", str(CARDS / f"tiny-{name}.md"), "--results", str(folder / "evaluation.json")]
    assert main(["hub", "card", name, *arguments, "--plot", "quality_speed.png", "--output", str(output)]) == 0
    assert capsys.readouterr().out.strip() == str(output)
    assert output.read_text() == (folder / "README.md").read_text()
    card = ModelCard.load(output)
    scores = {(result.dataset_name, result.metric_name.split(", ")[1]) for result in card.data.eval_results}
    assert scores == {(task, system) for task in ("tasks", "bible") for system in ("stock", "default")}
    assert "## Depths\n" in card.text
    assert main(["hub", "card", name, *arguments, "--plot", "none.png", "--output", str(output)]) == 2
    assert "plot='none.png'" in capsys.readouterr().err


def test_the_command_exports(tmp_path, capsys):
    folder = tmp_path / "model"
    assert main(["hub", "export", "ouro", str(folder), "--license", "mit", "--tag", "a", "--tag", "b"]) == 0
    assert ModelCard.load(folder / "README.md").data.tags[-2:] == ["a", "b"]
    assert AutoTokenizer.from_pretrained(folder)(PROMPT)
    capsys.readouterr()
    assert main(["hub", "export", "ouro", str(tmp_path)]) == 2
    assert "no export made it" in capsys.readouterr().err


def test_the_card_says_what_was_calibrated():
    model = random_ouro()
    held_out = {"examples": 50, "loss": 0.0123, "low": -0.01, "high": 0.02, "mean_depth": 1.65}
    chosen = Calibrated(
        0.97, 0.7, "gate", 0, "last_exited", None, 1, 4, "score: exact_match", 0.95, "sums", 200, 1.64, held_out, 0.9375
    )
    remember(model, chosen)
    text = " ".join(str(model_card(model, "name")).split())
    assert (
        "Calibrated on sums, 200 examples: with `exit_threshold` 0.7 (`gate`, `last_exited`) the expected loss "
        "(score: exact_match) is below 0.03 with confidence 0.95. On 50 other examples it was 0.0123 (-0.0100 to "
        "0.0200) at mean depth 1.65. Full depth scores 0.9375."
    ) in text
    assert '"quality": 0.97' in text
