"""A process that ends as a crash does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from sayso.assembly import App


@asynccontextmanager
async def process(app: App) -> AsyncIterator[App]:
    """Run the app's worker for the block; then everything of it stops where it is, whatever it still waits for."""
    await app.worker.register()
    work = asyncio.create_task(app.worker.run())
    try:
        yield app
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work
