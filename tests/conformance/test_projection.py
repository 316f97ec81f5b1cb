"""Can what rows have changed be rebuilt from the rows alone?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sayso.core.consent import ConsentState
from sayso.core.operation import OperationState, Ref
from sayso.core.rows import (
    Body,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    EffectGoneBody,
    Ending,
    InputRetractedBody,
    InputSupersededBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    RequestRefusedBody,
    Row,
    SessionChangedBody,
    SessionClosedBody,
    Table,
    ToolIntendedBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
)
from sayso.core.session import Others, SessionRole, Token
from sayso.storage.store import Store, WriteOutcome
from tests.conformance.conftest import OPENERS
from tests.conformance.given import (
    ALICE,
    NOON,
    Clock,
    blobs,
    called,
    consent,
    hook,
    planned,
    quick_folder,
    result,
    rows,
    sent,
    sha,
    staged,
    started,
    taken,
)

INPUTS = 6
#: files that inputs came with, by place
CAME_WITH = {2: (b"plan", b""), 5: (b"plan",)}
FILES = (b"plan", b"", b"photo")
UNSETTLED = (OperationState.SENT, OperationState.UNKNOWN)
AFTER = {
    Outcome.OK: OperationState.ANSWERED,
    Outcome.FAILED: OperationState.FAILED,
    Outcome.UNKNOWN: OperationState.UNKNOWN,
}


@dataclass
class Life:
    """What a session's next row may be. It knows the rules, and nothing of how a store keeps them."""

    queued: list[int] = field(default_factory=lambda: list(range(1, INPUTS + 1)))
    turns: int = 0
    in_turn: bool = False
    #: open calls, and the operation of each that has one
    calls: dict[str, str | None] = field(default_factory=dict)
    made_calls: int = 0
    operations: dict[str, OperationState] = field(default_factory=dict)
    attempts: dict[str, int] = field(default_factory=dict)
    consents: dict[str, ConsentState] = field(default_factory=dict)
    people: set[str] = field(default_factory=set)
    #: live things, and what made them
    refs: dict[Ref, str | None] = field(default_factory=dict)

    def moves(self) -> list[str]:
        """Return what may happen next, by name."""
        may = {
            "say": True,
            "take": bool(self.queued),
            "notice": bool(self.queued),
            "start": not self.in_turn,
            "end": self.in_turn and not self.calls,
            "call": self.in_turn,
            "ask": self.in_turn,
            "intend": None in self.calls.values(),
            "send": None in self.calls.values() or bool(self._out(OperationState.INTENDED, *UNSETTLED)),
            "give up": bool(self._out(*UNSETTLED)),
            "settle": bool(self.calls),
            "answer": bool(self.queued) and ConsentState.OPEN in self.consents.values(),
            "expire": ConsentState.OPEN in self.consents.values(),
            "withdraw": bool({ConsentState.OPEN, ConsentState.APPROVED} & set(self.consents.values())),
            "use": ConsentState.APPROVED in self.consents.values(),
            "gone": bool(self.refs),
            "invite": bool(self.queued),
            "remove": bool(self.queued) and bool(self.people),
            "refuse": bool(self.queued),
            "set": bool(self.queued),
            "retract": len(self.queued) > 1,
            "close": bool(self.queued),
            "supersede": bool(self.queued),
        }
        return [name for name, allowed in may.items() if allowed]

    def _out(self, *states: OperationState) -> list[str]:
        """Return the operations in these states whose call has no result yet."""
        return [o for o in self.calls.values() if o is not None and self.operations[o] in states]

    def live(self, draw: st.DrawFn, move: str) -> Body:
        """Return the row of one move, and live on after it."""
        match move:
            case "take":
                n = self.queued.pop(0)
                return taken(n, files=CAME_WITH.get(n, ()))
            case "notice":
                return NoticeBody((), self.queued.pop(draw(st.integers(0, len(self.queued) - 1))))
            case "start":
                self.in_turn, self.turns = True, self.turns + 1
                due = [name for name, state in self.consents.items() if state is ConsentState.USED]
                return started(consent=draw(st.sampled_from([None, *due])))
            case "end":
                self.in_turn = False
                return TurnEndBody(draw(st.sampled_from(Ending)))
            case "call":
                names = [f"T{self.turns}.{self.made_calls + i}" for i in range(draw(st.integers(1, 3)))]
                self.made_calls += len(names)
                self.calls |= dict.fromkeys(names)
                return planned(*(called(name) for name in names))
            case "ask" | "answer" | "expire" | "withdraw" | "use":
                return self._consent(draw, move)
            case "invite" | "remove" | "refuse" | "set" | "retract" | "close" | "supersede":
                return self._people(draw, move)
            case "intend" | "send" | "give up" | "settle" | "gone":
                return self._operation(draw, move)
            case _:
                return ModelSaidBody(self.turns, ())

    def _consent(self, draw: st.DrawFn, move: str) -> Body:
        def one(*states: ConsentState) -> str:
            return draw(st.sampled_from([name for name, state in self.consents.items() if state in states]))

        match move:
            case "ask":
                name = f"A{len(self.consents) + 1}"
                self.consents[name] = ConsentState.OPEN
                return TurnAskBody(consent(name))
            case "answer":
                name, n, yes = one(ConsentState.OPEN), self.queued.pop(), draw(st.booleans())
                self.consents[name] = ConsentState.APPROVED if yes else ConsentState.DECLINED
                if yes:
                    ticks = draw(st.sampled_from([None, (0,), (0, 1)]))
                    return ConsentApprovedBody(name, n, "user:alice", NOON, "api token", ticks)
                return ConsentDeclinedBody(name, n, "user:alice", NOON)
            case "expire":
                name = one(ConsentState.OPEN)
                self.consents[name] = ConsentState.EXPIRED
                return ConsentExpiredBody(name, None)
            case "withdraw":
                name = one(ConsentState.OPEN, ConsentState.APPROVED)
                self.consents[name] = ConsentState.WITHDRAWN
                return ConsentWithdrawnBody(name, "a newer question")
            case _:
                name = one(ConsentState.APPROVED)
                self.consents[name] = ConsentState.USED
                return ConsentUsedBody(name, f"T{self.turns + 1}")

    def _people(self, draw: st.DrawFn, move: str) -> Body:
        n = self.queued.pop(0)
        if move == "close":
            self.queued.clear()  # what waits is taken by that row
            return SessionClosedBody(n, "user:alice", NOON)
        if move == "supersede":
            return InputSupersededBody(n, "its subject is moot")
        if move == "set":
            title, others = draw(st.sampled_from([None, "Friday"])), draw(st.sampled_from(Others))
            return SessionChangedBody(n, "user:alice", title, others)
        if move == "retract":
            return InputRetractedBody(n, self.queued.pop(0), "user:alice")
        if move == "refuse":
            return RequestRefusedBody(n, "user:alice", "no more may")
        if move == "remove":
            gone = draw(st.sampled_from(sorted(self.people)))
            self.people.discard(gone)
            return ParticipantChangedBody(n, gone, None, gone)
        whom = draw(st.sampled_from(["user:bob", "user:carol"]))
        self.people.add(whom)
        role = draw(st.sampled_from([SessionRole.MEMBER, SessionRole.VIEWER]))
        return ParticipantChangedBody(n, whom, role, "user:alice")

    def _operation(self, draw: st.DrawFn, move: str) -> Body:
        call_of = {operation: call for call, operation in self.calls.items() if operation is not None}
        if move == "gone":
            ref = draw(st.sampled_from(list(self.refs)))
            return self._gone(ref, self.refs.pop(ref))
        if move == "settle":
            return self._settle(draw, draw(st.sampled_from(list(self.calls))))
        if move == "give up":
            operation = draw(st.sampled_from(self._out(*UNSETTLED)))
            self.operations[operation] = OperationState.UNKNOWN
            return ToolUnknownBody(operation, call_of[operation], "book", "no answer")
        without = [call for call, operation in self.calls.items() if operation is None]
        again = self._out(OperationState.INTENDED, *UNSETTLED)
        if move == "send" and again and (not without or draw(st.booleans())):
            operation = draw(st.sampled_from(again))
            self.operations[operation] = OperationState.SENT
            self.attempts[operation] += 1
            return sent(operation, call=call_of[operation], attempt=self.attempts[operation], intended=True)
        call, operation = draw(st.sampled_from(without)), f"O{len(self.operations) + 1}"
        self.calls[call], self.attempts[operation] = operation, int(move == "send")
        self.operations[operation] = OperationState.SENT if move == "send" else OperationState.INTENDED
        if move == "send":
            return sent(operation, call=call)
        return ToolIntendedBody(operation, call, "book", f"s1:{operation}", sha(operation))

    def _settle(self, draw: st.DrawFn, call: str) -> Body:
        operation = self.calls.pop(call)
        if operation is None:
            return result(call, outcome=draw(st.sampled_from([Outcome.OK, Outcome.REFUSED, Outcome.WAITING])))
        if self.operations[operation] is OperationState.INTENDED:
            self.operations[operation] = OperationState.NOT_STARTED
            return result(call, outcome=Outcome.NOT_STARTED, operation=operation)
        outcome = draw(st.sampled_from([Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN]))
        self.operations[operation] = AFTER[outcome]
        made = []
        if outcome is Outcome.OK:
            made = [Ref("restaurant", "reservation", draw(st.sampled_from(["R1", "R2"])))]
            self.refs[made[0]] = operation
        files = draw(st.lists(st.sampled_from(FILES), max_size=2))
        return result(call, outcome=outcome, operation=operation, made=made, files=files)

    def _gone(self, ref: Ref, operation: str | None) -> Body:
        if operation is None or self.operations[operation] is not OperationState.ANSWERED:
            return EffectGoneBody(ref, "source:restaurant", 1)
        self.operations[operation] = OperationState.GONE
        return EffectGoneBody(ref, "source:restaurant", 1, operation)


@dataclass(frozen=True)
class Commit:
    """Rows written together, and whether another owner writes them."""

    turn: str
    bodies: tuple[Body, ...]
    taken_over: bool


@st.composite
def lives(draw: st.DrawFn) -> list[Commit]:
    """Return the commits of a random legal life."""
    life, commits = Life(), []
    for _ in range(draw(st.integers(1, 12))):
        bodies = tuple(life.live(draw, draw(st.sampled_from(life.moves()))) for _ in range(draw(st.integers(1, 5))))
        commits.append(Commit(f"T{max(1, life.turns)}", bodies, draw(st.integers(0, 4)) == 0))
    return commits


async def born(store: Store) -> Token:
    """Store a session with all its inputs, and own it."""
    await store.create_session("s1", owner=ALICE, title="")
    for n in range(1, INPUTS + 1):
        uploads = [f"u{n}.{place}" for place, _ in enumerate(CAME_WITH.get(n, ()))]
        for upload, data in zip(uploads, CAME_WITH.get(n, ()), strict=True):
            await staged(store, upload, data)
        await store.put(replace(hook(f"evt_{n}"), uploads=tuple(uploads)))
    return (await store.claim("n1", at_most=1))[0].token


async def taken_over(store: Store, token: Token) -> Token:
    """Return the next owner's right."""
    await store.surrender(token)
    return (await store.claim("n2", at_most=1))[0].token


async def lived(store: Store, commits: list[Commit]) -> list[Row]:
    """Write a life commit by commit, and return its rows as they are stored."""
    token, head = await born(store), 0
    for commit in commits:
        if commit.taken_over:
            token = await taken_over(store, token)
        written = rows(token, head, *commit.bodies, turn=commit.turn, at_ms=NOON + head)
        assert await store.write(token, written, blobs=blobs(*FILES)) is WriteOutcome.WRITTEN
        head += len(written)
    return await store.rows("s1")


async def rebuilt(store: Store, journal: list[Row]) -> None:
    """Write stored rows into an empty store: all of an epoch at once, whatever their commits were."""
    token = await born(store)
    for epoch, of_epoch in groupby(journal, key=lambda row: row.epoch):
        while token.epoch < epoch:
            token = await taken_over(store, token)
        again = [Row(row.seq, epoch, row.turn, token.commit_key(row.seq), row.at_ms, row.body) for row in of_epoch]
        assert await store.write(token, again, blobs=blobs(*FILES)) is WriteOutcome.WRITTEN


@pytest.mark.parametrize("kind", [kind for kind in OPENERS if kind != "postgres"])
@given(commits=lives())
async def test_side_tables_follow_from_the_rows_alone(kind: str, commits: list[Commit]) -> None:
    await follow(kind, commits)


@settings(max_examples=max(1, settings().max_examples // 5))
@given(commits=lives())
async def test_side_tables_follow_from_the_rows_alone_on_postgresql(commits: list[Commit]) -> None:
    """A fifth of the lives must do: two schemas are made and dropped for each."""
    await follow("postgres", commits)


async def follow(kind: str, commits: list[Commit]) -> None:
    with quick_folder() as here, quick_folder() as there:
        async with (
            OPENERS[kind](Path(here), Clock(), 100, 100) as first,
            OPENERS[kind](Path(there), Clock(), 100, 100) as second,
        ):
            journal = await lived(first, commits)
            await rebuilt(second, journal)

            assert len(journal) == sum(len(commit.bodies) for commit in commits)
            assert await second.side_tables("s1") == await first.side_tables("s1")
            assert await second.blobs() == await first.blobs()
            assert len((await first.side_tables("s1"))[Table.INBOX]) == INPUTS
