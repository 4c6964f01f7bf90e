"""A real nginx before a folder, over TLS."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.peers.ports import free_port, until_open

NGINX = shutil.which("nginx") or "/usr/sbin/nginx"
TEMPS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
needs_nginx = pytest.mark.skipif(not Path(NGINX).exists(), reason="nginx is not installed")


@asynccontextmanager
async def nginx(folder: Path, cert: Path | str, key: Path | str, server: str = "", *, h2: bool) -> AsyncIterator[int]:
    """The port of one that serves `folder`; `server`: more directives for it."""
    port, conf = free_port(), folder / "nginx.conf"
    temps = " ".join(f"{name}_temp_path {folder}/{name};" for name in TEMPS)
    conf.write_text(f"""daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 256; }}
http {{ access_log off; {temps}
  server {{ listen 127.0.0.1:{port} ssl{" http2" if h2 else ""}; ssl_certificate {cert}; ssl_certificate_key {key};
    ssl_protocols TLSv1.3; root {folder}; client_max_body_size 64m; {server} }} }}""")
    process = await asyncio.create_subprocess_exec(NGINX, "-c", str(conf), "-e", f"{folder}/start.log")
    try:
        await until_open(port)
        yield port
    finally:
        process.kill()
        await process.wait()
