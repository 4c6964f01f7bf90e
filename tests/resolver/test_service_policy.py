"""What the service decides by configuration: local names, zones, lists, rates, and what outlives a restart."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest

from config.model import DnsCache, DnsUpstream, Record, Zone
from resolver.io.files import CACHE_FILE
from tests.patience import no_hang
from tests.resolver.scripted import answer
from tests.resolver.service_lab import QUIET, Lab, addresses, configured, reasons, until

# --- names and policy ---------------------------------------------------------------------------------------------


async def test_names_that_stay_here_send_nothing_upstream(lab: Lab) -> None:
    assert addresses(await lab.ask("localhost")) == ["127.0.0.1"]
    assert (await lab.ask("x.onion")).rcode() == dns.rcode.NXDOMAIN
    assert not (await lab.ask("_dns.resolver.arpa", "SVCB")).answer
    assert (await lab.ask("example.com", "ANY")).answer[0].rdtype == 13
    assert lab.upstreams.asked == []


ZONE = Zone("corp.example", (DnsUpstream("udp", "10.0.0.53", 53),))


async def test_a_zone_is_asked_of_its_own_upstreams_and_kept_apart(tmp_path: Path) -> None:
    lab = configured(tmp_path, zones=(ZONE,))
    lab.upstreams.script = lambda query: answer(query, "60 A 10.0.0.7")
    assert addresses(await lab.ask("a.corp.example")) == ["10.0.0.7"], "private addresses are what a zone is for"
    assert lab.upstreams.zones == [ZONE]
    lab.service.reconfigure(QUIET)
    lab.upstreams.script = lambda query: answer(query, "60 A 192.0.2.1")
    assert addresses(await lab.ask("a.corp.example")) == ["192.0.2.1"]
    assert lab.upstreams.zones == [ZONE, None]
    await lab.service.close()


async def test_a_zone_that_is_down_is_never_asked_of_the_public(tmp_path: Path) -> None:
    lab = configured(tmp_path, zones=(ZONE,))
    lab.upstreams.down = True
    assert (await lab.ask("a.corp.example")).rcode() == dns.rcode.SERVFAIL
    assert lab.upstreams.zones == [ZONE]
    await lab.service.close()


@pytest.mark.parametrize("address", ["10.0.0.1", "127.0.0.2"])
async def test_a_private_address_from_outside_is_refused_whole_and_not_kept(lab: Lab, address: str) -> None:
    lab.upstreams.script = lambda query: answer(
        query, "60 CNAME b.example.", "b.example. 60 A 192.0.2.1", f"b.example. 60 A {address}"
    )
    for _ in range(2):
        reply = await lab.ask("a.example")
        assert not reply.answer and reasons(reply) == [17]
    assert len(lab.upstreams.asked) == 1
    assert lab.service.stats()["entries"] == 0


async def test_rebind_protection_can_be_turned_off(tmp_path: Path) -> None:
    lab = configured(tmp_path, rebind_protection=False)
    lab.upstreams.script = lambda query: answer(query, "60 A 10.0.0.1")
    assert addresses(await lab.ask("a.example")) == ["10.0.0.1"]
    await lab.service.close()


async def test_blocked_names_and_targets_are_denied_for_all_types(tmp_path: Path) -> None:
    (tmp_path / "list").write_text("||ads.example^\n")
    lab = configured(tmp_path, blocklists=(str(tmp_path / "list"),))
    await lab.service.start()
    lab.upstreams.script = lambda query: answer(query, "60 CNAME x.ads.example.", "x.ads.example. 60 A 192.0.2.1")
    for name, rdtype in (("ads.example", "A"), ("a.ads.example", "HTTPS"), ("innocent.example", "A")):
        reply = await lab.ask(name, rdtype)
        assert (reply.rcode(), reasons(reply)) == (dns.rcode.NXDOMAIN, [15])
    assert lab.upstreams.asked == [("innocent.example.", "A")]
    await lab.service.close()


async def test_a_list_that_comes_with_a_reload_blocks_what_is_cached(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    await lab.service.start()
    await lab.ask("ads.example")
    (tmp_path / "list").write_text("ads.example\n")
    lab.service.reconfigure(replace(QUIET, blocklists=(str(tmp_path / "list"),)))

    async def blocked() -> bool:
        return (await lab.ask("ads.example")).rcode() == dns.rcode.NXDOMAIN

    async with no_hang():
        while not await blocked():
            await asyncio.sleep(0.01)
    await lab.service.close()


async def test_a_local_alias_is_followed_outside(tmp_path: Path) -> None:
    lab = configured(tmp_path, records=(Record("short.lan", "CNAME", "long.example.com."),))
    reply = await lab.ask("short.lan")
    assert [rrset.to_text() for rrset in reply.answer] == [
        "short.lan. 60 IN CNAME long.example.com.",
        "long.example.com. 60 IN A 192.0.2.1",
    ]
    await lab.service.close()


async def test_hosts_answer_and_a_reload_takes_them_away(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("192.0.2.44 box.lan\n")
    lab = configured(tmp_path, hosts_files=(str(tmp_path / "hosts"),))
    assert addresses(await lab.ask("box.lan")) == ["192.0.2.44"]
    lab.service.reconfigure(QUIET)
    assert addresses(await lab.ask("box.lan")) == ["192.0.2.1"]
    await lab.service.close()


# --- across a restart -------------------------------------------------------------------------------------------------


async def test_the_cache_survives_a_restart_and_a_damaged_file_is_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = replace(QUIET, cache=DnsCache(persist=True))
    first = Lab(tmp_path, config)
    await first.service.start()
    await first.ask("a.example")
    await first.service.close()
    second = Lab(tmp_path, config)
    second.clock.now = 7.0
    await second.service.start()
    reply = await second.ask("a.example")
    assert addresses(reply) == ["192.0.2.1"] and reply.answer[0].ttl <= 60
    assert second.upstreams.asked == []
    await second.service.close()
    (tmp_path / CACHE_FILE).write_bytes(b"headrace-dns 1\nrubbish")
    third = Lab(tmp_path, config)
    await third.service.start()
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1
    await third.ask("a.example")
    assert len(third.upstreams.asked) == 1
    await third.service.close()


async def test_a_stop_before_the_cache_was_read_leaves_the_saved_one(tmp_path: Path) -> None:
    config = replace(QUIET, cache=DnsCache(persist=True))
    first = Lab(tmp_path, config)
    await first.service.start()
    await first.ask("a.example")
    await first.service.close()
    saved = (tmp_path / CACHE_FILE).read_bytes()
    second = Lab(tmp_path, config)
    starting = asyncio.ensure_future(second.service.start())
    await asyncio.sleep(0)
    await second.service.close()
    assert (tmp_path / CACHE_FILE).read_bytes() == saved
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)


async def test_malformed_queries_get_their_verdict_without_waiting(lab: Lab) -> None:
    assert lab.service.answer_cached(b"short", 512) == b""
    assert await lab.service.answer(b"short", 512) is None
    refused = lab.service.answer_cached(b"\x12\x34\1\0\0\0\0\0\0\0\0\0", 512)
    assert refused is not None and refused[:2] == b"\x12\x34" and refused[3] & 15 == 1


async def test_flush_forgets_a_name(lab: Lab) -> None:
    await lab.ask("a.example")
    assert lab.service.flush("example") == 1
    await lab.ask("a.example")
    assert len(lab.upstreams.asked) == 2


async def test_a_subnet_gets_its_own_answer_and_scope_0_is_for_all(tmp_path: Path) -> None:
    lab = configured(tmp_path, ecs="pass")

    def script(query: dns.message.Message) -> bytes:
        subnet = query.options[0] if query.options else None
        reply = dns.message.from_wire(
            answer(query, "60 A 192.0.2.9" if subnet is None else f"60 A {SEEN[str(subnet.address)]}")
        )
        if subnet is not None:
            scope = 0 if reply.question[0].name.to_text().startswith("all") else 24
            reply.use_edns(0, options=[dns.edns.ECSOption(subnet.address, subnet.srclen, scope)])
        return reply.to_wire()

    lab.upstreams.script = script
    for _ in range(2):
        for network, address in SEEN.items():
            reply = await lab.ask("own.example", options=[dns.edns.ECSOption(network, 24)])
            assert addresses(reply) == [address]
            assert [(o.address, o.srclen, o.scopelen) for o in reply.options] == [(network, 24, 24)]
            reply = await lab.ask("all.example", options=[dns.edns.ECSOption(network, 24)])
            assert [o.scopelen for o in reply.options] == [0]
    assert addresses(await lab.ask("own.example")) == ["192.0.2.9"], "never an answer of somebody's subnet"
    assert [name for name, _ in lab.upstreams.asked] == ["own.example.", "all.example.", "own.example.", "own.example."]
    await lab.service.close()


SEEN = {"198.51.100.0": "192.0.2.1", "203.0.113.0": "192.0.2.2"}


async def test_a_cache_that_was_saved_under_another_policy_obeys_todays(tmp_path: Path) -> None:
    config = replace(QUIET, cache=DnsCache(persist=True), rebind_protection=False)
    first = Lab(tmp_path, config)
    await first.service.start()
    first.upstreams.script = lambda query: answer(query, "60 A 10.0.0.1")
    await first.ask("a.example")
    first.service.reconfigure(replace(config, rebind_protection=True))
    await until(lambda: first.service.stats()["entries"] == 0)
    first.service.reconfigure(config)
    await first.ask("a.example")
    await first.service.close()
    second = Lab(tmp_path, replace(config, rebind_protection=True))
    await second.service.start()
    assert second.service.stats()["entries"] == 0
    await second.service.close()


async def test_a_client_above_its_rate_is_refused_at_once_and_told(tmp_path: Path) -> None:
    lab = configured(tmp_path, rate_limit_per_s=2)
    limit = lab.service.rate_limit
    assert limit is not None
    assert [limit.admits("192.0.2.1", lab.clock.now) for _ in range(3)] == [True, True, False]
    assert limit.admits("192.0.2.2", lab.clock.now)
    assert limit.admits("192.0.2.1", lab.clock.now + 0.5)
    assert [limit.admits(f"2001:db8::{i}", lab.clock.now) for i in range(3)] == [True, True, False]
    wire = lab.service.refuse_rate(dns.message.make_query("a.example", "A", use_edns=0).to_wire())
    assert dns.message.from_wire(wire).rcode() == dns.rcode.REFUSED
    assert reasons(dns.message.from_wire(wire)) == [18]
    assert lab.service.refuse_rate(b"short") == b""
    await lab.service.close()
