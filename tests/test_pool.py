import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_cdb.pool import Pool


def new_pool():
    return Pool(2, 3, torch.float32, torch.device("cpu"))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=30))
def test_segments_never_overlap_and_keep_what_is_in_them(steps):
    """Allocate in the given sizes, release the oldest now and then: every segment keeps its own number."""
    pool, held = new_pool(), []
    for number, (rows, release) in enumerate(steps):
        first = pool.allocate(rows)
        pool.tensor[:, first : first + rows] = number
        held.append((first, rows, number))
        for _ in range(min(release // 3, len(held))):
            start, length, _ = held.pop(0)
            pool.release(start, length)
        for start, length, number_in in held:
            assert (pool.tensor[:, start : start + length] == number_in).all()
    for start, length, _ in held:
        pool.release(start, length)
    assert pool._free == [(0, pool.tensor.shape[1])]


def test_gaps_are_used_again_and_bursts_grow_once():
    pool = new_pool()
    pool.reserve(30)
    assert pool.reserved_bytes == 2 * 30 * 3 * 4
    firsts = [pool.allocate(10) for _ in range(3)]
    assert firsts == [0, 10, 20]
    pool.release(10, 10)
    assert pool.allocate(4) == 10
    assert pool.allocate(6) == 14
    assert pool.tensor.shape[1] == 30
    assert pool.allocate(5) == 30
    assert pool.tensor.shape[1] == 37  # by a quarter
    assert pool.row_bytes == 2 * 3 * 4
