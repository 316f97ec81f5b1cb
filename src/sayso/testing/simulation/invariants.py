"""What must hold at the end of every story, whatever was said, whatever failed, and whenever the process died.

Each invariant is a function from what was left to sentences about what does not hold; none, where all does.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from sayso.core.authority import Action, Verdict, decide, may_approve
from sayso.core.canonical import canonical
from sayso.core.consent import ConsentState
from sayso.core.inputs import InputKind
from sayso.core.operation import OperationState
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import (
    Called,
    ConsentApprovedBody,
    ConsentUsedBody,
    InputBody,
    InputRetractedBody,
    InputSupersededBody,
    ModelCalledBody,
    Outcome,
    Row,
    ToolResultBody,
    ToolSentBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
)
from sayso.testing.simulation.setting import Played


@dataclass(frozen=True, slots=True)
class Invariant:
    """Something that always holds."""

    name: str
    #: the sentence
    holds: str
    #: the rules that it comes from
    rules: tuple[str, ...]
    check: Callable[[Played], Iterable[str]]

    def __reduce__(self) -> tuple[Callable[[str, str], Invariant], tuple[str, str]]:
        """Between processes it goes by its name: what it has in its module is itself, and no function any more."""
        return _of_module, (self.check.__module__, self.check.__qualname__)


def _of_module(module: str, name: str) -> Invariant:
    found: Invariant = getattr(importlib.import_module(module), name)
    return found


def invariant(*rules: str) -> Callable[[Callable[[Played], Iterable[str]]], Invariant]:
    """Make an invariant of a function: its name, its docstring's first paragraph, and what it yields."""

    def declare(check: Callable[[Played], Iterable[str]]) -> Invariant:
        holds = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
        return Invariant(check.__name__, holds, rules, check)

    return declare


# --- what comes in ---------------------------------------------------------------


@invariant("A7", "A8", "A10", "X41")
def no_acknowledged_input_lost(played: Played) -> Iterator[str]:
    """Every input whose sender was told that it is stored is there, and a row says what became of it, once."""
    kept = {entry.n: entry for entry in played.inbox}
    for told in played.acknowledged:
        if told.n is None or told.n not in kept:
            yield f"{told.what} was acknowledged and is not in the inbox"
    said: Counter[int] = Counter(n for row in played.rows for n in _takes(row))
    for entry in played.inbox:
        if entry.state == "queued":
            yield f"input {entry.n} was never looked at"
        if entry.input.lane == "normal" and said[entry.n] != 1:
            yield f"{said[entry.n]} rows say what became of input {entry.n}"


@invariant("A4", "A5", "K27")
def no_repeat_acted_on(played: Played) -> Iterator[str]:
    """However often a message or an event comes under one id, the session takes it in once."""
    sent: dict[str, set[str]] = {}
    for action in played.story.actions:
        if action.do == "event":
            sent.setdefault(f"source:{action.args['source']}", set()).add(action.args["id"])
        elif action.do == "say":
            sent.setdefault(f"user:{action.args['who']}", set()).add(action.args["key"])
    came = Counter(str(entry.input.principal) for entry in played.inbox if entry.input.kind in _SENT)
    for who, times in came.items():
        if times > len(sent.get(who, ())):
            yield f"{who} sent {len(sent.get(who, ()))} things, and {times} came in"


#: what a message or an event is to the session; a bare yes is an answer, and counted with those
_SENT = (InputKind.MESSAGE, InputKind.EVENT, InputKind.NOTICE, InputKind.UNCLEAR)


def _takes(row: Row) -> tuple[int, ...]:
    """Return the messages and events of which a row says what became."""
    match row.body:
        case InputBody(n=n) | InputSupersededBody(n=n) | InputRetractedBody(entry=n):
            return (n,)
        case _:
            return ()


# --- what goes out ----------------------------------------------------------------


@invariant("B2", "B3", "B7", "B9", "B10", "K11", "K17", "D1", "N1")
def no_effect_without_say_so(played: Played) -> Iterator[str]:
    """What was done to the world is an operation that was stored as sent before, in a turn whose origin may do so, or
    as a step of a consent to which an approver said yes in time."""
    calls = _calls(played.rows)
    sent = [(row, row.body) for row in played.rows if isinstance(row.body, ToolSentBody)]
    for row, body in sent:
        why = _without_say_so(played, row, calls.get(body.call))
        if why:
            yield f"{body.operation} ({body.tool}) went out: {why}"
    keys = {body.key for _, body in sent}
    for deed in played.ledger.deeds:
        if deed.key not in keys:
            yield f"{deed.name} {deed.what} was done under {deed.key!r}, which no row says was sent"


def _without_say_so(played: Played, row: Row, proposed: tuple[Row, Called] | None) -> str:
    """Return why nobody who may said that this call may go out; empty if somebody did."""
    if proposed is None or proposed[0].seq > row.seq:
        return "no reply and no consent proposed it"
    by, called = proposed
    if isinstance(by.body, TurnStepsBody):
        return _not_agreed(played, by.body.consent, called)
    if called.verdict is not Verdict.RUN:
        return f"the verdict was {called.verdict}"
    origin = next(r.body.origin for r in played.rows if isinstance(r.body, TurnStartBody) and r.turn == by.turn)
    action = Action(called.tool, called.arguments)
    decision = decide(action, played.contracts[called.tool], origin, (), (), owner=played.owner)
    return "" if decision.verdict is Verdict.RUN else decision.reason


def _not_agreed(played: Played, consent: str, called: Called) -> str:
    asked = next((each.consent for each in played.standings if each.consent.id == consent), None)
    if asked is None:
        return f"there is no question {consent}"
    answers = [row.body for row in played.rows if isinstance(row.body, ConsentApprovedBody)]
    yes = next((body for body in answers if body.consent == consent), None)
    if yes is None:
        return f"nobody said yes to {consent}"
    if not may_approve(Principal.parse(yes.by), asked.approvers):
        return f"{yes.by} may not say yes to {consent}"
    if yes.received_at_ms > asked.expires_at_ms:
        return f"the yes to {consent} came too late"
    if not any((step.tool, step.arguments) == (called.tool, called.arguments) for step in asked.steps):
        return f"{consent} asked about something else"
    return ""


def _calls(rows: Iterable[Row]) -> dict[str, tuple[Row, Called]]:
    return {
        called.call: (row, called)
        for row in rows
        if isinstance(row.body, ModelCalledBody | TurnStepsBody)
        for called in row.body.calls
    }


@invariant("B8", "K13")
def no_consent_used_twice(played: Played) -> Iterator[str]:
    """A consent starts one turn, whose steps are written once."""
    for body in (ConsentUsedBody, TurnStepsBody):
        used = Counter(row.body.consent for row in played.rows if isinstance(row.body, body))
        yield from (f"{consent} was used {times} times" for consent, times in used.items() if times > 1)


@invariant("D2", "D4", "D5")
def no_keyed_effect_twice(played: Played) -> Iterator[str]:
    """What was sent under one key was done at most once; one operation has one key, and no other has it."""
    keys: dict[str, set[str]] = {}
    for row in played.rows:
        if isinstance(row.body, ToolSentBody):
            keys.setdefault(row.body.operation, set()).add(row.body.key)
            if played.contracts[row.body.tool].keyed and played.ledger.times(row.body.key) > 1:
                yield f"{row.body.tool} was done {played.ledger.times(row.body.key)} times under {row.body.key!r}"
    yield from (f"{operation} went out under {sorted(under)}" for operation, under in keys.items() if len(under) > 1)
    shared = Counter(key for under in keys.values() for key in under)
    yield from (f"{times} operations went out under {key!r}" for key, times in shared.items() if times > 1)


@invariant("C7", "C8", "D3")
def what_is_equal_is_taken_over(played: Played) -> Iterator[str]:
    """A turn that begins anew does nothing again that the one before it did, where it plans the same: each equal step
    takes over an operation that was done, or may have been, as long as there is one."""
    done = {operation.operation: operation for operation in played.operations}
    for start in played.rows:
        if not isinstance(start.body, TurnStartBody) or start.body.restarts is None:
            continue
        before = [done[id_] for id_ in _did(played.rows, start.body.restarts) if id_ in done]
        left = Counter((o.tool, o.arguments) for o in before if o.state in _STANDS)
        for row, called in _calls(played.rows).values():
            if row.turn != start.turn or isinstance(row.body, TurnStepsBody) or called.verdict is not Verdict.RUN:
                continue
            same = (called.tool, canonical(called.arguments))
            anew = called.takes is None and any(o.operation == called.call for o in played.operations)
            if anew and left[same] > 0:
                yield f"{called.call} ({called.tool}) was done anew, though {start.body.restarts} had done the same"
            left[same] -= 1


#: what an operation that was done may be at the end; what was not done may be done anew
_STANDS = (OperationState.ANSWERED, OperationState.RELEASED)


def _did(rows: Iterable[Row], turn: str) -> list[str]:
    """Return the operations that were a turn's when it ended: its own, and those that it took over."""
    calls = [called for row, called in _calls(rows).values() if row.turn == turn]
    return [called.operation for called in calls if called.is_operation]


@invariant("D5")
def what_can_be_found_out_is(played: Played) -> Iterator[str]:
    """Nobody is told that no answer came of something that the other side could be asked about, unless that failed."""
    if any(str(action.args.get("at", "")).startswith("lookup") for action in played.story.actions):
        return
    for row in played.rows:
        if isinstance(row.body, ToolResultBody) and played.contracts[row.body.tool].has_lookup:
            told = " ".join(part.text for part in row.body.parts)
            if row.body.outcome is Outcome.UNKNOWN and "(no answer came" in told:
                yield f"nobody asked what became of {row.body.operation} ({row.body.tool})"


@invariant("D5", "K25")
def no_unkeyed_effect_resent(played: Played) -> Iterator[str]:
    """An operation without a key goes out at most once, and is done at most once."""
    sent = Counter(
        (row.body.operation, row.body.tool, row.body.key)
        for row in played.rows
        if isinstance(row.body, ToolSentBody) and not played.contracts[row.body.tool].keyed
    )
    for (operation, tool, key), times in sent.items():
        if times > 1:
            yield f"{operation} ({tool}) was sent {times} times without a key"
        if played.ledger.times(key) > 1:
            yield f"{operation} ({tool}) was done {played.ledger.times(key)} times"


@invariant("D5", "B15")
def success_is_true(played: Played) -> Iterator[str]:
    """What the record calls done was done: a tool that enters its deeds in the books has one for every success."""
    enters = _entering(played)
    for row in played.rows:
        body = row.body
        if isinstance(body, ToolResultBody) and body.outcome is Outcome.OK and body.tool in enters:
            key = f"{played.session}:{body.operation}"
            if not played.ledger.times(key):
                yield f"{body.operation} ({body.tool}) is said to be done, and is not in the books"


def _entering(played: Played) -> set[str]:
    """Return the tools of which anything is in the books."""
    tool_of = {row.body.key: row.body.tool for row in played.rows if isinstance(row.body, ToolSentBody)}
    return {tool_of[deed.key] for deed in played.ledger.deeds if deed.key in tool_of}


# --- the record --------------------------------------------------------------------


@invariant("H12", "K17", "C2")
def every_call_has_one_result(played: Played) -> Iterator[str]:
    """When a turn has ended, each of its calls has exactly one result."""
    ended = {row.turn for row in played.rows if isinstance(row.body, TurnEndBody)}
    results = Counter(row.body.call for row in played.rows if isinstance(row.body, ToolResultBody))
    for call, (row, _) in _calls(played.rows).items():
        if row.turn in ended and results[call] != 1:
            yield f"{call} has {results[call]} results"


@invariant("C6")
def only_its_own_person_joins(played: Played) -> Iterator[str]:
    """What joins a turn was said by the person who began it, or by the runtime to itself."""
    began = {row.turn: row.body.origin for row in played.rows if isinstance(row.body, TurnStartBody)}
    for row in played.rows:
        if isinstance(row.body, InputBody) and row.turn is not None:
            who = row.body.input.principal
            if who != began[row.turn].principal and who.kind is not PrincipalKind.AGENT:
                yield f"what {who} said joined {row.turn}, which {began[row.turn].principal} began"


@invariant("K24")
def a_stop_is_heard(played: Played) -> Iterator[str]:
    """A stop that comes while a turn runs ends it: beside what is on its way just then, nothing goes out after it came.

    Where another process may be the owner, or the word of what came in is lost, it may be a second until the owner
    looks, so nothing is said of such stories.
    """
    if any(a.do == "take_over" or str(a.args.get("at", "")).startswith("put") for a in played.story.actions):
        return
    for entry in played.inbox:
        if entry.input.kind is not InputKind.STOP or entry.input.stops is not None:
            continue
        running = _running(played.rows, entry.at_seq)
        whose = next(
            (r.body.origin for r in played.rows if isinstance(r.body, TurnStartBody) and r.turn == running), None
        )
        if whose is None or entry.input.principal not in (whose.principal, played.owner):
            continue
        results = 0
        for row in played.rows:
            if row.turn != running or row.seq <= entry.at_seq:
                continue
            results += isinstance(row.body, ToolResultBody)
            if isinstance(row.body, ToolSentBody) and row.body.attempt == 1 and results > 1:
                yield f"{row.body.operation} went out after {entry.input.principal} stopped {running}"


def _running(rows: Iterable[Row], seq: int) -> str | None:
    """Return the turn that was open when so many rows were stored."""
    running: str | None = None
    for row in rows:
        if row.seq > seq:
            break
        if isinstance(row.body, TurnStartBody):
            running = row.turn
        elif isinstance(row.body, TurnEndBody):
            running = None
    return running


@invariant("C1", "B1")
def one_turn_at_a_time(played: Played) -> Iterator[str]:
    """A turn begins after the one before it has ended, and each begins and ends once."""
    running: str | None = None
    for row in played.rows:
        if isinstance(row.body, TurnStartBody):
            if running is not None:
                yield f"{row.turn} began while {running} ran"
            running = row.turn
        elif isinstance(row.body, TurnEndBody):
            if row.turn != running:
                yield f"{row.turn} ended while {running} ran"
            running = None


@invariant("H5", "N21")
def rows_are_gapless_and_once(played: Played) -> Iterator[str]:
    """The rows are numbered 1, 2, 3 without a gap, and no two have one name."""
    numbers = [row.seq for row in played.rows]
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"the rows are numbered {numbers}"
    if len({row.commit_key for row in played.rows}) != len(numbers):
        yield "two rows have one commit key"


@invariant("H1", "H24", "K1", "K3")
def every_listener_saw_the_same(played: Played) -> Iterator[str]:
    """Whoever follows, is cut off and comes back shows the stored rows in the end, each once, and never saw two rows in
    one place."""
    yield from played.seen_wrong
    for number, shown in enumerate(played.pages):
        if shown != played.expected:
            yield f"page {number} shows {len(shown)} rows, which are not the {len(played.expected)} stored ones"


@invariant("K2", "N2")
def one_writer_an_epoch(played: Played) -> Iterator[str]:
    """Epochs never fall from one row to the next, and the rows of one are all of one owner."""
    epochs = [row.epoch for row in played.rows]
    if epochs != sorted(epochs):
        yield f"the epochs of the rows are {epochs}"
    owners: dict[int, set[str]] = {}
    for row in played.rows:
        owners.setdefault(row.epoch, set()).add(row.commit_key.partition(".")[0])
    yield from (f"epoch {epoch} has {len(of)} owners" for epoch, of in owners.items() if len(of) > 1)


@invariant("A8", "C1", "K13", "K16", "K22")
def every_session_comes_to_rest(played: Played) -> Iterator[str]:
    """Once nothing goes wrong any more, the session has nothing left to do, and nothing of it is half done."""
    if not played.rested:
        yield "the session does not come to rest"
        return
    for operation in played.operations:
        if operation.state in (OperationState.INTENDED, OperationState.SENT):
            yield f"{operation.operation} ({operation.tool}) is left {operation.state}"
    for standing in played.standings:
        if standing.state is ConsentState.APPROVED or standing.due_seq is not None:
            yield f"the answer to {standing.consent.id} owes a turn"
    started = {row.turn for row in played.rows if isinstance(row.body, TurnStartBody)}
    ended = {row.turn for row in played.rows if isinstance(row.body, TurnEndBody)}
    yield from (f"{turn} never ended" for turn in sorted(map(str, started - ended)))


@invariant()
def the_runtime_never_fails(played: Played) -> Iterator[str]:
    """No owner of a session, no worker and no call of a client breaks off for a fault of the runtime's own."""
    yield from played.failed


INVARIANTS: tuple[Invariant, ...] = (
    no_acknowledged_input_lost,
    no_repeat_acted_on,
    no_effect_without_say_so,
    no_consent_used_twice,
    no_keyed_effect_twice,
    no_unkeyed_effect_resent,
    what_is_equal_is_taken_over,
    what_can_be_found_out_is,
    success_is_true,
    every_call_has_one_result,
    only_its_own_person_joins,
    a_stop_is_heard,
    one_turn_at_a_time,
    rows_are_gapless_and_once,
    every_listener_saw_the_same,
    one_writer_an_epoch,
    every_session_comes_to_rest,
    the_runtime_never_fails,
)
