"""A bad line on one machine: two network namespaces joined by a link that delays, loses, blocks and forgets.

Kernels that tests run on may lack `netem`, so the link is a thread between two TUN devices, as in mahimahi: every IP packet
is read on one side, may be dropped, waits its turn, and is written on the other. Root and /dev/net/tun are needed.

      namespace A (workstation)              the thread                 namespace B (edge)
        10.77.0.1, fd77::1   --- line0 ---> [drop?] [delay] --- line0 ---> 10.77.0.2, fd77::2

`nat_key` is a port-translating NAT in front of A: a change of it gives every flow a new source port, as a home router's
reboot does. `mute()` is a NAT that forgot: flows it has seen go on in silence, new ones work.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Self

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
TCP, UDP = 6, 17
ADDRESS_A, ADDRESS_B = "10.77.0.1", "10.77.0.2"
ADDRESS6_B = "fd77::2"
NAT_KEY, NAT_KEY_REBOUND = 0x2A2A, 0x2B55
QUEUE = 2000  # packets on the way in one direction; more are lost


def missing() -> str:
    """Why there can be no link here, or ""."""
    if os.geteuid() != 0:
        return "needs root for network namespaces"
    if not os.access("/dev/net/tun", os.W_OK):
        return "needs /dev/net/tun"
    if shutil.which("ip") is None:
        return "needs ip (iproute2)"
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, check=False)
    return "" if done.returncode == 0 else "network namespaces are not allowed here"


@dataclass(slots=True)
class Conditions:
    """How bad the line is now. Changed while it runs; what is on the way keeps its time."""

    delay_s: float = 0.025
    loss: float = 0.0
    drop_udp: bool = False
    drop_ipv6: bool = False
    nat_key: int = 0
    muted: set[bytes] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Packet:
    """What the link looks at: `protocol`, and the port of A's side that names the flow."""

    ipv6: bool
    protocol: int
    port_at: int  # offset of A's port; 0 when the protocol has none

    @classmethod
    def read(cls, raw: bytes, *, from_a: bool) -> Packet:
        ipv6 = raw[0] >> 4 == 6
        head = 40 if ipv6 else (raw[0] & 15) * 4
        protocol = raw[6] if ipv6 else raw[9]
        has_ports = protocol in (TCP, UDP) and len(raw) >= head + 4
        return cls(ipv6, protocol, (head if from_a else head + 2) if has_ports else 0)


class Direction:
    """One way of the link; `now` is given."""

    def __init__(self, out_fd: int, conditions: Conditions, rng: random.Random, *, from_a: bool) -> None:
        self.udp_seen = 0
        self._out_fd, self._conditions, self._rng, self._from_a = out_fd, conditions, rng, from_a
        self._queue: deque[tuple[float, bytes]] = deque(maxlen=QUEUE)
        self.flows: set[bytes] = set()

    def offer(self, raw: bytes, now: float) -> None:
        said, packet = self._conditions, Packet.read(raw, from_a=self._from_a)
        self.udp_seen += packet.protocol == UDP
        if said.nat_key and not packet.ipv6 and packet.port_at:
            raw = translated(raw, packet, said.nat_key)
        if not self._passes(raw, packet):
            return
        self._queue.append((now + said.delay_s, raw))

    def _passes(self, raw: bytes, packet: Packet) -> bool:
        said = self._conditions
        if (said.drop_udp and packet.protocol == UDP) or (said.drop_ipv6 and packet.ipv6):
            return False
        if packet.port_at:
            flow = bytes([packet.protocol]) + raw[packet.port_at : packet.port_at + 2]
            self.flows.add(flow)
            if flow in said.muted:
                return False
        return self._rng.random() >= said.loss

    def deliver(self, now: float) -> float | None:
        """Write what is due; when the next is due, or None."""
        while self._queue and self._queue[0][0] <= now:
            try:
                os.write(self._out_fd, self._queue.popleft()[1])
            except OSError:
                continue  # the device is down, or full: lost, as on any line
        return self._queue[0][0] if self._queue else None


def translated(raw: bytes, packet: Packet, key: int) -> bytes:
    """The packet with A's port changed, checksum kept right (RFC 1624)."""
    at = packet.port_at
    check_at = (raw[0] & 15) * 4 + (6 if packet.protocol == UDP else 16)
    out = bytearray(raw)
    old = int.from_bytes(raw[at : at + 2], "big")
    out[at : at + 2] = (old ^ key).to_bytes(2, "big")
    check = int.from_bytes(raw[check_at : check_at + 2], "big")
    if check or packet.protocol == TCP:
        total = (~check & 0xFFFF) + (~old & 0xFFFF) + (old ^ key)
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        out[check_at : check_at + 2] = (~total & 0xFFFF or 0xFFFF).to_bytes(2, "big")
    return bytes(out)


class LossyLink:
    """The namespaces and the thread; a context manager that removes them all."""

    def __init__(self, *, delay_s: float = 0.025, loss: float = 0.0, nat: bool = False, seed: int = 1) -> None:
        tag = uuid.uuid4().hex[:6]
        self.namespace_a, self.namespace_b = f"hra{tag}", f"hrb{tag}"
        self.now = Conditions(delay_s, loss, nat_key=NAT_KEY if nat else 0)
        self._rng = random.Random(seed)
        self._fds: list[int] = []
        self._stop_reading, self._stop_writing = os.pipe()

    def __enter__(self) -> Self:
        try:
            for name, mine, peer, mine6 in (
                (self.namespace_a, ADDRESS_A, ADDRESS_B, "fd77::1"),
                (self.namespace_b, ADDRESS_B, ADDRESS_A, ADDRESS6_B),
            ):
                ip("netns", "add", name)
                self._fds.append(open_tun(name))
                ip("-n", name, "addr", "add", mine, "peer", peer, "dev", "line0")
                ip("-n", name, "-6", "addr", "add", f"{mine6}/64", "dev", "line0", "nodad")
                ip("-n", name, "link", "set", "line0", "up")
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "route", "add", "default", "dev", "line0")
            self.a_to_b = Direction(self._fds[1], self.now, self._rng, from_a=True)
            self.b_to_a = Direction(self._fds[0], self.now, self._rng, from_a=False)
            self._thread = threading.Thread(target=self._carry, name="lossy-link", daemon=True)
            self._thread.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._stop_writing)
        if hasattr(self, "_thread"):
            self._thread.join()
        for name in (self.namespace_a, self.namespace_b):
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)
        for fd in (*self._fds, self._stop_reading):
            os.close(fd)

    def mute(self) -> None:
        """Drop every packet of the flows seen so far, both ways."""
        self.now.muted |= self.a_to_b.flows | self.b_to_a.flows

    def rebind(self) -> None:
        """The NAT gives every flow a new source port; what comes for the old one is lost."""
        assert self.now.nat_key, "made without nat=True"
        self.now.nat_key = NAT_KEY_REBOUND

    def pull(self) -> None:
        """Pull the cable at A."""
        ip("-n", self.namespace_a, "link", "set", "line0", "down")

    def plug(self) -> None:
        ip("-n", self.namespace_a, "link", "set", "line0", "up")
        ip("-n", self.namespace_a, "route", "replace", "default", "dev", "line0")

    def _carry(self) -> None:
        ways = {self._fds[0]: self.a_to_b, self._fds[1]: self.b_to_a}
        wait_s = 1.0
        while True:
            readable, _, _ = select.select([*ways, self._stop_reading], [], [], wait_s)
            if self._stop_reading in readable:
                return
            now = time.monotonic()
            for fd in readable:
                for raw in packets(fd):
                    ways[fd].offer(raw, now)
            dues = [due for due in (way.deliver(time.monotonic()) for way in ways.values()) if due is not None]
            wait_s = max(0.0, min(dues) - time.monotonic()) if dues else 1.0


def packets(fd: int) -> list[bytes]:
    """What a device has to say, at most 64 packets."""
    read: list[bytes] = []
    while len(read) < 64:
        try:
            read.append(os.read(fd, 65536))
        except OSError:  # nothing more, or the device is down
            break
    return read


def enter(namespace: str) -> None:
    """Move this thread, and no other, into a namespace."""
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"setns {namespace}")


def open_tun(namespace: str) -> int:
    """A TUN device `line0` that lives in `namespace`; the thread that made it is gone."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            enter(namespace)
            fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            made.append(fd)
            fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", b"line0", IFF_TUN | IFF_NO_PI))
        except OSError as exc:
            made.append(exc)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    last = made[-1]
    if isinstance(last, OSError):
        raise last
    return last


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
