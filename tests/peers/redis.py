"""A real redis-server for a test, and one that is slow, silent or a liar."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from types import TracebackType

import pytest

from tests.patience import no_hang

needs_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")


class RedisServer:
    """`async with RedisServer(folder) as server`; `stop` and `start` again keep the port, `freeze` makes it deaf."""

    def __init__(self, folder: Path, password: str = "") -> None:
        self.folder, self.password = folder, password
        self.port = 0
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"redis://{f':{self.password}@' if self.password else ''}127.0.0.1:{self.port}/1"

    async def __aenter__(self) -> RedisServer:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        if not self.port:
            probe = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
            self.port = probe.sockets[0].getsockname()[1]
            probe.close()
        words = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        words += ["--dir", str(self.folder), *(["--requirepass", self.password] if self.password else [])]
        self._process = await asyncio.create_subprocess_exec(
            "redis-server", *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        assert self._process.stdout is not None
        async with no_hang():
            while b"Ready to accept" not in await self._process.stdout.readline():
                pass

    async def stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.thaw()
            self._process.kill()
            await self._process.communicate()

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    async def command(self, *words: str) -> bytes:
        """Through redis's own wire, not ours: what redis-cli says, raw."""
        auth = ["-a", self.password] if self.password else []
        process = await asyncio.create_subprocess_exec(
            *("redis-cli", "--raw", "-p", str(self.port), "-n", "1", *auth, *words),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        out, _ = await process.communicate()
        return out.rstrip(b"\n")

    async def keys(self) -> list[str]:
        return [key for key in (await self.command("KEYS", "*")).decode().split("\n") if key]
