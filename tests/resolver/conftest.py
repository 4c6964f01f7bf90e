"""What the resolver's tests share: an authority for TLS peers."""

from __future__ import annotations

import pytest

from tests.peers.authority import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))
