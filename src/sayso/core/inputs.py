"""What arrives: an input, the lane it waits in, and what recognises its repeat.

An input is stored before it is acknowledged and acted on after (A7). A repeat is known by its source
and event id, whatever session it names (A4, K27).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from sayso.core.attachment import Attachment
from sayso.core.labels import Part
from sayso.core.operation import Ref
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.session import Others, SessionRole


class Lane(StrEnum):
    """How an input waits."""

    #: in order of arrival, for the running turn to end
    NORMAL = "normal"
    #: settled between any two awaits of the running turn: answers, expiries, notices, and what is asked of the
    #: session itself
    CONTROL = "control"


class InFlight(StrEnum):
    """What becomes of an input that arrives while a turn of its own sender runs."""

    #: it waits, and starts a turn of its own
    QUEUE = "queue"
    #: it joins the turn at the next boundary
    MERGE = "merge"
    #: it is not acted on, and its sender is told: she may say it again when the turn has ended
    REJECT = "reject"
    #: the turn ends, and another begins with what was said before and since; it takes over what was done (C7)
    RESTART = "restart"


class Fit(StrEnum):
    """How what a running turn's own person says meanwhile fits the turn (C3)."""

    #: it belongs to what is being done: the agent's policy decides
    ADDS = "adds"
    #: it is another matter: it waits for a turn of its own
    INDEPENDENT = "independent"
    #: it changes what was asked for: what was done is settled first, and taken over or offered to be undone (C8)
    REVISES = "revises"
    #: nobody can tell: the turn pauses, and she is asked (C4)
    UNSURE = "unsure"


class InputKind(StrEnum):
    """What an input is to the session."""

    #: a person's words; starts a turn
    MESSAGE = "message"
    #: what a source told us; starts a turn
    EVENT = "event"
    #: delivered when it arrives; needs no turn and no authority (A11)
    NOTICE = "notice"
    #: a person's answer to a stored question
    ANSWER = "answer"
    #: a question's time is over
    EXPIRY = "expiry"
    #: an operator's choice between our rows and the store's (K7)
    CHOICE = "choice"
    #: a person asks that somebody takes part, in another role, or no more
    PARTICIPANT = "participant"
    #: a person takes back a message of hers that waits
    RETRACT = "retract"
    #: a person asks that the session goes by another title, or treats others otherwise
    SETTINGS = "settings"
    #: a person asks that the session ends
    CLOSE = "close"
    #: a person asks that the running turn stops (K24)
    STOP = "stop"
    #: a bare yes or no that fits no question, or several: the runtime asks which (K20)
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True)
class Answer:
    """A person's answer to one question, by its id and the digest of what it fixed (B7)."""

    consent: str
    digest: str
    yes: bool
    reason: str = ""
    #: the places of the steps that a yes ticks; None means all
    steps: tuple[int, ...] | None = None


class Keep(StrEnum):
    """Which version an operator keeps of rows that the store holds otherwise (K7)."""

    STORED = "stored"
    OURS = "ours"


@dataclass(frozen=True, slots=True)
class Restated:
    """What one of our rows said, so that it can be said again under another number."""

    line: str
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """An operator's choice, with everything that settling it needs after a crash."""

    keep: Keep
    #: the first row that is not the store's
    from_seq: int
    ours: tuple[Restated, ...]


@dataclass(frozen=True, slots=True)
class ParticipantChange:
    """Who is to take part in a session, and as what; `role=None`: no more."""

    principal: Principal
    role: SessionRole | None


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """What is to change of a session; None stays as it is."""

    title: str | None = None
    others: Others | None = None


@dataclass(frozen=True, slots=True)
class Input:
    """One input as stored. `about` and `gone` are what a source's event names (A12, A13)."""

    kind: InputKind
    principal: Principal
    #: how the principal was verified, e.g. "standard-webhooks v1", "api token"
    verified: str
    parts: tuple[Part, ...] = ()
    about: tuple[Ref, ...] = ()
    #: the source says that what it names no longer exists
    gone: bool = False
    answer: Answer | None = None
    #: the question whose time is over
    consent: str | None = None
    choice: Choice | None = None
    #: the sender's own ids of this message; they correlate and never deduplicate (H19)
    client_send_ids: tuple[str, ...] = ()
    #: files that came with it
    attachments: tuple[Attachment, ...] = ()
    #: what is asked about who takes part
    participant: ParticipantChange | None = None
    #: the place in the inbox of what its sender takes back
    retracts: int | None = None
    settings: SettingsChange | None = None
    #: the turn that is to stop; None for the one that runs when this is looked at
    stops: str | None = None
    #: what becomes of a message that comes while a turn of its sender's runs; None: as the agent is set
    in_flight: InFlight | None = None

    @property
    def owner(self) -> Principal | None:
        """Whose it is while it waits: a person's, or nobody's (D2). Only she may take it back, and it counts
        against what may wait of hers alone."""
        return self.principal if self.principal.is_person else None

    @property
    def lane(self) -> Lane:
        """The lane that this kind of input waits in."""
        match self.kind:
            case InputKind.MESSAGE | InputKind.EVENT | InputKind.UNCLEAR:
                return Lane.NORMAL
            case InputKind.NOTICE | InputKind.ANSWER | InputKind.EXPIRY | InputKind.CHOICE:
                return Lane.CONTROL
            case InputKind.PARTICIPANT | InputKind.RETRACT | InputKind.SETTINGS | InputKind.CLOSE | InputKind.STOP:
                return Lane.CONTROL


def may_join(received: Input, origin: Origin, session: str) -> bool:
    """Whether an input may be looked at for a turn of that origin: one comparison (C6). Its own user's words may;
    and those of the session's agent, which carry no authority."""
    who = received.principal
    own = origin.is_user and who == origin.principal
    return received.kind is InputKind.MESSAGE and (own or who == Principal(PrincipalKind.AGENT, session))


_BARE = re.compile(r"\s*(yes|no)\s*[.!]?\s*", re.IGNORECASE | re.ASCII)


def bare_answer(text: str) -> bool | None:
    """Return True for a message that is a yes and nothing else, False for a no, else None (B7, K20)."""
    match = _BARE.fullmatch(text)
    return None if match is None else match.group(1).lower() == "yes"


def timer_event_id(consent: str, instant_ms: int) -> str:
    """Return the event id of a question's expiry: one per question and instant, so it fires once (K12)."""
    return f"{consent}@{instant_ms}"
