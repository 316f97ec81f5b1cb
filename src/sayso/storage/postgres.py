"""The store on PostgreSQL: a transaction for each call, on one of a few connections.

The bodies are those of `statements`, which lock their session's row first, so READ COMMITTED is enough for
any number of nodes; what a call reads alone is of one moment (REPEATABLE READ, READ ONLY). Whatever happens
before COMMIT is sent has not happened; from then on it is unknown until the server has said so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from typing import Any, ParamSpec, TypeVar

from sayso.core.errors import CommitUnknown, Refused, StoreLocked, StoreUnavailable
from sayso.core.text import storable
from sayso.storage import migrate, statements
from sayso.storage.bodies import BodyStore
from sayso.storage.postgres_clock import DatabaseClock
from sayso.storage.postgres_connections import (
    RACED,
    Bounds,
    Connection,
    Connections,
    DriverError,
    Target,
    unavailable,
)
from sayso.storage.postgres_lock import Lock, LockLost, advisory_key
from sayso.storage.shape import DOOR_NOTES_MAX, INBOX_MAX, CommitPhase, OnCommit, Steady
from sayso.storage.statements import NOW, Body, Many, Sql, Value, dialect

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: how often a transaction is run that others are in the way of
ATTEMPTS = 10
#: how long a first start waits for another one's migrations
MIGRATION_WAIT_MS = 60_000
#: how long one migration may take, the waiting included
MIGRATION_S = 3_600.0

_WRITE = b"begin isolation level read committed"
_READ = b"begin isolation level repeatable read read only"
_TIME = b"select extract(epoch from clock_timestamp())::float8 * 1000"


class NoSchema(Refused):
    """The schema that the URL names is not there; nothing is made in another one."""


class _Raced(Exception):
    """The server has rolled the transaction back because of another one; it may be run again."""


class _Gone(Exception):
    """Nobody waits for the transaction any more, and it is not committed yet: it is rolled back."""


class _Caller:
    """Who waits for a transaction."""

    gone = False

    def must_be_there(self) -> None:
        """Return if somebody still waits."""
        if self.gone:
            raise _Gone


class PostgresStore(BodyStore):
    """See `Store` for what every method promises, and `open` for how to get one.

    It belongs to the event loop that opened it. A caller that is cancelled tears nothing: its transaction is
    rolled back, unless COMMIT has been sent.
    """

    def __init__(
        self,
        connections: Connections,
        clock: DatabaseClock | Steady,
        *,
        on_commit: OnCommit | None,
        inbox_max: int,
        door_notes_max: int,
    ) -> None:
        super().__init__(clock, inbox_max=inbox_max, door_notes_max=door_notes_max)
        #: how many COMMITs of writes were answered
        self.commits = 0
        self._connections, self._time, self._on_commit = connections, clock, on_commit
        self._lock: Lock | None = None
        self._node: str | None = None
        self._running: set[asyncio.Task[Any]] = set()
        self._closed = False

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        exclusive: bool,
        clock: Callable[[], int] | None = None,
        on_commit: OnCommit | None = None,
        inbox_max: int = INBOX_MAX,
        door_notes_max: int = DOOR_NOTES_MAX,
        bounds: Bounds | None = None,
    ) -> PostgresStore:
        """Connect to the database at `url` (postgresql://…), and bring the schema that its search_path names
        first up to date. The role needs the right to create tables there the first time.

        `exclusive` is for who runs sessions, one process a database and schema: it holds an advisory lock on
        a connection of its own until `close`. If that connection is lost, the lock is no longer trusted: it is
        taken again at once, and meanwhile `register`, `claim` and `healthy`, which ask the server in their own
        transaction whether we hold it, raise StoreUnavailable; so this node begins nothing new. What it has
        begun goes on, and is fenced by epoch and nonce if another process has taken over. When the lock was
        away and is ours again, the node is registered anew, so that what another one left is taken up.
        A look or a token from beside needs no lock.

        Without a `clock`, time is the server's (K10): stamped from clock_timestamp() after the body's locks are
        held, and known in between by `DatabaseClock`. A `clock` returns milliseconds since 1970 UTC and takes
        its place, for tests whose time jumps. `on_commit` is called on the event loop around each COMMIT, and
        may raise or end the process there: see `CommitPhase`.

        Raises:
            StoreLocked: another process runs sessions on it.
            BadUrl, NoSchema, SchemaTooNew, SchemaChanged: this can't be used as it is.
            StoreUnavailable: it can't be reached, or not be written where it must be.
        """
        target = Target(url, bounds or Bounds())
        time = DatabaseClock() if clock is None else Steady(clock)
        store = cls(Connections(target), time, on_commit=on_commit, inbox_max=inbox_max, door_notes_max=door_notes_max)
        try:
            schema = await store._read(_current_schema)
            if exclusive:
                store._lock = lock = Lock(target, schema, on_look=store._look, on_retaken=store._register_again)
                await lock.take()
            if await store._read(_is_behind):
                while await store._migrated(schema):
                    pass
            await store._read(_now)
        except BaseException:
            await store.close()
            raise
        return store

    async def register(self, node: str) -> int:
        """See `Store`. Valid while one node runs sessions here, which the lock sees to."""
        self._node = node
        return await super().register(node)

    async def close(self) -> None:
        """See `Store`. May be called twice; what is asked afterwards gets StoreUnavailable."""
        self._closed = True
        if self._running:
            await asyncio.wait(self._running)
        if self._lock is not None:
            await self._lock.close()
        await self._connections.close()

    # how a body is run

    async def _write(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        def run(caller: _Caller) -> Coroutine[Any, Any, T]:
            if self._lock is None or body not in _OF_THE_OWNER:
                return self._committed(caller, body.__name__, lambda: body(*args, **kwargs))
            return self._while_held(caller, body, lambda: body(*args, **kwargs))

        return await self._to_its_end(run)

    async def _read(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._to_its_end(lambda caller: self._looked_up(caller, lambda: body(*args, **kwargs)))

    async def _read_page(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._to_its_end(lambda caller: self._looked_up(caller, lambda: body(*args, **kwargs), page=True))

    async def _to_its_end(self, work: Callable[[_Caller], Coroutine[Any, Any, T]]) -> T:
        """Do it in a task of the store's own, which `close` waits for. A caller's cancellation does not interrupt a
        statement, which the driver would answer by asking the server; it is heeded at the next one."""
        if self._closed:
            raise StoreUnavailable("the store is closed")
        caller = _Caller()

        async def working() -> T:
            try:
                return await work(caller)
            except Exception as error:
                if caller.gone:  # there is nobody to tell
                    raise asyncio.CancelledError from error
                raise

        task = asyncio.get_running_loop().create_task(working())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller.gone = True
            raise

    async def _migrated(self, schema: str) -> bool:
        """Apply the next migration; False if there is none."""
        return await self._to_its_end(
            lambda caller: self._committed(caller, "migrate", lambda: _next_migration(schema), within_s=MIGRATION_S)
        )

    async def _committed(
        self, caller: _Caller, name: str, make: Callable[[], Body[T]], *, within_s: float | None = None
    ) -> T:
        """Run a body and commit it; again if other transactions were in its way.

        Raises:
            StoreUnavailable: nothing happened.
            CommitUnknown: it may be stored.
            Exception: whatever the body raises; nothing of it is stored.
        """
        for _ in range(ATTEMPTS):
            try:
                async with self._connections.transaction(_WRITE, within_s=within_s) as tx:
                    result = await self._performed(caller, tx, make())
                    caller.must_be_there()
                    await self._commit(tx, name)
                    return result
            except _Raced:
                log.info("transaction run again", extra={"body": name})
        raise StoreUnavailable("the store can't be used: other transactions are in the way of this one again and again")

    async def _commit(self, tx: Connection, name: str) -> None:
        try:
            self._tell(CommitPhase.BEFORE, name)
            done = await tx.execute(b"commit", prepare=False)
            if done.statusmessage != "COMMIT":
                raise RuntimeError(f"the server answered COMMIT with {done.statusmessage}")
            self.commits += 1
            self._tell(CommitPhase.AFTER, name)
        except Exception as error:
            if isinstance(error, DriverError) and error.sqlstate in RACED:
                raise _Raced from error
            log.warning("commit unknown", extra={"callers": 1, "cause": str(error)})
            raise CommitUnknown(f"the commit has no answer: {unavailable(error) or error}") from error

    def _tell(self, phase: CommitPhase, name: str) -> None:
        if self._on_commit is not None:
            self._on_commit(phase, (name,))

    async def _looked_up(self, caller: _Caller, make: Callable[[], Body[T]], *, page: bool = False) -> T:
        for _ in range(ATTEMPTS):
            try:
                async with self._connections.transaction(_READ, page=page) as tx:
                    result = await self._performed(caller, tx, make())
                    await tx.execute(b"commit", prepare=False)
                    return result
            except _Raced:
                pass
            except DriverError as error:
                raise (unavailable(error) or error) from error
        raise StoreUnavailable("the store can't be used: other transactions are in the way of this one again and again")

    async def _performed(self, caller: _Caller, tx: Connection, body: Body[T]) -> T:
        """Run a body's statements in the transaction that is open, and return what it returns."""
        answer: Any = None
        cursor = tx.cursor()
        try:
            while True:
                asked = body.send(answer)
                caller.must_be_there()
                if isinstance(asked, Sql):
                    await cursor.execute(_query(asked.text, bool(asked.params)), _values(asked.params))
                    answer = await cursor.fetchall() if cursor.description else []
                elif isinstance(asked, Many):
                    await cursor.executemany(_query(asked.text, True), [_values(row) or () for row in asked.rows])
                    answer = None
                else:
                    answer = await self._read_time(tx)
        except StopIteration as done:
            result: T = done.value
            return result
        except DriverError as error:
            if error.sqlstate in RACED:
                raise _Raced from error
            raise (unavailable(error) or error) from error

    async def _look(self, connection: Connection) -> None:
        """Hear from the server, and know its time better where it is ours."""
        if isinstance(self._time, Steady):
            await connection.execute(b"select 1")
        else:
            await self._read_time(connection)

    async def _read_time(self, connection: Connection) -> int:
        """Return the time to stamp, and know it better from then on."""
        if isinstance(self._time, Steady):
            return self._time()
        asked_ms = self._time.here_ms()
        row = await (await connection.execute(_TIME)).fetchone()
        assert row is not None
        return self._time.read(row[0], asked_ms=asked_ms)

    # the lock

    async def _while_held(self, caller: _Caller, body: Callable[..., Body[Any]], make: Callable[[], Body[T]]) -> T:
        """Run a body in a transaction in which the server says that the lock is ours; take it again if need be."""
        assert self._lock is not None
        lock, name = self._lock, body.__name__
        try:
            return await self._committed(caller, name, lambda: _guarded(lock, body, make))
        except LockLost:
            try:
                await lock.retake()
                return await self._committed(caller, name, lambda: _guarded(lock, body, make))
            except (LockLost, StoreLocked) as error:
                raise StoreUnavailable(f"this process may start no work now: {error}") from error

    async def _register_again(self) -> None:
        """After the lock was away: whoever had it meanwhile is gone, and what they owned is anybody's."""
        if self._node is None or self._lock is None:
            return
        lock, register = self._lock, partial(statements.register, self._node)
        await self._committed(_Caller(), "register", lambda: _guarded(lock, statements.register, register))


#: what only the process may do that has the lock, and how it goes about those that claim: a process that ends
#: may leave a claim behind that is still being committed, and `register` must not look before that is done
_OF_THE_OWNER: dict[Callable[..., Body[Any]], str] = {
    statements.register: "select pg_advisory_xact_lock(?)",
    statements.claim: "select pg_advisory_xact_lock_shared(?)",
    statements.probe: "",
}


def _guarded(lock: Lock, body: Callable[..., Body[Any]], make: Callable[[], Body[T]]) -> Body[T]:
    if among_claims := _OF_THE_OWNER[body]:
        yield Sql(among_claims, (lock.claims_key,))
    yield from lock.held()
    return (yield from make())


# --- opening ------------------------------------------------------------------


def _current_schema() -> Body[str]:
    [(schema,)] = yield Sql("select current_schema()")
    if schema is None:
        raise NoSchema("the schema in the URL's search_path does not exist: create it first")
    return str(schema)


def _now() -> Body[int]:
    now: int = yield NOW
    return now


def _is_behind() -> Body[bool]:
    """Say whether migrations are due. Needs no right to create anything, and takes no lock."""
    recorded = yield Sql(
        """
        select 1 from pg_class c join pg_namespace n on n.oid = c.relnamespace
        where c.relname = 'migration' and n.nspname = current_schema()
        """
    )
    if not recorded:
        return True
    applied = yield Sql("select number, checksum from migration")
    return bool(migrate.pending(dict(applied), migrate.released()))


def _next_migration(schema: str) -> Body[bool]:
    """Apply the next migration; False if there is none. One process at a time: two first starts at once would
    make the same table, and one of them would fail (X60)."""
    yield Sql("set local statement_timeout = 0")
    yield Sql(f"set local lock_timeout = {MIGRATION_WAIT_MS}")
    yield Sql("select pg_advisory_xact_lock(?)", (advisory_key("migration", schema),))
    due = migrate.pending((yield from migrate.applied()), migrate.released())
    return bool(due) and (yield from migrate.apply(due[0], database="postgres"))


# --- statements ---------------------------------------------------------------


@cache
def _query(text: str, has_values: bool) -> bytes:
    """Return a statement as the driver takes it: where there are values, `%s` stands for one, and `%%` for `%`."""
    ours = dialect(text, "postgres")
    return (ours.replace("%", "%%").replace("?", "%s") if has_values else ours).encode()


def _values(params: Sequence[Value]) -> list[Value] | None:
    """Return values as the server's columns can hold them: a name from outside may have what they can't."""
    return [storable(value) if isinstance(value, str) else value for value in params] or None
