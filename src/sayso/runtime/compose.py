"""What rows a decision comes to: pure functions from what is known to the bodies that record it."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from sayso.core.authority import Action, Decision, Verdict
from sayso.core.canonical import canonical, digest
from sayso.core.consent import (
    Consent,
    ConsentState,
    Replaced,
    Standing,
    Step,
    Wording,
    pause_question,
    steps_digest,
    supersedes,
)
from sayso.core.contract import ConsentPolicy, Contract, Effect
from sayso.core.errors import Invalid
from sayso.core.labels import RUNTIME, Integrity, Label, Part
from sayso.core.operation import EffectState, OperationState, idempotency_key
from sayso.core.origin import Origin, Principal
from sayso.core.rows import (
    Called,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    Draft,
    Ending,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ToolIntendedBody,
    ToolResultBody,
    ToolSentBody,
    ToolSettledBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
    decode_arguments,
)
from sayso.core.text import plain, scrub
from sayso.core.turn import CallState, End, Planned, Turn, unbegun
from sayso.runtime.loaded import Loaded
from sayso.runtime.operations import Attempt, Came
from sayso.runtime.ports import Call, Finished, ProposedCall, Tools
from sayso.storage.store import InboxRow, OperationRow

Decide = Callable[..., Decision]


def instant(at_ms: int) -> str:
    """Return an instant as a sentence shows it."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def by_runtime(text: str) -> Part:
    """Return the runtime's own words as a part."""
    return Part(text, "runtime", RUNTIME, "runtime")


# --- the model's reply -------------------------------------------------------


def replied(
    reply: Finished, turn: Turn, loaded: Loaded, tools: Tools, decide: Decide, *, out: Container[str] = ()
) -> Draft:
    """Return the row of a model reply, with what was decided about each of its calls (B2, B3).

    Its words carry the join of everything that the model had in view: nothing it says raises a label.
    """
    number = turn.replies + 1
    label = loaded.context.label
    parts = (Part(scrub(reply.text), "model", label),) if reply.text else ()
    if not reply.calls:
        return Draft(ModelSaidBody(number, parts), turn.id)
    calls = tuple(
        _called(call, f"{turn.id}.{number}.{place}", loaded, tools, decide, label)
        for place, call in enumerate(reply.calls, 1)
    )
    doubt = _asked_again(loaded, tools, decide, label)
    return Draft(ModelCalledBody(number, _taking(calls, loaded, tools, out, doubt), parts), turn.id)


#: what was sent and not answered is taken over too: it is found out, or sent again under its key
_REUSABLE = (OperationState.ANSWERED, OperationState.UNKNOWN, OperationState.SENT)


def _taking(
    calls: Sequence[Called], loaded: Loaded, tools: Tools, out: Container[str], doubt: Doubt
) -> tuple[Called, ...]:
    """Let each call that may run take over an operation that did, or may have done, the same: tool and canonical
    arguments are equal, and it is taken once (D3). One of which nobody can find out what it did, because the other
    side knows no key and no lookup and nothing is out any more, is asked about instead (K25)."""
    left = {id_: (row.tool, row.arguments, row) for id_, row in loaded.reuse.items() if row.state in _REUSABLE}
    unsure = {id_: same for id_, same in loaded.unsure.items() if id_ not in left}
    taking = []
    for called in calls:
        same = (called.tool, canonical(called.arguments))
        older = next((id_ for id_, (tool, arguments, _) in left.items() if (tool, arguments) == same), None)
        perhaps = next((id_ for id_, known in unsure.items() if known == same), None)
        if called.verdict is not Verdict.RUN or not called.is_operation or (older is None and perhaps is None):
            taking.append(called)
            continue
        row = left.pop(older)[2] if older is not None else None
        done = row is not None and row.state is OperationState.ANSWERED
        found_out = called.keyed or tools.contracts[called.tool].has_lookup
        if row is not None and (done or found_out or row.operation in out):
            called = replace(called, takes=row.operation, done=done, sent_at_ms=row.sent_at_ms)
        elif not found_out and (again := older or perhaps) is not None:
            unsure.pop(again, None)
            called = doubt(called, again)
        taking.append(called)
    return tuple(taking)


#: turns a call into one that a person is asked about, because an operation may have done the same already
Doubt = Callable[[Called, str], Called]


def _asked_again(loaded: Loaded, tools: Tools, decide: Decide, label: Label) -> Doubt:
    body = loaded.turn_body
    assert body is not None

    def ask(called: Called, again: str) -> Called:
        contract = replace(tools.contracts[called.tool], consent=ConsentPolicy.ALWAYS)
        asked = decide(Action(called.tool, called.arguments), contract, body.origin, (label,), (), owner=loaded.owner)
        why = f"{again} may have done it already"
        return replace(called, verdict=asked.verdict, reason=why, approvers=asked.approvers, again=again)

    return ask


def broken_off(text: str, turn: Turn, loaded: Loaded) -> list[Draft]:
    """Return the row of a reply that broke off, or was cut off: the text that was published of it (K9). None where
    nothing was."""
    if not text:
        return []
    return [Draft(ModelSaidBody(turn.replies + 1, (Part(text, "model", loaded.context.label),), True), turn.id)]


def _called(call: ProposedCall, ref: str, loaded: Loaded, tools: Tools, decide: Decide, label: Label) -> Called:
    contract = tools.contracts.get(call.tool)
    if contract is None or contract.undoes:  # what undoes is the runtime's to offer, and a person's to want
        known = ", ".join(sorted(name for name, one in tools.contracts.items() if not one.undoes))
        return _not_a_call(call, ref, f"there is no tool of that name; there are: {known}")
    if call.arguments is None:
        return _not_a_call(call, ref, "its arguments are not JSON")
    try:
        arguments = _json(tools.check(call.tool, call.arguments))
    except Invalid as invalid:
        return _not_a_call(call, ref, invalid.detail)
    assert loaded.turn_body is not None
    decision = decide(Action(call.tool, arguments), contract, loaded.turn_body.origin, (label,), (), owner=loaded.owner)
    return _decided(ref, contract, arguments, decision, provider_id=call.provider_id)


def _json(arguments: Mapping[str, object]) -> dict[str, object]:
    """Return arguments that can be stored and compared.

    Raises:
        Invalid: they hold a number that JSON can't say.
    """
    try:
        found: dict[str, object] = json.loads(canonical(arguments))
    except (ValueError, TypeError) as error:
        raise Invalid("its arguments hold a number that JSON can't say") from error
    return found


def _not_a_call(call: ProposedCall, ref: str, why: str) -> Called:
    """A call that names nothing we offer, or does not fit it: refused with the reason, never guessed at."""
    try:
        arguments = _json(call.arguments or {})
    except Invalid:
        arguments = {}
    return Called(
        ref,
        plain(call.tool, chars_max=100),
        arguments,
        Verdict.DENY,
        why,
        Effect.EXTERNAL,
        provider_id=call.provider_id,
    )


def _decided(
    ref: str, contract: Contract, arguments: Mapping[str, object], decision: Decision, *, provider_id: str = ""
) -> Called:
    return Called(
        ref,
        contract.tool,
        dict(arguments),
        decision.verdict,
        decision.reason,
        contract.effect,
        keyed=contract.keyed,
        parallel_safe=contract.parallel_safe,
        contract=contract.version,
        approvers=decision.approvers,
        provider_id=provider_id,
    )


# --- operations --------------------------------------------------------------


def _digest(called: Called) -> str:
    return digest([called.tool, called.arguments])


def intended(called: Called, turn: Turn, key: str) -> Draft:
    """Return the row of an operation that is stored and not sent (D1). Its id is its call's."""
    return Draft(ToolIntendedBody(called.operation, called.call, called.tool, key, _digest(called)), turn.id)


def sent(called: Called, turn: Turn, key: str) -> Draft:
    """Return the row of an attempt that may go out once it is durable. The key is the operation's (D2)."""
    planned = turn.find(called.call)
    body = ToolSentBody(
        called.operation,
        called.call,
        called.tool,
        key,
        _digest(called),
        planned.attempts + 1,
        intended=planned.state is CallState.INTENDED,
    )
    return Draft(body, turn.id)


def handed(called: Called, turn: Turn, session: str, key: str, by: Principal) -> Call:
    """Return what the tool is handed beside its arguments."""
    attempt = max(turn.find(called.call).attempts, 1)
    undoes = "" if called.undoes is None else idempotency_key(session, called.undoes)
    return Call(session, turn.id, key, str(by), attempt, undoes=undoes)


def unknown(called: Called, turn: Turn, reason: str) -> Draft:
    """Return the row of an attempt that was given up (C7)."""
    return Draft(ToolUnknownBody(called.operation, called.call, called.tool, reason), turn.id)


def _is_stored(planned: Planned) -> bool:
    return planned.attempts > 0 or planned.state is CallState.INTENDED


def closed(called: Called, outcome: Outcome, reason: str, turn: Turn) -> Draft:
    """Return the result of a call that is not run, in the runtime's words."""
    effect = _effect_unheard(called, outcome)
    return Draft(_result(called, turn, outcome, by_runtime(reason), effect=effect), turn.id)


def _result(called: Called, turn: Turn, outcome: Outcome, *parts: Part, effect: EffectState | None) -> ToolResultBody:
    planned = turn.find(called.call)
    stored = called.is_operation and _is_stored(planned)
    return ToolResultBody(
        called.call,
        called.tool,
        outcome,
        parts,
        operation=called.operation if stored else None,
        stored=stored,
        effect=effect,
        acting_principal=turn.acting,
        undoes=called.undoes,
    )


def _effect_unheard(called: Called, outcome: Outcome) -> EffectState | None:
    """What a call left whose tool said nothing: nothing where it provably did not run, else nobody knows (H9). A call
    that declares no effect has none to be unsure of."""
    if outcome in (Outcome.REFUSED, Outcome.WAITING, Outcome.NOT_STARTED):
        return EffectState.NONE
    return EffectState.UNKNOWN if called.is_operation else None


def result(ended: Attempt, called: Called, turn: Turn, returns: Integrity) -> Draft:
    """Return the one result of a call that was run. Its words are the tool's, labelled as its contract says, or the
    runtime's where a guard withheld them."""
    outcome = Outcome.OK if ended.came is Came.OK else Outcome.FAILED
    body = _result(called, turn, outcome, *_said(ended, called.tool, returns), effect=ended.effect)
    return Draft(replace(body, made=ended.made, attachments=ended.attachments), turn.id)


def settled(
    ended: Attempt,
    operation: str,
    tool: str,
    turn: str,
    acting: str | None,
    returns: Integrity,
    *,
    undoes: str | None = None,
) -> Draft:
    """Return the row of an operation that was given up as unknown and answered after all (K25)."""
    outcome = Outcome.OK if ended.came is Came.OK else Outcome.FAILED
    body = ToolSettledBody(
        operation,
        ended.call,
        tool,
        outcome,
        _said(ended, tool, returns),
        made=ended.made,
        attachments=ended.attachments,
        effect=ended.effect,
        acting_principal=acting,
        undoes=undoes,
    )
    return Draft(body, turn)


def _said(ended: Attempt, tool: str, returns: Integrity) -> tuple[Part, ...]:
    said = Part(ended.text, f"tool:{tool}", Label(returns), "tool contract")
    part = by_runtime(ended.text) if ended.withheld else said
    return (part,) if ended.text or not ended.attachments else ()


def reused(called: Called, turn: Turn) -> Draft:
    """Return the result of a call whose operation was done before: nothing was sent again."""
    said = by_runtime(f"done before, as {called.takes}, and taken over: nothing was sent again, and its result stands")
    body = _result(called, turn, Outcome.OK, said, effect=EffectState.COMMITTED)
    return Draft(replace(body, operation=called.takes, stored=False), turn.id)


#: what became of an operation that nobody plans any more
_LEFT = {
    OperationState.ANSWERED: "stands",
    OperationState.SENT: "may or may not stand",
    OperationState.UNKNOWN: "may or may not stand",
}


def left_over(loaded: Loaded, *, offered: Container[str] = ()) -> list[Draft]:
    """Return a word to the people about each operation that a restarted turn did not take over: it stands, or may,
    and nothing was undone. What is `offered` to be undone is asked about instead."""
    left = [row for row in loaded.reuse.values() if row.state in _LEFT and row.operation not in offered]
    return [Draft(NoticeBody((by_runtime(_left(row)),))) for row in left]


def _left(row: OperationRow) -> str:
    what = f"{row.tool} {plain(row.arguments, chars_max=200)} ({row.operation})"
    return f"{what} {_LEFT[row.state]} and is not planned any more. Nothing was undone."


def undoable(loaded: Loaded, contracts: Mapping[str, Contract]) -> list[OperationRow]:
    """Return the operations that a restarted turn did not take over and that can be undone."""
    known = [(row, contracts.get(row.tool)) for row in loaded.reuse.values() if row.state in _LEFT]
    return [row for row, contract in known if contract is not None and contract.has_release]


def offer_to_undo(
    rows: Sequence[OperationRow],
    turn: Turn,
    loaded: Loaded,
    contracts: Mapping[str, Contract],
    decide: Decide,
    *,
    now_ms: int,
    consent_ms: int,
    wording: Wording,
) -> Draft:
    """Return the row of the question whether operations that are not planned any more are to be undone: each by an
    operation of its own, none of them silently (C8, D6)."""
    body = loaded.turn_body
    assert body is not None
    undoing = [contracts[row.tool].releasing() for row in rows]
    steps = tuple(
        Step(row.call, contract.tool, decode_arguments(row.arguments), contract.version, undoes=row.operation)
        for row, contract in zip(rows, undoing, strict=True)
    )
    first = Action(steps[0].tool, steps[0].arguments)
    asked = decide(first, undoing[0], body.origin, (RUNTIME,), (), owner=loaded.owner)
    id_ = f"A{loaded.consents + 1}"
    consent = Consent(
        id=id_,
        turn=turn.id,
        origin=body.origin,
        steps=steps,
        digest=steps_digest(steps),
        approvers=asked.approvers,
        about=(),
        question=wording(
            id_,
            steps=steps,
            contracts=contracts,
            origin=body.origin,
            parts=tuple(loaded.context.parts),
            replaced={},
            approvers=asked.approvers,
            why=f"it was done for {body.restarts or 'an older turn'}, and is not planned any more",
        ),
        asked_at_ms=now_ms,
        expires_at_ms=now_ms + consent_ms,
        steps_left=turn.steps_left,
    )
    return Draft(TurnAskBody(consent))


def told(called: Called, turn: Turn, reason: str) -> list[Draft]:
    """Return the rows of an operation that stays unknown: its result, and a word to the people (D5)."""
    text = (
        f"{called.tool} may or may not have happened ({reason}). It was not sent again, "
        "because the other side could not recognise a repeat."
        if not called.keyed
        else f"{called.tool} may or may not have happened ({reason}), after {turn.find(called.call).attempts} attempts."
    )
    return _unsure(called, text, turn)


def _unsure(called: Called, text: str, turn: Turn) -> list[Draft]:
    """Return the result of an operation of which nobody knows what it did, and the same words for the people."""
    return [closed(called, Outcome.UNKNOWN, text, turn), Draft(NoticeBody((by_runtime(text),)), turn.id)]


def cancelled(turn: Turn, reason: str, *, ending: Ending = Ending.CANCELLED, tell: bool = True) -> list[Draft]:
    """Return the rows that end a turn whose work was given up: a result for each call that has none, and the end.
    What may have happened is said to be unknown, never undone."""
    drafts = [
        result
        for planned in turn.plan
        if planned.state is not CallState.SETTLED
        for result in _given_up(planned, turn, reason, tell=tell)
    ]
    return [*drafts, ended(turn, End(ending, reason))]


def _given_up(planned: Planned, turn: Turn, reason: str, *, tell: bool) -> list[Draft]:
    out = planned.state in (CallState.SENT, CallState.UNKNOWN)
    if out and planned.called.is_operation:
        rows = _unsure(planned.called, f"{planned.called.tool} may or may not have happened: {reason}.", turn)
        return rows if tell else rows[:1]
    outcome = Outcome.FAILED if out else Outcome.NOT_STARTED
    return [closed(planned.called, outcome, reason, turn)]


def lost(turn: Turn) -> list[Draft]:
    """Return what a restart finds: each operation that was out when the process ended is unknown now."""
    return [
        unknown(planned.called, turn, "the process ended before it heard the answer")
        for planned in turn.plan
        if planned.state is CallState.SENT and planned.called.is_operation
    ]


def too_old(
    turn: Turn,
    say_so_at_ms: int,
    now_ms: int,
    contracts: Mapping[str, Contract],
    *,
    unsent: frozenset[str] = frozenset(),
) -> list[Draft]:
    """Return the results of operations that did not go out, and whose say-so is too old by now (K14): those that
    a restart finds unsent, and `unsent`, which waited for the store."""
    drafts = []
    for planned in turn.plan:
        called = planned.called
        contract = contracts.get(called.tool)
        waits = planned.state in (CallState.PLANNED, CallState.INTENDED) and called.verdict is Verdict.RUN
        if not called.is_operation or not (waits or called.call in unsent):
            continue
        if contract is None or now_ms > say_so_at_ms + contract.good_for_ms:
            why = f"the say-so of {instant(say_so_at_ms)} is too old by now; nothing was sent"
            drafts.append(closed(planned.called, Outcome.NOT_STARTED, why, turn))
    return drafts


# --- questions ---------------------------------------------------------------


def ask(
    calls: Sequence[Called],
    turn: Turn,
    loaded: Loaded,
    contracts: Mapping[str, Contract],
    *,
    now_ms: int,
    consent_ms: int,
    wording: Wording,
) -> list[Draft]:
    """Return the row of a question about exactly these calls (B5, B6), after those that it withdraws (K18)."""
    body = loaded.turn_body
    assert body is not None
    steps = tuple(Step(c.call, c.tool, c.arguments, c.contract, again=c.again) for c in calls)
    id_ = f"A{loaded.consents + 1}"
    consent = Consent(
        id=id_,
        turn=turn.id,
        origin=body.origin,
        steps=steps,
        digest=steps_digest(steps),
        approvers=next(called.approvers for called in calls if called.approvers),
        about=body.about,
        question=wording(
            id_,
            steps=steps,
            contracts=contracts,
            origin=body.origin,
            parts=tuple(loaded.context.parts),
            replaced={old.tool: old for old in body.replaced},
            approvers=next(called.approvers for called in calls if called.approvers),
        ),
        asked_at_ms=now_ms,
        expires_at_ms=now_ms + consent_ms,
        steps_left=turn.steps_left,
    )
    older = [standing.consent for standing in loaded.open_questions if supersedes(consent, standing.consent)]
    withdrawn = [Draft(ConsentWithdrawnBody(old.id, f"{id_} takes its place")) for old in older]
    return [*withdrawn, Draft(TurnAskBody(consent), turn.id)]


def pause(entry: InboxRow, turn: Turn, loaded: Loaded, *, now_ms: int, pause_ms: int) -> Draft:
    """Return the row of the question whether what a person said meanwhile belongs to her turn, which waits for the
    answer (C4, K23)."""
    body = loaded.turn_body
    assert body is not None
    id_, words = f"A{loaded.consents + 1}", "\n".join(part.text for part in entry.input.parts)
    consent = Consent(
        id=id_,
        turn=turn.id,
        origin=body.origin,
        steps=(),
        digest=digest([id_, entry.n, words]),
        approvers=(str(entry.input.principal),),
        about=(),
        question=pause_question(id_, turn.id, words),
        asked_at_ms=now_ms,
        expires_at_ms=now_ms + pause_ms,
        pause=entry.n,
    )
    return Draft(TurnAskBody(consent), turn.id)


def superseded(turn: Turn, by: str) -> list[Draft]:
    """Return the results of the calls that have not begun, where its own person said more: the model plans again."""
    drafts = []
    for planned in unbegun(turn):
        called = planned.called
        if called.done:
            drafts.append(reused(called, turn))
        elif called.verdict is Verdict.DENY:
            drafts.append(closed(called, Outcome.REFUSED, called.reason, turn))
        else:
            drafts.append(closed(called, Outcome.NOT_STARTED, f"superseded by what {by} said meanwhile", turn))
    return drafts


def ended(turn: Turn, end: End) -> Draft:
    """Return the row of a turn's end."""
    return Draft(TurnEndBody(end.ending, end.reason, turn.steps_left), turn.id)


def approved(
    standing: Standing,
    steps: Sequence[Step],
    loaded: Loaded,
    contracts: Mapping[str, Contract],
    *,
    now_ms: int,
    moot: Container[str] = (),
) -> list[Draft]:
    """Return the rows that begin the turn of an approved consent: it runs these steps, no others (B10).

    The person who approved is its origin. If a tool's declaration changed since she was asked, or her yes
    is too old to act on, nothing runs and the question is withdrawn (R11, K14); so it is where what was to be undone
    is `moot`.
    """
    void = _void(standing, steps, contracts, now_ms, moot)
    if void is not None:
        told = Draft(NoticeBody((by_runtime(f"{standing.consent.id} was not run: {void}."),)))
        return [Draft(ConsentWithdrawnBody(standing.consent.id, void)), told]
    assert standing.answered_by is not None
    id_ = f"T{loaded.turns + 1}"
    origin = Origin(Principal.parse(standing.answered_by), f"consent {standing.consent.id}")
    decision = Decision(Verdict.RUN, f"{standing.answered_by} approved {standing.consent.id}")
    calls = tuple(
        replace(_decided(f"{id_}.0.{place}", contracts[step.tool], step.arguments, decision), undoes=step.undoes)
        for place, step in enumerate(steps, 1)
    )
    begins = TurnStartBody(
        origin,
        steps_left=0,
        consent=standing.consent.id,
        about=standing.consent.about,
        say_so_at_ms=standing.answered_at_ms or now_ms,
    )
    return [
        Draft(ConsentUsedBody(standing.consent.id, id_)),
        Draft(begins, id_),
        Draft(TurnStepsBody(standing.consent.id, calls), id_),
    ]


def _void(
    standing: Standing, steps: Sequence[Step], contracts: Mapping[str, Contract], now_ms: int, moot: Container[str]
) -> str | None:
    for step in steps:
        if step.undoes is not None and step.undoes in moot:
            return f"{step.undoes} does not stand any more"
        contract = contracts.get(step.tool)
        if contract is None or contract.version != step.contract:
            return f"{step.tool} changed since the question was asked"
        if now_ms > (standing.answered_at_ms or now_ms) + contract.good_for_ms:
            return f"the yes of {instant(standing.answered_at_ms or 0)} is too old by now"
    return None


def continuation(standing: Standing, loaded: Loaded, replaced: tuple[Replaced, ...], *, now_ms: int) -> Draft:
    """Return the row that begins the turn in which the model goes on, with the asking turn's origin (K16)."""
    consent = standing.consent
    body = TurnStartBody(
        consent.origin,
        steps_left=consent.steps_left,
        continues=consent.turn,
        consent=consent.id,
        about=consent.about,
        replaced=replaced,
        say_so_at_ms=now_ms,
    )
    return Draft(body, f"T{loaded.turns + 1}")


def already(standing: Standing) -> str:
    """Return why an answer to a settled question changes nothing (B8): who answered, and when."""
    by = f" by {standing.answered_by} at {instant(standing.answered_at_ms)}" if standing.answered_at_ms else ""
    state = ConsentState.APPROVED if standing.state is ConsentState.USED else standing.state
    return f"{standing.consent.id} was {state}{by}; this changes nothing"
