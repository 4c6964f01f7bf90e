"""Plain DNS over UDP: a fresh port and id for each send, 0x20, and TCP for what does not fit (RFC 5452, RFC 7766 5).

Theory: a `_Question` is one question given to a `UdpChannel`. Each send has a socket of its own, connected, so that the
kernel drops what comes from elsewhere; all sockets stay open to the end, because a resend must not forget the first
send (unbound does: an answer slower than its timer is never heard). What becomes of a datagram:

    id, QR, opcode or question differ    ignored and counted, the wait goes on (RFC 5452 9.1)
    only letters differ                  maybe a spoofer, maybe a peer that answers in lower case: TCP tells them apart
    TC=1                                 TCP
    FORMERR to EDNS                      again without EDNS
    anything else                        the reply

Rules for editing: 1. nothing ends a wait but a reply that matches or the deadline; 2. `finish` closes every socket.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from functools import partial

from resolver import outgoing as o
from resolver import wire as w
from resolver.io.addresses import AddressBook, family_of
from resolver.io.channel import Clock, Done, Failure, failure_of
from resolver.io.readiness import Readiness
from resolver.io.warm import WarmChannel
from resolver.outgoing import Outgoing
from resolver.quirks import Intolerance
from resolver.standing import Fault

Socket = socket.SocketType
"""What is below `socket.socket`: the same calls without the Python around them, 3 us less for each of these short lives."""
MAX_OPEN = 512  # sockets of one upstream; more questions wait their turn
MAX_WAITING = 4096
MAX_SENDS = 4
RESEND_MIN_S, RESEND_MAX_S, RESEND_UNKNOWN_S = 0.25, 1.0, 0.5
LARGEST = 65_535
RANDOM_PAGE = 4096
DRAIN = 16  # datagrams read from one socket in a loop turn: a flood of forgeries must not hold the others


class Draws:
    """Random bytes of the kernel, fetched a page at a time, since a system call for each send is 1 us. Each is used once."""

    __slots__ = ("_at", "_page")

    def __init__(self) -> None:
        self._page, self._at = b"", 0

    def take(self, count: int) -> bytes:
        at = self._at
        if at + count > len(self._page):
            self._page, at = os.urandom(max(count, RANDOM_PAGE)), 0
        self._at = at + count
        return self._page[at : at + count]


class UdpChannel:
    """One upstream over UDP; `tcp` is the same upstream over TCP, warm once it was needed."""

    encrypted = False

    def __init__(self, book: AddressBook, port: int, tcp: WarmChannel, *, clock: Clock) -> None:
        self.book, self.port, self.tcp, self.clock = book, port, tcp, clock
        self.ignored = 0  # datagrams that matched no question: forgeries, or answers to a peer's own muddle
        self.no_edns, self.no_case = Intolerance(), Intolerance()
        self._rtt_s: float | None = None
        self._asked: set[_Question] = set()
        self._waiting: deque[_Question] = deque()
        self._lookups: set[asyncio.Task[None]] = set()
        self._readiness: Readiness | None = None
        self._closed = False
        self.draws = Draws()
        self.inbox = memoryview(
            bytearray(LARGEST)
        )  # of whoever reads: what it says is copied before the next one reads

    def ask(self, out: Outgoing, deadline: float, done: Done, *, question: bytes = b"") -> None:
        asked = _Question(self, out, question, deadline, done)
        if self._closed:
            asked.finish(Failure(Fault.UNREACHABLE, "closed by us"))
        elif len(self._waiting) >= MAX_WAITING:
            asked.finish(Failure(Fault.SILENT, f"{MAX_WAITING} questions wait for a socket"))
        elif len(self._asked) >= MAX_OPEN:
            self._waiting.append(asked)
        else:
            self._begin(asked)

    def _begin(self, asked: _Question) -> None:
        self._asked.add(asked)
        addresses = self.book.at_once()
        if addresses:
            asked.start(addresses)
            return
        lookup = asyncio.ensure_future(self._find(asked))
        self._lookups.add(lookup)
        lookup.add_done_callback(self._lookups.discard)

    async def _find(self, asked: _Question) -> None:
        try:
            asked.start(await self.book.find())
        except OSError as exc:
            asked.finish(failure_of(exc))

    def ended(self, asked: _Question, took_s: float | None) -> None:
        if took_s is not None:
            self._rtt_s = took_s if self._rtt_s is None else self._rtt_s + (took_s - self._rtt_s) / 8
        self._asked.discard(asked)
        while self._waiting and len(self._asked) < MAX_OPEN and not self._closed:
            self._begin(self._waiting.popleft())

    @property
    def readiness(self) -> Readiness:
        if self._readiness is None:
            self._readiness = Readiness()
        return self._readiness

    def resend_after_s(self) -> float:
        return RESEND_UNKNOWN_S if self._rtt_s is None else min(max(4 * self._rtt_s, RESEND_MIN_S), RESEND_MAX_S)

    def drop(self) -> None:
        """Ports bound to an address that is gone hear nothing: each question in flight is sent anew."""
        for asked in list(self._asked):
            asked.send_again()
        self.tcp.drop()

    async def close(self) -> None:
        self._closed = True
        for lookup in list(self._lookups):
            lookup.cancel()
        for asked in (*self._asked, *self._waiting):
            asked.finish(Failure(Fault.UNREACHABLE, "closed by us"))
        if self._readiness is not None:
            self._readiness.close()
        await self.tcp.close()


class _Question:
    """One question on its way; see the module's head."""

    __slots__ = (
        "_addresses",
        "_channel",
        "_deadline",
        "_done",
        "_edns",
        "_first_at",
        "_given",
        "_mix",
        "_out",
        "_over_tcp",
        "_resend_s",
        "_sends",
        "_sockets",
        "_timer",
        "finished",
    )

    def __init__(self, channel: UdpChannel, out: Outgoing, given: bytes, deadline: float, done: Done) -> None:
        self._channel, self._out, self._given = channel, out, given
        self._deadline, self._done = deadline, done
        self._sockets: dict[Socket, str] = {}
        self._addresses: list[str] = []
        self._sends = 0
        self._over_tcp = False
        self._timer: asyncio.TimerHandle | None = None
        self._edns = self._mix = True
        self._first_at = self._resend_s = 0.0
        self.finished = False

    def start(self, addresses: list[str]) -> None:
        if self.finished:
            return
        now = self._channel.clock()
        self._addresses = addresses
        self._edns = not self._channel.no_edns.spares(now)
        self._mix = not self._channel.no_case.spares(now)
        self._first_at = now
        self._resend_s = self._channel.resend_after_s()
        self._send(now)

    def finish(self, result: bytes | Failure, took_s: float | None = None) -> None:
        if self.finished:
            return
        self.finished = True
        if self._timer is not None:
            self._timer.cancel()
        for sock in self._sockets:
            self._channel.readiness.forget(sock)
            sock.close()
        self._sockets.clear()
        self._channel.ended(self, took_s)
        self._done(result)

    # --- sending -----------------------------------------------------------------------------------------------------

    def _send(self, now: float) -> None:
        """One send from a fresh port; an address that cannot be reached at all gives way to the next one at once."""
        while self._sends < max(MAX_SENDS, len(self._addresses)):
            address = self._addresses[self._sends % len(self._addresses)]
            self._sends += 1
            try:
                self._send_to(address)
            except OSError as exc:
                failure = failure_of(exc)
                if failure.fault is Fault.UNREACHABLE:
                    self._channel.book.failed(address)
                if self._sends < len(self._addresses):
                    continue
                if not self._sockets:
                    self.finish(failure)
                    return
            break
        self._set_timer(now)

    def _send_to(self, address: str) -> None:
        draw = self._channel.draws.take(2 + len(self._out.question))
        ident = draw[0] << 8 | draw[1]
        question = self._given or self._out.folded
        if self._mix:
            question = o.mix_case(question, draw[2:])
        message = o.compose(self._out, ident, question, edns=self._edns)
        sock = Socket(family_of(address), socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect((address, self._channel.port))
            sock.send(message)
            self._channel.readiness.watch(sock, partial(self._readable, sock, ident, question, self._edns))
        except BaseException:
            sock.close()
            raise
        self._sockets[sock] = address

    def send_again(self) -> None:
        if not self.finished and self._addresses:
            self._sends = min(self._sends, MAX_SENDS - 1)
            self._send(self._channel.clock())

    def _set_timer(self, now: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = self._deadline - now
        if self._resend_s < wait_s and self._sends < MAX_SENDS and not self._over_tcp:
            wait_s = self._resend_s
        self._timer = self._channel.readiness.loop.call_later(wait_s if wait_s > 0 else 0.0, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        now = self._channel.clock()
        if now >= self._deadline - 0.001:
            self.finish(Failure(Fault.SILENT, f"no answer in {now - self._first_at:.2f} s"))
            return
        self._resend_s *= 2
        self._send(now)

    # --- hearing -----------------------------------------------------------------------------------------------------

    def _readable(self, sock: Socket, ident: int, question: bytes, edns: bool) -> None:
        inbox = self._channel.inbox
        for _ in range(DRAIN):
            try:
                reply = bytes(inbox[: sock.recv_into(inbox)])
            except BlockingIOError:
                return
            except OSError as exc:
                self._cannot_reach(sock, exc)
                return
            verdict = o.match(reply, ident, question)
            if verdict is o.Match.YES:
                self._hear(sock, reply, edns)
                return
            self._channel.ignored += 1
            if verdict is o.Match.OTHER_CASE:
                self._doubt_case(question)
            if self.finished:
                return

    def _hear(self, sock: Socket, reply: bytes, edns: bool) -> None:
        channel, rcode = self._channel, o.rcode(reply)
        now = channel.clock()
        if edns and rcode == w.FORMERR:
            self._without_edns()
            return
        if edns:
            channel.no_edns.worked()
        elif rcode not in (w.FORMERR, w.SERVFAIL):
            channel.no_edns.broke(now)
        if o.is_truncated(reply):
            self._ask_over_tcp(b"", self._deadline, self.finish)
            return
        channel.book.worked(self._sockets[sock])
        self.finish(reply, now - self._first_at)

    def _cannot_reach(self, sock: Socket, exc: OSError) -> None:
        """The host or a router said that nobody listens (ICMP). Other sends may still be answered."""
        self._channel.readiness.forget(sock)
        sock.close()
        address = self._sockets.pop(sock)
        self._channel.book.failed(address)
        if self._sockets or self._over_tcp:
            return
        if self._sends < len(self._addresses):
            self._send(self._channel.clock())
        else:
            self.finish(failure_of(exc))

    def _without_edns(self) -> None:
        if self._edns:
            self._edns = False
            self.send_again()

    def _ask_over_tcp(self, question: bytes, deadline: float, done: Done) -> None:
        if not self._over_tcp:
            self._over_tcp = True
            self._set_timer(self._channel.clock())
            self._channel.tcp.ask(self._out, deadline, done, question=question)

    def _doubt_case(self, question: bytes) -> None:
        """Over TCP the same letters tell a forgery (they come back) from a peer that cannot keep them (they do not)."""

        def told(result: bytes | Failure) -> None:
            keeps = isinstance(result, bytes) and result[w.HEADER : w.HEADER + len(question)] == question
            if not keeps:
                self._channel.no_case.broke(self._channel.clock())
            if isinstance(result, bytes):
                self.finish(result)
            elif not self.finished:
                self._over_tcp = self._mix = False
                self.send_again()

        # Half of what is left: where port 53/tcp is silent there must be time to ask without mixed case.
        now = self._channel.clock()
        self._ask_over_tcp(question, now + (self._deadline - now) / 2, told)
