"""The parts of the running program: who is given what, what changes together, and who is closed before whom.

      config -> UpstreamSet -> ResolverService -> EdgeSet -> Gateway -> listeners
                TicketRing -> TlsIdentity ----------------------^

Theory: whoever asks is made after those it asks, and closed before them. A part is told of a change after those it asks too.

Owner: the daemon, which decides when. Nothing here reads a file of configuration, hears a signal or owns a task.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from config.model import Config, Resolver, Tickets
from headrace.identity import Certificate, OwnIdentity
from headrace.links import LinkWatch
from headrace.listeners import Listeners
from proxy.io.edges import EdgeSet
from proxy.io.gateway import Gateway
from proxy.io.tls import TicketRing
from proxy.waterfall import Finished
from resolver.designation import designations
from resolver.io.clock import now
from resolver.io.doh_server import DohService
from resolver.io.service import ResolverService
from resolver.io.shared_cache import SharedCache
from resolver.io.upstream_set import UpstreamSet

logger = logging.getLogger("headrace.parts")


class Parts:
    """Made from a configuration, serving nobody yet. `record` hears of each finished exchange."""

    def __init__(self, config: Config, *, record: Callable[[Finished], None]) -> None:
        resolver, redis = config.resolver, config.resolver.cache.redis
        self.ring = TicketRing(config.tls.tickets, state_dir=config.state_dir)
        self.identity = OwnIdentity(self.ring)
        self.links = LinkWatch()
        self.upstreams = UpstreamSet(resolver, clock=now)
        self.shared = SharedCache(redis, self.upstreams, clock=now) if redis else None
        self.resolver = ResolverService(
            resolver, state_dir=config.state_dir, upstreams=self.shared or self.upstreams, clock=now
        )
        self.doh = DohService(self.resolver, resolver.doh_path)
        self.edges = EdgeSet(resolver=self.resolver, clock=now)
        self.gateway = Gateway(edges=self.edges, resolver=self.resolver, doh=self.doh, clock=now, record=record)
        self.listeners = Listeners(self.gateway, self.resolver)

    # ---------------------------------------------------------------- what changes together

    def apply(self, config: Config) -> None:
        """Edges and routes change in one turn of the loop: no request sees a route to a pool that is not there."""
        self.doh.path = config.resolver.doh_path.encode()
        self.edges.apply(config.pools)
        self.gateway.apply(config, own_names=self.identity.names)

    def resolve_by(self, config: Resolver) -> None:
        """The resolver's configuration, and what the machine's links know; a configured zone wins."""
        names = {zone.name for zone in config.zones}
        zones = (*config.zones, *(zone for zone in self.links.zones if zone.name not in names))
        config = replace(config, zones=zones)
        self.upstreams.reconfigure(config)
        self.resolver.reconfigure(config)

    def take_tickets_by(self, tickets: Tickets) -> None:
        self.ring.configure(tickets)
        self.listeners.retune(tickets)

    def use_certificate(self, certificate: Certificate | None, doh_path: str) -> None:
        """None: the one in use stays."""
        if self.identity.use(certificate):
            for quic in self.listeners.quic:
                quic.renew_certificate()
            self.designate(doh_path)

    def designate(self, doh_path: str) -> None:
        """Tell clients of plain DNS of our encrypted listeners (RFC 9462), by a name that the certificate proves."""
        name = next(iter(self.identity.names), "")
        self.resolver.designate(designations(self.listeners.addresses, name, doh_path))

    def network_changed(self) -> None:
        """Whatever was learnt of the old network is void, first for names, then for those who ask for them."""
        self.upstreams.network_changed()
        if self.shared is not None:
            self.shared.network_changed()
        self.resolver.network_changed()
        self.edges.network_changed()

    # ---------------------------------------------------------------- the end

    async def close(self) -> None:
        """Close every part, the ones that are asked last."""
        await close_one(self.listeners.close())
        await close_one(self.edges.close())
        await close_one(self.resolver.close())
        if self.shared is not None:
            await close_one(self.shared.close())
        await close_one(self.upstreams.close())
        await close_one(self.ring.close())
        self.identity.close()


async def close_one(closing: Awaitable[None]) -> None:
    """A part that fails to close does not keep the others open."""
    try:
        await closing
    except Exception:
        logger.exception("a part did not close")
