"""The live stream over a real connection: each row once and in place, whatever happens to the connection."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from sayso.core.errors import StoreUnavailable
from sayso.server.app import Server, create_app
from tests.e2e.serving import Headers, OnPurpose, Served, Troubled, opened, problem, said, served_on, serving


@pytest.fixture(scope="module", params=["memory", "sqlite", "postgres"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with served_on(request.param, tmp_path_factory.mktemp("stream")) as one:
        yield one


@dataclass(frozen=True)
class Event:
    """One event as it came. A comment has neither name nor data."""

    event: str
    data: Any = None
    id: str | None = None

    @property
    def text(self) -> str:
        """The words of a row that the model said."""
        words: str = self.data["body"]["parts"][0]["text"]
        return words


def parse(block: bytes) -> Event:
    """Read one event, strictly: known fields in their order, one line of data, line feeds only."""
    lines = block.decode().split("\n")
    if lines[0].startswith((": ", "retry: ")):
        assert len(lines) == 1
        return Event(lines[0])
    id_ = lines.pop(0).removeprefix("id: ") if lines[0].startswith("id: ") else None
    event, data = lines
    assert event.startswith("event: ")
    assert data.startswith("data: ")
    return Event(event.removeprefix("event: "), json.loads(data.removeprefix("data: ")), id_)


async def events(answer: httpx2.Response) -> AsyncIterator[Event]:
    """Yield what comes, until the body ends."""
    rest = b""
    async for chunk in answer.aiter_raw():
        assert b"\r" not in chunk
        *blocks, rest = (rest + chunk).split(b"\n\n")
        for block in blocks:
            yield parse(block)
    assert rest == b""


@asynccontextmanager
async def listening(
    served: Served,
    session: str,
    headers: Headers,
    *,
    after: str | None = None,
    token: str | None = None,
    last_event_id: str | None = None,
) -> AsyncIterator[AsyncIterator[Event]]:
    """Open a stream, and close it in the middle of whatever comes."""
    headers = {**headers, **({"Last-Event-ID": last_event_id} if last_event_id is not None else {})}
    given = {"after": after, "token": token}
    params = {name: value for name, value in given.items() if value is not None}
    async with (
        asyncio.timeout(20),
        served.http.stream("GET", f"/v1/sessions/{session}/stream", params=params, headers=headers) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        yield events(answer)


async def take(stream: AsyncIterator[Event], until: str) -> list[Event]:
    """Return events up to the first of this name."""
    found = []
    async for each in stream:
        found.append(each)
        if each.event == until:
            return found
    raise AssertionError(f"the stream ended before {until}: {found}")


async def rows(stream: AsyncIterator[Event], count: int) -> list[Event]:
    """Return the next rows."""
    found: list[Event] = []
    async for each in stream:
        if each.id is not None:
            found.append(each)
        if len(found) == count:
            return found
    raise AssertionError(f"the stream ended after {len(found)} rows")


async def gone(served: Served) -> None:
    """Return when nobody listens any more."""
    async with asyncio.timeout(5):
        while served.feeds.listeners():  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0.002)


# --- what comes --------------------------------------------------------------


async def test_a_stream_is_the_past_then_the_present(served: Served) -> None:
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("one", "two")

    async with listening(served, session, headers) as stream:
        past = await take(stream, "caught_up")
        owner.publish(said("three"), turn="T1")
        [live] = await rows(stream, 1)

    assert past[0] == Event("retry: 1000")
    assert past[1] == Event("resume", {"keep": 0})
    assert [(each.event, each.id, each.text) for each in past[2:4]] == [
        ("model.said", "1.1", "one"),
        ("model.said", "1.2", "two"),
    ]
    assert past[4] == Event("caught_up", {"seq": 2})
    assert (live.id, live.text, live.data["position"]) == ("1.3", "three", "1.3")


async def test_the_answer_may_not_be_kept_or_held_back(served: Served) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)

    async with served.http.stream("GET", f"/v1/sessions/{session}/stream", headers=headers) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-accel-buffering"] == "no"


@pytest.mark.rule("K1")
async def test_a_stream_goes_on_after_the_last_row_its_reader_has(served: Served) -> None:
    """`Last-Event-ID` wins over `after`; an empty one is none; past the end there is nothing to come."""
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("one", "two", "three")

    async def seen(**where: str) -> list[str | None]:
        async with listening(served, session, headers, **where) as stream:
            return [each.id for each in await take(stream, "caught_up") if each.id is not None]

    assert await seen(after="0.0") == ["1.1", "1.2", "1.3"]
    assert await seen(after="1.1") == ["1.2", "1.3"]
    assert await seen(after="1.1", last_event_id="1.2") == ["1.3"]
    assert await seen(after="1.2", last_event_id="") == ["1.3"]
    assert await seen(last_event_id="1.3") == []


@pytest.mark.rule("K1")
async def test_a_reader_is_told_which_of_its_rows_still_stand(served: Served) -> None:
    """A row that a lost owner published and never stored is taken back, and its successor's is not missed."""
    _, headers = await served.somebody()
    session, lost = await served.owned(headers)
    await lost.says("stored")
    async with listening(served, session, headers) as stream:
        await take(stream, "caught_up")
        lost.publish(said("never stored"), turn="T1")
        [shown] = await rows(stream, 1)
    served.feeds.disown(session)
    assert await served.store.surrender(lost.token)
    successor = await served.own(session)
    await successor.says("in its place")

    async with listening(served, session, headers, last_event_id=shown.id) as stream:
        again = await take(stream, "caught_up")

    assert shown.id == "1.2"
    assert again[1] == Event("resume", {"keep": 1})
    assert [(each.id, each.text) for each in again[2:-1]] == [("2.2", "in its place")]


async def test_two_readers_see_the_same_and_one_that_drops_misses_nothing(served: Served) -> None:
    """Rows keep coming while a reader drops and comes back again and again: each once, in order."""
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)

    async def write() -> None:
        for n in range(60):
            await owner.says(f"row {n}")

    async def steady() -> list[tuple[str | None, str]]:
        async with listening(served, session, headers) as stream:
            return [(each.id, each.text) for each in await rows(stream, 60)]

    async def flighty() -> list[tuple[str | None, str]]:
        found: list[tuple[str | None, str]] = []
        while len(found) < 60:
            cursor = found[-1][0] if found else None
            async with listening(served, session, headers, last_event_id=cursor) as stream:
                found += [(each.id, each.text) for each in await rows(stream, min(7, 60 - len(found)))]
        return found

    _, one, other = await asyncio.gather(write(), steady(), flighty())

    assert one == other == [(f"1.{n + 1}", f"row {n}") for n in range(60)]
    await gone(served)


@pytest.mark.parametrize(
    "text", ["a\nb\n\nc", "a\r\nb\r", "\u2028\u2029\x85", "data: x\n\nevent: farewell\n\n", "\0\ufeff", "\U0010ffff"]
)
async def test_no_text_can_leave_its_line(served: Served, text: str) -> None:
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says(text, "next")

    async with listening(served, session, headers) as stream:
        assert [each.text for each in await rows(stream, 2)] == [text, "next"]


async def test_a_long_past_comes_whole(served: Served) -> None:
    """Past the buffer of a stream and the page of a store."""
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says(*(f"{n} " + "x" * 500 for n in range(1_200)))

    async with listening(served, session, headers) as stream:
        found = await rows(stream, 1_200)
        [caught_up] = await take(stream, "caught_up")

    assert [each.id for each in found] == [f"1.{n}" for n in range(1, 1_201)]
    assert caught_up.data == {"seq": 1_200}


# --- from the token of a history ---------------------------------------------


async def history(served: Served, session: str, headers: Headers) -> Any:
    answer = await served.http.get(f"/v1/sessions/{session}/history", headers=headers)
    return answer.raise_for_status().json()


@pytest.mark.rule("H3", "X31")
async def test_a_stream_begins_where_a_history_ended(served: Served) -> None:
    """With nothing twice; a row's event and its place in the history are the same JSON, which names its session."""
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("one", "two")
    page = await history(served, session, headers)
    owner.feed.write("T1", 1, "half a ")
    owner.feed.flush()

    async with listening(served, session, headers, token=page["token"]) as stream:
        begin = await take(stream, "delta")
        owner.publish(said("half a sentence"), turn="T1")
        [live] = await rows(stream, 1)

    assert begin[1:] == [
        Event("resume", {"keep": 2}),
        Event("caught_up", {"seq": 2}),
        Event("delta", {"turn": "T1", "reply": 1, "offset": 0, "text": "half a "}),
    ]
    assert live.data["session"] == session
    assert [row["session"] for row in page["rows"]] == [session] * 2
    assert (await history(served, session, headers))["rows"][-1] == live.data


@pytest.mark.rule("H3")
async def test_a_stale_token_is_told_so_and_nobody_is_registered(served: Served) -> None:
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("one")
    token = (await history(served, session, headers))["token"]
    await owner.says("two")

    async with listening(served, session, headers, token=token) as stream:
        found = [each async for each in stream]

    assert found[1:] == [Event("resync", {"reason": "stale_token"}), Event("farewell", {"reason": "stale_token"})]
    assert served.feeds.listeners() == 0


@pytest.mark.rule("H3", "K1")
async def test_who_comes_back_goes_on_after_what_it_has_whatever_its_address_says(served: Served) -> None:
    """A browser repeats the address, with the token that is old by now, and says where it is in a header."""
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("one")
    token = (await history(served, session, headers))["token"]
    await owner.says("two", "three")

    async with listening(served, session, headers, token=token, last_event_id="1.2") as stream:
        found = await take(stream, "caught_up")

    assert [each.id for each in found if each.id is not None] == ["1.3"]


@pytest.mark.rule("K4")
async def test_a_token_of_a_session_that_nobody_owns_is_followed_like_a_cursor(served: Served) -> None:
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says("one")
    token = (await history(served, session, headers))["token"]
    await owner.says("two")
    served.feeds.disown(session)
    assert await served.store.surrender(owner.token)

    async with listening(served, session, headers, token=token) as stream:
        found = await take(stream, "caught_up")

    assert [each.id for each in found if each.id is not None] == ["1.2"]


async def test_a_stream_goes_on_from_one_place(served: Served) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)
    address = f"/v1/sessions/{session}/stream"

    problem(await served.http.get(f"{address}?after=0.0&token=0.0", headers=headers), 400, "malformed")
    problem(await served.http.get(f"{address}?token=latest", headers=headers), 400, "malformed")
    problem(await served.http.get(f"{address}?token=", headers=headers), 400, "malformed")


# --- what is refused ---------------------------------------------------------


@pytest.mark.parametrize(
    "position", ["", "3", "1.", ".1", "-1.0", "1.1.1", "01.1", "1.1 ", "x", "9" * 30 + ".1", "%00"]
)
async def test_a_position_that_is_none_is_400(served: Served, position: str) -> None:
    _, headers = await served.somebody()
    session = await served.session(headers)
    address = f"/v1/sessions/{session}/stream"

    problem(await served.http.get(address, params={"after": position}, headers=headers), 400, "malformed")
    if position not in ("", "1.1 "):  # a header's ends are trimmed on its way
        cursor = {**headers, "Last-Event-ID": position}
        problem(await served.http.get(f"{address}?after=0.0", headers=cursor), 400, "malformed")


async def test_a_stream_is_for_those_who_may_read_the_session(served: Served) -> None:
    _, hers = await served.somebody()
    _, his = await served.somebody()
    session = await served.session(hers)
    address = f"/v1/sessions/{session}/stream"

    problem(await served.http.get(address), 401, "unauthenticated")
    problem(await served.http.get(address, headers=his), 404, "not-found")
    problem(await served.http.get("/v1/sessions/ses_none/stream", headers=hers), 404, "not-found")
    problem(await served.http.post(address, headers=hers), 405)
    problem(await served.http.get(address + "?after=junk", headers=his), 400, "malformed")
    assert served.feeds.listeners() == 0
    async with listening(served, session, await served.auth("operator:ops")) as stream:
        await take(stream, "caught_up")


# --- how it ends -------------------------------------------------------------


async def test_a_reader_that_leaves_is_forgotten(served: Served) -> None:
    """At once where nothing is written, in the middle of the past, and while rows come."""
    _, headers = await served.somebody()
    session, owner = await served.owned(headers)
    await owner.says(*("x" * 1_000 for _ in range(1_000)))

    async with listening(served, session, headers) as stream:
        await anext(stream)
    await gone(served)
    async with listening(served, session, headers, after="1.1000") as stream:
        await take(stream, "caught_up")
        assert served.feeds.listeners() == 1
    await gone(served)
    async with listening(served, session, headers, after="1.1000") as stream:
        owner.publish(*(said(str(n)) for n in range(100)), turn="T1")
        await rows(stream, 1)
    await gone(served)


async def test_a_quiet_stream_shows_that_it_lives(tmp_path: Path) -> None:
    async with served_on("memory", tmp_path, ping_s=0.01) as served:
        _, headers = await served.somebody()
        session, owner = await served.owned(headers)
        async with listening(served, session, headers) as stream:
            await take(stream, "caught_up")
            assert [await anext(stream) for _ in range(3)] == [Event(": ping")] * 3
            await owner.says("still here")
            assert (await rows(stream, 1))[0].text == "still here"


async def test_a_stream_ends_when_its_token_stops_standing(tmp_path: Path) -> None:
    """Revoked or expired, however much is going on; another reader's stream goes on."""
    async with served_on("memory", tmp_path, ping_s=0.02) as served:
        user, revoked = await served.somebody()
        expiring, good = await served.auth(user, ttl_ms=3_600_000), await served.auth(user)
        session, owner = await served.owned(good)
        async with (
            listening(served, session, revoked) as first,
            listening(served, session, expiring) as second,
            listening(served, session, good) as third,
        ):
            for stream in (first, second, third):
                await take(stream, "caught_up")
            assert await served.store.revoke_token(revoked["Authorization"].split("_")[1])
            ended = await take(first, "farewell")
            served.clock.ahead_ms += 3_600_000
            expired = await take(second, "farewell")
            await owner.says("for those who may")
            [row] = await rows(third, 1)
            assert [each async for each in first] == []

    assert ended[-1].data == expired[-1].data == {"reason": "signed_out"}
    assert row.text == "for those who may"


async def test_a_store_that_cannot_say_ends_no_stream(tmp_path: Path) -> None:
    """It is no answer to whether a token stands, nor a reason to drop who is here."""
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock, ping_s=0.01) as served:
        assert isinstance(store, Troubled)
        _, headers = await served.somebody()
        session, owner = await served.owned(headers)
        async with listening(served, session, headers) as stream:
            await take(stream, "caught_up")
            store.trouble = {"token": StoreUnavailable("locked")}
            for _ in range(3):
                assert await anext(stream) == Event(": ping")
            store.trouble = {}
            await owner.says("here")
            assert (await rows(stream, 1))[0].text == "here"


@pytest.mark.parametrize(
    ("trouble", "reason"), [(StoreUnavailable("locked"), "unavailable"), (OnPurpose("the secret is 42"), "fault")]
)
async def test_trouble_on_the_way_ends_a_stream_politely(tmp_path: Path, trouble: Exception, reason: str) -> None:
    """The past can't be read further: the reader has what came, and comes back by its cursor."""
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock) as served:
        assert isinstance(store, Troubled)
        _, headers = await served.somebody()
        session, owner = await served.owned(headers)
        await owner.says(*(str(n) for n in range(1_200)))
        store.trouble, store.spared = {"rows": trouble}, {"rows": 1}
        async with listening(served, session, headers) as stream:
            found = [each async for each in stream]
        store.trouble = {}
        async with listening(served, session, headers, last_event_id=found[-2].id) as stream:
            again = await rows(stream, 1)

    assert [each.event for each in found[:2]] == ["retry: 1000", "resume"]
    assert found[-1].data == {"reason": reason}
    assert int(again[0].text) == int(found[-2].text) + 1


async def test_a_reader_that_does_not_keep_up_is_sent_away(tmp_path: Path) -> None:
    """What it has is in order and without a gap, so that it can come back by its cursor."""
    async with served_on("memory", tmp_path) as served:
        _, headers = await served.somebody()
        session, owner = await served.owned(headers)
        async with listening(served, session, headers) as stream:
            await take(stream, "caught_up")
            for n in range(750):
                owner.publish(said(f"{n} " + "x" * 100_000), turn="T1")
                await asyncio.sleep(0)
            found = await take(stream, "farewell")

    assert found[-1].data == {"reason": "slow"}
    assert 0 < len(found) - 1 < 750
    assert [each.id for each in found[:-1]] == [f"1.{n + 1}" for n in range(len(found) - 1)]


@pytest.mark.rule("K9")
async def test_stopping_ends_every_stream_with_a_farewell_and_at_once(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as (store, clock), serving(store, clock=clock) as served:
        _, headers = await served.somebody()
        session, owner = await served.owned(headers)
        await owner.says(*("x" * 1_000 for _ in range(500)))
        async with (
            listening(served, session, headers) as fresh,
            listening(served, session, headers, after="1.500") as idle,
        ):
            await take(idle, "caught_up")
            began = time.monotonic()
            served.server.stop()
            last = [[each async for each in stream][-1] for stream in (fresh, idle)]
            ended = time.monotonic() - began

    assert last == [Event("farewell", {"reason": "shutdown"})] * 2
    assert ended < 1
    assert time.monotonic() - began < 2


async def test_a_reader_that_does_not_read_cannot_hold_up_the_server(tmp_path: Path) -> None:
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock, grace_s=1) as served:
        _, headers = await served.somebody()
        session, owner = await served.owned(headers)
        async with listening(served, session, headers) as stream:
            await take(stream, "caught_up")
            for n in range(300):
                owner.publish(said(f"{n} " + "x" * 100_000), turn="T1")
                await asyncio.sleep(0)
            began = time.monotonic()
            served.server.stop()
            await served.running

    assert time.monotonic() - began < 3


PROCESS = """
import asyncio, time
from sayso.adapters.system import SystemClock, SystemIds
from sayso.core.origin import Principal
from sayso.journal.feed import Feeds
from sayso.runtime.admission import Admission
from sayso.runtime.commands import Commands
from sayso.runtime.identity import Identity
from sayso.runtime.limits import Limits
from sayso.server.app import Server, create_app
from sayso.storage.memory import MemoryStore

class Nobody:
    def hint(self, session): pass

async def main():
    clock, ids = SystemClock(), SystemIds()
    store = MemoryStore(clock=clock.now_ms)
    commands, identity = Commands(store, Feeds(), Nobody(), ids, Limits()), Identity(store, ids)
    app = create_app(commands=commands, admission=Admission({}, store, Nobody(), ids), identity=identity, store=store)
    server = Server(app, port=0)
    serving = asyncio.create_task(server.serve())
    await asyncio.to_thread(server.listening.wait)
    print(server.address[1], await identity.mint(Principal.parse("user:alice")), flush=True)
    await serving

asyncio.run(main())
"""


@pytest.mark.rule("K9")
async def test_a_signal_ends_a_process_with_open_streams_within_a_second() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", PROCESS, stdout=subprocess.PIPE)
    assert process.stdout is not None
    port, token = (await process.stdout.readline()).decode().split()
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=headers) as http:
        session = (await http.post("/v1/sessions")).json()["id"]
        async with http.stream("GET", f"/v1/sessions/{session}/stream") as answer:
            stream = events(answer)
            await take(stream, "caught_up")
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            last = [each async for each in stream]
    status = await process.wait()

    assert last == [Event("farewell", {"reason": "shutdown"})]
    assert time.monotonic() - began < 1.5
    assert status == -signal.SIGTERM


async def test_a_server_may_run_in_a_thread_beside_something_else(tmp_path: Path) -> None:
    async with opened("memory", tmp_path) as (store, clock), serving(store, clock=clock) as served:
        app = create_app(
            commands=served.commands, admission=served.admission, identity=served.identity, store=store, ping_s=15
        )
        server = Server(app, port=0)
        thread = threading.Thread(target=server.run)
        thread.start()
        assert await asyncio.to_thread(server.listening.wait, 10)
        host, port = server.address
        async with httpx2.AsyncClient(base_url=f"http://{host}:{port}") as http:
            assert (await http.get("/healthz")).status_code == 200
        server.stop()
        await asyncio.to_thread(thread.join, 5)

    assert not thread.is_alive()
