"""Connections to PostgreSQL: made when needed, kept for the next transaction, dropped when they are broken.

There is nothing here that tries again on its own: a server that is away is away for the caller who asks,
at once and with the reason, and back for the next one as soon as it is. Nothing that is raised or logged
quotes the URL, or what libpq says about it, since either may hold a password.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from sayso.core.errors import Refused, StoreUnavailable

try:
    import psycopg
    from psycopg.adapt import AdaptersMap
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.pq import TransactionStatus
    from psycopg.types.numeric import Int8Dumper
except ImportError as error:
    raise ImportError("a store on PostgreSQL needs psycopg: pip install 'sayso[postgres]'", name="psycopg") from error

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
DriverError: TypeAlias = psycopg.Error


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one store may take of a server, and how long it waits for it."""

    #: connections at once, beside the one that holds the lock
    connections: int = 10
    #: waiting for one of them to be free
    free_s: float = 5.0
    #: making one
    connect_s: int = 5
    #: one statement, of which waiting for another transaction's lock
    statement_ms: int = 30_000
    lock_ms: int = 5_000
    #: a transaction in which we say nothing: its locks are others' to wait for
    silent_ms: int = 10_000
    #: a whole transaction, by our own clock: a server that says nothing may be gone without a word
    transaction_s: float = 60.0


class BadUrl(Refused):
    """The URL of a database can't be read; the text does not quote it."""


#: what the server says with a code of its own, for who has to mend it
_WHY = {
    "25006": "the database is read-only",
    "25P03": "a transaction was left open too long",
    "28000": "the server does not let this role in",
    "28P01": "the server refuses the password",
    "3D000": "there is no database of that name",
    "3F000": "the schema in the URL's search_path does not exist",
    "42501": "the role lacks a right that it needs",
    "53000": "the server lacks resources",
    "53100": "the server's disk is full",
    "53200": "the server has no memory left",
    "53300": "the server has too many connections",
    "55P03": "another transaction holds the lock for too long",
    "57014": "a statement took too long, or was cancelled on the server",
    "57P01": "the server ended the connection: it shuts down, or somebody told it to",
    "57P02": "the server has crashed and is restarting",
    "57P03": "the server is starting or stopping",
    "57P04": "the database was dropped",
    "57P05": "the server ended a connection that was idle",
    "58000": "the server's machine failed",
    "58030": "the server's disk failed to read or write",
    "XX001": "the server's data is damaged",
    "XX002": "one of the server's indexes is damaged",
}

#: what libpq says of a connection that was not made, where the server's code does not come through
_NOT_MADE = {
    "Connection refused": "nothing listens there",
    "No such file": "nothing listens on that socket",
    "resolve host": "its host's name is not known",
    "timeout": "it did not answer in time",
    "unreachable": "its network can't be reached",
    "too many clients": _WHY["53300"],
    "remaining connection slots": _WHY["53300"],
    "too many connections": _WHY["53300"],
    "password": _WHY["28P01"],
    "pg_hba": _WHY["28000"],
    "role": _WHY["28000"],
    "database system is": _WHY["57P03"],
    "does not exist": _WHY["3D000"],
    "SSL": "TLS with it could not be set up",
    "hot standby": "it is a standby, and no primary",
    "standby mode": "it is a standby, and no primary",
}

#: two transactions were in each other's way, and the server has rolled ours back: it may be run again
RACED = frozenset({"40001", "40P01"})

_ADAPTERS = AdaptersMap(psycopg.adapters)
# one type for every number: else a statement would be prepared once for each size that its values have
_ADAPTERS.register_dumper(int, Int8Dumper)

_SET_UP = b"""
    select set_config('statement_timeout', %s, false), set_config('lock_timeout', %s, false),
        set_config('idle_in_transaction_session_timeout', %s, false),
        set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
        set_config('tcp_keepalives_count', '3', false),
        set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)
    """


def unavailable(error: BaseException) -> StoreUnavailable | None:
    """Return what an error of the driver means to a caller; None if it is a fault of ours."""
    if not isinstance(error, DriverError):
        return None
    why = _WHY.get(error.sqlstate or "")
    lost = isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    if why is None and lost and (error.sqlstate is None or error.sqlstate.startswith("08")):
        why = "the connection was lost"
    return None if why is None else StoreUnavailable(f"the store can't be used: {why}")


def is_lost(connection: Connection) -> bool:
    """Return whether nothing more can be said on a connection."""
    return connection.closed or connection.broken


class Target:
    """Where the database is, and as whom; its text never shows the password."""

    def __init__(self, url: str, bounds: Bounds) -> None:
        """Read the URL.

        Raises:
            BadUrl: it can't be read.
        """
        authority = url.partition("://")[2].partition("/")[0].partition("?")[0]
        if authority.count("@") > 1:
            raise BadUrl("the database's URL has two @: write one that is in a password as %40")
        try:
            given: dict[str, Any] = {**conninfo_to_dict(url)}
        except DriverError:
            raise BadUrl("the database's URL can't be read: postgresql://USER:PASSWORD@HOST:PORT/DATABASE") from None
        standard: dict[str, str | int] = {
            "application_name": "sayso",
            "connect_timeout": bounds.connect_s,
            # K3: what a capture reads is what was committed, so no standby
            "target_session_attrs": "primary",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": 20_000,
        }
        self._conninfo = make_conninfo("", **{**standard, **given, "client_encoding": "utf8"})
        self.bounds = bounds

    async def connect(self) -> Connection:
        """Return a new connection, outside a transaction.

        Raises:
            StoreUnavailable: there is none to be had; the text says why.
            BadUrl: the server's database can't hold every text.
        """
        try:
            connection: Connection = await psycopg.AsyncConnection.connect(
                self._conninfo, autocommit=True, context=_ADAPTERS
            )
        except (DriverError, OSError) as error:
            said = str(error)
            why = next((why for phrase, why in _NOT_MADE.items() if phrase in said), "it can't be reached")
            raise StoreUnavailable(f"there is no connection to the database: {why}") from None
        async with closed_unless_ready(connection):
            if connection.info.parameter_status("server_encoding") != "UTF8":
                raise BadUrl("the database's encoding must be UTF8")
            limits = (self.bounds.statement_ms, self.bounds.lock_ms, self.bounds.silent_ms)
            await connection.execute(_SET_UP, [str(limit) for limit in limits])
        return connection


@asynccontextmanager
async def closed_unless_ready(connection: Connection) -> AsyncIterator[None]:
    """Close the connection if the block, which makes it ready, does not come to its end.

    Raises:
        StoreUnavailable: the database could not do what the block asked of it.
    """
    try:
        yield
    except DriverError as error:
        await connection.close()
        raise (unavailable(error) or error) from None
    except BaseException:
        await connection.close()
        raise


@contextmanager
def cut_after(connection: Connection, seconds: float) -> Iterator[None]:
    """End the connection if the block takes longer: whoever waits on it then hears that it was lost.

    A cancellation would not do: the driver answers one by asking the server, and waits for it.
    """

    def cut() -> None:
        if is_lost(connection):
            return
        with socket.socket(fileno=os.dup(connection.fileno())) as ours:
            ours.shutdown(socket.SHUT_RDWR)

    timer = asyncio.get_running_loop().call_later(seconds, cut)
    try:
        yield
    finally:
        timer.cancel()


class Connections:
    """A bounded number of connections for transactions; the newest idle one first."""

    def __init__(self, target: Target) -> None:
        """Make none yet."""
        self._target, self._bounds = target, target.bounds
        self._idle: list[Connection] = []
        self._free = asyncio.Semaphore(self._bounds.connections)
        # pages of history take half of them at most, and nothing small waits behind one
        self._free_for_pages = asyncio.Semaphore(max(1, self._bounds.connections // 2))

    @asynccontextmanager
    async def transaction(
        self, begin: bytes, *, page: bool = False, within_s: float | None = None
    ) -> AsyncIterator[Connection]:
        """Begin a transaction for the block. What the block has not committed is rolled back. `within_s` is how long
        it may take, if not as long as others.

        Raises:
            StoreUnavailable: there is no connection to be had.
        """
        async with self._place(self._free_for_pages) if page else nullcontext(), self._place(self._free):
            connection = await self._begun(begin)
            try:
                with cut_after(connection, within_s or self._bounds.transaction_s):
                    yield connection
            finally:
                await self._put_back(connection)

    async def close(self) -> None:
        """Close those that are idle; those in use are closed when they are put back."""
        self._bounds, idle, self._idle = Bounds(connections=0), self._idle, []
        for connection in idle:
            await connection.close()

    @asynccontextmanager
    async def _place(self, free: asyncio.Semaphore) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._bounds.free_s):
                await free.acquire()
        except TimeoutError:
            raise StoreUnavailable("the store can't be used: all its connections are busy") from None
        try:
            yield
        finally:
            free.release()

    async def _begun(self, begin: bytes) -> Connection:
        """Return a connection in a new transaction. One that was idle may have been lost meanwhile, and then the
        others as well, for one reason: they are dropped, and a new one is made."""
        while self._idle:
            connection = self._idle.pop()
            try:
                with cut_after(connection, self._bounds.connect_s):
                    await connection.execute(begin, prepare=False)
            except DriverError as error:
                if not is_lost(connection):
                    raise (unavailable(error) or error) from error
                lost, self._idle = [connection, *self._idle], []
                for each in lost:
                    await each.close()
            else:
                return connection
        connection = await self._target.connect()
        try:
            with cut_after(connection, self._bounds.connect_s):
                await connection.execute(begin, prepare=False)
        except DriverError as error:
            await connection.close()
            raise (unavailable(error) or error) from error
        return connection

    async def _put_back(self, connection: Connection) -> None:
        status = connection.info.transaction_status
        if status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
            try:
                with cut_after(connection, self._bounds.connect_s):
                    await connection.execute(b"rollback", prepare=False)
            except DriverError:
                await connection.close()  # and the server rolls back
                return
            status = connection.info.transaction_status
        if status is TransactionStatus.IDLE and len(self._idle) < self._bounds.connections:
            self._idle.append(connection)
        else:
            await connection.close()
