"""What is remembered of strangers is bounded: clients by their rate, questions by their failures."""

from __future__ import annotations

from resolver import failures, ratelimit


def test_the_client_that_is_silent_for_longest_is_forgotten_first() -> None:
    rate = ratelimit.RateLimit(1)
    for number in range(ratelimit.MOST_CLIENTS + 5):
        assert rate.admits(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
    assert len(rate) == ratelimit.MOST_CLIENTS
    assert rate.admits("10.0.0.0", 0.0), "forgotten, so it begins anew"
    newest = ratelimit.MOST_CLIENTS + 4
    assert not rate.admits(f"10.0.{newest >> 8}.{newest & 255}", 0.0)


def test_a_client_gets_its_rate_back_with_time_and_never_more() -> None:
    rate = ratelimit.RateLimit(2)
    assert [rate.admits("10.0.0.1", 0.0) for _ in range(3)] == [True, True, False]
    assert [rate.admits("10.0.0.1", 100.0) for _ in range(3)] == [True, True, False]


def test_failures_beyond_the_bound_push_out_the_oldest() -> None:
    kept: failures.Failures[str] = failures.Failures()
    for number in range(failures.MOST + 3):
        kept.failed(b"%d" % number, "refused", 0.0)
    assert len(kept) == failures.MOST
    assert kept.find(b"0", 0.5) is None
    assert kept.find(b"%d" % (failures.MOST + 2), 0.5) == "refused"
