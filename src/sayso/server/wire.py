"""The JSON of requests and answers, and the one table from errors to status codes.

Inbound shapes refuse what they don't know; every refusal is problem+json (RFC 9457). What a client sent is
never repeated to it beyond the names of its fields, and what went wrong inside is never told.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from sayso.core import errors, view
from sayso.core.consent import Standing
from sayso.core.origin import Principal
from sayso.core.record import sentence
from sayso.core.rows import Row, decode_arguments, encode_body
from sayso.core.session import Position, SessionRecord
from sayso.core.text import plain
from sayso.journal.append import JournalStatus
from sayso.journal.feed import Captured
from sayso.runtime.commands import Dispute
from sayso.runtime.effects import Page
from sayso.runtime.files import Staged
from sayso.runtime.people import Participant, Queue
from sayso.server.body import CutShort, Encoded, Form, NotJson, TooLarge, TooSlow
from sayso.storage.store import DoorRow, Put, PutOutcome

log = logging.getLogger(__name__)

# --- what clients send -------------------------------------------------------

#: a name as ids and keys are made of: no blank, nothing that a header or an address would have to escape
Name = Annotated[str, Field(pattern="^[!-~]+$", max_length=200)]
#: `<epoch>.<seq>`, as `Position.parse` takes it
At = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})$", examples=["3.17"])]


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half of a surrogate pair, which no UTF-8 can hold") from None
    return text


#: somebody's words: whatever UTF-8 can hold
Words = Annotated[str, AfterValidator(_utf8)]

CLIENT_SEND_IDS_MAX = 16
#: what one request may name at most; `limits.attachments` says what one message may have
ATTACHMENTS_MAX = 100
STEPS_MAX = 1_000


class Wanted(BaseModel):
    """A request's body. Fields that are not known here are refused, and no type is guessed at."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class OpenSession(Wanted):
    """A session to open."""

    title: Words = Field(default="", max_length=200)


class PostInput(Wanted):
    """A message to a session."""

    text: Words
    as_of: At | None = Field(
        default=None, description="The newest position that its writer had seen; a bare yes needs it."
    )
    client_send_ids: list[Name] = Field(
        default=[], max_length=CLIENT_SEND_IDS_MAX, description="Ids of the client's own, returned in the input's row."
    )
    attachments: list[Name] = Field(
        default=[], max_length=ATTACHMENTS_MAX, description="Ids of uploads; the message takes each with it, once."
    )
    in_flight: Literal["queue", "merge", "reject", "restart"] | None = Field(
        default=None,
        description="What becomes of it while a turn of its sender's runs: it waits for its own turn, joins that one, "
        "is refused with a row, or that one ends for another with both. Left out: as the agent is set.",
    )


class AnswerQuestion(Wanted):
    """An answer to one question about exact steps."""

    verdict: Literal["yes", "no"]
    digest: Words = Field(max_length=100, description="The question's digest: what the answer is about.")
    reason: Words = Field(default="", max_length=4_000)
    steps: list[Annotated[int, Field(ge=0, lt=STEPS_MAX)]] | None = Field(
        default=None, max_length=STEPS_MAX, description="The places of the steps that a yes covers; left out: all."
    )


class ChangeSession(Wanted):
    """What is to change of a session; what is left out stays."""

    title: Words | None = Field(default=None, max_length=200)
    others: Literal["queue", "refuse"] | None = Field(
        default=None,
        description="What becomes of a person's message while another person is being answered, or waits to be.",
    )


class StopTurn(Wanted):
    """Which turn is to stop."""

    turn: str | None = Field(
        default=None,
        pattern=r"^T[1-9][0-9]{0,17}$",
        description="As `T3`; without it, the one that runs when this is looked at. A page that names the turn it "
        "shows can't stop the next one by a late click.",
    )


class Invite(Wanted):
    """Somebody's role in a session."""

    role: Literal["member", "viewer"] = Field(description="A member reads and writes; a viewer reads.")


# --- what clients get --------------------------------------------------------


class Shown(BaseModel):
    """An answer's body. Clients ignore fields that they don't know."""

    model_config = ConfigDict(extra="allow", frozen=True)


class SessionView(Shown):
    """A session."""

    id: str
    title: str
    owner: str = Field(examples=["user:alice"])
    created_at_ms: int
    state: str
    position: str = Field(description="The newest stored row.", examples=["3.17"])
    turn: str | None = Field(description="The turn that is open, if one is.")
    others: Literal["queue", "refuse"] = Field(
        description="What becomes of a person's message while another person is being answered, or waits to be."
    )
    closed_at_ms: int | None = Field(description="When it was closed; nothing comes in any more.")
    waiting: int | None = Field(None, description="Inputs that are not taken yet; only where one session is asked for.")


class SessionList(Shown):
    """Sessions, newest first. For more, ask for those `before` the last one's id."""

    sessions: list[SessionView]


class ParticipantView(Shown):
    """Somebody who takes part in a session."""

    principal: str = Field(examples=["user:bob"])
    role: Literal["owner", "member", "viewer"]


class ParticipantList(Shown):
    """Who takes part in a session: its owner, then the others."""

    participants: list[ParticipantView]


class InputStored(Shown):
    """The message is stored and will be acted on once, also if it was sent before with the same key."""

    outcome: Literal["stored", "duplicate"]
    input: int | None = Field(description="Its place in the session's inbox.")
    received_at_ms: int


class UploadStored(Shown):
    """The file waits for a message that names it."""

    upload: str = Field(description="Unguessable: whoever takes part in the session and knows it may name it, once.")
    filename: str
    media_type: str
    size_bytes: int
    until_ms: int = Field(description="It is dropped then.")


class RowView(Shown):
    """One entry of a session's history. The event of the row in a stream has the same JSON."""

    session: str
    position: str = Field(description="Its place: `<epoch>.<seq>`. No two rows of a session share one.")
    kind: str
    turn: str | None
    at_ms: int
    line: str = Field(description="What it says, in one sentence.")
    body: dict[str, Any]


class HistoryPage(Shown):
    """The newest rows asked for, oldest first, and what to follow them from."""

    rows: list[RowView]
    token: str | None = Field(
        description="The position of the session's newest row, for the stream's `token`; null with `before`.",
        examples=["3.17"],
    )


class OriginView(Shown):
    """Whose voice started a turn."""

    kind: str
    name: str
    verified: str


class ArgumentView(Shown):
    """One argument of a step, and where its value came from."""

    name: str
    value: str
    role: str
    source: str
    outside: bool
    was: str | None


class StepView(Shown):
    """One fixed step of a question."""

    tool: str
    undoes: str | None = Field(description="The operation that it would undo.")
    sentence: str
    arguments: list[ArgumentView]


class QuestionView(Shown):
    """A question about exact steps, in the runtime's words, and what became of it."""

    id: str
    turn: str
    origin: OriginView
    text: str
    because: str
    steps: list[StepView]
    pause: int | None = Field(
        description="The input whose place it asks about: its turn waits, a yes lets it belong to that, and there are "
        "no steps. null for a question about steps."
    )
    digest: str
    approvers: list[str]
    asked_at_ms: int
    expires_at_ms: int
    state: str
    position: str
    answered_by: str | None
    answered_at_ms: int | None
    reason: str
    ticks: list[int] | None
    used_by: str | None


class QuestionList(Shown):
    """A session's questions, in the order they were asked."""

    consents: list[QuestionView]


class AnswerTaken(Shown):
    """The answer is stored. `settled` is the row that says what came of it; null if it isn't there yet."""

    input: int | None
    settled: RowView | None


class Settled(Shown):
    """What was asked is stored. `settled` is the row that says what came of it; null if it isn't there yet."""

    input: int | None
    settled: RowView | None


class WaitingView(Shown):
    """A message of one's own that waits for its turn."""

    input: int = Field(description="Its place in the session's inbox, by which it can be taken back.")
    text: str
    received_at_ms: int
    client_send_ids: list[str]


class OwnerCount(Shown):
    """How many messages of one person wait; null: of nobody, as what a source told."""

    owner: str | None
    waiting: int


class QueueView(Shown):
    """What waits in a session for its turn. Of other people's messages it says only how many there are."""

    mine: list[WaitingView]
    waiting: int = Field(description="All that waits, one's own too.")
    owners: list[OwnerCount] | None = Field(description="For operators: how many wait of each.")


class MadeView(Shown):
    """A thing that an operation made, as its source names it."""

    source: str
    kind: str
    value: str
    state: str = Field(description="`live`, or `gone`.")
    reported_by: str | None = Field(description="The source that said it is gone.")


class EffectView(Shown):
    """What one operation left in the world."""

    operation: str
    turn: str
    tool: str
    arguments: dict[str, Any]
    state: str = Field(
        description="`under_way`: sent, and nothing came back yet. `standing`. `unknown`: it may be there. `gone`: "
        "somebody reported so. `released`: undone on somebody's say-so. `nothing`: it failed, or was never sent."
    )
    effect: str | None = Field(description="What its newest answer says: `partial` stands in part.")
    made: list[MadeView]


class EffectList(Shown):
    """The newest effects of a session, newest first."""

    effects: list[EffectView]
    more: bool = Field(description="Whether there are older ones.")


class JournalRow(Shown):
    """A row as stored."""

    seq: int
    epoch: int
    kind: str
    turn: str | None
    at_ms: int
    line: str
    body: dict[str, Any]


class JournalPage(Shown):
    """Stored rows in order. For more, ask for those `after` the last one's `seq`."""

    rows: list[JournalRow]


class StatusView(Shown):
    """How far the store follows a session."""

    state: str = Field(description="healthy, pending, retrying or conflict.", examples=["healthy"])
    pending: int = Field(description="Rows that are accepted and not known to be stored.")
    attempts: int = Field(description="Tries that failed since the store followed last.")
    first_failure_at_ms: int | None
    last_failure_at_ms: int | None
    next_retry_at_ms: int | None


class ConflictView(Shown):
    """Two versions of a piece of a journal, from row `from_seq` on."""

    from_seq: int
    ours: list[JournalRow] = Field(description="What was accepted and shown, and is not what the store holds.")
    stored: list[JournalRow]


class SettleConflict(Wanted):
    """A choice between the two."""

    keep: Literal["ours", "stored"] = Field(
        description="`stored`: go on from the store. `ours`: the same, and what was accepted is said again as notices."
    )


class NoteView(Shown):
    """What the door recorded about an input that it did not store as it came."""

    n: int
    at_ms: int
    kind: str
    source: str
    text: str
    event_id: str
    session: str | None
    at_seq: int | None = Field(description="The session's newest row at that time.")


class NoteList(Shown):
    """The door's record, oldest first."""

    notes: list[NoteView]


class Health(Shown):
    """The process answers."""

    status: Literal["ok"] = "ok"


def session_view(record: SessionRecord, *, waiting: int | None = None) -> SessionView:
    """Return a session as its reader gets it."""
    return SessionView(
        waiting=waiting,
        id=record.id,
        title=record.title,
        owner=str(record.owner),
        created_at_ms=record.created_at_ms,
        state=record.state,
        position=str(record.position),
        turn=record.turn,
        others=record.others.value,
        closed_at_ms=record.closed_at_ms,
    )


def participant_list(found: Iterable[Participant]) -> ParticipantList:
    """Return who takes part."""
    views = [{"principal": str(each.principal), "role": each.role} for each in found]
    return ParticipantList(participants=[ParticipantView.model_validate(view) for view in views])


def row_view(row: Row, session: str) -> RowView:
    """Return a row as its reader gets it."""
    return RowView(**view.public(row, session))


def history_page(captured: Captured) -> Response:
    """Return a piece of the history, a `HistoryPage` that is JSON already."""
    return Response(captured.text.encode("utf-8", "replace"), media_type="application/json")


def question_view(standing: Standing) -> QuestionView:
    """Return a question as its reader gets it."""
    return QuestionView(**view.standing(standing))


def input_stored(put: Put) -> InputStored:
    """Return what the sender of an input is told."""
    outcome: Literal["stored", "duplicate"] = "stored" if put.outcome is PutOutcome.STORED else "duplicate"
    return InputStored(outcome=outcome, input=put.n, received_at_ms=put.received_at_ms)


def upload_stored(staged: Staged) -> UploadStored:
    """Return what the sender of a file is told."""
    upload = staged.upload
    return UploadStored(
        upload=upload.id,
        filename=upload.filename,
        media_type=upload.media_type,
        size_bytes=staged.size_bytes,
        until_ms=staged.until_ms,
    )


def settled(session: str, n: int | None, row: Row | None) -> Settled:
    """Return what became of something that was asked of a session."""
    return Settled(input=n, settled=None if row is None else row_view(row, session))


def effect_list(found: Page) -> EffectList:
    """Return what a session's operations left."""
    effects = [
        EffectView(
            operation=one.operation.operation,
            turn=one.operation.turn,
            tool=one.operation.tool,
            arguments=decode_arguments(one.operation.arguments),
            state=one.presence,
            effect=one.operation.effect,
            made=[
                MadeView(
                    source=row.ref.source,
                    kind=row.ref.kind,
                    value=row.ref.value,
                    state=row.state,
                    reported_by=row.reported_by,
                )
                for row in one.made
            ],
        )
        for one in found.effects
    ]
    return EffectList(effects=effects, more=found.more)


def queue_view(found: Queue) -> QueueView:
    """Return what waits, as its reader may see it."""
    mine = [
        WaitingView(
            input=entry.n,
            text="".join(part.text for part in entry.input.parts),
            received_at_ms=entry.received_at_ms,
            client_send_ids=list(entry.input.client_send_ids),
        )
        for entry in found.mine
    ]
    owners = None
    if found.owners is not None:
        owners = [OwnerCount(owner=owner or None, waiting=count) for owner, count in sorted(found.owners.items())]
    return QueueView(mine=mine, waiting=found.waiting, owners=owners)


def journal_row(row: Row) -> JournalRow:
    """Return a row as an operator gets it: all of it but its commit key, which never leaves the process."""
    return JournalRow(
        seq=row.seq,
        epoch=row.epoch,
        kind=row.kind,
        turn=row.turn,
        at_ms=row.at_ms,
        line=sentence(row),
        body=json.loads(encode_body(row.body)),
    )


def status_view(status: JournalStatus) -> StatusView:
    """Return how far the store follows."""
    return StatusView(
        state=status.state,
        pending=status.pending,
        attempts=status.attempts,
        first_failure_at_ms=status.first_failure_at_ms,
        last_failure_at_ms=status.last_failure_at_ms,
        next_retry_at_ms=status.next_retry_at_ms,
    )


def conflict_view(dispute: Dispute) -> ConflictView:
    """Return both versions of what is in conflict."""
    return ConflictView(
        from_seq=dispute.from_seq,
        ours=[journal_row(row) for row in dispute.ours],
        stored=[journal_row(row) for row in dispute.stored],
    )


def note_view(row: DoorRow) -> NoteView:
    """Return an entry of the door's record."""
    note = row.note
    return NoteView(
        n=row.n,
        at_ms=row.at_ms,
        kind=note.kind,
        source=note.source,
        text=note.text,
        event_id=note.event_id,
        session=note.session,
        at_seq=row.at_seq,
    )


# --- names in addresses ------------------------------------------------------


class Malformed(errors.Refused):
    """The request can't be read as what it claims to be."""


_NAME = re.compile(r"[!-~]{1,200}")


def named(what: str, text: str) -> str:
    """Return an id from an address. A person's name is no id of ours; see `person`.

    Raises:
        NotFound: no id looks like this, so there is no such thing; the store isn't asked.
    """
    if what != "person" and not _NAME.fullmatch(text):
        raise errors.NotFound(what)
    return text


def person(text: str) -> Principal:
    """Return the person that an address names.

    Raises:
        Invalid: it names none.
    """
    try:
        return Principal.parse(text)
    except ValueError:
        raise errors.Invalid("a person is named user:<id>, as user:bob") from None


def position(text: str) -> Position:
    """Return the position that a stream is to go on from.

    Raises:
        Malformed: it is none.
    """
    try:
        return Position.parse(text)
    except ValueError as error:
        raise Malformed(str(error)) from None


# --- errors to status codes --------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a class of errors comes to for a client."""

    status: int
    #: last part of the problem's type; empty: the status says all ("about:blank")
    slug: str = ""
    title: str = ""
    #: what is said instead of the error's own words, which may be about our insides
    detail: str = ""
    headers: Mapping[str, str] | None = None


def _later(seconds: int) -> Mapping[str, str]:
    return {"Retry-After": str(seconds)}


#: The nearest class of an error decides. An error of ours that is not here is a fault of ours: 500.
TABLE: Mapping[type[errors.SaysoError], Verdict] = {
    Malformed: Verdict(400, "malformed", "The request can't be read"),
    CutShort: Verdict(400, "malformed", "The request can't be read"),
    errors.Unauthenticated: Verdict(
        401, "unauthenticated", "Who is asking isn't proven", headers={"WWW-Authenticate": "Bearer"}
    ),
    errors.Forbidden: Verdict(403, "forbidden", "Not this caller's to do"),
    errors.NotFound: Verdict(
        404, "not-found", "There is no such thing, or it isn't this caller's to see", "The two look alike on purpose."
    ),
    TooSlow: Verdict(408, "too-slow", "The body didn't arrive in time"),
    errors.CrossUser: Verdict(409, "cross-user-interjection", "Another person is being answered"),
    errors.NotSettled: Verdict(409, "not-settled", "What was said last is not known to be stored"),
    errors.SessionClosed: Verdict(409, "closed", "The session was closed"),
    errors.RequestRefused: Verdict(409, "request-refused", "The session can't do that as it is"),
    errors.AnswerRefused: Verdict(409, "answer-refused", "The answer isn't one to this question"),
    TooLarge: Verdict(413, "too-large", "The body is too large"),
    Encoded: Verdict(415, "wrong-type", "The body comes in a form that isn't taken here"),
    Form: Verdict(415, "wrong-type", "The body comes in a form that isn't taken here"),
    NotJson: Verdict(415, "wrong-type", "The body comes in a form that isn't taken here"),
    errors.Invalid: Verdict(422, "invalid", "The request doesn't say something that can be acted on"),
    errors.Misused: Verdict(
        422,
        "key-reused",
        "An idempotency key came again with other content",
        "Nothing was stored. Another message needs another Idempotency-Key.",
    ),
    errors.NoUpload: Verdict(422, "no-upload", "An upload that the message names isn't there"),
    errors.UploadsFull: Verdict(429, "uploads-full", "Too many uploads wait for a message", headers=_later(60)),
    errors.InboxFull: Verdict(429, "inbox-full", "Too many inputs wait already", headers=_later(5)),
    errors.Busy: Verdict(
        503, "busy", "Not now", "Nothing happened. The same request may succeed later.", headers=_later(2)
    ),
    errors.OutcomeUnknown: Verdict(
        503,
        "outcome-unknown",
        "It may have been stored, or not",
        "With the same Idempotency-Key it is safe to send again.",
        headers=_later(2),
    ),
}

FAULT = Verdict(
    500, "fault", "Something went wrong here", "It was recorded. The request may or may not have been done."
)


def verdict(error: errors.SaysoError) -> Verdict:
    """Return what an error comes to for a client; one that no client can cause is logged."""
    for each in type(error).__mro__:
        if each in TABLE:
            return TABLE[each]
    log.error("request met a fault of ours", exc_info=error)
    return FAULT


class WrongField(Shown):
    """One thing that is wrong with a request."""

    where: Literal["body", "query", "header", "path"]
    pointer: str = Field(description="JSON pointer into the body, or the name of the parameter.", examples=["/text"])
    detail: str


class Problem(Shown):
    """Why a request was refused (RFC 9457)."""

    type: str = Field(examples=["/problems/not-found"])
    title: str
    status: int
    detail: str | None = None
    errors: list[WrongField] | None = None


#: an answer or a request is stored, and what comes of it is not known yet
TAKEN = 202
NOT_SETTLED: dict[int | str, dict[str, Any]] = {
    TAKEN: {"model": AnswerTaken, "description": "Stored; it will be settled."}
}
NOT_DONE: dict[int | str, dict[str, Any]] = {TAKEN: {"model": Settled, "description": "Stored; it will be settled."}}

PROBLEM_TYPE = "application/problem+json"


def problem(found: Verdict, *, detail: str = "", wrong: Iterable[WrongField] = ()) -> Response:
    """Return the answer that says why not. It is ASCII, so whatever it repeats can be encoded."""
    content = Problem(
        type=f"/problems/{found.slug}" if found.slug else "about:blank",
        title=found.title or HTTPStatus(found.status).phrase,
        status=found.status,
        detail=found.detail or detail or None,
        errors=list(wrong) or None,
    )
    text = json.dumps(content.model_dump(exclude_none=True), separators=(",", ":"))
    headers = {**(found.headers or {}), "Cache-Control": "no-store"}
    return Response(text, found.status, headers, media_type=PROBLEM_TYPE)


async def _on_error(_: Request, error: errors.SaysoError) -> Response:
    return problem(verdict(error), detail=plain(str(error), chars_max=300))


async def _on_http(request: Request, error: HTTPException) -> Response:
    """Answer what the framework refuses: no such route, a method that it hasn't, a body that can't be read."""
    if error.status_code == HTTPStatus.BAD_REQUEST:
        return problem(TABLE[Malformed], detail="the body is not JSON in UTF-8, or it is nested too deep")
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        headers["Allow"] = ", ".join(_methods(request)) or headers.get("Allow", "")
    return problem(Verdict(error.status_code, headers=headers))


def _methods(request: Request) -> list[str]:
    """Return the methods of every route at this address."""
    routes = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in routes for method in getattr(route, "methods", None) or ()})


async def _on_invalid(_: Request, error: RequestValidationError) -> Response:
    found = error.errors()
    if any(each["type"] == "json_invalid" for each in found):
        return problem(TABLE[Malformed], detail=f"the body is not JSON: see character {found[0]['loc'][-1]}")
    return problem(TABLE[errors.Invalid], wrong=[_wrong(each) for each in found[:WRONG_FIELDS_MAX]])


#: things that one refusal lists
WRONG_FIELDS_MAX = 20


def _wrong(found: Mapping[str, Any]) -> WrongField:
    """Return one thing that is wrong, without the value that was sent."""
    where, *path = (str(step) for step in found["loc"])
    names = [plain(step, chars_max=60) for step in path]
    pointer = "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)
    return WrongField(
        where=where if where in ("query", "header", "path") else "body",  # type: ignore[arg-type]  # one of these
        pointer=pointer if where == "body" else ".".join(names),
        detail=found["msg"],
    )


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]

#: how each kind of refusal becomes an answer
HANDLERS: Mapping[int | type[Exception], Handler] = {
    errors.SaysoError: _on_error,
    HTTPException: _on_http,
    RequestValidationError: _on_invalid,
}
