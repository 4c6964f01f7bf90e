"""Remember what this network lets through: which address family, whether QUIC, and who offers HTTP/3.

Theory: a dial learns by waiting. An IPv6 that goes nowhere costs 250 ms (RFC 8305), a UDP that is dropped costs the
head start of QUIC. What was learnt is kept for each host, because a network rarely breaks a family for all of them,
and only for a while; `forget()` drops it all when the network changes.
Rules for editing: 1. no clock here; 2. each memory is bounded and has an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

FAMILY_KEPT_S = 600.0
QUIC_BLOCKED_S = 300.0  # doubles with each failure
QUIC_BLOCKED_CAP_S = 4 * 3600.0
ALT_SVC_CAP_S = 7 * 86_400.0
MAX_HOSTS = 1024


@dataclass(frozen=True, slots=True)
class _Block:
    until: float
    failures: int


class Reach:
    """One for all edges of a process. Hosts beyond MAX_HOSTS push out the oldest."""

    def __init__(self) -> None:
        self._families: dict[str, tuple[bool, float]] = {}  # host -> (IPv6 first, until)
        self._blocked: dict[tuple[str, int], _Block] = {}
        self._h3: dict[tuple[str, int], tuple[int, float]] = {}  # origin -> (UDP port, until)

    def forget(self) -> None:
        """The network changed (RFC 7838 2.2 wants the alternatives gone too)."""
        self._families.clear()
        self._blocked.clear()
        self._h3.clear()

    def order(self, host: str, addresses: Sequence[str], now: float) -> list[str]:
        """Addresses in the order to try: as given, or with the family that worked here first, still alternating."""
        prefer_v6, until = self._families.get(host, (False, 0.0))
        if now >= until:
            return list(addresses)
        first = [a for a in addresses if (":" in a) is prefer_v6]
        second = [a for a in addresses if (":" in a) is not prefer_v6]
        mixed = [a for pair in zip(first, second, strict=False) for a in pair]
        shorter = min(len(first), len(second))
        return mixed + first[shorter:] + second[shorter:]

    def connected(self, host: str, address: str, tried_first: str, now: float) -> None:
        """A race of addresses was won. A winner of the other family than the one tried first is worth remembering."""
        if (":" in address) is not (":" in tried_first):
            _put(self._families, host, (":" in address, now + FAMILY_KEPT_S))

    def quic_failed(self, host: str, port: int, now: float) -> None:
        """QUIC got no answer or was refused while TCP works: not tried for 5 min, then twice as long each time."""
        failures = self._blocked[host, port].failures if (host, port) in self._blocked else 0
        wait = min(QUIC_BLOCKED_S * 2**failures, QUIC_BLOCKED_CAP_S)
        _put(self._blocked, (host, port), _Block(now + wait, min(failures + 1, 16)))

    def quic_worked(self, host: str, port: int) -> None:
        self._blocked.pop((host, port), None)

    def quic_blocked(self, host: str, port: int, now: float) -> bool:
        block = self._blocked.get((host, port))
        return block is not None and now < block.until

    def quic_suspect(self, host: str, port: int) -> bool:
        """It failed before: the next try gets no head start over TCP."""
        return (host, port) in self._blocked

    def heard_alt_svc(self, host: str, port: int, value: bytes, now: float) -> None:
        """An answer of this origin carried Alt-Svc (RFC 7838 3). Only `h3` on the same host is taken."""
        if value.strip() == b"clear":
            self._h3.pop((host, port), None)
            return
        offered = h3_alternative(value, host)
        if offered is not None:
            udp_port, max_age_s = offered
            _put(self._h3, (host, port), (udp_port, now + min(max_age_s, ALT_SVC_CAP_S)))

    def h3_port(self, host: str, port: int, now: float) -> int | None:
        """The UDP port where an Alt-Svc said that HTTP/3 is spoken, or None."""
        udp_port, until = self._h3.get((host, port), (0, 0.0))
        return udp_port if now < until else None


def h3_alternative(value: bytes, host: str) -> tuple[int, float] | None:
    """(port, max-age in seconds) of the first usable `h3` alternative on the same host in an Alt-Svc value.

    `h3=":443"; ma=86400, h2="other:443"`: an alternative on another host would need its certificate checked against
    this one's name and is left alone. Drafts (`h3-29`) are not spoken. Nonsense is None.
    """
    for part in value.decode("latin-1").split(","):
        first, *parameters = (piece.strip() for piece in part.split(";"))
        protocol, _, authority = first.partition("=")
        alternative, _, port = authority.strip('"').rpartition(":")
        if (
            protocol == "h3"
            and alternative in ("", host)
            and port.isdecimal()
            and len(port) < 6
            and 0 < int(port) < 65536
        ):
            return int(port), _max_age(parameters)
    return None


def _max_age(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        name, _, number = parameter.partition("=")
        if name.strip() == "ma" and number.strip().strip('"').isdecimal():
            return float(number.strip().strip('"'))
    return 86_400.0


def _put(memory: dict[K, V], key: K, value: V) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MAX_HOSTS:
        del memory[next(iter(memory))]
