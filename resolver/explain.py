"""Say, step by step, how a question would be answered now: the chain of `resolver/chain.py`, read aloud.

Theory: the chain must be quick and says nothing; this walks the same steps in the same order for one question of a person,
changes no counter and no entry, and says what each step saw. It ends with the step that decides. A test holds the two
together: the step that decides here is the source of the answer there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from resolver import wire as w
from resolver.cache import Entry, key_of
from resolver.chain import Chain
from resolver.question import Question


class Step(NamedTuple):
    """`decides`: the answer comes from here."""

    name: str
    said: str
    decides: bool = False


def explain(chain: Chain, question: Question, now: float) -> list[Step]:
    """The steps up to the one that decides; the last one is `upstream` when nothing here does."""
    steps = []
    for step in _steps(chain, question, now):
        steps.append(step)
        if step.decides:
            break
    return steps


def _steps(chain: Chain, question: Question, now: float) -> Iterator[Step]:
    if question.type == w.ANY:
        yield Step("any", "ANY is refused with a small HINFO (RFC 8482)", True)
    local = chain.local.answer(question)
    if local is None:
        yield Step("local", "no hosts line and no record of the configuration has this name")
    elif local.unfinished:
        target = w.name_to_text(local.unfinished)
        yield Step("local", f"a record of the configuration leads to {target}, which is asked upstream")
        yield Step("upstream", _who(chain, local.unfinished), True)
    else:
        yield Step("local", "a hosts line or a record of the configuration answers", True)
    special = chain.zones.stays(question)
    yield Step("special", "a name that never leaves this machine" if special else "may leave", special is not None)
    blocked = chain.blocklist.blocks(question.name)
    count = len(chain.blocklist)
    yield Step("blocklist", "blocked" if blocked else f"not among {count} names", blocked)
    scope, _ = chain.zones.zone_of(question.name)
    yield from _cached(chain, question, now, scope)
    failure = chain.failures.find(key_of(question, scope), now)
    yield Step("failures", "failed a moment ago and is not asked again yet" if failure else "none", failure is not None)
    yield Step("upstream", _who(chain, question.name), True)


def _cached(chain: Chain, question: Question, now: float, scope: bytes) -> Iterator[Step]:
    fresh = chain.cache.fresh(question, now, scope)
    if fresh is not None:
        ahead = chain.foresight.is_ahead(key_of(question, scope))
        yield Step("cache", _entry(fresh, now) + (", asked for before anybody did" if ahead else ""), True)
    above = chain.cache.denied_above(question, now, scope)
    if above is not None:
        yield Step("cache", f"a name above it does not exist: {_entry(above, now)}", True)
    stale = chain.cache.stale(question, now, scope)
    if stale is None:
        yield Step("cache", "nothing")
        return
    at_once = now < stale.recheck_at
    what = "given at once, a refresh failed" if at_once else "kept in case that nobody answers in time"
    yield Step("stale" if at_once else "cache", f"expired {now - stale.expires_at:.0f} s ago, {what}", at_once)


def _entry(entry: Entry, now: float) -> str:
    left_s, age_s = entry.expires_at - now, now - entry.stored_at
    return (
        f"from {entry.source or 'an upstream'} {age_s:.0f} s ago, good for {left_s:.0f} s more, used {entry.hits} times"
    )


def _who(chain: Chain, name: bytes) -> str:
    scope, zone = chain.zones.zone_of(name)
    if zone is None:
        return "nobody here knows: the public upstreams are asked"
    urls = ", ".join(upstream.url for upstream in zone.upstreams)
    return f"nobody here knows: the zone {w.name_to_text(scope)} is asked of {urls}"
