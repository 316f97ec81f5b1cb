"""What a session's owner holds in memory: a fold of its rows, kept up row by row.

Loading reads the session row, the open questions, the open turn's rows and a bounded piece of the past
(K8); its cost does not grow with the length of the history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from sayso.core.canonical import canonical
from sayso.core.consent import ConsentState, Standing
from sayso.core.context import Context
from sayso.core.inputs import Fit
from sayso.core.operation import OperationState
from sayso.core.origin import Principal
from sayso.core.rows import (
    Called,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    InputBody,
    InputClassifiedBody,
    ModelCalledBody,
    Outcome,
    Row,
    SessionClosedBody,
    ToolResultBody,
    ToolSettledBody,
    TurnAskBody,
    TurnStartBody,
    pause_after,
)
from sayso.core.session import SessionRecord
from sayso.core.turn import Phase, Turn, advance, event_of, fold, start
from sayso.runtime.limits import Limits
from sayso.runtime.rules import Rules
from sayso.storage.store import OperationRow, Store


@dataclass(slots=True)
class Loaded:
    """One session as its owner knows it. `take` is the only thing that changes it."""

    id: str
    owner: Principal
    turns: int
    consents: int
    context: Context
    #: questions that are open, or whose answer still owes a turn
    standings: dict[str, Standing]
    turn: Turn | None = None
    turn_body: TurnStartBody | None = None
    #: when it began, by its first row
    turn_at_ms: int = 0
    #: operations that a call of the turn may take over, by id: each once (D3)
    reuse: dict[str, OperationRow] = field(default_factory=dict)
    #: older operations that calls of the turn have taken over
    taken: set[str] = field(default_factory=set)
    #: operations of which nobody knows what they did, by id: the tool and canonical arguments of each (K25)
    unsure: dict[str, tuple[str, str]] = field(default_factory=dict)
    #: how inputs that came in meanwhile fit the turn, by their place in the inbox (C3)
    fits: dict[int, Fit] = field(default_factory=dict)
    #: its last row is written: nothing comes in, and nothing goes on
    closed: bool = False

    def take(self, row: Row) -> None:
        """Take an accepted row into account."""
        self.context.add((row,))
        match row.body:
            case TurnStartBody() as body:
                assert row.turn is not None
                self.turns += 1
                self.turn, self.turn_body, self.turn_at_ms = start(row.turn, body), body, row.at_ms
                self.reuse = {id_: row for id_, row in self.reuse.items() if id_ in body.reuse}
                self.taken, self.fits = set(), {}
                if body.consent is not None:
                    self._owes_nothing(body.consent)
            case ModelCalledBody(calls=calls):
                self.taken |= _taken(calls)
                self.reuse = {id_: row for id_, row in self.reuse.items() if id_ not in self.taken}
            case ToolSettledBody(operation=id_, outcome=outcome):
                self.unsure.pop(id_, None)
                if id_ in self.reuse:
                    state = OperationState.ANSWERED if outcome is Outcome.OK else OperationState.FAILED
                    self.reuse[id_] = replace(self.reuse[id_], state=state)
            case ToolResultBody(operation=str() as id_, outcome=outcome) if self.turn is not None:
                self.unsure.pop(id_, None)
                if outcome is Outcome.UNKNOWN:
                    called = self.turn.find(row.body.call).called
                    self.unsure[id_] = (called.tool, canonical(called.arguments))
            case InputClassifiedBody() as body:
                self._classified(body)
            case InputBody() as body if self.turn is not None and row.turn == self.turn.id:
                assert self.turn_body is not None
                self.turn_body = _said_again(self.turn_body, body)
            case TurnAskBody(consent=consent):
                self.consents += 1
                self.standings[consent.id] = Standing(consent, ConsentState.OPEN, row.position)
            case ConsentApprovedBody() as body:
                self._settle(body.consent, row, ConsentState.APPROVED, body.by, body.received_at_ms, body.ticks)
            case ConsentDeclinedBody() as body:
                self._settle(body.consent, row, ConsentState.DECLINED, body.by, body.received_at_ms, None)
            case ConsentExpiredBody(consent=id_):
                self.standings[id_] = replace(self.standings[id_], state=ConsentState.EXPIRED)
            case ConsentWithdrawnBody(consent=id_):
                self.standings[id_] = replace(self.standings[id_], state=ConsentState.WITHDRAWN, due_seq=None)
            case SessionClosedBody():
                self.closed = True
            case ConsentUsedBody(consent=id_):
                self.standings[id_] = replace(self.standings[id_], state=ConsentState.USED)
            case _:
                pass
        self._advance(row)

    def _advance(self, row: Row) -> None:
        event = event_of(row) if self.turn is not None and row.turn == self.turn.id else None
        if self.turn is not None and event is not None:
            self.turn, _ = advance(self.turn, event)
            if self.turn.phase is Phase.ENDED:
                self.turn = None

    def _settle(
        self, consent: str, row: Row, state: ConsentState, by: str, at_ms: int, ticks: tuple[int, ...] | None
    ) -> None:
        self.standings[consent] = replace(
            self.standings[consent], state=state, answered_by=by, answered_at_ms=at_ms, ticks=ticks, due_seq=row.seq
        )

    def _classified(self, body: InputClassifiedBody) -> None:
        self.fits[body.n] = body.fit
        if body.consent is not None:
            answered_by = None if body.at_ms is None else body.by
            self.standings[body.consent] = replace(
                self.standings[body.consent],
                state=pause_after(body),
                answered_by=answered_by,
                answered_at_ms=body.at_ms,
            )

    def _owes_nothing(self, consent: str) -> None:
        """The turn that an answer owed has begun."""
        self.standings[consent] = replace(self.standings[consent], due_seq=None)

    def forget_settled(self) -> None:
        """Drop questions that nothing here needs any more. Called when all that was staged is durable: until
        then the store would still call them open."""
        running = self.turn.steps_of if self.turn is not None else None
        self.standings = {
            id_: standing
            for id_, standing in self.standings.items()
            if standing.state is ConsentState.OPEN or standing.due_seq is not None or id_ == running
        }

    @property
    def open_questions(self) -> list[Standing]:
        """The open questions, in the order they were asked."""
        return [s for s in self.standings.values() if s.state is ConsentState.OPEN]

    @property
    def owed(self) -> Standing | None:
        """The answer that owes a turn and came first (K13)."""
        owing = [s for s in self.standings.values() if s.due_seq is not None]
        return min(owing, key=lambda s: s.due_seq or 0, default=None)


def _said_again(turn: TurnStartBody, joined: InputBody) -> TurnStartBody:
    """Return a turn that an input joined: what it does from here on is done on what its own person said last (K14).
    What the runtime tells itself is nobody's say-so."""
    if joined.input.principal != turn.origin.principal:
        return turn
    return replace(turn, say_so_at_ms=joined.received_at_ms)


def _taken(calls: Sequence[Called]) -> set[str]:
    return {older for called in calls for older in (called.takes, called.again) if older is not None}


async def _reusable(store: Store, session: str, ids: Sequence[str]) -> dict[str, OperationRow]:
    found = [await store.operation(session, id_) for id_ in ids]
    return {row.operation: row for row in found if row is not None}


async def load(store: Store, record: SessionRecord, rules: Rules, limits: Limits) -> Loaded:
    """Return a claimed session as its rows describe it."""
    past = await store.last_rows(record.id, limit=limits.context_rows)
    context = Context(wrap=rules.labelled)
    context.add(past)
    states = (ConsentState.OPEN, ConsentState.APPROVED)
    standings = {s.consent.id: s for s in await store.standings(record.id, states=states, due=True)}
    loaded = Loaded(record.id, record.owner, record.turns, record.consents, context, standings)
    loaded.closed = record.closed_at_ms is not None
    unsure = await store.operations(record.id, states=(OperationState.UNKNOWN,))
    loaded.unsure = {row.operation: (row.tool, row.arguments) for row in unsure}
    if record.turn is not None and record.turn_seq is not None:
        rows = [r for r in past if r.seq >= record.turn_seq]
        if not rows or rows[0].seq > record.turn_seq:  # a turn longer than the window
            rows = await store.rows(record.id, after=record.turn_seq - 1)
        mine = tuple(r for r in rows if r.turn == record.turn)
        loaded.turn = fold(record.turn, mine)
        body, loaded.turn_at_ms = mine[0].body, mine[0].at_ms
        assert isinstance(body, TurnStartBody)
        loaded.turn_body = reduce(_said_again, (row.body for row in mine if isinstance(row.body, InputBody)), body)
        for row in mine:
            if isinstance(row.body, ModelCalledBody):
                loaded.taken |= _taken(row.body.calls)
            elif isinstance(row.body, InputClassifiedBody):
                loaded.fits[row.body.n] = row.body.fit
        loaded.reuse = await _reusable(store, record.id, [id_ for id_ in body.reuse if id_ not in loaded.taken])
        if body.consent is not None and body.continues is None:
            used = await store.standing(record.id, body.consent)
            if used is not None:
                loaded.standings[body.consent] = used
    return loaded
