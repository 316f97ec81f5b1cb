"""An event loop whose time is a test's: whoever waits for a time-out waits for the clock to be moved, not for the
time that we live in."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from sayso.testing.clock import VirtualClock

T = TypeVar("T")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """asyncio's loop on a clock that stands still until it is told to go on. Files and sockets answer as ever."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._simulated = clock

    def time(self) -> float:
        """Return the clock's seconds."""
        return self._simulated.now_ms() / 1000


def run(main: Coroutine[Any, Any, T], clock: VirtualClock) -> T:
    """Run something on a loop of this clock, and end all that it left running."""
    with asyncio.Runner(loop_factory=lambda: SimulatedLoop(clock)) as runner:
        return runner.run(main)
