"""What a caller may ask about the people of a session: who takes part, and as what.

Nothing here writes a row: what is asked is an input of the control lane, which the session's owner settles
with a row, as it does with an answer. So who may see a session changes in one place and in one order.
"""

from __future__ import annotations

from dataclasses import dataclass

from sayso.core.errors import Invalid, NotFound, RequestRefused
from sayso.core.inputs import Input, InputKind, ParticipantChange
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import RequestRefusedBody, Row
from sayso.core.session import SessionRole
from sayso.runtime.commands import Caller, Commands
from sayso.storage.store import Put, Store

#: the roles that can be given; a session's owner is who opened it
GIVEN = (SessionRole.MEMBER, SessionRole.VIEWER)


@dataclass(frozen=True, slots=True)
class Participant:
    """Somebody who takes part, the owner too."""

    principal: Principal
    role: SessionRole


class People:
    """The calls about who takes part."""

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
    ) -> tuple[Put, Row | None]:
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

    async def remove(
        self, by: Caller, session: str, whom: Principal, *, idempotency_key: str | None = None
    ) -> tuple[Put, Row | None]:
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
            await self._commands.may_manage(by, session)
        if await self._store.participant(session, whom) is None:
            raise NotFound("participant")
        return await self._change(by, session, ParticipantChange(whom, None), idempotency_key)

    @staticmethod
    def _not_the_owner(whom: Principal, owner: Principal) -> None:
        if whom == owner:
            raise Invalid(f"{whom} owns the session, and stays its owner")

    async def _change(
        self, by: Caller, session: str, change: ParticipantChange, idempotency_key: str | None
    ) -> tuple[Put, Row | None]:
        received = Input(InputKind.PARTICIPANT, by.principal, by.verified, participant=change)
        content = {"participant": str(change.principal), "role": change.role}
        put, settled = await self._commands.ask(by, session, received, content, idempotency_key=idempotency_key)
        return put, _done(settled)


def _done(settled: Row | None) -> Row | None:
    """Return the row that settles a request, unless it says that nothing was changed.

    Raises:
        RequestRefused: it does.
    """
    if settled is not None and isinstance(settled.body, RequestRefusedBody):
        raise RequestRefused(settled.body.reason)
    return settled
