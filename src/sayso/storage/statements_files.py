"""The transaction bodies of files: sent ahead, taken by a message, read, and gone when nothing refers to them.

An upload and an attachment are a reference each; a message that takes an upload makes one of the other, so no
count changes. Whatever changes counts does it last and in order of digest. See `statements` for what a body is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sayso.core.attachment import Attachment, of_input
from sayso.core.errors import NotFound, NoUpload, UploadsFull
from sayso.core.origin import Principal
from sayso.core.rows import decode_input
from sayso.storage.statements import NOW, Body, Sql, count_refs
from sayso.storage.store import AttachmentRow, Upload

# --- uploads -----------------------------------------------------------------


def stage_upload(upload: Upload, data: bytes, keep_ms: int, staged_max: int, staged_bytes_max: int) -> Body[int]:
    """Insert an upload and its bytes, if its person may have one more."""
    found = yield Sql("select 1 from session where id = ? /*postgres: for update*/", (upload.session,))
    if not found:
        raise NotFound("session")
    now: int = yield NOW
    [(staged, staged_bytes)] = yield Sql(
        """
        select count(*), coalesce(sum(size_bytes), 0) from upload
        where session = ? and uploader = ? and until_ms > ?
        """,
        (upload.session, str(upload.uploader), now),
    )
    if staged >= staged_max:
        raise UploadsFull(upload.session, f"{staged} uploads wait for a message already")
    if staged_bytes + len(data) > staged_bytes_max:
        raise UploadsFull(upload.session, f"uploads of {staged_bytes} bytes wait for a message already")
    until_ms = now + keep_ms
    yield Sql(
        """
        insert into upload (upload, session, uploader, filename, media_type, digest, size_bytes, until_ms)
        values (?, ?, ?, ?, ?, ?, ?, ?)
        """,
        (
            upload.id,
            upload.session,
            str(upload.uploader),
            upload.filename,
            upload.media_type,
            upload.digest,
            len(data),
            until_ms,
        ),
    )
    yield from count_refs({upload.digest: 1}, {upload.digest: data})
    return until_ms


def ahead(digest: str, size_bytes: int, place: int, piece: bytes) -> Body[None]:
    """Insert one piece of bytes that a later transaction will refer to, so that it is short. Nobody can read them
    until then, and a sweep that comes between is made good by it."""
    yield Sql(
        """
        insert into blob (digest, size_bytes, refs) values (?, ?, 0)
        on conflict (digest) do update set size_bytes = excluded.size_bytes
        """,
        (digest, size_bytes),
    )
    yield Sql(
        "insert into piece (digest, place, bytes) values (?, ?, ?) on conflict (digest, place) do nothing",
        (digest, place, piece),
    )


def discard_upload(session: str, upload: str, uploader: Principal) -> Body[bool]:
    """Delete one person's upload."""
    now: int = yield NOW
    gone = yield Sql(
        "delete from upload where upload = ? and session = ? and uploader = ? and until_ms > ? returning digest",
        (upload, session, str(uploader), now),
    )
    yield from _let_go(gone)
    return bool(gone)


def consumed(uploads: Sequence[str], session: str, n: int, now: int) -> Body[tuple[Attachment, ...]]:
    """Make attachments of the input at place `n` from uploads of its session, whoever sent them (K29).

    Raises:
        NoUpload: one isn't there.
    """
    attachments = []
    for place, upload in enumerate(uploads, 1):
        found = yield Sql(
            """
            delete from upload where upload = ? and session = ? and until_ms > ?
            returning filename, media_type, size_bytes, digest, uploader
            """,
            (upload, session, now),
        )
        if not found:
            raise NoUpload(upload)
        filename, media_type, size_bytes, digest, uploader = found[0]
        attached = Attachment(of_input(n, place), filename, media_type, size_bytes, digest)
        yield Sql(
            """
            insert into attachment (session, attachment, n, filename, media_type, digest, size_bytes, uploader)
            values (?, ?, ?, ?, ?, ?, ?, ?)
            """,
            (session, attached.id, n, filename, media_type, digest, size_bytes, uploader),
        )
        attachments.append(attached)
    return tuple(attachments)


# --- reading -----------------------------------------------------------------


def attachment(session: str, attachment: str) -> Body[AttachmentRow | None]:
    """Read what is known of one file, and who sent the input that it waits with."""
    found = yield Sql(
        """
        select a.attachment, a.filename, a.media_type, a.size_bytes, a.digest, a.seq, a.n, a.uploader, i.body
        from attachment a left join inbox i on a.seq is null and i.session = a.session and i.n = a.n
        where a.session = ? and a.attachment = ?
        """,
        (session, attachment),
    )
    if not found:
        return None
    id_, filename, media_type, size_bytes, digest, seq, n, uploader, body = found[0]
    sender = None if body is None else decode_input(body).principal
    return AttachmentRow(Attachment(id_, filename, media_type, size_bytes, digest), seq, n, uploader, sender)


def piece(digest: str, place: int) -> Body[bytes | None]:
    """Read one piece of bytes that something refers to."""
    found = yield Sql(
        """
        select p.bytes from piece p join blob b on b.digest = p.digest
        where p.digest = ? and p.place = ? and b.refs > 0
        """,
        (digest, place),
    )
    return bytes(found[0][0]) if found else None


def blobs() -> Body[dict[str, int]]:
    """Read how many refer to each of the bytes that are kept, for a look from outside: a test, an operator."""
    found = yield Sql("select digest, refs from blob where refs > 0 order by digest")
    return dict(found)


# --- going -------------------------------------------------------------------


def expire(at_most: int) -> Body[int]:
    """Delete uploads whose time is over, the oldest first."""
    now: int = yield NOW
    gone = yield Sql(
        """
        delete from upload where upload in (
            select upload from upload where until_ms <= ? order by until_ms, upload limit ?
            /*postgres: for update skip locked*/
        )
        returning digest
        """,
        (now, at_most),
    )
    yield from _let_go(gone)
    return len(gone)


def release_all(session: str) -> Body[None]:
    """Delete every upload and attachment of a session that goes."""
    uploads = yield Sql("delete from upload where session = ? returning digest", (session,))
    attachments = yield Sql("delete from attachment where session = ? returning digest", (session,))
    yield from _let_go([*uploads, *attachments])


def _let_go(gone: Sequence[tuple[str]]) -> Body[None]:
    refs: Counter[str] = Counter()
    refs.subtract(digest for (digest,) in gone)
    yield from count_refs(refs)


def sweep(at_most: int) -> Body[int]:
    """Delete rows of bytes that nothing refers to, about so many, their pieces first; return how many."""
    nobodys = yield Sql(
        "select digest from blob where refs = 0 order by digest limit ? /*postgres: for update skip locked*/",
        (at_most,),
    )
    swept = 0
    for (digest,) in nobodys:
        gone = yield Sql(
            """
            delete from piece where digest = ? and place in (
                select place from piece where digest = ? order by place desc limit ?
            )
            returning 1
            """,
            (digest, digest, at_most - swept),
        )
        swept += len(gone)
        if swept >= at_most:
            break  # there may be more of it
        yield Sql("delete from blob where digest = ? and refs = 0", (digest,))
        swept += 1
    return swept
