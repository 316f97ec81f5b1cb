"""What a caller may ask about the people of a session: who takes part and as what, and what of theirs waits.

Nothing here writes a row: what is asked is an input of the control lane, which the session's owner settles
with a row, as it does with an answer. So who may see a session changes in one place and in one order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from sayso.core.errors import Invalid, NotFound, RequestRefused
from sayso.core.inputs import Input, InputKind, Lane, ParticipantChange, SettingsChange
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import InputRetractedBody, Row
from sayso.core.session import SessionRole
from sayso.runtime.commands import Caller, Commands
from sayso.storage.store import InboxRow, Store

#: the roles that can be given; a session's owner is who opened it
GIVEN = (SessionRole.MEMBER, SessionRole.VIEWER)


#: the place of a request in the inbox, and the row that settled it; None: it is not there yet, and will be
Asked = tuple[int | None, Row | None]


@dataclass(frozen=True, slots=True)
class Participant:
    """Somebody who takes part, the owner too."""

    principal: Principal
    role: SessionRole


@dataclass(frozen=True, slots=True)
class Queue:
    """What waits in a session for its turn, as one person may see it."""

    #: her own, whole
    mine: tuple[InboxRow, ...]
    #: how many there are, hers too
    waiting: int
    #: for an operator: how many of each owner's there are; "" stands for what nobody owns
    owners: Mapping[str, int] | None


#: characters of a session's title
TITLE_CHARS_MAX = 200


class People:
    """The calls about who takes part, what waits, and how people come between each other."""

    def __init__(self, commands: Commands, store: Store) -> None:
        self._commands, self._store = commands, store

    async def participants(self, by: Caller, session: str) -> list[Participant]:
        """Return the owner and everybody who takes part; whoever may see the session sees who else may.

        Raises:
            NotFound: see `Commands.seat`.
        """
        seat = await self._commands.seat(by, session)
        others = await self._store.participants(session)
        owner = Participant(seat.record.owner, SessionRole.OWNER)
        return [owner, *(Participant(row.principal, row.role) for row in others)]

    async def invite(
        self, by: Caller, session: str, whom: Principal, role: SessionRole, *, idempotency_key: str | None = None
    ) -> Asked:
        """Ask that somebody takes part, or in another role. The row is there when that is so; None: it will be.

        Raises:
            NotFound, Forbidden: see `Commands.may_manage`.
            Invalid: she is no user, is the owner, or the role can't be given.
            RequestRefused: as many take part as may.
        """
        seat = await self._commands.may_manage(by, session)
        if whom.kind is not PrincipalKind.USER:
            raise Invalid(f"{whom} is no user, and only people take part in a session")
        if role not in GIVEN:
            raise Invalid(f"the role {role} can't be given; there are: {', '.join(GIVEN)}")
        self._not_the_owner(whom, seat.record.owner)
        return await self._change(by, session, ParticipantChange(whom, role), idempotency_key)

    async def remove(self, by: Caller, session: str, whom: Principal, *, idempotency_key: str | None = None) -> Asked:
        """Ask that somebody takes part no more; everybody may ask it for herself.

        From that row on the session does not exist for her: her open streams end with it.

        Raises:
            NotFound: see `Commands.seat`; or she does not take part.
            Forbidden: it is another person, and the session is not the caller's to manage.
            Invalid: she is the owner.
        """
        seat = await self._commands.seat(by, session)
        self._not_the_owner(whom, seat.record.owner)
        if whom != by.principal:
            self._commands.manages(seat)
        if await self._store.participant(session, whom) is None:
            raise NotFound("participant")
        return await self._change(by, session, ParticipantChange(whom, None), idempotency_key)

    @staticmethod
    def _not_the_owner(whom: Principal, owner: Principal) -> None:
        if whom == owner:
            raise Invalid(f"{whom} owns the session, and stays its owner")

    async def _change(self, by: Caller, session: str, change: ParticipantChange, idempotency_key: str | None) -> Asked:
        received = Input(InputKind.PARTICIPANT, by.principal, by.verified, participant=change)
        content = {"participant": str(change.principal), "role": change.role}
        return await self._ask(by, session, received, content, idempotency_key)

    # what waits

    async def queue(self, by: Caller, session: str) -> Queue:
        """Return what waits for its turn: the caller's own with its words, of the others' only how many there are.

        Raises:
            NotFound: see `Commands.seat`.
        """
        await self._commands.seat(by, session)
        waiting: list[InboxRow] = []
        after = 0
        while page := await self._store.inbox(session, after=after, limit=self._commands.limits.inbox_page):
            waiting += [entry for entry in page if entry.lane is Lane.NORMAL]
            after = page[-1].n
        owners = Counter("" if entry.input.owner is None else str(entry.input.owner) for entry in waiting)
        mine = tuple(entry for entry in waiting if entry.input.owner == by.principal)
        return Queue(mine, len(waiting), owners if by.is_operator else None)

    async def retract(self, by: Caller, session: str, n: int, *, idempotency_key: str | None = None) -> Asked:
        """Ask that a message of the caller's that waits is taken back. With the row it never reaches the model, and
        no row says what it said; None: that is not known yet.

        Raises:
            NotFound: see `Commands.seat`; or there is no such message of hers, whoever's it is.
            RequestRefused: it does not wait any more: it had its turn, or has it now.
        """
        await self._commands.seat(by, session)
        entry = await self._store.inbox_entry(session, n)
        if entry is None or entry.lane is not Lane.NORMAL or entry.input.owner != by.principal:
            raise NotFound("waiting message")
        if entry.taken_seq is not None:
            return self._retracted_before(n, await self._store.rows(session, after=entry.taken_seq - 1, limit=1))
        received = Input(InputKind.RETRACT, by.principal, by.verified, retracts=n)
        return await self._ask(by, session, received, {"retract": n}, idempotency_key)

    @staticmethod
    def _retracted_before(n: int, taken_by: list[Row]) -> Asked:
        """Return the row that took a message back, if it is that what took it."""
        for row in taken_by:
            if isinstance(row.body, InputRetractedBody):
                return row.body.n, row
        raise RequestRefused(f"input {n} can't be taken back: it doesn't wait any more")

    # how the session is set

    async def change(
        self,
        by: Caller,
        session: str,
        change: SettingsChange,
        *,
        idempotency_key: str | None = None,
    ) -> Asked:
        """Ask that the session goes by another title, or treats others otherwise. None: it will.

        Raises:
            NotFound, Forbidden: see `Commands.may_manage`.
            Invalid: nothing is to change, or the title is too long.
        """
        await self._commands.may_manage(by, session)
        if change == SettingsChange():
            raise Invalid("say what is to change: title, others")
        if change.title is not None and len(change.title) > TITLE_CHARS_MAX:
            raise Invalid(f"the title is longer than {TITLE_CHARS_MAX} characters")
        received = Input(InputKind.SETTINGS, by.principal, by.verified, settings=change)
        content = {"title": change.title, "others": change.others}
        return await self._ask(by, session, received, content, idempotency_key)

    async def _ask(
        self, by: Caller, session: str, received: Input, content: object, idempotency_key: str | None
    ) -> Asked:
        put, row = await self._commands.ask(by, session, received, content, idempotency_key=idempotency_key)
        return put.n, row
