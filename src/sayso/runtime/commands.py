"""What a caller may ask: open a session, post an input, answer a question, read.

The caller is a principal that was authenticated before. What is not hers looks as if it did not exist.
Everything that changes something is stored when it returns; nothing here waits for a model or a tool.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from sayso.core.authority import may_manage, may_post
from sayso.core.canonical import digest
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import Forbidden, Invalid, NotFound, NotSettled, RequestRefused
from sayso.core.inputs import Answer, Choice, InFlight, Input, InputKind, Keep, Restated
from sayso.core.labels import RUNTIME, USER, Part
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.record import sentence
from sayso.core.rows import (
    AnswerRefusedBody,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    InputBody,
    InputRetractedBody,
    Kind,
    NoticeBody,
    ParticipantChangedBody,
    RequestRefusedBody,
    Row,
    SessionChangedBody,
    SessionClosedBody,
    TurnStopBody,
)
from sayso.core.session import Position, SessionRecord, SessionRole
from sayso.core.text import scrub
from sayso.journal.append import JournalState, JournalStatus
from sayso.journal.feed import Captured, Feeds, Listener
from sayso.journal.follow import capture, follow
from sayso.journal.frames import Frame, Published, farewell
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Ids
from sayso.runtime.rules import RULES, Rules
from sayso.storage.store import DoorKind, DoorNote, Entry, Put, PutOutcome, Store


class Hints(Protocol):
    """Tell the one who owns a session, or whoever may take it, to look at its inbox. Carries no data."""

    def hint(self, session: str) -> None:
        """Look again at `session`; may be lost without harm to anything but speed."""
        ...


class Puts:
    """Stores inputs, and hints at each one that is stored.

    The two are whole even where the caller leaves in between (a client hangs up): what was on its way into the store
    arrives there, and its owner hears of it.
    """

    def __init__(self, store: Store, hints: Hints) -> None:
        self._store, self._hints = store, hints
        self._under_way: set[asyncio.Task[Put]] = set()

    async def put(self, entry: Entry) -> Put:
        """See `Store.put`."""
        task = asyncio.create_task(self._put(entry))
        self._under_way.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    async def _put(self, entry: Entry) -> Put:
        put = await self._store.put(entry)
        if put.outcome is PutOutcome.STORED and put.session is not None:
            self._hints.hint(put.session)
        return put

    def _ended(self, task: asyncio.Task[Put]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # its caller is told, if there is one still


class Owners(Hints, Protocol):
    """Who owns sessions in this process. See `Worker` for what each method promises."""

    def status(self, session: str) -> JournalStatus:
        """Return how far the store follows."""
        ...

    async def reconcile(self, session: str) -> JournalStatus:
        """Try at once to make what was accepted durable."""
        ...

    def disputed(self, session: str) -> tuple[Row, ...]:
        """Return our rows of a session that stands still in a conflict."""
        ...

    async def give_up(self, session: str) -> bool:
        """Let a disputed session go."""
        ...

    async def delete(self, session: str) -> bool:
        """Delete a session."""
        ...


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated principal and how it was verified, e.g. `api token`."""

    principal: Principal
    verified: str

    @property
    def is_operator(self) -> bool:
        """Whether the caller may see every session and the door's record."""
        return self.principal.kind is PrincipalKind.OPERATOR


@dataclass(frozen=True, slots=True)
class Dispute:
    """Two versions of a piece of journal: what this process accepted and showed, and what the store holds."""

    #: the first row that is not the store's
    from_seq: int
    ours: tuple[Row, ...]
    stored: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Seat:
    """A session, and what the caller is in it."""

    record: SessionRecord
    role: SessionRole


class Commands:
    """The calls of the HTTP API, the client and the CLI. `runtime/people.py` has those about who takes part,
    `runtime/files.py` those about files."""

    def __init__(
        self, store: Store, feeds: Feeds, owners: Owners, ids: Ids, limits: Limits, *, rules: Rules = RULES
    ) -> None:
        self._store, self._feeds, self._owners = store, feeds, owners
        self._puts = Puts(store, owners)
        self._ids, self._limits, self._rules = ids, limits, rules

    @property
    def limits(self) -> Limits:
        """The bounds of what a caller may ask."""
        return self._limits

    @property
    def ids(self) -> Ids:
        """Names that nobody else has."""
        return self._ids

    @property
    def feeds(self) -> Feeds:
        """What is published here."""
        return self._feeds

    # sessions

    async def open_session(self, by: Caller, *, title: str = "") -> SessionRecord:
        """Store a new session that belongs to the caller.

        Raises:
            Forbidden: the caller is no user; a session belongs to a person.
        """
        if by.principal.kind is not PrincipalKind.USER:
            raise Forbidden("a session belongs to a user, and this token is an operator's")
        return await self._store.create_session(self._ids.session(), owner=by.principal, title=scrub(title))

    async def sessions(self, by: Caller, *, limit: int = 50, before: str | None = None) -> list[SessionRecord]:
        """Return the sessions that are the caller's or that she takes part in, newest first; an operator's list
        has everybody's."""
        return await self._store.sessions(of=None if by.is_operator else by.principal, limit=limit, before=before)

    async def seat(self, by: Caller, session: str) -> Seat:
        """Return a session and what the caller is in it. Every call about a session begins here.

        Raises:
            NotFound: there is none, or she is nothing in it.
        """
        record = await self._store.session(session)
        if record is None:
            raise NotFound("session")
        role = self._rules.role(by.principal, record.owner, None)
        if role is None:
            given = await self._store.participant(session, by.principal)
            role = self._rules.role(by.principal, record.owner, None if given is None else given.role)
        if role is None:
            raise NotFound("session")
        return Seat(record, role)

    async def session(self, by: Caller, session: str) -> SessionRecord:
        """Return a session that the caller may see.

        Raises:
            NotFound: see `seat`.
        """
        return (await self.seat(by, session)).record

    async def may_post(self, by: Caller, session: str) -> Seat:
        """Return a session in which the caller may say something.

        Raises:
            NotFound: see `seat`.
            Forbidden: she may only read in it.
        """
        seat = await self.seat(by, session)
        if not may_post(seat.role):
            raise Forbidden(f"a {seat.role} of this session reads, and can't post or answer")
        return seat

    async def may_manage(self, by: Caller, session: str) -> Seat:
        """Return a session that is the caller's to manage.

        Raises:
            NotFound: see `seat`.
            Forbidden: she takes part in it, and it is another's to manage.
        """
        return self.manages(await self.seat(by, session))

    @staticmethod
    def manages(seat: Seat) -> Seat:
        """Return the seat if it is one to manage the session from.

        Raises:
            Forbidden: see `may_manage`.
        """
        if not may_manage(seat.role):
            raise Forbidden("this is for the session's owner")
        return seat

    async def close_session(
        self, by: Caller, session: str, *, idempotency_key: str | None = None
    ) -> tuple[Put, Row | None]:
        """Ask that a session ends: its turn is cancelled, its questions are withdrawn, what waits is not acted on, and
        nothing comes in any more. Its history stays. With the row that is so; None: it will be.

        Raises:
            NotFound, Forbidden: see `may_manage`.
            NotSettled: what was accepted of it can't be stored now, also after one more try. Nothing was asked, and
                the session is as it was.
            SessionClosed: it was closed before.
        """
        await self.may_manage(by, session)
        if (await self._owners.reconcile(session)).state in (JournalState.RETRYING, JournalState.CONFLICT):
            raise NotSettled(session)
        received = Input(InputKind.CLOSE, by.principal, by.verified)
        return await self.ask(by, session, received, {"close": session}, idempotency_key=idempotency_key)

    async def stop(
        self, by: Caller, session: str, *, turn: str | None = None, idempotency_key: str | None = None
    ) -> tuple[Put, Row | None]:
        """Ask that a turn stops (K24): nothing of it begins any more, a reply that is being written ends where it is,
        and what is out has a few seconds to answer before it is given up as unknown. What the caller said before and
        nobody has looked at goes with it. `turn` is one that runs, or one that ended with a question, which is
        withdrawn; None: the one that runs. With the row that is so; None: it will be settled.

        Raises:
            NotFound, Forbidden: see `may_post`.
            RequestRefused: no such turn runs, or it is another's to stop.
            Misused, InboxFull, SessionClosed: see `Store.put`.
        """
        await self.may_post(by, session)
        received = Input(InputKind.STOP, by.principal, by.verified, stops=turn)
        return await self.ask(by, session, received, {"stop": turn}, idempotency_key=idempotency_key)

    async def delete_session(self, by: Caller, session: str) -> None:
        """Delete a session and everything of it, at once: also what is running, and what is not stored yet.

        Raises:
            NotFound, Forbidden: see `may_manage`.
            StoreUnavailable, CommitUnknown: it may still be there.
        """
        await self.may_manage(by, session)
        await self._owners.delete(session)

    async def waiting(self, by: Caller, session: str) -> int:
        """Return how many inputs of the session are stored and not taken yet, counted up to a page."""
        await self.session(by, session)
        return len(await self._store.inbox(session, after=0, limit=self._limits.inbox_page))

    # how the store follows

    async def status(self, by: Caller, session: str) -> JournalStatus:
        """Return how far the store follows: counts and instants, nothing of what was said.

        Raises:
            NotFound: see `session`.
        """
        await self.session(by, session)
        return self._owners.status(session)

    async def dispute(self, by: Caller, session: str) -> Dispute:
        """Return both versions of what is in conflict (K7). For operators.

        Raises:
            Forbidden, NotFound: the caller is none, or nothing is in conflict here.
        """
        if not by.is_operator:
            raise Forbidden("a conflict is an operator's to settle")
        await self.session(by, session)
        ours = self._owners.disputed(session)
        if not ours:
            raise NotFound("conflict")
        stored = await self._store.rows(session, after=ours[0].seq - 1, limit=self._limits.history_rows)
        return Dispute(ours[0].seq, ours, tuple(stored))

    async def settle_dispute(self, by: Caller, session: str, keep: Keep) -> Put:
        """Store an operator's choice, and give the session up, so that its next owner goes on from the store. The
        choice becomes a row; where ours are kept, their words follow it, as notices.

        Raises:
            Forbidden, NotFound: see `dispute`.
        """
        dispute = await self.dispute(by, session)
        ours = tuple(Restated(sentence(row), _said(row)) for row in dispute.ours)
        choice = Choice(keep, dispute.from_seq, ours)
        received = Input(InputKind.CHOICE, by.principal, by.verified, choice=choice)
        content = {"keep": keep, "from_seq": dispute.from_seq}
        put = await self._put(by, session, received, content, idempotency_key=None)
        await self._owners.give_up(session)
        return put

    # inputs

    async def post(
        self,
        by: Caller,
        session: str,
        text: str,
        *,
        idempotency_key: str | None = None,
        as_of: Position | None = None,
        client_send_ids: tuple[str, ...] = (),
        attachments: tuple[str, ...] = (),
        in_flight: InFlight | None = None,
    ) -> Put:
        """Store the caller's message. Two equal messages are two, unless they share an idempotency key (A5).

        `attachments` are ids of uploads; the message takes them with it, each once (K29). `in_flight` says what becomes
        of it if a turn of hers runs when it is looked at; None: as the agent is set.

        Raises:
            NotFound, Forbidden, Misused, NoUpload: see `may_post` and `Store.put`.
            InboxFull: as many of her messages wait as may; another person's don't count.
            CrossUser, SessionClosed: see `Store.put`.
            Invalid: neither text nor a file, or too much of them.
        """
        await self.may_post(by, session)
        if not text.strip() and not attachments:
            raise Invalid("text is empty")
        if len(attachments) > self._limits.attachments:
            raise Invalid(f"there are more than {self._limits.attachments} attachments")
        if len(set(attachments)) < len(attachments):
            raise Invalid("an upload is named twice")
        if len(text.encode("utf-8", "replace")) > self._limits.message_bytes:
            raise Invalid(f"text is longer than {self._limits.message_bytes} bytes")
        words = scrub(text)
        received = Input(
            InputKind.MESSAGE,
            by.principal,
            by.verified,
            parts=(Part(words, str(by.principal), USER, by.verified),) if text.strip() else (),
            client_send_ids=client_send_ids,
            in_flight=in_flight,
        )
        content: dict[str, object] = {"text": words, "client_send_ids": list(client_send_ids)}
        content |= {"attachments": list(attachments)} if attachments else {}
        content |= {"in_flight": in_flight.value} if in_flight is not None else {}
        most = self._limits.waiting_messages
        return await self._put(
            by,
            session,
            received,
            content,
            idempotency_key=idempotency_key,
            as_of=as_of,
            waiting_max=most,
            uploads=attachments,
        )

    async def answer(
        self, by: Caller, session: str, answer: Answer, *, idempotency_key: str | None = None
    ) -> tuple[Put, Row | None]:
        """Store the caller's answer, and wait a little for the row that settles it.

        The row is one of consent.approved, consent.declined, consent.expired, answer.refused; None if it
        is not there yet, which says nothing about the answer: it is stored and will be settled.

        Raises:
            NotFound: no such session or question for this caller.
            Forbidden: she may only read in it.
            AnswerRefused: the door does not take it (K12).
        """
        await self._may_answer(by, session, answer.consent)
        received = Input(InputKind.ANSWER, by.principal, by.verified, answer=answer)
        content: dict[str, Any] = {
            "consent": answer.consent,
            "digest": answer.digest,
            "yes": answer.yes,
            "reason": answer.reason,
        }
        content |= {"steps": None if answer.steps is None else list(answer.steps)}
        return await self.ask(by, session, received, content, idempotency_key=idempotency_key)

    async def ask(
        self, by: Caller, session: str, received: Input, content: object, *, idempotency_key: str | None = None
    ) -> tuple[Put, Row | None]:
        """Store what is for the control lane, and wait a little for the row that settles it; None if it is not
        there yet, or not durable. Whether the caller may ask it was looked at before.

        Raises:
            Misused, InboxFull: see `Store.put`.
            RequestRefused: it changes nothing, and that is on record.
        """
        listener, _ = self._feeds.listen(session)
        most = self._limits.waiting_requests
        try:
            put = await self._put(by, session, received, content, idempotency_key=idempotency_key, waiting_max=most)
            if put.n is None or put.outcome is not PutOutcome.STORED:
                row = await self._settled_before(session, put.n)
            else:
                row = await self._settling(session, listener, put.n)
        finally:
            self._feeds.leave(session, listener)
        if row is not None and isinstance(row.body, RequestRefusedBody):
            raise RequestRefused(row.body.reason)
        return put, row

    async def _may_answer(self, by: Caller, session: str, consent: str) -> None:
        """Refuse an answer to what this caller can't see; if the question exists, that goes on record (A2)."""
        found = await self._store.standing(session, consent)
        try:
            await self.may_post(by, session)
        except (NotFound, Forbidden) as refused:
            if found is not None:
                to = "see" if isinstance(refused, NotFound) else "answer"
                why = f"{by.principal} answered {consent}, which is not theirs to {to}"
                await self._store.note(DoorNote(DoorKind.REJECTED, str(by.principal), why, session=session))
            raise
        if found is None:
            raise NotFound("question")

    async def _put(
        self,
        by: Caller,
        session: str,
        received: Input,
        content: object,
        *,
        idempotency_key: str | None,
        waiting_max: int | None = None,
        as_of: Position | None = None,
        uploads: tuple[str, ...] = (),
    ) -> Put:
        entry = Entry(
            session=session,
            source=f"{by.principal}@{session}",
            event_id=idempotency_key or self._ids.event(),
            input=received,
            digest=digest(content),
            keep_ms=self._limits.person_keep_ms,
            strict=True,
            as_of=as_of,
            waiting_max=waiting_max,
            uploads=uploads,
        )
        return await self._puts.put(entry)

    async def _settling(self, session: str, listener: Listener, n: int) -> Row | None:
        """Wait for the row that settles an answer. It is seen when it is accepted, and told when it is durable:
        what a caller was told must still be so after a crash."""
        try:
            async with asyncio.timeout(self._limits.settle_wait_ms / 1000):
                while (event := await listener.queue.get()) is not None:
                    if isinstance(event, Published) and _settles(event.row, n):
                        return event.row if await self._feeds.durable(session, event.row) else None
        except TimeoutError:
            pass
        return None

    async def _settled_before(self, session: str, n: int | None) -> Row | None:
        """Find the row that settled the first of two equal answers."""
        entry = None if n is None else await self._store.inbox_entry(session, n)
        if entry is None or entry.taken_seq is None:
            return None
        rows = await self._store.rows(session, after=entry.taken_seq - 1, limit=1)
        return rows[0] if rows else None

    # reading

    async def history(
        self, by: Caller, session: str, *, limit: int | None = None, before: int | None = None
    ) -> Captured:
        """Return the newest rows (those with `seq < before`); never less than was accepted.

        Raises:
            NotFound, StoreUnavailable.
        """
        await self.session(by, session)
        most = min(limit or self._limits.history_rows, self._limits.history_rows)
        captured = await capture(self._store, self._feeds, session, limit=most, before=before)
        if not captured.rows:  # none yet, or it was deleted meanwhile: that is no empty history
            await self.session(by, session)
        return captured

    async def follow(
        self, by: Caller, session: str, *, after: Position | None = None, token: Position | None = None
    ) -> AsyncGenerator[Frame, None]:
        """Return the session's events from a position on, or from the token of a history (see `journal.follow`).

        The right to see them is looked at before the first one, and again at each row that says something
        about who takes part.

        Raises:
            NotFound: see `session`.
        """
        await self.session(by, session)
        return self._while_seen(by, session, follow(self._store, self._feeds, session, after=after, token=token))

    async def _while_seen(
        self, by: Caller, session: str, frames: AsyncGenerator[Frame, None]
    ) -> AsyncGenerator[Frame, None]:
        """Yield frames for as long as the caller may see the session.

        At a row about herself she gets nothing more until it is durable, for only then does the store say what
        she is now; a row of the past may have been followed by another.
        """
        async with aclosing(frames) as coming:
            async for frame in coming:
                if frame.event == "resume":  # of a session that was deleted meanwhile nobody is told to drop anything
                    await self.session(by, session)
                yield frame
                if frame.kind is Kind.PARTICIPANT_CHANGED and frame.id is not None:
                    await self._feeds.durable_at(session, Position.parse(frame.id))
                    if not await self.may_see(by, session):
                        yield farewell("removed")
                        return

    async def may_see(self, by: Caller, session: str) -> bool:
        """Return whether the session exists for the caller."""
        try:
            await self.seat(by, session)
        except NotFound:
            return False
        return True

    async def standings(self, by: Caller, session: str, *, open_only: bool = False) -> list[Standing]:
        """Return the session's questions, in the order they were asked."""
        await self.session(by, session)
        return await self._store.standings(session, states=(ConsentState.OPEN,) if open_only else None)

    async def standing(self, by: Caller, session: str, consent: str) -> Standing:
        """Return one question.

        Raises:
            NotFound: there is none of that id.
        """
        await self.session(by, session)
        found = await self._store.standing(session, consent)
        if found is None:
            raise NotFound("question")
        return found


def _said(row: Row) -> tuple[Part, ...]:
    """Return a row's words with their labels; the runtime's own sentence where it has none."""
    parts = row.body.input.parts if isinstance(row.body, InputBody) else getattr(row.body, "parts", ())
    return tuple(parts) or (Part(sentence(row), "runtime", RUNTIME, "runtime"),)


def _settles(row: Row, n: int) -> bool:
    match row.body:
        case ConsentApprovedBody() | ConsentDeclinedBody() | ConsentExpiredBody() | AnswerRefusedBody() as body:
            return body.n == n
        case RequestRefusedBody() | ParticipantChangedBody() | InputRetractedBody() | SessionChangedBody() as asked:
            return asked.n == n
        case TurnStopBody(n=settled) | NoticeBody(n=settled):
            return settled == n
        case SessionClosedBody():
            return True
        case _:
            return False
