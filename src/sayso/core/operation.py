"""A call with an effect, from before it is first sent until what it did is known (D1 to D5).

The idempotency key is `session:operation`: scoped to the turn a restart would book twice, scoped to
the step a second booking that is meant would be swallowed (D2).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OperationState(StrEnum):
    """What is known of an operation."""

    #: stored, not sent: safe to send, or to leave
    INTENDED = "intended"
    #: it may be on its way; nothing came back yet
    SENT = "sent"
    #: the other side said yes
    ANSWERED = "answered"
    #: the other side said no: it did not happen
    FAILED = "failed"
    #: sent, and no answer will be waited for: it may or may not have happened
    UNKNOWN = "unknown"
    #: it happened and no longer stands; somebody reported it (A13)
    GONE = "gone"
    #: it happened, and was undone by an operation of its own (D6)
    RELEASED = "released"
    #: never sent, and never will be
    NOT_STARTED = "not_started"


class EffectState(StrEnum):
    """What a call left in the world, as its result says. Where nobody can say, as of a read, a result has none.

    `NONE` is only for what is known to have done nothing: an outcome that nobody saw is `UNKNOWN`.
    """

    COMMITTED = "committed"
    NONE = "none"
    #: it may have acted
    UNKNOWN = "unknown"
    #: a part of it happened, and stands
    PARTIAL = "partial"
    #: it happened and was undone, before the call ended
    ROLLED_BACK = "rolled_back"


def effect_state(word: str) -> EffectState:
    """Return the effect that a tool names.

    Raises:
        ValueError: there is none of that name.
    """
    try:
        return EffectState(word)
    except ValueError:
        raise ValueError(f"effect is {word!r}, which is none of {', '.join(EffectState)}") from None


#: the moves that exist; a store refuses every other one (`rows.changes` names them)
MOVES: dict[OperationState, frozenset[OperationState]] = {
    OperationState.INTENDED: frozenset({OperationState.SENT, OperationState.NOT_STARTED}),
    # not started: the row that sends it was accepted and not durable, so this process knows that nothing went out
    OperationState.SENT: frozenset(
        {
            OperationState.SENT,
            OperationState.ANSWERED,
            OperationState.FAILED,
            OperationState.UNKNOWN,
            OperationState.NOT_STARTED,
        }
    ),
    OperationState.UNKNOWN: frozenset(
        {
            OperationState.SENT,
            OperationState.ANSWERED,
            OperationState.FAILED,
            OperationState.UNKNOWN,
            OperationState.RELEASED,
        }
    ),
    OperationState.ANSWERED: frozenset({OperationState.GONE, OperationState.RELEASED}),
    # what was undone may have failed, or be reported gone, while that was under way: then it is undone all the same
    OperationState.FAILED: frozenset({OperationState.RELEASED}),
    OperationState.GONE: frozenset({OperationState.RELEASED}),
    OperationState.RELEASED: frozenset({OperationState.RELEASED}),
    OperationState.NOT_STARTED: frozenset(),
}


def sources_of(target: OperationState) -> tuple[OperationState, ...]:
    """Return the states from which `target` may be reached."""
    return tuple(state for state, targets in MOVES.items() if target in targets)


def idempotency_key(session: str, operation: str) -> str:
    """Return the key that goes out with every attempt at this operation (D2)."""
    return f"{session}:{operation}"


class Settlement(StrEnum):
    """What to do about an operation that was sent and not answered when the process died (D5)."""

    #: ask the other side what became of it
    LOOK_UP = "look_up"
    #: send again with the same key
    RESEND = "resend"
    #: tell the person: it may have happened
    TELL = "tell"


def settlement(*, has_lookup: bool, recognised: bool, attempts: int, attempts_max: int) -> Settlement:
    """Return how to settle an unknown operation. One that the other side would not recognise, because it has no key or
    its key is too old by now, is never sent again silently (D5)."""
    if has_lookup:
        return Settlement.LOOK_UP
    if recognised and attempts < attempts_max:
        return Settlement.RESEND
    return Settlement.TELL


@dataclass(frozen=True, slots=True)
class Ref:
    """A thing in a source's world, by which later events find the session that made it (A12)."""

    source: str
    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.kind} {self.value}"
