"""Places at which a process can be killed, by name: around every COMMIT, and around every await of the runtime
on a store, a model, a tool and the one who waits for an answer.

Everything here wraps a port or a hook that is public; production code knows nothing of it. A name is a place and
how often it was passed, as `store.put:after#2`. A request's own steps carry its name, as `hook/store.put:before#1`.
Requests that only read are not counted: how often they come is their reader's business.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sayso.core.rows import Row
from sayso.core.session import Token
from sayso.runtime.ports import Finished, Model, ModelRequest, TextDelta
from sayso.storage.shape import CommitPhase
from sayso.storage.store import Store

P = ParamSpec("P")
T = TypeVar("T")

#: whose step this is: "" is the runtime's own, None is not counted
_whose: ContextVar[str | None] = ContextVar("whose", default="")

#: long enough for a place to leave the same behind each time
MOMENT_S = 0.03

_PHASES = {CommitPhase.BEFORE: "before", CommitPhase.AFTER: "after"}


class CrashPoints:
    """Counts the places that this process passes, and ends it at one of them."""

    def __init__(self) -> None:
        self._passed: Counter[str] = Counter()
        self._passing = threading.Lock()
        self._at: str | None = None
        self._moment_s = MOMENT_S
        self._told: int | None = None

    def arm(self, *, at: str | None = None, told: Path | None = None, moment_s: float = MOMENT_S) -> None:
        """From now on: end at the place of this name, and write each name that is passed to a file, a line each,
        there at once whatever ends the process. All other threads may go on for `moment_s` before the end: they
        finish what is under way, and what would act on a row too early gets its chance to."""
        self._at, self._moment_s = at, moment_s
        self._told = None if told is None else os.open(told, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)

    def passing(self, place: str, *, note: str = "") -> None:
        """Pass a place; from any thread. SIGKILL, as `kill -9`: this does not return where it ends the process.
        A note stands behind the name in the file."""
        whose = _whose.get()
        if whose is None:
            return
        place = f"{whose}/{place}" if whose else place
        with self._passing:
            self._passed[place] += 1
            name = f"{place}#{self._passed[place]}"
            if self._told is not None:
                os.write(self._told, f"{name} {note}".strip().encode() + b"\n")
        if name == self._at:
            time.sleep(self._moment_s)
            os.kill(os.getpid(), signal.SIGKILL)

    def committing(self, phase: CommitPhase, bodies: tuple[str, ...]) -> None:
        """For a store's `on_commit`. Each body of a batch has a place of its own, so that a name does not depend on
        what else happened to wait."""
        for body in bodies:
            self.passing(f"commit.{body}:{_PHASES[phase]}")

    def around(
        self, place: str, call: Callable[P, Awaitable[T]], *, note: Callable[P, str] | None = None
    ) -> Callable[P, Coroutine[Any, Any, T]]:
        """Return `call` with a place before it goes out, and one after it came back with a result or an error,
        before anything is done with that. `note` says of its arguments what is noted at the first."""

        @functools.wraps(call)
        async def watched(*args: P.args, **kwargs: P.kwargs) -> T:
            self.passing(f"{place}:before", note="" if note is None else note(*args, **kwargs))
            try:
                result = await call(*args, **kwargs)
            except Exception:
                self.passing(f"{place}:after")
                raise
            self.passing(f"{place}:after")
            return result

        return watched


class WatchedStore:
    """A store, each of whose methods that wait has its two places. It is handed the real one by `behind`, which may
    come after others were handed this one."""

    def __init__(self, points: CrashPoints) -> None:
        self._points = points
        self._store: Store | None = None

    def behind(self, store: Store) -> None:
        """Stand in front of this store from now on."""
        self._store = store

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return self._points.around(f"store.{name}", found, note=_kinds if name == "write" else None)

    @property
    def as_store(self) -> Store:
        """Itself, as those see it who are handed it."""
        return cast(Store, self)


def _kinds(_: Token, rows: Sequence[Row], **__: object) -> str:
    return ",".join(row.kind for row in rows)


class WatchedModel:
    """A model with places before it is asked, after its first words, and after the whole reply has come."""

    def __init__(self, model: Model, points: CrashPoints) -> None:
        self.name = model.name
        self._model, self._points = model, points

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[TextDelta | Finished]]:
        """See `Model`."""
        self._points.passing("model:before")
        async with self._model.stream(request) as pieces:
            yield self._watched(pieces)

    async def _watched(self, pieces: AsyncIterator[TextDelta | Finished]) -> AsyncIterator[TextDelta | Finished]:
        midway = False
        async for piece in pieces:
            if isinstance(piece, Finished):
                self._points.passing("model:after")
            elif not midway:
                midway = True
                self._points.passing("model:midway")
            yield piece


class WatchedAnswers:
    """ASGI middleware: names the steps of a request that may change something, and has places before its answer
    goes out and after it went."""

    def __init__(self, app: ASGIApp, points: CrashPoints) -> None:
        self._app, self._points = app, points

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        _whose.set(_named(scope["method"], scope["path"]))

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._points.passing("respond:before")
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                self._points.passing("respond:after")

        return await self._app(scope, receive, sending)


def _named(method: str, path: str) -> str | None:
    if method != "POST":
        return None
    if path.startswith("/v1/hooks/"):
        return "hook"
    return "answer" if "/consents/" in path else "message" if path.endswith("/inputs") else None
