"""Does the PostgreSQL store keep its promises when the server, the connection or another node does not wait for it?"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from sayso.core.errors import CommitUnknown, NotFound, StoreLocked, StoreUnavailable
from sayso.core.rows import ModelSaidBody
from sayso.core.session import Token
from sayso.storage.migrate import SchemaChanged, SchemaTooNew, released
from sayso.storage.postgres import NoSchema, PostgresStore
from sayso.storage.postgres_connections import Bounds
from sayso.storage.postgres_lock import advisory_key
from sayso.storage.shape import CommitPhase
from sayso.storage.store import LEASE_MS, PutOutcome, Released, WriteOutcome
from tests import postgres
from tests.conformance.given import ALICE, Clock, hook, message, owned, rows, taken
from tests.wire import AtCommit, Wire

SAID = ModelSaidBody(1, ())


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of an empty schema."""
    with postgres.schema() as url:
        yield url


@asynccontextmanager
async def opened(
    url: str, *, exclusive: bool = True, clock: Clock | None = None, **options: Any
) -> AsyncIterator[PostgresStore]:
    """Open a store on the server's own time, unless there is a clock, and close it."""
    store = await PostgresStore.open(url, exclusive=exclusive, clock=clock, **options)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def beside(url: str) -> AsyncIterator[psycopg.AsyncConnection[tuple[Any, ...]]]:
    """A connection of somebody else, who commits each statement unless they say otherwise."""
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        yield connection


def called(url: str, name: str) -> str:
    """Return the URL with a name by which the server knows its connections, of this schema alone."""
    schema = options_of(url).partition("search_path=")[2]
    return make_conninfo(url, application_name=f"{name} {schema}")


async def end(other: psycopg.AsyncConnection[tuple[Any, ...]], name: str, *, where: bytes = b"") -> int:
    """Let the server end the connections of this name, and return how many it were, once they are gone."""
    query = b"select count(pg_terminate_backend(pid, 10000)) from pg_stat_activity a " + NAMED + where
    row = await (await other.execute(query, (name,))).fetchone()
    assert row is not None
    return int(row[0])


NAMED = b"where application_name = %s || ' ' || current_schema() "
HAS_A_LOCK = b"and exists (select from pg_locks l where l.pid = a.pid and l.locktype = 'advisory')"
WAITS_FOR_ONE = b"and wait_event_type = 'Lock'"


async def until_waiting(other: psycopg.AsyncConnection[tuple[Any, ...]], name: str) -> None:
    """Return once a connection of this name waits for a lock."""
    async with asyncio.timeout(20):
        query = b"select from pg_stat_activity a, pg_sleep(0.01) " + NAMED + WAITS_FOR_ONE
        while await (await other.execute(query, (name,))).fetchone() is None:
            pass


# --- one database, one process, one schema -----------------------------------


@pytest.mark.rule("N20")
async def test_a_second_process_that_would_run_sessions_is_refused(url: str) -> None:
    async with opened(url):
        with pytest.raises(
            StoreLocked, match=r"schema sayso_test_\w+ of the database is in use by another sayso process"
        ):
            await PostgresStore.open(url, exclusive=True)

    async with opened(url):
        pass


async def test_two_schemas_of_one_database_are_two_stores(url: str) -> None:
    with postgres.schema() as other:
        async with opened(url) as one, opened(other) as two:
            await one.create_session("s1", owner=ALICE, title="")
            assert await two.session("s1") is None


async def test_a_look_from_beside_needs_no_lock_and_sees_what_is_stored(url: str) -> None:
    async with opened(url) as store, opened(url, exclusive=False) as other:
        token = await owned(store)
        await store.write(token, rows(token, 0, taken(1), SAID))

        assert await other.rows("s1") == await store.rows("s1")
        await other.put(hook("evt_2"))
        assert await store.release(token, looked_to=1) is Released.MORE


async def test_a_closed_store_takes_nothing_and_may_be_closed_again(url: str) -> None:
    async with opened(url) as store:
        await store.close()

        for call in (store.put(hook("evt_1")), store.session("s1"), store.healthy()):
            with pytest.raises(StoreUnavailable, match="closed"):
                await call


async def test_what_was_submitted_before_close_is_answered(url: str) -> None:
    async with opened(url) as store:
        await store.create_session("s1", owner=ALICE, title="")
        async with asyncio.TaskGroup() as tasks:
            puts = [tasks.create_task(store.put(hook(f"evt_{n}"))) for n in range(20)]
            tasks.create_task(store.close())

        assert {put.result().outcome for put in puts} == {PutOutcome.STORED}


async def test_a_cancelled_callers_transaction_is_rolled_back_whole(url: str) -> None:
    async with opened(called(url, "cancelled")) as store, beside(url) as other:
        await store.create_session("s1", owner=ALICE, title="")
        await other.execute(b"begin")
        await other.execute(b"select from session for update")
        put = asyncio.create_task(store.put(hook("evt_1")))
        await until_waiting(other, "cancelled")
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        await other.execute(b"commit")

        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED


async def test_no_session_is_left_to_a_process_that_ended_while_its_claim_was_being_committed(url: str) -> None:
    """Its lock was gone before its last transaction: the next one registers when that is done, not before."""
    async with opened(called(url, "next")) as store, beside(url) as claiming:
        await store.create_session("s1", owner=ALICE, title="")
        await store.put(hook("evt_1"))
        async with opened(url, exclusive=False) as dead:  # stands for the one that ended; its claim is as theirs
            await claiming.execute(b"begin")
            key = advisory_key("claims", await schema_of(claiming))
            await claiming.execute(b"select pg_advisory_xact_lock_shared(%s)", (key,))
            registering = asyncio.create_task(store.register("n2"))
            await until_waiting(claiming, "next")
            await dead.claim("n1", at_most=1)
            await claiming.execute(b"commit")

        assert await registering == 1
        assert [each.token.session for each in await store.claim("n2", at_most=1)] == ["s1"]


async def schema_of(connection: psycopg.AsyncConnection[tuple[Any, ...]]) -> str:
    row = await (await connection.execute(b"select current_schema()")).fetchone()
    assert row is not None
    return str(row[0])


async def test_a_schema_that_is_not_there_is_refused_and_nothing_is_made_elsewhere(url: str) -> None:
    with pytest.raises(NoSchema, match="does not exist"):
        await PostgresStore.open(postgres.within(postgres.required(), "sayso_nowhere"), exclusive=False)


# --- migrations --------------------------------------------------------------


async def test_each_migration_is_applied_once_and_recorded(url: str) -> None:
    for _ in range(2):
        async with opened(url), beside(url) as other:
            found = await (await other.execute(b"select number, checksum from migration order by number")).fetchall()
    assert found == [(each.number, each.checksum) for each in released()]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (b"insert into migration values (9999, 'later', '0', 0)", SchemaTooNew),
        (b"update migration set checksum = '0'", SchemaChanged),
    ],
    ids=["a newer release's", "another content"],
)
async def test_a_schema_of_another_release_is_refused(url: str, change: bytes, refusal: type[Exception]) -> None:
    async with opened(url), beside(url) as other:
        await other.execute(change)

    with pytest.raises(refusal):
        await PostgresStore.open(url, exclusive=True)


@pytest.mark.rule("X60")
async def test_first_starts_at_the_same_moment_neither_wait_forever_nor_apply_twice(url: str) -> None:
    stores = await asyncio.gather(*(PostgresStore.open(url, exclusive=False) for _ in range(8)))
    try:
        for store in stores:
            await store.healthy()
        async with beside(url) as other:
            found = await (await other.execute(b"select number from migration order by number")).fetchall()
        assert found == [(each.number,) for each in released()]
    finally:
        await asyncio.gather(*(store.close() for store in stores))


@pytest.mark.rule("X60")
def test_two_processes_that_start_first_both_find_a_whole_schema(url: str) -> None:
    command = [sys.executable, "-m", "sayso", "token", "create", "user:alice", "-d", url]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]

    assert [process.returncode for process in both] == [0, 0], said
    with psycopg.connect(url) as connection:
        [(migrations, tokens)] = connection.execute(
            b"select (select count(*) from migration), (select count(*) from token)"
        )
    assert (migrations, tokens) == (len(released()), 2)


# --- the lock ----------------------------------------------------------------


async def test_a_lock_that_was_lost_is_taken_again(url: str) -> None:
    async with opened(called(url, "loses its lock")) as store, beside(url) as other:
        token = await owned(store)
        assert await end(other, "loses its lock", where=HAS_A_LOCK) == 1

        await store.healthy()

        with pytest.raises(StoreLocked):
            await PostgresStore.open(url, exclusive=True)
        assert await store.write(token, rows(token, 0, taken(1))) is WriteOutcome.WRITTEN


@pytest.mark.rule("K2", "N2")
async def test_who_lost_the_lock_to_another_starts_nothing_and_is_fenced_and_takes_up_what_the_other_left(
    url: str,
) -> None:
    async with opened(called(url, "first")) as first, beside(url) as other:
        await first.register("n1")
        token = await owned(first)
        # killed until somebody else is quicker
        async with opened(url, exclusive=False) as door:
            while True:
                assert await end(other, "first", where=HAS_A_LOCK) in (0, 1)
                try:
                    second = await PostgresStore.open(url, exclusive=True)
                    break
                except StoreLocked:
                    continue
            assert await second.register("n2") == 1
            [taken_over] = await second.claim("n2", at_most=9)
            await door.create_session("s2", owner=ALICE, title="")
            await door.put(hook("evt_2", session="s2"))

        for call in (first.claim("n1", at_most=9), first.register("n1"), first.healthy()):
            with pytest.raises(StoreUnavailable, match="in use by another sayso process"):
                await call
        assert await first.write(token, rows(token, 0, taken(1))) is WriteOutcome.FENCED
        assert (await first.put(hook("evt_3"))).outcome is PutOutcome.STORED
        assert await first.session("s1") is not None

        await second.close()
        claimed = {each.token.session: each.token.epoch for each in await first.claim("n1", at_most=9)}
        assert claimed == {"s1": taken_over.token.epoch + 2, "s2": 1}


# --- a server that goes away -------------------------------------------------


async def test_connections_that_died_while_idle_are_nobodys_trouble(url: str) -> None:
    async with opened(called(url, "idle")) as store, beside(url) as other:
        await asyncio.gather(*(store.session("s1") for _ in range(9)))
        assert await end(other, "idle") >= 3

        await store.create_session("s1", owner=ALICE, title="")
        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED


async def test_a_connection_that_is_ended_within_a_transaction_leaves_nothing(url: str) -> None:
    async with opened(called(url, "within")) as store, beside(url) as other:
        await store.create_session("s1", owner=ALICE, title="")
        await other.execute(b"begin")
        await other.execute(b"select from session for update")
        put = asyncio.create_task(store.put(hook("evt_1")))
        await until_waiting(other, "within")
        assert await end(other, "within", where=WAITS_FOR_ONE) == 1

        with pytest.raises(StoreUnavailable, match="the server ended the connection"):
            await put
        await other.execute(b"rollback")
        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED


class Lost(Exception):
    """A fault that a test puts in."""


@dataclass
class AtPhase:
    """Does something once, at one phase of a commit."""

    phase: CommitPhase
    do: Callable[[], None]
    armed: bool = False

    def __call__(self, phase: CommitPhase, names: tuple[str, ...]) -> None:
        if self.armed and phase is self.phase:
            self.armed = False
            self.do()


def lose() -> None:
    raise Lost("on purpose")


@pytest.mark.rule("K6")
@pytest.mark.parametrize("phase", CommitPhase)
async def test_a_commit_without_an_answer_is_unknown_and_found_out_by_keys(url: str, phase: CommitPhase) -> None:
    loses = AtPhase(phase, lose)
    async with opened(url, clock=Clock(), on_commit=loses) as store:
        token = await owned(store)
        written = rows(token, 0, taken(1), SAID)
        before = store.commits
        loses.armed = True

        with pytest.raises(CommitUnknown):
            await store.write(token, written)

        stored = phase is CommitPhase.AFTER
        assert store.commits - before == int(stored)
        assert await store.rows("s1") == (written if stored else [])
        assert await store.write(token, written) is (WriteOutcome.ALREADY if stored else WriteOutcome.WRITTEN)


@pytest.mark.rule("K6")
async def test_a_connection_that_is_ended_before_commit_leaves_it_unknown(url: str) -> None:
    """Nothing is stored; but who asked for COMMIT and heard that the server ends can't know."""

    def kill() -> None:
        with psycopg.connect(url, autocommit=True) as other:
            other.execute(
                b"select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                b" where application_name = 'before ' || current_schema() and state = 'idle in transaction'"
            )

    killed = AtPhase(CommitPhase.BEFORE, kill)
    async with opened(called(url, "before"), exclusive=False, on_commit=killed) as store:
        await store.create_session("s1", owner=ALICE, title="")
        killed.armed = True

        with pytest.raises(CommitUnknown, match="no answer"):
            await store.put(message("hello", key="k1"))

        assert (await store.put(message("hello", key="k1"))).outcome is PutOutcome.STORED


@pytest.fixture
async def wire(url: str) -> AsyncIterator[Wire]:
    """A wire to the server, up."""
    wire = Wire(url)
    await wire.up()
    yield wire
    await wire.down()


@pytest.mark.rule("K6")
@pytest.mark.parametrize("at", AtCommit)
async def test_a_connection_that_breaks_during_commit_leaves_it_unknown(wire: Wire, at: AtCommit) -> None:
    # waited for to its end by one of the three alone
    bounds = Bounds(transaction_s=3 if at is AtCommit.SILENT else 60)
    async with opened(wire.url, clock=Clock(), bounds=bounds) as store:
        token = await owned(store)
        written = rows(token, 0, taken(1), SAID)
        wire.at_commit = at

        with pytest.raises(CommitUnknown, match="the connection was lost"):
            await store.write(token, written)

        wire.silent = False
        stored = at is not AtCommit.NEVER_ASKED
        assert await store.rows("s1") == (written if stored else [])
        assert await store.write(token, written) is (WriteOutcome.ALREADY if stored else WriteOutcome.WRITTEN)


async def test_a_server_that_is_away_is_away_at_once_and_back_for_the_next_caller(wire: Wire) -> None:
    async with opened(wire.url) as store:
        await store.create_session("s1", owner=ALICE, title="")
        await wire.down()

        began = time.monotonic()
        for call in (store.put(hook("evt_1")), store.session("s1"), store.claim("n1", at_most=1), store.healthy()):
            with pytest.raises(StoreUnavailable, match="nothing listens there"):
                await call
        assert time.monotonic() - began < Bounds().free_s

        await wire.up()
        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED
        await store.healthy()


async def test_a_server_that_falls_silent_is_given_up(url: str, wire: Wire) -> None:
    bounds = Bounds(transaction_s=2)
    async with opened(called(wire.url, "silent"), exclusive=False, bounds=bounds) as store, beside(url) as other:
        await store.create_session("s1", owner=ALICE, title="")
        await other.execute(b"begin")
        await other.execute(b"select from session for update")
        put = asyncio.create_task(store.put(hook("evt_1")))
        await until_waiting(other, "silent")
        wire.silent = True

        with pytest.raises(StoreUnavailable, match="the connection was lost"):
            await put

        wire.silent = False
        await other.execute(b"rollback")
        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED


# --- nodes beside each other -------------------------------------------------

HERE = "http://10.0.0.1:8000"


@asynccontextmanager
async def two_nodes(url: str) -> AsyncIterator[tuple[PostgresStore, PostgresStore, Clock]]:
    """The stores of a node that will stand still, and of one that sweeps; their database's clock is set by the test."""
    clock = Clock()
    async with (
        opened(called(url, "still"), exclusive=False, clock=clock) as still,
        opened(called(url, "sweeper"), exclusive=False, clock=clock) as sweeper,
    ):
        yield still, sweeper, clock


async def ended(store: PostgresStore, clock: Clock) -> Token:
    """Let n1 own s1, and its lease end; return its right."""
    token = await owned(store, node="n1")
    await store.beat("n1", HERE)
    clock.later(LEASE_MS)
    return token


@pytest.mark.rule("K2", "N2")
async def test_a_write_under_way_as_its_nodes_lease_ends_is_stored_and_then_swept(url: str) -> None:
    """It holds the session's row, so the sweep passes it over, waits for nobody, and sees what came of it next time."""
    async with two_nodes(url) as (still, sweeper, clock), beside(url) as other:
        await owned(still, node="n1", session="s2")
        token = await ended(still, clock)
        await other.execute(b"begin")
        await other.execute(b"insert into journal values ('s1', 1, 0, null, 'x', 'x.1', 0, 0, '')")
        writing = asyncio.create_task(still.write(token, rows(token, 0, taken(1), SAID)))
        await until_waiting(other, "still")

        assert await sweeper.sweep() == 1
        assert await still.beat("n1", HERE) is None
        await other.execute(b"rollback")
        assert await writing is WriteOutcome.WRITTEN
        assert await sweeper.sweep() == 1

        assert await still.write(token, rows(token, 2, SAID)) is WriteOutcome.FENCED
        claimed = {each.token.session: each for each in await sweeper.claim("n2", at_most=9)}
        assert claimed["s1"].record.head == 2
        mine = claimed["s1"].token
        assert await sweeper.write(mine, rows(mine, 2, SAID)) is WriteOutcome.WRITTEN
        assert [row.seq for row in await sweeper.rows("s1")] == [1, 2, 3]


@pytest.mark.rule("K2", "N2")
async def test_a_write_that_comes_while_its_session_is_swept_waits_and_is_fenced(url: str) -> None:
    async with two_nodes(url) as (still, sweeper, clock), beside(url) as other:
        token = await ended(still, clock)
        await owned(still, session="s2", node="n2")
        await still.beat("n2", HERE)
        await other.execute(b"begin")
        await other.execute(b"select from session for update")
        assert await sweeper.sweep() == 0  # it marks n1, and passes the session over
        await other.execute(b"rollback")
        await other.execute(b"insert into node values ('old', 0, '', 0, 0)")
        await other.execute(b"begin")
        await other.execute(b"lock table node in share mode")
        sweeping = asyncio.create_task(sweeper.sweep())  # has the session, and waits to forget an old node
        await until_waiting(other, "sweeper")
        writing = asyncio.create_task(still.write(token, rows(token, 0, taken(1))))
        await until_waiting(other, "still")

        clock.later(LEASE_MS)
        assert await still.sweep() == 0  # one at a time, also where there is more to do by now
        await other.execute(b"commit")

        assert await sweeping == 1
        assert await writing is WriteOutcome.FENCED
        assert await still.rows("s1") == []
        assert await still.sweep() == 1


async def test_a_claim_under_way_as_its_node_is_declared_dead_is_swept_next_time(url: str) -> None:
    async with two_nodes(url) as (still, sweeper, clock), beside(url) as other:
        await still.create_session("s1", owner=ALICE, title="")
        await still.put(hook("evt_1"))
        await still.beat("n1", HERE)
        clock.later(LEASE_MS)
        await other.execute(b"begin")  # as a claim does
        await other.execute(
            b"update session set state = 'owned', ready_at_ms = null, node = 'n1', nonce = 'x', epoch = epoch + 1"
        )
        assert await sweeper.sweep() == 0
        await other.execute(b"commit")

        assert await sweeper.sweep() == 1
        assert [each.token.epoch for each in await sweeper.claim("n2", at_most=9)] == [3]


async def test_a_beat_under_way_is_waited_for_by_no_sweep_and_decides_if_it_is_first(url: str) -> None:
    async with two_nodes(url) as (still, sweeper, clock), beside(url) as other:
        token = await ended(still, clock)
        await other.execute(b"begin")  # as a beat does that was in time
        await other.execute(b"update node set lease_until_ms = lease_until_ms + 2000")
        assert await sweeper.sweep() == 0
        await other.execute(b"commit")

        assert await sweeper.sweep() == 0
        assert await still.beat("n1", HERE) == clock.now_ms + LEASE_MS
        assert await still.write(token, rows(token, 0, taken(1))) is WriteOutcome.WRITTEN


@pytest.mark.rule("K10")
async def test_leases_end_by_the_servers_clock(url: str) -> None:
    """One that has ended by the server's is over, and one that has not is not, whatever a node's own clock says."""

    async def server_ms() -> float:
        row = await (await other.execute(b"select extract(epoch from clock_timestamp())::float8 * 1000")).fetchone()
        assert row is not None
        return float(row[0])

    async with opened(url) as store, beside(url) as other:
        await owned(store, node="n1")
        before_ms = await server_ms()
        until_ms = await store.beat("n1", HERE, lease_ms=3_600_000)
        assert until_ms is not None
        assert before_ms - 1 <= until_ms - 3_600_000 <= await server_ms()
        assert await store.sweep() == 0

        assert await store.beat("n1", HERE, lease_ms=0) is not None
        assert await store.sweep() == 1


@pytest.mark.rule("K2")
async def test_nobody_is_dead_before_its_lease_has_ended(url: str) -> None:
    async with opened(url, clock=Clock()) as store, beside(url) as other:
        await store.beat("n1", HERE)
        for dead_at_ms in (b"lease_until_ms - 1", b"0"):
            with pytest.raises(psycopg.errors.CheckViolation):
                await other.execute(b"update node set dead_at_ms = " + dead_at_ms)
        with pytest.raises(psycopg.errors.CheckViolation):
            await other.execute(b"insert into node (node, registered_at_ms, dead_at_ms) values ('n2', 0, 0)")


# --- others ------------------------------------------------------------------


async def test_a_lock_that_another_transaction_holds_is_waited_for_and_given_up(url: str) -> None:
    bounds = Bounds(connections=1, lock_ms=200, free_s=0.05)
    async with opened(called(url, "waits"), bounds=bounds) as store, beside(url) as other:
        await store.create_session("s1", owner=ALICE, title="")
        await other.execute(b"begin")
        await other.execute(b"select from session for update")
        waiting = asyncio.create_task(store.put(hook("evt_1")))
        await until_waiting(other, "waits")

        with pytest.raises(StoreUnavailable, match="all its connections are busy"):
            await store.session("s1")
        with pytest.raises(StoreUnavailable, match="another transaction holds the lock"):
            await waiting
        await other.execute(b"rollback")
        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED


async def test_a_transaction_that_was_in_a_deadlock_is_run_again(url: str) -> None:
    """The other holds s2 and wants s1; `register` holds s1 and wants s2, and is the one that is rolled back."""
    async with beside(url) as other:
        superuser = await other.execute(b"select from pg_roles where rolname = user and rolsuper")
        if await superuser.fetchone() is None:
            pytest.skip("only a superuser may say who loses a deadlock")
        async with opened(
            make_conninfo(called(url, "loses"), options=f"{options_of(url)} -c deadlock_timeout=20ms")
        ) as store:
            for session in ("s1", "s2"):
                await owned(store, session=session)
            await other.execute(b"set deadlock_timeout = '30s'")
            await other.execute(b"begin")
            await other.execute(b"select from session where id = 's2' for update")
            registering = asyncio.create_task(store.register("n2"))
            await until_waiting(other, "loses")
            await other.execute(b"select from session where id = 's1' for update")
            await other.execute(b"commit")

            assert await registering == 2


def options_of(url: str) -> str:
    return str(conninfo_to_dict(url)["options"])


async def test_a_database_that_is_read_only_can_be_read(url: str) -> None:
    async with opened(url) as store:
        token = await owned(store)
        await store.write(token, rows(token, 0, SAID))

    read_only = make_conninfo(url, options=f"{options_of(url)} -c default_transaction_read_only=on")
    async with opened(read_only) as store:
        assert len(await store.rows("s1")) == 1
        for call in (store.put(hook("evt_2")), store.write(token, rows(token, 1, SAID)), store.healthy()):
            with pytest.raises(StoreUnavailable, match="read-only"):
                await call
        assert len(await store.rows("s1")) == 1


async def test_a_body_that_raises_leaves_nothing_and_its_connection_goes_on(url: str) -> None:
    async with opened(url, bounds=Bounds(connections=1)) as store:
        with pytest.raises(NotFound):
            await store.put(hook("evt_1"))
        with pytest.raises(ValueError, match="at least one row"):
            await store.write(await owned(store), [])
        assert (await store.put(hook("evt_1"))).outcome is PutOutcome.STORED


@pytest.mark.rule("K12")
async def test_puts_of_two_nodes_at_the_same_moment_stand_in_one_order_of_place_and_time(url: str) -> None:
    async with opened(url) as one, opened(url, exclusive=False) as two:
        await one.create_session("s1", owner=ALICE, title="")
        puts = await asyncio.gather(*(node.put(hook(f"{node is one}_{n}")) for n in range(15) for node in (one, two)))

        inbox = await one.inbox_record("s1")
        assert [row.n for row in inbox] == list(range(1, 31))
        times = [row.received_at_ms for row in inbox]
        assert times == sorted(times)
        assert sorted((put.n, put.received_at_ms) for put in puts) == list(zip(range(1, 31), times, strict=True))


@pytest.mark.rule("A4", "K27")
async def test_one_event_at_two_nodes_at_the_same_moment_is_stored_once(url: str) -> None:
    async with opened(url) as one, opened(url, exclusive=False) as two:
        for session in ("s1", "s2"):
            await one.create_session(session, owner=ALICE, title="")
        puts = await asyncio.gather(
            *(
                node.put(hook(f"evt_{n}", session=session))
                for n in range(8)
                for node in (one, two)
                for session in ("s1", "s2")
            )
        )

        assert [put.outcome for put in puts].count(PutOutcome.STORED) == 8
        assert len(await one.inbox_record("s1")) + len(await one.inbox_record("s2")) == 8


async def test_nobody_claims_what_another_has_claimed(url: str) -> None:
    """Two that both believe to be the owner, as after a lost lock: skip locked keeps them apart."""
    async with opened(url, exclusive=False) as one, opened(url, exclusive=False) as two:
        for n in range(20):
            await one.create_session(f"s{n}", owner=ALICE, title="")
            await one.put(hook(f"evt_{n}", session=f"s{n}"))

        claims = await asyncio.gather(*(node.claim("n", at_most=7) for _ in range(2) for node in (one, two)))

        claimed = [each.token.session for claim in claims for each in claim]
        assert len(claimed) == len(set(claimed))


@pytest.mark.rule("K10")
async def test_time_is_the_servers(url: str) -> None:
    async with opened(url) as store, beside(url) as other:
        await store.create_session("s1", owner=ALICE, title="")

        async def server_ms() -> float:
            row = await (await other.execute(b"select extract(epoch from clock_timestamp())::float8 * 1000")).fetchone()
            assert row is not None
            return float(row[0])

        before = await server_ms()
        put = await store.put(hook("evt_1"))
        assert int(before) <= put.received_at_ms <= await server_ms()
        known = store.now_ms()
        assert put.received_at_ms <= known <= await server_ms()


# --- kill -9 -----------------------------------------------------------------

_CHILD = """
import asyncio, os, signal, sys
from sayso.storage.postgres import PostgresStore
from sayso.storage.shape import CommitPhase
from tests.conformance.given import ALICE, hook

async def main(url: str, point: str) -> None:
    puts = 0
    def die_at(phase: CommitPhase, names: tuple[str, ...]) -> None:
        if point == f"{phase} {puts}" and "put" in names:
            os.kill(os.getpid(), signal.SIGKILL)
    store = await PostgresStore.open(url, exclusive=True, on_commit=die_at)
    await store.create_session("s1", owner=ALICE, title="")
    for puts in range(1, 100):
        await store.put(hook(f"evt_{puts}"))
        os.write(1, f"evt_{puts}\\n".encode())
        if point == f"acknowledged {puts}":
            os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main(sys.argv[1], sys.argv[2]))
"""


@pytest.mark.parametrize(
    ("point", "acknowledged", "stored"),
    [("acknowledged 3", 3, 3), ("before_commit 3", 2, 2), ("after_commit 3", 2, 3)],
)
async def test_what_was_acknowledged_is_there_after_a_kill(
    url: str, point: str, acknowledged: int, stored: int
) -> None:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _CHILD, url, point), cwd=Path(__file__).parents[2], stdout=subprocess.PIPE
    )
    async with asyncio.timeout(60):
        said, _ = await child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert len(said.split()) == acknowledged

    async with opened(url) as store:  # the lock went with the process
        inbox = await store.inbox("s1", after=0, limit=9)
        assert [row.event_id for row in inbox] == [f"evt_{n}" for n in range(1, stored + 1)]
        assert (await store.put(hook("evt_3"))).outcome is (PutOutcome.DUPLICATE if stored == 3 else PutOutcome.STORED)
