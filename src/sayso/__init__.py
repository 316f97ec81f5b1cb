"""An agent runtime that knows on whose say-so it acts.

Each name is imported when it is first asked for: a program that needs one part doesn't wait for the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sayso.agent import Agent
    from sayso.core.errors import ToolFailed
    from sayso.runtime.ports import Absent, Call, File, Heard, Output
    from sayso.sources import bearer, standard_webhook
else:
    _HOMES = {
        "Agent": "sayso.agent",
        "Call": "sayso.runtime.ports",
        "File": "sayso.runtime.ports",
        "Heard": "sayso.runtime.ports",
        "Output": "sayso.runtime.ports",
        "ToolFailed": "sayso.core.errors",
        "Absent": "sayso.runtime.ports",
        "standard_webhook": "sayso.sources",
        "bearer": "sayso.sources",
    }

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)


__all__ = [
    "Agent",
    "Call",
    "File",
    "Heard",
    "Output",
    "ToolFailed",
    "Absent",
    "standard_webhook",
    "bearer",
    "__version__",
]
