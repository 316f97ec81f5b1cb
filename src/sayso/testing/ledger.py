"""Books of what was really done, by the key under which it was done. What stands in them happened, whatever the
runtime believes of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deed:
    """One thing that was done to the world, once."""

    name: str
    #: the idempotency key that came with the request: a tool has it as `call.key`, also one that hands it to nobody
    key: str
    what: str = ""


class Ledger:
    """The other side of a tool, as far as a test is concerned: it does what it is asked, and keeps books."""

    def __init__(self) -> None:
        #: what was done, in order
        self.deeds: list[Deed] = []
        self._done: Counter[tuple[str, str]] = Counter()

    @property
    def ledger(self) -> Ledger:
        """Itself: a world that is nothing but its books."""
        return self

    def enter(self, name: str, *, key: str, what: str = "") -> None:
        """Do it, whatever was done before, as a service does that recognises no repeat."""
        self.deeds.append(Deed(name, key, what))
        self._done[name, key] += 1

    def once(self, name: str, *, key: str, what: str = "") -> bool:
        """Do it unless that was done under this key, as a good service does. True if it was done now."""
        if self.knows(name, key=key):
            return False
        self.enter(name, key=key, what=what)
        return True

    def knows(self, name: str, *, key: str) -> bool:
        """Return whether it was done under this key: what a lookup asks."""
        return self._done[name, key] > 0

    def times(self, key: str) -> int:
        """Return how many deeds there are under a key."""
        return sum(deed.key == key for deed in self.deeds)
