"""The door's record and a session's journal as one numbered list that a person can read (E1, K28).

A journal row stands at its `seq`; an entry of the door after the newest row that was stored when it came,
or, where it named no session, by its time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from sayso.core.record import persisted, sentence
from sayso.core.rows import Row
from sayso.storage.store import DoorRow, InboxRow, Store


@dataclass(frozen=True, slots=True)
class Line:
    """One entry of the list."""

    number: int
    at_ms: int
    kind: str
    text: str
    #: the journal's row number; None for an entry of the door
    seq: int | None = None
    turn: str | None = None
    #: names the entry whatever its number is: an entry of the door may come to stand before older ones
    ref: str = ""


@dataclass(frozen=True, slots=True)
class Beside:
    """An entry that is no row: it stands after the row `after`, in order of time and then of `n`."""

    after: int
    at_ms: int
    n: int
    kind: str
    text: str


async def numbered(store: Store, session: str, *, beside: Sequence[Beside] = ()) -> list[Line]:
    """Return everything recorded about a session, and what the door turned away without one, in order.

    `beside` are entries that somebody else kept, such as what the outside did.
    """
    rows = await store.rows(session)
    inbox = await store.inbox_record(session)
    door = await store.door(session=session)
    return arrange(rows, [*_stored(inbox), *_noted(door, rows), *beside])


def _stored(inbox: Sequence[InboxRow]) -> list[Beside]:
    return [
        Beside(entry.at_seq, entry.received_at_ms, entry.n, "input.persisted", persisted(entry.input, entry.event_id))
        for entry in inbox
    ]


def _noted(door: Sequence[DoorRow], rows: Sequence[Row]) -> list[Beside]:
    return [
        Beside(_place(found, rows), found.at_ms, _NOTES_LAST + found.n, str(found.note.kind), found.note.text)
        for found in door
    ]


#: at one place and time, inputs stand before the door's notes
_NOTES_LAST = 1_000_000_000


def _place(found: DoorRow, rows: Sequence[Row]) -> int:
    if found.at_seq is not None:
        return found.at_seq
    return max((row.seq for row in rows if row.at_ms <= found.at_ms), default=0)


def arrange(rows: Sequence[Row], beside: Sequence[Beside]) -> list[Line]:
    """Put rows and what stands beside them in one order, and number them."""
    waiting = deque(sorted(beside, key=lambda entry: (entry.after, entry.at_ms, entry.n)))
    lines: list[Line] = []

    def catch_up(seq: int) -> None:
        while waiting and waiting[0].after <= seq:
            entry = waiting.popleft()
            ref = f"{entry.kind} {entry.n}"
            lines.append(Line(len(lines) + 1, entry.at_ms, entry.kind, entry.text, ref=ref))

    for row in rows:
        catch_up(row.seq - 1)
        lines.append(Line(len(lines) + 1, row.at_ms, row.kind, sentence(row), row.seq, row.turn, f"row {row.seq}"))
    catch_up(1 << 62)
    return lines


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which entries a reader wants; what is left empty leaves nothing out."""

    #: kinds, or their beginnings, as `turn` or `tool.sent`
    kinds: tuple[str, ...] = ()
    turn: str | None = None
    #: words that the sentence has, in any case
    words: str = ""
    since_ms: int = 0

    def takes(self, line: Line) -> bool:
        """Return whether the entry is wanted."""
        kinds = not self.kinds or any(line.kind == kind or line.kind.startswith(f"{kind}.") for kind in self.kinds)
        turn = self.turn is None or line.turn == self.turn
        return kinds and turn and self.words.casefold() in line.text.casefold() and line.at_ms >= self.since_ms


def lay_out(lines: Sequence[Line], *, since_ms: int | None = None) -> list[str]:
    """Return the list as text, a line an entry: number, time, kind, what happened.

    With `since_ms` the time is hours and minutes since then; else it is the time of day, UTC.
    """
    wide = max((len(line.kind) for line in lines), default=0)
    return [f"{line.number:>3}  {_time(line.at_ms, since_ms)}  {line.kind:<{wide}}  {line.text}" for line in lines]


def _time(at_ms: int, since_ms: int | None) -> str:
    if since_ms is not None:
        minutes = (at_ms - since_ms) // 60_000
        return f"{minutes // 60:02}:{minutes % 60:02}"
    seconds = at_ms // 1000
    return f"{seconds // 3600 % 24:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
