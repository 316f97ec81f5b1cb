"""What every test stands on: one event loop, and how hard hypothesis looks.

`HYPOTHESIS_PROFILE` chooses the profile: `ci` (the default: few examples, the same ones each time),
`search` (others each time) or `night` (many). A failure prints what repeats it.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("ci", max_examples=50, derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile("search", max_examples=200, deadline=None, print_blob=True)
settings.register_profile(
    "night", max_examples=5_000, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run `async def` tests and fixtures on asyncio, the loop that sayso is written for."""
    return "asyncio"
