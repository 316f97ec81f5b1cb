"""Who: a principal is a kind and an id; an origin is whose voice started a turn.

An origin is written once, in `turn.start`, and nothing changes it (B1). It is never read from the
role of a message, from its text, or from the model (B2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from sayso.core.text import is_hidden

_ID = re.compile(r"[^\s:@][^\s:]{0,199}")


class PrincipalKind(StrEnum):
    """What a principal is. The kind is part of its identity: a source's peer "42" is never user "42"."""

    USER = "user"
    SOURCE = "source"
    TIMER = "timer"
    AGENT = "agent"
    OPERATOR = "operator"


@dataclass(frozen=True, slots=True)
class Principal:
    """Somebody or something that can be named as the one who did it."""

    kind: PrincipalKind
    id: str

    def __post_init__(self) -> None:
        if not _ID.fullmatch(self.id) or any(map(is_hidden, self.id)):
            raise ValueError(f"{self.id!r} can't be a principal's id: 1 to 200 visible characters, no blank, no colon")

    def __str__(self) -> str:
        return f"{self.kind}:{self.id}"

    @property
    def is_person(self) -> bool:
        """Whether somebody signs in under this name; a source, a timer and an agent are the runtime's to let speak."""
        return self.kind in (PrincipalKind.USER, PrincipalKind.OPERATOR)

    @classmethod
    def parse(cls, text: str) -> Principal:
        """Return the principal that `text` names, as `user:alice`.

        Raises:
            ValueError: no known kind, or no id.
        """
        kind, colon, name = text.partition(":")
        if not colon:
            raise ValueError(f"{text!r} is no principal: write kind:id, as user:alice")
        return cls(PrincipalKind(kind), name)


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose voice started a turn, how that was verified, and by which inputs (B1)."""

    principal: Principal
    #: how the principal was verified, e.g. "standard-webhooks v1", "api token", "runtime"
    verified: str
    #: the places in the session's inbox of the inputs that started it
    inputs: tuple[int, ...] = ()

    @property
    def is_user(self) -> bool:
        """Whether a person's own signed-in word started the turn."""
        return self.principal.kind is PrincipalKind.USER

    @property
    def acting(self) -> str | None:
        """On whose say-so a turn of this origin acts, as `user:bob`; None for a timer's, behind which there is nobody.
        Absent is not the same as empty: that a result names somebody is what an audit looks for (H10)."""
        return None if self.principal.kind is PrincipalKind.TIMER else str(self.principal)
