"""The outside of the demo and the tests: a restaurant, a group chat and a cinema that keep books.

What is in the books was really done. A venue recognises a request's repeat by its idempotency key, as a
good service does: the same key with the same content is answered again and done once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from sayso.testing.ledger import Ledger


class TurnedDown(Exception):
    """A venue said no, and nothing was done. `reason` is one word: `full`, `key_reused` or `unknown`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


# --- what a tool may ask, of a World or of a WorldClient ----------------------


class RestaurantDesk(Protocol):
    """A restaurant's tables."""

    async def book(self, day: str, time: str, party: int, key: str | None = None) -> str:
        """Return the id of the reservation that is made, or was made under this key.

        Raises:
            TurnedDown: there is no table then, or the key came with other content.
        """
        ...

    async def cancel(self, reservation: str, key: str | None = None) -> str:
        """Give a table back, and return its id. To do so twice changes nothing.

        Raises:
            TurnedDown: there was no such reservation, or the key came with other content.
        """
        ...

    async def lookup(self, key: str) -> str | None:
        """Return the id of what was made under this key, or None."""
        ...


class GroupDesk(Protocol):
    """A group chat."""

    async def tell(self, text: str, key: str | None = None) -> str:
        """Return the id of the message that everybody in the group has now.

        Raises:
            TurnedDown: the key came with other content.
        """
        ...

    async def lookup(self, key: str) -> str | None:
        """Return the id of the message that was sent under this key, or None."""
        ...


class CinemaDesk(Protocol):
    """A cinema's seats."""

    async def book(self, film: str, time: str, seats: int, key: str | None = None) -> str:
        """Return the id of the booking that is made, or was made under this key.

        Raises:
            TurnedDown: the key came with other content.
        """
        ...

    async def cancel(self, booking: str, key: str | None = None) -> str:
        """Give the seats of a booking back, and return its id. To do so twice changes nothing.

        Raises:
            TurnedDown: there was no such booking, or the key came with other content.
        """
        ...

    async def lookup(self, key: str) -> str | None:
        """Return the id of what was booked or cancelled under this key, or None."""
        ...


class Outside(Protocol):
    """The venues, in this process (`World`) or in another (`WorldClient`)."""

    @property
    def restaurant(self) -> RestaurantDesk: ...
    @property
    def group(self) -> GroupDesk: ...
    @property
    def cinema(self) -> CinemaDesk: ...


# --- the venues ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Table:
    """What a reservation is for."""

    day: str
    time: str
    party: int


@dataclass(frozen=True, slots=True)
class Seats:
    """What a cinema's booking is for."""

    film: str
    time: str
    seats: int


class Venue:
    """What the three have in common: repeats, lines of what was done, and a door that can be held shut.

    While a venue is held, each request takes effect and then waits with its answer: whoever asked can be
    killed in between.
    """

    def __init__(self, name: str, lines: list[str], ledger: Ledger | None = None) -> None:
        self.name = name
        self._lines, self._ledger = lines, ledger if ledger is not None else Ledger()
        self._by_key: dict[str, tuple[object, str]] = {}
        self._answering, self._someone_waits = asyncio.Event(), asyncio.Event()
        self._answering.set()
        self._waiting = 0

    def hold(self) -> None:
        """From now on answers wait."""
        self._answering.clear()

    def release(self) -> None:
        """Let the answers go that wait, and all further ones."""
        self._answering.set()

    async def until_held(self) -> None:
        """Return once a request has taken effect and waits with its answer."""
        await self._someone_waits.wait()

    async def lookup(self, key: str) -> str | None:
        """Return the id of what was done under this key, or None. Never held."""
        return self._by_key[key][1] if key in self._by_key else None

    def _note(self, line: str) -> None:
        self._lines.append(f"{self.name}: {line}")

    async def _once(self, key: str | None, wanted: object, act: Callable[[], str]) -> str:
        """Do it, unless the key says that it was done; then answer, when answers may go."""
        if key is not None and key in self._by_key:
            made = self._again(key, wanted)
        else:
            made = act()
            self._ledger.enter(self.name, key=key or "", what=made)
        if key is not None:
            self._by_key[key] = (wanted, made)
        await self._answer()
        return made

    def _again(self, key: str, wanted: object) -> str:
        first, made = self._by_key[key]
        if first != wanted:
            self._note(f"refused a request whose key had made {made} from other content")
            raise TurnedDown("key_reused", f"this key has made {made}, from other content")
        self._note(f"asked for {made} again under its key; nothing new")
        return made

    async def _answer(self) -> None:
        if self._answering.is_set():
            return
        self._waiting += 1
        self._someone_waits.set()
        try:
            await self._answering.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._someone_waits.clear()


class Restaurant(Venue):
    """Has a table for every party, except where it was told to be full."""

    def __init__(self, lines: list[str], ledger: Ledger | None = None) -> None:
        super().__init__("restaurant", lines, ledger)
        #: the tables that are held, by reservation
        self.tables: dict[str, Table] = {}
        self._full: set[tuple[str, str]] = set()
        self._made = 0

    async def book(self, day: str, time: str, party: int, key: str | None = None) -> str:
        """Return the id of the reservation that is made, or was made under this key: R1, R2, …

        Raises:
            TurnedDown: it is full then, or the key came with other content.
        """
        table = Table(day, time, party)
        return await self._once(key, table, lambda: self._seat(table))

    async def cancel(self, reservation: str, key: str | None = None) -> str:
        """Give a table back, and return its id. To do so twice changes nothing.

        Raises:
            TurnedDown: there was no such reservation, or the key came with other content.
        """
        return await self._once(key, reservation, lambda: self._give_back(reservation))

    def _give_back(self, reservation: str) -> str:
        if reservation not in {f"R{number}" for number in range(1, self._made + 1)}:
            raise TurnedDown("unknown", f"there was no reservation {reservation}")
        if self.tables.pop(reservation, None) is not None:
            self._note(f"was given {reservation} back")
        return reservation

    def full(self, day: str, time: str) -> None:
        """Be full then; reservations that stand are kept."""
        self._full.add((day, time))

    def free(self, day: str, time: str) -> None:
        """Have tables then."""
        self._full.discard((day, time))

    def take_away(self, reservation: str) -> None:
        """Drop a reservation, as restaurants do. Nobody is told: that is a hook's business.

        Raises:
            TurnedDown: no such table is held.
        """
        if self.tables.pop(reservation, None) is None:
            raise TurnedDown("unknown", f"no table is held as {reservation}")
        self._note(f"took {reservation} away")

    def _seat(self, table: Table) -> str:
        if (table.day, table.time) in self._full:
            self._note(f"turned down a table for {table.party} on {table.day} at {table.time}: full")
            raise TurnedDown("full", f"no table on {table.day} at {table.time}")
        self._made += 1
        reservation = f"R{self._made}"
        self.tables[reservation] = table
        self._note(f"holds {reservation}, a table for {table.party} on {table.day} at {table.time}")
        return reservation


class Group(Venue):
    """Everybody in it has read what was told."""

    def __init__(self, lines: list[str], ledger: Ledger | None = None) -> None:
        super().__init__("group", lines, ledger)
        #: the messages, in order
        self.texts: list[str] = []

    async def tell(self, text: str, key: str | None = None) -> str:
        """Return the id of the message that everybody has now: M1, M2, …

        Raises:
            TurnedDown: the key came with other content.
        """
        return await self._once(key, text, lambda: self._send(text))

    def _send(self, text: str) -> str:
        self.texts.append(text)
        message = f"M{len(self.texts)}"
        self._note(f"has {message}: {text}")
        return message


class Cinema(Venue):
    """Has seats for everybody."""

    def __init__(self, lines: list[str], ledger: Ledger | None = None) -> None:
        super().__init__("cinema", lines, ledger)
        #: the seats that are held, by booking
        self.seats: dict[str, Seats] = {}
        self._made = 0

    async def book(self, film: str, time: str, seats: int, key: str | None = None) -> str:
        """Return the id of the booking that is made, or was made under this key: C1, C2, …

        Raises:
            TurnedDown: the key came with other content.
        """
        wanted = Seats(film, time, seats)
        return await self._once(key, wanted, lambda: self._sell(wanted))

    async def cancel(self, booking: str, key: str | None = None) -> str:
        """Give the seats of a booking back, and return its id. To do so twice changes nothing.

        Raises:
            TurnedDown: there was no such booking, or the key came with other content.
        """
        return await self._once(key, booking, lambda: self._give_back(booking))

    def _sell(self, wanted: Seats) -> str:
        self._made += 1
        booking = f"C{self._made}"
        self.seats[booking] = wanted
        self._note(f"holds {booking}, {wanted.seats} seats for {wanted.film} at {wanted.time}")
        return booking

    def _give_back(self, booking: str) -> str:
        if booking not in {f"C{number}" for number in range(1, self._made + 1)}:
            raise TurnedDown("unknown", f"there was no booking {booking}")
        if self.seats.pop(booking, None) is not None:
            self._note(f"gave back {booking}")
        return booking


class World:
    """The three venues in this process, and what they did. For one event loop."""

    def __init__(self, *, lines: list[str] | None = None) -> None:
        #: what the outside did, in order: the part of a log that no journal has
        self.lines: list[str] = [] if lines is None else lines
        #: the same by key
        self.ledger = Ledger()
        self.restaurant = Restaurant(self.lines, self.ledger)
        self.group = Group(self.lines, self.ledger)
        self.cinema = Cinema(self.lines, self.ledger)

    @property
    def venues(self) -> dict[str, Venue]:
        """The venues by name."""
        return {venue.name: venue for venue in (self.restaurant, self.group, self.cinema)}

    def books(self) -> dict[str, Any]:
        """Return what stands now, as JSON values: tables held, texts sent, seats held."""
        return {
            "tables": {name: asdict(table) for name, table in self.restaurant.tables.items()},
            "texts": list(self.group.texts),
            "seats": {name: asdict(seats) for name, seats in self.cinema.seats.items()},
        }
