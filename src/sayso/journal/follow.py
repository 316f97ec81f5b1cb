"""Read from a position and stay: stored rows, then live ones, each once and in place (the hand-off)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from sayso.core.errors import NotFound, StaleToken, StoreUnavailable
from sayso.core.rows import ConflictSettledBody, Row
from sayso.core.session import START, Position
from sayso.journal.feed import Captured, Feed, Feeds, Joined, Watch
from sayso.journal.frames import Frame, Published, caught_up, farewell, resume, resync, truncated
from sayso.storage.store import Store

#: rows fetched from the store at a time while catching up
PAGE_ROWS = 500


async def follow(
    store: Store, feeds: Feeds, session: str, *, after: Position | None = None, token: Position | None = None
) -> AsyncGenerator[Frame, None]:
    """Yield what comes after a position (None: from the start), and stay.

    First `resume {keep}`: rows beyond `keep` that the reader shows were never stored, and it drops them (K1). Then
    the missing rows; if they are very many `truncated` says first which of them are not sent. Then `caught_up`,
    the text so far of a reply that is being written, and what comes: rows, pieces of text, `status` when the
    store stops or begins again to follow. It ends with `farewell` when this process lets the reader go; it
    then comes back by its cursor.

    `token` is that of a history. Where the session is owned here it must still be the newest position (H3); if it
    is not, the answer is `resync`, a farewell, and nothing was registered.

    Raises:
        NotFound: the session is gone.
        StoreUnavailable: the store can't be read now.
    """
    try:
        joined = await _join(store, feeds, session, after=after, token=token)
    except StaleToken:
        yield resync("stale_token")
        yield farewell("stale_token")
        return
    reader = _Reader(store, feeds, session, token or after or START, joined)
    try:
        try:
            async for frame in reader.past():
                yield frame
            yield caught_up(reader.seen)
            for event in joined.standing:
                yield event.frame
            async for frame in reader.present():
                yield frame
        except _PassedOver:
            joined.listener.close("moved")
        yield farewell(joined.listener.farewell)
    finally:
        feeds.leave(session, joined.listener)


class _PassedOver(Exception):
    """An operator's choice comes that passes over what the reader has kept: it is to come back, and drop that."""


async def _join(store: Store, feeds: Feeds, session: str, *, after: Position | None, token: Position | None) -> Joined:
    while token is not None and feeds.newest_is_unknown(session):
        await capture(store, feeds, session, limit=1)
    return feeds.join(session, after=after, token=token)


class _Reader:
    """One reader's way from the past into the present."""

    def __init__(self, store: Store, feeds: Feeds, session: str, cursor: Position, joined: Joined) -> None:
        self._store, self._feeds, self._session, self._cursor, self._joined = store, feeds, session, cursor, joined
        #: number of the last row that the reader has, or was told to read elsewhere
        self.seen = 0
        #: number of the last row that it keeps of those it came with
        self._kept = 0

    async def past(self) -> AsyncGenerator[Frame, None]:
        """Yield `resume`, and what the reader misses of what was accepted before it was registered."""
        missing = self._joined.missing
        if missing is None or _stands(self._cursor.seq, [one.row for one in missing]) < self._cursor.seq:
            async for frame in self._stored():
                yield frame
            for row in self._joined.pending:
                if row.seq > self.seen:
                    yield self._row(row)
            return
        self.seen = self._kept = self._cursor.seq
        yield resume(self.seen)
        for published in missing:
            yield self._next(published)

    async def present(self) -> AsyncGenerator[Frame, None]:
        """Yield what is published. A row that would leave a gap ends the stream instead."""
        listener = self._joined.listener
        while (event := await listener.queue.get()) is not None:
            if isinstance(event, Published):
                if event.row.seq != self.seen + 1:
                    listener.close("gap")
                    return
                yield self._next(event)
            else:
                yield event.frame

    async def _stored(self) -> AsyncGenerator[Frame, None]:
        keep, page = await self._where()
        yield resume(keep)
        self.seen = self._kept = keep
        skipped_to = await self._skipped_to(keep, page)
        if skipped_to > keep:
            yield truncated(keep, skipped_to + 1)
            self.seen = skipped_to
            page = await self._page()
        while page:
            for row in page:
                if row.seq >= self._stop:
                    return
                yield self._row(row)
            page = await self._page() if len(page) >= PAGE_ROWS else []

    async def _where(self) -> tuple[int, list[Row]]:
        """Return how many of its rows the reader keeps, and the first page after them.

        A cursor of the current epoch says what it was shown, stored or not; but one beyond all there is, of another
        session or of a store that was set back, must not hide the rows that come under those numbers.
        """
        keep = await self._store.keep(self._session, self._cursor) if self._cursor.seq else 0
        keep = _stands(keep, self._joined.pending)
        page = await self._store.rows(self._session, after=max(keep - 1, 0), limit=PAGE_ROWS + 1)
        if keep and page:
            return keep, page[1:]
        if not page and await self._store.session(self._session) is None:
            raise NotFound("session")
        if keep and keep not in (row.seq for row in self._joined.pending):
            keep = min(keep, await self._newest())
        return keep, page

    async def _skipped_to(self, keep: int, page: list[Row]) -> int:
        """Return the last row that is not sent because too many are missing; `keep` where all are sent."""
        most = self._feeds.bounds.replay_rows
        if len(page) < min(PAGE_ROWS, most):
            return keep
        return max(keep, await self._newest() - most)

    async def _newest(self) -> int:
        """Return the number of the newest row that was there when the reader was registered."""
        if self._joined.pending:
            return self._joined.pending[-1].seq
        stored = await self._store.last_rows(self._session, limit=1)
        return min(stored[-1].seq, self._stop - 1) if stored else 0

    async def _page(self) -> list[Row]:
        return await self._store.rows(self._session, after=self.seen, limit=PAGE_ROWS)

    @property
    def _stop(self) -> int:
        """The first row that the reader has from elsewhere: from those that were pending when it was registered, or
        from its queue, where what was written before a row is in order with it."""
        if self._joined.pending:
            return self._joined.pending[0].seq
        began = self._joined.listener.began
        return began if began is not None else 2**62

    def _row(self, row: Row) -> Frame:
        return self._next(Published(row, self._feeds.projection.frame(row, self._session)))

    def _next(self, published: Published) -> Frame:
        if published.row.seq != self.seen + 1:
            raise StoreUnavailable(f"session {self._session}: rows after {self.seen} can't be read now")
        if _stands(self._kept, [published.row]) < self._kept:
            raise _PassedOver
        self.seen = published.row.seq
        return published.frame


def _stands(seq: int, coming: Sequence[Row]) -> int:
    """Return how many of the first `seq` rows a reader keeps who was shown them, where these rows are to come: from a
    choice on that it has not seen, what it shows may be what was passed over (K7)."""
    chosen = [row.body.from_seq - 1 for row in coming if row.seq > seq and isinstance(row.body, ConflictSettledBody)]
    return min([seq, *chosen])


async def capture(store: Store, feeds: Feeds, session: str, *, limit: int, before: int | None = None) -> Captured:
    """Return the newest `limit` rows (those with `seq < before`), and without `before` the token to follow from.

    Stored rows, and in their places those that were pending when the load began or accepted since (K3): what was
    accepted is never missing, and an accepted row that is in conflict with a stored one is shown in its place (H40).
    Writers wait for no reader. What is found stored is told to whoever waits for that. Who asks for the same
    piece while it is read gets the same one.

    Raises:
        NotFound: there is no such session.
        StoreUnavailable: the store can't be read now, or the session changed hands meanwhile. Never less is shown.
    """
    while (loading := feeds.loading(session, limit, before)) is not None:
        if (shared := await asyncio.shield(loading)) is not None:
            return shared
    feed, watch = feeds.watch(session, rows_max=limit)
    loading = feed.loads[limit, before] = asyncio.get_running_loop().create_future()
    found: Captured | None = None
    try:
        found = await _load(store, feed, watch, limit=limit, before=before)
        return found
    except (NotFound, StoreUnavailable) as error:
        loading.set_exception(error)
        loading.exception()  # nobody else asking is no fault
        raise
    finally:
        del feed.loads[limit, before]
        feeds.unwatch(feed, watch)
        if not loading.done():
            loading.set_result(found)  # None: this reader gave up, and another one has to read


async def _load(store: Store, feed: Feed, watch: Watch, *, limit: int, before: int | None) -> Captured:
    stored = await store.last_rows(feed.session, limit=limit, before=before)
    if feed.ends != watch.ends:
        raise StoreUnavailable(f"session {feed.session} changed hands while its history was read")
    feed.seen(stored)
    rows = tuple(stored)
    if watch.pending or watch.accepted:
        by_seq = {row.seq: row for row in stored}
        by_seq |= {row.seq: row for row in (*watch.pending, *watch.accepted) if before is None or row.seq < before}
        rows = tuple(by_seq[seq] for seq in sorted(by_seq)[-limit:])
    token = None
    if before is None:
        feed.found(rows[-1].position if rows else START, watch)
        token = feed.newest or (rows[-1].position if rows else START)
    if not _is_whole(rows, token):
        raise StoreUnavailable(f"session {feed.session}: the store shows less than was stored")
    if not rows and await store.session(feed.session) is None:
        raise NotFound("session")
    return Captured(feed.session, rows, token)


def _is_whole(rows: Sequence[Row], token: Position | None) -> bool:
    """Whether no row is missing, in the middle or at the end."""
    newest = rows[-1].seq if rows else 0
    return (not rows or newest - rows[0].seq == len(rows) - 1) and (token is None or newest >= token.seq)
