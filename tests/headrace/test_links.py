"""Split horizon from the machine's links, and the few names that a portal may see."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.model import DnsUpstream, Resolver, Zone
from headrace.links import LinkWatch, outward_links
from resolver.io.upstream_set import UpstreamView
from resolver.link_zones import CHECK_NAMES, Link, learned_zones, portal_zones, read_link

PUBLIC = DnsUpstream("https", "dns.example", 443, "/dns-query")
VPN = """# This is private data. Do not parse.
LLMNR=yes
SERVERS=10.8.0.1 fd00::53
DOMAINS=~corp.example ~10.in-addr.arpa search.example
"""
WIFI = "SERVERS=192.168.1.1\nDOMAINS=~evil.example home.example ~.\n"


def server(host: str, port: int = 53) -> DnsUpstream:
    return DnsUpstream("udp", host, port, addresses=(host,))


@pytest.mark.parametrize(
    ("text", "link"),
    [
        (VPN, Link((server("10.8.0.1"), server("fd00::53")), ("corp.example", "10.in-addr.arpa"))),
        (
            "DNS=10.0.0.53\nDOMAINS=search.example\nROUTE_DOMAINS=lan.example\n",
            Link((server("10.0.0.53"),), ("lan.example",)),
        ),
        (
            "SERVERS=10.0.0.1:5353#dns.name [fd00::1]:54 fe80::1%3\n",
            Link((server("10.0.0.1", 5353), server("fd00::1", 54))),
        ),
        ("SERVERS=127.0.0.53 ::1 0.0.0.0 nonsense 1.2.3.4:99999\nDOMAINS=~. ~com ~ ~a..b\n", Link()),
        ("", Link()),
        ("\x00\xff=\nSERVERS\n", Link()),
    ],
)
def test_a_links_file_says_servers_and_routes(text: str, link: Link) -> None:
    assert read_link(text) == link


def test_a_vpn_gets_its_domains_and_the_network_one_is_in_gets_none() -> None:
    links = {"3": read_link(VPN), "2": read_link(WIFI)}
    zones = learned_zones(links, ["2"], ["10.in-addr.arpa"])
    assert zones == [Zone("corp.example", (server("10.8.0.1"), server("fd00::53")))]
    assert learned_zones(links, ["2", "3"], []) == []


def test_a_portal_sees_the_check_names_alone() -> None:
    zones = portal_zones([server("192.168.1.1")], ["captive.apple.com"])
    assert {zone.name for zone in zones} == set(CHECK_NAMES) - {"captive.apple.com"}
    assert portal_zones([], []) == []


class Machine:
    """Two folders as systemd keeps them; link 2 carries the default route."""

    def __init__(self, folder: Path) -> None:
        self.netif = folder / "netif"
        self.netif.mkdir()
        self.resolv = folder / "resolv.conf"
        self.outward: set[str] | None = {"2"}
        self.path: tuple[str, ...] = ("192.168.1.7",)
        self.watch = LinkWatch(
            folders=(self.netif, folder / "none"),
            resolv_conf=self.resolv,
            outward=lambda: self.outward,
            path=lambda: self.path,
        )

    def look(self, state: str = "healthy") -> bool:
        return self.watch.look(Resolver(upstreams=(PUBLIC,)), [UpstreamView(PUBLIC.url, state, 0.01, 1, 0, "")])


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_vpn_that_comes_and_goes_is_seen(machine: Machine) -> None:
    assert not machine.look()
    (machine.netif / "3").write_text(VPN)
    (machine.netif / "notes").write_text(VPN.replace("corp", "other"))
    assert machine.look() and [zone.name for zone in machine.watch.zones] == ["corp.example", "10.in-addr.arpa"]
    assert not machine.look()
    (machine.netif / "3").unlink()
    assert machine.look() and machine.watch.zones == ()


def test_a_portal_is_suspected_when_all_are_down_with_a_way_out_and_over_with_an_answer(machine: Machine) -> None:
    (machine.netif / "2").write_text(WIFI)
    machine.path = ()
    assert not machine.look("down") and not machine.watch.portal
    machine.path = ("192.168.1.7",)
    assert machine.look("down") and machine.watch.portal
    assert {zone.name for zone in machine.watch.zones} == set(CHECK_NAMES)
    assert machine.watch.zones[0].upstreams == (server("192.168.1.1"),)
    assert not machine.look("recovering")
    assert machine.look("healthy") and not machine.watch.portal and machine.watch.zones == ()


def test_without_systemd_a_portals_servers_are_those_of_resolv_conf(machine: Machine) -> None:
    machine.resolv.write_text("# by hand\nnameserver 127.0.0.1\nnameserver 192.168.1.254\nsearch lan\n")
    assert machine.look("down")
    assert machine.watch.zones[0].upstreams == (server("192.168.1.254"),)


def test_no_link_is_believed_while_the_outer_network_is_unknown(machine: Machine) -> None:
    (machine.netif / "3").write_text(VPN)
    machine.outward = None
    assert not machine.look() and machine.watch.zones == ()


ROUTES = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


@pytest.mark.parametrize(
    ("v4", "v6", "leads_out"),
    [
        ("lo 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\n", "", True),
        ("lo 00000080 0101A8C0 0003 0 0 0 00000080 0 0 0\n", "", True),  # 128.0.0.0/1, a half of everything
        ("lo 0000080A 00000000 0001 0 0 0 0000FFFF 0 0 0\n", "", False),
        ("", f"{'0' * 32} 00 {'0' * 32} 00 {'0' * 32} ffffffff 1 0 200200 lo\n", False),
    ],
)
def test_wide_routes_lead_out(v4: str, v6: str, leads_out: bool, tmp_path: Path) -> None:
    assert outward_links(tmp_path) is None
    (tmp_path / "route").write_text(ROUTES + v4)
    (tmp_path / "ipv6_route").write_text(v6)
    assert outward_links(tmp_path) == ({"1"} if leads_out else set())
