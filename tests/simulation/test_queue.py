"""What waits while a turn runs: whose it is, who sees it, who may take it back, and what becomes of others' words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sayso.core.errors import CrossUser, Forbidden, InboxFull, Invalid, NotFound, RequestRefused
from sayso.core.rows import InputRetractedBody, RequestRefusedBody, SessionChangedBody, TurnStartBody
from sayso.core.session import Others
from sayso.demo.local import OpenStore
from sayso.journal.append import JournalState
from sayso.journal.frames import Shown
from sayso.runtime.limits import Limits
from sayso.testing.stores import GatedStore, Point
from tests.simulation.room import OPS, VIEWER, Room, caller, room

SECRET = "never mind what I said"


@pytest.fixture
async def busy(open_store: OpenStore) -> AsyncIterator[Room]:
    """Alice is being answered, and the model takes its time; bob is a member, vera a viewer."""
    async with room(open_store, limits=Limits(waiting_messages=3)) as shared:
        await shared.invite("bob")
        await shared.invite("vera", VIEWER)
        await begin(shared)
        yield shared
        await release(shared)


async def begin(shared: Room) -> None:
    """Let alice's turn begin, with the model out."""
    shared.model.hold = asyncio.Event()
    await shared.post("alice", "a long story")
    await shared.model.until_asked(len(shared.model.requests) + 1)


async def release(shared: Room) -> None:
    """Let the model answer, now and from now on, and return when nothing is left to do."""
    assert shared.model.hold is not None
    shared.model.hold.set()
    await shared.rest()


async def waiting(shared: Room, who: str) -> tuple[list[str], int]:
    queue = await shared.app.people.queue(caller(who), shared.session)
    return [entry.input.parts[0].text for entry in queue.mine], queue.waiting


# --- who sees what waits ---------------------------------------------------------


@pytest.mark.rule("X36")
async def test_one_sees_ones_own_words_and_how_many_others_wait(busy: Room) -> None:
    for who, text in (("alice", "one"), ("bob", SECRET), ("bob", "three")):
        await busy.post(who, text)
    await busy.hook("we close at ten", id="evt_1")

    assert await waiting(busy, "alice") == (["one"], 4)
    assert await waiting(busy, "bob") == ([SECRET, "three"], 4)
    assert await waiting(busy, "vera") == ([], 4)
    assert (await busy.app.people.queue(caller("bob"), busy.session)).owners is None
    ops = await busy.app.people.queue(OPS, busy.session)
    assert (ops.mine, ops.owners) == ((), {"user:alice": 1, "user:bob": 2, "": 1})
    with pytest.raises(NotFound):
        await busy.app.people.queue(caller("mallory"), busy.session)


async def test_those_who_listen_are_told_how_many_wait_and_nothing_else(busy: Room) -> None:
    listener, _ = busy.app.feeds.listen(busy.session)
    n = await busy.post("bob", SECRET)
    await busy.post("bob", "and this")
    await busy.retract("bob", n)
    await release(busy)

    shown = []
    while not listener.queue.empty():
        event = listener.queue.get_nowait()
        if isinstance(event, Shown) and event.event == "queue":
            shown.append(event)
    assert {event.data["session"] for event in shown} == {busy.session}
    assert {frozenset(event.data) for event in shown} == {frozenset({"session", "waiting"})}
    assert shown[-1].data["waiting"] == 0
    assert max(event.data["waiting"] for event in shown) in (1, 2)
    assert all(event.frame.id is None for event in shown)


# --- how much may wait -----------------------------------------------------------


@pytest.mark.rule("X39")
async def test_a_full_queue_of_ones_own_blocks_nobody_else(busy: Room) -> None:
    for n in range(3):
        await busy.post("bob", f"bob {n}")
    with pytest.raises(InboxFull):
        await busy.post("bob", "one too many")

    await busy.post("alice", "still room for me")
    assert await busy.hook("and for me", id="evt_1") == 202
    assert await busy.invite("carol") is not None  # the control lane is another
    assert await busy.retract("bob", (await busy.app.people.queue(caller("bob"), busy.session)).mine[0].n) is not None
    await busy.post("bob", "now there is room")
    await release(busy)

    said = [text for _, text in await busy.heard()]
    assert said == ["a long story", "bob 1", "bob 2", "still room for me", "and for me", "now there is room"]


# --- what is taken back ----------------------------------------------------------


@pytest.mark.rule("X40", "X41")
async def test_what_is_taken_back_never_reaches_the_model_nor_a_row(busy: Room) -> None:
    n = await busy.post("bob", SECRET)

    row = await busy.retract("bob", n)
    again = await busy.retract("bob", n)
    await release(busy)

    assert row is not None
    assert again == row
    assert row.body == InputRetractedBody(n + 1, n, "user:bob")
    assert SECRET not in repr(await busy.rows())
    assert not any(SECRET in message.text for asked in busy.model.requests for message in asked.last)
    assert [str(start.origin.principal) for start in await busy.bodies(TurnStartBody)] == ["user:alice"]
    assert await waiting(busy, "bob") == ([], 0)


@pytest.mark.rule("X39")
async def test_only_its_owner_may_take_a_message_back(busy: Room) -> None:
    """For the session's owner, an operator, a viewer and a stranger there is no such message."""
    n = await busy.post("bob", "mine")
    people = busy.app.people

    for by in (caller("alice"), caller("vera"), caller("mallory"), OPS):
        with pytest.raises(NotFound):
            await people.retract(by, busy.session, n)
    for other in (0, n + 1, 10**17):
        with pytest.raises(NotFound):
            await busy.retract("bob", other)
    await busy.hook("a source's", id="evt_1")
    with pytest.raises(NotFound):
        await people.retract(OPS, busy.session, n + 1)

    assert (await waiting(busy, "bob"))[0] == ["mine"]


@pytest.mark.rule("X41")
async def test_what_had_its_turn_or_has_it_now_is_not_taken_back(busy: Room) -> None:
    """Asked before anybody could tell, it is settled with a row; asked afterwards, it is refused at once."""
    running = (await busy.store.inbox_record(busy.session))[-1].n
    with pytest.raises(RequestRefused):
        await busy.retract("alice", running)
    n = await busy.post("bob", "my turn")
    await release(busy)
    with pytest.raises(RequestRefused):
        await busy.retract("bob", n)

    assert await busy.bodies(InputRetractedBody) == []
    assert await busy.bodies(RequestRefusedBody) == []
    assert ("bob", "my turn") in await busy.heard()


@pytest.mark.rule("F65")
@pytest.mark.rule("K22", "X41")
async def test_what_is_being_taken_is_not_taken_back(open_store: OpenStore) -> None:
    """The store has not answered yet when its sender takes it back, so there it still waits: the session's owner
    decides, once, and the sender is told that it was too late."""
    store = GatedStore()
    async with room(open_store, around=store.around, limits=Limits(settle_wait_ms=1)) as shared:
        door = store.hold(Point.WRITE)
        n = await shared.post("alice", "said too early")
        while not shared.app.feeds.pending(shared.session):  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        settling = await shared.retract("alice", n)
        assert settling is None
        door.open()
        await shared.rest()

        assert await shared.heard() == [("alice", "said too early")]
        assert await shared.bodies(InputRetractedBody) == []
        [refused] = await shared.bodies(RequestRefusedBody)
        assert refused.n == n + 1
        with pytest.raises(RequestRefused):
            await shared.retract("alice", n)


# --- between people --------------------------------------------------------------


async def test_a_queue_is_drained_each_under_ones_own_name(busy: Room) -> None:
    for who in ("bob", "alice", "bob"):
        await busy.post(who, f"use note: {who}")
    await release(busy)

    assert [(call.principal, what) for call, what in busy.handed] == [
        ("user:bob", "bob"),
        ("user:alice", "alice"),
        ("user:bob", "bob"),
    ]


async def test_how_others_are_treated_is_its_owners_to_say(busy: Room) -> None:
    row = await busy.set(title="Friday", others=Others.REFUSE)

    record = await busy.app.commands.session(caller("bob"), busy.session)
    assert (record.title, record.others) == ("Friday", Others.REFUSE)
    assert row is not None
    assert isinstance(row.body, SessionChangedBody)
    assert (row.body.by, row.body.title, row.body.others) == ("user:alice", "Friday", Others.REFUSE)
    for who in ("bob", "vera"):
        with pytest.raises(Forbidden):
            await busy.set(by=who, others=Others.QUEUE)
    with pytest.raises(NotFound):
        await busy.set(by="mallory", title="mine")
    for change in ({}, {"title": "x" * 201}):
        with pytest.raises(Invalid):
            await busy.set(**change)  # type: ignore[arg-type]  # either of two


@pytest.mark.rule("H28")
async def test_a_foreign_send_is_refused_until_the_turn_and_what_waits_before_it_are_done(busy: Room) -> None:
    await busy.set(others=Others.REFUSE)
    await busy.post("alice", "and then")
    stored = len(await busy.store.inbox_record(busy.session))

    with pytest.raises(CrossUser):
        await busy.post("bob", "me too")
    assert len(await busy.store.inbox_record(busy.session)) == stored
    assert await busy.hook("a source is nobody", id="evt_1") == 202
    await release(busy)
    await busy.say("bob", "me too")

    assert [who for who, _ in await busy.heard()] == ["alice", "alice", "restaurant", "bob"]


@pytest.mark.rule("H28", "X40")
@pytest.mark.parametrize("fault", ["refused", "without an answer"])
async def test_what_waited_when_the_store_failed_is_its_senders_and_said_once(
    open_store: OpenStore, fault: str
) -> None:
    """Alice's turn can't be stored, with a message of hers waiting. Bob is refused before anything of his exists.
    When the store is back her message is one row, under her name, and nothing is left over."""
    store = GatedStore()
    async with room(open_store, around=store.around, limits=Limits(settle_wait_ms=1)) as shared:
        await shared.invite("bob")
        await shared.set(others=Others.REFUSE)
        await begin(shared)
        await shared.post("alice", "and then")
        if fault == "refused":
            store.refuse_writes()
        else:
            store.lose_acknowledgements(times=None)
        assert shared.model.hold is not None
        shared.model.hold.set()
        commands = shared.app.commands
        while (await commands.status(OPS, shared.session)).state is not JournalState.RETRYING:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        before = await shared.store.inbox_record(shared.session)

        with pytest.raises(CrossUser):
            await shared.post("bob", "me instead")

        assert await shared.store.inbox_record(shared.session) == before
        assert (await waiting(shared, "alice"))[0] == ["and then"]
        store.mend()
        await shared.later(60_000)
        await shared.say("alice", "and finally")

        assert await shared.heard() == [("alice", "a long story"), ("alice", "and then"), ("alice", "and finally")]
        assert await waiting(shared, "alice") == ([], 0)
        status = await commands.status(OPS, shared.session)
        assert (status.state, status.pending) == (JournalState.HEALTHY, 0)
        assert await shared.say("bob", "now me") > 0
