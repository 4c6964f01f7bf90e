"""The short way for requests of h2 and h3 streams: heads that were decoded, and are like one that was judged before.

Theory: a stream is an ordinary leg from the start, so unfolding one gives nothing but the leg itself. A body is waited for
until the end of the loop turn that brought the head: SDKs send both in one go. If it is not whole by then, the ordinary way
takes over and hears first what came.

      head like a known one, no body ──► StreamFront.begin ─────────────┐
      head like a known one ──► Gathering ──whole in this turn──► begin ┴─ refused ──► ordinary
                                   └──────not whole: ordinary, and what came is said again

Rules for editing: as in `proxy.io.express`; a receiver here forwards whatever it does not need itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.io.express import Express, Known, KnownAnswer
from proxy.messages import NOBODY, Abort, Fields, Leg, NullReceiver, ResponseHead
from proxy.priority import Priority


class StreamFront(NullReceiver):
    """A stream whose whole request is on the short way: its receiver until the answer is there."""

    __slots__ = ("_express", "_leg")

    def __init__(self, leg: Leg) -> None:
        self._leg = leg
        self._express = Express(self)

    def begin(self, known: Known, body: bytes) -> bool:
        """Send the request; False, and nothing done, when the ordinary way must take it."""
        if not self._express.begin(known, body):
            return False
        self._leg.receiver = self
        if known.priority is not None:
            self._leg.prioritize(known.priority)
        return True

    def answer_known(self, answer: KnownAnswer, timing: bytes, body: bytes) -> bool:
        leg, head = self._leg, answer.head
        self._express.is_running = False
        leg.receiver = NOBODY
        at_once = getattr(leg, "answer", None)  # h2 has a step that says head, data and end
        last = (b"server-timing", timing)
        if at_once is None or not at_once(answer, head.status, answer.fields, last, body):
            leg.head(ResponseHead(head.status, [*answer.fields, last], head.length, reason=head.reason))
            if body:
                leg.data(body)
            leg.end()
        return True

    def unfold(self) -> Leg:
        return self._leg

    # ---------------------------------------------------------------- from the stream, as its receiver

    def on_abort(self, abort: Abort) -> None:
        self._express.unfold()
        self._leg.receiver.on_abort(abort)

    def on_priority(self, priority: Priority) -> None:
        """HTTP/1.1, which is all that an edge on the short way speaks, has no word for it."""


class Gathering(NullReceiver):
    """A stream whose body is awaited for the rest of this loop turn."""

    __slots__ = ("_begin", "_body", "_leg", "_ordinary")

    def __init__(self, leg: Leg, begin: Callable[[bytes], bool], ordinary: Callable[[], None]) -> None:
        """`begin`: take the short way with the whole body. `ordinary`: give the leg its ordinary receiver."""
        self._leg = leg
        self._begin = begin
        self._ordinary = ordinary
        self._body: list[bytes] = []
        leg.receiver = self
        asyncio.get_running_loop().call_soon(self._give_up)

    def _give_up(self) -> None:
        if self._leg.receiver is self:
            self._go_on()

    def _go_on(self) -> None:
        """The ordinary way hears what came so far."""
        leg = self._leg
        leg.receiver = NOBODY
        self._ordinary()
        for chunk in self._body:
            leg.receiver.on_data(chunk)

    def on_data(self, chunk: bytes) -> None:
        self._body.append(chunk)

    def on_trailers(self, fields: Fields) -> None:
        self._go_on()
        self._leg.receiver.on_trailers(fields)

    def on_end(self) -> None:
        body = self._body
        if not self._begin(body[0] if len(body) == 1 else b"".join(body)):
            self._go_on()
            self._leg.receiver.on_end()

    def on_abort(self, abort: Abort) -> None:
        self._go_on()
        self._leg.receiver.on_abort(abort)

    def on_full(self) -> None:
        self._go_on()
        self._leg.receiver.on_full()

    def on_priority(self, priority: Priority) -> None:
        self._go_on()
        self._leg.receiver.on_priority(priority)
