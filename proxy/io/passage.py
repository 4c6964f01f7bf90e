"""Pass the chunks of a token stream from an HTTP/1.1 edge on, to an HTTP/1.1 client as they are.

Theory: nearly every read of such a stream is one whole chunk with one event. On the ordinary way it has its framing taken
off, counts, gets a new framing, waits for the end of the turn, leaves, and is looked at: ten functions, 12 us with cold
caches. Here it is one. Where both framings are chunks the bytes pass unchanged; any other client's leg is given the payload.

It sees to nothing but a read that is one whole chunk and begins where a chunk may begin; the leg gets everything else, and
every end. What an exchange counts is kept here until it is asked for (`settle`).

Owner: the exchange. The edge's connection asks it first, until the exchange is over there.

Rules for editing: what the ordinary way counts or watches is counted and watched here. A callable in a slot is called by a
local name: the interpreter does not specialise `self.slot(...)` (0.05 us hot, more when cold).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.h1_bodies import LONE, UNKNOWN, ChunkedReader
from proxy.io.inbound_h1_leg import H1ClientLeg
from proxy.io.outbound_h1 import H1EdgeLeg
from proxy.io.wire import Wire
from proxy.sse import Observer

if TYPE_CHECKING:
    from proxy.io.exchange import Exchange


class Passage:
    """The way of one answer's chunks: to `wire` as they are, or without their framing to `give`."""

    __slots__ = ("_at", "_bytes", "_chunks", "_clock", "_exchange", "_give", "_observer", "_wire")

    def __init__(
        self, exchange: Exchange, chunks: ChunkedReader, wire: Wire | None, give: Callable[[bytes], None]
    ) -> None:
        self._exchange = exchange
        self._chunks = chunks
        self._wire = wire
        self._give = give
        self._observer: Observer | None = exchange.observer
        self._clock = exchange.relay.clock
        self._at = 0.0
        self._bytes = 0

    def take(self, read: bytes) -> bool:
        """Pass on a read that is one whole chunk; False, and nothing done, when it is not."""
        start, size = LONE.get(read[:5], UNKNOWN)
        if size != len(read) or read[-2:] != b"\r\n" or not self._chunks.is_between:
            return False
        direct, clock, observer = self._wire.direct, self._clock, self._observer  # type: ignore[union-attr]  # it has one
        direct(read)
        self._at = now = clock()
        self._bytes += size - start - 2
        if observer is not None:
            expects = observer.expects
            if expects(read, start, size - 2) is not None:
                observer.events += 1
                observer.last_token = now
            else:
                observer.feed(read[start:-2])
        return True

    def take_apart(self, read: bytes) -> bool:
        """As `take`, for a client's leg that frames by itself, and gathers what it writes until the loop comes round."""
        start, size = LONE.get(read[:5], UNKNOWN)
        if size != len(read) or read[-2:] != b"\r\n" or not self._chunks.is_between:
            return False
        give, clock, observer = self._give, self._clock, self._observer
        payload = read[start:-2]
        give(payload)
        self._at = now = clock()
        self._bytes += len(payload)
        if observer is not None:
            expects = observer.expects
            if expects(payload, 0, len(payload)) is not None:
                observer.events += 1
                observer.last_token = now
            else:
                observer.feed(payload)
        return True

    def settle(self) -> None:
        """Have the exchange count what passed since it was last told, and be due later for it."""
        x, passed = self._exchange, self._bytes
        if passed:
            self._bytes = 0
            x.bytes_out += passed
            x.deadline = max(x.deadline, self._at + x.idle_s)


def passage_of(exchange: Exchange) -> Passage | None:
    """Open the way for an exchange whose answer has begun, where its edge speaks in chunks."""
    edge, client = exchange.leg, exchange.client
    if not isinstance(edge, H1EdgeLeg) or (chunks := edge.chunks) is None:
        return None
    wire = client.chunks_to if isinstance(client, H1ClientLeg) else None
    passage = Passage(exchange, chunks, wire, client.data)
    edge.let_pass(passage.take if wire is not None else passage.take_apart)
    return passage
