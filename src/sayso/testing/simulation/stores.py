"""Stores to play on: an empty one for each story."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from sayso.storage.memory import MemoryStore
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Store


@asynccontextmanager
async def in_memory(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
    """Open an empty store in memory."""
    yield MemoryStore(clock=now_ms)


@asynccontextmanager
async def in_a_file(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
    """Open an empty SQLite store, whose file goes when it is closed."""
    with TemporaryDirectory(prefix="sayso-simulation-") as folder:
        store = await SqliteStore.open(Path(folder) / "sayso.db", clock=now_ms, exclusive=True)
        try:
            yield store
        finally:
            await store.close()
