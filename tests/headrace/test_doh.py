"""DNS over HTTPS through the daemon: who asked is known over each version, to the query log and to the rate limit."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import dns.message
import dns.rcode
import pytest

from headrace.lab.clients import VERSIONS, Request, ask, client_context
from headrace.lab.daemon import Daemon
from headrace.lab.settings import DaemonPorts
from tests.patience import no_hang


def configured(folder: Path, ports: DaemonPorts, resolver: str, proxy: str = "") -> Daemon:
    file = folder / "headrace.toml"
    file.write_text(
        f'state_dir = "{folder / "state"}"\nlog = {{ level = "info", format = "json" }}\n'
        f'[resolver]\nlisten = ["udp://127.0.0.1:{ports.dns}"]\nupstream = []\nhosts_files = []\n{resolver}\n'
        f'[proxy]\nlisten = ["https://127.0.0.1:{ports.https}", "h3://127.0.0.1:{ports.https}"]\n{proxy}\n'
        f'[admin]\nlisten = "http://127.0.0.1:{ports.admin}"\n'
    )
    return Daemon(file, folder / "state", ports)


async def asked(
    daemon: Daemon, version: str, *, post: bool = False, fields: dict[str, str] | None = None
) -> dns.message.Message:
    wire = dns.message.make_query("localhost", "A", id=0, use_edns=0).to_wire()
    encoded = base64.urlsafe_b64encode(wire).rstrip(b"=").decode()
    request = Request("GET", f"/dns-query?dns={encoded}", b"", fields or {})
    if post:
        request = Request("POST", "/dns-query", wire, {"content-type": "application/dns-message"})
    said = await ask(version, daemon.target(), request)
    assert said.status == 200
    return dns.message.from_wire(said.body)


async def test_the_query_log_names_the_client_over_each_version(tmp_path: Path) -> None:
    async with configured(tmp_path, DaemonPorts.choose(), 'query_log = "names"') as daemon:
        for version in VERSIONS:
            for post in (False, True):
                assert (await asked(daemon, version, post=post)).rcode() == dns.rcode.NOERROR
    logged = [json.loads(line) for line in daemon.log.splitlines() if '"query"' in line]
    assert [(one["transport"], one["client"]) for one in logged] == [("https", "127.0.0.1")] * 6


@pytest.mark.parametrize(("trusted", "client"), [('["127.0.0.0/8"]', "9.9.9.9"), ("[]", "127.0.0.1")])
async def test_who_asks_behind_a_trusted_proxy_is_whom_it_speaks_for(trusted: str, client: str, tmp_path: Path) -> None:
    said = {"x-forwarded-for": "6.6.6.6, 9.9.9.9"}
    ports = DaemonPorts.choose()
    async with configured(tmp_path, ports, 'query_log = "names"', f"trusted_proxies = {trusted}") as daemon:
        for version in VERSIONS:
            await asked(daemon, version, fields=said)
    logged = [json.loads(line) for line in daemon.log.splitlines() if '"query"' in line]
    assert [one["client"] for one in logged] == [client] * 3


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_client_above_its_rate_is_refused_over_each_version(version: str, tmp_path: Path) -> None:
    # One a second: whatever the machine does meanwhile, ten questions do not take ten seconds.
    async with configured(tmp_path, DaemonPorts.choose(), "rate_limit = 1") as daemon:
        said = [await asked(daemon, version) for _ in range(10)]
    codes = [reply.rcode() for reply in said]
    assert codes[0] == dns.rcode.NOERROR and dns.rcode.REFUSED in codes
    refused = said[codes.index(dns.rcode.REFUSED)]
    assert [int(option.code) for option in refused.options] == [18]


@pytest.mark.parametrize(("length", "heard"), [(0, b"HTTP/1.1 100 "), (70_000, b"HTTP/1.1 413 ")])
async def test_a_client_that_waits_for_100_is_told_whether_to_go_on(length: int, heard: bytes, tmp_path: Path) -> None:
    wire = dns.message.make_query("localhost", "A", id=0, use_edns=False).to_wire()
    async with configured(tmp_path, DaemonPorts.choose(), "") as daemon:
        target = daemon.target()
        assert target.ca_file is not None
        context = client_context(target.ca_file, "http/1.1")
        reader, writer = await asyncio.open_connection(
            target.address, target.port, ssl=context, server_hostname=target.server_name
        )
        async with no_hang():
            size = length or len(wire)
            writer.write(
                b"POST /dns-query HTTP/1.1\r\nHost: %b\r\nContent-Type: application/dns-message\r\n"
                b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % (target.authority.encode(), size)
            )
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(heard)
            if not length:
                writer.write(wire)
                assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.transport.abort()
