"""What rows are to their readers where somebody wants other events than ours: no row goes untold, or is told twice."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Any, cast

import pytest

from sayso.core.origin import Principal
from sayso.core.rows import Kind, Row
from sayso.core.session import Position
from sayso.demo.local import OpenStore, local_stage
from sayso.journal.frames import PLAIN, Frame, Hook, Projection, encode, plainly
from sayso.runtime.commands import Caller
from sayso.testing.view import View
from tests.simulation.desk import SESSION, desk_in, notice, said

ALICE = Caller(Principal.parse("user:alice"), "api token")


def none(row: Row, session: str) -> Frame | None:
    return None


def raises(row: Row, session: str) -> Frame | None:
    raise KeyError("somebody's mistake")


def nonsense(row: Row, session: str) -> Frame | None:
    return cast(Frame, {"event": row.kind})


def unsendable(row: Row, session: str) -> Frame | None:
    return Frame(row.kind, '{"text": "\n\n"}')


def ours(row: Row, session: str) -> Frame | None:
    return Frame("caught_up", "{}")


HOOKS: dict[str, Hook | None] = {
    "missing": None,
    "returns none": none,
    "raises": raises,
    "returns no frame": nonsense,
    "returns what no stream carries": unsendable,
    "returns a name of ours": ours,
}


@pytest.mark.rule("H6", "H7", "H8", "H16", "H17", "H18")
@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.TOOL_RESULT])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=list(HOOKS))
async def test_a_row_without_an_event_of_its_own_is_repaired_once_under_its_own_id(
    open_store: OpenStore, kind: Kind, hook: Hook | None
) -> None:
    """Live and from the store; it is accepted all the same, and the turn goes on."""
    projection = PLAIN.but({kind: hook})
    async with local_stage(open_store=open_store, projection=projection) as stage:
        live = await followed(stage.app.commands, stage.session, post="Book Friday at seven for four")
        await stage.rest()
        replayed = await followed(stage.app.commands, stage.session)
        history = json.loads((await stage.app.commands.history(ALICE, stage.session)).text)

    expected = [row["position"] for row in history["rows"] if row["kind"] == kind]
    assert len(expected) == 1
    reason = {"input": "input_accepted", "tool.result": "tool_result_accepted"}[kind]
    for frames in (live, replayed):
        repairs = [frame for frame in frames if frame.event == "resync"]
        assert [(frame.id, json.loads(frame.data)) for frame in repairs] == [(expected[0], {"reason": reason})]
        assert kind not in [frame.event for frame in frames]
        assert [frame.id for frame in frames if frame.id] == [row["position"] for row in history["rows"]]
        view = View()
        for frame in frames:
            view.apply(frame)
        assert view.holes == [Position.parse(expected[0]).seq]
        view.fill(history)
        assert (view.rows, view.needs_history) == (history["rows"], False)
    assert history["rows"][-1]["kind"] == "turn.end"


async def followed(commands: Any, session: str, *, post: str | None = None) -> list[Frame]:
    """Follow from the start to the end of the turn."""
    found: list[Frame] = []
    async with asyncio.timeout(10), aclosing(await commands.follow(ALICE, session)) as frames:
        async for frame in frames:
            found.append(frame)
            if frame.event == "caught_up" and post is not None:
                await commands.post(ALICE, session, post)
            if frame.event == "turn.end":
                return found
    raise AssertionError(found)


@pytest.mark.rule("H11")
async def test_a_repair_has_its_rows_id_whatever_is_published_right_after(open_store: OpenStore) -> None:
    """Rows of the same commit, pieces of text, things shown live: the id is the row's place, not a count of events."""
    projection = PLAIN.but({Kind.NOTICE: none})
    async with desk_in(open_store, projection=projection) as desk:
        page = await desk.follow().caught_up()
        ticket = desk.accept(notice("one"), said("two"))
        desk.feeds.show(SESSION, "queue", {})
        desk.accept(notice("three"))
        await ticket.durable()
        await page.until(lambda: page.view.holes == [1, 3])

    assert [(frame.event, frame.id) for frame in page.frames] == [
        ("resume", None),
        ("caught_up", None),
        ("resync", "1.1"),
        ("model.said", "1.2"),
        ("queue", None),
        ("resync", "1.3"),
    ]
    assert [row.position for row in ticket.rows] == [Position(1, 1), Position(1, 2)]


async def test_a_hook_may_say_it_otherwise_and_has_no_say_in_the_id(open_store: OpenStore) -> None:
    def other(row: Row, session: str) -> Frame | None:
        return Frame("note", encode({"in": session, "at": row.seq}), id="9.9")

    async with desk_in(open_store, projection=PLAIN.but({Kind.NOTICE: other})) as desk:
        listener, _ = desk.feeds.listen(SESSION)
        await desk.write(notice("one"))
        event = await listener.queue.get()

    assert event is not None
    assert (event.frame.event, event.frame.data, event.frame.id) == ("note", f'{{"in":"{SESSION}","at":1}}', "1.1")
    assert event.frame.sse == f'id: 1.1\nevent: note\ndata: {{"in":"{SESSION}","at":1}}\n\n'.encode()


async def test_what_a_hook_raises_is_logged_and_ends_nothing(
    open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    async with desk_in(open_store, projection=PLAIN.but({Kind.NOTICE: raises})) as desk:
        page = await desk.follow().caught_up()
        await desk.write(notice("one"), said("two"))
        await page.until(lambda: page.view.cursor == "1.2")

    assert [record.getMessage() for record in caplog.records] == ["a row could not be shown"]


def test_the_plain_projection_has_an_event_for_every_kind() -> None:
    assert dict(PLAIN.hooks) == dict.fromkeys(Kind, plainly)
    assert Projection({}).hooks == {}
