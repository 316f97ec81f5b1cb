"""`python -m bench` runs every measurement."""

from __future__ import annotations

import uvloop

from bench import histories, listeners, rows, turns

for measure in (turns, rows, histories, listeners):
    uvloop.run(measure.main())
    print()
