"""A file that an input or a result brought with it: what is said of it. Its bytes are never in a row.

Bytes are stored once for each content, named by its digest, and counted: at no reference they go.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

#: bytes by their digest, as they travel beside the rows that name them
Blobs = Mapping[str, bytes]
NO_BLOBS: Blobs = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Attachment:
    """One file of a session, as rows name it."""

    #: unique in its session, see `of_input` and `of_call`
    id: str
    #: as its sender calls it, cleaned; never a path
    filename: str
    #: what its sender says it is, e.g. `image/png`
    media_type: str
    size_bytes: int
    #: `sha256:<hex>` of the bytes
    digest: str


#: of which nothing is known
OCTETS = "application/octet-stream"
_MEDIA_TYPE = re.compile(r"[a-z0-9][a-z0-9!#$&^_.+-]{0,63}/[a-z0-9][a-z0-9!#$&^_.+-]{0,63}")


def media_type_of(text: str) -> str:
    """Return the media type that a Content-Type names, in lower case and without parameters; `OCTETS` where it
    names none.

    Source: RFC 6838, section 4.2 (restricted names).
    """
    named = text.partition(";")[0].strip().lower()
    return named if _MEDIA_TYPE.fullmatch(named) else OCTETS


def digest_of(data: bytes) -> str:
    """Return the name of these bytes."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def of_input(n: int, place: int) -> str:
    """Return the id of an input's attachment: the input's place in the inbox, its own among the input's, from 1."""
    return f"n{n}.{place}"


def of_call(call: str, place: int) -> str:
    """Return the id of a result's attachment: the call that it answers, its own place in the result, from 1."""
    return f"{call}.f{place}"
