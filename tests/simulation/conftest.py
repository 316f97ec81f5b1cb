"""The stages that the simulation tests play on: the same runtime over each store."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sayso.demo.local import OpenStore
from sayso.storage.memory import MemoryStore
from sayso.storage.postgres import PostgresStore
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Store
from tests.postgres import SCHEMAS, needs_postgres

#: two answers at one moment: a server with many connections may store one before the runtime looks, or both
SAME_MOMENT = "test_a_scenarios_log_is_the_recorded_one[postgres-second-yes-"


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgres", marks=needs_postgres)])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenStore]:
    """How to open a store, given a clock; on a database the same file or schema each time."""

    @asynccontextmanager
    async def memory(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        yield MemoryStore(clock=now_ms)

    @asynccontextmanager
    async def sqlite(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        store = await SqliteStore.open(tmp_path / "sayso.db", clock=now_ms, exclusive=True)
        try:
            yield store
        finally:
            await store.close()

    @asynccontextmanager
    async def postgres(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        store = await PostgresStore.open(SCHEMAS.dsn(schema), clock=now_ms, exclusive=True)
        try:
            yield store
        finally:
            await store.close()

    if request.node.name.startswith(SAME_MOMENT):
        pytest.skip("what happens at one moment has no order that a log could be compared with")
    if request.param != "postgres":
        yield memory if request.param == "memory" else sqlite
        return
    schema = SCHEMAS.take()
    yield postgres
    SCHEMAS.give(schema)
