"""How what a running turn's own person says meanwhile fits it: a classifier is asked once for each input, and what it
says becomes a row (C3).

Nothing waits for a classifier: an input of which it is not known how it fits stays in the queue, and so does one
that came too late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from sayso.core.consent import Consent
from sayso.core.inputs import Fit, InFlight
from sayso.core.labels import Part
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.record import call_line
from sayso.core.rows import InputBody, ModelCalledBody
from sayso.journal.append import Spawn
from sayso.runtime.inbox import Inbox
from sayso.runtime.loaded import Loaded
from sayso.runtime.ports import Classifier, Meanwhile
from sayso.storage.store import InboxRow, Store

#: newest rows in which a turn's own words and steps are looked for
ROWS_LOOKED_AT = 200

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Classified:
    """What a classifier said of one input."""

    turn: str
    n: int
    fit: Fit
    by: str


class Fitting:
    """One session's inputs in flight, as its owner has them classified."""

    def __init__(
        self,
        classifier: Classifier | None,
        store: Store,
        loaded: Loaded,
        inbox: Inbox,
        spawn: Spawn,
        heard: Callable[[Classified], None],
        *,
        classify_ms: int,
        in_flight: InFlight,
    ) -> None:
        """`heard` is told what was found out. Without a classifier, all that its own person says belongs to a turn."""
        self._in_flight = in_flight
        self._classifier, self._store, self._loaded, self._inbox = classifier, store, loaded, inbox
        self._spawn, self._heard, self._classify_ms = spawn, heard, classify_ms
        self._asked: dict[tuple[str, int], asyncio.Task[None]] = {}

    @property
    def busy(self) -> bool:
        """Whether a classifier is being asked."""
        return bool(self._asked)

    def of(self, entry: InboxRow) -> Fit | None:
        """Return how an input of the running turn's own person fits it; None while nobody knows."""
        itself = entry.input.principal == Principal(PrincipalKind.AGENT, self._loaded.id)
        if self._classifier is None or itself:
            return Fit.ADDS
        return self._loaded.fits.get(entry.n)

    def policy(self, entry: InboxRow) -> InFlight:
        """Return what becomes of an input that belongs to the running turn: as its sender says, else as the agent is
        set."""
        return entry.input.in_flight or self._in_flight

    def joins(self, entry: InboxRow) -> bool:
        """Whether what belongs to the running turn becomes a part of it, or begins it anew."""
        return self.policy(entry) in (InFlight.MERGE, InFlight.RESTART)

    def merges(self, entry: InboxRow) -> Fit | None:
        """Return how an input fits, where it may join the running turn; None where it waits all the same."""
        fit = self.of(entry)
        return fit if fit is not Fit.ADDS or self.policy(entry) is InFlight.MERGE else None

    def restarts(self, entry: InboxRow) -> bool:
        """Whether an input is known to belong to the running turn, and to begin it anew."""
        return self.of(entry) is Fit.ADDS and self.policy(entry) is InFlight.RESTART

    def first(self, fit: Fit) -> InboxRow | None:
        """Return what waits longest of the running turn's own person and fits so."""
        return next((entry for entry in self._inbox.own() if self.of(entry) is fit), None)

    def look(self) -> None:
        """Have that classified of which nobody knows how it fits, one after the other: what came later may not overtake
        it. Of a turn that runs the steps of a yes nothing is asked: nothing can change those."""
        turn = self._loaded.turn
        if self._classifier is None or turn is None:
            return
        if turn.steps_of is not None or turn.stopped:
            self.forget()
            return
        body = self._loaded.turn_body
        assert body is not None
        unknown = next((entry for entry in self._inbox.own() if self.of(entry) is None), None)
        if unknown is not None and not self._asked:
            self._begin(turn.id, body.origin, unknown)

    def after(self, asked: Consent, entry: InboxRow) -> Fit | None:
        """Return how an input fits a turn that has ended with a question to its own person, who has not answered it;
        None while that is being found out. Without a classifier it is another matter."""
        if self._classifier is None:
            return Fit.INDEPENDENT
        fit = self._loaded.fits.get(entry.n)
        if fit is None:
            self._begin(asked.turn, asked.origin, entry)
        return fit

    def _begin(self, turn: str, origin: Origin, entry: InboxRow) -> None:
        if self._classifier is not None and (turn, entry.n) not in self._asked:
            self._asked[turn, entry.n] = self._spawn(self._ask(self._classifier, turn, origin, entry))

    def forget(self) -> list[asyncio.Task[None]]:
        """Ask no more. Return what was out."""
        out = list(self._asked.values())
        self._asked.clear()
        for task in out:
            task.cancel()
        return out

    def taken_in(self, classified: Classified) -> None:
        """What was found out is known to its owner: until then it counts as being asked, so that it is asked once."""
        self._asked.pop((classified.turn, classified.n), None)

    async def _ask(self, classifier: Classifier, turn: str, origin: Origin, entry: InboxRow) -> None:
        fit = Fit.UNSURE
        try:
            async with asyncio.timeout(self._classify_ms / 1000):
                fit = Fit(await classifier.fit(await self._meanwhile(turn, origin, entry)))
        except Exception:  # a fault or nonsense: nobody can tell, and so she is asked
            about = {"session": self._loaded.id, "turn": turn, "input": entry.n}
            log.warning("classifier failed: the input counts as unsure", extra=about, exc_info=True)
        self._heard(Classified(turn, entry.n, fit, classifier.name))

    async def _meanwhile(self, turn: str, origin: Origin, entry: InboxRow) -> Meanwhile:
        before: list[str] = []
        steps: list[str] = []
        for row in await self._store.last_rows(self._loaded.id, limit=ROWS_LOOKED_AT):
            match row.body:
                case InputBody() as taken if row.turn == turn or taken.n in origin.inputs:
                    before.append(_said(taken.input.parts))
                case ModelCalledBody(calls=calls) if row.turn == turn:
                    steps += map(call_line, calls)
        return Meanwhile(self._loaded.id, turn, _said(entry.input.parts), tuple(before), tuple(steps))


def _said(parts: tuple[Part, ...]) -> str:
    return "\n".join(part.text for part in parts)
