"""The parts of an exchange's time sum to the whole, whatever marks are missing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.waterfall import PARTS, Waterfall

steps = st.floats(0, 100, allow_nan=False)


@given(st.lists(steps, min_size=6, max_size=6), st.lists(steps, min_size=3, max_size=3), st.integers(0, 5))
def test_parts_sum_to_the_wall_time(gaps: list[float], dial: list[float], reached: int) -> None:
    times = [sum(gaps[: i + 1]) for i in range(6)]
    fall = Waterfall(0.0)
    if reached > 0:
        fall.open(times[0], *dial)
    for mark, at in zip(("sent", "head", "first", "ended")[: max(0, reached - 1)], times[1:], strict=False):
        setattr(fall, mark, at)
    end = fall.ended if fall.ended >= 0 else times[5]
    parts = fall.parts(times[5])
    assert sum(parts.values()) == pytest.approx(end, abs=1e-6)
    assert all(seconds >= 0 for seconds in parts.values())
    assert list(parts) == [name for name in PARTS if name in parts]


def test_an_answer_before_the_upload_ended_counts_no_upload_after_it() -> None:
    fall = Waterfall(0.0)
    fall.open(1.0, 0.0, 0.0, 0.0)
    fall.head, fall.sent, fall.first, fall.ended = 2.0, 5.0, 3.0, 6.0
    assert fall.parts(6.0) == {"queue": 1.0, "upload": 1.0, "first_byte": 1.0, "answer": 3.0}


def test_server_timing_is_in_milliseconds() -> None:
    fall = Waterfall(0.0)
    fall.open(0.010, 0.002, 0.003, 0.005)
    fall.sent = fall.head = 0.2
    assert fall.server_timing("1 a h2").decode() == (
        'headrace;desc="1 a h2", wait;dur=0.0, resolve;dur=2.0, connect;dur=3.0, tls;dur=5.0, upload;dur=190.0'
    )


def test_server_timing_of_a_reused_connection_names_no_dial() -> None:
    fall = Waterfall(1.0)
    fall.open(1.001, 0.0, 0.0, 0.0)
    fall.sent, fall.head = 1.002, 1.1
    assert fall.server_timing("x") == b'headrace;desc="x", wait;dur=98.0, queue;dur=1.0, upload;dur=1.0'
