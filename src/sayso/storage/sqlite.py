"""The store on one SQLite file: one thread writes, two read.

What waits is written in one transaction, a savepoint for each caller, and answered after COMMIT (K6): one
flush to disk for all, and a caller that fails takes nobody with it. WAL and synchronous=FULL, so what was
answered survives a loss of power.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ParamSpec, TypeVar

from sayso.core.errors import StoreLocked, StoreUnavailable
from sayso.storage import migrate
from sayso.storage.bodies import BodyStore
from sayso.storage.shape import DOOR_NOTES_MAX, INBOX_MAX, OnCommit, Steady
from sayso.storage.sqlite_threads import Reader, Writer, perform, unavailable
from sayso.storage.statements import Body

P = ParamSpec("P")
T = TypeVar("T")

#: how long a statement waits for another process's lock
BUSY_MS = 5_000

_PRAGMAS = (
    "pragma journal_mode = wal",
    "pragma synchronous = full",
    "pragma cache_size = -16384",
    "pragma temp_store = memory",
    # a checkpoint costs a flush of its own: after 8 MiB; a file that a burst made long is cut afterwards
    "pragma wal_autocheckpoint = 2000",
    "pragma journal_size_limit = 67108864",
)


class SqliteStore(BodyStore):
    """See `Store` for what every method promises, and `open` for how to get one."""

    def __init__(
        self,
        writer: Writer,
        readers: tuple[Reader, Reader],
        clock: Steady,
        held: ExitStack,
        *,
        inbox_max: int,
        door_notes_max: int,
    ) -> None:
        super().__init__(clock, inbox_max=inbox_max, door_notes_max=door_notes_max)
        self._writer, self._held = writer, held
        #: what somebody waits for is small, and never behind a page of history
        self._reader, self._pager = readers

    @classmethod
    async def open(
        cls,
        path: str | Path,
        *,
        clock: Callable[[], int],
        exclusive: bool,
        on_commit: OnCommit | None = None,
        inbox_max: int = INBOX_MAX,
        door_notes_max: int = DOOR_NOTES_MAX,
        bytes_max: int | None = None,
    ) -> SqliteStore:
        """Open the file, make it if there is none, and bring its schema up to date.

        `clock` returns milliseconds since 1970 UTC. `exclusive` is for who runs sessions, one process a file;
        a look or a token from beside needs no lock. An inbox holds `inbox_max` queued entries in each lane, the
        door's record `door_notes_max` notes. `on_commit` is called in the writer's thread around each
        COMMIT, and may raise or end the process there: see `CommitPhase`. `bytes_max` bounds the file; past
        it the store is full as on a full disk.

        Raises:
            StoreLocked: another process has it exclusively.
            SchemaTooNew, SchemaChanged: this release must not touch it.
            StoreUnavailable: it can't be opened, or not be written where it must be.
        """

        def opened() -> SqliteStore:
            file = Path(path).absolute()
            with ExitStack() as stack:
                if exclusive:
                    stack.callback(os.close, _lock(file))
                steady = Steady(clock)
                try:
                    connection = _connect(file)
                    stack.callback(connection.close)
                    for pragma in _PRAGMAS:
                        connection.execute(pragma)
                    _migrate(connection, steady)
                    if bytes_max is not None:
                        [(page_bytes,)] = connection.execute("pragma page_size").fetchall()
                        connection.execute(f"pragma max_page_count = {bytes_max // page_bytes}")
                    reading = [_connect(file, read_only=True) for _ in range(2)]
                except sqlite3.Error as error:
                    if (told := unavailable(error)) is None:
                        raise
                    raise told from error
                writer = Writer(connection, steady, on_commit=on_commit)
                readers = Reader(reading[0], steady), Reader(reading[1], steady)
                held = stack.pop_all()
                return cls(writer, readers, steady, held, inbox_max=inbox_max, door_notes_max=door_notes_max)

        return await asyncio.to_thread(opened)

    @property
    def commits(self) -> int:
        """How many COMMITs the writer has done."""
        return self._writer.commits

    async def _write(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writer.submit(body.__name__, body(*args, **kwargs))

    async def _read(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._reader.submit(body.__name__, body(*args, **kwargs))

    async def _read_page(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._pager.submit(body.__name__, body(*args, **kwargs))

    async def close(self) -> None:
        """See `Store`. May be called twice; what is asked afterwards gets StoreUnavailable."""

        def closed() -> None:
            self._reader.close()
            self._pager.close()
            self._writer.close()
            self._held.close()

        await asyncio.to_thread(closed)


def _connect(file: Path, *, read_only: bool = False) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"{file.as_uri()}?mode={'ro' if read_only else 'rwc'}",
        uri=True,
        timeout=BUSY_MS / 1000,
        isolation_level=None,  # every BEGIN here is written out
        check_same_thread=False,  # one thread at a time, not always the same
        cached_statements=256,
    )
    if read_only:
        connection.execute("pragma query_only = on")
    return connection


def _migrate(connection: sqlite3.Connection, clock: Callable[[], int]) -> None:
    cursor = connection.cursor()
    for migration in migrate.pending(perform(cursor, migrate.applied(), clock), migrate.released()):
        cursor.execute("begin immediate")
        try:
            perform(cursor, migrate.apply(migration, database="sqlite"), clock)
            cursor.execute("commit")
        finally:
            if connection.in_transaction:
                connection.rollback()


def _lock(file: Path) -> int:
    """Return the descriptor that holds the file's lock; it goes with the descriptor, so with the process."""
    try:
        descriptor = os.open(f"{file}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreUnavailable(f"{file}.lock can't be opened: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).decode("ascii", "replace").strip() or "unknown"
        os.close(descriptor)
        raise StoreLocked(f"{file} is in use by another sayso process (pid {holder})") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
