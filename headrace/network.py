"""Notice that the machine is on another network, or woke from sleep, so that dead connections are not waited for.

Theory: the kernel says over netlink (rtnetlink(7)) that links, addresses or routes changed; a docker bridge that flaps says so
too. What counts is the way out: which of our addresses, through which gateways, lead to the world. That *path* is read again
`settle_s` after the last message, and only a path that differs is a change. Sleep is told by the clocks: CLOCK_BOOTTIME went
on while CLOCK_MONOTONIC stood still.

Owner: the daemon. One socket, one timer; `close` ends both. Without netlink only the timer looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

SETTLE_S = 1.0
"""A new Wi-Fi brings its link, addresses and routes one after the other."""
LOOK_S = 30.0
SLEPT_S = 5.0
GROUPS = 0x1 | 0x10 | 0x40 | 0x100 | 0x400
"""RTMGRP_LINK, IPV4_IFADDR, IPV4_ROUTE, IPV6_IFADDR, IPV6_ROUTE (linux/rtnetlink.h)."""
PROBES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses of documentation (RFC 5737, 3849): asked which source would lead there; no packet is sent."""

logger = logging.getLogger("headrace.network")
Path4And6 = tuple[str, ...]


class NetworkWatch:
    """Calls `changed(reason)` on the loop, once for each change. `path` and `netlink` are for tests; the latter is owned."""

    def __init__(
        self,
        changed: Callable[[str], None],
        *,
        path: Callable[[], Path4And6] | None = None,
        netlink: socket.socket | None = None,
        settle_s: float = SETTLE_S,
    ) -> None:
        self._changed = changed
        self._path = path or way_out
        self._settle_s = settle_s
        self._loop = asyncio.get_running_loop()
        self._known = self._path()
        self._asleep_s = _asleep_s()
        self._settling: asyncio.TimerHandle | None = None
        self._netlink = netlink or _subscribed()
        if self._netlink is not None:
            self._loop.add_reader(self._netlink, self._hear)
        self._looking = self._loop.call_later(LOOK_S, self._look_again)

    def close(self) -> None:
        self._looking.cancel()
        if self._settling is not None:
            self._settling.cancel()
        if self._netlink is not None:
            self._loop.remove_reader(self._netlink)
            self._netlink.close()
            self._netlink = None

    def _hear(self) -> None:
        assert self._netlink is not None
        # ENOBUFS: messages were lost. What they said does not matter, that they came does.
        with contextlib.suppress(OSError):
            while self._netlink.recv(65536):
                pass
        if self._settling is not None:
            self._settling.cancel()
        self._settling = self._loop.call_later(self._settle_s, self._compare)

    def _look_again(self) -> None:
        self._looking = self._loop.call_later(LOOK_S, self._look_again)
        asleep_s = _asleep_s()
        slept_s, self._asleep_s = asleep_s - self._asleep_s, asleep_s
        if slept_s > SLEPT_S:
            self._known = self._path()
            self._say(f"awake after {slept_s:.0f} s of sleep")
        elif self._netlink is None:
            self._compare()

    def _compare(self) -> None:
        self._settling = None
        path, known = self._path(), self._known
        if path != known:
            self._known = path
            self._say(f"the way out changed from {_text(known)} to {_text(path)}")

    def _say(self, reason: str) -> None:
        logger.info("%s", reason)
        self._changed(reason)


def way_out() -> Path4And6:
    """Our source addresses towards the world and the gateways on the way; empty when there is no way."""
    return (*filter(None, (_source(family, address) for family, address in PROBES)), *_gateways())


def _source(family: socket.AddressFamily, address: str) -> str:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            return str(asking.getsockname()[0])
    except OSError:
        return ""


def _gateways(proc: Path = Path("/proc/self/net")) -> Iterable[str]:
    """Interface and gateway of each default route. Two networks may give us the same address; rarely the same of both."""
    for name, wanted in (("route", _default_v4), ("ipv6_route", _default_v6)):
        try:
            lines = (proc / name).read_text().splitlines()
        except OSError:  # hidden by a sandbox (ProcSubset=pid hides /proc/net, and not this one), or not Linux
            continue
        yield from sorted({found for line in lines if (found := wanted(line.split()))})


def _default_v4(fields: list[str]) -> str:
    is_default = len(fields) > 7 and fields[1] == fields[7] == "00000000"
    return f"{fields[0]} {fields[2]}" if is_default else ""


def _default_v6(fields: list[str]) -> str:
    is_default = len(fields) > 9 and fields[0] == "0" * 32 and fields[1] == "00" and fields[9] != "lo"
    return f"{fields[9]} {fields[4]}" if is_default else ""


def _asleep_s() -> float:
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()


def _subscribed() -> socket.socket | None:
    """A netlink socket that hears of changes; None where there is none, or none is allowed."""
    if not hasattr(socket, "AF_NETLINK"):
        return None
    try:
        netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, 0)  # NETLINK_ROUTE
    except OSError as exc:
        logger.info("changes of the network are looked for every %g s: no netlink (%s)", LOOK_S, exc.strerror)
        return None
    try:
        netlink.setblocking(False)
        netlink.bind((0, GROUPS))
    except OSError as exc:
        logger.info("changes of the network are looked for every %g s: no netlink (%s)", LOOK_S, exc.strerror)
        netlink.close()
        return None
    return netlink


def _text(path: Path4And6) -> str:
    return ", ".join(path) or "none"
