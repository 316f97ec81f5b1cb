"""What is published of the sessions of this process, and who listens.

Accepting, publishing and registering contain no `await`. So whoever registers at some instant has every later
event in its queue, and finds every earlier row in the store, in the ring, or among the pending ones of that instant.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from sayso.core.errors import StaleToken
from sayso.core.rows import ModelCalledBody, ModelSaidBody, Row, TurnEndBody
from sayso.core.session import Position
from sayso.core.view import Json, public
from sayso.journal.frames import PLAIN, Delta, Event, Projection, Published, Shown, Status, encode

log = logging.getLogger(__name__)

#: unfinished text is gathered for so long, or up to so many characters, before it is published
DELTA_S, DELTA_CHARS = 0.025, 4096
#: what is shown live beside rows and text, encoded; more than that is shown to nobody
SHOWN_BYTES_MAX = 512 * 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept of a session for those who listen to it. Bytes are those of encoded events."""

    #: what a listener may be behind before it is sent away, to come back by its cursor
    queue_events: int = 512
    queue_bytes: int = 8 * 1024 * 1024
    #: newest rows of a session that is owned and listened to: a reader who comes back gets them without the store
    ring_rows: int = 1_000
    ring_bytes: int = 1024 * 1024
    #: the same once nobody listens any more
    alone_rows: int = 32
    alone_bytes: int = 16 * 1024
    #: rows that are sent to a reader who comes back; of more, the newest, and it is told which it has to read
    replay_rows: int = 2_000


class Queue:
    """Events on their way to one reader, and None behind the last one. For one reader, in one event loop."""

    __slots__ = ("_items", "_woken", "size_bytes")

    def __init__(self) -> None:
        self._items = deque[Event | None]()
        self._woken: asyncio.Future[None] | None = None
        self.size_bytes = 0

    def put_nowait(self, event: Event | None) -> None:
        """Take an event."""
        self._items.append(event)
        self.size_bytes += _size(event)
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def get_nowait(self) -> Event | None:
        """Return the next event; IndexError if there is none."""
        event = self._items.popleft()
        self.size_bytes -= _size(event)
        return event

    async def get(self) -> Event | None:
        """Return the next event, and wait for it if there is none."""
        while not self._items:
            self._woken = asyncio.get_running_loop().create_future()
            try:
                await self._woken
            finally:
                self._woken = None
        return self.get_nowait()

    def qsize(self) -> int:
        """Return how many wait."""
        return len(self._items)

    def empty(self) -> bool:
        """Return whether none waits."""
        return not self._items


def _size(event: Event | None) -> int:
    return 0 if event is None else len(event.frame.sse)


class Listener:
    """One live reader. Its queue is bounded; the first event that finds it full closes it, and nothing follows."""

    __slots__ = ("_bounds", "began", "farewell", "queue")

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self.queue = Queue()
        #: why it was sent away; empty while it is welcome
        self.farewell = ""
        #: number of the first row that was published to it
        self.began: int | None = None

    def offer(self, event: Event) -> None:
        """Take an event, or close for good if the reader is too far behind."""
        if self.farewell:
            return
        if self.queue.qsize() >= self._bounds.queue_events or self.queue.size_bytes >= self._bounds.queue_bytes:
            self.close("slow")
            return
        if self.began is None and isinstance(event, Published):
            self.began = event.row.seq
        self.queue.put_nowait(event)

    def close(self, farewell: str) -> None:
        """End after what is queued; the reader comes back by its cursor."""
        if not self.farewell:
            self.farewell = farewell
            self.queue.put_nowait(None)


class Ring:
    """The newest rows of one ownership, encoded. They follow each other, and all have its epoch."""

    __slots__ = ("_bytes", "_rows")

    def __init__(self) -> None:
        self._rows, self._bytes = deque[Published](), 0

    def add(self, published: Sequence[Published]) -> None:
        """Take rows that were accepted."""
        self._rows.extend(published)
        self._bytes += sum(len(one.frame.sse) for one in published)

    def cut(self, *, rows_max: int, bytes_max: int) -> None:
        """Let the oldest go, down to the bounds."""
        while self._rows and (len(self._rows) > rows_max or self._bytes > bytes_max):
            self._bytes -= len(self._rows.popleft().frame.sse)

    def clear(self) -> None:
        """Let all go."""
        self._rows.clear()
        self._bytes = 0

    def after(self, position: Position) -> list[Published] | None:
        """Return the rows after a position of this ownership; None where the ring doesn't reach so far."""
        if not self._rows:
            return None
        first, last = self._rows[0].row, self._rows[-1].row
        if position.epoch != first.epoch or not first.seq - 1 <= position.seq <= last.seq:
            return None
        return list(islice(self._rows, position.seq - first.seq + 1, None))


@dataclass(frozen=True, slots=True)
class Joined:
    """A listener, and what stood in the instant it was registered."""

    listener: Listener
    #: rows accepted and not durable
    pending: tuple[Row, ...]
    #: that the store does not follow, and what was published of the reply that is being written
    standing: tuple[Event, ...]
    #: the rows that the reader misses, where the ring has them all
    missing: Sequence[Published] | None


class Watch:
    """What is accepted of a session while somebody reads the store: nothing that a history must show is missed."""

    __slots__ = ("accepted", "ends", "owned", "pending")

    def __init__(self, feed: Feed, *, rows_max: int) -> None:
        #: pending in the instant before the read began
        self.pending = tuple(feed.pending)
        self.accepted = deque[Row](maxlen=rows_max)
        self.owned, self.ends = feed.owned, feed.ends


@dataclass(frozen=True)
class Captured:
    """A piece of a session's history, and what to follow it from."""

    session: str
    rows: tuple[Row, ...]
    #: position of the newest accepted row of the session; None of an older piece, which nothing can be followed from
    token: Position | None

    @cached_property
    def text(self) -> str:
        """The page as its readers get it, JSON. Made once, for all who asked for it at the same time."""
        token = None if self.token is None else str(self.token)
        return encode({"rows": [public(row, self.session) for row in self.rows], "token": token})


@dataclass(eq=False, slots=True)
class Feed:
    """What is published of one session in this process: its listeners, and the accepted rows that are
    not durable yet. It exists while somebody reads or the session is owned here."""

    session: str = ""
    projection: Projection = PLAIN
    bounds: Bounds = Bounds()
    listeners: set[Listener] = field(default_factory=set)
    #: whether anybody has listened: until then no row is put into words, and the ring has none
    heard: bool = False
    watches: set[Watch] = field(default_factory=set)
    #: histories that are being read, by limit and end: who asks for the same one meanwhile shares it
    loads: dict[tuple[int, int | None], asyncio.Future[Captured | None]] = field(default_factory=dict)
    ring: Ring = field(default_factory=Ring)
    #: accepted and not yet durable, in order; kept by the journal that owns the session
    pending: list[Row] = field(default_factory=list)
    owned: bool = False
    #: how often an ownership ended here: what was read across such an end may show what never was
    ends: int = 0
    #: the newest accepted row, in a session that is owned here; None while that isn't known
    newest: Position | None = None
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

    # rows

    def publish(self, rows: Sequence[Row]) -> None:
        """Hand accepted rows to every listener. No await: this is part of acceptance. Unfinished text that
        belongs before them goes first, and a row that ends it takes its place."""
        self.flush()
        self.newest = rows[-1].position
        for watch in self.watches:
            watch.accepted.extend(rows)
        if self.heard:
            published = [Published(row, self.projection.frame(row, self.session)) for row in rows]
            self.ring.add(published)
            self.cut()
            self._offer(published)
        if any(isinstance(row.body, ModelSaidBody | ModelCalledBody | TurnEndBody) for row in rows):
            self.unfinished = None

    def cut(self) -> None:
        """Keep as many rows as those who listen may come back for."""
        rows_max, bytes_max = self.bounds.ring_rows, self.bounds.ring_bytes
        if not self.listeners:
            rows_max, bytes_max = min(rows_max, self.bounds.alone_rows), min(bytes_max, self.bounds.alone_bytes)
        self.ring.cut(rows_max=rows_max, bytes_max=bytes_max)

    def stored(self, count: int) -> None:
        """The oldest `count` pending rows are durable."""
        del self.pending[:count]
        self._answer_waiting(durable=True)

    def lost(self) -> None:
        """The pending rows may never be stored. Who was shown them comes back by cursor, and is told (K1)."""
        if self.pending:
            self.dismiss("moved")
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

    def seen(self, stored: Sequence[Row]) -> None:
        """Rows were found stored."""
        if self.on_seen is not None and self.pending:
            self.on_seen(stored)

    def found(self, newest: Position, watch: Watch) -> None:
        """A read that `watch` watched found this row to be the newest stored one: of a session that was owned here
        all the time, and of which nothing was accepted, it is the newest."""
        if self.owned and watch.owned and watch.ends == self.ends and self.newest is None:
            self.newest = newest

    # ownership

    def own(self) -> None:
        """The session is owned here from now on, under a new epoch."""
        self.owned, self.newest = True, None
        self.ring.clear()

    def disown(self) -> None:
        """The session is not owned here any more."""
        self.owned, self.newest, self.status, self.on_seen = False, None, None, None
        self.ends += 1
        self.lost()
        self.erase()
        self.ring.clear()

    # a reply that is being written

    def write(self, turn: str, reply: int, text: str) -> None:
        """Take a piece of a reply that is being written. The first piece of another one replaces it (K5)."""
        if self.unfinished is None or (self.unfinished.turn, self.unfinished.reply) != (turn, reply):
            self._let_go_of_held()
            self.unfinished = Delta(turn, reply, 0, "")
        self.held += text
        if len(self.held) >= DELTA_CHARS:
            self.flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(DELTA_S, self.flush)

    def flush(self) -> None:
        """Publish what is held. What a reader who joins is told and what the others are told change in one step."""
        held, so_far = self._let_go_of_held(), self.unfinished
        if held and so_far is not None:
            self.unfinished = Delta(so_far.turn, so_far.reply, 0, so_far.text + held)
            self._offer([Delta(so_far.turn, so_far.reply, len(so_far.text), held)])

    def erase(self) -> None:
        """Forget the unfinished reply: it ended without a row, or the session is not owned here any more. Who was
        shown some of it is told that it is nothing."""
        self._let_go_of_held()
        so_far, self.unfinished = self.unfinished, None
        if so_far is not None and so_far.text:
            self._offer([Delta(so_far.turn, so_far.reply, 0, "")])

    def _let_go_of_held(self) -> str:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        held, self.held = self.held, ""
        return held

    def written(self, turn: str, reply: int) -> str:
        """Publish what is held, and return what was published of this reply from its first character on; empty where
        nothing was."""
        self.flush()
        so_far = self.unfinished
        return so_far.text if so_far is not None and (so_far.turn, so_far.reply) == (turn, reply) else ""

    # beside rows

    def tell(self, status: Status | None) -> None:
        """Tell the readers that the store does not follow, or (None) that it does again."""
        if status != self.status:
            self.status = status
            self._offer([status or Status("healthy", 0)])

    def show(self, event: str, data: Json) -> None:
        """Publish something that is no row, e.g. a result before it is accepted, or that the queue has changed: to
        everybody who listens now, in order with the rows, and without an id. Who comes later does not get it.
        """
        if not self.listeners:
            return
        shown = Shown(event, data)
        if len(shown.frame.sse) > SHOWN_BYTES_MAX:
            log.warning("too long to be shown live", extra={"session": self.session, "event": event})
            return
        self._offer([shown])

    @property
    def standing(self) -> tuple[Event, ...]:
        """What a reader who joins is told beside rows."""
        writing = self.unfinished if self.unfinished is not None and self.unfinished.text else None
        return tuple(event for event in (self.status, writing) if event is not None)

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

    def __init__(self, *, projection: Projection = PLAIN, bounds: Bounds | None = None) -> None:
        self.projection, self.bounds = projection, bounds or Bounds()
        self._feeds: dict[str, Feed] = {}

    def _feed(self, session: str) -> Feed:
        feed = self._feeds.get(session)
        if feed is None:
            feed = self._feeds[session] = Feed(session, self.projection, self.bounds)
        return feed

    # owners

    def own(self, session: str) -> Feed:
        """Return the session's feed for its owner."""
        feed = self._feed(session)
        feed.own()
        return feed

    def disown(self, session: str) -> None:
        """The session is not owned here any more."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.disown()
            self._drop_if_unused(feed)

    def pending(self, session: str) -> tuple[Row, ...]:
        """Return the accepted rows of a session that are not durable yet."""
        feed = self._feeds.get(session)
        return tuple(feed.pending) if feed is not None else ()

    async def durable(self, session: str, row: Row) -> bool:
        """Return True once a published row is durable; False if it may never be."""
        feed = self._feeds.get(session)
        return feed is None or await feed.durable(row)

    async def durable_at(self, session: str, position: Position) -> bool:
        """Return True once the row that was published at a position is durable; False if it may never be."""
        row = next((row for row in self.pending(session) if row.position == position), None)
        return row is None or await self.durable(session, row)

    def show(self, session: str, event: str, data: Json) -> None:
        """Publish something that is no row to who listens to a session here. See `Feed.show`."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.show(event, data)

    # listeners

    def listen(self, session: str, *, token: Position | None = None) -> tuple[Listener, tuple[Row, ...]]:
        """Register a listener, and copy what is pending in the same instant. See `join` for the token.

        Raises:
            StaleToken: a row was accepted since; nothing is registered.
        """
        joined = self.join(session, token=token)
        return joined.listener, joined.pending

    def join(self, session: str, *, after: Position | None = None, token: Position | None = None) -> Joined:
        """Register a listener that has every row up to `after`, as far as they still stand.

        With the token of a history, only if that is still the newest position (H3): then nothing has come between
        the two, and nothing is missing. Check and registration are one step. Where the session is not owned here
        nobody can say, and the token is a position to follow from like any other (K4).

        Raises:
            StaleToken: a row was accepted since; nothing is registered.
        """
        feed = self._feeds.get(session)
        strict = token is not None and feed is not None and feed.owned
        if strict and feed is not None and token != feed.newest:
            raise StaleToken(session)
        feed = self._feed(session)
        listener = Listener(self.bounds)
        feed.listeners.add(listener)
        feed.heard = True
        cursor = token or after
        missing = [] if strict else feed.ring.after(cursor) if cursor is not None else None
        return Joined(listener, tuple(feed.pending), feed.standing, missing)

    # histories

    def loading(self, session: str, limit: int, before: int | None) -> asyncio.Future[Captured | None] | None:
        """Return the history that somebody is reading already, if it is this one."""
        feed = self._feeds.get(session)
        return feed.loads.get((limit, before)) if feed is not None else None

    def watch(self, session: str, *, rows_max: int) -> tuple[Feed, Watch]:
        """Begin to note what is accepted of a session: its newest `rows_max` rows from now on."""
        feed = self._feed(session)
        watch = Watch(feed, rows_max=rows_max)
        feed.watches.add(watch)
        return feed, watch

    def unwatch(self, feed: Feed, watch: Watch) -> None:
        """End that."""
        feed.watches.discard(watch)
        self._drop_if_unused(feed)

    def newest_is_unknown(self, session: str) -> bool:
        """Whether the session is owned here, and its newest row was stored before: a read finds it."""
        feed = self._feeds.get(session)
        return feed is not None and feed.owned and feed.newest is None

    def leave(self, session: str, listener: Listener) -> None:
        """Forget a listener."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.listeners.discard(listener)
            feed.cut()
            self._drop_if_unused(feed)

    def listeners(self) -> int:
        """Return how many there are."""
        return sum(len(feed.listeners) for feed in self._feeds.values())

    def dismiss(self, session: str, farewell: str) -> None:
        """Send every listener of a session away."""
        feed = self._feeds.get(session)
        if feed is not None:
            feed.dismiss(farewell)

    def dismiss_all(self, farewell: str) -> None:
        """Send every listener of every session away (shutdown)."""
        for feed in tuple(self._feeds.values()):
            feed.dismiss(farewell)

    def _drop_if_unused(self, feed: Feed) -> None:
        if not feed.owned and not feed.listeners and not feed.watches:
            self._feeds.pop(feed.session, None)
