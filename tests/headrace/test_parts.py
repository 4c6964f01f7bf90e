"""The parts wired together as the daemon has them: what reaches whom when something changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from config.model import Config, DnsCache, Listen, Proxy, Resolver, Tls, Zone
from headrace.parts import Parts
from tests.peers.authority import Authority
from tests.peers.dns import Ask, Peer
from tests.peers.h3peers import Client

GOOD = "60 A 192.0.2.1"


def asking(peer: Peer, *zones: Zone) -> Resolver:
    cache = DnsCache(persist=False)
    return Resolver(upstreams=(peer.upstream,), bootstrap=(), zones=zones, hosts_files=(), cache=cache)


def parts_of(folder: Path, resolver: Resolver) -> Parts:
    return Parts(Config(state_dir=folder, resolver=resolver), record=lambda finished: None)


@pytest.fixture
async def open_parts() -> AsyncIterator[list[Parts]]:
    """Whatever a test puts here is closed."""
    made: list[Parts] = []
    yield made
    for each in made:
        await each.close()


async def test_another_network_voids_the_failures_of_the_old_one(tmp_path: Path, open_parts: list[Parts]) -> None:
    async def script(ask: Ask) -> None:
        ask.answer(ask.reply(rcode="SERVFAIL") if len(peer.asks) == 1 else ask.reply(GOOD))

    async with Peer(script) as peer:
        parts = parts_of(tmp_path, asking(peer))
        open_parts.append(parts)
        assert (await parts.resolver.resolve("a.example", "A")).rcode == "SERVFAIL"
        parts.network_changed()
        assert (await parts.resolver.resolve("a.example", "A")).rcode == "NOERROR"


async def test_a_configured_zone_wins_over_what_a_link_says(tmp_path: Path, open_parts: list[Parts]) -> None:
    async def script(ask: Ask) -> None:
        ask.answer(ask.reply(GOOD))

    async with Peer(script) as public, Peer(script) as mine, Peer(script) as of_the_link:
        parts = parts_of(tmp_path, asking(public))
        open_parts.append(parts)
        parts.links.zones = (
            Zone("corp.example", (of_the_link.upstream,)),
            Zone("vpn.example", (of_the_link.upstream,)),
        )
        parts.resolve_by(asking(public, Zone("corp.example", (mine.upstream,))))
        for name in ("a.corp.example", "a.vpn.example", "a.example"):
            await parts.resolver.resolve(name, "A")
    asked = [[ask.name for ask in peer.asks] for peer in (mine, of_the_link, public)]
    assert asked == [["a.corp.example."], ["a.vpn.example."], ["a.example."]]


async def test_an_h3_listener_shows_the_new_certificate(tmp_path: Path, open_parts: list[Parts]) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    pem = tmp_path / "server.pem"
    pem.write_bytes(Path(old.issue()).read_bytes())
    config = Config(
        state_dir=tmp_path,
        resolver=Resolver(hosts_files=(), cache=DnsCache(persist=False)),
        proxy=Proxy(listen=(Listen("h3", "127.0.0.1", 0),)),
        tls=Tls(cert_file=str(pem), key_file=str(pem)),
    )
    parts = Parts(config, record=lambda finished: None)
    open_parts.append(parts)
    parts.identity.make(config)
    parts.apply(config)
    await parts.listeners.open(config.proxy.listen, parts.identity.tls, config.tls.tickets)
    await parts.listeners.load_quic()
    pem.write_bytes(Path(new.issue()).read_bytes())
    parts.use_certificate(await parts.identity.prove(config), "/dns-query")
    client = Client(parts.listeners.addresses[0].port, new.ca_file)
    await client.connect()
    await client.until(lambda each: each.handshake)
    client.vanish()
