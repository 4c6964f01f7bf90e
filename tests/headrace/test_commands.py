"""What commands make of an answer of the daemon: the lines for people."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.commands import requests, status
from headrace.wording import counted

ANSWERED: dict[str, Any] = {
    "time": "2026-03-01T12:30:01.250Z",
    "id": "a-1",
    "method": "GET",
    "path": "/openai/v1/models",
    "pool": "openai",
    "edge": "direct",
    "client_version": "h1",
    "edge_version": "h2",
    "status": 200,
    "outcome": "ok",
    "detail": "",
    "wall_s": 0.012,
    "parts": {"queue": 0.0, "wait": 0.012},
    "bytes_in": 0,
    "bytes_out": 812,
    "retries": 0,
    "reused": True,
    "resumed": False,
}


def row(**changes: Any) -> str:
    return requests.lines([ANSWERED | changes])[1]


def test_a_request_says_where_its_time_went() -> None:
    assert row().endswith("12 ms  0 B  812 B  wait 12 ms, reused")


def test_a_request_that_failed_says_why() -> None:
    assert row(status=502, outcome="edge lost", detail="resolve: no address").endswith("; resolve: no address")


@pytest.mark.parametrize(("retries", "said"), [(1, ", 1 retry"), (2, ", 2 retries")])
def test_retries_are_counted(retries: int, said: str) -> None:
    assert row(retries=retries).endswith(said)


def test_the_time_of_a_request_is_that_of_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC-5")  # POSIX: five hours ahead
    time.tzset()
    try:
        assert row().startswith("17:30:01.250")
    finally:
        monkeypatch.undo()
        time.tzset()


STATUS: dict[str, Any] = {
    "headrace": "1.2.3",
    "pid": 77,
    "uptime_s": 7300.0,
    "config_file": None,
    "state_dir": "/var/lib/headrace",
    "listeners": ["http://127.0.0.1:8080", "udp://127.0.0.1:5353"],
    "pools": ["llama", "empty"],
    "active_requests": 1,
    "connections": 2,
    "portal_suspected": False,
    "link_zones": ["corp.example"],
    "notes": ["workers (line 3): has no effect yet"],
}
EDGES: list[dict[str, Any]] = [
    {"pool": "llama", "id": "rack-1", "state": "healthy", "reason": ""},
    {"pool": "llama", "id": "rack-2", "state": "degraded", "reason": "slow"},
    {"pool": "llama", "id": "rack-3", "state": "ejected", "reason": "3 failures in a row"},
    {"pool": "other", "id": "x", "state": "down", "reason": "gone"},
]
RESOLVER: dict[str, Any] = {
    "counts": {"queries": 12},
    "upstreams": [
        {"url": "tls://192.0.2.1:853", "state": "healthy", "rtt_s": 0.0123, "reason": ""},
        {"url": "udp://192.0.2.2:53", "state": "down", "rtt_s": None, "reason": "silent"},
    ],
}
TICKETS: dict[str, Any] = {
    "supported": True,
    "full": 3,
    "resumed": 4,
    "h3": {"full": 1, "resumed": 0},
    "doq": {"full": 0, "resumed": 2},
    "keys": [{"age_s": 900.0, "seals": True}, {"age_s": 90_000.0, "seals": False}],
}


def shown(
    *, edges: list[dict[str, Any]] = EDGES, tickets: dict[str, Any] = TICKETS, **changes: Any
) -> dict[str, list[str]]:
    """What stands beside each word."""
    told: dict[str, list[str]] = {}
    word = ""
    for line in status.lines(STATUS | changes, {"edges": edges}, RESOLVER, tickets):
        word = line[:10].strip() or word
        told.setdefault(word, []).append(line[10:])
    return told


def test_status_says_what_runs_and_where_it_listens() -> None:
    told = shown()
    assert told["headrace"] == ["1.2.3, pid 77, up 2.0 h"]
    assert told["config"] == ["the defaults: no file was found"]
    assert told["listens"] == STATUS["listeners"]
    assert told["notes"] == STATUS["notes"]
    assert "notes" not in shown(notes=[])


def test_status_names_the_edges_that_are_out_and_why() -> None:
    told = shown()["pools"]
    assert told == ["llama: 2 of 3 edges usable; rack-3 ejected (3 failures in a row)", "empty: 0 of 0 edges usable"]
    assert shown(pools=[])["pools"] == ["none"]


def test_status_tells_of_the_network() -> None:
    assert shown()["upstreams"] == ["tls://192.0.2.1:853: healthy, 12 ms", "udp://192.0.2.2:53: down (silent)"]
    assert shown()["network"] == ["no portal suspected; zones of the links: corp.example"]
    assert shown(portal_suspected=True, link_zones=[])["network"] == [
        "a portal may stand in the way; zones of the links: none"
    ]


def test_status_counts_what_goes_through() -> None:
    assert shown()["traffic"] == ["1 request under way, 2 connections open, 12 DNS queries so far"]
    assert shown()["tickets"] == ["4 full and 6 resumed handshakes; 2 keys, the one in use 15 min old"]
    assert shown(tickets=TICKETS | {"supported": False, "keys": []})["tickets"] == [
        "4 full and 6 resumed handshakes; the keys are OpenSSL's own"
    ]


def test_a_count_has_its_plural() -> None:
    assert [counted(count, "server") for count in (0, 1, 2)] == ["0 servers", "1 server", "2 servers"]
