"""Ask a Redis that a fleet shares before the upstreams are asked, and never let it be in the way.

Theory: this stands where the upstreams stand and speaks as they do. A question waits WAIT_S for the store, then goes
upstream; what upstream says is written to the store by the way. Whatever is wrong with the store (gone, slow, full, lying)
costs one question WAIT_S at most, and after a few the breaker opens: nobody waits, and it is tried again after a while.

      question -> GET --value within WAIT_S, believable--> answer
                   +--none, late, lost, breaker open----> upstreams -> answer, SET

    breaker: closed --FAILS in a row--> open for 1, 2, 4 .. 60 s --dial, in the background--> closed

The dial is the only task; `close` cancels it.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from config.model import Secret, Zone
from resolver import wire as w
from resolver.errors import Malformed, UpstreamsFailed
from resolver.io.channel import words
from resolver.io.fetch import UpstreamReply, Upstreams
from resolver.io.resp import RespConnection
from resolver.outgoing import Outgoing, read
from resolver.shared_cache import kept_for_s, key_for, may_share, pack, unpack

WAIT_S = 0.004
FAILS = 5
DIAL_S = 1.0
BACKOFF_MAX_S = 60.0
SOURCE = "redis"

log = logging.getLogger("headrace.resolver")


@dataclass(frozen=True, slots=True)
class SharedReply:
    """An answer from the store. `encrypted` when TLS stands between us and it: only then its AD bit is kept."""

    wire: bytes
    encrypted: bool
    layout: w.Scan | None = None
    upstream: str = SOURCE
    took_s: float = 0.0


@dataclass(slots=True)
class Counts:
    hits: int = 0
    misses: int = 0
    late: int = 0
    refused: int = 0  # values that could not be believed
    stored: int = 0
    skipped: int = 0  # questions that the open breaker let pass


class SharedCache:
    """Implements `Upstreams` around `upstreams`. `wall`: seconds since the epoch, which a fleet has in common."""

    def __init__(
        self,
        url: Secret,
        upstreams: Upstreams,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float] = time.time,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url.reveal())
        self._host, self._port = parts.hostname or "", parts.port or 6379
        self._tls = (tls or ssl.create_default_context()) if parts.scheme == "rediss" else None
        self._user, self._password = unquote(parts.username or ""), unquote(parts.password or "")
        self._database = parts.path.strip("/") or "0"
        self._upstreams = upstreams
        self._clock = clock
        self._wall = wall
        self.counts = Counts()
        self._connection: RespConnection | None = None
        self._dialling: asyncio.Task[None] | None = None
        self._fails = 0
        self._opened = 0  # how often in a row the breaker opened
        self._closed_until = 0.0
        self._reason = ""
        self._ended = False

    # --- Upstreams ---------------------------------------------------------------------------------------------------

    async def ask(self, query: bytes, *, zone: Zone | None, deadline: float, avoid: str = "") -> UpstreamReply:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def heard(result: UpstreamReply | UpstreamsFailed) -> None:
            if not future.done():
                future.set_result(result)

        self.begin(read(query, pass_subnet=True), zone=zone, deadline=deadline, heard=heard, avoid=avoid)
        result: UpstreamReply | UpstreamsFailed = await future
        if isinstance(result, UpstreamsFailed):
            raise result
        return result

    def begin(
        self,
        out: Outgoing,
        *,
        zone: Zone | None,
        deadline: float,
        heard: Callable[[Any], None],
        avoid: str = "",
    ) -> None:
        connection = self._usable() if may_share(out) else None
        if connection is None:
            self._upstreams.begin(out, zone=zone, deadline=deadline, heard=heard, avoid=avoid)
            return
        key = key_for(out, zone.name if zone else "")
        if avoid:  # what is to be avoided may be what the store holds; a better answer takes its place
            self.go_upstream(out, zone, deadline, heard, key, avoid)
        else:
            _Look(self, connection, out, zone, deadline, heard, key).start()

    def _usable(self) -> RespConnection | None:
        if self._connection is None:
            self.counts.skipped += 1
            self._dial()
            return None
        return self._connection

    def go_upstream(
        self,
        out: Outgoing,
        zone: Zone | None,
        deadline: float,
        heard: Callable[[Any], None],
        key: bytes,
        avoid: str = "",
    ) -> None:
        def said(result: Any) -> None:
            if not isinstance(result, UpstreamsFailed):
                self._keep(key, result)
            heard(result)

        self._upstreams.begin(out, zone=zone, deadline=deadline, heard=said, avoid=avoid)

    def _keep(self, key: bytes, reply: UpstreamReply) -> None:
        if self._connection is None:
            return
        try:
            layout = reply.layout or w.scan(reply.wire)
        except Malformed:
            return
        keep_s = kept_for_s(reply.wire, layout)
        if keep_s > 0:
            self.counts.stored += 1
            value = pack(_bare(reply, layout), keep_s, self._wall())
            self._connection.send(_nothing, b"SET", key, value, b"PX", b"%d" % (keep_s * 1000))

    def believed(self, value: bytes | None, out: Outgoing) -> SharedReply | None:
        self._fails = 0
        if value is None:
            self.counts.misses += 1
            return None
        wire = unpack(value, out, self._wall())
        if wire is None:
            self.counts.refused += 1
            return None
        self.counts.hits += 1
        return SharedReply(wire, self._tls is not None)

    def was_late(self) -> None:
        self.counts.late += 1
        self._fails += 1
        if self._fails >= FAILS and self._connection is not None:
            self._connection.close(f"{FAILS} times in a row no reply in {WAIT_S * 1000:g} ms")

    # --- the connection ----------------------------------------------------------------------------------------------

    def _dial(self) -> None:
        if self._dialling is None and not self._ended and self._clock() >= self._closed_until:
            self._dialling = asyncio.ensure_future(self._dial_once())

    async def _dial_once(self) -> None:
        connection = RespConnection(self._lost)
        try:
            async with asyncio.timeout(DIAL_S):
                await asyncio.get_running_loop().create_connection(
                    lambda: connection, self._host, self._port, ssl=self._tls
                )
                await self._introduce(connection)
        except (OSError, TimeoutError) as exc:
            connection.close("")
            self._open_breaker(words(exc))
        else:
            self._connection, self._fails = connection, 0
            log.info("the shared DNS cache is in use")
        finally:
            self._dialling = None

    async def _introduce(self, connection: RespConnection) -> None:
        """Raises ConnectionError when the server does not take us."""
        if self._password:
            names = [name.encode() for name in (self._user, self._password) if name]
            await _command(connection, b"AUTH", *names)
        if self._database != "0":
            await _command(connection, b"SELECT", self._database.encode())
        await _command(connection, b"PING")

    def _lost(self, connection: RespConnection, reason: str) -> None:
        if connection is self._connection:
            self._connection = None
            self._open_breaker(reason)

    def _open_breaker(self, reason: str) -> None:
        if self._ended:
            return
        self._opened = 1 if self._clock() > self._closed_until + BACKOFF_MAX_S else self._opened + 1
        pause_s = min(2.0 ** (self._opened - 1), BACKOFF_MAX_S)
        self._closed_until = self._clock() + pause_s
        if reason != self._reason:
            log.warning("the shared DNS cache is not in use: %s", reason)
        self._reason = reason

    async def ready(self, within_s: float = DIAL_S) -> bool:
        """Dials now instead of at the first question; whether the store can be used."""
        self._dial()
        if self._dialling is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._dialling), within_s)
        return self._connection is not None

    def network_changed(self) -> None:
        """The connection may be dead, and what kept us from dialling is void."""
        self._closed_until, self._opened = 0.0, 0
        if self._connection is not None:
            self._connection.close("the network changed")
            self._closed_until = 0.0

    def stats(self) -> dict[str, int | str]:
        state = "in use" if self._connection is not None else "not in use"
        counts = self.counts
        return {
            "state": state,
            "reason": "" if self._connection is not None else self._reason,
            **{name: getattr(counts, name) for name in counts.__slots__},
        }

    async def close(self) -> None:
        self._ended = True
        if self._dialling is not None:
            self._dialling.cancel()
            with suppress(asyncio.CancelledError):
                await self._dialling
        if self._connection is not None:
            self._connection.close("closed by us")
            self._connection = None
            await asyncio.sleep(0)


class _Look:
    """One question that waits for the store: the reply or the clock, whichever is first, decides once."""

    __slots__ = ("_connection", "_deadline", "_heard", "_key", "_of", "_out", "_timer", "_zone")

    def __init__(
        self,
        of: SharedCache,
        connection: RespConnection,
        out: Outgoing,
        zone: Zone | None,
        deadline: float,
        heard: Callable[[Any], None],
        key: bytes,
    ) -> None:
        self._of, self._connection, self._out, self._zone = of, connection, out, zone
        self._deadline, self._heard, self._key = deadline, heard, key
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WAIT_S, self._on_late)
        self._connection.send(self._on_value, b"GET", self._key)

    def _on_value(self, value: bytes | None) -> None:
        if self._timer is None:
            return  # it was late, and somebody else is asked
        self._timer.cancel()
        self._timer = None
        reply = self._of.believed(value, self._out)
        if reply is not None:
            self._heard(reply)
        else:
            self._upstream()

    def _on_late(self) -> None:
        self._timer = None
        self._of.was_late()
        self._upstream()

    def _upstream(self) -> None:
        self._of.go_upstream(self._out, self._zone, self._deadline, self._heard, self._key)


async def _command(connection: RespConnection, *words: bytes) -> None:
    """Raises ConnectionError when the reply is an error."""
    future: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
    connection.send(lambda value: None if future.done() else future.set_result(value), *words)
    if await future is None:
        raise ConnectionError(f"{words[0].decode()}: {connection.complaint or 'no reply'}")


def _bare(reply: UpstreamReply, found: w.Scan) -> bytes:
    """The message without what was meant for us alone (our id, an OPT with cookies) and an AD that nobody vouches for."""
    wire = reply.wire
    if not reply.encrypted:
        wire = wire[:3] + bytes([wire[3] & ~w.AD & 255]) + wire[4:]
    if found.opt is None:
        return b"\0\0" + wire[2:]
    kept = found.opt.start  # what follows OPT goes too: additional records are a courtesy
    extra = found.opt_index - found.answers - found.authorities
    return b"\0\0" + wire[2:10] + max(0, extra).to_bytes(2) + wire[w.HEADER : kept]


def _nothing(value: bytes | None) -> None:
    pass
