"""Every store, one suite: a test that asks for `store` runs once for each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sayso.storage.memory import MemoryStore
from sayso.storage.sqlite import SqliteStore
from tests.conformance.given import Clock, Inspected

#: opens an empty store: (folder, clock, inputs that an inbox holds, notes that the door keeps)
Opener = Callable[[Path, Clock, int, int], Awaitable[Inspected]]


async def _memory(_: Path, clock: Clock, inbox_max: int, door_notes_max: int) -> Inspected:
    return MemoryStore(clock=clock, inbox_max=inbox_max, door_notes_max=door_notes_max)


async def _sqlite(folder: Path, clock: Clock, inbox_max: int, door_notes_max: int) -> Inspected:
    return await SqliteStore.open(
        folder / "sayso.db", clock=clock, exclusive=True, inbox_max=inbox_max, door_notes_max=door_notes_max
    )


OPENERS: dict[str, Opener] = {"memory": _memory, "sqlite": _sqlite}


@pytest.fixture
def clock() -> Clock:
    """The clock that the store of this test reads."""
    return Clock()


@pytest.fixture(params=list(OPENERS))
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Inspected]:
    """An empty store of each kind."""
    opened = await OPENERS[request.param](tmp_path, clock, 1_000, 10_000)
    yield opened
    await opened.close()


@pytest.fixture(params=list(OPENERS))
async def small(request: pytest.FixtureRequest, tmp_path: Path, clock: Clock) -> AsyncIterator[Inspected]:
    """An empty store of each kind whose inboxes hold three inputs a lane and whose door keeps three notes."""
    opened = await OPENERS[request.param](tmp_path, clock, 3, 3)
    yield opened
    await opened.close()
