"""What the vectors don't say about shared keys: the operator's sentences, secrets, limits, and any bytes at all."""

from __future__ import annotations

import ast
import hmac
import logging
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sayso.sources
from sayso.runtime.ports import RawRequest, Refusal, Scheme, Verified
from sayso.sources import (
    SecretMalformed,
    SecretMissing,
    SecretUnsupported,
    SecretUnusable,
    Unready,
    bearer,
    sign,
    standard_webhook,
)

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
OLD_SECRET = "whsec_b2xkLWtleS1mb3Itcm90YXRpb24tMjRi"
TOKEN = "t0ken-of-the-cron-box"
NOW_S = 1_764_500_000
NOW_MS = NOW_S * 1000
BODY = b'{"id": "evt_1", "reservation": "R1"}'

STANDARD = standard_webhook(SECRET).ready({})
BEARER = bearer(TOKEN, header="x-token", event_id="header:x-event").ready({})


def request(headers: dict[str, str] | list[tuple[bytes, bytes]], body: bytes = BODY) -> RawRequest:
    pairs = [(n.encode(), v.encode()) for n, v in headers.items()] if isinstance(headers, dict) else headers
    return RawRequest("POST", "/v1/hooks/restaurant", tuple(pairs), body)


def signed(
    *, secret: str = SECRET, webhook_id: str = "evt_1", timestamp_s: int = NOW_S, body: bytes = BODY
) -> RawRequest:
    return request(sign(secret, webhook_id=webhook_id, timestamp_s=timestamp_s, body=body), body)


def shown(**headers: str) -> RawRequest:
    return request({name.replace("_", "-"): value for name, value in headers.items()})


def replaced(was: RawRequest, header: bytes, value: bytes) -> RawRequest:
    return request([(name, value if name == header else kept) for name, kept in was.headers], was.body)


def verdict(scheme: Scheme, raw: RawRequest, *, now_ms: int = NOW_MS) -> Verified | Refusal:
    return scheme.verify(raw, source="restaurant", now_ms=now_ms)


def refused(scheme: Scheme, raw: RawRequest, *, now_ms: int = NOW_MS) -> Refusal:
    found = verdict(scheme, raw, now_ms=now_ms)
    assert isinstance(found, Refusal), found
    return found


def verified(scheme: Scheme, raw: RawRequest, *, now_ms: int = NOW_MS) -> Verified:
    found = verdict(scheme, raw, now_ms=now_ms)
    assert isinstance(found, Verified), found
    return found


#: a request that each scheme accepts
GENUINE = [
    pytest.param(STANDARD, signed(), id="standard-webhooks"),
    pytest.param(BEARER, shown(x_token=TOKEN, x_event="evt_1"), id="bearer"),
]
#: the same, with each header that its scheme reads
GENUINE_HEADERS = [
    pytest.param(STANDARD, signed(), name, id=name.decode())
    for name in (b"webhook-id", b"webhook-timestamp", b"webhook-signature")
] + [
    pytest.param(BEARER, shown(x_token=TOKEN, x_event="evt_1"), b"x-token", id="x-token"),
    pytest.param(BEARER, shown(x_token=TOKEN, x_event="evt_1"), b"x-event", id="x-event"),
]


# --- what is vouched for -----------------------------------------------------


@pytest.mark.rule("A1")
def test_what_sign_signs_is_verified_with_its_id_time_and_key() -> None:
    assert verified(STANDARD, signed()) == Verified(key="secret 1", signed_at_ms=NOW_MS, event_id="evt_1")


@pytest.mark.rule("A1")
@given(body=st.binary(max_size=200), webhook_id=st.from_regex(r"[!-\-/-~]{1,256}", fullmatch=True))
def test_any_body_and_any_allowed_id_verify_when_signed(body: bytes, webhook_id: str) -> None:
    raw = signed(webhook_id=webhook_id, body=body)

    assert verified(STANDARD, raw).event_id == webhook_id


def test_the_scheme_says_what_admission_has_to_keep() -> None:
    assert (STANDARD.name, STANDARD.id_signed) == ("standard-webhooks v1", True)
    assert (BEARER.name, BEARER.id_signed) == ("bearer", False)
    assert STANDARD.keep_ms == BEARER.keep_ms == 7 * 24 * 60 * 60 * 1000
    assert STANDARD.body_bytes_max == BEARER.body_bytes_max == 1_048_576


def test_the_bounds_of_a_source_are_its_own() -> None:
    scheme = standard_webhook(SECRET, tolerance_s=60, keep_days=2, body_bytes_max=10).ready({})

    assert (scheme.keep_ms, scheme.body_bytes_max) == (2 * 24 * 60 * 60 * 1000, 10)
    assert refused(scheme, signed(), now_ms=NOW_MS + 60_001).reason == "timestamp_old"


@pytest.mark.parametrize("signer", [SECRET, OLD_SECRET], ids=["sender-new", "sender-old"])
def test_a_receiver_with_both_secrets_takes_either_and_says_which(signer: str) -> None:
    environ = {"NEW": SECRET, "OLD": OLD_SECRET}
    scheme = standard_webhook("env:NEW", "env:OLD").ready(environ)

    found = verified(scheme, signed(secret=signer))

    assert found.key == ("env:NEW" if signer == SECRET else "env:OLD")


def test_a_receiver_with_one_secret_takes_a_sender_that_signs_with_both() -> None:
    both = signed(secret=OLD_SECRET).headers[2][1] + b" " + signed().headers[2][1]

    assert verified(STANDARD, replaced(signed(), b"webhook-signature", both)).key == "secret 1"


def test_a_malformed_entry_beside_a_good_one_does_no_harm() -> None:
    entries = b"v1 nonsense  v1,*** " + signed().headers[2][1]

    verified(STANDARD, replaced(signed(), b"webhook-signature", entries))


def test_an_id_of_one_family_never_goes_with_a_signature_of_the_other() -> None:
    as_svix = [(name.replace(b"webhook-", b"svix-"), value) for name, value in signed().headers]

    verified(STANDARD, request(as_svix))
    assert refused(STANDARD, request([signed().headers[0], *as_svix[1:]])).reason == "missing_header"


# --- what is refused, and the operator's sentence ----------------------------


@pytest.mark.rule("A2")
@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        pytest.param(
            signed(secret=OLD_SECRET),
            Refusal("signature", "signature doesn't match restaurant's secret"),
            id="other key",
        ),
        pytest.param(
            replaced(signed(), b"webhook-signature", b"v1,*** v1,AAAA"),
            Refusal("signature", "signature doesn't match restaurant's secret"),
            id="one malformed, one wrong",
        ),
        pytest.param(
            replaced(signed(), b"webhook-signature", b"v1,***"),
            Refusal("malformed_signature", "webhook-signature isn't canonical base64"),
            id="malformed",
        ),
        pytest.param(
            replaced(signed(), b"webhook-signature", b"v1a,AAAA"),
            Refusal("no_usable_signature", "webhook-signature holds no v1 signature"),
            id="other version",
        ),
        pytest.param(
            shown(webhook_id="evt_1"), Refusal("missing_header", "webhook-timestamp is missing"), id="no timestamp"
        ),
        pytest.param(
            request([*signed().headers, (b"Webhook-ID", b"evt_2")]),
            Refusal("duplicate_header", "webhook-id came more than once", status=400),
            id="two ids",
        ),
    ],
)
def test_the_operator_reads_why_it_was_refused(raw: RawRequest, expected: Refusal) -> None:
    assert refused(STANDARD, raw) == expected


@pytest.mark.rule("A2", "A3")
@pytest.mark.parametrize(
    ("off_ms", "reason", "detail"),
    [
        (300_001, "timestamp_old", "signed 5 min 1 s ago; at most 5 min are allowed"),
        (432_000, "timestamp_old", "signed 7 min 12 s ago; at most 5 min are allowed"),
        (273_600_000, "timestamp_old", "signed 3 d 4 h ago; at most 5 min are allowed"),
        (-360_000, "timestamp_future", "signed 6 min in the future; at most 5 min are allowed"),
    ],
)
def test_the_operator_reads_how_far_off_the_time_was(off_ms: int, reason: str, detail: str) -> None:
    assert refused(STANDARD, signed(), now_ms=NOW_MS + off_ms) == Refusal(reason, detail)


@pytest.mark.rule("A2")
def test_the_sentence_counts_the_secrets_that_were_tried() -> None:
    scheme = standard_webhook(SECRET, OLD_SECRET).ready({})
    raw = replaced(signed(), b"webhook-id", b"evt_2")

    assert refused(scheme, raw).detail == "signature doesn't match any of restaurant's 2 secrets"
    assert refused(BEARER, shown(x_token="other")).detail == "token doesn't match restaurant's secret"


@pytest.mark.rule("A3", "W6")
@pytest.mark.parametrize(
    ("off_ms", "reason"),
    [
        (-301_000, "timestamp_future"),
        (-300_001, "timestamp_future"),
        (-300_000, None),
        (300_000, None),
        (300_001, "timestamp_old"),
        (301_000, "timestamp_old"),
    ],
)
def test_a_signed_time_may_be_five_minutes_off_either_way(off_ms: int, reason: str | None) -> None:
    found = verdict(STANDARD, signed(), now_ms=NOW_MS + off_ms)

    assert (found.reason if isinstance(found, Refusal) else None) == reason


def test_a_time_that_nobody_signed_is_not_the_reason() -> None:
    assert refused(STANDARD, signed(secret=OLD_SECRET), now_ms=NOW_MS + 86_400_000).reason == "signature"


@pytest.mark.rule("W7")
def test_milliseconds_in_place_of_seconds_are_refused() -> None:
    raw = replaced(signed(), b"webhook-timestamp", str(NOW_MS).encode())

    assert refused(STANDARD, raw).reason == "malformed_timestamp"
    with pytest.raises(ValueError, match="not whole seconds"):
        sign(SECRET, webhook_id="evt_1", timestamp_s=NOW_MS, body=BODY)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" 1764500000",
        b"+1764500000",
        b"-1",
        b"1_764_500_000",
        b"1764500000\n",
        "१७६४५०००००".encode(),
        b"9" * 5000,
    ],
)
def test_a_time_is_ascii_digits_only(value: bytes) -> None:
    raw = replaced(signed(), b"webhook-timestamp", value)

    assert refused(STANDARD, raw).reason == "malformed_timestamp"


@pytest.mark.parametrize(
    "value",
    [b"", b"evt.1", b"e" * 257, b"evt_1\n", b"evt\x00", b"evt 1", b"\x7f", "évt".encode()],
    ids=["empty", "dot", "overlong", "line-end", "nul", "space", "delete", "not-ascii"],
)
def test_an_id_that_could_be_read_in_two_ways_is_refused(value: bytes) -> None:
    assert refused(STANDARD, replaced(signed(), b"webhook-id", value)).reason == "malformed_id"


@pytest.mark.parametrize("webhook_id", ["", "evt.1", "e" * 257, "évt"])
def test_sign_makes_nothing_that_a_receiver_refuses(webhook_id: str) -> None:
    with pytest.raises(ValueError, match="visible ASCII"):
        sign(SECRET, webhook_id=webhook_id, timestamp_s=NOW_S, body=BODY)


@pytest.mark.rule("W3")
@pytest.mark.parametrize("value", [b"\xe9", b"v1,\xe9", "é".encode(), b"\xff" * 44], ids=repr)
@pytest.mark.parametrize(("scheme", "raw", "header"), GENUINE_HEADERS)
def test_a_header_that_is_not_ascii_is_a_plain_refusal(
    scheme: Scheme, raw: RawRequest, header: bytes, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    found = refused(scheme, replaced(raw, header, value))

    assert (found.status, found.reason == "internal", caplog.records) == (401, False, [])


@pytest.mark.rule("W4")
@pytest.mark.parametrize(("scheme", "raw", "header"), [each for each in GENUINE_HEADERS if each.id != "x-event"])
def test_a_request_without_one_of_its_headers_is_refused(scheme: Scheme, raw: RawRequest, header: bytes) -> None:
    rest = [(name, value) for name, value in raw.headers if name != header]

    assert refused(scheme, request(rest)) == Refusal("missing_header", f"{header.decode()} is missing")


@pytest.mark.parametrize(("scheme", "raw", "header"), GENUINE_HEADERS)
def test_a_header_that_came_twice_is_refused_also_when_both_agree(
    scheme: Scheme, raw: RawRequest, header: bytes
) -> None:
    again = (header.title(), dict(raw.headers)[header])

    assert refused(scheme, request([*raw.headers, again])) == Refusal(
        "duplicate_header", f"{header.decode()} came more than once", status=400
    )


# --- any bytes at all --------------------------------------------------------

HEADER_NAMES = st.sampled_from(
    [b"webhook-id", b"Webhook-Timestamp", b"webhook-signature", b"svix-id", b"svix-signature", b"x-token", b"x-event"]
)
HEADER_VALUES = st.one_of(
    st.binary(max_size=60),
    st.just(str(NOW_S).encode()),
    st.builds(lambda raw: b"v1," + raw, st.binary(max_size=60)),
    st.from_regex(rb"(v1,[A-Za-z0-9+/]{43}= ?){1,3}", fullmatch=True),
)
HEADERS = st.lists(st.tuples(st.one_of(HEADER_NAMES, st.binary(max_size=20)), HEADER_VALUES), max_size=8)


@pytest.mark.rule("A1", "W3")
@given(headers=HEADERS, body=st.binary(max_size=200), now_ms=st.integers(-(2**63), 2**63))
def test_arbitrary_bytes_never_raise_and_never_verify(
    headers: list[tuple[bytes, bytes]], body: bytes, now_ms: int
) -> None:
    for scheme in (STANDARD, BEARER):
        found = refused(scheme, request(headers, body), now_ms=now_ms)

        assert found.reason != "internal"


@pytest.mark.rule("A1", "A3")
@given(
    part=st.sampled_from(["body", "webhook-id", "webhook-timestamp", "webhook-signature"]),
    place=st.integers(0, 10_000),
    flip=st.integers(1, 255),
)
def test_one_byte_changed_is_refused(part: str, place: int, flip: int) -> None:
    raw = signed()
    was = raw.body if part == "body" else dict(raw.headers)[part.encode()]
    at = place % len(was)
    changed = was[:at] + bytes([was[at] ^ flip]) + was[at + 1 :]

    if part == "body":
        refused(STANDARD, request(list(raw.headers), changed))
    else:
        refused(STANDARD, replaced(raw, part.encode(), changed))


@given(body=st.binary(max_size=100))
def test_a_bearer_takes_any_body_whether_or_not_it_holds_the_id(body: bytes) -> None:
    scheme = bearer(TOKEN, event_id="json:/id").ready({})

    found = verdict(scheme, request({"authorization": f"Bearer {TOKEN}"}, body))

    assert isinstance(found, Verified) or found.reason == "malformed_id"


class Trap(bytes):
    """A header name that no server makes: it stands for a fault of ours, with the body in its message."""

    def lower(self) -> bytes:
        raise LookupError(BODY.decode())


@pytest.mark.parametrize(("scheme", "raw"), GENUINE)
def test_a_fault_of_ours_is_a_refusal_and_logged_without_what_it_choked_on(
    scheme: Scheme, raw: RawRequest, caplog: pytest.LogCaptureFixture
) -> None:
    found = refused(scheme, request([(Trap(b"x"), b""), *raw.headers]))

    assert (found.reason, found.status) == ("internal", 401)
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.ERROR, "scheme failed")]
    assert "LookupError" in caplog.text
    assert "in lower" in caplog.text
    for private in (BODY.decode(), SECRET, TOKEN):
        assert private not in caplog.text + found.detail


# --- secrets -----------------------------------------------------------------


@pytest.mark.parametrize("make", [standard_webhook, bearer])
def test_a_module_can_name_a_secret_that_is_not_there_yet(make: Any) -> None:
    unready: Unready = make("env:RESTAURANT_SECRET")

    with pytest.raises(SecretMissing, match=r"^env:RESTAURANT_SECRET is not set$"):
        unready.ready({})
    with pytest.raises(SecretMissing, match=r"^env:RESTAURANT_SECRET is empty$"):
        unready.ready({"RESTAURANT_SECRET": " \n"})
    assert unready.ready({"RESTAURANT_SECRET": SECRET}).name == unready.name


@pytest.mark.rule("W4")
@pytest.mark.parametrize("missing", ["NEW", "OLD"])
@pytest.mark.parametrize("make", [standard_webhook, bearer])
def test_a_source_that_lacks_one_of_its_secrets_does_not_start(make: Any, missing: str) -> None:
    environ = {name: value for name, value in (("NEW", SECRET), ("OLD", OLD_SECRET)) if name != missing}

    with pytest.raises(SecretMissing) as found:
        make("env:NEW", "env:OLD").ready(environ)

    assert found.value.reference == f"env:{missing}"


@pytest.mark.parametrize("make", [standard_webhook, bearer])
def test_a_source_without_any_secret_is_a_mistake_at_once(make: Any) -> None:
    with pytest.raises(ValueError, match="needs a secret"):
        make()
    with pytest.raises(ValueError, match="secret 1 names no environment variable"):
        make("env:")


@pytest.mark.parametrize(
    ("secret", "error"),
    [
        ("whsec_", SecretMissing),
        ("whsec_****", SecretMalformed),
        ("whsec_MfKQ9", SecretMalformed),
        ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw\n", SecretMalformed),
        ("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaS_", SecretMalformed),
        ("ключ-ресторана", SecretMalformed),
        ("RESTAURANT_SECRET", SecretMalformed),
        ("whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=", SecretUnsupported),
        ("whsk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4=", SecretUnsupported),
    ],
)
def test_what_is_no_webhook_key_is_refused_at_start_without_being_shown(
    secret: str, error: type[SecretUnusable]
) -> None:
    with pytest.raises(error) as found:
        standard_webhook("env:KEY").ready({"KEY": secret})
    with pytest.raises(error):
        sign(secret, webhook_id="evt_1", timestamp_s=NOW_S, body=BODY)

    assert str(found.value).startswith("env:KEY ")
    assert secret.removeprefix("whsec_").strip() not in str(found.value) or secret == "whsec_"
    assert found.value.__cause__ is None
    assert found.value.__suppress_context__ or found.value.__context__ is None


@pytest.mark.parametrize("token", [f"{TOKEN}\n", f" {TOKEN}"])
def test_a_token_with_white_space_around_it_is_refused_at_start(token: str) -> None:
    with pytest.raises(SecretMalformed, match=r"^env:TOKEN begins or ends with white space") as found:
        bearer("env:TOKEN").ready({"TOKEN": token})

    assert TOKEN not in str(found.value)


def test_a_token_may_be_any_bytes_that_an_environment_holds() -> None:
    scheme = bearer("env:TOKEN", header="x-token").ready({"TOKEN": b"s\xe9cret".decode("utf-8", "surrogateescape")})

    assert verified(scheme, request([(b"x-token", b"s\xe9cret")])).key == "env:TOKEN"


@pytest.mark.parametrize(("make", "secret"), [(standard_webhook, SECRET), (bearer, TOKEN)])
def test_no_secret_is_ever_shown(make: Any, secret: str) -> None:
    by_literal, by_reference = make(secret), make("env:KEY")
    ready = [by_literal.ready({}), by_reference.ready({"KEY": secret})]
    key = ready[0].keys[0].secret

    refusals = [refused(scheme, raw) for scheme in ready for raw in (signed(secret=OLD_SECRET), shown(x="y"))]
    for thing in (by_literal, by_reference, *ready, *refusals):
        for private in (secret, secret.removeprefix("whsec_"), repr(key)[2:-1]):
            assert private not in repr(thing)
            assert private not in str(thing)
    assert "env:KEY" in repr(by_reference)
    assert "env:KEY" in repr(ready[1])


def test_every_key_meets_every_signature_whichever_matches(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def counting(ours: bytes, theirs: bytes) -> bool:
        compared.append(theirs)
        return compare(ours, theirs)

    monkeypatch.setattr("hmac.compare_digest", counting)
    scheme = standard_webhook(SECRET, OLD_SECRET).ready({})
    good = signed().headers[2][1]

    verified(scheme, replaced(signed(), b"webhook-signature", good + b" v1,AAAA"))
    assert len(compared) == 4

    compared.clear()
    verified(bearer(TOKEN, "other").ready({}), shown(authorization=f"Bearer {TOKEN}"))
    assert len(compared) == 2


def unsafe_comparisons(source: str) -> list[int]:
    """Return the lines where something secret meets `==` or `!=`, which stop at the first difference."""
    private = {"secret", "key", "token", "signature", "signatures", "expected", "sent", "entry", "mac", "digest"}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare) and any(isinstance(op, ast.Eq | ast.NotEq) for op in node.ops):
            words = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            words |= {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}
            if words & private:
                found.append(node.lineno)
    return found


@pytest.mark.rule("W2")
def test_no_secret_or_signature_is_compared_in_passing() -> None:
    assert unsafe_comparisons("if ours.secret != sent: pass") == [1]
    for file in Path(sayso.sources.__file__).parent.glob("*.py"):
        assert unsafe_comparisons(file.read_text("utf-8")) == [], file.name


# --- a bearer's own ----------------------------------------------------------


@pytest.mark.parametrize("value", [f"Bearer {TOKEN}", f"bearer {TOKEN}", f"BEARER  {TOKEN}"])
def test_the_authorization_header_carries_the_token_after_the_word_bearer(value: str) -> None:
    scheme = bearer("env:CRON").ready({"CRON": TOKEN})

    assert verified(scheme, shown(authorization=value)) == Verified(key="env:CRON", signed_at_ms=None, event_id=None)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (TOKEN, "no_usable_signature"),
        (f"Basic {TOKEN}", "no_usable_signature"),
        (f"Bearer{TOKEN}", "no_usable_signature"),
        ("", "no_usable_signature"),
        ("Bearer", "signature"),
        ("Bearer ", "signature"),
        (f"Bearer {TOKEN} x", "signature"),
        (f"Bearer {TOKEN[:-1]}", "signature"),
        (f"Bearer {TOKEN.upper()}", "signature"),
    ],
)
def test_anything_else_in_the_authorization_header_is_refused(value: str, reason: str) -> None:
    assert refused(bearer(TOKEN).ready({}), shown(authorization=value)).reason == reason


def test_another_header_is_the_token_as_a_whole() -> None:
    scheme = bearer(TOKEN, header="X-Gitlab-Token").ready({})

    verified(scheme, shown(x_gitlab_token=TOKEN))
    assert refused(scheme, shown(x_gitlab_token=f"Bearer {TOKEN}")).reason == "signature"


@pytest.mark.rule("A5")
@pytest.mark.parametrize(
    ("pointer", "body", "expected"),
    [
        ("/update_id", b'{"update_id": 10000}', "10000"),
        ("/data/0/id", b'{"data": [{"id": "a.b c"}]}', "a.b c"),
        ("/a~1b/m~0n", b'{"a/b": {"m~n": "x"}}', "x"),
        ("/", b'{"": "empty name"}', "empty name"),
        ("/id", "\ufeff".encode() + b'{"id": "x"}', "x"),
        ("/id", b"{}", None),
        ("/id", b'{"id": null}', None),
        ("/id/deeper", b'{"id": "x"}', None),
        ("/1", b'["x"]', None),
        ("/00", b'["x"]', None),
        ("/-1", b'["x"]', None),
        ("/id", b"", None),
        ("/id", b"not JSON", None),
        ("/id", b'{"id": "\xff"}', None),
        ("/id", b"[" * 100_000, None),
        ("/id", b'{"id": ' + b"9" * 5000 + b"}", None),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_the_id_in_a_body_is_found_or_there_is_none(pointer: str, body: bytes, expected: str | None) -> None:
    scheme = bearer(TOKEN, event_id=f"json:{pointer}").ready({})

    assert verified(scheme, request({"authorization": f"Bearer {TOKEN}"}, body)).event_id == expected


@pytest.mark.parametrize(
    "value", [b'""', b"{}", b"[1]", b"true", b"1.5", b'"\\u0000"', b'"\\ud800"', b'"' + b"e" * 257 + b'"', b"9" * 257]
)
def test_a_value_that_can_not_be_an_id_is_refused(value: bytes) -> None:
    scheme = bearer(TOKEN, event_id="json:/id").ready({})

    found = refused(scheme, request({"authorization": f"Bearer {TOKEN}"}, b'{"id": ' + value + b"}"))

    assert found == Refusal("malformed_id", "/id in the body isn't 1 to 256 characters")


@pytest.mark.rule("A5")
def test_a_missing_id_header_means_that_the_sender_gave_none() -> None:
    assert verified(BEARER, shown(x_token=TOKEN)).event_id is None
    assert verified(BEARER, shown(x_token=TOKEN, x_event="evt.1")).event_id == "evt.1"


# --- mistakes in a user's module ---------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"header": ""},
        {"header": "x token"},
        {"header": "x-tokén"},
        {"event_id": "x-event"},
        {"event_id": "header:"},
        {"event_id": "json:update_id"},
        {"event_id": "body:/id"},
        {"header": "X-Token", "event_id": "header:x-token"},
        {"keep_days": 0},
        {"body_bytes_max": 0},
    ],
    ids=repr,
)
def test_a_bearer_that_can_not_work_is_a_mistake_at_once(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"header|event_id|positive"):
        bearer(TOKEN, **wrong)


@pytest.mark.parametrize("wrong", [{"tolerance_s": 0}, {"tolerance_s": 43_200, "keep_days": 1}, {"keep_days": 0}])
def test_repeats_are_remembered_for_longer_than_a_capture_can_live(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        standard_webhook(SECRET, **wrong)

    early = verified(STANDARD, signed(timestamp_s=NOW_S), now_ms=NOW_MS - 299_000)
    late = verified(STANDARD, signed(timestamp_s=NOW_S), now_ms=NOW_MS + 299_000)
    assert early.event_id == late.event_id
    assert STANDARD.keep_ms > 600_000


def test_a_scheme_can_not_be_changed_once_it_is_ready() -> None:
    with pytest.raises(AttributeError):
        cast(Any, STANDARD).tolerance_s = 10**9
