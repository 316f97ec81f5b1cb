"""What a scenario needs: people who speak, a restaurant that calls, time that passes, a record to read.

A scenario is written once against `Stage`. One stage plays it in this process, on a clock whose minutes
pass when told, with ids that begin anew: its log can be compared. The other plays it over HTTP against a
real server with the outside in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

#: the secret that the demo's restaurant signs with; for demos and tests only
RESTAURANT_SECRET = "whsec_c2F5c28tZGVtby1yZXN0YXVyYW50LXNlY3JldA=="  # noqa: S105 - a demo's


@dataclass(frozen=True, slots=True)
class Open:
    """An open question as its reader sees it."""

    id: str
    digest: str
    text: str


class Stage(Protocol):
    """A place to play a scenario. Everything returns when the runtime has come to rest."""

    async def say(self, who: str, text: str) -> None:
        """A person writes to the session; she has seen everything so far."""
        ...

    async def hook(
        self, event: Mapping[str, Any], *, id: str, secret: str = RESTAURANT_SECRET, changed: bytes | None = None
    ) -> int:
        """The restaurant calls, signed with `secret`; `changed` replaces the body after it was signed.
        Return the status it got."""
        ...

    async def questions(self) -> list[Open]:
        """Return the open questions, oldest first."""
        ...

    async def answer(self, who: str, question: Open, *, yes: bool, reason: str = "") -> int:
        """A person answers a question by its id and digest. Return the status she got."""
        ...

    async def minutes(self, count: int) -> None:
        """Time passes."""
        ...

    async def books(self) -> Mapping[str, Any]:
        """Return what was really done outside."""
        ...
