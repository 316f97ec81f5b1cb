"""Stores around a store: each changes one thing, and passes the rest through."""

from __future__ import annotations

from typing import Any, cast

from sayso.core.errors import StoreUnavailable
from sayso.storage.store import Entry, Put, Store


class StoreAround:
    """Everything as in the store inside, until a subclass says otherwise."""

    def __init__(self, inside: Store) -> None:
        self.inside = inside

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
