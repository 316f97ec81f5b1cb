"""A connection that is lost after any frame: the page that comes back shows what one shows that never lost it."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from contextlib import aclosing
from functools import partial

import pytest

from sayso.core.origin import Principal
from sayso.core.rows import ModelCalledBody
from sayso.core.session import Position
from sayso.demo.local import LocalStage, OpenStore, local_stage
from sayso.demo.scenarios import offer
from sayso.journal.feed import Bounds
from sayso.journal.frames import Frame
from sayso.runtime.commands import Caller
from sayso.testing.view import View
from tests.simulation.desk import SESSION, Desk, Follower, began, called, desk_in, done, notice, result, said

ALICE = Caller(Principal.parse("user:alice"), "api token")


async def a_turn_and_a_question(stage: LocalStage, page: View) -> list[Frame]:
    """Play a turn that says something, calls a tool and asks, and return the frames that a page gets meanwhile."""
    frames: list[Frame] = []

    async def read() -> None:
        async with aclosing(await stage.app.commands.follow(ALICE, stage.session)) as coming:
            async for frame in coming:
                frames.append(frame)
                page.apply(frame)

    reading = asyncio.create_task(read())
    for text in ("Hello there", "Book Friday at seven for four"):
        await stage.app.commands.post(ALICE, stage.session, text)
        await stage.rest()
    await stage.hook(offer("20:30"), id="evt_17")
    [question] = await stage.questions()
    assert await stage.answer("alice", question, yes=True) == [200]
    newest = (await stage.app.commands.history(ALICE, stage.session)).token
    async with asyncio.timeout(10):
        while page.cursor != str(newest):  # noqa: ASYNC110 - the page says when
            await asyncio.sleep(0)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    return frames


@pytest.mark.rule("F66", "X20", "X21", "H25")
async def test_after_a_cut_behind_any_frame_a_page_has_the_same_rows_byte_for_byte(open_store: OpenStore) -> None:
    """Whatever kind of row comes next, and whether or not the last frame had an id."""
    async with local_stage(open_store=open_store) as stage:
        whole = View()
        frames = await a_turn_and_a_question(stage, whole)
        rows = [frame.sse for frame in frames if frame.id is not None]
        for cut in range(1, len(frames)):
            page, got = View(), frames[:cut]
            for frame in got:
                page.apply(frame)
            page.cut()
            cursor = None if page.cursor is None else Position.parse(page.cursor)
            async with aclosing(await stage.app.commands.follow(ALICE, stage.session, after=cursor)) as coming:
                async for frame in coming:
                    page.apply(frame)
                    got.append(frame)
                    if page.caught_up:
                        break
            assert [frame.sse for frame in got if frame.id is not None] == rows, cut
            assert (page.rows, page.text, page.cursor) == (whole.rows, whole.text, whole.cursor), cut

    kinds = {frame.event for frame in frames}
    assert kinds >= {"delta", "model.called", "tool.sent", "tool.result", "turn.ask", "consent.approved"}


Step = Callable[[Desk], object]

STEPS: list[Step] = [
    lambda desk: desk.accept(began()),
    lambda desk: desk.journal.write("T1", 1, "Let me "),
    lambda desk: desk.journal.write("T1", 1, "see. "),
    lambda desk: desk.accept(notice("the reservation was changed"), turn=None),
    lambda desk: desk.journal.write("T1", 1, "One moment."),
    lambda desk: desk.accept(ModelCalledBody(1, called().calls, said("Let me see. One moment.").parts)),
    lambda desk: desk.feeds.show(SESSION, "tool.provisional", {"call": "T1.1.1", "text": "raw"}),
    lambda desk: desk.accept(result("seen")),
    lambda desk: desk.journal.write("T1", 2, "It "),
    lambda desk: desk.journal.write("T1", 2, "broke"),
    lambda desk: desk.journal.erase(),
    lambda desk: desk.journal.write("T1", 2, "It's"),
    lambda desk: desk.journal.write("T1", 2, " done."),
    lambda desk: desk.accept(said("It's done.", reply=2), done()),
]

#: what every page shows after each step
TEXTS = [
    None, "Let me ", "Let me see. ", "Let me see. ", "Let me see. One moment.", None, None, None,
    "It ", "It broke", None, "It's", "It's done.", None,
]  # fmt: skip


def shows(page: Follower, newest: int, text: str | None) -> bool:
    """Whether the page shows so many rows and this text."""
    return len(page.view.rows) == newest and page.view.text == text


@pytest.mark.rule("F66", "K5", "H2", "H25")
@pytest.mark.parametrize("ring_rows", [0, 1_000], ids=["from the store", "from the ring"])
async def test_at_every_moment_a_page_that_was_cut_off_shows_what_the_others_show(
    open_store: OpenStore, ring_rows: int
) -> None:
    """One more page is lost and comes back after each step of a turn; all show the same rows and the same text."""
    async with desk_in(open_store, bounds=Bounds(ring_rows=ring_rows)) as desk:
        live = await desk.follow().caught_up()
        pages: list[Follower] = []
        for step, text in zip(STEPS, TEXTS, strict=True):
            step(desk)
            await live.until(partial(shows, live, desk.journal.head, text))
            back = Follower(copy.deepcopy(live.view))
            back.view.cut()
            desk.follow(back, after=back.view.cursor or "0.0")
            pages.append(back)
            for page in pages:
                await page.until(partial(shows, page, desk.journal.head, text))
                assert page.view.rows == live.view.rows
