"""What is remembered of a network: families, blocked QUIC, offered HTTP/3, each with an end and a bound."""

from __future__ import annotations

import pytest

from proxy.reach import ALT_SVC_CAP_S, MAX_HOSTS, Reach, h3_alternative

MIXED = ["2001:db8::1", "192.0.2.1", "2001:db8::2", "192.0.2.2", "192.0.2.3"]


def test_the_family_that_won_against_the_first_one_leads_and_still_alternates() -> None:
    reach = Reach()
    reach.connected("h", "192.0.2.1", "2001:db8::1", now=0.0)
    assert reach.order("h", MIXED, 1.0) == ["192.0.2.1", "2001:db8::1", "192.0.2.2", "2001:db8::2", "192.0.2.3"]
    assert reach.order("other", MIXED, 1.0) == MIXED


def test_a_family_is_tried_again_after_ten_minutes_or_on_another_network() -> None:
    reach = Reach()
    reach.connected("h", "192.0.2.1", "2001:db8::1", now=0.0)
    assert reach.order("h", MIXED, 601.0) == MIXED
    reach.forget()
    assert reach.order("h", MIXED, 1.0) == MIXED


def test_a_winner_of_the_first_family_teaches_nothing() -> None:
    reach = Reach()
    reach.connected("h", "2001:db8::2", "2001:db8::1", now=0.0)
    assert reach.order("h", MIXED, 1.0) == MIXED


def test_blocked_quic_is_left_alone_for_five_minutes_then_twice_as_long() -> None:
    reach = Reach()
    reach.quic_failed("h", 443, now=0.0)
    assert reach.quic_blocked("h", 443, 299.0) and not reach.quic_blocked("h", 443, 300.0)
    assert reach.quic_suspect("h", 443)
    reach.quic_failed("h", 443, now=300.0)
    assert reach.quic_blocked("h", 443, 899.0) and not reach.quic_blocked("h", 443, 900.0)
    for _ in range(40):
        reach.quic_failed("h", 443, now=0.0)
    assert not reach.quic_blocked("h", 443, 4 * 3600.0)


def test_quic_that_worked_is_free_of_its_past() -> None:
    reach = Reach()
    reach.quic_failed("h", 443, now=0.0)
    reach.quic_worked("h", 443)
    assert not reach.quic_blocked("h", 443, 1.0) and not reach.quic_suspect("h", 443)


def test_alt_svc_is_believed_for_its_time_until_cleared() -> None:
    reach = Reach()
    reach.heard_alt_svc("h", 443, b'h3=":8443"; ma=60', now=0.0)
    assert (reach.h3_port("h", 443, 59.0), reach.h3_port("h", 443, 60.0)) == (8443, None)
    reach.heard_alt_svc("h", 443, b'h3=":8443"', now=0.0)
    reach.heard_alt_svc("h", 443, b" clear ", now=1.0)
    assert reach.h3_port("h", 443, 2.0) is None


def test_an_alt_svc_for_ever_ends_after_a_week() -> None:
    reach = Reach()
    reach.heard_alt_svc("h", 443, b'h3=":443"; ma=999999999', now=0.0)
    assert reach.h3_port("h", 443, ALT_SVC_CAP_S) is None


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b'h3=":443"; ma=86400', (443, 86400.0)),
        (b'h3-29=":443", h3=":444"; persist=1; ma="7"', (444, 7.0)),
        (b'h3="h:443"', (443, 86400.0)),
        (b'h3="other.test:443"', None),
        (b'h2=":443"', None),
        (b'h3=":99999"', None),
        (b'h3=":0"', None),
        (b'h3=":' + b"4" * 5000 + b'"', None),  # more digits than int() takes
        (b"h3", None),
        (b"\xff\xfe", None),
        (b"", None),
    ],
)
def test_an_alternative_is_taken_only_as_h3_on_the_same_host(value: bytes, found: tuple[int, float] | None) -> None:
    assert h3_alternative(value, "h") == found


def test_memories_are_bounded() -> None:
    reach = Reach()
    for n in range(MAX_HOSTS + 50):
        reach.quic_failed(f"h{n}", 443, now=0.0)
        reach.connected(f"h{n}", "192.0.2.1", "2001:db8::1", now=0.0)
        reach.heard_alt_svc(f"h{n}", 443, b'h3=":443"', now=0.0)
    assert len(reach._blocked) == len(reach._families) == len(reach._h3) == MAX_HOSTS


def test_a_family_that_only_wins_because_it_is_first_does_not_stay_first() -> None:
    reach = Reach()
    reach.connected("h", "192.0.2.1", "2001:db8::1", now=0.0)
    reach.connected("h", "192.0.2.1", "192.0.2.1", now=500.0)
    assert reach.order("h", MIXED, 601.0) == MIXED
