"""Load modules while the loop goes on answering."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module

TURN_S = 0.0005
"""How long the thread that imports may keep the interpreter from the loop. By default it is ten times that, and a request
that comes meanwhile pays it for each of its waits."""

SOON = ("resolver.io.doh", "dns.message", "dns.rdtypes.IN.A", "dns.rdtypes.IN.AAAA", "dns.rdtypes.IN.HTTPS")
"""What the first name that is looked up wants, 40 ms in all. No listener opens later for it."""


async def load_beside(*names: str) -> None:
    """Import them in a thread, one by one, in this order."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(min(TURN_S, usual))
    try:
        for name in names:
            await asyncio.to_thread(import_module, name)
    finally:
        sys.setswitchinterval(usual)
