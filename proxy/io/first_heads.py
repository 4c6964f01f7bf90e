"""Remember the first heads of a listener's connections, for clients that make a connection for each request.

Theory: what one connection learns of its heads (`proxy.io.express`) is no use to a client that asks once on each: curl in a
loop, a short-lived worker, an SDK without its pool. Such a client's first head is that of its last connection. So the first
head of a connection is held against the last one of the same address; alike twice, it is known, and the next connection
takes the short way from its first byte. A head may hold a secret: nothing stays longer than KEPT_S.

Owner: the listener. A configuration that is applied closes what is known, and the next head makes it anew.
"""

from __future__ import annotations

import asyncio

from proxy.io.express import Known
from proxy.io.rims import Origin, Service
from proxy.known_heads import Shape
from proxy.messages import RequestHead

CLIENTS = 32
KEPT_S = 30.0


class FirstHeads:
    """The last first head of each client address, and what was decided for it."""

    def __init__(self) -> None:
        self._heads: dict[str, tuple[Shape, Known | None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def recall(self, origin: Origin) -> tuple[Shape, Known] | None:
        """What a new connection's first request will likely look like."""
        shape, known = self._heads.get(origin.peer, _NOTHING)
        return (shape, known) if shape is not None and known is not None and known.lane.is_open else None

    def note(self, raw: bytes, head: RequestHead, origin: Origin, service: Service) -> None:
        """A first head that was not recalled."""
        try:
            shape = Shape(raw)
        except ValueError:
            return
        heads = self._heads
        last, _ = heads.get(origin.peer, _NOTHING)
        if last is None and len(heads) >= CLIENTS:
            heads.clear()
        heads[origin.peer] = shape, service.known(head, origin) if last == shape else None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(KEPT_S, self.forget)

    def forget(self) -> None:
        """Drop all of it; also when the listener closes."""
        self._heads.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


_NOTHING: tuple[None, None] = (None, None)
