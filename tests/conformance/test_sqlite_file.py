"""Does the SQLite store keep its promises when the file, the disk or the process does not keep theirs?"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sayso.core.errors import CommitUnknown, IllegalChange, NotFound, StoreLocked, StoreUnavailable
from sayso.core.rows import ModelSaidBody
from sayso.storage.migrate import Migration, SchemaChanged, SchemaTooNew, pending, released
from sayso.storage.shape import CommitPhase, OnCommit
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import PutOutcome, Released, WriteOutcome
from tests.conformance.given import ALICE, Clock, hook, message, owned, rows, taken

SAID = ModelSaidBody(1, ())


@asynccontextmanager
async def opened(
    folder: Path, *, exclusive: bool = True, on_commit: OnCommit | None = None, bytes_max: int | None = None
) -> AsyncIterator[SqliteStore]:
    """Open the file in `folder`, and close it."""
    store = await SqliteStore.open(
        folder / "sayso.db", clock=Clock(), exclusive=exclusive, on_commit=on_commit, bytes_max=bytes_max
    )
    try:
        yield store
    finally:
        await store.close()


async def _sessions(store: SqliteStore, many: int) -> None:
    for n in range(many):
        await store.create_session(f"s{n}", owner=ALICE, title="")


# --- one file, one process, one schema ---------------------------------------


async def test_a_second_process_that_would_run_sessions_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path):
        with pytest.raises(StoreLocked, match=r"sayso\.db is in use by another sayso process \(pid \d+\)"):
            await SqliteStore.open(tmp_path / "sayso.db", clock=Clock(), exclusive=True)

    async with opened(tmp_path):
        pass


async def test_a_look_from_beside_needs_no_lock_and_sees_what_is_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as store, opened(tmp_path, exclusive=False) as beside:
        token = await owned(store)
        await store.write(token, rows(token, 0, taken(1), SAID))

        assert await beside.rows("s1") == await store.rows("s1")
        await beside.put(hook("evt_2"))
        assert await store.release(token, looked_to=1) is Released.MORE


async def test_a_file_that_is_opened_again_has_kept_everything(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        token = await owned(store)
        written = rows(token, 0, taken(1), SAID)
        await store.write(token, written)
        await store.put(hook("evt_2"))

    async with opened(tmp_path) as store:
        assert await store.rows("s1") == written
        assert [row.n for row in await store.inbox("s1", after=0, limit=9)] == [2]
        assert (await store.put(hook("evt_2"))).outcome is PutOutcome.DUPLICATE
        assert await store.write(token, rows(token, 2, SAID)) is WriteOutcome.WRITTEN
    assert set(os.listdir(tmp_path)) == {"sayso.db", "sayso.db.lock"}


async def test_a_closed_store_takes_nothing_and_may_be_closed_again(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await store.close()

        for call in (store.put(hook("evt_1")), store.session("s1"), store.healthy()):
            with pytest.raises(StoreUnavailable, match="closed"):
                await call


async def test_what_was_submitted_before_close_is_answered(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await _sessions(store, 1)
        async with asyncio.TaskGroup() as tasks:
            puts = [tasks.create_task(store.put(hook(f"evt_{n}", session="s0"))) for n in range(50)]
            tasks.create_task(store.close())

    assert {put.result().outcome for put in puts} == {PutOutcome.STORED}


def test_a_changed_migration_or_a_newer_schema_is_refused() -> None:
    known = [Migration(1, "first", "create table a (b text);\n"), Migration(2, "second", "drop table a;\n")]
    applied = {migration.number: migration.checksum for migration in known}

    assert pending({}, known) == known
    assert pending({1: applied[1]}, known) == known[1:]
    assert pending(applied, known) == []
    with pytest.raises(SchemaTooNew, match="the database has schema 3, this release of sayso knows 2"):
        pending({**applied, 3: "x"}, known)
    with pytest.raises(SchemaChanged, match=r"migration 1 \(first\)"):
        pending({**applied, 1: "x"}, known)


def test_each_database_gets_its_own_text_of_a_migration() -> None:
    table = "create table a (\n    b /*sqlite: blob*//*postgres: bytea*/\n) /*sqlite: without rowid*/;\n"
    text = f"-- why\n{table}drop table c;"

    assert Migration(1, "first", text).statements("sqlite") == [
        "create table a (\n    b blob\n) without rowid",
        "drop table c",
    ]
    assert Migration(1, "first", text).statements("postgres")[0] == "create table a (\n    b bytea\n)"
    assert [migration.number for migration in released()] == list(range(1, len(released()) + 1))


# --- group commit ------------------------------------------------------------


@dataclass
class Gate:
    """Holds the writer before a commit until the test lets it go, and notes what each commit held."""

    closed: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    batches: list[tuple[str, ...]] = field(default_factory=list)

    def __call__(self, phase: CommitPhase, names: tuple[str, ...]) -> None:
        if phase is CommitPhase.BEFORE:
            self.batches.append(names)
            self.closed.set()
            assert self.go.wait(30)


@pytest.mark.rule("K6")
async def test_what_waits_is_committed_together_and_a_failing_caller_fails_alone(tmp_path: Path) -> None:
    gate = Gate()
    gate.go.set()
    async with opened(tmp_path, on_commit=gate) as store:
        await _sessions(store, 20)
        token = await owned(store, session="mine")
        gate.go.clear()
        gate.closed.clear()
        before = store.commits
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(store.bind("restaurant", "s0"))
            await asyncio.to_thread(gate.closed.wait, 30)
            puts = [tasks.create_task(store.put(hook(f"evt_{n}", session=f"s{n}"))) for n in range(20)]
            twice = rows(token, 0, taken(1), taken(1))
            failing = [
                asyncio.create_task(store.put(hook("lost", session="nowhere"))),
                asyncio.create_task(store.write(token, twice)),
                asyncio.create_task(store.write(token, [])),
            ]
            follower = tasks.create_task(store.write(token, rows(token, 2, SAID)))
            late = tasks.create_task(store.write(token, rows(token, 0, taken(1))))
            asyncio.get_running_loop().call_soon(gate.go.set)  # after each of them has submitted

        errors = await asyncio.gather(*failing, return_exceptions=True)
        assert [type(error) for error in errors] == [NotFound, IllegalChange, ValueError]
        assert {put.result().outcome for put in puts} == {PutOutcome.STORED}
        assert follower.result() is WriteOutcome.BEHIND  # its predecessor was rolled back
        assert late.result() is WriteOutcome.WRITTEN
        assert store.commits - before == 2
        assert gate.batches[-1] == ("put",) * 21 + ("write",) * 4
        assert len(await store.rows("mine")) == 1


async def test_many_callers_share_few_commits(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        await _sessions(store, 10)
        before = store.commits

        puts = await asyncio.gather(*(store.put(hook(f"evt_{n}", session=f"s{n % 10}")) for n in range(1_000)))

        assert {put.outcome for put in puts} == {PutOutcome.STORED}
        assert store.commits - before < 50
        for n in range(10):
            assert [row.n for row in await store.inbox(f"s{n}", after=0, limit=999)] == list(range(1, 101))


async def test_a_cancelled_caller_tears_nothing(tmp_path: Path) -> None:
    gate = Gate()
    gate.go.set()
    async with opened(tmp_path, on_commit=gate) as store:
        await _sessions(store, 1)
        gate.go.clear()
        gate.closed.clear()
        put = asyncio.create_task(store.put(hook("evt_1", session="s0")))
        await asyncio.to_thread(gate.closed.wait, 30)
        put.cancel()
        gate.go.set()
        with pytest.raises(asyncio.CancelledError):
            await put

        assert (await store.put(hook("evt_1", session="s0"))).outcome is PutOutcome.DUPLICATE


class Lost(Exception):
    """A fault that a test puts in."""


@dataclass
class Loses:
    """Fails the next commit at one phase."""

    phase: CommitPhase
    armed: bool = False

    def __call__(self, phase: CommitPhase, names: tuple[str, ...]) -> None:
        if self.armed and phase is self.phase:
            self.armed = False
            raise Lost(f"on purpose, with {names}")


@pytest.mark.rule("K6")
@pytest.mark.parametrize("phase", CommitPhase)
async def test_a_commit_without_an_answer_is_unknown_to_all_and_found_out_by_keys(
    tmp_path: Path, phase: CommitPhase
) -> None:
    loses = Loses(phase)
    async with opened(tmp_path, on_commit=loses) as store:
        token = await owned(store)
        written = rows(token, 0, taken(1), SAID)
        before = store.commits
        loses.armed = True

        outcomes = await asyncio.gather(
            store.write(token, written),
            store.put(message("hello", key="k1")),
            store.put(hook("evt_2")),
            return_exceptions=True,
        )

        assert [type(outcome) for outcome in outcomes] == [CommitUnknown] * 3
        stored = phase is CommitPhase.AFTER
        assert store.commits - before == int(stored)
        assert await store.rows("s1") == (written if stored else [])
        assert await store.write(token, written) is (WriteOutcome.ALREADY if stored else WriteOutcome.WRITTEN)
        again = await store.put(message("hello", key="k1"))
        assert again.outcome is (PutOutcome.DUPLICATE if stored else PutOutcome.STORED)


@pytest.mark.rule("A7")
async def test_an_input_and_its_dedupe_entry_are_stored_in_one_write(tmp_path: Path) -> None:
    """Were the entry stored and the input not, the sender's next try would be taken for a repeat."""
    loses = Loses(CommitPhase.BEFORE)
    async with opened(tmp_path, on_commit=loses) as store:
        await _sessions(store, 1)
        loses.armed = True
        with pytest.raises(CommitUnknown):
            await store.put(hook("evt_1", session="s0"))

    async with opened(tmp_path) as store:
        assert await store.inbox_record("s0") == []
        assert (await store.put(hook("evt_1", session="s0"))).outcome is PutOutcome.STORED


# --- a disk that does not keep its promises ----------------------------------


async def test_a_read_only_file_is_unavailable_for_writing_and_can_be_read(tmp_path: Path) -> None:
    async with opened(tmp_path) as store:
        token = await owned(store)
        await store.write(token, rows(token, 0, SAID))
    with (tmp_path / "sayso.db").open("r+b") as file:
        file.seek(18)  # the file format's write version: past 2, SQLite may only read (fileformat2.html, 1.3.3)
        file.write(b"\x03")

    async with opened(tmp_path) as store:
        assert len(await store.rows("s1")) == 1
        for call in (store.put(hook("evt_2")), store.write(token, rows(token, 1, SAID)), store.healthy()):
            with pytest.raises(StoreUnavailable, match="read-only"):
                await call
        assert len(await store.rows("s1")) == 1


async def test_a_file_that_is_no_database_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "sayso.db").write_text("these are my notes, and nobody's database\n" * 200)

    with pytest.raises(StoreUnavailable, match="no database"):
        await SqliteStore.open(tmp_path / "sayso.db", clock=Clock(), exclusive=True)
    with pytest.raises(StoreUnavailable, match="can't be opened"):
        await SqliteStore.open(tmp_path / "missing" / "sayso.db", clock=Clock(), exclusive=False)


async def test_a_full_disk_is_unavailable_and_leaves_nothing_half(tmp_path: Path) -> None:
    """Alone and in company: the others of a batch that the database has dropped are told "unknown" (K6)."""
    stored: list[str] = []
    async with opened(tmp_path, bytes_max=400 * 1024) as store:
        await _sessions(store, 4)

        async def fill() -> None:
            for n in range(10_000):
                await store.put(hook(f"evt_{n}", session="s0", content="x" * 5_000))
                stored.append(f"evt_{n}")

        with pytest.raises(StoreUnavailable, match="full"):
            await fill()
        outcomes = await asyncio.gather(
            *(store.put(hook(f"more_{n}", session=f"s{n % 4}", content="x" * 50_000)) for n in range(8)),
            return_exceptions=True,
        )
        assert {type(outcome) for outcome in outcomes} <= {StoreUnavailable, CommitUnknown}
        assert StoreUnavailable in {type(outcome) for outcome in outcomes}
        assert len(await store.rows("s0")) == 0

    async with opened(tmp_path) as store:
        assert [row.event_id for row in await store.inbox_record("s0")] == stored
        record = await store.session("s0")
        assert record is not None
        assert record.inbox_tail == len(stored)
        for n in range(8):
            assert (await store.put(hook(f"more_{n}", session=f"s{n % 4}"))).outcome is PutOutcome.STORED


# --- kill -9 -----------------------------------------------------------------

_CHILD = """
import asyncio, os, signal, sys
from pathlib import Path
from sayso.storage.sqlite import SqliteStore
from sayso.storage.shape import CommitPhase
from tests.conformance.given import ALICE, Clock, hook

async def main(folder: Path, point: str) -> None:
    puts = 0
    def die_at(phase: CommitPhase, names: tuple[str, ...]) -> None:
        if point == f"{phase} {puts}" and "put" in names:
            os.kill(os.getpid(), signal.SIGKILL)
    store = await SqliteStore.open(folder / "sayso.db", clock=Clock(), exclusive=True, on_commit=die_at)
    await store.create_session("s1", owner=ALICE, title="")
    for puts in range(1, 100):
        await store.put(hook(f"evt_{puts}"))
        os.write(1, f"evt_{puts}\\n".encode())
        if point == f"acknowledged {puts}":
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(Path(sys.argv[1]), sys.argv[2]))
"""


@pytest.fixture
def killed(tmp_path: Path) -> Callable[[str], list[str]]:
    """Run a process that stores hooks until it is killed at a point; return what it acknowledged."""

    def run(point: str) -> list[str]:
        child = subprocess.run(
            [sys.executable, "-c", _CHILD, str(tmp_path), point],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        assert child.returncode == -signal.SIGKILL
        return child.stdout.split()

    return run


@pytest.mark.parametrize(
    ("point", "acknowledged", "stored"),
    [("acknowledged 3", 3, 3), ("before_commit 3", 2, 2), ("after_commit 3", 2, 3)],
)
async def test_what_was_acknowledged_is_there_after_a_kill(
    tmp_path: Path, killed: Callable[[str], list[str]], point: str, acknowledged: int, stored: int
) -> None:
    assert len(killed(point)) == acknowledged

    async with opened(tmp_path) as store:  # the lock went with the process
        inbox = await store.inbox("s1", after=0, limit=9)
        assert [row.event_id for row in inbox] == [f"evt_{n}" for n in range(1, stored + 1)]
        assert (await store.put(hook("evt_3"))).outcome is (PutOutcome.DUPLICATE if stored == 3 else PutOutcome.STORED)
