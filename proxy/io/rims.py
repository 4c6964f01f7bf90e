"""What a rim is given and what it offers: the contracts between connections, the gateway and the edges.

Theory: an inbound rim turns a connection into exchanges and hands each to the `Service`. An outbound rim is an
`EdgeConnection` that opens legs as long as it has room. Nobody above a rim sees a transport.

      TcpListener / QuicListener -> inbound rim -> Service.on_request(leg, head, origin)
      EdgeConnections.open(opening) -> EdgeConnection.open() -> opening.on_open(leg, marks)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proxy.h2_shapes import Find
from proxy.messages import Abort, Leg, RequestHead

if TYPE_CHECKING:
    from proxy.io.express import Known

HIGH_WATER = 256 * 1024
"""Bytes: above it a send buffer says on_full. Measured: memory stays flat for large bodies at full speed."""
LOW_WATER = 64 * 1024


@dataclass(slots=True)
class Origin:
    """Where an exchange came from. One for each connection, shared by its exchanges."""

    peer: str  # the client's address, without port; "" for a unix socket
    peer_port: int
    listener: str  # "https://127.0.0.1:8443", as configured
    scheme: bytes  # b"http" or b"https"
    version: str  # h1, h2, h3
    server_name: str = ""  # SNI, lower case
    resumed: bool = False  # TLS session resumed
    early_data: bool = False  # the request came in 0-RTT
    known: Known | None = None  # streams: what was decided for heads like the last ones
    seen: RequestHead | None = None  # streams: the last head that nothing was known of


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one inbound connection, from `[proxy]`."""

    max_header_bytes: int = 64 * 1024
    max_body_bytes: int = 512 * 1024 * 1024
    idle_timeout_s: float = 120.0
    header_timeout_s: float = 10.0
    max_streams: int = 256


class InboundConnection(Protocol):
    """What a listener keeps of each connection, to drain it."""

    def drain(self) -> None:
        """Take no new exchange: h1 says `Connection: close` and closes when idle, h2 and h3 send GOAWAY."""

    def close_now(self) -> None:
        """Abort every exchange (never a clean end) and close."""


class Service(Protocol):
    """The gateway, as the inbound rims see it."""

    @property
    def limits(self) -> Limits:
        """The bounds for connections accepted from now on."""

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        """A request's head is whole. Sets `leg.receiver` before it returns. Never raises."""

    def shortcut(self, head: RequestHead, origin: Origin) -> Find | None:
        """Who has whole answers ready for GETs like this one, which differ in nothing but the target; None: nobody.

        What is found there was counted as served. Asked by h2 alone, where a request costs most.
        """

    def known(self, head: RequestHead, origin: Origin) -> Known | None:
        """What was decided for a request, for those with a head of the same shape (`proxy.io.express`); None: each is to
        be decided anew. Asked by h1 for a head that came twice."""

    def on_connected(self, connection: InboundConnection) -> bool:
        """A connection is ready to speak. False when there are `max_connections` already: the rim closes it."""

    def on_disconnected(self, connection: InboundConnection) -> None:
        """The connection is gone."""


class EdgeConnection(Protocol):
    """One connection to an edge, any version."""

    version: str

    @property
    def room(self) -> int:
        """Exchanges that may be opened now; 0 when closed, going away or full. h1: 1 or 0."""

    @property
    def active(self) -> int:
        """Exchanges in progress."""

    def open(self) -> Leg:
        """A leg for a new exchange; only while `room` > 0. The caller sets its receiver, then calls head()."""

    def close(self) -> None:
        """Send no new exchange; close when those in progress have ended, at once when there is none."""

    on_change: Callable[[], None]
    """Called when `room` or `active` changed, and once when the connection is gone (`closed` is True then)."""
    closed: bool


@dataclass(slots=True)
class DialMarks:
    """How a leg's connection came to be; seconds, 0.0 for what did not happen (all of them on a reused one)."""

    version: str = "h1"
    address: str = ""
    reused: bool = False
    resumed: bool = False
    resolve_s: float = 0.0
    connect_s: float = 0.0
    tls_s: float = 0.0


class Opening(Protocol):
    """Who waits for a leg to an edge."""

    def on_open(self, leg: Leg, marks: DialMarks) -> None:
        """A leg is ready. May come inside `open()` when a warm connection has room."""

    def on_open_failed(self, abort: Abort) -> None:
        """No connection came about: stage CONNECT, `unprocessed` True."""
