"""Learn from the machine's links who knows which names: a VPN's own domains, and a portal's check names.

Theory: systemd-resolved keeps what a VPN or NetworkManager told it about each link in a file of `KEY=value` lines. A domain
written `~corp.example` is for routing: names below it are that link's business. Two things are never taken: `~.`, which
would send every name out in the clear, and any domain of a link that carries the default route. The latter is the network
one happens to be in; whoever runs a cafe's DHCP must not get to say where `openai.com` is asked. A VPN for some networks
only, which is what split horizon is for, carries none.

While no upstream can be reached, a portal may be what stands in the way. The few names by which systems look for one may
then be asked of the network's own servers, so that its page can open; every other name waits (no fall to plain DNS).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from config.model import DnsUpstream, Zone
from resolver import wire as w

MOST_SERVERS, MOST_DOMAINS = 4, 64
CHECK_NAMES = (
    "captive.apple.com",
    "connectivitycheck.gstatic.com",
    "connectivity-check.ubuntu.com",
    "detectportal.firefox.com",
    "network-test.debian.org",
    "nmcheck.gnome.org",
    "www.msftconnecttest.com",
)
"""What Apple, Android and Chrome, Ubuntu, Firefox, Debian, GNOME and Windows fetch to find a portal."""


@dataclass(frozen=True, slots=True)
class Link:
    """One link's servers and the domains that are routed to it, without `~`."""

    servers: tuple[DnsUpstream, ...] = ()
    routes: tuple[str, ...] = ()


def read_link(text: str) -> Link:
    """Of resolved's file (SERVERS, DOMAINS) or networkd's (DNS, ROUTE_DOMAINS); what makes no sense is passed over."""
    said: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition("=")
        said.setdefault(key.strip(), []).extend(value.split())
    servers = [server for word in said.get("SERVERS", said.get("DNS", [])) if (server := _server(word))]
    routes = [word[1:] for word in said.get("DOMAINS", []) if word.startswith("~")] + said.get("ROUTE_DOMAINS", [])
    kept = dict.fromkeys(name for word in routes if (name := _domain(word.removeprefix("~"))))
    return Link(tuple(servers[:MOST_SERVERS]), tuple(kept)[:MOST_DOMAINS])


def _server(word: str) -> DnsUpstream | None:
    """`10.0.0.53`, `10.0.0.53:5353`, `[fd00::53]:5353`, with `%link` and `#name` behind; loopback is ourselves or a stub."""
    bare = word.partition("#")[0].partition("%")[0]
    host, port = bare, "53"
    if bare.startswith("["):
        host, _, port = bare[1:].partition("]:")
    elif bare.count(":") == 1:
        host, _, port = bare.partition(":")
    try:
        address = ip_address(host)
        # A link-local address means nothing without its link, which a socket of ours does not name.
        unusable = address.is_loopback or address.is_unspecified or (address.version == 6 and address.is_link_local)
        if unusable or not 0 < int(port) < 65536:
            return None
    except ValueError:
        return None
    return DnsUpstream("udp", str(address), int(port), addresses=(str(address),))


def _domain(text: str) -> str:
    """At least two labels, or a reverse zone: nobody's VPN is all of `com`."""
    try:
        name = w.name_from_text(text)
    except (ValueError, UnicodeError):
        return ""
    return w.name_to_text(name).rstrip(".") if sum(1 for _ in w.suffixes(name)) >= 3 else ""


def learned_zones(links: Mapping[str, Link], default: Iterable[str], configured: Iterable[str]) -> list[Zone]:
    """Zones of links that carry no default route; what is configured wins, and the first link of two with one domain."""
    taken = {name.lower().rstrip(".") for name in configured}
    outward = set(default)
    zones = []
    for name, link in sorted(links.items()):
        for domain in link.routes if link.servers and name not in outward else ():
            if domain not in taken:
                taken.add(domain)
                zones.append(Zone(domain, link.servers))
    return zones


def portal_zones(servers: Iterable[DnsUpstream], configured: Iterable[str]) -> list[Zone]:
    """The check names, asked of the network's own servers; none without servers."""
    found = tuple(dict.fromkeys(servers))[:MOST_SERVERS]
    taken = set(configured)
    return [Zone(name, found) for name in CHECK_NAMES if name not in taken] if found else []
