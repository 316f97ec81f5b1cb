"""The owner's side of an inbox: what is settled at once, and what waits its turn.

An entry stays queued until the commit that takes it, so one that was looked at and not taken is simply
looked at again by the next owner.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

from sayso.core.consent import Consent, ConsentState, Replaced, Settled, Standing
from sayso.core.errors import StoreUnavailable
from sayso.core.inputs import Answer, Fit, InFlight, InputKind, Keep, Lane, ParticipantChange
from sayso.core.labels import USER, Part
from sayso.core.operation import OperationState, Ref
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.retry import delay_ms
from sayso.core.rows import (
    AnswerRefusedBody,
    ConflictSettledBody,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentWithdrawnBody,
    Draft,
    EffectGoneBody,
    InputBody,
    InputClassifiedBody,
    InputRetractedBody,
    InputSupersededBody,
    NoticeBody,
    ParticipantChangedBody,
    RequestRefusedBody,
    SessionChangedBody,
    SessionClosedBody,
    TurnStartBody,
    TurnStopBody,
    decode_arguments,
)
from sayso.core.turn import stopped_by
from sayso.journal.append import Journal
from sayso.runtime.compose import already, by_runtime, instant
from sayso.runtime.limits import Limits
from sayso.runtime.loaded import Loaded
from sayso.runtime.rules import Rules
from sayso.storage.store import InboxRow, OperationRow, RefRow, Store

P = ParamSpec("P")
T = TypeVar("T")
#: past every place of an inbox
ALL = 2**62
#: waits so many milliseconds
Sleep = Callable[[int], Coroutine[Any, Any, None]]


class Inbox:
    """One session's inbox, as its owner reads it."""

    def __init__(
        self,
        store: Store,
        loaded: Loaded,
        rules: Rules,
        limits: Limits,
        *,
        tail: int,
        sleep: Sleep,
        journal: Journal,
    ) -> None:
        """`tail` is the newest entry when the session was claimed: the first look sees all up to it that wait."""
        self._store, self._loaded, self._rules, self._limits = store, loaded, rules, limits
        self._sleep, self._journal = sleep, journal
        self._tail = tail
        #: the last entry looked at, taken or not: what a release compares with (K22)
        self.looked_to = 0
        self._waiting: deque[InboxRow] = deque()

    async def _read(self, read: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Read, and try again while the store can't be read: what was heard from outside and is not stored yet
        must not be lost for a read that failed, so the session stands still, as it does for a write."""
        attempt = 0
        while True:
            try:
                found = await read(*args, **kwargs)
            except StoreUnavailable as error:
                attempt += 1
                wait_ms = delay_ms(attempt, chance=random.random())  # noqa: S311 - jitter, no secret
                self._journal.unread(error, wait_ms=wait_ms)
                await self._sleep(wait_ms)
            else:
                self._journal.was_read()
                return found

    async def look(self) -> list[InboxRow]:
        """Read what is new. Return the entries of the control lane, in order of arrival, to be settled now;
        those of the normal lane wait for `next_turn`."""
        control = []
        while True:
            page = await self._read(
                self._store.inbox, self._loaded.id, after=self.looked_to, limit=self._limits.inbox_page
            )
            for entry in page:
                self.looked_to = entry.n
                match entry.lane:
                    case Lane.NORMAL:
                        self._waiting.append(entry)
                    case Lane.CONTROL:
                        control.append(entry)
            if len(page) < self._limits.inbox_page:
                self.looked_to = max(self.looked_to, self._tail)
                return control

    # the control lane

    async def settle(self, entry: InboxRow) -> list[Draft]:
        """Return the rows that settle an entry of the control lane, given what is known now."""
        received = entry.input
        if received.kind is InputKind.NOTICE:
            return [Draft(NoticeBody(received.parts, entry.n)), *await self._gone(entry)]
        if received.kind is InputKind.CHOICE:
            return _chosen(entry)
        if received.kind is InputKind.EXPIRY:
            return await self._expire(entry, received.consent or "")
        if received.participant is not None:
            return [Draft(await self._change(entry, received.participant))]
        if received.retracts is not None:
            return self._retract(entry, received.retracts)
        if received.settings is not None:
            new = received.settings
            return [Draft(SessionChangedBody(entry.n, str(received.principal), new.title, new.others))]
        assert received.answer is not None
        return await self._answer(entry, received.answer)

    async def _standing(self, consent: str) -> Standing | None:
        """Return a question as it stands; one that this owner does not hold, because another has asked it meanwhile or
        it was settled before, is read, and held from now on: whatever row settles it finds it there."""
        held = self._loaded.standings.get(consent)
        found = held or await self._read(self._store.standing, self._loaded.id, consent)
        if found is not None:
            self._loaded.standings.setdefault(consent, found)
        return found

    async def _expire(self, entry: InboxRow, consent: str) -> list[Draft]:
        standing = await self._standing(consent)
        if standing is not None and standing.state is ConsentState.OPEN:
            if standing.consent.pause is not None:
                return [self._unpaused(standing, Fit.INDEPENDENT, "nobody", entry)]
            return [Draft(ConsentExpiredBody(consent, entry.n))]
        why = f"the time of {consent} is over, and it was settled before"
        return [Draft(AnswerRefusedBody(entry.n, str(entry.input.principal), why, consent))]

    async def _answer(self, entry: InboxRow, answer: Answer) -> list[Draft]:
        """What an answer comes to: by the time it was received, and only once (B7 to B9)."""
        standing = await self._standing(answer.consent)
        assert standing is not None, "the door takes an answer to a stored question only (K12)"
        if standing.consent.pause is not None:
            return self._answer_pause(entry, standing, answer)
        by, id_ = str(entry.input.principal), answer.consent
        match self._rules.settle(standing, answer, received_at_ms=entry.received_at_ms):
            case Settled.APPROVED:
                ticks = answer.steps
                verified = entry.input.verified
                return [Draft(ConsentApprovedBody(id_, entry.n, by, entry.received_at_ms, verified, ticks))]
            case Settled.DECLINED:
                parts = (Part(answer.reason, by, USER, entry.input.verified),) if answer.reason else ()
                return [Draft(ConsentDeclinedBody(id_, entry.n, by, entry.received_at_ms, parts))]
            case Settled.LATE:
                why = f"{id_} expired at {instant(standing.consent.expires_at_ms)}; nothing was run"
                expired = [Draft(ConsentExpiredBody(id_, None))] if standing.state is ConsentState.OPEN else []
                return [*expired, Draft(AnswerRefusedBody(entry.n, by, why, id_))]
            case Settled.REPEATED:
                return [Draft(AnswerRefusedBody(entry.n, by, already(standing), id_))]

    def _answer_pause(self, entry: InboxRow, standing: Standing, answer: Answer) -> list[Draft]:
        """What the answer to a pause comes to: whether what she said belongs to the turn that waits for it (K23). Late,
        it is another matter."""
        by, id_ = str(entry.input.principal), standing.consent.id
        match self._rules.settle(standing, answer, received_at_ms=entry.received_at_ms):
            case Settled.APPROVED:
                return [self._unpaused(standing, Fit.ADDS, by, entry)]
            case Settled.DECLINED:
                return [self._unpaused(standing, Fit.INDEPENDENT, by, entry)]
            case Settled.LATE:
                why = f"{id_} expired at {instant(standing.consent.expires_at_ms)}; it waits for its own turn"
                open_ = standing.state is ConsentState.OPEN
                late = [self._unpaused(standing, Fit.INDEPENDENT, "nobody", None)] if open_ else []
                return [*late, Draft(AnswerRefusedBody(entry.n, by, why, id_))]
            case Settled.REPEATED:
                return [Draft(AnswerRefusedBody(entry.n, by, already(standing), id_))]

    def _unpaused(self, standing: Standing, fit: Fit, by: str, entry: InboxRow | None) -> Draft:
        consent = standing.consent
        assert consent.pause is not None
        n = None if entry is None else entry.n
        answered = entry is not None and entry.input.kind is InputKind.ANSWER
        at_ms = entry.received_at_ms if entry is not None and answered else None
        replies = self._loaded.turn.replies if self._loaded.turn is not None else 0
        return Draft(InputClassifiedBody(consent.pause, fit, by, replies, consent.id, n, at_ms), consent.turn)

    async def _change(self, entry: InboxRow, change: ParticipantChange) -> ParticipantChangedBody | RequestRefusedBody:
        """What becomes of who takes part. Whether it may be asked was looked at when it came in; how many take
        part is known here alone."""
        by, most = str(entry.input.principal), self._limits.participants
        others = [
            row
            for row in await self._read(self._store.participants, self._loaded.id)
            if row.principal != change.principal
        ]
        if change.role is not None and len(others) >= most:
            why = f"{change.principal} can't take part: {most} people do already, and no more may"
            return RequestRefusedBody(entry.n, by, why)
        return ParticipantChangedBody(entry.n, str(change.principal), change.role, by)

    def _retract(self, entry: InboxRow, n: int) -> list[Draft]:
        """Take back what its sender sent, if it still waits: this and the taking are settled here, one after the
        other, so it is either retracted or had its turn."""
        by = entry.input.principal
        mine = next((w for w in self._waiting if w.n == n and w.input.owner == by), None)
        if mine is None:
            why = f"input {n} can't be taken back: it doesn't wait any more"
            return [Draft(RequestRefusedBody(entry.n, str(by), why))]
        self._waiting.remove(mine)
        asked = [s.consent for s in self._loaded.open_questions if s.consent.pause == n]
        moot = [Draft(ConsentWithdrawnBody(consent.id, f"{by} took it back"), consent.turn) for consent in asked]
        return [*moot, Draft(InputRetractedBody(entry.n, n, str(by)))]

    def rejected(self, policy: Callable[[InboxRow], InFlight]) -> list[Draft]:
        """Return the rows of what the running turn's own person said while it ran, where that is to be refused. What
        she said before it began waits as it did; what a source says is never refused for being busy."""
        turn = self._loaded.turn
        busy = [entry for entry in self.said_meanwhile() if policy(entry) is InFlight.REJECT]
        if turn is None or not busy:
            return []
        self._take_out(busy)
        why = f"{turn.id} was running; say it again when it has ended"
        return [Draft(InputSupersededBody(waits.n, why)) for waits in busy]

    def said_meanwhile(self) -> list[InboxRow]:
        """Return what waits of the running turn's own person that came in while it ran."""
        since_ms = self._loaded.turn_at_ms
        return [w for w in self.own() if w.input.owner is not None and w.received_at_ms >= since_ms]

    def own(self) -> list[InboxRow]:
        """Return what waits of the running turn's own person, and what the runtime told itself: nothing else is ever
        looked at for that turn (C6)."""
        body = self._loaded.turn_body
        if self._loaded.turn is None or body is None:
            return []
        return [waits for waits in self._waiting if self._rules.may_join(waits.input, body.origin, self._loaded.id)]

    def _take_out(self, taken: Sequence[InboxRow]) -> None:
        self._waiting = deque(waits for waits in self._waiting if waits not in taken)

    async def done_in(self, turn: str) -> list[OperationRow]:
        """Return the turn's operations that may have done something: those that it began, and those it took over."""
        states = (OperationState.SENT, OperationState.ANSWERED, OperationState.UNKNOWN)
        found = await self._read(self._store.operations, self._loaded.id, states=states)
        return list(self._rules.reuse([row for row in found if row.turn == turn]))

    async def stands(self, operation: str) -> bool:
        """Whether what an operation did is there, or may be."""
        found = await self._read(self._store.operation, self._loaded.id, operation)
        return found is not None and found.state in (OperationState.ANSWERED, OperationState.UNKNOWN)

    def restarting(self, said: Sequence[InboxRow], turn: str, body: TurnStartBody) -> list[Draft]:
        """Take what was said meanwhile, and return the rows that begin a turn with it in place of another (C7)."""
        self._take_out(said)
        origin = replace(body.origin, inputs=(*body.origin.inputs, *(entry.n for entry in said)))
        begins = TurnStartBody(
            origin,
            steps_left=self._limits.steps_per_turn,
            about=body.about,
            replaced=body.replaced,
            say_so_at_ms=said[-1].received_at_ms,
            restarts=turn,
            reuse=tuple(self._loaded.reuse),
        )
        taken = [Draft(InputBody(e.n, e.source, e.event_id, e.received_at_ms, e.input)) for e in said]
        return [*taken, Draft(begins, f"T{self._loaded.turns + 1}")]

    def stop(self, entry: InboxRow) -> list[Draft]:
        """Return the rows of a stop (K24): of the running turn, with what its sender still has waiting; or, where the
        turn that it names has ended with a question, of that question. It is the turn's own person's to stop, the
        session's owner's, and an operator's."""
        received, turn = entry.input, self._loaded.turn
        by, named = received.principal, received.stops
        if turn is not None and named in (None, turn.id):
            assert self._loaded.turn_body is not None
            whose = self._loaded.turn_body.origin.principal
            if not self._may_stop(by, whose):
                return [Draft(RequestRefusedBody(entry.n, str(by), f"{turn.id} is {whose}'s to stop"))]
            if turn.stopped:
                return [Draft(RequestRefusedBody(entry.n, str(by), f"{turn.id} is being stopped already"))]
            stops = Draft(TurnStopBody(entry.n, str(by), entry.received_at_ms), turn.id)
            return [stops, *self._moot(turn.id, by), *self._taken_back(entry)]
        asked = [s for s in self._loaded.open_questions if s.consent.turn == named]
        if not asked:
            why = f"{named} does not run" if named is not None else "no turn runs"
            return [Draft(RequestRefusedBody(entry.n, str(by), why))]
        if not self._may_stop(by, asked[0].consent.origin.principal):
            why = f"{named} is {asked[0].consent.origin.principal}'s to stop"
            return [Draft(RequestRefusedBody(entry.n, str(by), why))]
        told = f"{by} stopped {named}; its question is withdrawn"
        return [*self._moot(named or "", by), *self._taken_back(entry), Draft(NoticeBody((by_runtime(told),), entry.n))]

    def _may_stop(self, by: Principal, whose: Principal) -> bool:
        return by in (whose, self._loaded.owner) or by.kind is PrincipalKind.OPERATOR

    def _moot(self, turn: str, by: Principal) -> list[Draft]:
        """Withdraw what a turn has asked: its answer would start what was stopped."""
        asked = [s.consent.id for s in self._loaded.open_questions if s.consent.turn == turn]
        return [Draft(ConsentWithdrawnBody(id_, stopped_by(str(by)))) for id_ in asked]

    def own_question(self) -> tuple[InboxRow, Consent] | None:
        """Return the message that waits longest and the newest question of its sender's own turn that waits for her,
        if there is one: what she says may change what was asked."""
        if not self._waiting or self._waiting[0].input.kind is not InputKind.MESSAGE:
            return None
        entry = self._waiting[0]
        asked = [s.consent for s in self._loaded.open_questions if s.consent.plans]
        own = [c for c in asked if c.origin.principal == entry.input.principal and c.origin.is_user]
        return (entry, own[-1]) if own else None

    async def instead(self, asked: Consent) -> list[Draft]:
        """Take the message that waits longest, and return the rows that begin its turn in place of the one that asked:
        the question is withdrawn, and what was done may be taken over."""
        entry = self._waiting.popleft()
        done = await self.done_in(asked.turn)
        origin = replace(asked.origin, inputs=(*asked.origin.inputs, entry.n))
        begins = TurnStartBody(
            origin,
            steps_left=self._limits.steps_per_turn,
            about=asked.about,
            replaced=await self.replaced(asked.about),
            say_so_at_ms=entry.received_at_ms,
            restarts=asked.turn,
            reuse=tuple(row.operation for row in done),
        )
        self._loaded.reuse = {row.operation: row for row in done}
        why = f"{entry.input.principal} said more: what it was about is planned again"
        taken = InputBody(entry.n, entry.source, entry.event_id, entry.received_at_ms, entry.input)
        withdrawn = Draft(ConsentWithdrawnBody(asked.id, why))
        return [withdrawn, Draft(taken), Draft(begins, f"T{self._loaded.turns + 1}")]

    def moot_pause(self) -> list[Draft]:
        """Withdraw the question of a turn that waits for it and ends."""
        paused = self._loaded.turn.paused if self._loaded.turn is not None else None
        asked = [s.consent.id for s in self._loaded.open_questions if s.consent.id == paused]
        return [Draft(ConsentWithdrawnBody(id_, "its turn is over")) for id_ in asked]

    def _taken_back(self, entry: InboxRow) -> list[Draft]:
        """Let what the sender of a stop said before it, and nobody has looked at, go with it."""
        by = entry.input.principal
        mine = [waits for waits in self._waiting if waits.n < entry.n and waits.input.owner == by]
        self._take_out(mine)
        return [Draft(InputSupersededBody(waits.n, stopped_by(str(by)))) for waits in mine]

    def closing(self, entry: InboxRow, why: str) -> list[Draft]:
        """Return the last rows of a session: open questions and unused answers are withdrawn, what waits is not
        acted on."""
        moot = [s for s in self._loaded.standings.values() if s.state in (ConsentState.OPEN, ConsentState.APPROVED)]
        waiting, self._waiting = self._waiting, deque()
        self.looked_to = ALL  # what still comes in before the last row is taken by it
        return [
            *(Draft(ConsentWithdrawnBody(standing.consent.id, why)) for standing in moot),
            *(Draft(InputSupersededBody(left.n, why)) for left in waiting),
            Draft(SessionClosedBody(entry.n, str(entry.input.principal), entry.received_at_ms)),
        ]

    # the normal lane

    @property
    def waiting(self) -> int:
        """How many inputs wait for their turn, as far as this owner has looked."""
        return len(self._waiting)

    def _together(self) -> list[InboxRow]:
        """Return what waits longest, with what else the same person said right after it."""
        first, found = self._waiting[0], []
        for entry in self._waiting:
            more = entry.input.kind is InputKind.MESSAGE and entry.input.owner is not None
            if entry is not first and not (more and entry.input.principal == first.input.principal):
                break
            found.append(entry)
            if first.input.kind is not InputKind.MESSAGE:
                break
        return found

    def quiet_at_ms(self, debounce_ms: int) -> int:
        """Return when what waits longest may start its turn: its sender has said nothing more for so long, or has gone
        on for ten times as long."""
        if not self._waiting or self._waiting[0].input.kind is not InputKind.MESSAGE or debounce_ms <= 0:
            return 0
        said = self._together()
        return min(said[-1].received_at_ms + debounce_ms, said[0].received_at_ms + 10 * debounce_ms)

    async def next_turn(self, *, together: bool = False) -> list[Draft]:
        """Take the entry that waits longest, and return the rows that begin its turn; none if none waits. With
        `together`, what its sender said right after it is part of the same turn."""
        if not self._waiting:
            return []
        entries = self._together() if together else [self._waiting[0]]
        self._take_out(entries)
        entry, received = entries[0], entries[0].input
        taken = [Draft(InputBody(e.n, e.source, e.event_id, e.received_at_ms, e.input)) for e in entries]
        if received.kind is InputKind.UNCLEAR:
            return [*taken, Draft(NoticeBody((by_runtime(self._which()),)))]
        gone = await self._gone(entry)
        origin = Origin(received.principal, received.verified, tuple(entry.n for entry in entries))
        begins = TurnStartBody(
            origin,
            steps_left=self._limits.steps_per_turn,
            about=received.about,
            replaced=await self.replaced(received.about),
            say_so_at_ms=entries[-1].received_at_ms,
        )
        return [*taken, *gone, Draft(begins, f"T{self._loaded.turns + 1}")]

    def adding(self, fit: Callable[[InboxRow], Fit | None]) -> list[InboxRow]:
        """Return what waits and may join the running turn now: what belongs to it, of its own user and of what the
        runtime told itself. Nothing of anybody else, and no word about it either (C6); and nothing that would
        overtake what its own sender said before and may still join: only another matter is overtaken."""
        body = self._loaded.turn_body
        found, passed = [], set[Principal]()
        for entry in self._waiting:
            own = body is not None and self._rules.may_join(entry.input, body.origin, self._loaded.id)
            fits = fit(entry) if own else None
            if fits is Fit.ADDS and entry.input.principal not in passed:
                found.append(entry)
            elif fits is not Fit.INDEPENDENT:
                passed.add(entry.input.principal)
        return found

    def joining(self, adding: Sequence[InboxRow], turn: str) -> list[Draft]:
        """Take what joins a turn, and return its rows."""
        self._take_out(adding)
        return [
            Draft(InputBody(entry.n, entry.source, entry.event_id, entry.received_at_ms, entry.input), turn)
            for entry in adding
        ]

    def _which(self) -> str:
        """The runtime's question back, where a bare yes or no fits no question or several (K20)."""
        questions = [standing.consent.question.text for standing in self._loaded.open_questions]
        if not questions:
            return "Nothing waits for your answer any more."
        return "Which one do you mean? Answer it by its card or id. " + " ".join(questions)

    # what an event names

    async def _gone(self, entry: InboxRow) -> list[Draft]:
        """Return the rows that mark as gone what the source says no longer exists (A13), and withdraw the
        questions of other origins about it (K18)."""
        if not entry.input.gone:
            return []
        live = [row for row in await self._refs(entry.input.about) if row.state == "live"]
        by, told = entry.input.principal.id, set[str]()
        rows = []
        for row in live:
            operation = await self._answered(row, told)
            rows.append(Draft(EffectGoneBody(row.ref, by, entry.n, operation)))
        names = {row.ref for row in live}
        moot = [s for s in self._loaded.open_questions if names & set(s.consent.about)]
        return rows + [Draft(ConsentWithdrawnBody(s.consent.id, f"what it is about is gone, {by} says")) for s in moot]

    async def _refs(self, about: Sequence[Ref]) -> list[RefRow]:
        if not about:
            return []
        rows = await self._read(self._store.refs, about[0].source, about)
        return [row for row in rows if row.session == self._loaded.id]

    async def _answered(self, row: RefRow, told: set[str]) -> str | None:
        """Return the operation that made a thing, if it stands and was not told of yet: only that can be gone."""
        if row.operation is None or row.operation in told:
            return None
        told.add(row.operation)
        found = await self._read(self._store.operation, self._loaded.id, row.operation)
        return row.operation if found is not None and found.state is OperationState.ANSWERED else None

    async def replaced(self, about: Sequence[Ref]) -> tuple[Replaced, ...]:
        """Return, for each tool, the newest operation that made a thing which `about` names (K31)."""
        newest: dict[str, Replaced] = {}
        for row in sorted(await self._refs(about), key=lambda row: row.seq):
            if row.operation is None:
                continue
            found = await self._read(self._store.operation, self._loaded.id, row.operation)
            if found is not None:
                newest[found.tool] = Replaced(found.tool, decode_arguments(found.arguments))
        return tuple(newest.values())


def _chosen(entry: InboxRow) -> list[Draft]:
    """Return the rows of an operator's choice (K7): what it was, and, where ours are kept, their words again. They
    are notices, with the labels that they had: nothing acts on them."""
    choice, by = entry.input.choice, str(entry.input.principal)
    assert choice is not None
    if choice.keep is Keep.STORED:
        lines = tuple(row.line for row in choice.ours)
        return [Draft(ConflictSettledBody(entry.n, by, choice.keep, choice.from_seq, lines))]
    again = [Draft(NoticeBody(row.parts)) for row in choice.ours]
    return [Draft(ConflictSettledBody(entry.n, by, choice.keep, choice.from_seq)), *again]
