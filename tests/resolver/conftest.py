"""What the resolver's tests share: an authority for TLS peers, and both event loops where sockets are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tests.peers.authority import Authority
from tests.resolver.service_lab import Lab
from tests.resolver.stage import chains
from tests.settled import SettledLoop

LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": SettledLoop,
    "uvloop": uvloop.new_event_loop,
}
# uvloop's transports inherit from none of asyncio's, and its TLS is its own: the rims run on both. The cases are about
# behaviour and take their time: they run on the loop that the daemon runs on.
BOTH = ("asyncio", "uvloop")
ON = dict.fromkeys(("test_listen", "test_datagrams"), BOTH) | dict.fromkeys(
    (f"test_upstream_{part}" for part in ("set", "udp", "streams", "doh", "doq")), BOTH
)


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


@pytest.fixture
async def lab(tmp_path: Path) -> AsyncIterator[Lab]:
    """A service whose upstreams the test scripts: see tests/resolver/service_lab.py."""
    made = Lab(tmp_path)
    yield made
    await made.service.close()
