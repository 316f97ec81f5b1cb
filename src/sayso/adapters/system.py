"""The real clock, sleep and randomness: the one file that reads them."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Callable

import uuid_utils

#: the longest sleep between two looks at the clock, so that a computer that slept is noticed
STEP_MS = 10_000


class SystemClock:
    """The computer's time, which never steps back.

    Where the wall clock was set back, this one goes on at half speed until the wall has caught up: a timer
    comes late and never not at all, and a signed time is not judged by an error that stays.
    """

    def __init__(
        self,
        *,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._wall_ns, self._monotonic_ns = wall_ns, monotonic_ns
        self._lock = threading.Lock()
        self._now_ns, self._read_at_ns = wall_ns(), monotonic_ns()

    def now_ms(self) -> int:
        """Return milliseconds since 1970 UTC; never less than before, from any thread."""
        with self._lock:
            read_at_ns = self._monotonic_ns()
            slow_ns = self._now_ns + (read_at_ns - self._read_at_ns) // 2
            self._now_ns, self._read_at_ns = max(self._wall_ns(), slow_ns), read_at_ns
            return self._now_ns // 1_000_000

    async def sleep_until(self, instant_ms: int) -> None:
        """Return at `instant_ms`, or soon after; others get their turn even if that has passed."""
        await _sleep_until(instant_ms, self.now_ms)


class StoreClock:
    """The store's time as the clock of the runtime beside it, so that both mean the same instants (K10)."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        """`now_ms` is the store's."""
        self.now_ms = now_ms

    async def sleep_until(self, instant_ms: int) -> None:
        """Return at `instant_ms`, or soon after; others get their turn even if that has passed."""
        await _sleep_until(instant_ms, self.now_ms)


async def _sleep_until(instant_ms: int, now_ms: Callable[[], int]) -> None:
    await asyncio.sleep(0)
    while (left_ms := instant_ms - now_ms()) > 0:  # noqa: ASYNC110 - no event says that it is time
        await asyncio.sleep(min(left_ms, STEP_MS) / 1000)


class SystemIds:
    """Names that nobody else has: UUIDv7, so that they sort by time."""

    def session(self) -> str:
        """Return a new session id."""
        return _named("ses")

    def event(self) -> str:
        """Return a local event id for input that came without one (A5)."""
        return _named("evt")

    def node(self) -> str:
        """Return a new incarnation of this process."""
        return _named("node")

    def secret(self) -> str:
        """Return 32 random bytes as text, for a token."""
        return secrets.token_urlsafe(32)


def _named(kind: str) -> str:
    return f"{kind}_{uuid_utils.uuid7().hex}"
