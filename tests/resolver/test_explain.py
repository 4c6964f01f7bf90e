"""What people are told about an answer is what happened; what is logged of queries is what was asked for."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import dns.message
import pytest

from config.model import Record, Zone
from resolver.explain import explain
from resolver.io.fetch import question_for
from resolver.io.inspection import cache_entries, explain_answer
from resolver.io.query_log import QueryLog
from resolver.wire import name_from_text, type_from_text
from tests.peers.dns import Ask, Peer
from tests.resolver.stage import EVERY_CLIENT, GOOD, Chain, query

KINDS = [
    ("own.test", "A", "local", "local"),
    ("x.onion", "A", "special", "local"),
    ("ads.test", "A", "blocklist", "policy"),
    ("any.test", "ANY", "any", "policy"),
    ("known.test", "A", "cache", "cache"),
    ("below.gone.test", "A", "cache", "cache"),
    ("fails.test", "A", "failures", "failure"),
    ("new.test", "A", "upstream", "udp://"),
    ("a.corp.test", "A", "upstream", "udp://"),
    ("alias.test", "A", "upstream", "udp://"),
]


async def script(a: Ask) -> None:
    if "gone" in a.name:
        a.answer(a.reply(rcode="NXDOMAIN", soa="test. 60 60"))
    else:
        a.answer(a.reply(rcode="SERVFAIL") if a.name.startswith("fails") else a.reply(GOOD))


async def filled(chain: Chain) -> None:
    for name in ("known.test", "gone.test", "fails.test"):
        await chain.ask(query(name))


@pytest.mark.parametrize(("name", "rdtype", "step", "source"), KINDS)
async def test_the_step_that_decides_is_the_source_of_the_answer(
    name: str, rdtype: str, step: str, source: str, chain_of: Any, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text("ads.test\n")
    records = (Record("own.test", "A", "192.0.2.1"), Record("alias.test", "CNAME", "new.test."))
    async with Peer(script) as peer:
        kw: dict[str, Any] = {"blocklists": (str(tmp_path / "list"),), "records": records}
        async with chain_of(peer, zones=(Zone("corp.test", (peer.upstream,)),), **kw) as chain:
            await filled(chain)
            before = chain.service.stats()
            steps = explain(
                chain.service.chain, question_for(name_from_text(name), type_from_text(rdtype)), chain.service.now()
            )
            assert chain.service.stats() == before  # looking changes nothing
            assert [s.name for s in steps if s.decides] == [step] and steps[-1].decides
            explained = await explain_answer(chain.service, name, rdtype)
            assert explained.resolved.source.startswith(source)
            assert bool(explained.attempts) is (step == "upstream")


async def test_attempts_name_who_was_asked_and_what_became_of_it(chain_of: Any) -> None:
    async def refuse(a: Ask) -> None:
        a.answer(a.reply(rcode="REFUSED"))

    async with Peer(refuse) as first, Peer(script) as second, chain_of(first, second) as chain:
        explained = await explain_answer(chain.service, "two.test", "A")
        said = [(a.upstream, a.said) for a in explained.attempts]
        assert said == [(first.upstream.url, "REFUSED"), (second.upstream.url, "answered")]
        assert all(a.took_s > 0 for a in explained.attempts)


async def test_attempts_of_a_question_that_somebody_else_asked_are_seen(chain_of: Any) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def refuse(a: Ask) -> None:
        a.answer(a.reply(rcode="REFUSED"))

    async def hold(a: Ask) -> None:
        asked.set()
        await answered.wait()
        a.answer(a.reply(GOOD))

    async with Peer(refuse) as first, Peer(hold) as second, chain_of(first, second) as chain:
        other = asyncio.create_task(chain.ask(query("Joined.test")))
        await asked.wait()
        explaining = asyncio.create_task(explain_answer(chain.service, "joined.test", "A", upstreams=chain.upstreams))
        while chain.service.stats()["waiting"] < 2:
            await asyncio.sleep(0)
        answered.set()
        explained = await explaining
        await other
        assert [(a.upstream, a.said) for a in explained.attempts] == [
            (first.upstream.url, "REFUSED"),
            (second.upstream.url, "answered"),
        ]
        assert not chain.upstreams.live


async def test_a_stale_answer_is_explained(chain_of: Any) -> None:
    async with Peer(script) as peer, chain_of(peer, stale_s=3600.0) as chain:
        await chain.ask(query("old.test"))
        question, later = question_for(name_from_text("old.test"), 1), chain.service.now() + 100
        steps = explain(chain.service.chain, question, later)
        assert ("cache", "expired 40 s ago, kept in case that nobody answers in time", False) in steps
        entry = chain.service.chain.cache.stale(question, later)
        assert entry is not None
        entry.recheck_at = later + 30
        assert explain(chain.service.chain, question, later)[-1].name == "stale"


async def test_the_cache_is_listed_with_escaped_names_by_what_is_below(chain_of: Any) -> None:
    async with Peer(script) as peer, chain_of(peer) as chain:
        await filled(chain)
        await chain.ask(dns.message.make_query(dns.name.Name([b"a\x1b[31m", b"odd", b"test", b""]), "A"))
        cache, now = chain.service.chain.cache, chain.service.now()
        found = {entry["name"]: entry for entry in cache_entries(cache, now)}
        assert set(found) == {"known.test.", "gone.test.", r"a\027\09131m.odd.test."}
        assert found["gone.test."]["type"] == "any" and found["gone.test."]["rcode"] == "NXDOMAIN"
        assert found["known.test."]["state"] == "fresh" and 58 <= found["known.test."]["left_s"] <= 60
        assert [entry["name"] for entry in cache_entries(cache, now, "odd.test")] == [r"a\027\09131m.odd.test."]


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_replies_are_counted_by_transport_and_rcode(by: str, chain_of: Any) -> None:
    async with Peer(script) as peer, chain_of(peer) as chain:
        for name in ("known.test", "known.test", "gone.test", "fails.test"):
            await chain.ask(query(name), by)
        counts = chain.service.replies[by]
        assert (counts[0], counts[2], counts[3], sum(counts)) == (2, 1, 1, 4)


# --- the query log ---------------------------------------------------------------------------------------------------


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [r.fields for r in caplog.records if r.name == "headrace.queries"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_no_query_is_logged_unless_it_is_asked_for(
    by: str, chain_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with Peer(script) as peer, chain_of(peer) as chain:
        await chain.ask(query("secret-diary.test"), by)
    assert "secret-diary" not in caplog.text and not fields(caplog)


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_a_logged_query_says_who_what_and_from_where(
    by: str, chain_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.queries")
    async with Peer(script) as peer, chain_of(peer, query_log="names") as chain:
        for _ in range(2):
            await chain.ask(query("Deep.Name.known.test"), by)
    first, second = fields(caplog)
    assert first["transport"] == by and first["name"] == "deep.name.known.test." and first["type"] == "A"
    assert first["source"].startswith("udp://") and second["source"] == "memory"
    assert first["client"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("client", "name", "said"),
    [
        ("198.51.100.77", "a.b.example.test", ("198.51.100.0/24", "*.example.test.")),
        ("2001:db8:1:2::3", "example.test", ("2001:db8:1::/48", "example.test.")),
        ("127.0.0.1", "test", ("127.0.0.1", "test.")),
        ("fe80::1%eth0", ".", ("fe80::/48", ".")),
    ],
)
def test_domains_alone_name_no_host_and_no_client(
    client: str, name: str, said: tuple[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headrace.queries")
    reply = dns.message.make_response(dns.message.make_query(name, "A")).to_wire()
    QueryLog("domains")("udp", client, reply)
    (line,) = fields(caplog)
    assert (line["client"], line["name"]) == said
