"""Run the notebooks from top to bottom and write their outputs into them: `python notebooks/execute.py [FILE ...]`.

Nothing of the machine goes into the files: no times, no names of folders or hosts, no versions of Python. What
libraries write to stderr, bars and hints with the folders that they lie in, is left out.
"""

import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parent


def execute(path: Path, folder: Path, timeout: int = 600) -> nbformat.NotebookNode:
    """The notebook with the outputs of a run in `folder`.

    Args:
        path: of the notebook, which is only read.
        folder: working directory of the kernel.
        timeout: seconds that a cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised; the message has the cell and its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=timeout,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    return notebook


def main(names: list[str]) -> None:
    for path in map(Path, names) if names else sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
