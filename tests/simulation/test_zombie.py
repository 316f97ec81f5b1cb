"""A process stands still for longer than its lease, in the middle of a turn: another goes on with it, and when the
first one wakes up, nothing that it does reaches the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from sayso import Agent, Call
from sayso.assembly import App
from sayso.core.context import MessageRole
from sayso.core.operation import OperationState
from sayso.core.origin import Principal
from sayso.core.rows import Ending, ToolResultBody, ToolSentBody, TurnEndBody
from sayso.demo.local import START_MS, OpenStore
from sayso.runtime.commands import Caller
from sayso.runtime.ports import Finished, ModelRequest
from sayso.storage.store import LEASE_MS
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel, call, calls, say

ALICE = Caller(Principal.parse("user:alice"), "api token")


def script(request: ModelRequest) -> Finished:
    return calls(call("book")) if request.messages[-1].role is MessageRole.USER else say("It is booked.")


class World:
    """What was asked of it, in order, by whom and under which key; and what came of it, once for each key."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.booked: dict[str, str] = {}

    def book(self, who: str, key: str) -> str:
        self.asked.append((who, key))
        return self.booked.setdefault(key, f"table {len(self.booked) + 1}")


class Node:
    """One process: an agent whose tool books, and may be held before it answers."""

    def __init__(self, name: str, world: World) -> None:
        #: set by the tool once the world was asked; by the test, to let it answer; by the tool, as it does
        self.asked, self.hold, self.answered = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.model = ScriptedModel(script)
        self.agent = agent = Agent("assistant", self.model, "You book tables.")

        @agent.tool(effect="book", keyed=True, timeout_s=3_600, key_kept_s=3_600)
        async def book(call: Call) -> str:
            table = world.book(name, call.key)
            self.asked.set()
            await self.hold.wait()
            self.answered.set()
            return table


@asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    """Run the app's worker for the block."""
    work = asyncio.create_task(app.worker.run())
    try:
        yield
    finally:
        work.cancel()
        with suppress(asyncio.CancelledError):
            await work


@pytest.mark.rule("F34", "K2", "A8", "D2", "D5", "N18", "X45")
async def test_a_process_whose_lease_ended_in_a_turn_writes_nothing_when_it_wakes_up(open_store: OpenStore) -> None:
    clock, ids, world = VirtualClock(START_MS), CountingIds(), World()
    still, heir = Node("still", world), Node("heir", world)
    heir.hold.set()
    async with open_store(clock.now_ms) as store:
        zombie, next_one = (App(node.agent, store=store, clock=clock, ids=ids) for node in (still, heir))
        for app in (zombie, next_one):
            await app.worker.register()
        async with working(zombie):
            session = (await zombie.commands.open_session(ALICE)).id
            await zombie.commands.post(ALICE, session, "book a table")
            await still.asked.wait()
            owner = await store.session(session)
            assert owner is not None
            assert owner.node is not None
            assert await store.beat(owner.node, "http://zombie") == START_MS + LEASE_MS

            clock.advance(LEASE_MS)
            assert await store.sweep() == 1
            async with working(next_one):
                await next_one.worker.rested()
                finished = await store.rows(session)
                still.hold.set()
                await still.answered.wait()
                await zombie.worker.rested()
                await next_one.worker.rested()

        assert await store.beat(owner.node, "http://zombie") is None
        rows, after = await store.rows(session), await store.session(session)
        [operation] = await store.operations(session)

    assert rows == finished
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert [row.epoch for row in rows] == sorted(row.epoch for row in rows)
    assert {row.epoch for row in rows} == {owner.epoch, owner.epoch + 2}
    assert [row.body.ending for row in rows if isinstance(row.body, TurnEndBody)] == [Ending.DONE]
    # asked twice under one key, done once, told once
    assert world.asked == [("still", operation.key), ("heir", operation.key)]
    assert world.booked == {operation.key: "table 1"}
    assert [row.body.attempt for row in rows if isinstance(row.body, ToolSentBody) and not row.body.intended][-1] == 2
    [told] = [row.body for row in rows if isinstance(row.body, ToolResultBody)]
    assert told.parts[0].text == "table 1"
    assert (operation.state, operation.attempts) == (OperationState.ANSWERED, 2)
    assert len(still.model.requests) == 1
    assert after is not None
    assert (after.head, after.attempts, after.epoch) == (len(rows), 0, owner.epoch + 2)
