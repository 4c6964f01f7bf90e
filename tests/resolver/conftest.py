"""What the resolver's tests share: an authority for TLS peers, and both event loops where sockets are."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.peers.authority import Authority

# uvloop's transports inherit from none of asyncio's, and its TLS is its own: what talks to a socket runs on both.
ON_BOTH_LOOPS = ("test_upstream_set", "test_cases_dns", "test_listen")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    plain = {"asyncio": asyncio.new_event_loop}
    return {**plain, "uvloop": uvloop.new_event_loop} if item.path.stem in ON_BOTH_LOOPS else plain


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))
