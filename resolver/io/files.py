"""Read the lists that people write, and keep the cache in one file that is whole or absent."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from resolver.blocklist import Blocklist

log = logging.getLogger("headrace.resolver")

CACHE_FILE = "dns-cache"
LARGEST_CACHE_FILE = 1 << 30


def read_hosts(paths: Sequence[str]) -> list[str]:
    """The texts of the files that can be read; one line of log for each that cannot."""
    texts = []
    for path in paths:
        try:
            texts.append(Path(path).read_text("utf-8", "replace"))
        except OSError as exc:
            log.warning("hosts file not read: %s", exc)
    return texts


def stamps(paths: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """What changes when a file changes: (mtime, size) each, zeros for one that is not there."""
    found = []
    for path in paths:
        try:
            status = os.stat(path)
            found.append((status.st_mtime_ns, status.st_size))
        except OSError:
            found.append((0, 0))
    return tuple(found)


def read_blocklists(paths: Sequence[str]) -> Blocklist:
    """All lists in one. A million lines take seconds: call it in a thread."""
    blocklist = Blocklist()
    for path in paths:
        try:
            with open(path, encoding="utf-8", errors="replace") as lines:
                blocklist.add_lines(lines)
        except OSError as exc:
            log.warning("blocklist not read: %s", exc)
    if paths:
        log.info("blocklists: %d names, %d rules skipped", len(blocklist), blocklist.skipped)
    return blocklist


def read_cache_file(state_dir: Path) -> bytes:
    """The saved cache; empty when there is none or it cannot be read."""
    try:
        with open(state_dir / CACHE_FILE, "rb") as file:
            return file.read(LARGEST_CACHE_FILE)
    except FileNotFoundError:
        return b""
    except OSError as exc:
        log.warning("saved DNS cache not read: %s", exc)
        return b""


def write_cache_file(state_dir: Path, content: bytes) -> bool:
    """Replaces the file whole: written beside it with mode 0600, synced, renamed. False, with one log line, on failure.

    Two processes write under different names, so the last rename wins and neither file is a mixture.
    """
    name = ""
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{CACHE_FILE}-", dir=state_dir)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, state_dir / CACHE_FILE)
    except OSError as exc:
        log.warning("DNS cache not saved: %s", exc)
        if name:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return False
    return True
