"""A turn that begins anew because its own person said more: what it did is taken over where it is planned again, one
to one, and told of where it is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from sayso import Agent, Call
from sayso.core.context import MessageRole
from sayso.core.inputs import Answer
from sayso.core.operation import OperationState
from sayso.core.rows import (
    Ending,
    InputBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ToolResultBody,
    ToolSettledBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.demo.local import OpenStore
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Absent, ModelRequest
from sayso.testing.scripted import Reply, call, calls, say
from sayso.testing.view import View
from tests.simulation.room import Room, caller, room

SAID_MORE = (Ending.CANCELLED, "user:alice said more, and it begins anew")


@dataclass
class World:
    """What tools did, by key, in order; while `hold` is set, they do it and don't answer."""

    did: list[tuple[str, str]] = field(default_factory=list)
    hold: asyncio.Event | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    finds: bool = True

    async def do(self, call: Call, what: str) -> str:
        self.did.append((call.key.split(":")[1], what))
        self.begun.set()
        if self.hold is not None:
            await self.hold.wait()
        return f"did {what}"

    def tools(self, agent: Agent) -> None:
        @agent.tool(effect="book", keyed=True, timeout_s=600, key_kept_s=3600)
        async def reserve(call: Call, what: str) -> str:
            return await self.do(call, what)

        @agent.tool(effect="send", keyed=False, timeout_s=600)
        async def tell(call: Call, what: str) -> str:
            return await self.do(call, what)

        @agent.tool(effect="write", keyed=True, timeout_s=600, no_restart=True)
        async def deploy(call: Call, what: str) -> str:
            return await self.do(call, what)

        async def found(call: Call, what: str) -> str:
            if not self.finds:
                raise Absent
            return f"found {what}"

        @agent.tool(effect="write", timeout_s=600, lookup=found)
        async def enter(call: Call, what: str) -> str:
            return await self.do(call, what)


def script(request: ModelRequest) -> Reply:
    """Do what the newest words of a person say, as `do reserve friday; tell sam`; all of it has been done: say so."""
    newest = next(m for m in reversed(request.messages) if m.source != "runtime")
    if newest.role is MessageRole.USER and newest.text.startswith("do "):
        steps = [step.split() for step in newest.text.removeprefix("do ").split("; ")]
        return calls(*(call(tool, what=what) for tool, what in steps))
    return say("All of it is done.")


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
async def here(open_store: OpenStore, world: World) -> AsyncIterator[Room]:
    limits = Limits(drain_ms=0)
    async with room(
        open_store, limits=limits, answers=script, tools=world.tools, in_flight="restart", classifier="none"
    ) as here:
        await here.invite("bob")
        yield here


async def ends(here: Room) -> list[tuple[Ending, str]]:
    return [(body.ending, body.reason) for body in await here.bodies(TurnEndBody)]


async def results(here: Room) -> list[tuple[str, Outcome, str | None]]:
    return [(body.call, body.outcome, body.operation) for body in await here.bodies(ToolResultBody)]


async def notices(here: Room) -> list[str]:
    return [body.parts[0].text for body in await here.bodies(NoticeBody)]


async def state(here: Room, operation: str = "T1.1.1") -> OperationState:
    found = await here.store.operation(here.session, operation)
    assert found is not None
    return found.state


async def done_and_thinking(here: Room, world: World, text: str) -> None:
    """Let alice have something done, and the model think about what to do next."""
    hold = world.hold = asyncio.Event()
    await here.post("alice", text)
    await world.begun.wait()
    asked = len(here.model.requests)
    here.model.hold = asyncio.Event()
    world.hold = None
    hold.set()
    await here.model.until_asked(asked + 1)


async def restarted(here: Room, text: str) -> None:
    """Let alice say more, and see it through."""
    await here.post("alice", text)
    here.model.hold = None
    await here.rest()


# --- the turn ----------------------------------------------------------------------


@pytest.mark.rule("C5", "C7")
async def test_a_reply_that_is_being_written_is_cut_off_and_a_turn_begins_with_both(here: Room) -> None:
    here.model.hold_midway = asyncio.Event()
    view = View()
    await here.post("alice", "What is open?")
    async with aclosing(await here.app.commands.follow(caller("alice"), here.session)) as coming:
        async for frame in coming:
            view.apply(frame)
            if view.text:
                break
    here.model.hold_midway = None
    await here.post("alice", "On Friday, I mean")
    await here.rest()

    first, second = await here.bodies(TurnStartBody)
    assert (first.restarts, second.restarts) == (None, "T1")
    assert second.origin.principal == first.origin.principal
    assert second.origin.inputs == (*first.origin.inputs, first.origin.inputs[0] + 1)
    assert await here.heard() == [("alice", "What is open?"), ("alice", "On Friday, I mean")]
    assert await ends(here) == [SAID_MORE, (Ending.DONE, "")]
    cut_off, whole = await here.bodies(ModelSaidBody)
    assert (cut_off.interrupted, cut_off.parts[0].text) == (True, view.text)
    assert (whole.interrupted, whole.parts[0].text) == (False, "All of it is done.")


@pytest.mark.rule("C1", "C6")
async def test_what_another_says_waits_and_begins_nothing_anew(here: Room) -> None:
    hold = here.model.hold = asyncio.Event()
    await here.post("alice", "one")
    await here.model.until_asked()
    await here.post("bob", "two")
    hold.set()
    await here.rest()

    assert [body.restarts for body in await here.bodies(TurnStartBody)] == [None, None]
    assert [end for end, _ in await ends(here)] == [Ending.DONE] * 2


@pytest.mark.rule("C1")
async def test_what_she_said_before_the_turn_began_waits_for_its_own(here: Room) -> None:
    hold = here.model.hold = asyncio.Event()
    await here.post("bob", "one")
    await here.model.until_asked()
    await here.post("alice", "two")
    await here.post("alice", "three")
    hold.set()
    await here.rest()

    assert [body.restarts for body in await here.bodies(TurnStartBody)] == [None] * 3


async def test_a_step_that_forbids_it_is_seen_through_and_the_words_wait(here: Room, world: World) -> None:
    hold = world.hold = asyncio.Event()
    await here.post("alice", "do deploy web")
    await world.begun.wait()
    await here.post("alice", "do reserve friday")
    await here.set(title="Friday")  # settled after that was looked at
    world.hold = None
    hold.set()
    await here.rest()

    assert world.did == [("T1.1.1", "web"), ("T2.1.1", "friday")]
    assert await results(here) == [("T1.1.1", Outcome.OK, "T1.1.1"), ("T2.1.1", Outcome.OK, "T2.1.1")]


# --- what was done -----------------------------------------------------------------


@pytest.mark.rule("C7", "D2", "D3")
async def test_what_was_done_is_taken_over_and_not_done_again(here: Room, world: World) -> None:
    await done_and_thinking(here, world, "do reserve friday")
    await restarted(here, "do reserve friday; tell sam")

    assert world.did == [("T1.1.1", "friday"), ("T2.1.2", "sam")]
    assert await results(here) == [
        ("T1.1.1", Outcome.OK, "T1.1.1"),
        ("T2.1.1", Outcome.OK, "T1.1.1"),
        ("T2.1.2", Outcome.OK, "T2.1.2"),
    ]
    assert await ends(here) == [SAID_MORE, (Ending.DONE, "")]
    assert await notices(here) == []


@pytest.mark.rule("D3")
async def test_an_equal_step_is_taken_over_once_and_a_second_one_is_done(here: Room, world: World) -> None:
    await done_and_thinking(here, world, "do reserve friday")
    await restarted(here, "do reserve friday; reserve friday")

    assert world.did == [("T1.1.1", "friday"), ("T2.1.2", "friday")]


@pytest.mark.rule("C7")
async def test_what_is_not_planned_any_more_is_told_of_and_not_undone(here: Room, world: World) -> None:
    await done_and_thinking(here, world, "do reserve friday")
    await restarted(here, "do reserve saturday")

    assert world.did == [("T1.1.1", "friday"), ("T2.1.1", "saturday")]
    assert await notices(here) == [
        'reserve {"what":"friday"} (T1.1.1) stands and is not planned any more. Nothing was undone.'
    ]


@pytest.mark.rule("C7", "D3")
async def test_what_was_taken_over_once_can_be_taken_over_again(here: Room, world: World) -> None:
    await done_and_thinking(here, world, "do reserve friday")
    await here.post("alice", "do reserve friday")
    asked = len(here.model.requests)
    await here.model.until_asked(asked + 1)
    hold, here.model.hold = here.model.hold, asyncio.Event()
    assert hold is not None
    hold.set()
    await here.model.until_asked(asked + 2)
    await restarted(here, "do reserve friday; tell sam")

    assert world.did == [("T1.1.1", "friday"), ("T3.1.2", "sam")]
    assert [body.restarts for body in await here.bodies(TurnStartBody)] == [None, "T1", "T2"]


# --- what is out -------------------------------------------------------------------


@pytest.mark.rule("C7", "K25")
@pytest.mark.parametrize("tool", ["reserve", "tell"])
async def test_what_is_out_is_unknown_and_its_answer_is_the_new_call_s(here: Room, world: World, tool: str) -> None:
    hold = world.hold = asyncio.Event()
    await here.post("alice", f"do {tool} friday")
    await world.begun.wait()
    await here.post("alice", f"do {tool} friday; reserve dinner")
    await here.model.until_asked(2)
    assert await results(here) == [("T1.1.1", Outcome.UNKNOWN, "T1.1.1")]
    world.hold = None
    hold.set()
    await here.rest()

    assert world.did == [("T1.1.1", "friday"), ("T2.1.2", "dinner")]
    assert (await results(here))[1:] == [("T2.1.1", Outcome.OK, "T1.1.1"), ("T2.1.2", Outcome.OK, "T2.1.2")]
    assert await state(here) is OperationState.ANSWERED
    assert await notices(here) == []


@pytest.mark.rule("C7", "K25")
async def test_what_is_out_and_not_planned_any_more_still_says_what_it_did(here: Room, world: World) -> None:
    hold = world.hold = asyncio.Event()
    await here.post("alice", "do reserve friday")
    await world.begun.wait()
    await here.post("alice", "do tell sam")
    await here.model.until_asked(2)
    world.hold = None
    await here.rest()
    hold.set()
    await here.rest()

    assert await notices(here) == [
        'reserve {"what":"friday"} (T1.1.1) may or may not stand and is not planned any more. Nothing was undone.'
    ]
    assert [body.operation for body in await here.bodies(ToolSettledBody)] == ["T1.1.1"]
    assert await state(here) is OperationState.ANSWERED


async def out_and_restarted(here: Room, world: World, text: str) -> None:
    """Let something be out, let alice say the same again, and let the process end before the model has answered."""
    world.hold = asyncio.Event()
    await here.post("alice", text)
    await world.begun.wait()
    here.model.hold = asyncio.Event()
    await here.post("alice", text)
    await here.model.until_asked(2)
    world.hold = here.model.hold = None


@pytest.mark.rule("D2", "D3", "D5")
async def test_after_a_crash_it_goes_out_again_under_the_key_that_it_had(here: Room, world: World) -> None:
    await out_and_restarted(here, world, "do reserve friday")
    await here.reborn()
    await here.rest()

    assert world.did == [("T1.1.1", "friday")] * 2
    assert (await results(here))[1:] == [("T2.1.1", Outcome.OK, "T1.1.1")]
    assert await state(here) is OperationState.ANSWERED


@pytest.mark.rule("D3", "D5")
@pytest.mark.parametrize("there", [True, False])
async def test_after_a_crash_the_other_side_is_asked_where_it_can_be(here: Room, world: World, there: bool) -> None:
    world.finds = there
    await out_and_restarted(here, world, "do enter friday")
    await here.reborn()
    await here.rest()

    assert world.did == [("T1.1.1", "friday")]
    assert (await results(here))[1:] == [("T2.1.1", Outcome.OK if there else Outcome.FAILED, "T1.1.1")]


@pytest.mark.rule("D5", "K25")
@pytest.mark.parametrize("yes", [True, False])
async def test_after_a_crash_she_is_asked_about_what_has_no_key(here: Room, world: World, yes: bool) -> None:
    await out_and_restarted(here, world, "do tell sam")
    await here.reborn()
    await here.rest()

    assert world.did == [("T1.1.1", "sam")], "it is not sent again silently"
    [asked] = await here.app.commands.standings(caller("alice"), here.session, open_only=True)
    assert "run tell, with what = ‹sam›, which may have happened already?" in asked.consent.question.text
    await here.app.commands.answer(
        caller("alice"), here.session, Answer(asked.consent.id, asked.consent.digest, yes=yes)
    )
    await here.rest()
    assert world.did == [("T1.1.1", "sam"), *([("T3.0.1", "sam")] if yes else [])]


@pytest.mark.rule("D5", "K25")
async def test_whoever_plans_again_what_may_have_happened_is_asked_about_it(here: Room, world: World) -> None:
    """No turn was begun anew: the model simply tries again."""
    world.hold = asyncio.Event()
    await here.post("alice", "do tell sam")
    await world.begun.wait()
    world.hold = None
    await here.reborn()
    await here.rest()
    assert [outcome for _, outcome, _ in await results(here)] == [Outcome.UNKNOWN]

    await here.say("alice", "do tell sam; reserve friday")
    [asked] = await here.app.commands.standings(caller("alice"), here.session, open_only=True)
    assert [step.again for step in asked.consent.steps] == ["T1.1.1", None]
    assert world.did == [("T1.1.1", "sam")]


@pytest.mark.rule("D5")
async def test_a_key_that_the_other_side_has_forgotten_is_not_sent_again(here: Room, world: World) -> None:
    await out_and_restarted(here, world, "do reserve friday")
    here.clock.advance(3_600_001)
    await here.reborn()
    await here.rest()

    assert world.did == [("T1.1.1", "friday")]
    [told] = await notices(here)
    assert "its key is too old to be sent again" in told


@pytest.mark.rule("C7")
async def test_a_crash_between_forgets_nothing_that_may_be_taken_over(here: Room, world: World) -> None:
    await done_and_thinking(here, world, "do reserve friday")
    asked = len(here.model.requests)
    await here.post("alice", "do reserve friday; tell sam")
    await here.model.until_asked(asked + 1)
    here.model.hold = None
    await here.reborn()
    await here.rest()

    assert world.did == [("T1.1.1", "friday"), ("T2.1.2", "sam")]
    assert [body.input.parts[0].text for body in await here.bodies(InputBody)] == [
        "do reserve friday",
        "do reserve friday; tell sam",
    ]
