"""A disk that is full, read-only or somebody else's, under a real server; and what a loss of power leaves of a file."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sayso.adapters.system import SystemClock, SystemIds
from sayso.assembly import App, create_token
from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.origin import Principal
from sayso.core.rows import Row, ToolSentBody, ToolUnknownBody
from sayso.core.session import Token
from sayso.demo.concierge import concierge, signed_by_demo
from sayso.demo.http_stage import HttpStage, demo_environ
from sayso.demo.scenarios import BOOK, offer
from sayso.demo.stage import SECRETS
from sayso.runtime.identity import Identity
from sayso.server.app import Server
from sayso.sources import sign
from sayso.storage.shape import CommitPhase, OnCommit
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Entry, Put, PutOutcome, Store, WriteOutcome
from sayso.testing.server_process import ServerBroken, ServerProcess
from sayso.testing.stores import StoreAround
from sayso.testing.world_server import WorldClient, start_world

AGENT = "sayso.demo.concierge:agent"
#: how long anything may take, seconds
PATIENCE_S = 30


@pytest.fixture(scope="module")
def world_url() -> Iterator[str]:
    with start_world() as url:
        yield url


@pytest.fixture
async def world(world_url: str) -> AsyncIterator[WorldClient]:
    """The outside of every test here: what one of them books, the next one finds."""
    async with WorldClient(world_url) as client:
        yield client


@asynccontextmanager
async def served(store: Store, world: WorldClient) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve the demo's agent on this store, in this process, and yield a client of it."""
    app = App(concierge(world, scheme=signed_by_demo), store=store)
    async with app.running():
        server = Server(app.asgi, port=0)
        serving = asyncio.create_task(server.serve())
        await asyncio.to_thread(server.listening.wait, PATIENCE_S)
        host, port = server.address
        async with httpx2.AsyncClient(base_url=f"http://{host}:{port}", timeout=PATIENCE_S) as http:
            yield http
        server.stop()
        await serving


@asynccontextmanager
async def opened(
    database: Path, *, on_commit: OnCommit | None = None, bytes_max: int | None = None
) -> AsyncIterator[SqliteStore]:
    """Open a store as who runs sessions does."""
    clock = SystemClock().now_ms
    store = await SqliteStore.open(database, clock=clock, exclusive=True, on_commit=on_commit, bytes_max=bytes_max)
    try:
        yield store
    finally:
        await store.close()


async def hook(http: httpx2.AsyncClient, event: dict[str, Any], id: str) -> httpx2.Response:
    """Send a hook as the restaurant does."""
    body = json.dumps(event).encode()
    headers = sign(SECRETS["restaurant"], webhook_id=id, timestamp_s=int(time.time()), body=body)
    return await http.post("/v1/hooks/restaurant", content=body, headers=headers)


async def newest_table(world: WorldClient) -> str:
    """Return the reservation that was made last."""
    tables: dict[str, Any] = (await world.books())["tables"]
    return max(tables, key=lambda name: int(name[1:]))


async def goes_on(stage: HttpStage) -> None:
    """The story after the restaurant's call: one question, her yes, one table at 20:30."""
    [question] = await stage.questions()
    assert await stage.answer("alice", question, yes=True) == [200]
    [table] = [table for table in (await stage.books())["tables"].values() if table["time"] == "20:30"]
    assert table == {"day": "Friday", "time": "20:30", "party": 4}


# --- full ----------------------------------------------------------------------


@pytest.mark.rule("A7", "N20", "W13")
async def test_a_full_file_takes_nothing_and_says_come_later(tmp_path: Path, world: WorldClient) -> None:
    database = tmp_path / "sayso.db"
    async with opened(database, bytes_max=1024 * 1024) as store:
        token = await Identity(store, SystemIds()).mint(Principal.parse("user:alice"), label="test")
        async with served(store, world) as http:
            stage = HttpStage(http, {"alice": token}, world)
            await stage.open()
            await stage.say("alice", BOOK)
            call = {**offer("20:30", reservation=await newest_table(world)), "padding": "x" * 100_000}
            await fill_up(http)

            before = await everything(store, stage.session)
            refused = [await hook(http, call, "evt_17") for _ in range(3)]
            assert [(answer.status_code, answer.content) for answer in refused] == [(503, b"")] * 3
            assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
            assert await everything(store, stage.session) == before

    async with opened(database) as store, served(store, world) as http:
        there = HttpStage(http, {"alice": token}, world)
        there.session = stage.session
        await world.restaurant.take_away(str(call["reservation"]))
        assert (await hook(http, call, "evt_17")).status_code == 202
        await there.rest()
        await goes_on(there)
        await world.restaurant.take_away(await newest_table(world))


async def fill_up(http: httpx2.AsyncClient) -> None:
    """Send hooks about what nobody made, until not even a small one is taken."""
    for number in range(1_000):
        about_nothing = {"type": "notice", "reservation": "none", "text": "x" * (50_000 if number < 50 else 4_000)}
        answer = await hook(http, about_nothing, f"evt_none_{number}")
        if answer.status_code == 503 and number >= 50:
            return
        assert answer.status_code in (202, 503)
    raise AssertionError("it does not fill up")


async def everything(store: SqliteStore, session: str) -> list[object]:
    """Return all that a store holds of a session, and at the door."""
    return [
        await store.session(session),
        await store.rows(session),
        await store.inbox_record(session),
        await store.side_tables(session),
        await store.door(limit=10_000),
    ]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Yield a folder on a disk of 8 MiB; only who may mount has one."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk to fill: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """Leave no room on a disk while the block runs."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    try:
        yield
    finally:
        ballast.unlink()


@dataclass
class Town:
    """A real server on a small disk."""

    database: Path
    disk: Path
    server: ServerProcess
    http: httpx2.AsyncClient
    stage: HttpStage

    async def rows(self) -> list[Row]:
        """The rows that are stored now."""
        store = await SqliteStore.open(self.database, clock=SystemClock().now_ms, exclusive=False)
        rows = await store.rows(self.stage.session)
        await store.close()
        return rows


@pytest.fixture
async def town(tmp_path: Path, world_url: str, world: WorldClient) -> AsyncIterator[Town]:
    with small_disk(tmp_path / "disk") as disk:
        database = disk / "sayso.db"
        token = await create_token(str(database), "user:alice", label="test", days=1)
        with ServerProcess(AGENT, database=database, environ=demo_environ(world_url)) as server:
            async with httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
                stage = HttpStage(http, {"alice": token}, world)
                await stage.open()
                await stage.say("alice", BOOK)
                yield Town(database, disk, server, http, stage)
            server.stop()


@pytest.mark.rule("A7", "N20", "W13")
async def test_a_full_disk_is_told_at_the_door_and_forgotten_when_there_is_room(town: Town, world: WorldClient) -> None:
    """The same process goes on: nobody has to start it again."""
    call = {**offer("20:30", reservation=await newest_table(world))}
    rows = await town.rows()
    with filled(town.disk):
        refused = await hook(town.http, call, "evt_17")
        assert (refused.status_code, refused.content) == (503, b"")
        assert "retry-after" in refused.headers
        assert (await town.http.get("/readyz")).status_code == 503
        with pytest.raises(httpx2.HTTPStatusError, match="503"):
            await town.stage.post("alice", "Are you there?")
        assert await town.rows() == rows

    assert (await town.http.get("/readyz")).status_code == 200
    await world.restaurant.take_away(str(call["reservation"]))
    assert (await hook(town.http, call, "evt_17")).status_code == 202
    await town.stage.rest()
    await goes_on(town.stage)
    await world.restaurant.take_away(await newest_table(world))
    assert "Traceback" not in town.server.said()


@pytest.mark.rule("D5", "F52", "N20")
async def test_an_answer_that_finds_the_disk_full_is_stored_when_there_is_room(town: Town, world: WorldClient) -> None:
    """The restaurant has booked, and says so while nothing can be stored: it is neither lost nor asked for again."""
    await world.restaurant.hold()
    await town.stage.post("alice", "Book Saturday at eight for two")
    await world.restaurant.until_held()
    with filled(town.disk):
        before = await town.rows()
        await world.restaurant.release()
        async with asyncio.timeout(PATIENCE_S):
            while not await accepted(town, len(before) + 1):  # noqa: ASYNC110 - what a reader sees
                await asyncio.sleep(0.02)
        assert await town.rows() == before
    await town.stage.rest()

    rows = await town.rows()
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert not any(isinstance(row.body, ToolUnknownBody) for row in rows)
    assert all(row.body.attempt == 1 for row in rows if isinstance(row.body, ToolSentBody))
    assert rows[-1].kind == "turn.end"


async def accepted(town: Town, seq: int) -> bool:
    """Return whether a row of this number is in view, stored or not."""
    answer = await town.http.get(
        f"/v1/sessions/{town.stage.session}/history", headers={"Authorization": f"Bearer {town.stage.tokens['alice']}"}
    )
    return bool(answer.raise_for_status().json()["rows"][-1]["position"].endswith(f".{seq}"))


# --- read-only, and somebody else's ----------------------------------------------


async def refused(database: Path, world_url: str) -> str:
    """Return what a server says that does not start on this file: one line."""
    server = ServerProcess(AGENT, database=database, environ=demo_environ(world_url))
    server.log = database.parent.parent / "server.log"
    with pytest.raises(ServerBroken):
        await asyncio.to_thread(server.start)
    said = server.said()
    assert "Traceback" not in said
    [line] = said.splitlines()
    return line


@pytest.fixture
async def database(tmp_path: Path) -> Path:
    (tmp_path / "there").mkdir()
    found = tmp_path / "there" / "sayso.db"
    await create_token(str(found), "user:alice", label="test", days=1)
    return found


@pytest.mark.rule("N20")
async def test_a_read_only_file_is_refused_in_one_line(database: Path, world_url: str) -> None:
    with database.open("r+b") as file:
        file.seek(18)  # the file format's write version: past 2, SQLite may only read, whoever asks
        file.write(b"\x03")

    assert await refused(database, world_url) == "Error: the store can't be used: its file or folder is read-only"


@pytest.mark.rule("N20")
async def test_a_read_only_folder_is_refused_in_one_line(database: Path, world_url: str, tmp_path: Path) -> None:
    with read_only(database.parent):
        said = await refused(database, world_url)

    assert said.startswith(f"Error: {database}.lock can't be opened: ")


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Let nobody write there meanwhile. Root may write whatever the mode says, but not on a read-only mount."""
    if os.geteuid() != 0:
        mode = folder.stat().st_mode
        for lock in folder.glob("*.lock"):
            lock.unlink()
        folder.chmod(0o555)
        yield
        folder.chmod(mode)
        return
    bound = subprocess.run(["mount", "--bind", folder, folder], capture_output=True)
    if bound.returncode != 0:
        pytest.skip(f"root without the right to mount: {bound.stderr.decode().strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", folder], check=True)
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.rule("N20")
async def test_a_file_that_another_sayso_serves_is_refused_by_its_pid(database: Path, world_url: str) -> None:
    async with opened(database):
        said = await refused(database, world_url)

    assert said == f"Error: {database} is in use by another sayso process (pid {os.getpid()})"


@pytest.mark.rule("N20")
async def test_a_file_that_another_program_writes_is_refused_in_one_line(database: Path, world_url: str) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("begin immediate")
        said = await refused(database, world_url)

    assert said == "Error: the store can't be used: another process holds its lock"


# --- a loss of power -------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The file and its write-ahead log as they were around a COMMIT, and what had been acknowledged by then."""

    phase: CommitPhase
    bodies: tuple[str, ...]
    database: Path
    rows: int
    inputs: int


class Acknowledging(StoreAround):
    """A store that knows what its callers were told."""

    rows = inputs = 0

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        """See `Store`."""
        outcome = await self.inside.write(token, rows, blobs=blobs)
        self.rows = rows[-1].seq
        return outcome

    async def put(self, entry: Entry) -> Put:
        """See `Store`."""
        put = await self.inside.put(entry)
        self.inputs += put.outcome is PutOutcome.STORED
        return put


@dataclass(frozen=True)
class Held:
    """What a file holds."""

    rows: int
    inputs: int
    tables: dict[str, Any]


async def held(database: Path, session: str) -> Held:
    """Return what a file holds after a start on it; its rows have no gap, whatever it is."""
    async with opened(database) as store:
        rows, inputs = await store.rows(session), await store.inbox_record(session)
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
        record = await store.session(session)
        assert record is None or record.head == len(rows)
        return Held(len(rows), len(inputs), await store.side_tables(session))


@pytest.mark.rule("A7", "K6", "N20")
async def test_what_was_acknowledged_outlives_a_loss_of_power_at_any_commit(tmp_path: Path, world: WorldClient) -> None:
    """`synchronous=FULL`: at each COMMIT the file and its log hold all that anybody was told."""
    cuts, told, session = await played_with_cuts(tmp_path, world)

    found = [(cut, await held(cut.database, session)) for cut in cuts]

    assert len(found) >= 30
    for cut, now in found:
        assert now.rows >= cut.rows
        assert now.inputs >= cut.inputs
    for (before, was), (after, now) in pairwise(found):
        if after.phase is CommitPhase.BEFORE:
            assert now == was  # nothing is stored between two commits
        elif {"write", "put"} & set(before.bodies):
            assert (now.rows, now.inputs) > (was.rows, was.inputs)  # and each commit stores all that is in it
    assert (found[-1][1].rows, found[-1][1].inputs) == (told.rows, told.inputs)


@pytest.mark.rule("K6", "N20")
async def test_a_log_that_power_cut_short_loses_whole_commits_from_its_end(tmp_path: Path, world: WorldClient) -> None:
    """What was being written when the power went was not acknowledged; what stood before it stays whole."""
    cuts, _, session = await played_with_cuts(tmp_path, world)
    last = cuts[-1].database
    wal = last.with_name("sayso.db-wal").read_bytes()
    whole = {(now.rows, now.inputs) for now in [await held(cut.database, session) for cut in cuts[:-1]]}
    shorter = tmp_path / "shorter"
    shorter.mkdir()
    lengths = range(0, len(wal), max(1, len(wal) // 40))

    seen = []
    for length in lengths:
        shutil.copyfile(last, shorter / "sayso.db")
        (shorter / "sayso.db-wal").write_bytes(wal[:length])
        now = await held(shorter / "sayso.db", session)
        seen.append((now.rows, now.inputs))
        (shorter / "sayso.db-shm").unlink(missing_ok=True)

    assert seen == sorted(seen)
    assert set(seen) <= whole | {(0, 0)}
    assert len(set(seen)) > 10


async def played_with_cuts(tmp_path: Path, world: WorldClient) -> tuple[list[Cut], Acknowledging, str]:
    """Play the offer, and copy the file and its log at each COMMIT, as they are then."""
    database, cuts = tmp_path / "sayso.db", list[Cut]()
    around: list[Acknowledging] = []

    def cut(phase: CommitPhase, bodies: tuple[str, ...]) -> None:
        aside = tmp_path / f"cut-{len(cuts)}"
        aside.mkdir()
        for name in ("sayso.db", "sayso.db-wal"):
            if (tmp_path / name).exists():
                shutil.copyfile(tmp_path / name, aside / name)
        told = (around[0].rows, around[0].inputs) if around else (0, 0)
        cuts.append(Cut(phase, bodies, aside / "sayso.db", *told))

    async with opened(database, on_commit=cut) as store:
        told = Acknowledging(store)
        around.append(told)
        token = await Identity(store, SystemIds()).mint(Principal.parse("user:alice"), label="test")
        async with served(told.store, world) as http:
            stage = HttpStage(http, {"alice": token}, world)
            await stage.open()
            await stage.say("alice", BOOK)
            assert await stage.hook(offer("20:30", reservation=await newest_table(world)), id="evt_17") == 202
            await goes_on(stage)
        await world.restaurant.take_away(await newest_table(world))
        return list(cuts), told, stage.session
