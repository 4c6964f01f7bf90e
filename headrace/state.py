"""The folder that outlives the process: its mode, the admin token, and where the daemon can be found.

A disk that is full or read-only must not stop the daemon from serving: what cannot be kept is said in one line and lives in
memory instead.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

TOKEN = "admin-token"  # noqa: S105 - the file's name
RUNNING = "running.json"
logger = logging.getLogger("headrace.state")


@dataclass(frozen=True, slots=True)
class Running:
    """What a daemon writes down of itself. The port is 0 when there is no admin interface."""

    pid: int
    admin_host: str = ""
    admin_port: int = 0


def ca_folder(state_dir: Path) -> Path:
    """Where the local CA and what it issued are kept."""
    return state_dir / "ca"


def ensure_folder(path: Path) -> None:
    """Create the folder, for its owner alone. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.stat().st_mode & 0o077 and path.stat().st_uid == os.geteuid():
        path.chmod(0o700)


def write_private(path: Path, text: str) -> None:
    """Replace a file whole, mode 0600: a reader sees the old text or the new one. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def admin_token(state_dir: Path) -> str:
    """The token that was generated once for this folder; a new one in memory when it cannot be kept there."""
    file = state_dir / TOKEN
    try:
        if file.exists() and not file.stat().st_mode & 0o077:
            kept = file.read_text("ascii").strip()
            if len(kept) >= 32:
                return kept
        token = _fresh_token()
        write_private(file, token + "\n")
    except OSError as exc:
        logger.warning("the admin token cannot be kept in %s (%s): changes over the API are off", file, exc.strerror)
        return _fresh_token()
    return token


def _fresh_token() -> str:
    import secrets  # 4 ms that a later start need not wait for

    return secrets.token_urlsafe(32)


def write_running(state_dir: Path, running: Running) -> None:
    """Best effort: without it, commands look at the configured address."""
    try:
        write_private(state_dir / RUNNING, json.dumps(asdict(running)) + "\n")
    except OSError as exc:
        logger.warning("%s cannot be written (%s)", state_dir / RUNNING, exc.strerror)


def forget_running(state_dir: Path) -> None:
    """Remove what `write_running` wrote, if it is ours."""
    running = read_running(state_dir / RUNNING)
    if running is not None and running.pid == os.getpid():
        with suppress(OSError):
            (state_dir / RUNNING).unlink()


def read_running(file: Path) -> Running | None:
    """The daemon that wrote the file, if its process still lives."""
    try:
        running = Running(**json.loads(file.read_text()))
        os.kill(running.pid, 0)
    except PermissionError:  # from kill: it lives, as another user
        return running
    except (OSError, ValueError, TypeError):
        return None
    return running
