"""A real server, a real store, the outside in a process of its own, and `kill -9` in the awkward moments."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from sayso.assembly import create_token, read_log
from sayso.demo.http_stage import HttpStage, demo_environ
from sayso.demo.scenarios import offer
from sayso.testing.server_process import ServerProcess
from sayso.testing.world_server import WorldClient, start_world

BOOK = "Book Friday at seven for four and tell the group"


@dataclass
class Town:
    """Everything that goes on while servers come and go."""

    database: str
    server: ServerProcess
    world: WorldClient
    tokens: dict[str, str]
    session: str = ""

    @asynccontextmanager
    async def stage(self) -> AsyncIterator[HttpStage]:
        """A client of the server that runs now."""
        async with httpx2.AsyncClient(base_url=self.server.url, timeout=30) as http:
            stage = HttpStage(http, self.tokens, self.world)
            stage.session = self.session
            yield stage

    async def log(self) -> list[str]:
        """The session's numbered list, a line each: kind and text."""
        lines = await read_log(self.database, self.session)
        return [" ".join(line.split()[2:]) for line in lines]


@pytest.fixture
async def town(database: str, tmp_path: Path) -> AsyncIterator[Town]:
    tokens = {who: await create_token(database, f"user:{who}", label="test", days=1) for who in ("alice", "bob")}
    with start_world() as world_url:
        environ, log = demo_environ(world_url), tmp_path / "said.log"
        server = ServerProcess("sayso.demo.concierge:agent", database=database, log=log, environ=environ)
        with server:
            async with WorldClient(world_url) as world:
                found = Town(database, server, world, tokens)
                async with found.stage() as stage:
                    await stage.open()
                    found.session = stage.session
                    await stage.say("alice", BOOK)
                yield found


@pytest.mark.rule("A8", "D4", "E1")
async def test_a_question_outlives_the_process_that_asked_it(town: Town) -> None:
    async with town.stage() as stage:
        await stage.hook(offer("20:30"), id="evt_17")
        [question] = await stage.questions()

    town.server.kill()
    town.server.start()

    async with town.stage() as stage:
        assert await stage.questions() == [question]
        assert await stage.answer("alice", question, yes=True) == [200]
        books = await stage.books()
    assert books["tables"] == {"R2": {"day": "Friday", "time": "20:30", "party": 4}}
    assert len(books["texts"]) == 2
    assert [line for line in await town.log() if line.startswith("turn.ask")] != []


@pytest.mark.rule("D5", "W10")
async def test_a_repeat_after_a_crash_is_still_a_repeat(town: Town) -> None:
    async with town.stage() as stage:
        await stage.hook(offer("20:30"), id="evt_17")

    town.server.kill()
    town.server.start()

    async with town.stage() as stage:
        assert await stage.hook(offer("20:30"), id="evt_17") == 202
    log = await town.log()
    assert len([line for line in log if line.startswith("turn.ask")]) == 1
    assert log[-1] == "input.dropped evt_17 again from restaurant; acknowledged, not acted on"


@pytest.mark.rule("D5", "D1", "D2")
async def test_a_booking_sent_and_not_answered_is_looked_up_not_made_again(town: Town) -> None:
    """The restaurant books and its answer is never heard: after the restart it is asked, by the key."""
    await town.world.restaurant.hold()
    async with town.stage() as stage:
        await stage.post("alice", "Book Saturday at eight for two")
        await town.world.restaurant.until_held()

    town.server.kill()
    await town.world.restaurant.release()
    town.server.start()

    async with town.stage() as stage:
        await stage.rest()
        books = await stage.books()
    assert sorted(books["tables"]) == ["R1", "R2"]
    log = await town.log()
    story = [line.split(",")[0] for line in log if line.startswith("tool.")][-3:]
    assert story == ["tool.sent reserve_table", "tool.unknown reserve_table", "tool.result reserve_table: ok"]
    assert log[-1] == "turn.end T2 done"


@pytest.mark.rule("D5", "D2", "F35")
async def test_a_keyed_message_sent_and_not_answered_is_sent_again_under_the_same_key(town: Town) -> None:
    """The group has no way to look up, so the same key goes out again; the group has one message of it."""
    await town.world.group.hold()
    async with town.stage() as stage:
        await stage.hook(offer("20:30"), id="evt_17")
        [question] = await stage.questions()
        await stage.post_answer("alice", question, yes=True)
        await town.world.group.until_held()

    town.server.kill()
    await town.world.group.release()
    town.server.start()

    async with town.stage() as stage:
        await stage.rest()
        books = await stage.books()
    assert len(books["texts"]) == 2
    assert sorted(books["tables"]) == ["R2"]
    log = await town.log()
    assert "tool.sent tell_group, operation T3.0.2, attempt 2, same key" in log
    assert log[-1] == "turn.end T4 done"
    assert "group: asked for M2 again under its key; nothing new" in await town.world.lines()


@pytest.mark.rule("K9")
async def test_a_server_that_is_told_to_stop_ends_at_once_and_well(town: Town) -> None:
    assert town.server.stop() == 0
    town.server.start()
    async with town.stage() as stage:
        await stage.say("alice", "Book Sunday at seven for two")
        assert sorted((await stage.books())["tables"]) == ["R1", "R2"]
    assert "Traceback" not in town.server.said()


@pytest.mark.rule("N20")
async def test_a_second_server_on_the_same_store_is_refused_in_one_line(town: Town, tmp_path: Path) -> None:
    second = ServerProcess(
        "sayso.demo.concierge:agent",
        database=town.database,
        log=tmp_path / "second.log",
        environ=demo_environ("http://127.0.0.1:1"),
    )
    with pytest.raises(Exception, match="is in use by another sayso process"):
        second.start()
