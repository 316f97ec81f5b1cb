"""Something broken for each invariant of the simulator, which it must find: a rule that is not kept, a store that
breaks its promise, an agent or its other side that does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.authority import Decision
from sayso.core.errors import IllegalChange
from sayso.core.inputs import InFlight, InputKind
from sayso.core.labels import RUNTIME, Part
from sayso.core.rows import Kind, ModelSaidBody, NoticeBody, Row
from sayso.core.session import SessionState, Token
from sayso.runtime.rules import RULES, Rules
from sayso.storage.memory import MemoryStore
from sayso.storage.store import Entry, Put, PutOutcome, Store, WriteOutcome
from sayso.testing.ablations import ABLATIONS
from sayso.testing.ledger import Ledger
from sayso.testing.simulation import Simulation
from sayso.testing.simulation.workshop import CAST, workshop
from sayso.testing.stores import StoreAround

#: what a row says that was read wrongly
_GARBLED = NoticeBody((Part("?", "runtime", RUNTIME, "runtime"),))


class Forgetful(StoreAround):
    """Says of each fifth message that it is stored, and has forgotten it."""

    def __init__(self, inside: Store) -> None:
        super().__init__(inside)
        self._count = count(1)

    async def put(self, entry: Entry) -> Put:
        if entry.input.kind is InputKind.MESSAGE and next(self._count) % 5 == 0:
            return Put(PutOutcome.STORED, entry.session, None, self.inside.now_ms(), 0)
        return await self.inside.put(entry)


class Reading(StoreAround):
    """Reads its rows otherwise than they were written."""

    def otherwise(self, row: Row) -> Row | None:
        """Return the row as it is read; None where it is not."""
        raise NotImplementedError

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> list[Row]:
        found = await self.inside.rows(session, after=after, up_to=up_to, limit=limit)
        return [read for row in found if (read := self.otherwise(row)) is not None]


class WithoutResults(Reading):
    """Loses the results of one tool."""

    def otherwise(self, row: Row) -> Row | None:
        lost = row.kind is Kind.TOOL_RESULT and row.seq % 3 == 0
        return replace(row, body=_GARBLED) if lost else row


class WithoutEnds(Reading):
    """Does not know that a turn has ended."""

    def otherwise(self, row: Row) -> Row | None:
        return replace(row, body=_GARBLED) if row.kind is Kind.TURN_END else row


class WithGaps(Reading):
    """Loses each tenth row."""

    def otherwise(self, row: Row) -> Row | None:
        return row if row.seq % 10 else None


class OtherWords(StoreAround):
    """Stores other words than the ones that were shown."""

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        return await self.inside.write(token, [_in_other_words(row) for row in rows], blobs=blobs)


def _in_other_words(row: Row) -> Row:
    if not isinstance(row.body, ModelSaidBody) or not row.body.parts:
        return row
    return replace(row, body=replace(row.body, parts=(replace(row.body.parts[0], text="Something else."),)))


class Unfenced(Reading):
    """Lets an owner write that was taken over from, behind what its heir has written."""

    def __init__(self, inside: Store) -> None:
        super().__init__(inside)
        #: the epochs of such rows, by number
        self._epochs: dict[int, int] = {}

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        outcome = await self.inside.write(token, rows, blobs=blobs)
        record = await self.inside.session(token.session)
        if outcome is not WriteOutcome.FENCED or record is None or record.state is not SessionState.OWNED:
            return outcome
        heir = Token(token.session, record.epoch, record.nonce)
        numbers = range(record.head + 1, record.head + 1 + len(rows))
        moved = [
            replace(row, seq=seq, epoch=heir.epoch, commit_key=heir.commit_key(seq))
            for seq, row in zip(numbers, rows, strict=True)
        ]
        try:
            outcome = await self.inside.write(heir, moved, blobs=blobs)
        except IllegalChange:
            return WriteOutcome.FENCED
        self._epochs |= dict.fromkeys(numbers, token.epoch)
        return outcome

    def otherwise(self, row: Row) -> Row:
        return replace(row, epoch=self._epochs.get(row.seq, row.epoch))


class NeverFreed(StoreAround):
    """Does not free the sessions of a process that has ended."""

    async def register(self, node: str) -> int:
        return 0


class Careless(Ledger):
    """A service that recognises no repeat."""

    def once(self, name: str, *, key: str, what: str = "") -> bool:
        self.enter(name, key=key, what=what)
        return True


class Repeating(Ledger):
    """A client library that sends each third request twice, to be sure."""

    def enter(self, name: str, *, key: str, what: str = "") -> None:
        super().enter(name, key=key, what=what)
        if len(self.deeds) % 3 == 0:
            super().enter(name, key=key, what=what)


class Lazy(Ledger):
    """A service that says yes to each second request, and does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._asked = count(1)

    def once(self, name: str, *, key: str, what: str = "") -> bool:
        return next(self._asked) % 2 == 0 or super().once(name, key=key, what=what)


def _no_decision(*_: Any, **__: Any) -> Decision:
    raise ZeroDivisionError


@dataclass(frozen=True)
class Broken:
    """What is broken, and the invariant that finds it."""

    invariant: str
    about: str
    rules: Rules = RULES
    store: Callable[[Store], Store] = field(default=lambda store: store)
    world: Callable[[], Ledger] = Ledger
    in_flight: InFlight = InFlight.QUEUE

    @asynccontextmanager
    async def opened(self, now_ms: Callable[[], int]) -> AsyncIterator[Store]:
        """Open the broken store."""
        yield self.store(MemoryStore(clock=now_ms))


_BY_ROLE, _REUSABLE, _NO_EXPIRY, _NO_DEDUPE = (
    ABLATIONS[name] for name in ("authority-by-role", "consent-reusable", "consent-without-expiry", "no-dedupe")
)

_KEYS = [ABLATIONS[name] for name in ("key-by-turn", "key-by-step", "key-by-attempt")]
_AGAIN, _FORGETS, _NOT_ASKED = (
    ABLATIONS[name] for name in ("sent-again-silently", "nothing-taken-over", "never-looked-up")
)
_ANYBODY, _ADDS, _STOPS = (
    ABLATIONS[name] for name in ("merged-whoever-says-it", "all-of-it-adds", "stop-waits-its-turn")
)

BROKEN = (
    Broken("no_acknowledged_input_lost", "acknowledged, not stored", store=lambda store: Forgetful(store).store),
    Broken("no_repeat_acted_on", _NO_DEDUPE.about, store=_NO_DEDUPE.store),
    Broken("no_effect_without_say_so", _BY_ROLE.about, rules=_BY_ROLE.rules),
    Broken("no_effect_without_say_so", _NO_EXPIRY.about, rules=_NO_EXPIRY.rules, store=_NO_EXPIRY.store),
    Broken("no_consent_used_twice", _REUSABLE.about, rules=_REUSABLE.rules, store=_REUSABLE.store),
    Broken("no_keyed_effect_twice", "the other side recognises no key", world=Careless),
    Broken("no_unkeyed_effect_resent", "a client library repeats requests", world=Repeating),
    *(Broken("no_keyed_effect_twice", a.about, rules=a.rules, in_flight=InFlight.RESTART) for a in _KEYS),
    Broken("no_unkeyed_effect_resent", _AGAIN.about, rules=_AGAIN.rules),
    Broken("what_is_equal_is_taken_over", _FORGETS.about, rules=_FORGETS.rules, in_flight=InFlight.RESTART),
    Broken("what_can_be_found_out_is", _NOT_ASKED.about, rules=_NOT_ASKED.rules),
    Broken("only_its_own_person_joins", _ANYBODY.about, rules=_ANYBODY.rules, in_flight=InFlight.MERGE),
    Broken("what_the_classifier_says_counts", _ADDS.about, rules=_ADDS.rules, in_flight=InFlight.MERGE),
    Broken("a_stop_is_heard", _STOPS.about, store=_STOPS.store),
    Broken("success_is_true", "the other side says yes and does nothing", world=Lazy),
    Broken("every_call_has_one_result", "results are lost", store=lambda store: WithoutResults(store).store),
    Broken("one_turn_at_a_time", "a turn's end is lost", store=lambda store: WithoutEnds(store).store),
    Broken("rows_are_gapless_and_once", "rows are lost", store=lambda store: WithGaps(store).store),
    Broken("every_listener_saw_the_same", "shown so, stored otherwise", store=lambda store: OtherWords(store).store),
    Broken("one_writer_an_epoch", "a lost owner is not fenced", store=lambda store: Unfenced(store).store),
    Broken("every_session_comes_to_rest", "nobody's session stays so", store=lambda store: NeverFreed(store).store),
    Broken("the_runtime_never_fails", "a decision raises", rules=replace(RULES, decide=_no_decision)),
)


def careless(**options: Any) -> Simulation[Ledger]:
    """Return a simulation that fails, for the command line."""
    return Simulation(workshop, CAST, world=Careless, name="careless", **options)
