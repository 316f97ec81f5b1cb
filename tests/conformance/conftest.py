"""Every store, one suite: a test that asks for `store` runs once for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from sayso.storage.memory import MemoryStore
from sayso.storage.postgres import PostgresStore
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Store
from tests import postgres
from tests.conformance.given import Clock, Inspected

#: opens an empty store for a block: (folder, clock, inputs that an inbox holds, notes that the door keeps)
Opener = Callable[[Path, Clock, int, int], AbstractAsyncContextManager[Inspected]]


@asynccontextmanager
async def _memory(_: Path, clock: Clock, inbox_max: int, door_notes_max: int) -> AsyncIterator[Inspected]:
    yield MemoryStore(clock=clock, inbox_max=inbox_max, door_notes_max=door_notes_max)


@asynccontextmanager
async def _sqlite(folder: Path, clock: Clock, inbox_max: int, door_notes_max: int) -> AsyncIterator[Inspected]:
    store = await SqliteStore.open(
        folder / "sayso.db", clock=clock, exclusive=True, inbox_max=inbox_max, door_notes_max=door_notes_max
    )
    async with closing(store):
        yield store


@asynccontextmanager
async def _postgres(_: Path, clock: Clock, inbox_max: int, door_notes_max: int) -> AsyncIterator[Inspected]:
    with postgres.schema() as url:
        store = await PostgresStore.open(
            url, clock=clock, exclusive=True, inbox_max=inbox_max, door_notes_max=door_notes_max
        )
        async with closing(store):
            yield store


@asynccontextmanager
async def closing(store: Store) -> AsyncIterator[Store]:
    """Close the store at the end of the block."""
    try:
        yield store
    finally:
        await store.close()


OPENERS: dict[str, Opener] = {"memory": _memory, "sqlite": _sqlite, "postgres": _postgres}


@pytest.fixture
def clock() -> Clock:
    """The clock that the store of this test reads."""
    return Clock()


@pytest.fixture(params=list(OPENERS))
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Inspected]:
    """An empty store of each kind."""
    async with OPENERS[request.param](tmp_path, clock, 1_000, 10_000) as store:
        yield store


@pytest.fixture(params=list(OPENERS))
async def small(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Inspected]:
    """An empty store of each kind whose inboxes hold three inputs a lane and whose door keeps three notes."""
    async with OPENERS[request.param](tmp_path, clock, 3, 3) as store:
        yield store
