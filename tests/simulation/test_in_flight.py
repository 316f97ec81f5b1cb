"""Input that arrives while a turn runs: it waits, and it doesn't disturb what is out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import pytest

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.origin import Principal
from sayso.core.rows import ConsentApprovedBody, InputBody, InputSupersededBody, Row, TurnEndBody, TurnStartBody
from sayso.core.session import Token
from sayso.demo.local import LocalStage, OpenStore, local_stage
from sayso.demo.scenarios import offer
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.storage.store import Store, WriteOutcome
from sayso.testing.stores import StoreAround
from tests.simulation.room import Room, room

ALICE = Caller(Principal.parse("user:alice"), "api token")
BOOK = "Book Friday at seven for four and tell the group"


@pytest.fixture
async def stage(open_store: OpenStore) -> AsyncIterator[LocalStage]:
    async with local_stage(open_store=open_store) as stage:
        yield stage


async def post(stage: LocalStage, text: str) -> None:
    await stage.app.commands.post(ALICE, stage.session, text)


@pytest.mark.rule("C1")
async def test_inputs_are_taken_one_turn_at_a_time_in_order_of_arrival(stage: LocalStage) -> None:
    """Three messages while the model is out: it is asked once for the first, then for each of the others."""
    hold = stage.model.hold = asyncio.Event()
    await post(stage, "one")
    await stage.model.until_asked()
    await post(stage, "two")
    await post(stage, "three")
    hold.set()
    await stage.rest()

    assert [request.turn for request in stage.requests] == ["T1", "T2", "T3"]
    rows = await stage.app.store.rows(stage.session)
    assert [row.body.input.parts[0].text for row in rows if isinstance(row.body, InputBody)] == ["one", "two", "three"]
    turns = [row.body for row in rows if isinstance(row.body, TurnStartBody | TurnEndBody)]
    assert [isinstance(body, TurnStartBody) for body in turns] == [True, False] * 3


@pytest.mark.rule("C1", "K13")
async def test_an_answer_overtakes_the_queue_and_runs_when_no_turn_does(stage: LocalStage) -> None:
    await stage.say("alice", BOOK)
    await stage.hook(offer("20:30"), id="evt_17")
    [question] = await stage.questions()
    asked_before = len(stage.requests)

    hold = stage.model.hold = asyncio.Event()
    await post(stage, "What time is sunset?")
    await stage.model.until_asked(asked_before + 1)
    await post(stage, "And the day after?")
    _, settled = await stage.app.commands.answer(ALICE, stage.session, stage.yes(question))
    assert settled is not None  # at once, while the model is still out
    assert isinstance(settled.body, ConsentApprovedBody)
    hold.set()
    await stage.rest()

    rows = await stage.app.store.rows(stage.session)
    starts = [(row.turn, row.body.consent, row.body.continues) for row in rows if isinstance(row.body, TurnStartBody)]
    assert starts[2:] == [("T3", None, None), ("T4", "A1", None), ("T5", "A1", "T2"), ("T6", None, None)]


class Blocking(StoreAround):
    """A store whose rows wait at the door while it is shut."""

    def __init__(self, inside: Store) -> None:
        super().__init__(inside)
        self.open = asyncio.Event()
        self.open.set()

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        await self.open.wait()
        return await self.inside.write(token, rows, blobs=blobs)


@pytest.mark.rule("K12", "N9")
async def test_an_answer_is_told_as_settled_only_once_that_is_durable(open_store: OpenStore) -> None:
    """The row is there when it is accepted; the caller is told when it can't be lost any more."""
    blocking: list[Blocking] = []

    @asynccontextmanager
    async def opened(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        async with open_store(now_ms) as store:
            blocking.append(Blocking(store))
            yield blocking[0].store

    async with local_stage(open_store=opened, limits=Limits(settle_wait_ms=300)) as stage:
        await stage.say("alice", BOOK)
        await stage.hook(offer("20:30"), id="evt_17")
        [question] = await stage.questions()
        blocking[0].open.clear()

        _, settled = await stage.app.commands.answer(ALICE, stage.session, stage.yes(question))
        seen = await stage.app.commands.history(ALICE, stage.session)
        assert isinstance(seen.rows[-1].body, ConsentApprovedBody)  # accepted, so readers see it
        assert settled is None  # and not told as done

        blocking[0].open.set()
        await stage.rest()
        assert sorted((await stage.books())["tables"]) == ["R2"]


# --- an agent that refuses what comes meanwhile ------------------------------------


@pytest.mark.rule("C5")
async def test_what_a_person_says_while_her_turn_runs_is_rejected_and_she_is_told(open_store: OpenStore) -> None:
    """Stored, not acted on, on record. Another person's waits, and a source is never refused for being busy."""
    async with room(open_store, in_flight="reject") as here:
        await here.invite("bob")
        hold = here.model.hold = asyncio.Event()
        await here.post("alice", "one")
        await here.model.until_asked()
        meanwhile = await here.post("alice", "two")
        await here.post("bob", "hello from bob")
        assert await here.hook("a table is free", id="evt_1") == 202
        while not await here.bodies(InputSupersededBody):  # noqa: ASYNC110 - its owner tells nobody
            await asyncio.sleep(0)
        here.model.hold = None
        hold.set()
        await here.rest()
        await here.say("alice", "two, again")

        [rejected] = await here.bodies(InputSupersededBody)
        assert (rejected.n, rejected.reason) == (meanwhile, "T1 was running; say it again when it has ended")
        assert [said for _, said in await here.heard()] == ["one", "hello from bob", "a table is free", "two, again"]


@pytest.mark.rule("C5")
async def test_what_waited_before_her_turn_began_is_not_rejected(open_store: OpenStore) -> None:
    """Alice spoke while bob's turn ran, twice: the second still waits when her own turn begins."""
    async with room(open_store, in_flight="reject") as here:
        await here.invite("bob")
        hold = here.model.hold = asyncio.Event()
        await here.post("bob", "a long story")
        await here.model.until_asked()
        await here.post("alice", "one")
        await here.post("alice", "two")
        here.clock.advance(10)
        here.model.hold = None
        hold.set()
        await here.rest()

        assert await here.bodies(InputSupersededBody) == []
        assert [said for _, said in await here.heard()] == ["a long story", "one", "two"]


# --- debounce ----------------------------------------------------------------


async def turns(here: Room) -> list[tuple[int, ...]]:
    return [body.origin.inputs for body in await here.bodies(TurnStartBody)]


@pytest.mark.rule("C5")
async def test_what_one_says_in_one_breath_is_one_turn_s(open_store: OpenStore) -> None:
    async with room(open_store, debounce_s=2) as here:
        await here.invite("bob")
        one = await here.say("alice", "one")
        await here.later(1_500)
        two = await here.say("alice", "two")
        bobs = await here.say("bob", "and me")
        await here.later(1_500)
        assert await turns(here) == [], "she may still go on"
        await here.later(500)
        await here.later(2_000)

        assert await turns(here) == [(one, two), (bobs,)]
        assert await here.heard() == [("alice", "one"), ("alice", "two"), ("bob", "and me")]


@pytest.mark.rule("C5")
async def test_one_who_does_not_stop_is_heard_all_the_same(open_store: OpenStore) -> None:
    async with room(open_store, debounce_s=1, limits=Limits(waiting_messages=50)) as here:
        said = []
        for _ in range(20):
            said.append(await here.say("alice", "and"))
            await here.later(600)
            if await turns(here):
                break
        assert len(said) == 17
        assert await turns(here) == [tuple(said)]


@pytest.mark.rule("C5", "A7")
async def test_a_process_that_ends_meanwhile_forgets_nothing(open_store: OpenStore) -> None:
    async with room(open_store, debounce_s=2) as here:
        one = await here.say("alice", "one")
        await here.reborn()
        await here.rest()
        await here.later(2_000)
        assert await turns(here) == [(one,)]


@pytest.mark.rule("C5")
async def test_what_a_source_says_does_not_wait(open_store: OpenStore) -> None:
    async with room(open_store, debounce_s=2) as here:
        await here.hook("R1 at nine", id="evt_1")
        await here.rest()
        assert len(await turns(here)) == 1
