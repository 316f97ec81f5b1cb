"""What a reader of a session is sent of a row: public JSON, one shape a kind.

No commit key, no provider id, no digest of a key, no flag of what is stored: those are the runtime's.
Whose voice a turn has is public; how a person is known to us beyond her name is not.
Nothing but what JSON has: a member of an enumeration costs its encoder four times as much as its word.
"""

from __future__ import annotations

from typing import Any

from sayso.core.attachment import Attachment
from sayso.core.consent import Consent, Standing
from sayso.core.labels import Part
from sayso.core.operation import EffectState
from sayso.core.origin import Origin
from sayso.core.record import sentence
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

Json = dict[str, Any]


def _parts(parts: tuple[Part, ...]) -> list[Json]:
    return [{"text": part.text, "source": part.source, "integrity": part.label.integrity.value} for part in parts]


def _with(attachments: tuple[Attachment, ...]) -> Json:
    """Return what a row that brings files says of them; nothing where it brings none."""
    shown = [
        {
            "id": attached.id,
            "filename": attached.filename,
            "media_type": attached.media_type,
            "size_bytes": attached.size_bytes,
        }
        for attached in attachments
    ]
    return {"attachments": shown} if shown else {}


def _origin(origin: Origin) -> Json:
    return {"kind": origin.principal.kind.value, "name": origin.principal.id, "verified": origin.verified}


def _calls(calls: tuple[Called, ...]) -> list[Json]:
    return [
        {
            "call": called.call,
            "tool": called.tool,
            "arguments": dict(called.arguments),
            "takes": called.takes,
            "verdict": called.verdict.value,
            "reason": called.reason,
        }
        for called in calls
    ]


def question(consent: Consent) -> Json:
    """Return a question as its reader gets it: the runtime's words, each step, each argument."""
    return {
        "id": consent.id,
        "turn": consent.turn,
        "origin": _origin(consent.origin),
        "text": consent.question.text,
        "because": consent.question.because,
        "steps": [
            {
                "tool": step.tool,
                "undoes": step.undoes,
                "sentence": asked.sentence,
                "arguments": [
                    {
                        "name": shown.name,
                        "value": shown.value,
                        "role": shown.role.value,
                        "source": shown.source,
                        "outside": shown.outside,
                        "was": shown.was,
                    }
                    for shown in asked.arguments
                ],
            }
            for step, asked in zip(consent.steps, consent.question.steps, strict=True)
        ],
        "pause": consent.pause,
        "digest": consent.digest,
        "approvers": list(consent.approvers),
        "asked_at_ms": consent.asked_at_ms,
        "expires_at_ms": consent.expires_at_ms,
    }


def standing(value: Standing) -> Json:
    """Return a question and what became of it."""
    return {
        **question(value.consent),
        "state": value.state.value,
        "position": str(value.position),
        "answered_by": value.answered_by,
        "answered_at_ms": value.answered_at_ms,
        "reason": value.reason,
        "ticks": None if value.ticks is None else list(value.ticks),
        "used_by": value.used_by,
    }


def _body(row: Row) -> Json:
    match row.body:
        case InputBody(n=n, received_at_ms=at, input=received):
            return {
                "input": n,
                "sender": {"kind": received.principal.kind.value, "name": received.principal.id},
                "verified": received.verified,
                "received_at_ms": at,
                "about": [str(ref) for ref in received.about],
                "parts": _parts(received.parts),
                "client_send_ids": list(received.client_send_ids),
                **_with(received.attachments),
            }
        case NoticeBody(parts=parts):
            return {"parts": _parts(parts)}
        case EffectGoneBody(ref=ref, reported_by=by, operation=operation):
            return {"ref": str(ref), "reported_by": by, "operation": operation}
        case TurnStartBody() as body:
            return {
                "origin": _origin(body.origin),
                "continues": body.continues,
                "consent": body.consent,
                "restarts": body.restarts,
            }
        case TurnStepsBody(consent=consent, calls=calls):
            return {"consent": consent, "calls": _calls(calls)}
        case TurnAskBody(consent=consent):
            return {"consent": question(consent)}
        case TurnStopBody(by=by, received_at_ms=at):
            return {"by": by, "received_at_ms": at}
        case TurnEndBody(ending=ending, reason=reason):
            return {"ending": ending.value, "reason": reason}
        case ModelCalledBody(reply=reply, calls=calls, parts=parts):
            return {"reply": reply, "calls": _calls(calls), "parts": _parts(parts)}
        case ModelSaidBody(reply=reply, parts=parts, interrupted=interrupted):
            return {"reply": reply, "parts": _parts(parts), "interrupted": interrupted}
        case ToolIntendedBody() as body:
            return {"operation": body.operation, "call": body.call, "tool": body.tool}
        case ToolSentBody() as body:
            return {"operation": body.operation, "call": body.call, "tool": body.tool, "attempt": body.attempt}
        case ToolUnknownBody() as body:
            return {"operation": body.operation, "call": body.call, "tool": body.tool, "reason": body.reason}
        case ToolResultBody() | ToolSettledBody() as body:
            return {
                "call": body.call,
                "tool": body.tool,
                "outcome": body.outcome.value,
                "operation": body.operation,
                "made": [str(ref) for ref in body.made],
                "parts": _parts(body.parts),
                **({} if body.effect is None else {"effect": body.effect.value}),
                **_with(body.attachments),
            }
        case ConsentApprovedBody() as body:
            ticks = None if body.ticks is None else list(body.ticks)
            return {"consent": body.consent, "by": body.by, "received_at_ms": body.received_at_ms, "ticks": ticks}
        case ConsentDeclinedBody() as body:
            return {
                "consent": body.consent,
                "by": body.by,
                "received_at_ms": body.received_at_ms,
                "parts": _parts(body.parts),
            }
        case ConsentExpiredBody(consent=consent):
            return {"consent": consent}
        case ConsentWithdrawnBody(consent=consent, reason=reason):
            return {"consent": consent, "reason": reason}
        case ConsentUsedBody(consent=consent, turn=turn):
            return {"consent": consent, "turn": turn}
        case AnswerRefusedBody(consent=consent, by=by, reason=reason):
            return {"consent": consent, "by": by, "reason": reason}
        case ConflictSettledBody() as body:
            passed_over = list(body.passed_over)
            return {"by": body.by, "keep": body.keep.value, "from_seq": body.from_seq, "passed_over": passed_over}
        case RequestRefusedBody(by=by, reason=reason):
            return {"by": by, "reason": reason}
        case InputRetractedBody(entry=entry, by=by):
            return {"input": entry, "by": by}
        case InputSupersededBody(n=n, reason=reason):
            return {"input": n, "reason": reason}
        case InputClassifiedBody(n=n, fit=fit, by=by, consent=consent):
            return {"input": n, "fit": fit.value, "by": by, "consent": consent}
        case SessionClosedBody(by=by, received_at_ms=at):
            return {"by": by, "received_at_ms": at}
        case SessionChangedBody(title=title, others=others, by=by):
            return {"title": title, "others": None if others is None else others.value, "by": by}
        case ParticipantChangedBody(principal=principal, role=role, by=by):
            return {"principal": principal, "role": None if role is None else role.value, "by": by}


def provisional(
    *,
    session: str,
    turn: str,
    call: str,
    tool: str,
    outcome: Outcome,
    text: str,
    effect: EffectState | None,
    attachments: tuple[Attachment, ...],
) -> Json:
    """Return what those who listen are shown of a result before it is accepted. It is no row: the `tool.result` of
    the same call takes its place, and may say less."""
    classified = {} if effect is None else {"effect": effect.value}
    place = {"session": session, "turn": turn, "call": call, "tool": tool}
    return {**place, "outcome": outcome.value, "text": text, **classified, **_with(attachments)}


def public(row: Row, session: str) -> Json:
    """Return a row of a session as its readers get it."""
    return {
        "session": session,
        "position": f"{row.epoch}.{row.seq}",
        "kind": row.kind.value,
        "turn": row.turn,
        "at_ms": row.at_ms,
        "line": sentence(row),
        "body": _body(row),
    }
