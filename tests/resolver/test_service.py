"""The chain with a scripted upstream set: what is asked, what is kept, who waits for whom, and what clients hear."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.model import DnsCache, DnsUpstream, Record, Resolver, Zone
from resolver.errors import NoAddress
from resolver.io.files import CACHE_FILE
from resolver.io.service import ResolverService
from tests.patience import no_hang
from tests.resolver.messages import queries
from tests.resolver.scripted import ScriptedUpstreams, answer

QUIET = Resolver(hosts_files=(), cache=DnsCache(persist=False))


class Clock:
    """Time that stands still until it is told to pass."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """A resolver over a script, asked the way a client asks."""

    def __init__(self, tmp_path: Path, config: Resolver = QUIET) -> None:
        self.clock = Clock()
        self.upstreams = ScriptedUpstreams()
        self.service = ResolverService(config, state_dir=tmp_path, upstreams=self.upstreams, clock=self.clock)

    async def ask(self, name: str, rdtype: str = "A", *, limit: int = 65535, **options: object) -> dns.message.Message:
        query = dns.message.make_query(name, rdtype, **{"use_edns": 0, **options})  # type: ignore[arg-type]
        return await self.send(query, limit)

    async def send(self, query: dns.message.Message, limit: int = 65535) -> dns.message.Message:
        wire = await self.service.answer(query.to_wire(), limit)
        assert wire is not None
        reply = dns.message.from_wire(wire)
        assert reply.id == query.id
        return reply


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    made = Lab(tmp_path)
    yield made
    await made.service.close()


def configured(tmp_path: Path, **changes: object) -> Lab:
    return Lab(tmp_path, replace(QUIET, **changes))  # type: ignore[arg-type]


def addresses(reply: dns.message.Message) -> list[str]:
    return [rdata.to_text() for rrset in reply.answer for rdata in rrset if rrset.rdtype in (1, 28)]


def reasons(reply: dns.message.Message) -> list[int]:
    return [int(option.code) for option in reply.options if isinstance(option, dns.edns.EDEOption)]


def reason_texts(reply: dns.message.Message) -> str:
    return " ".join(str(option.text) for option in reply.options if isinstance(option, dns.edns.EDEOption))


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    async with no_hang():
        while not condition():
            await asyncio.sleep(0.002)


# --- cache ----------------------------------------------------------------------------------------------------------


async def test_ttl_falls_with_time_and_the_end_is_a_new_question(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "5 A 192.0.2.1")
    ttls = []
    for step in (0, 1, 2, 1.9):
        lab.clock.now += step
        ttls.append((await lab.ask("a.example")).answer[0].ttl)
    assert ttls == [5, 4, 2, 1]
    assert len(lab.upstreams.asked) == 1
    lab.clock.now += 0.2
    assert (await lab.ask("a.example")).answer[0].ttl == 5
    assert len(lab.upstreams.asked) == 2


async def test_the_exact_path_and_the_parsed_path_agree_as_time_passes(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "50 A 192.0.2.1")
    query = dns.message.make_query("A.example", "A", use_edns=0)
    await lab.send(query)
    for _ in range(60):
        lab.clock.now += 0.9
        first = lab.service.answer_cached(query.to_wire(), 1232)
        again = lab.service.answer_cached(query.to_wire(), 1232)
        assert first == again
        if again is not None:
            assert dns.message.from_wire(again).answer[0].ttl == 50 - int(lab.clock.now - 1000)
    assert lab.service.stats()["memo"] > 20
    assert first is None, "50 seconds are over"


async def test_what_a_refresh_brings_is_seen_by_the_exact_path_at_once(lab: Lab) -> None:
    fresh = itertools.count(1)
    lab.upstreams.script = lambda query: answer(query, f"20 A 192.0.2.{next(fresh)}")
    query = dns.message.make_query("a.example", "A")
    await lab.send(query)
    lab.clock.now += 18.5
    for _ in range(3):
        lab.service.answer_cached(query.to_wire(), 1232)
        await turns()
    wire = lab.service.answer_cached(query.to_wire(), 1232)
    assert wire is not None
    assert addresses(dns.message.from_wire(wire)) == ["192.0.2.2"]


@given(query=queries(), other=queries(), limit=st.sampled_from([512, 1232, 65535]), sealed=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
async def test_the_exact_path_gives_the_bytes_of_the_parsed_path(
    tmp_path: Path, query: dns.message.Message, other: dns.message.Message, limit: int, sealed: bool
) -> None:
    lab = Lab(tmp_path)
    lab.upstreams.script = lambda asked: answer(asked, r"60 TYPE65281 \# 2 0102", "x. 30 TXT t")
    for message in (query, other):
        wire = message.to_wire()
        await lab.service.answer(wire, limit, sealed=sealed)
        parsed = lab.service.answer_cached(b"\0\0" + wire[2:], limit, sealed=sealed)
        exact = lab.service.answer_cached(wire, limit, sealed=sealed)
        if parsed is not None:
            assert exact == wire[:2] + parsed[2:]
            assert len(parsed) <= limit
    await lab.service.close()


@pytest.mark.parametrize("extra", [40, 14])
async def test_a_reply_that_was_cut_for_a_datagram_is_whole_over_tcp(lab: Lab, extra: int) -> None:
    def script(query: dns.message.Message) -> bytes:
        reply = dns.message.from_wire(answer(query, *(f"60 A 192.0.2.{i}" for i in range(1, extra))))
        text = " ".join(f'"{"x" * 100}"' for _ in range(3))
        reply.additional.append(dns.rrset.from_text("b.example.", 60, "IN", "TXT", text))
        return reply.to_wire(max_size=65535)

    lab.upstreams.script = script
    query = dns.message.make_query("a.example", "A")
    for _ in range(2):
        assert not (await lab.send(query, 512)).additional
        assert lab.service.answer_cached(query.to_wire(), 512) is not None
        wire = lab.service.answer_cached(query.to_wire(), 65535)
        assert wire is not None
        whole = dns.message.from_wire(wire)
        assert len(addresses(whole)) == extra - 1 and whole.additional


async def test_ttl_0_goes_to_those_who_wait_and_to_nobody_later(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "0 A 192.0.2.1")
    lab.upstreams.held = asyncio.Event()
    waiting = [asyncio.ensure_future(lab.ask("a.example")) for _ in range(3)]
    await turns()
    lab.upstreams.held.set()
    assert [addresses(reply) for reply in await asyncio.gather(*waiting)] == [["192.0.2.1"]] * 3
    assert len(lab.upstreams.asked) == 1
    await lab.ask("a.example")
    assert len(lab.upstreams.asked) == 2


async def test_nxdomain_stops_other_types_and_names_below(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, rcode="NXDOMAIN", soa="example. 60 60")
    for name, rdtype in (("gone.example", "A"), ("gone.example", "TXT"), ("below.gone.example", "A")):
        reply = await lab.ask(name, rdtype)
        assert reply.rcode() == dns.rcode.NXDOMAIN and reply.authority
    assert lab.upstreams.asked == [("gone.example.", "A")]


async def test_nodata_hides_its_own_type_only(lab: Lab) -> None:
    def script(query: dns.message.Message) -> bytes:
        if query.question[0].rdtype == 1:
            return answer(query, "60 A 192.0.2.1")
        return answer(query, soa="example. 60 60")

    lab.upstreams.script = script
    for _ in range(2):
        assert not (await lab.ask("a.example", "AAAA")).answer
        assert addresses(await lab.ask("a.example")) == ["192.0.2.1"]
    assert len(lab.upstreams.asked) == 2


async def test_dnssec_records_are_fetched_for_those_who_want_them_and_kept_from_others(lab: Lab) -> None:
    await lab.ask("a.example")
    await lab.ask("a.example", want_dnssec=True)
    assert [bool(query.ednsflags & dns.flags.DO) for query in lab.upstreams.queries] == [False, True]
    assert all(query.flags & dns.flags.AD for query in lab.upstreams.queries)


async def test_a_subnet_of_the_client_is_not_passed_on(lab: Lab) -> None:
    reply = await lab.ask("a.example", options=[dns.edns.ECSOption("192.0.2.0", 24)])
    assert not reply.options and not lab.upstreams.queries[0].options


async def test_a_chain_that_stopped_short_is_completed(lab: Lab) -> None:
    def script(query: dns.message.Message) -> bytes:
        if query.question[0].name.to_text() == "a.example.":
            return answer(query, "300 CNAME b.example.")
        return answer(query, "2 CNAME c.example.", "c.example. 60 A 192.0.2.1")

    lab.upstreams.script = script
    reply = await lab.ask("a.example")
    assert [rrset.to_text() for rrset in reply.answer] == [
        "a.example. 300 IN CNAME b.example.",
        "b.example. 2 IN CNAME c.example.",
        "c.example. 60 IN A 192.0.2.1",
    ]
    lab.clock.now += 2
    await lab.ask("a.example")
    assert len(lab.upstreams.asked) == 4, "never served without its end"


@pytest.mark.parametrize("links", [40, -1])
async def test_an_endless_chain_is_a_failure_with_a_reason(lab: Lab, links: int) -> None:
    def script(query: dns.message.Message) -> bytes:
        if links < 0:
            return answer(query, "60 CNAME b.example.", "b.example. 60 CNAME a.example.")
        return answer(query, *(f"{i if i else 'a'}.example. 60 CNAME {i + 1}.example." for i in range(links)))

    lab.upstreams.script = script
    reply = await lab.ask("a.example")
    assert reply.rcode() == dns.rcode.SERVFAIL and "CNAME" in reason_texts(reply)


# --- in flight ------------------------------------------------------------------------------------------------------


async def test_a_thousand_identical_questions_are_one_upstream_and_each_has_its_own_reply(tmp_path: Path) -> None:
    lab = configured(tmp_path, timeout_s=30)  # making the questions takes a busy machine its time
    lab.upstreams.held = asyncio.Event()
    name = "stampede.example"
    cased = ["".join(c.upper() if i >> (k % 10) & 1 else c for k, c in enumerate(name)) for i in range(1000)]
    asked = [dns.message.make_query(text, "A", id=i) for i, text in enumerate(cased)]
    waiting = [asyncio.ensure_future(lab.send(query)) for query in asked]
    await turns()
    lab.upstreams.held.set()
    replies = await asyncio.gather(*waiting)
    assert [reply.question[0].name.to_text() for reply in replies] == [text + "." for text in cased]
    assert all(addresses(reply) == ["192.0.2.1"] for reply in replies)
    assert len(lab.upstreams.asked) == 1
    await lab.service.close()


async def test_the_first_client_goes_away_and_the_others_are_answered(lab: Lab) -> None:
    lab.upstreams.held = asyncio.Event()
    first, second = (asyncio.ensure_future(lab.ask("a.example")) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    lab.upstreams.held.set()
    assert addresses(await second) == ["192.0.2.1"]
    assert len(lab.upstreams.asked) == 1


async def test_one_failure_answers_all_who_wait_and_is_kept_for_seconds(lab: Lab) -> None:
    lab.upstreams.held, lab.upstreams.down = asyncio.Event(), True
    waiting = [asyncio.ensure_future(lab.ask("a.example")) for _ in range(50)]
    await turns()
    lab.upstreams.held.set()
    replies = await asyncio.gather(*waiting)
    assert {reply.rcode() for reply in replies} == {dns.rcode.SERVFAIL}
    assert reasons(replies[0]) == [23] and "tls://peer: connection refused" in reason_texts(replies[0])
    lab.clock.now += 0.9
    assert (await lab.ask("a.example")).rcode() == dns.rcode.SERVFAIL
    assert len(lab.upstreams.asked) == 1
    lab.upstreams.down = False
    lab.clock.now += 0.2
    assert addresses(await lab.ask("a.example")) == ["192.0.2.1"]


async def test_failures_in_a_row_are_kept_longer_but_never_more_than_five_seconds(lab: Lab) -> None:
    lab.upstreams.down = True
    asked_at = []
    for _ in range(200):
        before = len(lab.upstreams.asked)
        await lab.ask("a.example")
        if len(lab.upstreams.asked) > before:
            asked_at.append(lab.clock.now - 1000)
        lab.clock.now += 0.125
    assert asked_at == [0, 1, 3, 7, 12, 17, 22]


async def test_an_answer_ends_the_row_of_failures(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "0 A 192.0.2.1")
    asked = 0
    for down in (True, False, True):
        lab.upstreams.down = down
        await lab.ask("a.example")
        asked += 1
        assert len(lab.upstreams.asked) == asked, "a first failure is kept for one second"
        lab.clock.now += 1.1
    await lab.ask("a.example")
    assert len(lab.upstreams.asked) == asked + 1


async def test_a_floor_for_ttls_does_not_hold_a_failure(tmp_path: Path) -> None:
    lab = configured(tmp_path, cache=DnsCache(persist=False, min_ttl_s=3600))
    lab.upstreams.script = lambda query: answer(query, rcode="SERVFAIL")
    assert (await lab.ask("a.example")).rcode() == dns.rcode.SERVFAIL
    lab.upstreams.script = lambda query: answer(query, "1 A 192.0.2.1")
    lab.clock.now += 6
    assert (await lab.ask("a.example")).answer[0].ttl == 3600
    await lab.service.close()


async def test_a_silent_upstream_set_is_given_up_in_time(tmp_path: Path) -> None:
    lab = configured(tmp_path, timeout_s=0.2)
    lab.upstreams.held = asyncio.Event()
    loop = asyncio.get_running_loop()
    begun = loop.time()
    reply = await lab.ask("a.example")
    assert reply.rcode() == dns.rcode.SERVFAIL and reasons(reply) == [22]
    assert loop.time() - begun >= 0.199, "and long before the guard of a hang"
    await lab.service.close()


async def test_closing_answers_those_who_wait(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.upstreams.held = asyncio.Event()
    waiting = asyncio.ensure_future(lab.ask("a.example"))
    await turns()
    await lab.service.close()
    assert (await waiting).rcode() == dns.rcode.SERVFAIL


# --- stale and prefetch -----------------------------------------------------------------------------------------------


async def test_an_expired_answer_bridges_an_outage_and_is_then_given_at_once(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "60 A 192.0.2.1", "60 A 192.0.2.2")
    await lab.ask("a.example")
    lab.clock.now += 100
    lab.upstreams.down = True
    reply = await lab.ask("a.example")
    assert len(addresses(reply)) == 2 and reply.answer[0].ttl <= 30 and reasons(reply) == [3]
    for _ in range(3):
        lab.clock.now += 9
        assert reasons(await lab.ask("a.example")) == [3]
    assert len(lab.upstreams.asked) == 2, "no new try within 30 s"
    lab.clock.now += 9
    await lab.ask("a.example")
    assert len(lab.upstreams.asked) == 3
    lab.clock.now += 90_000
    assert (await lab.ask("a.example")).rcode() == dns.rcode.SERVFAIL, "older than serve_stale"


async def test_a_stale_denial_says_so_with_its_own_code(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, rcode="NXDOMAIN", soa="example. 60 60")
    await lab.ask("a.example")
    lab.clock.now += 100
    lab.upstreams.down = True
    reply = await lab.ask("a.example", "TXT")
    assert reply.rcode() == dns.rcode.NXDOMAIN and reasons(reply) == [19]


async def test_late_fresh_data_means_stale_data_for_those_who_wait_and_fresh_data_later(tmp_path: Path) -> None:
    lab = configured(tmp_path, cache=DnsCache(persist=False, stale_answer_after_s=0.05))
    await lab.ask("a.example")
    lab.clock.now += 100
    lab.upstreams.held = asyncio.Event()
    lab.upstreams.script = lambda query: answer(query, "60 A 192.0.2.9")
    assert reasons(await lab.ask("a.example")) == [3]
    assert reasons(await lab.ask("a.example")) == [3]
    assert len(lab.upstreams.asked) == 2
    lab.upstreams.held.set()
    await until(lambda: lab.service.stats()["in_flight"] == 0)
    reply = await lab.ask("a.example")
    assert addresses(reply) == ["192.0.2.9"] and not reasons(reply)
    await lab.service.close()


async def test_fresh_data_in_time_is_preferred_to_stale_data(lab: Lab) -> None:
    await lab.ask("a.example")
    lab.clock.now += 100
    lab.upstreams.script = lambda query: answer(query, "60 A 192.0.2.9")
    reply = await lab.ask("a.example")
    assert addresses(reply) == ["192.0.2.9"] and not reasons(reply)


async def test_serve_stale_off_means_failure(tmp_path: Path) -> None:
    lab = configured(tmp_path, cache=DnsCache(persist=False, serve_stale_s=0))
    await lab.ask("a.example")
    lab.clock.now += 61
    lab.upstreams.down = True
    assert (await lab.ask("a.example")).rcode() == dns.rcode.SERVFAIL
    await lab.service.close()


async def test_a_name_asked_each_second_is_fetched_once_a_ttl_and_nobody_waits(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "20 A 192.0.2.1")
    waited = 0
    for _ in range(100):
        wire = dns.message.make_query("a.example", "A").to_wire()
        waited += lab.service.answer_cached(wire, 1232) is None
        if not lab.service.stats()["entries"]:
            await lab.ask("a.example")
        await turns()
        lab.clock.now += 1
    assert waited == 1
    assert len(lab.upstreams.asked) == 6
    lab.clock.now += 30
    await turns()
    assert len(lab.upstreams.asked) == 6, "not asked again, not fetched again"


async def test_a_failed_prefetch_leaves_the_entry_as_it_is(lab: Lab) -> None:
    lab.upstreams.script = lambda query: answer(query, "20 A 192.0.2.1")
    await lab.ask("a.example")
    await lab.ask("a.example")
    lab.upstreams.down = True
    lab.clock.now += 18.5
    for _ in range(3):
        reply = await lab.ask("a.example")
        await turns()
        assert addresses(reply) == ["192.0.2.1"] and reply.answer[0].ttl == 2 and not reasons(reply)
    assert len(lab.upstreams.asked) == 2


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


# --- for the proxy ----------------------------------------------------------------------------------------------------


def serving(zone: dict[tuple[str, str], tuple[str, ...]]) -> Callable[[dns.message.Message], bytes]:
    def script(query: dns.message.Message) -> bytes:
        question = query.question[0]
        records = zone.get((question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)), ())
        return answer(query, *records) if records else answer(query, soa="example. 60 60")

    return script


async def test_endpoints_alternate_families_and_tell_what_the_https_record_promises(lab: Lab) -> None:
    lab.upstreams.script = serving(
        {
            ("api.example", "A"): ("60 A 192.0.2.1", "60 A 192.0.2.2"),
            ("api.example", "AAAA"): ("50 AAAA 2001:db8::1",),
            ("api.example", "HTTPS"): ("40 HTTPS 1 . alpn=h3,h2 ipv4hint=192.0.2.7",),
        }
    )
    found = await lab.service.endpoints("api.example", 443)
    assert found.addresses[0] == "2001:db8::1"
    assert sorted(found.addresses[1:]) == ["192.0.2.1", "192.0.2.2"]
    assert (found.port, found.alpn, found.ttl_s) == (443, ("h3", "h2", "http/1.1"), 40)


@pytest.mark.parametrize(
    ("records", "alpn", "addresses"),
    [
        (("40 HTTPS 1 . alpn=h3 no-default-alpn mandatory=alpn",), ("h3",), ("192.0.2.1",)),
        (
            ("40 HTTPS 1 . alpn=h3 key65400=x mandatory=key65400", "40 HTTPS 2 . alpn=h2"),
            ("h2", "http/1.1"),
            ("192.0.2.1",),
        ),
        (("40 HTTPS 1 . alpn=h3 key65400=x mandatory=key65400",), (), ("192.0.2.1",)),
        (("40 HTTPS 1 . alpn=foo no-default-alpn",), (), ("192.0.2.1",)),
        (("40 HTTPS 1 svc.example. alpn=h2",), ("h2", "http/1.1"), ("192.0.2.55",)),
        (("40 HTTPS 1 hinted.example. alpn=h2 ipv4hint=192.0.2.7",), ("h2", "http/1.1"), ("192.0.2.7",)),
        (("40 HTTPS 0 alias.example.",), ("h3", "http/1.1"), ("192.0.2.66",)),
        (("40 HTTPS 0 .",), (), ("192.0.2.1",)),
    ],
)
async def test_https_records_by_the_rules_of_rfc_9460(
    lab: Lab, records: tuple[str, ...], alpn: tuple[str, ...], addresses: tuple[str, ...]
) -> None:
    lab.upstreams.script = serving(
        {
            ("api.example", "A"): ("60 A 192.0.2.1",),
            ("api.example", "HTTPS"): records,
            ("svc.example", "A"): ("60 A 192.0.2.55",),
            ("alias.example", "A"): ("60 A 192.0.2.66",),
            ("alias.example", "HTTPS"): ("60 HTTPS 1 . alpn=h3",),
        }
    )
    found = await lab.service.endpoints("api.example", 443)
    assert (found.alpn, found.addresses) == (alpn, addresses)


async def test_another_port_has_its_own_https_record(lab: Lab) -> None:
    lab.upstreams.script = serving(
        {
            ("api.example", "A"): ("60 A 192.0.2.1",),
            ("_8443._https.api.example", "HTTPS"): ("9 HTTPS 1 . alpn=h2 port=9443",),
        }
    )
    found = await lab.service.endpoints("api.example", 8443)
    assert (found.port, found.alpn, found.addresses) == (9443, ("h2", "http/1.1"), ("192.0.2.1",))


async def test_a_slow_https_record_does_not_hold_the_dial_up(lab: Lab) -> None:
    held = asyncio.Event()

    async def script(query: dns.message.Message) -> bytes:
        if query.question[0].rdtype == 65:
            await held.wait()
        return answer(query, "60 A 192.0.2.1") if query.question[0].rdtype == 1 else answer(query, soa="example. 60 60")

    lab.upstreams.script = script
    async with no_hang():  # the record stays away
        found = await lab.service.endpoints("api.example", 443)
    assert (found.addresses, found.alpn) == (("192.0.2.1",), ())
    held.set()


async def test_an_address_stands_for_itself(lab: Lab) -> None:
    assert (await lab.service.endpoints("[2001:db8::1]", 8443)).addresses == ("2001:db8::1",)
    assert lab.upstreams.asked == []


@pytest.mark.parametrize(("down", "rcode"), [(True, "SERVFAIL"), (False, "NXDOMAIN")])
async def test_no_address_says_why(lab: Lab, down: bool, rcode: str) -> None:
    lab.upstreams.down = down
    lab.upstreams.script = lambda query: answer(query, rcode="NXDOMAIN", soa="example. 60 60")
    with pytest.raises(NoAddress) as caught:
        await lab.service.endpoints("api.example", 443)
    assert caught.value.rcode == rcode
    assert ("connection refused" in str(caught.value)) == down


async def test_resolve_tells_source_ttl_and_rcode(lab: Lab) -> None:
    first, second = await lab.service.resolve("a.example", "A"), await lab.service.resolve("A.example.", "a")
    assert (first.source, second.source) == ("tls://peer", "cache")
    assert (second.rcode, second.ttl_s) == ("NOERROR", 60)
    assert [rrset.to_text() for rrset in second.rrsets] == ["a.example. 60 IN A 192.0.2.1"]


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
