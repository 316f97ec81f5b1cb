"""The calls about the people of a session over a real connection: each status, and who may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from sayso.core.rows import ParticipantChangedBody, Row
from sayso.core.session import SessionRole
from sayso.runtime.limits import Limits
from sayso.storage.store import WriteOutcome
from sayso.testing.stores import GatedStore, Point
from tests.conformance.given import hook
from tests.e2e.serving import Headers, problem, served_on
from tests.e2e.test_stream_http import events, listening, take
from tests.e2e.whole import Whole, whole


@pytest.fixture(scope="module", params=["memory", "sqlite"])
async def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Whole]:
    async with whole(request.param, tmp_path_factory.mktemp("people"), limits=Limits(participants=3)) as one:
        yield one


# --- who takes part ------------------------------------------------------------


async def test_an_invitation_is_answered_with_its_row_and_stands_from_then_on(served: Whole) -> None:
    owner, hers = await served.somebody()
    bob, bobs = await served.somebody()
    session = await served.session(hers)
    assert (await served.http.get(session, headers=bobs)).status_code == 404

    answer = await served.http.put(f"{session}/participants/{bob}", json={"role": "viewer"}, headers=hers)

    assert answer.status_code == 200
    assert answer.json()["input"] == 1
    assert answer.json()["settled"]["kind"] == "participant.changed"
    assert answer.json()["settled"]["body"] == {"principal": bob, "role": "viewer", "by": owner}
    listed = (await served.http.get(f"{session}/participants", headers=bobs)).json()
    assert listed == {"participants": [{"principal": owner, "role": "owner"}, {"principal": bob, "role": "viewer"}]}
    assert session.endswith((await served.http.get("/v1/sessions", headers=bobs)).json()["sessions"][0]["id"])
    assert (await served.http.get(f"{session}/history", headers=bobs)).status_code == 200


async def test_a_removal_is_answered_with_its_row_and_stands_from_then_on(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    [_, bob] = (await served.http.get(f"{session}/participants", headers=hers)).json()["participants"]
    address = f"{session}/participants/{bob['principal']}"

    answer = await served.http.delete(address, headers=hers)

    assert answer.status_code == 200
    assert answer.json()["settled"]["body"]["role"] is None
    for path in ("", "/history", "/participants", "/stream", "/consents"):
        problem(await served.http.get(f"{session}{path}", headers=bobs), 404, "not-found")
    problem(await served.http.post(f"{session}/inputs", json={"text": "hi"}, headers=bobs), 404, "not-found")
    problem(await served.http.delete(address, headers=hers), 404, "not-found")


async def test_a_member_speaks_and_a_viewer_does_not(served: Whole) -> None:
    session, hers, members = await served.shared("member")
    vera, viewers = await served.somebody()
    await served.http.put(f"{session}/participants/{vera}", json={"role": "viewer"}, headers=hers)

    assert (await served.http.post(f"{session}/inputs", json={"text": "hi"}, headers=members)).status_code == 202
    problem(await served.http.post(f"{session}/inputs", json={"text": "hi"}, headers=viewers), 403, "forbidden")
    answer = {"verdict": "yes", "digest": "sha256:0"}
    problem(await served.http.post(f"{session}/consents/A1", json=answer, headers=viewers), 403, "forbidden")
    assert (await served.http.get(f"{session}/history", headers=viewers)).status_code == 200


@pytest.mark.rule("X32")
async def test_only_the_owner_and_an_operator_say_who_takes_part(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    [_, bob] = (await served.http.get(f"{session}/participants", headers=hers)).json()["participants"]
    _, strangers = await served.somebody()
    ops = await served.auth("operator:ops")
    address, role = f"{session}/participants/user:eve", {"role": "member"}

    async def put(headers: Headers) -> int:
        return (await served.http.put(address, json=role, headers=headers)).status_code

    async def delete(headers: Headers) -> int:
        return (await served.http.delete(address, headers=headers)).status_code

    assert [await put(headers) for headers in (strangers, bobs, ops, hers)] == [404, 403, 200, 200]
    assert [await delete(headers) for headers in (strangers, bobs, ops)] == [404, 403, 200]
    problem(await served.http.get(f"{session}/participants", headers=strangers), 404, "not-found")
    assert (await served.http.delete(f"{session}/participants/{bob['principal']}", headers=bobs)).status_code == 200


@pytest.mark.parametrize(
    "name", ["eve", "user:", "user:a:b", "nobody:eve", "user:a%20b", "source:x", "operator:x", "%00"]
)
async def test_a_name_that_is_no_persons_is_422(served: Whole, name: str) -> None:
    session, hers, _ = await served.shared()
    address = f"{session}/participants/{name}"

    problem(await served.http.put(address, json={"role": "member"}, headers=hers), 422, "invalid")


@pytest.mark.parametrize("name", ["user:a/b", "user:%C3%A9ve", "user:a%3Fb"])
async def test_a_name_may_hold_what_an_id_may(served: Whole, name: str) -> None:
    session, hers, _ = await served.shared()
    address = f"{session}/participants/{name}"

    assert (await served.http.put(address, json={"role": "member"}, headers=hers)).status_code == 200
    assert (await served.http.delete(address, headers=hers)).status_code == 200


@pytest.mark.parametrize("body", [{}, {"role": "owner"}, {"role": None}, {"role": "member", "by": "user:x"}, [], "x"])
async def test_a_role_is_one_of_two(served: Whole, body: object) -> None:
    session, hers, _ = await served.shared()

    problem(await served.http.put(f"{session}/participants/user:eve", json=body, headers=hers), 422, "invalid")


async def test_the_owner_is_neither_invited_nor_removed(served: Whole) -> None:
    owner, hers = await served.somebody()
    session = await served.session(hers)
    address = f"{session}/participants/{owner}"

    problem(await served.http.put(address, json={"role": "viewer"}, headers=hers), 422, "invalid")
    problem(await served.http.delete(address, headers=hers), 422, "invalid")


async def test_one_too_many_is_409_and_says_how_many_may(served: Whole) -> None:
    session, hers, _ = await served.shared()
    for who in ("user:c", "user:d"):
        assert (
            await served.http.put(f"{session}/participants/{who}", json={"role": "member"}, headers=hers)
        ).status_code == 200

    refused = await served.http.put(f"{session}/participants/user:e", json={"role": "member"}, headers=hers)

    assert "3 people do already" in problem(refused, 409, "request-refused")["detail"]
    assert len((await served.http.get(f"{session}/participants", headers=hers)).json()["participants"]) == 4


async def test_a_repeat_with_its_key_is_answered_alike(served: Whole) -> None:
    session, hers, _ = await served.shared()
    keyed = {**hers, "Idempotency-Key": "k1"}
    address = f"{session}/participants/user:eve"

    answers = [await served.http.put(address, json={"role": "member"}, headers=keyed) for _ in "ab"]
    assert answers[0].json() == answers[1].json()
    problem(await served.http.put(address, json={"role": "viewer"}, headers=keyed), 422, "key-reused")


async def test_what_is_not_durable_yet_is_202_and_comes_true_later(tmp_path: Path) -> None:
    """Nobody is told that bob takes part before that can't be lost any more, and until then he doesn't."""
    store = GatedStore()
    async with whole("memory", tmp_path, limits=Limits(settle_wait_ms=50), around=store.around) as served:
        (_, hers), (bob, bobs) = await served.somebody(), await served.somebody()
        session = await served.session(hers)
        door = store.hold(Point.WRITE)
        answer = await served.http.put(f"{session}/participants/{bob}", json={"role": "member"}, headers=hers)
        assert (answer.status_code, answer.json()) == (202, {"input": 1, "settled": None})
        problem(await served.http.get(session, headers=bobs), 404, "not-found")

        door.open()
        async with asyncio.timeout(5):
            while (await served.http.get(session, headers=bobs)).status_code == 404:
                pass


@pytest.mark.rule("X32")
async def test_who_was_removed_elsewhere_is_sent_away_at_the_next_ping(tmp_path: Path) -> None:
    """The row was written by a process whose listeners she is not among; the others' streams go on."""
    async with served_on("memory", tmp_path, ping_s=0.02) as served:
        (alice, hers), (bob, bobs) = await served.somebody(), await served.somebody()
        session, owner = await served.owned(hers)
        await owner.write(ParticipantChangedBody(1, bob, SessionRole.VIEWER, alice))
        await served.store.put(hook("evt_1", session=session))
        async with listening(served, session, bobs) as his, listening(served, session, hers) as her_own:
            for stream in (his, her_own):
                await take(stream, "caught_up")
            removed = Row(
                2, owner.token.epoch, None, owner.token.commit_key(2), 0, ParticipantChangedBody(2, bob, None, bob)
            )
            assert await served.store.write(owner.token, [removed]) is WriteOutcome.WRITTEN

            assert (await take(his, "farewell"))[-1].data == {"reason": "removed"}
            for _ in range(3):
                assert (await anext(her_own)).event == ": ping"


# --- what waits ----------------------------------------------------------------


@asynccontextmanager
async def answering(served: Whole, session: str, headers: Headers) -> AsyncIterator[None]:
    """Have somebody's message answered meanwhile, by a model that takes its time."""
    hold = served.model.hold = asyncio.Event()
    before = len(served.model.requests)
    await posted(served, session, headers, "a long story")
    await served.model.until_asked(before + 1)
    try:
        yield
    finally:
        served.model.hold = None
        hold.set()


async def posted(served: Whole, session: str, headers: Headers, text: str) -> int:
    answer = await served.http.post(
        f"{session}/inputs", json={"text": text, "client_send_ids": [f"c-{text[:1]}"]}, headers=headers
    )
    assert answer.status_code == 202, answer.text
    place: int = answer.json()["input"]
    return place


@pytest.mark.rule("X36", "X39")
async def test_the_queue_shows_ones_own_words_and_counts_the_rest(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    ops, (_, strangers) = await served.auth("operator:ops"), await served.somebody()
    async with answering(served, session, hers):
        n = await posted(served, session, bobs, "me too")
        await posted(served, session, hers, "and then")

        of_bob = (await served.http.get(f"{session}/queue", headers=bobs)).json()
        of_ops = await served.http.get(f"{session}/queue", headers=ops)
        problem(await served.http.get(f"{session}/queue", headers=strangers), 404, "not-found")

    [entry] = of_bob["mine"]
    assert isinstance(entry.pop("received_at_ms"), int)
    assert entry == {"input": n, "text": "me too", "client_send_ids": ["c-m"]}
    assert (of_bob["waiting"], of_bob["owners"]) == (2, None)
    assert "me too" not in of_ops.text
    assert "and then" not in of_ops.text
    assert (of_ops.json()["mine"], of_ops.json()["waiting"]) == ([], 2)
    assert sorted(each["waiting"] for each in of_ops.json()["owners"]) == [1, 1]


@pytest.mark.rule("X39")
async def test_an_eleventh_message_of_one_person_is_429_and_says_of_whom(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    async with answering(served, session, hers):
        for n in range(10):
            await posted(served, session, bobs, f"{n}")
        full = await served.http.post(f"{session}/inputs", json={"text": "one more"}, headers=bobs)

        assert "10 inputs of user:" in problem(full, 429, "inbox-full")["detail"]
        assert full.headers["retry-after"]
        assert await posted(served, session, hers, "hers is another queue") > 0


@pytest.mark.rule("X40", "X41")
async def test_a_message_that_waits_is_taken_back_by_its_sender_alone(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    ops, (_, strangers) = await served.auth("operator:ops"), await served.somebody()
    async with answering(served, session, hers):
        n = await posted(served, session, bobs, "never mind")
        address = f"{session}/queue/{n}"
        for headers in (hers, ops, strangers):
            problem(await served.http.delete(address, headers=headers), 404, "not-found")

        taken_back = await served.http.delete(address, headers=bobs)
        again = await served.http.delete(address, headers=bobs)

    assert taken_back.status_code == again.status_code == 200
    assert taken_back.json() == again.json()
    row = taken_back.json()["settled"]
    assert (row["kind"], row["body"]["input"]) == ("input.retracted", n)
    history = await served.http.get(f"{session}/history", headers=hers)
    assert "never mind" not in history.text


async def test_what_does_not_wait_any_more_is_409(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    async with answering(served, session, hers):
        n = await posted(served, session, bobs, "me too")
        problem(await served.http.delete(f"{session}/queue/{n - 1}", headers=hers), 409, "request-refused")
        problem(await served.http.delete(f"{session}/queue/{n - 1}", headers=bobs), 404, "not-found")
    problem(await served.http.delete(f"{session}/queue/{n + 7}", headers=bobs), 404, "not-found")
    for wrong in ("0", "x", "-1", str(10**18), "1.5"):
        problem(await served.http.delete(f"{session}/queue/{wrong}", headers=bobs), 422, "invalid")


# --- how a session is set ------------------------------------------------------


async def test_the_owner_sets_the_title_and_what_becomes_of_others(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    _, strangers = await served.somebody()
    ops = await served.auth("operator:ops")

    set_ = await served.http.patch(session, json={"others": "refuse"}, headers=hers)
    named = await served.http.patch(session, json={"title": "Friday \N{SNOWMAN}"}, headers=ops)

    assert set_.status_code == named.status_code == 200
    assert set_.json()["settled"]["kind"] == "session.changed"
    seen = (await served.http.get(session, headers=bobs)).json()
    assert (seen["title"], seen["others"], seen["closed_at_ms"]) == ("Friday \N{SNOWMAN}", "refuse", None)
    problem(await served.http.patch(session, json={"title": "mine"}, headers=bobs), 403, "forbidden")
    problem(await served.http.patch(session, json={"title": "mine"}, headers=strangers), 404, "not-found")


@pytest.mark.parametrize("body", [{}, {"others": "ignore"}, {"title": "x" * 201}, {"title": 7}, {"owner": "x"}, []])
async def test_a_change_says_what_is_to_change(served: Whole, body: object) -> None:
    session, hers, _ = await served.shared()

    problem(await served.http.patch(session, json=body, headers=hers), 422, "invalid")


@pytest.mark.rule("H28")
async def test_where_others_are_refused_a_foreign_message_is_409_and_nothing_is_stored(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    await served.http.patch(session, json={"others": "refuse"}, headers=hers)
    async with answering(served, session, hers):
        refused = await served.http.post(f"{session}/inputs", json={"text": "me too"}, headers=bobs)

        assert "say it again later" in problem(refused, 409, "cross-user-interjection")["detail"]
        assert (await served.http.get(f"{session}/queue", headers=bobs)).json()["waiting"] == 0


# --- what was done ---------------------------------------------------------------


async def test_what_a_session_has_done_is_for_those_who_may_see_it(served: Whole) -> None:
    session, hers, bobs = await served.shared("viewer")
    _, strangers = await served.somebody()

    for headers in (hers, bobs):
        assert (await served.http.get(f"{session}/effects?all=true", headers=headers)).json() == {
            "effects": [],
            "more": False,
        }
    problem(await served.http.get(f"{session}/effects", headers=strangers), 404, "not-found")
    problem(await served.http.get(f"{session}/effects?limit=0", headers=hers), 422, "invalid")
    problem(await served.http.get(f"{session}/effects?all=perhaps", headers=hers), 422, "invalid")


# --- how a turn is stopped -----------------------------------------------------


@pytest.mark.rule("K24")
async def test_a_turn_is_stopped_by_its_own_person_and_its_end_is_a_row(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    _, strangers = await served.somebody()
    async with answering(served, session, hers):
        problem(await served.http.post(f"{session}/stop", headers=strangers), 404, "not-found")
        refused = problem(await served.http.post(f"{session}/stop", headers=bobs), 409, "request-refused")
        assert "'s to stop" in refused["detail"]
        problem(await served.http.post(f"{session}/stop", json={"turn": "T9"}, headers=hers), 409, "request-refused")
        keyed = {**hers, "Idempotency-Key": "k1"}
        stopped = await served.http.post(f"{session}/stop", json={"turn": "T1"}, headers=keyed)
        again = await served.http.post(f"{session}/stop", json={"turn": "T1"}, headers=keyed)

        assert stopped.status_code == again.status_code == 200
        assert again.json() == stopped.json()
        assert stopped.json()["settled"]["kind"] == "turn.stop"
        while (await served.http.get(session, headers=hers)).json()["turn"] is not None:
            pass
    history = (await served.http.get(f"{session}/history", headers=hers)).json()
    [end] = [row for row in history["rows"] if row["kind"] == "turn.end"]
    assert end["body"]["ending"] == "cancelled"
    problem(await served.http.post(f"{session}/stop", headers=hers), 409, "request-refused")


@pytest.mark.parametrize("body", [{"turn": ""}, {"turn": "T0"}, {"turn": 1}, {"turn": "T1\n"}, {"all": True}, []])
async def test_which_turn_is_to_stop_is_named_as_turns_are(served: Whole, body: object) -> None:
    session, hers, _ = await served.shared()

    problem(await served.http.post(f"{session}/stop", json=body, headers=hers), 422, "invalid")


async def test_a_viewer_stops_nothing(served: Whole) -> None:
    session, _, viewers = await served.shared("viewer")

    problem(await served.http.post(f"{session}/stop", headers=viewers), 403, "forbidden")


# --- how a session ends --------------------------------------------------------


async def test_a_session_is_closed_by_its_owner_and_takes_nothing_more(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    _, strangers = await served.somebody()
    keyed = {**hers, "Idempotency-Key": "k1"}
    problem(await served.http.post(f"{session}/close", headers=bobs), 403, "forbidden")
    problem(await served.http.post(f"{session}/close", headers=strangers), 404, "not-found")

    closed = await served.http.post(f"{session}/close", headers=keyed)
    again = await served.http.post(f"{session}/close", headers=keyed)

    assert closed.status_code == again.status_code == 200
    assert closed.json()["settled"]["kind"] == "session.closed"
    assert again.json() == closed.json()
    seen = (await served.http.get(session, headers=bobs)).json()
    assert seen["closed_at_ms"] == closed.json()["settled"]["body"]["received_at_ms"]
    history = (await served.http.get(f"{session}/history", headers=bobs)).json()
    assert history["rows"][-1]["kind"] == "session.closed"
    for refused in (
        await served.http.post(f"{session}/inputs", json={"text": "hello?"}, headers=hers),
        await served.http.put(f"{session}/participants/user:eve", json={"role": "member"}, headers=hers),
        await served.http.patch(session, json={"title": "over"}, headers=hers),
        await served.http.post(f"{session}/close", headers=hers),
    ):
        problem(refused, 409, "closed")


async def test_an_operator_closes_and_deletes(served: Whole) -> None:
    session, hers, _ = await served.shared()
    ops = await served.auth("operator:ops")

    assert (await served.http.post(f"{session}/close", headers=ops)).status_code == 200
    assert (await served.http.delete(session, headers=ops)).status_code == 204
    problem(await served.http.get(session, headers=hers), 404, "not-found")


async def test_a_deleted_session_is_404_for_everybody_and_its_readers_are_told(served: Whole) -> None:
    session, hers, bobs = await served.shared()
    _, strangers = await served.somebody()
    problem(await served.http.delete(session, headers=bobs), 403, "forbidden")
    problem(await served.http.delete(session, headers=strangers), 404, "not-found")
    async with asyncio.timeout(10), served.http.stream("GET", f"{session}/stream", headers=bobs) as answer:
        stream = events(answer)
        await take(stream, "caught_up")

        deleted = await served.http.delete(session, headers=hers)

        assert (await take(stream, "farewell"))[-1].data == {"reason": "gone"}
    assert (deleted.status_code, deleted.content) == (204, b"")
    for path in ("", "/history", "/stream", "/queue", "/participants", "/consents"):
        problem(await served.http.get(f"{session}{path}", headers=hers), 404, "not-found")
    problem(await served.http.delete(session, headers=hers), 404, "not-found")
    listed = (await served.http.get("/v1/sessions", headers=bobs)).json()["sessions"]
    assert session.rpartition("/")[2] not in [each["id"] for each in listed]


@pytest.mark.rule("H36")
async def test_what_can_not_be_stored_is_not_closed_and_the_session_goes_on(tmp_path: Path) -> None:
    store = GatedStore()
    async with whole("memory", tmp_path, limits=Limits(settle_wait_ms=50), around=store.around) as served:
        _, hers = await served.somebody()
        session = await served.session(hers)
        store.refuse_writes()
        await posted(served, session, hers, "hello")
        async with asyncio.timeout(5):
            while (await served.http.get(f"{session}/status", headers=hers)).json()["state"] != "retrying":
                pass

        refused = await served.http.post(f"{session}/close", headers=hers)
        problem(refused, 409, "not-settled")
        assert (await served.http.get(session, headers=hers)).json()["closed_at_ms"] is None

        store.mend()
        assert (await served.http.post(f"{session}/close", headers=hers)).status_code in (200, 202)
        async with asyncio.timeout(5):
            while (await served.http.get(session, headers=hers)).json()["closed_at_ms"] is None:
                pass


async def test_closing_that_is_not_durable_yet_is_202(tmp_path: Path) -> None:
    store = GatedStore()
    async with whole("memory", tmp_path, limits=Limits(settle_wait_ms=50), around=store.around) as served:
        _, hers = await served.somebody()
        session = await served.session(hers)
        door = store.hold(Point.WRITE)

        answer = await served.http.post(f"{session}/close", headers=hers)

        assert (answer.status_code, answer.json()["settled"]) == (202, None)
        door.open()
        async with asyncio.timeout(5):
            while (await served.http.get(session, headers=hers)).json()["closed_at_ms"] is None:
                pass
