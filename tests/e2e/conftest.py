"""What several of these tests begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests import postgres
from tests.e2e.serving import Served, Troubled, opened, serving


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A store that is empty, as a command names it."""
    if request.param == "postgres":
        with postgres.schema() as url:
            yield url
    else:
        yield str(tmp_path / "sayso.db")


@pytest.fixture
async def troubled(tmp_path: Path) -> AsyncIterator[tuple[Served, Troubled]]:
    """A server, and its store, which fails as a test says."""
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock) as one:
        assert isinstance(store, Troubled)
        yield one, store
        store.trouble.clear()
