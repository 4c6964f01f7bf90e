"""What the proxy's tests share: one throw-away authority for a session, and both event loops where it matters."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from headrace.lab.ca import ThrowAwayCa, issue
from tests.settled import SettledLoop

# The h3 rims work on bare sockets, the h1 rims write to uvloop's transports directly: what both do differs between the loops.
ON_BOTH = ("test_arrivals", "test_inbound_h1", "test_outbound_h1", "test_splice")
H3_ON_BOTH = ("inbound", "answers", "connections", "outbound", "outbound_streams", "outbound_ends", "dialling")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": SettledLoop}
    if item.path.stem in (*ON_BOTH, *(f"test_h3_{name}" for name in H3_ON_BOTH)):
        loops["uvloop"] = uvloop.new_event_loop
    return loops


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> ThrowAwayCa:
    return issue(
        tmp_path_factory.mktemp("ca"), ["localhost", "127.0.0.1", "h1.localhost", "h2.localhost", "h3.localhost"]
    )
