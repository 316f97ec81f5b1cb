"""Read from a position and stay: stored rows, then live ones, each once and in place (the hand-off).

Accepting, publishing and registering contain no `await`, so a listener registered at some instant has
every later row in its queue; what came before is in the store or among the rows copied in that instant.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from sayso.core.rows import ModelCalledBody, ModelSaidBody, Row, TurnEndBody
from sayso.core.session import START, Position
from sayso.core.view import Json, public
from sayso.storage.store import Store

log = logging.getLogger(__name__)

#: events a listener may be behind before it is sent away to come back by its cursor
QUEUE_EVENTS_MAX = 512
#: unfinished text is gathered for so long, or up to so many characters, before it is published
DELTA_S, DELTA_CHARS = 0.025, 4096
#: rows fetched from the store at a time while catching up
PAGE_ROWS = 500
#: what is shown live beside rows and text, encoded; more than that is shown to nobody
SHOWN_BYTES_MAX = 512 * 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """One event for a listener. Only a row has an id; the id is its position."""

    event: str
    data: str
    id: str | None = None


@dataclass(frozen=True)
class Published:
    """A row as published: encoded once, when the first listener wants it, and shared."""

    row: Row

    @cached_property
    def frame(self) -> Frame:
        """The event that stands for the row."""
        return Frame(self.row.kind, encode(public(self.row)), str(self.row.position))


@dataclass(frozen=True)
class Delta:
    """A piece of a reply that is still being written: where it belongs, and from which character on (K5).

    It has no id and may be lost: a reader who joins gets the text so far, and the row replaces it.
    """

    turn: str
    reply: int
    offset: int
    text: str

    @cached_property
    def frame(self) -> Frame:
        """The event that stands for the piece."""
        place = {"turn": self.turn, "reply": self.reply, "offset": self.offset}
        return Frame("delta", encode({**place, "text": self.text}))


@dataclass(frozen=True)
class Status:
    """Whether the store follows, for those who read: nothing of what a row says."""

    state: str
    pending: int

    @cached_property
    def frame(self) -> Frame:
        """The event that tells it. It has no id."""
        return Frame("status", encode({"state": self.state, "pending": self.pending}))


@dataclass(frozen=True)
class Shown:
    """Something that is shown live and is no row: it has no id, may be lost, and a row or a read heals it."""

    event: str
    data: Json

    @cached_property
    def frame(self) -> Frame:
        """The event as it goes out."""
        return Frame(self.event, encode(self.data))


Event = Published | Delta | Status | Shown


def encode(value: object) -> str:
    """Return the JSON text of an event's data, on one line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@dataclass(eq=False, slots=True)
class Listener:
    """One live reader. Its queue is bounded; the first event that finds it full closes it."""

    queue: asyncio.Queue[Event | None] = field(default_factory=lambda: asyncio.Queue(QUEUE_EVENTS_MAX + 1))
    #: why it was sent away; empty while it is welcome
    farewell: str = ""

    def offer(self, event: Event) -> None:
        """Take an event, or close for good if the reader is too far behind."""
        if self.farewell:
            return
        if self.queue.qsize() >= QUEUE_EVENTS_MAX:
            self.close("slow")
        else:
            self.queue.put_nowait(event)

    def close(self, farewell: str) -> None:
        """End the stream after what is queued; the reader comes back by its cursor."""
        if not self.farewell:
            self.farewell = farewell
            self.queue.put_nowait(None)


@dataclass(eq=False, slots=True)
class Feed:
    """What is published of one session in this process: its listeners, and the accepted rows that are
    not durable yet. It exists while somebody listens or the session is owned here."""

    listeners: set[Listener] = field(default_factory=set)
    #: accepted and not yet durable, in order; kept by the journal that owns the session
    pending: list[Row] = field(default_factory=list)
    owned: bool = False
    #: told of rows that a reader found stored, so that a lost acknowledgement is noticed (K3)
    on_seen: Callable[[Sequence[Row]], None] | None = None
    #: what readers were told of the store; None while it follows
    status: Status | None = None
    #: the reply that is being written: what was published of it, from its first character
    unfinished: Delta | None = None
    #: what was written of it since, and waits to be published
    held: str = ""
    #: who waits for a pending row to be durable
    _waiting: list[tuple[Row, asyncio.Future[bool]]] = field(default_factory=list)
    _timer: asyncio.TimerHandle | None = None

    def publish(self, rows: Sequence[Row]) -> None:
        """Hand accepted rows to every listener. No await: this is part of acceptance. Unfinished text that
        belongs before them goes first, and a row that ends it takes its place."""
        self.flush()
        self._offer([Published(row) for row in rows] if self.listeners else [])
        if any(isinstance(row.body, ModelSaidBody | ModelCalledBody | TurnEndBody) for row in rows):
            self.unfinished = None

    def stored(self, count: int) -> None:
        """The oldest `count` pending rows are durable."""
        del self.pending[:count]
        self._answer_waiting(durable=True)

    def lost(self) -> None:
        """The pending rows may never be stored."""
        self.pending.clear()
        self._answer_waiting(durable=False)

    def undecided(self) -> None:
        """The pending rows stay as they are shown, and nobody can say when they will be durable (K7)."""
        for _, answer in self._waiting:
            if not answer.done():
                answer.set_result(False)
        self._waiting = []

    async def durable(self, row: Row) -> bool:
        """Return True once a published row is durable; False if it may never be."""
        if row not in self.pending:
            return True
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.append((row, answer))
        return await answer

    def _answer_waiting(self, *, durable: bool) -> None:
        still = [(row, answer) for row, answer in self._waiting if row in self.pending]
        for row, answer in self._waiting:
            if row not in self.pending and not answer.done():
                answer.set_result(durable)
        self._waiting = still

    def write(self, turn: str, reply: int, text: str) -> None:
        """Take a piece of a reply that is being written. The first piece of another one replaces it (K5)."""
        if self.unfinished is None or (self.unfinished.turn, self.unfinished.reply) != (turn, reply):
            self.erase()
            self.unfinished = Delta(turn, reply, 0, "")
        self.held += text
        if len(self.held) >= DELTA_CHARS:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELTA_S, self.flush)

    def flush(self) -> None:
        """Publish what is held. What a reader who joins is told and what the others are told change in one step."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.held and self.unfinished is not None:
            so_far = self.unfinished
            piece = Delta(so_far.turn, so_far.reply, len(so_far.text), self.held)
            self.unfinished = Delta(so_far.turn, so_far.reply, 0, so_far.text + self.held)
            self.held = ""
            self._offer([piece])

    def tell(self, status: Status | None) -> None:
        """Tell the readers that the store does not follow, or (None) that it does again."""
        if status != self.status:
            self.status = status
            self._offer([status or Status("healthy", 0)])

    def show(self, event: str, data: Json) -> None:
        """Publish something that is no row, e.g. a result before it is accepted, or that the queue has changed: to
        everybody who listens now, in order with the rows, and without an id. Who comes later does not get it.
        """
        shown = Shown(event, data)
        if not self.listeners:
            return
        if len(shown.frame.data.encode("utf-8", "replace")) > SHOWN_BYTES_MAX:
            log.warning("too long to be shown live", extra={"event": event})
            return
        self._offer([shown])

    def erase(self) -> None:
        """Forget the unfinished reply: it ended without a row, or the session is not owned here any more."""
        self.flush()
        self.unfinished = None

    def _offer(self, events: Sequence[Event]) -> None:
        for listener in tuple(self.listeners):
            for event in events:
                listener.offer(event)

    def dismiss(self, farewell: str) -> None:
        """Send every listener away, to come back by its cursor."""
        for listener in tuple(self.listeners):
            listener.close(farewell)


class Feeds:
    """The feeds of this process, one a session that somebody reads or that is owned here."""

    def __init__(self) -> None:
        self._feeds: dict[str, Feed] = {}

    def own(self, session: str) -> Feed:
        """Return the session's feed for its owner."""
        feed = self._feeds.setdefault(session, Feed())
        feed.owned = True
        return feed

    def disown(self, session: str) -> None:
        """The session is not owned here any more."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.owned = False
            feed.lost()
            feed.erase()
            feed.status = None
            self._drop_if_unused(session, feed)

    def listen(self, session: str) -> tuple[Listener, tuple[Row, ...]]:
        """Register a listener, and copy what is pending in the same instant."""
        feed = self._feeds.setdefault(session, Feed())
        listener = Listener()
        feed.listeners.add(listener)
        return listener, tuple(feed.pending)

    def standing(self, session: str) -> list[Event]:
        """Return what a reader who joins is told beside rows: that the store does not follow, and what was
        published of the reply that is being written."""
        feed = self._feeds.get(session)
        if feed is None:
            return []
        writing = feed.unfinished if feed.unfinished is not None and feed.unfinished.text else None
        return [event for event in (feed.status, writing) if event is not None]

    def leave(self, session: str, listener: Listener) -> None:
        """Forget a listener."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.listeners.discard(listener)
            self._drop_if_unused(session, feed)

    async def durable(self, session: str, row: Row) -> bool:
        """Return True once a published row is durable; False if it may never be."""
        feed = self._feeds.get(session)
        return feed is None or await feed.durable(row)

    async def durable_at(self, session: str, position: Position) -> bool:
        """Return True once the row that was published at a position is durable; False if it may never be."""
        row = next((row for row in self.pending(session) if row.position == position), None)
        return row is None or await self.durable(session, row)

    def pending(self, session: str) -> tuple[Row, ...]:
        """Return the accepted rows of a session that are not durable yet."""
        feed = self._feeds.get(session)
        return tuple(feed.pending) if feed is not None else ()

    def show(self, session: str, event: str, data: Json) -> None:
        """Publish something that is no row to who listens to a session here. See `Feed.show`."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.show(event, data)

    def dismiss(self, session: str, farewell: str) -> None:
        """Send every listener of a session away."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.dismiss(farewell)

    def dismiss_all(self, farewell: str) -> None:
        """Send every listener of every session away (shutdown)."""
        for feed in tuple(self._feeds.values()):
            feed.dismiss(farewell)

    def listeners(self) -> int:
        """Return how many there are."""
        return sum(len(feed.listeners) for feed in self._feeds.values())

    def _drop_if_unused(self, session: str, feed: Feed) -> None:
        if not feed.owned and not feed.listeners:
            del self._feeds[session]


async def follow(store: Store, feeds: Feeds, session: str, *, after: Position | None) -> AsyncGenerator[Frame, None]:
    """Yield what comes after a position, and stay (K1).

    First `resume {keep}`: rows beyond `keep` that the reader shows were never stored, and it drops them.
    Then the missing rows, then `caught_up`, then the text so far of a reply that is being written, then rows
    and pieces of text as they come, and `status` when the store stops or begins again to follow. It ends with
    `farewell` when this process lets the reader go; it then comes back by its cursor. `after=None` means from
    the start.

    Raises:
        StoreUnavailable: the store can't be read now.
    """
    listener, pending = feeds.listen(session)
    standing = feeds.standing(session)  # in the same instant: what comes later is in the queue
    try:
        keep = await store.keep(session, after if after is not None else START)
        yield Frame("resume", encode({"keep": keep}))
        seen = keep
        while page := await store.rows(session, after=seen, limit=PAGE_ROWS):
            for row in page:
                yield Published(row).frame
            seen = page[-1].seq
        for row in pending:
            if row.seq > seen:
                yield Published(row).frame
                seen = row.seq
        yield Frame("caught_up", encode({"seq": seen}))
        for event in standing:
            yield event.frame
        while (coming := await listener.queue.get()) is not None:
            if not isinstance(coming, Published):
                yield coming.frame
            elif coming.row.seq == seen + 1:
                yield coming.frame
                seen = coming.row.seq
            elif coming.row.seq > seen:  # a row that would leave a gap ends the stream instead
                listener.close("gap")
                break
        yield Frame("farewell", encode({"reason": listener.farewell}))
    finally:
        feeds.leave(session, listener)


async def capture(
    store: Store, feeds: Feeds, session: str, *, limit: int, before: int | None = None
) -> tuple[list[Row], Position]:
    """Return the newest `limit` rows (those with `seq < before`), and the position of the newest one.

    Stored rows, overlaid by seq with those that were pending when the load began and those still pending
    when it ended (K3), so that what was accepted is never missing. Fails rather than show less.

    Raises:
        StoreUnavailable: the store can't be read now.
    """
    listener, pending = feeds.listen(session)
    try:
        stored = await store.last_rows(session, limit=limit, before=before)
        by_seq = {row.seq: row for row in stored}
        accepted = [*pending]
        while not listener.queue.empty() and (event := listener.queue.get_nowait()) is not None:
            if isinstance(event, Published):
                accepted.append(event.row)
        for row in accepted:
            if before is None or row.seq < before:
                by_seq.setdefault(row.seq, row)
        rows = [by_seq[seq] for seq in sorted(by_seq)][-limit:]
        return rows, rows[-1].position if rows else START
    finally:
        feeds.leave(session, listener)
