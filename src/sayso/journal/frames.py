"""What a listener is sent: events, each put into words once, whoever gets it.

An accepted row is exactly one event, and its position is that event's id. What is no row has no id: it may be
lost, and no cursor ever points at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from pydantic_core import PydanticSerializationError, to_json

from sayso.core.rows import Kind, Row
from sayso.core.text import scrub_json
from sayso.core.view import Json, public

log = logging.getLogger(__name__)


def encode(value: object) -> str:
    """Return the JSON text of an event's data, on one line, as any reader can parse it: a lone surrogate is U+FFFD,
    and what is no number is null."""
    try:
        return to_json(value, inf_nan_mode="null").decode()
    except PydanticSerializationError:  # a lone surrogate; what is stored has none
        return to_json(scrub_json(value), inf_nan_mode="null").decode()


@dataclass(frozen=True)
class Frame:
    """One event for a listener: its name and its data, JSON on one line. Only a row's has an id, its position."""

    event: str
    data: str
    id: str | None = None
    #: the kind of the row that it stands for
    kind: Kind | None = None

    @cached_property
    def sse(self) -> bytes:
        """The event as a stream carries it: line feeds only, one line of data. Made once, and shared."""
        name = f"id: {self.id}\n" if self.id is not None else ""
        return f"{name}event: {self.event}\ndata: {self.data}\n\n".encode("utf-8", "replace")


#: what a row of some kind is to its readers: a row and its session to an event, or None if it can't be said
Hook = Callable[[Row, str], Frame | None]


def plainly(row: Row, session: str) -> Frame:
    """Return the event of a row as docs/stream.md has it: its kind, and its public JSON."""
    return Frame(row.kind, encode(public(row, session)))


@dataclass(frozen=True, slots=True)
class Projection:
    """What rows are to those who follow a session: a hook for each kind.

    A hook can't keep a row from its readers. Where there is none for a row's kind, where it returns None, raises,
    or returns what no stream could carry, the event is `resync`, which sends the reader to the history. The
    id is the row's position in any case; a hook has no say in it (1.15, 1.17 of the hand-off).
    """

    hooks: Mapping[Kind, Hook] = field(default_factory=lambda: dict.fromkeys(Kind, plainly))

    def but(self, hooks: Mapping[Kind, Hook | None]) -> Projection:
        """Return this one with other hooks for some kinds; None takes one away."""
        changed = {**self.hooks, **hooks}
        return Projection({kind: hook for kind, hook in changed.items() if hook is not None})

    def frame(self, row: Row, session: str) -> Frame:
        """Return the one event that stands for a row."""
        said = self._said(row, session)
        if said is None:
            said = Frame("resync", encode({"reason": f"{row.kind.replace('.', '_')}_accepted"}))
        return Frame(said.event, said.data, str(row.position), row.kind)

    def _said(self, row: Row, session: str) -> Frame | None:
        hook = self.hooks.get(row.kind)
        if hook is None:
            return None
        try:
            said = hook(row, session)
            return said if said is not None and _is_carried(said) else None
        except Exception:  # it is the embedder's code, and whatever it does the row is accepted
            log.exception("a row could not be shown", extra={"session": session, "kind": row.kind, "seq": row.seq})
            return None


def _is_carried(frame: Frame) -> bool:
    """Whether a stream can carry a hook's event: a name and data, each on one line, and none of our own names."""
    lines = frame.event + frame.data
    return bool(frame.event) and frame.event not in OURS and not any(end in lines for end in "\r\n\0")


#: names of events that are about the stream itself
OURS = frozenset({"resume", "truncated", "caught_up", "delta", "status", "resync", "farewell"})

PLAIN = Projection()


@dataclass(frozen=True, slots=True)
class Published:
    """A row as published, and the event that stands for it."""

    row: Row
    frame: Frame


@dataclass(frozen=True)
class Delta:
    """A piece of a reply that is still being written: where it belongs, and from which character on (K5).

    It may be lost: a reader who joins gets the text so far, and the row replaces it.
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
        """The event that tells it."""
        return Frame("status", encode({"state": self.state, "pending": self.pending}))


@dataclass(frozen=True)
class Shown:
    """Something that is shown live and is no row: it may be lost, and a row or a read heals it."""

    event: str
    data: Json

    @cached_property
    def frame(self) -> Frame:
        """The event as it goes out."""
        return Frame(self.event, encode(self.data))


Event = Published | Delta | Status | Shown


# --- about the stream itself -------------------------------------------------


def resume(keep: int) -> Frame:
    """What a reader shows beyond row `keep` was never stored; it lets go of it (K1)."""
    return Frame("resume", encode({"keep": keep}))


def truncated(after: int, next_: int) -> Frame:
    """The rows between the two are not sent; the history has them."""
    return Frame("truncated", encode({"after": after, "next": next_}))


def caught_up(seq: int) -> Frame:
    """The past ends with row `seq`; what comes now is new."""
    return Frame("caught_up", encode({"seq": seq}))


def resync(reason: str) -> Frame:
    """The history is to be read again, for a reason that is no row."""
    return Frame("resync", encode({"reason": reason}))


def farewell(reason: str) -> Frame:
    """Nothing more comes on this connection."""
    return Frame("farewell", encode({"reason": reason}))
