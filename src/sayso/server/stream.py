"""A session's history, live: server-sent events from a position on.

A stream ends when its reader leaves, when its token stops standing, or when this process lets it go; then
the reader comes back by the id of the last row it has. The journal is the buffer: here is only what is ready.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sayso.core.errors import Busy, SaysoError, Unauthenticated
from sayso.core.session import Position
from sayso.journal.frames import Frame, farewell
from sayso.runtime.commands import Caller, Commands
from sayso.runtime.identity import Identity
from sayso.server import wire
from sayso.server.auth import authenticate

log = logging.getLogger(__name__)

#: a comment keeps the connection from looking dead, and the token is looked at again
PING_S = 15.0
STREAMS_MAX = 10_000
#: bytes that wait for a reader before no more are made
READY_BYTES_MAX = 64 * 1024

_RETRY = b"retry: 1000\n\n"
_PING = b": ping\n\n"
_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ],
}


class Closing(Busy):
    """This process is going away, or has as many streams open as it may; another one, or later, will do."""


#: where a request's scope keeps the stream that it opened, until whoever began the request runs it
OPENED = "sayso.streams"


class Streams:
    """`GET /v1/sessions/{session}/stream`, as an ASGI application that knows every stream it has open.

    What answers here is refused, or opened: `opening` runs the rest. A stream stays open for hours, and would hold
    every layer of the framework that its request came through.
    """

    def __init__(self, commands: Commands, identity: Identity, *, ping_s: float = PING_S) -> None:
        self._commands, self._identity, self._ping_s = commands, identity, ping_s
        self._open: set[Stream] = set()
        self._closing = False

    def close(self) -> None:
        """Send every reader away, and let no more in. For the event loop, when the server stops."""
        self._closing = True
        for stream in self._open:
            stream.end("shutdown")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Open a stream of one session for one reader. Everything that can be refused is refused before it begins.

        Raises:
            Unauthenticated, NotFound, Malformed, Closing, StoreUnavailable.
        """
        if scope["method"] != "GET":
            raise HTTPException(405, headers={"Allow": "GET"})
        request = Request(scope)
        by = await authenticate(self._identity, request.headers)
        session, whence = wire.named("session", request.path_params["session"]), _whence(request)
        frames = await self._commands.follow(by, session, after=whence.after, token=whence.token)
        try:
            first = await anext(frames)
            if self._closing or len(self._open) >= STREAMS_MAX:
                raise Closing("no more streams are opened here")
        except BaseException:
            await frames.aclose()
            raise
        stands = partial(self._stands, request.headers, by, session)
        scope[OPENED].append(Stream(first, frames, ping_s=self._ping_s, stands=stands))

    async def opening(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Let `app` answer, and run the stream that it opened, if it did."""
        opened: list[Stream] = []
        await app({**scope, OPENED: opened}, receive, send)
        for stream in opened:
            self._open.add(stream)
            if self._closing:
                stream.end("shutdown")
            try:
                await stream.run(receive, send)
            finally:
                self._open.discard(stream)

    async def _stands(self, headers: Headers, by: Caller, session: str) -> str:
        """Return why the reader may read no more: its token is good no longer, or the session is not its to see.
        Empty while it may; where the store can't say, the stream goes on."""
        try:
            if await authenticate(self._identity, headers) != by:
                return "signed_out"
            return "" if await self._commands.may_see(by, session) else "removed"
        except Unauthenticated:
            return "signed_out"
        except Busy:
            return ""


class _Signal:
    """For one who waits: that something has happened since it last waited. Smaller than an `asyncio.Event`, of which
    thousands of streams would have thousands."""

    __slots__ = ("_given", "_waiter")

    def __init__(self) -> None:
        self._given = False
        self._waiter: asyncio.Future[None] | None = None

    def give(self) -> None:
        """It has happened."""
        self._given = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once it has happened."""
        if not self._given:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._given = False


class Stream:
    """Frames on their way to one reader: what becomes ready while the last bytes are sent goes out together."""

    def __init__(
        self,
        first: Frame,
        frames: AsyncGenerator[Frame, None],
        *,
        ping_s: float,
        stands: Callable[[], Awaitable[str]],
    ) -> None:
        self._frames, self._ping_s, self._stands = frames, ping_s, stands
        self._ready = bytearray(_RETRY + first.sse)
        self._changed, self._sent = _Signal(), _Signal()
        self._ended = False
        #: why the frames were cut short; empty while they weren't
        self._farewell = ""
        self._reading: asyncio.Task[None] | None = None

    async def run(self, receive: Receive, send: Send) -> None:
        """Send until the frames end or the reader has left."""
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(self._finish)
        watching = asyncio.create_task(self._watch(receive))
        try:
            if self._farewell:
                self._reading.cancel()
            await send(_START)
            await self._write(send)
        finally:
            for task in (watching, self._reading):
                task.cancel()
            await asyncio.wait((watching, self._reading))
            await self._frames.aclose()

    def end(self, farewell: str) -> None:
        """End after what is ready; `farewell` tells the reader why."""
        self._farewell = self._farewell or farewell
        if self._reading is not None:
            self._reading.cancel()

    async def _read(self) -> None:
        """Make frames ready, no faster than the reader takes them."""
        try:
            async for frame in self._frames:
                self._put(frame.sse)
                while len(self._ready) > READY_BYTES_MAX:
                    await self._sent.wait()
        except SaysoError as error:
            log.warning("stream ended early", extra={"cause": type(error).__name__})
            self._farewell = "unavailable"
        except Exception:
            log.exception("stream failed")
            self._farewell = "fault"

    def _finish(self, _: asyncio.Task[None]) -> None:
        """Nothing more will be read; the frames' own farewell, if they ended by themselves, is ready already."""
        self._ended = True
        self._put(farewell(self._farewell).sse if self._farewell else b"")

    async def _watch(self, receive: Receive) -> None:
        """Notice when the reader leaves or may no longer read; keep the connection alive till then."""
        while True:
            try:
                async with asyncio.timeout(self._ping_s):
                    while (await receive())["type"] != "http.disconnect":
                        pass
                return self.end("")
            except TimeoutError:
                if why := await self._stands():
                    return self.end(why)
                self._put(_PING)

    async def _write(self, send: Send) -> None:
        ended = False
        while not ended:
            await self._changed.wait()
            ended, batch = self._ended, bytes(self._ready)
            self._ready.clear()
            self._sent.give()
            try:
                await send({"type": "http.response.body", "body": batch, "more_body": not ended})
            except OSError:  # how some servers say that the reader has left
                self.end("")
                return

    def _put(self, data: bytes) -> None:
        self._ready += data
        self._changed.give()


@dataclass(frozen=True, slots=True)
class Whence:
    """Where a reader comes from: after a position, or with the token of a history."""

    after: Position | None = None
    token: Position | None = None


def _whence(request: Request) -> Whence:
    """Return where to go on from: the id of the last event that the reader has, else what the address says. A page
    that comes back by itself has both, and then the token in its address is an old one.

    Raises:
        Malformed: it is no position, or the address says two things.
    """
    last = request.headers.get("last-event-id")
    after, token = (request.query_params.get(name) for name in ("after", "token"))
    if last:
        return Whence(after=wire.position(last))
    if after is not None and token is not None:
        raise wire.Malformed("a stream goes on after a position or from a token, not both")
    if token is not None:
        return Whence(token=wire.position(token))
    return Whence(after=None if after is None else wire.position(after))
