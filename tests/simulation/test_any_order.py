"""Whatever comes in whatever order, and whenever the process dies: what must hold, holds at the end.

A seed decides everything: who says what, which calls come twice, when time passes, when the restaurant is
full or slow to answer, and where the process ends. A failure prints the seed that repeats it.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from sayso.assembly import App
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import AnswerRefused, NotFound
from sayso.core.inputs import Answer
from sayso.core.operation import OperationState
from sayso.core.origin import Principal
from sayso.core.rows import (
    ConsentApprovedBody,
    ConsentUsedBody,
    ModelCalledBody,
    Outcome,
    Row,
    ToolResultBody,
    ToolSentBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
)
from sayso.demo.concierge import concierge, script, signed_by_demo
from sayso.demo.local import START_MS
from sayso.demo.stage import SECRETS
from sayso.runtime.commands import Caller
from sayso.runtime.ports import RawRequest
from sayso.sources import sign
from sayso.storage.memory import MemoryStore
from sayso.storage.postgres import PostgresStore
from sayso.storage.store import PutOutcome, Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel
from sayso.testing.world import World

ALICE, BOB = (Caller(Principal.parse(f"user:{who}"), "api token") for who in ("alice", "bob"))
ACTIONS = 24


@dataclass
class Life:
    """One seed's story: a store, a clock and a world that outlive the processes."""

    chance: random.Random
    store: Store
    clock: VirtualClock
    world: World = field(default_factory=World)
    ids: CountingIds = field(default_factory=CountingIds)
    session: str = ""
    acknowledged: list[int] = field(default_factory=list)
    crashes: int = 0

    async def start(self) -> None:
        agent = concierge(self.world, model=ScriptedModel(script), scheme=signed_by_demo)
        self.app = App(agent, store=self.store, clock=self.clock, ids=self.ids)
        await self.app.worker.register()
        self.work = asyncio.create_task(self.app.worker.run())

    async def crash(self) -> None:
        """The process ends where it stands; what it had sent may have been done."""
        self.crashes += 1
        self.work.cancel()
        with suppress(asyncio.CancelledError):
            await self.work
        await self.start()

    async def some_steps(self) -> None:
        for _ in range(self.chance.randrange(0, 40)):
            await self.step()

    async def step(self) -> None:
        """Let the others go on: by a step where nothing is waited for, as long as a look at the store takes."""
        await asyncio.sleep(0)
        await self.store.bound("")

    # what people and the outside do

    async def say(self) -> None:
        text = self.chance.choice(
            ("Book Friday at seven for four and tell the group", "Book Saturday at eight for two", "Hello", "yes", "no")
        )
        seen = (await self.app.commands.history(ALICE, self.session)).token
        as_of = seen if self.chance.random() < 0.7 else None
        put = await self.app.commands.post(ALICE, self.session, text, as_of=as_of)
        self.acknowledged.append(put.n or 0)

    async def hook(self) -> None:
        kind = self.chance.choice(("cancelled", "offer", "notice"))
        event = {
            "type": kind,
            "reservation": f"R{self.chance.randrange(1, 5)}",
            "text": f"{self.chance.choice(('20:30', '21:00'))} is free",
        }
        event_id = f"evt_{self.chance.randrange(1, 7)}"
        body = json.dumps(event).encode()
        headers = sign(SECRETS["restaurant"], webhook_id=event_id, timestamp_s=self.clock.now_ms() // 1000, body=body)
        pairs = tuple((name.encode(), value.encode()) for name, value in headers.items())
        receipt = await self.app.admission.receive("restaurant", RawRequest("POST", "/", pairs, body))
        assert receipt.status == 202
        assert receipt.put is not None
        if receipt.put.outcome is PutOutcome.STORED:
            self.acknowledged.append(receipt.put.n or 0)

    async def answer(self) -> None:
        standings = await self.store.standings(self.session)
        if not standings:
            return
        standing: Standing = self.chance.choice(standings)
        by = self.chance.choice((ALICE, ALICE, BOB))
        answer = Answer(standing.consent.id, standing.consent.digest, self.chance.random() < 0.8)
        given = asyncio.create_task(self.app.commands.answer(by, self.session, answer))
        await self.some_steps()
        self.clock.advance(0)
        if given.done():
            with suppress(NotFound, AnswerRefused):
                put, _ = given.result()
                self.acknowledged.append(put.n or 0)
        else:
            given.cancel()
            with suppress(asyncio.CancelledError, NotFound, AnswerRefused):
                await given

    async def time_passes(self) -> None:
        self.clock.advance(self.chance.choice((1_000, 60_000, 4 * 60_000, 11 * 60_000)))

    async def restaurant(self) -> None:
        what = self.chance.choice(("full", "free", "hold", "release"))
        time = self.chance.choice(("20:30", "21:00"))
        match what:
            case "full":
                self.world.restaurant.full("Friday", time)
            case "free":
                self.world.restaurant.free("Friday", time)
            case "hold":
                self.chance.choice((self.world.restaurant, self.world.group)).hold()
            case "release":
                self.release()

    def release(self) -> None:
        self.world.restaurant.release()
        self.world.group.release()

    async def play(self) -> None:
        await self.start()
        self.session = (await self.app.commands.open_session(ALICE)).id
        acts: list[Callable[[], object]] = [self.say, self.say, self.hook, self.hook, self.answer, self.answer]
        acts += [self.time_passes, self.restaurant, self.crash]
        for _ in range(ACTIONS):
            await self.chance.choice(acts)()  # type: ignore[misc]  # each is one of the methods above
            await self.some_steps()
        self.release()
        await self.rest()
        self.work.cancel()
        with suppress(asyncio.CancelledError):
            await self.work

    async def rest(self) -> None:
        """Let everything come to an end; back-off and time-outs pass on the clock."""
        for _ in range(3_000):
            await self.step()
            if self.app.worker.at_rest and not await self.store.inbox(self.session, after=0, limit=1):
                return
            self.clock.advance(500)
        raise AssertionError("the session does not come to rest")


@pytest.mark.rule("A4", "A7", "A8", "B1", "B3", "B7", "B8", "B10", "D1", "D2", "D5", "K13", "K15", "K16", "C1")
@pytest.mark.parametrize("seed", range(60))
async def test_whatever_the_order_and_whenever_it_dies(seed: int) -> None:
    clock = VirtualClock(START_MS)
    await holds(Life(random.Random(seed), MemoryStore(clock=clock.now_ms), clock))


@pytest.mark.rule("A8", "D5", "K13")
@pytest.mark.parametrize("seed", range(6))
async def test_whatever_the_order_and_whenever_it_dies_on_postgresql(seed: int, schema: str) -> None:
    """A few seeds must do, since each step waits for a server; it has its part in the order, so that a seed says
    who does what and not what comes of it."""
    clock = VirtualClock(START_MS)
    store = await PostgresStore.open(schema, clock=clock.now_ms, exclusive=True)
    try:
        await holds(Life(random.Random(seed), store, clock))
    finally:
        await store.close()


async def holds(life: Life) -> None:
    """Live a life, and check at its end all that must hold."""
    await life.play()

    rows = await life.store.rows(life.session)
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert len({row.commit_key for row in rows}) == len(rows)
    await every_acknowledged_input_was_taken_once(life)
    every_turn_ended_and_every_call_has_one_result(rows)
    await nothing_is_left_half_done(life)
    no_effect_without_say_so(rows)
    await a_consent_is_used_once_and_only_by_alices_yes(life, rows)
    no_keyed_effect_twice(life, rows)


async def every_acknowledged_input_was_taken_once(life: Life) -> None:
    inbox = {entry.n: entry for entry in await life.store.inbox_record(life.session)}
    assert {entry.state for entry in inbox.values()} <= {"taken"}
    assert set(life.acknowledged) <= set(inbox)


def every_turn_ended_and_every_call_has_one_result(rows: list[Row]) -> None:
    started = [row.turn for row in rows if isinstance(row.body, TurnStartBody)]
    ended = [row.turn for row in rows if isinstance(row.body, TurnEndBody)]
    assert started == ended  # one at a time, in order
    called = [c.call for row in rows if isinstance(row.body, ModelCalledBody | TurnStepsBody) for c in row.body.calls]
    settled = [row.body.call for row in rows if isinstance(row.body, ToolResultBody)]
    assert Counter(called) == Counter(settled)


async def nothing_is_left_half_done(life: Life) -> None:
    open_states = (OperationState.INTENDED, OperationState.SENT)
    assert await life.store.operations(life.session, states=open_states) == []
    owed = await life.store.standings(life.session, states=(ConsentState.APPROVED,), due=True)
    assert [standing.consent.id for standing in owed] == []


def no_effect_without_say_so(rows: list[Row]) -> None:
    origin = {row.turn: row.body.origin for row in rows if isinstance(row.body, TurnStartBody)}
    for row in rows:
        if isinstance(row.body, ToolSentBody):
            assert str(origin[row.turn].principal) == "user:alice"


async def a_consent_is_used_once_and_only_by_alices_yes(life: Life, rows: list[Row]) -> None:
    used = [row.body.consent for row in rows if isinstance(row.body, ConsentUsedBody)]
    assert len(used) == len(set(used))
    approved = {row.body.consent: row.body for row in rows if isinstance(row.body, ConsentApprovedBody)}
    for consent in used:
        standing = await life.store.standing(life.session, consent)
        assert standing is not None
        assert approved[consent].by == "user:alice"
        assert approved[consent].received_at_ms <= standing.consent.expires_at_ms


def no_keyed_effect_twice(life: Life, rows: list[Row]) -> None:
    """What is in the books was done once for each operation that says so, or may have been for an unknown one."""
    outcomes = Counter(
        row.body.outcome for row in rows if isinstance(row.body, ToolResultBody) and row.body.tool == "tell_group"
    )
    sure, unsure = outcomes[Outcome.OK], outcomes[Outcome.UNKNOWN]
    assert sure <= len(life.world.group.texts) <= sure + unsure
    keys = [row.body.key for row in rows if isinstance(row.body, ToolSentBody) and row.body.attempt == 1]
    assert len(keys) == len(set(keys))
