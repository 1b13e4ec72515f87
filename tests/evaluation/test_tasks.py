import json
import re

import pytest
from datasets import Dataset
from transformers import AutoTokenizer

import hf_cdb
from hf_cdb.evaluation import load_task
from hf_cdb.evaluation.data import load_rows
from hf_cdb.evaluation.task_spec import TaskSpec
from hf_cdb.training.tasks import TASKS

QUESTIONS = [{"question": f"{n} + {n}", "answer": f"{n} and {n} make {2 * n}.\n#### {2 * n}"} for n in range(1, 6)]
GSM8K = {"name": "gsm8k", "kind": "generate", "prompt": "Question: {question}\nAnswer:", "reference": "{answer}"}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(hf_cdb.tiny_checkpoint("ouro"))


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return str(path)


def test_shots_come_before_the_prompt(questions, tokenizer):
    spec = {**GSM8K, "data": {"path": questions, "skip": 3}, "shot_data": questions, "shots": 2}
    task = load_task({**spec, "metrics": ["exact_match:strict", "exact_match:flexible"]}, tokenizer, limit=1)
    (example,) = task.examples
    assert example.prompt == (
        "Question: 1 + 1\nAnswer: 1 and 1 make 2.\n#### 2\n\n"
        "Question: 2 + 2\nAnswer: 2 and 2 make 4.\n#### 4\n\n"
        "Question: 4 + 4\nAnswer:"
    )
    assert task.score(example, "4 and 4 make 8") == {"exact_match:strict": 0.0, "exact_match:flexible": 1.0}
    assert task.add_special_tokens


@pytest.mark.parametrize("name", ["a/b", "", 5])
def test_names_that_cannot_be_told_from_metrics_are_refused(name, questions):
    with pytest.raises(ValueError, match=re.escape(f"name={name!r} of a task: choose a text without '/'")):
        TaskSpec(name, "generate", questions)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.jsonl", "", "has no row: the file is empty"),
        ("blank.json", " \n", "cannot be read as json: "),
        ("broken.jsonl", '{"a": 1}\n{"a": \n', "cannot be read as json: "),
        ("broken.parquet", "no parquet", "cannot be read as parquet: "),
        ("notes.txt", "text", "files are read of .json, .jsonl, .parquet, .csv"),
    ],
)
def test_files_that_cannot_be_read(name, content, words, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=re.escape(f"data={str(path)!r}")) as caught:
        load_rows(str(path))
    assert words in str(caught.value)


@pytest.mark.parametrize("skip", [-1, "2", True])
def test_rows_to_skip(skip, questions):
    with pytest.raises(ValueError, match=re.escape(f"skip={skip!r} has to be an integer of at least 0")):
        load_rows({"path": questions, "skip": skip})


@pytest.mark.parametrize("template", ["{answer.x}", "{answer", "{nothing}", "{0}", "{answer:d}", "{answer[x]}"])
def test_templates_that_cannot_be_filled(template, questions, tokenizer):
    spec = {**GSM8K, "data": questions, "prompt": template}
    with pytest.raises(ValueError, match=re.escape(f"the template {template!r} cannot be filled")):
        load_task(spec, tokenizer)


def test_a_data_set_that_is_nowhere(monkeypatch):
    def offline(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr("hf_cdb.evaluation.data.load_dataset", offline)
    with pytest.raises(FileNotFoundError, match=r"data='nofile\.txt' is no file or folder here, and the Hub gives no"):
        load_rows("nofile.txt")


def test_chat(questions, tokenizer):
    """Shots are turns, and the template writes BOS itself."""
    spec = {**GSM8K, "prompt": "{question}", "data": {"path": questions, "skip": 1}, "chat": True}
    task = load_task({**spec, "shot_data": questions, "shots": 1, "stop": ["5", "#"]}, tokenizer)
    assert task.examples[0].prompt == "<s>1 + 11 and 1 make 2.\n#### 2</s><s>2 + 2".replace(
        "<s>", tokenizer.bos_token
    ).replace("</s>", tokenizer.eos_token)
    assert not task.add_special_tokens
    assert task.cut("4 # 5") == "4 "
    assert task.cut("4 + 4") == "4 + 4"


def test_choices(tmp_path, tokenizer):
    rows = [{"question": "Which?", "choices": {"text": ["no", "yes"], "label": ["A", "B"]}, "answerKey": "B"}] * 2
    Dataset.from_list(rows).to_parquet(tmp_path / "arc.parquet")
    spec = {
        "name": "arc",
        "kind": "loglikelihood",
        "data": str(tmp_path / "arc.parquet"),
        "prompt": "Question: {question}\nAnswer:",
        "choices": "choices.text",
        "labels": "choices.label",
        "answer": "answerKey",
    }
    example = load_task(spec, tokenizer).examples[1]
    assert (example.choices, example.answer, example.reference) == ((" no", " yes"), 1, " yes")
    shot = {**spec, "shots": 1, "shot_data": {"path": str(tmp_path / "arc.parquet"), "skip": 1}}
    assert load_task(shot, tokenizer).examples[0].prompt == "Question: Which?\nAnswer: yes\n\nQuestion: Which?\nAnswer:"
    with pytest.raises(ValueError, match=r"answer 'B' is none of \[0, 1\]"):
        load_task({**spec, "labels": None}, tokenizer)
    with pytest.raises(ValueError, match=r"there is no 'choices\.texts' in a row"):
        load_task({**spec, "choices": "choices.texts"}, tokenizer)


def test_layouts(tmp_path, tokenizer):
    talk = [{"from": "human", "value": "Hi {you}"}, {"from": "gpt", "value": "Hello"}]
    (tmp_path / "share.json").write_text(json.dumps([{"conversations": []}, {"conversations": talk}]))
    spec = {"name": "share", "kind": "generate", "layout": "sharegpt", "metrics": ["rouge"]}
    spec["data"] = str(tmp_path / "share.json")
    (example,) = load_task(spec, tokenizer, limit=1).examples  # the one that has turns
    assert (example.prompt, example.reference) == ("Hi {you}", "Hello")
    row = {
        "activity_label": "Baking",
        "ctx": "",
        "ctx_a": "Mix it. [header] Now",
        "ctx_b": "the oven",
        "endings": ["is [substeps] hot.", "sings [title] low"],
        "label": "0",
    }
    (tmp_path / "hella.jsonl").write_text(json.dumps(row) + "\n")
    spec = {"name": "h", "kind": "loglikelihood", "layout": "hellaswag", "data": str(tmp_path / "hella.jsonl")}
    (example,) = load_task(spec, tokenizer).examples
    # The words of the harness's own cleaning, lm_eval/tasks/hellaswag/utils.py.
    assert example.prompt == "Baking: Mix it. Now The oven"
    assert example.choices == (" is hot.", " sings. low")
    assert example.answer == 0


def test_builders(tokenizer):
    spec = {"name": "t", "kind": "generate", "data": {"builder": "tasks", "count": 2}, "reference": "{answer}"}
    task = load_task({**spec, "group": "{task}"}, tokenizer, limit=7)
    assert [example.group for example in task.examples] == list(TASKS)
    bible = {"name": "b", "kind": "text", "data": {"builder": "bible"}, "prompt": "{text}", "length": 256}
    texts = [example.prompt for example in load_task(bible, tokenizer).examples]
    assert 0 < len(texts) <= 59
    assert all(len(tokenizer.tokenize(text)) >= 256 for text in texts)
    with pytest.raises(ValueError, match=r"length=100000 of task 'b': none of its 59 texts"):
        load_task({**bible, "length": 100_000}, tokenizer)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "chat"}, "kind='chat' of task 'gsm8k': choose one of generate"),
        ({"promt": "x"}, "the key 'promt' is unknown. Did you mean 'prompt'?"),
        ({"prompt": "{queston}"}, "cannot be filled (KeyError: 'queston'). A row has the columns question, answer"),
        ({"shots": 1}, "shots=1 of task 'gsm8k' without shot_data"),
        ({"shots": 9, "shot_data": {"skip": 1}}, "shot_data has 4 rows. Ask for fewer"),
        ({"system_prompt": "Be brief."}, "has no effect without chat"),
        ({"chat_options": {"enable_thinking": True}}, "have no effect without chat"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 of task 'gsm8k': choose at least 1"),
        ({"stop": [""]}, "give texts of a character at least"),
        ({"metrics": ["bleu"]}, "metric='bleu' scores no answers"),
        ({"labels": "choices.label"}, "kind 'generate' does not read it, 'loglikelihood' does"),
        ({"length": 64, "context": 64}, "context=64 of task 'gsm8k' leaves nothing"),
        ({"layout": "dolly"}, "layout='dolly' is unknown: choose one of sharegpt"),
        ({"limit": 0}, "limit=0"),
    ],
)
def test_what_cannot_work_is_refused(change, words, questions, tokenizer):
    change = {k: {"path": questions, **v} if k == "shot_data" else v for k, v in change.items()}
    with pytest.raises(ValueError, match=re.escape(words)):
        load_task({**GSM8K, "data": questions, **change}, tokenizer)


def test_a_prompt_never_holds_its_own_answer(questions, tokenizer):
    with pytest.raises(ValueError, match="would hold its own answer"):
        load_task({**GSM8K, "data": questions, "shot_data": questions, "shots": 1}, tokenizer)


def test_data_that_is_not_there(tmp_path, questions):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        load_rows(str(tmp_path / "nowhere.jsonl"))
    for data, words in [
        ({"builder": "riddles"}, "builder='riddles' is unknown: choose one of tasks, bible"),
        ({"builder": "bible", "count": 3}, "unexpected keyword argument 'count'"),
        ({"split": "test"}, "give path"),
        ({"path": questions, "subset": "x"}, "give path"),
        ({"path": questions, "split": "test"}, "has no split, files, name or revision"),
        ({"path": questions, "skip": 5}, "has no row"),
    ]:
        with pytest.raises(ValueError, match=re.escape(words)):
            load_rows(data)


def test_a_folder_of_datasets(tmp_path):
    Dataset.from_list(QUESTIONS).save_to_disk(tmp_path / "saved")
    assert load_rows(str(tmp_path / "saved"), limit=2) == QUESTIONS[:2]
