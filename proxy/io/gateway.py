"""Receive every request of every listener and hand it to the part that answers it.

Theory: the rims know bytes, the relay knows legs; this file knows what headrace is. The order of the questions is the order
of trust: what must be refused first, what is ours next, pools last.

      CONNECT on the http listener ---------> forward proxy (allow list)
      loop, foreign Host, foreign Origin ---------> refused
      DNS over HTTPS path, /proxy.pac under our own names ---------> answered here
      replay in 0-RTT, body over the limit ---------> refused
      a pool's host or path prefix ---------> relay

Owner: the daemon. `apply` swaps the configuration between two requests; exchanges in progress keep what they began with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import config.model
from proxy import errors, headers
from proxy.h2_shapes import Find
from proxy.io.dns_shortcut import DnsShortcut
from proxy.io.express import Known, Lane, known_request
from proxy.io.express_streams import Gathering, StreamFront
from proxy.io.forward import ForwardProxy
from proxy.io.local import LocalAnswer, say
from proxy.io.relay import Relay
from proxy.io.rims import InboundConnection, Limits, Origin
from proxy.known_heads import are_alike
from proxy.messages import Leg, RequestHead, ResponseHead
from proxy.routing import SAFE, Refusal, Route, RouteTable, host_of
from proxy.waterfall import Finished

if TYPE_CHECKING:
    from proxy.io.edges import EdgeSet
    from resolver.io.doh_server import DohReply, DohService
    from resolver.io.service import ResolverService

SHORT_BODY = 64 * 1024  # bytes of a request that may be waited for within a loop turn
MAX_DNS_MESSAGE = 65535  # RFC 8484 6: a DNS message has no more; D9 answers 413 above it


class Gateway:
    """The `Service` of all inbound rims; see the module's picture. `record` hears of each finished exchange."""

    def __init__(
        self,
        *,
        edges: EdgeSet,
        resolver: ResolverService,
        doh: DohService | None,
        clock: Callable[[], float],
        record: Callable[[Finished], None],
    ) -> None:
        self.limits = Limits()
        self.relay = Relay(clock=clock, record=record)
        self._edges = edges
        self._doh = doh
        self._doh_path = b""
        self._dns_shortcut = DnsShortcut(doh)
        self.lane = Lane(self.relay)
        self._own_paths: tuple[bytes, ...] = ()
        self._table = RouteTable([])
        self._forward = ForwardProxy(resolver, self.relay)
        self._connections: set[InboundConnection] = set()
        self._max_connections = 4096
        self._draining = False

    @property
    def active(self) -> int:
        """Exchanges and tunnels in progress."""
        return len(self.relay.exchanges) + self._forward.active

    @property
    def connections(self) -> int:
        return len(self._connections)

    def apply(self, whole: config.model.Config, *, own_names: Iterable[str] = ()) -> None:
        """Serve by this configuration from the next request on. `own_names`: the names of our certificate."""
        proxy = whole.proxy
        self.limits = Limits(
            max_header_bytes=proxy.max_header_bytes,
            max_body_bytes=proxy.max_body_bytes,
            idle_timeout_s=proxy.idle_timeout_s,
            header_timeout_s=proxy.header_timeout_s,
        )
        self._max_connections = proxy.max_connections
        self._doh_path = whole.resolver.doh_path.encode()
        self._dns_shortcut.retire()  # connections that hold it were judged by the old table
        self._dns_shortcut = DnsShortcut(self._doh)
        self.lane.close()  # what was decided by the old table and pools holds no more
        self.lane = Lane(self.relay)
        self._own_paths = (self._doh_path, b"/proxy.pac")
        self._table = RouteTable(whole.pools, own_names=own_names, allowed_origins=proxy.allowed_origins)
        self._forward.apply(proxy.forward, [str(listen) for listen in proxy.listen if listen.scheme == "http"])
        self.relay.max_body_bytes = proxy.max_body_bytes
        self.relay.trusted = headers.networks(proxy.trusted_proxies)

    # ---------------------------------------------------------------- connections

    def on_connected(self, connection: InboundConnection) -> bool:
        if len(self._connections) >= self._max_connections:
            return False
        self._connections.add(connection)
        if self._draining:
            connection.drain()
        return True

    def on_disconnected(self, connection: InboundConnection) -> None:
        self._connections.discard(connection)

    def drain(self) -> None:
        """Take no new work: every connection says so in its own way; exchanges in progress go on."""
        self._draining = True
        self.relay.drain()
        for connection in list(self._connections):
            connection.drain()

    def abort_all(self, detail: str = "stopping") -> None:
        """The hard stop: nothing ends cleanly that has not ended yet."""
        self.relay.abort_all(detail)
        self._forward.abort_all()
        for connection in list(self._connections):
            connection.close_now()

    # ---------------------------------------------------------------- requests

    def on_request(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        if origin.version != "h1" and self._takes_short_way(leg, head, origin):
            return
        self._decide(leg, head, origin)

    def _takes_short_way(self, leg: Leg, head: RequestHead, origin: Origin) -> bool:
        """Whether this request of a stream is like an earlier one of its connection, and was sent on (or waits for the rest
        of this loop turn to be)."""
        known = origin.known
        if known is None or not known.lane.is_open or not are_alike(known.head, head):
            self._look_for_likeness(head, origin)
            return False
        if origin.early_data or self._draining:
            return False
        front = StreamFront(leg)
        if head.length == 0:
            return front.begin(known, b"")
        if head.length is None or head.length > SHORT_BODY:
            return False
        Gathering(leg, lambda body: front.begin(known, body), lambda: self._decide(leg, head, origin))
        return True

    def _look_for_likeness(self, head: RequestHead, origin: Origin) -> None:
        """Twice the same head, but for its length, and it becomes known."""
        seen, origin.seen = origin.seen, head
        if seen is not None and are_alike(seen, head):
            origin.known, origin.seen = self.known(head, origin), None

    def _decide(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        if head.method == b"CONNECT":
            self._forward.on_connect(leg, head, origin)
            return
        if head.target.startswith(self._own_paths) and self._serve_own(leg, head, origin):
            return
        route = self._table.route(head)
        if isinstance(route, Route):
            refusal = self._refusal(head, origin)
            if refusal is None and headers.is_last_hop(head):
                LocalAnswer.refuse(leg, errors.options_of_ours(), b"")
                return
            if refusal is None:
                self.relay.begin(leg, head, origin, self._edges.pool(route.pool), route.target)
                return
            route = refusal
        self._refuse(leg, head, route)

    def shortcut(self, head: RequestHead, origin: Origin) -> Find | None:
        """Ready answers for DNS over HTTPS by GET, to clients whose other fields passed the guard with this request."""
        if not head.target.startswith(self._doh_path) or head.method != b"GET" or origin.scheme != b"https":
            return None
        own = self._doh is not None and self._table.is_own(host_of(head.authority)) and self._table.judge(head) is None
        return self._dns_shortcut.find if own else None

    def known(self, head: RequestHead, origin: Origin) -> Known | None:
        """Every request whose head has the shape of this one may go the short way, while the configuration stays."""
        if head.target.startswith(self._own_paths) or not self.lane.is_open:
            return None
        route = self._table.route(head)
        if not isinstance(route, Route) or self._refusal(head, origin) is not None or headers.is_last_hop(head):
            return None
        pool = self._edges.pool(route.pool)
        return None if pool.config.llm.heartbeat_s else known_request(head, origin, self.lane, pool, route.target)

    def _refusal(self, head: RequestHead, origin: Origin) -> Refusal | None:
        """Why a request that has a route is not taken all the same."""
        if origin.early_data and head.method not in SAFE:
            return Refusal(425, "too_early", "this method is not accepted in 0-RTT data (RFC 8470)")
        if head.length is not None and head.length > self.limits.max_body_bytes:
            limit = self.limits.max_body_bytes
            return Refusal(
                413,
                "body_too_large",
                f"request body of {head.length} bytes, the limit is {limit} (proxy.max_body_size)",
            )
        return None

    def _serve_own(self, leg: Leg, head: RequestHead, origin: Origin) -> bool:
        """DNS over HTTPS and the PAC file, under our own names and behind the same guard as everything else."""
        path = head.target.split(b"?", 1)[0]
        if not self._table.is_own(host_of(head.authority)) or self._table.judge(head) is not None:
            return False
        if path == self._doh_path and origin.scheme == b"https" and self._doh:
            self._serve_dns(leg, head, origin)
            return True
        if path == b"/proxy.pac" and self._forward.enabled:
            self._forward.serve_pac(leg, head)
            return True
        return False

    def _serve_dns(self, leg: Leg, head: RequestHead, origin: Origin) -> None:
        gathering = LocalAnswer(leg, MAX_DNS_MESSAGE, lambda body: self._answer_dns(leg, head, origin, body))
        if head.length is not None and head.length > MAX_DNS_MESSAGE:
            gathering.give_up()  # a client that waits for 100 is spared the body
        elif head.expect_continue and head.length != 0:
            leg.interim(ResponseHead(100, []))  # RFC 9110 10.1.1: nobody else will say it

    def _answer_dns(self, leg: Leg, head: RequestHead, origin: Origin, body: bytes | None) -> None:
        """`body` None: it was longer than a DNS message can be."""
        assert self._doh is not None
        if body is None:
            say(leg, *errors.own_answer(413, "a DNS message has at most 65535 bytes", code="body_too_large"))
            return

        def done(reply: DohReply) -> None:
            no_body = head.method == b"HEAD"
            say(
                leg, ResponseHead(reply.status, list(reply.fields), length=len(reply.body), no_body=no_body), reply.body
            )

        client = headers.client_of(origin.peer, head.fields, self.relay.trusted)
        self._doh.respond(head.method, head.target, head.get(b"content-type"), body, done, client)

    def _refuse(self, leg: Leg, head: RequestHead, refusal: Refusal) -> None:
        dialect = errors.dialect_of(head.target)
        answer, body = errors.own_answer(refusal.status, refusal.message, code=refusal.code, dialect=dialect)
        answer.no_body = head.method == b"HEAD"
        LocalAnswer.refuse(leg, answer, body)
