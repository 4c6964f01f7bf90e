"""What commands make of an answer of the daemon: the lines for people."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.commands import requests
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


def test_a_count_has_its_plural() -> None:
    assert [counted(count, "server") for count in (0, 1, 2)] == ["0 servers", "1 server", "2 servers"]
