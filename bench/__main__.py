"""`python -m bench` runs every measurement."""

from __future__ import annotations

import asyncio

from bench import turns

asyncio.run(turns.main())
