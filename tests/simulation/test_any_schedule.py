"""Whatever the schedule, every page ends with the stored history, row by row, and no position names two rows.

A seed decides everything: who says what, how long replies are, which writes are refused, which acknowledgements are
lost, where the store holds another row than ours, where the process ends, and when each of three pages reads,
loses its connection and comes back. Histories are captured in between. A failure prints the seed that repeats it;
`SAYSO_TEST_SEEDS=10000` plays so many, and a fiftieth of them on each store.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from sayso.assembly import App
from sayso.core.context import MessageRole
from sayso.core.errors import CommitUnknown, NotFound, StoreUnavailable
from sayso.core.inputs import Input, InputKind, Keep
from sayso.core.origin import Principal
from sayso.core.rows import ModelSaidBody, Row
from sayso.core.session import Position, Token
from sayso.core.view import public
from sayso.demo.concierge import concierge, script, signed_by_demo
from sayso.demo.local import START_MS, OpenStore
from sayso.journal.append import JournalState
from sayso.runtime.commands import Caller
from sayso.runtime.ports import Finished, ModelRequest
from sayso.storage.memory import MemoryStore
from sayso.storage.store import Entry, Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel, say
from sayso.testing.stores import GatedStore, Point
from sayso.testing.view import View
from sayso.testing.world import World

ALICE, OPS = (Caller(Principal.parse(who), "api token") for who in ("user:alice", "operator:ops"))
SEEDS = int(os.environ.get("SAYSO_TEST_SEEDS", "200"))
#: how many of them are played on databases too
ON_EACH_STORE = max(20, SEEDS // 50)
#: seeds that once failed
KEPT = (1484, 2956, 7086, 9763)
ACTIONS = 20
PAGES = 3


def told(request: ModelRequest) -> Finished:
    """As the concierge's script, but a story is long enough to be published piece by piece."""
    newest = request.messages[-1]
    if newest.role is MessageRole.USER and newest.text.startswith("Tell"):
        return say(" ".join(word * 4100 for word in "abc"))
    return script(request)


class Named(dict[str, dict[str, Any]]):
    """The row of each position, for all pages; save where somebody wrote under our own right, and a position does
    name two rows until an operator has chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.at_issue: set[str] = set()

    def setdefault(self, position: str, row: dict[str, Any] | None = None) -> dict[str, Any]:
        """Note what a position names; return what it named before."""
        assert row is not None
        return row if position in self.at_issue else super().setdefault(position, row)


@dataclass
class Page:
    """One page, and the connection that it has, if it has one."""

    view: View
    reading: asyncio.Task[None] | None = None
    #: it takes nothing while this is not set
    awake: asyncio.Event = field(default_factory=asyncio.Event)


class Story:
    """One seed's schedule: a store, a clock and a world that outlive the processes, and three pages."""

    def __init__(self, seed: int, kept: Store, clock: VirtualClock) -> None:
        self.chance = random.Random(seed)
        self.clock, self.world, self.ids = clock, World(), CountingIds()
        self.kept = kept
        self.store = GatedStore(self.kept)
        self.named = Named()
        #: a dispute is on its way, or stands, and is not settled
        self.disputed = False
        self.pages = [Page(View(named=self.named)) for _ in range(PAGES)]
        self.session = ""

    # the process

    async def start(self) -> None:
        agent = concierge(self.world, model=ScriptedModel(told), scheme=signed_by_demo)
        self.app = App(agent, store=self.store.store, clock=self.clock, ids=self.ids)
        await self.app.worker.register()
        self.work = asyncio.create_task(self.app.worker.run())

    async def end(self) -> None:
        """The process ends where it stands. What the store has not, is lost."""
        self.work.cancel()
        with suppress(asyncio.CancelledError):
            await self.work

    async def crash(self) -> None:
        for page in self.pages:
            await self.cut(page)
        if self.disputed:  # what was shown under our own right by another is beyond what a cursor can say
            return
        await self.end()
        await self.start()

    async def some_steps(self) -> None:
        for _ in range(self.chance.randrange(0, 30)):
            await self.step()

    async def step(self) -> None:
        """Let others have their turn, and as much time as the store takes to answer."""
        await asyncio.sleep(0)
        await self.kept.session(self.session)

    # what people do

    async def say(self) -> None:
        text = self.chance.choice(("Hello", "Tell me a story", "Book Friday at seven for four", "yes"))
        await self.app.commands.post(ALICE, self.session, text)

    async def time_passes(self) -> None:
        self.clock.advance(self.chance.choice((100, 1_000, 60_000, 11 * 60_000)))

    async def stop(self) -> None:
        """Stop what runs, if anything does; its sender does not wait for the row."""
        received = Input(InputKind.STOP, ALICE.principal, ALICE.verified)
        put = await self.kept.put(Entry(self.session, "stops", str(self.ids.event()), received, "", keep_ms=1))
        assert put.n is not None
        self.app.worker.hint(self.session)

    # what the store does

    async def refuse(self) -> None:
        self.store.refuse_writes(times=self.chance.randrange(1, 4))

    async def lose(self) -> None:
        self.store.lose_acknowledgements(times=self.chance.randrange(1, 3))

    async def refuse_loads(self) -> None:
        self.store.refuse_loads(times=self.chance.randrange(1, 3))

    async def refuse_looks(self) -> None:
        self.store.refuse_looks(times=self.chance.randrange(1, 4))

    async def mend(self) -> None:
        self.store.mend()

    async def dispute(self) -> None:
        """The next reply in words finds another one in its place."""

        async def other_first(rows: Sequence[Row]) -> None:
            said = [row for row in rows if isinstance(row.body, ModelSaidBody) and row.body.parts]
            if not said:
                return
            token = Token(self.session, rows[0].epoch, rows[0].commit_key.partition(".")[0])
            self.disputed = True
            self.named.at_issue.update(str(row.position) for row in rows)
            await self.kept.write(token, [_otherwise(row) for row in rows])

        self.store.on(Point.WRITE, other_first, times=1)

    async def choose(self) -> None:
        """An operator looks whether there is something to choose, and does."""
        if self.app.worker.status(self.session).state is not JournalState.CONFLICT:
            return
        with suppress(NotFound, StoreUnavailable, CommitUnknown):  # not found: its owner is about to say so
            await self.app.commands.settle_dispute(OPS, self.session, self.chance.choice([*Keep]))
            self.disputed = False

    # what pages do

    async def cut(self, page: Page) -> None:
        """The connection goes, wherever it is."""
        if page.reading is not None:
            page.reading.cancel()
            with suppress(asyncio.CancelledError):
                await page.reading
            page.reading = None
            page.view.cut()

    async def lose_a_connection(self) -> None:
        await self.cut(self.chance.choice(self.pages))

    async def connect_one(self) -> None:
        await self.connect(self.chance.choice(self.pages), anew=self.chance.random() < 0.3)

    async def connect(self, page: Page, *, anew: bool) -> None:
        """Come back by the cursor; or paint anew from the history and come by its token."""
        if page.reading is not None and not page.reading.done():
            return
        token: Position | None = None
        try:
            if anew or page.view.needs_history:
                token = await self.paint(page)
        except StoreUnavailable:
            return
        page.reading = asyncio.create_task(self.read(page, token))
        page.awake.set()

    async def paint(self, page: Page) -> Position | None:
        captured = await self.app.commands.history(ALICE, self.session)
        shown = json.loads(captured.text)
        if shown["token"] is None:
            return None
        page.view.load(shown)
        return Position.parse(shown["token"])

    async def read(self, page: Page, token: Position | None) -> None:
        cursor = None if page.view.cursor is None else Position.parse(page.view.cursor)
        with suppress(StoreUnavailable):
            frames = await self.app.commands.follow(
                ALICE, self.session, token=token, after=None if token is not None else cursor
            )
            async with aclosing(frames):
                async for frame in frames:
                    page.view.apply(frame)
                    await page.awake.wait()
        if not page.view.farewell:
            page.view.cut()

    async def doze(self) -> None:
        page = self.chance.choice(self.pages)
        if self.chance.random() < 0.5:
            page.awake.clear()
        else:
            page.awake.set()

    async def capture(self) -> None:
        """A history is what is stored, and what was accepted beyond it: consecutive, each row once. What is accepted
        or stored while it is read may be in it or not."""
        before = await self.known()
        try:
            captured = await self.app.commands.history(ALICE, self.session)
        except StoreUnavailable:
            return
        after = await self.known()
        assert [row.seq for row in captured.rows] == list(range(1, len(captured.rows) + 1))
        assert len(captured.rows) >= min(len(before), len(after))
        for row in captured.rows:
            assert row in (before.get(row.seq), after.get(row.seq))
        if before == after:
            assert [*captured.rows] == [after[seq] for seq in sorted(after)]
        for shown in json.loads(captured.text)["rows"]:
            assert self.named.setdefault(shown["position"], shown) == shown

    async def known(self) -> dict[int, Row]:
        """Return every row that is accepted when it is called, by its number: by then stored, or pending at once."""
        pending = {row.seq: row for row in self.app.feeds.pending(self.session)}
        return {row.seq: row for row in await self.kept.rows(self.session)} | pending

    # the whole

    async def play(self) -> list[Row]:
        await self.start()
        self.session = (await self.app.commands.open_session(ALICE)).id
        often = [self.say, self.say, self.time_passes, self.connect_one, self.connect_one, self.capture, self.choose]
        seldom = [
            self.refuse,
            self.lose,
            self.refuse_loads,
            self.refuse_looks,
            self.mend,
            self.dispute,
            self.crash,
            self.stop,
        ]
        acts: list[Callable[[], Coroutine[Any, Any, None]]] = [*often, *often, *seldom]
        acts += [self.lose_a_connection, self.doze, self.doze]
        for _ in range(ACTIONS):
            await self.chance.choice(acts)()
            await self.some_steps()
        self.store.mend()
        await self.rest()
        await self.everybody_catches_up()
        rows = await self.kept.rows(self.session)
        for page in self.pages:
            await self.cut(page)
        await self.end()
        return rows

    async def rest(self) -> None:
        """Let everything come to an end; back-off and time-outs pass on the clock. A database takes its own time, of
        which a busy disk takes much."""
        for _ in range(40_000):
            await self.choose()
            await self.step()
            quiet = self.app.worker.at_rest and self.app.worker.status(self.session).state is JournalState.HEALTHY
            if quiet and not await self.kept.inbox(self.session, after=0, limit=1):
                return
            self.clock.advance(700)
        raise AssertionError("the session does not come to rest")

    async def everybody_catches_up(self) -> None:
        newest = len(await self.kept.rows(self.session))
        for page in self.pages:
            page.awake.set()
            for _ in range(400):
                done = page.view.caught_up and not page.view.needs_history and len(page.view.rows) == newest
                if done and page.reading is not None and not page.reading.done():
                    break
                await self.connect(page, anew=False)
                await self.step()


def _otherwise(row: Row) -> Row:
    if not isinstance(row.body, ModelSaidBody):
        return row
    return replace(row, body=replace(row.body, parts=(replace(row.body.parts[0], text="Something else."),)))


async def plays(seed: int, kept: Store, clock: VirtualClock) -> None:
    story = Story(seed, kept, clock)
    rows = await story.play()

    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    expected = [json.loads(json.dumps(public(row, story.session))) for row in rows]
    for page in story.pages:
        assert page.view.rows == expected
        assert page.view.text is None


@pytest.mark.rule("H1", "H20", "H24", "H40", "K1", "K3", "K7", "X1", "X17", "X25")
@pytest.mark.parametrize("seed", sorted({*range(SEEDS), *KEPT}))
async def test_every_page_ends_with_the_stored_history(seed: int) -> None:
    clock = VirtualClock(START_MS)
    await plays(seed, MemoryStore(clock=clock.now_ms), clock)


@pytest.mark.rule("H1", "H20", "H24", "H40", "K1", "K3", "K7")
@pytest.mark.parametrize("seed", range(ON_EACH_STORE))
async def test_every_page_ends_with_the_stored_history_on_each_store(seed: int, open_store: OpenStore) -> None:
    """Here reads and writes take time, and a process may end while one is out."""
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as kept:
        await plays(seed, kept, clock)
