"""Frames that are legal one at a time and ruinous by the thousand end in GOAWAY ENHANCE_YOUR_CALM; busy clients do not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proxy import h2_frames as wire
from proxy.h2_errors import Code
from proxy.h2_limits import Budget, H2Limits
from tests.proxy.h2_wire import GET, POST, Seen, Served, body, coded, credit, frame, headers, reset, settings

CALM = Seen("GoAway", 0, Code.ENHANCE_YOUR_CALM)

FLOODS: dict[str, Callable[[int], bytes]] = {
    "rapid reset": lambda n: headers(2 * n + 1, GET, end=True) + reset(2 * n + 1, 8),
    "resets that we are provoked into": lambda n: headers(2 * n + 1, POST) + credit(2 * n + 1, 0),
    "malformed requests": lambda n: headers(2 * n + 1, [*GET, (b"X", b"y")], end=True),
    "SETTINGS": lambda n: settings(initial_window_size=n),
    "SETTINGS ACK": lambda n: frame(wire.SETTINGS, wire.ACK),
    "PING": lambda n: frame(wire.PING, 0, 0, b"8 bytes!"),
    "PING ACK": lambda n: frame(wire.PING, wire.ACK, 0, b"8 bytes!"),
    "empty DATA": lambda n: body(1, b"") if n else headers(1, POST),
    "DATA that is all padding": lambda n: frame(wire.DATA, wire.PADDED, 1, b"\x01\0") if n else headers(1, POST),
    "PRIORITY": lambda n: frame(wire.PRIORITY, 0, 1, b"\0" * 5),
    "PRIORITY_UPDATE": lambda n: frame(wire.PRIORITY_UPDATE, 0, 0, b"\0\0\0\1u=1"),
    "WINDOW_UPDATE": lambda n: credit(0, 1),
    "unknown frames": lambda n: frame(0x77, 0, 0),
    "GOAWAY": lambda n: frame(wire.GOAWAY, 0, 0, b"\0" * 8),
    "DATA behind our reset": lambda n: body(1, b"") if n else headers(1, [*POST, (b"X", b"")]),
    "empty CONTINUATION": lambda n: frame(wire.CONTINUATION, 0, 1) if n else headers(1, GET, whole=False),
    "CONTINUATION that grows": lambda n: (
        frame(wire.CONTINUATION, 0, 1, b"x" * 4000) if n else headers(1, GET, whole=False)
    ),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_flood(flood: str) -> None:
    served = Served()
    for number in range(30_000):
        served.say(FLOODS[flood](number))
        if served.h2.failed is not None:
            break
    assert served.heard()[-1] == CALM
    assert not served.h2.streams


@pytest.mark.parametrize("flood", ["rapid reset", "SETTINGS", "PING", "empty DATA", "WINDOW_UPDATE"])
def test_the_same_at_a_human_pace_is_welcome(flood: str) -> None:
    served = Served()
    for number in range(2000):
        served.now += 0.25
        served.say(FLOODS[flood](number))
        served.h2.sender.take()
    assert served.h2.failed is None


def test_an_hpack_bomb_ends_the_connection() -> None:
    # One entry of 4 KiB in the table, then a byte for each copy of it (CVE-2016-6581).
    served = Served(H2Limits(max_header_bytes=65536))
    big = b"\x40\x01x" + b"\x7f\xb1\x1e" + b"y" * 4000
    served.say(frame(wire.HEADERS, 5, 1, coded(GET) + big + b"\xbe" * 12_000))
    assert served.heard()[-1] == CALM


def test_a_list_somewhat_over_the_limit_is_only_that_requests_fault() -> None:
    served = Served(H2Limits(max_header_bytes=2000))
    served.say(headers(1, [*GET, (b"x", b"y" * 3000)], end=True))
    assert served.h2.failed is None
    served.ask(3)


def test_replies_that_nobody_reads_are_bounded() -> None:
    served = Served()
    served.h2.sender.blocked = True
    number = 0
    while served.h2.failed is None and number < 100_000:
        served.now += 1
        number += 1
        served.say(frame(wire.PING, 0, 0, b"8 bytes!"))
    assert served.heard()[-1] == CALM


def test_what_is_remembered_of_closed_streams_is_bounded() -> None:
    served = Served()
    for number in range(2000):
        served.now += 1
        served.say(FLOODS["rapid reset"](number))
    assert len(served.h2._closed) <= 512


def test_a_budget_is_a_burst_and_then_a_rate() -> None:
    budget = Budget("things", 3, 2)
    for _ in range(3):
        budget.spend(1000.0)
    with pytest.raises(Exception, match="more than 3 things"):
        budget.spend(1000.0)
    for _ in range(2):
        budget.spend(1002.0)
