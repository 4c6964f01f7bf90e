"""Watch the machine's links for split horizon, and tell a portal from an outage of our own.

Theory: files and not D-Bus. `/run/systemd/resolve/netif/` is what resolved itself reads after a restart, so it holds what
NetworkManager and VPNs said over D-Bus; reading it needs no library, no bus and no permission, and works for a user's
daemon too. `/run/systemd/netif/links/` is networkd's. Both are a few hundred bytes, read every LOOK_S: a VPN that takes some
networks only does not change the way out, so no event of `headrace/network.py` tells of it.

Portal: all public upstreams are down while there is a way out. It is a suspicion, shown in `headrace status`' JSON and in
the log; what it changes is said in `resolver/link_zones.py`. It ends with the first answer of an upstream.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from config.model import DnsUpstream, Resolver, Zone
from headrace.network import way_out
from resolver.io.upstream_set import UpstreamView
from resolver.link_zones import Link, learned_zones, portal_zones, read_link

LOOK_S = 2.0
FOLDERS = (Path("/run/systemd/resolve/netif"), Path("/run/systemd/netif/links"))
RESOLV_CONF = Path("/etc/resolv.conf")
LARGEST = 64 * 1024
WIDE = 8

logger = logging.getLogger("headrace.links")


class LinkWatch:
    """`look` reads the links again; `zones` are what to add to the configured ones."""

    def __init__(
        self,
        *,
        folders: Sequence[Path] = FOLDERS,
        resolv_conf: Path = RESOLV_CONF,
        outward: Callable[[], set[str] | None] | None = None,
        path: Callable[[], Sequence[str]] = way_out,
    ) -> None:
        self._folders, self._resolv_conf = folders, resolv_conf
        self._outward = outward or outward_links
        self._path = path
        self.portal = False
        self.zones: tuple[Zone, ...] = ()

    def look(self, config: Resolver, upstreams: Sequence[UpstreamView]) -> bool:
        """Whether `zones` changed. `upstreams`: how those of `config` do, zones' own included."""
        links, outward = self._read_links(), self._outward()
        configured = [zone.name for zone in config.zones]
        # Not knowing which network is the outer one, no link is believed.
        zones = [] if outward is None else learned_zones(links, outward, configured)
        self._judge_portal(config, upstreams)
        if self.portal:
            servers = [server for name in sorted(outward or ()) for server in links.get(name, Link()).servers]
            zones += portal_zones(servers or self._resolv_servers(), [*configured, *(zone.name for zone in zones)])
        if tuple(zones) == self.zones:
            return False
        self._say(zones)
        self.zones = tuple(zones)
        return True

    def _judge_portal(self, config: Resolver, upstreams: Sequence[UpstreamView]) -> None:
        public = {upstream.url for upstream in config.upstreams}
        states = [view.state for view in upstreams if view.url in public]
        answering = any(state == "healthy" for state in states)
        silent = bool(states) and all(state in ("down", "recovering") for state in states)
        if silent and not self.portal and self._path():
            self.portal = True
            logger.warning("no upstream can be reached though there is a way out: a portal may stand in the way")
        elif answering and self.portal:
            self.portal = False
            logger.info("upstreams answer again")

    def _say(self, zones: Sequence[Zone]) -> None:
        for zone in set(zones) - set(self.zones):
            logger.info("%s is asked of %s", zone.name, ", ".join(upstream.url for upstream in zone.upstreams))
        for zone in set(self.zones) - set(zones):
            logger.info("%s is asked as all names are", zone.name)

    def _read_links(self) -> dict[str, Link]:
        """By interface index; the first folder that knows a link wins."""
        links: dict[str, Link] = {}
        for folder in self._folders:
            for index, text in _texts(folder):
                link = read_link(text)
                if link.servers:
                    links.setdefault(index, link)
        return links

    def _resolv_servers(self) -> list[DnsUpstream]:
        try:
            lines = self._resolv_conf.read_text("utf-8", "replace")[:LARGEST].splitlines()
        except OSError:
            return []
        words = [line.split() for line in lines]
        servers = " ".join(word[1] for word in words if len(word) > 1 and word[0] == "nameserver")
        return list(read_link(f"SERVERS={servers}").servers)


def _texts(folder: Path) -> list[tuple[str, str]]:
    try:
        files = [file for file in sorted(folder.iterdir()) if file.name.isdecimal()]
    except OSError:  # no systemd here, or a sandbox
        return []
    found = []
    for file in files[:256]:
        try:
            with file.open(encoding="utf-8", errors="replace") as opened:
                found.append((file.name, opened.read(LARGEST)))
        except OSError:  # the link went meanwhile
            continue
    return found


def outward_links(proc: Path = Path("/proc/self/net")) -> set[str] | None:
    """Indices of the interfaces that lead to the world: a route of fewer than 8 bits goes there (two halves of /1 do as well
    as a default route). None when it cannot be known, as in a sandbox without /proc."""
    names: set[str] = set()
    readable = False
    for file, outward in (("route", _outward_v4), ("ipv6_route", _outward_v6)):
        try:
            lines = (proc / file).read_text().splitlines()
        except OSError:
            continue
        readable = True
        names.update(name for line in lines if (name := outward(line.split())))
    return {str(index) for name in names if (index := _index(name))} if readable else None


def _outward_v4(fields: list[str]) -> str:
    """`Iface Destination Gateway Flags RefCnt Use Metric Mask ..`, the mask in hexadecimal."""
    if len(fields) < 8 or fields[0] == "Iface":
        return ""
    return fields[0] if int(fields[7], 16).bit_count() < WIDE else ""


def _outward_v6(fields: list[str]) -> str:
    """`destination length source length next-hop .. device`, the length in hexadecimal; ::/0 of `lo` says unreachable."""
    if len(fields) < 10 or fields[9] == "lo":
        return ""
    return fields[9] if int(fields[1], 16) < WIDE else ""


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
