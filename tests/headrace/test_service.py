"""What a service manager hears from us on a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.service import Notifier


class Manager:
    """The socket that systemd would hold."""

    def __init__(self, address: str) -> None:
        self.environ = {"NOTIFY_SOCKET": address.replace("\0", "@"), "PATH": "/bin"}
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(2.0)

    def hears(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    address = str(tmp_path / "notify") if request.param == "path" else f"\0headrace-test-{os.getpid()}-{time.time_ns()}"
    made = Manager(address)
    yield made
    made.socket.close()


async def test_life_of_a_service_is_told_in_order(manager: Manager) -> None:
    notifier = Notifier(manager.environ)
    assert manager.environ == {"PATH": "/bin"}, "a child must not speak for us"
    notifier.ready("2 listeners,\n 3 pools")
    assert manager.hears() == ["READY=1", "STATUS=2 listeners, 3 pools"]
    before = time.monotonic_ns() // 1000
    notifier.reloading()
    word, since = manager.hears()
    assert word == "RELOADING=1" and before <= int(since.removeprefix("MONOTONIC_USEC=")) <= time.monotonic_ns() // 1000
    notifier.ready()
    assert manager.hears() == ["READY=1"]
    notifier.status("draining 3 streams")
    assert manager.hears() == ["STATUS=draining 3 streams"]
    notifier.extend_timeout(30.0)
    assert manager.hears() == ["EXTEND_TIMEOUT_USEC=30000000"]
    notifier.stopping()
    assert manager.hears() == ["STOPPING=1", "STATUS=stopping"]
    notifier.close()
    notifier.close()
    notifier.ready()


async def test_watchdog_is_fed_twice_in_each_interval_by_the_loop(manager: Manager) -> None:
    manager.environ |= {"WATCHDOG_USEC": "100000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(manager.environ)
    notifier.ready()
    assert manager.hears() == ["READY=1"]
    fed = [await asyncio.to_thread(manager.hears) for _ in range(3)]
    assert fed == [["WATCHDOG=1"]] * 3
    notifier.close()


async def test_loop_that_hangs_feeds_nobody(manager: Manager) -> None:
    manager.environ |= {"WATCHDOG_USEC": "40000"}
    notifier = Notifier(manager.environ)
    notifier.ready()
    assert [manager.hears(), manager.hears()] == [["READY=1"], ["WATCHDOG=1"]]
    manager.socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        manager.hears()  # blocks the loop for longer than the interval
    notifier.close()


async def test_watchdog_of_another_process_is_not_ours(manager: Manager) -> None:
    manager.environ |= {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": "1"}
    notifier = Notifier(manager.environ)
    notifier.ready()
    assert manager.hears() == ["READY=1"]
    manager.socket.settimeout(0.1)
    with pytest.raises(TimeoutError):
        await asyncio.to_thread(manager.hears)
    notifier.close()


async def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000"})
    for say in (notifier.ready, notifier.reloading, notifier.stopping, notifier.close):
        say()


async def test_manager_that_cannot_be_reached_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")})
    notifier.ready()
    assert len(caplog.records) == 1 and "nobody" in caplog.text
    notifier.close()


async def test_manager_that_does_not_read_never_blocks_us(manager: Manager) -> None:
    notifier = Notifier(manager.environ)
    for _ in range(2000):
        notifier.status("x" * 300)
    assert len(manager.hears()[0]) == len("STATUS=") + 200
    notifier.close()
