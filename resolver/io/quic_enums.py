"""Let the members of aioquic's enumerations be looked up by identity.

aioquic keeps keys, packet spaces and the states of a connection in maps and sets by members of `Enum`, whose hash is
written in Python: eight calls for a datagram, 7 % of the processor time of an h3 listener. A member is one object, so the
hash of any object will do, and that one is written in C.
"""

from __future__ import annotations

from aioquic import tls
from aioquic.quic import connection


def look_up_by_identity() -> None:
    """For the whole process, before the first connection is made: what is in a map already would not be found again."""
    for members in (tls.Epoch, connection.QuicConnectionState):
        members.__hash__ = object.__hash__  # type: ignore[method-assign]
    # A set keeps the hashes that it was made with, even when it is copied from a set.
    connection.END_STATES = frozenset(list(connection.END_STATES))
