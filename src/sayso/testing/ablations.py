"""Each rule, broken on purpose (E3). Production code has no switch for any of this: a demo or a test hands the
runtime another value of `Rules`, or puts a part that breaks its promise in front of the store or a source."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sayso.core import consent as consents
from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.authority import Decision, decide
from sayso.core.canonical import canonical
from sayso.core.consent import Consent, ConsentState, Question, Settled, Standing, Step
from sayso.core.errors import StoreUnavailable
from sayso.core.inputs import Answer, Fit, Input, InputKind
from sayso.core.labels import Part
from sayso.core.operation import Settlement, settlement
from sayso.core.origin import Origin, Principal
from sayso.core.rows import Called, ConsentApprovedBody, Row, Table
from sayso.core.session import SessionRole, Token
from sayso.core.turn import Turn
from sayso.runtime.ports import RawRequest, Refusal, Scheme, Verified
from sayso.runtime.rules import RULES, Rules
from sayso.storage.memory import MemoryStore
from sayso.storage.store import Entry, Fired, InboxRow, OperationRow, Put, PutOutcome, Store, WriteOutcome
from sayso.testing.stores import StoreAround


def _same_store(store: Store) -> Store:
    return store


def _same_scheme(scheme: Scheme) -> Scheme:
    return scheme


@dataclass(frozen=True, slots=True)
class Ablation:
    """A rule taken away: which, how, and the harm that then happens."""

    name: str
    rule: str
    #: what is broken
    about: str
    #: what then happened, in one line
    harm: str
    rules: Rules = RULES
    store: Callable[[Store], Store] = _same_store
    scheme: Callable[[Scheme], Scheme] = _same_scheme


#: nothing is broken
NONE = Ablation("none", "", "", "")


# --- authority and consent -----------------------------------------------------


def _by_role(*args: Any, owner: Principal | None) -> Decision:
    """Whatever starts a turn arrives in the user's role, so it has the user's authority."""
    action, contract, origin, labels, mandates = args
    as_user = origin if owner is None else replace(origin, principal=owner)
    return decide(action, contract, as_user, labels, mandates, owner=owner)


def _in_the_models_words(consent_id: str, *, parts: tuple[Part, ...], **rest: Any) -> Question:
    """The model words the question, and retells what the event suggested."""
    asked = consents.question(consent_id, parts=parts, **rest)
    suggested = re.findall(r"Shall we [^?]*\?", parts[-1].text) if parts else []
    return replace(asked, text=f"{consent_id}: {suggested[-1]}") if suggested else asked


def _whenever(standing: Standing, answer: Answer, *, received_at_ms: int) -> Settled:
    """A yes counts whenever it comes."""
    return consents.settle(standing, answer, received_at_ms=min(received_at_ms, standing.consent.expires_at_ms))


def _again_and_again(standing: Standing, answer: Answer, *, received_at_ms: int) -> Settled:
    """A used consent is as good as an open one."""
    if standing.state is ConsentState.USED:
        standing = replace(standing, state=ConsentState.OPEN)
    return consents.settle(standing, answer, received_at_ms=received_at_ms)


def _replanned(standing: Standing, parts: tuple[Part, ...]) -> tuple[Step, ...]:
    """At the yes the model plans again, from what it has read meanwhile."""
    offered = [match for part in parts if (match := re.search(r"is free for (\d+)", part.text)) is not None]
    if not offered:
        return standing.ticked
    party = int(offered[-1].group(1))
    return tuple(
        replace(step, arguments={**step.arguments, "party": party}) if "party" in step.arguments else step
        for step in standing.ticked
    )


def _closable(part: Part, *, key: str) -> str:
    """The label is a fixed tag, and the text in it is left as it came."""
    return f'<data source="{part.source}">\n{part.text}\n</data>'


class _NoTimer(StoreAround):
    """No question's time is ever over."""

    async def fire(self) -> Fired:
        return Fired((), None)


class _Reusable(MemoryStore):
    """A store whose state machine lets a used consent be approved again."""

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        for row in rows:
            if isinstance(row.body, ConsentApprovedBody):
                sides = self._sessions[token.session].tables[Table.CONSENT]
                sides[row.body.consent,] = {**sides[row.body.consent,], "state": ConsentState.OPEN}
        return await super().write(token, rows, blobs=blobs)


class _AnyApprover(StoreAround):
    """Whoever says yes, in whatever way, is taken for the approver."""

    async def put(self, entry: Entry) -> Put:
        if entry.session is None:
            return await self.inside.put(entry)
        open_ones = await self.inside.standings(entry.session, states=(ConsentState.OPEN,))
        said_yes = [part.text for part in entry.input.parts] == ["yes"]
        if entry.input.kind is InputKind.ANSWER and open_ones:
            return await self.inside.put(_by_approver(entry, open_ones[0].consent, entry.input.answer))
        if entry.input.kind is InputKind.EVENT and said_yes and len(open_ones) == 1:
            consent = open_ones[0].consent
            return await self.inside.put(_by_approver(entry, consent, Answer(consent.id, consent.digest, yes=True)))
        return await self.inside.put(entry)


def _by_approver(entry: Entry, consent: Consent, answer: Answer | None) -> Entry:
    approver = Principal.parse(consent.approvers[0])
    return replace(entry, input=Input(InputKind.ANSWER, approver, entry.input.verified, answer=answer))


# --- admission -----------------------------------------------------------------


class _NoDedupe(StoreAround):
    """Every delivery is a new one."""

    def __init__(self, inside: Store) -> None:
        super().__init__(inside)
        self._count = itertools.count(1)

    async def put(self, entry: Entry) -> Put:
        return await self.inside.put(replace(entry, event_id=f"{entry.event_id}/{next(self._count)}"))


class _ByIdAlone(StoreAround):
    """A repeat is known by its id, whoever sent it."""

    def __init__(self, inside: Store) -> None:
        super().__init__(inside)
        self._seen: set[str] = set()

    async def put(self, entry: Entry) -> Put:
        if entry.event_id in self._seen:
            return Put(PutOutcome.DUPLICATE, entry.session, None, self.inside.now_ms(), 0)
        self._seen.add(entry.event_id)
        return await self.inside.put(entry)


class _ActsFirst(StoreAround):
    """What comes in is acted on, and then stored: where storing fails, it was acted on all the same."""

    async def put(self, entry: Entry) -> Put:
        try:
            return await self.inside.put(entry)
        except StoreUnavailable:
            await self.inside.put(replace(entry, event_id=f"{entry.event_id} (acted on, not remembered)"))
            raise


class _AcknowledgesFirst(StoreAround):
    """What comes in is acknowledged, and then stored: where storing fails, the sender knows nothing of it."""

    async def put(self, entry: Entry) -> Put:
        try:
            return await self.inside.put(entry)
        except StoreUnavailable:
            return Put(PutOutcome.STORED, entry.session, None, self.inside.now_ms(), 0)


@dataclass(frozen=True)
class _Lax(Scheme):
    """A scheme that leaves something unchecked."""

    inside: Scheme
    #: judge the signed time by itself
    any_time: bool = False
    any_signature: bool = False
    name: str = field(init=False)
    id_signed: bool = field(init=False)
    keep_ms: int = field(init=False)
    body_bytes_max: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("name", "id_signed", "keep_ms", "body_bytes_max"):
            object.__setattr__(self, name, getattr(self.inside, name))

    def verify(self, request: RawRequest, *, source: str, now_ms: int) -> Verified | Refusal:
        headers = {name.lower(): value for name, value in request.headers}
        if self.any_time:
            now_ms = int(headers[b"webhook-timestamp"]) * 1000
        verdict = self.inside.verify(request, source=source, now_ms=now_ms)
        if self.any_signature and isinstance(verdict, Refusal):
            return Verified("none", None, headers[b"webhook-id"].decode())
        return verdict


# --- the turn under way --------------------------------------------------------


def _anybody_joins(received: Input, origin: Origin, session: str) -> bool:
    """Whatever comes in while a turn runs is taken for a part of it."""
    return received.kind in (InputKind.MESSAGE, InputKind.EVENT)


def _adds(fit: Fit) -> Fit:
    """Whatever a classifier says, it is taken for a part of the turn."""
    return Fit.ADDS


def _nothing(done: Sequence[OperationRow]) -> Sequence[OperationRow]:
    """A turn that begins anew knows nothing of the one before."""
    return ()


def _key_by_turn(session: str, turn: Turn, called: Called) -> str:
    """The key is the turn's and the place of the step in it."""
    return f"{session}:{turn.id}:{called.call.split('.', 1)[1]}"


def _key_by_step(session: str, turn: Turn, called: Called) -> str:
    """The key is the step's: its tool and its arguments."""
    return f"{session}:{called.tool}:{canonical(called.arguments)}"


def _key_by_attempt(session: str, turn: Turn, called: Called) -> str:
    """Every attempt has a key of its own."""
    return f"{session}:{called.operation}:{turn.find(called.call).attempts}"


def _always_again(*, has_lookup: bool, recognised: bool, attempts: int, attempts_max: int) -> Settlement:
    """Whatever got no answer is sent again."""
    return Settlement.RESEND if attempts < attempts_max else Settlement.TELL


def _never_asked(*, has_lookup: bool, recognised: bool, attempts: int, attempts_max: int) -> Settlement:
    """The other side is not asked, though it could tell."""
    return settlement(has_lookup=False, recognised=recognised, attempts=attempts, attempts_max=attempts_max)


class _StopsLater(StoreAround):
    """A stop waits for the running turn to end, as everything else does."""

    async def inbox(self, session: str, *, after: int, limit: int) -> list[InboxRow]:
        found = await self.inside.inbox(session, after=after, limit=limit)
        record = await self.inside.session(session)
        runs = record is not None and record.turn is not None
        return [row for row in found if not runs or row.input.kind is not InputKind.STOP]


ABLATIONS: Mapping[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        Ablation(
            "authority-by-role",
            "B2",
            "a turn's authority is read from the role its message plays, not from who sent it",
            "a table was booked and the group was told of it, and nobody was asked.",
            rules=replace(RULES, decide=_by_role),
        ),
        Ablation(
            "question-by-the-model",
            "B6",
            "the model words the question",
            "the question spoke of four, Alice said yes, and a party of 12 was booked.",
            rules=replace(RULES, question=_in_the_models_words),
        ),
        Ablation(
            "no-dedupe",
            "A4",
            "a repeat isn't recognised",
            "the repeated call was acted on again, and two tables are held.",
            store=lambda store: _NoDedupe(store).store,
        ),
        Ablation(
            "dedupe-by-id-alone",
            "A4",
            "a repeat is recognised by its id, whoever sent it",
            "the cinema's call was taken for the restaurant's, and nobody heard that the film is cancelled.",
            store=lambda store: _ByIdAlone(store).store,
        ),
        Ablation(
            "signature-unchecked",
            "A1",
            "a signature isn't checked",
            "somebody else's words became a question, and a table was booked on them.",
            scheme=lambda scheme: _Lax(scheme, any_signature=True),
        ),
        Ablation(
            "time-unchecked",
            "A3",
            "the signed time isn't checked",
            "an old call, caught and sent again, was acted on.",
            scheme=lambda scheme: _Lax(scheme, any_time=True),
        ),
        Ablation(
            "act-before-store",
            "A7",
            "an input is acted on before it is stored",
            "the restaurant sent its call again, as it must; it was acted on twice, and two tables are held.",
            store=lambda store: _ActsFirst(store).store,
        ),
        Ablation(
            "acknowledge-before-store",
            "A7",
            "an input is acknowledged before it is stored",
            "the restaurant believes that it was heard, and nobody was told that the table is gone.",
            store=lambda store: _AcknowledgesFirst(store).store,
        ),
        Ablation(
            "consent-without-expiry",
            "B9",
            "a question never expires",
            "a yes that came when the offer was long over booked a table and told the group.",
            rules=replace(RULES, settle=_whenever),
            store=lambda store: _NoTimer(store).store,
        ),
        Ablation(
            "consent-reusable",
            "B8",
            "a consent can be used again",
            "one question, asked once, booked two tables and told the group twice.",
            rules=replace(RULES, settle=_again_and_again),
            store=lambda store: _Reusable(clock=store.now_ms),
        ),
        Ablation(
            "approver-unchecked",
            "B7",
            "whoever says yes is taken for the approver",
            "the table was booked and the group was told, and Alice was never heard.",
            rules=replace(RULES, role=lambda principal, owner, given: SessionRole.MEMBER),
            store=lambda store: _AnyApprover(store).store,
        ),
        Ablation(
            "re-planned-at-the-yes",
            "B5",
            "the steps are planned again when the yes comes",
            "Alice approved a table for four, and a party of 12 was booked.",
            rules=replace(RULES, steps=_replanned),
        ),
        Ablation(
            "label-closable",
            "B4",
            "the text of an event can end its label",
            "the model took the restaurant's words for Alice's, and the group was told that dinner is off.",
            rules=replace(RULES, labelled=_closable),
        ),
        Ablation(
            "merged-whoever-says-it",
            "C6",
            "whatever comes in while a turn runs joins it, whoever said it",
            "the restaurant's words joined Alice's turn, and Sam was told that dinner is off; nobody was asked.",
            rules=replace(RULES, may_join=_anybody_joins),
        ),
        Ablation(
            "all-of-it-adds",
            "C4",
            "whatever a person says meanwhile is taken for a part of her turn",
            "a table for six is held, which Alice never asked for.",
            rules=replace(RULES, fit=_adds),
        ),
        Ablation(
            "nothing-taken-over",
            "D3",
            "a turn that begins anew knows nothing of what the one before did",
            "two tables are held, and nobody is told of the first.",
            rules=replace(RULES, reuse=_nothing),
        ),
        Ablation(
            "key-by-turn",
            "D2",
            "the idempotency key belongs to the turn",
            "the turn that began anew asked under another key, and two tables are held.",
            rules=replace(RULES, key=_key_by_turn),
        ),
        Ablation(
            "key-by-step",
            "D2",
            "the idempotency key belongs to the step: its tool and arguments",
            "the second table, which was meant, was taken for a repeat of the first, and only one is held.",
            rules=replace(RULES, key=_key_by_step),
        ),
        Ablation(
            "key-by-attempt",
            "D4",
            "every attempt has an idempotency key of its own",
            "after the crash the group was told again, under another key, and has the same text twice.",
            rules=replace(RULES, key=_key_by_attempt),
        ),
        Ablation(
            "sent-again-silently",
            "D5",
            "whatever got no answer is sent again, also where the other side can't know a repeat",
            "Sam was told twice, and nobody knows of it.",
            rules=replace(RULES, settlement=_always_again),
        ),
        Ablation(
            "never-looked-up",
            "D5",
            "the other side is never asked what became of an operation",
            "the seats are booked, and Alice is told that nobody knows.",
            rules=replace(RULES, settlement=_never_asked),
        ),
        Ablation(
            "stop-waits-its-turn",
            "K24",
            "a stop waits for the running turn to end",
            "Alice said stop, and the group was told all the same.",
            store=lambda store: _StopsLater(store).store,
        ),
    )
}
