"""What the resolver's tests share: an authority for TLS peers, and both event loops where sockets are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.peers.authority import Authority
from tests.resolver.stage import chains
from tests.settled import SettledLoop

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": SettledLoop,
    "uvloop": uvloop.new_event_loop,
}
# uvloop's transports inherit from none of asyncio's, and its TLS is its own: the rims run on both. The cases are about
# behaviour and take their time: they run on the loop that the daemon runs on.
BOTH = ("asyncio", "uvloop")
ON = {"test_upstream_set": BOTH, "test_listen": BOTH, "test_datagrams": BOTH}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    on = ("uvloop",) if item.path.stem.startswith("test_cases_dns") else ON.get(item.path.stem, ("asyncio",))
    return {name: LOOPS[name] for name in on}


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def chain_of(authority: Authority, tmp_path: Path) -> Any:
    """`async with chain_of(peer, ...) as chain`: see tests/resolver/stage.py."""
    return chains(authority, tmp_path)
