"""Another process takes a session over: the one before it can do no more, and the newcomer reads only what it needs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

import pytest

from sayso.agent import Agent
from sayso.assembly import App
from sayso.core.context import MessageRole
from sayso.core.labels import RUNTIME, Part
from sayso.core.origin import Principal
from sayso.core.rows import NoticeBody, Row, ToolResultBody, TurnEndBody
from sayso.core.session import Token
from sayso.demo.local import START_MS
from sayso.journal.frames import Frame
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Call, Finished, ModelRequest
from sayso.storage.memory import MemoryStore
from sayso.storage.store import WriteOutcome
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel, call, calls, say
from sayso.testing.stores import StoreAround

ALICE = Caller(Principal.parse("user:alice"), "api token")


def script(request: ModelRequest) -> Finished:
    return calls(call("act")) if request.messages[-1].role is MessageRole.USER else say("Done.")


class Node:
    """One process: an agent with one tool that notes who called it, and a model that can be held."""

    def __init__(self, name: str, store: MemoryStore, clock: VirtualClock, ids: CountingIds, did: list[str]) -> None:
        self.model = ScriptedModel(script)
        agent = Agent("both", self.model, "Do it.")

        @agent.tool(effect="send", keyed=True)
        async def act(call: Call) -> str:
            did.append(name)
            return "done"

        self._make = partial(App, agent, store=store, clock=clock, ids=ids)
        self.app = self._make()

    def linger(self, linger_ms: int) -> None:
        """Stay loaded for so long without work."""
        self.app = self._make(limits=Limits(linger_ms=linger_ms))

    async def start(self) -> None:
        await self.app.worker.register()
        self.work = asyncio.create_task(self.app.worker.run())

    async def rest(self) -> None:
        await self.app.worker.rested()


@pytest.fixture
async def nodes() -> AsyncIterator[tuple[Node, Node, MemoryStore, list[str]]]:
    clock, ids, did = VirtualClock(START_MS), CountingIds(), list[str]()
    store = MemoryStore(clock=clock.now_ms)
    first, second = (Node(name, store, clock, ids, did) for name in ("first", "second"))
    yield first, second, store, did
    for node in (first, second):
        if hasattr(node, "work"):
            node.work.cancel()
            with suppress(asyncio.CancelledError):
                await node.work


async def stand_still(node: Node) -> str:
    """Start a turn whose model call is held, and return its session."""
    node.model.hold = asyncio.Event()
    await node.start()
    session = (await node.app.commands.open_session(ALICE)).id
    await node.app.commands.post(ALICE, session, "act")
    await node.model.until_asked()
    return session


@pytest.mark.rule("F56")
@pytest.mark.rule("K2", "A8", "D5", "X45")
async def test_a_process_that_was_taken_over_from_does_nothing_more(
    nodes: tuple[Node, Node, MemoryStore, list[str]],
) -> None:
    """It stood still, another took its session; when it wakes up, its next write is fenced, its tool isn't
    called, and its readers are sent to the new owner."""
    zombie, heir, store, did = nodes
    session = await stand_still(zombie)

    async def read() -> list[Frame]:
        return [frame async for frame in await zombie.app.commands.follow(ALICE, session, after=None)]

    reading = asyncio.create_task(read())
    await heir.start()
    await heir.rest()
    assert zombie.model.hold is not None
    zombie.model.hold.set()
    frames = await reading
    await zombie.rest()

    assert did == ["second"]
    assert (frames[-1].event, frames[-1].data) == ("farewell", '{"reason":"moved"}')
    rows = await store.rows(session)
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert [row.epoch for row in rows] == sorted(row.epoch for row in rows)
    assert isinstance(rows[-1].body, TurnEndBody)


@pytest.mark.rule("K7", "H5")
async def test_nothing_acts_on_rows_that_the_store_holds_otherwise(
    nodes: tuple[Node, Node, MemoryStore, list[str]],
) -> None:
    """Somebody wrote other rows under the same right: the session stands still, and no tool saw ours."""
    node, _, store, did = nodes
    session = await stand_still(node)
    record = await store.session(session)
    assert record is not None
    token = Token(session, record.epoch, record.nonce)
    body = NoticeBody((Part("not ours", "runtime", RUNTIME),))
    other = Row(record.head + 1, record.epoch, None, token.commit_key(record.head + 1), record.at_ms, body)
    assert await store.write(token, [other]) is WriteOutcome.WRITTEN

    assert node.model.hold is not None
    node.model.hold.set()
    await node.rest()

    assert did == []
    assert (await store.rows(session))[-1] == other
    assert not any(isinstance(row.body, ToolResultBody) for row in await store.rows(session))


class Counting(StoreAround):
    """Counts the rows that are read."""

    read = 0

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> Sequence[Row]:
        found = await self.inside.last_rows(session, limit=limit, before=before)
        self.read += len(found)
        return found

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> Sequence[Row]:
        found = await self.inside.rows(session, after=after, up_to=up_to, limit=limit)
        self.read += len(found)
        return found


@pytest.mark.rule("K8")
@pytest.mark.parametrize("turns", [20, 80])
async def test_a_take_over_reads_the_same_at_any_length(turns: int) -> None:
    clock, ids = VirtualClock(START_MS), CountingIds()
    inside = MemoryStore(clock=clock.now_ms)
    agent = Agent("long", ScriptedModel(lambda _: say("Yes.")), "Talk.")
    before = App(agent, store=inside, clock=clock, ids=ids)
    async with before.running():
        session = (await before.commands.open_session(ALICE)).id
        for _ in range(turns):
            await before.commands.post(ALICE, session, "hello")
            await before.worker.rested()

    counting = Counting(inside)
    after = App(agent, store=counting.store, clock=clock, ids=ids, limits=Limits(context_rows=40))
    async with after.running():
        await after.commands.post(ALICE, session, "still there?")
        await after.worker.rested()

    assert counting.read == 40
    assert len(await inside.rows(session)) == (turns + 1) * 4


@pytest.mark.rule("K22")
async def test_a_session_that_was_taken_over_is_let_go_like_any_other(
    nodes: tuple[Node, Node, MemoryStore, list[str]],
) -> None:
    """Its inbox holds only entries that were taken before: there is nothing to look at, and so it is released."""
    ended, heir, store, _ = nodes
    session = await stand_still(ended)
    ended.work.cancel()
    with suppress(asyncio.CancelledError):
        await ended.work
    heir.linger(0)
    await heir.start()
    await heir.rest()

    async with asyncio.timeout(10):
        while True:
            record = await store.session(session)
            if record is not None and record.state == "idle":
                break
            await asyncio.sleep(0)
    assert isinstance((await store.rows(session))[-1].body, TurnEndBody)
