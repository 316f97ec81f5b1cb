"""The right to run sessions on a database and schema: one process has it, for as long as its connection lives.

It is an advisory lock of a session of the server's, held on a connection of its own. The server lets go of it
when that connection ends, so a crash leaves nothing to clean up. It keeps a second process from working by
mistake; what keeps two from harm is the epoch and the nonce in every write, which do not depend on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from sayso.core.errors import CommitUnknown, StoreLocked, StoreUnavailable
from sayso.storage.postgres_connections import Connection, DriverError, Target, closed_unless_ready, cut_after, is_lost
from sayso.storage.statements import Body, Sql

log = logging.getLogger(__name__)

#: how often the connection is tried
LOOK_S = 2.0
#: how long an answer on it may take
ANSWER_S = 5.0
#: how long a start tries for a lock that somebody has: the server may not have noticed yet that a process has ended
PATIENCE_S = 1.0
#: how often meanwhile
AGAIN_S = 0.05


def advisory_key(purpose: str, schema: str) -> int:
    """Return the key of an advisory lock, 63 bits: one a purpose and schema, in any database."""
    return int.from_bytes(hashlib.sha256(f"sayso {purpose} {schema}".encode()).digest()[:8]) >> 1


class LockLost(Exception):
    """The server does not know our lock."""

    def __init__(self) -> None:
        super().__init__("its lock on the store was lost")


class Lock:
    """The lock of one schema, taken again by itself when its connection was lost.

    While it is not held, nothing here stops: `held` is for a transaction that must not be done without.
    """

    def __init__(
        self,
        target: Target,
        schema: str,
        *,
        on_look: Callable[[Connection], Awaitable[object]],
        on_retaken: Callable[[], Awaitable[object]],
    ) -> None:
        """Hold nothing yet. `on_look` is awaited with the connection every `LOOK_S`; it asks the server something.
        `on_retaken` is awaited when the lock was away and is ours again, until it has succeeded once."""
        self._target, self._schema, self._on_look, self._on_retaken = target, schema, on_look, on_retaken
        #: the lock was lost, and is not ours again; then it is, and what that brings with it is still to be done
        self._lost = self._owed = False
        self._key = advisory_key("owner", schema)
        #: of the lock, for a transaction's length, that claims share and a registration has alone
        self.claims_key = advisory_key("claims", schema)
        self._connection: Connection | None = None
        self._taking = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def take(self) -> None:
        """Take the lock, and keep it until `close`.

        Raises:
            StoreLocked: another process has it.
            StoreUnavailable: the server can't be asked.
        """
        await self._take(PATIENCE_S)
        self._task = asyncio.get_running_loop().create_task(self._keep())

    def held(self) -> Body[None]:
        """Go on if the server says, in this transaction, that our connection has the lock.

        Raises:
            LockLost: it does not.
        """
        pid = 0 if self._connection is None else self._connection.info.backend_pid
        found = yield Sql(
            """
            select 1 from pg_locks
            where locktype = 'advisory' and granted and pid = ? and objsubid = 1
                and database = (select oid from pg_database where datname = current_database())
                and classid = ? and objid = ?
            """,
            (pid, self._key >> 32, self._key & 0xFFFFFFFF),
        )
        if not found:
            raise LockLost

    async def retake(self) -> None:
        """Take the lock again if its connection was lost.

        Raises:
            StoreLocked: another process has taken it meanwhile.
            StoreUnavailable: the server can't be asked.
        """
        async with self._taking:
            if not await self._looked():
                if not self._lost:
                    log.warning("lock lost", extra={"schema": self._schema})
                self._lost = True
                await self._take(0)
                log.info("lock taken again", extra={"schema": self._schema})
                self._lost, self._owed = False, True
            if self._owed:
                await self._on_retaken()
                self._owed = False

    async def close(self) -> None:
        """Let go."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._connection is not None:
            # said aloud: else whoever opens the store next may be quicker than the server's noticing
            with suppress(DriverError), cut_after(self._connection, ANSWER_S):
                await self._connection.execute(b"select pg_advisory_unlock_all()")
            await self._connection.close()

    async def _keep(self) -> None:
        said = ""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.retake()
                said = ""
            except StoreLocked as error:
                if said != "locked":
                    log.error("the store was taken over by another process", extra={"cause": str(error)})
                said = "locked"
            except (StoreUnavailable, CommitUnknown, LockLost) as error:
                if said != "unavailable":
                    log.warning("lock not taken again", extra={"cause": str(error)})
                said = "unavailable"
            except Exception:
                log.exception("lock not looked after")

    async def _looked(self) -> bool:
        """Return whether the connection answers."""
        if self._connection is None or is_lost(self._connection):
            return False
        try:
            with cut_after(self._connection, ANSWER_S):
                await self._on_look(self._connection)
        except DriverError:
            return False
        return not is_lost(self._connection)

    async def _take(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        connection = await self._target.connect()
        async with closed_unless_ready(connection):
            deadline = loop.time() + patience_s
            with cut_after(connection, patience_s + ANSWER_S):
                while not await _scalar(connection, b"select pg_try_advisory_lock(%s)", self._key):
                    if loop.time() >= deadline:
                        raise StoreLocked(await self._who(connection))
                    await asyncio.sleep(AGAIN_S)
        if self._connection is not None:
            await self._connection.close()
        self._connection = connection

    async def _who(self, connection: Connection) -> str:
        where = await _scalar(
            connection,
            b"""
            select coalesce(host(client_addr), 'its own machine') || ', backend ' || a.pid
            from pg_locks l join pg_stat_activity a on a.pid = l.pid
            where locktype = 'advisory' and granted and classid::bigint << 32 | objid::bigint = %s limit 1
            """,
            self._key,
        )
        beside = "" if where is None else f" (from {where})"
        return f"schema {self._schema} of the database is in use by another sayso process{beside}"


async def _scalar(connection: Connection, query: bytes, *params: object) -> object:
    row = await (await connection.execute(query, params)).fetchone()
    return None if row is None else row[0]
