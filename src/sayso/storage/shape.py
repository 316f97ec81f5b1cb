"""What every store agrees on beside the protocol: sentences of the door, columns of the side tables,
and what an entry, a timer or a stored question comes to. Pure, save for `Steady`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum

from sayso.core.attachment import Blobs, digest_of
from sayso.core.canonical import digest
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import AnswerRefused, IllegalChange
from sayso.core.inputs import Answer, Input, InputKind, Lane, bare_answer, timer_event_id
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import Row, Table, decode_consent
from sayso.core.session import Position, Token
from sayso.core.text import plain
from sayso.storage.store import DoorKind, DoorNote, Entry

#: queued entries of one session's inbox, in each lane: a full queue never keeps an answer out
INBOX_MAX = 1_000
#: notes that the door's record keeps
DOOR_NOTES_MAX = 10_000
#: timers that one `fire` takes; where more are due, its `next_at_ms` is past and it is called again
FIRED_MAX = 256
#: how long a timer's input is recognised; the timer itself never fires the same instant twice
TIMER_KEEP_MS = 7 * 24 * 3_600_000
#: how long it is known of an incarnation that it was declared dead
DEAD_KEPT_MS = 24 * 3_600_000

#: bytes are stored in pieces of this size
PIECE_BYTES = 1024 * 1024
#: bytes whose digest is worth a thread
HASHED_APART_BYTES = 64 * 1024

#: the columns of the side tables, key first, as `side_tables` returns them
SIDE_COLUMNS: dict[Table, tuple[str, ...]] = {
    Table.SESSION: (
        "head",
        "at_ms",
        "turn",
        "turn_seq",
        "turn_principal",
        "turns",
        "consents",
        "title",
        "others",
        "closed_at_ms",
    ),
    Table.INBOX: ("n", "state", "taken_seq"),
    Table.CALL: ("call", "turn", "tool", "arguments", "state", "seq", "outcome", "result_seq"),
    Table.OPERATION: ("operation", "call", "turn", "tool", "key", "digest", "state", "attempts", "sent_at_ms"),
    Table.CONSENT: (
        "consent",
        "turn",
        "state",
        "seq",
        "epoch",
        "digest",
        "expires_at_ms",
        "body",
        "answered_by",
        "answered_at_ms",
        "reason",
        "ticks",
        "due_seq",
        "used_by",
    ),
    Table.REF: ("source", "kind", "value", "operation", "call", "state", "reported_by", "seq"),
    Table.TIMER: ("timer", "purpose", "next_at_ms"),
    Table.PARTICIPANT: ("principal", "role", "seq"),
    Table.ATTACHMENT: ("attachment", "n", "seq", "filename", "media_type", "digest", "size_bytes", "uploader"),
}

#: the key of each side table, after the session
SIDE_KEYS: dict[Table, tuple[str, ...]] = {
    Table.INBOX: ("n",),
    Table.CALL: ("call",),
    Table.OPERATION: ("operation",),
    Table.CONSENT: ("consent",),
    Table.REF: ("source", "kind", "value"),
    Table.TIMER: ("timer",),
    Table.PARTICIPANT: ("principal",),
    Table.ATTACHMENT: ("attachment",),
}


class CommitPhase(StrEnum):
    """Where a store over a database is when it calls `on_commit`."""

    #: everything is in the transaction, nothing is stored. Raising here drops it: callers get CommitUnknown
    BEFORE = "before_commit"
    #: everything is stored, nobody knows. Raising here loses the acknowledgement: callers get CommitUnknown
    AFTER = "after_commit"


#: told the phase and the names of the bodies in the transaction, by whoever commits it
OnCommit = Callable[[CommitPhase, tuple[str, ...]], None]


class Steady:
    """A clock that never steps back (K10), read from any thread."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock, self._lock, self._last_ms = clock, threading.Lock(), 0

    def __call__(self) -> int:
        """Return milliseconds since 1970 UTC, at least what was returned before."""
        with self._lock:
            self._last_ms = max(self._last_ms, self._clock())
            return self._last_ms


def check_rows(token: Token, rows: Sequence[Row]) -> None:
    """Return if `rows` are what one write may hold.

    Raises:
        ValueError: there are none, they are not consecutive, or they are named under another token.
    """
    if not rows:
        raise ValueError("a write has at least one row")
    for seq, row in enumerate(rows, rows[0].seq):
        if (row.seq, row.epoch, row.commit_key) != (seq, token.epoch, token.commit_key(seq)):
            raise ValueError(f"row {row.seq} of epoch {row.epoch} has no place at {seq} of epoch {token.epoch}")


def check_blobs(blobs: Blobs) -> None:
    """Return if each blob is what its digest says: what is stored under a digest is never other bytes.

    Raises:
        IllegalChange: one is not.
    """
    for named, data in blobs.items():
        if digest_of(data) != named:
            raise IllegalChange(f"the bytes that came are not those of {named}")


def pieces(data: bytes) -> list[bytes]:
    """Return bytes as they are stored: in order, each of `PIECE_BYTES` but the last one."""
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


# --- entries -----------------------------------------------------------------


def timer_entry(session: str, timer: str, instant_ms: int) -> Entry:
    """Return what a due timer puts into its session: an input of its own namespace, once an instant (K12)."""
    event_id = timer_event_id(timer, instant_ms)
    return Entry(
        session=session,
        source=f"timer@{session}",
        event_id=event_id,
        input=Input(InputKind.EXPIRY, Principal(PrincipalKind.TIMER, timer), "runtime", consent=timer),
        digest=digest(event_id),
        keep_ms=TIMER_KEEP_MS,
    )


def interjects(received: Input, turn: str | None, waiting: Iterable[str | None]) -> bool:
    """Return whether an input is a person's message that comes between another person's turn (its principal), or
    another's messages that wait (their owners). Sources and timers are nobody's, and come between nothing."""
    if received.owner is None or received.lane is not Lane.NORMAL:
        return False
    running = Principal.parse(turn) if turn is not None else None
    taken = running is not None and running.is_person and running != received.owner
    return taken or any(owner not in (None, str(received.owner)) for owner in waiting)


def bare(entry: Entry) -> bool | None:
    """Return what a person's whole message says, if it is a bare yes or no; else None (K20). With a file it is more."""
    received = entry.input
    is_message = received.kind is InputKind.MESSAGE and received.principal.kind is PrincipalKind.USER
    return (
        bare_answer(received.parts[0].text) if is_message and len(received.parts) == 1 and not entry.uploads else None
    )


def as_meant(received: Input, meant: Answer | InputKind) -> Input:
    """Return the input as it is stored, once it is known what its bare yes or no means."""
    if isinstance(meant, Answer):
        return replace(received, kind=InputKind.ANSWER, answer=meant)
    return replace(received, kind=meant)


# --- the door's sentences ----------------------------------------------------


def repeated(entry: Entry, session: str | None) -> DoorNote:
    """Return the note of a known event (A4)."""
    return _dropped(entry, session, "again from {source}; acknowledged, not acted on")


def other_content(entry: Entry, session: str | None) -> DoorNote:
    """Return the note of a known event id with other bytes (K27)."""
    return _dropped(entry, session, "from {source} came again with other content; acknowledged, not acted on")


def known_content(entry: Entry, session: str | None) -> DoorNote:
    """Return the note of known bytes under another event id that no proof covers (K27)."""
    text = "from {source} repeats known content under another id; acknowledged, not acted on"
    return _dropped(entry, session, text)


def _dropped(entry: Entry, session: str | None, text: str) -> DoorNote:
    sentence = f"{entry.event_id} {text.replace('{source}', entry.source)}"
    return DoorNote(DoorKind.DROPPED, entry.source, sentence, entry.event_id, session, entry.digest)


def unclaimed(entry: Entry) -> DoorNote:
    """Return the note of an input that is kept in no session."""
    text = f"{entry.event_id} from {entry.source}: {entry.unclaimed_because}; kept"
    return DoorNote(DoorKind.UNCLAIMED, entry.source, text, entry.event_id, None, entry.digest)


def answer_refused(entry: Entry, refused: AnswerRefused) -> DoorNote:
    """Return the note of an answer that the door does not take (K12)."""
    asked = plain(refused.consent, chars_max=60)
    text = f"{asked} is not answered by {entry.input.principal}: {refused.why}"
    return DoorNote(DoorKind.REJECTED, entry.source, text, entry.event_id, entry.session, entry.digest)


# --- questions ---------------------------------------------------------------


#: the columns of a question's side table that `standing_of` takes
STANDING_COLUMNS = (
    "body",
    "state",
    "epoch",
    "seq",
    "answered_by",
    "answered_at_ms",
    "reason",
    "ticks",
    "due_seq",
    "used_by",
)


def standing_of(
    body: str,
    state: str,
    epoch: int,
    seq: int,
    answered_by: str | None,
    answered_at_ms: int | None,
    reason: str | None,
    ticks: str | None,
    due_seq: int | None,
    used_by: str | None,
) -> Standing:
    """Return a question from `STANDING_COLUMNS`."""
    return Standing(
        consent=decode_consent(body),
        state=ConsentState(state),
        position=Position(epoch, seq),
        answered_by=answered_by,
        answered_at_ms=answered_at_ms,
        reason=reason or "",
        ticks=None if ticks is None else tuple(json.loads(ticks)),
        due_seq=due_seq,
        used_by=used_by,
    )
