"""What a turn's own user says meanwhile joins it where nothing is half done; what another says waits, unseen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sayso.core.context import MessageRole
from sayso.core.inputs import Input, InputKind
from sayso.core.labels import RUNTIME, Part
from sayso.core.origin import Principal
from sayso.core.rows import (
    InputBody,
    Kind,
    ModelSaidBody,
    NoticeBody,
    ToolResultBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.core.session import SessionState
from sayso.demo.local import OpenStore
from sayso.runtime.limits import Limits
from sayso.runtime.loaded import load
from sayso.runtime.rules import RULES
from sayso.storage.store import Entry, InboxRow, Store
from sayso.testing.stores import GatedStore, Point
from tests.simulation.room import Room, caller, room


@asynccontextmanager
async def merging(open_store: OpenStore) -> AsyncIterator[Room]:
    """A room where alice and bob share a session whose agent lets its user's words join."""
    async with room(open_store, in_flight="merge", classifier="none") as shared:
        await shared.invite("bob")
        yield shared


async def out(shared: Room, who: str, text: str) -> asyncio.Event:
    """Post a message whose tool waits, and return once it does."""
    gate = asyncio.Event()
    shared.hold.append(gate)
    before = len(shared.handed)
    await shared.post(who, text)
    async with asyncio.timeout(10):
        while len(shared.handed) == before:  # noqa: ASYNC110 - the tool says when
            await asyncio.sleep(0)
    return gate


async def go_on(shared: Room, gate: asyncio.Event) -> None:
    shared.hold.clear()
    gate.set()
    await shared.rest()


async def joined(shared: Room) -> list[tuple[str | None, str, str]]:
    """Return (turn, who, what) of every input that was taken; the turn is None where it started one."""
    rows = [(row.turn, row.body) for row in await shared.rows() if isinstance(row.body, InputBody)]
    return [(turn, body.input.principal.id, body.input.parts[0].text) for turn, body in rows if body.input.parts]


async def queued(shared: Room) -> list[str]:
    return [entry.input.parts[0].text for entry in await shared.store.inbox(shared.session, after=0, limit=10)]


@pytest.mark.rule("H29", "C6", "X42")
async def test_at_the_end_of_a_batch_the_turns_user_is_heard_and_another_is_not(open_store: OpenStore) -> None:
    async with merging(open_store) as shared:
        gate = await out(shared, "bob", "use look: the door")
        await shared.post("alice", "and the window")
        await go_on(shared, gate)

        assert ("T1", "alice", "and the window") not in await joined(shared)
        assert (None, "alice", "and the window") in await joined(shared), "it had a turn of its own"
        starts = await shared.bodies(TurnStartBody)
        assert [str(start.origin.principal) for start in starts] == ["user:bob", "user:alice"]

        gate = await out(shared, "alice", "use look: the roof")
        await shared.post("alice", "and the cellar")
        await go_on(shared, gate)

        assert ("T3", "alice", "and the cellar") in await joined(shared)
        kinds = [row.kind for row in await shared.rows() if row.turn == "T3"]
        assert kinds.index(Kind.INPUT) > kinds.index(Kind.TOOL_RESULT), "never between a call and its result"
        assert await queued(shared) == []


@pytest.mark.rule("H30", "C6")
async def test_of_a_mixed_queue_each_turn_takes_its_own_and_the_model_sees_nothing_else(open_store: OpenStore) -> None:
    async with merging(open_store) as shared:
        gate = await out(shared, "bob", "use look: the door")
        await shared.post("alice", "hush, a secret")
        await shared.post("bob", "and the lock")
        await go_on(shared, gate)

        assert ("T1", "bob", "and the lock") in await joined(shared)
        assert (None, "alice", "hush, a secret") in await joined(shared)
        in_bobs_turn = [m.text for asked in shared.model.requests if asked.turn == "T1" for m in asked.last]
        assert any("and the lock" in text for text in in_bobs_turn)
        assert not any("secret" in text for text in in_bobs_turn)


@pytest.mark.rule("H31", "H32")
async def test_after_the_last_word_the_turns_user_is_heard_and_the_model_asked_again(open_store: OpenStore) -> None:
    """No tool ran: the seam is the end of the reply. Another's words stay where they are, and are nowhere in the rows
    until they have their own turn."""
    async with merging(open_store) as shared:
        shared.model.hold = asyncio.Event()
        await shared.post("bob", "good morning")
        await shared.model.until_asked()
        await shared.post("alice", "for alice alone")
        await shared.post("bob", "and good night")
        release, shared.model.hold = shared.model.hold, None
        release.set()
        await shared.rest()

        assert await joined(shared) == [
            (None, "bob", "good morning"),
            ("T1", "bob", "and good night"),
            (None, "alice", "for alice alone"),
        ]
        said = [row for row in await shared.rows() if isinstance(row.body, ModelSaidBody)]
        assert [row.turn for row in said] == ["T1", "T1", "T2"]
        shown = [m.text for asked in shared.model.requests if asked.turn == "T1" for m in asked.last]
        assert not any("alone" in text for text in shown)


@pytest.mark.rule("H31")
async def test_where_only_another_waits_nothing_joins_and_the_turn_ends(open_store: OpenStore) -> None:
    async with merging(open_store) as shared:
        shared.model.hold = asyncio.Event()
        await shared.post("bob", "good morning")
        await shared.model.until_asked()
        await shared.post("alice", "and me")
        release, shared.model.hold = shared.model.hold, None
        release.set()
        await shared.rest()

        assert [asked.turn for asked in shared.model.requests] == ["T1", "T2"]
        assert await joined(shared) == [(None, "bob", "good morning"), (None, "alice", "and me")]


@pytest.mark.rule("H33")
@pytest.mark.parametrize("tool", [True, False])
@pytest.mark.parametrize("who", ["alice", "bob"])
async def test_what_the_runtime_told_itself_joins_whoever_acts(open_store: OpenStore, who: str, tool: bool) -> None:
    async with merging(open_store) as shared:
        text = "use look: the door" if tool else "good morning"
        gate = await out(shared, who, text) if tool else asyncio.Event()
        if not tool:
            shared.model.hold = gate
            await shared.post(who, text)
            await shared.model.until_asked()
        agent = Principal.parse(f"agent:{shared.session}")
        note = Input(InputKind.MESSAGE, agent, "runtime", parts=(Part("a reminder", "runtime", RUNTIME, "runtime"),))
        await shared.store.put(Entry(shared.session, f"{agent}", "e1", note, "sha256:1", keep_ms=60_000))
        shared.app.worker.hint(shared.session)
        shared.model.hold = None
        await go_on(shared, gate)

        assert ("T1", shared.session, "a reminder") in await joined(shared)
        assert await queued(shared) == []


@pytest.mark.rule("K21", "C2")
async def test_without_the_policy_everything_has_a_turn_of_its_own(open_store: OpenStore) -> None:
    async with room(open_store) as shared:
        gate = await out(shared, "alice", "use look: the door")
        await shared.post("alice", "and the window")
        await go_on(shared, gate)

        assert await joined(shared) == [(None, "alice", "use look: the door"), (None, "alice", "and the window")]


@pytest.mark.rule("K21", "C2", "K14")
async def test_what_joined_is_still_there_after_a_restart_and_is_joined_once(open_store: OpenStore) -> None:
    async with room(open_store, in_flight="merge", classifier="none", limits=Limits(drain_ms=1)) as shared:
        gate = await out(shared, "alice", "use look: the door")
        await shared.post("alice", "use note: milk")
        shared.model.hold = asyncio.Event()
        shared.hold.clear()
        gate.set()
        asked = len(shared.model.requests)
        async with asyncio.timeout(10):
            await shared.model.until_asked(asked + 1)
        shared.model.hold = None
        await shared.reborn()
        await shared.rest()

        assert [entry for entry in await joined(shared) if entry[2] == "use note: milk"] == [
            ("T1", "alice", "use note: milk")
        ]
        results = await shared.bodies(ToolResultBody)
        assert [result.tool for result in results] == ["look", "note"]


@pytest.mark.rule("X44", "K21")
@pytest.mark.parametrize("lag", range(14))
async def test_a_session_that_is_closed_as_something_might_join_is_over(open_store: OpenStore, lag: int) -> None:
    """The model answers, and a moment later somebody is let in and the session is closed: whichever the owner sees
    first, no row stands after the last one, and the turn has ended once."""
    stores: list[GatedStore] = []

    def around(store: Store) -> Store:
        stores.append(GatedStore(store))
        return stores[0].store

    async with (
        room(open_store, around=around, in_flight="merge", classifier="none") as shared,
        asyncio.TaskGroup() as asking,
    ):
        words = shared.model.hold = asyncio.Event()
        await shared.post("alice", "hello")
        await shared.model.until_asked()
        gate = stores[0].hold(Point.WRITE, of=[Kind.PARTICIPANT_CHANGED])
        words.set()
        for _ in range(lag):
            await asyncio.sleep(0)
        asking.create_task(shared.invite("bob"))
        await gate.reached()
        closing = asking.create_task(shared.app.commands.close_session(caller("alice"), shared.session))
        while len(await shared.store.inbox_record(shared.session)) < 3:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        gate.open()
        _, row = await closing
        await shared.rest()

        assert row is not None
        rows = await shared.rows()
        assert [row.kind for row in rows][-1] == Kind.SESSION_CLOSED
        assert [end.ending for end in await shared.bodies(TurnEndBody)] in (["cancelled"], ["done"])
        record = await shared.store.session(shared.session)
        assert record is not None
        assert (record.turn, record.state) == (None, SessionState.IDLE)


# --- where, and how often --------------------------------------------------------


async def thinking(shared: Room, who: str, text: str = "hello") -> asyncio.Event:
    """Post a message that the model takes its time to answer, and return once it is asked."""
    gate = shared.model.hold = asyncio.Event()
    asked = len(shared.model.requests)
    await shared.post(who, text)
    async with asyncio.timeout(10):
        await shared.model.until_asked(asked + 1)
    shared.model.hold = None
    return gate


async def test_it_joins_between_the_batch_and_the_next_call_of_the_model(open_store: OpenStore) -> None:
    async with merging(open_store) as shared:
        gate = await out(shared, "alice", "use look: the door")
        await shared.post("alice", "and the window")
        await go_on(shared, gate)

        kinds = [row.kind for row in await shared.rows() if row.turn == "T1"]
        middle = [Kind.MODEL_CALLED, Kind.TOOL_RESULT, Kind.INPUT, Kind.MODEL_SAID]
        assert kinds == [Kind.TURN_START, *middle, Kind.TURN_END]
        roles = [message.role for message in shared.model.requests[-1].last]
        assert roles[-3:] == [MessageRole.ASSISTANT, MessageRole.RESULT, MessageRole.USER]


async def test_what_waits_when_a_turn_begins_joins_it_at_once(open_store: OpenStore) -> None:
    """That is a boundary too: three of alice's messages are answered together, bob's in his own turn."""
    async with merging(open_store) as shared:
        gate = await thinking(shared, "bob")
        for who, text in (("alice", "one"), ("bob", "and mine"), ("alice", "two"), ("alice", "three")):
            await shared.post(who, text)
        await go_on(shared, gate)

        assert await joined(shared) == [
            (None, "bob", "hello"),
            ("T1", "bob", "and mine"),
            (None, "alice", "one"),
            ("T2", "alice", "two"),
            ("T2", "alice", "three"),
        ]


@pytest.mark.rule("C6")
async def test_a_source_joins_nobodys_turn_nor_its_own(open_store: OpenStore) -> None:
    async with merging(open_store) as shared:
        shared.model.hold = gate = asyncio.Event()
        await shared.hook("first", id="evt_1")
        await shared.model.until_asked()
        await shared.hook("second", id="evt_2")
        await shared.post("alice", "hello")
        shared.model.hold = None
        await go_on(shared, gate)

        assert [turn for turn, _, _ in await joined(shared)] == [None, None, None]
        assert len(await shared.bodies(TurnStartBody)) == 3


@pytest.mark.rule("F62")
@pytest.mark.rule("K21", "X42")
async def test_what_comes_in_the_last_moment_has_a_turn_of_its_own(open_store: OpenStore) -> None:
    """The turn's end is accepted and not stored yet: too late to join, so it is simply still queued."""
    stores: list[GatedStore] = []

    def around(store: Store) -> Store:
        stores.append(GatedStore(store))
        return stores[0].store

    async with room(open_store, around=around, in_flight="merge", classifier="none") as shared:
        gate = stores[0].hold(Point.WRITE, of=[Kind.TURN_END])
        await shared.post("alice", "hello")
        await gate.reached()
        await shared.post("alice", "and then")
        gate.open()
        await shared.rest()

        assert await joined(shared) == [(None, "alice", "hello"), (None, "alice", "and then")]


@pytest.mark.rule("K21", "X40", "X42", "X50")
@pytest.mark.parametrize("lag", range(12))
async def test_whenever_it_comes_it_is_said_once(open_store: OpenStore, lag: int) -> None:
    """After each of the loop's steps: it joined, or has a turn of its own, and is answered."""
    async with room(open_store, in_flight="merge", classifier="none") as shared:
        await shared.post("alice", "use look: the sky")
        for _ in range(lag):
            await asyncio.sleep(0)
        await shared.post("alice", "and then")
        await shared.rest()

        assert [what for _, _, what in await joined(shared)] == ["use look: the sky", "and then"]
        assert (await shared.bodies(ModelSaidBody))[-1].parts[0].text == "I heard: and then"
        assert {end.ending for end in await shared.bodies(TurnEndBody)} == {"done"}


async def test_a_turn_that_may_not_ask_the_model_again_takes_nothing_more(open_store: OpenStore) -> None:
    """It ends as it would have, and what she said has a turn of its own, with model calls of its own."""
    async with room(open_store, in_flight="merge", classifier="none", limits=Limits(steps_per_turn=1)) as shared:
        gate = await thinking(shared, "alice")
        await shared.post("alice", "and then")
        await go_on(shared, gate)

        assert [turn for turn, _, _ in await joined(shared)] == [None, None]
        assert [end.ending for end in await shared.bodies(TurnEndBody)] == ["done", "done"]


@pytest.mark.rule("C1", "K20")
async def test_nothing_of_ones_own_overtakes_what_can_not_join(open_store: OpenStore) -> None:
    """A bare yes that could mean two things waits to be asked about; what she says after it waits behind it."""
    async with merging(open_store) as shared:
        for what in ("rent", "lunch"):
            await shared.say("alice", f"use pay: {what}")
        gate = await thinking(shared, "alice")
        for text in ("yes", "one", "two"):
            await shared.post("alice", text)
        await go_on(shared, gate)

        assert (await joined(shared))[-3:] == [(None, "alice", "yes"), (None, "alice", "one"), ("T4", "alice", "two")]
        assert any("Which one do you mean?" in notice.parts[0].text for notice in await shared.bodies(NoticeBody))


# --- nothing gets lost -----------------------------------------------------------


@pytest.mark.rule("K22", "X43")
async def test_whoever_takes_the_session_over_looks_at_all_that_waits_again(open_store: OpenStore) -> None:
    """Looked at and not taken, when the process ended: alice's joins her turn, which goes on; bob's has his own."""
    async with room(open_store, in_flight="merge", classifier="none", limits=Limits(drain_ms=1)) as shared:
        await shared.invite("bob")
        await thinking(shared, "alice")
        await shared.post("bob", "and me")
        await shared.post("alice", "and then")
        for _ in range(20):
            await asyncio.sleep(0)

        await shared.reborn()
        await shared.rest()

        assert await joined(shared) == [
            (None, "alice", "hello"),
            ("T1", "alice", "and then"),
            (None, "bob", "and me"),
        ]


@pytest.mark.rule("K22")
async def test_what_must_wait_neither_spins_nor_is_let_go_of(open_store: OpenStore) -> None:
    """Bob's message was looked at and stays: the inbox isn't read over and over, and the session is kept."""
    looks: list[int] = []

    def around(store: Store) -> Store:
        class Counted(GatedStore):
            async def inbox(self, session: str, *, after: int, limit: int) -> list[InboxRow]:
                looks.append(after)
                return await store.inbox(session, after=after, limit=limit)

        return Counted(store).store

    async with room(
        open_store, around=around, in_flight="merge", classifier="none", limits=Limits(linger_ms=0)
    ) as shared:
        await shared.invite("bob")
        gate = await thinking(shared, "alice")
        n = await shared.post("bob", "and me")
        async with asyncio.timeout(10):
            while n - 1 not in looks:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
        seen = len(looks)
        for _ in range(1_000):
            await asyncio.sleep(0)

        assert len(looks) == seen
        assert shared.app.worker.owned == 1
        gate.set()
        async with asyncio.timeout(10):
            while len(await shared.bodies(TurnEndBody)) < 2:  # noqa: ASYNC110 - nobody is told
                await asyncio.sleep(0)
        assert (await joined(shared))[-1] == (None, "bob", "and me")


@pytest.mark.rule("K14")
async def test_a_turns_say_so_is_as_new_as_what_its_own_person_said_last(open_store: OpenStore) -> None:
    """Also as a successor loads it. What the runtime tells itself is nobody's say-so."""
    async with merging(open_store) as shared:
        gate = await out(shared, "alice", "use look: the door")
        shared.clock.advance(60_000)
        await shared.post("alice", "and the window")
        said_at_ms = shared.clock.now_ms()
        shared.clock.advance(60_000)
        agent = Principal.parse(f"agent:{shared.session}")
        note = Input(InputKind.MESSAGE, agent, "runtime", parts=(Part("a reminder", "runtime", RUNTIME, "runtime"),))
        await shared.store.put(Entry(shared.session, f"{agent}", "e1", note, "sha256:1", keep_ms=60_000))
        shared.app.worker.hint(shared.session)
        words, asked = asyncio.Event(), len(shared.model.requests)
        shared.model.hold = words
        shared.hold.clear()
        gate.set()
        async with asyncio.timeout(10):
            await shared.model.until_asked(asked + 1)

        record = await shared.store.session(shared.session)
        assert record is not None
        loaded = await load(shared.store, record, RULES, Limits())
        assert loaded.turn_body is not None
        assert loaded.turn_body.say_so_at_ms == said_at_ms
        assert [what for turn, _, what in await joined(shared) if turn == "T1"] == ["and the window", "a reminder"]
        words.set()
        await shared.rest()
