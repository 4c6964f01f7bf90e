"""Open one connection to an edge: find its addresses, race them, speak TLS, choose the version.

Theory: addresses are raced first (`eyeballs`) and TLS starts on the socket that won, so that the time of the TCP handshake
and that of TLS are known apart. QUIC, where it is expected, gets a head start before TCP begins; the loser of that race
is left to end by itself, because both what it proves and the connection are worth having.

      resolve ─► QUIC expected? ── no ──► race addresses ─► TLS ─► h1 or h2 by ALPN
                      └─ yes ─► QUIC, 200 ms later TCP beside it; first one wins, the other is adopted late

Who may cancel: `EdgeConnections` owns the task of each dial and cancels it when it closes. Its timeout covers all of
it. A loser that ends late is owned by `Dialler` (`strays`) and cancelled by `Dialler.close`.

Rules for editing: 1. every failure names the place and what was seen there; 2. certificates are always verified;
3. an address is dialled as a literal: the system's resolver is never asked.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, Protocol, cast

from config.model import Edge
from proxy.io.eyeballs import Connected, DialError, connect_first, place_of
from proxy.io.rims import DialMarks, EdgeConnection
from proxy.messages import Abort, Cause, Party, Stage
from proxy.reach import Reach
from resolver.endpoints import Endpoints
from resolver.errors import ResolverError
from resolver.io.tls_client import ResumingContext, client_context, was_resumed

SHUTDOWN_S = 2.0
"""What a dial that nobody wants any more may take to end its half-made TLS; the loop's own 30 s would hold a socket each."""
FIXED_TTL_S = 86_400.0  # of an address that the configuration names


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a dial waits before it tries the next thing; seconds."""

    step_s: float = 0.250  # RFC 8305 8, "Connection Attempt Delay"
    quic_head_start_s: float = 0.200  # below the 300 ms that blocked UDP may cost the first request
    quic_timeout_s: float = 3.0


class Resolves(Protocol):
    """What a dial asks of the resolver. Raises `resolver.errors.ResolverError`."""

    async def endpoints(self, host: str, port: int) -> Endpoints: ...


def _h1() -> asyncio.Protocol:
    from proxy.io.outbound_h1 import H1EdgeConnection

    return H1EdgeConnection()


def _h2() -> asyncio.Protocol:
    from proxy.io.outbound_h2 import H2EdgeConnection

    connection: asyncio.Protocol = H2EdgeConnection()
    return connection


class QuicDialler:
    """Dials QUIC to one edge and keeps its tickets. The library is imported at the first dial: it costs 100 ms."""

    def __init__(self) -> None:
        self._sessions: Any = None

    async def __call__(self, address: str, port: int, edge: Edge, timeout_s: float) -> EdgeConnection:
        from proxy.io.outbound_quic import QuicSessions, dial_quic

        if self._sessions is None:
            self._sessions = QuicSessions()
        return await dial_quic(
            address,
            port,
            server_name=edge.tls_name,
            ca_file=edge.ca_file,
            timeout_s=timeout_s,
            sessions=self._sessions,
        )


@dataclass(frozen=True, slots=True)
class Rims:
    """Who speaks which version. Loaded when first needed."""

    h1: Callable[[], asyncio.Protocol] = _h1
    h2: Callable[[], asyncio.Protocol] = _h2
    quic: Callable[[str, int, Edge, float], Awaitable[EdgeConnection]] = field(default_factory=QuicDialler)


@dataclass(slots=True)
class Dialled:
    """A connection that is ready for its first exchange. `transport` is None for QUIC."""

    connection: EdgeConnection
    transport: asyncio.Transport | None
    marks: DialMarks


def failed_dial(exc: BaseException, place: str) -> Abort:
    """What a failure while dialling means, in the words of an exchange that never began."""
    cause, said = _reading(exc)
    return Abort(Party.EDGE, Stage.CONNECT, cause, f"{place}: {said}" if place else said, unprocessed=True)


def _reading(exc: BaseException) -> tuple[Cause, str]:
    if isinstance(exc, ssl.SSLCertVerificationError):
        return Cause.BROKEN, f"certificate verify failed: {exc.verify_message.rstrip('.').lower()}"
    if isinstance(exc, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
        return Cause.LOST, "closed during the handshake"
    if isinstance(exc, ssl.SSLError):
        return Cause.BROKEN, (exc.reason or str(exc)).replace("_", " ").lower()
    if isinstance(exc, TimeoutError):
        return Cause.TIMED_OUT, "no answer in time"
    if isinstance(exc, OSError) and exc.errno:
        return Cause.LOST, os.strerror(exc.errno).lower()
    return Cause.LOST, str(exc) or "closed during the handshake"


class _Negotiating(asyncio.Protocol):
    """Stands in until ALPN is known, then hands the transport to the rim that it names, before any byte arrives."""

    def __init__(self, choose: Callable[[str | None], asyncio.Protocol | None]) -> None:
        self._choose = choose
        self.alpn: str | None = None
        self.connection: asyncio.Protocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        tls = transport.get_extra_info("ssl_object")
        self.alpn = tls.selected_alpn_protocol() if tls is not None else None
        self.connection = self._choose(self.alpn)
        if self.connection is None:
            cast(asyncio.Transport, transport).abort()
            return
        transport.set_protocol(self.connection)
        self.connection.connection_made(transport)


class Dialler:
    """Dials one edge. Keeps its TLS contexts, and with them the sessions to resume."""

    def __init__(
        self,
        edge: Edge,
        *,
        resolver: Resolves,
        reach: Reach,
        clock: Callable[[], float],
        rims: Rims | None = None,
        race_quic: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self.edge = edge
        self._pace = pace or Pace()
        self._race_quic = race_quic
        self._resolver, self._reach, self._clock = resolver, reach, clock
        self._rims = rims or Rims()
        self._contexts: dict[bool, asyncio.Future[ResumingContext]] = {}
        self.strays: set[asyncio.Task[Dialled]] = (
            set()
        )  # races lost, not yet over; at most one QUIC and one TCP each dial
        self.found: Endpoints | None = None
        """The last answer of the resolver."""
        self.on_stray: Callable[[Dialled], None] = _close_stray

    @property
    def is_fixed(self) -> bool:
        """Whether no look-up is needed: addresses are configured, or the host is one."""
        return bool(self.edge.addresses) or _is_literal(self.edge.host)

    async def endpoints(self) -> Endpoints:
        """Where to dial now. Raises DialError."""
        edge = self.edge
        if self.is_fixed:
            return Endpoints(edge.addresses or (edge.host,), edge.port, (), FIXED_TTL_S)
        try:
            self.found = await self._resolver.endpoints(edge.host, edge.port)
        except (ResolverError, OSError) as exc:
            raise DialError(failed_dial(exc, "resolve")) from exc
        return self.found

    async def dial(self, timeout_s: float, *, h1_only: bool = False) -> Dialled:
        """A connection, ready to open legs on. Raises DialError; `timeout_s` covers all of it."""
        edge, place = self.edge, [f"resolve {self.edge.host}"]
        try:
            async with asyncio.timeout(timeout_s):
                started = self._clock()
                found = await self.endpoints()
                resolve_s = 0.0 if self.is_fixed else self._clock() - started
                dialled = await self._dial_found(found, place, timeout_s, h1_only)
        except TimeoutError as exc:
            said = f"{place[0]}: no answer in {timeout_s:g} s"
            raise DialError(Abort(Party.EDGE, Stage.CONNECT, Cause.TIMED_OUT, said, unprocessed=True)) from exc
        except DialError:
            raise
        except (OSError, ValueError) as exc:
            raise DialError(failed_dial(exc, place[0])) from exc
        dialled.marks.resolve_s = resolve_s
        if dialled.connection.closed:
            raise DialError(failed_dial(ConnectionError(f"{edge.host} closed the connection at once"), place[0]))
        return dialled

    def close(self) -> None:
        for stray in self.strays:
            stray.cancel()

    async def _dial_found(self, found: Endpoints, place: list[str], timeout_s: float, h1_only: bool) -> Dialled:
        edge = self.edge
        h3_only = edge.scheme == "h3" or edge.protocol == "h3"
        if h3_only and not h1_only:
            return await self._quic(found, found.port, place, self._pace.quic_timeout_s)
        port = None if h1_only else self._quic_port(found)
        if port is None:
            return await self._tcp(found, place, h1_only)
        return await self._race(found, port, place, timeout_s)

    def _quic_port(self, found: Endpoints) -> int | None:
        """The UDP port when QUIC is worth a try now: promised, not blocked, not being tried already."""
        edge, now = self.edge, self._clock()
        if edge.protocol != "auto" or edge.scheme != "https" or self.strays or not self._race_quic:
            return None
        promised = found.port if "h3" in found.alpn else self._reach.h3_port(edge.host, edge.port, now)
        if promised is None or self._reach.quic_blocked(edge.host, edge.port, now):
            return None
        return promised

    async def _race(self, found: Endpoints, port: int, place: list[str], timeout_s: float) -> Dialled:
        """QUIC with a head start against TCP. The loser becomes a stray: adopted when it connects after all."""
        edge, quic_place = self.edge, [""]
        quic = asyncio.create_task(self._quic(found, port, quic_place, self._pace.quic_timeout_s))
        tcp: asyncio.Task[Dialled] | None = None
        try:
            head_start_s = 0.0 if self._reach.quic_suspect(edge.host, edge.port) else self._pace.quic_head_start_s
            await asyncio.wait({quic}, timeout=head_start_s)
            if quic.done() and quic.exception() is None:
                self._reach.quic_worked(edge.host, edge.port)
                return quic.result()
            # A timeout of its own: as a stray it outlives the dial and its timeout.
            tcp = asyncio.create_task(asyncio.wait_for(self._tcp(found, place, h1_only=False), timeout_s))
            running = {task for task in (quic, tcp) if not task.done()}
            while running:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if task.exception() is None:
                        return task.result()
            return tcp.result()  # both failed: TCP's reason is the one that a person can act on
        except asyncio.CancelledError:
            for task in filter(None, (quic, tcp)):
                task.cancel()
            raise
        finally:
            self._settle_race(quic, tcp)

    def _settle_race(self, quic: asyncio.Task[Dialled], tcp: asyncio.Task[Dialled] | None) -> None:
        # Without a TCP that works it is the edge or the network that failed, and QUIC is not to blame.
        if tcp is None or (tcp.done() and not tcp.cancelled() and tcp.exception() is None):
            quic.add_done_callback(self._judge_quic)
        for task in (quic, tcp):
            if task is not None and not task.done():
                self.strays.add(task)
                task.add_done_callback(self._stray_ended)
            elif task is not None and not task.cancelled():
                task.exception()  # seen: a race has two failures and tells one

    def _judge_quic(self, quic: asyncio.Task[Dialled]) -> None:
        if quic.cancelled():
            return
        edge = self.edge
        if quic.exception() is None:
            self._reach.quic_worked(edge.host, edge.port)
        else:
            self._reach.quic_failed(edge.host, edge.port, self._clock())

    def _stray_ended(self, stray: asyncio.Task[Dialled]) -> None:
        self.strays.discard(stray)
        if not stray.cancelled() and stray.exception() is None:
            self.on_stray(stray.result())

    async def _quic(self, found: Endpoints, port: int, place: list[str], timeout_s: float) -> Dialled:
        """QUIC has no SYN of its own to time: its handshake is the connect and the TLS in one, counted as TLS."""
        address = self._reach.order(self.edge.host, found.addresses, self._clock())[0]
        place[0] = f"quic {place_of(address, port)}"
        started = self._clock()
        try:
            connection = await self._rims.quic(address, port, self.edge, timeout_s)
        except (OSError, ValueError) as exc:
            raise DialError(failed_dial(exc, place[0])) from exc
        resumed = bool(getattr(connection, "resumed", False))
        marks = DialMarks("h3", address, resumed=resumed, tls_s=self._clock() - started)
        return Dialled(connection, None, marks)

    async def _tcp(self, found: Endpoints, place: list[str], h1_only: bool) -> Dialled:
        edge = self.edge
        left = self._reach.order(edge.host, found.addresses, self._clock())
        while True:
            place[0] = "connect " + ", ".join(place_of(address, found.port) for address in left[:4])
            connected = await connect_first(left, found.port, clock=self._clock, step_s=self._pace.step_s)
            self._reach.connected(edge.host, connected.address, left[0], self._clock())
            place[0] = f"{'tls' if edge.is_tls else 'connect'} {place_of(connected.address, found.port)}"
            try:
                return await self._secure(connected, place[0], h1_only)
            except ssl.SSLError as exc:
                # A certificate or a protocol is wrong on all addresses of a host alike; a lost handshake is one machine's.
                if not isinstance(exc, ssl.SSLEOFError) or len(left) == 1:
                    raise
            except ConnectionError:
                if len(left) == 1:
                    raise
            left.remove(connected.address)

    async def _secure(self, connected: Connected, place: str, h1_only: bool) -> Dialled:
        """TLS (or none) on a connected socket, and the rim that ALPN names."""
        loop, edge = asyncio.get_running_loop(), self.edge
        negotiating = _Negotiating(lambda alpn: self._rim(alpn, h1_only))
        started = self._clock()  # a context that is still being built is a part of TLS: somebody waits for it
        try:
            context = await self._context(h1_only) if edge.is_tls else None
        except BaseException:
            connected.sock.close()
            raise
        transport, _ = await loop.create_connection(
            lambda: negotiating,
            sock=connected.sock,
            ssl=context,
            server_hostname=edge.tls_name if context is not None else None,
            ssl_shutdown_timeout=SHUTDOWN_S if context is not None else None,
        )
        if negotiating.connection is None:
            raise DialError(failed_dial(ValueError(f"alpn gave {negotiating.alpn or 'nothing'}, not h2"), place))
        connection = cast(EdgeConnection, negotiating.connection)
        marks = DialMarks(
            connection.version,
            connected.address,
            resumed=was_resumed(transport),
            connect_s=connected.took_s,
            tls_s=self._clock() - started if context is not None else 0.0,
        )
        return Dialled(connection, transport, marks)

    def _rim(self, alpn: str | None, h1_only: bool) -> asyncio.Protocol | None:
        edge = self.edge
        if alpn == "h2" or (edge.protocol == "h2" and not edge.is_tls and not h1_only):
            return self._rims.h2()
        if edge.protocol == "h2" and not h1_only:
            return None
        return self._rims.h1()

    def prepare(self) -> None:
        """Build the TLS context now, so that the first request does not wait for it."""
        if self.edge.is_tls:
            self._building_context(False)

    async def _context(self, h1_only: bool) -> ssl.SSLContext:
        """One for each edge: a session of one edge is of no use to another. Reading the system's roots takes 10 ms and
        more, so it is done in a thread, once; a failed one is tried again by the next dial."""
        building = self._building_context(h1_only)
        try:
            return await asyncio.shield(building)
        except (OSError, ValueError) as exc:
            raise DialError(failed_dial(exc, f"tls files of edge {self.edge.id}")) from exc

    def _building_context(self, h1_only: bool) -> asyncio.Future[ResumingContext]:
        building = self._contexts.get(h1_only)
        if building is None or (building.done() and (building.cancelled() or building.exception() is not None)):
            building = asyncio.get_running_loop().run_in_executor(None, self._build_context, h1_only)
            building.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whoever waits
            self._contexts[h1_only] = building
        return building

    def _build_context(self, h1_only: bool) -> ResumingContext:
        edge = self.edge
        context = client_context(edge.ca_file, ["http/1.1"] if h1_only else ALPN[edge.protocol])
        if edge.client_cert:
            context.load_cert_chain(edge.client_cert)
        return context


ALPN = {"auto": ["h2", "http/1.1"], "h1": ["http/1.1"], "h2": ["h2"], "h3": ["h2", "http/1.1"]}


def _close_stray(dialled: Dialled) -> None:
    dialled.connection.close()


def _is_literal(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host)
        return True
    return False


__all__ = ["DialError", "Dialled", "Dialler", "Pace", "QuicDialler", "Resolves", "Rims", "connect_first", "failed_dial"]
