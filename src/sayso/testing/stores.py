"""Stores around a store: each changes one thing, and passes the rest through."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeVar, cast

from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.errors import CommitUnknown, StoreUnavailable
from sayso.core.rows import Kind, Row
from sayso.core.session import Position, Token
from sayso.storage.store import Entry, InboxRow, Put, Store, WriteOutcome

T = TypeVar("T")


class StoreAround:
    """Everything as in the store inside, until a subclass says otherwise."""

    inside: Store

    def __init__(self, inside: Store | None = None) -> None:
        """`inside` may come later, by `around`."""
        if inside is not None:
            self.inside = inside

    def around(self, inside: Store) -> Store:
        """Stand in front of a store from here on, and return this one."""
        self.inside = inside
        return self.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inside, name)

    @property
    def store(self) -> Store:
        """This one, as the store that it is."""
        return cast("Store", self)

    async def put(self, entry: Entry) -> Put:
        """See `Store`."""
        return await self.inside.put(entry)


class FailingStore(StoreAround):
    """A store that can be told not to take the next input, as a full or locked disk does."""

    fail_once = False

    async def put(self, entry: Entry) -> Put:
        """Fail if told so, with nothing stored."""
        if self.fail_once:
            self.fail_once = False
            raise StoreUnavailable("the store can't be written now")
        return await self.inside.put(entry)


class Point(StrEnum):
    """A place in a store's work where a test can hold it, or make it fail."""

    #: rows were accepted, and have not reached the store
    WRITE = "write"
    #: rows are stored, and nobody was told
    ACKNOWLEDGE = "acknowledge"
    #: an input is on its way in, and not stored yet
    PUT = "put"
    #: an owner looks at its inbox, and has read nothing yet
    LOOK = "look"
    #: a history was asked for, and nothing is read yet
    LOAD = "load"
    #: a history was read, and its reader has it not
    LOADED = "loaded"


class Gate:
    """Where the store's work stands still until it is let on."""

    def __init__(self) -> None:
        self._reached, self._open = asyncio.Event(), asyncio.Event()

    async def reached(self) -> None:
        """Return once the store's work has come to the gate."""
        await self._reached.wait()

    def open(self) -> None:
        """Let the work go on."""
        self._open.set()

    async def passed(self) -> None:
        """What the store calls at its point: note that it was reached, and wait."""
        self._reached.set()
        await self._open.wait()


#: what happens at a point: it returns, or raises what the store's caller is to see
Hook = Callable[[Sequence[Row]], Awaitable[None]]


@dataclass(slots=True)
class _Placed:
    hook: Hook
    #: only for a write that holds a row of one of these kinds; all writes where there are none
    of: Collection[Kind]
    #: how often it happens; None for always
    times: int | None


@dataclass(slots=True)
class _Hooks:
    placed: dict[Point, list[_Placed]] = field(default_factory=lambda: {point: [] for point in Point})

    async def at(self, point: Point, rows: Sequence[Row] = ()) -> None:
        for placed in tuple(self.placed[point]):
            if placed.of and not any(row.kind in placed.of for row in rows):
                continue
            if placed.times is not None:
                placed.times -= 1
                if placed.times <= 0:
                    self.placed[point].remove(placed)
            await placed.hook(rows)


class GatedStore(StoreAround):
    """A store that can be held at named points, loses acknowledgements, and fails, as a test asks.

    What it does is what a slow disk, a broken connection and a full disk do. Nothing else is changed: what it
    answers, the store inside has done.
    """

    def __init__(self, inside: Store | None = None) -> None:
        """See `StoreAround`."""
        super().__init__(inside)
        self._hooks = _Hooks()

    # what a test asks for

    def on(self, point: Point, hook: Hook, *, of: Collection[Kind] = (), times: int | None = None) -> None:
        """Call `hook` at a point, with the rows of a write there (none at the other points). It may wait, or raise what
        the caller is to see."""
        self._hooks.placed[point].append(_Placed(hook, of, times))

    def hold(self, point: Point, *, of: Collection[Kind] = ()) -> Gate:
        """Hold the next work that comes to a point; the gate says when it did, and lets it on."""
        gate = Gate()

        async def wait(_: Sequence[Row]) -> None:
            await gate.passed()

        self.on(point, wait, of=of, times=1)
        return gate

    def lose_acknowledgements(self, *, of: Collection[Kind] = (), times: int | None = 1) -> None:
        """Store what comes, and answer that it may or may not be stored."""

        async def lost(_: Sequence[Row]) -> None:
            raise CommitUnknown("the acknowledgement was lost")

        self.on(Point.ACKNOWLEDGE, lost, of=of, times=times)

    def refuse_writes(self, *, of: Collection[Kind] = (), times: int | None = None) -> None:
        """Store nothing, and say so."""
        self.on(Point.WRITE, _unavailable, of=of, times=times)

    def refuse_loads(self, *, times: int | None = None) -> None:
        """Read nothing of a history, and say so."""
        self.on(Point.LOAD, _unavailable, times=times)

    def refuse_looks(self, *, times: int | None = None) -> None:
        """Read nothing of an inbox, and say so."""
        self.on(Point.LOOK, _unavailable, times=times)

    def mend(self) -> None:
        """Behave as the store inside again; what is held stays held until its gate opens."""
        self._hooks = _Hooks()

    # what the store does

    async def put(self, entry: Entry) -> Put:
        """See `Store`."""
        await self._hooks.at(Point.PUT)
        return await self.inside.put(entry)

    async def write(self, token: Token, rows: Sequence[Row], *, blobs: Blobs = NO_BLOBS) -> WriteOutcome:
        """See `Store`."""
        await self._hooks.at(Point.WRITE, rows)
        outcome = await self.inside.write(token, rows, blobs=blobs)
        await self._hooks.at(Point.ACKNOWLEDGE, rows)
        return outcome

    async def inbox(self, session: str, *, after: int, limit: int) -> list[InboxRow]:
        """See `Store`."""
        await self._hooks.at(Point.LOOK)
        return await self.inside.inbox(session, after=after, limit=limit)

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> list[Row]:
        """See `Store`."""
        return await self._loaded(partial(self.inside.rows, session, after=after, up_to=up_to, limit=limit))

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> list[Row]:
        """See `Store`."""
        return await self._loaded(partial(self.inside.last_rows, session, limit=limit, before=before))

    async def keep(self, session: str, position: Position) -> int:
        """See `Store`."""
        return await self._loaded(partial(self.inside.keep, session, position))

    async def _loaded(self, load: Callable[[], Awaitable[T]]) -> T:
        await self._hooks.at(Point.LOAD)
        found = await load()
        await self._hooks.at(Point.LOADED)
        return found


async def _unavailable(_: Sequence[Row]) -> None:
    raise StoreUnavailable("the store doesn't answer")
