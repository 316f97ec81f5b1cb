"""Files over a real connection: sent ahead, taken by a message, read by who may see the session, and by nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sayso.core.attachment import digest_of
from sayso.core.errors import CommitUnknown, StoreUnavailable
from sayso.core.rows import InputBody
from sayso.runtime.limits import Limits
from sayso.server.files import READING_MAX
from sayso.storage.shape import PIECE_BYTES
from sayso.testing.stores import GatedStore, Point
from tests.e2e.serving import Headers, Served, Troubled, exchange, opened, problem, serving
from tests.e2e.whole import Whole, whole

LIMITS = Limits(
    upload_bytes=3 * PIECE_BYTES,
    uploads_staged=3,
    uploads_staged_bytes=4 * PIECE_BYTES,
    attachments=3,
    settle_wait_ms=200,
)
PNG = {"content-type": "image/png"}
PHOTO = b"\x89PNG photo"


@pytest.fixture(scope="module", params=["memory", "sqlite"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Whole]:
    async with whole(request.param, tmp_path_factory.mktemp("files"), limits=LIMITS) as one:
        yield one


async def sent(
    served: Whole, session: str, who: Headers, data: bytes = PHOTO, *, filename: str = "photo.png", **headers: str
) -> str:
    """Send a file ahead, and return the id of the upload."""
    answer = await served.http.post(
        f"{session}/uploads", params={"filename": filename}, content=data, headers={**PNG, **who, **headers}
    )
    assert answer.status_code == 201, answer.text
    upload: str = answer.json()["upload"]
    return upload


async def post(served: Whole, session: str, who: Headers, *uploads: str, text: str = "see here", **more: Any) -> Any:
    """Post a message that names uploads."""
    body = {"text": text, "attachments": list(uploads)}
    return await served.http.post(f"{session}/inputs", json=body, headers={**who, **more})


async def row(served: Whole, session: str, who: Headers, kind: str, **has: Any) -> dict[str, Any]:
    """Return the body of the first row of a kind that has these values, once it is there."""
    async with asyncio.timeout(10):
        while True:
            for each in (await served.http.get(f"{session}/history", headers=who)).json()["rows"]:
                body: dict[str, Any] = each["body"]
                if each["kind"] == kind and has.items() <= body.items():
                    return body


async def shown(served: Whole, session: str, who: Headers, *, n: int) -> dict[str, Any]:
    """Return the body of the row of input `n`, once it is there."""
    return await row(served, session, who, "input", input=n)


async def attached(
    served: Whole, session: str, who: Headers, data: bytes = PHOTO, *, filename: str = "photo.png", **headers: str
) -> str:
    """Post a message with a file, and return the address of the file once a row shows it."""
    answer = await post(served, session, who, await sent(served, session, who, data, filename=filename, **headers))
    assert answer.status_code == 202, answer.text
    body = await shown(served, session, who, n=answer.json()["input"])
    return f"{session}/attachments/{body['attachments'][0]['id']}"


# --- sent ahead --------------------------------------------------------------


async def test_an_upload_is_told_back_under_an_id_that_nobody_guesses(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)

    answer = await served.http.post(
        f"{session}/uploads?filename=../r%C3%A9sum%C3%A9.pdf", content=b"%PDF", headers={**PNG, **hers}
    )

    assert answer.status_code == 201
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["cache-control"] == "no-store"
    told = answer.json()
    assert len(told["upload"]) > 40
    assert 0 < told.pop("until_ms") - served.store.now_ms() <= LIMITS.upload_ms
    assert told.pop("upload") != await sent(served, session, hers)
    assert told == {"filename": "résumé.pdf", "media_type": "image/png", "size_bytes": 4}


@pytest.mark.parametrize(
    ("headers", "filename"),
    [
        ({"content-disposition": 'attachment; filename="plan.png"'}, "plan.png"),
        ({"content-disposition": "attachment; filename=plan.png"}, "plan.png"),
        ({"content-disposition": "attachment; filename*=UTF-8''%e2%82%ac%20rates.txt"}, "€ rates.txt"),
        ({"content-disposition": "attachment; filename=\"e.txt\"; filename*=UTF-8''%c3%a9.txt"}, "é.txt"),
        ({"content-disposition": 'attachment; filename="é.txt"'.encode().decode("latin-1")}, "é.txt"),
        ({"content-disposition": 'attachment; filename="C:\\\\secret\\\\plan.png"'}, "plan.png"),
        ({"content-disposition": "attachment; filename*=no-such-charset''x%41.txt"}, "xA.txt"),
        ({"content-disposition": "attachment; filename*=UTF-8''x%ff.txt"}, "x\ufffd.txt"),
        ({"content-disposition": "attachment"}, "file"),
        ({"content-disposition": ';=";"'}, "file"),
        ({}, "file"),
    ],
)
async def test_a_header_may_say_what_a_file_is_called(served: Whole, headers: Headers, filename: str) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    raw = [(name.encode(), value.encode("latin-1")) for name, value in {**PNG, **hers, **headers}.items()]

    answer = await served.http.post(f"{session}/uploads", content=b"x", headers=raw)

    assert (answer.status_code, answer.json()["filename"]) == (201, filename)


@pytest.mark.parametrize(
    ("sent_as", "kept_as"),
    [
        ("Text/Plain; charset=latin-1", "text/plain"),
        ("image/svg+xml", "image/svg+xml"),
        ("nonsense", "application/octet-stream"),
        ("image/*", "application/octet-stream"),
        (None, "application/octet-stream"),
    ],
)
async def test_a_file_is_what_its_sender_says_or_octets(served: Whole, sent_as: str | None, kept_as: str) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    headers = hers if sent_as is None else {**hers, "content-type": sent_as}

    answer = await served.http.post(f"{session}/uploads", content=b"x", headers=headers)

    assert (answer.status_code, answer.json()["media_type"]) == (201, kept_as)


@pytest.mark.parametrize("form", ["multipart/form-data; boundary=x", "application/x-www-form-urlencoded"])
async def test_a_form_is_415_and_says_what_is_wanted(served: Whole, form: str) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)

    answer = await served.http.post(f"{session}/uploads", content=b"x=1", headers={**hers, "content-type": form})

    assert "the file itself" in problem(answer, 415, "wrong-type")["detail"]


async def test_an_encoded_file_is_415(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)

    answer = await served.http.post(
        f"{session}/uploads", content=b"x", headers={**hers, **PNG, "content-encoding": "gzip"}
    )

    problem(answer, 415, "wrong-type")


async def test_an_empty_file_is_422(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)

    problem(await served.http.post(f"{session}/uploads", content=b"", headers={**hers, **PNG}), 422, "invalid")


async def test_a_file_past_the_limit_is_413_declared_or_not_and_nothing_of_it_is_kept(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    most = LIMITS.upload_bytes

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(most // 65_536 + 64):
            yield b" " * 65_536

    for content in (b"x" * (most + 1), chunks()):
        answer = await served.http.post(f"{session}/uploads", content=content, headers={**hers, **PNG})
        problem(answer, 413, "too-large")
        assert answer.headers["connection"] == "close"
    await sent(served, session, hers, b"x" * most)


async def test_a_file_that_was_cut_short_is_not_kept(served: Whole) -> None:
    """The connection ends before as much has come as was declared."""
    _, hers = await served.somebody()
    session = await served.session(hers)
    head = f"POST {session}/uploads HTTP/1.1\r\nhost: x\r\nauthorization: {hers['Authorization']}\r\n"
    _, writer = await asyncio.open_connection(*served.address)
    writer.write(head.encode() + b"content-length: 1000\r\n\r\nhalf of it")
    await writer.drain()
    writer.close()
    await writer.wait_closed()

    uploads = [await sent(served, session, hers) for _ in range(LIMITS.uploads_staged)]

    assert len(set(uploads)) == LIMITS.uploads_staged


async def test_too_many_files_wait_is_429_and_says_when_to_come_back(served: Whole) -> None:
    """In one session, of one person; others and other sessions have their own."""
    session, hers, bobs = await served.shared()
    uploads = [await sent(served, session, hers) for _ in range(LIMITS.uploads_staged)]

    answer = await served.http.post(f"{session}/uploads", content=b"x", headers={**hers, **PNG})

    problem(answer, 429, "uploads-full")
    assert int(answer.headers["retry-after"]) > 0
    await sent(served, session, bobs)
    await sent(served, await served.session(hers), hers)
    assert (await served.http.delete(f"{session}/uploads/{uploads[0]}", headers=hers)).status_code == 204
    await sent(served, session, hers)


async def test_too_many_bytes_wait_is_429(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    await sent(served, session, hers, b"x" * LIMITS.upload_bytes)

    too_many = b"y" * (LIMITS.uploads_staged_bytes - LIMITS.upload_bytes + 1)
    answer = await served.http.post(f"{session}/uploads", content=too_many, headers={**hers, **PNG})

    problem(answer, 429, "uploads-full")
    await sent(served, session, hers, too_many[1:])


async def test_one_person_sends_only_so_many_files_at_once(served: Whole) -> None:
    """Each is held until it is stored; who opens many and sends none takes no memory from others."""
    _, hers = await served.somebody()
    _, his = await served.somebody()
    session, other = await served.session(hers), await served.session(his)
    head = f"POST {session}/uploads HTTP/1.1\r\nhost: x\r\nauthorization: {hers['Authorization']}\r\n"
    half = head.encode() + b"content-length: 10\r\nexpect: 100-continue\r\n\r\n"
    open_ones = [await asyncio.open_connection(*served.address) for _ in range(READING_MAX)]
    for reader, writer in open_ones:
        writer.write(half)
        assert b"100 Continue" in await reader.readuntil(b"\r\n\r\n")

    problem(await served.http.post(f"{session}/uploads", content=b"x", headers={**hers, **PNG}), 429, "uploads-full")
    await sent(served, other, his)

    for reader, writer in open_ones:
        writer.write(b"0123456789")
        status = await reader.readuntil(b"\r\n")
        assert status.split()[1] in (b"201", b"429")  # three wait, the fourth is one too many
        writer.close()
    assert (await post(served, session, hers)).status_code == 202


async def test_who_sent_a_file_may_take_it_back_once(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    upload = await sent(served, session, hers)
    address = f"{session}/uploads/{upload}"

    problem(await served.http.delete(address, headers=bobs), 404, "not-found")
    answer = await served.http.delete(address, headers=hers)
    assert (answer.status_code, answer.content) == (204, b"")
    problem(await served.http.delete(address, headers=hers), 404, "not-found")
    problem(await post(served, session, hers, upload), 422, "no-upload")


# --- taken by a message ------------------------------------------------------


@pytest.mark.rule("K29")
async def test_a_message_shows_its_files_and_who_may_see_the_session_reads_them(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    first = await sent(served, session, hers, PHOTO, filename="photo.png")
    second = await sent(served, session, hers, b"a plan", filename="plan.txt", **{"content-type": "text/plain"})

    answer = await post(served, session, hers, first, second)

    body = await shown(served, session, bobs, n=answer.json()["input"])
    assert body["attachments"] == [
        {"id": "n2.1", "filename": "photo.png", "media_type": "image/png", "size_bytes": len(PHOTO)},
        {"id": "n2.2", "filename": "plan.txt", "media_type": "text/plain", "size_bytes": 6},
    ]
    assert "sha256" not in str(body)
    for who in (hers, bobs, await served.auth("operator:ops")):
        assert (await served.http.get(f"{session}/attachments/n2.1", headers=who)).content == PHOTO
        assert (await served.http.get(f"{session}/attachments/n2.2", headers=who)).content == b"a plan"


@pytest.mark.rule("K29")
async def test_a_participant_who_knows_an_upload_may_name_it_and_speaks_for_herself(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    upload = await sent(served, session, hers)

    answer = await post(served, session, bobs, upload)

    body = await shown(served, session, hers, n=answer.json()["input"])
    [owner, bob] = (await served.http.get(f"{session}/participants", headers=hers)).json()["participants"]
    assert f"user:{body['sender']['name']}" == bob["principal"]
    [file] = body["attachments"]
    stored = await served.store.attachment(session.rpartition("/")[2], file["id"])
    assert stored is not None
    assert stored.uploader == owner["principal"]


@pytest.mark.rule("K29", "X7")
async def test_what_a_message_names_and_is_not_there_refuses_it_whole(served: Whole) -> None:
    session, hers, _ = await served.shared()
    good, used, elsewhere = (
        await sent(served, session, hers),
        await sent(served, session, hers),
        await sent(served, await served.session(hers), hers),
    )
    assert (await post(served, session, hers, used)).status_code == 202
    before = len(await served.store.inbox_record(session.rpartition("/")[2]))

    for named in (used, elsewhere, "upl_nobody_knows"):
        told = problem(await post(served, session, hers, good, named), 422, "no-upload")
        assert told["detail"] == f"no such upload: {named}"
    problem(await post(served, session, hers, good, good), 422, "invalid")
    problem(await post(served, session, hers, *(f"upl_{n}" for n in range(4))), 422, "invalid")
    problem(await post(served, session, hers, *(f"upl_{n}" for n in range(200))), 422, "invalid")
    problem(await post(served, session, hers, good, text="x" * (LIMITS.message_bytes + 1)), 422, "invalid")

    assert len(await served.store.inbox_record(session.rpartition("/")[2])) == before
    assert (await post(served, session, hers, good)).status_code == 202


async def test_an_upload_whose_time_is_over_is_not_there(tmp_path: Path) -> None:
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock) as served:
        _, hers = await served.somebody()
        session = f"/v1/sessions/{await served.session(hers)}"
        upload = (await served.http.post(f"{session}/uploads", content=b"x", headers={**hers, **PNG})).json()["upload"]
        clock.ahead_ms += 3_600_000

        body = {"text": "see here", "attachments": [upload]}
        problem(await served.http.post(f"{session}/inputs", json=body, headers=hers), 422, "no-upload")
        problem(await served.http.delete(f"{session}/uploads/{upload}", headers=hers), 404, "not-found")


@pytest.mark.rule("A5", "K27", "X7")
async def test_a_repeat_under_its_key_is_the_first_though_the_upload_is_used_up(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    upload, other = await sent(served, session, hers), await sent(served, session, hers)
    key = {"idempotency-key": "k1"}

    first = await post(served, session, hers, upload, **key)
    again = await post(served, session, hers, upload, **key)

    assert (first.json()["outcome"], again.json()["outcome"]) == ("stored", "duplicate")
    assert again.json()["input"] == first.json()["input"]
    problem(await post(served, session, hers, other, **key), 422, "key-reused")
    problem(await post(served, session, hers, **key), 422, "key-reused")
    assert (await post(served, session, hers, other)).status_code == 202


async def test_a_message_may_be_a_file_alone(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)

    answer = await post(served, session, hers, await sent(served, session, hers), text=" ")

    body = await shown(served, session, hers, n=answer.json()["input"])
    assert body["parts"] == []
    assert [file["filename"] for file in body["attachments"]] == ["photo.png"]
    problem(await post(served, session, hers, text=" "), 422, "invalid")


async def test_the_model_is_told_of_a_file_and_not_of_its_bytes(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)

    await attached(served, session, hers, b"what it holds", filename="plan.png")

    await row(served, session, hers, "model.said")
    [asked] = [each for each in served.model.requests if session.endswith(each.session)]
    words, file = asked.last
    assert words.text == "see here"
    assert "‹plan.png› (image/png, 13 bytes)" in file.text
    assert not any("what it holds" in message.text for message in asked.last)


# --- who may -----------------------------------------------------------------


@pytest.mark.rule("A1", "X32")
async def test_what_another_person_asks_about_a_file_says_what_it_says_of_none(served: Whole) -> None:
    _, hers = await served.somebody()
    _, eves = await served.somebody()
    session = await served.session(hers)
    file = (await attached(served, session, hers)).rpartition("/")[2]
    upload = await sent(served, session, hers)

    async def ask(at: str) -> list[tuple[int, str]]:
        answers = [
            await served.http.post(f"{at}/uploads", content=b"x", headers={**eves, **PNG}),
            await served.http.delete(f"{at}/uploads/{upload}", headers=eves),
            await served.http.get(f"{at}/attachments/{file}", headers=eves),
            await served.http.post(f"{at}/inputs", json={"text": "hi", "attachments": [upload]}, headers=eves),
        ]
        return [(each.status_code, each.text) for each in answers]

    assert await ask(session) == await ask("/v1/sessions/ses_none")
    assert {status for status, _ in await ask(session)} == {404}
    assert (await served.http.head(f"{session}/attachments/{file}", headers=eves)).status_code == 404
    assert (await post(served, session, hers, upload)).status_code == 202


async def test_a_viewer_reads_files_and_sends_none(served: Whole) -> None:
    session, hers, veras = await served.shared("viewer")
    address = await attached(served, session, hers)
    upload = await sent(served, session, hers)

    assert (await served.http.get(address, headers=veras)).content == PHOTO
    problem(await served.http.post(f"{session}/uploads", content=b"x", headers={**veras, **PNG}), 403, "forbidden")
    problem(await post(served, session, veras, upload), 403, "forbidden")
    problem(await served.http.delete(f"{session}/uploads/{upload}", headers=veras), 404, "not-found")


async def test_the_caller_is_known_before_a_byte_of_a_file_is_read(served: Whole) -> None:
    """Declared too long, and none of it sent: were it read first, there would be no answer."""
    _, hers = await served.somebody()
    _, eves = await served.somebody()
    session = await served.session(hers)

    for who, status in (("nobody", 401), (eves["Authorization"], 404)):
        head = f"POST {session}/uploads HTTP/1.1\r\nhost: x\r\nauthorization: {who}\r\ncontent-length: 100\r\n"
        answer = await exchange(served.address, head.encode() + b"expect: 100-continue\r\n\r\n")
        assert answer.status == status


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "uploads", "POST"),
        ("PUT", "uploads", "POST"),
        ("GET", "uploads/upl_1", "DELETE"),
        ("POST", "attachments/n1.1", "GET, HEAD"),
        ("DELETE", "attachments/n1.1", "GET, HEAD"),
    ],
)
async def test_a_method_that_isnt_there_for_files_is_405(served: Whole, method: str, path: str, allow: str) -> None:
    answer = await served.http.request(method, f"/v1/sessions/x/{path}")

    problem(answer, 405)
    assert answer.headers["allow"] == allow


@pytest.mark.parametrize("name", ["n9.9", "%00", "..", "n1.1%2F..", "x" * 201, "%E2%80%AE"])
async def test_an_attachment_that_is_not_there_is_404(served: Whole, name: str) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    request = f"GET {session}/attachments/{name} HTTP/1.1\r\nhost: x\r\nauthorization: {hers['Authorization']}\r\n\r\n"

    assert (await exchange(served.address, request.encode())).status == 404


# --- read --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media_type", "told", "how"),
    [
        ("image/png", "image/png", "inline"),
        ("text/plain", "text/plain; charset=utf-8", "inline"),
        ("application/pdf", "application/pdf", "inline"),
        ("text/html", "text/html; charset=utf-8", "attachment"),
        ("image/svg+xml", "image/svg+xml", "attachment"),
        ("application/xhtml+xml", "application/xhtml+xml", "attachment"),
        ("application/octet-stream", "application/octet-stream", "attachment"),
    ],
)
async def test_a_file_comes_as_what_it_is_and_a_browser_runs_none_of_it(
    served: Whole, media_type: str, told: str, how: str
) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    address = await attached(served, session, hers, b"<script>", filename="a b.x", **{"content-type": media_type})

    answer = await served.http.get(address, headers=hers)

    assert (answer.status_code, answer.content) == (200, b"<script>")
    assert answer.headers["content-type"] == told
    assert answer.headers["content-length"] == "8"
    assert answer.headers["content-disposition"] == f'{how}; filename="a b.x"'
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-security-policy"] == "sandbox; default-src 'none'"
    assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert answer.headers["etag"] == f'"{digest_of(b"<script>")}"'
    assert answer.headers["vary"] == "Authorization"


@pytest.mark.parametrize(
    ("filename", "disposition"),
    [
        ("plan.png", 'inline; filename="plan.png"'),
        ("é 漢.png", "inline; filename=\"_ _.png\"; filename*=UTF-8''%C3%A9%20%E6%BC%A2.png"),
        ('a"b.png', "inline; filename=\"a_b.png\"; filename*=UTF-8''a%22b.png"),
        ("100%41.png", "inline; filename=\"100_41.png\"; filename*=UTF-8''100%2541.png"),
        ("x\r\nSet-Cookie: a=b\r\n.png", 'inline; filename="x Set-Cookie: a=b .png"'),
        ("../../etc/passwd", 'inline; filename="passwd"'),
        ("invoice\u202egnp.exe", 'inline; filename="invoicegnp.exe"'),
        ("\0", 'inline; filename="file"'),
    ],
)
async def test_a_hostile_name_stays_a_name(served: Whole, filename: str, disposition: str) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    address = await attached(served, session, hers, filename=filename)

    answer = await served.http.get(address, headers=hers)

    assert answer.headers["content-disposition"] == disposition
    assert "set-cookie" not in answer.headers


async def test_a_long_file_comes_back_whole(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    data = bytes(range(256)) * (PIECE_BYTES // 256 * 2) + b"the end"

    answer = await served.http.get(await attached(served, session, hers, data), headers=hers)

    assert answer.content == data


async def test_head_says_what_get_would(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    address = await attached(served, session, hers)

    got, headed = await served.http.get(address, headers=hers), await served.http.head(address, headers=hers)

    assert (headed.status_code, headed.content) == (200, b"")
    assert {**headed.headers, "date": ""} == {**got.headers, "date": ""}


async def test_a_client_that_has_a_file_is_told_so(served: Whole) -> None:
    _, hers = await served.somebody()
    session = await served.session(hers)
    address = await attached(served, session, hers)
    tag = f'"{digest_of(PHOTO)}"'

    for has in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        answer = await served.http.get(address, headers={**hers, "if-none-match": has})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    for has in ('"other"', digest_of(PHOTO), ""):
        assert (await served.http.get(address, headers={**hers, "if-none-match": has})).status_code == 200
    _, eves = await served.somebody()
    problem(await served.http.get(address, headers={**eves, "if-none-match": tag}), 404, "not-found")


async def test_a_file_of_a_message_that_waits_is_its_senders_alone(tmp_path: Path) -> None:
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock) as served:
        _, hers = await served.somebody()
        id_ = await served.session(hers)
        session = f"/v1/sessions/{id_}"
        upload = (await served.http.post(f"{session}/uploads", content=b"x", headers={**hers, **PNG})).json()["upload"]
        body = {"text": "see here", "attachments": [upload]}
        await served.http.post(f"{session}/inputs", json=body, headers=hers)
        ops = await served.auth("operator:ops")
        address = f"{session}/attachments/n1.1"

        assert (await served.http.get(address, headers=hers)).content == b"x"
        problem(await served.http.get(address, headers=ops), 404, "not-found")

        owner = await served.own(id_)
        [waiting] = await store.inbox(id_, after=0, limit=1)
        await owner.write(InputBody(1, waiting.source, waiting.event_id, waiting.received_at_ms, waiting.input))
        assert (await served.http.get(address, headers=ops)).content == b"x"


async def test_a_file_that_a_row_shows_is_waited_for_until_the_row_is_stored(tmp_path: Path) -> None:
    """A tab asks for it as soon as it sees the row, which is a moment before the store has it."""
    slow = GatedStore()
    async with whole("memory", tmp_path, limits=LIMITS, around=slow.around) as served:
        session, hers, bobs = await served.shared()
        upload = await sent(served, session, hers)
        door = slow.hold(Point.WRITE)
        answer = await post(served, session, hers, upload)
        body = await shown(served, session, bobs, n=answer.json()["input"])
        address = f"{session}/attachments/{body['attachments'][0]['id']}"

        refused = await served.http.get(address, headers=bobs)
        problem(refused, 503, "busy")
        assert int(refused.headers["retry-after"]) > 0

        asking = asyncio.create_task(served.http.get(address, headers=bobs))
        await asyncio.sleep(0)
        door.open()
        assert (await asking).content == PHOTO


# --- what the store says -----------------------------------------------------


async def test_a_store_that_cannot_now_is_503_for_files_too(troubled: tuple[Served, Troubled]) -> None:
    served, store = troubled
    _, hers = await served.somebody()
    session = f"/v1/sessions/{await served.session(hers)}"

    async def upload() -> httpx2.Response:
        return await served.http.post(f"{session}/uploads", content=b"x", headers={**hers, **PNG})

    body = {"text": "see here", "attachments": [(await upload()).json()["upload"]]}
    assert (await served.http.post(f"{session}/inputs", json=body, headers=hers)).status_code == 202
    down = StoreUnavailable("disk full: /var/lib/secret.db")

    store.trouble = {"stage_upload": down}
    problem(await upload(), 503, "busy")
    store.trouble = {"stage_upload": CommitUnknown("COMMIT failed")}
    problem(await upload(), 503, "outcome-unknown")
    store.trouble = {"discard_upload": down}
    problem(await served.http.delete(f"{session}/uploads/upl_1", headers=hers), 503, "busy")
    for method in ("attachment", "piece"):
        store.trouble = {method: down}
        answer = await served.http.get(f"{session}/attachments/n1.1", headers=hers)
        assert "secret" not in str(problem(answer, 503, "busy"))


# --- whatever is sent --------------------------------------------------------

FUZZ = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)


@pytest.fixture(scope="module")
async def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Whole, str, Headers]]:
    generous = replace(LIMITS, uploads_staged=10_000)
    async with whole("sqlite", tmp_path_factory.mktemp("fuzz"), limits=generous) as one:
        _, headers = await one.somebody()
        yield one, await one.session(headers), headers


@FUZZ
@given(
    filename=st.text(max_size=40).map(str),
    how=st.sampled_from(["attachment; filename={}", 'inline; filename="{}"', "x; filename*={}", "{}"]),
    media_type=st.text(st.characters(min_codepoint=32, max_codepoint=255), max_size=40),
    data=st.binary(min_size=1, max_size=20),
)
async def test_no_name_or_type_of_a_file_is_a_fault(
    fuzzed: tuple[Whole, str, Headers], filename: str, how: str, media_type: str, data: bytes
) -> None:
    served, session, headers = fuzzed
    named = how.format(filename).encode("utf-8", "replace")
    disposition = bytes(byte for byte in named if byte >= 32 and byte != 127).strip()
    type_ = bytes(byte for byte in media_type.encode("latin-1") if byte != 127).strip()
    quoted = quote(filename.encode("utf-8", "surrogatepass"))
    auth = (b"authorization", headers["Authorization"].encode())

    by_query = await served.http.post(
        f"{session}/uploads?filename={quoted}", content=data, headers=[auth, (b"content-type", type_)]
    )
    by_header = await served.http.post(
        f"{session}/uploads", content=data, headers=[auth, (b"content-disposition", disposition)]
    )

    assert (by_query.status_code, by_header.status_code) == (201, 201)
    assert by_query.json()["filename"]
