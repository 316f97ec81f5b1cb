"""The store does not follow: a write has no answer, or its answer is lost. Nothing goes past it, nobody is told
less than was accepted, and once it is known what is stored the session goes on by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import pytest

from sayso.core.errors import Forbidden, NotFound, Unresolved
from sayso.core.inputs import Input, InputKind, Keep
from sayso.core.labels import RUNTIME, Part
from sayso.core.origin import Principal
from sayso.core.rows import (
    Body,
    ConflictSettledBody,
    Draft,
    InputBody,
    Kind,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    Row,
    ToolResultBody,
)
from sayso.core.session import Position, Token
from sayso.core.view import public
from sayso.demo.local import START_MS, LocalStage, OpenStore, local_stage
from sayso.demo.scenarios import offer
from sayso.journal.append import Journal, JournalState, JournalStatus, Ticket
from sayso.journal.feed import Feeds
from sayso.journal.follow import capture
from sayso.journal.frames import Frame, Status
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.storage.store import Entry, Store
from sayso.testing.clock import VirtualClock
from sayso.testing.scripted import ScriptedModel
from sayso.testing.stores import GatedStore, Point
from sayso.testing.view import View

ALICE = Caller(Principal.parse("user:alice"), "api token")
OPS = Caller(Principal.parse("operator:ops"), "api token")
MINUTE_MS = 60_000


@dataclass
class Place:
    """A stage over a store that can be held and can fail."""

    stage: LocalStage
    store: GatedStore

    @property
    def state(self) -> JournalState:
        return self.stage.app.worker.status(self.stage.session).state

    async def post(self, text: str) -> None:
        await self.stage.app.commands.post(ALICE, self.stage.session, text)

    async def until(self, state: JournalState) -> None:
        async with asyncio.timeout(10):
            while self.state is not state:  # noqa: ASYNC110 - the worker says when
                await asyncio.sleep(0)
        for _ in range(10):  # its owner hears of it, and does what it does at once
            await asyncio.sleep(0)

    async def mended(self) -> None:
        """The store follows again, and time goes on until the next try was made."""
        self.store.mend()
        async with asyncio.timeout(10):
            while self.state is JournalState.RETRYING:
                self.stage.tick(MINUTE_MS)
                await asyncio.sleep(0)
        await self.stage.rest()

    async def shown(self) -> list[Row]:
        return [*(await self.stage.app.commands.history(ALICE, self.stage.session)).rows]

    async def stored(self) -> list[Row]:
        return await self.store.inside.rows(self.stage.session)

    async def queued(self) -> int:
        return len(await self.store.inside.inbox(self.stage.session, after=0, limit=10))


@asynccontextmanager
async def placed(
    open_store: OpenStore, model: ScriptedModel | None = None, limits: Limits | None = None
) -> AsyncIterator[Place]:
    made: list[GatedStore] = []

    @asynccontextmanager
    async def gated(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        async with open_store(now_ms) as inside:
            made.append(GatedStore(inside))
            yield made[0].store

    async with local_stage(open_store=gated, model=model, limits=limits) as stage:
        yield Place(stage, made[0])


@pytest.fixture
async def place(open_store: OpenStore) -> AsyncIterator[Place]:
    async with placed(open_store) as place:
        yield place


class Two:
    """One journal with two commits: the second is accepted while the first has no answer, and then none comes."""

    def __init__(self, store: GatedStore, feeds: Feeds, journal: Journal) -> None:
        self.store, self.journal = store, journal
        self.session = journal.token.session
        self._feeds = feeds
        self.writes: list[list[int]] = []

    def accept(self, text: str) -> Ticket:
        self.journal.stage(Draft(NoticeBody((Part(text, "runtime", RUNTIME, "runtime"),))))
        return self.journal.accept()

    async def failures(self) -> list[type[BaseException] | None]:
        """Accept both, and return what their tickets raised."""

        async def noted(rows: Sequence[Row]) -> None:
            self.writes.append([row.seq for row in rows])

        self.store.on(Point.WRITE, noted)
        tickets = [self.accept("the first"), self.accept("the second")]
        ended = await asyncio.gather(*(ticket.durable() for ticket in tickets), return_exceptions=True)
        return [type(end) if end is not None else None for end in ended]

    async def shown(self) -> list[Row]:
        return [*(await capture(self.store.store, self._feeds, self.session, limit=100)).rows]

    async def stored(self) -> list[Row]:
        return await self.store.inside.rows(self.session)


@pytest.fixture
async def two(open_store: OpenStore) -> AsyncIterator[Two]:
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as inside, asyncio.TaskGroup() as tasks:
        await inside.create_session("s1", owner=ALICE.principal, title="")
        received = Input(InputKind.MESSAGE, ALICE.principal, "api token")
        await inside.put(Entry("s1", "user:alice@s1", "e1", received, "sha256:0", keep_ms=MINUTE_MS))
        [claimed] = await inside.claim("node", at_most=1)
        store, feeds = GatedStore(inside), Feeds()
        feed = feeds.own("s1")
        yield Two(store, feeds, Journal(store.store, feed, claimed.token, claimed.record, spawn=tasks.create_task))


def kinds(rows: list[Row]) -> list[Kind]:
    return [row.kind for row in rows]


def whole(rows: list[Row]) -> None:
    """Every row once, in place."""
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))


# --- an acknowledgement is lost -------------------------------------------------


@pytest.mark.rule("H20")
async def test_an_input_whose_commit_has_no_answer_blocks_the_turn_and_is_seen_once(place: Place) -> None:
    place.store.lose_acknowledgements(of=[Kind.INPUT])
    await place.post("Hello")
    await place.until(JournalState.RETRYING)
    await place.post("And another thing")

    assert place.stage.requests == [], "no model call goes past it"
    assert kinds(await place.stored()) == [Kind.INPUT, Kind.TURN_START]
    assert await place.queued() == 1, "the second message is stored and waits"

    shown = await place.shown()
    assert kinds(shown) == [Kind.INPUT, Kind.TURN_START]
    body = shown[0].body
    assert isinstance(body, InputBody)
    assert body.input.principal == ALICE.principal
    assert place.state is not JournalState.RETRYING, "the history proves the whole commit"
    await place.stage.rest()
    assert len(place.stage.requests) == 2
    assert await place.queued() == 0
    whole(await place.stored())


@pytest.mark.rule("H20", "H35")
async def test_what_was_accepted_behind_a_lost_acknowledgement_is_shown_and_waits_until_it_is_due(two: Two) -> None:
    """The head is stored and its answer lost, the notice behind it never reached the store. A reader proves the
    first; the second waits for its time."""
    two.store.lose_acknowledgements()

    assert await two.failures() == [Unresolved, Unresolved]
    assert [row.seq for row in await two.stored()] == [1]
    assert [row.seq for row in await two.shown()] == [1, 2]
    status = two.journal.status
    assert (status.state, status.pending, status.attempts) == (JournalState.RETRYING, 1, 1)
    assert status.next_retry_at_ms is not None
    assert not await two.journal.reconcile(now_ms=status.next_retry_at_ms - 1), "it is not due yet"
    assert await two.journal.reconcile(now_ms=status.next_retry_at_ms)

    assert two.journal.status == JournalStatus(JournalState.HEALTHY)
    assert [row.seq for row in await two.stored()] == [1, 2]


@pytest.mark.rule("H35")
async def test_a_failed_head_poisons_its_successor_whose_write_never_runs(two: Two) -> None:
    two.store.refuse_writes(times=1)

    assert await two.failures() == [Unresolved, Unresolved]
    assert two.writes == [], "the head was refused before it was noted, and nothing came after it"
    assert await two.stored() == []
    with pytest.raises(Unresolved):
        two.accept("a third")
    assert [row.seq for row in await two.shown()] == [1, 2], "what was refused never had a place"
    await two.journal.reconcile(now_ms=two.journal.status.next_retry_at_ms)
    await two.journal.settled()
    third = two.accept("a third")
    await third.durable()

    assert two.writes == [[1], [2], [3]]
    assert [row.seq for row in await two.stored()] == [1, 2, 3]


@pytest.mark.rule("H35")
async def test_tries_come_later_each_time_and_never_more_than_a_minute_apart(two: Two) -> None:
    two.store.refuse_writes()
    assert await two.failures() == [Unresolved, Unresolved]

    waits = []
    for _ in range(10):
        status = two.journal.status
        assert status.next_retry_at_ms is not None
        assert status.last_failure_at_ms is not None
        waits.append(status.next_retry_at_ms - status.last_failure_at_ms)
        assert await two.journal.reconcile(now_ms=status.next_retry_at_ms)
    two.store.mend()

    assert two.journal.status.attempts == 11
    for place, wait in enumerate(waits):
        ceiling = min(60_000, 1_000 * 2**place)
        assert ceiling / 2 <= wait <= ceiling
    await two.journal.reconcile(now_ms=two.journal.status.next_retry_at_ms)
    assert two.journal.status == JournalStatus(JournalState.HEALTHY)


# --- a reply's calls ------------------------------------------------------------


@pytest.mark.rule("H26", "H27", "F41")
async def test_a_reply_whose_calls_may_not_be_stored_runs_none_of_them(place: Place) -> None:
    """The reply and one "not started" for its call are shown; nothing is sent; the queue waits; then it goes on."""
    listener, _ = place.stage.app.feeds.listen(place.stage.session)
    held = place.store.hold(Point.WRITE, of=[Kind.MODEL_CALLED])
    place.store.refuse_writes(of=[Kind.MODEL_CALLED])
    await place.post("Book Friday at seven for four")
    async with asyncio.timeout(10):
        await held.reached()
    await place.post("And tell Sam")
    held.open()
    await place.until(JournalState.RETRYING)

    shown = await place.shown()
    [called] = [row.body for row in shown if isinstance(row.body, ModelCalledBody)]
    results = [row.body for row in shown if isinstance(row.body, ToolResultBody)]
    assert [(r.call, r.outcome) for r in results] == [(called.calls[0].call, Outcome.NOT_STARTED)]
    assert Kind.MODEL_CALLED not in kinds(await place.stored())
    assert (await place.stage.books())["tables"] == {}
    assert await place.queued() == 1
    told = [listener.queue.get_nowait() for _ in range(listener.queue.qsize())]
    assert [event.state for event in told if isinstance(event, Status)][:1] == [JournalState.RETRYING]
    await place.stage.app.worker.reconcile(place.stage.session)
    assert place.state is JournalState.RETRYING, "a forced try fails too, and the session stands as it stood"

    await place.mended()
    rows = await place.stored()
    whole(rows)
    assert rows[: len(shown)] == shown
    assert await place.queued() == 0
    assert (await place.stage.books())["tables"] == {}
    told_model = [message.text for asked in place.stage.requests for message in asked.last]
    assert any("it was not sent" in text for text in told_model), "the model knows, and may call again"


@pytest.mark.rule("H27")
async def test_an_equal_row_under_another_key_is_another_row(two: Two) -> None:
    """Identity is the key alone: equal words are no repeat."""
    for _ in range(2):
        await two.accept("the same words").durable()

    rows = await two.stored()
    assert [row.seq for row in rows] == [1, 2]
    assert rows[0].body == rows[1].body


@pytest.mark.rule("H27", "K9")
async def test_an_answer_that_comes_while_the_store_is_down_is_shown_at_once_and_stored_in_its_place(
    place: Place,
) -> None:
    place.store.refuse_writes(of=[Kind.TOOL_RESULT])
    await place.post("Book Friday at seven for four")
    await place.until(JournalState.RETRYING)

    assert Kind.TOOL_RESULT in kinds(await place.shown())
    assert Kind.TOOL_RESULT not in kinds(await place.stored())

    await place.mended()
    whole(await place.stored())
    assert len((await place.stage.books())["tables"]) == 1


@pytest.mark.rule("K14")
async def test_the_steps_of_a_yes_wait_for_the_store_and_go_stale_with_it(place: Place) -> None:
    """A yes is good for an hour: a store that was down for longer does not turn it into a surprise."""
    await place.stage.say("alice", "Book Friday at seven for four")
    await place.stage.hook(offer("20:30"), id="evt_9")
    [question] = await place.stage.questions()
    place.store.refuse_writes(of=[Kind.TURN_STEPS])
    answering = asyncio.create_task(
        place.stage.app.commands.answer(ALICE, place.stage.session, place.stage.yes(question))
    )
    await place.until(JournalState.RETRYING)
    before = await place.stage.books()
    place.stage.tick(2 * 60 * MINUTE_MS)
    await place.mended()
    await answering

    rows = await place.stored()
    whole(rows)
    assert await place.stage.books() == before
    results = [
        row.body for row in rows if isinstance(row.body, ToolResultBody) and row.body.outcome is Outcome.NOT_STARTED
    ]
    assert any("too old" in result.parts[0].text for result in results)


# --- a store that can't be read -------------------------------------------------


@pytest.mark.rule("H34", "K6")
async def test_readers_are_told_where_the_owner_cannot_look_at_its_inbox_and_it_goes_on_by_itself(place: Place) -> None:
    """Nothing is pending: all that was accepted is stored. What waits in the inbox is not lost."""
    listener, _ = place.stage.app.feeds.listen(place.stage.session)
    place.store.refuse_looks()
    await place.post("Hello")
    await place.until(JournalState.RETRYING)

    status = await place.stage.app.commands.status(ALICE, place.stage.session)
    assert (status.state, status.pending, status.attempts) == (JournalState.RETRYING, 0, 1)
    assert status.next_retry_at_ms is not None
    await place.mended()

    told = [listener.queue.get_nowait() for _ in range(listener.queue.qsize())]
    assert [(each.state, each.pending) for each in told if isinstance(each, Status)] == [
        ("retrying", 0),
        ("healthy", 0),
    ]
    rows = await place.stored()
    whole(rows)
    assert [row.kind for row in rows][-1] == Kind.TURN_END


# --- a conflict ------------------------------------------------------------------


def _other(body: Body) -> Body:
    if not isinstance(body, ModelSaidBody):
        return body
    return replace(body, parts=(replace(body.parts[0], text="Something else."),))


async def in_dispute(place: Place) -> None:
    """Let the reply to a hello find another one in its place."""

    async def other_first(rows: Sequence[Row]) -> None:
        nonce = rows[0].commit_key.partition(".")[0]
        other = [replace(row, body=_other(row.body)) for row in rows]
        await place.store.inside.write(Token(place.stage.session, rows[0].epoch, nonce), other)

    place.store.on(Point.WRITE, other_first, of=[Kind.MODEL_SAID], times=1)
    await place.post("Hello")
    await place.until(JournalState.CONFLICT)


@pytest.mark.rule("H40", "K7", "X5")
@pytest.mark.parametrize("keep", Keep)
async def test_a_conflict_stands_still_until_an_operator_chooses_and_the_choice_is_a_row(
    open_store: OpenStore, keep: Keep
) -> None:
    """The store holds another reply under our number (here: written under our own right, as a broken tool might)."""
    async with placed(open_store) as place:
        commands, session = place.stage.app.commands, place.stage.session
        await in_dispute(place)

        shown = await place.shown()
        [(first, ours)] = [(row.seq, row.body) for row in shown if isinstance(row.body, ModelSaidBody)]
        assert ours not in [row.body for row in await place.stored()]
        whole(shown)
        dispute = await commands.dispute(OPS, session)
        assert dispute.from_seq == first
        await place.post("Are you there?")
        assert await place.queued() == 1, "nothing goes on before the choice"
        with pytest.raises(Forbidden):
            await commands.settle_dispute(ALICE, session, keep)

        await commands.settle_dispute(OPS, session, keep)
        await place.stage.rest()

        rows = await place.stored()
        whole(rows)
        [settled] = [row.body for row in rows if isinstance(row.body, ConflictSettledBody)]
        assert (settled.keep, settled.by) == (keep, "operator:ops")
        words = [part.text for row in rows if isinstance(row.body, NoticeBody) for part in row.body.parts]
        assert (ours.parts[0].text in words) == (keep is Keep.OURS)
        assert await place.queued() == 0
        assert await place.shown() == rows
        with pytest.raises(NotFound):
            await commands.settle_dispute(OPS, session, keep)


@pytest.mark.rule("K1", "K7")
@pytest.mark.parametrize("when", ["pending when it comes back", "accepted while it listens"])
async def test_a_reader_who_was_shown_what_is_passed_over_drops_it_before_it_is_shown_the_choice(
    open_store: OpenStore, when: str
) -> None:
    """The choice is no stored row yet, so the store alone can't say that what the reader has does not stand."""
    async with placed(open_store) as place:
        commands, session = place.stage.app.commands, place.stage.session
        await in_dispute(place)
        shown = await place.shown()
        cursor, [ours] = shown[-1].position, [row for row in shown if isinstance(row.body, ModelSaidBody)]
        named: dict[str, dict[str, Any]] = {}
        view = View(named=named)
        view.load({"rows": [public(row, session) for row in shown], "token": str(cursor)})

        async def comes_back() -> AsyncGenerator[Frame, None]:
            assert view.cursor is not None
            return await commands.follow(ALICE, session, after=Position.parse(view.cursor))

        async def reads(frames: AsyncGenerator[Frame, None], until: str) -> None:
            async with asyncio.timeout(10):
                async for frame in frames:
                    view.apply(frame)
                    if frame.event == until:
                        return

        named.clear()  # another wrote under our own right, so that one position names two rows here
        look = place.store.hold(Point.LOOK)
        await commands.settle_dispute(OPS, session, Keep.STORED)
        await look.reached()
        if when == "pending when it comes back":
            place.store.refuse_writes()
            look.open()
            await place.until(JournalState.RETRYING)
        else:
            frames = await comes_back()
            await reads(frames, "caught_up")
            look.open()
            await reads(frames, "farewell")
        await reads(await comes_back(), "caught_up")
        place.store.mend()
        await place.mended()

        assert view.rows == [json.loads(json.dumps(public(row, session))) for row in (await place.stored())]
        assert ours.seq in [row.seq for row in await place.stored()]
        assert public(ours, session) not in view.rows


# --- a caller who leaves ------------------------------------------------------------


@pytest.mark.rule("A7", "A8")
async def test_a_message_whose_sender_hangs_up_while_it_is_stored_is_heard_at_once(place: Place) -> None:
    """The store is slow, the client gives up waiting: what was on its way arrives, and its owner hears of it."""
    await place.stage.say("alice", "Hello")
    heard = len(place.stage.requests)
    slow = place.store.hold(Point.PUT)
    sending = asyncio.create_task(place.post("Are you there?"))
    async with asyncio.timeout(10):
        await slow.reached()
    sending.cancel()
    with suppress(asyncio.CancelledError):
        await sending
    slow.open()

    async with asyncio.timeout(10):
        await place.stage.model.until_asked(heard + 1)
    await place.stage.rest()
    assert await place.queued() == 0
