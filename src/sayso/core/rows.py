"""The kinds of row, their JSON, and what each changes beside the journal.

Rows are never updated. `changes` is the only thing that says what a row does to a side table: a store
applies it in the row's transaction, and a projection can be rebuilt from the rows alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import PydanticSerializationError

from sayso.core.attachment import Attachment
from sayso.core.authority import Verdict
from sayso.core.canonical import canonical
from sayso.core.consent import Consent, ConsentState, Replaced
from sayso.core.contract import Effect
from sayso.core.inputs import Fit, Input, Keep
from sayso.core.labels import Part
from sayso.core.operation import EffectState, OperationState, Ref, sources_of
from sayso.core.origin import Origin
from sayso.core.session import Others, Position, SessionRole
from sayso.core.text import scrub_json

#: version of the bodies below; a reader accepts every version up to its own
BODY_VERSION = 1


class Kind(StrEnum):
    """What a row records (E1)."""

    INPUT = "input"
    NOTICE = "notice"
    EFFECT_GONE = "effect.gone"
    TURN_START = "turn.start"
    TURN_STEPS = "turn.steps"
    TURN_ASK = "turn.ask"
    TURN_STOP = "turn.stop"
    TURN_END = "turn.end"
    MODEL_CALLED = "model.called"
    MODEL_SAID = "model.said"
    TOOL_INTENDED = "tool.intended"
    TOOL_SENT = "tool.sent"
    TOOL_UNKNOWN = "tool.unknown"
    TOOL_RESULT = "tool.result"
    TOOL_SETTLED = "tool.settled"
    CONSENT_APPROVED = "consent.approved"
    CONSENT_DECLINED = "consent.declined"
    CONSENT_EXPIRED = "consent.expired"
    CONSENT_WITHDRAWN = "consent.withdrawn"
    CONSENT_USED = "consent.used"
    ANSWER_REFUSED = "answer.refused"
    CONFLICT_SETTLED = "conflict.settled"
    REQUEST_REFUSED = "request.refused"
    PARTICIPANT_CHANGED = "participant.changed"
    INPUT_RETRACTED = "input.retracted"
    INPUT_SUPERSEDED = "input.superseded"
    INPUT_CLASSIFIED = "input.classified"
    SESSION_CHANGED = "session.changed"
    SESSION_CLOSED = "session.closed"


class Ending(StrEnum):
    """How a turn ended (C2)."""

    DONE = "done"
    ASKED = "asked"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Outcome(StrEnum):
    """What one call came to; every call has exactly one."""

    OK = "ok"
    #: it did not succeed; what it left in the world all the same is the result's `effect`
    FAILED = "failed"
    #: not allowed, not offered, or not a valid call
    REFUSED = "refused"
    #: fixed in a question
    WAITING = "waiting"
    NOT_STARTED = "not_started"
    #: sent, and nobody knows
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class InputBody:
    """The owner took an input from the inbox."""

    n: int
    source: str
    event_id: str
    received_at_ms: int
    input: Input


@dataclass(frozen=True, slots=True)
class NoticeBody:
    """Words for people, from a source (`n` names its input) or from the runtime. No authority (A11)."""

    parts: tuple[Part, ...]
    n: int | None = None


@dataclass(frozen=True, slots=True)
class EffectGoneBody:
    """A source reported that something a tool made is no more (A13)."""

    ref: Ref
    reported_by: str
    n: int
    operation: str | None = None


@dataclass(frozen=True, slots=True)
class TurnStartBody:
    """A turn began. The origin is written here and nowhere else (B1)."""

    origin: Origin
    #: model calls that are left to it
    steps_left: int
    #: the turn that asked, where this one goes on with it (K16)
    continues: str | None = None
    #: the consent whose steps it runs (B10), or whose answer it goes on from
    consent: str | None = None
    #: what the starting input names (K18)
    about: tuple[Ref, ...] = ()
    #: what steps of this turn would replace (K31)
    replaced: tuple[Replaced, ...] = ()
    #: when the say-so that it acts on was given (K14)
    say_so_at_ms: int = 0
    #: the turn that ended for it (C7)
    restarts: str | None = None
    #: operations of that turn that a call of this one may take over, if it plans the same (D3)
    reuse: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Called:
    """One call, proposed by the model or fixed by a consent, with what was decided about it."""

    #: ours: turn, reply, place (H13)
    call: str
    tool: str
    arguments: Mapping[str, Any]
    verdict: Verdict
    reason: str
    effect: Effect
    keyed: bool = False
    parallel_safe: bool = False
    #: version of the contract it was decided under
    contract: str = ""
    approvers: tuple[str, ...] = ()
    #: the provider's id, a note only
    provider_id: str = ""
    #: an older operation that this call takes over instead of beginning one (D3)
    takes: str | None = None
    #: that one is done: nothing is sent, and nothing is asked
    done: bool = False
    #: when that one was first sent
    sent_at_ms: int | None = None
    #: the operation that it undoes (D6)
    undoes: str | None = None
    #: an operation that may have done the same already (K25)
    again: str | None = None

    @property
    def operation(self) -> str:
        """The operation that this call is about, if it does something to the world: its own, or the one it takes."""
        return self.takes or self.call

    @property
    def is_operation(self) -> bool:
        """Whether it does something to the world, and so is stored before it is sent (D1)."""
        return self.effect.consequential


@dataclass(frozen=True, slots=True)
class ModelCalledBody:
    """A model reply that calls tools. Its parts carry the join of everything the model had read."""

    reply: int
    calls: tuple[Called, ...]
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSaidBody:
    """A model reply in words. `interrupted`: it broke off, or was cut off, and this is what was shown of it (K9)."""

    reply: int
    parts: tuple[Part, ...]
    interrupted: bool = False


@dataclass(frozen=True, slots=True)
class TurnStepsBody:
    """The fixed steps of a used consent, written by the runtime (K17)."""

    consent: str
    calls: tuple[Called, ...]


@dataclass(frozen=True, slots=True)
class TurnAskBody:
    """The question, as it was asked."""

    consent: Consent


@dataclass(frozen=True, slots=True)
class TurnStopBody:
    """Somebody stops the turn (K24): nothing of it begins any more, and it ends once what is out has answered, or has
    had its time."""

    n: int
    by: str
    received_at_ms: int


@dataclass(frozen=True, slots=True)
class TurnEndBody:
    """A turn ended."""

    ending: Ending
    reason: str = ""
    #: model calls that were left to it
    steps_left: int = 0


@dataclass(frozen=True, slots=True)
class ToolIntendedBody:
    """An operation exists and was not sent yet."""

    operation: str
    call: str
    tool: str
    key: str
    #: of tool and canonical arguments, by which an equal step is found again (D3)
    digest: str


@dataclass(frozen=True, slots=True)
class ToolSentBody:
    """An attempt may be on its way. For a keyed operation this row is also its first."""

    operation: str
    call: str
    tool: str
    key: str
    digest: str
    attempt: int
    #: whether `tool.intended` went before it
    intended: bool = False


@dataclass(frozen=True, slots=True)
class ToolUnknownBody:
    """An attempt was given up: it may have happened."""

    operation: str
    call: str
    tool: str
    reason: str


#: what an outcome says of the effect, where nothing else does
_IMPLIED = {
    Outcome.OK: EffectState.COMMITTED,
    Outcome.REFUSED: EffectState.NONE,
    Outcome.WAITING: EffectState.NONE,
    Outcome.NOT_STARTED: EffectState.NONE,
    Outcome.UNKNOWN: EffectState.UNKNOWN,
}


@dataclass(frozen=True, slots=True)
class ToolResultBody:
    """What a call came to, with the operation's new state and the refs it made: one row, one commit."""

    call: str
    tool: str
    outcome: Outcome
    parts: tuple[Part, ...]
    operation: str | None = None
    #: whether the operation's row exists
    stored: bool = False
    made: tuple[Ref, ...] = ()
    #: files that it gave back
    attachments: tuple[Attachment, ...] = ()
    #: what it left in the world; None where nobody classified it
    effect: EffectState | None = None
    #: on whose say-so it ran, as `user:bob`; None where there is nobody behind the turn. Never public (H9, H10)
    acting_principal: str | None = None
    #: the operation that it undid, if it did what it was to do (D6)
    undoes: str | None = None

    @property
    def told_effect(self) -> EffectState | None:
        """Return the effect where the outcome alone does not say it: what a reader must be told."""
        return _told(self.outcome, self.effect)


def _told(outcome: Outcome, effect: EffectState | None) -> EffectState | None:
    return None if effect is _IMPLIED.get(outcome) else effect


@dataclass(frozen=True, slots=True)
class ToolSettledBody:
    """An operation that was given up as unknown answered after all (K25). Its call keeps the one result that it has:
    this says what the operation did. The row's turn is the one that began it, and may be over."""

    operation: str
    call: str
    tool: str
    outcome: Outcome
    parts: tuple[Part, ...]
    made: tuple[Ref, ...] = ()
    attachments: tuple[Attachment, ...] = ()
    effect: EffectState | None = None
    #: see `ToolResultBody`
    acting_principal: str | None = None
    undoes: str | None = None

    @property
    def told_effect(self) -> EffectState | None:
        """See `ToolResultBody`."""
        return _told(self.outcome, self.effect)


@dataclass(frozen=True, slots=True)
class ConsentApprovedBody:
    """An approver said yes, in time."""

    consent: str
    n: int
    by: str
    received_at_ms: int
    #: how the approver was verified
    verified: str
    ticks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ConsentDeclinedBody:
    """An approver said no; her words, if any, are hers (B11)."""

    consent: str
    n: int
    by: str
    received_at_ms: int
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class ConsentExpiredBody:
    """Nobody answered in time. `n` is the timer's input, or the late answer that came first."""

    consent: str
    n: int | None


@dataclass(frozen=True, slots=True)
class ConsentWithdrawnBody:
    """The question no longer stands, and why."""

    consent: str
    reason: str


@dataclass(frozen=True, slots=True)
class ConsentUsedBody:
    """The consent's one turn begins."""

    consent: str
    turn: str


@dataclass(frozen=True, slots=True)
class AnswerRefusedBody:
    """An answer, or a question's timer, that changed nothing, and why (B8, B9, K20)."""

    n: int
    by: str
    reason: str
    consent: str | None = None


@dataclass(frozen=True, slots=True)
class ConflictSettledBody:
    """An operator chose between rows that this process had accepted and others that the store holds in their
    place (K7). Where ours are kept, notices with their words follow this row."""

    n: int
    by: str
    keep: Keep
    #: a reader drops what it shows from this row on, and reads it again
    from_seq: int
    #: what was accepted and is passed over
    passed_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestRefusedBody:
    """Something that was asked of the session itself and changed nothing, and why."""

    n: int
    by: str
    reason: str


@dataclass(frozen=True, slots=True)
class ParticipantChangedBody:
    """Somebody takes part from here on, in another role, or (`role` None) no more."""

    n: int
    #: as `user:bob`
    principal: str
    role: SessionRole | None
    #: who asked for it; the principal itself, where it left
    by: str


@dataclass(frozen=True, slots=True)
class InputRetractedBody:
    """A person took back what she had sent and nobody had looked at. What it said is in no row."""

    #: the request
    n: int
    #: what is taken back, by its place in the inbox
    entry: int
    by: str


@dataclass(frozen=True, slots=True)
class SessionChangedBody:
    """The session goes by another title, or treats others otherwise; None stayed as it was."""

    n: int
    by: str
    title: str | None = None
    others: Others | None = None


@dataclass(frozen=True, slots=True)
class InputSupersededBody:
    """An input that waited is not acted on, and why (A10)."""

    n: int
    reason: str


@dataclass(frozen=True, slots=True)
class InputClassifiedBody:
    """How an input fits the turn that ran when it came in (C3): as a classifier says, or as the answer to a pause does,
    which this row settles (K23)."""

    #: the input that it is about
    n: int
    fit: Fit
    #: a classifier, a person as `user:alice`, or `nobody` where a pause was not answered in time
    by: str
    #: replies of the model that the turn had by then
    replies: int = 0
    #: the pause that is settled, the answer or expiry that settles it, and when that was received
    consent: str | None = None
    entry: int | None = None
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class SessionClosedBody:
    """The session ended: its last row. Nothing comes in any more, and what still waited is not acted on."""

    n: int
    by: str
    received_at_ms: int


Body = (
    InputBody
    | NoticeBody
    | EffectGoneBody
    | TurnStartBody
    | TurnStepsBody
    | TurnAskBody
    | TurnStopBody
    | TurnEndBody
    | ModelCalledBody
    | ModelSaidBody
    | ToolIntendedBody
    | ToolSentBody
    | ToolUnknownBody
    | ToolResultBody
    | ToolSettledBody
    | ConsentApprovedBody
    | ConsentDeclinedBody
    | ConsentExpiredBody
    | ConsentWithdrawnBody
    | ConsentUsedBody
    | AnswerRefusedBody
    | ConflictSettledBody
    | RequestRefusedBody
    | ParticipantChangedBody
    | InputRetractedBody
    | InputSupersededBody
    | InputClassifiedBody
    | SessionChangedBody
    | SessionClosedBody
)

_BODIES: dict[Kind, type[Any]] = {
    Kind.INPUT: InputBody,
    Kind.NOTICE: NoticeBody,
    Kind.EFFECT_GONE: EffectGoneBody,
    Kind.TURN_START: TurnStartBody,
    Kind.TURN_STEPS: TurnStepsBody,
    Kind.TURN_ASK: TurnAskBody,
    Kind.TURN_STOP: TurnStopBody,
    Kind.TURN_END: TurnEndBody,
    Kind.MODEL_CALLED: ModelCalledBody,
    Kind.MODEL_SAID: ModelSaidBody,
    Kind.TOOL_INTENDED: ToolIntendedBody,
    Kind.TOOL_SENT: ToolSentBody,
    Kind.TOOL_UNKNOWN: ToolUnknownBody,
    Kind.TOOL_RESULT: ToolResultBody,
    Kind.TOOL_SETTLED: ToolSettledBody,
    Kind.CONSENT_APPROVED: ConsentApprovedBody,
    Kind.CONSENT_DECLINED: ConsentDeclinedBody,
    Kind.CONSENT_EXPIRED: ConsentExpiredBody,
    Kind.CONSENT_WITHDRAWN: ConsentWithdrawnBody,
    Kind.CONSENT_USED: ConsentUsedBody,
    Kind.ANSWER_REFUSED: AnswerRefusedBody,
    Kind.CONFLICT_SETTLED: ConflictSettledBody,
    Kind.REQUEST_REFUSED: RequestRefusedBody,
    Kind.PARTICIPANT_CHANGED: ParticipantChangedBody,
    Kind.INPUT_RETRACTED: InputRetractedBody,
    Kind.INPUT_SUPERSEDED: InputSupersededBody,
    Kind.INPUT_CLASSIFIED: InputClassifiedBody,
    Kind.SESSION_CHANGED: SessionChangedBody,
    Kind.SESSION_CLOSED: SessionClosedBody,
}
_KINDS: dict[type[Any], Kind] = {body: kind for kind, body in _BODIES.items()}
_ADAPTERS: dict[Kind, TypeAdapter[Any]] = {kind: TypeAdapter(body) for kind, body in _BODIES.items()}
#: without the adapters' own layer, for a page has thousands of rows
_DECODE = {str(kind): adapter.validator.validate_json for kind, adapter in _ADAPTERS.items()}
_INPUT: TypeAdapter[Input] = TypeAdapter(Input)
_CONSENT: TypeAdapter[Consent] = TypeAdapter(Consent)


class UnknownVersion(ValueError):
    """A row was written by a newer release than this one."""


def _dump(adapter: TypeAdapter[Any], value: Any) -> str:
    try:
        return adapter.dump_json(value, exclude_defaults=True).decode()
    except PydanticSerializationError:  # a lone surrogate, which no UTF-8 can hold
        return canonical(scrub_json(adapter.dump_python(value, mode="python", exclude_defaults=True)))


def encode_input(value: Input) -> str:
    """Return the JSON text of an input, as the inbox holds it."""
    return _dump(_INPUT, value)


def decode_input(text: str) -> Input:
    """Return the input of an inbox row."""
    return _INPUT.validate_json(text)


def encode_consent(value: Consent) -> str:
    """Return the JSON text of a question, as its side table holds it."""
    return _dump(_CONSENT, value)


def decode_consent(text: str) -> Consent:
    """Return the question of a side table's row."""
    return _CONSENT.validate_json(text)


def encode_body(body: Body) -> str:
    """Return the JSON text of a row's body; its version travels in the row's own column."""
    return _dump(_ADAPTERS[_KINDS[type(body)]], body)


def decode_body(kind: str, version: int, text: str) -> Body:
    """Return the body of a stored row.

    Raises:
        UnknownVersion: a newer release wrote it, so what it means is not known here.
    """
    decode = _DECODE.get(kind)
    if decode is None or version > BODY_VERSION:
        raise UnknownVersion(f"a row of kind {kind!r}, version {version}: a newer sayso wrote it")
    body: Body = decode(text)
    return body


@dataclass(frozen=True, slots=True)
class Draft:
    """A row that has no position yet."""

    body: Body
    #: the turn it belongs to; None for what belongs to the session alone
    turn: str | None = None

    @property
    def kind(self) -> Kind:
        """The kind that goes with the body."""
        return _KINDS[type(self.body)]


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of a journal."""

    seq: int
    epoch: int
    turn: str | None
    #: `<nonce>.<seq>`; never public
    commit_key: str
    at_ms: int
    body: Body

    @property
    def kind(self) -> Kind:
        """The kind that goes with the body."""
        return _KINDS[type(self.body)]

    @property
    def position(self) -> Position:
        """Where the row stands; its event's id."""
        return Position(self.epoch, self.seq)


# --- what a row changes ------------------------------------------------------


class Table(StrEnum):
    """The side tables that rows change; each is keyed by the session first."""

    SESSION = "session"
    INBOX = "inbox"
    CALL = "call"
    OPERATION = "operation"
    CONSENT = "consent"
    REF = "ref"
    TIMER = "timer"
    PARTICIPANT = "participant"
    #: each row of it is a reference to its bytes: an insert counts one more, `Release` one less
    ATTACHMENT = "attachment"


Scalar = str | int | None


@dataclass(frozen=True, slots=True)
class Insert:
    """A new row of a side table. A second one under the same key is refused (`IllegalChange`),
    or takes the place of the first where `replace` says so."""

    table: Table
    values: Mapping[str, Scalar]
    replace: bool = False


@dataclass(frozen=True, slots=True)
class Update:
    """New values for one row of a side table. With `when`, the row must be in one of these states,
    or the whole write is refused (`IllegalChange`): this is where a consent can't be used twice.
    With `all`, for every row of the session that is in one of these states, if there are any."""

    table: Table
    key: Mapping[str, Scalar]
    values: Mapping[str, Scalar]
    when: tuple[str, ...] = field(default=())
    all: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """One row of a side table goes; there may be none."""

    table: Table
    key: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Release:
    """The files that came with an input go, where it goes unread, and so do their references to bytes."""

    n: int


@dataclass(frozen=True, slots=True)
class Absent:
    """No row with these values may be in one of these states, or the whole write is refused (`IllegalChange`): this is
    where a turn can't end with a call that has no result."""

    table: Table
    key: Mapping[str, Scalar]
    when: tuple[str, ...]


Change = Insert | Update | Delete | Release | Absent


def _taken(n: int, seq: int) -> Update:
    return Update(Table.INBOX, {"n": n}, {"state": "taken", "taken_seq": seq}, when=("queued",))


def _calls(seq: int, turn: str | None, calls: tuple[Called, ...]) -> tuple[Change, ...]:
    return tuple(
        Insert(
            Table.CALL,
            {
                "call": called.call,
                "turn": turn,
                "tool": called.tool,
                "arguments": canonical(called.arguments),
                "state": "open",
                "seq": seq,
            },
        )
        for called in calls
    )


def _taken_over(turn: str | None, calls: tuple[Called, ...]) -> tuple[Change, ...]:
    """Older operations that calls take over are their turn's from now on (D3)."""
    older = (called.takes for called in calls if called.takes is not None)
    return tuple(Update(Table.OPERATION, {"operation": operation}, {"turn": turn}) for operation in older)


def _operation(body: ToolIntendedBody | ToolSentBody, turn: str | None, sent_at_ms: int | None) -> Insert:
    return Insert(
        Table.OPERATION,
        {
            "operation": body.operation,
            "call": body.call,
            "turn": turn,
            "tool": body.tool,
            "key": body.key,
            "digest": body.digest,
            "state": OperationState.INTENDED if sent_at_ms is None else OperationState.SENT,
            "attempts": 0 if sent_at_ms is None else 1,
            "sent_at_ms": sent_at_ms,
        },
    )


def _moved(operation: str, state: OperationState, **values: Scalar) -> Update:
    return Update(Table.OPERATION, {"operation": operation}, {"state": state, **values}, when=sources_of(state))


_OPERATION_AFTER = {
    Outcome.OK: OperationState.ANSWERED,
    Outcome.FAILED: OperationState.FAILED,
    Outcome.UNKNOWN: OperationState.UNKNOWN,
    Outcome.NOT_STARTED: OperationState.NOT_STARTED,
}


def _operation_after(body: ToolResultBody | ToolSettledBody) -> OperationState:
    """What is known of the operation: what it did counts before how it answered."""
    match body.effect:
        case EffectState.COMMITTED | EffectState.PARTIAL:
            return OperationState.ANSWERED
        case EffectState.UNKNOWN:
            return OperationState.UNKNOWN
        case EffectState.NONE | EffectState.ROLLED_BACK | None:
            return _OPERATION_AFTER[body.outcome]


def _answered(operation: str, body: ToolResultBody | ToolSettledBody) -> list[Change]:
    left: dict[str, Scalar] = {} if body.effect is None else {"effect": body.effect}
    after = _operation_after(body)
    moved: list[Change] = [_moved(operation, after, **left)]
    if body.undoes is not None and after is OperationState.ANSWERED and body.effect is not EffectState.PARTIAL:
        moved.append(_moved(body.undoes, OperationState.RELEASED))
    return moved


def _result(seq: int, body: ToolResultBody) -> tuple[Change, ...]:
    changes: list[Change] = [
        Update(
            Table.CALL,
            {"call": body.call},
            {"state": "settled", "outcome": body.outcome, "result_seq": seq},
            when=("open",),
        )
    ]
    if body.operation is not None and body.stored:
        changes += _answered(body.operation, body)
    return (*changes, *_brought(seq, body))


def _brought(seq: int, body: ToolResultBody | ToolSettledBody) -> list[Change]:
    """Return what a call made, and the files that it gave back."""
    made: list[Change] = [
        Insert(
            Table.REF,
            {
                "source": ref.source,
                "kind": ref.kind,
                "value": ref.value,
                "operation": body.operation,
                "call": body.call,
                "state": "live",
                "reported_by": None,
                "seq": seq,
            },
            replace=True,  # the newest operation speaks for a thing that two of them name
        )
        for ref in body.made
    ]
    return made + [_attached(seq, f"tool:{body.tool}", attached) for attached in body.attachments]


def _attached(seq: int, uploader: str, attached: Attachment) -> Insert:
    return Insert(
        Table.ATTACHMENT,
        {
            "attachment": attached.id,
            "n": None,
            "seq": seq,
            "filename": attached.filename,
            "media_type": attached.media_type,
            "digest": attached.digest,
            "size_bytes": attached.size_bytes,
            "uploader": uploader,
        },
    )


def _asked(seq: int, epoch: int, consent: Consent) -> tuple[Change, ...]:
    return (
        Insert(
            Table.CONSENT,
            {
                "consent": consent.id,
                "turn": consent.turn,
                "state": ConsentState.OPEN,
                "seq": seq,
                "epoch": epoch,
                "digest": consent.digest,
                "expires_at_ms": consent.expires_at_ms,
                "body": encode_consent(consent),
            },
        ),
        Insert(Table.TIMER, {"timer": consent.id, "purpose": "consent", "next_at_ms": consent.expires_at_ms}),
    )


def _consent(consent: str, state: ConsentState, when: tuple[ConsentState, ...], **values: Scalar) -> tuple[Change, ...]:
    return (
        Update(Table.CONSENT, {"consent": consent}, {"state": state, **values}, when=when),
        Update(Table.TIMER, {"timer": consent}, {"next_at_ms": None}),
    )


_OPEN = (ConsentState.OPEN,)


def changes(row: Row) -> tuple[Change, ...]:
    """Return what `row` changes beside the journal, in order. Pure: equal rows, equal changes."""
    seq, turn = row.seq, row.turn
    match row.body:
        case InputBody(n=n, input=received):  # its files came with it through the door, and are shown from here on
            shown = [Update(Table.ATTACHMENT, {"attachment": a.id}, {"seq": seq}) for a in received.attachments]
            return (_taken(n, seq), *shown)
        case TurnStopBody(n=n):
            return (_taken(n, seq),)
        case NoticeBody(n=n) | AnswerRefusedBody(n=n) | RequestRefusedBody(n=n):
            return () if n is None else (_taken(n, seq),)
        case ConflictSettledBody(n=n):
            return (_taken(n, seq),)
        case ParticipantChangedBody() as body:
            return (_taken(body.n, seq), _participant(seq, body))
        case InputRetractedBody(n=n, entry=entry):
            return (_taken(n, seq), _taken(entry, seq), Release(entry))
        case InputSupersededBody(n=n):
            return (_taken(n, seq), Release(n))
        case InputClassifiedBody() as body:
            return _classified(seq, turn, body)
        case SessionClosedBody(n=n, received_at_ms=at_ms):
            # what came in after the owner's last look, and before this row, is taken by it
            rest = Update(Table.INBOX, {}, {"state": "taken", "taken_seq": seq}, when=("queued",), all=True)
            return (_taken(n, seq), rest, Update(Table.SESSION, {}, {"closed_at_ms": at_ms}))
        case SessionChangedBody() as body:
            new: dict[str, Scalar] = {"title": body.title, "others": body.others}
            values = {column: value for column, value in new.items() if value is not None}
            return (_taken(body.n, seq), Update(Table.SESSION, {}, values))
        case EffectGoneBody() as body:
            return _gone(body)
        case TurnStartBody() as body:
            return _turn_started(seq, turn, body)
        case TurnEndBody():
            over = Update(Table.SESSION, {}, {"turn": None, "turn_seq": None, "turn_principal": None})
            return (Absent(Table.CALL, {"turn": turn}, ("open",)), over)
        case ModelCalledBody(calls=calls) | TurnStepsBody(calls=calls):
            return (*_calls(seq, turn, calls), *_taken_over(turn, calls))
        case ModelSaidBody():
            return ()
        case TurnAskBody(consent=consent):
            return (*_asked(seq, row.epoch, consent), Update(Table.SESSION, {}, {"consents": _number(consent.id)}))
        case ToolIntendedBody() as body:
            return (_operation(body, turn, None),)
        case ToolSentBody() as body:
            if body.attempt == 1 and not body.intended:
                return (_operation(body, turn, row.at_ms),)
            first: dict[str, Scalar] = {"sent_at_ms": row.at_ms} if body.attempt == 1 else {}
            return (_moved(body.operation, OperationState.SENT, attempts=body.attempt, **first),)
        case ToolUnknownBody(operation=operation):
            return (_moved(operation, OperationState.UNKNOWN),)
        case ToolResultBody() as body:
            return _result(seq, body)
        case ToolSettledBody() as body:
            return (*_answered(body.operation, body), *_brought(seq, body))
        case ConsentApprovedBody() as body:
            ticks = None if body.ticks is None else canonical(list(body.ticks))
            answered: dict[str, Scalar] = {"answered_by": body.by, "answered_at_ms": body.received_at_ms}
            return (
                _taken(body.n, seq),
                *_consent(body.consent, ConsentState.APPROVED, _OPEN, due_seq=seq, ticks=ticks, **answered),
            )
        case ConsentDeclinedBody() as body:
            reason = "".join(part.text for part in body.parts)
            answered = {"answered_by": body.by, "answered_at_ms": body.received_at_ms, "reason": reason}
            return (_taken(body.n, seq), *_consent(body.consent, ConsentState.DECLINED, _OPEN, due_seq=seq, **answered))
        case ConsentExpiredBody(consent=consent_id, n=n):
            taken = () if n is None else (_taken(n, seq),)
            return (*taken, *_consent(consent_id, ConsentState.EXPIRED, _OPEN))
        case ConsentWithdrawnBody(consent=consent_id, reason=why):
            before = (ConsentState.OPEN, ConsentState.APPROVED)
            return _consent(consent_id, ConsentState.WITHDRAWN, before, reason=why, due_seq=None)
        case ConsentUsedBody(consent=consent_id, turn=used_by):
            return _consent(consent_id, ConsentState.USED, (ConsentState.APPROVED,), used_by=used_by)


_PAUSE_AFTER = {Fit.ADDS: ConsentState.USED, Fit.INDEPENDENT: ConsentState.DECLINED}


def pause_after(body: InputClassifiedBody) -> ConsentState:
    """Return where the pause stands that a row settles."""
    return ConsentState.EXPIRED if body.at_ms is None else _PAUSE_AFTER[body.fit]


def _classified(seq: int, turn: str | None, body: InputClassifiedBody) -> tuple[Change, ...]:
    taken = () if body.entry is None else (_taken(body.entry, seq),)
    if body.consent is None:
        return taken
    answered: dict[str, Scalar] = {} if body.at_ms is None else {"answered_by": body.by, "answered_at_ms": body.at_ms}
    state = pause_after(body)
    if state is ConsentState.USED:
        answered["used_by"] = turn
    return (*taken, *_consent(body.consent, state, _OPEN, **answered))


def _participant(seq: int, body: ParticipantChangedBody) -> Change:
    if body.role is None:
        return Delete(Table.PARTICIPANT, {"principal": body.principal})
    # who takes part already has one role, the newest
    values: dict[str, Scalar] = {"principal": body.principal, "role": body.role, "seq": seq}
    return Insert(Table.PARTICIPANT, values, replace=True)


def _number(name: str) -> int:
    return int(name[1:])


def _turn_started(seq: int, turn: str | None, body: TurnStartBody) -> tuple[Change, ...]:
    assert turn is not None
    opened = Update(
        Table.SESSION,
        {},
        {"turn": turn, "turn_seq": seq, "turn_principal": str(body.origin.principal), "turns": _number(turn)},
    )
    if body.consent is None:
        return (opened,)
    return (opened, Update(Table.CONSENT, {"consent": body.consent}, {"due_seq": None}))


def _gone(body: EffectGoneBody) -> tuple[Change, ...]:
    key: dict[str, Scalar] = {"source": body.ref.source, "kind": body.ref.kind, "value": body.ref.value}
    ref = Update(Table.REF, key, {"state": "gone", "reported_by": body.reported_by}, when=("live",))
    return (ref,) if body.operation is None else (ref, _moved(body.operation, OperationState.GONE))


def decode_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as its side table holds them."""
    value: dict[str, Any] = json.loads(text)
    return value
