"""Stop: nothing more begins, what is out has a few seconds, and what was done is said as it is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field

import pytest

from sayso import Agent, Call
from sayso.core.context import MessageRole
from sayso.core.errors import Forbidden, NotFound, RequestRefused
from sayso.core.operation import EffectState, OperationState
from sayso.core.rows import (
    AnswerRefusedBody,
    ConsentWithdrawnBody,
    Ending,
    InputSupersededBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ToolResultBody,
    ToolSettledBody,
    TurnEndBody,
    TurnStartBody,
    TurnStopBody,
)
from sayso.core.session import SessionState
from sayso.demo.local import OpenStore
from sayso.runtime.limits import Limits
from sayso.runtime.ports import ModelRequest
from sayso.testing.scripted import Reply, call, calls, say
from sayso.testing.view import View
from tests.simulation.room import OPS, VIEWER, Room, caller, room

GRACE_MS = Limits().stop_grace_ms


@dataclass
class Slow:
    """Tools that answer when they are told to."""

    begun: asyncio.Event = field(default_factory=asyncio.Event)
    answer: asyncio.Event = field(default_factory=asyncio.Event)
    did: list[str] = field(default_factory=list)

    def tools(self, agent: Agent) -> None:
        async def out(name: str) -> None:
            self.did.append(name)
            self.begun.set()
            await self.answer.wait()

        @agent.tool(effect="book", keyed=True, timeout_s=60)
        async def reserve(call: Call) -> str:
            await out("reserve")
            call.made("reservation", "R7", source="restaurant")
            return "booked R7"

        @agent.tool(effect="read")
        async def search(call: Call) -> str:
            await out("search")
            return "found"

        @agent.tool(effect="send", keyed=False)
        async def tell(call: Call) -> str:
            self.did.append("tell")
            return "told"


def script(request: ModelRequest) -> Reply:
    """Call the tools that a person names; anything else is answered in words."""
    newest = request.messages[-1]
    if newest.role is MessageRole.USER and newest.text.startswith("do "):
        return calls(*(call(name) for name in newest.text.removeprefix("do ").split()))
    if newest.role is MessageRole.USER and newest.text.startswith("pay "):
        return calls(call("pay", what=newest.text.removeprefix("pay ")))
    return say("All right.")


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
async def here(open_store: OpenStore, slow: Slow) -> AsyncIterator[Room]:
    async with room(open_store, answers=script, tools=slow.tools) as here:
        await here.invite("bob")
        yield here


async def stop(here: Room, who: str = "alice", turn: str | None = None) -> object:
    _, row = await here.app.commands.stop(caller(who), here.session, turn=turn)
    return None if row is None else row.body


async def ends(here: Room) -> list[tuple[Ending, str]]:
    return [(body.ending, body.reason) for body in await here.bodies(TurnEndBody)]


async def results(here: Room) -> list[tuple[str, Outcome, EffectState | None]]:
    return [(body.tool, body.outcome, body.effect) for body in await here.bodies(ToolResultBody)]


async def state(here: Room, operation: str = "T1.1.1") -> OperationState:
    found = await here.store.operation(here.session, operation)
    assert found is not None
    return found.state


CANCELLED = (Ending.CANCELLED, "user:alice stopped it")


# --- what becomes of the turn ------------------------------------------------------


@pytest.mark.rule("K24", "K9")
async def test_a_reply_that_is_being_written_ends_where_it_is_and_its_text_is_kept(here: Room) -> None:
    here.model.hold_midway = asyncio.Event()
    view = View()
    await here.post("alice", "Tell me a story")
    async with aclosing(await here.app.commands.follow(caller("alice"), here.session)) as coming:
        async for frame in coming:
            view.apply(frame)
            if view.text:
                break
    assert here.model.open == 1

    stopped = await stop(here)
    here.model.hold_midway = None
    await here.rest()

    assert isinstance(stopped, TurnStopBody)
    assert here.model.open == 0
    [said] = await here.bodies(ModelSaidBody)
    assert (said.interrupted, said.parts[0].text) == (True, view.text)
    assert await ends(here) == [CANCELLED]
    await here.say("alice", "And now?")
    assert (await ends(here))[1:] == [(Ending.DONE, "")]


@pytest.mark.rule("K24", "F53")
async def test_what_answers_in_time_has_its_result_and_what_had_not_begun_never_does(here: Room, slow: Slow) -> None:
    await here.post("alice", "do reserve tell")
    await slow.begun.wait()
    asked = len(here.model.requests)

    await stop(here)
    assert await ends(here) == [], "what is out may still answer"
    slow.answer.set()
    await here.rest()

    assert await results(here) == [
        ("tell", Outcome.NOT_STARTED, EffectState.NONE),
        ("reserve", Outcome.OK, EffectState.COMMITTED),
    ]
    assert await ends(here) == [CANCELLED]
    assert slow.did == ["reserve"]
    assert len(here.model.requests) == asked, "nothing begins any more"
    assert await state(here) is OperationState.ANSWERED


@pytest.mark.rule("K24", "K25", "C7")
async def test_what_does_not_answer_in_time_is_unknown_and_tells_later_what_it_did(here: Room, slow: Slow) -> None:
    """By a row of its own: the call keeps the one result that it has."""
    await here.post("alice", "do reserve")
    await slow.begun.wait()
    await stop(here)
    await here.later(GRACE_MS)

    assert await results(here) == [("reserve", Outcome.UNKNOWN, EffectState.UNKNOWN)]
    assert await ends(here) == [CANCELLED]
    assert await state(here) is OperationState.UNKNOWN
    assert any("may or may not have happened" in body.parts[0].text for body in await here.bodies(NoticeBody))
    await here.say("alice", "hello")
    slow.answer.set()
    while not await here.bodies(ToolSettledBody):  # noqa: ASYNC110 - the tool tells its owner
        await asyncio.sleep(0)
    await here.rest()

    [settled] = await here.bodies(ToolSettledBody)
    assert (settled.operation, settled.outcome, settled.effect) == ("T1.1.1", Outcome.OK, EffectState.COMMITTED)
    assert settled.acting_principal == "user:alice"
    assert [str(ref) for ref in settled.made] == ["reservation R7"]
    assert len(await results(here)) == 1
    assert await state(here) is OperationState.ANSWERED
    assert slow.did == ["reserve"]
    await here.say("alice", "and now?")
    told = [m.text for m in here.model.requests[-1].last if m.role is MessageRole.DATA]
    assert any("reserve, call T1.1.1, which was given up as unknown, answered after all: ok" in text for text in told)
    [known] = await here.store.refs("restaurant", settled.made)
    assert (known.session, known.state, known.operation) == (here.session, "live", "T1.1.1")


@pytest.mark.rule("K24")
async def test_a_read_that_is_out_is_not_waited_for_longer_than_the_grace(here: Room, slow: Slow) -> None:
    await here.post("alice", "do search")
    await slow.begun.wait()
    await stop(here)
    await here.later(GRACE_MS)

    assert await results(here) == [("search", Outcome.FAILED, None)]
    assert await ends(here) == [CANCELLED]


@pytest.mark.rule("K24", "K25")
async def test_a_session_with_something_given_up_that_is_still_out_is_not_let_go(open_store: OpenStore) -> None:
    """Its answer can be told under the epoch that sent it, and under no other."""
    slow = Slow()
    async with room(open_store, answers=script, tools=slow.tools, limits=Limits(linger_ms=1)) as here:
        await here.post("alice", "do reserve")
        await slow.begun.wait()
        await stop(here)
        await here.later(GRACE_MS)
        record = await here.app.commands.session(caller("alice"), here.session)
        assert record.state is SessionState.OWNED
        slow.answer.set()
        while here.app.worker.owned:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)

        assert [body.outcome for body in await here.bodies(ToolSettledBody)] == [Outcome.OK]


@pytest.mark.rule("K24", "D5", "F51")
async def test_a_stop_outlives_the_process_and_nothing_is_looked_up_or_sent_again(open_store: OpenStore) -> None:
    slow = Slow()
    async with room(open_store, answers=script, tools=slow.tools, limits=Limits(drain_ms=1)) as here:
        await here.post("alice", "do reserve tell")
        await slow.begun.wait()
        await stop(here)
        await here.reborn()
        await here.rest()

        assert (await results(here))[-1] == ("reserve", Outcome.UNKNOWN, EffectState.UNKNOWN)
        assert await ends(here) == [CANCELLED]
        assert slow.did == ["reserve"]
        await here.say("alice", "still there?")
        assert (await ends(here))[-1] == (Ending.DONE, "")


# --- what goes with it ---------------------------------------------------------------


@pytest.mark.rule("K24", "F24")
async def test_the_senders_own_waiting_messages_go_with_it_and_nobody_elses(here: Room, slow: Slow) -> None:
    await here.post("alice", "do reserve")
    await slow.begun.wait()
    mine, his = await here.post("alice", "and the cinema"), await here.post("bob", "hello from bob")

    await stop(here)
    slow.answer.set()
    await here.rest()

    assert [body.n for body in await here.bodies(InputSupersededBody)] == [mine]
    assert await here.heard() == [("alice", "do reserve"), ("bob", "hello from bob")]
    assert his > mine
    assert [str(body.origin.principal) for body in await here.bodies(TurnStartBody)] == ["user:alice", "user:bob"]


@pytest.mark.rule("K24", "F24")
async def test_a_turn_that_ended_with_a_question_is_stopped_by_withdrawing_it(here: Room) -> None:
    await here.say("alice", "pay the bill")
    [asked] = await here.app.commands.standings(caller("alice"), here.session, open_only=True)

    with pytest.raises(RequestRefused, match="no turn runs"):
        await stop(here)
    stopped = await stop(here, turn="T1")

    assert isinstance(stopped, NoticeBody)
    assert [body.consent for body in await here.bodies(ConsentWithdrawnBody)] == ["A1"]
    refused = await here.yes_to(asked)
    assert refused is not None
    assert isinstance(refused.body, AnswerRefusedBody)
    assert here.handed == []


@pytest.mark.rule("K24", "K16")
async def test_a_stopped_turn_of_approved_steps_hands_on_to_no_other(open_store: OpenStore) -> None:
    slow = Slow()

    def tools(agent: Agent) -> None:
        slow.tools(agent)

        @agent.tool(effect="pay", keyed=True, consent="always")
        async def settle_bill(call: Call) -> str:
            slow.begun.set()
            await slow.answer.wait()
            return "paid"

    async with room(open_store, answers=script, tools=tools) as here:
        await here.say("alice", "do settle_bill tell")
        [asked] = await here.app.commands.standings(caller("alice"), here.session, open_only=True)
        await here.yes_to(asked, wait=False)
        await slow.begun.wait()
        asked_before = len(here.model.requests)
        await stop(here)
        slow.answer.set()
        await here.rest()

        assert [outcome for _, outcome, _ in await results(here)][-2:] == [Outcome.NOT_STARTED, Outcome.OK]
        assert (await ends(here))[-1] == CANCELLED
        assert len(here.model.requests) == asked_before
        assert "tell" not in slow.did


# --- whose it is ---------------------------------------------------------------------


@pytest.mark.rule("K24", "F31")
async def test_a_turn_is_its_own_persons_the_owners_and_an_operators_to_stop(here: Room, slow: Slow) -> None:
    await here.invite("vera", VIEWER)
    await here.post("alice", "do reserve")
    await slow.begun.wait()

    with pytest.raises(RequestRefused, match="T1 is user:alice's to stop"):
        await stop(here, "bob")
    with pytest.raises(Forbidden):
        await stop(here, "vera")
    with pytest.raises(NotFound):
        await stop(here, "mallory")
    assert await here.bodies(TurnStopBody) == []
    await here.app.commands.stop(OPS, here.session)
    slow.answer.set()
    await here.rest()
    assert await ends(here) == [(Ending.CANCELLED, "operator:ops stopped it")]


@pytest.mark.rule("K24", "F31")
async def test_the_owner_may_stop_what_another_has_started(here: Room, slow: Slow) -> None:
    await here.post("bob", "do reserve")
    await slow.begun.wait()
    await stop(here, "alice")
    slow.answer.set()
    await here.rest()

    assert await ends(here) == [CANCELLED]


@pytest.mark.rule("K24")
async def test_a_late_click_does_not_stop_the_next_turn(here: Room, slow: Slow) -> None:
    await here.say("alice", "hello")
    await here.post("alice", "do reserve")
    await slow.begun.wait()

    with pytest.raises(RequestRefused, match="T1 does not run"):
        await stop(here, turn="T1")
    slow.answer.set()
    await here.rest()
    assert [ending for ending, _ in await ends(here)] == [Ending.DONE, Ending.DONE]


@pytest.mark.rule("K24")
async def test_a_second_stop_changes_nothing(here: Room, slow: Slow) -> None:
    await here.post("alice", "do reserve")
    await slow.begun.wait()
    await stop(here)

    with pytest.raises(RequestRefused, match="T1 is being stopped already"):
        await stop(here)
    slow.answer.set()
    await here.rest()
    assert await ends(here) == [CANCELLED]
    assert len(await here.bodies(TurnStopBody)) == 1
