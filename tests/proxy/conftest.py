"""What the proxy's tests share: one throw-away authority for a session."""

from __future__ import annotations

import pytest

from headrace.lab.ca import ThrowAwayCa, issue


@pytest.fixture(scope="session")
def ca(tmp_path_factory: pytest.TempPathFactory) -> ThrowAwayCa:
    return issue(
        tmp_path_factory.mktemp("ca"), ["localhost", "127.0.0.1", "h1.localhost", "h2.localhost", "h3.localhost"]
    )
