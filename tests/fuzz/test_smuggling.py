"""A slice of the smuggling corpus, sent to every real origin that is installed. `python -m bench smuggling` sends all of it."""

from __future__ import annotations

import random

import pytest

from headrace.lab.ca import ThrowAwayCa, issue
from tests.fuzz.corpus import corpus
from tests.fuzz.origins import ORIGINS, lacking
from tests.fuzz.smuggler import smuggle

SLICE = 160


@pytest.fixture(scope="module")
def ca(tmp_path_factory: pytest.TempPathFactory) -> ThrowAwayCa:
    return issue(tmp_path_factory.mktemp("ca"), ["localhost", "127.0.0.1"])


@pytest.mark.parametrize("name", ORIGINS)
async def test_no_origin_counts_a_request_that_was_not_forwarded(name: str, ca: ThrowAwayCa) -> None:
    if said := lacking(name):
        pytest.skip(said)
    # Another slice for each origin; the same one in every run.
    cases = random.Random(name).sample(corpus(), SLICE)
    verdict = await smuggle(name, cases, ca)
    assert verdict.holes == []
    assert verdict.seen >= SLICE  # the innocent ones arrived


def test_the_corpus_is_large_and_always_the_same() -> None:
    assert len(corpus()) > 2000
    assert corpus() == corpus()
