"""The transaction bodies of the door: what arrives, what is due, and what the door notes about both.

An input's transaction locks its session's row first and reads the time after it, so that order in the
inbox and time agree on any two nodes (K12). See `statements` for what a body is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sayso.core.consent import ConsentState, read_bare, refuse_at_door
from sayso.core.errors import AnswerRefused, CrossUser, IllegalChange, InboxFull, Misused, NotFound, SessionClosed
from sayso.core.inputs import Input, InputKind, Lane
from sayso.core.origin import Principal
from sayso.core.rows import Table, decode_input, encode_input
from sayso.core.session import Others, SessionState
from sayso.core.text import storable
from sayso.storage import shape
from sayso.storage.statements import NOW, Body, Sql, Value, standing, standings
from sayso.storage.statements_files import consumed, release_all
from sayso.storage.store import DoorKind, DoorNote, DoorRow, Entry, Fired, InboxRow, Put, PutOutcome, TokenRow


@dataclass(frozen=True, slots=True)
class _Place:
    """A session as an input finds it, its row locked."""

    state: str
    node: str | None
    head: int
    inbox_tail: int
    turn_principal: str | None
    others: str
    closed_at_ms: int | None


def _locked(session: str) -> Body[_Place]:
    place = yield from _found(session)
    if place is None:
        raise NotFound("session")
    return place


def _found(session: str) -> Body[_Place | None]:
    found = yield Sql(
        """
        select state, node, head, inbox_tail, turn_principal, others, closed_at_ms from session
        where id = ? /*postgres: for update*/
        """,
        (session,),
    )
    return _Place(*found[0]) if found else None


# --- put ---------------------------------------------------------------------


def put(entry: Entry, *, inbox_max: int, door_notes_max: int) -> Body[Put | AnswerRefused]:
    """Store an input with its dedupe entry, or note why not.

    A refused answer is returned, not raised: the note about it is to be committed.
    """
    place = None if entry.session is None else (yield from _locked(entry.session))
    now: int = yield NOW
    refused = yield from _refused(entry)
    if refused is not None:
        yield from note(shape.answer_refused(entry, refused), door_notes_max=door_notes_max)
        return refused
    n = None if place is None else place.inbox_tail + 1
    known = yield from _remembered(entry, n, now)
    if known is not None:
        return (yield from _again(entry, known, door_notes_max=door_notes_max))
    if entry.session is None or place is None:
        yield from _kept_unclaimed(entry, now)
        yield from note(shape.unclaimed(entry), door_notes_max=door_notes_max)
        return Put(PutOutcome.UNCLAIMED, None, None, now, 0)
    meant = yield from _meant(entry, entry.session)
    if place.closed_at_ms is not None:
        raise SessionClosed(entry.session)
    if place.others == Others.REFUSE:
        yield from _refuse_interjection(entry.session, place, meant)
    most = inbox_max if entry.waiting_max is None else entry.waiting_max
    if place.inbox_tail >= most:
        yield from _refuse_if_full(entry.session, meant, most)
    return (yield from _stored(entry, entry.session, place, meant, now))


def _refused(entry: Entry) -> Body[AnswerRefused | None]:
    """Say why the door does not take an answer. Nothing of this can change once the question is stored,
    so a repeat of an answer that was taken comes past here again."""
    answer = entry.input.answer
    if entry.input.kind is not InputKind.ANSWER or answer is None or entry.session is None:
        return None
    asked = yield from standing(entry.session, answer.consent)
    why = refuse_at_door(answer, asked, entry.input.principal)
    return None if why is None else AnswerRefused(answer.consent, why)


@dataclass(frozen=True, slots=True)
class _Known:
    """The first of what came again."""

    event_id: str
    digest: str
    session: str | None
    n: int | None
    received_at_ms: int


def _remembered(entry: Entry, n: int | None, now: int) -> Body[_Known | None]:
    """Insert the dedupe entry, unless the event is known; return the known one.

    The insert is the check. An entry whose time is over is written over, as if it had been forgotten (A6).
    """
    if not entry.id_signed:
        content = yield from _known_content(entry, now)
        if content is not None:
            return content
    new = yield Sql(
        """
        insert into seen (source, event_id, digest, id_signed, session, n, received_at_ms, until_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?)
        on conflict (source, event_id) do update set
            digest = excluded.digest, id_signed = excluded.id_signed, session = excluded.session, n = excluded.n,
            received_at_ms = excluded.received_at_ms, until_ms = excluded.until_ms
        where seen.until_ms <= ?
        returning 1
        """,
        (
            entry.source,
            entry.event_id,
            entry.digest,
            int(entry.id_signed),
            entry.session,
            n,
            now,
            now + entry.keep_ms,
            now,
        ),
    )
    if new:
        return None
    [found] = yield Sql(
        "select event_id, digest, session, n, received_at_ms from seen where source = ? and event_id = ?",
        (entry.source, entry.event_id),
    )
    return _Known(*found)


def _known_content(entry: Entry, now: int) -> Body[_Known | None]:
    """Return what came with the same bytes under another id that nothing vouched for, if this id is new (K27)."""
    found = yield Sql(
        """
        select event_id, digest, session, n, received_at_ms from seen
        where source = ? and digest = ? and id_signed = 0 and until_ms > ? and not exists (
            select 1 from seen same where same.source = ? and same.event_id = ? and same.until_ms > ?
        )
        order by received_at_ms, event_id /*postgres: collate "C"*/ limit 1
        """,
        (entry.source, entry.digest, now, entry.source, entry.event_id, now),
    )
    return _Known(*found[0]) if found else None


def _again(entry: Entry, known: _Known, *, door_notes_max: int) -> Body[Put]:
    """Acknowledge what is known, and note it; nothing acts on it (A4, K27)."""
    same_id, same_content = known.event_id == storable(entry.event_id), known.digest == entry.digest
    if same_id and not same_content and entry.strict:
        raise Misused(f"{entry.event_id} was used before with other content")
    about = entry.session if known.session is None else known.session
    if same_id and same_content:
        outcome, noted = PutOutcome.DUPLICATE, shape.repeated(entry, about)
    elif same_id:
        outcome, noted = PutOutcome.SUSPECT_REPLAY, shape.other_content(entry, about)
    else:
        outcome, noted = PutOutcome.SUSPECT_REPLAY, shape.known_content(entry, about)
    yield from note(noted, door_notes_max=door_notes_max)
    first = yield Sql(
        """
        select inbox.at_seq, session.node from inbox join session on session.id = inbox.session
        where inbox.session = ? and inbox.n = ?
        """,
        (known.session, known.n),
    )
    head, node = first[0] if first else (0, None)
    return Put(outcome, known.session, known.n, known.received_at_ms, head, node)


def _meant(entry: Entry, session: str) -> Body[Input]:
    """Return the input as it is stored: a bare yes or no is read against the open questions (K20)."""
    yes = shape.bare(entry)
    if yes is None:
        return entry.input
    open_ones = yield from standings(session, (ConsentState.OPEN,), False)
    return shape.as_meant(entry.input, read_bare(yes, open_ones, entry.input.principal, as_of=entry.as_of))


def _refuse_interjection(session: str, place: _Place, received: Input) -> Body[None]:
    """Refuse a person's message while another person's turn runs, or another's message waits (H28)."""
    if received.owner is None or received.lane is not Lane.NORMAL:
        return
    waiting = yield Sql(
        """
        select owner from inbox
        where session = ? and state = 'queued' and n > 0 and lane = 'normal' and owner <> ? limit 1
        """,
        (session, str(received.owner)),
    )
    if shape.interjects(received, place.turn_principal, [owner for (owner,) in waiting]):
        raise CrossUser(session)


def _refuse_if_full(session: str, received: Input, most: int) -> Body[None]:
    """Refuse what is one too many of its owner's in its lane. What nobody owns is counted together."""
    owner = None if received.owner is None else str(received.owner)
    [(waiting,)] = yield Sql(
        """
        select count(*) from (
            select 1 from inbox
            where session = ? and state = 'queued' and n > 0 and lane = ? and coalesce(owner, '') = ? limit ?
        ) as waiting
        """,
        (session, str(received.lane), owner or "", most),
    )
    if waiting >= most:
        raise InboxFull(session, most, owner=owner)


def _stored(entry: Entry, session: str, place: _Place, received: Input, now: int) -> Body[Put]:
    n, owner = place.inbox_tail + 1, None if received.owner is None else str(received.owner)
    if entry.uploads:
        received = replace(received, attachments=(yield from consumed(entry.uploads, session, n, now)))
    yield Sql(
        """
        insert into inbox (session, n, lane, owner, at_seq, state,
            source, event_id, received_at_ms, body, raw, content_type, key, signed_at_ms)
        values (?, ?, ?, ?, ?, 'queued', ?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (session, n, str(received.lane), owner, place.head, *_came(entry, received, now)),
    )
    if place.state == SessionState.IDLE:
        yield Sql("update session set inbox_tail = ?, state = 'ready', ready_at_ms = ? where id = ?", (n, now, session))
    else:
        yield Sql("update session set inbox_tail = ? where id = ?", (n, session))
    return Put(PutOutcome.STORED, session, n, now, place.head, place.node)


def _came(entry: Entry, received: Input, now: int) -> tuple[Value, ...]:
    """Return the columns that an inbox row and an unclaimed one share, from `source` to `signed_at_ms`."""
    came = entry.received
    how = (came.raw or None, came.content_type or None, came.key or None, came.signed_at_ms)
    return (entry.source, entry.event_id, now, encode_input(received), *how)


def _kept_unclaimed(entry: Entry, now: int) -> Body[None]:
    yield Sql(
        """
        insert into unclaimed (source, event_id, received_at_ms, body, raw, content_type, key, signed_at_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?)
        """,
        _came(entry, entry.input, now),
    )


# --- a session that goes -----------------------------------------------------

#: the tables that hold what is of a session, beside its own row and its files
OF_SESSION = (
    "journal",
    *(str(table) for table in Table if table not in (Table.SESSION, Table.ATTACHMENT)),
    "binding",
)


def delete_session(session: str) -> Body[bool]:
    """Delete a session and everything of it. Its row goes first, so that who writes or stores an input waits for
    that, and finds nothing."""
    found = yield Sql("delete from session where id = ? returning 1", (session,))
    if not found:
        return False
    for table in OF_SESSION:
        yield Sql(f"delete from {table} where session = ?", (session,))  # noqa: S608 - from the list above
    yield from release_all(session)
    return True


# --- timers ------------------------------------------------------------------


def fire() -> Body[Fired]:
    """Store the input of the timers that are due, and move each to never.

    The session's row is locked before its timer, as a write does it, so that the two can't wait for each
    other; a timer that was moved meanwhile is no longer due.
    """
    now: int = yield NOW
    due = yield Sql(
        """
        select session, timer, next_at_ms from timer where next_at_ms <= ?
        order by next_at_ms, session /*postgres: collate "C"*/, timer /*postgres: collate "C"*/ limit ?
        """,
        (now, shape.FIRED_MAX),
    )
    stored: list[tuple[str, str | None]] = []
    for session, timer, instant in sorted(due, key=lambda row: row[0]):
        place = yield from _found(session)
        if place is None:
            continue  # deleted meanwhile, its timers with it
        moved = yield Sql(
            """
            update timer set next_at_ms = null where session = ? and timer = ? and next_at_ms = ?
            returning 1
            """,
            (session, timer, instant),
        )
        entry = shape.timer_entry(session, timer, instant)
        received_at: int = yield NOW
        if moved and (yield from _remembered(entry, place.inbox_tail + 1, received_at)) is None:
            done = yield from _stored(entry, session, place, entry.input, received_at)
            stored.append((session, done.node))
    [(next_at_ms,)] = yield Sql("select min(next_at_ms) from timer where next_at_ms is not null")
    return Fired(tuple(stored), next_at_ms)


# --- the inbox ---------------------------------------------------------------


def _inbox_row(row: tuple[Any, ...]) -> InboxRow:
    n, lane, state, source, event_id, received_at_ms, at_seq, body, taken_seq = row
    return InboxRow(n, Lane(lane), state, source, event_id, received_at_ms, at_seq, decode_input(body), taken_seq)


def inbox(session: str, after: int, limit: int) -> Body[list[InboxRow]]:
    """Read queued entries in order of arrival; by index, however many were taken before."""
    found = yield Sql(
        """
        select n, lane, state, source, event_id, received_at_ms, at_seq, body, taken_seq from inbox
        where session = ? and state = 'queued' and n > ? order by n limit ?
        """,
        (session, after, limit),
    )
    return [_inbox_row(row) for row in found]


def inbox_entry(session: str, n: int) -> Body[InboxRow | None]:
    """Read one entry, taken or not."""
    found = yield Sql(
        """
        select n, lane, state, source, event_id, received_at_ms, at_seq, body, taken_seq from inbox
        where session = ? and n = ?
        """,
        (session, n),
    )
    return _inbox_row(found[0]) if found else None


def inbox_record(session: str) -> Body[list[InboxRow]]:
    """Read every entry, taken or not."""
    found = yield Sql(
        """
        select n, lane, state, source, event_id, received_at_ms, at_seq, body, taken_seq from inbox
        where session = ? order by n
        """,
        (session,),
    )
    return [_inbox_row(row) for row in found]


# --- the door's record -------------------------------------------------------


def note(noted: DoorNote, *, door_notes_max: int) -> Body[None]:
    """Add a note, and drop the one that is now too many: notes are numbered, so this is one step in the key."""
    now: int = yield NOW
    [(n,)] = yield Sql(
        """
        insert into door (at_ms, at_seq, kind, source, text, event_id, session, digest)
        values (?, (select head from session where id = ?), ?, ?, ?, ?, ?, ?)
        returning n
        """,
        (now, noted.session, str(noted.kind), noted.source, noted.text, noted.event_id, noted.session, noted.digest),
    )
    yield Sql("delete from door where n <= ?", (n - door_notes_max,))


def door(session: str | None, limit: int) -> Body[list[DoorRow]]:
    """Read the newest notes, oldest first: of one session and of none, or all."""
    if session is None:
        found = yield Sql(
            """
            select n, at_ms, at_seq, kind, source, text, event_id, session, digest from door
            order by n desc limit ?
            """,
            (limit,),
        )
    else:
        found = yield Sql(
            """
            select n, at_ms, at_seq, kind, source, text, event_id, session, digest from door
            where session = ? or session is null order by n desc limit ?
            """,
            (session, limit),
        )
    return [
        DoorRow(n, at_ms, at_seq, DoorNote(DoorKind(kind), *rest)) for n, at_ms, at_seq, kind, *rest in reversed(found)
    ]


def forget(at_most: int) -> Body[int]:
    """Drop dedupe entries whose time is over (A6), the oldest first."""
    now: int = yield NOW
    gone = yield Sql(
        """
        delete from seen where (source, event_id) in (
            select source, event_id from seen where until_ms <= ? order by until_ms limit ?
        )
        returning 1
        """,
        (now, at_most),
    )
    return len(gone)


def bind(source: str, session: str) -> Body[None]:
    """Set the source's default session."""
    yield Sql(
        """
        insert into binding (source, session) values (?, ?)
        on conflict (source) do update set session = excluded.session
        """,
        (source, session),
    )


def bound(source: str) -> Body[str | None]:
    """Read the source's default session."""
    found = yield Sql("select session from binding where source = ?", (source,))
    return str(found[0][0]) if found else None


# --- tokens ------------------------------------------------------------------


def add_token(token: TokenRow) -> Body[None]:
    """Insert a token; one of that id may not exist."""
    added = yield Sql(
        """
        insert into token (id, secret_hash, principal, label, created_at_ms, expires_at_ms, revoked_at_ms)
        values (?, ?, ?, ?, ?, ?, ?)
        on conflict (id) do nothing
        returning 1
        """,
        (
            token.id,
            token.secret_hash,
            str(token.principal),
            token.label,
            token.created_at_ms,
            token.expires_at_ms,
            token.revoked_at_ms,
        ),
    )
    if not added:
        raise IllegalChange(f"token {token.id} exists")


def _token_row(row: tuple[Any, ...]) -> TokenRow:
    id_, secret_hash, principal, *rest = row
    return TokenRow(id_, secret_hash, Principal.parse(principal), *rest)


def token(token_id: str) -> Body[TokenRow | None]:
    """Read one token."""
    found = yield Sql(
        """
        select id, secret_hash, principal, label, created_at_ms, expires_at_ms, revoked_at_ms
        from token where id = ?
        """,
        (token_id,),
    )
    return _token_row(found[0]) if found else None


def tokens() -> Body[list[TokenRow]]:
    """Read every token, oldest first."""
    found = yield Sql(
        """
        select id, secret_hash, principal, label, created_at_ms, expires_at_ms, revoked_at_ms
        from token order by created_at_ms, id
        """
    )
    return [_token_row(row) for row in found]


def revoke_token(token_id: str) -> Body[bool]:
    """Set the time of revocation, once."""
    now: int = yield NOW
    revoked = yield Sql(
        "update token set revoked_at_ms = ? where id = ? and revoked_at_ms is null returning 1", (now, token_id)
    )
    return bool(revoked)
