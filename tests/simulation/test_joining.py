"""What a turn's own user says meanwhile joins it where nothing is half done; what another says waits, unseen."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from sayso.core.inputs import Input, InputKind
from sayso.core.labels import RUNTIME, Part
from sayso.core.origin import Principal
from sayso.core.rows import InputBody, Kind, ModelSaidBody, ToolResultBody, TurnStartBody
from sayso.demo.local import OpenStore
from sayso.runtime.limits import Limits
from sayso.storage.store import Entry
from tests.simulation.room import Room, room


@asynccontextmanager
async def merging(open_store: OpenStore) -> AsyncIterator[Room]:
    """A room where alice and bob share a session whose agent lets its user's words join."""
    async with room(open_store, in_flight="merge") as shared:
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
    async with room(open_store, in_flight="merge", limits=Limits(drain_ms=1)) as shared:
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
