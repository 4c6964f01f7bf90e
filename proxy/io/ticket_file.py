"""Keep the ticket keys in a file that only its owner can read and that is always whole.

Theory: workers share the ring through this file. Whoever wants to change it takes the directory's lock, reads what
stands there, and puts a new file in its place; readers need no lock, for they see the old file or the new one.
A file that others could read has told its keys: it is not believed, and the next write replaces it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from proxy.ticketkeys import BrokenRing, TicketKey, TicketKeys, keys_from_bytes

LOCK_WAIT_S = 2.0
MAX_BYTES = 16 * 1024


class TicketFile:
    """`path` and the identity of the version last seen there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> tuple[TicketKey, ...]:
        """The stored keys; () when there is no file. BrokenRing when it must not be believed, OSError when unreadable."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return ()
        except OSError as exc:
            if exc.errno == errno.ELOOP:
                raise BrokenRing(f"{self.path} is a link, not a file of ours") from exc
            raise
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            self._seen = _identity(status)
            if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise BrokenRing(f"{self.path} has mode {stat.S_IMODE(status.st_mode):04o}: others could read its keys")
            if status.st_uid != os.geteuid():
                raise BrokenRing(f"{self.path} belongs to uid {status.st_uid}, not to us ({os.geteuid()})")
            return keys_from_bytes(file.read(MAX_BYTES))

    def changed(self) -> bool:
        """Another worker has put a new file in place since we last looked. One stat; never raises."""
        try:
            return _identity(os.stat(self.path, follow_symlinks=False)) != self._seen
        except OSError:
            return False

    def update(self, change: Callable[[tuple[TicketKey, ...]], TicketKeys]) -> TicketKeys:
        """`change` of what is stored, stored in its place while no other worker writes. Blocks: not for the loop.

        OSError when the file cannot be written (the old one is untouched then) or the lock is held for 2 s.
        """
        with self._locked():
            try:
                stored = self.read()
            except BrokenRing:
                stored = ()
            keys = change(stored)
            if keys.keys != stored:
                self._replace(keys.to_bytes())
            return keys

    def _replace(self, content: bytes) -> None:
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        with suppress(FileNotFoundError):  # left behind by a process that was killed here
            fresh.unlink()
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                # Without this a power cut may leave the new name on an empty file (delayed allocation).
                os.fsync(file.fileno())
                self._seen = _identity(os.fstat(file.fileno()))
            fresh.replace(self.path)
        except BaseException:
            fresh.unlink(missing_ok=True)
            raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # The directory is what is locked: a lock on the file itself would be lost when the file is replaced.
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _lock(directory)
            yield
        finally:
            os.close(directory)


def _lock(descriptor: int) -> None:
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= give_up:
                raise TimeoutError(f"the lock of the state directory was held for {LOCK_WAIT_S:.0f} s") from None
            time.sleep(0.02)


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size
