"""Rows that were published and that the store never got, because the process was killed: who was shown them comes back
by its cursor, and shows what is stored and nothing else."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import psycopg
import pytest

from sayso.assembly import create_token
from sayso.core.session import Position
from sayso.demo.http_stage import HttpStage, demo_environ
from sayso.testing.server_process import ServerProcess
from sayso.testing.view import View, frames
from sayso.testing.world_server import WorldClient, start_world


@contextmanager
def nothing_can_be_written(database: str) -> Iterator[None]:
    """Keep every write of a session waiting; those that still wait at the end come to nothing."""
    if database.startswith("postgresql:"):
        with psycopg.connect(database) as other:
            other.execute("select from session for update")
            yield
            other.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity "
                "where pg_backend_pid() = any(pg_blocking_pids(pid))"
            )
            other.rollback()
    else:
        connection = sqlite3.connect(database, isolation_level=None)
        connection.execute("begin immediate")
        yield
        connection.execute("rollback")
        connection.close()


class Tab:
    """A page in a browser: it follows, loses its connection, and comes back by its cursor."""

    def __init__(self) -> None:
        self.view = View()
        self._reading: asyncio.Task[None] | None = None

    def connect(self, url: str, session: str, token: str) -> None:
        """Follow from where it is."""
        self._reading = asyncio.create_task(self._read(f"{url}/v1/sessions/{session}/stream", token))

    async def _read(self, url: str, token: str) -> None:
        headers = {"Authorization": f"Bearer {token}"}
        if self.view.cursor is not None:
            headers["Last-Event-ID"] = self.view.cursor
        with suppress(httpx2.HTTPError):
            async with httpx2.AsyncClient(timeout=60) as http, http.stream("GET", url, headers=headers) as answer:
                async for frame in frames(answer.aiter_raw()):
                    self.view.apply(frame)
        self.view.cut()

    async def lost(self) -> None:
        """Return when the connection is gone."""
        assert self._reading is not None
        await self._reading

    async def close(self) -> None:
        """Go away."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self.view.cut()

    async def until(self, said: Any) -> None:
        """Return once `said` is so of what it shows."""
        async with asyncio.timeout(60):
            while not said(self.view):
                assert self._reading is not None
                if self._reading.done():
                    self._reading.result()
                await asyncio.sleep(0.01)


@pytest.fixture
async def tabs() -> AsyncIterator[list[Tab]]:
    found = [Tab(), Tab(), Tab()]
    yield found
    for tab in found:
        await tab.close()


@pytest.mark.rule("K1", "X26", "X25")
async def test_what_the_store_never_got_goes_away_and_what_took_its_place_is_shown(
    database: str, tmp_path: Path, tabs: list[Tab]
) -> None:
    """A tab that was shown it, one that went away before, and one that lost its connection with the first of it."""
    token = await create_token(database, "user:alice", label="test", days=1)
    alice = {"Authorization": f"Bearer {token}"}
    with start_world() as world_url:
        environ = demo_environ(world_url)
        server = ServerProcess("sayso.demo.concierge:agent", database=database, environ=environ, log=tmp_path / "log")
        with server:
            async with WorldClient(world_url) as world:
                async with httpx2.AsyncClient(base_url=server.url, timeout=30) as http:
                    stage = HttpStage(http, {"alice": token}, world)
                    await stage.open()
                    for tab in tabs:
                        tab.connect(server.url, stage.session, token)
                    await world.restaurant.hold()
                    await stage.post("alice", "Book Friday at seven for four")
                    await world.restaurant.until_held()
                    for tab in tabs:
                        await tab.until(lambda view: view.rows and view.rows[-1]["kind"] == "tool.sent")
                    await tabs[1].close()
                    stored = len(tabs[0].view.rows)
                    with nothing_can_be_written(database):
                        await world.restaurant.release()
                        for tab in (tabs[0], tabs[2]):
                            await tab.until(lambda view: len(view.rows) > stored)
                        shown = {row["position"] for row in tabs[0].view.rows[stored:]}
                        server.kill()
                    await tabs[0].lost()
                    await tabs[2].lost()
                server.start()
                async with httpx2.AsyncClient(base_url=server.url, timeout=30) as http:
                    after = HttpStage(http, {"alice": token}, world)
                    after.session = stage.session
                    for tab in tabs:
                        tab.connect(server.url, stage.session, token)
                    await after.rest()
                    page = (await http.get(f"/v1/sessions/{stage.session}/history", headers=alice)).json()
                    for tab in tabs:
                        await tab.until(lambda view: view.cursor == page["token"])

    numbers = [Position.parse(row["position"]).seq for row in page["rows"]]
    assert numbers == [*range(1, len(numbers) + 1)]
    assert page["rows"][-1]["kind"] == "turn.end"
    assert shown == {f"1.{stored + 1}"}, "one row was accepted, published and lost"
    in_its_place = Position.parse(page["rows"][stored]["position"])
    assert in_its_place.seq == stored + 1, "and another one has its number"
    assert in_its_place.epoch > 1
    for tab in tabs:
        assert tab.view.rows == page["rows"]
        assert tab.view.text is None
    assert "Traceback" not in server.said()
