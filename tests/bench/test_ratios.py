import pytest

from hf_cdb.bench.ratios import Spread, in_turns


def test_systems_take_turns_after_warming_up():
    log = []
    found = in_turns(
        {"a": lambda: log.append("A") or len(log), "b": lambda: log.append("B") or len(log)}, 2, warm_up=log.append
    )
    assert log == ["a", "b", "A", "B", "A", "B"]
    assert found == {"a": [3, 5], "b": [4, 6]}
    with pytest.raises(ValueError, match="turns=0"):
        in_turns({}, 0)


def test_spread():
    spread = Spread.of([3.0, 1.0, 2.5])
    assert (spread.median, str(spread)) == (2.5, "2.5 (1-3)")
    assert spread.to_dict() == {"median": 2.5, "least": 1.0, "most": 3.0, "values": [3.0, 1.0, 2.5]}
    assert str(Spread.of([0.98765])) == "0.988"
    assert Spread.of([1.0, None]) is None
    assert Spread.of([]) is None
