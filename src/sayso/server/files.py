"""Files over HTTP: bytes in, bounded while they are read, and bytes out, as something that a browser does not run.

What a file calls itself and says it is comes from whoever sent it, so nothing is guessed from its content, and
only a few types that show and do nothing are shown in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from email.message import Message as Headers
from email.utils import collapse_rfc2231_value
from typing import Any
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sayso.core.attachment import OCTETS, Attachment, media_type_of
from sayso.core.errors import UploadsFull
from sayso.core.origin import Principal
from sayso.runtime.commands import Commands
from sayso.runtime.files import Files
from sayso.runtime.identity import Identity
from sayso.server import wire
from sayso.server.auth import authenticate
from sayso.server.body import Form, headers, read_body

#: how long a file may take to arrive
UPLOAD_MS_MAX = 300_000
#: files that are read at once, of one person and of all; each is held in memory until it is stored
READING_MAX, READING_ALL_MAX = 4, 32

#: forms of which a browser or a command line may think that they are wanted
_FORMS = frozenset({"multipart/form-data", "application/x-www-form-urlencoded"})
#: shown in place; everything else is offered for saving
INLINE = frozenset(
    {
        "application/pdf",
        "audio/mpeg",
        "audio/ogg",
        "audio/wav",
        "audio/webm",
        "image/avif",
        "image/gif",
        "image/jpeg",
        "image/png",
        "image/webp",
        "text/plain",
        "video/mp4",
        "video/ogg",
        "video/webm",
    }
)


class Uploads:
    """`POST /v1/sessions/{session}/uploads`, as an ASGI application: the framework would read without a limit."""

    def __init__(self, commands: Commands, files: Files, identity: Identity) -> None:
        self._commands, self._files, self._identity = commands, files, identity
        self._reading: Counter[Principal] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store one file. Who asks, and whether she may, is known before a byte of it is read.

        Raises:
            Unauthenticated, NotFound, Forbidden, Form, TooLarge, Encoded, CutShort, TooSlow, Invalid, UploadsFull,
            StoreUnavailable: nothing of it is kept.
        """
        if scope["method"] != "POST":
            raise HTTPException(405, headers={"Allow": "POST"})
        request = Request(scope)
        by = await authenticate(self._identity, request.headers)
        session = wire.named("session", request.path_params["session"])
        await self._commands.may_post(by, session)
        media_type = _media_type(scope)
        with self._one_more(by.principal, session):
            data = await read_body(scope, receive, bytes_max=self._files.upload_bytes, ms_max=UPLOAD_MS_MAX)
            staged = await self._files.upload(
                by, session, filename=_filename(request), media_type=media_type, data=data
            )
        told = wire.upload_stored(staged).model_dump_json()
        answer = Response(told, 201, {"Cache-Control": "no-store"}, media_type="application/json")
        await answer(scope, receive, send)

    @contextmanager
    def _one_more(self, who: Principal, session: str) -> Iterator[None]:
        if self._reading[who] >= READING_MAX or self._reading.total() >= READING_ALL_MAX:
            raise UploadsFull(session, "as many uploads arrive as may at once")
        self._reading[who] += 1
        try:
            yield
        finally:
            self._reading[who] -= 1
            self._reading += Counter()  # those who have none are forgotten


def _media_type(scope: Scope) -> str:
    types = headers(scope, b"content-type")
    media_type = media_type_of(types[0].decode("latin-1")) if len(types) == 1 else OCTETS
    if media_type in _FORMS:
        raise Form("send the file itself as the body, with its own Content-Type, not a form that holds it")
    return media_type


def _filename(request: Request) -> str:
    """Return what the request calls the file; empty where it says nothing.

    Source: RFC 6266, section 4.3, and RFC 8187 for names that ASCII can't hold.
    """
    named = request.query_params.get("filename")
    if named is not None:
        return named
    parsed = Headers()
    parsed["content-disposition"] = request.headers.get("content-disposition", "")
    params: list[tuple[str, Any]] = parsed.get_params([], "content-disposition") or []
    names = [value for name, value in params if name.lower() == "filename"]
    for name in names:
        if isinstance(name, tuple):  # the one of RFC 8187 wins over the one for those who don't know it
            return collapse_rfc2231_value(name)
    found = str(names[0]) if names else ""
    try:  # a header is Latin-1 to the server; who doesn't know of RFC 8187 has most likely sent UTF-8
        return found.encode("latin-1").decode()
    except UnicodeError:
        return found


class Downloads:
    """`GET` and `HEAD /v1/sessions/{session}/attachments/{attachment}`, as an ASGI application."""

    def __init__(self, files: Files, identity: Identity) -> None:
        self._files, self._identity = files, identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send one file, a piece at a time.

        Raises:
            Unauthenticated, NotFound, StoreUnavailable: before anything of it is sent.
        """
        if scope["method"] not in ("GET", "HEAD"):
            raise HTTPException(405, headers={"Allow": "GET, HEAD"})
        request = Request(scope)
        by = await authenticate(self._identity, request.headers)
        session, name = (wire.named(what, request.path_params[what]) for what in ("session", "attachment"))
        found = await self._files.attachment(by, session, name)
        known = {
            "ETag": f'"{found.digest}"',
            "Cache-Control": "private, max-age=31536000, immutable",
            "Vary": "Authorization",  # what one person's browser keeps is not for the next one who signs in there
        }
        if _has(request, found):
            await Response(status_code=304, headers=known)(scope, receive, send)
            return
        told = {**known, **_about(found)}
        if scope["method"] == "HEAD":
            await Response(status_code=200, headers=told)(scope, receive, send)
            return
        async with aclosing(self._files.pieces(found)) as pieces:
            first = await anext(pieces, b"")
            await StreamingResponse(_after(first, pieces), 200, told)(scope, receive, send)


async def _after(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _about(found: Attachment) -> dict[str, str]:
    """Return the headers of a file: what it is and is called, and that a browser must neither guess nor run it."""
    text = found.media_type.startswith("text/")
    return {
        "Content-Type": f"{found.media_type}; charset=utf-8" if text else found.media_type,
        "Content-Length": str(found.size_bytes),
        "Content-Disposition": disposition(found),
        "X-Content-Type-Options": "nosniff",
        "Content-Security-Policy": "sandbox; default-src 'none'",
    }


def disposition(found: Attachment) -> str:
    """Return the Content-Disposition of a file: shown in place or saved, and under which name.

    Source: RFC 6266, section 4.3 and appendix D: a name in ASCII for all, the real one where that isn't it.
    """
    how = "inline" if found.media_type in INLINE else "attachment"
    plain = "".join(c if " " <= c <= "~" and c not in '"\\%' else "_" for c in found.filename)
    named = f'{how}; filename="{plain}"'
    return named if plain == found.filename else f"{named}; filename*=UTF-8''{quote(found.filename, safe='')}"


def _has(request: Request, found: Attachment) -> bool:
    """Whether the client says that it has these bytes (RFC 9110, section 13.1.2: a weak comparison)."""
    said = ",".join(request.headers.getlist("if-none-match"))
    tags = {tag.strip().removeprefix("W/") for tag in said.split(",")}
    return "*" in tags or f'"{found.digest}"' in tags
