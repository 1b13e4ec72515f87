import argparse
import json
import sys
from pathlib import Path

import numpy
import pytest
import torch

from hf_cdb import __version__
from hf_cdb.bench.report import (
    Report,
    check_outputs,
    check_plot,
    check_seed,
    markdown_table,
    rate_text,
    save_plot,
    set_threads,
)

from ..tiny import random_ouro


def test_a_table():
    rows = [{"system": "a", "seconds": 1.234, "loops": 4}, {"system": "b", "seconds": None}]
    lines = markdown_table({"system": "", "seconds": ".2f", "loops": "d"}, rows).splitlines()
    assert lines == ["| system | seconds | loops |", "|---|---|---|", "| a | 1.23 | 4 |", "| b |  |  |"]


def test_the_json_tells_what_ran(tmp_path):
    path = tmp_path / "new" / "figures.json"
    arguments = argparse.Namespace(group="bench", command="step", seed=3, json=path, plot=None, run=print)
    report = Report(arguments, random_ouro(), {"checksum": "ab"}, {"width": 8})
    report.add("rows", [{"seconds": numpy.float64(0.5), "times": numpy.arange(2), "dtype": torch.float32}])
    report.write(path)
    content = json.loads(path.read_text())
    assert content["command"] == "hf-cdb bench step"
    assert content["settings"] == {"seed": 3, "width": 8}
    assert content["environment"]["versions"]["hf-cdb"] == __version__
    assert content["environment"]["torch_threads"] == torch.get_num_threads()
    # Layers of 4 * 32 * 32 + 3 * 32 * 64 + 4 * 32 and a norm; head, gate and its bias.
    assert content["model"]["parameters_per_loop"] == 2 * (4 * 32 * 32 + 3 * 32 * 64 + 4 * 32) + 32
    assert content["model"]["parameters_once"] == 50 * 32 + 32 + 1
    assert content["rows"] == [{"seconds": 0.5, "times": [0, 1], "dtype": "torch.float32"}]


def test_nothing_is_written_without_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Report(argparse.Namespace()).write(None)
    save_plot(None, None)
    assert not list(tmp_path.iterdir())


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are an extra, hf-cdb[bench]")
    path = tmp_path / "new" / "figure.png"
    save_plot(path, lambda figure, axes: axes[1].plot([1, 2], [3, 4]), panels=2)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"ends in \.png"):
        check_plot(Path("figure.jpg"))


def test_a_picture_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"figure\.png' needs matplotlib.*hf-cdb\[bench\]"):
        check_plot(Path("figure.png"))


def test_threads():
    with pytest.raises(ValueError, match="threads=0"):
        set_threads(0)


def test_slow_models_have_rates_too():
    assert [rate_text(rate) for rate in (12345.6, 99.96, 7.123, 0.0421, None)] == [
        "12346",
        "100",
        "7.12",
        "0.0421",
        None,
    ]


def test_places_that_nothing_can_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    check_outputs(json=tmp_path / "new" / "deep" / "a.json", record=tmp_path / "file", plot=None)
    with pytest.raises(ValueError, match=r"json=.* is a folder. Name a file"):
        check_outputs(json=tmp_path)
    with pytest.raises(ValueError, match=r"record=.*'.*file' is a file, and no folder"):
        check_outputs(record=tmp_path / "file" / "deep" / "a.json")
    with pytest.raises(ValueError, match="json and record both name"):
        check_outputs(json=tmp_path / "a", record=tmp_path / "b" / ".." / "a")
    with pytest.raises(ValueError, match=r"ends in \.png"):
        check_outputs(plot=tmp_path / "a.jpg")


def test_a_place_that_is_locked(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda place, mode: False)  # root may write anywhere
    with pytest.raises(ValueError, match=r"json=.*: nothing can be written to"):
        check_outputs(json=tmp_path / "a.json")


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_of_no_generator(seed):
    check_seed(2**63 - 1)
    with pytest.raises(ValueError, match=f"seed={seed}: choose at least 0"):
        check_seed(seed)
