"""One session at a desk: its journal, a store that can be held, and pages that follow it. No model and no turn: a
test accepts the rows itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sayso.core.authority import Verdict
from sayso.core.contract import Effect
from sayso.core.inputs import Input, InputKind
from sayso.core.labels import RUNTIME, USER, Part
from sayso.core.origin import Origin, Principal
from sayso.core.rows import (
    Body,
    Called,
    Draft,
    Ending,
    InputBody,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    Row,
    ToolResultBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.core.session import Position
from sayso.demo.local import START_MS, OpenStore
from sayso.journal.append import Journal, Ticket
from sayso.journal.feed import Bounds, Captured, Feeds
from sayso.journal.follow import capture, follow
from sayso.journal.frames import PLAIN, Frame, Projection
from sayso.storage.store import Claimed, Entry
from sayso.testing.clock import VirtualClock
from sayso.testing.stores import GatedStore
from sayso.testing.view import View

T = TypeVar("T")

SESSION = "ses_desk"
ALICE, BOB = Principal.parse("user:alice"), Principal.parse("user:bob")


@dataclass
class Follower:
    """A page that follows the session, and the frames that it got."""

    view: View = field(default_factory=View)
    frames: list[Frame] = field(default_factory=list)
    reading: asyncio.Task[None] | None = None

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once that is so."""
        async with asyncio.timeout(10):
            while not condition():
                if self.reading is not None and self.reading.done():
                    self.reading.result()  # what went wrong there is what went wrong
                    assert condition(), f"the stream ended: {self.view.farewell}"
                await asyncio.sleep(0)

    async def caught_up(self) -> Follower:
        """Return once everything of the past has come."""
        await self.until(lambda: self.view.caught_up)
        return self

    async def row(self, seq: int) -> Follower:
        """Return once the page has a row of this number."""
        await self.until(lambda: self.numbers[-1:] == [seq])
        return self

    async def ended(self) -> str:
        """Return why the stream ended."""
        async with asyncio.timeout(10):
            assert self.reading is not None
            await self.reading
        return self.view.farewell

    async def cut(self) -> None:
        """Lose the connection."""
        if self.reading is not None and not self.reading.done():
            self.reading.cancel()
            await asyncio.gather(self.reading, return_exceptions=True)
        self.view.cut()

    @property
    def numbers(self) -> list[int]:
        return [Position.parse(row["position"]).seq for row in self.view.rows]

    @property
    def events(self) -> list[str]:
        return [frame.event for frame in self.frames]


class Desk:
    """See the module's text."""

    def __init__(self, store: GatedStore, clock: VirtualClock, feeds: Feeds) -> None:
        self.store, self.clock, self.feeds = store, clock, feeds
        self._tasks: set[asyncio.Task[Any]] = set()
        self.journal: Journal
        self.inputs = 0

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Do something beside the test, until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        return task

    async def close(self) -> None:
        """End everything, also what a test left held."""
        self.feeds.dismiss_all("shutdown")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # owners

    async def claim(self) -> Claimed:
        """Take the session."""
        await self.post("wake up")
        [claimed] = await self.store.store.claim("node", at_most=1)
        return claimed

    async def own(self) -> None:
        """Take the session, and write its rows from now on."""
        claimed = await self.claim()
        feed = self.feeds.own(SESSION)
        self.journal = Journal(self.store.store, feed, claimed.token, claimed.record, spawn=self.spawn)

    async def give_up(self) -> None:
        """Let the session go, as a node does that lost it: what is pending is lost."""
        self.feeds.disown(SESSION)
        await self.store.inside.surrender(self.journal.token)

    async def restart(self, bounds: Bounds | None = None) -> None:
        """The process ends and another one starts: what it had in memory is gone."""
        await self.give_up()
        self.feeds.dismiss_all("shutdown")
        self.feeds = Feeds(projection=self.feeds.projection, bounds=bounds or self.feeds.bounds)
        await self.own()

    async def post(self, text: str, by: Principal = ALICE, ids: tuple[str, ...] = ()) -> InputBody:
        """Store a message, and return the row that takes it."""
        self.inputs += 1
        parts = (Part(text, str(by), USER, "api token"),)
        received = Input(InputKind.MESSAGE, by, "api token", parts, client_send_ids=ids)
        source, event_id = f"{by}@{SESSION}", f"e{self.inputs}"
        put = await self.store.put(Entry(SESSION, source, event_id, received, "sha256:0", keep_ms=60_000))
        assert put.n is not None
        return InputBody(put.n, source, event_id, put.received_at_ms, received)

    # rows

    def accept(self, *bodies: Body, turn: str | None = "T1") -> Ticket:
        """Accept rows as one commit."""
        for body in bodies:
            self.journal.stage(Draft(body, turn))
        return self.journal.accept()

    async def write(self, *bodies: Body, turn: str | None = "T1") -> tuple[Row, ...]:
        """Accept rows, a commit each, and return when they are stored."""
        rows: list[Row] = []
        for body in bodies:
            ticket = self.accept(body, turn=turn)
            await ticket.durable()
            rows += ticket.rows
        return tuple(rows)

    async def stored(self) -> list[Row]:
        return await self.store.inside.rows(SESSION)

    # readers

    async def capture(self, limit: int = 100, before: int | None = None) -> Captured:
        return await capture(self.store.store, self.feeds, SESSION, limit=limit, before=before)

    def follow(
        self, follower: Follower | None = None, *, after: Position | str | None = None, token: Position | None = None
    ) -> Follower:
        """Connect a page; one that was connected before goes on from its cursor."""
        follower = follower or Follower()
        if after is None and token is None and follower.view.cursor is not None:
            after = follower.view.cursor
        at = Position.parse(after) if isinstance(after, str) else after
        follower.reading = self.spawn(self._read(follower, at, token))
        return follower

    async def _read(self, follower: Follower, after: Position | None, token: Position | None) -> None:
        async with aclosing(follow(self.store.store, self.feeds, SESSION, after=after, token=token)) as frames:
            async for frame in frames:
                follower.frames.append(frame)
                follower.view.apply(frame)

    async def from_history(self) -> Follower:
        """Paint a page from the history, and connect it with the token."""
        captured = await self.capture()
        follower = Follower()
        follower.view.load(json.loads(captured.text))
        return await self.follow(follower, token=captured.token).caught_up()


@asynccontextmanager
async def desk_in(
    open_store: OpenStore, *, projection: Projection = PLAIN, bounds: Bounds | None = None
) -> AsyncIterator[Desk]:
    """Yield a desk over a store, its session owned."""
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as inside:
        desk = Desk(GatedStore(inside), clock, Feeds(projection=projection, bounds=bounds))
        await inside.create_session(SESSION, owner=ALICE, title="")
        await desk.own()
        try:
            yield desk
        finally:
            await desk.close()


# --- rows ---------------------------------------------------------------------


def notice(text: str) -> NoticeBody:
    return NoticeBody((Part(text, "runtime", RUNTIME, "runtime"),))


def said(text: str, reply: int = 1) -> ModelSaidBody:
    return ModelSaidBody(reply, (Part(text, "model", RUNTIME),))


def began(by: Principal = ALICE, n: int = 1) -> TurnStartBody:
    return TurnStartBody(Origin(by, "api token", (n,)), steps_left=20)


def called(call: str = "T1.1.1", tool: str = "look", reply: int = 1) -> ModelCalledBody:
    return ModelCalledBody(reply, (Called(call, tool, {}, Verdict.RUN, "", Effect.READ),), ())


def result(text: str, call: str = "T1.1.1", tool: str = "look") -> ToolResultBody:
    return ToolResultBody(call, tool, Outcome.OK, (Part(text, f"tool:{tool}", RUNTIME, "tool contract"),))


def done() -> TurnEndBody:
    return TurnEndBody(Ending.DONE, "", 20)


def words(row: dict[str, Any]) -> str:
    """The text of a public row."""
    return "".join(part["text"] for part in row["body"]["parts"])
