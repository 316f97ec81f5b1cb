"""What a caller may ask about files: send one ahead of a message, take it back, read one that a row shows.

An upload is known to who sent it, by an id that nobody can guess, until a message of its session takes it (K29).
Who may see a session may read the files that its rows show; those of an input that waits are its sender's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from sayso.core.attachment import Attachment, digest_of
from sayso.core.errors import Invalid, NotFound, StoreUnavailable
from sayso.core.rows import InputBody, Row, ToolResultBody, ToolSettledBody
from sayso.core.text import file_name
from sayso.runtime.commands import Caller, Commands
from sayso.storage.store import Store, Upload


@dataclass(frozen=True, slots=True)
class Staged:
    """A file that waits for a message to name it."""

    upload: Upload
    size_bytes: int
    #: it is dropped then, milliseconds since 1970 UTC
    until_ms: int


class Files:
    """The calls about files."""

    def __init__(self, commands: Commands, store: Store) -> None:
        self._commands, self._store = commands, store

    @property
    def upload_bytes(self) -> int:
        """The longest file that is taken."""
        return self._commands.limits.upload_bytes

    async def upload(self, by: Caller, session: str, *, filename: str, media_type: str, data: bytes) -> Staged:
        """Store a file for one of the caller's messages to come, and return its id.

        Raises:
            NotFound, Forbidden: see `Commands.may_post`.
            Invalid: there are no bytes, or too many.
            UploadsFull: as many wait as may.
        """
        await self._commands.may_post(by, session)
        limits = self._commands.limits
        if not data:
            raise Invalid("the file is empty")
        if len(data) > limits.upload_bytes:
            raise Invalid(f"the file is longer than {limits.upload_bytes} bytes")
        digest = await asyncio.to_thread(digest_of, data)
        name = f"upl_{self._commands.ids.secret()}"
        upload = Upload(name, session, by.principal, file_name(filename), media_type, digest)
        until_ms = await self._store.stage_upload(
            upload,
            data,
            keep_ms=limits.upload_ms,
            staged_max=limits.uploads_staged,
            staged_bytes_max=limits.uploads_staged_bytes,
        )
        return Staged(upload, len(data), until_ms)

    async def discard(self, by: Caller, session: str, upload: str) -> None:
        """Drop an upload of the caller's that no message has taken.

        Raises:
            NotFound: see `Commands.seat`, or she has no such upload here.
        """
        await self._commands.seat(by, session)
        if not await self._store.discard_upload(session, upload, uploader=by.principal):
            raise NotFound("upload")

    async def attachment(self, by: Caller, session: str, attachment: str) -> Attachment:
        """Return what is known of a file that the caller may read.

        A row shows its files as soon as it is accepted; they are read once it is stored, a moment later.

        Raises:
            NotFound: see `Commands.seat`; or there is none, or it waits with another person's input.
            StoreUnavailable: a row that shows it is not stored yet.
        """
        await self._commands.seat(by, session)
        await self._stored(session, attachment)
        found = await self._store.attachment(session, attachment)
        if found is None or (found.seq is None and by.principal != found.sender):
            raise NotFound("attachment")
        return found.attachment

    async def _stored(self, session: str, attachment: str) -> None:
        feeds, most_ms = self._commands.feeds, self._commands.limits.settle_wait_ms
        showing = next((row for row in feeds.pending(session) if _shows(row, attachment)), None)
        if showing is None:
            return
        try:
            async with asyncio.timeout(most_ms / 1000):
                await feeds.durable(session, showing)
        except TimeoutError:
            raise StoreUnavailable("the row that shows this file is not stored yet") from None

    async def pieces(self, attachment: Attachment) -> AsyncGenerator[bytes, None]:
        """Yield a file's bytes, in order; no more than a piece is held.

        Raises:
            NotFound: they went while they were read, with their session.
        """
        sent = place = 0
        while sent < attachment.size_bytes:
            piece = await self._store.piece(attachment.digest, place)
            if piece is None:
                raise NotFound("attachment")
            yield piece
            sent, place = sent + len(piece), place + 1


def _shows(row: Row, attachment: str) -> bool:
    match row.body:
        case InputBody(input=received):
            return any(each.id == attachment for each in received.attachments)
        case ToolResultBody(attachments=attachments) | ToolSettledBody(attachments=attachments):
            return any(each.id == attachment for each in attachments)
        case _:
            return False
