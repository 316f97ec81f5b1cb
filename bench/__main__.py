"""`python -m bench` runs every measurement."""

from __future__ import annotations

import asyncio

from bench import histories, rows, turns

for measure in (turns, rows, histories):
    asyncio.run(measure.main())
    print()
