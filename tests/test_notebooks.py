"""Notebooks run from top to bottom in a folder of their own, and what is committed was made so."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
sys.path.insert(0, str(FOLDER))

from execute import execute  # noqa: E402 (a script beside the notebooks)

NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What has to be in the outputs: the claims that the text around them makes.
CLAIMS = {
    "quickstart": ["equal tokens: True", "add:458+367=825", "FLOP bound"],
    "quality_and_speed": ["has a score loss below 0.03 with confidence 0.95", "[[4, 2, 2, 1]]", "quality=0.999"],
    "your_own_looped_model": ["No difference.", "the same game: True True"],
}


def text_of(notebook):
    """Everything that its cells put out as text."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    shown = [part for output in outputs for kind, part in output.get("data", {}).items() if kind.startswith("text/")]
    return "\n".join([*shown, *(output.text for output in outputs if output.output_type == "stream")])


def test_there_are_three():
    assert {path.stem for path in NOTEBOOKS} == set(CLAIMS)


@pytest.mark.timeout(900)  # half a minute of work each, and several on a machine that others use
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs(path, tmp_path, monkeypatch):
    """A cell that raises fails the test, with the cell in the message."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    found = text_of(execute(path, tmp_path))
    for claim in CLAIMS[path.stem]:
        assert claim in found, claim


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_is_committed_is_executed_small_and_of_no_machine(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert all(not cell.metadata for cell in notebook.cells)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.metadata.language_info == {"name": "python"}
    text = path.read_text(encoding="utf-8")
    assert len(text) < 400_000
    assert not re.search(r"/(home|root|work|tmp|usr|opt|Users)/", text)
    for claim in CLAIMS[path.stem]:
        assert claim in text_of(notebook), claim


def test_an_error_in_a_cell_is_raised(tmp_path):
    from nbclient.exceptions import CellExecutionError

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0", id="a")])
    nbformat.write(notebook, tmp_path / "wrong.ipynb")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        execute(tmp_path / "wrong.ipynb", tmp_path)
