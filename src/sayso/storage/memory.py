"""The store in memory: slow, obvious, right. What it answers is what every other store must answer.

No call awaits anything, so each is one step for everybody else; one that raises has changed nothing.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from sayso.core.attachment import NO_BLOBS, Attachment, Blobs, of_input
from sayso.core.consent import ConsentState, Standing, read_bare, refuse_at_door
from sayso.core.errors import (
    AnswerRefused,
    CrossUser,
    IllegalChange,
    InboxFull,
    Misused,
    NotFound,
    NoUpload,
    SessionClosed,
    UploadsFull,
)
from sayso.core.inputs import Input, InputKind
from sayso.core.operation import EffectState, OperationState, Ref
from sayso.core.origin import Principal
from sayso.core.rows import (
    BODY_VERSION,
    Absent,
    ConflictSettledBody,
    Delete,
    Insert,
    Release,
    Row,
    Scalar,
    Table,
    Update,
    changes,
    decode_body,
    decode_input,
    encode_body,
    encode_input,
)
from sayso.core.session import Others, Position, SessionRecord, SessionRole, SessionState, Token
from sayso.core.text import storable
from sayso.storage import shape
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
    PutOutcome,
    RefRow,
    Released,
    TokenRow,
    Upload,
    WriteOutcome,
)

#: one row of a side table: its columns, as `shape.SIDE_COLUMNS` has them; never changed, only replaced
Side = Mapping[str, Any]
Key = tuple[Scalar, ...]
Tables = dict[Table, dict[Key, Side]]


@dataclass(slots=True)
class _Session:
    """All that is kept of one session."""

    record: SessionRecord
    ready_at_ms: int = 0
    rows: list[Row] = field(default_factory=list)
    #: what came in, by its place; `tables` has what rows say of it
    inbox: dict[int, InboxRow] = field(default_factory=dict)
    tables: Tables = field(default_factory=lambda: {table: {} for table in shape.SIDE_KEYS})


@dataclass(frozen=True, slots=True)
class _Node:
    """An incarnation that has beaten."""

    address: str
    lease_until_ms: int
    dead_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Seen:
    """A dedupe entry."""

    event_id: str
    digest: str
    session: str | None
    n: int | None
    received_at_ms: int
    until_ms: int
    id_signed: bool


@dataclass(frozen=True, slots=True)
class _Staged:
    """An upload, and until when it waits."""

    upload: Upload
    size_bytes: int
    until_ms: int


class MemoryStore:
    """See `Store` for what every method promises."""

    def __init__(
        self, *, clock: Callable[[], int], inbox_max: int = shape.INBOX_MAX, door_notes_max: int = shape.DOOR_NOTES_MAX
    ) -> None:
        """Start empty. `clock` returns milliseconds since 1970 UTC."""
        self._clock, self._inbox_max, self._door_notes_max = shape.Steady(clock), inbox_max, door_notes_max
        self._sessions: dict[str, _Session] = {}
        self._nodes: dict[str, _Node] = {}
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._unclaimed: list[tuple[int, Entry]] = []
        self._door: list[DoorRow] = []
        self._bound: dict[str, str] = {}
        self._tokens: dict[str, TokenRow] = {}
        self._uploads: dict[str, _Staged] = {}
        #: bytes by digest, and how many uploads and attachments refer to them
        self._blobs: dict[str, tuple[bytes, int]] = {}

    # engine

    async def register(self, node: str) -> int:
        taken = 0
        for kept in self._sessions.values():
            record = kept.record
            if record.state is SessionState.OWNED and record.node != node:
                self._make_ready(kept, epoch=record.epoch + 1)
                taken += 1
        return taken

    async def claim(self, node: str, *, at_most: int) -> list[Claimed]:
        ready = [kept for kept in self._sessions.values() if kept.record.state is SessionState.READY]
        ready.sort(key=lambda kept: (kept.ready_at_ms, kept.record.id))
        if node in self._dead():
            return []
        claimed = []
        for kept in ready[:at_most]:
            epoch, nonce = kept.record.epoch + 1, secrets.token_hex(8)
            attempts = kept.record.attempts + 1
            owned = {"state": SessionState.OWNED, "node": node, "epoch": epoch, "nonce": nonce, "attempts": attempts}
            kept.record = replace(kept.record, **owned)  # type: ignore[arg-type]
            claimed.append(Claimed(Token(kept.record.id, epoch, nonce), kept.record))
        return claimed

    async def ready(self, *, at_most: int) -> int:
        ready = [kept for kept in self._sessions.values() if kept.record.state is SessionState.READY]
        return min(len(ready), at_most)

    async def release(self, token: Token, *, looked_to: int) -> Released:
        kept = self._owned(token)
        if kept is None:
            return Released.FENCED
        if kept.record.inbox_tail > looked_to:
            return Released.MORE
        kept.record = replace(kept.record, state=SessionState.IDLE, node=None, attempts=0)
        return Released.IDLE

    async def surrender(self, token: Token, *, failed: bool = False) -> bool:
        kept = self._owned(token)
        if kept is None:
            return False
        self._make_ready(kept, epoch=token.epoch)
        if not failed:
            kept.record = replace(kept.record, attempts=0)
        return True

    async def beat(self, incarnation: str, address: str, *, lease_ms: int = LEASE_MS) -> int | None:
        now, node = self._clock(), self._nodes.get(incarnation)
        if node is not None and (node.dead_at_ms is not None or node.lease_until_ms <= now):
            return None
        self._nodes[incarnation] = _Node(address, now + lease_ms)
        return now + lease_ms

    async def sweep(self) -> int:
        now = self._clock()
        for incarnation, node in self._nodes.items():
            if node.dead_at_ms is None and node.lease_until_ms <= now:
                self._nodes[incarnation] = replace(node, dead_at_ms=now)
        dead = self._dead()
        left = [kept for kept in self._sessions.values() if kept.record.node in dead]
        for kept in left:
            self._hand_back(kept)
        for incarnation, died_at_ms in dead.items():
            if died_at_ms <= now - shape.DEAD_KEPT_MS:
                del self._nodes[incarnation]
        return len(left)

    async def reclaim(self, incarnation: str, running: AbstractSet[str]) -> list[str]:
        owned = [session for session, kept in self._sessions.items() if kept.record.node == incarnation]
        handed_back = sorted(session for session in owned if session not in running)
        for session in handed_back:
            self._hand_back(self._sessions[session])
        return handed_back

    async def fire(self) -> Fired:
        now = self._clock()
        due = [timer for timer in self._timers() if timer[0] <= now][: shape.FIRED_MAX]
        stored: list[tuple[str, str | None]] = []
        for instant, session, timer in sorted(due, key=lambda timer: timer[1]):
            kept = self._sessions[session]
            timers = kept.tables[Table.TIMER]
            timers[timer,] = {**timers[timer,], "next_at_ms": None}
            entry = shape.timer_entry(session, timer, instant)
            if self._known(entry, self._clock()) is None:
                done = self._store(entry, kept, entry.input, self._clock())
                stored.append((session, done.node))
        return Fired(tuple(stored), min((timer[0] for timer in self._timers()), default=None))

    def _timers(self) -> list[tuple[int, str, str]]:
        """Return (next instant, session, timer) of those that are set, the earliest first."""
        return sorted(
            (side["next_at_ms"], session, side["timer"])
            for session, kept in self._sessions.items()
            for side in kept.tables[Table.TIMER].values()
            if side["next_at_ms"] is not None
        )

    def _make_ready(self, kept: _Session, *, epoch: int) -> None:
        kept.record = replace(kept.record, state=SessionState.READY, node=None, epoch=epoch)
        kept.ready_at_ms = self._clock()

    def _hand_back(self, kept: _Session) -> None:
        kept.record = replace(kept.record, nonce="")
        self._make_ready(kept, epoch=kept.record.epoch + 1)

    def _dead(self) -> dict[str, int]:
        """Return the incarnations that were declared dead, and when."""
        return {name: node.dead_at_ms for name, node in self._nodes.items() if node.dead_at_ms is not None}

    def _owned(self, token: Token) -> _Session | None:
        """Return the session if `token` is the right to it."""
        kept = self._sessions.get(token.session)
        if kept is None or kept.record.state is not SessionState.OWNED:
            return None
        return kept if (kept.record.epoch, kept.record.nonce) == (token.epoch, token.nonce) else None

    # session

    async def create_session(self, session: str, *, owner: Principal, title: str) -> SessionRecord:
        if session in self._sessions:
            raise IllegalChange(f"session {session} exists")
        record = SessionRecord(
            id=session,
            owner=owner,
            title=storable(title),
            created_at_ms=self._clock(),
            state=SessionState.IDLE,
            node=None,
            epoch=0,
            nonce="",
            head=0,
            inbox_tail=0,
            turn=None,
            turn_seq=None,
            turn_principal=None,
            turns=0,
            consents=0,
            at_ms=0,
        )
        self._sessions[session] = _Session(record)
        return record

    async def delete_session(self, session: str) -> bool:
        kept = self._sessions.pop(session, None)
        if kept is None:
            return False
        self._release_all(kept)
        self._bound = {source: bound for source, bound in self._bound.items() if bound != session}
        return True

    async def session(self, session: str) -> SessionRecord | None:
        kept = self._sessions.get(session)
        return None if kept is None else kept.record

    async def sessions(self, *, of: Principal | None, limit: int, before: str | None = None) -> list[SessionRecord]:
        found = [
            kept.record
            for id_, kept in sorted(self._sessions.items(), reverse=True)
            if before is None or id_ < before
            if of is None or kept.record.owner == of or (str(of),) in kept.tables[Table.PARTICIPANT]
        ]
        return found[:limit]

    async def participants(self, session: str) -> list[ParticipantRow]:
        sides = sorted(self._sides(session, Table.PARTICIPANT), key=lambda side: side["seq"])
        return [ParticipantRow(Principal.parse(s["principal"]), SessionRole(s["role"]), s["seq"]) for s in sides]

    async def participant(self, session: str, principal: Principal) -> ParticipantRow | None:
        return next((row for row in await self.participants(session) if row.principal == principal), None)

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        shape.check_blobs(blobs)
        shape.check_rows(token, rows)
        kept = self._owned(token)
        if kept is None:
            return WriteOutcome.FENCED if token.session in self._sessions else WriteOutcome.GONE
        if kept.record.head < rows[0].seq - 1:
            return WriteOutcome.BEHIND
        as_stored = [_as_stored(row) for row in rows]
        if kept.record.head > rows[0].seq - 1:
            same = kept.rows[rows[0].seq - 1 : rows[-1].seq] == as_stored
            return WriteOutcome.ALREADY if same else WriteOutcome.CONFLICT
        tables: Tables = {table: dict(sides) for table, sides in kept.tables.items()}
        record = replace(kept.record, head=rows[-1].seq, at_ms=rows[-1].at_ms, attempts=0)
        refs: Counter[str] = Counter()
        for row in rows:
            for change in changes(row):
                if isinstance(change, Absent):
                    _check_absent(tables[change.table], change)
                elif isinstance(change, Release):
                    refs.subtract(_released(tables[Table.ATTACHMENT], change.n))
                elif isinstance(change, Update) and change.table is Table.SESSION:
                    new = {column: _clean(value) for column, value in change.values.items()}
                    record = replace(record, **new)  # type: ignore[arg-type]  # columns are its fields
                else:
                    _apply(tables[change.table], change)
                    if isinstance(change, Insert) and change.table is Table.ATTACHMENT:
                        refs[str(change.values["digest"])] += 1
        self._count(refs, blobs)
        kept.rows += as_stored
        kept.record, kept.tables = record, tables
        return WriteOutcome.WRITTEN

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> list[Row]:
        stored = self._rows_of(session)
        return [row for row in stored if row.seq > after and (up_to is None or row.seq <= up_to)][:limit]

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> list[Row]:
        stored = [row for row in self._rows_of(session) if before is None or row.seq < before]
        return stored[max(0, len(stored) - limit) :]

    async def keep(self, session: str, position: Position) -> int:
        record = await self.session(session)
        rows = self._rows_of(session)
        kept = position.seq
        if record is None or record.epoch != position.epoch:
            kept = max((row.seq for row in rows if row.seq <= kept and row.epoch <= position.epoch), default=0)
        unseen = [row.body for row in rows if row.seq > kept]
        return min([kept, *(body.from_seq - 1 for body in unseen if isinstance(body, ConflictSettledBody))])

    async def standings(
        self, session: str, *, states: Sequence[ConsentState] | None = None, due: bool = False
    ) -> list[Standing]:
        wanted = [
            standing
            for standing in map(_standing, self._sides(session, Table.CONSENT))
            if states is None or standing.state in states or (due and standing.due_seq is not None)
        ]
        return sorted(wanted, key=lambda standing: standing.position.seq)

    async def standing(self, session: str, consent: str) -> Standing | None:
        return next((found for found in await self.standings(session) if found.consent.id == consent), None)

    async def operations(self, session: str, *, states: Sequence[OperationState] | None = None) -> list[OperationRow]:
        none: Side = {"seq": 0, "arguments": "{}"}
        calls = {side["call"]: side for side in self._sides(session, Table.CALL)}
        found = []
        for side in self._sides(session, Table.OPERATION):
            call, state = calls.get(side["call"], none), OperationState(side["state"])
            name, of_call, turn, tool, key = (side[c] for c in ("operation", "call", "turn", "tool", "key"))
            effect = None if side.get("effect") is None else EffectState(side["effect"])
            row = OperationRow(
                name, of_call, turn, tool, key, state, side["attempts"], call["arguments"], effect, side["sent_at_ms"]
            )
            if states is None or state in states:
                found.append(((call["seq"], len(name), name), row))
        return [row for _, row in sorted(found, key=lambda pair: pair[0])]

    async def operation(self, session: str, operation: str) -> OperationRow | None:
        return next((row for row in await self.operations(session) if row.operation == operation), None)

    async def made(self, session: str) -> list[RefRow]:
        record = await self.session(session)
        closed = record is not None and record.closed_at_ms is not None
        sides = [(Ref(*(str(s[c]) for c in ("source", "kind", "value"))), s) for s in self._sides(session, Table.REF)]
        found = [_ref_row(session, ref, side, closed=closed) for ref, side in sides]
        return sorted(found, key=lambda row: (row.seq, row.ref.source, row.ref.kind, row.ref.value))

    async def refs(self, source: str, refs: Sequence[Ref]) -> list[RefRow]:
        found: list[RefRow] = []
        for ref in dict.fromkeys(ref for ref in refs if ref.source == source):
            key = tuple(storable(part) for part in (ref.source, ref.kind, ref.value))
            for session, kept in sorted(self._sessions.items()):
                side = kept.tables[Table.REF].get(key)
                if side is not None:
                    closed = kept.record.closed_at_ms is not None
                    found.append(_ref_row(session, ref, side, closed=closed))
        return found

    async def side_tables(self, session: str) -> dict[str, list[tuple[Scalar, ...]]]:
        """Return what rows have changed of this session, table by table in order of key, for a look from outside."""
        record = await self.session(session)
        if record is None:
            return {table: [] for table in shape.SIDE_COLUMNS}
        tables: dict[str, list[tuple[Scalar, ...]]] = {
            Table.SESSION: [tuple(getattr(record, column) for column in shape.SIDE_COLUMNS[Table.SESSION])]
        }
        for table, sides in self._sessions[session].tables.items():
            in_order = [side for _, side in sorted(sides.items(), key=lambda item: item[0])]
            tables[table] = [tuple(side.get(column) for column in shape.SIDE_COLUMNS[table]) for side in in_order]
        return tables

    def _rows_of(self, session: str) -> list[Row]:
        kept = self._sessions.get(session)
        return [] if kept is None else kept.rows

    def _sides(self, session: str, table: Table) -> list[Side]:
        kept = self._sessions.get(session)
        return [] if kept is None else list(kept.tables[table].values())

    # door

    async def put(self, entry: Entry) -> Put:
        entry = replace(entry, event_id=storable(entry.event_id))
        kept = None
        if entry.session is not None:
            kept = self._sessions.get(entry.session)
            if kept is None:
                raise NotFound("session")
        now = self._clock()
        await self._refuse_answer(entry)
        known = self._known(entry, now)
        if known is not None:
            return await self._again(entry, known)
        if kept is None:
            self._remember(entry, None, now)
            self._unclaimed.append((now, entry))
            await self.note(shape.unclaimed(entry))
            return Put(PutOutcome.UNCLAIMED, None, None, now, 0)
        meant = entry.input
        yes = shape.bare(entry)
        if yes is not None:
            open_ones = await self.standings(kept.record.id, states=(ConsentState.OPEN,))
            meant = shape.as_meant(meant, read_bare(yes, open_ones, meant.principal, as_of=entry.as_of))
        if kept.record.closed_at_ms is not None:
            raise SessionClosed(kept.record.id)
        queued = await self.inbox(kept.record.id, after=0, limit=kept.record.inbox_tail)
        waiting = [row.input.owner for row in queued if row.lane is meant.lane]
        if kept.record.others is Others.REFUSE:
            owners = [None if owner is None else str(owner) for owner in waiting]
            if shape.interjects(meant, kept.record.turn_principal, owners):
                raise CrossUser(kept.record.id)
        most = self._inbox_max if entry.waiting_max is None else entry.waiting_max
        if waiting.count(meant.owner) >= most:
            raise InboxFull(kept.record.id, most, owner=None if meant.owner is None else str(meant.owner))
        return self._store(entry, kept, meant, now)

    async def _refuse_answer(self, entry: Entry) -> None:
        answer = entry.input.answer
        if entry.input.kind is not InputKind.ANSWER or answer is None or entry.session is None:
            return
        asked = await self.standing(entry.session, answer.consent)
        why = refuse_at_door(answer, asked, entry.input.principal)
        if why is not None:
            refused = AnswerRefused(answer.consent, why)
            await self.note(shape.answer_refused(entry, refused))
            raise refused

    def _known(self, entry: Entry, now: int) -> _Seen | None:
        """Return the first of what came again: by its id, else by its bytes where no proof covers the id."""
        same = self._seen.get((entry.source, entry.event_id))
        if same is not None and same.until_ms > now:
            return same
        if entry.id_signed:
            return None
        alike = [
            seen
            for (source, _), seen in self._seen.items()
            if source == entry.source and seen.digest == entry.digest and not seen.id_signed and seen.until_ms > now
        ]
        return min(alike, key=lambda seen: (seen.received_at_ms, seen.event_id), default=None)

    async def _again(self, entry: Entry, known: _Seen) -> Put:
        about = entry.session if known.session is None else known.session
        outcome, noted = PutOutcome.SUSPECT_REPLAY, shape.known_content(entry, about)
        if known.event_id == entry.event_id:
            if known.digest == entry.digest:
                outcome, noted = PutOutcome.DUPLICATE, shape.repeated(entry, about)
            elif entry.strict:
                raise Misused(f"{entry.event_id} was used before with other content")
            else:
                noted = shape.other_content(entry, about)
        await self.note(noted)
        kept = self._sessions.get(known.session or "")
        first = None if kept is None else kept.inbox.get(known.n or 0)
        head, node = (0, None) if kept is None or first is None else (first.at_seq, kept.record.node)
        return Put(outcome, known.session, known.n, known.received_at_ms, head, node)

    def _remember(self, entry: Entry, kept: _Session | None, now: int) -> None:
        n = None if kept is None else kept.record.inbox_tail
        self._seen[entry.source, entry.event_id] = _Seen(
            entry.event_id, entry.digest, entry.session, n, now, now + entry.keep_ms, entry.id_signed
        )

    def _store(self, entry: Entry, kept: _Session, received: Input, now: int) -> Put:
        n, head = kept.record.inbox_tail + 1, kept.record.head
        if entry.uploads:
            received = replace(received, attachments=self._consumed(entry.uploads, kept, n))
        as_stored = decode_input(encode_input(received))
        kept.inbox[n] = InboxRow(n, received.lane, "queued", entry.source, entry.event_id, now, head, as_stored)
        kept.tables[Table.INBOX][n,] = {"n": n, "state": "queued", "taken_seq": None}
        kept.record = replace(kept.record, inbox_tail=n)
        if kept.record.state is SessionState.IDLE:
            self._make_ready(kept, epoch=kept.record.epoch)
        self._remember(entry, kept, now)
        return Put(PutOutcome.STORED, kept.record.id, n, now, head, kept.record.node)

    async def inbox(self, session: str, *, after: int, limit: int) -> list[InboxRow]:
        record = await self.inbox_record(session)
        return [row for row in record if row.state == "queued" and row.n > after][:limit]

    async def inbox_entry(self, session: str, n: int) -> InboxRow | None:
        return next((row for row in await self.inbox_record(session) if row.n == n), None)

    async def inbox_record(self, session: str) -> list[InboxRow]:
        kept = self._sessions.get(session)
        if kept is None:
            return []
        found = []
        for n, row in sorted(kept.inbox.items()):
            side = kept.tables[Table.INBOX][n,]
            found.append(replace(row, state=side["state"], taken_seq=side["taken_seq"]))
        return found

    async def note(self, note: DoorNote) -> None:
        kept = self._sessions.get(note.session or "")
        n = self._door[-1].n + 1 if self._door else 1
        source, text, event_id = (storable(each) for each in (note.source, note.text, note.event_id))
        clean = replace(note, source=source, text=text, event_id=event_id)
        self._door.append(DoorRow(n, self._clock(), None if kept is None else kept.record.head, clean))
        del self._door[: -self._door_notes_max]

    async def door(self, *, session: str | None = None, limit: int = 1000) -> list[DoorRow]:
        found = [row for row in self._door if session is None or row.note.session in (session, None)]
        return found[max(0, len(found) - limit) :]

    async def forget(self) -> int:
        now = self._clock()
        over = [key for key, seen in self._seen.items() if seen.until_ms <= now]
        for key in over:
            del self._seen[key]
        expired = [id_ for id_, staged in self._uploads.items() if staged.until_ms <= now]
        self._drop_uploads(expired)
        return len(over) + len(expired)

    # files

    async def stage_upload(
        self, upload: Upload, data: bytes, *, keep_ms: int, staged_max: int, staged_bytes_max: int
    ) -> int:
        shape.check_blobs({upload.digest: data})
        if upload.session not in self._sessions:
            raise NotFound("session")
        now = self._clock()
        theirs = [
            staged.size_bytes
            for staged in self._uploads.values()
            if (staged.upload.session, staged.upload.uploader) == (upload.session, upload.uploader)
            and staged.until_ms > now
        ]
        if len(theirs) >= staged_max:
            raise UploadsFull(upload.session, f"{len(theirs)} uploads wait for a message already")
        if sum(theirs) + len(data) > staged_bytes_max:
            raise UploadsFull(upload.session, f"uploads of {sum(theirs)} bytes wait for a message already")
        self._uploads[upload.id] = _Staged(upload, len(data), now + keep_ms)
        self._count({upload.digest: 1}, {upload.digest: data})
        return now + keep_ms

    async def discard_upload(self, session: str, upload: str, *, uploader: Principal) -> bool:
        staged = self._waiting_upload(session, upload)
        if staged is None or staged.upload.uploader != uploader:
            return False
        self._drop_uploads([upload])
        return True

    async def attachment(self, session: str, attachment: str) -> AttachmentRow | None:
        kept = self._sessions.get(session)
        side = None if kept is None else kept.tables[Table.ATTACHMENT].get((attachment,))
        if kept is None or side is None:
            return None
        columns = ("attachment", "filename", "media_type", "size_bytes", "digest")
        n, seq = side["n"], side["seq"]
        sender = kept.inbox[n].input.principal if seq is None else None
        return AttachmentRow(Attachment(*(side[column] for column in columns)), seq, n, side["uploader"], sender)

    async def piece(self, digest: str, place: int) -> bytes | None:
        found = self._blobs.get(digest)
        start = place * shape.PIECE_BYTES
        return None if found is None else found[0][start : start + shape.PIECE_BYTES] or None

    async def blobs(self) -> dict[str, int]:
        """Return how many refer to each of the bytes that are kept, for a look from outside."""
        return {digest: refs for digest, (_, refs) in sorted(self._blobs.items())}

    def _waiting_upload(self, session: str, upload: str) -> _Staged | None:
        staged = self._uploads.get(upload)
        waits = staged is not None and staged.upload.session == session and staged.until_ms > self._clock()
        return staged if waits else None

    def _drop_uploads(self, uploads: Sequence[str]) -> None:
        refs: Counter[str] = Counter()
        refs.subtract(self._uploads.pop(upload).upload.digest for upload in uploads)
        self._count(refs)

    def _consumed(self, uploads: Sequence[str], kept: _Session, n: int) -> tuple[Attachment, ...]:
        """Make attachments of an input from uploads; nothing is changed if one isn't there."""
        taken: dict[str, Attachment] = {}
        sides: list[Side] = []
        for place, upload in enumerate(uploads, 1):
            staged = None if upload in taken else self._waiting_upload(kept.record.id, upload)
            if staged is None:
                raise NoUpload(upload)
            sent = staged.upload
            attached = Attachment(of_input(n, place), sent.filename, sent.media_type, staged.size_bytes, sent.digest)
            taken[upload] = attached
            sides.append({"uploader": str(sent.uploader), "n": n, "seq": None, **_columns(attached)})
        for upload in taken:
            del self._uploads[upload]
        kept.tables[Table.ATTACHMENT].update({(side["attachment"],): side for side in sides})
        return tuple(taken.values())

    def _release_all(self, kept: _Session) -> None:
        """Let go of every upload and attachment of a session that goes."""
        self._drop_uploads([id_ for id_, staged in self._uploads.items() if staged.upload.session == kept.record.id])
        refs: Counter[str] = Counter()
        refs.subtract(side["digest"] for side in kept.tables[Table.ATTACHMENT].values())
        kept.tables[Table.ATTACHMENT].clear()
        self._count(refs)

    def _count(self, by: Mapping[str, int], blobs: Blobs = NO_BLOBS) -> None:
        """Change how many refer to each of these bytes; at none they go. Nothing is changed if some aren't there."""
        after = dict(self._blobs)
        for digest, more in by.items():
            if more == 0:
                continue
            data, refs = after.get(digest, (blobs.get(digest), 0))
            if data is None:
                raise IllegalChange(f"there are no bytes of {digest}")
            after[digest] = data, refs + more
            if refs + more == 0:
                del after[digest]
        self._blobs = after

    async def bind(self, source: str, session: str) -> None:
        self._bound[source] = session

    async def bound(self, source: str) -> str | None:
        return self._bound.get(source)

    async def add_token(self, token: TokenRow) -> None:
        if token.id in self._tokens:
            raise IllegalChange(f"token {token.id} exists")
        self._tokens[token.id] = token

    async def token(self, token_id: str) -> TokenRow | None:
        return self._tokens.get(token_id)

    async def tokens(self) -> list[TokenRow]:
        return sorted(self._tokens.values(), key=lambda token: (token.created_at_ms, token.id))

    async def revoke_token(self, token_id: str) -> bool:
        token = self._tokens.get(token_id)
        if token is None or token.revoked_at_ms is not None:
            return False
        self._tokens[token_id] = replace(token, revoked_at_ms=self._clock())
        return True

    # life

    def now_ms(self) -> int:
        return self._clock()

    async def healthy(self) -> None:
        pass

    async def close(self) -> None:
        pass


def _as_stored(row: Row) -> Row:
    """Return the row as it would come back from a disk."""
    return replace(row, body=decode_body(row.kind, BODY_VERSION, encode_body(row.body)))


def _clean(value: Scalar) -> Scalar:
    return storable(value) if isinstance(value, str) and not isinstance(value, StrEnum) else value


def _columns(attached: Attachment) -> Side:
    return {
        "attachment": attached.id,
        "filename": attached.filename,
        "media_type": attached.media_type,
        "size_bytes": attached.size_bytes,
        "digest": attached.digest,
    }


def _ref_row(session: str, ref: Ref, side: Side, *, closed: bool) -> RefRow:
    return RefRow(session, ref, side["state"], side["operation"], side["seq"], closed, side["reported_by"])


def _released(sides: dict[Key, Side], n: int) -> list[str]:
    """Let go of what came with an input; return the digest of each, whose reference goes with it."""
    gone = [key for key, side in sides.items() if side["n"] == n]
    return [sides.pop(key)["digest"] for key in gone]


def _check_absent(sides: dict[Key, Side], change: Absent) -> None:
    """Return if nothing is in a state that it may not be in.

    Raises:
        IllegalChange: something is.
    """
    wanted = [side for side in sides.values() if all(side[column] == value for column, value in change.key.items())]
    if any(side["state"] in change.when for side in wanted):
        raise IllegalChange(
            f"a {change.table} of {' '.join(map(str, change.key.values()))} is {' or '.join(change.when)}"
        )


def _apply(sides: dict[Key, Side], change: Insert | Update | Delete) -> None:
    """Apply one change to one side table.

    Raises:
        IllegalChange: there is such a row already, or none in a state that allows it.
    """
    if isinstance(change, Delete):
        sides.pop(tuple(_clean(change.key[column]) for column in shape.SIDE_KEYS[change.table]), None)
        return
    if isinstance(change, Insert):
        side = {column: _clean(value) for column, value in change.values.items()}
        key = tuple(side[column] for column in shape.SIDE_KEYS[change.table])
        if key in sides and not change.replace:
            raise IllegalChange(f"{change.table} {key} exists")
        sides[key] = side
        return
    if change.all:
        sides |= {key: {**side, **change.values} for key, side in sides.items() if side["state"] in change.when}
        return
    key = tuple(_clean(change.key[column]) for column in shape.SIDE_KEYS[change.table])
    found = sides.get(key)
    if found is not None and (not change.when or found["state"] in change.when):
        sides[key] = {**found, **{column: _clean(value) for column, value in change.values.items()}}
    elif change.when:
        raise IllegalChange(f"{change.table} {key} is not {' or '.join(change.when)}")


def _standing(side: Side) -> Standing:
    told: list[Any] = [side.get(column) for column in shape.STANDING_COLUMNS]
    return shape.standing_of(*told)
