"""What a session's operations left in the world, as its people can read it."""

from __future__ import annotations

import asyncio

import pytest

from sayso import Agent, Call, ToolFailed
from sayso.core.errors import NotFound
from sayso.demo.local import OpenStore
from sayso.runtime.effects import Effects, Presence
from sayso.runtime.limits import Limits
from sayso.runtime.ports import ModelRequest
from sayso.testing.scripted import Reply, call, calls, say
from tests.simulation.room import Room, caller, room

GRACE_MS = Limits().stop_grace_ms


def script(request: ModelRequest) -> Reply:
    """Call the tool that a person names with what she says; anything else is answered in words."""
    tool, colon, what = request.messages[-1].text.partition(": ")
    return calls(call(tool, what=what)) if colon and tool.isidentifier() else say("All right.")


def tools(agent: Agent) -> None:
    @agent.tool(effect="pay", keyed=True)
    async def refuse(call: Call, what: str) -> str:
        raise ToolFailed("no such bill")

    @agent.tool(effect="send", keyed=True)
    async def half(call: Call, what: str) -> str:
        raise ToolFailed("two of three", effect="partial")

    @agent.tool(effect="send", keyed=True)
    async def undo(call: Call, what: str) -> str:
        raise ToolFailed("taken back", effect="rolled_back")


async def effects(here: Room, who: str = "alice", *, everything: bool = False) -> list[tuple[str, str, str]]:
    page = await Effects(here.app.commands, here.store).page(
        caller(who), here.session, limit=100, everything=everything
    )
    return [(one.operation.tool, one.presence, ", ".join(str(row.ref) for row in one.made)) for one in page.effects]


@pytest.mark.rule("D1")
async def test_what_stands_is_listed_and_what_left_nothing_only_if_asked_for(
    open_store: OpenStore,
) -> None:
    async with room(open_store, answers=script, tools=tools) as here:
        await here.say("alice", "book: R1")
        await here.say("alice", "note: milk")
        await here.say("alice", "look: nothing")
        await here.say("alice", "refuse: me")
        await here.say("alice", "half: of it")
        await here.say("alice", "undo: it")

        assert await effects(here) == [
            ("half", Presence.STANDING, ""),
            ("note", Presence.STANDING, ""),
            ("book", Presence.STANDING, "reservation R1"),
        ]
        everything = await effects(here, everything=True)
        assert everything[:1] == [("undo", Presence.NOTHING, "")]
        assert ("refuse", Presence.NOTHING, "") in everything
        assert len(everything) == 5, "a read is no operation"
        with pytest.raises(NotFound):
            await effects(here, "mallory")


@pytest.mark.rule("K25", "D5")
async def test_what_is_under_way_and_what_nobody_knows_are_listed_as_that(open_store: OpenStore) -> None:
    async with room(open_store, answers=script, tools=tools) as here:
        hold = asyncio.Event()
        here.hold.append(hold)
        await here.post("alice", "note: milk")
        while not here.handed:  # noqa: ASYNC110 - the tool tells nobody
            await asyncio.sleep(0)
        assert await effects(here) == [("note", Presence.UNDER_WAY, "")]

        await here.app.commands.stop(caller("alice"), here.session)
        await here.later(GRACE_MS)
        assert await effects(here) == [("note", Presence.UNKNOWN, "")]

        hold.set()
        while await effects(here) != [("note", Presence.STANDING, "")]:  # noqa: ASYNC110 - the tool tells its owner
            await asyncio.sleep(0)


async def test_a_page_has_the_newest_and_says_that_there_are_more(open_store: OpenStore) -> None:
    async with room(open_store, answers=script, tools=tools) as here:
        for name in ("R1", "R2", "R3"):
            await here.say("alice", f"book: {name}")
        page = await Effects(here.app.commands, here.store).page(
            caller("alice"), here.session, limit=2, everything=False
        )

        assert [one.made[0].ref.value for one in page.effects] == ["R3", "R2"]
        assert page.more
        assert page.effects[0].line == 'T3.1.1  standing  book {"what":"R3"}; made reservation R3'
