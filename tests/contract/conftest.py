"""The engines, one after another, each at position 0 when a test begins and ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines import ENGINES

from capserve.engine.seam import Engine


@pytest.fixture(scope="module", params=sorted(ENGINES))
def built(request: pytest.FixtureRequest) -> Engine:
    return ENGINES[request.param]()


@pytest.fixture
def engine(built: Engine) -> Iterator[Engine]:
    built.reset()
    yield built
    built.reset()
