"""The turn: `advance(turn, event)` says what a turn is after an event, and what is due next.

Phases (C2): at a `boundary` nothing is half done, and only there may new input join; `thinking` while a
model call is out; `acting` while a plan's calls are; `ended`. What is due is read off the state alone (but for
the model call, which leaving a boundary makes due once), so folding a turn's rows again after a crash arrives
at the same place, and nothing else holds turn state.

Events that come from rows: Started, Replied, StepsFixed, Intended, Sent, GaveUp, Settled, Asked, Joined, Paused,
Unpaused, Stopped, Ended.
Events that are no rows, and so are simply told again after a crash: Proceed, Begun, Resumed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum

from sayso.core.authority import Verdict
from sayso.core.errors import OutOfOrder
from sayso.core.rows import (
    Called,
    ConsentWithdrawnBody,
    Ending,
    InputBody,
    InputClassifiedBody,
    ModelCalledBody,
    ModelSaidBody,
    Outcome,
    Row,
    ToolIntendedBody,
    ToolResultBody,
    ToolSentBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
    TurnStopBody,
)
from sayso.core.text import quoted

#: calls of one reply; a longer plan is refused whole
CALLS_PER_REPLY_MAX = 32
#: of ids that stand twice in a reply, how many an error names, and how much of each
IDS_NAMED_MAX, PROVIDER_ID_CHARS = 3, 60


class Phase(StrEnum):
    """Where a turn stands."""

    #: nothing is half done
    BOUNDARY = "boundary"
    #: a model call is out
    THINKING = "thinking"
    #: calls of a plan are out, or due
    ACTING = "acting"
    ENDED = "ended"


class CallState(StrEnum):
    """Where one call of the plan stands."""

    PLANNED = "planned"
    #: stored, not sent
    INTENDED = "intended"
    #: out; for a call without an effect this is not stored
    SENT = "sent"
    #: given up; what it did is being found out
    UNKNOWN = "unknown"
    SETTLED = "settled"


#: the place of a call that is fixed in a question instead of run
FIXED = -1


@dataclass(frozen=True, slots=True)
class Planned:
    """One call of the plan, when it is due, and what came of it."""

    called: Called
    #: calls of one group go out together, groups one after the other; FIXED ones are asked about
    group: int
    state: CallState = CallState.PLANNED
    outcome: Outcome | None = None
    attempts: int = 0
    #: when it was first sent
    sent_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn. A value: `advance` returns another."""

    id: str
    phase: Phase
    steps_left: int
    #: the consent whose fixed steps it runs; such a turn never calls the model (B10)
    steps_of: str | None = None
    replies: int = 0
    #: calls that the model asked for, in all of its replies
    calls: int = 0
    plan: tuple[Planned, ...] = ()
    #: the question that this turn has asked
    asked: str | None = None
    #: the whole plan is refused, with this reason
    refused: str | None = None
    #: why the turn ends once that plan is closed; empty where the model is asked again
    ambiguous: str = ""
    ending: Ending | None = None
    failure: str = ""
    #: why it was stopped (K24): nothing more begins, and it ends once nothing is out; empty while it goes on
    stopped: str = ""
    #: the question that it waits for: nothing of it goes on until that is settled (K23)
    paused: str | None = None
    #: on whose say-so it acts, as `user:bob`; None where there is nobody behind it
    acting: str | None = None

    def find(self, call: str) -> Planned:
        """Return the planned call of that ref.

        Raises:
            OutOfOrder: no call of the plan has it.
        """
        for planned in self.plan:
            if planned.called.call == call:
                return planned
        raise OutOfOrder(f"{self.id} has no call {call}")


# --- events ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Proceed:
    """Nothing more joins at this boundary: go on."""


@dataclass(frozen=True, slots=True)
class Replied:
    """The model answered: with calls, or with words alone."""

    calls: tuple[Called, ...]


@dataclass(frozen=True, slots=True)
class ModelFailed:
    """The model gave no usable answer."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepsFixed:
    """The steps of the consent that this turn runs."""

    calls: tuple[Called, ...]


@dataclass(frozen=True, slots=True)
class Intended:
    """An unkeyed operation is stored."""

    call: str


@dataclass(frozen=True, slots=True)
class Sent:
    """An operation's attempt is stored, and may go out."""

    call: str
    at_ms: int = 0


@dataclass(frozen=True, slots=True)
class Begun:
    """A call without an effect went out, or a lookup of an unknown operation did."""

    call: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """An attempt was given up: unknown, never failed (C7)."""

    call: str


@dataclass(frozen=True, slots=True)
class Settled:
    """A call has its one result."""

    call: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Asked:
    """The question is stored."""

    consent: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The end is stored."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Joined:
    """An input joined the turn, where nothing is half done (C2)."""


@dataclass(frozen=True, slots=True)
class Paused:
    """The question about what its own person said meanwhile is stored."""

    consent: str


@dataclass(frozen=True, slots=True)
class Unpaused:
    """A question is settled; the turn goes on if it is the one that it waits for."""

    consent: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Somebody stopped the turn."""

    reason: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """The process that ran this turn is gone: nothing is out any more."""


Event = (
    Proceed
    | Replied
    | ModelFailed
    | StepsFixed
    | Intended
    | Sent
    | Begun
    | GaveUp
    | Settled
    | Asked
    | Ended
    | Joined
    | Paused
    | Unpaused
    | Stopped
    | Resumed
)


# --- effects -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallModel:
    """Ask the model, once everything so far is durable."""


@dataclass(frozen=True, slots=True)
class Intend:
    """Store an unkeyed operation, in a commit before the one that sends it."""

    call: Called


@dataclass(frozen=True, slots=True)
class Send:
    """Store that the operation is sent; when that is durable, call the tool.

    `apart` says that everything before must be durable first, so that a crash in between leaves
    "not sent" (an unkeyed operation) rather than "nobody knows".
    """

    call: Called
    apart: bool


@dataclass(frozen=True, slots=True)
class Reuse:
    """Give a call the result of an older operation that is done (D3)."""

    call: Called


@dataclass(frozen=True, slots=True)
class Run:
    """Call a tool that does nothing to the world; nothing is stored first."""

    call: Called


@dataclass(frozen=True, slots=True)
class Settle:
    """Find out what became of an operation that nobody waits for any more (D5)."""

    call: Called
    attempts: int


@dataclass(frozen=True, slots=True)
class Close:
    """Give a call its result without running it."""

    call: Called
    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Put these calls to a person, as one question (K19)."""

    calls: tuple[Called, ...]


@dataclass(frozen=True, slots=True)
class End:
    """End the turn."""

    ending: Ending
    reason: str


Due = CallModel | Intend | Send | Reuse | Run | Settle | Close | Ask | End


# --- the machine -------------------------------------------------------------


def start(turn_id: str, body: TurnStartBody) -> Turn:
    """Return the turn that a `turn.start` row opens: at its first boundary.

    A turn with a consent and no turn to go on from runs the consent's steps (B10).
    """
    runs_steps = body.consent is not None and body.continues is None
    return Turn(
        turn_id,
        Phase.BOUNDARY,
        body.steps_left,
        steps_of=body.consent if runs_steps else None,
        acting=body.origin.acting,
    )


def advance(turn: Turn, event: Event) -> tuple[Turn, tuple[Due, ...]]:
    """Return the turn after `event`, and what is due, in order.

    Raises:
        OutOfOrder: `event` cannot happen in this phase.
    """
    after = _after(turn, event)
    return after, (CallModel(),) if isinstance(event, Proceed) else due(after)


def _after(turn: Turn, event: Event) -> Turn:
    match turn.phase, event:
        case Phase.BOUNDARY, Proceed() if _goes_on(turn):
            return replace(turn, phase=Phase.THINKING)
        case Phase.BOUNDARY | Phase.THINKING, Replied(calls) if turn.steps_of is None and not turn.failure:
            return _replied(turn, calls)
        case Phase.THINKING, ModelFailed(reason):
            return replace(turn, failure=reason)
        case Phase.BOUNDARY, StepsFixed(calls) if turn.steps_of is not None:
            return replace(turn, phase=Phase.ACTING, plan=_in_order(calls))
        case Phase.ACTING, Intended(call) if _runs(turn, call) and not turn.find(call).called.keyed:
            return _moved(turn, call, CallState.INTENDED, CallState.PLANNED)
        case Phase.ACTING, Sent(call, at_ms) if _runs(turn, call):
            before = (CallState.PLANNED, CallState.INTENDED, CallState.SENT, CallState.UNKNOWN)
            return _moved(turn, call, CallState.SENT, *before, sent_at_ms=at_ms)
        case Phase.ACTING, Begun(call) if _runs(turn, call):
            return _moved(turn, call, CallState.SENT, CallState.UNKNOWN)
        case Phase.ACTING, Begun(call):
            return _moved(turn, call, CallState.SENT, CallState.PLANNED)
        case Phase.ACTING, GaveUp(call):
            return _moved(turn, call, CallState.UNKNOWN, CallState.SENT, CallState.UNKNOWN)
        case Phase.ACTING, Settled(call, outcome):
            return _settled(turn, call, outcome)
        case Phase.ACTING, Asked(consent) if any(isinstance(item, Ask) for item in due(turn)):
            return replace(turn, asked=consent)
        case Phase.BOUNDARY | Phase.THINKING | Phase.ACTING, Ended(ending):
            return replace(turn, phase=Phase.ENDED, ending=ending)
        case Phase.BOUNDARY | Phase.ACTING, Paused(consent) if may_pause(turn):
            return replace(turn, paused=consent)
        case Phase.BOUNDARY | Phase.THINKING | Phase.ACTING, Unpaused(consent):
            return replace(turn, paused=None) if turn.paused == consent else turn
        case Phase.BOUNDARY, Joined() if _goes_on(turn):
            return turn
        case Phase.BOUNDARY | Phase.THINKING | Phase.ACTING, Stopped(reason) if not turn.stopped:
            return replace(turn, stopped=reason)
        case Phase.ACTING, Joined() if at_last_word(turn) and turn.steps_left > 0:
            return replace(turn, phase=Phase.BOUNDARY)
        case Phase.THINKING, Resumed():
            return replace(turn, phase=Phase.BOUNDARY)
        case Phase.ACTING, Resumed():
            return _resumed(turn)
        case ((Phase.BOUNDARY | Phase.ENDED), Resumed()):
            return turn
        case _:
            raise OutOfOrder(f"{turn.id}: {type(event).__name__} can't happen while {turn.phase}")


def _goes_on(turn: Turn) -> bool:
    """Whether the model may be asked at this boundary."""
    return turn.steps_of is None and turn.steps_left > 0 and turn.paused is None and not turn.stopped


def at_last_word(turn: Turn) -> bool:
    """Whether the model has answered in words and the turn is about to end: the last place where input may join."""
    last = turn.phase is Phase.ACTING and not turn.plan and turn.asked is None
    return last and turn.steps_of is None and not turn.stopped


def between_steps(turn: Turn) -> bool:
    """Whether calls of a reply have not begun and nothing is out: what comes in may take their place (C2)."""
    quiet = all(p.state in (CallState.PLANNED, CallState.INTENDED, CallState.SETTLED) for p in turn.plan)
    whole = turn.phase is Phase.ACTING and turn.asked is None and turn.refused is None and turn.steps_of is None
    return quiet and whole and bool(unbegun(turn)) and not turn.stopped


def unbegun(turn: Turn) -> list[Planned]:
    """Return the calls that have not begun and have no result."""
    return [p for p in turn.plan if p.state in (CallState.PLANNED, CallState.INTENDED)]


def may_pause(turn: Turn) -> bool:
    """Whether the turn may wait for its own person here: nothing is out, and something of it is left to do."""
    here = turn.phase is Phase.BOUNDARY or between_steps(turn)
    return here and turn.steps_of is None and turn.paused is None and not turn.stopped


def _replied(turn: Turn, calls: tuple[Called, ...]) -> Turn:
    """A reply in words, a plan, or one that is refused whole, before anything of it runs. Where its ids are
    ambiguous the turn ends too (H12): a model that can't tell its calls apart isn't asked to try again."""
    spent = replace(
        turn,
        replies=turn.replies + 1,
        calls=turn.calls + len(calls),
        steps_left=turn.steps_left - 1,
        phase=Phase.ACTING,
    )
    if not calls:
        return replace(spent, plan=())
    if ids := _same_ids(calls):
        why = f"calls of one reply have the same id, {ids}, so none of the reply was run"
        return replace(spent, plan=_arranged(calls), refused=f"rejected before execution: {why}", ambiguous=why)
    if len(calls) > CALLS_PER_REPLY_MAX:
        why = f"more than {CALLS_PER_REPLY_MAX} calls in one reply, so none of them was run"
        return replace(spent, plan=_arranged(calls), refused=why)
    return replace(spent, plan=_arranged(calls))


def _same_ids(calls: tuple[Called, ...]) -> str:
    """Return the provider's ids that more than one call has, as an error names them; empty if there are none."""
    counts = Counter(called.provider_id for called in calls if called.provider_id)
    twice = [quoted(id_, chars_max=PROVIDER_ID_CHARS) for id_, count in counts.items() if count > 1]
    more = f" and {len(twice) - IDS_NAMED_MAX} more" if len(twice) > IDS_NAMED_MAX else ""
    return ", ".join(twice[:IDS_NAMED_MAX]) + more


def _in_order(calls: tuple[Called, ...]) -> tuple[Planned, ...]:
    return tuple(Planned(called, group) for group, called in enumerate(calls))


def _arranged(calls: tuple[Called, ...]) -> tuple[Planned, ...]:
    """Place the calls: neighbours that are parallel-safe go out together, others one after the other.

    From the first call that needs say-so on, parallel-safe reads still run now, and all the rest is
    fixed in the one question (K19), provided the same people may answer it.
    """
    planned: list[Planned] = []
    group, beside, guarded = 0, False, False
    for called in calls:
        guarded = guarded or called.verdict is Verdict.ASK
        runs = called.verdict is Verdict.RUN and (not guarded or called.parallel_safe)
        if not runs and called.verdict is not Verdict.DENY:
            planned.append(Planned(called, FIXED))
            continue
        if not (beside and called.parallel_safe):
            group += 1
        beside = called.parallel_safe
        planned.append(_planned(called, group))
    return tuple(planned)


def _planned(called: Called, group: int) -> Planned:
    """A call that takes over an operation which was sent begins where that one stands: nobody knows what it did."""
    if called.takes is not None and not called.done:
        return Planned(called, group, CallState.UNKNOWN, attempts=1, sent_at_ms=called.sent_at_ms)
    return Planned(called, group)


def _runs(turn: Turn, call: str) -> bool:
    """Whether the call does something to the world, and is to be run in this turn."""
    planned = turn.find(call)
    return planned.called.is_operation and planned.group != FIXED


def _moved(turn: Turn, call: str, to: CallState, *before: CallState, sent_at_ms: int | None = None) -> Turn:
    planned = turn.find(call)
    if planned.state not in before:
        raise OutOfOrder(f"{turn.id}: {call} is {planned.state}, so it can't become {to}")
    moved = replace(planned, state=to)
    if sent_at_ms is not None:
        first = sent_at_ms if planned.sent_at_ms is None else planned.sent_at_ms
        moved = replace(moved, attempts=planned.attempts + 1, sent_at_ms=first)
    return _with(turn, moved)


def _with(turn: Turn, changed: Planned) -> Turn:
    plan = tuple(changed if p.called.call == changed.called.call else p for p in turn.plan)
    return replace(turn, plan=plan)


def _settled(turn: Turn, call: str, outcome: Outcome) -> Turn:
    planned = turn.find(call)
    if planned.state is CallState.SETTLED:
        raise OutOfOrder(f"{turn.id}: {call} has its result already")
    ran = outcome in (Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN)
    sent = planned.state in (CallState.SENT, CallState.UNKNOWN) or planned.called.done
    if ran and planned.called.is_operation and not sent:
        raise OutOfOrder(f"{turn.id}: {call} was never sent, so it can't be {outcome}")
    after = _with(turn, replace(planned, state=CallState.SETTLED, outcome=outcome))
    done = all(p.state is CallState.SETTLED for p in after.plan)
    if done and after.asked is None and after.steps_of is None and not after.ambiguous:
        return replace(after, phase=Phase.BOUNDARY, plan=(), refused=None)
    return after


def _resumed(turn: Turn) -> Turn:
    """What was out is out no more: an effect becomes unknown, a read is simply due again."""
    plan = tuple(
        replace(p, state=CallState.UNKNOWN if p.called.is_operation else CallState.PLANNED)
        if p.state is CallState.SENT
        else p
        for p in turn.plan
    )
    return replace(turn, plan=plan)


def due(turn: Turn) -> tuple[Due, ...]:
    """Return what is due in this state, in order; empty while something is out, or at a boundary."""
    if turn.stopped and turn.phase is not Phase.ENDED:
        return _due_to_stop(turn)
    if turn.paused is not None:
        return ()
    match turn.phase:
        case Phase.BOUNDARY:
            if turn.steps_of is None and turn.steps_left <= 0:
                return (End(Ending.FAILED, "no model calls are left to this turn"),)
            return ()
        case Phase.THINKING:
            return (End(Ending.FAILED, turn.failure),) if turn.failure else ()
        case Phase.ACTING:
            return _due_of_plan(turn)
        case Phase.ENDED:
            return ()


def _due_to_stop(turn: Turn) -> tuple[Due, ...]:
    """What has not begun gets its result; the turn ends once nothing is out that may still answer. What was given up
    by then stays unknown: it is neither asked about nor sent again."""
    if unsent := unbegun(turn):
        return tuple(Close(p.called, Outcome.NOT_STARTED, turn.stopped) for p in unsent)
    if any(p.state is CallState.SENT for p in turn.plan):
        return ()
    return (End(Ending.CANCELLED, turn.stopped),)


def _due_of_plan(turn: Turn) -> tuple[Due, ...]:
    open_calls = [p for p in turn.plan if p.state is not CallState.SETTLED]
    if not open_calls:
        return (_end(turn),)
    if turn.refused is not None:
        return tuple(Close(p.called, Outcome.REFUSED, turn.refused) for p in open_calls)
    if turn.asked is not None:
        return tuple(Close(p.called, Outcome.WAITING, f"waiting for {turn.asked}") for p in open_calls)
    stopped = _stopped(turn.plan)
    if stopped:
        return tuple(Close(p.called, Outcome.NOT_STARTED, "a step before it did not succeed") for p in stopped)
    running = [p for p in open_calls if p.group != FIXED]
    if not running:
        return _ask(open_calls)
    now = min(p.group for p in running)
    return tuple(item for p in running if p.group == now for item in _due_of_call(p))


def _stopped(plan: tuple[Planned, ...]) -> list[Planned]:
    """Return the calls that don't start, because one before them did not succeed (K15). Those that go out
    beside it are none of them, and are waited for."""
    for place, failed in enumerate(plan):
        if failed.state is CallState.SETTLED and failed.outcome is not Outcome.OK:
            if any(p.group == failed.group != FIXED and p.state is not CallState.SETTLED for p in plan):
                return []
            return [p for p in plan[place + 1 :] if p.state in (CallState.PLANNED, CallState.INTENDED)]
    return []


def _ask(fixed: list[Planned]) -> tuple[Due, ...]:
    """Everything that could run has run: ask about the rest. What waits for other people than the first
    guarded step is not fixed beside it, and so nothing after it is either."""
    guarded = next(p for p in fixed if p.called.verdict is Verdict.ASK)
    for other in fixed:
        if other.called.verdict is Verdict.ASK and other.called.approvers != guarded.called.approvers:
            why = "it waits for other people than the steps before it; call it again on its own"
            return (Close(other.called, Outcome.NOT_STARTED, why),)
    return (Ask(tuple(p.called for p in fixed)),)


def _due_of_call(planned: Planned) -> tuple[Due, ...]:
    called = planned.called
    match planned.state:
        case CallState.PLANNED if called.verdict is Verdict.DENY:
            return (Close(called, Outcome.REFUSED, called.reason),)
        case CallState.PLANNED if called.done:
            return (Reuse(called),)
        case CallState.PLANNED if not called.is_operation:
            return (Run(called),)
        case CallState.PLANNED if called.keyed:
            return (Send(called, apart=False),)
        case CallState.PLANNED:
            return (Intend(called),)
        case CallState.INTENDED:
            return (Send(called, apart=True),)
        case CallState.UNKNOWN:
            return (Settle(called, planned.attempts),)
        case CallState.SENT | CallState.SETTLED:
            return ()


def _end(turn: Turn) -> End:
    if turn.ambiguous:
        return End(Ending.FAILED, turn.ambiguous)
    if turn.asked is not None:
        return End(Ending.ASKED, f"waits for {turn.asked}")
    if turn.steps_of is not None:
        failed = [p for p in turn.plan if p.outcome is not Outcome.OK]
        if failed:
            return End(Ending.FAILED, f"{failed[0].called.tool}: {failed[0].outcome}")
    return End(Ending.DONE, "")


# --- from rows ---------------------------------------------------------------


def stopped_by(who: str) -> str:
    """Return why a turn ends that somebody stopped."""
    return f"{who} stopped it"


def event_of(row: Row) -> Event | None:
    """Return the event that a row of an open turn tells the machine; None for rows beside it."""
    match row.body:
        case ModelCalledBody(calls=calls):
            return Replied(calls)
        case ModelSaidBody(interrupted=False):
            return Replied(())
        case TurnStepsBody(calls=calls):
            return StepsFixed(calls)
        case ToolIntendedBody(call=call):
            return Intended(call)
        case ToolSentBody(call=call):
            return Sent(call, row.at_ms)
        case ToolUnknownBody(call=call):
            return GaveUp(call)
        case ToolResultBody(call=call, outcome=outcome):
            return Settled(call, outcome)
        case TurnAskBody(consent=consent):
            return Asked(consent.id) if consent.pause is None else Paused(consent.id)
        case InputClassifiedBody(consent=str() as consent_id) | ConsentWithdrawnBody(consent=consent_id):
            return Unpaused(consent_id)
        case TurnEndBody(ending=ending):
            return Ended(ending)
        case InputBody():
            return Joined()
        case TurnStopBody(by=by):
            return Stopped(stopped_by(by))
        case _:
            return None


def fold(turn_id: str, rows: tuple[Row, ...]) -> Turn:
    """Return the turn that its stored rows describe, before `Resumed` is told.

    Raises:
        OutOfOrder: the rows are not those of one turn from its start.
    """
    if not rows or not isinstance(rows[0].body, TurnStartBody):
        raise OutOfOrder(f"{turn_id} does not begin with turn.start")
    turn = start(turn_id, rows[0].body)
    for row in rows[1:]:
        event = event_of(row)
        if event is not None:
            turn, _ = advance(turn, event)
    return turn
