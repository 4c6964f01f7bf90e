"""How long an upload may take, as a store of patience."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.upload_pace import SLOWEST, UploadPace

PIECES = st.lists(st.tuples(st.integers(1, 100_000), st.floats(0, 30)), max_size=50)


def test_silence_draws_and_bytes_fill_but_never_beyond_the_start() -> None:
    pace = UploadPace(10)
    assert pace.came(1_000_000, 0) == 10
    assert pace.came(SLOWEST, 4) == 4 + 7
    assert pace.came(SLOWEST, 5) == 5 + 7
    assert pace.came(100 * SLOWEST, 6) == 6 + 10


def test_a_client_that_was_held_back_is_forgiven_the_time() -> None:
    pace = UploadPace(10)
    pace.came(1, 0)
    pace.held()
    assert pace.came(1, 1000) == 1010


@given(PIECES)
def test_a_request_is_never_longer_than_patience_and_its_bytes_allow(pieces: list[tuple[int, float]]) -> None:
    pace, now, sent = UploadPace(10), 0.0, 0
    for size, wait_s in pieces:
        due = pace.came(size, now)
        sent += size
        assert due <= now + 10
        assert due <= 10 + sent / SLOWEST + 1e-6
        now += wait_s
        if now > due:
            return
