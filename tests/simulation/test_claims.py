"""A session that waits to be claimed is claimed, whatever else was at it just then."""

from __future__ import annotations

import asyncio

import psycopg

from sayso.demo.local import OpenStore
from sayso.runtime.limits import Limits
from sayso.storage.store import Claimed
from sayso.testing.stores import StoreAround
from tests.simulation.conftest import on_postgres
from tests.simulation.room import room


class Beside(StoreAround):
    """A store where somebody else's transaction is at the session while it is first to be claimed with work in it."""

    def __init__(self, other: psycopg.AsyncConnection) -> None:
        super().__init__()
        self._other = other
        self.armed = False
        self.passed_over = asyncio.Event()

    async def claim(self, node: str, *, at_most: int) -> list[Claimed]:
        if self.armed:
            self.armed = False
            await self._other.execute(b"select id from session for update")
            claimed = await self.inside.claim(node, at_most=at_most)
            self.passed_over.set()
            return claimed
        return await self.inside.claim(node, at_most=at_most)


async def test_a_session_that_a_delivery_which_came_again_was_at_is_claimed_without_another_hint(schema: str) -> None:
    open_store: OpenStore = on_postgres(schema)
    async with await psycopg.AsyncConnection.connect(schema) as other:
        beside = Beside(other)
        async with room(open_store, around=beside.around, limits=Limits(timer_look_ms=3_600_000)) as here:
            await here.rest()
            beside.armed = True
            await here.post("alice", "hello")
            await beside.passed_over.wait()
            await other.rollback()
            await here.rest()

            assert await here.heard() == [("alice", "hello")]
