"""What a restart finds, and what a fault of a tool or a model leaves: honest rows, and a session that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sayso.agent import Agent
from sayso.assembly import App
from sayso.core.consent import ConsentState
from sayso.core.context import MessageRole
from sayso.core.errors import StoreUnavailable
from sayso.core.inputs import Answer, Input, InputKind
from sayso.core.labels import OUTSIDER, Part
from sayso.core.operation import Ref
from sayso.core.origin import Principal
from sayso.core.rows import (
    ConsentWithdrawnBody,
    EffectGoneBody,
    NoticeBody,
    Outcome,
    Row,
    ToolResultBody,
    ToolSentBody,
    ToolUnknownBody,
    TurnEndBody,
)
from sayso.demo.local import START_MS, OpenStore, in_memory, local_stage
from sayso.demo.scenarios import offer
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Call, Finished, ModelFault, ModelRequest
from sayso.storage.store import Entry, Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel, call, calls, say
from sayso.testing.stores import StoreAround
from tests.simulation.process import process

ALICE = Caller(Principal.parse("user:alice"), "api token")
HOUR_MS = 3_600_000


def script(request: ModelRequest) -> Finished:
    """Do what the person says: the name of a tool is called, anything else is answered."""
    newest = request.messages[-1]
    if newest.role is MessageRole.USER and newest.text in {offer.name for offer in request.tools}:
        return calls(call(newest.text))
    return say("All right.")


class Place:
    """A store and a clock that outlive the processes which run on them; ids never restart."""

    def __init__(self, store: Store, clock: VirtualClock) -> None:
        self.store, self.clock, self.ids = store, clock, CountingIds()
        self.session = ""
        #: tells the worker that runs to look
        self.hint: Callable[[], None] = lambda: None

    def app(self, agent: Agent, limits: Limits | None = None) -> App:
        return App(agent, store=self.store, clock=self.clock, ids=self.ids, limits=limits)

    @asynccontextmanager
    async def process(self, agent: Agent, limits: Limits | None = None) -> AsyncIterator[App]:
        """A process on this store. It ends as a crash does: everything stops where it is."""
        async with process(self.app(agent, limits)) as app:
            if not self.session:
                self.session = (await app.commands.open_session(ALICE)).id
            yield app

    async def rest(self, app: App) -> None:
        await app.worker.rested()

    async def say(self, app: App, text: str) -> None:
        await app.commands.post(ALICE, self.session, text)
        await self.rest(app)

    async def bodies(self) -> list[object]:
        return [row.body for row in await self.rows()]

    async def rows(self) -> list[Row]:
        return await self.store.rows(self.session)

    async def results(self) -> list[ToolResultBody]:
        return [body for body in await self.bodies() if isinstance(body, ToolResultBody)]


@pytest.fixture
async def place(open_store: OpenStore) -> AsyncIterator[Place]:
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as store:
        yield Place(store, clock)


def acting(*, keyed: bool, begun: asyncio.Event, gate: asyncio.Event, sent: list[str]) -> Agent:
    """An agent whose one tool notes its key, and then waits at the gate."""
    agent = Agent("fault", ScriptedModel(script), "Do it.")

    @agent.tool(effect="send", keyed=keyed)
    async def act(call: Call) -> str:
        sent.append(call.key)
        begun.set()
        await gate.wait()
        return "done"

    return agent


# --- a restart ------------------------------------------------------------------


@pytest.mark.rule("D5", "F41")
async def test_an_unkeyed_operation_is_never_sent_again_silently(place: Place) -> None:
    begun, gate, sent = asyncio.Event(), asyncio.Event(), list[str]()
    agent = acting(keyed=False, begun=begun, gate=gate, sent=sent)
    async with place.process(agent) as app:
        await app.commands.post(ALICE, place.session, "act")
        await begun.wait()
    async with place.process(agent) as app:
        await place.rest(app)

    assert len(sent) == 1
    [result] = await place.results()
    assert result.outcome is Outcome.UNKNOWN
    bodies = await place.bodies()
    assert any(isinstance(body, ToolUnknownBody) for body in bodies)
    [notice] = [body for body in bodies if isinstance(body, NoticeBody)]
    assert "may or may not have happened" in notice.parts[0].text


@pytest.mark.rule("D5", "D2", "D4")
async def test_a_keyed_operation_is_sent_again_under_its_key(place: Place) -> None:
    begun, gate, sent = asyncio.Event(), asyncio.Event(), list[str]()
    agent = acting(keyed=True, begun=begun, gate=gate, sent=sent)
    async with place.process(agent) as app:
        await app.commands.post(ALICE, place.session, "act")
        await begun.wait()
    gate.set()
    async with place.process(agent) as app:
        await place.rest(app)
        await place.say(app, "act")

    assert sent == [f"{place.session}:T1.1.1"] * 2 + [f"{place.session}:T2.1.1"]
    assert [result.outcome for result in await place.results()] == [Outcome.OK, Outcome.OK]


@pytest.mark.rule("X61", "D5")
async def test_a_call_that_had_its_answer_keeps_it_when_its_sibling_dies_with_the_process(place: Place) -> None:
    """Of two calls of one reply one was answered: after the restart it isn't made again, and the model sees both."""
    begun, gate, sent = asyncio.Event(), asyncio.Event(), list[str]()

    def both(request: ModelRequest) -> Finished:
        first = request.messages[-1].role is MessageRole.USER
        return calls(call("pay"), call("act")) if first else say("All right.")

    model = ScriptedModel(both)
    agent = Agent("fault", model, "Do it.")

    @agent.tool(effect="pay", keyed=False)
    async def pay(call: Call) -> str:
        sent.append("pay")
        return "paid 12"

    @agent.tool(effect="send", keyed=False)
    async def act(call: Call) -> str:
        sent.append("act")
        begun.set()
        await gate.wait()
        return "done"

    async with place.process(agent) as app:
        await app.commands.post(ALICE, place.session, "go")
        await begun.wait()
        while not await place.results():  # noqa: ASYNC110 - the store tells nobody
            await asyncio.sleep(0)
    async with place.process(agent) as app:
        await place.rest(app)

    assert sent == ["pay", "act"]
    assert [(result.tool, result.outcome) for result in await place.results()] == [
        ("pay", Outcome.OK),
        ("act", Outcome.UNKNOWN),
    ]
    asked = model.requests[-1].last
    assert [m.tool for m in asked if m.role is MessageRole.RESULT] == ["pay", "act"]
    assert any("paid 12" in m.text for m in asked)


@pytest.mark.rule("A8")
async def test_a_model_call_that_died_with_the_process_is_made_again(place: Place) -> None:
    model = ScriptedModel(script)
    model.hold = asyncio.Event()
    agent = Agent("fault", model, "Do it.")
    async with place.process(agent) as app:
        await app.commands.post(ALICE, place.session, "hello")
        await model.until_asked()
    model.hold = None
    async with place.process(agent) as app:
        await place.rest(app)

    assert [request.turn for request in model.requests] == ["T1", "T1"]
    assert isinstance((await place.bodies())[-1], TurnEndBody)


async def test_a_tool_that_is_gone_after_a_restart_is_reported_and_the_turn_goes_on(place: Place) -> None:
    hold, model = asyncio.Event(), ScriptedModel(script)
    before, after = Agent("fault", model, "Do it."), Agent("fault", model, "Do it.")
    begun = asyncio.Event()

    @before.tool(effect="read")
    async def look(call: Call) -> str:
        begun.set()
        await hold.wait()
        return "seen"

    async with place.process(before) as app:
        await app.commands.post(ALICE, place.session, "look")
        await begun.wait()
    async with place.process(after) as app:
        await place.rest(app)

    [result] = await place.results()
    assert (result.outcome, result.parts[0].text) == (Outcome.NOT_STARTED, "there is no tool look any more")
    assert isinstance((await place.bodies())[-1], TurnEndBody)


@pytest.mark.rule("R11", "K14")
async def test_a_yes_does_not_run_a_tool_that_was_declared_anew_since_the_question(place: Place) -> None:
    sent: list[str] = []

    def guarded(say: str) -> Agent:
        agent = Agent("fault", ScriptedModel(script), "Do it.")

        @agent.tool(effect="pay", keyed=True, consent="always", say=say)
        async def act(call: Call) -> str:
            sent.append(call.key)
            return "done"

        return agent

    async with place.process(guarded("pay the bill")) as app:
        await place.say(app, "act")
    async with place.process(guarded("pay the bill twice")) as app:
        standing = await app.commands.standing(ALICE, place.session, "A1")
        await app.commands.answer(ALICE, place.session, Answer("A1", standing.consent.digest, yes=True))
        await place.rest(app)

    assert sent == []
    [withdrawn] = [body for body in await place.bodies() if isinstance(body, ConsentWithdrawnBody)]
    assert withdrawn.reason == "act changed since the question was asked"
    found = await place.store.standing(place.session, "A1")
    assert found is not None
    assert found.state is ConsentState.WITHDRAWN


@pytest.mark.rule("K14")
async def test_a_yes_that_nobody_acted_on_for_too_long_is_not_acted_on(place: Place) -> None:
    """She said yes, the process died, and it came back two hours later."""
    sent: list[str] = []
    model = ScriptedModel(script)
    agent = Agent("fault", model, "Do it.")

    @agent.tool(effect="pay", keyed=True, consent="always")
    async def act(call: Call) -> str:
        sent.append(call.key)
        return "done"

    async with place.process(agent) as app:
        await place.say(app, "act")
        model.hold = asyncio.Event()
        await app.commands.post(ALICE, place.session, "hello")
        await model.until_asked(2)
        standing = await app.commands.standing(ALICE, place.session, "A1")
        _, settled = await app.commands.answer(ALICE, place.session, Answer("A1", standing.consent.digest, yes=True))
        assert settled is not None
    model.hold = None
    place.clock.advance(2 * HOUR_MS)
    async with place.process(agent) as app:
        await place.rest(app)

    assert sent == []
    [withdrawn] = [body for body in await place.bodies() if isinstance(body, ConsentWithdrawnBody)]
    assert "too old by now" in withdrawn.reason


# --- tools and models that fail ---------------------------------------------------


@pytest.mark.rule("D5", "F41")
@pytest.mark.parametrize(("effect", "outcome"), [("send", Outcome.UNKNOWN), ("read", Outcome.FAILED)])
async def test_a_tool_that_breaks_off_is_unknown_if_it_has_an_effect(
    place: Place, effect: str, outcome: Outcome
) -> None:
    agent = Agent("fault", ScriptedModel(script), "Do it.")

    @agent.tool(effect=effect)
    async def act(call: Call) -> str:
        raise ConnectionResetError("peer went away")

    async with place.process(agent) as app:
        await place.say(app, "act")

    [result] = await place.results()
    assert result.outcome is outcome
    assert "peer went away" not in result.parts[0].text


@pytest.mark.rule("D5")
async def test_a_keyed_tool_that_keeps_failing_is_tried_a_few_times_and_then_told(place: Place) -> None:
    agent = Agent("fault", ScriptedModel(script), "Do it.")
    keys: list[str] = []

    @agent.tool(effect="send", keyed=True, key_kept_s=10**9)  # the clock goes on for as long as the store takes
    async def act(call: Call) -> str:
        keys.append(call.key)
        raise ConnectionResetError

    async with place.process(agent) as app:
        await app.commands.post(ALICE, place.session, "act")
        while not app.worker.at_rest or len(keys) < 3:
            place.clock.advance(60_000)
            await asyncio.sleep(0)
        await place.rest(app)

    assert keys == [f"{place.session}:T1.1.1"] * 3
    attempts = [body.attempt for body in await place.bodies() if isinstance(body, ToolSentBody)]
    assert attempts == [1, 2, 3]
    assert [result.outcome for result in await place.results()] == [Outcome.UNKNOWN]


@pytest.mark.rule("F6")
async def test_a_turn_whose_model_failed_does_not_stand_in_the_way_of_the_next(place: Place) -> None:
    model = ScriptedModel(script)
    agent = Agent("fault", model, "Do it.")
    async with place.process(agent) as app:
        model.failing = ModelFault("unavailable")
        await place.say(app, "hello")
        model.failing = None
        await place.say(app, "hello again")

    ends = [body for body in await place.bodies() if isinstance(body, TurnEndBody)]
    assert [(end.ending, end.reason) for end in ends] == [("failed", "the model failed: unavailable"), ("done", "")]


async def test_a_model_that_never_stops_calling_comes_to_the_limit(place: Place) -> None:
    agent = Agent("fault", ScriptedModel(lambda _: calls(call("look"))), "Do it.")

    @agent.tool(effect="read")
    async def look(call: Call) -> str:
        return "seen"

    async with place.process(agent, Limits(steps_per_turn=3)) as app:
        await place.say(app, "go")

    [end] = [body for body in await place.bodies() if isinstance(body, TurnEndBody)]
    assert (end.ending, end.reason) == ("failed", "no model calls are left to this turn")
    assert len(await place.results()) == 3


async def test_a_turn_comes_to_the_limit_of_its_calls_and_none_of_the_last_reply_is_run(place: Place) -> None:
    agent = Agent("fault", ScriptedModel(lambda _: calls(call("look"), call("look"))), "Do it.")

    @agent.tool(effect="read")
    async def look(call: Call) -> str:
        return "seen"

    async with place.process(agent, Limits(calls_per_turn=5)) as app:
        await place.say(app, "go")

    [end] = [body for body in await place.bodies() if isinstance(body, TurnEndBody)]
    why = "the model asked for more than 5 calls in one turn, and none of its last reply was run"
    assert (end.ending, end.reason) == ("failed", why)
    assert len(await place.results()) == 4


async def test_a_turn_that_takes_too_long_ends_where_nothing_is_half_done(place: Place) -> None:
    agent = Agent("fault", ScriptedModel(lambda _: calls(call("look"))), "Do it.")

    @agent.tool(effect="read")
    async def look(call: Call) -> str:
        place.clock.advance(40_000)
        return "seen"

    async with place.process(agent, Limits(turn_ms=100_000)) as app:
        await place.say(app, "go")

    [end] = [body for body in await place.bodies() if isinstance(body, TurnEndBody)]
    assert (end.ending, end.reason) == ("failed", "it took longer than 100000 ms")
    assert [result.outcome for result in await place.results()] == [Outcome.OK] * 3


@pytest.mark.rule("F14", "H12")
async def test_two_calls_of_one_reply_with_one_id_are_both_refused(place: Place) -> None:
    ran: list[str] = []
    twice = Finished("", tuple(call("act").__class__("act", {}, provider_id="dup") for _ in range(2)))
    agent = Agent("fault", ScriptedModel([twice, say("Sorry.")]), "Do it.")

    @agent.tool(effect="send", keyed=True)
    async def act(call: Call) -> str:
        ran.append(call.key)
        return "done"

    async with place.process(agent) as app:
        await place.say(app, "go")

    assert ran == []
    assert [result.outcome for result in await place.results()] == [Outcome.REFUSED, Outcome.REFUSED]


# --- what a source says twice -----------------------------------------------------


@pytest.mark.rule("A13")
async def test_two_reports_that_a_thing_is_gone_mark_it_once(place: Place) -> None:
    agent = Agent("fault", ScriptedModel(script), "Do it.")

    @agent.tool(effect="book", keyed=True)
    async def act(call: Call) -> str:
        call.made("table", "R1", source="restaurant")
        call.made("menu", "M1", source="restaurant")
        return "done"

    async with place.process(agent) as app:
        await place.say(app, "act")
        for event_id in ("e1", "e2"):
            await place.store.put(gone(place.session, event_id))
        app.worker.hint(place.session)
        await place.rest(app)
        await place.say(app, "hello")

    marks = [body for body in await place.bodies() if isinstance(body, EffectGoneBody)]
    assert [(mark.ref.value, mark.operation) for mark in marks] == [("R1", "T1.1.1"), ("M1", None)]
    assert isinstance((await place.bodies())[-1], TurnEndBody)


def gone(session: str, event_id: str) -> Entry:
    received = Input(
        InputKind.NOTICE,
        Principal.parse("source:restaurant"),
        "standard-webhooks v1",
        parts=(Part("closed", "source:restaurant", OUTSIDER),),
        about=(Ref("restaurant", "table", "R1"), Ref("restaurant", "menu", "M1")),
        gone=True,
    )
    return Entry(session, "restaurant", event_id, received, digest=f"sha256:{event_id}", keep_ms=HOUR_MS)


# --- a store that can't be read for a moment ----------------------------------------


class Unreadable(StoreAround):
    """A store whose reads of one kind fail so many times once it is told so."""

    def __init__(self, inside: Store, name: str) -> None:
        super().__init__(inside)
        self._name, self.failures = name, 0

    def __getattr__(self, name: str) -> Any:
        read = super().__getattr__(name)
        if name != self._name:
            return read

        async def reading(*args: Any, **kwargs: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise StoreUnavailable("the store can't be read now")
            return await read(*args, **kwargs)

        return reading


@pytest.mark.rule("D5", "F52")
@pytest.mark.parametrize("keyed", [True, False])
async def test_what_a_tool_answered_is_not_lost_to_a_look_at_the_inbox_that_fails(keyed: bool) -> None:
    """The answer was heard and is not stored yet; the store can't be read for a moment; nothing is sent again."""
    clock, sent = VirtualClock(START_MS), list[str]()
    async with in_memory(clock.now_ms) as inside:
        failing = Unreadable(inside, "inbox")
        place = Place(failing.store, clock)
        agent = Agent("fault", ScriptedModel(script), "Do it.")

        @agent.tool(effect="book", keyed=keyed, consent="always")
        async def act(call: Call) -> str:
            sent.append(call.key)
            call.made("table", "R1", source="restaurant")
            failing.failures = 3
            place.hint()
            return "done"

        async with place.process(agent) as app:
            place.hint = lambda: app.worker.hint(place.session)
            await place.say(app, "act")
            standing = await app.commands.standing(ALICE, place.session, "A1")
            await app.commands.answer(ALICE, place.session, Answer("A1", standing.consent.digest, yes=True))
            while not app.worker.at_rest:
                clock.advance(1_000)
                await asyncio.sleep(0)

    assert len(sent) == 1
    assert [result.outcome for result in await place.results()] == [Outcome.WAITING, Outcome.OK]
    assert not any(isinstance(body, ToolUnknownBody) for body in await place.bodies())


@pytest.mark.rule("D5", "K16", "F52")
@pytest.mark.parametrize("name", ["refs", "operation"])
async def test_the_last_answer_of_fixed_steps_is_not_lost_to_a_read_that_fails(name: str) -> None:
    """Its row waits for the continuation to be put together, which reads what the question was about."""
    failing: list[Unreadable] = []

    @asynccontextmanager
    async def opened(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        async with in_memory(now_ms) as inside:
            failing.append(Unreadable(inside, name))
            yield failing[0].store

    async with local_stage(open_store=opened) as stage:
        await stage.say("alice", "Book Friday at seven for four and tell the group")
        await stage.hook(offer("20:30"), id="evt_17")
        [question] = await stage.questions()
        failing[0].failures = 3
        answering = asyncio.create_task(stage.answer("alice", question, yes=True))
        while not answering.done():
            stage.tick(1_000)
            await asyncio.sleep(0)
        assert await answering == [200]
        rows = await stage.app.store.rows(stage.session)
        books = await stage.books()

    assert failing[0].failures == 0
    assert len(books["texts"]) == 2
    assert not any(isinstance(row.body, ToolUnknownBody) for row in rows)
    assert {row.body.attempt for row in rows if isinstance(row.body, ToolSentBody)} == {1}
