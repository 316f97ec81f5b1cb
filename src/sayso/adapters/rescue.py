"""Answers of operations that the store did not take, in a file beside it (K9).

An operation was sent, its answer came, and the process had to end before the answer could be stored. Everything else
is asked again after a restart; an answer may not come twice. So it goes into this file, one JSON object a line,
synced, and is offered to its operation at the next start. The file holds what tools answered: it is as private as
the store, and is readable by its owner alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from sayso.runtime.ports import Evidence

log = logging.getLogger(__name__)

_LINE: TypeAdapter[Evidence] = TypeAdapter(Evidence)


class RescueFile:
    """See `Rescue`. One process at a time: the one that runs sessions on the store."""

    def __init__(self, path: Path) -> None:
        """Read what an earlier process left; there may be no file. A line that can't be read stays in it, and is
        said in the log: it is for a person to look at."""
        self._path = path
        self._kept: list[Evidence] = []
        self._unread: list[str] = []
        try:
            lines = path.read_text("utf-8", "replace").split("\n")  # a text may hold other ends of line
        except FileNotFoundError:
            return
        for number, line in enumerate(lines, 1):
            if not line:
                continue
            try:
                self._kept.append(_LINE.validate_json(line))
            except ValidationError:
                log.error("a line of the rescue file can't be read", extra={"file": str(path), "line": number})
                self._unread.append(line)
        if self._kept:
            log.warning("answers were rescued", extra={"file": str(path), "answers": len(self._kept)})

    def keep(self, evidence: Sequence[Evidence]) -> None:
        """See `Rescue`. What can't be written is said in the log, so that a person can look at the other side."""
        self._kept += evidence
        try:
            self._write()
        except OSError as error:
            for one in evidence:
                extra = {"session": one.session, "operation": one.operation, "tool": one.tool, "happened": one.happened}
                log.error("an answer could not be rescued", extra={**extra, "cause": str(error)})

    def of(self, session: str) -> Sequence[Evidence]:
        """See `Rescue`."""
        return [one for one in self._kept if one.session == session]

    def drop(self, session: str, operation: str) -> None:
        """See `Rescue`. Where the file can't be written the line stays: it is offered again, and dropped again."""
        self._kept = [one for one in self._kept if (one.session, one.operation) != (session, operation)]
        try:
            self._write()
        except OSError as error:
            log.warning("the rescue file can't be written", extra={"file": str(self._path), "cause": str(error)})

    def _write(self) -> None:
        lines = [*self._unread, *(_LINE.dump_json(one).decode() for one in self._kept)]
        if not lines:
            self._path.unlink(missing_ok=True)
            return
        new = self._path.with_name(f"{self._path.name}.new")
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        new.replace(self._path)
        directory = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
