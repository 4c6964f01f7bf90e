"""Speak with the service manager that started us: readiness, reloads, the watchdog.

Theory: sd_notify(3) is one datagram of NAME=value lines to the socket that NOTIFY_SOCKET names. The watchdog is fed by
the loop itself: a timer on it, and nothing else. A loop that hangs feeds nobody, and systemd starts us anew.

Without NOTIFY_SOCKET every call does nothing. A manager that does not read never stops us: what cannot be sent is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import MutableMapping

MAX_STATUS = 200
"""Characters; it is one line of `systemctl status`."""

logger = logging.getLogger("headrace.service")


class Notifier:
    """Tells the service manager how we are. Takes what concerns it out of `environ`, so that no child inherits it."""

    def __init__(self, environ: MutableMapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._socket = _connected(environ.pop("NOTIFY_SOCKET", ""))
        self._feed_every_s = _half_interval(environ) if self._socket else 0.0
        self._feeding: asyncio.TimerHandle | None = None

    def ready(self, status: str = "") -> None:
        """Started, or done with a reload. Feeds the watchdog of the running loop from now on."""
        self._send("READY=1", _status(status))
        if self._feed_every_s and self._feeding is None:
            self._feed()

    def reloading(self) -> None:
        """A reload began; `ready()` ends it. Type=notify-reload (systemd 253) wants to know since when."""
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str = "stopping") -> None:
        self._send("STOPPING=1", _status(status))

    def status(self, text: str) -> None:
        """One line for `systemctl status`; the caller sees to it that it holds no secret."""
        self._send(_status(text))

    def extend_timeout(self, seconds: float) -> None:
        """The start or stop under way will need so long: a drain must not be killed as a hang."""
        self._send(f"EXTEND_TIMEOUT_USEC={int(seconds * 1_000_000)}")

    def close(self) -> None:
        """Say no more. Idempotent."""
        if self._feeding is not None:
            self._feeding.cancel()
            self._feeding = None
        self._feed_every_s = 0.0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _feed(self) -> None:
        self._send("WATCHDOG=1")
        self._feeding = asyncio.get_running_loop().call_later(self._feed_every_s, self._feed)

    def _send(self, *lines: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send("\n".join(line for line in lines if line).encode())
        except OSError as exc:
            # A restarted manager or a full queue; the next word may come through.
            logger.debug("the service manager did not hear %s: %s", lines[0], exc)


def _connected(address: str) -> socket.socket | None:
    """A datagram socket to the manager; None without an address, or one that cannot be reached."""
    if not address:
        return None
    sending = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    sending.setblocking(False)  # a manager that does not read must not stop the loop
    try:
        sending.connect("\0" + address[1:] if address.startswith("@") else address)
    except OSError as exc:
        logger.warning("the service manager cannot be told that we are ready (%s): %s", address, exc)
        sending.close()
        return None
    return sending


def _half_interval(environ: MutableMapping[str, str]) -> float:
    """Seconds between feedings; 0.0 when no watchdog, or another process's, is asked for (sd_watchdog_enabled(3))."""
    interval, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not interval.isdecimal() or pid not in ("", str(os.getpid())):
        return 0.0
    return int(interval) / 2_000_000


def _status(text: str) -> str:
    return f"STATUS={' '.join(text.split())[:MAX_STATUS]}" if text else ""
