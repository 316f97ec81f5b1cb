"""Schemes whose proof is a secret that both sides hold: Standard Webhooks v1 (Svix too), and a bearer token.

Bytes in, verdict out: whatever bytes come, a scheme vouches or refuses, and never raises. Nothing is
decoded before it is proven. A secret is named in the user's module and read when the server starts.
"""

from __future__ import annotations

import base64
import hmac
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from sayso.runtime.ports import RawRequest, Refusal, Scheme, Verified

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 1024 * 1024
TOLERANCE_S = 300
#: longer than the Standard Webhooks example schedule, which ends after 75 h 35 min (A6)
KEEP_DAYS = 7
EVENT_ID_CHARS_MAX = 256

DAY_MS = 24 * 60 * 60 * 1000


# --- what a user's module says -----------------------------------------------


def standard_webhook(
    *secrets: str,
    tolerance_s: int = TOLERANCE_S,
    keep_days: int = KEEP_DAYS,
    body_bytes_max: int = BODY_BYTES_MAX,
) -> Unready:
    """Return the scheme of senders that follow Standard Webhooks, or Svix, with a symmetric key.

    Each of `secrets` is "env:NAME", read by `Unready.ready`, or the secret itself ("whsec_…"; for tests
    and development). Several are all accepted, so that a secret can be replaced without an outage.
    `tolerance_s` is how far the signed time may be off, either way (A3).

    Raises:
        ValueError: no secret is given, a number is not positive, or repeats would be forgotten while a
            captured request, which lives for twice the tolerance, can still be sent again.
    """
    check_limits(keep_days=keep_days, body_bytes_max=body_bytes_max)
    if tolerance_s < 1 or keep_days * DAY_MS <= 2 * tolerance_s * 1000:
        raise ValueError(f"tolerance_s={tolerance_s} must be positive and less than half of keep_days={keep_days}")

    def build(keys: tuple[Key, ...]) -> Scheme:
        return StandardWebhook(keys, tolerance_s, keep_days * DAY_MS, body_bytes_max)

    return Unready(StandardWebhook.NAME, references(secrets), read=webhook_key, build=build)


def bearer(
    *secrets: str,
    header: str = "authorization",
    event_id: str | None = None,
    keep_days: int = KEEP_DAYS,
    body_bytes_max: int = BODY_BYTES_MAX,
) -> Unready:
    """Return the scheme of senders that show a token and sign nothing: GitLab, Telegram, a script of yours.

    `secrets` are given as for `standard_webhook`. In "authorization" the token follows the word Bearer;
    any other `header` is the token. `event_id` says where the sender puts its own id of the event:
    "header:idempotency-key", or "json:/update_id" (a JSON pointer, RFC 6901) for one in the body.

    Raises:
        ValueError: no secret is given, a number is not positive, `header` is no header name, or
            `event_id` has neither form or points at the token.
    """
    check_limits(keep_days=keep_days, body_bytes_max=body_bytes_max)
    token_header = header_name(header)
    id_place = None if event_id is None else id_place_of(event_id)
    if id_place == HeaderId(token_header):
        raise ValueError(f"event_id={event_id!r} is the header of the token, which must not be stored")

    def build(keys: tuple[Key, ...]) -> Scheme:
        return Bearer(keys, token_header, id_place, keep_days * DAY_MS, body_bytes_max)

    return Unready(Bearer.NAME, references(secrets), read=token_key, build=build)


@dataclass(frozen=True, slots=True)
class Unready:
    """A scheme whose secrets are only named yet; every function that a user's module calls returns one.

    Building one reads nothing, so a module that names "env:X" can be imported where X is not set. The
    server calls `ready` for every source before it listens: a source without a usable key doesn't start.
    """

    #: the name of the scheme that it becomes
    name: str
    secrets: tuple[Reference, ...]
    #: a secret's text to the bytes of its key; raises `SecretUnusable`
    read: Callable[[Reference, str], bytes] = field(repr=False)
    build: Callable[[tuple[Key, ...]], Scheme] = field(repr=False)

    def ready(self, environ: Mapping[str, str]) -> Scheme:
        """Return the scheme with its secrets read, those by reference from `environ`.

        Raises:
            SecretMissing: one is not set, or empty.
            SecretMalformed: one is no key of this scheme.
            SecretUnsupported: one is a key for an algorithm that sayso can't verify.
        """
        return self.build(tuple(Key(each.name, self.read(each, each.text(environ))) for each in self.secrets))


class SecretUnusable(ValueError):
    """A secret can't serve, so its source must not start. Names the reference, never the value."""

    #: one word, as a refusal has
    reason: ClassVar[str]

    def __init__(self, reference: str, why: str) -> None:
        super().__init__(f"{reference} {why}")
        self.reference = reference


class SecretMissing(SecretUnusable):
    """There is no secret: the variable is not set, or the text is empty."""

    reason = "config_empty_secret"


class SecretMalformed(SecretUnusable):
    """The text is no key of this scheme."""

    reason = "config_malformed_secret"


class SecretUnsupported(SecretUnusable):
    """The text is a key of a kind that sayso can't verify with."""

    reason = "config_unsupported_key"


# --- the sender's half -------------------------------------------------------


def sign(secret: str, *, webhook_id: str, timestamp_s: int, body: bytes) -> dict[str, str]:
    """Return the headers that make `body` a Standard Webhooks delivery, signed with `secret` ("whsec_…").

    `webhook_id` is the same for every attempt; `timestamp_s` (whole seconds since 1970 UTC) is the
    attempt's own, so each attempt is signed afresh.

    Raises:
        SecretUnusable: `secret` is no symmetric key.
        ValueError: `webhook_id` or `timestamp_s` is one that a receiver refuses.

    Source: Standard Webhooks 1.0.0, "Signature scheme".
    """
    raw_id, raw_time = webhook_id.encode(), str(timestamp_s).encode()
    if not SIGNED_ID.fullmatch(raw_id):
        raise ValueError(f"webhook id {webhook_id!r} is not 1 to {EVENT_ID_CHARS_MAX} visible ASCII characters, no dot")
    if not SECONDS.fullmatch(raw_time):
        raise ValueError(f"timestamp_s={timestamp_s} is not whole seconds since 1970")
    reference = Reference("the secret", literal=secret)
    key = webhook_key(reference, reference.text({}))
    signature = b"v1," + mac(key, signed_text(raw_id, raw_time, body))
    values = (raw_id, raw_time, signature)
    return {name.decode(): value.decode() for name, value in zip(HEADERS[0], values, strict=True)}


# --- the schemes -------------------------------------------------------------


class Names(NamedTuple):
    """What one family of senders calls its three headers, in lower case."""

    id: bytes
    timestamp: bytes
    signature: bytes


#: One request is read by one row: an id of one family never goes with a signature of the other.
HEADERS = (
    Names(b"webhook-id", b"webhook-timestamp", b"webhook-signature"),
    Names(b"svix-id", b"svix-timestamp", b"svix-signature"),
)

#: An id with a full stop would let `id.time.body` be split elsewhere: a new id and body, the old signature.
SIGNED_ID = re.compile(rb"[!-\-/-~]{1,%d}" % EVENT_ID_CHARS_MAX)
VISIBLE_ID = re.compile(rb"[!-~]{1,%d}" % EVENT_ID_CHARS_MAX)
#: ASCII digits only, and too few of them for milliseconds
SECONDS = re.compile(rb"[0-9]{1,11}")


@dataclass(frozen=True, slots=True)
class StandardWebhook(Scheme):
    """HMAC-SHA256 over `id.time.body`, base64: the version `v1` of Standard Webhooks 1.0.0.

    Entries of other versions are skipped, so a sender may sign with several at once.
    """

    NAME: ClassVar = "standard-webhooks v1"

    keys: tuple[Key, ...]
    tolerance_s: int
    keep_ms: int
    body_bytes_max: int
    name: str = NAME
    id_signed: bool = True

    def verify(self, request: RawRequest, *, source: str, now_ms: int) -> Verified | Refusal:
        """Return who vouches for `request`, or why nobody does. Never raises.

        The signature comes before the time: a time that nobody proved is no reason.
        """
        return guarded(lambda: self._judge(request, source, now_ms), scheme=self.name, source=source)

    def _judge(self, request: RawRequest, source: str, now_ms: int) -> Verified:
        names = family_of(request)
        sent_id, sent_time, signatures = (only(request, name) for name in names)
        if not SIGNED_ID.fullmatch(sent_id):
            raise Unproven("malformed_id", f"{text(names.id)} isn't 1 to {EVENT_ID_CHARS_MAX} plain characters, no dot")
        if not SECONDS.fullmatch(sent_time):
            raise Unproven("malformed_timestamp", f"{text(names.timestamp)} isn't whole seconds since 1970")
        content = signed_text(sent_id, sent_time, request.body)
        reference = matching(self.keys, content, v1_entries(signatures, names.signature), names.signature, source)
        signed_at_ms = int(sent_time) * 1000
        check_time(signed_at_ms, now_ms=now_ms, tolerance_ms=self.tolerance_s * 1000)
        return Verified(key=reference, signed_at_ms=signed_at_ms, event_id=text(sent_id))


@dataclass(frozen=True, slots=True)
class Bearer(Scheme):
    """A token in a header. It proves who sent the request, and nothing about the id, the time or the body."""

    NAME: ClassVar = "bearer"

    keys: tuple[Key, ...]
    #: in lower case
    header: bytes
    id_place: HeaderId | JsonId | None
    keep_ms: int
    body_bytes_max: int
    name: str = NAME
    id_signed: bool = False

    def verify(self, request: RawRequest, *, source: str, now_ms: int) -> Verified | Refusal:
        """Return who vouches for `request`, or why nobody does. Never raises. There is no time to check."""
        return guarded(lambda: self._judge(request, source), scheme=self.name, source=source)

    def _judge(self, request: RawRequest, source: str) -> Verified:
        sent = only(request, self.header)
        if self.header == b"authorization":
            sent = after_bearer(sent)
        matches = [key.reference for key in self.keys if hmac.compare_digest(key.secret, sent)]
        if not matches:
            raise Unproven("signature", f"token doesn't match {whose(self.keys, source)}")
        event_id = self.id_place.find(request) if self.id_place else None
        return Verified(key=matches[0], signed_at_ms=None, event_id=event_id)


def check_limits(*, keep_days: int, body_bytes_max: int) -> None:
    if keep_days < 1 or body_bytes_max < 1:
        raise ValueError(f"keep_days={keep_days} and body_bytes_max={body_bytes_max} must be positive")


# --- secrets -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reference:
    """Where a secret is: in an environment variable, or in the text that the user's module gave."""

    #: "env:NAME", or "secret 1" for the first one when it was given as text
    name: str
    literal: str | None = field(default=None, repr=False)

    def text(self, environ: Mapping[str, str]) -> str:
        """Return the secret. Raises `SecretMissing` where it is not set or empty."""
        found = environ.get(self.name.removeprefix("env:")) if self.literal is None else self.literal
        if found is None:
            raise SecretMissing(self.name, "is not set")
        if not found.strip():
            raise SecretMissing(self.name, "is empty")
        return found


@dataclass(frozen=True, slots=True)
class Key:
    """A secret that was read."""

    #: what the records call it
    reference: str
    secret: bytes = field(repr=False)


def references(secrets: tuple[str, ...]) -> tuple[Reference, ...]:
    if not secrets:
        raise ValueError("a source needs a secret")
    return tuple(reference(given, place) for place, given in enumerate(secrets, start=1))


def reference(given: str, place: int) -> Reference:
    if not given.startswith("env:"):
        return Reference(f"secret {place}", literal=given)
    if not given.removeprefix("env:").strip():
        raise ValueError(f"secret {place} names no environment variable after env:")
    return Reference(given)


def webhook_key(secret: Reference, found: str) -> bytes:
    """Return the key in "whsec_…": base64, prefix and padding optional, and of any length.

    Svix documents a key of 18 bytes, below the 24 that the specification asks for. A public key (`whpk_`)
    is known to everybody, so an HMAC keyed with it would prove nothing.
    """
    if found.startswith(("whpk_", "whsk_")):
        raise SecretUnsupported(
            secret.name, "is an Ed25519 key, which sayso can't verify with yet; it needs the secret that begins whsec_"
        )
    encoded = found.removeprefix("whsec_")
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except ValueError:
        # No cause is shown: its text could quote the secret.
        raise SecretMalformed(
            secret.name, 'is not "whsec_" and base64 (to name an environment variable, write env:NAME)'
        ) from None
    if not key:
        raise SecretMissing(secret.name, "is empty")
    return key


def token_key(secret: Reference, found: str) -> bytes:
    """Return the bytes of a token. White space at an end can't arrive in a header, so it would never match."""
    key = found.encode("utf-8", "surrogateescape")  # as the environment held it
    if found != found.strip():
        raise SecretMalformed(secret.name, "begins or ends with white space, perhaps the line end of a file")
    return key


# --- signatures and times ----------------------------------------------------


def signed_text(sent_id: bytes, sent_time: bytes, body: bytes) -> bytes:
    return b".".join((sent_id, sent_time, body))


def mac(secret: bytes, content: bytes) -> bytes:
    return base64.b64encode(hmac.digest(secret, content, "sha256"))


def v1_entries(signatures: bytes, header: bytes) -> list[bytes]:
    """Return what follows each `v1,` in the header; there may be several while a sender changes its key."""
    entries = [entry.partition(b",") for entry in signatures.split(b" ")]
    found = [value for version, comma, value in entries if version == b"v1" and comma]
    if not found:
        raise Unproven("no_usable_signature", f"{text(header)} holds no v1 signature")
    return found


def matching(keys: tuple[Key, ...], content: bytes, sent: list[bytes], header: bytes, source: str) -> str:
    """Return the reference of the key that made one of `sent`. Every key meets every entry: no early exit.

    The base64 texts are compared, not the bytes in them, so another spelling of a signature isn't one.
    """
    matches = [
        key.reference
        for key in keys
        for expected in [mac(key.secret, content)]
        for entry in sent
        if hmac.compare_digest(expected, entry)
    ]
    if matches:
        return matches[0]
    if not any(is_base64(entry) for entry in sent):
        raise Unproven("malformed_signature", f"{text(header)} isn't canonical base64")
    raise Unproven("signature", f"signature doesn't match {whose(keys, source)}")


def is_base64(given: bytes) -> bool:
    """Return whether this is the one canonical spelling of some bytes."""
    try:
        return base64.b64encode(base64.b64decode(given, validate=True)) == given
    except ValueError:
        return False


def whose(keys: tuple[Key, ...], source: str) -> str:
    return f"{source}'s secret" if len(keys) == 1 else f"any of {source}'s {len(keys)} secrets"


def check_time(signed_at_ms: int, *, now_ms: int, tolerance_ms: int) -> None:
    """Refuse a time more than `tolerance_ms` off, either way; exactly that much is allowed (A3)."""
    late_ms = now_ms - signed_at_ms
    allowed = f"at most {span(tolerance_ms)} are allowed"
    if late_ms > tolerance_ms:
        raise Unproven("timestamp_old", f"signed {span(late_ms)} ago; {allowed}")
    if -late_ms > tolerance_ms:
        raise Unproven("timestamp_future", f"signed {span(-late_ms)} in the future; {allowed}")


def span(duration_ms: int) -> str:
    """Return a positive duration in its two largest units, a begun second counted: "7 min 12 s"."""
    rest_s, parts = -(-duration_ms // 1000), []
    for unit, unit_s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, rest_s = divmod(rest_s, unit_s)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


# --- headers and ids ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeaderId:
    """The event id stands in a header."""

    #: in lower case
    name: bytes

    def find(self, request: RawRequest) -> str | None:
        """Return the id, or None where the sender gave none (A5)."""
        if not values_of(request, self.name):
            return None
        found = only(request, self.name)
        if not VISIBLE_ID.fullmatch(found):
            raise Unproven("malformed_id", f"{text(self.name)} isn't 1 to {EVENT_ID_CHARS_MAX} plain characters")
        return text(found)


@dataclass(frozen=True, slots=True)
class JsonId:
    """The event id stands in the body, as a string or a whole number."""

    #: as the user wrote it, for the record
    pointer: str

    def find(self, request: RawRequest) -> str | None:
        """Return the id, or None where the sender gave none (A5), also because the body is no JSON."""
        try:
            found = at_pointer(json.loads(request.body), self.pointer)
        except (ValueError, RecursionError):
            return None
        if found is None:
            return None
        if isinstance(found, int) and not isinstance(found, bool):
            found = str(found)
        if not isinstance(found, str) or not (0 < len(found) <= EVENT_ID_CHARS_MAX and found.isprintable()):
            raise Unproven("malformed_id", f"{self.pointer} in the body isn't 1 to {EVENT_ID_CHARS_MAX} characters")
        return found


def id_place_of(given: str) -> HeaderId | JsonId:
    kind, _, place = given.partition(":")
    if kind == "header":
        return HeaderId(header_name(place))
    if kind == "json" and place.startswith("/"):
        return JsonId(place)
    raise ValueError(f'event_id={given!r} is neither "header:NAME" nor "json:/POINTER"')


def at_pointer(document: object, pointer: str) -> object:
    """Return what a JSON pointer names, or None. Source: RFC 6901."""
    for escaped in pointer.split("/")[1:]:
        step = escaped.replace("~1", "/").replace("~0", "~")
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and re.fullmatch("0|[1-9][0-9]{0,8}", step) and int(step) < len(document):
            document = document[int(step)]
        else:
            return None
    return document


def header_name(given: str) -> bytes:
    """Return the name as headers are compared, in lower case. Source: RFC 9110, section 5.6.2."""
    if not re.fullmatch(r"[0-9A-Za-z!#$%&'*+.^_`|~-]+", given):
        raise ValueError(f"{given!r} is no header name")
    return given.lower().encode()


def family_of(request: RawRequest) -> Names:
    """Return the row of `HEADERS` that this request uses; the first where it uses none."""
    present = {name.lower() for name, _ in request.headers}
    return next((names for names in HEADERS if present.intersection(names)), HEADERS[0])


def only(request: RawRequest, name: bytes) -> bytes:
    """Return a header's one value. Of two, the sender's signature may be for one, and our reading of the other."""
    values = values_of(request, name)
    if not values:
        raise Unproven("missing_header", f"{text(name)} is missing")
    if len(values) > 1:
        raise Unproven("duplicate_header", f"{text(name)} came more than once", status=400)
    return values[0]


def values_of(request: RawRequest, name: bytes) -> list[bytes]:
    return [value for each, value in request.headers if each.lower() == name]


def after_bearer(value: bytes) -> bytes:
    word, _, token = value.partition(b" ")
    if word.lower() != b"bearer":
        raise Unproven("no_usable_signature", "authorization holds no bearer token")
    return token.strip(b" ")


def text(ascii_bytes: bytes) -> str:
    return ascii_bytes.decode("ascii")


# --- refusing, whatever comes ------------------------------------------------


class Unproven(Exception):
    """Carries a refusal from the check that failed to `guarded`. It never leaves this module."""

    def __init__(self, reason: str, detail: str, *, status: int = 401) -> None:
        super().__init__(reason)
        self.refusal = Refusal(reason, detail, status)


def guarded(judge: Callable[[], Verified], *, scheme: str, source: str) -> Verified | Refusal:
    """Return the verdict; a fault of ours refuses too, since an unexpected 500 would invite retries."""
    try:
        return judge()
    except Unproven as unproven:
        return unproven.refusal
    except Exception as error:
        # Only the kind and the place are logged: the text could quote a body or a secret.
        kind = RuntimeError(type(error).__name__).with_traceback(error.__traceback__)
        log.exception("scheme failed", exc_info=kind, extra={"source": source, "scheme": scheme})
        return Refusal("internal", "the check itself failed; the server's log says where")
