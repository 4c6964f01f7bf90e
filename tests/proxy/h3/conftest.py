"""What the tests of the h3 rims share: one throw-away authority a file, and a certificate of its for localhost."""

from __future__ import annotations

import pytest

from tests.peers.h3peers import make_authority


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return make_authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def ca(files: tuple[str, str]) -> str:
    return files[0]


@pytest.fixture
def pem(files: tuple[str, str]) -> str:
    return files[1]
