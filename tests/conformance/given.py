"""What the store's tests begin with: people, a clock, entries, rows, a question."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from sayso.core.attachment import Attachment, digest_of, of_call, of_input
from sayso.core.authority import Verdict
from sayso.core.consent import Consent, Question, Step, steps_digest
from sayso.core.contract import Effect
from sayso.core.inputs import Answer, Input, InputKind
from sayso.core.labels import OUTSIDER, USER, Part
from sayso.core.operation import Ref
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.rows import (
    Body,
    Called,
    Ending,
    InputBody,
    ModelCalledBody,
    Outcome,
    Row,
    Scalar,
    ToolResultBody,
    ToolSentBody,
    TurnAskBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.core.session import Position, Token
from sayso.storage.store import Entry, Received, Store, Upload

ALICE = Principal(PrincipalKind.USER, "alice")
BOB = Principal(PrincipalKind.USER, "bob")
RESTAURANT = Principal(PrincipalKind.SOURCE, "restaurant")

#: when the clock of a test starts
NOON = 1_800_000_000_000
MINUTE = 60_000
DAY = 24 * 60 * MINUTE


class Inspected(Store, Protocol):
    """A store whose side tables a test may look at."""

    async def side_tables(self, session: str) -> dict[str, list[tuple[Scalar, ...]]]:
        """Return what rows have changed of a session."""
        ...

    async def blobs(self) -> dict[str, int]:
        """Return how many refer to each of the bytes that are kept."""
        ...


class Clock:
    """A clock that a test sets; also backwards."""

    def __init__(self) -> None:
        self.now_ms = NOON

    def __call__(self) -> int:
        return self.now_ms

    def later(self, ms: int) -> None:
        """Let time pass."""
        self.now_ms += ms


def quick_folder() -> tempfile.TemporaryDirectory[str]:
    """Return a folder in memory where there is one, for tests whose subject is not the disk."""
    memory = "/dev/shm"
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


def sha(text: str) -> str:
    """Return the digest of some content."""
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def hook(
    event_id: str,
    *,
    session: str | None = "s1",
    content: str = "the table is gone",
    source: str = "restaurant",
    keep_ms: int = 7 * DAY,
    id_signed: bool = True,
) -> Entry:
    """Return the entry of a verified hook."""
    return Entry(
        session=session,
        source=source,
        event_id=event_id,
        input=Input(
            InputKind.EVENT,
            Principal(PrincipalKind.SOURCE, source),
            "standard-webhooks v1",
            (Part(content, f"source:{source}", OUTSIDER, "standard-webhooks v1"),),
        ),
        digest=sha(content),
        keep_ms=keep_ms,
        id_signed=id_signed,
        received=Received(content.encode(), "application/json", "env:RESTAURANT_SECRET", NOON),
    )


def message(
    text: str,
    *,
    key: str,
    by: Principal = ALICE,
    session: str = "s1",
    as_of: Position | None = None,
    parts: int = 1,
    uploads: Sequence[str] = (),
    waiting_max: int | None = None,
) -> Entry:
    """Return the entry of a person's message under an idempotency key."""
    words = tuple(Part(text, str(by), USER, "api token") for _ in range(parts))
    received = Input(InputKind.MESSAGE, by, "api token", words)
    content, source = sha("|".join([text, *uploads])), f"{by}@{session}"
    return Entry(
        session,
        source,
        key,
        received,
        content,
        2 * DAY,
        strict=True,
        as_of=as_of,
        uploads=tuple(uploads),
        waiting_max=waiting_max,
    )


def answer(said: Answer, *, key: str, by: Principal = ALICE, session: str = "s1") -> Entry:
    """Return the entry of a person's answer to a question."""
    received = Input(InputKind.ANSWER, by, "api token", answer=said)
    return Entry(session, f"{by}@{session}", key, received, sha(repr(said)), 2 * DAY, strict=True)


async def staged(
    store: Store,
    upload: str,
    data: bytes = b"plan",
    *,
    by: Principal = ALICE,
    session: str = "s1",
    keep_ms: int = 60 * MINUTE,
    most: int = 10,
    most_bytes: int = 100_000_000,
) -> int:
    """Send a file ahead of the message that will name it; return until when it waits."""
    sent_ahead = Upload(upload, session, by, "plan.png", "image/png", digest_of(data))
    return await store.stage_upload(sent_ahead, data, keep_ms=keep_ms, staged_max=most, staged_bytes_max=most_bytes)


def rows(token: Token, after: int, *bodies: Body, turn: str | None = "T1", at_ms: int = NOON) -> list[Row]:
    """Return bodies as rows of `token`, numbered on from `after`."""
    return [
        Row(seq, token.epoch, turn, token.commit_key(seq), at_ms, body) for seq, body in enumerate(bodies, after + 1)
    ]


# --- bodies ------------------------------------------------------------------


def taken(n: int, event_id: str = "evt_1", *, files: Sequence[bytes] = ()) -> InputBody:
    """Return the row of the input at place `n`, which came with these files."""
    attached = tuple(file(of_input(n, place), data) for place, data in enumerate(files, 1))
    return InputBody(n, "restaurant", event_id, NOON, replace(hook(event_id).input, attachments=attached))


def file(id_: str, data: bytes) -> Attachment:
    """Return what a row says of a file."""
    return Attachment(id_, "plan.png", "image/png", len(data), digest_of(data))


def blobs(*several: bytes) -> dict[str, bytes]:
    """Return bytes as they travel beside rows."""
    return {digest_of(data): data for data in several}


def started(*, by: Principal = RESTAURANT, consent: str | None = None, continues: str | None = None) -> TurnStartBody:
    """Return the start of a turn."""
    return TurnStartBody(Origin(by, "standard-webhooks v1", (1,)), 20, continues, consent)


def called(call: str = "T1.1.1", *, tool: str = "book", verdict: Verdict = Verdict.RUN) -> Called:
    """Return one call of a reply."""
    return Called(call, tool, {"party": 4, "day": "Friday"}, verdict, "its contract", Effect.BOOK, keyed=True)


def planned(*calls: Called) -> ModelCalledBody:
    """Return a reply that calls tools."""
    return ModelCalledBody(1, calls or (called(),))


def sent(operation: str = "O1", *, call: str = "T1.1.1", attempt: int = 1, intended: bool = False) -> ToolSentBody:
    """Return the row of an attempt."""
    return ToolSentBody(operation, call, "book", f"s1:{operation}", sha("book"), attempt, intended)


def result(
    call: str = "T1.1.1",
    *,
    outcome: Outcome = Outcome.OK,
    operation: str | None = None,
    made: Sequence[Ref] = (),
    files: Sequence[bytes] = (),
) -> ToolResultBody:
    """Return the one result of a call."""
    words = (Part("booked", "tool:book", OUTSIDER),)
    attached = tuple(file(of_call(call, place), data) for place, data in enumerate(files, 1))
    return ToolResultBody(call, "book", outcome, words, operation, operation is not None, tuple(made), attached)


def consent(
    name: str = "A1", *, approvers: Sequence[str] = ("user:alice",), expires_at_ms: int = NOON + 10 * MINUTE
) -> Consent:
    """Return a question about two steps."""
    steps = (
        Step("T1.1.1", "book", {"party": 4, "day": "Friday"}, "v1"),
        Step("T1.1.2", "tell", {"text": "booked"}, "v1"),
    )
    return Consent(
        id=name,
        turn="T1",
        origin=Origin(RESTAURANT, "standard-webhooks v1", (1,)),
        steps=steps,
        digest=steps_digest(steps),
        approvers=tuple(approvers),
        about=(Ref("restaurant", "reservation", "R1"),),
        question=Question(f"{name}: book?", "the restaurant started this turn", ()),
        asked_at_ms=NOON,
        expires_at_ms=expires_at_ms,
    )


def asking(asked: Consent) -> tuple[Body, ...]:
    """Return a turn that asks and ends; its input, at place 1, is taken in it."""
    return (
        taken(1),
        started(),
        planned(called(verdict=Verdict.ASK)),
        TurnAskBody(asked),
        result(outcome=Outcome.WAITING),
        TurnEndBody(Ending.ASKED),
    )


def yes_to(
    asked: Consent, *, yes: bool = True, digest: str | None = None, steps: tuple[int, ...] | None = None
) -> Answer:
    """Return an answer to a question."""
    return Answer(asked.id, digest or asked.digest, yes, steps=steps)


# --- a store with a session --------------------------------------------------


async def owned(store: Store, *, session: str = "s1", node: str = "n1") -> Token:
    """Store a session with one input, own it, and return the right to it."""
    await store.create_session(session, owner=ALICE, title="dinner")
    await store.put(hook(f"evt_1@{session}", session=session))
    claimed = {claim.token.session: claim.token for claim in await store.claim(node, at_most=100)}
    return claimed[session]


async def asked(store: Store, question: Consent) -> Token:
    """Store a session that has asked one question, owned, and return the right to it."""
    token = await owned(store)
    await store.write(token, rows(token, 0, *asking(question)))
    return token
