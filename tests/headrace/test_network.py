"""A change of the network is told once, and only when the way out is another."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.network import NetworkWatch, way_out
from tests.patience import no_hang

ROOT = Path(__file__).parent.parent.parent
SETTLE_S = 0.02


class Kernel:
    """Says that something changed, and has a way out."""

    def __init__(self) -> None:
        self.ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        theirs.setblocking(False)
        self.path: tuple[str, ...] = ("10.0.0.2", "wlan0 0100000A")
        self.reasons: list[str] = []
        self.told = asyncio.Event()
        self.read = asyncio.Event()
        self.watch = NetworkWatch(self._on_changed, path=self._way_out, netlink=theirs, settle_s=SETTLE_S)

    def _way_out(self) -> tuple[str, ...]:
        self.read.set()
        return self.path

    def _on_changed(self, reason: str) -> None:
        self.reasons.append(reason)
        self.told.set()

    def say(self) -> None:
        self.ours.send(b"a message of rtnetlink")

    def close(self) -> None:
        self.watch.close()
        self.ours.close()


@pytest.fixture
async def kernel() -> AsyncIterator[Kernel]:
    made = Kernel()
    yield made
    made.close()


async def within(event: asyncio.Event) -> None:
    async with no_hang():
        await event.wait()


async def test_another_way_out_is_told_once_however_often_the_kernel_speaks(kernel: Kernel) -> None:
    kernel.path = ("192.168.1.2", "eth0 0101A8C0")
    for _ in range(5):
        kernel.say()
    await within(kernel.told)
    assert kernel.reasons == [
        "the way out changed from 10.0.0.2, wlan0 0100000A to 192.168.1.2, eth0 0101A8C0",
    ]


async def test_a_bridge_that_flaps_is_no_change(kernel: Kernel) -> None:
    kernel.read.clear()
    kernel.say()
    await within(kernel.read)  # it was looked at
    assert kernel.reasons == []


async def test_going_offline_and_back_is_two_changes(kernel: Kernel) -> None:
    home, kernel.path = kernel.path, ()
    kernel.say()
    await within(kernel.told)
    kernel.told.clear()
    kernel.path = home
    kernel.say()
    await within(kernel.told)
    assert [reason.rpartition(" to ")[2] for reason in kernel.reasons] == ["none", "10.0.0.2, wlan0 0100000A"]


async def test_a_closed_watch_says_nothing(kernel: Kernel) -> None:
    kernel.path = ()
    kernel.say()
    kernel.watch.close()
    await asyncio.sleep(2 * SETTLE_S)
    assert kernel.reasons == []


def test_the_way_out_can_be_read_here() -> None:
    assert way_out() == way_out()


IN_NAMESPACE = """
import asyncio, subprocess
from headrace.network import NetworkWatch
from tests.patience import soon

async def main():
    told = asyncio.get_running_loop().create_future()
    watch = NetworkWatch(lambda reason: told.done() or told.set_result(reason), settle_s=0.1)
    for command in ("link add d0 type veth peer name d1", "link set d1 up", "addr add 10.9.0.2/24 dev d0", "link set d0 up",
                    "route add default via 10.9.0.1"):
        subprocess.run(["ip", *command.split()], check=True)
    print(await soon(told))
    watch.close()

asyncio.run(main())
"""


def _can_unshare() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return False
    trial = ["unshare", "-n", "ip", "link", "add", "d0", "type", "veth", "peer", "name", "d1"]
    return subprocess.run(trial, capture_output=True).returncode == 0


@pytest.mark.net
@pytest.mark.skipif(not _can_unshare(), reason="needs root, unshare and ip")
def test_a_real_route_is_heard_of() -> None:
    command = ["unshare", "-n", sys.executable, "-c", IN_NAMESPACE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert "the way out changed from none to 10.9.0.2, d0 0100090A" in done.stdout, done.stderr
