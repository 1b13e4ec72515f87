"""Hand-made traces: two places, three requests."""

import pytest

from hf_cdb.bench.launches import DecodeTime, decode_time, new_tokens, prefill_seconds, prompt_rows, steady_state
from hf_cdb.trace import Trace, TracedLaunch


def trace(*launches, in_flight=2):
    """Launches (stage, rows, seconds), one after the other without gaps; rows may bring their own number in flight."""
    made, start = [], 0.0
    for stage, rows, seconds, *own in launches:
        busy = own[0] if own else in_flight
        made.append(TracedLaunch(stage, rows, (1,) * len(rows), len(rows), len(rows), 0, busy, 0, 0, start, seconds))
        start += seconds
    return Trace(made)


RUN = trace(
    ("prelude", (0, 1), 1.0),
    ("loop", (0, 1), 10.0),
    ("coda", (0, 1), 2.0),  # the first tokens
    ("prelude", (0, 1), 0.5),
    ("loop", (0, 1), 4.0),
    ("coda", (0,), 1.0),  # request 0 ends
    ("prelude", (2,), 1.0),  # request 2 is admitted
    ("loop", (1, 2), 9.0),  # a prompt beside a row that decodes
    ("coda", (1, 2), 3.0),  # request 1 ends
    ("prelude", (2,), 0.25, 1),
    ("loop", (2,), 3.0, 1),
    ("coda", (2,), 1.0, 1),
)


def test_prompts_are_rows_before_their_first_coda():
    assert prompt_rows(RUN) == [2, 2, 2, 0, 0, 0, 1, 1, 1, 0, 0, 0]


def test_prompts_in_pieces():
    """Two pieces go through one stage after the other; the second coda gives the token."""
    pieces = [(stage, (0,), 1.0) for stage in ("prelude", "loop", "coda") for _ in range(2)]
    run = trace(*pieces, *[(stage, (0,), 1.0) for stage in ("prelude", "loop", "coda")])
    assert prompt_rows(run) == [1] * 6 + [0] * 3
    assert new_tokens(run) == [0, 0, 0, 0, 0, 1, 0, 0, 1]


def test_seconds_per_row_of_launches_without_prompts_while_all_places_are_busy():
    # Launches 3, 4 and 5; in the last three one place is free.
    time = decode_time(RUN, 2)
    assert time == DecodeTime(prelude=0.25, loop=2.0, coda=1.0)
    assert time.per_token(3) == 7.25


def test_prefill_is_what_the_decoding_rows_do_not_explain():
    # 1 + 10 + 2 of the first prompts; 1, 9 - 2 and 3 - 1 of the third.
    assert prefill_seconds(RUN, DecodeTime(0.25, 2.0, 1.0)) == pytest.approx(13 + 1 + 7 + 2)
    assert prefill_seconds(RUN, DecodeTime(0.25, 50.0, 1.0)) == 0


def test_no_figure_without_a_launch_of_its_own():
    assert decode_time(RUN, 3) is None
    assert decode_time(trace(("loop", (0,), 1.0)), 2) is None


def test_the_steady_state_lies_between_the_ends_of_2w_requests_and_the_last_admission():
    stages = (("prelude", 1.0), ("loop", 4.0), ("coda", 2.0))
    one_place = [(stage, (key,), seconds) for key in range(4) for stage, seconds in stages]
    steady = steady_state(trace(*one_place), 1)
    # Requests 0 and 1 have ended, 3 is not there yet: request 2 alone.
    assert (steady.seconds, steady.tokens, steady.occupancy) == (7.0, 1, 1.0)
    assert steady.tokens_per_second == pytest.approx(1 / 7)
    assert steady_state(trace(*one_place), 2) is None
    assert steady_state(RUN, 1) is None
    assert steady_state(RUN, 2) is None
