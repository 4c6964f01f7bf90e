"""The signed tree asked of the daemon's resolver and of the real unbound, both validating forwarders to one upstream."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import dns.asyncquery
import dns.exception
import dns.flags
import dns.message
import dns.rcode
import pytest

from tests.patience import no_hang
from tests.peers.dns import HOST, Peer
from tests.peers.ports import free_port
from tests.resolver.signed_lab import (
    BOGUS_NAMES,
    INSECURE_NAMES,
    SECURE_NAMES,
    recurse,
    validating,
)

UNBOUND = shutil.which("unbound") or shutil.which("unbound", path="/usr/sbin")
CONFIG = """\
server:
  interface: 127.0.0.1@{port}
  username: ""
  chroot: ""
  directory: "{directory}"
  pidfile: ""
  use-syslog: no
  do-daemonize: no
  do-not-query-localhost: no
  trust-anchor-file: "{anchors}"
  module-config: "validator iterator"
  local-zone: "test." nodefault
  minimal-responses: yes
  val-max-restart: 0
forward-zone:
  name: "."
  forward-addr: 127.0.0.1@{upstream}
remote-control:
  control-enable: no
"""


@dataclass(frozen=True)
class Said:
    """What a client sees of the verdict."""

    rcode: str
    ad: bool


@asynccontextmanager
async def unbound(directory: Path, anchors: Path, upstream: int) -> AsyncIterator[int]:
    port = free_port()
    path = directory / "unbound.conf"
    path.write_text(CONFIG.format(port=port, directory=directory, anchors=anchors, upstream=upstream))
    assert UNBOUND is not None
    process = await asyncio.create_subprocess_exec(UNBOUND, "-d", "-c", str(path), stderr=asyncio.subprocess.DEVNULL)
    try:
        await _answering(port)
        yield port
    finally:
        process.terminate()
        await process.wait()


async def _answering(port: int) -> None:
    async with no_hang():
        while True:
            try:
                await dns.asyncquery.udp(dns.message.make_query("test", "SOA"), HOST, port=port, timeout=2)
                return
            except (OSError, dns.exception.Timeout):
                await asyncio.sleep(0.05)


def query(name: str, rdtype: str, *, do: bool, cd: bool = False) -> dns.message.Message:
    made = dns.message.make_query(name, rdtype, use_edns=0, want_dnssec=do, payload=1232)
    made.flags |= dns.flags.AD | (dns.flags.CD if cd else 0)
    return made


def said(reply: dns.message.Message) -> Said:
    return Said(dns.rcode.to_text(reply.rcode()), bool(reply.flags & dns.flags.AD))


NAMES = [
    *SECURE_NAMES,
    *INSECURE_NAMES,
    *((name, rdtype) for name, rdtype, _ in BOGUS_NAMES),
    ("www.good.test", "RRSIG"),
    ("www.good.test", "NSEC"),
    ("unsigned.optout.test", "DS"),
    ("signed.optout.test", "DS"),
    ("wrongds.test", "DS"),
    ("wrongds.test", "DNSKEY"),
    ("www.rsa1.test", "A"),
    ("x.tree.good.test", "A"),
]


@pytest.mark.skipif(UNBOUND is None, reason="unbound is not installed")
@pytest.mark.parametrize("cd", [False, True])
async def test_we_say_what_unbound_says(tmp_path: Path, cd: bool) -> None:
    differing = []
    async with (
        Peer(recurse) as peer,
        validating(tmp_path, peer) as service,
        unbound(tmp_path, tmp_path / "anchors", peer.port) as port,
    ):
        for name, rdtype in NAMES:
            for do in (True, False):
                asked = query(name, rdtype, do=do, cd=cd)
                theirs, _ = await dns.asyncquery.udp_with_fallback(asked, HOST, port=port, timeout=20)
                ours = dns.message.from_wire(await service.answer(asked.to_wire(), 65535) or b"")
                # What unbound fetched for its own chains lies in its cache unjudged, and under CD it gives it as it lies.
                if cd and rdtype in ("DS", "DNSKEY") and said(ours).ad:
                    theirs.flags |= dns.flags.AD
                if said(ours) != said(theirs):
                    differing.append((name, rdtype, do, said(ours), said(theirs)))
    assert not differing, "\n".join(map(str, differing))
    assert len(NAMES) >= 60
