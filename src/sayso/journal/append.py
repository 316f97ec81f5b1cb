"""Accept, publish, make durable: once, in order, under an epoch.

`stage` gives a row its position; `accept` publishes what is staged, without an `await`, and the store follows in order.
What must not act before it is durable awaits the ticket. While a write has no answer the session stands
still: later tickets wait behind it, and it is settled by its commit keys, never by writing it twice.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sayso.core.errors import CommitUnknown, Conflict, Fenced, IllegalChange, SaysoError, StoreUnavailable
from sayso.core.retry import delay_ms
from sayso.core.rows import Draft, Row
from sayso.core.session import SessionRecord, Token
from sayso.core.text import scrub
from sayso.journal.follow import Feed, Status
from sayso.storage.store import Store, WriteOutcome

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class JournalState(StrEnum):
    """Whether the store follows."""

    HEALTHY = "healthy"
    #: a write has no answer yet; it is tried again, and nothing goes past it
    UNRESOLVED = "unresolved"
    #: another epoch owns the session
    FENCED = "fenced"
    #: the store holds other rows, or refused ours: an operator must look
    CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class _Commit:
    rows: tuple[Row, ...]
    done: asyncio.Future[None]


@dataclass(frozen=True, slots=True)
class Ticket:
    """Accepted rows on their way into the store."""

    rows: tuple[Row, ...]
    _done: asyncio.Future[None]

    async def durable(self) -> None:
        """Return once the rows are stored.

        Raises:
            Fenced: another epoch owns the session, and these rows may never be stored.
            Conflict: the store holds others in their place.
        """
        await asyncio.shield(self._done)


class Journal:
    """The journal of one session under one token. The only writer of its rows in this process."""

    def __init__(
        self,
        store: Store,
        feed: Feed,
        token: Token,
        record: SessionRecord,
        *,
        spawn: Spawn,
        sleep: Callable[[int], Coroutine[Any, Any, None]],
    ) -> None:
        """Start at the stored head. `sleep` takes milliseconds."""
        self.token = token
        self.state = JournalState.HEALTHY
        self.head = record.head
        self._at_ms = record.at_ms
        self._store, self._feed, self._spawn, self._sleep = store, feed, spawn, sleep
        self._staged: list[Row] = []
        self._commits: deque[_Commit] = deque()
        self._writing = False
        self._writer: asyncio.Task[None] | None = None

    def stage(self, draft: Draft) -> Row:
        """Give a draft the next position, for the commit that is being put together. Nobody sees it yet,
        and if the process ends here it never was."""
        self._at_ms = max(self._at_ms, self._store.now_ms())
        self.head += 1
        row = Row(self.head, self.token.epoch, draft.turn, self.token.commit_key(self.head), self._at_ms, draft.body)
        self._staged.append(row)
        return row

    def accept(self) -> Ticket:
        """Accept what is staged as one commit: publish it, and send it to the store in order.

        Nothing here awaits, so a listener either has a row in its queue or finds it among the pending ones.

        Raises:
            Fenced, Conflict: this journal is over.
        """
        self._refuse_if_over()
        rows, self._staged = tuple(self._staged), []
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits.append(_Commit(rows, done))
        self._feed.pending.extend(rows)
        self._feed.publish(rows)
        if not self._writing:
            self._writing = True
            self._writer = self._spawn(self._write_all())
        return Ticket(rows, done)

    def write(self, turn: str, reply: int, text: str) -> None:
        """Publish a piece of a reply that is being written. It is no row: it may be lost, and nothing acts on it."""
        self._feed.write(turn, reply, scrub(text))

    def erase(self) -> None:
        """Forget what was published of a reply that ends without a row."""
        self._feed.erase()

    def _refuse_if_over(self) -> None:
        if self.state is JournalState.FENCED:
            raise Fenced(self.token.session, ours=self.token.epoch)
        if self.state is JournalState.CONFLICT:
            raise Conflict(self.token.session, self.head)

    async def _write_all(self) -> None:
        """Write what was accepted, commit by commit, until nothing waits."""
        try:
            while self._commits:
                commit = self._commits[0]
                await self._write(commit)
                self._commits.popleft()
                self._feed.stored(len(commit.rows))
                commit.done.set_result(None)
        except SaysoError as error:
            self._give_up(error)
        except Exception:
            log.exception("rows can't be written", extra={"session": self.token.session})
            self._give_up(Conflict(self.token.session, self._commits[0].rows[0].seq))
        finally:
            self._writing = False

    async def _write(self, commit: _Commit) -> None:
        attempt = 0
        while True:
            try:
                outcome = await self._store.write(self.token, commit.rows)
            except (StoreUnavailable, CommitUnknown) as error:
                attempt += 1
                self.state = JournalState.UNRESOLVED
                self._feed.tell(Status(self.state, len(self._feed.pending)))
                wait_ms = delay_ms(attempt, chance=random.random())  # noqa: S311 - jitter, no secret
                log.warning(
                    "rows not stored yet",
                    extra={
                        "session": self.token.session,
                        "seq": commit.rows[0].seq,
                        "attempt": attempt,
                        "wait_ms": wait_ms,
                        "cause": str(error),
                    },
                )
                await self._sleep(wait_ms)
                continue
            match outcome:
                case WriteOutcome.WRITTEN | WriteOutcome.ALREADY:
                    self.state = JournalState.HEALTHY
                    self._feed.tell(None)
                    return
                case WriteOutcome.FENCED:
                    raise Fenced(self.token.session, ours=self.token.epoch)
                case WriteOutcome.CONFLICT | WriteOutcome.BEHIND:
                    raise Conflict(self.token.session, commit.rows[0].seq)

    def _give_up(self, error: SaysoError) -> None:
        """End this journal: what is pending here may never be stored, and its readers are sent away."""
        self.state = JournalState.FENCED if isinstance(error, Fenced) else JournalState.CONFLICT
        level = logging.WARNING if isinstance(error, Fenced) else logging.ERROR
        log.log(level, "journal given up", extra={"session": self.token.session, "cause": str(error)})
        reason = error if not isinstance(error, IllegalChange) else Conflict(self.token.session, self.head)
        for commit in self._commits:
            commit.done.set_exception(reason)
            commit.done.exception()  # whoever waits is told; nobody waiting is no fault
        self._commits.clear()
        self._feed.lost()
        self._feed.dismiss("moved")
