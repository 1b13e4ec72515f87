"""What rows carry between launches, on launches made by hand."""

import pytest
import torch

from hf_cdb.batch import Batch
from hf_cdb.request import Request
from hf_cdb.row_states import RowStates
from hf_cdb.scheduler import Launch


def batch_of(rows, chunk=None):
    """A launch of rows (place, prompt length, tokens so far, piece of the prompt)."""
    requests, pieces = {}, {}
    for key, (_, prompt, tokens, piece) in enumerate(rows):
        request = Request(key, 9, None, prompt_ids=torch.arange(prompt), tokens=[7] * tokens, in_prompt=not tokens)
        request.start, request.end = (prompt + tokens - 1, prompt + tokens) if tokens else (0, 0)
        requests[key] = request
        if not tokens:
            size = chunk or prompt
            pieces[key] = (piece * size, min((piece + 1) * size, prompt))
    launch = Launch("loop", tuple(requests), tuple(row[0] for row in rows), (1,) * len(rows), pieces)
    return Batch(launch, requests, torch.device("cpu"))


def lines(*values):
    return torch.tensor(values, dtype=torch.float32)[:, None].expand(-1, 3)


def test_positions_and_tokens():
    batch = batch_of([(4, 3, 0, 0), (2, 5, 2, 0), (0, 4, 0, 0)])
    assert (batch.prompts, batch.decoding) == ([0, 2], [1])
    assert batch.positions.tolist() == [[0, 1, 2, 6, 0, 1, 2, 3]]
    assert batch.places.tolist() == [2]
    assert batch.decoding_tokens.tolist() == [3]
    assert (batch.spans.first.tolist(), batch.spans.last.tolist()) == ([0, 3, 4], [2, 3, 7])


def test_lines_stay_when_the_table_grows_or_widens():
    """A row at a far place comes later, then one in a wider dtype: what the first ones carry is still there."""
    states = RowStates()
    near, far = batch_of([(0, 3, 1, 0), (1, 3, 1, 0)]), batch_of([(40, 3, 1, 0)])
    states.write("state", near, lines(1, 2))
    states.write("state", far, lines(3))
    assert states.read("state", near)[:, 0].tolist() == [1, 2]
    assert states.read("state", far)[:, 0].tolist() == [3]
    states.write("state", far, lines(1 / 3).double())
    assert states.read("state", near)[:, 0].tolist() == [1, 2]
    assert states.read("state", far)[0, 0] == torch.tensor(1 / 3, dtype=torch.float32).double()
    states.write("state", near, lines(5, 6).bfloat16())
    assert states.read("state", near)[:, 0].tolist() == [5, 6]
    assert states.read("state", far)[0, 0] == torch.tensor(1 / 3, dtype=torch.float32).double()


@pytest.mark.parametrize("chunk", [None, 2])
def test_prompts_beside_rows_that_decode(chunk):
    """A prompt keeps a line for every position, whole or in pieces; the row beside it keeps its own."""
    states, pieces = RowStates(), 1 if chunk is None else 2
    rows = [[(1, 4, 0, piece), (0, 6, 3, 0)] for piece in range(pieces)]
    batches = [batch_of(row, chunk) for row in rows]
    for batch in batches[1:]:
        batch.rows = batches[0].rows  # the same requests
    values = [lines(*range(10 * index, 10 * index + batch.spans.tokens)) for index, batch in enumerate(batches)]
    for batch, value in zip(batches, values, strict=True):
        states.write("state", batch, value)
    kept = batches[0].rows[0].state[:, 0].tolist()
    assert kept == ([0, 1, 2, 3] if chunk is None else [0, 1, 10, 11])
    for batch, value in zip(batches, values, strict=True):
        decoding = values[-1][-1:]  # the last write of the row that decodes
        assert torch.equal(states.read("state", batch), torch.cat((value[:-1], decoding)))
    alone = batch_of(rows[0][:1], chunk)
    alone.rows = batches[0].rows[:1]
    assert torch.equal(states.read("state", alone), values[0][:-1])
