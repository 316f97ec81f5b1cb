"""Store: the transactions that the runtime needs. Every implementation keeps the same promises.

Three families of tables. *Session* (journal and projections): only `write` changes them, and only by rows.
*Door* (inbox, seen, unclaimed, record, bindings, tokens, uploads, a timer's `next_at_ms`): any node. *Engine*
(session ownership, nodes). Session and inbox keys begin with the session id, door keys with the source;
no transaction needs to span two sessions.

Whatever returns has been committed, synced to disk where the store has one. Instants are the store's time (K10).
Every method may raise `StoreUnavailable` (nothing happened) and those that write `CommitUnknown`.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sayso.core.attachment import NO_BLOBS, Attachment, Blobs
from sayso.core.consent import ConsentState, Standing
from sayso.core.inputs import Input, Lane
from sayso.core.operation import EffectState, OperationState, Ref
from sayso.core.origin import Principal
from sayso.core.rows import Row
from sayso.core.session import Position, SessionRecord, SessionRole, Token

# --- the door ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Received:
    """What came through the door, beside what it was parsed to. `None` where there is none (a user, a timer)."""

    #: the bytes as they came; kept for a hook until the input is taken
    raw: bytes = b""
    content_type: str = ""
    #: reference of the key that matched
    key: str = ""
    signed_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One input on its way into a session, or to the unclaimed ones where `session` is None."""

    session: str | None
    #: the namespace of event ids: a source's name, or `user:alice@<session>` (K27)
    source: str
    event_id: str
    input: Input
    #: `sha256:<hex>` of the content that a repeat must share
    digest: str
    #: how long a repeat is recognised, milliseconds from now
    keep_ms: int
    #: whether the proof covers the event id; where not, a known digest under a new id is a suspect replay
    id_signed: bool = True
    received: Received = Received()
    #: True: the same id with other content raises `Misused` (a person's Idempotency-Key);
    #: False: it is acknowledged, recorded as a suspect replay and not acted on (a hook)
    strict: bool = False
    #: where `session` is None: why, for the door's record
    unclaimed_because: str = "no session knows what it names"
    #: the position that the sender had seen; a bare yes counts only at or past the question (K20)
    as_of: Position | None = None
    #: uploads of this session that it takes with it, in order; they become the input's attachments (K29)
    uploads: tuple[str, ...] = ()
    #: how many inputs of its owner may wait in its lane; None: as many as of all that nobody owns together
    waiting_max: int | None = None


class PutOutcome(StrEnum):
    """What became of an entry."""

    STORED = "stored"
    #: known by (source, event id): acknowledged, not acted on (A4)
    DUPLICATE = "duplicate"
    #: a known id with other content, or known content under a new unsigned id
    SUSPECT_REPLAY = "suspect_replay"
    #: no session: stored all the same
    UNCLAIMED = "unclaimed"


@dataclass(frozen=True, slots=True)
class Put:
    """The answer to `put`. For a duplicate, `session` and `n` are those of the first one."""

    outcome: PutOutcome
    session: str | None
    #: place in the session's inbox; None where it is in none
    n: int | None
    received_at_ms: int
    #: newest stored row of that session when it was stored
    head: int
    #: node incarnation to hint; None if nobody owns the session
    node: str | None = None


@dataclass(frozen=True, slots=True)
class InboxRow:
    """An input as stored. It stays as the door's record after it was taken."""

    n: int
    lane: Lane
    state: str
    source: str
    event_id: str
    received_at_ms: int
    #: newest stored row when it arrived: where it stands in the numbered list (K28)
    at_seq: int
    input: Input
    taken_seq: int | None = None


@dataclass(frozen=True, slots=True)
class Upload:
    """A file sent ahead of the message that will name it."""

    #: unguessable, and told to the uploader alone: whoever knows it may name it in a message (K29)
    id: str
    session: str
    uploader: Principal
    #: clean, see `core.attachment`
    filename: str
    media_type: str
    #: of the bytes, see `core.attachment.digest_of`
    digest: str


@dataclass(frozen=True, slots=True)
class AttachmentRow:
    """A file of an input or a result, as its side table holds it."""

    attachment: Attachment
    #: the row that shows it; None while its input waits
    seq: int | None
    #: the input that it came with; None for a result's
    n: int | None
    #: who sent the bytes: a principal, or `tool:<name>`
    uploader: str
    #: who sent the input that waits; None once it doesn't
    sender: Principal | None = None


class DoorKind(StrEnum):
    """What the door records beside the inputs it stored (K28)."""

    DROPPED = "input.dropped"
    REJECTED = "input.rejected"
    UNCLAIMED = "input.unclaimed"
    #: what stood in a session's way again and again was given up, so that it goes on
    PARKED = "session.parked"


@dataclass(frozen=True, slots=True)
class DoorNote:
    """An entry of the door's record: no bodies, no secrets."""

    kind: DoorKind
    source: str
    #: the sentence
    text: str
    event_id: str = ""
    session: str | None = None
    digest: str = ""


@dataclass(frozen=True, slots=True)
class DoorRow:
    """A door note as stored, in order of `n` over the whole store."""

    n: int
    at_ms: int
    #: newest stored row of its session then; None without a session
    at_seq: int | None
    note: DoorNote


# --- sessions and rows -------------------------------------------------------

#: how long a node lives after a beat, where it says nothing else
LEASE_MS = 6_000


@dataclass(frozen=True, slots=True)
class Claimed:
    """A session that this node now owns."""

    token: Token
    record: SessionRecord


class WriteOutcome(StrEnum):
    """What `write` found (design section 6)."""

    WRITTEN = "written"
    #: all our keys are there with our content: a lost acknowledgement
    ALREADY = "already"
    #: epoch or nonce differ: nothing written
    FENCED = "fenced"
    #: the store is further on with other rows: nothing written
    CONFLICT = "conflict"
    #: a predecessor is missing: nothing written, try again after it
    BEHIND = "behind"
    #: there is no such session any more: nothing written
    GONE = "gone"


class Released(StrEnum):
    """What `release` found."""

    #: nobody owns it now, nothing waits
    IDLE = "idle"
    #: an input came meanwhile: still owned, look again (K22)
    MORE = "more"
    FENCED = "fenced"


@dataclass(frozen=True, slots=True)
class Fired:
    """What `fire` did."""

    #: (session, node to hint) of each input that it stored
    stored: tuple[tuple[str, str | None], ...]
    #: the next due instant, milliseconds since 1970 UTC; None if none is set
    next_at_ms: int | None


@dataclass(frozen=True, slots=True)
class OperationRow:
    """An operation as its side table holds it."""

    operation: str
    call: str
    #: the turn whose it is: that began it, or took it over since (D3)
    turn: str
    tool: str
    key: str
    state: OperationState
    attempts: int
    #: canonical JSON of the arguments
    arguments: str
    #: what it left in the world, as its newest answer says; None while nobody said so
    effect: EffectState | None = None
    #: when it was first sent; None while it was not
    sent_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RefRow:
    """A ref as its side table holds it."""

    session: str
    ref: Ref
    state: str
    operation: str | None
    seq: int
    #: its session was closed, and takes no input any more
    closed: bool = False
    #: the source that said it is gone
    reported_by: str | None = None


@dataclass(frozen=True, slots=True)
class ParticipantRow:
    """Somebody who takes part in a session beside its owner."""

    principal: Principal
    role: SessionRole
    #: the row that says so
    seq: int


@dataclass(frozen=True, slots=True)
class TokenRow:
    """An API token: the hash of its secret, and whom it stands for."""

    id: str
    secret_hash: str
    principal: Principal
    label: str
    created_at_ms: int
    expires_at_ms: int | None
    revoked_at_ms: int | None = None


class Store(Protocol):
    """See the module's text."""

    # engine

    async def register(self, node: str) -> int:
        """Make this incarnation known, and return how many sessions it took from dead ones: they are
        ready again under a higher epoch, so whatever a dead node still sends to the store is fenced."""
        ...

    async def claim(self, node: str, *, at_most: int) -> list[Claimed]:
        """Take up to `at_most` ready sessions, longest ready first: epoch + 1, a fresh nonce and one attempt more
        each. One that
        another transaction is at may be passed over; `ready` still counts it. Nothing for an incarnation that was
        declared dead."""
        ...

    async def ready(self, *, at_most: int) -> int:
        """Return how many sessions wait to be claimed, counted up to `at_most`."""
        ...

    async def release(self, token: Token, *, looked_to: int) -> Released:
        """Give the session up, unless its inbox has an entry past `looked_to`, the last one looked at."""
        ...

    async def surrender(self, token: Token, *, failed: bool = False) -> bool:
        """Give the session up as it is, ready for another claim; False if it was fenced. For shutdown,
        a fault of this node, and a conflict. `failed`: going on with it failed, and this attempt counts."""
        ...

    async def beat(self, incarnation: str, address: str, *, lease_ms: int = LEASE_MS) -> int | None:
        """Begin or renew the lease of a node's incarnation, and return the instant at which it ends, by the store's
        clock alone. `address` is where other nodes reach it.

        None: its lease has ended, or it was declared dead; nothing was stored. What it owned is anybody's, and its
        process goes on as another incarnation. One that never beats has no lease, and is never declared dead.
        """
        ...

    async def sweep(self) -> int:
        """Declare dead each incarnation whose lease has ended, hand back what dead ones own, and return how many
        sessions that are: ready again under a higher epoch, so whatever an owner still sends to the store is fenced.
        A write of it that is under way is stored first, and seen by the next owner, or fenced.

        One at a time: 0 where another sweep is under way. A session, or a beat, that another transaction is at just
        then is left to the next sweep. An incarnation that was declared dead is forgotten after a day; if it beats
        then, it is a new one, and owns nothing.
        """
        ...

    async def reclaim(self, incarnation: str, running: AbstractSet[str]) -> list[str]:
        """Hand back, as `sweep` does, what the store says this incarnation owns and what is not among the sessions
        `running` there, and return them in order: their task has died, or their claim had no answer.

        For who has no claim under way: what that one brings is not running yet, and would be handed back.
        """
        ...

    async def fire(self) -> Fired:
        """Store the input of every due timer and move its `next_at_ms` (to never), in one transaction:
        source `timer`, event id `<timer>@<instant>`, lane control."""
        ...

    # session

    async def create_session(self, session: str, *, owner: Principal, title: str) -> SessionRecord:
        """Store a new session, idle and empty."""
        ...

    async def delete_session(self, session: str) -> bool:
        """Remove a session and everything of it, whoever owns it: rows, projections, inbox, uploads and files (bytes
        that nothing else refers to), participants, bindings. False if there is none. What names its events stays
        until its time, so that a repeat is still one; and the door's notes stay. Whoever owned it finds nothing to
        write to afterwards (`WriteOutcome.GONE`)."""
        ...

    async def session(self, session: str) -> SessionRecord | None:
        """Return the session, or None."""
        ...

    async def sessions(self, *, of: Principal | None, limit: int, before: str | None = None) -> list[SessionRecord]:
        """Return sessions, newest first (their ids sort by time), those before `before`: those that somebody owns
        or takes part in, or (None) all."""
        ...

    async def participants(self, session: str) -> list[ParticipantRow]:
        """Return who takes part beside the owner, in the order of the rows that say so."""
        ...

    async def participant(self, session: str, principal: Principal) -> ParticipantRow | None:
        """Return what somebody was given in a session, or None."""
        ...

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        """Write consecutive rows and all they change, or nothing. The only way to write rows.

        `blobs` are the bytes of attachments that these rows bring, by digest: stored in the same transaction,
        so who sees the rows can have the bytes. ALREADY adds no reference to them. Bytes that are stored already
        may be left out.

        Raises:
            IllegalChange: a row asks for a change that its subject's state does not allow, or names bytes that
                are not there, or others than those of its digest; nothing is written.
        """
        ...

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> list[Row]:
        """Return stored rows with `after < seq <= up_to`, in order, the first `limit` of them."""
        ...

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> list[Row]:
        """Return the newest `limit` stored rows (those with `seq < before`), in order."""
        ...

    async def keep(self, session: str, position: Position) -> int:
        """Return K1's `keep`: `seq` if `epoch` is the session's current one, else the highest stored seq
        at most `seq` of an epoch at most `epoch`; 0 if there is none. Where an operator has chosen since
        between two versions (K7), nothing from the first row in question on is kept."""
        ...

    async def standings(
        self, session: str, *, states: Sequence[ConsentState] | None = None, due: bool = False
    ) -> list[Standing]:
        """Return the session's questions in the order they were asked: those in `states`, plus with `due`
        those whose answer still owes a turn."""
        ...

    async def standing(self, session: str, consent: str) -> Standing | None:
        """Return one question, or None."""
        ...

    async def operations(self, session: str, *, states: Sequence[OperationState] | None = None) -> list[OperationRow]:
        """Return the session's operations, oldest first."""
        ...

    async def operation(self, session: str, operation: str) -> OperationRow | None:
        """Return one operation, or None."""
        ...

    async def made(self, session: str) -> list[RefRow]:
        """Return the things that a session's operations made, in the order of the rows that say so."""
        ...

    async def refs(self, source: str, refs: Sequence[Ref]) -> list[RefRow]:
        """Return what sessions' tools made for `source` among `refs`, in any session (A12)."""
        ...

    # door

    async def put(self, entry: Entry) -> Put:
        """Store an input with its dedupe entry, in one transaction (A7), and make an idle session ready.

        The received time is stamped here, after the session's row is locked, so that order in the inbox
        and time agree (K12). An answer is taken only to a stored question, from an approver, with its
        digest. A message that is a bare yes or no becomes an answer, an unclear one, or stays a message,
        decided here from the open questions that its sender may answer (K20).

        Raises:
            NotFound: there is no such session.
            NoUpload: an upload that it names isn't there for this session; nothing was stored, none is used up.
            SessionClosed: it was ended by a row; nothing was stored.
            CrossUser: the session refuses a person's message while another person is being answered (H28); nothing
                was stored.
            InboxFull: as many queued entries of its owner as may wait in that lane of the session's inbox, or, of
                what nobody owns, of all that together; nothing was stored.
            Misused: with `strict`, the event id is known with other content.
            AnswerRefused: the answer is not one the door takes; a note of it is stored.
        """
        ...

    async def inbox(self, session: str, *, after: int, limit: int) -> list[InboxRow]:
        """Return queued entries with `n > after`, in order of arrival."""
        ...

    async def inbox_entry(self, session: str, n: int) -> InboxRow | None:
        """Return one entry, taken or not, or None."""
        ...

    async def inbox_record(self, session: str) -> list[InboxRow]:
        """Return every entry of a session's inbox, taken or not, for the numbered list (K28)."""
        ...

    async def note(self, note: DoorNote) -> None:
        """Add to the door's record. It keeps a bounded number of notes, the newest."""
        ...

    async def door(self, *, session: str | None = None, limit: int = 1000) -> list[DoorRow]:
        """Return the door's record, oldest first: of one session and of none, or of all (None)."""
        ...

    async def forget(self) -> int:
        """Drop dedupe entries (A6) and uploads whose time is over, and bytes that nothing refers to; return how
        many entries and uploads."""
        ...

    async def stage_upload(
        self, upload: Upload, data: bytes, *, keep_ms: int, staged_max: int, staged_bytes_max: int
    ) -> int:
        """Store a file for a message to come, and return until when, milliseconds since 1970 UTC.

        One person has at most `staged_max` of them, of `staged_bytes_max` bytes together, in one session.

        Raises:
            NotFound: there is no such session.
            UploadsFull: it would be one too many, or too large beside the others; nothing was stored.
            IllegalChange: the bytes are not those of their digest.
        """
        ...

    async def discard_upload(self, session: str, upload: str, *, uploader: Principal) -> bool:
        """Drop an upload before a message took it; False if this person has none of that id here."""
        ...

    async def attachment(self, session: str, attachment: str) -> AttachmentRow | None:
        """Return a file of the session, or None."""
        ...

    async def piece(self, digest: str, place: int) -> bytes | None:
        """Return the bytes from `place` times `PIECE_BYTES` on, as many as that at most; None if there are none there,
        or nothing refers to them any more."""
        ...

    async def bind(self, source: str, session: str) -> None:
        """Make `session` the one that takes what `source` sends about nothing known."""
        ...

    async def bound(self, source: str) -> str | None:
        """Return the source's default session, or None."""
        ...

    async def add_token(self, token: TokenRow) -> None:
        """Store an API token."""
        ...

    async def token(self, token_id: str) -> TokenRow | None:
        """Return a token by its id, revoked and expired ones too."""
        ...

    async def tokens(self) -> list[TokenRow]:
        """Return every token, oldest first."""
        ...

    async def revoke_token(self, token_id: str) -> bool:
        """Make a token useless from now on; False if there is none or it was revoked before."""
        ...

    # life

    def now_ms(self) -> int:
        """Return the store's time as last known to this node, milliseconds since 1970 UTC (K10)."""
        ...

    async def healthy(self) -> None:
        """Return if the store can be read and written; raise `StoreUnavailable` if not."""
        ...

    async def close(self) -> None:
        """Finish what was submitted, and let go of the file or the connections."""
        ...
