"""The error tree: each class is one thing that a caller may conclude.

`Refused`: nothing happened, and the same request will not do better later.
`Busy`: nothing happened, and it may do better later. `OutcomeUnknown`: find out first.
Only `server/wire.py` knows status codes.
"""

from __future__ import annotations

from sayso.core.operation import EffectState, effect_state


class SaysoError(Exception):
    """Base of every error that sayso raises on purpose."""


class Refused(SaysoError):
    """Nothing happened, and the same request will not do better later."""


class Busy(SaysoError):
    """Nothing happened; the same request may succeed later."""


class OutcomeUnknown(SaysoError):
    """It may have happened. Find out before trying again."""


class NotFound(Refused):
    """There is no such thing, or it is not this caller's to see: the two look alike on purpose."""

    def __init__(self, what: str) -> None:
        super().__init__(f"no such {what}")
        self.what = what


class Unauthenticated(Refused):
    """The caller did not prove who they are."""


class Forbidden(Refused):
    """The caller is known, and this is not theirs to do."""


class Invalid(Refused):
    """The request does not say something we can act on; `detail` says what is wrong with it."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class Misused(Refused):
    """An idempotency key came again with other content (K27): nothing was stored."""


class AnswerRefused(Refused):
    """An answer that the door does not take: no approver, another digest, another question (K12)."""

    def __init__(self, consent: str, why: str) -> None:
        super().__init__(f"{consent}: {why}")
        self.consent, self.why = consent, why


class RequestRefused(Refused):
    """The session's owner looked at what was asked of it, and changed nothing; a row says so, with the reason."""


class CrossUser(Refused):
    """Another person's turn runs in this session or another's message waits, and it is set to refuse meanwhile."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session}: another person is being answered; nothing was stored, say it again later")
        self.session = session


class NotSettled(Refused):
    """What was accepted of the session is not known to be stored, so it can't be closed: it stays open and whole."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session}: what was said last is not known to be stored; close it once it is")
        self.session = session


class SessionClosed(Refused):
    """The session was closed: its history stands, and nothing comes in any more."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session} is closed")
        self.session = session


class Fenced(Refused):
    """A newer epoch owns the session; this worker must stop writing."""

    def __init__(self, session: str, *, ours: int) -> None:
        super().__init__(f"session {session}: epoch {ours} was replaced")
        self.session, self.ours = session, ours


class Gone(Refused):
    """The session was deleted; nothing of it is written any more."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session} was deleted")
        self.session = session


class Conflict(Refused):
    """The store holds other content under a position that we accepted rows for (H5)."""

    def __init__(self, session: str, seq: int) -> None:
        super().__init__(f"session {session}: the store holds another row at {seq}")
        self.session, self.seq = session, seq


class IllegalChange(Refused):
    """A row asks for a change that the state of its subject does not allow; nothing was written.

    This is the refusal of a state machine (a consent used twice, a second result of one call),
    so it means a fault of ours or a lost race, never a client's request.
    """


class OutOfOrder(Refused):
    """The turn machine was told an event that cannot happen in its phase."""


class StaleToken(Refused):
    """A row was accepted since the history of this token was read; the history has to be read again."""

    def __init__(self, session: str) -> None:
        super().__init__(f"session {session}: the token is not its newest position")
        self.session = session


class InboxFull(Busy):
    """As much waits in the session as may: of this sender, where it is a person, or else of all the others together.
    It takes more once some of it was taken, or taken back."""

    def __init__(self, session: str, limit: int, *, owner: str | None = None) -> None:
        whose = "inputs" if owner is None else f"inputs of {owner}"
        super().__init__(f"session {session}: {limit} {whose} wait already, and no more may")
        self.session, self.limit, self.owner = session, limit, owner


class Unresolved(Busy):
    """Rows were accepted and the store has not said yes to them: they may or may not be stored, and nothing goes
    past them until that is known. What was accepted is not lost by waiting."""

    def __init__(self, session: str, seq: int) -> None:
        super().__init__(f"session {session}: row {seq} is not known to be stored")
        self.session, self.seq = session, seq


class NoUpload(Refused):
    """A message names an upload that isn't there for its session: unknown, expired, or used up before."""

    def __init__(self, upload: str) -> None:
        super().__init__(f"no such upload: {upload}")
        self.upload = upload


class UploadsFull(Busy):
    """This person has as many uploads in the session as may wait for a message."""

    def __init__(self, session: str, detail: str) -> None:
        super().__init__(f"session {session}: {detail}")
        self.session = session


class StoreUnavailable(Busy):
    """The store cannot take or read anything now: locked, full, read-only or gone."""


class StoreLocked(Refused):
    """Another process owns this store; two may not run sessions on one SQLite file."""


class CommitUnknown(OutcomeUnknown):
    """COMMIT itself failed, so the rows may or may not be stored: reconcile by their commit keys."""


class ToolFailed(Refused):
    """What a tool raises to say: it did not happen, and here is why. The text goes to the model.

    Where it did not succeed and did something all the same, `effect` says so: `partial`, `rolled_back`, or
    `unknown`. Left out, it is what the tool told its call (`Call.effect`), else `none`: nothing was done.

    Raises:
        ValueError: `effect` is no such word, or `committed`: what happened did not fail.
    """

    def __init__(self, *text: object, effect: str | None = None) -> None:
        super().__init__(*text)
        if effect == EffectState.COMMITTED:
            raise ValueError("a call that committed did not fail: return what came of it")
        self.effect = None if effect is None else effect_state(effect)
