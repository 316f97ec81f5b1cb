"""A session: the unit of ordering, with one owner at a time and one position for everything.

A position is `<epoch>.<seq>`: token of a history, id of an event and cursor of a listener in one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from sayso.core.origin import Principal

_POSITION = re.compile(r"(0|[1-9][0-9]{0,17})\.(0|[1-9][0-9]{0,17})")


class SessionState(StrEnum):
    """Who has it: nobody and nothing waits; nobody and something does; a node."""

    IDLE = "idle"
    READY = "ready"
    OWNED = "owned"


class SessionRole(StrEnum):
    """What somebody is in a session. It is the session's: nobody has one in general, save an operator."""

    #: she opened it
    OWNER = "owner"
    #: reads and writes; what she starts runs under her own name
    MEMBER = "member"
    #: reads
    VIEWER = "viewer"
    #: sees and manages every session
    OPERATOR = "operator"


class Others(StrEnum):
    """What becomes of a person's message while another person's turn runs or another's message waits."""

    #: it waits its turn
    QUEUE = "queue"
    #: it is not taken; she is told so, and may say it again later
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """A place in a journal: the epoch that wrote the row, and the row's number."""

    epoch: int
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.seq}"

    @classmethod
    def parse(cls, text: str) -> Position:
        """Return the position that `text` names.

        Raises:
            ValueError: it is not `<epoch>.<seq>` in plain digits.
        """
        match = _POSITION.fullmatch(text)
        if match is None:
            raise ValueError("a position is <epoch>.<seq>, as 3.17")
        return cls(int(match.group(1)), int(match.group(2)))


#: the position before the first row
START = Position(0, 0)


@dataclass(frozen=True, slots=True)
class Token:
    """A node's right to write a session: the epoch is its fencing token, the nonce guards against a
    database that lost commits and issues an epoch again."""

    session: str
    epoch: int
    nonce: str

    def commit_key(self, seq: int) -> str:
        """Return the name of the row at `seq` under this epoch; it never leaves the process."""
        return f"{self.nonce}.{seq}"


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """A session as stored: the row that every write updates first."""

    id: str
    #: the person it belongs to
    owner: Principal
    title: str
    created_at_ms: int
    state: SessionState
    #: the node incarnation that owns it now
    node: str | None
    epoch: int
    nonce: str
    #: number of the newest stored row
    head: int
    #: place of the newest stored input
    inbox_tail: int
    #: the open turn, where it began, and whose it is
    turn: str | None
    turn_seq: int | None
    turn_principal: str | None
    #: how many turns and questions there have been; the next ones are numbered from here
    turns: int
    consents: int
    #: journal time of the newest row, so that `at_ms` never falls within a session (K10)
    at_ms: int
    others: Others = Others.QUEUE
    #: when the row was written that ended it; nothing comes in any more
    closed_at_ms: int | None = None
    #: how often it was claimed since anything of it was stored, or its owner gave it up in good order
    attempts: int = 0

    @property
    def position(self) -> Position:
        """The position of the newest stored row."""
        return Position(self.epoch, self.head)
