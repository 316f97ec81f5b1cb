"""Log lines, for programs as JSON and for people: a constant phrase, then its fields.

A phrase is written as the code has it, without what was put into it: texts from outside may only come as
named fields, and nobody names those. An error is its kind and place, since its text could quote a body.
"""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any

from sayso.core.text import plain

#: what every record has; the rest of its attributes are the fields that the call gave
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
FRAMES_MAX = 20


class JsonFormatter(logging.Formatter):
    """One line of JSON for one record, in ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
        line: dict[str, Any] = {
            "at_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg if isinstance(record.msg, str) else type(record.msg).__name__,
        }
        fields = _fields(record)
        return json.dumps(line | {k: v for k, v in fields.items() if k not in line} | _error(record))


class LineFormatter(logging.Formatter):
    """One line of text for one record, for a person at a terminal; a traceback goes below it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line."""
        fields = "".join(f" {name}={plain(str(value), chars_max=300)}" for name, value in _fields(record).items())
        return super().formatMessage(record) + fields


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: _plain(value) for name, value in vars(record).items() if name not in _OWN}


def _plain(value: object) -> str | int | float | bool | None:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _error(record: logging.LogRecord) -> dict[str, Any]:
    if not record.exc_info or record.exc_info[0] is None:
        return {}
    kind, _, trace = record.exc_info
    frames = traceback.extract_tb(trace)[-FRAMES_MAX:]
    return {"error": kind.__name__, "where": [f"{each.filename}:{each.lineno} {each.name}" for each in frames]}
