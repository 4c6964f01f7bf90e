"""Run the daemon as a process of its own, as a user or systemd would, and speak to its admin API.

Ready means READY=1 on NOTIFY_SOCKET: the daemon itself says when its listeners answer, so nothing here polls. What it
writes goes to a file; a daemon that dies early is quoted from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from headrace.lab.clients import Request, Target, ask
from headrace.lab.settings import DaemonPorts

READY_WITHIN_S = 45.0
STOP_WITHIN_S = 45.0
QUOTED_LINES = 15


class DaemonFailed(Exception):
    """The daemon did not do what was asked of it; the message quotes the end of its log."""


class Daemon:
    """`async with Daemon(config_file, state_dir, ports) as daemon`. Stopped with SIGTERM at the end, then SIGKILL."""

    def __init__(
        self, config_file: Path, state_dir: Path, ports: DaemonPorts, environ: Mapping[str, str] | None = None
    ) -> None:
        self.config_file = config_file
        self.state_dir = state_dir
        self.ports = ports
        self.log_file = config_file.with_suffix(".log")
        self._environ = dict(environ or {})
        self._process: asyncio.subprocess.Process | None = None
        self._notices: DaemonNotices | None = None

    async def __aenter__(self) -> Daemon:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> str:
        """What it wrote so far, stdout and stderr."""
        return self.log_file.read_text("utf-8", "replace") if self.log_file.exists() else ""

    @property
    def ca_file(self) -> Path:
        """The local CA that vouches for the daemon's own listeners."""
        return self.state_dir / "ca" / "ca.pem"

    def target(self) -> Target:
        """The https and h3 listeners."""
        return Target(self.ports.https, self.ca_file)

    def plain_target(self) -> Target:
        """The http listener for SDKs on loopback."""
        return Target(self.ports.http, None, server_name="127.0.0.1")

    async def start(self, within_s: float = READY_WITHIN_S) -> None:
        """Start it and return when it says that it is ready. Raises DaemonFailed."""
        self._notices = DaemonNotices()
        environ = {**os.environ, **self._environ, "NOTIFY_SOCKET": self._notices.address, "NO_COLOR": "1"}
        command = (sys.executable, "-m", "headrace", "run", "--config", str(self.config_file))
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )
        try:
            await self._until(self._notices.ready, within_s)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> int:
        """SIGTERM, and SIGKILL when it does not end; the exit code, -9 when it had to be killed."""
        assert self._process is not None
        if self._process.returncode is None:
            self.send(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), STOP_WITHIN_S)
            except TimeoutError:
                self.send(signal.SIGKILL)
        code = await self._process.wait()
        if self._notices is not None:
            self._notices.close()
        return code

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def wait(self, within_s: float = STOP_WITHIN_S) -> int:
        """The exit code, once it ended by itself."""
        assert self._process is not None
        return await asyncio.wait_for(self._process.wait(), within_s)

    async def reload(self, within_s: float = READY_WITHIN_S) -> None:
        """SIGHUP; returns when it is ready again (RELOADING=1, then READY=1)."""
        assert self._notices is not None
        self._notices.ready.clear()
        self.send(signal.SIGHUP)
        await self._until(self._notices.ready, within_s)

    async def admin(self, method: str, path: str) -> Any:
        """The JSON of an admin answer. Raises DaemonFailed for anything but 200."""
        token = (self.state_dir / "admin-token").read_text().strip()
        target = Target(self.ports.admin, None, server_name="127.0.0.1")
        answer = await ask("h1", target, Request(method, path, fields={"authorization": f"Bearer {token}"}))
        if answer.status != 200:
            raise DaemonFailed(f"{method} {path} on the admin listener: {answer.status} {answer.ending}{self._quote()}")
        return json.loads(answer.body)

    async def _until(self, event: asyncio.Event, within_s: float) -> None:
        """Wait for `event` or the process's end, whichever comes first."""
        assert self._process is not None
        waiting = {asyncio.ensure_future(event.wait()), asyncio.ensure_future(self._process.wait())}
        try:
            await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        if self._process.returncode is not None:
            raise DaemonFailed(f"the daemon ended with code {self._process.returncode}{self._quote()}")
        if not event.is_set():
            raise DaemonFailed(f"the daemon was not ready after {within_s:g} s{self._quote()}")

    def _quote(self) -> str:
        lines = self.log.splitlines()[-QUOTED_LINES:]
        return "".join(f"\n    | {line}" for line in lines)


class DaemonNotices:
    """The receiving end of sd_notify(3), under an abstract name: a path in a deep folder would not fit a socket address."""

    def __init__(self) -> None:
        self.address = f"@headrace-lab-{os.getpid()}-{secrets.token_hex(8)}"
        self.ready = asyncio.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.address[1:])
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._hear)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                if b"READY=1" in self._socket.recv(4096).splitlines():
                    self.ready.set()
