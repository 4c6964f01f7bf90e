"""What a transport to one upstream offers, and the words for what became of a question given to it.

Theory: a `Channel` is one upstream over one transport. `ask` is a plain call; `done` is called exactly once, later or
at once, with the reply's bytes (they match the question; nothing else was judged) or with a `Failure`. There is no way
to take a question back: whoever lost interest ignores `done`, and the channel ends what it began at the deadline.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from resolver.outgoing import Outgoing
from resolver.standing import Fault


@dataclass(frozen=True, slots=True)
class Failure:
    fault: Fault
    reason: str


Done = Callable[[bytes | Failure], None]
Clock = Callable[[], float]


class Channel(Protocol):
    encrypted: bool

    def ask(self, out: Outgoing, deadline: float, done: Done, *, question: bytes = b"") -> None:
        """Send the question, in the letters of `question` when it is given. `deadline` in seconds of the clock."""
        ...

    def drop(self) -> None:
        """The network changed: no connection can be trusted. What is in flight moves to a fresh one."""
        ...

    async def close(self) -> None:
        """End everything; questions in flight fail."""
        ...


LOCAL_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def failure_of(exc: OSError) -> Failure:
    """What a failed connection or send says. A shortage of ours (file descriptors, ports) must not take an upstream down."""
    fault = Fault.UNWILLING if exc.errno in LOCAL_SHORTAGES else Fault.UNREACHABLE
    return Failure(fault, words(exc))


def words(exc: BaseException) -> str:
    """A failure of the operating system or of TLS, short enough for an extended DNS error."""
    verify = getattr(exc, "verify_message", "")
    if verify:
        return f"bad certificate: {verify}"
    if isinstance(exc, TimeoutError):
        return str(exc) or "no connection in time"
    text = (exc.strerror if isinstance(exc, OSError) else None) or str(exc) or type(exc).__name__
    return text.lower()
