"""`python -m bench` runs every measurement."""

from __future__ import annotations

import asyncio

from bench import rows, turns

for measure in (turns, rows):
    asyncio.run(measure.main())
    print()
