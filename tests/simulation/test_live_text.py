"""A reply while it is being written: pieces for those who listen, the text so far for those who join, and the
row for everybody in the end. Pieces carry no id, so no cursor ever points at one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest

from sayso.core.origin import Principal
from sayso.core.session import Position
from sayso.demo.local import LocalStage, OpenStore, local_stage
from sayso.journal.follow import Frame
from sayso.runtime.commands import Caller
from sayso.runtime.ports import ModelFault
from sayso.testing.scripted import Cut, ScriptedModel

ALICE = Caller(Principal.parse("user:alice"), "api token")


@pytest.fixture
async def stage(open_store: OpenStore) -> AsyncIterator[LocalStage]:
    async with local_stage(open_store=open_store) as stage:
        yield stage


class Page:
    """What a page shows: rows by number, and one unfinished reply, applied by its offset."""

    def __init__(self) -> None:
        self.rows: dict[int, Any] = {}
        self.writing: dict[str, Any] | None = None
        self.caught_up = False

    def take(self, frame: Frame) -> None:
        data = json.loads(frame.data)
        match frame.event:
            case "resume":
                self.rows = {seq: row for seq, row in self.rows.items() if seq <= data["keep"]}
                self.writing = None
            case "caught_up":
                self.caught_up = True
            case "delta":
                assert frame.id is None
                self._write(data)
            case "farewell":
                pass
            case _:
                assert frame.id is not None
                self.rows[Position.parse(frame.id).seq] = data
                if data["kind"] in ("model.said", "model.called", "turn.end"):
                    self.writing = None

    def _write(self, data: dict[str, Any]) -> None:
        place = (data["turn"], data["reply"])
        if self.writing is None or (self.writing["turn"], self.writing["reply"]) != place:
            self.writing = {"turn": data["turn"], "reply": data["reply"], "text": ""}
        text = self.writing["text"]
        assert data["offset"] <= len(text), "a piece never leaves a gap before it"
        self.writing["text"] = text[: data["offset"]] + data["text"]

    @property
    def unfinished(self) -> str | None:
        return None if self.writing is None else self.writing["text"]

    @property
    def said(self) -> list[str]:
        return [row["body"]["parts"][0]["text"] for row in self.rows.values() if row["kind"] == "model.said"]


async def reading(stage: LocalStage, page: Page, *, until: str, after: Position | None = None) -> None:
    """Follow until the page shows a row of that kind, or a piece of text."""
    async with aclosing(await stage.app.commands.follow(ALICE, stage.session, after=after)) as frames:
        async for frame in frames:
            page.take(frame)
            if frame.event == until:
                return


@pytest.mark.rule("K5", "H4")
async def test_a_piece_reaches_who_listens_and_the_text_so_far_who_joins(stage: LocalStage) -> None:
    midway = stage.model.hold_midway = asyncio.Event()
    first, joined, last = Page(), Page(), Page()
    await stage.app.commands.post(ALICE, stage.session, "Hello there")
    await stage.model.until_asked()

    async with asyncio.timeout(10):
        await reading(stage, first, until="delta")
        await reading(stage, joined, until="delta")
        assert first.writing == joined.writing == {"turn": "T1", "reply": 1, "text": "All "}
        following = asyncio.create_task(reading(stage, last, until="turn.end"))
        await asyncio.sleep(0)
        midway.set()
        await following

    assert last.said == ["All right."]
    assert last.writing is None


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
    said = events.index("model.said")
    assert events[said - 1] == "delta"
    page = Page()
    for frame in frames[:said]:
        page.take(frame)
    assert page.writing is not None
    assert page.writing["text"] == "All right."
    assert all((frame.id is None) == (frame.event in ("resume", "caught_up", "delta")) for frame in frames)


@pytest.mark.rule("K5")
async def test_text_of_a_reply_that_failed_goes_away(open_store: OpenStore) -> None:
    model = ScriptedModel([Cut("Half a sentence", ModelFault("truncated"))])
    async with local_stage(open_store=open_store, model=model) as stage:
        page, joined = Page(), Page()
        midway = model.hold_midway = asyncio.Event()
        await stage.app.commands.post(ALICE, stage.session, "Hello")
        async with asyncio.timeout(10):
            await reading(stage, page, until="delta")
            written = [page.unfinished]
            midway.set()
            await reading(stage, page, until="turn.end", after=Position(1, 2))
            await reading(stage, joined, until="caught_up")

    assert [*written, page.unfinished, joined.unfinished] == ["Half ", None, None]
    assert page.said == []
