"""What a session's operations left in the world: what stands, what may, and what is gone, and who said so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sayso.core.operation import EffectState, OperationState
from sayso.core.text import plain
from sayso.runtime.commands import Caller, Commands
from sayso.storage.store import OperationRow, RefRow, Store


class Presence(StrEnum):
    """Whether what an operation did is there."""

    #: it was sent, and nothing came back yet
    UNDER_WAY = "under_way"
    STANDING = "standing"
    #: it may be there: nobody knows
    UNKNOWN = "unknown"
    #: somebody reported that it is there no more (A13)
    GONE = "gone"
    #: it was undone, by an operation of its own (D6)
    RELEASED = "released"
    #: it left nothing: it failed, was undone by itself, or was never sent
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class SessionEffect:
    """One operation, what became of it, and the things that it made."""

    operation: OperationRow
    made: tuple[RefRow, ...]

    @property
    def presence(self) -> Presence:
        """Return whether what it did is there. What stands in part stands."""
        match self.operation.state:
            case OperationState.SENT:
                return Presence.UNDER_WAY
            case OperationState.UNKNOWN:
                return Presence.UNKNOWN
            case OperationState.GONE:
                return Presence.GONE
            case OperationState.RELEASED:
                return Presence.RELEASED
            case OperationState.ANSWERED if self.operation.effect not in (EffectState.NONE, EffectState.ROLLED_BACK):
                return Presence.STANDING
            case _:
                return Presence.NOTHING

    @property
    def line(self) -> str:
        """The effect on one line; nothing in a value can break it."""
        call = f"{plain(self.operation.tool, chars_max=60)} {plain(self.operation.arguments, chars_max=200)}"
        part = ", in part" if self.operation.effect is EffectState.PARTIAL else ""
        said = [f"{plain(str(row.ref), chars_max=80)}{_gone(row)}" for row in self.made]
        made = f"; made {', '.join(said)}" if said else ""
        return f"{self.operation.operation}  {self.presence.replace('_', ' ')}{part}  {call}{made}"


def _gone(row: RefRow) -> str:
    return "" if row.state == "live" else f" (gone, {plain(row.reported_by or '', chars_max=60)} says)"


@dataclass(frozen=True, slots=True)
class Page:
    """The newest effects of a session, newest first, and whether there are more."""

    effects: tuple[SessionEffect, ...]
    more: bool


async def effects_of(store: Store, session: str, *, limit: int, everything: bool = False) -> Page:
    """Return what a session's operations left: what is there or may be, or also what is gone and what left nothing."""
    made: dict[str | None, list[RefRow]] = {}
    for row in await store.made(session):
        made.setdefault(row.operation, []).append(row)
    operations = await store.operations(session, states=None if everything else _MAY_STAND)
    found = [SessionEffect(row, tuple(made.get(row.operation, ()))) for row in reversed(operations)]
    chosen = found if everything else [effect for effect in found if effect.presence is not Presence.NOTHING]
    return Page(tuple(chosen[:limit]), len(chosen) > limit)


_MAY_STAND: Sequence[OperationState] = (OperationState.SENT, OperationState.UNKNOWN, OperationState.ANSWERED)


class Effects:
    """The call about effects."""

    def __init__(self, commands: Commands, store: Store) -> None:
        self._commands, self._store = commands, store

    async def page(self, by: Caller, session: str, *, limit: int, everything: bool) -> Page:
        """Return the newest effects of a session that the caller may see.

        Raises:
            NotFound: see `Commands.seat`.
            StoreUnavailable: the store can't be read now.
        """
        await self._commands.seat(by, session)
        return await effects_of(self._store, session, limit=limit, everything=everything)
