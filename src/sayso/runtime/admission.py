"""Hooks: verify over the raw bytes, recognise a repeat, find the session, store; then acknowledge.

What happens later never changes the status: it speaks of receipt alone (`admission.md` section 6).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from sayso.core.errors import NotFound, SessionClosed
from sayso.core.inputs import Input, InputKind
from sayso.core.labels import OUTSIDER, Part
from sayso.core.operation import Ref
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.text import scrub
from sayso.runtime.commands import Hints, Puts
from sayso.runtime.ports import Heard, Ids, RawRequest, Refusal, SourceDoor, Verified
from sayso.storage.store import DoorKind, DoorNote, Entry, Put, Received, Store

log = logging.getLogger(__name__)

#: refs that one event may name; further ones are not looked at
REFS_MAX = 16


@dataclass(frozen=True, slots=True)
class Receipt:
    """What the sender is told: a status, and nothing that depends on the content."""

    status: int
    put: Put | None = None


#: why an input is in no session, where one would have taken it
ENDED = "the session that it is for has ended"

#: stored, a repeat, a suspect replay, unmatched: all the same to the sender
ACCEPTED = 202


class Admission:
    """The door for hooks."""

    def __init__(self, sources: Mapping[str, SourceDoor], store: Store, hints: Hints, ids: Ids) -> None:
        self._sources, self._store, self._ids = sources, store, ids
        self._puts = Puts(store, hints)

    def body_bytes_max(self, source: str) -> int:
        """Return how much of a body may be read for this source.

        Raises:
            NotFound: there is no such source.
        """
        return self._source(source).scheme.body_bytes_max

    def _source(self, name: str) -> SourceDoor:
        found = self._sources.get(name)
        if found is None:
            raise NotFound("source")
        return found

    async def turn_away(self, source: str, reason: str) -> None:
        """Record a hook that was refused before it could be verified: too large, encoded, cut short."""
        await self._store.note(DoorNote(DoorKind.REJECTED, source, reason))

    async def receive(self, source: str, request: RawRequest) -> Receipt:
        """Take one hook: after this returns with 202, its input is stored and will be acted on once.

        Raises:
            NotFound: there is no such source.
            StoreUnavailable, CommitUnknown: it may not be stored; the sender must try again.
        """
        door = self._source(source)
        verified = door.scheme.verify(request, source=source, now_ms=self._store.now_ms())
        if isinstance(verified, Refusal):
            await self._store.note(DoorNote(DoorKind.REJECTED, source, verified.detail, digest=_digest(request.body)))
            return Receipt(verified.status)
        event_id = verified.event_id or self._ids.event()
        entry = await self._entry(door, request, verified, event_id)
        try:
            put = await self._puts.put(entry)
        except (SessionClosed, NotFound):  # it ended after it was found
            put = await self._puts.put(replace(entry, session=None, unclaimed_because=ENDED))
        return Receipt(ACCEPTED, put)

    async def _entry(self, door: SourceDoor, request: RawRequest, verified: Verified, event_id: str) -> Entry:
        """Return the entry of a verified hook. One whose body does not parse is kept too, in no session:
        that is ours to mend, not the sender's to send again."""
        heard = _hear(door, request.body)
        about = _about(door.name, heard)
        session, why = await self._route(door.name, about) if heard is not None else (None, "its body does not parse")
        received = Input(
            InputKind.NOTICE if heard is not None and heard.notice else InputKind.EVENT,
            Principal(PrincipalKind.SOURCE, door.name),
            door.scheme.name,
            parts=()
            if heard is None
            else (Part(scrub(heard.text), f"source:{door.name}", OUTSIDER, door.scheme.name),),
            about=about,
            gone=heard is not None and heard.gone,
        )
        return Entry(
            session=session,
            source=door.name,
            event_id=event_id,
            input=received,
            digest=_digest(request.body),
            keep_ms=door.scheme.keep_ms,
            id_signed=door.scheme.id_signed,
            received=Received(request.body, _content_type(request), verified.key, verified.signed_at_ms),
            unclaimed_because=why,
        )

    async def _route(self, source: str, about: tuple[Ref, ...]) -> tuple[str | None, str]:
        """Return the session of the first named thing that a tool made for this source, else the source's
        default session, else None and why. A thing that two sessions made is ambiguous: it names neither, and
        no other rule may guess; nor where the session that made it has ended."""
        rows = await self._store.refs(source, about) if about else []
        for ref in about:
            made_by = [row for row in rows if row.ref == ref]
            sessions = {row.session for row in made_by if not row.closed}
            if len(sessions) > 1:
                return None, "more than one session made what it names"
            if sessions:
                return sessions.pop(), ""
            if made_by:
                return None, ENDED
        return await self._store.bound(source), "no session knows what it names"


def _hear(door: SourceDoor, body: bytes) -> Heard | None:
    """Return what the source's function makes of a body, or None where it can make nothing of it."""
    try:
        return door.hear(body)
    except Exception as error:  # noqa: BLE001 - somebody's function over somebody's bytes may raise anything
        log.warning("hook does not parse", extra={"source": door.name, "cause": type(error).__name__})
        return None


def _about(source: str, heard: Heard | None) -> tuple[Ref, ...]:
    named = () if heard is None else heard.about
    return tuple(Ref(source, scrub(str(kind)), scrub(str(value))) for kind, value in named)[:REFS_MAX]


def _digest(body: bytes) -> str:
    return "sha256:" + hashlib.sha256(body).hexdigest()


def _content_type(request: RawRequest) -> str:
    for name, value in request.headers:
        if name.lower() == b"content-type":
            return value.decode("latin-1")[:200]
    return ""
