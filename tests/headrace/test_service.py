"""What a service manager hears from us on a real socket, and what we take over from it."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.service import Inherited, Notifier, inherited_sockets


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


def passed(*kinds: socket.SocketKind) -> tuple[int, list[socket.socket]]:
    """Bound sockets moved to consecutive descriptors, as a manager would leave them."""
    first, bound = 200, []
    for index, kind in enumerate(kinds):
        opened = socket.socket(socket.AF_INET, kind)
        opened.bind(("127.0.0.1", 0))
        os.dup2(opened.fileno(), first + index)
        bound.append(opened)
    return first, bound


def close(bound: list[socket.socket], inherited: list[Inherited]) -> None:
    for one in (*bound, *(each.socket for each in inherited)):
        one.close()


def test_sockets_are_taken_over_with_names_kinds_and_addresses() -> None:
    first, bound = passed(socket.SOCK_STREAM, socket.SOCK_DGRAM)
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "https:dns"}
    inherited = inherited_sockets(environ, first=first)
    assert environ == {}
    assert [(each.name, each.socket.type) for each in inherited] == [
        ("https", socket.SOCK_STREAM),
        ("dns", socket.SOCK_DGRAM),
    ]
    assert [each.socket.getsockname() for each in inherited] == [each.getsockname() for each in bound]
    assert not any(each.socket.get_inheritable() or each.socket.getblocking() for each in inherited)
    close(bound, inherited)


def test_unnamed_sockets_have_empty_names() -> None:
    first, bound = passed(socket.SOCK_STREAM)
    inherited = inherited_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}, first=first)
    assert [each.name for each in inherited] == [""]
    close(bound, inherited)


@pytest.mark.parametrize("environ", [{}, {"LISTEN_FDS": "1"}, {"LISTEN_FDS": "1", "LISTEN_PID": "1"}])
def test_sockets_of_another_process_are_left_alone(environ: dict[str, str]) -> None:
    assert inherited_sockets(environ) == []


@pytest.mark.parametrize("count", ["-1", "many", "65", "१"])
def test_senseless_count_is_an_error(count: str) -> None:
    with pytest.raises(ValueError, match="LISTEN_FDS"):
        inherited_sockets({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": count})
