"""What a scenario needs: people who speak, a restaurant that calls, time that passes, a record to read.

A scenario is written once against `Stage`. One stage plays it in this process, on a clock whose minutes
pass when told, with ids that begin anew: its log can be compared. The other plays it over HTTP against a
real server with the outside in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

#: what the demo's sources sign with, by source; for demos and tests only
SECRETS = {
    "restaurant": "whsec_c2F5c28tZGVtby1yZXN0YXVyYW50LXNlY3JldA==",
    "cinema": "whsec_c2F5c28tZGVtby1jaW5lbWEtc2VjcmV0LTEyMzQ1Ng==",
}
#: a secret that no source has
FORGED = "whsec_bm90LXRoZS1yZXN0YXVyYW50LXNlY3JldA=="


@dataclass(frozen=True, slots=True)
class Open:
    """An open question as its reader sees it."""

    id: str
    digest: str
    text: str


class Stage(Protocol):
    """A place to play a scenario. Everything returns when the runtime has come to rest."""

    async def say(self, who: str, text: str, *, seen: bool = True, wait: bool = True) -> None:
        """A person writes to the session; `seen` says whether she has seen everything so far. Without `wait`, while
        something is out: return when the runtime has taken note of it."""
        ...

    async def begin(self, who: str, text: str, venue: str) -> None:
        """A person writes; return once the venue, which is on hold, has done something and does not answer."""
        ...

    async def hold(self, venue: str) -> None:
        """From now on the venue's answers wait."""
        ...

    async def let_go(self, venue: str) -> None:
        """The venue answers again."""
        ...

    async def until(self, kind: str, turn: str) -> None:
        """Return once a row of that kind and turn is stored."""
        ...

    async def stop(self, who: str) -> None:
        """A person stops the running turn."""
        ...

    async def crash(self) -> None:
        """The process ends where it stands, and another takes its place."""
        ...

    async def hook(
        self,
        event: Mapping[str, Any],
        *,
        id: str,
        source: str = "restaurant",
        secret: str | None = None,
        changed: Mapping[str, Any] | None = None,
        signed_minutes_ago: int = 0,
        wait: bool = True,
    ) -> int:
        """A source calls. `secret` is what it signs with, if not its own; `changed` is the body that arrives
        in the place of the signed one. Return the status it got."""
        ...

    async def questions(self) -> list[Open]:
        """Return the open questions, oldest first."""
        ...

    async def answer(self, who: str, question: Open, *, yes: bool, reason: str = "", times: int = 1) -> list[int]:
        """A person answers a question by its id and digest, from so many clients at the same moment. Return the
        status that each got."""
        ...

    async def minutes(self, count: int) -> None:
        """Time passes."""
        ...

    async def full(self, day: str, time: str) -> None:
        """The restaurant has no table then."""
        ...

    async def store_fails_once(self) -> None:
        """The next input can't be stored."""
        ...

    async def books(self) -> Mapping[str, Any]:
        """Return what was really done outside."""
        ...
