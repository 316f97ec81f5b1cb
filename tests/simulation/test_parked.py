"""A session that ends whoever owns it: what stands in its way is given up after a few attempts, and it goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from sayso.agent import Agent
from sayso.assembly import App
from sayso.core.authority import Decision
from sayso.core.context import MessageRole
from sayso.core.origin import Principal
from sayso.core.rows import Ending, Row, TurnEndBody
from sayso.demo.local import START_MS, OpenStore
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Call, Finished, ModelRequest
from sayso.runtime.rules import RULES, Rules
from sayso.storage.store import DoorKind, Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel, call, calls, say
from tests.simulation.process import process

ALICE = Caller(Principal.parse("user:alice"), "api token")
MOST = Limits().attempts_to_go_on


def script(request: ModelRequest) -> Finished:
    newest = request.messages[-1]
    return calls(call("boom")) if newest.role is MessageRole.USER and newest.text == "boom" else say("All right.")


def decide_but_not_boom(action: Any, *args: Any, **kwargs: Any) -> Decision:
    """An embedder's own rule, which has a fault."""
    if action.tool == "boom":
        raise ZeroDivisionError
    return RULES.decide(action, *args, **kwargs)


class Place:
    """A store and a clock that outlive the processes which run on them."""

    def __init__(self, store: Store, clock: VirtualClock, rules: Rules) -> None:
        self.store, self.clock, self.session = store, clock, ""
        self.model = ScriptedModel(script)
        agent = Agent("fault", self.model, "Do it.")
        self.calls: list[str] = []

        @agent.tool(effect="read")
        async def boom(call: Call) -> str:
            self.calls.append(call.key)
            return "done"

        self.app = partial(App, agent, store=store, clock=clock, ids=CountingIds(), rules=rules)

    async def rows(self) -> list[Row]:
        return await self.store.rows(self.session)

    async def ends(self) -> list[tuple[Ending, str]]:
        return [(row.body.ending, row.body.reason) for row in await self.rows() if isinstance(row.body, TurnEndBody)]

    async def notes(self) -> list[str]:
        return [row.note.text for row in await self.store.door() if row.note.kind is DoorKind.PARKED]


@pytest.fixture
async def place(open_store: OpenStore) -> AsyncIterator[Place]:
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as store:
        yield Place(store, clock, RULES)


@pytest.mark.rule("N18")
async def test_a_turn_whose_owner_always_fails_is_given_up_and_an_operator_is_told(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock(START_MS)
    async with open_store(clock.now_ms) as store:
        place = Place(store, clock, replace(RULES, decide=decide_but_not_boom))
        async with process(place.app()) as app:
            place.session = (await app.commands.open_session(ALICE)).id
            with caplog.at_level(logging.ERROR, logger="sayso.runtime"):
                await app.commands.post(ALICE, place.session, "boom")
                async with asyncio.timeout(30):
                    while not await place.ends():
                        clock.advance(60_000)
                        await asyncio.sleep(0)
            await app.commands.post(ALICE, place.session, "hello")
            await app.worker.rested()

        [(ending, reason), after] = await place.ends()
        assert (ending, after) == (Ending.FAILED, (Ending.DONE, ""))
        assert reason == f"given up after {MOST} attempts to go on, of which nothing was stored"
        assert len([asked for asked in place.model.requests if asked.turn == "T1"]) == MOST + 1
        assert await place.notes() == [f"T1 was {reason}"]
        assert [record.message for record in caplog.records].count("session parked") == 1


@pytest.mark.rule("N18")
async def test_a_turn_that_ends_its_process_again_and_again_is_given_up(place: Place) -> None:
    """As one would that takes all memory: each process ends while the model answers."""
    place.model.hold = asyncio.Event()
    async with process(place.app()) as app:
        place.session = (await app.commands.open_session(ALICE)).id
        await app.commands.post(ALICE, place.session, "hello")
        await place.model.until_asked()
    for ended in range(2, MOST + 2):
        async with process(place.app()):
            await place.model.until_asked(ended)
    place.model.hold = None
    async with process(place.app()) as app:
        await app.worker.rested()
        assert [ending for ending, _ in await place.ends()] == [Ending.FAILED]
        await app.commands.post(ALICE, place.session, "still there?")
        await app.worker.rested()

    assert [ending for ending, _ in await place.ends()] == [Ending.FAILED, Ending.DONE]
    assert len(await place.notes()) == 1
    assert len(place.model.requests) == MOST + 2


@pytest.mark.rule("N18", "K9")
async def test_processes_that_end_in_good_order_count_for_nothing(place: Place) -> None:
    place.model.hold = asyncio.Event()
    for ended in range(1, MOST + 3):
        app = place.app(limits=Limits(drain_ms=1))
        async with app.running():
            if not place.session:
                place.session = (await app.commands.open_session(ALICE)).id
                await app.commands.post(ALICE, place.session, "hello")
            await place.model.until_asked(ended)
    place.model.hold = None
    async with process(place.app()) as last:
        await last.worker.rested()

    assert await place.ends() == [(Ending.DONE, "")]
    assert await place.notes() == []
