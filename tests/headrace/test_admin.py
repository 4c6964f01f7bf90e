"""The admin interface over a real socket: guards, token, pages, and an end that does not hang."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.admin import GETS, POSTS, AdminApp, AdminServer
from tests.patience import soon

TOKEN = "t" * 32


class FakeDaemon:
    """Operations that say what was asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def status(self) -> dict[str, object]:
        return {"page": "status"}

    def edges(self) -> dict[str, object]:
        raise RuntimeError("sk-canary-in-an-exception")

    def requests(self, last: int) -> dict[str, object]:
        return {"last": last}

    def tickets(self) -> dict[str, object]:
        return {"keys": []}

    def resolver(self) -> dict[str, object]:
        return {"upstreams": []}

    def metrics(self) -> str:
        return "headrace_up 1\n"

    async def rotate_tickets(self) -> dict[str, object]:
        self.asked.append("rotate")
        return {"current": "k"}

    def flush_resolver(self, name: str | None) -> dict[str, object]:
        self.asked.append(f"flush {name}")
        return {"flushed": 0}

    async def query(self, name: str, rdtype: str, *, explained: bool = False) -> dict[str, object]:
        return {"name": name, "type": rdtype, "explained": explained}

    def cache(self) -> dict[str, object]:
        return {"counts": {}}

    def cache_entries(self, below: str, limit: int) -> dict[str, object]:
        return {"entries": [], "below": below, "limit": limit}

    async def reload(self) -> dict[str, object]:
        self.asked.append("reload")
        return {"applied": True}


class Served:
    """An admin server and a client for it."""

    def __init__(self, app: AdminApp) -> None:
        bound = socket.create_server(("127.0.0.1", 0))
        self.daemon = app.operations
        self.server = AdminServer(app, bound)
        self.port = self.server.address[1]

    async def ask(self, method: str, path: str, **headers: str) -> tuple[int, Any]:
        return await asyncio.to_thread(self._ask, method, path, headers)

    def _ask(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            body = response.read()
        finally:
            connection.close()
        is_json = response.headers["content-type"] == "application/json" and body
        return response.status, json.loads(body) if is_json else body.decode()


@pytest.fixture
async def admin() -> AsyncIterator[Served]:
    served = Served(AdminApp(FakeDaemon(), token=TOKEN, metrics=True))
    served.server.start()
    yield served
    await served.server.close()


async def test_reading_needs_no_token_and_is_versioned(admin: Served) -> None:
    assert await admin.ask("GET", "/status") == (200, {"version": 1, "page": "status"})
    assert await admin.ask("GET", "/requests?last=7") == (200, {"version": 1, "last": 7})
    assert (await admin.ask("GET", "/resolver/query?name=a.test&type=HTTPS"))[1]["type"] == "HTTPS"
    assert (await admin.ask("GET", "/resolver/query?name=a.test&explain=1"))[1]["explained"] is True
    assert (await admin.ask("GET", "/resolver/cache/entries?below=a.test&limit=7"))[1]["limit"] == 7
    assert (await admin.ask("GET", "/resolver/cache/entries?limit=5001"))[0] == 400
    assert await admin.ask("GET", "/healthz") == (200, {"version": 1, "ok": True})
    assert await admin.ask("GET", "/metrics") == (200, "headrace_up 1\n")
    assert await admin.ask("HEAD", "/status") == (200, "")


@pytest.mark.parametrize("path", sorted(POSTS))
@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {TOKEN}"}])
async def test_a_change_without_the_token_is_refused(admin: Served, path: str, given: dict[str, str]) -> None:
    status, answer = await admin.ask("POST", path, **given)
    assert (status, admin.daemon.asked) == (401, [])
    assert "token" in answer["error"]


async def test_a_change_with_the_token_is_done(admin: Served) -> None:
    for path in ("/reload", "/tickets/rotate", "/resolver/flush?name=a.test"):
        assert (await admin.ask("POST", path, Authorization=f"Bearer {TOKEN}"))[0] == 200
    assert admin.daemon.asked == ["reload", "rotate", "flush a.test"]


@pytest.mark.parametrize("host", ["evil.test", "127.0.0.1.evil.test", "localhost.evil.test", "10.0.0.1", ""])
async def test_a_name_that_is_not_this_machine_is_refused(admin: Served, host: str) -> None:
    assert (await admin.ask("GET", "/status", Host=host))[0] in (400, 421)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9443", "[::1]:9443"])
async def test_names_of_this_machine_are_served(admin: Served, host: str) -> None:
    assert (await admin.ask("GET", "/status", Host=host))[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.test"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
    ],
)
async def test_pages_of_other_sites_are_refused_even_with_the_token(admin: Served, headers: dict[str, str]) -> None:
    status, _ = await admin.ask("POST", "/reload", Authorization=f"Bearer {TOKEN}", **headers)
    assert (status, admin.daemon.asked) == (403, [])


async def test_the_own_origin_is_served(admin: Served) -> None:
    assert (await admin.ask("GET", "/status", Origin=f"http://127.0.0.1:{admin.port}"))[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/reload", 405),
        ("POST", "/status", 405),
        ("GET", "/requests?last=0", 400),
        ("GET", "/requests?last=x", 400),
        ("GET", "/resolver/query", 400),
    ],
)
async def test_what_cannot_be_answered_says_so(admin: Served, method: str, path: str, status: int) -> None:
    answered, answer = await admin.ask(method, path)
    assert answered == status
    assert answer["version"] == 1
    assert answer["error"]


async def test_a_failure_inside_is_500_without_its_text(admin: Served, caplog: pytest.LogCaptureFixture) -> None:
    status, answer = await admin.ask("GET", "/edges")
    assert status == 500
    assert "canary" not in json.dumps(answer)
    assert "admin request failed" in caplog.text


async def test_metrics_can_be_turned_off() -> None:
    served = Served(AdminApp(FakeDaemon(), token=TOKEN, metrics=False))
    served.server.start()
    try:
        assert (await served.ask("GET", "/metrics"))[0] == 404
    finally:
        await served.server.close()


async def test_it_takes_no_signal_from_the_daemon(admin: Served) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    await admin.ask("GET", "/status")
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


async def test_it_closes_at_once_when_nobody_ever_came() -> None:
    served = Served(AdminApp(FakeDaemon(), token=TOKEN, metrics=True))
    served.server.start()
    await served.server.close()
    with pytest.raises(ConnectionRefusedError):
        await served.ask("GET", "/status")


async def test_it_closes_with_a_connection_left_open(admin: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
    await reader.readuntil(b"}")
    await soon(admin.server.close())
    assert await reader.read() is not None
    writer.close()
    await writer.wait_closed()


def test_every_page_has_an_answer() -> None:
    assert {"/status", "/edges", "/requests", "/tickets", "/resolver", "/metrics", "/healthz"} <= set(GETS)


@pytest.mark.parametrize("query", ["last=" + "9" * 5000, "last=0", "&".join(["a=b"] * 17)])
async def test_an_odd_query_is_400_and_no_line_in_the_log(
    admin: Served, query: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, _ = await admin.ask("GET", f"/requests?{query}")
    assert status == 400
    assert caplog.records == []
