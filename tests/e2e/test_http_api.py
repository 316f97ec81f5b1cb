"""The JSON calls over a real connection: who may do what, what is refused and how, and that nothing sent is a 5xx."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sayso.core import view
from sayso.core.consent import ConsentState, Standing
from sayso.core.errors import CommitUnknown, InboxFull, Invalid, StoreUnavailable
from sayso.core.origin import Principal
from sayso.core.rows import AnswerRefusedBody, ConsentApprovedBody, ConsentDeclinedBody
from sayso.core.session import Position
from sayso.server import wire
from tests.e2e.serving import (
    LIMITS,
    Headers,
    Hints,
    OnPurpose,
    Owner,
    Served,
    Troubled,
    exchange,
    problem,
    question,
    read_answer,
    said,
    served_on,
)


@pytest.fixture(scope="module", params=["memory", "sqlite", "postgres"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_on(request.param, tmp_path_factory.mktemp("api")) as one:
        yield one


# --- who is asking -----------------------------------------------------------


async def test_no_token_that_does_not_stand_is_told_why(served: Served) -> None:
    """Missing, malformed, unknown, wrong, expired and revoked tokens get one and the same answer."""
    user, good = await served.somebody()
    text = good["Authorization"]
    expired = await served.auth(user, ttl_ms=1_000)
    revoked = await served.auth(user)
    assert await served.store.revoke_token(revoked["Authorization"].split("_")[1])
    served.clock.ahead_ms += 1_000
    bad: list[Headers | list[tuple[str, str]]] = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer nonsense"},
        {"Authorization": f"Basic {text.split()[1]}"},
        {"Authorization": text[:-1]},
        {"Authorization": text + "x"},
        {"Authorization": text[:-1] + ("A" if text[-1] != "A" else "B")},
        {"Authorization": "Bearer sayso_0123456789abcdef_" + "x" * 43},
        {"Authorization": f"{text} {text}"},
        [("Authorization", text), ("Authorization", text)],
        expired,
        revoked,
    ]

    answers = [await served.http.get("/v1/sessions", headers=headers) for headers in bad]

    assert [answer.status_code for answer in answers] == [401] * len(bad)
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}
    assert len({answer.text for answer in answers}) == 1
    problem(answers[0], 401, "unauthenticated")
    assert (await served.http.get("/v1/sessions", headers=good)).status_code == 200


async def test_bearer_may_be_written_in_any_case(served: Served) -> None:
    _, headers = await served.somebody()
    lower = {"authorization": headers["Authorization"].replace("Bearer", "bEARER")}

    assert (await served.http.get("/v1/sessions", headers=lower)).status_code == 200


async def test_only_the_hash_of_a_secret_is_stored(served: Served) -> None:
    user, headers = await served.somebody()
    token = headers["Authorization"].removeprefix("Bearer ")
    _, id_, secret = token.split("_", 2)

    row = await served.store.token(id_)

    assert row is not None
    assert (str(row.principal), row.label, row.expires_at_ms, len(row.secret_hash)) == (user, "test", None, 64)
    assert secret not in repr(row)


@pytest.mark.parametrize("principal", ["source:restaurant", "timer:7", "agent:s1"])
async def test_a_token_is_for_people_only(served: Served, principal: str) -> None:
    with pytest.raises(Invalid):
        await served.identity.mint(Principal.parse(principal), label="no")


async def test_a_token_is_good_for_some_time(served: Served) -> None:
    with pytest.raises(Invalid):
        await served.identity.mint(Principal.parse("user:alice"), label="no", ttl_ms=0)


async def test_the_caller_is_known_before_anything_else_is_read(served: Served) -> None:
    """A body that can't be read, of a kind that isn't taken, and too long: who sent it comes first."""
    for headers in ({"content-type": "application/json"}, {"content-type": "text/plain"}, {"content-encoding": "gzip"}):
        problem(await served.http.post("/v1/sessions", content=b"{" * 100, headers=headers), 401, "unauthenticated")
    problem(await served.http.post("/v1/sessions", content=b"x" * (2 << 20)), 401, "unauthenticated")


@pytest.mark.rule("A1")
async def test_another_persons_session_looks_as_if_it_did_not_exist(served: Served) -> None:
    """Every call about a session says of somebody else's what it says of none."""
    alice, hers = await served.somebody()
    _, bobs = await served.somebody()
    session, consent, _ = await served.asked(alice, hers)
    answer = {"verdict": "yes", "digest": consent.digest}

    async def ask(id_: str) -> list[tuple[int, str]]:
        at = f"/v1/sessions/{id_}"
        answers = [
            await served.http.get(at, headers=bobs),
            await served.http.post(f"{at}/inputs", json={"text": "hi"}, headers=bobs),
            await served.http.get(f"{at}/history", headers=bobs),
            await served.http.get(f"{at}/consents", headers=bobs),
            await served.http.get(f"{at}/consents/A1", headers=bobs),
            await served.http.post(f"{at}/consents/A1", json=answer, headers=bobs),
            await served.http.get(f"{at}/stream", headers=bobs),
        ]
        return [(each.status_code, each.text) for each in answers]

    assert await ask(session) == await ask("ses_none")
    assert {status for status, _ in await ask(session)} == {404}
    assert len(await served.store.inbox_record(session)) == 1
    assert (await served.http.get("/v1/sessions", headers=bobs)).json() == {"sessions": []}


async def test_an_operator_sees_every_session_and_opens_none(served: Served) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers, "dinner")
    ops = await served.auth("operator:ops")

    listed = (await served.http.get("/v1/sessions", headers=ops)).json()["sessions"]

    assert session in [each["id"] for each in listed]
    assert (await served.http.get(f"/v1/sessions/{session}", headers=ops)).json()["title"] == "dinner"
    problem(await served.http.post("/v1/sessions", json={}, headers=ops), 403, "forbidden")


async def test_the_journal_and_the_door_are_for_operators(served: Served) -> None:
    _, hers = await served.somebody()
    session, owner = await served.owned(hers)
    await owner.says("one", "two", "three")
    await served.http.post("/v1/hooks/restaurant", content=b"{}")
    ops = await served.auth("operator:ops")

    problem(await served.http.get(f"/v1/sessions/{session}/journal", headers=hers), 403, "forbidden")
    problem(await served.http.get("/v1/door", headers=hers), 403, "forbidden")
    journal = (await served.http.get(f"/v1/sessions/{session}/journal?after=1&limit=1", headers=ops)).json()
    notes = (await served.http.get("/v1/door?limit=1", headers=ops)).json()["notes"]

    assert [(row["seq"], row["kind"]) for row in journal["rows"]] == [(2, "model.said")]
    assert owner.token.nonce not in json.dumps(journal)
    assert [(note["kind"], note["source"]) for note in notes] == [("input.rejected", "restaurant")]
    problem(await served.http.get("/v1/sessions/ses_none/journal", headers=ops), 404, "not-found")


# --- sessions and inputs -----------------------------------------------------


async def test_a_session_opens_without_a_body_and_lists_newest_first(served: Served) -> None:
    user, headers = await served.somebody()
    first = (await served.http.post("/v1/sessions", headers=headers)).json()
    second = await served.session(headers, "zwei \N{SNOWMAN}")

    listed = (await served.http.get("/v1/sessions?limit=1", headers=headers)).json()["sessions"]
    older = (await served.http.get(f"/v1/sessions?before={second}", headers=headers)).json()["sessions"]

    assert (first["owner"], first["title"], first["position"], first["turn"]) == (user, "", "0.0", None)
    assert [(each["id"], each["title"]) for each in listed] == [(second, "zwei \N{SNOWMAN}")]
    assert [each["id"] for each in older] == [first["id"]]


@pytest.mark.rule("A7")
async def test_a_message_is_stored_when_it_is_acknowledged(served: Served) -> None:
    user, headers = await served.somebody()
    session = await served.session(headers)

    answer = await served.http.post(
        f"/v1/sessions/{session}/inputs",
        json={"text": "hello", "client_send_ids": ["c1"], "in_flight": "merge"},
        headers=headers,
    )

    [row] = await served.store.inbox_record(session)
    assert answer.status_code == 202
    assert answer.json() == {"outcome": "stored", "input": 1, "received_at_ms": row.received_at_ms}
    assert (str(row.input.principal), row.input.verified, row.state) == (user, "api token", "queued")
    assert (row.input.parts[0].text, row.input.client_send_ids) == ("hello", ("c1",))
    assert row.input.in_flight == "merge"
    assert served.hints.seen[-1] == session


@pytest.mark.rule("A5")
async def test_two_equal_messages_are_two(served: Served) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)

    answers = [
        await served.http.post(f"/v1/sessions/{session}/inputs", json={"text": "hi"}, headers=headers) for _ in "ab"
    ]

    assert [each.json()["input"] for each in answers] == [1, 2]


@pytest.mark.rule("A4", "K27")
async def test_an_idempotency_key_makes_a_repeat_one_message(served: Served) -> None:
    """Twenty at once are stored once; the same key with other words is refused; in another session it is new."""
    _, headers = await served.somebody()
    session, other = await served.session(headers), await served.session(headers)
    keyed = {**headers, "Idempotency-Key": "k-1"}
    address = f"/v1/sessions/{session}/inputs"

    answers = await asyncio.gather(
        *(served.http.post(address, json={"text": "book it"}, headers=keyed) for _ in range(20))
    )

    assert {each.status_code for each in answers} == {202}
    assert sorted(each.json()["outcome"] for each in answers) == ["duplicate"] * 19 + ["stored"]
    assert len({(each.json()["input"], each.json()["received_at_ms"]) for each in answers}) == 1
    problem(await served.http.post(address, json={"text": "cancel it"}, headers=keyed), 422, "key-reused")
    elsewhere = await served.http.post(f"/v1/sessions/{other}/inputs", json={"text": "book it"}, headers=keyed)
    assert elsewhere.json()["outcome"] == "stored"
    assert len(await served.store.inbox_record(session)) == 1


@pytest.mark.parametrize(
    "text", ["\0", "a\0b", "\x1b[2J\x7f", "\ufeff\u202e\u2028", "\U0010ffff", "\r\n" * 3 + ".", '"</script>\\', "ü" * 9]
)
async def test_text_may_be_whatever_utf_8_can_hold(served: Served, text: str) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers, title=text[:200])

    answer = await served.http.post(f"/v1/sessions/{session}/inputs", json={"text": text}, headers=headers)

    assert answer.status_code == 202
    [row] = await served.store.inbox_record(session)
    assert row.input.parts[0].text == text
    title = (await served.http.get(f"/v1/sessions/{session}", headers=headers)).json()["title"]
    assert title == text.replace("\0", "\ufffd")  # a name is a column of its own, and not every database has NULs


async def test_a_message_has_text_and_not_too_much_of_it(served: Served) -> None:
    _, headers = await served.somebody()
    address = f"/v1/sessions/{await served.session(headers)}/inputs"

    most = await served.http.post(address, json={"text": "x" * LIMITS.message_bytes}, headers=headers)

    assert most.status_code == 202
    for text in ("", " \n\t", "x" * (LIMITS.message_bytes + 1), "ü" * (LIMITS.message_bytes // 2 + 1)):
        problem(await served.http.post(address, json={"text": text}, headers=headers), 422, "invalid")


@pytest.mark.rule("K20")
async def test_a_bare_yes_needs_the_position_its_sender_had_seen(served: Served) -> None:
    alice, headers = await served.somebody()
    session, _, _ = await served.asked(alice, headers)
    address = f"/v1/sessions/{session}/inputs"

    for as_of in (None, "0.1", "1.1"):
        assert (
            await served.http.post(address, json={"text": "yes", "as_of": as_of}, headers=headers)
        ).status_code == 202

    kinds = [row.input.kind for row in await served.store.inbox_record(session)]
    assert kinds == ["message", "unclear", "unclear", "answer"]


# --- what can't be read ------------------------------------------------------

DEEP = b'{"text":' + b"[" * 100_000 + b"]" * 100_000 + b"}"

UNREADABLE = {
    "nothing in it": b" ",
    "cut off": b'{"text": "hi"',
    "two values": b'{"text": "hi"} {}',
    "single quotes": b"{'text': 'hi'}",
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "an overlong NUL": b'{"text": "\xc0\x80"}',
    "a raw NUL": b'{"text": "\x00"}',
    "nested too deep": DEEP,
    "a number of 5,000 digits": b'{"text": ' + b"9" * 5_000 + b"}",
}


@pytest.mark.parametrize("body", UNREADABLE.values(), ids=UNREADABLE)
async def test_what_is_no_json_is_400(served: Served, body: bytes) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)
    json_headers = {**headers, "content-type": "application/json"}

    for path in ("inputs", "consents/A1"):
        answer = await served.http.post(f"/v1/sessions/{session}/{path}", content=body, headers=json_headers)
        problem(answer, 400, "malformed")


#: what is JSON, and doesn't say something that can be acted on
WRONG: dict[str, Any] = {
    "no object": [],
    "null": None,
    "a string": "hi",
    "no text": {},
    "a number as text": {"text": 1},
    "true as text": {"text": True},
    "a list as text": {"text": ["hi"]},
    "an unknown field": {"text": "hi", "principal": "user:root"},
    "an empty unknown field": {"text": "hi", "": 1},
    "a position of one number": {"text": "hi", "as_of": "3"},
    "a position below zero": {"text": "hi", "as_of": "-1.0"},
    "a position of another script": {"text": "hi", "as_of": "\u0663.\u0661\u0667"},
    "a position with a line end": {"text": "hi", "as_of": "3.17\n"},
    "a position too far": {"text": "hi", "as_of": f"1.{10**18}"},
    "a position as a number": {"text": "hi", "as_of": 3.17},
    "an id with a blank": {"text": "hi", "client_send_ids": ["a b"]},
    "ids as a string": {"text": "hi", "client_send_ids": "a"},
    "too many ids": {"text": "hi", "client_send_ids": ["a"] * 17},
    "a long id": {"text": "hi", "client_send_ids": ["a" * 201]},
    "no such policy": {"text": "hi", "in_flight": "sometimes"},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
async def test_what_says_nothing_is_422_and_stores_nothing(served: Served, wrong: Any) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)

    answer = await served.http.post(f"/v1/sessions/{session}/inputs", json=wrong, headers=headers)

    assert problem(answer, 422, "invalid")["errors"]
    assert await served.store.inbox_record(session) == []


@pytest.mark.parametrize(
    "body", [b'{"text": "\\ud800"}', b'{"text": "\xed\xa0\x80"}', b'{"text": "hi", "\\udfff": 1}', b'{"\\ud800": 1}']
)
async def test_a_lone_surrogate_is_422(served: Served, body: bytes) -> None:
    """No UTF-8 can hold it, so it could be stored by no store and sent to no reader."""
    _, headers = await served.somebody()
    session = await served.session(headers)
    json_headers = {**headers, "content-type": "application/json"}

    answer = await served.http.post(f"/v1/sessions/{session}/inputs", content=body, headers=json_headers)

    problem(answer, 422, "invalid")


async def test_a_refusal_says_what_is_wrong_and_repeats_no_value(served: Served) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)
    wanted = {"txet": "s3cret", "client_send_ids": [5], "a/~b\n": "s3cret", "as_of": "s3cret"}

    answer = await served.http.post(
        f"/v1/sessions/{session}/inputs", json=wanted, headers={**headers, "Idempotency-Key": "s3cret with blanks"}
    )

    found = problem(answer, 422, "invalid")
    where = {(each["where"], each["pointer"]) for each in found["errors"]}
    assert where == {
        ("body", "/text"),
        ("body", "/txet"),
        ("body", "/client_send_ids/0"),
        ("body", "/a~1~0b⏎"),
        ("body", "/as_of"),
        ("header", "Idempotency-Key"),
    }
    assert "s3cret" not in answer.text
    assert "Traceback" not in answer.text
    assert answer.text.isascii()


async def test_a_refusal_is_short_however_much_is_wrong(served: Served) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)

    answer = await served.http.post(
        f"/v1/sessions/{session}/inputs", json={"x" * 500 + str(n): n for n in range(1_000)}, headers=headers
    )

    assert len(problem(answer, 422, "invalid")["errors"]) == wire.WRONG_FIELDS_MAX
    assert len(answer.content) < 10_000


@pytest.mark.parametrize(
    "query",
    [
        *("limit=0", "limit=-1", "limit=1001", "limit=x", "limit=" + "9" * 5_000, "limit=1e3", "limit="),
        *("before=-1", "before=" + "9" * 19, "before=%00", "before=1.5"),
    ],
)
async def test_a_window_has_limits(served: Served, query: str) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)

    problem(await served.http.get(f"/v1/sessions/{session}/history?{query}", headers=headers), 422, "invalid")


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/jsonx"},
        {"content-type": ""},
        {},
        {"content-type": "application/json", "content-encoding": "gzip"},
        {"content-type": "application/json", "content-encoding": "identity, br"},
    ],
)
async def test_a_body_of_another_type_is_415(served: Served, headers: Headers) -> None:
    _, auth = await served.somebody()

    answer = await served.http.post("/v1/sessions", content=b'{"title": "x"}', headers={**auth, **headers})

    problem(answer, 415, "wrong-type")


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON", "application/json ;x"])
async def test_json_may_be_named_in_any_way(served: Served, content_type: str) -> None:
    _, auth = await served.somebody()

    answer = await served.http.post(
        "/v1/sessions", content=b'{"title": "x"}', headers={**auth, "content-type": content_type}
    )

    assert answer.status_code == 201


async def test_a_body_past_the_limit_is_413_declared_or_not(served: Served) -> None:
    _, headers = await served.somebody()
    json_headers = {**headers, "content-type": "application/json"}

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b" " * 32 * 1024

    for content in (b" " * (2 << 20), chunks()):
        answer = await served.http.post("/v1/sessions", content=content, headers=json_headers)
        problem(answer, 413, "too-large")
        assert answer.headers["connection"] == "close"
    under = b'{"title": "x"}' + b" " * ((1 << 20) - 14)
    assert (await served.http.post("/v1/sessions", content=under, headers=json_headers)).status_code == 201


@pytest.mark.parametrize("head", [b"x: " + b"y" * 70_000, b"GET /" + b"y" * 70_000, b"x: y\r\n" * 12_000])
async def test_a_head_without_an_end_is_cut_off(served: Served, head: bytes) -> None:
    """One endless header, one endless address, or headers without number: nothing else bounds their memory."""
    first = b"" if head.startswith(b"GET") else b"GET /healthz HTTP/1.1\r\nhost: x\r\n"

    answer = await exchange(served.address, first, head)

    assert (answer.status, answer.headers["connection"]) == (400, "close")


async def test_requests_of_one_connection_are_bounded_one_by_one(served: Served) -> None:
    _, auth = await served.somebody()
    request = f"GET /v1/sessions HTTP/1.1\r\nhost: x\r\nauthorization: {auth['Authorization']}\r\n"
    padded = request.encode() + b"x: " + b"y" * 50_000 + b"\r\n\r\n"
    reader, writer = await asyncio.open_connection(*served.address)

    writer.write(padded * 3)
    answers = [await read_answer(reader) for _ in range(3)]
    writer.close()

    assert [answer.status for answer in answers] == [200] * 3


# --- where nothing is --------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/v1", "/v2/sessions", "/v1/sessions/", "/docs", "/redoc", "/v1/hooks", "/%00"])
async def test_an_unknown_address_is_404_and_never_a_redirect(served: Served, path: str) -> None:
    _, headers = await served.somebody()

    for method in ("GET", "POST"):
        problem(await served.http.request(method, path, headers=headers), 404)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("DELETE", "/v1/sessions", "GET, POST"),
        ("PUT", "/v1/sessions/x/consents/A1", "GET, POST"),
        ("GET", "/v1/sessions/x/inputs", "POST"),
        ("HEAD", "/v1/sessions/x/history", "GET"),
        ("POST", "/v1/sessions/x/stream", "GET"),
        ("POST", "/healthz", "GET"),
    ],
)
async def test_a_method_that_isnt_there_is_405_and_says_which_are(
    served: Served, method: str, path: str, allow: str
) -> None:
    answer = await served.http.request(method, path)

    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("id_", ["%00", "%FF%FE", "%ED%A0%80", "%E2%80%AE", "a%20b", "x" * 201, "..", "%0d%0a", "'--"])
async def test_odd_bytes_in_an_address_are_404(served: Served, id_: str) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)

    for path in (f"/v1/sessions/{id_}/history", f"/v1/sessions/{session}/consents/{id_}"):
        request = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: {headers['Authorization']}\r\n\r\n"
        answer = await exchange(served.address, request.encode("latin-1"))
        assert (answer.status, json.loads(answer.body)["status"]) == (404, 404)


async def test_the_description_names_every_call_and_loads_nothing(served: Served) -> None:
    found = (await served.http.get("/openapi.json")).json()

    calls = {(method.upper(), path) for path, item in found["paths"].items() for method in item}
    assert calls == {
        ("POST", "/v1/hooks/{source}"),
        ("POST", "/v1/sessions"),
        ("GET", "/v1/sessions"),
        ("GET", "/v1/sessions/{session}"),
        ("POST", "/v1/sessions/{session}/inputs"),
        ("PATCH", "/v1/sessions/{session}"),
        ("DELETE", "/v1/sessions/{session}"),
        ("POST", "/v1/sessions/{session}/close"),
        ("POST", "/v1/sessions/{session}/stop"),
        ("GET", "/v1/sessions/{session}/effects"),
        ("GET", "/v1/sessions/{session}/queue"),
        ("DELETE", "/v1/sessions/{session}/queue/{n}"),
        ("POST", "/v1/sessions/{session}/uploads"),
        ("DELETE", "/v1/sessions/{session}/uploads/{upload}"),
        ("GET", "/v1/sessions/{session}/attachments/{attachment}"),
        ("GET", "/v1/sessions/{session}/participants"),
        ("PUT", "/v1/sessions/{session}/participants/{person}"),
        ("DELETE", "/v1/sessions/{session}/participants/{person}"),
        ("GET", "/v1/sessions/{session}/history"),
        ("GET", "/v1/sessions/{session}/stream"),
        ("GET", "/v1/sessions/{session}/consents"),
        ("GET", "/v1/sessions/{session}/consents/{consent}"),
        ("POST", "/v1/sessions/{session}/consents/{consent}"),
        ("GET", "/v1/sessions/{session}/journal"),
        ("GET", "/v1/sessions/{session}/status"),
        ("GET", "/v1/sessions/{session}/conflict"),
        ("POST", "/v1/sessions/{session}/conflict"),
        ("GET", "/v1/door"),
        ("GET", "/healthz"),
        ("GET", "/readyz"),
    }
    operations = [operation for item in found["paths"].values() for operation in item.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert set(_refs(found)) <= set(found["components"]["schemas"])
    assert "HTTPValidationError" not in found["components"]["schemas"]


def _refs(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"].removeprefix("#/components/schemas/")] if "$ref" in value else []
        return own + [ref for each in value.values() for ref in _refs(each)]
    return [ref for each in value for ref in _refs(each)] if isinstance(value, list) else []


def test_the_shapes_say_what_readers_get() -> None:
    """A field that `core.view` adds is shown at once, and here somebody notices that OpenAPI lacks it."""
    standing = Standing(question("A1", "user:alice"), ConsentState.OPEN, Position(1, 1))
    shown = view.standing(standing)

    def missing(model: type[wire.Shown], value: dict[str, Any]) -> set[str]:
        return set(value) ^ set(model.model_fields)

    assert missing(wire.QuestionView, shown) == set()
    assert missing(wire.StepView, shown["steps"][0]) == set()
    assert missing(wire.ArgumentView, shown["steps"][0]["arguments"][0]) == set()
    assert missing(wire.OriginView, shown["origin"]) == set()


# --- questions and answers ---------------------------------------------------


async def test_questions_are_listed_in_order_and_the_open_ones_alone(served: Served) -> None:
    alice, headers = await served.somebody()
    session, consent, owner = await served.asked(alice, headers)
    address = f"/v1/sessions/{session}/consents"
    await served.http.post(f"{address}/A1", json={"verdict": "no", "digest": consent.digest}, headers=headers)

    before = (await served.http.get(f"{address}?open=true", headers=headers)).json()["consents"]
    await owner.write(ConsentDeclinedBody("A1", 2, alice, 5))
    after = (await served.http.get(f"{address}?open=true", headers=headers)).json()["consents"]
    [every] = (await served.http.get(address, headers=headers)).json()["consents"]
    one = (await served.http.get(f"{address}/A1", headers=headers)).json()

    assert [each["id"] for each in before] == ["A1"]
    assert after == []
    assert (one["state"], one["answered_by"], one["position"]) == ("declined", alice, "1.1")
    assert one == every
    assert one["steps"][0]["arguments"][0]["was"] == "12"
    problem(await served.http.get(f"{address}/A2", headers=headers), 404, "not-found")


async def _settle(served: Served, session: str, owner: Owner, hints: Hints) -> None:
    """Be the owner: settle each answer as it comes."""
    hints.owner = owner
    settled, done = 0, False
    while True:
        await owner.hinted.wait()
        owner.hinted.clear()
        for entry in await served.store.inbox(session, after=settled, limit=100):
            settled = entry.n
            if entry.input.answer is None:
                continue
            by = str(entry.input.principal)
            body = AnswerRefusedBody(entry.n, by, "it was answered before", "A1")
            first = ConsentApprovedBody("A1", entry.n, by, entry.received_at_ms, "api token", entry.input.answer.steps)
            await owner.write(body if done else first)
            done = True


@pytest.mark.rule("B7", "B8", "K12")
async def test_an_answer_is_stored_and_its_settling_row_comes_back(served: Served) -> None:
    """The first yes is approved, a second one is told that it came later, a repeat gets the first one's row."""
    alice, headers = await served.somebody()
    session, consent, owner = await served.asked(alice, headers, steps=3)
    address = f"/v1/sessions/{session}/consents/A1"
    yes = {"verdict": "yes", "digest": consent.digest, "steps": [0, 2]}
    keyed = {**headers, "Idempotency-Key": "card-1"}
    settling = asyncio.create_task(_settle(served, session, owner, served.hints))

    first = await served.http.post(address, json=yes, headers=keyed)
    repeat = await served.http.post(address, json=yes, headers=keyed)
    second = await served.http.post(address, json=yes, headers=headers)
    settling.cancel()

    assert (first.status_code, first.json()["settled"]["kind"]) == (200, "consent.approved")
    assert first.json()["settled"]["body"]["ticks"] == [0, 2]
    assert (repeat.status_code, repeat.json()) == (200, first.json())
    assert (second.status_code, second.json()["settled"]["kind"]) == (200, "answer.refused")
    assert [first.json()["input"], second.json()["input"]] == [2, 3]


async def test_an_answer_that_nobody_settles_yet_is_202(served: Served) -> None:
    alice, headers = await served.somebody()
    session, consent, _ = await served.asked(alice, headers)

    answer = await served.http.post(
        f"/v1/sessions/{session}/consents/A1",
        json={"verdict": "no", "digest": consent.digest, "reason": "too late\0"},
        headers=headers,
    )

    assert (answer.status_code, answer.json()) == (202, {"input": 2, "settled": None})
    stored = (await served.store.inbox_record(session))[1].input.answer
    assert stored is not None
    assert (stored.yes, stored.reason) == (False, "too late\0")


@pytest.mark.rule("B7", "K12")
async def test_only_an_approvers_answer_to_these_steps_is_taken(served: Served) -> None:
    """Another digest, another approver, steps that aren't there: 409, and nothing in the session."""
    alice, headers = await served.somebody()
    session, consent, _ = await served.asked(alice, headers)
    for_bob, asked_bob, _ = await served.asked("user:bob", headers)
    ops = await served.auth("operator:ops")
    yes = {"verdict": "yes", "digest": consent.digest}
    tries = [
        (session, headers, {**yes, "digest": "sha256:" + "0" * 64}),
        (session, headers, {**yes, "digest": ""}),
        (session, headers, {**yes, "steps": []}),
        (session, headers, {**yes, "steps": [1]}),
        (session, ops, yes),
        (for_bob, headers, {**yes, "digest": asked_bob.digest}),
    ]

    for where, who, answer in tries:
        problem(
            await served.http.post(f"/v1/sessions/{where}/consents/A1", json=answer, headers=who), 409, "answer-refused"
        )
    problem(await served.http.post(f"/v1/sessions/{session}/consents/A9", json=yes, headers=headers), 404, "not-found")

    assert len(await served.store.inbox_record(session)) == 1
    assert len(await served.store.inbox_record(for_bob)) == 1
    assert [row.note.kind for row in await served.store.door(session=for_bob) if row.note.session] == ["input.rejected"]


WRONG_ANSWERS: dict[str, Any] = {
    "no verdict": {"digest": "d"},
    "a verdict that is neither": {"verdict": "maybe", "digest": "d"},
    "a verdict in capitals": {"verdict": "YES", "digest": "d"},
    "a verdict as a truth": {"verdict": True, "digest": "d"},
    "no digest": {"verdict": "yes"},
    "a step as text": {"verdict": "yes", "digest": "d", "steps": ["0"]},
    "a step as a truth": {"verdict": "yes", "digest": "d", "steps": [True]},
    "a step below zero": {"verdict": "yes", "digest": "d", "steps": [-1]},
    "a step of 4,000 digits": {"verdict": "yes", "digest": "d", "steps": [10**4_000]},
    "a long reason": {"verdict": "no", "digest": "d", "reason": "x" * 4_001},
    "who says it": {"verdict": "yes", "digest": "d", "by": "user:alice"},
}


@pytest.mark.parametrize("wrong", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS)
async def test_an_answer_says_exactly_what_it_means(served: Served, wrong: Any) -> None:
    alice, headers = await served.somebody()
    session, _, _ = await served.asked(alice, headers)

    problem(await served.http.post(f"/v1/sessions/{session}/consents/A1", json=wrong, headers=headers), 422, "invalid")

    assert len(await served.store.inbox_record(session)) == 1


# --- history -----------------------------------------------------------------


async def test_history_is_the_newest_rows_and_pages_back(served: Served) -> None:
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says(*(f"row {n}" for n in range(1, 8)))
    address = f"/v1/sessions/{session}/history"

    newest = (await served.http.get(f"{address}?limit=3", headers=headers)).json()
    older = (await served.http.get(f"{address}?limit=3&before=5", headers=headers)).json()
    every = (await served.http.get(address, headers=headers)).json()

    assert [row["position"] for row in newest["rows"]] == ["1.5", "1.6", "1.7"]
    assert newest["token"] == "1.7"
    assert [row["position"] for row in older["rows"]] == ["1.2", "1.3", "1.4"]
    assert older["token"] is None
    assert len(every["rows"]) == 7


@pytest.mark.rule("K3")
async def test_history_shows_what_is_accepted_and_not_yet_stored(served: Served) -> None:
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("stored")
    owner.publish(said("accepted"), turn="T1")

    page = (await served.http.get(f"/v1/sessions/{session}/history", headers=headers)).json()

    assert [row["body"]["parts"][0]["text"] for row in page["rows"]] == ["stored", "accepted"]
    assert page["token"] == "1.2"


# --- faults of ours ----------------------------------------------------------


@pytest.mark.rule("H34")
async def test_a_store_that_cannot_now_is_503_and_says_when_to_come_back(troubled: tuple[Served, Troubled]) -> None:
    served, store = troubled
    _, headers = await served.somebody()
    session, _ = await served.owned(headers)
    calls: list[tuple[str, str, str, Any]] = [
        ("put", "POST", f"/v1/sessions/{session}/inputs", {"text": "hi"}),
        ("last_rows", "GET", f"/v1/sessions/{session}/history", None),
        ("rows", "GET", f"/v1/sessions/{session}/stream", None),
        ("token", "GET", "/v1/sessions", None),
        ("healthy", "GET", "/readyz", None),
    ]

    for method, verb, path, body in calls:
        store.trouble = {method: StoreUnavailable("database is locked: /var/lib/secret.db")}
        answer = await served.http.request(verb, path, json=body, headers=headers)
        problem(answer, 503, "busy")
        assert int(answer.headers["retry-after"]) > 0
        assert "secret" not in answer.text


@pytest.mark.rule("H34", "X13")
async def test_a_history_that_cannot_be_read_is_503_and_no_part_of_one(troubled: tuple[Served, Troubled]) -> None:
    """A fixed text, and no token, so that a page keeps what it shows. Later what is pending is there, once, and as
    any other row: with no key of ours and no flag."""
    served, store = troubled
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("stored")
    [pending] = owner.publish(said("accepted"), turn="T1")
    address = f"/v1/sessions/{session}/history"

    store.trouble = {"last_rows": StoreUnavailable("database is locked")}
    refused = await served.http.get(address, headers=headers)
    store.trouble = {}
    page = await served.http.get(address, headers=headers)

    problem(refused, 503, "busy")
    assert set(refused.json()) == {"type", "title", "status", "detail"}
    assert refused.json()["detail"] == "Nothing happened. The same request may succeed later."
    assert [row["position"] for row in page.json()["rows"]] == ["1.1", "1.2"]
    assert page.json()["token"] == "1.2"
    assert pending.commit_key not in page.text
    assert set(page.json()["rows"][0]) == set(page.json()["rows"][1])
    assert served.feeds.pending(session) == (pending,)


async def test_a_commit_of_unknown_outcome_is_503_and_a_full_inbox_429(troubled: tuple[Served, Troubled]) -> None:
    served, store = troubled
    _, headers = await served.somebody()
    address = f"/v1/sessions/{await served.session(headers)}/inputs"

    store.trouble = {"put": CommitUnknown("COMMIT failed")}
    unknown = await served.http.post(address, json={"text": "hi"}, headers=headers)
    store.trouble = {"put": InboxFull("ses_1", 1_000)}
    full = await served.http.post(address, json={"text": "hi"}, headers=headers)

    problem(unknown, 503, "outcome-unknown")
    problem(full, 429, "inbox-full")
    assert "retry-after" in unknown.headers
    assert "retry-after" in full.headers


async def test_what_nobody_foresaw_is_500_logged_once_and_not_told(
    troubled: tuple[Served, Troubled], caplog: pytest.LogCaptureFixture
) -> None:
    served, store = troubled
    _, headers = await served.somebody()
    store.trouble = {"sessions": OnPurpose("the secret is 42")}

    with caplog.at_level(logging.ERROR):
        answer = await served.http.get("/v1/sessions", headers=headers)

    problem(answer, 500, "fault")
    assert "42" not in answer.text
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == ["request failed"]
    assert (await served.http.get("/healthz")).json() == {"status": "ok"}


async def test_health_needs_no_token(served: Served) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await served.http.get(path)).json() == {"status": "ok"}


# --- whatever is sent --------------------------------------------------------

FUZZ = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)

TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    ["text", "title", "as_of", "client_send_ids", "verdict", "digest", "reason", "steps", "principal", "attachments"]
)
PLAUSIBLE = st.sampled_from(["yes", "no", "1.1", "0.0", "", "hello", [], [0], ["a"], 0, -1, True, None, 10**30])
BODIES = VALUES | st.dictionaries(FIELDS, PLAUSIBLE | VALUES, max_size=5)
HEADER_VALUES = st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40).map(
    lambda text: text.strip().replace("\x7f", "").encode("latin-1")
)


@pytest.fixture(scope="module")
async def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Served, str, Headers]]:
    async with served_on("sqlite", tmp_path_factory.mktemp("fuzz")) as one:
        alice, headers = await one.somebody()
        session, _, _ = await one.asked(alice, headers)
        yield one, session, headers


def _check(answer: httpx2.Response) -> None:
    assert answer.status_code < 500, (answer.status_code, answer.content)
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["status"] == answer.status_code


@FUZZ
@given(body=BODIES, path=st.sampled_from(["", "/{s}/inputs", "/{s}/consents/A1", "/{s}/consents/A7"]))
async def test_no_json_is_a_fault(fuzzed: tuple[Served, str, Headers], body: Any, path: str) -> None:
    served, session, headers = fuzzed
    content = json.dumps(body).encode()

    _check(
        await served.http.post(
            f"/v1/sessions{path.format(s=session)}",
            content=content,
            headers={**headers, "content-type": "application/json"},
        )
    )


@FUZZ
@given(body=st.binary(max_size=200) | st.binary(max_size=40).map(lambda junk: b'{"text": "' + junk + b'"}'))
async def test_no_bytes_are_a_fault(fuzzed: tuple[Served, str, Headers], body: bytes) -> None:
    served, session, headers = fuzzed

    _check(
        await served.http.post(
            f"/v1/sessions/{session}/inputs", content=body, headers={**headers, "content-type": "application/json"}
        )
    )


@FUZZ
@given(
    name=st.sampled_from(
        [
            *("authorization", "idempotency-key", "content-type", "content-encoding", "content-length"),
            *("transfer-encoding", "expect", "host", "x-forwarded-for", "connection", "upgrade", "last-event-id"),
        ]
    ),
    value=HEADER_VALUES,
    signed_in=st.booleans(),
)
async def test_no_header_is_a_fault(
    fuzzed: tuple[Served, str, Headers], name: str, value: bytes, signed_in: bool
) -> None:
    """Sent as bytes, since a client would refuse some of these itself; the server may end the connection."""
    served, session, headers = fuzzed
    lines = [f"POST /v1/sessions/{session}/inputs HTTP/1.1", "host: x", "content-type: application/json"]
    lines += ["content-length: 14"] if name != "content-length" else []
    lines += [f"authorization: {headers['Authorization']}"] if signed_in and name != "authorization" else []
    request = "\r\n".join(lines).encode() + b"\r\n" + name.encode() + b": " + value + b"\r\n\r\n" + b'{"text": "hi"}'

    try:
        answer = await asyncio.wait_for(exchange(served.address, request + b"\r\n\r\n"), 0.5)
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
        return  # it waits for more of a body, or was cut off
    assert answer.status < 500


@FUZZ
@given(path=st.binary(max_size=30), tail=st.sampled_from(["", "/history", "/inputs", "/stream", "/consents/A1"]))
async def test_no_address_is_a_fault(fuzzed: tuple[Served, str, Headers], path: bytes, tail: str) -> None:
    served, _, headers = fuzzed
    quoted = "".join(f"%{byte:02X}" for byte in path)

    _check(await served.http.get(f"/v1/sessions/{quoted}{tail}", headers=headers))


@FUZZ
@given(query=st.dictionaries(st.sampled_from(["limit", "before", "after", "open", "session"]), TEXTS, max_size=3))
async def test_no_query_is_a_fault(fuzzed: tuple[Served, str, Headers], query: dict[str, str]) -> None:
    served, session, headers = fuzzed
    ops = await served.auth("operator:ops")
    clean = {name: value.encode("utf-8", "replace").decode() for name, value in query.items()}

    for path in ("/v1/sessions", f"/v1/sessions/{session}/history", f"/v1/sessions/{session}/consents"):
        _check(await served.http.get(path, params=clean, headers=headers))
    for path in (f"/v1/sessions/{session}/journal", "/v1/door"):
        _check(await served.http.get(path, params=clean, headers=ops))
