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
from tests import postgres


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> OpenStore:
    """How to open a store, given a clock; on a database the same one each time."""

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

    if request.param == "postgres":
        return on_postgres(request.getfixturevalue("schema"))
    return memory if request.param == "memory" else sqlite


def on_postgres(url: str) -> OpenStore:
    """How to open the store in this schema."""

    @asynccontextmanager
    async def opened(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        store = await PostgresStore.open(url, clock=now_ms, exclusive=True)
        try:
            yield store
        finally:
            await store.close()

    return opened


@pytest.fixture
def schema() -> Iterator[str]:
    """The URL of an empty schema in PostgreSQL."""
    with postgres.schema() as url:
        yield url
