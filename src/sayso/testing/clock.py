"""Time and names that a test decides: no test waits, and a recorded log is the same in each run."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from itertools import count


class VirtualClock:
    """A clock that stands still until it is told to go on.

    It jumps, as a computer's does that slept: who waits for an instant on the way wakes at the end of it, in
    order of those instants. A test that wants each instant for itself goes by `advance_to(clock.due_ms)`.
    """

    def __init__(self, start_ms: int = 0) -> None:
        self._start_ms = self._now_ms = start_ms
        self._sleepers: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = count()

    def now_ms(self) -> int:
        """Return the present, milliseconds since 1970 UTC."""
        return self._now_ms

    @property
    def minutes(self) -> int:
        """Whole minutes since the start."""
        return (self._now_ms - self._start_ms) // 60_000

    @property
    def due_ms(self) -> int | None:
        """The instant of the sleeper that wakes next; None where nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return self._sleepers[0][0] if self._sleepers else None

    async def sleep_until(self, instant_ms: int) -> None:
        """Return once the clock has come to `instant_ms`; others get their turn even if it has."""
        if instant_ms <= self._now_ms:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (instant_ms, next(self._order), woken))
        await woken

    def advance(self, ms: int) -> None:
        """Go on by `ms`. The sleepers wake when the caller next awaits."""
        self.advance_to(self._now_ms + ms)

    def advance_to(self, instant_ms: int) -> None:
        """Go on to `instant_ms`. The sleepers wake when the caller next awaits.

        Raises:
            ValueError: that has passed; a clock never steps back.
        """
        if instant_ms < self._now_ms:
            raise ValueError(f"{instant_ms} has passed: it is {self._now_ms}")
        self._now_ms = instant_ms
        while (due_ms := self.due_ms) is not None and due_ms <= instant_ms:
            heapq.heappop(self._sleepers)[2].set_result(None)


class CountingIds:
    """Ids that count from 1 in each run. They don't sort by time, and its secrets are none."""

    def __init__(self) -> None:
        self._made: Counter[str] = Counter()

    def session(self) -> str:
        """Return ses_1, ses_2, …"""
        return self._next("ses")

    def event(self) -> str:
        """Return evt_1, evt_2, …"""
        return self._next("evt")

    def node(self) -> str:
        """Return node_1, node_2, …"""
        return self._next("node")

    def secret(self) -> str:
        """Return secret_1, secret_2, …"""
        return self._next("secret")

    def _next(self, kind: str) -> str:
        self._made[kind] += 1
        return f"{kind}_{self._made[kind]}"
