"""Tell Prometheus of the resolver: replies by transport and rcode, answers by source, each upstream.

Labels come from closed sets and from the configuration: no name and no client's address is ever one.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.telemetry import Labels, gauges
from resolver.io.service import ResolverService
from resolver.io.shared_cache import SharedCache
from resolver.io.upstream_set import UpstreamSet, UpstreamView
from resolver.wire import rcode_to_text

SOURCES = ("memo", "cache", "stale", "local", "policy", "failed", "upstream")


def resolver_lines(resolver: ResolverService, upstreams: UpstreamSet, shared: SharedCache | None) -> Iterator[str]:
    """Lines of the text format 0.0.4."""
    replies = [
        ((("transport", transport), ("rcode", rcode_to_text(rcode))), float(count))
        for transport, counts in sorted(resolver.replies.items())
        for rcode, count in enumerate(counts)
        if count
    ]
    yield from gauges("headrace_dns_replies_total", "counter", replies)
    stats = resolver.stats()
    answers = [((("source", source),), float(stats[source])) for source in SOURCES]
    yield from gauges("headrace_dns_answers_total", "counter", answers)
    yield from _upstream_lines(upstreams.snapshot())
    if shared is not None:
        counts = [
            ((("result", name),), float(value)) for name, value in shared.stats().items() if isinstance(value, int)
        ]
        yield from gauges("headrace_dns_shared_cache_total", "counter", counts)


def _upstream_lines(views: list[UpstreamView]) -> Iterator[str]:
    labels: list[Labels] = [(("upstream", view.url),) for view in views]
    for name, kind, values in (
        ("asked_total", "counter", [view.asked for view in views]),
        ("failed_total", "counter", [view.failed for view in views]),
        ("ignored_total", "counter", [view.ignored for view in views]),
        ("rtt_seconds", "gauge", [view.rtt_s or 0.0 for view in views]),
        ("down", "gauge", [float(view.state == "down") for view in views]),
    ):
        yield from gauges(f"headrace_dns_upstream_{name}", kind, zip(labels, values, strict=True))
