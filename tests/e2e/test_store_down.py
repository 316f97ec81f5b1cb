"""The store can't be written for a while, in the middle of a turn, in a real process: nothing acknowledged is
lost, readers are told, and the session goes on by itself."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from sayso.assembly import create_token, read_log
from sayso.demo.http_stage import HttpStage, demo_environ
from sayso.testing.server_process import ServerProcess
from sayso.testing.world_server import WorldClient, start_world
from tests import postgres
from tests.wire import Wire

#: how long the store is away
DOWN_S = 30


async def events(
    http: httpx2.AsyncClient, session: str, token: str, *, until: str, seen: list[tuple[str, str]]
) -> None:
    """Follow a session, noting (event, data), until an event of that kind."""
    headers = {"Authorization": f"Bearer {token}"}
    async with http.stream("GET", f"/v1/sessions/{session}/stream", headers=headers) as answer:
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                seen.append((name, line.removeprefix("data: ")))
                if name == until:
                    return


@dataclass
class MidTurn:
    """A turn whose booking the restaurant has not answered, and a reader who follows it."""

    stage: HttpStage
    world: WorldClient
    http: httpx2.AsyncClient
    #: what the reader was sent: (event, data)
    seen: list[tuple[str, str]]
    following: asyncio.Task[None]

    async def until_told(self) -> None:
        """Return once the reader is told that the store does not follow."""
        async with asyncio.timeout(30):
            while not any(name == "status" for name, _ in self.seen):  # noqa: ASYNC110 - what a reader sees
                await asyncio.sleep(0.05)


@asynccontextmanager
async def mid_turn(server: ServerProcess, world_url: str, token: str, *, until: str) -> AsyncIterator[MidTurn]:
    """Alice books, and the restaurant holds its answer; the reader follows to an event of the kind `until`."""
    async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http, WorldClient(world_url) as world:
        stage = HttpStage(http, {"alice": token}, world)
        await stage.open()
        seen: list[tuple[str, str]] = []
        following = asyncio.create_task(events(http, stage.session, token, until=until, seen=seen))
        await world.restaurant.hold()
        await stage.post("alice", "Book Friday at seven for four")
        await world.restaurant.until_held()
        yield MidTurn(stage, world, http, seen, following)


@contextmanager
def locked(database: Path) -> Iterator[None]:
    """Another process writes to the file, and does not come to an end."""
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("begin immediate")
        yield
        other.execute("rollback")


@dataclass
class Failing:
    """A store, and how it goes away and comes back."""

    database: Path | str
    down: Callable[[], AbstractAsyncContextManager[None]]


@pytest.fixture(params=["a locked file", "a database that is not reached"])
async def failing(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Failing]:
    if request.param == "a locked file":
        file = tmp_path / "sayso.db"

        @asynccontextmanager
        async def held() -> AsyncIterator[None]:
            with locked(file):
                yield

        yield Failing(file, held)
        return

    with postgres.schema() as url:
        wire = Wire(url)
        await wire.up()

        @asynccontextmanager
        async def unreached() -> AsyncIterator[None]:
            await wire.down()
            yield
            await wire.up()

        yield Failing(wire.url, unreached)
        await wire.down()


@pytest.mark.rule("H34", "K6")
async def test_a_store_that_is_down_for_thirty_seconds_in_mid_turn(failing: Failing, tmp_path: Path) -> None:
    """Readers are told; what was acknowledged before is all there afterwards; the turn goes on by itself."""
    database = str(failing.database)
    token = await create_token(database, "user:alice", label="test", days=1)
    alices = {"Authorization": f"Bearer {token}"}
    with start_world() as world_url:
        environ = demo_environ(world_url)
        target, log = "sayso.demo.concierge:agent", tmp_path / "log"
        server = ServerProcess(target, database=database, log=log, environ=environ)
        await asyncio.to_thread(server.start)
        async with mid_turn(server, world_url, token, until="turn.end") as turn:
            await turn.stage.post("alice", "And a word to the group, please")
            async with failing.down():
                await turn.world.restaurant.release()
                refused = [
                    await turn.http.post(
                        "/v1/hooks/restaurant", content=b"{}", headers={"webhook-id": "x", "webhook-timestamp": "1"}
                    ),
                    await turn.http.post(
                        f"/v1/sessions/{turn.stage.session}/inputs",
                        json={"text": "Is anybody there?"},
                        headers=alices,
                    ),
                ]
                await turn.until_told()
                ended, _ = await asyncio.wait((turn.following,), timeout=DOWN_S)
            async with asyncio.timeout(90):
                await turn.following
            await turn.stage.rest()
            books = await turn.stage.books()
            history = await turn.http.get(f"/v1/sessions/{turn.stage.session}/history", headers=alices)
        await asyncio.to_thread(server.stop)

    assert not ended, "it can't end before the store is back"
    # the note of a refused hook can't be stored either, so the sender is told to try again
    assert [answer.status_code for answer in refused] == [503, 503]
    assert all("retry-after" in answer.headers for answer in refused)
    assert sorted(books["tables"]) == ["R1"]
    states = [json.loads(data)["state"] for name, data in turn.seen if name == "status"]
    assert (states[0], states[-1]) == ("retrying", "healthy")
    assert turn.seen[-1][0] == "turn.end"
    said = [row["body"]["parts"][0]["text"] for row in history.json()["rows"] if row["kind"] == "input"]
    assert said == ["Book Friday at seven for four", "And a word to the group, please"]
    assert "Traceback" not in server.said()


@pytest.mark.rule("K9")
async def test_a_process_that_ends_while_the_store_is_locked_loses_no_answer_of_a_tool(tmp_path: Path) -> None:
    """The restaurant said yes, the store could not take it, and the operator stopped the process. At the next start
    the answer is offered to its operation: the restaurant is not asked again, by its key or otherwise."""
    database = tmp_path / "sayso.db"
    token = await create_token(str(database), "user:alice", label="test", days=1)
    with start_world() as world_url:
        environ = demo_environ(world_url) | {"SAYSO_LIMITS__DRAIN_MS": "500"}
        server = ServerProcess("sayso.demo.concierge:agent", database=database, environ=environ)
        server.start()
        async with mid_turn(server, world_url, token, until="farewell") as turn:
            with locked(database):
                await turn.world.restaurant.release()
                await turn.until_told()
                code = await asyncio.to_thread(server.stop)
                rescued = (tmp_path / "sayso.db.rescue").read_text("utf-8")
            await turn.following

        with server:
            async with httpx2.AsyncClient(base_url=server.url, timeout=60) as http, WorldClient(world_url) as world:
                after = HttpStage(http, {"alice": token}, world)
                after.session = turn.stage.session
                await after.rest()
                books, lines = await after.books(), await world.lines()
        assert not (tmp_path / "sayso.db.rescue").exists()

    assert code == 0
    assert "reserve_table" in rescued
    assert sorted(books["tables"]) == ["R1"]
    assert len([line for line in lines if line.startswith("restaurant")]) == 1
    log = "\n".join(await read_log(str(database), turn.stage.session))
    assert "reserve_table: ok" in log
    assert "Traceback" not in server.said()
