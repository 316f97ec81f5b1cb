"""Inbound hooks: the bytes as they came, to `Admission`; a status back, and nothing else.

The answer speaks of receipt, never of what a hook says or whom it is for, so that nothing can be learned
by sending guesses. An unknown source is read and recorded like a known one.
"""

from __future__ import annotations

import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sayso.core.errors import NotFound, SaysoError
from sayso.core.text import plain
from sayso.runtime.admission import Admission
from sayso.runtime.ports import RawRequest
from sayso.server.body import CutShort, Encoded, TooLarge, TooSlow, read_body
from sayso.server.wire import FAULT, verdict

log = logging.getLogger(__name__)

#: what is read of a hook for a source that doesn't exist
UNKNOWN_BYTES_MAX = 1024 * 1024
#: characters of an unknown source's name in the door's record
NAME_CHARS_MAX = 60


class Hooks:
    """`POST /v1/hooks/{source}`, as an ASGI application. Every answer is without a body."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one hook; a sender that has gone gets no answer."""
        if scope["method"] != "POST":
            answer = Response(status_code=405, headers={"Allow": "POST"})
        else:
            try:
                answer = Response(status_code=await self._status(scope, receive))
            except CutShort:
                return
            except SaysoError as error:
                found = verdict(error)
                answer = Response(status_code=found.status, headers=found.headers)
            except Exception:
                log.exception("hook met a fault of ours", extra={"source": plain(_source(scope), chars_max=60)})
                answer = Response(status_code=FAULT.status)
        await answer(scope, receive, send)

    async def _status(self, scope: Scope, receive: Receive) -> int:
        source = _source(scope)
        body = await self._read(scope, receive, source)
        try:
            receipt = await self._admission.receive(source, _raw(scope, body))
        except NotFound:
            await self._admission.turn_away(plain(source, chars_max=NAME_CHARS_MAX), "no such source")
            raise
        return receipt.status

    async def _read(self, scope: Scope, receive: Receive, source: str) -> bytes:
        """Return the body, or record why it wasn't taken. What was cut off leaves nothing but that note."""
        try:
            bytes_max = self._admission.body_bytes_max(source)
        except NotFound:
            bytes_max = UNKNOWN_BYTES_MAX
        try:
            return await read_body(scope, receive, bytes_max=bytes_max)
        except (TooLarge, Encoded, CutShort, TooSlow) as error:
            await self._admission.turn_away(plain(source, chars_max=NAME_CHARS_MAX), str(error))
            raise


def _source(scope: Scope) -> str:
    source: str = scope["path_params"]["source"]
    return source


def _raw(scope: Scope, body: bytes) -> RawRequest:
    query: bytes = scope["query_string"]
    target: bytes = scope.get("raw_path", b"") + (b"?" + query if query else b"")
    return RawRequest(
        method=scope["method"],
        target=target.decode("latin-1"),
        headers=tuple((bytes(name), bytes(value)) for name, value in scope["headers"]),
        body=body,
    )
