"""A question's way through the service: the cache, flights that are joined, stale answers and prefetch."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import dns.edns
import dns.flags
import dns.message
import dns.rcode
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.model import DnsCache
from tests.resolver.messages import queries
from tests.resolver.scripted import answer
from tests.resolver.service_lab import Lab, addresses, configured, reason_texts, reasons, turns, until

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
