"""Accept, publish, make durable: once, in order, under an epoch.

`stage` gives a row its position; `accept` publishes what is staged, without an `await`, and the store follows in
order. What must not act before it is durable awaits the ticket. A write that gets no answer leaves the session
*unresolved*: every ticket raises, nothing new is accepted but results that end what was begun, and what was
accepted is settled by its commit keys, by a pass when one is due or by a reader who sees it stored.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.errors import (
    CommitUnknown,
    Conflict,
    Fenced,
    Gone,
    IllegalChange,
    SaysoError,
    StoreUnavailable,
    Unresolved,
)
from sayso.core.retry import delay_ms
from sayso.core.rows import Draft, Row, encode_body
from sayso.core.session import SessionRecord, Token
from sayso.core.text import scrub
from sayso.journal.feed import Feed
from sayso.journal.frames import Status
from sayso.storage.store import Store, WriteOutcome

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class JournalState(StrEnum):
    """Whether the store follows."""

    #: everything accepted is durable
    HEALTHY = "healthy"
    #: rows are on their way
    PENDING = "pending"
    #: a write got no answer; it is tried again when it is due, and nothing goes past it
    RETRYING = "retrying"
    #: another epoch owns the session
    FENCED = "fenced"
    #: the store holds other rows, or refused ours: an operator must choose (K7)
    CONFLICT = "conflict"
    #: the session was deleted
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class JournalStatus:
    """How a journal stands: counts and instants (milliseconds since 1970 UTC), and nothing of what a row says."""

    state: JournalState
    #: rows that are accepted and not known to be durable
    pending: int = 0
    #: passes that failed since the store followed last
    attempts: int = 0
    first_failure_at_ms: int | None = None
    last_failure_at_ms: int | None = None
    next_retry_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Commit:
    rows: tuple[Row, ...]
    done: asyncio.Future[None]
    #: bytes that the rows bring; kept here until the store says yes
    blobs: Blobs


@dataclass(frozen=True, slots=True)
class _Failure:
    """What is known of a store that does not follow."""

    error: Unresolved
    attempts: int
    first_at_ms: int
    last_at_ms: int
    retry_at_ms: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """Accepted rows on their way into the store."""

    rows: tuple[Row, ...]
    _done: asyncio.Future[None]

    async def durable(self) -> None:
        """Return once the rows are stored.

        Raises:
            Unresolved: the store gave no answer for these rows, or for others before them (H35).
            Fenced, Gone: the session is another epoch's, or nobody's, and these rows may never be stored.
            Conflict: the store holds others in their place.
        """
        await asyncio.shield(self._done)


class Journal:
    """The journal of one session under one token. The only writer of its rows in this process."""

    def __init__(self, store: Store, feed: Feed, token: Token, record: SessionRecord, *, spawn: Spawn) -> None:
        """Start at the stored head."""
        self.token = token
        self.head = record.head
        self._at_ms = record.at_ms
        self._store, self._feed, self._spawn = store, feed, spawn
        self._staged: list[Row] = []
        self._blobs: Blobs = NO_BLOBS
        self._commits: deque[_Commit] = deque()
        self._writing = False
        self._writer: asyncio.Task[None] | None = None
        self._failure: _Failure | None = None
        #: since its owner can't read what it needs to go on; nothing need be pending
        self._unread: _Failure | None = None
        self._over: SaysoError | None = None
        #: set while nothing is unresolved, and for good once this journal is over
        self._settled = asyncio.Event()
        self._settled.set()
        feed.on_seen = self.seen

    @property
    def status(self) -> JournalStatus:
        """How it stands now."""
        pending, failure = len(self._feed.pending), self._failure or self._unread
        if self._over is not None:
            return JournalStatus(_state_after(self._over), pending)
        if failure is None:
            return JournalStatus(JournalState.PENDING if self._commits else JournalState.HEALTHY, pending)
        return JournalStatus(
            JournalState.RETRYING,
            pending,
            failure.attempts,
            failure.first_at_ms,
            failure.last_at_ms,
            failure.retry_at_ms,
        )

    @property
    def state(self) -> JournalState:
        """The state alone."""
        return self.status.state

    # accepting

    def stage(self, draft: Draft, *, blobs: Blobs = NO_BLOBS) -> Row:
        """Give a draft the next position, for the commit that is being put together. Nobody sees it yet,
        and if the process ends here it never was. `blobs` are the bytes that it brings: stored with its row."""
        self._at_ms = max(self._at_ms, self._store.now_ms())
        self.head += 1
        row = Row(self.head, self.token.epoch, draft.turn, self.token.commit_key(self.head), self._at_ms, draft.body)
        self._staged.append(row)
        self._blobs = {**self._blobs, **blobs}
        return row

    def accept(self, *, ends: bool = False) -> Ticket:
        """Accept what is staged as one commit: publish it, and send it to the store in order.

        Nothing here awaits, so a listener either has a row in its queue or finds it among the pending ones. While
        the session is unresolved only results that end what was begun are taken (`ends`); they wait behind what
        is pending, and their ticket raises at once.

        Raises:
            Unresolved: see above; what was staged is as if it had not been.
            Fenced, Gone, Conflict: this journal is over.
        """
        rows, self._staged = tuple(self._staged), []
        blobs, self._blobs = self._blobs, NO_BLOBS
        refused = self._over or (self._failure.error if self._failure is not None and not ends else None)
        if refused is not None:
            self.head -= len(rows)
            raise refused
        commit = _Commit(rows, asyncio.get_running_loop().create_future(), blobs)
        self._commits.append(commit)
        self._feed.pending.extend(rows)
        self._feed.publish(rows)
        if self._failure is not None:
            _fail(commit, self._failure.error)
            self._tell()
        elif not self._writing:
            self._writing = True
            self._writer = self._spawn(self._write_pending())
        return Ticket(rows, commit.done)

    def write(self, turn: str, reply: int, text: str) -> None:
        """Publish a piece of a reply that is being written. It is no row: it may be lost, and nothing acts on it."""
        self._feed.write(turn, reply, scrub(text))

    def show(self, event: str, data: dict[str, Any]) -> None:
        """Publish something that is no row to those who listen now: it may be lost, and nothing acts on it."""
        self._feed.show(event, data)

    def written(self, turn: str, reply: int) -> str:
        """Publish what is held of a reply that is being written, and return all that was published of it. A row with
        this text takes its place when it is accepted."""
        return self._feed.written(turn, reply)

    def erase(self) -> None:
        """Forget what was published of a reply that ends without a row."""
        self._feed.erase()

    # settling

    async def reconcile(self, *, now_ms: int | None = None) -> bool:
        """Try once, if a try is due, to make everything pending durable, in the order of acceptance up to the first
        failure; return whether it was tried. `now_ms` (default: the store's time) says what is due by then.

        Never for a journal that is over: a conflict is an operator's to settle (K7).
        """
        at_ms = self._store.now_ms() if now_ms is None else now_ms
        if self._over is not None or self._failure is None or self._writing or at_ms < self._failure.retry_at_ms:
            return False
        self._writing = True
        await self._write_pending()
        return True

    def unread(self, error: SaysoError, *, wait_ms: int) -> None:
        """The owner can't read what it needs to go on, and tries again after that time: readers are told, as they are
        when a write gets no answer. `was_read` ends it."""
        now_ms, before = self._store.now_ms(), self._unread
        attempts, first_at_ms = (1, now_ms) if before is None else (before.attempts + 1, before.first_at_ms)
        told = Unresolved(self.token.session, self.head + 1)
        self._unread = _Failure(told, attempts, first_at_ms, now_ms, now_ms + wait_ms)
        self._tell()
        extra = {"session": self.token.session, "attempt": attempts, "wait_ms": wait_ms}
        log.warning("inbox not read", extra={**extra, "cause": str(error)})

    def was_read(self) -> None:
        """The owner has read what it needed."""
        if self._unread is not None:
            self._unread = None
            self._tell_if_well()

    async def settled(self) -> None:
        """Return once nothing is unresolved.

        Raises:
            Fenced, Gone, Conflict: this journal is over.
        """
        await self._settled.wait()
        if self._over is not None:
            raise self._over

    def seen(self, stored: Sequence[Row]) -> None:
        """Take notice of rows that a reader found stored (K3): one that has a pending row's key and content
        proves its whole commit, and all before it; one of a later epoch under that number says that the session was
        taken over, as a fenced write would (K2); any other with other content is a conflict."""
        by_seq = {row.seq: row for row in stored}
        proven = 0
        for place, commit in enumerate(self._commits, 1):
            for row in commit.rows:
                found = by_seq.get(row.seq)
                if found is None:
                    continue
                if not _same(found, row):
                    taken_over = found.epoch > self.token.epoch
                    self._end(
                        Fenced(self.token.session, ours=self.token.epoch)
                        if taken_over
                        else Conflict(self.token.session, row.seq)
                    )
                    return
                proven = place
        for _ in range(proven):
            self._pop()
        if proven and not self._commits:
            self._recovered()

    async def _write_pending(self) -> None:
        """Write what was accepted, commit by commit, until nothing waits or a write gets no answer."""
        try:
            while self._over is None and self._commits:
                commit = self._commits[0]
                await self._write(commit)
                if self._commits and self._commits[0] is commit:  # a reader may have proven it meanwhile
                    self._pop()
            self._recovered()
        except (StoreUnavailable, CommitUnknown) as error:
            self._failed(error)
        except SaysoError as error:
            self._end(error)
        except Exception:
            log.exception("rows can't be written", extra={"session": self.token.session})
            self._end(Conflict(self.token.session, self._commits[0].rows[0].seq))
        finally:
            self._writing = False

    async def _write(self, commit: _Commit) -> None:
        session, seq = self.token.session, commit.rows[0].seq
        match await self._store.write(self.token, commit.rows, blobs=commit.blobs):
            case WriteOutcome.WRITTEN | WriteOutcome.ALREADY:
                return
            case WriteOutcome.FENCED:
                raise Fenced(session, ours=self.token.epoch)
            case WriteOutcome.GONE:
                raise Gone(session)
            case WriteOutcome.CONFLICT | WriteOutcome.BEHIND:
                raise Conflict(session, seq)

    def _pop(self) -> None:
        commit = self._commits.popleft()
        self._feed.stored(len(commit.rows))
        if not commit.done.done():
            commit.done.set_result(None)

    def _recovered(self) -> None:
        if self._over is None:
            self._failure = None
            self._settled.set()
            self._tell_if_well()

    def _failed(self, error: SaysoError) -> None:
        """A write got no answer: whoever waits is told, what was accepted stays, and the next try has its time."""
        if not self._commits:  # a reader has found all of it stored
            self._recovered()
            return
        now_ms, before = self._store.now_ms(), self._failure
        attempts = 1 if before is None else before.attempts + 1
        wait_ms = delay_ms(attempts, chance=random.random())  # noqa: S311 - jitter, no secret
        seq = self._commits[0].rows[0].seq
        told = Unresolved(self.token.session, seq)
        first_at_ms = now_ms if before is None else before.first_at_ms
        self._failure = _Failure(told, attempts, first_at_ms, now_ms, now_ms + wait_ms)
        self._settled.clear()
        for commit in self._commits:
            _fail(commit, told)
        self._tell()
        extra = {"session": self.token.session, "seq": seq, "attempt": attempts, "wait_ms": wait_ms}
        log.warning("rows not stored yet", extra={**extra, "cause": str(error)})

    def _tell_if_well(self) -> None:
        if self._over is None and self._failure is None and self._unread is None:
            self._feed.tell(None)

    def _tell(self) -> None:
        status = self.status
        self._feed.tell(Status(status.state, status.pending))

    def _end(self, error: SaysoError) -> None:
        """End this journal: what is pending here may never be stored.

        Readers go to whoever owns the session now; in a conflict they keep what they were shown, for nobody
        may choose for them but an operator (H40).
        """
        self._over = error if not isinstance(error, IllegalChange) else Conflict(self.token.session, self.head)
        state = self.state
        level = logging.ERROR if state is JournalState.CONFLICT else logging.WARNING
        log.log(level, "journal given up", extra={"session": self.token.session, "cause": str(error)})
        for commit in self._commits:
            _fail(commit, self._over)
        self._commits.clear()
        self._feed.on_seen = None
        self._settled.set()
        if state is JournalState.CONFLICT:
            self._feed.undecided()
            self._tell()
        else:
            self._feed.lost()
            self._feed.dismiss("gone" if state is JournalState.GONE else "moved")


def _fail(commit: _Commit, error: SaysoError) -> None:
    if not commit.done.done():
        commit.done.set_exception(error)
        commit.done.exception()  # whoever waits is told; nobody waiting is no fault


def _same(stored: Row, ours: Row) -> bool:
    """Whether a stored row is ours: by its key, and by everything that we wrote."""
    mine = (ours.commit_key, ours.epoch, ours.turn, ours.kind, ours.at_ms, encode_body(ours.body))
    return mine == (stored.commit_key, stored.epoch, stored.turn, stored.kind, stored.at_ms, encode_body(stored.body))


def _state_after(error: SaysoError) -> JournalState:
    match error:
        case Fenced():
            return JournalState.FENCED
        case Gone():
            return JournalState.GONE
        case _:
            return JournalState.CONFLICT
