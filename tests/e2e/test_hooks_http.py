"""Inbound hooks over a real connection: what is accepted, how each refusal looks, and that no bytes are a fault."""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.types import Message

from sayso.core.errors import CommitUnknown, InboxFull, StoreUnavailable
from sayso.runtime.ports import RawRequest, Refusal, Verified
from sayso.server.body import TooSlow, read_body
from sayso.sources import sign
from tests.e2e.serving import (
    HOOK_BYTES_MAX,
    SECRET,
    Headers,
    OnPurpose,
    Raw,
    Restaurant,
    Served,
    Troubled,
    exchange,
    opened,
    read_answer,
    served_on,
    serving,
)

BODY = b'{"text": "that table is gone, 20:30 is free"}'


@pytest.fixture(scope="module", params=["memory", "sqlite", "postgres"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_on(request.param, tmp_path_factory.mktemp("hooks")) as one:
        yield one


async def post(served: Served, body: bytes, headers: Headers, source: str = "restaurant") -> httpx2.Response:
    return await served.http.post(f"/v1/hooks/{source}", content=body, headers=headers)


def looks(answer: httpx2.Response | Raw) -> tuple[int, dict[str, str], bytes]:
    """Return all that a sender can see, but for the clock."""
    if isinstance(answer, Raw):
        return answer.status, {name: value for name, value in answer.headers.items() if name != "date"}, answer.body
    headers = {name: value for name, value in answer.headers.items() if name != "date"}
    return answer.status_code, headers, answer.content


async def notes(served: Served) -> list[tuple[str, str]]:
    """Return source and sentence of what the door refused."""
    return [(row.note.source, row.note.text) for row in await served.door() if row.note.kind == "input.rejected"]


async def bound(served: Served) -> str:
    """Return a session that takes what the restaurant sends from now on."""
    _, headers = await served.somebody()
    session = await served.session(headers)
    await served.store.bind("restaurant", session)
    return session


def request_bytes(source: str, headers: Headers, *, length: int | None = None) -> bytes:
    """Return the head of a hook; without a `length` its body is chunked."""
    framing = "transfer-encoding: chunked" if length is None else f"content-length: {length}"
    lines = [f"POST /v1/hooks/{source} HTTP/1.1", "host: x", framing, *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


# --- accepted ----------------------------------------------------------------


@pytest.mark.rule("A1", "A7")
async def test_a_verified_hook_is_stored_when_it_is_acknowledged(served: Served) -> None:
    session = await bound(served)

    answer = await post(served, BODY, served.signed(BODY))

    [row] = await served.store.inbox_record(session)
    assert looks(answer) == (202, {"content-length": "0"}, b"")
    assert (str(row.input.principal), row.input.verified) == ("source:restaurant", "standard-webhooks v1")
    assert row.input.parts[0].text == "that table is gone, 20:30 is free"
    assert served.hints.seen[-1] == session


@pytest.mark.rule("A4")
async def test_a_repeat_is_acknowledged_and_stored_once(served: Served) -> None:
    """Twenty at once, and one more much later in the sender's schedule, signed afresh."""
    session, id_ = await bound(served), served.event_id()

    answers = await asyncio.gather(*(post(served, BODY, served.signed(BODY, id_)) for _ in range(20)))
    served.clock.ahead_ms += 3_600_000
    late = await post(served, BODY, served.signed(BODY, id_))

    assert {each.status_code for each in [*answers, late]} == {202}
    assert len(await served.store.inbox_record(session)) == 1


@pytest.mark.rule("A4", "K27")
async def test_a_sender_cannot_tell_what_became_of_an_accepted_hook(served: Served) -> None:
    """Stored, a repeat, other bytes under a known id, for nobody, and unreadable: all look the same."""
    session, known = await bound(served), served.event_id()
    other = b'{"text": "something else"}'

    answers = [await post(served, BODY, served.signed(BODY, known)) for _ in "ab"]
    answers += [await post(served, other, served.signed(other, known))]
    answers += [await post(served, b"not json", served.signed(b"not json"))]
    answers += [await post(served, b"", served.signed(b""))]
    answers += [await post(served, BODY, {"authorization": "Bearer let-me-in"}, "cinema")]

    assert [looks(each) for each in answers] == [(202, {"content-length": "0"}, b"")] * 6
    assert len(await served.store.inbox_record(session)) == 1


async def test_a_body_that_does_not_parse_is_kept_for_the_operator(served: Served) -> None:
    body = b"\xff\xfe not json"

    answer = await post(served, body, served.signed(body))

    assert answer.status_code == 202
    last = (await served.door())[-1].note
    assert (last.kind, last.source) == ("input.unclaimed", "restaurant")
    assert "does not parse" in last.text


@pytest.mark.rule("A4")
async def test_the_same_id_from_another_source_is_no_repeat(served: Served) -> None:
    _, headers = await served.somebody()
    session, id_ = await served.session(headers), served.event_id()
    for source in ("restaurant", "cinema"):
        await served.store.bind(source, session)

    body = b'{"text": "both of us say so"}'

    await post(served, body, served.signed(body, id_))
    await post(served, body, {"authorization": "Bearer let-me-in", "idempotency-key": id_}, "cinema")

    assert [row.source for row in await served.store.inbox_record(session)] == ["restaurant", "cinema"]


# --- refused -----------------------------------------------------------------


def _signature(change: Callable[[str], str]) -> Callable[[Headers], Headers]:
    return lambda headers: {**headers, "webhook-signature": change(headers["webhook-signature"])}


def _flipped(signature: str) -> str:
    raw = bytearray(base64.b64decode(signature[3:]))
    raw[0] ^= 1
    return "v1," + base64.b64encode(raw).decode()


def _without(name: str) -> Callable[[Headers], Headers]:
    return lambda headers: {key: value for key, value in headers.items() if key != name}


UNPROVEN: dict[str, Callable[[Headers], Headers]] = {
    "a wrong signature": _signature(_flipped),
    "one byte short": _signature(lambda text: text[:-1]),
    "half of it": _signature(lambda text: text[:20]),
    "nothing after the version": _signature(lambda text: "v1,"),
    "no version": _signature(lambda text: text[3:]),
    "an empty one": _signature(lambda text: ""),
    "another version": _signature(lambda text: "v2," + text[3:]),
    "not ASCII": _signature(lambda text: text[:10] + "ü" + text[11:]),
    "no base64": _signature(lambda text: "v1,%%%%"),
    "a secret instead": _signature(lambda text: "v1," + SECRET),
    "no signature": _without("webhook-signature"),
    "no id": _without("webhook-id"),
    "no time": _without("webhook-timestamp"),
    "nothing at all": lambda headers: {},
    "another id": lambda headers: {**headers, "webhook-id": "msg_other"},
    "an id with a dot": lambda headers: {**headers, "webhook-id": "msg.1"},
    "a time in milliseconds": lambda headers: {**headers, "webhook-timestamp": "1700000000000"},
    "a time that is none": lambda headers: {**headers, "webhook-timestamp": "soon"},
}


@pytest.mark.rule("A1", "A2")
@pytest.mark.parametrize("change", UNPROVEN.values(), ids=UNPROVEN)
async def test_what_nobody_vouches_for_is_401_and_on_record(
    served: Served, change: Callable[[Headers], Headers]
) -> None:
    session = await bound(served)
    before = await notes(served)
    headers = {name.encode(): value.encode("latin-1") for name, value in change(served.signed(BODY)).items()}

    answer = await served.http.post("/v1/hooks/restaurant", content=BODY, headers=headers)

    assert looks(answer) == (401, {"content-length": "0"}, b"")
    [(source, text)] = (await notes(served))[len(before) :]
    assert source == "restaurant"
    assert text
    assert SECRET not in text
    assert await served.store.inbox_record(session) == []


@pytest.mark.rule("A2")
async def test_the_record_says_in_words_what_was_wrong(served: Served) -> None:
    await post(served, BODY + b" ", served.signed(BODY))

    assert (await notes(served))[-1] == ("restaurant", "signature doesn't match restaurant's secret")


@pytest.mark.rule("A3")
@pytest.mark.parametrize("age_s", [301, -302, 3 * 86_400])
async def test_a_signed_time_too_far_off_is_401(served: Served, age_s: int) -> None:
    assert (await post(served, BODY, served.signed(BODY, age_s=age_s))).status_code == 401


@pytest.mark.rule("A3")
@pytest.mark.parametrize("age_s", [298, -298])
async def test_a_signed_time_near_enough_is_taken(served: Served, age_s: int) -> None:
    assert (await post(served, BODY, served.signed(BODY, age_s=age_s))).status_code == 202


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
async def test_a_header_of_the_proof_that_comes_twice_is_400(served: Served, name: str) -> None:
    headers = list(served.signed(BODY).items())
    twice = [*headers, *(pair for pair in headers if pair[0] == name)]

    answer = await served.http.post("/v1/hooks/restaurant", content=BODY, headers=twice)

    assert looks(answer) == (400, {"content-length": "0"}, b"")


async def test_an_unknown_source_is_404_and_costs_what_a_refusal_costs(served: Served) -> None:
    """Its body is read, it leaves a note, and its name can't do any harm there."""
    for source, shown in (("nobody", "nobody"), ("x%0a%1b%E2%80%AE", "x⏎[U+001B][U+202E]"), ("%FF", "\ufffd")):
        answer = await post(served, BODY, served.signed(BODY), source)
        assert looks(answer) == (404, {"content-length": "0"}, b"")
        assert (await notes(served))[-1] == (shown, "no such source")
    assert (await post(served, b"x" * (2 << 20), {}, "nobody")).status_code == 413
    assert (await post(served, BODY, {"content-encoding": "gzip"}, "nobody")).status_code == 415


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_a_hook_is_posted(served: Served, method: str) -> None:
    for source in ("restaurant", "nobody"):
        answer = await served.http.request(method, f"/v1/hooks/{source}")
        assert looks(answer) == (405, {"allow": "POST", "content-length": "0"}, b"")


@pytest.mark.parametrize("coding", ["gzip", "br", "deflate, gzip", "identity, gzip", "x", ""])
async def test_an_encoded_body_is_415(served: Served, coding: str) -> None:
    answer = await post(served, BODY, {**served.signed(BODY), "content-encoding": coding})

    assert looks(answer) == (415, {"content-length": "0", "connection": "close"}, b"")
    assert "content-encoding" in (await notes(served))[-1][1]


async def test_identity_is_no_encoding(served: Served) -> None:
    assert (await post(served, BODY, {**served.signed(BODY), "content-encoding": "Identity"})).status_code == 202


# --- sizes and connections ---------------------------------------------------


async def test_a_body_at_the_limit_is_taken_and_one_byte_more_is_413(served: Served) -> None:
    most = b"x" * HOOK_BYTES_MAX

    assert (await post(served, most, served.signed(most))).status_code == 202
    answer = await post(served, most + b"x", served.signed(most + b"x"))

    assert looks(answer) == (413, {"content-length": "0", "connection": "close"}, b"")
    assert (await notes(served))[-1] == ("restaurant", f"the body is longer than {HOOK_BYTES_MAX} bytes")


async def test_two_mebibytes_are_413_declared_or_chunked(served: Served) -> None:
    """The whole of it is sent, and the answer is still read, not lost in a reset connection."""
    body = b"x" * (2 << 20)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 10_000):
            yield body[at : at + 10_000]

    for content in (body, chunks()):
        answer = await served.http.post("/v1/hooks/restaurant", content=content, headers=served.signed(body))
        assert looks(answer) == (413, {"content-length": "0", "connection": "close"}, b"")


async def test_a_declared_length_past_the_limit_is_refused_before_the_body(served: Served) -> None:
    answer = await exchange(served.address, request_bytes("restaurant", {}, length=10**12))

    assert looks(answer) == (413, {"content-length": "0", "connection": "close"}, b"")


async def test_a_body_without_an_end_is_not_read_without_an_end(served: Served) -> None:
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(request_bytes("restaurant", served.signed(BODY)))
    chunk = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"

    async def send() -> int:
        sent = 0
        try:
            while True:
                writer.write(chunk)
                await writer.drain()
                sent += 0x10000
        except ConnectionError:
            return sent

    sending = asyncio.create_task(send())
    answer = await read_answer(reader)
    async with asyncio.timeout(10):
        sent = await sending

    assert answer.status == 413
    assert sent < 64 << 20
    writer.close()


async def test_a_sender_that_waits_to_be_told_is_not_asked_for_what_would_be_refused(served: Served) -> None:
    """`Expect: 100-continue`: the answer comes at once, and the connection ends, since no body will follow."""
    waits = {**served.signed(BODY), "expect": "100-continue"}
    began = time.monotonic()

    refused = await exchange(served.address, request_bytes("restaurant", waits, length=10**9))
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(request_bytes("restaurant", waits, length=len(BODY)))
    told = await read_answer(reader)
    writer.write(BODY)
    taken = await read_answer(reader)
    writer.close()

    assert (refused.status, refused.headers["connection"]) == (413, "close")
    assert (told.status, taken.status) == (100, 202)
    assert time.monotonic() - began < 1.5


async def test_a_connection_stays_open_where_the_body_was_read(served: Served) -> None:
    """Also after a refusal, so that a sender's next hook needs no new connection."""
    reader, writer = await asyncio.open_connection(*served.address)
    statuses = []
    for headers in (served.signed(BODY), {}, served.signed(BODY)):
        writer.write(request_bytes("restaurant", headers, length=len(BODY)) + BODY)
        statuses.append((await read_answer(reader)).status)
    writer.close()

    assert statuses == [202, 401, 202]


async def _noted(served: Served, text: str, *, since: int) -> None:
    async with asyncio.timeout(10):
        while text not in [each for _, each in (await notes(served))[since:]]:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.005)


async def test_a_body_that_is_cut_off_leaves_only_a_note(served: Served) -> None:
    session, since = await bound(served), len(await notes(served))
    whole = BODY * 1_000
    headers = served.signed(whole)

    for head in (request_bytes("restaurant", headers, length=len(whole)), request_bytes("restaurant", headers)):
        _, writer = await asyncio.open_connection(*served.address)
        writer.write(head + (b"" if b"content-length" in head else b"400\r\n") + whole[:1_000])
        await writer.drain()
        writer.transport.abort()
        await _noted(served, "the client went away before its body had arrived", since=since)
        since = len(await notes(served))

    assert await served.store.inbox_record(session) == []


async def test_a_body_that_takes_too_long_is_given_up() -> None:
    async def receive() -> Message:
        await asyncio.sleep(0.002)
        return {"type": "http.request", "body": b"x", "more_body": True}

    with pytest.raises(TooSlow):
        await read_body({"type": "http", "headers": []}, receive, bytes_max=1_000_000, ms_max=20)


class Recorder:
    """A scheme that keeps what it is shown, and vouches for nothing."""

    name = "recorder"
    id_signed = True
    keep_ms = 1
    body_bytes_max = 1_000

    def __init__(self) -> None:
        self.shown: list[RawRequest] = []

    def verify(self, request: RawRequest, *, source: str, now_ms: int) -> Verified | Refusal:
        self.shown.append(request)
        return Refusal("no", "no")


async def test_a_scheme_is_shown_the_bytes_as_they_came(tmp_path: Path) -> None:
    """Headers in order with repeats, whatever bytes they hold; the address undecoded; the body of all chunks."""
    recorder = Recorder()
    more = {"any": Restaurant("any", recorder)}
    head = (
        b"POST /v1/hooks/any?b=2&a=%C3%BC HTTP/1.1\r\nhost: x\r\nX-Two: b\r\nx-one: \xff\xfe\r\nX-Two: a\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )

    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock, more=more) as served:
        await exchange(served.address, head, b"2\r\n\xff\x00\r\n", b"3\r\n\r\n!\r\n0\r\n\r\n")

    [request] = recorder.shown
    assert (request.method, request.target, request.body) == ("POST", "/v1/hooks/any?b=2&a=%C3%BC", b"\xff\x00\r\n!")
    assert request.headers == (
        (b"host", b"x"),
        (b"x-two", b"b"),
        (b"x-one", b"\xff\xfe"),
        (b"x-two", b"a"),
        (b"transfer-encoding", b"chunked"),
    )


# --- faults of ours ----------------------------------------------------------


@pytest.mark.rule("A7")
@pytest.mark.parametrize(
    ("trouble", "status", "says_when"),
    [
        (StoreUnavailable("locked"), 503, True),
        (CommitUnknown("COMMIT failed"), 503, True),
        (InboxFull("ses_1", 1_000), 429, True),
    ],
    ids=["locked", "unknown", "full"],
)
async def test_what_may_not_be_stored_is_not_acknowledged(
    troubled: tuple[Served, Troubled], trouble: Exception, status: int, says_when: bool
) -> None:
    """The sender is told to come back, does, and is stored once."""
    served, store = troubled
    session, headers = await bound(served), served.signed(BODY)

    store.trouble = {"put": trouble}
    refused = await post(served, BODY, headers)
    store.trouble = {}
    again = await post(served, BODY, headers)

    assert (refused.status_code, refused.content, "retry-after" in refused.headers) == (status, b"", says_when)
    assert again.status_code == 202
    assert len(await store.inbox_record(session)) == 1


async def test_a_refusal_that_cannot_be_recorded_is_503(troubled: tuple[Served, Troubled]) -> None:
    served, store = troubled
    store.trouble = {"note": StoreUnavailable("locked")}

    assert (await post(served, BODY, {})).status_code == 503
    assert (await post(served, BODY, {}, "nobody")).status_code == 503


async def test_what_nobody_foresaw_is_500_without_a_word(
    troubled: tuple[Served, Troubled], caplog: pytest.LogCaptureFixture
) -> None:
    served, store = troubled
    store.trouble = {"put": OnPurpose("the secret is 42")}

    with caplog.at_level(logging.ERROR):
        answer = await post(served, BODY, served.signed(BODY))

    assert looks(answer) == (500, {"content-length": "0"}, b"")
    assert [each.message for each in caplog.records if each.levelno >= logging.ERROR] == ["hook met a fault of ours"]


# --- whatever is sent --------------------------------------------------------

FUZZ = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=100)
VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=60).map(
    lambda text: text.strip().replace("\x7f", "").encode("latin-1")
)


@pytest.fixture(scope="module")
async def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_on("sqlite", tmp_path_factory.mktemp("fuzz")) as one:
        await bound(one)
        yield one


@FUZZ
@given(body=st.binary(max_size=300), json_like=st.booleans())
async def test_any_signed_bytes_are_acknowledged(fuzzed: Served, body: bytes, json_like: bool) -> None:
    content = b'{"text": ' + body + b"}" if json_like else body

    assert looks(await post(fuzzed, content, fuzzed.signed(content))) == (202, {"content-length": "0"}, b"")


@FUZZ
@given(
    changed=st.dictionaries(
        st.sampled_from([b"webhook-id", b"webhook-timestamp", b"webhook-signature", b"svix-id", b"authorization"]),
        VALUES,
    ),
    source=st.sampled_from(["restaurant", "cinema", "nobody"]),
)
async def test_no_header_is_a_fault_or_a_proof(fuzzed: Served, changed: dict[bytes, bytes], source: str) -> None:
    right = sign(SECRET, webhook_id="m", timestamp_s=1, body=BODY)
    headers = {name.encode(): value.encode() for name, value in right.items()}

    answer = await fuzzed.http.post(f"/v1/hooks/{source}", content=BODY, headers={**headers, **changed})

    assert answer.status_code in (400, 401, 404)
    assert answer.content == b""


@FUZZ
@given(at=st.integers(0, 47), bit=st.integers(0, 7))
async def test_no_changed_signature_is_a_proof(fuzzed: Served, at: int, bit: int) -> None:
    """Not one bit of it may differ, in any of its spellings."""
    headers = fuzzed.signed(BODY)
    signature = bytearray(headers["webhook-signature"].encode())
    signature[at % len(signature)] ^= 1 << bit
    pairs = [(name, value.encode()) for name, value in headers.items() if name != "webhook-signature"]
    head = b"".join(name.encode() + b": " + value + b"\r\n" for name, value in pairs)
    request = b"POST /v1/hooks/restaurant HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n" % len(BODY)

    answer = await exchange(
        fuzzed.address, request + head + b"webhook-signature: " + bytes(signature) + b"\r\n\r\n" + BODY
    )

    assert answer.status in (400, 401)
