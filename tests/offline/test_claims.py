"""Locks between processes: a second process is plain Python, so that it says what the system does."""

import fcntl
import subprocess
import sys
from contextlib import closing

import pytest

from hf_cdb.offline.claims import Claims

HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def claims(tmp_path):
    with closing(Claims(tmp_path / "claims", 4)) as claims:
        yield claims


@pytest.fixture
def hold(tmp_path, claims):
    holders = []

    def start(byte):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path / "claims"), str(byte)], stdout=subprocess.PIPE
        )
        holders.append(process)
        assert process.stdout.readline() == b"held\n"
        return process

    yield start
    for process in holders:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_piece_of_a_process_that_dies_is_free(claims, hold):
    other = hold(1 + 2)
    assert not claims.take(2)
    assert claims.take(1)
    assert claims.take(3)
    other.kill()
    other.wait()
    assert claims.take(2)


def test_a_piece_is_done_once(claims, tmp_path):
    assert claims.done == 0
    assert claims.take(0)
    assert claims.take(3)
    claims.finish([3])
    assert not claims.take(3)
    assert [claims.is_done(piece) for piece in range(4)] == [False, False, False, True]
    assert claims.done == 1
    claims.finish([0])
    assert (tmp_path / "claims").read_bytes() == b"\x001\x00\x001"


def test_a_piece_that_is_done_between_look_and_lock_is_not_taken(claims, tmp_path, monkeypatch):
    """Its process has let go of it by then, so that the lock is to be had; it is given back."""

    def end_and_lock(*arguments):
        (tmp_path / "claims").write_bytes(b"\x00\x00\x00" + b"1")  # another process's piece 2
        lockf(*arguments)

    lockf = fcntl.lockf
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", end_and_lock)
        assert not claims.take(2)
    lock = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 3)"
    subprocess.run([sys.executable, "-c", lock, tmp_path / "claims"], check=True)


def test_what_was_done_before_is_known(tmp_path):
    for done, taken in [(0, True), (1, False)]:
        with closing(Claims(tmp_path / "claims", 4)) as claims:
            assert claims.done == done
            assert claims.take(2) is taken
            if taken:
                claims.finish([2])


def test_one_process_alone(claims, hold):
    """The lock of a block is on the byte before the pieces, and given back."""
    with claims.alone():
        assert claims.take(0)
    hold(0)
