"""What was done and is not wanted any more: a person is asked whether it shall be undone, and that is an operation of
its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from sayso import Agent, Call, ToolFailed
from sayso.core.consent import Standing
from sayso.core.context import MessageRole
from sayso.core.contract import ContractError
from sayso.core.inputs import Answer
from sayso.core.operation import OperationState
from sayso.core.rows import (
    ConsentWithdrawnBody,
    Ending,
    NoticeBody,
    Outcome,
    ToolResultBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.demo.local import OpenStore
from sayso.runtime.effects import effects_of
from sayso.runtime.limits import Limits
from sayso.runtime.ports import ModelRequest
from sayso.testing.scripted import Reply, ScriptedModel, call, calls, say
from tests.simulation.room import Room, caller, room


@dataclass
class Restaurant:
    """Its books: what stands, by the key it was booked under, and every call it got."""

    stands: dict[str, str] = field(default_factory=dict)
    got: list[tuple[str, str, str]] = field(default_factory=list)
    #: while set, a call is done, and waits before it answers
    hold: asyncio.Event | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    refuses: bool = False

    async def wait(self) -> None:
        self.begun.set()
        if self.hold is not None:
            await self.hold.wait()

    def tools(self, agent: Agent) -> None:
        async def cancel(call: Call, day: str) -> str:
            self.got.append(("cancel", call.key, call.undoes))
            if self.refuses:
                raise ToolFailed("too late to cancel")
            self.stands.pop(call.undoes, None)
            await self.wait()
            return f"cancelled {day}"

        @agent.tool(effect="book", keyed=True, timeout_s=600, say="book {day} for {party}", release=cancel)
        async def reserve(call: Call, day: str, party: int = 2) -> str:
            self.got.append(("reserve", call.key, day))
            self.stands[call.key] = day
            call.made("reservation", f"R{len(self.got)}", source="restaurant")
            await self.wait()
            return f"reserved {day}"


def script(request: ModelRequest) -> Reply:
    """Do what the newest words of a person say, as `do friday saturday`."""
    newest = next(m for m in reversed(request.messages) if m.source != "runtime")
    if newest.role is MessageRole.USER and newest.text.startswith("do "):
        return calls(*(call("reserve", day=day) for day in newest.text.removeprefix("do ").split()))
    if newest.role is MessageRole.USER and newest.text.startswith("undo "):
        return calls(call("reserve.release", day=newest.text.removeprefix("undo ")))
    return say("All right.")


@pytest.fixture
def restaurant() -> Restaurant:
    return Restaurant()


@pytest.fixture
async def here(open_store: OpenStore, restaurant: Restaurant) -> AsyncIterator[Room]:
    limits = Limits(drain_ms=0)
    tools = restaurant.tools
    async with room(
        open_store, limits=limits, answers=script, tools=tools, in_flight="restart", classifier="none"
    ) as here:
        await here.invite("bob")
        yield here


async def changed_her_mind(here: Room, restaurant: Restaurant, first: str, then: str) -> Standing:
    """Let alice have something done, then say something else while the model thinks; return what she is asked."""
    hold, restaurant.begun = asyncio.Event(), asyncio.Event()
    restaurant.hold = hold
    await here.post("alice", first)
    await restaurant.begun.wait()
    asked = len(here.model.requests)
    here.model.hold = asyncio.Event()
    restaurant.hold = None
    hold.set()
    await here.model.until_asked(asked + 1)
    await here.post("alice", then)
    here.model.hold = None
    await here.rest()
    [offer] = await here.app.commands.standings(caller("alice"), here.session, open_only=True)
    return offer


async def answer(here: Room, asked: Standing, *, yes: bool, steps: tuple[int, ...] | None = None) -> None:
    given = Answer(asked.consent.id, asked.consent.digest, yes=yes, steps=steps)
    await here.app.commands.answer(caller("alice"), here.session, given)
    await here.rest()


async def state(here: Room, operation: str) -> OperationState:
    found = await here.store.operation(here.session, operation)
    assert found is not None
    return found.state


async def listed(here: Room) -> list[str]:
    page = await effects_of(here.store, here.session, limit=20, everything=True)
    return [effect.line for effect in page.effects]


@pytest.mark.rule("C8", "D6")
async def test_she_is_asked_in_the_runtimes_words_and_nothing_is_undone_before(
    here: Room, restaurant: Restaurant
) -> None:
    offer = await changed_her_mind(here, restaurant, "do friday", "do saturday")

    assert offer.consent.question.text == (
        "A1, asked because it was done for T1, and is not planned any more: undo: book ‹friday› for ‹2›?"
    )
    assert [(step.tool, step.undoes) for step in offer.consent.steps] == [("reserve.release", "T1.1.1")]
    assert offer.consent.approvers == ("user:alice",)
    assert list(restaurant.stands.values()) == ["friday", "saturday"]
    assert await here.bodies(NoticeBody) == [], "the question is the word about it"


@pytest.mark.rule("C8", "D1", "D2", "D6")
async def test_on_her_yes_it_is_undone_under_a_key_of_its_own(here: Room, restaurant: Restaurant) -> None:
    offer = await changed_her_mind(here, restaurant, "do friday", "do saturday")
    await answer(here, offer, yes=True)

    assert restaurant.got[-1] == ("cancel", f"{here.session}:T3.0.1", f"{here.session}:T1.1.1")
    assert list(restaurant.stands.values()) == ["saturday"]
    assert await state(here, "T1.1.1") is OperationState.RELEASED
    assert [line.split("  ")[:2] for line in await listed(here)] == [
        ["T3.0.1", "standing"],
        ["T2.1.1", "standing"],
        ["T1.1.1", "released"],
    ]
    assert [body.continues for body in await here.bodies(TurnStartBody)] == [None, None, None, "T2"]
    await answer(here, offer, yes=True)
    assert [what for what, _, _ in restaurant.got].count("cancel") == 1


@pytest.mark.rule("D6")
async def test_on_her_no_it_stands(here: Room, restaurant: Restaurant) -> None:
    offer = await changed_her_mind(here, restaurant, "do friday", "do saturday")
    await answer(here, offer, yes=False)

    assert list(restaurant.stands.values()) == ["friday", "saturday"]
    assert await state(here, "T1.1.1") is OperationState.ANSWERED


@pytest.mark.rule("D6", "D5")
async def test_a_crash_while_it_is_undone_undoes_it_once(here: Room, restaurant: Restaurant) -> None:
    offer = await changed_her_mind(here, restaurant, "do friday", "do saturday")
    restaurant.hold, restaurant.begun = asyncio.Event(), asyncio.Event()
    given = Answer(offer.consent.id, offer.consent.digest, yes=True)
    await here.app.commands.answer(caller("alice"), here.session, given)
    await restaurant.begun.wait()
    restaurant.hold = None
    await here.reborn()
    await here.rest()

    sent = [(key, undoes) for what, key, undoes in restaurant.got if what == "cancel"]
    assert sent == [(f"{here.session}:T3.0.1", f"{here.session}:T1.1.1")] * 2
    assert await state(here, "T1.1.1") is OperationState.RELEASED


@pytest.mark.rule("D6")
async def test_what_can_not_be_undone_still_stands(here: Room, restaurant: Restaurant) -> None:
    restaurant.refuses = True
    offer = await changed_her_mind(here, restaurant, "do friday", "do saturday")
    await answer(here, offer, yes=True)

    assert await state(here, "T1.1.1") is OperationState.ANSWERED
    assert [end.ending for end in await here.bodies(TurnEndBody)][2:] == [Ending.FAILED, Ending.DONE]


@pytest.mark.rule("A13", "D6")
async def test_what_is_gone_by_itself_is_not_undone(here: Room, restaurant: Restaurant) -> None:
    offer = await changed_her_mind(here, restaurant, "do friday", "do saturday")
    restaurant.stands.pop(f"{here.session}:T1.1.1")
    await here.hook("cancelled R1", id="evt_1")
    await here.rest()
    await answer(here, offer, yes=True)

    assert "cancel" not in [what for what, _, _ in restaurant.got]
    [withdrawn] = await here.bodies(ConsentWithdrawnBody)
    assert withdrawn.reason == "T1.1.1 does not stand any more"


@pytest.mark.rule("D6", "K19")
async def test_of_several_she_may_have_one_undone(here: Room, restaurant: Restaurant) -> None:
    await here.say("alice", "do friday")
    offer = await changed_her_mind(here, restaurant, "do monday tuesday", "do sunday")
    assert [step.arguments["day"] for step in offer.consent.steps] == ["monday", "tuesday"]
    await answer(here, offer, yes=True, steps=(1,))

    assert list(restaurant.stands.values()) == ["friday", "monday", "sunday"]


@pytest.mark.rule("B2", "D6")
async def test_no_model_undoes_anything(here: Room, restaurant: Restaurant) -> None:
    await here.say("alice", "do friday")
    await here.say("alice", "undo friday")

    assert list(restaurant.stands.values()) == ["friday"]
    last = (await here.bodies(ToolResultBody))[-1]
    assert (last.tool, last.outcome) == ("reserve.release", Outcome.REFUSED)
    assert "there is no tool of that name; there are: book, look, note, pay, reserve" in last.parts[0].text
    assert "reserve.release" not in {name for asked in here.model.requests for name in asked.tools}


@pytest.mark.rule("D6")
def test_a_release_that_undoes_nothing_is_refused() -> None:
    agent = Agent("a", ScriptedModel([]), "")

    async def undo(call: Call) -> None: ...

    async def undo_other(call: Call, other: str) -> None: ...

    with pytest.raises(ContractError, match="release undoes an effect, and read has none"):

        @agent.tool(effect="read", release=undo)
        async def look(call: Call) -> None: ...

    with pytest.raises(ContractError, match="release takes other, which is no argument of the tool"):

        @agent.tool(effect="book", release=undo_other)
        async def book(call: Call) -> None: ...
