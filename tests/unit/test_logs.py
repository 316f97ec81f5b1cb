"""How a record of the log reads, for programs and for people."""

from __future__ import annotations

import json
import logging
import sys

from sayso.adapters.logs import JsonFormatter, LineFormatter


def record(message: str = "rows not stored yet", **fields: object) -> logging.LogRecord:
    made = logging.makeLogRecord({"name": "sayso.journal", "levelno": logging.WARNING, "levelname": "WARNING"})
    made.msg = message
    vars(made).update(fields)
    return made


def test_a_line_for_people_has_the_phrase_and_its_fields() -> None:
    line = LineFormatter().format(record(session="ses_1", attempt=2, cause="the disk is full"))

    assert line.endswith("WARNING sayso.journal: rows not stored yet session=ses_1 attempt=2 cause=the disk is full")


def test_nothing_in_a_field_can_make_a_second_line() -> None:
    line = LineFormatter().format(record(cause="no\n2026-12-01 INFO all is well\u202e" + "x" * 400))

    assert "no⏎2026-12-01 INFO all is well[U+202E]" in line
    assert "\n" not in line
    assert line.endswith("more characters)")


def test_a_line_for_programs_is_one_object_and_an_error_is_its_kind_and_place() -> None:
    try:
        raise ValueError("a body, which nobody may see here")
    except ValueError:
        said = record(session="ses_1", exc_info=sys.exc_info())
    line = JsonFormatter().format(said)

    found = json.loads(line)
    assert (found["message"], found["session"], found["error"]) == ("rows not stored yet", "ses_1", "ValueError")
    assert "nobody may see" not in line
