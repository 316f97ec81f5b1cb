"""The transaction bodies, once for every database: those of the engine and of sessions.

A body is a generator. It yields what it wants done and is sent the answer: rows for `Sql`, nothing for `Many`,
milliseconds for `Now`. One that returns is committed; one that raises is rolled back and leaves nothing.
The SQL is what SQLite 3.35 and PostgreSQL share; `?` stands for a value, and a comment that names a database
holds text for that one alone (`dialect`).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, TypeAlias, TypeVar

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import IllegalChange
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
    encode_body,
)
from sayso.core.session import Others, Position, SessionRecord, SessionRole, SessionState, Token
from sayso.storage.shape import SIDE_COLUMNS, SIDE_KEYS, STANDING_COLUMNS, check_rows, pieces, standing_of
from sayso.storage.store import Claimed, OperationRow, ParticipantRow, RefRow, Released, WriteOutcome

T = TypeVar("T")

Value = str | int | bytes | None

#: past every number that a column holds: no limit
EVERYTHING = 2**62
#: past every id
LAST_TEXT = "\U0010ffff"


@dataclass(frozen=True, slots=True)
class Sql:
    """Run a statement; the answer is its rows, as a list of tuples."""

    text: str
    params: Sequence[Value] = ()


@dataclass(frozen=True, slots=True)
class Many:
    """Run a statement once for each of `rows`; there is no answer."""

    text: str
    rows: Sequence[Sequence[Value]]


@dataclass(frozen=True, slots=True)
class Now:
    """The answer is the store's time, milliseconds since 1970 UTC (K10)."""


NOW = Now()

#: the answers are what a database returned: `Any` stops in the body, which knows its own columns
Body: TypeAlias = Generator[Sql | Many | Now, Any, T]

_FOR_ONE = re.compile(r"/\*(sqlite|postgres): (.*?)\*/")


def dialect(text: str, database: str) -> str:
    """Return `text` for one database: what stands in comments for it is let in, what is for others falls out."""
    return _FOR_ONE.sub(lambda match: match.group(2) if match.group(1) == database else "", text)


# --- engine ------------------------------------------------------------------


def register(node: str) -> Body[int]:
    """Note the node, and take every session from all others: on a store of one node they are dead.

    With several nodes a lease decides who is dead, not this.
    """
    now: int = yield NOW
    yield Sql(
        """
        insert into node (node, registered_at_ms) values (?, ?)
        on conflict (node) do update set registered_at_ms = excluded.registered_at_ms
        """,
        (node, now),
    )
    taken = yield Sql(
        """
        update session set state = 'ready', ready_at_ms = ?, node = null, epoch = epoch + 1
        where state = 'owned' and node <> ?
        returning id
        """,
        (now, node),
    )
    return len(taken)


_RECORD = (
    "id, owner, title, created_at_ms, state, node, epoch, nonce, head, inbox_tail,"
    " turn, turn_seq, turn_principal, turns, consents, at_ms, others, closed_at_ms, attempts"
)


def _record(row: tuple[Any, ...]) -> SessionRecord:
    id_, owner, title, created_at_ms, state, *rest, others, closed_at_ms, attempts = row
    rest += [Others(others), closed_at_ms, attempts]
    return SessionRecord(id_, Principal.parse(owner), title, created_at_ms, SessionState(state), *rest)


def claim(node: str, nonces: Sequence[str]) -> Body[list[Claimed]]:
    """Take as many ready sessions as there are nonces, longest ready first. A sweep that looks meanwhile doesn't see
    them, and one after it does."""
    ready = yield Sql(
        """
        select id from session
        where state = 'ready' and not exists (select 1 from node where node = ? and dead_at_ms is not null)
        order by ready_at_ms, id limit ? /*postgres: for update skip locked*/
        """,
        (node, len(nonces)),
    )
    claimed = []
    for (session,), nonce in zip(ready, nonces, strict=False):
        [row] = yield Sql(
            f"""
            update session set state = 'owned', ready_at_ms = null, node = ?, nonce = ?, epoch = epoch + 1,
                attempts = attempts + 1
            where id = ?
            returning {_RECORD}
            """,  # noqa: S608 - the columns are ours
            (node, nonce, session),
        )
        record = _record(row)
        claimed.append(Claimed(Token(session, record.epoch, record.nonce), record))
    return claimed


def ready(at_most: int) -> Body[int]:
    """Count the sessions that wait to be claimed."""
    [(waiting,)] = yield Sql(
        "select count(*) from (select 1 from session where state = 'ready' limit ?) as waiting", (at_most,)
    )
    return int(waiting)


def release(token: Token, looked_to: int) -> Body[Released]:
    """Make the session idle if nothing came after `looked_to`; the comparison and the move are one (K22)."""
    released = yield Sql(
        """
        update session set state = 'idle', node = null, attempts = 0
        where id = ? and epoch = ? and nonce = ? and state = 'owned' and inbox_tail <= ?
        returning id
        """,
        (token.session, token.epoch, token.nonce, looked_to),
    )
    if released:
        return Released.IDLE
    ours = yield Sql(
        "select id from session where id = ? and epoch = ? and nonce = ? and state = 'owned'",
        (token.session, token.epoch, token.nonce),
    )
    return Released.MORE if ours else Released.FENCED


def surrender(token: Token, failed: bool) -> Body[bool]:
    """Make the session ready for another claim, whatever waits."""
    now: int = yield NOW
    given_up = yield Sql(
        """
        update session set state = 'ready', ready_at_ms = ?, node = null, attempts = attempts * ?
        where id = ? and epoch = ? and nonce = ? and state = 'owned'
        returning id
        """,
        (now, int(failed), token.session, token.epoch, token.nonce),
    )
    return bool(given_up)


def probe() -> Body[None]:
    """Write one small row, so that a store which can't be written says so."""
    now: int = yield NOW
    yield Sql(
        "insert into probe (id, at_ms) values (1, ?) on conflict (id) do update set at_ms = excluded.at_ms", (now,)
    )


# --- sessions ----------------------------------------------------------------


def create_session(session: str, owner: Principal, title: str) -> Body[SessionRecord]:
    """Insert a session; one of that id may not exist."""
    now: int = yield NOW
    created = yield Sql(
        f"""
        insert into session
            (id, owner, title, created_at_ms, state, epoch, nonce, head, inbox_tail, turns, consents, at_ms)
        values (?, ?, ?, ?, 'idle', 0, '', 0, 0, 0, 0, 0)
        on conflict (id) do nothing
        returning {_RECORD}
        """,  # noqa: S608 - the columns are ours
        (session, str(owner), title, now),
    )
    if not created:
        raise IllegalChange(f"session {session} exists")
    return _record(created[0])


def session(session: str) -> Body[SessionRecord | None]:
    """Read one session."""
    found = yield Sql(f"select {_RECORD} from session where id = ?", (session,))  # noqa: S608 - the columns are ours
    return _record(found[0]) if found else None


def sessions(of: Principal | None, limit: int, before: str | None) -> Body[list[SessionRecord]]:
    """Read sessions, newest first: those that are hers, and those that she takes part in."""
    past = LAST_TEXT if before is None else before
    if of is None:
        found = yield Sql(
            f"select {_RECORD} from session where id < ? order by id desc limit ?",  # noqa: S608 - the columns are ours
            (past, limit),
        )
    else:
        found = yield Sql(
            f"""
            select * from (
                select {_RECORD} from session where owner = ? and id < ? order by id desc limit ?
            ) as hers
            union
            select * from (
                select {_RECORD} from session where id in (
                    select session from participant where principal = ? and session < ?
                    order by session desc limit ?
                )
            ) as shared
            order by id desc limit ?
            """,  # noqa: S608 - as above
            (str(of), past, limit, str(of), past, limit, limit),
        )
    return [_record(row) for row in found]


def write(token: Token, rows: Sequence[Row], blobs: Blobs = NO_BLOBS) -> Body[WriteOutcome]:
    """Write rows and what they change, if the session is ours and its head is where the rows begin."""
    check_rows(token, rows)
    fenced = yield Sql(
        """
        update session set head = ?, at_ms = ?, attempts = 0
        where id = ? and epoch = ? and nonce = ? and state = 'owned' and head = ?
        returning id
        """,
        (rows[-1].seq, rows[-1].at_ms, token.session, token.epoch, token.nonce, rows[0].seq - 1),
    )
    texts = [encode_body(row.body) for row in rows]
    if not fenced:
        return (yield from _not_written(token, rows, texts))
    yield Many(
        """
        insert into journal (session, seq, epoch, turn, kind, commit_key, at_ms, version, body)
        values (?, ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        [
            (token.session, row.seq, row.epoch, row.turn, str(row.kind), row.commit_key, row.at_ms, BODY_VERSION, text)
            for row, text in zip(rows, texts, strict=True)
        ],
    )
    of_session: dict[str, Scalar] = {}
    refs: Counter[str] = Counter()
    for row in rows:
        for change in changes(row):
            if isinstance(change, Release):
                refs.subtract((yield from release_attachments(token.session, change.n)))
                continue
            if isinstance(change, Absent):
                if (yield _present(token.session, change)):
                    raise IllegalChange(f"row {row.seq} ({row.kind}): {_there(change)}")
                continue
            if isinstance(change, Update) and change.table is Table.SESSION:
                of_session.update(zip(change.values, _plain(change.values.values()), strict=True))
                continue
            done = yield _applied(token.session, change)
            if not done and not isinstance(change, Delete) and _must_hit(change):
                raise IllegalChange(f"row {row.seq} ({row.kind}): {_missed(change)}")
            if isinstance(change, Insert) and change.table is Table.ATTACHMENT:
                refs[str(change.values["digest"])] += 1
    yield from count_refs(refs, blobs)
    if of_session:
        yield Sql(_update_text(Table.SESSION, tuple(of_session), ("id",), 0), (*of_session.values(), token.session))
    return WriteOutcome.WRITTEN


def _not_written(token: Token, rows: Sequence[Row], texts: list[str]) -> Body[WriteOutcome]:
    """Say why the fenced update found no row (the table of design section 6)."""
    found = yield Sql("select epoch, nonce, state, head from session where id = ?", (token.session,))
    if not found:
        return WriteOutcome.GONE
    if found[0][:3] != (token.epoch, token.nonce, SessionState.OWNED):
        return WriteOutcome.FENCED
    if found[0][3] < rows[0].seq:
        return WriteOutcome.BEHIND
    stored = yield Sql(
        """
        select commit_key, kind, turn, at_ms, body from journal
        where session = ? and seq between ? and ? order by seq
        """,
        (token.session, rows[0].seq, rows[-1].seq),
    )
    ours = [(row.commit_key, row.kind, row.turn, row.at_ms, text) for row, text in zip(rows, texts, strict=True)]
    return WriteOutcome.ALREADY if stored == ours else WriteOutcome.CONFLICT


# --- what rows change --------------------------------------------------------


def _applied(session: str, change: Insert | Update | Delete) -> Sql:
    """Return the statement of a change. One that must hit a row returns it, so that a miss is seen."""
    if isinstance(change, Delete):
        return Sql(_delete_text(change.table, tuple(change.key)), (session, *change.key.values()))
    values = _plain(change.values.values())
    if isinstance(change, Insert):
        return Sql(_insert_text(change.table, tuple(change.values), change.replace), (session, *values))
    text = _update_text(change.table, tuple(change.values), ("session", *change.key), len(change.when))
    return Sql(text, (*values, session, *change.key.values(), *map(str, change.when)))


def _present(session: str, change: Absent) -> Sql:
    """Return the statement that finds what may not be there."""
    return Sql(
        _present_text(change.table, tuple(change.key), len(change.when)), (session, *change.key.values(), *change.when)
    )


def _there(change: Absent) -> str:
    return f"a {change.table} of {_named(change.key, tuple(change.key))} is {' or '.join(change.when)}"


def _plain(values: Iterable[Scalar]) -> list[Scalar]:
    """Return values as every driver takes them."""
    return [str(value) if isinstance(value, StrEnum) else value for value in values]


def _must_hit(change: Insert | Update) -> bool:
    return not change.replace if isinstance(change, Insert) else bool(change.when) and not change.all


def _missed(change: Insert | Update) -> str:
    if isinstance(change, Insert):
        return f"{change.table} {_named(change.values, SIDE_KEYS[change.table])} exists"
    return f"{change.table} {_named(change.key, tuple(change.key))} is not {' or '.join(change.when)}"


def _named(values: Mapping[str, Scalar], key: Sequence[str]) -> str:
    return " ".join(str(values[column]) for column in key)


@cache
def _insert_text(table: Table, columns: tuple[str, ...], replace: bool) -> str:
    key = ("session", *SIDE_KEYS[table])
    places = ", ".join("?" * (len(columns) + 1))
    into = f"insert into {table} (session, {', '.join(columns)}) values ({places})"  # noqa: S608 - from core.rows
    if not replace:
        return f"{into} on conflict ({', '.join(key)}) do nothing returning 1"
    new = ", ".join(f"{column} = excluded.{column}" for column in columns if column not in key)
    return f"{into} on conflict ({', '.join(key)}) do update set {new}"


@cache
def _delete_text(table: Table, key: tuple[str, ...]) -> str:
    where = " and ".join(f"{column} = ?" for column in ("session", *key))
    return f"delete from {table} where {where}"  # noqa: S608 - from core.rows


@cache
def _present_text(table: Table, key: tuple[str, ...], states: int) -> str:
    where = " and ".join(f"{column} = ?" for column in ("session", *key))
    in_state = f"state in ({', '.join('?' * states)})" if states > 1 else "state = ?"
    return f"select 1 from {table} where {where} and {in_state} limit 1"  # noqa: S608 - from core.rows


#: what goes when a row changes, beside what the change says: the bytes of an input that was taken
_GOES = {Table.INBOX: ", raw = null"}


@cache
def _update_text(table: Table, columns: tuple[str, ...], key: tuple[str, ...], states: int) -> str:
    new = ", ".join(f"{column} = ?" for column in columns)
    where = " and ".join(f"{column} = ?" for column in key)
    text = f"update {table} set {new}{_GOES.get(table, '')} where {where}"  # noqa: S608 - from core.rows
    return f"{text} and state in ({', '.join('?' * states)}) returning 1" if states else text


# --- bytes -------------------------------------------------------------------


def count_refs(by: Mapping[str, int], blobs: Blobs = NO_BLOBS) -> Body[None]:
    """Change how many refer to each of these bytes; those that come are stored. It goes by digest, so that no two
    transactions wait for each other.

    Raises:
        IllegalChange: bytes neither came nor are there.
    """
    for digest, more in sorted(by.items()):
        if more > 0 and digest in blobs:
            yield from _held(digest, blobs[digest], more)
        elif more != 0:
            there = yield Sql(
                "update blob set refs = refs + ? where digest = ? and refs > 0 returning 1", (more, digest)
            )
            if not there:
                raise IllegalChange(f"there are no bytes of {digest}")


def _held(digest: str, data: bytes, refs: int) -> Body[None]:
    """Add references, and the pieces that are not there: none, or those of a transaction that went ahead, or all."""
    yield Sql(
        """
        insert into blob (digest, size_bytes, refs) values (?, ?, ?)
        on conflict (digest) do update set refs = blob.refs + excluded.refs
        """,
        (digest, len(data), refs),
    )
    found = yield Sql("select place from piece where digest = ?", (digest,))
    there = {place for (place,) in found}
    missing = [(digest, place, piece) for place, piece in enumerate(pieces(data)) if place not in there]
    if missing:
        yield Many("insert into piece (digest, place, bytes) values (?, ?, ?)", missing)


def release_attachments(session: str, n: int) -> Body[list[str]]:
    """Delete what came with an input; return the digest of each, whose reference goes with it."""
    gone = yield Sql("delete from attachment where session = ? and n = ? returning digest", (session, n))
    return [digest for (digest,) in gone]


# --- reading rows and projections --------------------------------------------


def _row(row: tuple[Any, ...]) -> Row:
    seq, epoch, turn, kind, commit_key, at_ms, version, body = row
    return Row(seq, epoch, turn, commit_key, at_ms, decode_body(kind, version, body))


def rows(session: str, after: int, up_to: int | None, limit: int | None) -> Body[list[Row]]:
    """Read rows in order."""
    found = yield Sql(
        """
        select seq, epoch, turn, kind, commit_key, at_ms, version, body from journal
        where session = ? and seq > ? and seq <= ? order by seq limit ?
        """,
        (session, after, EVERYTHING if up_to is None else up_to, EVERYTHING if limit is None else limit),
    )
    return [_row(row) for row in found]


def last_rows(session: str, limit: int, before: int | None) -> Body[list[Row]]:
    """Read the newest rows, in order."""
    found = yield Sql(
        """
        select seq, epoch, turn, kind, commit_key, at_ms, version, body from journal
        where session = ? and seq < ? order by seq desc limit ?
        """,
        (session, EVERYTHING if before is None else before, limit),
    )
    return [_row(row) for row in reversed(found)]


def keep(session: str, position: Position) -> Body[int]:
    """Read how far a reader at `position` may keep what it shows (K1)."""
    current = yield Sql("select epoch from session where id = ?", (session,))
    kept = position.seq
    if current != [(position.epoch,)]:
        stored = yield Sql(
            "select seq from journal where session = ? and seq <= ? and epoch <= ? order by seq desc limit 1",
            (session, position.seq, position.epoch),
        )
        kept = int(stored[0][0]) if stored else 0
    # a choice that this reader has not seen: what it shows from there on may be what was passed over
    chosen = yield Sql(
        "select version, body from journal where session = ? and seq > ? and kind = 'conflict.settled'",
        (session, kept),
    )
    bodies = [decode_body("conflict.settled", version, body) for version, body in chosen]
    return min([kept, *(body.from_seq - 1 for body in bodies if isinstance(body, ConflictSettledBody))])


def _places(values: Sequence[Value]) -> str:
    return ", ".join("?" * len(values)) or "null"  # an empty list is no SQL everywhere, and nothing is in it


_STANDING = ", ".join(STANDING_COLUMNS)


def standings(session: str, states: Sequence[ConsentState] | None, due: bool) -> Body[list[Standing]]:
    """Read questions in the order they were asked; by index, however many are settled."""
    wanted = [str(state) for state in (ConsentState if states is None else states)]
    also = " or (session = ? and due_seq is not null)" if due else ""
    found = yield Sql(
        f"""
        select {_STANDING} from consent
        where (session = ? and state in ({_places(wanted)})){also} order by seq
        """,  # noqa: S608 - the columns are ours
        (session, *wanted, *((session,) if due else ())),
    )
    return [standing_of(*row) for row in found]


def standing(session: str, consent: str) -> Body[Standing | None]:
    """Read one question."""
    found = yield Sql(
        f"select {_STANDING} from consent where session = ? and consent = ?",  # noqa: S608 - the columns are ours
        (session, consent),
    )
    return standing_of(*found[0]) if found else None


_OPERATION = """
    o.operation, o.call, o.turn, o.tool, o.key, o.state, o.attempts, coalesce(c.arguments, '{}'), o.effect,
    o.sent_at_ms
    from operation o left join call c on c.session = o.session and c.call = o.call
    """


def _operation_row(row: tuple[Any, ...]) -> OperationRow:
    operation, call, turn, tool, key, state, attempts, arguments, effect, sent_at_ms = row
    left = None if effect is None else EffectState(effect)
    return OperationRow(operation, call, turn, tool, key, OperationState(state), attempts, arguments, left, sent_at_ms)


def operations(session: str, states: Sequence[OperationState] | None) -> Body[list[OperationRow]]:
    """Read operations in the order of their calls."""
    wanted = [str(state) for state in (OperationState if states is None else states)]
    found = yield Sql(
        f"""
        select {_OPERATION}
        where o.session = ? and o.operation in (
            select operation from operation where session = ? and state in ({_places(wanted)})
        )
        order by coalesce(c.seq, 0), length(o.operation), o.operation /*postgres: collate "C"*/
        """,  # noqa: S608 - the columns are ours
        (session, session, *wanted),
    )
    return [_operation_row(row) for row in found]


def operation(session: str, operation: str) -> Body[OperationRow | None]:
    """Read one operation."""
    found = yield Sql(
        f"select {_OPERATION} where o.session = ? and o.operation = ?",
        (session, operation),
    )
    return _operation_row(found[0]) if found else None


def made(session: str) -> Body[list[RefRow]]:
    """Read what a session's operations made."""
    found = yield Sql(
        """
        select r.source, r.kind, r.value, r.state, r.operation, r.seq, s.closed_at_ms, r.reported_by
        from ref r join session s on s.id = r.session where r.session = ?
        order by r.seq, r.source /*postgres: collate "C"*/, r.kind /*postgres: collate "C"*/,
            r.value /*postgres: collate "C"*/
        """,
        (session,),
    )
    return [
        RefRow(session, Ref(source, kind, value), state, operation, seq, closed_at_ms is not None, by)
        for source, kind, value, state, operation, seq, closed_at_ms, by in found
    ]


def refs(source: str, wanted: Sequence[Ref]) -> Body[list[RefRow]]:
    """Read who made these things, in the order they are named."""
    rows: list[RefRow] = []
    for ref in dict.fromkeys(ref for ref in wanted if ref.source == source):
        found = yield Sql(
            """
            select r.session, r.state, r.operation, r.seq, s.closed_at_ms, r.reported_by
            from ref r join session s on s.id = r.session
            where r.source = ? and r.kind = ? and r.value = ? order by r.session /*postgres: collate "C"*/
            """,
            (ref.source, ref.kind, ref.value),
        )
        rows += [
            RefRow(session, ref, state, operation, seq, closed_at_ms is not None, by)
            for session, state, operation, seq, closed_at_ms, by in found
        ]
    return rows


def _participant_row(row: tuple[Any, ...]) -> ParticipantRow:
    principal, role, seq = row
    return ParticipantRow(Principal.parse(principal), SessionRole(role), seq)


def participants(session: str) -> Body[list[ParticipantRow]]:
    """Read who takes part beside the owner, in the order of the rows that say so."""
    found = yield Sql("select principal, role, seq from participant where session = ? order by seq", (session,))
    return [_participant_row(row) for row in found]


def participant(session: str, principal: Principal) -> Body[ParticipantRow | None]:
    """Read what somebody was given in a session."""
    found = yield Sql(
        "select principal, role, seq from participant where session = ? and principal = ?", (session, str(principal))
    )
    return _participant_row(found[0]) if found else None


def side_tables(session: str) -> Body[dict[str, list[tuple[Scalar, ...]]]]:
    """Read everything that rows have changed, for a look from outside: a test, an operator."""
    tables: dict[str, list[tuple[Scalar, ...]]] = {}
    for table, columns in SIDE_COLUMNS.items():
        key = SIDE_KEYS.get(table, ("id",))
        owner = "id" if table is Table.SESSION else "session"
        tables[table] = yield Sql(
            f"select {', '.join(columns)} from {table} where {owner} = ? order by {', '.join(key)}",  # noqa: S608 - ours
            (session,),
        )
    return tables
