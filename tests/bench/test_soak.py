"""The soak in small: it passes where all is well, and finds what is lost or mixed."""

import pytest

from hf_cdb.bench.soak import FATES, Soak
from hf_cdb.cli import main
from hf_cdb.manager import CDBManager
from hf_cdb.outbox import Outbox

from ..requests import GATE, assert_clean
from ..test_manager import shared_model

SETTINGS = {**GATE, "prefill_chunk_size": 8, "max_num_seqs": 8}


def small():
    return Soak(shared_model(), SETTINGS, cases=12, in_flight=20)


def test_a_small_soak():
    soak = small()
    soak.run(150, fault_every=60, sample_every=50)
    assert [sample["requests"] for sample in soak.samples] == [0, 50, 100, 150]
    assert soak.ends["tokens"] > 50
    for end in ("SoakFault (processor)", "SoakFault (handler)", "SoakFault (finish)", "refused"):
        assert soak.ends[end], f"no {end} in {soak.ends}"
    assert_clean(soak._manager)
    assert set(soak._pending) == set()
    assert sum(FATES.values()) == 100


def test_it_finds_an_output_that_is_mixed(monkeypatch):
    put = Outbox.put

    def put_wrong(self, output):
        if output.request_id == "soak-7":
            output.generated_tokens = [*output.generated_tokens[::-1], 1]
        put(self, output)

    monkeypatch.setattr(Outbox, "put", put_wrong)
    with pytest.raises(RuntimeError, match="and alone"):
        small().run(20, fault_every=0, sample_every=20)


def test_it_finds_an_output_that_is_lost(monkeypatch):
    get = CDBManager.get_result

    def get_some(self, *args, **kwargs):
        output = get(self, *args, **kwargs)
        return None if output is not None and output.request_id == "soak-7" else output

    monkeypatch.setattr(CDBManager, "get_result", get_some)
    monkeypatch.setattr("hf_cdb.bench.soak._PATIENCE", 1.0)
    with pytest.raises(RuntimeError, match="1 outputs never came"):
        small().run(20, fault_every=0, sample_every=20)


def test_the_command(capsys, tmp_path):
    assert main(["bench", "soak", "--requests", "3", "--cases", "2", "--json", str(tmp_path / "soak.json")]) == 0
    assert "Every sequence ended once" in capsys.readouterr().out
    assert (tmp_path / "soak.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--requests", "0"], "requests=0: choose at least 1"),
        (["--cases", "0"], "cases=0: choose at least 1"),
        (["--device", "foo"], "device='foo' cannot be used here"),
        (["--json", "."], "json='.' is a folder"),
    ],
)
def test_what_cannot_be_soaked_is_refused(words, message, capsys):
    assert main(["bench", "soak", *words]) == 2
    assert message in capsys.readouterr().err
