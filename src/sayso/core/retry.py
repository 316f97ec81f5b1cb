"""When the next attempt is due. Pure: the caller brings the chance."""

from __future__ import annotations


def delay_ms(attempt: int, *, chance: float, first_ms: int = 1_000, most_ms: int = 60_000) -> int:
    """Return how long to wait after attempt number `attempt` (from 1) failed.

    Doubles from `first_ms` to `most_ms`; `chance` in [0, 1) draws from the upper half, so that many
    callers that failed together don't come back together.
    """
    ceiling = min(most_ms, first_ms * 2 ** min(attempt - 1, 30))
    return int(ceiling * (0.5 + chance / 2))
