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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from config.model import DnsUpstream, Resolver, Zone
from headrace.network import way_out
from resolver.io.upstream_set import UpstreamView
from resolver.link_zones import Link, learned_zones, portal_zones, read_link

LOOK_S = 2.0
FOLDERS = (Path("/run/systemd/resolve/netif"), Path("/run/systemd/netif/links"))
RESOLV_CONF = Path("/etc/resolv.conf")
LARGEST = 64 * 1024

logger = logging.getLogger("headrace.links")


class LinkWatch:
    """`look` reads the links again; `zones` are what to add to the configured ones."""

    def __init__(
        self,
        *,
        folders: Sequence[Path] = FOLDERS,
        resolv_conf: Path = RESOLV_CONF,
        default_links: Callable[[], Iterable[str]] | None = None,
        path: Callable[[], Sequence[str]] = way_out,
    ) -> None:
        self._folders, self._resolv_conf = folders, resolv_conf
        self._default_links = default_links or _default_links
        self._path = path
        self.portal = False
        self.zones: tuple[Zone, ...] = ()

    def look(self, config: Resolver, upstreams: Sequence[UpstreamView]) -> bool:
        """Whether `zones` changed. `upstreams`: how those of `config` do, zones' own included."""
        links, default = self._read_links(), set(self._default_links())
        configured = [zone.name for zone in config.zones]
        zones = learned_zones(links, default, configured)
        self._judge_portal(config, upstreams)
        if self.portal:
            servers = [server for name in sorted(default) for server in links.get(name, Link()).servers]
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


def _default_links(proc: Path = Path("/proc/net")) -> set[str]:
    """Indices of the interfaces that a default route goes through."""
    names = set()
    for file, at, zeros in (("route", 0, (1, "00000000")), ("ipv6_route", 9, (0, "0" * 32))):
        try:
            lines = (proc / file).read_text().splitlines()
        except OSError:
            continue
        for fields in map(str.split, lines):
            if len(fields) > at and fields[zeros[0]] == zeros[1] and fields[at] != "lo":
                names.add(fields[at])
    return {str(index) for name in names if (index := _index(name))}


def _index(name: str) -> int:
    try:
        return socket.if_nametoindex(name)
    except OSError:
        return 0
