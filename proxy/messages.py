"""The words that the rims and the relay say to each other.

Theory: a *rim* speaks one HTTP version on one connection. For each exchange (a request and its answer) it offers a
*leg*. The relay joins two legs, one from the client's rim and one from an edge's, and never learns a version:

      client rim                    relay                     edge rim
     h1 h2 h3  ---- on_head ---->          ---- head ---->    h1 h2 h3
               ---- on_data ---->          ---- data ---->
               <--- head --------          <--- on_head ---
               <--- data --------          <--- on_data ---
               <--- pause -------  on_full of one leg is pause() of the other

Every word is a plain call: nothing is awaited, nothing is queued in between. `on_full` says that a leg's send buffer
crossed its high mark; data() keeps working after it, the caller is only asked to stop the other side.

Rules for editing: 1. nothing here imports a loop, socket or clock; 2. a word added to `Leg` is added to every rim and
to `tests/peers/fakeleg.py`; 3. names of fields are lower case everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import itemgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from proxy.priority import Priority

Fields = list[tuple[bytes, bytes]]
"""Header or trailer fields in order, repeats kept. Names in lower case (HTTP/1.1 lines are lowered once, where they are
read, so that nobody behind has to), values as received without surrounding whitespace. No pseudo-fields, no Host, no
hop-by-hop fields (RFC 9110 7.6.1): a rim takes those out when it reads. Content-Length stays where it was received and is
what a rim sends; `length` is its meaning. A rim adds one of its own only when `length` is known, a body is expected and no
such field is there."""


class NeverIndexed(bytes):
    """A field's value whose sender asked that no hop's compression table keep it (RFC 7541 6.2.3, RFC 9204 4.5.4): it is
    sent on in the same form. In every other way the bytes that it is."""

    __slots__ = ()


@dataclass(slots=True)
class RequestHead:
    """A request's head.

    `target` is raw: origin form (`/v1/x?y`), `*` for OPTIONS, `host:port` for CONNECT.
    `authority` is Host or `:authority`, raw, b"" when absent; `fields` hold no Host.
    `length`: 0 no body, n bytes announced, None a body that says its own end.
    `protocol`: b"websocket" for an Upgrade (h1) or an extended CONNECT (RFC 8441, 9220) alike: both arrive with
    method GET and carry b"websocket" here; each rim turns them into its own form and back. For any other h1 Upgrade,
    the lower-cased token that was asked for. b"" otherwise. A request with a protocol has no end of its own: neither
    on_end nor end() is said for it, what comes later is the half-close of the tunnel.
    `expect_continue`: the client waits for 100 before it sends the body (RFC 9110 10.1.1).
    """

    method: bytes
    target: bytes
    scheme: bytes
    authority: bytes
    fields: Fields
    length: int | None = 0
    protocol: bytes = b""
    expect_continue: bool = False

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field by its lower-case name, or None."""
        return get_field(self.fields, name)


@dataclass(slots=True)
class ResponseHead:
    """A response's head, interim (1xx) or final. `length` as in a request; None also for "until the connection closes".

    `no_body`: HEAD, 204, 304: the fields may announce a length, yet no byte follows.
    A 101 (h1) or a 2xx to CONNECT opens a tunnel: from then on `data` flows both ways, `end` is a half-close.
    """

    status: int
    fields: Fields
    length: int | None = None
    no_body: bool = False
    reason: bytes = b""

    def get(self, name: bytes) -> bytes | None:
        """The first value of a field by its lower-case name, or None."""
        return get_field(self.fields, name)


Head = RequestHead | ResponseHead


NAME = itemgetter(0)
"""The name of a field, for the looks at all names of a head that happen in C."""


def without(fields: Fields, names: frozenset[bytes]) -> Fields:
    """A new list without the fields of these names; a plain copy, in one look, when there are none."""
    if names.isdisjoint(map(NAME, fields)):
        return fields.copy()
    return [field for field in fields if field[0] not in names]


NOT_IN_TRAILERS = frozenset({
    b"connection", b"content-length", b"expect", b"host", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding",
    b"upgrade",
})  # fmt: skip
"""Framing, routing and hop-by-hop fields have no business in trailers (RFC 9110 6.5.1): every rim leaves them out, for the
next hop may merge trailers into the head."""


def get_field(fields: Fields, name: bytes) -> bytes | None:
    """The first value of the field `name` (in lower case), or None."""
    for key, value in fields:
        if key == name:
            return value
    return None


class Party(Enum):
    """Who ended an exchange early."""

    CLIENT = "client"
    EDGE = "edge"
    US = "us"


class Stage(Enum):
    """How far the exchange had come, seen from the edge."""

    CONNECT = "connect"  # no byte of the request was sent
    HEAD = "head"  # request bytes were sent, no byte of the answer came
    BODY = "body"  # answer bytes came


class Cause(Enum):
    """What happened, in the words that each rim turns into its own ending."""

    CANCELLED = "cancelled"  # the peer does not want the rest
    LOST = "lost"  # the connection or stream went away
    BROKEN = "broken rule"  # the peer broke the protocol
    TIMED_OUT = "timed out"
    REFUSED = "refused"  # limits, policy


@dataclass(frozen=True, slots=True)
class Abort:
    """Why an exchange ended without a clean end.

    `unprocessed`: the peer or the protocol vouches that the request was not processed (REFUSED_STREAM, above the last
    id of a GOAWAY, connection never completed): it may be sent elsewhere whatever its method (RFC 9113 8.7).
    `code`: the wire's own number when there was one (h2 or h3 error code, close code).
    `detail`: lower case, has the numbers seen, no secret and no user data.
    """

    by: Party
    stage: Stage
    cause: Cause
    detail: str = ""
    code: int | None = None
    unprocessed: bool = False


class Receiver(Protocol):
    """Who hears what a leg's peer says. The relay gives each leg one. Never raises into a rim."""

    def on_head(self, head: ResponseHead) -> None:
        """Only edge legs: the final head. (A client leg's request head comes with the leg itself.)"""

    def on_interim(self, head: ResponseHead) -> None:
        """Only edge legs: a 1xx head, 101 excepted."""

    def on_data(self, chunk: bytes) -> None:
        """Body bytes as they came, framing removed; never empty."""

    def on_trailers(self, fields: Fields) -> None:
        """At most once, right before on_end."""

    def on_end(self) -> None:
        """A clean end, exactly once, and nothing but on_full, on_drained or on_abort after it."""

    def on_abort(self, abort: Abort) -> None:
        """The leg is dead; no further word comes from it. At most once."""

    def on_full(self) -> None:
        """The leg's send buffer (bytes given by data() that the peer has not taken) crossed its high mark."""

    def on_drained(self) -> None:
        """The send buffer is below its low mark again, after an on_full."""

    def on_priority(self, priority: Priority) -> None:
        """Only client legs of h2 and h3: the client said anew how urgent its answer is (PRIORITY_UPDATE, RFC 9218 7)."""


class Leg(Protocol):
    """What a rim offers for one exchange. Calls after the leg's own on_abort, or after abort(), do nothing."""

    receiver: Receiver
    reused: bool
    """Edge legs: the connection had carried an earlier request. Client legs: False."""
    version: str
    """h1, h2 or h3: for people, logs and Server-Timing, never for a decision of the relay."""

    def head(self, head: Head) -> None:
        """Client leg: the final ResponseHead, once. Edge leg: the RequestHead, once. Flushed at once."""

    def interim(self, head: ResponseHead) -> None:
        """Client leg: a 1xx. An HTTP/1.0 client is spared it."""

    def data(self, chunk: bytes) -> None:
        """Body bytes. The rim copies or sends; the caller keeps no claim. Sent within this loop turn."""

    def trailers(self, fields: Fields) -> None:
        """Right before end(); dropped where the version or framing cannot carry them."""

    def end(self) -> None:
        """A clean end of what we send. In a tunnel: half-close."""

    def finish(self) -> None:
        """As end(), in a tunnel whose peer has said all that it will: a connection that cannot half-close may close."""

    def abort(self, abort: Abort) -> None:
        """End now, uncleanly: h1 closes without the last chunk (RST when nothing useful is buffered), h2 and h3 reset
        with the code that `abort` means. On an edge leg: cancel the request. Idempotent; no on_abort follows."""

    def pause(self) -> None:
        """Stop on_data soon: h1 stops reading, h2 and h3 give no more credit. At most one window follows."""

    def resume(self) -> None:
        """Undo pause()."""

    def prioritize(self, priority: Priority) -> None:
        """Client leg: how urgent its answer is by our own rules, where its client did not say (RFC 9218); h1 has one
        answer at a time and no use for it. Edge leg: what its request's field said holds no more (h2 and h3 send a
        PRIORITY_UPDATE, h1 cannot say it)."""


class NullReceiver:
    """Hears nothing: what a leg holds before the relay takes it and after it let go."""

    def on_head(self, head: ResponseHead) -> None: ...
    def on_interim(self, head: ResponseHead) -> None: ...
    def on_data(self, chunk: bytes) -> None: ...
    def on_trailers(self, fields: Fields) -> None: ...
    def on_end(self) -> None: ...
    def on_abort(self, abort: Abort) -> None: ...
    def on_full(self) -> None: ...
    def on_drained(self) -> None: ...
    def on_priority(self, priority: Priority) -> None: ...


NOBODY = NullReceiver()
