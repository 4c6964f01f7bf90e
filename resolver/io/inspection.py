"""Look into a running resolver for people: why an answer is what it is, and what the cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resolver import wire as w
from resolver.cache import Cache, Entry, is_denial, name_of, scope_of, type_of
from resolver.explain import Step, explain
from resolver.io.fetch import question_for
from resolver.io.lookup import Resolved
from resolver.io.run import WATCH, Attempted
from resolver.io.upstream_set import UpstreamSet
from resolver.outgoing import fold

if TYPE_CHECKING:
    from resolver.io.service import ResolverService

MOST_ATTEMPTS = 64


@dataclass(frozen=True, slots=True)
class Explained:
    """An answer, the steps to it, and the upstreams that were asked on the way."""

    resolved: Resolved
    steps: tuple[Step, ...]
    attempts: tuple[Attempted, ...]


async def explain_answer(
    service: ResolverService, name: str, rdtype: str, *, upstreams: UpstreamSet | None = None
) -> Explained:
    """Resolves as any client would, and says how. Raises ValueError for what is no name or type.

    Of a question that somebody else asked already, the attempts for the name itself are seen where its `upstreams` are known,
    not those for its keys.
    """
    question = question_for(w.name_from_text(name), w.type_from_text(rdtype))
    steps = explain(service.chain, question, service.now())
    seen: list[Attempted] = []

    def watcher(attempt: Attempted) -> None:
        if len(seen) < MOST_ATTEMPTS:
            seen.append(attempt)

    token = WATCH.set(watcher)
    if upstreams is not None:
        upstreams.watch(fold(question.section), watcher)
    try:
        resolved = await service.resolve(name, rdtype)
    finally:
        WATCH.reset(token)
    return Explained(resolved, tuple(steps), tuple(_once(seen)))


def _once(seen: list[Attempted]) -> Iterator[Attempted]:
    """Those that were heard by what they said; those still waited for as asked."""
    heard = {(attempt.upstream, attempt.asked_at) for attempt in seen if attempt.said}
    for attempt in seen:
        if attempt.said or (attempt.upstream, attempt.asked_at) not in heard:
            yield attempt


def cache_entries(cache: Cache, now: float, below: str = "") -> Iterator[dict[str, object]]:
    """What is kept, at and below a name; names are escaped. Raises ValueError for what is no name."""
    suffix = w.name_from_text(below) if below else w.ROOT
    for entry in cache:
        name = name_of(entry.key)
        if entry.answer is not None and (suffix == w.ROOT or suffix in w.suffixes(name)):
            yield _fields(entry, name, now)


def _fields(entry: Entry, name: bytes, now: float) -> dict[str, object]:
    assert entry.answer is not None
    scope = scope_of(entry.key)
    return {
        "name": w.name_to_text(name),
        "type": "any" if is_denial(entry.key) else w.type_to_text(type_of(entry.key)),
        "zone": w.name_to_text(scope) if scope else "",
        "rcode": w.rcode_to_text(entry.answer.rcode),
        "state": "fresh" if now < entry.expires_at else "stale",
        "age_s": round(now - entry.stored_at, 1),
        "left_s": round(entry.expires_at - now, 1),
        "hits": entry.hits,
        "bytes": entry.size,
        "source": entry.source,
    }
