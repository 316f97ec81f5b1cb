"""A turn that breaks off or is called off: what was shown and what was tried of it stays, and nothing more happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from sayso.agent import Agent
from sayso.assembly import App
from sayso.core.origin import Principal
from sayso.core.rows import Ending, Kind, ModelSaidBody, Row, TurnEndBody, encode_body
from sayso.core.session import Position
from sayso.core.view import public
from sayso.demo.local import START_MS, OpenStore
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Finished, Model, ModelFault, ModelRequest, TextDelta
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import Cut, ScriptedModel, say
from sayso.testing.stores import GatedStore, Point
from sayso.testing.view import View
from tests.simulation.process import process

ALICE = Caller(Principal.parse("user:alice"), "api token")


@dataclass
class Place:
    """One store, its clock, and the processes that run on it one after the other."""

    store: GatedStore
    clock: VirtualClock
    ids: CountingIds = field(default_factory=CountingIds)
    session: str = ""
    #: the kinds of the rows of each commit
    commits: list[list[Kind]] = field(default_factory=list)

    def __post_init__(self) -> None:
        async def note(rows: Sequence[Row]) -> None:
            self.commits.append([row.kind for row in rows])

        self.store.on(Point.WRITE, note)

    @asynccontextmanager
    async def process(self, agent: Agent, limits: Limits | None = None) -> AsyncIterator[App]:
        """A process that is ended at the end of the block, whatever it still waits for."""
        async with process(App(agent, store=self.store.store, clock=self.clock, ids=self.ids, limits=limits)) as app:
            if not self.session:
                self.session = (await app.commands.open_session(ALICE)).id
            yield app

    async def say(self, app: App, text: str) -> None:
        await app.commands.post(ALICE, self.session, text)
        await self.rest(app)

    async def rest(self, app: App) -> None:
        async with asyncio.timeout(10):
            await app.worker.rested()

    async def rows(self) -> list[Row]:
        return await self.store.inside.rows(self.session)

    async def said(self) -> list[tuple[str, bool]]:
        bodies = [row.body for row in await self.rows() if isinstance(row.body, ModelSaidBody)]
        return [("".join(part.text for part in body.parts), body.interrupted) for body in bodies]

    async def ends(self) -> list[Ending]:
        return [row.body.ending for row in await self.rows() if isinstance(row.body, TurnEndBody)]


@pytest.fixture
async def place(open_store: OpenStore) -> AsyncIterator[Place]:
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as inside:
        yield Place(GatedStore(inside), clock)


def talker(model: Model) -> Agent:
    """An agent that only speaks."""
    return Agent("talker", model, "Talk.")


async def until_shown(app: App, session: str, view: View, text: str) -> None:
    """Follow the session until a page shows this text of a reply that is being written."""
    async with asyncio.timeout(10):
        stream = await app.commands.follow(ALICE, session, after=None)
        async for frame in stream:
            view.apply(frame)
            if view.text == text:
                break
        await stream.aclose()


async def until_caught_up(app: App, session: str, view: View) -> None:
    """Come back by the page's cursor, and read what it misses."""
    view.cut()
    after = None if view.cursor is None else Position.parse(view.cursor)
    async with asyncio.timeout(10):
        stream = await app.commands.follow(ALICE, session, after=after)
        async for frame in stream:
            view.apply(frame)
            if view.caught_up:
                break
        await stream.aclose()


# --- a reply that broke off --------------------------------------------------


class Stops:
    """A model that stops in the middle, and says neither what it would have said nor why."""

    name = "stops"

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[TextDelta | Finished]]:
        async def pieces() -> AsyncIterator[TextDelta | Finished]:
            yield TextDelta("Half ")
            yield TextDelta("a sentence")

        yield pieces()


class Empties:
    """A model that takes back at the end what it said before."""

    name = "empties"

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[TextDelta | Finished]]:
        async def pieces() -> AsyncIterator[TextDelta | Finished]:
            yield TextDelta("Half a sentence")
            yield Finished("")

        yield pieces()


def falls_silent() -> ScriptedModel:
    """A model that says half a sentence, and never anything after."""
    model = ScriptedModel(lambda _: say("Half_a_sentence and more"))
    model.hold_midway = asyncio.Event()
    return model


@pytest.mark.rule("K9", "X54")
@pytest.mark.parametrize(
    ("model", "text", "why"),
    [
        (lambda: ScriptedModel([Cut("Half a sentence", ModelFault("gone"))]), "Half a sentence", "failed: gone"),
        (Stops, "Half a sentence", "empty or cut short"),
        (Empties, "Half a sentence", "empty or cut short"),
        (falls_silent, "Half_a_sentence ", "within 50 ms"),
    ],
    ids=["the connection is lost", "it stops", "it is empty in the end", "it takes too long"],
)
async def test_what_was_shown_of_a_reply_that_broke_off_is_a_row_in_the_commit_that_ends_its_turn(
    place: Place, model: Callable[[], Model], text: str, why: str
) -> None:
    async with place.process(talker(model()), Limits(model_ms=50)) as app:
        await place.say(app, "Hello")

    assert await place.said() == [(text, True)]
    end = (await place.rows())[-1].body
    assert isinstance(end, TurnEndBody)
    assert (end.ending, why in end.reason) == (Ending.FAILED, True)
    assert place.commits[-1] == [Kind.MODEL_SAID, Kind.TURN_END]


@pytest.mark.rule("K9")
async def test_a_reply_of_which_nothing_was_shown_leaves_no_row(place: Place) -> None:
    async with place.process(talker(ScriptedModel([ModelFault("overloaded")]))) as app:
        await place.say(app, "Hello")

    assert await place.said() == []
    assert await place.ends() == [Ending.FAILED]


@pytest.mark.rule("K9", "H2")
async def test_a_page_that_saw_it_being_written_shows_what_the_history_has(place: Place) -> None:
    model = ScriptedModel([Cut("Half a sentence", ModelFault("gone"))])
    midway = model.hold_midway = asyncio.Event()
    early, late = View(), View()
    async with place.process(talker(model)) as app:
        await app.commands.post(ALICE, place.session, "Hello")
        await model.until_asked()
        await until_shown(app, place.session, early, "Half ")
        midway.set()
        await place.rest(app)
        await until_caught_up(app, place.session, early)
        await until_caught_up(app, place.session, late)

    assert early.rows == late.rows == [public(row, place.session) for row in await place.rows()]
    assert early.text is None


@pytest.mark.rule("X54")
async def test_the_model_is_shown_that_its_reply_was_cut_off(place: Place) -> None:
    model = ScriptedModel([Cut("I have booked", ModelFault("gone")), say("Where were we?")])
    async with place.process(talker(model)) as app:
        await place.say(app, "Hello")
        await place.say(app, "And?")

    shown = model.requests[-1].last
    assert [message.text for message in shown if message.role == "assistant"] == ["I have booked"]
    [note] = [message.text for message in shown if "cut off" in message.text]
    assert 'source="runtime"' in note


@pytest.mark.rule("K9")
async def test_a_process_that_ends_while_a_reply_is_written_leaves_no_row_and_the_model_is_asked_again(
    place: Place,
) -> None:
    first, second = ScriptedModel(lambda _: say("Good morning.")), ScriptedModel(lambda _: say("Good evening."))
    first.hold_midway = asyncio.Event()
    async with place.process(talker(first)) as app:
        await app.commands.post(ALICE, place.session, "Hello")
        await first.until_asked()
        await until_shown(app, place.session, View(), "Good ")
    assert await place.said() == []

    async with place.process(talker(second)) as app:
        await place.rest(app)

    assert await place.said() == [("Good evening.", False)]
    assert await place.ends() == [Ending.DONE]


@pytest.mark.rule("K9")
async def test_a_commit_that_is_lost_with_its_process_leaves_no_half_of_a_broken_reply(place: Place) -> None:
    """The text and the end are stored together or not at all; then the model is asked again."""
    gate = place.store.hold(Point.WRITE, of=[Kind.MODEL_SAID])
    async with place.process(talker(ScriptedModel([Cut("Half a sentence", ModelFault("gone"))]))) as app:
        await app.commands.post(ALICE, place.session, "Hello")
        async with asyncio.timeout(10):
            await gate.reached()

    async with place.process(talker(ScriptedModel(lambda _: say("A whole one.")))) as app:
        await place.rest(app)

    assert await place.said() == [("A whole one.", False)]
    assert await place.ends() == [Ending.DONE]


def test_an_interrupted_reply_is_told_from_a_whole_one_wherever_it_is_written_down() -> None:
    assert '"interrupted":true' in encode_body(ModelSaidBody(1, (), interrupted=True))
    assert "interrupted" not in encode_body(ModelSaidBody(1, ()))
