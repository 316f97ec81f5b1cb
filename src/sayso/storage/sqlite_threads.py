"""The threads of a SQLite store: one that writes, and those that read.

The writer commits whatever waits as one transaction (K6). Batches form by themselves: while one is flushed
to disk, the next one queues. Nobody is answered before COMMIT; if COMMIT fails, or its acknowledgement is
lost, everybody in the batch is told that it is unknown. A reader batches too, to wake its loop once.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sayso.core.errors import CommitUnknown, StoreUnavailable
from sayso.core.text import storable
from sayso.storage.shape import CommitPhase, OnCommit
from sayso.storage.statements import Body, Many, Sql, Value

log = logging.getLogger(__name__)

T = TypeVar("T")

#: callers in one write transaction, and in one read
WRITES_TOGETHER = 256
READS_TOGETHER = 64
#: how long a read that is done waits for the rest of its batch
READ_WAIT_S = 0.001


_WHY = {
    sqlite3.SQLITE_BUSY: "another process holds its lock",
    sqlite3.SQLITE_LOCKED: "another connection holds its lock",
    sqlite3.SQLITE_NOMEM: "there is no memory left",
    sqlite3.SQLITE_READONLY: "its file or folder is read-only",
    sqlite3.SQLITE_IOERR: "the disk failed to read or write",
    sqlite3.SQLITE_CORRUPT: "its file is damaged",
    sqlite3.SQLITE_FULL: "the disk is full, or the file has reached its limit",
    sqlite3.SQLITE_CANTOPEN: "its file can't be opened",
    sqlite3.SQLITE_NOTADB: "its file is no database",
}


def unavailable(error: Exception) -> StoreUnavailable | None:
    """Return what an error of the database means to a caller; None if it is a fault of ours."""
    why = _WHY.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
    return None if why is None else StoreUnavailable(f"the store can't be used: {why}")


def perform(cursor: sqlite3.Cursor, body: Body[T], clock: Callable[[], int]) -> T:
    """Run a body's statements in the transaction that is open, and return what it returns."""
    answer: Any = None
    try:
        while True:
            asked = body.send(answer)
            if isinstance(asked, Sql):
                answer = _execute(cursor, asked.text, asked.params)
            elif isinstance(asked, Many):
                cursor.executemany(asked.text, asked.rows)
                answer = None
            else:
                answer = clock()
    except StopIteration as done:
        result: T = done.value
        return result


def _execute(cursor: sqlite3.Cursor, text: str, params: Sequence[Value]) -> list[Any]:
    try:
        if not any(isinstance(value, str) and "\0" in value for value in params):
            return cursor.execute(text, params).fetchall()
    except UnicodeEncodeError:
        pass
    # a NUL or a lone surrogate in a name from outside: stored, and looked up, as U+FFFD
    return cursor.execute(text, [storable(value) if isinstance(value, str) else value for value in params]).fetchall()


class _Job(Generic[T]):
    """A body that waits, and its caller."""

    __slots__ = ("body", "error", "future", "loop", "name", "result")

    def __init__(self, name: str, body: Body[T]) -> None:
        self.name, self.body = name, body
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[T] = self.loop.create_future()
        self.result: T
        self.error: Exception | None = None

    def settle(self) -> None:
        """Tell the caller, unless it was cancelled: its transaction is what it is."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class _Waiting:
    """What waits for one thread. Ends when it was closed and everything before that was taken."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closed, self._closing = False, threading.Lock()

    async def submit(self, name: str, body: Body[T]) -> T:
        job = _Job(name, body)
        with self._closing:  # a job behind the end would never be answered
            if self._closed:
                raise StoreUnavailable("the store is closed")
            self._jobs.put(job)
        return await job.future

    def close(self) -> None:
        with self._closing:
            self._closed = True
            self._jobs.put(None)

    def take(self, *, at_most: int) -> list[_Job[Any]]:
        """Return all that waits, once something does; nothing at the end."""
        batch: list[_Job[Any]] = []
        job = self._jobs.get()
        while job is not None:
            batch.append(job)
            if len(batch) == at_most or self._jobs.empty():
                return batch
            job = self._jobs.get()
        if batch:
            self._jobs.put(None)  # come upon the end again, after this batch
        return batch


class Writer:
    """The only connection that writes, and its thread. `submit` from any event loop."""

    def __init__(
        self, connection: sqlite3.Connection, clock: Callable[[], int], *, on_commit: OnCommit | None = None
    ) -> None:
        """Start the thread; the connection is its own until `close`."""
        self.commits = 0
        self._connection, self._cursor = connection, connection.cursor()
        self._clock, self._on_commit = clock, on_commit
        self._waiting = _Waiting()
        self._thread = threading.Thread(target=self._run, name="sayso-write", daemon=True)
        self._thread.start()

    async def submit(self, name: str, body: Body[T]) -> T:
        """Return what `body` returns, once it is committed. A caller that is cancelled tears nothing.

        Raises:
            StoreUnavailable: nothing happened.
            CommitUnknown: it may be stored.
            Exception: whatever `body` raises; nothing of it is stored.
        """
        return await self._waiting.submit(name, body)

    def close(self) -> None:
        """Commit what was submitted, end the thread, close the connection."""
        self._waiting.close()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._waiting.take(at_most=WRITES_TOGETHER):
            try:
                self._commit(batch)
            except Exception as error:  # noqa: BLE001 - the edge of the thread: the batch is told, the next one runs
                log.warning("commit unknown", extra={"callers": len(batch), "cause": str(error)})
                for job in batch:
                    job.error = job.error or CommitUnknown(f"the commit has no answer: {error}")
                _roll_back(self._connection)
            _answer(batch)

    def _commit(self, batch: list[_Job[Any]]) -> None:
        try:
            self._cursor.execute("begin immediate")
        except sqlite3.Error as error:
            for job in batch:
                job.error = unavailable(error) or error
            return
        for job in batch:
            self._apart(job)
        self._tell(CommitPhase.BEFORE, batch)
        self._cursor.execute("commit")
        self.commits += 1
        self._tell(CommitPhase.AFTER, batch)

    def _tell(self, phase: CommitPhase, batch: list[_Job[Any]]) -> None:
        if self._on_commit is not None:
            self._on_commit(phase, tuple(job.name for job in batch))

    def _apart(self, job: _Job[Any]) -> None:
        """Run one body under a savepoint of its own. If it fails, it fails alone, unless the database has
        dropped the whole transaction with it."""
        self._cursor.execute("savepoint caller")
        try:
            job.result = perform(self._cursor, job.body, self._clock)
        except Exception as error:  # somebody's body: whatever it raises is its caller's to hear
            job.error = unavailable(error) or error
            if not self._connection.in_transaction:
                raise
            self._cursor.execute("rollback to caller")
        self._cursor.execute("release caller")


class Reader:
    """A connection that only reads, and its thread. `submit` from any event loop."""

    def __init__(self, connection: sqlite3.Connection, clock: Callable[[], int]) -> None:
        """Start the thread; the connection is its own until `close`."""
        self._connection, self._cursor, self._clock = connection, connection.cursor(), clock
        self._waiting = _Waiting()
        self._thread = threading.Thread(target=self._run, name="sayso-read", daemon=True)
        self._thread.start()

    async def submit(self, name: str, body: Body[T]) -> T:
        """Return what `body` reads; it sees everything that was committed before, and nothing half.

        Raises:
            StoreUnavailable: the file can't be read.
        """
        return await self._waiting.submit(name, body)

    def close(self) -> None:
        """Let the reads that were submitted end, end the thread, close the connection."""
        self._waiting.close()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while batch := self._waiting.take(at_most=READS_TOGETHER):
            done: list[_Job[Any]] = []
            began = time.monotonic()
            for job in batch:
                self._read(job)
                done.append(job)
                if time.monotonic() - began > READ_WAIT_S:
                    _answer(done)
                    done, began = [], time.monotonic()
            _answer(done)

    def _read(self, job: _Job[Any]) -> None:
        try:
            self._cursor.execute("begin")
            job.result = perform(self._cursor, job.body, self._clock)
        except Exception as error:  # noqa: BLE001 - the edge of the thread: the caller is told, the next one runs
            job.error = unavailable(error) or error
        _roll_back(self._connection)


def _roll_back(connection: sqlite3.Connection) -> None:
    """End the transaction if one is open. The thread lives on whatever the database says to it."""
    try:
        connection.rollback()
    except sqlite3.Error as error:
        log.error("rollback failed", extra={"cause": str(error)})


def _answer(batch: list[_Job[Any]]) -> None:
    """Wake each event loop once, for all of its callers."""
    for loop in {job.loop for job in batch}:
        jobs = [job for job in batch if job.loop is loop]
        try:
            loop.call_soon_threadsafe(_settle, jobs)
        except RuntimeError:
            log.warning("callers are gone with their event loop", extra={"callers": len(jobs)})


def _settle(jobs: list[_Job[Any]]) -> None:
    for job in jobs:
        job.settle()
