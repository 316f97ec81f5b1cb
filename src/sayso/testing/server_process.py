"""A real `sayso serve` in a process of its own, which a test may end as a crash would."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

_LISTENING = re.compile(rb"^listening on (\S+)$", re.MULTILINE)


class ServerBroken(RuntimeError):
    """The server ended, or did not listen in time; the text has what it said."""


class ServerProcess:
    """`sayso serve` on loopback, on a free port unless one is named. It can be killed and started again.

    What it says on standard error is appended to `log`: `<database>.log` beside the store's file, unless one is named,
    as it must be where `database` is a URL.
    """

    def __init__(
        self,
        target: str,
        *,
        database: Path | str,
        log: Path | None = None,
        environ: Mapping[str, str] | None = None,
        port: int = 0,
        python: Sequence[str] = (),
        patience_s: float = 30,
    ) -> None:
        """`python` are further arguments of the interpreter, before `-m sayso`."""
        self._command = [sys.executable, *python, "-m", "sayso", "serve", target]
        self._command += ["--port", str(port), "--database", str(database)]
        self._environ = {**os.environ, **(environ or {})}
        self._patience_s = patience_s
        self.log = Path(f"{database}.log") if log is None else log
        #: where it listens; another port after each start
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, and return once it listens. Ctrl-C at a terminal reaches only who started it.

        Raises:
            ServerBroken: it ended, or did not listen in time.
        """
        with self.log.open("ab") as stderr:
            self._process = subprocess.Popen(  # noqa: S603 - our own program, no shell
                self._command, env=self._environ, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
            )
        self.url = self._bound(self._process)

    @property
    def pid(self) -> int:
        """The id of its process, while it runs."""
        assert self._process is not None
        return self._process.pid

    def _bound(self, process: subprocess.Popen[bytes]) -> str:
        assert process.stdout is not None
        said, deadline = b"", time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            ready, _, _ = select.select([process.stdout], [], [], 0.1)
            if ready:
                piece = os.read(process.stdout.fileno(), 4096)
                said += piece
                if (found := _LISTENING.search(said)) is not None:
                    return found.group(1).decode()
                if not piece:
                    break
        self.kill()
        raise ServerBroken(f"it does not listen:\n{self.said()}")

    def said(self) -> str:
        """Return what it wrote to standard error so far, over all its starts."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End it as a crash does: SIGKILL, nothing is finished or written."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """End it as an operator does, and return its exit code."""
        return self._end(signal.SIGTERM)

    def wait(self) -> int:
        """Wait until it ended by itself, and return its exit code (negative: the signal)."""
        assert self._process is not None
        return self._process.wait(timeout=self._patience_s)

    def _end(self, number: int) -> int:
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            process.send_signal(number)
        code = process.wait(timeout=self._patience_s)
        if process.stdout is not None:
            process.stdout.close()
        self._process = None
        return code

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(signal.SIGTERM if kind is None else signal.SIGKILL)
