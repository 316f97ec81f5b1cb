"""A store over a database: each call runs one transaction body, and a subclass says how.

What a call promises is in `Store`; what its transaction does is in `statements` and `statements_door`.
"""

from __future__ import annotations

import asyncio
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import ParamSpec, TypeVar

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import AnswerRefused, CommitUnknown, StoreUnavailable
from sayso.core.operation import OperationState, Ref
from sayso.core.origin import Principal
from sayso.core.rows import Row, Scalar
from sayso.core.session import Position, SessionRecord, Token
from sayso.storage import statements, statements_door, statements_files, statements_nodes
from sayso.storage.shape import DEAD_KEPT_MS, HASHED_APART_BYTES, PIECE_BYTES, check_blobs, pieces
from sayso.storage.statements import Body
from sayso.storage.store import (
    LEASE_MS,
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

#: dedupe entries, or uploads, dropped in one transaction
FORGET_AT_ONCE = 1_000
#: pieces of bytes dropped in one transaction
SWEEP_AT_ONCE = 4
#: sessions of dead nodes handed back in one transaction
HAND_BACK_AT_ONCE = 100


class BodyStore(ABC):
    """Every call of `Store` that is a transaction body. How the store opens and closes is the subclass's."""

    def __init__(self, clock: Callable[[], int], *, inbox_max: int, door_notes_max: int) -> None:
        """`clock` returns the store's time and never steps back (K10)."""
        self._clock = clock
        self._inbox_max, self._door_notes_max = inbox_max, door_notes_max

    @abstractmethod
    async def _write(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the body returns, once it is committed."""

    @abstractmethod
    async def _read(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what the body reads, of one moment. It is small, and somebody waits for it."""

    @abstractmethod
    async def _read_page(self, body: Callable[P, Body[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `_read`, for what may be long, so that nothing small waits behind it."""

    # engine

    async def register(self, node: str) -> int:
        """See `Store`. Valid while one node runs sessions here, which `exclusive` sees to."""
        return await self._write(statements.register, node)

    async def claim(self, node: str, *, at_most: int) -> list[Claimed]:
        return await self._write(statements.claim, node, [secrets.token_hex(8) for _ in range(at_most)])

    async def ready(self, *, at_most: int) -> int:
        return await self._read(statements.ready, at_most)

    async def release(self, token: Token, *, looked_to: int) -> Released:
        return await self._write(statements.release, token, looked_to)

    async def surrender(self, token: Token, *, failed: bool = False) -> bool:
        return await self._write(statements.surrender, token, failed)

    async def beat(self, incarnation: str, address: str, *, lease_ms: int = LEASE_MS) -> int | None:
        return await self._write(statements_nodes.beat, incarnation, address, lease_ms)

    async def sweep(self) -> int:
        """See `Store`. Many sessions go in several transactions."""
        handed_back = 0
        while (now := await self._write(statements_nodes.sweep, HAND_BACK_AT_ONCE, DEAD_KEPT_MS)) == HAND_BACK_AT_ONCE:
            handed_back += now
        return handed_back + now

    async def reclaim(self, incarnation: str, running: AbstractSet[str]) -> list[str]:
        return await self._write(statements_nodes.reclaim, incarnation, running)

    async def fire(self) -> Fired:
        return await self._write(statements_door.fire)

    # session

    async def create_session(self, session: str, *, owner: Principal, title: str) -> SessionRecord:
        return await self._write(statements.create_session, session, owner, title)

    async def delete_session(self, session: str) -> bool:
        deleted = await self._write(statements_door.delete_session, session)
        await self._sweep()
        return deleted

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

    async def made(self, session: str) -> list[RefRow]:
        return await self._read(statements.made, session)

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
