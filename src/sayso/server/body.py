"""A request's body: read no further than its limit, and never left on the connection unread."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sayso.core.errors import Busy, Refused

#: how long a body may take to arrive
BODY_MS_MAX = 30_000
#: what a client that was answered early may still send before its connection is closed, and for how long
LINGER_BYTES_MAX = 8 * 1024 * 1024
LINGER_MS_MAX = 2_000


class TooLarge(Refused):
    """The body is longer than its route takes."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(f"the body is longer than {bytes_max} bytes")


class Encoded(Refused):
    """The body is compressed or otherwise encoded; it would have to be inflated before it is proven."""


class NotJson(Refused):
    """The body does not say that it is JSON."""


class Form(Refused):
    """The body is a form; what is wanted is the file itself."""


class CutShort(Refused):
    """The client went away before its body had arrived. Nobody is there to be told."""


class TooSlow(Busy):
    """The body did not arrive in time."""


async def read_body(scope: Scope, receive: Receive, *, bytes_max: int, ms_max: int = BODY_MS_MAX) -> bytes:
    """Return the whole body. Whatever it is, at most `bytes_max` and one chunk of it are held.

    Raises:
        TooLarge, Encoded, CutShort, TooSlow: it was not read to its end, and nothing of it may be used.
    """
    if any(coding.strip().lower() != b"identity" for coding in headers(scope, b"content-encoding")):
        raise Encoded("the body must come without a content-encoding")
    if declared_bytes(scope) > bytes_max:
        raise TooLarge(bytes_max)
    try:
        async with asyncio.timeout(ms_max / 1000):
            return await _gather(receive, bytes_max)
    except TimeoutError:
        raise TooSlow(f"the body did not arrive within {ms_max} ms") from None


async def read_json(scope: Scope, receive: Receive, *, bytes_max: int) -> bytes:
    """Return the body of a JSON route, empty where there is none.

    Raises:
        NotJson: there is one, of another type, or of none.
        TooLarge, Encoded, CutShort, TooSlow: see `read_body`.
    """
    if has_body(scope):
        types = headers(scope, b"content-type")
        if len(types) != 1 or types[0].partition(b";")[0].strip().lower() != b"application/json":
            raise NotJson("the body must be application/json")
    return await read_body(scope, receive, bytes_max=bytes_max)


async def _gather(receive: Receive, bytes_max: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            raise CutShort("the client went away before its body had arrived")
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise TooLarge(bytes_max)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def headers(scope: Scope, name: bytes) -> list[bytes]:
    """Return every value of a header; `name` is in lower case."""
    return [value for each, value in scope["headers"] if each.lower() == name]


def declared_bytes(scope: Scope) -> int:
    """Return the declared length of the body; 0 where none is declared."""
    values = headers(scope, b"content-length")
    return max((int(value[:20]) for value in values if value.isdigit()), default=0)  # 20 digits are too many anyway


def has_body(scope: Scope) -> bool:
    """Return whether the request comes with a body."""
    return declared_bytes(scope) > 0 or bool(headers(scope, b"transfer-encoding"))


class HangUp:
    """ASGI middleware: a request that is answered before its body was read ends its connection.

    What the client still sends would be taken for its next request, or, where it waited for `100 Continue`,
    its next request for the body. Closing a socket that holds unread bytes resets it, and the client would
    lose the answer: so a bounded rest is read and dropped first.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass through what has no body, and HTTP/2, where a connection isn't one request's."""
        if scope["type"] == "http" and scope["http_version"].startswith("1") and has_body(scope):
            exchange = _Exchange(receive, send, waits=bool(headers(scope, b"expect")))
            await self._app(scope, exchange.receive, exchange.send)
        else:
            await self._app(scope, receive, send)


class _Exchange:
    """One request with a body, and its answer."""

    def __init__(self, receive: Receive, send: Send, *, waits: bool) -> None:
        """`waits`: the client sends its body only when told to, so there is no rest to read."""
        self._receive, self._send, self._waits = receive, send, waits
        self._read = self._closing = False

    async def receive(self) -> Message:
        message = await self._receive()
        if not message.get("more_body", False):
            self._read = True
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start" and not self._read:
            self._closing = True
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        if self._closing and message["type"] == "http.response.body" and not message.get("more_body", False):
            await self._send({**message, "more_body": True})
            await self._drop_rest()
            message = {"type": "http.response.body", "body": b""}
        await self._send(message)

    async def _drop_rest(self) -> None:
        left = 0 if self._waits else LINGER_BYTES_MAX
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LINGER_MS_MAX / 1000):
                while left > 0 and not self._read:
                    left -= len((await self.receive()).get("body", b""))
