"""Keep what happened: the last requests, counters and histograms, and a line in the log for each request.

Theory: `record` runs once for each request on the event loop, so it only appends. What is counted is counted later, some
hundred at a time, and lines for the log are made a batch at a time by `flush_log`.

Labels of series come from the configuration and from closed sets, and the number
of series has a hard bound: beyond it everything counts as "other".
"""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from json.encoder import encode_basestring as quote

from headrace.logs import LogOutput, redact, rfc3339
from proxy.waterfall import PARTS, Finished, RequestRecord

RING = 1000
"""Requests kept for `headrace requests`."""
UNCOUNTED = 256
"""Requests that wait to be counted, until somebody asks for the figures or there are so many."""
MAX_POOLS = 256
MAX_SERIES_OF_POOL = 1024
SUMS = ("retries", "bytes_in", "bytes_out", "reused", "resumed")
PENDING = 4096
"""Log lines waiting for the next flush; more than these in one interval are counted, not written."""
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

Labels = tuple[tuple[str, str], ...]
logger = logging.getLogger("headrace.requests")


class Histogram:
    """Counts of values by upper bound, Prometheus-shaped."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_S) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS_S, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, labels: Labels) -> Iterator[str]:
        running = 0
        for bound, count in zip((*BUCKETS_S, None), self.counts, strict=True):
            running += count
            bucket = (*labels, ("le", "+Inf" if bound is None else f"{bound:g}"))
            yield f"{name}_bucket{label_text(bucket)} {running}"
        yield f"{name}_sum{label_text(labels)} {self.total:.6f}"
        yield f"{name}_count{label_text(labels)} {running}"


class PoolFigures:
    """What is counted for one pool. At most MAX_SERIES_OF_POOL combinations of edge, outcome and status."""

    __slots__ = ("bytes_in", "bytes_out", "first_byte", "requests", "resumed", "retries", "reused", "wall")

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}
        self.retries = self.bytes_in = self.bytes_out = self.reused = self.resumed = 0
        self.first_byte = Histogram()
        self.wall = Histogram()

    def add(self, record: Finished) -> None:
        key = (record.edge, record.outcome, record.status // 100)
        if key not in self.requests and len(self.requests) >= MAX_SERIES_OF_POOL:
            key = ("other", record.outcome, record.status // 100)
        self.requests[key] = self.requests.get(key, 0) + 1
        self.bytes_in += record.bytes_in
        self.bytes_out += record.bytes_out
        self.reused += record.reused
        self.resumed += record.resumed
        self.retries += record.attempts - 1
        self.wall.add(record.wall_s)
        if (first_byte_s := record.first_byte_s) is not None:
            self.first_byte.add(first_byte_s)


def _nobody_flushes() -> None:
    """Until the daemon says who does."""


class Telemetry:
    """What the daemon knows about finished requests."""

    def __init__(self, ring: int = RING) -> None:
        self.recent: deque[Finished] = deque(maxlen=ring)
        self._pools: dict[str, PoolFigures] = {}
        self._uncounted: list[Finished] = []
        self._pending: list[Finished] = []
        self.unlogged = 0
        self.log_requests = True
        self.on_pending: Callable[[], None] = _nobody_flushes
        """Called when a first line waits for `flush_log`."""

    def record(self, record: Finished) -> None:
        """Take a finished request. Microseconds: see the module's theory."""
        self.recent.append(record)
        self._uncounted.append(record)
        if len(self._uncounted) >= UNCOUNTED:
            self._count()
        if not self.log_requests:
            return
        if not self._pending:
            self.on_pending()
        if len(self._pending) < PENDING:
            self._pending.append(record)
        else:
            self.unlogged += 1

    def _count(self) -> None:
        uncounted, self._uncounted = self._uncounted, []
        for record in uncounted:
            pool = self._pools.get(record.pool) or self._new_pool(record.pool)
            pool.add(record)

    def _new_pool(self, name: str) -> PoolFigures:
        name = name or "none"
        if name not in self._pools and len(self._pools) >= MAX_POOLS:
            name = "other"
        return self._pools.setdefault(name, PoolFigures())

    def last(self, count: int) -> list[RequestRecord]:
        """The newest first."""
        return [record.whole() for record in islice(reversed(self.recent), count)]

    def flush_log(self, output: LogOutput, *, as_json: bool) -> None:
        """Write the pending requests, one line each."""
        pending, self._pending = self._pending, []
        line = json_line if as_json else text_line
        if pending:
            output.write("".join(line(record.whole()) + "\n" for record in pending))
        if self.unlogged:
            unlogged, self.unlogged = self.unlogged, 0
            logger.warning("%d requests were not logged: there were more than %d at once", unlogged, PENDING)

    def prometheus(self) -> Iterator[str]:
        """Lines of the text format 0.0.4."""
        self._count()
        yield "# HELP headrace_requests_total Finished requests."
        yield "# TYPE headrace_requests_total counter"
        for pool, figures in self._pools.items():
            for (edge, outcome, hundreds), count in figures.requests.items():
                status = f"{hundreds}xx" if hundreds else "none"
                labels = (("pool", pool), ("edge", edge or "none"), ("outcome", outcome), ("status", status))
                yield f"headrace_requests_total{label_text(labels)} {count}"
        for name in SUMS:
            yield f"# TYPE headrace_{name}_total counter"
            for pool, figures in self._pools.items():
                if amount := getattr(figures, name):
                    yield f"headrace_{name}_total{label_text((('pool', pool),))} {amount}"
        for name, which in (("first_byte", "first_byte"), ("request", "wall")):
            yield f"# TYPE headrace_{name}_seconds histogram"
            for pool, figures in self._pools.items():
                yield from getattr(figures, which).lines(f"headrace_{name}_seconds", (("pool", pool),))


def gauges(name: str, kind: str, values: Iterable[tuple[Labels, float]]) -> Iterator[str]:
    """A family of plain values in the text format."""
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{label_text(labels)} {value:.12g}"


def label_text(labels: Labels) -> str:
    """`{pool="a",edge="b"}`, escaped as the text format wants it."""
    if not labels:
        return ""
    quoted = (value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') for _, value in labels)
    return "{" + ",".join(f'{name}="{value}"' for (name, _), value in zip(labels, quoted, strict=True)) + "}"


def record_fields(record: RequestRecord) -> dict[str, object]:
    """A request for JSON: the path without query, times in seconds."""
    return {
        "id": record.id,
        "time": rfc3339(record.started_at),
        "method": record.method,
        "host": record.host,
        "path": redact(record.path),
        "pool": record.pool,
        "edge": record.edge,
        "client_version": record.client_version,
        "edge_version": record.edge_version,
        "status": record.status,
        "outcome": record.outcome,
        "detail": redact(record.detail),
        "wall_s": round(record.wall_s, 6),
        "parts": {name: round(record.parts[name], 6) for name in PARTS if name in record.parts},
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
        "retries": record.retries,
        "reused": record.reused,
        "resumed": record.resumed,
        "events": record.events,
        "incomplete": record.incomplete,
        "error_in_band": record.error_in_band,
        "first_token_s": _rounded(record.first_token_s),
        "last_token_s": _rounded(record.last_token_s),
        "usage": dict(record.usage),
    }


WELL = ("ok", "client cancelled")


def json_line(record: RequestRecord) -> str:
    """One object, as `record_fields` has it, written by hand: json.dumps of the same costs 15 us a request, this 6."""
    level = "info" if record.outcome in WELL else "warning"
    parts = ", ".join([f'"{name}": {seconds:.6f}' for name, seconds in record.parts.items()])
    usage = f', "usage": {json.dumps(record.usage)}' if record.usage else ""
    tokens = ""
    if (first := record.first_token_s) is not None and (last := record.last_token_s) is not None:
        tokens = f', "first_token_s": {first:.6f}, "last_token_s": {last:.6f}'
    trouble = f', "detail": {quote(redact(record.detail))}' if record.detail else ""
    return (
        f'{{"time": "{rfc3339(record.started_at)}", "level": "{level}", "logger": "requests", "message": "request", '
        f'"id": "{record.id}", "method": {quote(record.method)}, "host": {quote(record.host)}, '
        f'"path": {quote(redact(record.path))}, "pool": "{record.pool}", "edge": "{record.edge}", '
        f'"client_version": "{record.client_version}", "edge_version": "{record.edge_version}", '
        f'"status": {record.status}, "outcome": "{record.outcome}", "wall_s": {record.wall_s:.6f}, '
        f'"parts": {{{parts}}}, "bytes_in": {record.bytes_in}, "bytes_out": {record.bytes_out}, '
        f'"retries": {record.retries}, "reused": {_word(record.reused)}, "resumed": {_word(record.resumed)}, '
        f'"events": {record.events}, "incomplete": {_word(record.incomplete)}, '
        f'"error_in_band": {_word(record.error_in_band)}{trouble}{usage}{tokens}}}'
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _word(value: bool) -> str:
    return "true" if value else "false"


def text_line(record: RequestRecord) -> str:
    """`12:30:01.123 info requests: POST openai/e1 /v1/chat 200 ok 812 ms (connect 20, wait 700, answer 92) h2>h3`"""
    stamp = rfc3339(record.started_at)[11:23]
    level = "info" if record.outcome in WELL else "warning"
    parts = ", ".join([f"{name} {seconds * 1000:.0f}" for name, seconds in record.parts.items() if seconds >= 0.0005])
    tail = f" retries={record.retries}" if record.retries else ""
    tail += f" ({quote(redact(record.detail))[1:-1]})" if record.detail else ""
    return (
        f"{stamp} {level:7} requests: {record.method} {record.pool or '-'}/{record.edge or '-'} "
        f"{quote(redact(record.path))[1:-1]} {record.status or '-'} {record.outcome} "
        f"{record.wall_s * 1000:.0f} ms ({parts}) {record.client_version}>{record.edge_version or '-'}{tail}"
    )
