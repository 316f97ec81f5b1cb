"""A reply while it is being written: pieces for those who listen, the text so far for those who join, and the
row for everybody in the end. Pieces carry no id, so no cursor ever points at one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from sayso.core.origin import Principal
from sayso.core.session import Position
from sayso.demo.local import LocalStage, OpenStore, local_stage
from sayso.journal.frames import Frame
from sayso.runtime.commands import Caller
from sayso.runtime.ports import ModelFault
from sayso.testing.scripted import Cut, ScriptedModel
from sayso.testing.view import View

ALICE = Caller(Principal.parse("user:alice"), "api token")


@pytest.fixture
async def stage(open_store: OpenStore) -> AsyncIterator[LocalStage]:
    async with local_stage(open_store=open_store) as stage:
        yield stage


def said(view: View) -> list[str]:
    return [row["body"]["parts"][0]["text"] for row in view.rows if row["kind"] == "model.said"]


async def reading(stage: LocalStage, view: View, *, until: str, after: Position | None = None) -> None:
    """Follow until the page shows a row of that kind, or a piece of text."""
    async with aclosing(await stage.app.commands.follow(ALICE, stage.session, after=after)) as frames:
        async for frame in frames:
            view.apply(frame)
            if frame.event == until:
                return


@pytest.mark.rule("K5", "H4")
async def test_a_piece_reaches_who_listens_and_the_text_so_far_who_joins(stage: LocalStage) -> None:
    midway = stage.model.hold_midway = asyncio.Event()
    first, joined, last = View(), View(), View()
    await stage.app.commands.post(ALICE, stage.session, "Hello there")
    await stage.model.until_asked()

    async with asyncio.timeout(10):
        await reading(stage, first, until="delta")
        await reading(stage, joined, until="delta")
        assert first.text == joined.text == "All "
        following = asyncio.create_task(reading(stage, last, until="turn.end"))
        await asyncio.sleep(0)
        midway.set()
        await following

    assert said(last) == ["All right."]
    assert last.text is None


@pytest.mark.rule("H2", "K5")
async def test_held_text_goes_out_before_the_row_that_ends_it(stage: LocalStage) -> None:
    """Every reader has the whole text when the row comes, and the row's text is the same."""
    frames: list[Frame] = []
    async with asyncio.timeout(10):
        async with aclosing(await stage.app.commands.follow(ALICE, stage.session, after=None)) as stream:
            async for frame in stream:
                if frame.event == "caught_up":
                    await stage.app.commands.post(ALICE, stage.session, "Hello there")
                frames.append(frame)
                if frame.event == "turn.end":
                    break

    events = [frame.event for frame in frames]
    ends = events.index("model.said")
    assert events[ends - 1] == "delta"
    view = View()
    for frame in frames[:ends]:
        view.apply(frame)
    assert view.text == "All right."
    assert all((frame.id is None) == (frame.event in ("resume", "caught_up", "delta")) for frame in frames)


@pytest.mark.rule("K5", "X54")
async def test_text_of_a_reply_that_failed_is_replaced_by_its_row(open_store: OpenStore) -> None:
    model = ScriptedModel([Cut("Half a sentence", ModelFault("truncated"))])
    async with local_stage(open_store=open_store, model=model) as stage:
        page, joined = View(), View()
        midway = model.hold_midway = asyncio.Event()
        await stage.app.commands.post(ALICE, stage.session, "Hello")
        async with asyncio.timeout(10):
            await reading(stage, page, until="delta")
            written = [page.text]
            midway.set()
            await reading(stage, page, until="turn.end", after=Position(1, 2))
            await reading(stage, joined, until="caught_up")

    assert [*written, page.text, joined.text] == ["Half ", None, None]
    assert said(page) == said(joined) == ["Half a sentence"]
