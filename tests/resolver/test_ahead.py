"""What is foreseen is asked upstream for real: between a client's socket and a peer's, how often the peer hears a question."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from config.model import DnsCache, Zone
from resolver.explain import explain
from resolver.io.clock import now as boottime
from resolver.io.fetch import question_for
from resolver.wire import name_from_text
from tests.patience import no_hang
from tests.peers.dns import Peer
from tests.resolver.stage import EVERY_CLIENT, GOOD_IP, Chain, good, ips, query

FORESEEING = DnsCache(persist=False)
PAGE = ("www.test", "cdn.test", "img.test")


class Skewed:
    """The machine's clock, and what was added to it."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def __call__(self) -> float:
        return boottime() + self.ahead_s


def heard(peer: Peer) -> set[str]:
    """A loaded machine may send a question twice: how many went out is counted where they begin."""
    return {ask.name.rstrip(".").lower() for ask in peer.asks}


def begun(chain: Chain) -> int:
    return int(chain.service.stats()["upstream"])


def at_rest(chain: Chain, after: int) -> bool:
    return begun(chain) == after and not chain.service.stats()["in_flight"]


async def until(condition: Callable[[], bool]) -> None:
    async with no_hang():
        while not condition():
            await asyncio.sleep(0.005)


async def load(chain: Chain, by: str = "udp") -> None:
    for name in PAGE:
        assert ips(await chain.ask(query(name), by)) == GOOD_IP


@pytest.mark.parametrize("by", EVERY_CLIENT)
async def test_a_page_that_expired_is_refreshed_when_its_first_name_is_asked(by: str, chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        await load(chain, by)
        clock.ahead_s += 100
        await chain.ask(query("www.test"), by)
        await until(lambda: at_rest(chain, 6))
        peer.asks.clear()
        await load(chain, by)
        assert begun(chain) == 6 and not peer.asks, "whoever asks now finds a fresh answer"
        stats = chain.service.stats()
        assert (stats["foreseen"], stats["stale"]) == (2, 0)
        await until(lambda: chain.service.stats()["foreseen_used"] == 2)


@pytest.mark.parametrize("by", ["udp", "https"])
async def test_a_first_name_that_is_still_fresh_leads_as_well(by: str, chain_of: Any) -> None:
    """Its reply is ready, and is given by the loop that reads datagrams, which parses nothing."""

    async def script(ask: Any) -> None:
        ask.answer(ask.reply("3600 A 198.51.100.1" if ask.name.lower().startswith("www") else "60 A 198.51.100.1"))

    clock = Skewed()
    async with Peer(script) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        await load(chain, by)
        await chain.ask(query("www.test"), by)
        peer.asks.clear()
        clock.ahead_s += 100
        await chain.ask(query("www.test"), by)
        await until(lambda: at_rest(chain, 5))
        assert heard(peer) == {"cdn.test", "img.test"}


async def test_what_comes_at_regular_intervals_is_asked_for_shortly_before(chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        for _ in range(4):
            await chain.ask(query("poll.test"))
            clock.ahead_s += 100
        clock.ahead_s -= 4
        await chain.ask(query("other.test"))  # a clock that jumped is noticed with the next question
        await until(lambda: at_rest(chain, 6))
        clock.ahead_s += 4
        assert ips(await chain.ask(query("poll.test"))) == GOOD_IP
        assert begun(chain) == 6


async def test_the_timer_refreshes_a_poll_without_any_other_question(chain_of: Any) -> None:
    async def script(ask: Any) -> None:
        ask.answer(ask.reply("1 A 198.51.100.1"))

    clock = Skewed()
    async with Peer(script) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        for _ in range(5):
            await chain.ask(query("poll.test"))
            clock.ahead_s += 3
        clock.ahead_s -= 3
        peer.asks.clear()
        await until(lambda: heard(peer) == {"poll.test"})


async def test_a_refresh_is_no_question_and_does_not_feed_itself(chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        await load(chain)
        clock.ahead_s += 100
        await chain.ask(query("www.test"))
        await until(lambda: at_rest(chain, 6))
        queries = chain.service.stats()["queries"]
        clock.ahead_s += 1000  # longer than any interval that was seen: nothing is expected by itself
        await chain.ask(query("stranger.test"))
        await chain.ask(query("stranger.test"))
        assert begun(chain) == 7
        assert chain.service.stats()["queries"] == queries + 2


@pytest.mark.parametrize("cache", [DnsCache(persist=False, prefetch=False), DnsCache(persist=False, serve_stale_s=0.0)])
async def test_without_prefetch_or_without_old_answers_nothing_is_foreseen(cache: DnsCache, chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=cache, clock=clock) as chain:
        await load(chain)
        clock.ahead_s += 100
        await chain.ask(query("www.test"))
        assert begun(chain) == 4
        assert len(chain.service.chain.foresight) == 0


async def test_flushing_forgets_what_was_learned(chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        await load(chain)
        await until(lambda: len(chain.service.chain.foresight) > 0)
        chain.service.flush()
        assert len(chain.service.chain.foresight) == 0


async def test_a_companion_that_belongs_to_a_zone_today_is_not_asked_of_the_public(chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, Peer(good) as private, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        await load(chain)
        chain.reconfigure(zones=(Zone("cdn.test", (private.upstream,)),))
        clock.ahead_s += 100
        peer.asks.clear()
        await chain.ask(query("www.test"))
        await until(lambda: at_rest(chain, 5))
        assert heard(peer) == {"www.test", "img.test"} and not private.asks


async def test_an_upstream_that_fails_leaves_companions_as_they_are(chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=FORESEEING, clock=clock, timeout_s=0.3) as chain:
        await load(chain)
        clock.ahead_s += 100
        peer.dark = True
        await chain.ask(query("www.test"))
        await until(lambda: at_rest(chain, 6))
        peer.dark = False
        clock.ahead_s += 31
        assert ips(await chain.ask(query("cdn.test"))) == GOOD_IP


async def test_people_see_that_an_answer_was_asked_for_before_anybody_did(chain_of: Any) -> None:
    clock = Skewed()
    async with Peer(good) as peer, chain_of(peer, cache=FORESEEING, clock=clock) as chain:
        for name in PAGE:
            await chain.service.resolve(name, "A")
        clock.ahead_s += 100
        await chain.service.resolve("www.test", "A")
        await until(lambda: at_rest(chain, 6))

        def said() -> str:
            question = question_for(name_from_text("cdn.test"), 1)
            return explain(chain.service.chain, question, chain.service.now())[-1].said

        assert "before anybody did" in said()
        await chain.service.resolve("cdn.test", "A")
        await until(lambda: "before anybody did" not in said())
