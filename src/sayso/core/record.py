"""How an entry of the record reads: a kind and a sentence, for the log, a page, a test (E1).

One sentence for each kind of row. Values from outside stand between marks and on one line, so that no
entry can be made to look like another.
"""

from __future__ import annotations

from enum import StrEnum

from sayso.core.attachment import Attachment
from sayso.core.canonical import canonical
from sayso.core.inputs import Fit, Input, InputKind, Keep, SettingsChange
from sayso.core.labels import Part
from sayso.core.operation import Ref
from sayso.core.rows import (
    AnswerRefusedBody,
    Called,
    ConflictSettledBody,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    EffectGoneBody,
    InputBody,
    InputClassifiedBody,
    InputRetractedBody,
    InputSupersededBody,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    RequestRefusedBody,
    Row,
    SessionChangedBody,
    SessionClosedBody,
    ToolIntendedBody,
    ToolResultBody,
    ToolSentBody,
    ToolSettledBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
    TurnStopBody,
)
from sayso.core.session import Others
from sayso.core.text import plain, quoted

#: characters of somebody's words that a line shows
WORDS_CHARS_MAX = 160


def words(parts: tuple[Part, ...]) -> str:
    """Return somebody's words as a line shows them: between marks, nothing hidden, cut with a count."""
    return quoted("\n".join(part.text for part in parts), chars_max=WORDS_CHARS_MAX)


def _value(value: object) -> str:
    return quoted(value, chars_max=60) if isinstance(value, str) else plain(canonical(value), chars_max=60)


def call_line(called: Called) -> str:
    """Return a call on one line: the tool, and what is in each argument."""
    arguments = ", ".join(f"{plain(name, chars_max=60)}={_value(value)}" for name, value in called.arguments.items())
    return f"{plain(called.tool, chars_max=60)}({arguments})"


def _refs(refs: tuple[Ref, ...]) -> str:
    return ", ".join(plain(str(ref), chars_max=80) for ref in refs)


def described(attached: Attachment) -> str:
    """Return what is said of a file: its name between marks, what it is, how long it is."""
    what = plain(attached.media_type, chars_max=80)
    return f"{quoted(attached.filename, chars_max=80)} ({what}, {attached.size_bytes} bytes)"


def _with(attachments: tuple[Attachment, ...]) -> str:
    return f" with {', '.join(map(described, attachments))}" if attachments else ""


def heard(received: Input, event_id: str) -> str:
    """Return the sentence of an input."""
    who = received.principal.id
    match received.kind:
        case InputKind.MESSAGE | InputKind.UNCLEAR:
            return f"{who}: {words(received.parts)}{_with(received.attachments)}"
        case InputKind.EVENT | InputKind.NOTICE:
            about = f" about {_refs(received.about)}" if received.about else ""
            return f"{who}{about}: {words(received.parts)}"
        case InputKind.ANSWER:
            assert received.answer is not None
            return f"{who} answers {received.answer.consent}: {'yes' if received.answer.yes else 'no'}"
        case InputKind.CHOICE:
            assert received.choice is not None
            return f"{received.principal} keeps {received.choice.keep} rows from {received.choice.from_seq} on"
        case InputKind.RETRACT:
            return f"{who} takes back input {received.retracts}"
        case InputKind.CLOSE:
            return f"{who} closes the session"
        case InputKind.STOP:
            return f"{who} asks that {plain(received.stops or 'the turn', chars_max=80)} stops"
        case InputKind.SETTINGS:
            assert received.settings is not None
            return f"{who} asks: {_settings(received.settings)}"
        case InputKind.PARTICIPANT:
            assert received.participant is not None
            whom, role = received.participant.principal, received.participant.role
            return f"{who} asks that {whom} takes part {'no more' if role is None else f'as {role}'}"
        case InputKind.EXPIRY:
            return f"the time of {received.consent} is over ({plain(event_id, chars_max=80)})"


def persisted(received: Input, event_id: str) -> str:
    """Return the door's sentence for an input that it stored (A7)."""
    id_ = plain(event_id, chars_max=80)
    match received.kind:
        case InputKind.EXPIRY:
            return f"{id_} from the runtime's timer"
        case InputKind.MESSAGE | InputKind.EVENT | InputKind.NOTICE | InputKind.UNCLEAR:
            return f"{id_} from {received.principal.id}, verified by {received.verified}; now acknowledged"
        case _:
            return f"{heard(received, event_id)} ({received.verified}); now acknowledged"


def _turn_start(row: Row, body: TurnStartBody) -> str:
    text = f"{row.turn} origin={body.origin.principal.id}"
    if body.restarts is not None:
        return f"{text}, in place of {body.restarts}"
    if body.continues is not None:
        return f"{text}, continues {body.continues} after the answer to {body.consent}"
    return f"{text}, runs the steps of {body.consent}" if body.consent else text


def _result(body: ToolResultBody) -> str:
    made = f"; made {_refs(body.made)}" if body.made else ""
    effect = f"; effect: {_worded(body.told_effect)}" if body.told_effect is not None else ""
    by_runtime = all(part.source == "runtime" for part in body.parts)
    said = words(body.parts)[1:-1] if by_runtime else words(body.parts)
    if body.outcome is Outcome.WAITING:
        return f"{body.tool}: {said}"
    what = f"{_worded(body.outcome)}, {said}" if said else _worded(body.outcome)
    return f"{body.tool}: {what}{_with(body.attachments)}{made}{effect}"


_FITS = {
    Fit.ADDS: "adds to",
    Fit.INDEPENDENT: "is no part of",
    Fit.REVISES: "revises",
    Fit.UNSURE: "may or may not belong to",
}


def _says(body: InputClassifiedBody) -> str:
    if body.consent is None:
        return f"{plain(body.by, chars_max=80)} says"
    return (
        f"as nobody answered {body.consent} in time" if body.at_ms is None else f"as {body.by} answers {body.consent}"
    )


def _worded(word: StrEnum) -> str:
    return word.replace("_", " ")


def _settings(change: SettingsChange | SessionChangedBody) -> str:
    new = [] if change.title is None else [f"its title is {quoted(change.title, chars_max=WORDS_CHARS_MAX)}"]
    if change.others is not None:
        new += [f"others {'wait their turn' if change.others is Others.QUEUE else 'are refused'} meanwhile"]
    return " and ".join(new) or "nothing new"


def sentence(row: Row) -> str:
    """Return what a row says happened, on one line."""
    match row.body:
        case InputBody(input=received, event_id=event_id):
            return heard(received, event_id)
        case NoticeBody(parts=parts, n=n):
            return words(parts) if n is not None else words(parts)[1:-1]
        case EffectGoneBody(ref=ref, reported_by=by):
            return f"{plain(ref.value, chars_max=80)}: reported by {by}"
        case TurnStartBody() as body:
            return _turn_start(row, body)
        case TurnStepsBody(consent=consent, calls=calls):
            return f"{row.turn} runs what {consent} fixed: {'; '.join(map(call_line, calls))}"
        case TurnAskBody(consent=consent):
            who = " or ".join(a.partition(":")[2] if a.startswith("user:") else a for a in consent.approvers)
            asks = consent.question.text.removeprefix(consent.id)
            asks = asks if asks[:1] == "," else f": {asks}"
            return f"{row.turn or consent.turn}: {consent.id} needs {who}'s consent{asks}"
        case TurnStopBody(by=by):
            return f"{row.turn} is stopped by {by}: nothing more of it begins"
        case TurnEndBody(ending=ending, reason=reason):
            return f"{row.turn} {ending}" + (f": {plain(reason, chars_max=200)}" if reason else "")
        case ModelCalledBody(calls=calls):
            return f"{row.turn} plans {'; '.join(map(call_line, calls))}"
        case ModelSaidBody(parts=parts, interrupted=interrupted):
            return f"{row.turn}: {words(parts)}" + (", cut off there" if interrupted else "")
        case ToolIntendedBody(tool=tool, operation=operation):
            return f"{tool}, operation {operation}: stored, not sent yet"
        case ToolSentBody(tool=tool, operation=operation, attempt=attempt):
            return f"{tool}, operation {operation}" + (f", attempt {attempt}, same key" if attempt > 1 else "")
        case ToolUnknownBody(tool=tool, operation=operation, reason=reason):
            return f"{tool}, operation {operation}: {plain(reason, chars_max=200)}; it may have happened"
        case ToolResultBody() as body:
            return _result(body)
        case ToolSettledBody() as body:
            made = f"; made {_refs(body.made)}" if body.made else ""
            said = f", {words(body.parts)}" if body.parts else ""
            left = f"; effect: {_worded(body.told_effect)}" if body.told_effect is not None else ""
            return f"{body.tool}, operation {body.operation}, answered after all: {body.outcome}{said}{made}{left}"
        case ConsentApprovedBody(consent=consent, by=by, verified=verified, ticks=ticks):
            part = "" if ticks is None else f", steps {', '.join(str(t + 1) for t in ticks)} of it"
            return f"{consent} by {by} ({verified}){part}"
        case ConsentDeclinedBody(consent=consent, by=by, parts=parts):
            return f"{consent} by {by}" + (f": {words(parts)}" if parts else "")
        case ConsentExpiredBody(consent=consent):
            return f"{consent}: nobody answered in time; nothing was run"
        case ConsentWithdrawnBody(consent=consent, reason=reason):
            return f"{consent}: {plain(reason, chars_max=200)}"
        case ConsentUsedBody(consent=consent, turn=turn):
            return f"{consent}: used by {turn}; it is good for no other"
        case AnswerRefusedBody(reason=reason, by=by) | RequestRefusedBody(reason=reason, by=by):
            return f"{by}: {plain(reason, chars_max=300)}"
        case ConflictSettledBody(by=by, keep=Keep.OURS, from_seq=first):
            return f"{by} keeps our rows from {first} on: they are told again below"
        case ConflictSettledBody(by=by, from_seq=first, passed_over=lines):
            passed_over = plain("; ".join(lines), chars_max=500) or "nothing"
            return f"{by} keeps the stored rows from {first} on; passed over: {passed_over}"
        case InputRetractedBody(entry=entry, by=by):
            return f"{by} took back input {entry} before anybody looked at it"
        case InputSupersededBody(n=n, reason=reason):
            return f"input {n} is not acted on: {plain(reason, chars_max=200)}"
        case InputClassifiedBody() as body:
            return f"input {body.n} {_FITS[body.fit]} {row.turn}, {_says(body)}"
        case SessionClosedBody(by=by):
            return f"by {by}; nothing more comes in"
        case SessionChangedBody() as body:
            return f"{body.by}: {_settings(body)}"
        case ParticipantChangedBody(principal=principal, role=role, by=by):
            if role is None:
                return f"{principal} left" if by == principal else f"{principal} takes part no more, by {by}"
            return f"{principal} takes part as {role}, by {by}"
