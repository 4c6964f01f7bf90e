"""One daemon and one lab for a worker's e2e tests; tests that break things start their own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from headrace.lab.story import Stage
from tests.e2e.stage import started


@pytest_asyncio.fixture(loop_scope="session", scope="session")
async def shared() -> AsyncIterator[Stage]:
    async with started() as stage:
        yield stage


@pytest.fixture
def stage(shared: Stage) -> Stage:
    """The shared stage with every edge quick, healthy and told nothing."""
    for edge in shared.lab.edges.values():
        edge.controls.reset()
    return shared


@pytest_asyncio.fixture(loop_scope="session")
async def own() -> AsyncIterator[Stage]:
    """A stage of the test's own, to kill, stop and starve."""
    async with started() as stage:
        yield stage
