"""What the admin interface may see and ask of the daemon, as plain JSON types."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING

from headrace.admin import Refused
from headrace.commands.version import own_version
from headrace.resolver_metrics import resolver_lines
from headrace.telemetry import gauges, record_fields
from resolver.io.inspection import Explained, cache_entries, explain_answer
from resolver.io.lookup import Resolved

if TYPE_CHECKING:
    from headrace.daemon import Daemon

MAX_NAME = 255


class DaemonOperations:
    """Implements `headrace.admin.Operations`."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon, self._parts = daemon, daemon.parts

    def status(self) -> dict[str, object]:
        daemon = self._daemon
        return {
            "headrace": own_version(),
            "pid": os.getpid(),
            "uptime_s": round(time.time() - daemon.started_at, 3),
            "config_file": str(daemon.loaded.file) if daemon.loaded.file else None,
            "state_dir": str(daemon.config.state_dir),
            "ca_file": self._parts.identity.certificate.ca_file if self._parts.identity.certificate else "",
            "listeners": [str(listen) for listen in self._parts.listeners.addresses],
            "pools": [pool.name for pool in daemon.config.pools],
            "active_requests": self._parts.gateway.active,
            "connections": self._parts.gateway.connections,
            "portal_suspected": self._parts.links.portal,
            "link_zones": [zone.name for zone in self._parts.links.zones],
            "notes": [str(note) for note in daemon.loaded.notes],
        }

    def edges(self) -> dict[str, object]:
        return {"edges": [asdict(view) for view in self._parts.edges.views()]}

    def requests(self, last: int) -> dict[str, object]:
        return {"requests": [record_fields(record) for record in self._daemon.telemetry.last(last)]}

    def tickets(self) -> dict[str, object]:
        return {
            **asdict(self._parts.ring.snapshot()),
            "h3": self._handshakes("h3"),
            "doq": self._handshakes("quic"),
        }

    def _handshakes(self, scheme: str) -> dict[str, int]:
        quic = [found.listener for found in self._parts.listeners.quic if found.scheme == scheme and found.listener]
        return {
            "full": sum(listener.full_handshakes for listener in quic),
            "resumed": sum(listener.resumed_handshakes for listener in quic),
        }

    def resolver(self) -> dict[str, object]:
        upstreams = [asdict(view) for view in self._parts.upstreams.snapshot()]
        shared = self._parts.shared.stats() if self._parts.shared else None
        return {"counts": self._parts.resolver.stats(), "upstreams": upstreams, "shared_cache": shared}

    async def rotate_tickets(self) -> dict[str, object]:
        current = await self._parts.ring.rotate()
        return {"current": current, **self.tickets()}

    def flush_resolver(self, name: str | None) -> dict[str, object]:
        try:
            return {"flushed": self._parts.resolver.flush(name)}
        except ValueError as exc:
            raise Refused(400, str(exc)) from exc

    async def query(self, name: str, rdtype: str, *, explained: bool = False) -> dict[str, object]:
        if len(name) > MAX_NAME or len(rdtype) > 16:
            raise Refused(400, f"a name has at most {MAX_NAME} characters")
        try:
            if explained:
                return explained_fields(name, rdtype, await self._explained(name, rdtype))
            return resolved_fields(name, rdtype, await self._parts.resolver.resolve(name, rdtype))
        except ValueError as exc:
            raise Refused(400, str(exc)) from exc

    async def _explained(self, name: str, rdtype: str) -> Explained:
        return await explain_answer(self._parts.resolver, name, rdtype, upstreams=self._parts.upstreams)

    def cache(self) -> dict[str, object]:
        cache, stats = self._daemon.config.resolver.cache, self._parts.resolver.stats()
        shared = self._parts.shared.stats() if self._parts.shared else None
        bounds = {"entries": cache.entries, "bytes": cache.size_bytes}
        return {"counts": stats, "bounds": bounds, "shared_cache": shared}

    def cache_entries(self, below: str, limit: int) -> dict[str, object]:
        resolver = self._parts.resolver
        try:
            found = list(islice(cache_entries(resolver.chain.cache, resolver.now(), below), limit + 1))
        except ValueError as exc:
            raise Refused(400, str(exc)) from exc
        return {"entries": found[:limit], "more": len(found) > limit}

    async def reload(self) -> dict[str, object]:
        return asdict(await self._daemon.reload())

    def metrics(self) -> str:
        lines = [*self._daemon.telemetry.prometheus(), *self._edge_lines(), *self._own_lines()]
        return "\n".join(lines) + "\n"

    def _edge_lines(self) -> Iterator[str]:
        views = self._parts.edges.views()
        labels = [(("pool", view.pool), ("edge", view.id)) for view in views]
        for name, values in (
            ("active", [view.active for view in views]),
            ("live_weight", [view.live_weight for view in views]),
            ("usable", [float(view.state in ("healthy", "degraded")) for view in views]),
            ("rtt_seconds", [(view.rtt_ms or 0.0) / 1000 for view in views]),
        ):
            yield from gauges(f"headrace_edge_{name}", "gauge", zip(labels, values, strict=True))

    def _own_lines(self) -> Iterator[str]:
        daemon, tickets = self._daemon, self._parts.ring.snapshot()
        yield from gauges(
            "headrace_tls_handshakes_total",
            "counter",
            [((("resumed", "no"),), tickets.full), ((("resumed", "yes"),), tickets.resumed)],
        )
        yield from resolver_lines(self._parts.resolver, self._parts.upstreams, self._parts.shared)
        for name, value in self._parts.resolver.stats().items():
            yield from gauges(f"headrace_resolver_{name}", "gauge", [((), float(value))])
        yield from gauges("headrace_active_requests", "gauge", [((), self._parts.gateway.active)])
        yield from gauges("headrace_connections", "gauge", [((), self._parts.gateway.connections)])
        yield from gauges("headrace_log_lines_dropped_total", "counter", [((), daemon.log_lines_dropped)])
        yield from gauges("headrace_start_time_seconds", "gauge", [((), daemon.started_at)])


def explained_fields(name: str, rdtype: str, explained: Explained) -> dict[str, object]:
    """`resolved_fields`, with the steps of the chain and the upstreams that were asked, times from the first of them."""
    begin = explained.attempts[0].asked_at if explained.attempts else 0.0
    return {
        **resolved_fields(name, rdtype, explained.resolved),
        "steps": [step._asdict() for step in explained.steps],
        "attempts": [
            {
                "upstream": attempt.upstream,
                "after_s": round(attempt.asked_at - begin, 6),
                "took_s": round(attempt.took_s, 6) if attempt.said else None,
                "said": attempt.said or "not heard yet",
            }
            for attempt in explained.attempts
        ],
    }


def resolved_fields(name: str, rdtype: str, resolved: Resolved) -> dict[str, object]:
    """An answer for `headrace query`, records in presentation form."""
    rrsets = resolved.rrsets or resolved.authority
    return {
        "name": name,
        "type": rdtype.upper(),
        "rcode": resolved.rcode,
        "records": [line for rrset in rrsets for line in rrset.to_text().splitlines()],
        "ttl_s": resolved.ttl_s,
        "source": resolved.source,
        "took_s": round(resolved.took_s, 6),
        "reasons": list(resolved.reasons),
    }
