"""The store on one SQLite file: one thread writes, two read.

What waits is written in one transaction, a savepoint for each caller, and answered after COMMIT (K6): one
flush to disk for all, and a caller that fails takes nobody with it. WAL and synchronous=FULL, so what was
answered survives a loss of power.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ParamSpec, TypeVar

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import AnswerRefused, CommitUnknown, StoreLocked, StoreUnavailable
from sayso.core.operation import OperationState, Ref
from sayso.core.origin import Principal
from sayso.core.rows import Row, Scalar
from sayso.core.session import Position, SessionRecord, Token
from sayso.storage import migrate, statements, statements_door, statements_files
from sayso.storage.shape import (
    DOOR_NOTES_MAX,
    HASHED_APART_BYTES,
    INBOX_MAX,
    PIECE_BYTES,
    Steady,
    check_blobs,
    pieces,
)
from sayso.storage.sqlite_threads import OnCommit, Reader, Writer, perform, unavailable
from sayso.storage.statements import Body
from sayso.storage.store import (
    AttachmentRow,
    Claimed,
    DoorNote,
    DoorRow,
    Entry,
    Fired,
    InboxRow,
    OperationRow,
    ParticipantRow,
    Put,
    RefRow,
    Released,
    TokenRow,
    Upload,
    WriteOutcome,
)

P = ParamSpec("P")
T = TypeVar("T")

#: how long a statement waits for another process's lock
BUSY_MS = 5_000
#: dedupe entries, or uploads, dropped in one transaction
FORGET_AT_ONCE = 1_000
#: pieces of bytes dropped in one transaction
SWEEP_AT_ONCE = 4

_PRAGMAS = (
    "pragma journal_mode = wal",
    "pragma synchronous = full",
    "pragma cache_size = -16384",
    "pragma temp_store = memory",
    # a checkpoint costs a flush of its own: after 8 MiB; a file that a burst made long is cut afterwards
    "pragma wal_autocheckpoint = 2000",
    "pragma journal_size_limit = 67108864",
)


class SqliteStore:
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
        self._writer, self._clock, self._held = writer, clock, held
        #: what somebody waits for is small, and never behind a page of history
        self._reader, self._pager = readers
        self._inbox_max, self._door_notes_max = inbox_max, door_notes_max

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

    # engine

    async def register(self, node: str) -> int:
        """See `Store`. Valid while one node runs sessions here, which `exclusive` sees to."""
        return await self._write(statements.register, node)

    async def claim(self, node: str, *, at_most: int) -> list[Claimed]:
        return await self._write(statements.claim, node, [secrets.token_hex(8) for _ in range(at_most)])

    async def release(self, token: Token, *, looked_to: int) -> Released:
        return await self._write(statements.release, token, looked_to)

    async def surrender(self, token: Token) -> bool:
        return await self._write(statements.surrender, token)

    async def fire(self) -> Fired:
        return await self._write(statements_door.fire)

    # session

    async def create_session(self, session: str, *, owner: Principal, title: str) -> SessionRecord:
        return await self._write(statements.create_session, session, owner, title)

    async def session(self, session: str) -> SessionRecord | None:
        return await self._read(statements.session, session)

    async def sessions(self, *, of: Principal | None, limit: int, before: str | None = None) -> list[SessionRecord]:
        return await self._read_page(statements.sessions, of, limit, before)

    async def participants(self, session: str) -> list[ParticipantRow]:
        return await self._read(statements.participants, session)

    async def participant(self, session: str, principal: Principal) -> ParticipantRow | None:
        return await self._read(statements.participant, session, principal)

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        await self._sent_ahead(blobs)
        return await self._write(statements.write, token, rows, blobs)

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> list[Row]:
        return await self._read_page(statements.rows, session, after, up_to, limit)

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> list[Row]:
        return await self._read_page(statements.last_rows, session, limit, before)

    async def keep(self, session: str, position: Position) -> int:
        return await self._read(statements.keep, session, position)

    async def standings(
        self, session: str, *, states: Sequence[ConsentState] | None = None, due: bool = False
    ) -> list[Standing]:
        return await self._read(statements.standings, session, states, due)

    async def standing(self, session: str, consent: str) -> Standing | None:
        return await self._read(statements.standing, session, consent)

    async def operations(self, session: str, *, states: Sequence[OperationState] | None = None) -> list[OperationRow]:
        return await self._read(statements.operations, session, states)

    async def operation(self, session: str, operation: str) -> OperationRow | None:
        return await self._read(statements.operation, session, operation)

    async def refs(self, source: str, refs: Sequence[Ref]) -> list[RefRow]:
        return await self._read(statements.refs, source, refs)

    async def side_tables(self, session: str) -> dict[str, list[tuple[Scalar, ...]]]:
        """Return what rows have changed of this session, table by table in order of key, for a look from outside."""
        return await self._read_page(statements.side_tables, session)

    # door

    async def put(self, entry: Entry) -> Put:
        done = await self._write(
            statements_door.put, entry, inbox_max=self._inbox_max, door_notes_max=self._door_notes_max
        )
        if isinstance(done, AnswerRefused):
            raise done
        return done

    async def inbox(self, session: str, *, after: int, limit: int) -> list[InboxRow]:
        return await self._read(statements_door.inbox, session, after, limit)

    async def inbox_entry(self, session: str, n: int) -> InboxRow | None:
        return await self._read(statements_door.inbox_entry, session, n)

    async def inbox_record(self, session: str) -> list[InboxRow]:
        return await self._read_page(statements_door.inbox_record, session)

    async def note(self, note: DoorNote) -> None:
        await self._write(statements_door.note, note, door_notes_max=self._door_notes_max)

    async def door(self, *, session: str | None = None, limit: int = 1000) -> list[DoorRow]:
        return await self._read_page(statements_door.door, session, limit)

    async def forget(self) -> int:
        """See `Store`. A long list goes in several transactions."""
        gone = 0
        for forget in (statements_door.forget, statements_files.expire):
            while (now_gone := await self._write(forget, FORGET_AT_ONCE)) == FORGET_AT_ONCE:
                gone += now_gone
            gone += now_gone
        await self._sweep()
        return gone

    # files

    async def stage_upload(
        self, upload: Upload, data: bytes, *, keep_ms: int, staged_max: int, staged_bytes_max: int
    ) -> int:
        await self._sent_ahead({upload.digest: data})
        return await self._write(statements_files.stage_upload, upload, data, keep_ms, staged_max, staged_bytes_max)

    async def discard_upload(self, session: str, upload: str, *, uploader: Principal) -> bool:
        discarded = await self._write(statements_files.discard_upload, session, upload, uploader)
        await self._sweep()
        return discarded

    async def attachment(self, session: str, attachment: str) -> AttachmentRow | None:
        return await self._read(statements_files.attachment, session, attachment)

    async def piece(self, digest: str, place: int) -> bytes | None:
        return await self._read_page(statements_files.piece, digest, place)

    async def blobs(self) -> dict[str, int]:
        """Return how many refer to each of the bytes that are kept, for a look from outside."""
        return await self._read_page(statements_files.blobs)

    async def _sent_ahead(self, blobs: Blobs) -> None:
        """Check what is to be stored, and store the most of what is long a piece at a time: nobody waits behind a
        whole file. What then fails leaves pieces that nothing refers to, which `forget` sweeps away."""
        if sum(map(len, blobs.values())) <= HASHED_APART_BYTES:
            check_blobs(blobs)
            return
        await asyncio.to_thread(check_blobs, blobs)
        for digest, data in blobs.items():
            if len(data) > PIECE_BYTES:
                for place, piece in enumerate(pieces(data)):
                    await self._write(statements_files.ahead, digest, len(data), place, piece)

    async def _sweep(self) -> None:
        while await self._write(statements_files.sweep, SWEEP_AT_ONCE) >= SWEEP_AT_ONCE:
            pass

    async def bind(self, source: str, session: str) -> None:
        await self._write(statements_door.bind, source, session)

    async def bound(self, source: str) -> str | None:
        return await self._read(statements_door.bound, source)

    async def add_token(self, token: TokenRow) -> None:
        await self._write(statements_door.add_token, token)

    async def token(self, token_id: str) -> TokenRow | None:
        return await self._read(statements_door.token, token_id)

    async def tokens(self) -> list[TokenRow]:
        return await self._read_page(statements_door.tokens)

    async def revoke_token(self, token_id: str) -> bool:
        return await self._write(statements_door.revoke_token, token_id)

    # life

    def now_ms(self) -> int:
        return self._clock()

    async def healthy(self) -> None:
        try:
            await self._write(statements.probe)
        except CommitUnknown as error:
            raise StoreUnavailable(str(error)) from error
        await self._read(statements_door.bound, "")

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
