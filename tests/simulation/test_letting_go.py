"""Letting a session go: for want of work or of room, closed by its owner, deleted. What is unresolved stays."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from sayso.core.context import MessageRole
from sayso.core.errors import CommitUnknown, Forbidden, NotFound, NotSettled, SessionClosed, StoreUnavailable
from sayso.core.inputs import Answer
from sayso.core.rows import (
    ConsentWithdrawnBody,
    Ending,
    InputSupersededBody,
    Kind,
    ModelSaidBody,
    Outcome,
    SessionClosedBody,
    ToolResultBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.core.session import START, SessionState, Token
from sayso.demo.local import OpenStore
from sayso.journal.append import JournalState
from sayso.journal.feed import Queue
from sayso.journal.frames import Event
from sayso.runtime.limits import Limits
from sayso.storage.store import DoorKind, Released, Store
from sayso.testing.stores import GatedStore, Point
from tests.simulation.room import OPS, VIEWER, Room, caller, room


@pytest.fixture
async def shared(open_store: OpenStore) -> AsyncIterator[Room]:
    async with room(open_store) as shared:
        await shared.invite("bob")
        yield shared


async def out(shared: Room, who: str, text: str, *, tool: bool = False) -> asyncio.Event:
    """Post a message whose answer takes its time: the model's, or that of the tool it calls."""
    hold = asyncio.Event()
    if tool:
        shared.hold.append(hold)
        await shared.post(who, text)
        while not shared.handed:  # noqa: ASYNC110 - the tool tells nobody
            await asyncio.sleep(0)
    else:
        shared.model.hold = hold
        await shared.post(who, text)
        await shared.model.until_asked(len(shared.model.requests) + 1)
    return hold


async def unresolved(shared: Room, store: GatedStore) -> None:
    """Begin a turn of alice's, and have the store fail in the middle of it."""
    hold = await out(shared, "alice", "a long story")
    store.refuse_writes()
    hold.set()
    await until(shared, JournalState.RETRYING)


async def until(shared: Room, state: JournalState) -> None:
    while (await shared.app.commands.status(OPS, shared.session)).state is not state:  # noqa: ASYNC110 - nobody is told
        await asyncio.sleep(0)


# --- closed by its owner -------------------------------------------------------


async def close(shared: Room, who: str = "alice") -> SessionClosedBody:
    _, row = await shared.app.commands.close_session(caller(who), shared.session)
    assert row is not None
    assert isinstance(row.body, SessionClosedBody)
    await shared.rest()
    return row.body


async def test_a_closed_session_is_read_as_before_and_takes_nothing_more(shared: Room) -> None:
    await shared.say("alice", "hello")
    app, alice, session = shared.app, caller("alice"), shared.session
    assert (await close(shared)).by == "user:alice"

    closed = await app.commands.session(alice, session)
    assert (closed.closed_at_ms, closed.state) == (shared.clock.now_ms(), SessionState.IDLE)
    assert [row.kind for row in (await app.commands.history(caller("bob"), session)).rows][-1] == Kind.SESSION_CLOSED
    assert app.worker.owned == 0
    before = await shared.rows()
    for call in (
        shared.post("alice", "still here?"),
        shared.post("bob", "and me?"),
        shared.invite("carol"),
        shared.set(title="over"),
        app.commands.close_session(alice, session),
    ):
        with pytest.raises(SessionClosed):
            await call
    await shared.reborn()
    await shared.later(24 * 3_600_000)
    assert await shared.rows() == before


@pytest.mark.rule("X44")
async def test_closing_gives_up_the_model_and_nothing_begins_by_itself_afterwards(shared: Room) -> None:
    hold = await out(shared, "alice", "a long story")
    await shared.post("bob", "me next")

    await close(shared)
    asked = len(shared.model.requests)
    hold.set()
    await shared.reborn()
    await shared.later(60_000)

    [ended] = await shared.bodies(TurnEndBody)
    assert (ended.ending, ended.reason) == (Ending.CANCELLED, "the session was closed by user:alice")
    assert len(shared.model.requests) == asked
    assert shared.model.open == 0
    [left] = await shared.bodies(InputSupersededBody)
    assert left.reason == "the session was closed by user:alice"
    assert await shared.heard() == [("alice", "a long story")]
    assert await shared.store.inbox(shared.session, after=0, limit=9) == []


@pytest.mark.rule("K9", "X54")
async def test_what_was_shown_of_a_reply_when_it_was_closed_is_a_row(shared: Room) -> None:
    midway = shared.model.hold_midway = asyncio.Event()
    await shared.post("alice", "a long story")
    await shared.model.until_asked()
    for _ in range(10):  # the first piece is written
        await asyncio.sleep(0)

    await close(shared)
    midway.set()

    [said] = await shared.bodies(ModelSaidBody)
    assert said.interrupted
    assert said.parts[0].text == "I "
    kinds = [row.kind for row in await shared.rows() if row.turn == "T1"]
    assert kinds == [Kind.TURN_START, Kind.MODEL_SAID, Kind.TURN_END]


@pytest.mark.rule("X46", "X47", "X56")
@pytest.mark.parametrize(("tool", "outcome"), [("note", Outcome.UNKNOWN), ("look", Outcome.FAILED)])
async def test_what_was_out_when_it_was_closed_has_its_one_result(shared: Room, tool: str, outcome: Outcome) -> None:
    """An effect may have happened, and that is said; what only reads is given up. A late answer changes nothing."""
    hold = await out(shared, "alice", f"use {tool}: milk", tool=True)

    await close(shared)
    hold.set()
    await shared.rest()

    [result] = await shared.bodies(ToolResultBody)
    assert result.outcome is outcome
    assert "closed by user:alice" in result.parts[0].text
    assert [row.kind for row in await shared.rows()][-1] == Kind.SESSION_CLOSED
    assert await shared.store.operations(shared.session) == [] or tool == "note"


@pytest.mark.rule("X8", "X48")
async def test_closing_does_not_wait_for_an_open_question(shared: Room) -> None:
    """It is withdrawn, and so is a yes that was not used yet; a later yes is told that the session is closed."""
    await shared.say("alice", "use pay: rent")
    [asked] = await shared.app.commands.standings(caller("alice"), shared.session, open_only=True)

    await close(shared)

    [withdrawn] = await shared.bodies(ConsentWithdrawnBody)
    assert (withdrawn.consent, withdrawn.reason) == ("A1", "the session was closed by user:alice")
    answer = Answer("A1", asked.consent.digest, yes=True)
    with pytest.raises(SessionClosed):
        await shared.app.commands.answer(caller("alice"), shared.session, answer)
    await shared.later(24 * 3_600_000)  # its time is over, and nothing fires
    assert (await shared.rows())[-1].kind is Kind.SESSION_CLOSED
    assert shared.handed == []


async def test_a_yes_that_waits_for_the_turn_to_end_is_not_used(shared: Room) -> None:
    await shared.say("alice", "use pay: rent")
    await out(shared, "alice", "and a long story")
    assert await yes(shared) is not None

    await close(shared)

    assert [body.consent for body in await shared.bodies(ConsentWithdrawnBody)] == ["A1"]
    assert shared.handed == []


async def yes(shared: Room) -> object:
    [asked] = await shared.app.commands.standings(caller("alice"), shared.session, open_only=True)
    answer = Answer(asked.consent.id, asked.consent.digest, yes=True)
    return (await shared.app.commands.answer(caller("alice"), shared.session, answer))[1]


async def test_what_comes_for_a_closed_session_is_kept_and_told_to_nobody(shared: Room) -> None:
    """By what its tool made, and by its binding; a session that is open and made the same thing takes it."""
    await shared.say("alice", "use book: R1")
    await close(shared)

    assert await shared.hook("R1 is gone", id="evt_1") == 202
    assert await shared.hook("we close at ten", id="evt_2") == 202
    assert await shared.hook("we close at ten", id="evt_2") == 202

    notes = [row.note for row in await shared.store.door() if row.note.kind is DoorKind.UNCLAIMED]
    assert [note.event_id for note in notes] == ["evt_1", "evt_2"]
    assert all("has ended" in note.text for note in notes)
    other = await shared.another("bob")
    await shared.app.commands.post(caller("bob"), other, "use book: R1")
    await shared.rest()
    assert await shared.hook("R1 is gone", id="evt_3") == 202
    assert [entry.source for entry in await shared.store.inbox_record(other)][-1] == "restaurant"


async def test_closing_is_for_the_owner_and_operators(shared: Room) -> None:
    await shared.invite("vera", VIEWER)
    for who in ("bob", "vera"):
        with pytest.raises(Forbidden):
            await shared.app.commands.close_session(caller(who), shared.session)
        with pytest.raises(Forbidden):
            await shared.app.commands.delete_session(caller(who), shared.session)
    with pytest.raises(NotFound):
        await shared.app.commands.close_session(caller("mallory"), shared.session)
    with pytest.raises(NotFound):
        await shared.app.commands.delete_session(caller("mallory"), shared.session)

    _, row = await shared.app.commands.close_session(OPS, shared.session)
    assert row is not None


@pytest.mark.rule("H36", "X4")
async def test_a_session_that_is_unresolved_is_not_closed_and_is_whole_afterwards(open_store: OpenStore) -> None:
    """One more try is made; it fails, closing is refused, no closed row exists, and nobody is told of one."""
    store = GatedStore()
    async with room(open_store, around=store.around, limits=Limits(settle_wait_ms=1)) as shared:
        await unresolved(shared, store)
        listener, _ = shared.app.feeds.listen(shared.session)
        tries = (await shared.app.commands.status(OPS, shared.session)).attempts

        with pytest.raises(NotSettled):
            await shared.app.commands.close_session(caller("alice"), shared.session)

        status = await shared.app.commands.status(OPS, shared.session)
        assert (status.state, status.attempts) == (JournalState.RETRYING, tries + 1)
        seen = [event.frame.event for event in drained(listener.queue)]
        assert set(seen) <= {"status"}
        record = await shared.app.commands.session(caller("alice"), shared.session)
        assert (record.closed_at_ms, record.state) == (None, SessionState.OWNED)
        assert not any(e.input.kind == "close" for e in await shared.store.inbox_record(shared.session))

        store.mend()
        await shared.later(60_000)
        await shared.say("alice", "and then")
        assert [end.ending for end in await shared.bodies(TurnEndBody)] == [Ending.DONE, Ending.DONE]
        assert (await shared.app.commands.close_session(caller("alice"), shared.session))[0].n is not None
        await shared.rest()
        assert len(await shared.bodies(SessionClosedBody)) == 1


@pytest.mark.rule("H36")
async def test_the_try_that_closing_makes_may_settle_what_was_unresolved(open_store: OpenStore) -> None:
    """However long the next try would have been off."""
    store = GatedStore()
    async with room(open_store, around=store.around) as shared:
        await unresolved(shared, store)
        store.mend()

        _, row = await shared.app.commands.close_session(caller("alice"), shared.session)

        assert row is not None
        await shared.rest()
        assert [row.kind for row in await shared.rows()][-1] == Kind.SESSION_CLOSED


def drained(queue: Queue) -> list[Event]:
    found: list[Event] = []
    while not queue.empty():
        event = queue.get_nowait()
        if event is not None:
            found.append(event)
    return found


# --- for want of work ----------------------------------------------------------


class Watched(GatedStore):
    """A store that notes who was let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go: list[str] = []

    async def release(self, token: Token, *, looked_to: int) -> Released:
        """See `Store`."""
        released = await self.inside.release(token, looked_to=looked_to)
        if released is Released.IDLE:
            self.let_go.append(token.session)
        return released


@pytest.mark.rule("H37")
async def test_a_session_without_work_is_let_go_and_one_that_is_unresolved_is_kept(open_store: OpenStore) -> None:
    """However old it is: it is kept until the store has said what became of its rows."""
    store = Watched()
    async with room(open_store, around=store.around, limits=Limits(linger_ms=0)) as shared:
        await unresolved(shared, store)
        other = await shared.another("bob")
        await shared.app.commands.post(caller("bob"), other, "hello")
        while shared.app.worker.owned < 2:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        for _ in range(5):
            shared.clock.advance(3_600_000)
            for _ in range(50):
                await asyncio.sleep(0)

        assert store.let_go == []  # bob's can't be stored either, so it is kept as well
        assert shared.app.worker.owned == 2
        record = await shared.app.commands.session(caller("alice"), shared.session)
        assert (record.state, record.closed_at_ms) == (SessionState.OWNED, None)
        store.mend()
        await shared.later(3_600_000)
        while shared.app.worker.owned:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        assert sorted(store.let_go) == sorted([shared.session, other])


# --- for want of room ----------------------------------------------------------


@pytest.mark.rule("H38")
async def test_where_every_slot_is_active_the_newcomers_input_waits_and_nobody_is_pushed_out(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    """One slot, held by a session that is unresolved and old. It is said once, and shown as a figure; when the slot
    is free the newcomer is heard."""
    store = Watched()
    async with room(open_store, around=store.around, limits=Limits(sessions=1, timer_look_ms=1)) as shared:
        await unresolved(shared, store)
        shared.clock.advance(24 * 3_600_000)
        other = await shared.another("bob")
        worker = shared.app.worker
        with caplog.at_level(logging.WARNING, logger="sayso.runtime.worker"):
            await shared.app.commands.post(caller("bob"), other, "hello")
            while worker.waiting_for_a_slot != 1:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
            await shared.app.commands.post(caller("bob"), other, "is anybody there?")
            await asyncio.sleep(0.01)

        assert [record.message for record in caplog.records].count("all slots are active") == 1
        assert (worker.owned, store.let_go) == (1, [])
        assert [entry.state for entry in await shared.store.inbox_record(other)] == ["queued", "queued"]
        assert (await shared.app.commands.session(caller("alice"), shared.session)).state is SessionState.OWNED

        store.mend()
        await shared.later(60_000)
        while await shared.store.inbox(other, after=0, limit=9):  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        await shared.rest()
        assert worker.waiting_for_a_slot == 0
        assert [end.ending for end in await shared.bodies(TurnEndBody)] == [Ending.DONE]
        assert store.let_go[0] == shared.session


async def test_who_rested_longest_makes_room(open_store: OpenStore) -> None:
    store = Watched()
    async with room(open_store, around=store.around, limits=Limits(sessions=2)) as shared:
        first, second, third = shared.session, await shared.another("bob"), await shared.another("carol")
        for who, session in (("alice", first), ("bob", second), ("alice", first)):
            shared.clock.advance(1_000)
            await shared.app.commands.post(caller(who), session, "hello")
            await shared.rest()

        await shared.app.commands.post(caller("carol"), third, "hello")
        while await shared.store.inbox(third, after=0, limit=9):  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        await shared.rest()

        assert store.let_go == [second]
        assert shared.app.worker.owned == 2


@pytest.mark.rule("K22", "X51")
async def test_an_input_that_comes_as_its_session_is_let_go_is_heard(open_store: OpenStore) -> None:
    """Sessions push each other out of one slot, over and over: every message has its turn, once and in order."""
    async with room(open_store, limits=Limits(sessions=1)) as shared:
        sessions = {"alice": shared.session, "bob": await shared.another("bob"), "carol": await shared.another("carol")}
        for n in range(4):
            for who, session in sessions.items():
                await shared.app.commands.post(caller(who), session, f"{n}")
        for session in sessions.values():
            while len(await done(shared.store, session)) < 4:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)

        for session in sessions.values():
            assert await done(shared.store, session) == ["0", "1", "2", "3"]


async def done(store: Store, session: str) -> list[str]:
    """Return the messages whose turn has ended."""
    rows = await store.rows(session)
    ended = {row.turn for row in rows if isinstance(row.body, TurnEndBody)}
    starts = {row.body.origin.inputs[0]: row.turn for row in rows if isinstance(row.body, TurnStartBody)}
    record = await store.inbox_record(session)
    return [entry.input.parts[0].text for entry in record if starts.get(entry.n) in ended]


# --- deleted -------------------------------------------------------------------


async def left(shared: Room, session: str) -> list[object]:
    """Return everything that the store has of a session."""
    sides = await shared.store.side_tables(session)  # type: ignore[attr-defined]  # each store has it
    read = (await shared.store.rows(session), await shared.store.inbox_record(session), *sides.values())
    return [found for found in (*read, await shared.store.session(session)) if found]


@pytest.mark.rule("X2", "X10")
async def test_a_deleted_session_is_gone_for_everybody_and_at_once(shared: Room) -> None:
    """With an open question and people who listen: they are told that it is gone, and nothing of it is left. Nobody
    is served an empty history."""
    await shared.say("alice", "use pay: rent")
    commands, session = shared.app.commands, shared.session
    frames = await commands.follow(caller("bob"), session, after=START)
    async with aclosing(frames) as following:
        while (await anext(following)).event != "caught_up":
            pass
        await commands.delete_session(caller("alice"), session)
        last = [frame async for frame in following]

    assert [(frame.event, json.loads(frame.data)) for frame in last] == [("farewell", {"reason": "gone"})]
    assert await left(shared, session) == []
    assert shared.app.worker.owned == 0
    for call in (
        commands.history(caller("alice"), session),
        commands.follow(caller("bob"), session, after=START),
        commands.session(OPS, session),
        commands.post(caller("alice"), session, "hello?"),
        commands.delete_session(caller("alice"), session),
    ):
        with pytest.raises(NotFound):
            await call
    assert await commands.sessions(caller("bob")) == []
    assert await shared.store.bound("restaurant") is None
    await shared.later(24 * 3_600_000)
    assert await shared.hook("R1 is gone", id="evt_9") == 202


@pytest.mark.rule("X2")
async def test_what_is_deleted_while_it_is_read_is_not_shown_as_empty(open_store: OpenStore) -> None:
    """The right to see it was looked at, then it was deleted, then its rows were read."""
    store = Deleting()
    async with room(open_store, around=store.around) as shared:
        await shared.say("alice", "hello")
        commands, alice = shared.app.commands, caller("alice")

        store.delete_next = await shared.another("alice")
        with pytest.raises(NotFound):
            await commands.history(alice, store.delete_next)

        store.delete_next = await shared.another("alice")
        async with aclosing(await commands.follow(alice, store.delete_next, after=START)) as following:
            with pytest.raises(NotFound):
                await anext(following)


@pytest.mark.rule("X56")
@pytest.mark.parametrize("tool", [False, True])
async def test_nothing_that_was_admitted_before_lands_after_it(shared: Room, tool: bool) -> None:
    """What was out when it was deleted answers later, and finds nobody."""
    hold = await out(shared, "alice", "use note: milk", tool=tool)
    await shared.post("bob", "me next")

    await shared.app.commands.delete_session(caller("alice"), shared.session)
    hold.set()
    shared.model.hold = None
    shared.hold.clear()
    await shared.later(60_000)
    await shared.reborn()
    await shared.rest()

    assert await left(shared, shared.session) == []
    assert shared.app.worker.owned == 0


@pytest.mark.rule("H35", "X56")
@pytest.mark.parametrize("fault", ["refused", "without an answer", "at the door"])
async def test_deleting_does_not_hang_on_rows_that_can_not_be_stored(open_store: OpenStore, fault: str) -> None:
    """Refused, done without an answer, or still at the door: they are not waited for, and never land."""
    store = GatedStore()
    async with room(open_store, around=store.around) as shared:
        hold = await out(shared, "alice", "a long story")
        match fault:
            case "refused":
                store.refuse_writes()
            case "without an answer":
                store.lose_acknowledgements(times=None)
            case "at the door":
                door = store.hold(Point.WRITE)
        hold.set()
        await until(shared, JournalState.PENDING if fault == "at the door" else JournalState.RETRYING)

        await shared.app.commands.delete_session(caller("alice"), shared.session)
        store.mend()
        if fault == "at the door":
            door.open()
        await shared.later(120_000)

        assert await left(shared, shared.session) == []
        assert (await shared.app.commands.open_session(caller("alice"))).id != shared.session


@pytest.mark.parametrize("error", [StoreUnavailable("no"), CommitUnknown("no answer")])
async def test_where_it_can_not_be_deleted_it_goes_on_as_after_a_crash(open_store: OpenStore, error: Exception) -> None:
    store = Deleting()
    async with room(open_store, around=store.around) as shared:
        hold = await out(shared, "alice", "a long story")
        store.trouble = error
        with pytest.raises(type(error)):
            await shared.app.commands.delete_session(caller("alice"), shared.session)
        store.trouble = None
        hold.set()
        shared.model.hold = None
        await shared.later(60_000)
        while not await shared.bodies(TurnEndBody):
            await shared.later(1_000)

        assert [end.ending for end in await shared.bodies(TurnEndBody)] == [Ending.DONE]
        assert await shared.heard() == [("alice", "a long story")]


class Deleting(GatedStore):
    """A store in which a session is deleted at an awkward moment, or can't be."""

    delete_next = ""
    trouble: Exception | None = None

    async def delete_session(self, session: str) -> bool:
        """See `Store`."""
        if self.trouble is not None:
            raise self.trouble
        return await self.inside.delete_session(session)

    async def session(self, session: str) -> object:
        """See `Store`; afterwards it may be gone."""
        found = await self.inside.session(session)
        if self.delete_next == session:
            self.delete_next = ""
            await self.inside.delete_session(session)
        return found


# --- after a crash -------------------------------------------------------------


@pytest.mark.rule("X43", "X57")
async def test_a_turn_that_a_process_left_open_ends_and_what_waited_is_heard_in_order(open_store: OpenStore) -> None:
    """Also long after: whoever starts takes every session over, not only those somebody asks for."""
    async with room(open_store, limits=Limits(drain_ms=0)) as shared:
        await shared.invite("bob")
        await out(shared, "alice", "one")
        for who, text in (("bob", "two"), ("alice", "three"), ("bob", "four")):
            await shared.post(who, text)
        shared.clock.advance(14 * 24 * 3_600_000)
        shared.model.hold = None

        await shared.reborn()
        await shared.rest()

        assert await shared.heard() == [("alice", "one"), ("bob", "two"), ("alice", "three"), ("bob", "four")]
        assert [end.ending for end in await shared.bodies(TurnEndBody)] == [Ending.DONE] * 4
        words = [m.text for m in shared.model.requests[-1].last if m.role is MessageRole.USER]
        assert words == ["one", "two", "three", "four"]
