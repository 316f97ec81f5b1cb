"""Between a store and its PostgreSQL server: a wire that a test can cut where it likes."""

from __future__ import annotations

import asyncio
from enum import Enum
from urllib.parse import quote, urlencode

import psycopg
from psycopg.conninfo import conninfo_to_dict


class Wire:
    """A server's address whose connections a test can tamper with; behind it is the real server."""

    def __init__(self, url: str) -> None:
        self._url = url
        with psycopg.connect(url) as connection:
            self._host, self._server_port = connection.info.host, connection.info.port
        self._ends: set[asyncio.StreamWriter] = set()
        self._listener: asyncio.Server | None = None
        self._port = 0
        #: what happens at the next COMMIT, once
        self.at_commit: AtCommit | None = None
        #: while this is set, what the server says goes nowhere
        self.silent = False

    @property
    def url(self) -> str:
        """The database, through here."""
        given = {key: value for key, value in conninfo_to_dict(self._url).items() if key not in ("host", "hostaddr")}
        database, user = given.pop("dbname"), given.pop("user")
        rest = urlencode(
            {**given, "sslmode": "disable", "gssencmode": "disable"} | {"port": self._port}, quote_via=quote
        )
        return f"postgresql://{user}@127.0.0.1/{database}?{rest}"

    async def up(self) -> None:
        """Listen; on the same port each time."""
        self._listener = await asyncio.start_server(self._link, "127.0.0.1", self._port)
        self._port = self._listener.sockets[0].getsockname()[1]

    async def down(self) -> None:
        """Cut all connections, and listen no more."""
        if self._listener is not None:
            self._listener.close()
            self.cut()
            await self._listener.wait_closed()
            self._listener = None

    def cut(self) -> None:
        """End every connection, without a word on either side."""
        for end in self._ends:
            end.transport.abort()

    async def _link(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        if self._host.startswith("/"):
            to_the_server = asyncio.open_unix_connection(f"{self._host}/.s.PGSQL.{self._server_port}")
        else:
            to_the_server = asyncio.open_connection(self._host, self._server_port)
        from_server, to_server = await to_the_server
        ends = {to_client, to_server}
        self._ends |= ends
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._asked(from_client, to_server))
                both.create_task(self._answered(from_server, to_client))
        except* (_Cut, ConnectionError):
            pass
        finally:
            self._ends -= ends
            for end in ends:
                end.transport.abort()

    async def _asked(self, from_client: asyncio.StreamReader, to_server: asyncio.StreamWriter) -> None:
        while said := await from_client.read(65_536):
            if _COMMIT in said and self.at_commit is AtCommit.NEVER_ASKED:
                self.at_commit = None
                raise _Cut
            to_server.write(said)
            await to_server.drain()
        raise _Cut

    async def _answered(self, from_server: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        while said := await from_server.read(65_536):
            if _COMMITTED in said and self.at_commit is AtCommit.NEVER_ANSWERED:
                self.at_commit = None
                raise _Cut
            if _COMMITTED in said and self.at_commit is AtCommit.SILENT:
                self.at_commit, self.silent = None, True
            if not self.silent:
                to_client.write(said)
                await to_client.drain()
        raise _Cut


class AtCommit(Enum):
    """Where a connection ends."""

    #: COMMIT does not arrive: the server rolls back
    NEVER_ASKED = "commit is not sent"
    #: what it answers does not arrive: it has committed
    NEVER_ANSWERED = "commit is not answered"
    #: as before, and the connection stays as it is
    SILENT = "nothing is heard from commit on"


class _Cut(Exception):
    """The connection ends here."""


#: how the two look on the wire
_COMMIT = b"Q\0\0\0\x0bcommit\0"
_COMMITTED = b"C\0\0\0\x0bCOMMIT\0"
