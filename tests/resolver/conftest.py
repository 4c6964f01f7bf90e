"""What the resolver's tests share: an authority for TLS peers, and both event loops where sockets are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.peers.authority import Authority

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
# uvloop's transports inherit from none of asyncio's, and its TLS is its own: the rims run on both. The cases are about
# behaviour and take their time: they run on the loop that the daemon runs on.
BOTH = ("asyncio", "uvloop")
ON = {"test_upstream_set": BOTH, "test_listen": BOTH, "test_datagrams": BOTH, "test_cases_dns": ("uvloop",)}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {name: LOOPS[name] for name in ON.get(item.path.stem, ("asyncio",))}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))
