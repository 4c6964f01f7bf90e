"""Which loop tests run on, and which want the machine for themselves: those that count seconds on a bad line, or streams
by the thousand.

`make test` runs everything else in parallel first, then these one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.settled import SettledLoop

HERE = Path(__file__).parent
ALONE = (HERE / "net", HERE / "proxy" / "test_soak.py")


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": SettledLoop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(item.path.is_relative_to(place) for place in ALONE):
            item.add_marker("alone")
