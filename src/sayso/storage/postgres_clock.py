"""The store's time on PostgreSQL: the server's clock, as this node knows it between two looks at it (K10).

A node asks the server for the time inside its transactions, where instants are stamped. Between them it
counts on by its own monotonic clock, so that a jump of the machine's clock moves nothing.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable


def boot_ms() -> float:
    """Return milliseconds since this machine started, those asleep too where its clocks count them."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return (time.monotonic_ns() if clock is None else time.clock_gettime_ns(clock)) / 1e6


class DatabaseClock:
    """Milliseconds since 1970 UTC by the server's clock. Never steps back; read from any thread.

    Each look bounds how far the server is ahead of us: it read its clock after we asked and before we had the
    answer. Looks narrow the bounds; one that contradicts them (the server's clock was set, or has drifted)
    replaces them. We count from the lower bound, so we are behind the server rather than ahead of it.
    """

    def __init__(self, here_ms: Callable[[], float] = boot_ms) -> None:
        self._here_ms, self._lock = here_ms, threading.Lock()
        self._least, self._most = -math.inf, math.inf
        self._last_ms = self._last_read_ms = 0

    def __call__(self) -> int:
        """Return the time as known here: not before any instant that was returned or read earlier."""
        with self._lock:
            self._last_ms = max(self._last_ms, math.floor(self._here_ms() + self._least))
            return self._last_ms

    def here_ms(self) -> float:
        """Return this node's monotonic time, to be handed to `read`."""
        return self._here_ms()

    def read(self, server_ms: float, *, asked_ms: float) -> int:
        """Take the server's time, for which we asked at `asked_ms` and which has just arrived. Return it as an
        instant to stamp: the server's own, and not before one that it has told us earlier."""
        with self._lock:
            least, most = server_ms - self._here_ms(), server_ms - asked_ms
            if least > self._most or most < self._least:
                self._least, self._most = least, most
            else:
                self._least, self._most = max(least, self._least), min(most, self._most)
            self._last_read_ms = max(self._last_read_ms, math.floor(server_ms))
            self._last_ms = max(self._last_ms, self._last_read_ms)
            return self._last_read_ms
