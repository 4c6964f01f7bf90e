"""Say why a port could not be had: who holds it, as far as /proc tells, and which one is free.

Only Linux has /proc/net; elsewhere, and for processes of other users, the answer is shorter.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from config.kinds import TRANSPORTS
from config.model import Listen

PROC = Path("/proc")
LISTENING = "0A"
TRIED = 64


def explain(listen: Listen, exc: OSError) -> str:
    """One line: the address, the reason, the process, and what to do."""
    if exc.errno == errno.EADDRINUSE:
        return f"{listen}: the port is taken{_holder_text(listen)}{_offer(listen)}"
    if exc.errno in (errno.EACCES, errno.EPERM):
        return f"{listen}: ports below 1024 need CAP_NET_BIND_SERVICE; use another port, or the systemd service"
    if exc.errno == errno.EADDRNOTAVAIL:
        return f"{listen}: this machine has no such address; name one of its own, as in 127.0.0.1"
    return f"{listen}: {os.strerror(exc.errno).lower() if exc.errno else exc}"


def needs_privilege(exc: OSError) -> bool:
    return exc.errno in (errno.EACCES, errno.EPERM)


def _holder_text(listen: Listen) -> str:
    inodes = set(_inodes(listen))
    holders = sorted({f"{name} (process {pid})" for pid, name in _processes(inodes)}) if inodes else []
    return f" by {', '.join(holders)}" if holders else ""


def _offer(listen: Listen) -> str:
    kind = socket.SOCK_DGRAM if TRANSPORTS.get(listen.scheme) == "UDP" else socket.SOCK_STREAM
    for port in range(listen.port + 1, min(listen.port + TRIED, 65536)):
        try:
            with socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET, kind) as trial:
                trial.bind((listen.host, port))
        except OSError:
            continue
        return f"; stop it, or use another port: {port} is free"
    return "; stop it, or use another port"


def _inodes(listen: Listen) -> Iterator[str]:
    """Sockets that stand on the port, on this address or on all. `/proc/net/tcp`: address:port in hex, state, inode."""
    transport = TRANSPORTS.get(listen.scheme, "TCP").lower()
    for table in (transport, f"{transport}6"):
        try:
            lines = (PROC / "net" / table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if port == listen.port and (transport == "udp" or fields[3] == LISTENING):
                yield fields[9]


def _processes(inodes: set[str]) -> Iterator[tuple[int, str]]:
    """(pid, command) of those processes we may look into that hold one of the sockets."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for folder in PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            held = any(os.readlink(link) in wanted for link in (folder / "fd").iterdir())
            if held:
                yield int(folder.name), (folder / "comm").read_text().strip()
        except OSError:  # another user's, or gone while we looked
            continue
