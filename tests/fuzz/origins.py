"""Real origins that count what they take for requests: nginx, HAProxy before a lenient Node, hypercorn.

Each answers `METHOD TARGET` of what it saw and notes the same in a log, so that both the count and the order of answers
can be held against what was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypercorn.asyncio import serve
from hypercorn.config import Config

from tests.patience import no_hang
from tests.peers.ports import free_port

NGINX = """
daemon off; pid {folder}/pid; error_log {folder}/error.log crit; worker_processes 1;
events {{ worker_connections 512; }}
http {{
  log_format seen escape=none '$request_method $request_uri'; access_log {folder}/seen seen;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u;
  scgi_temp_path {folder}/s; keepalive_requests 1000000; merge_slashes off; underscores_in_headers on;
  server {{ listen 127.0.0.1:{port}; ignore_invalid_headers off;
    location / {{ return 200 "$request_method $request_uri"; }} }}
}}
"""

HAPROXY = """
global
  nbthread 1
defaults
  mode http
  timeout client 20s
  timeout server 20s
  timeout connect 2s
frontend f
  bind 127.0.0.1:{port}
  default_backend b
backend b
  http-reuse always
  server s 127.0.0.1:{behind}
"""

NODE = """
const http = require("http"), fs = require("fs");
const log = fs.openSync(process.argv[2], "a");
const server = http.createServer({ insecureHTTPParser: true, keepAliveTimeout: 60000 }, (asked, answer) => {
  const seen = asked.method + " " + asked.url;
  fs.writeSync(log, seen + "\\n");
  asked.on("end", () => { answer.setHeader("content-length", Buffer.byteLength(seen, "latin1")); answer.end(seen, "latin1"); });
  asked.resume();
});
server.on("connect", (asked, socket) => { fs.writeSync(log, "CONNECT " + asked.url + "\\n"); socket.destroy(); });
server.on("upgrade", (asked, socket) => { fs.writeSync(log, asked.method + " " + asked.url + "\\n"); socket.destroy(); });
server.listen(Number(process.argv[3]), "127.0.0.1");
"""


@dataclass
class Seen:
    """An origin's port and its log: a line for each request that it counted."""

    port: int
    file: Path | None = None
    lines: list[str] = field(default_factory=list)

    def requests(self) -> list[str]:
        if self.file is None:
            return self.lines
        return self.file.read_text("latin-1").splitlines() if self.file.exists() else []


@contextlib.asynccontextmanager
async def running(folder: Path, port: int, *command: str) -> AsyncIterator[None]:
    with (folder / "said").open("ab") as said:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        await listening(port, process)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def listening(port: int, process: asyncio.subprocess.Process) -> None:
    async with no_hang():
        while process.returncode is None:
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return
            await asyncio.sleep(0.02)
    raise RuntimeError(f"ended with {process.returncode}")


@contextlib.asynccontextmanager
async def nginx(folder: Path) -> AsyncIterator[Seen]:
    port, file = free_port(), folder / "nginx.conf"
    file.write_text(NGINX.format(folder=folder, port=port))
    async with running(folder, port, "nginx", "-c", str(file), "-e", str(folder / "error.log")):
        yield Seen(port, folder / "seen")


@contextlib.asynccontextmanager
async def haproxy_and_node(folder: Path) -> AsyncIterator[Seen]:
    port, behind, script, file = free_port(), free_port(), folder / "origin.js", folder / "haproxy.cfg"
    script.write_text(NODE)
    file.write_text(HAPROXY.format(port=port, behind=behind))
    async with (
        running(folder, behind, "node", str(script), str(folder / "seen"), str(behind)),
        running(folder, port, "haproxy", "-f", str(file)),
    ):
        yield Seen(port, folder / "seen")


@contextlib.asynccontextmanager
async def node(folder: Path) -> AsyncIterator[Seen]:
    """Alone, and as lenient as it can be told to be."""
    port, script = free_port(), folder / "origin.js"
    script.write_text(NODE)
    async with running(folder, port, "node", str(script), str(folder / "seen"), str(port)):
        yield Seen(port, folder / "seen")


@contextlib.asynccontextmanager
async def hypercorn(folder: Path) -> AsyncIterator[Seen]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    seen = Seen(sock.getsockname()[1])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        target = scope["raw_path"].decode("latin-1")
        seen.lines.append(f"{scope['method']} {target}")
        while (await receive()).get("more_body"):
            pass
        body = f"{scope['method']} {target}".encode("latin-1")
        fields = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": body})

    config, stop = Config(), asyncio.Event()
    config.bind, config.errorlog, config.graceful_timeout = [f"fd://{sock.detach()}"], None, 0.1
    serving = asyncio.create_task(serve(app, config, shutdown_trigger=stop.wait, mode="asgi"))  # type: ignore[arg-type]
    try:
        yield seen
    finally:
        stop.set()
        await serving


ORIGINS = {"nginx": nginx, "haproxy and node": haproxy_and_node, "node": node, "hypercorn": hypercorn}
NEEDS = {"nginx": ("nginx",), "haproxy and node": ("haproxy", "node"), "node": ("node",), "hypercorn": ()}


def lacking(name: str) -> str:
    """Why an origin cannot run here, or ""."""
    gone = [tool for tool in NEEDS[name] if shutil.which(tool) is None]
    return f"{', '.join(gone)} not installed" if gone else ""


@contextlib.asynccontextmanager
async def origin(name: str) -> AsyncIterator[Seen]:
    with tempfile.TemporaryDirectory(prefix="headrace-origin-") as folder:
        async with ORIGINS[name](Path(folder)) as seen:
            yield seen
