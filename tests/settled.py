"""An event loop that closes when its transports have: what a test leaves open is named as its fault, not as the next one's.

A transport that is told to close does so in later turns of its loop, TLS after its peer's. A test that ends meanwhile would
leave it half closed, for the collector to find in the middle of another test.
"""

from __future__ import annotations

import asyncio

from tests.patience import HANG_S


class SettledLoop(asyncio.SelectorEventLoop):
    def close(self) -> None:
        """AssertionError when something is still open after HANG_S."""
        try:
            if not self.is_closed():
                self.run_until_complete(self._settle())
        finally:
            super().close()

    async def _settle(self) -> None:
        until = self.time() + HANG_S
        while left := self._open():
            assert self.time() < until, f"left open: {', '.join(left)}"
            await asyncio.sleep(0.001)

    def _open(self) -> list[str]:
        transports = list(self._transports.values())  # type: ignore[attr-defined]
        return [f"{each!r} of {each.get_protocol()!r}" for each in transports if each._sock is not None]
