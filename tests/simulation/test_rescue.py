"""The process ends while the store takes nothing: what a tool answered is kept beside it, and offered at the next
start. Everything else is asked again (K9)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sayso.adapters.rescue import RescueFile
from sayso.agent import Agent
from sayso.assembly import App
from sayso.core.context import MessageRole
from sayso.core.operation import OperationState, Ref
from sayso.core.origin import Principal
from sayso.core.rows import Kind, Outcome, ToolResultBody
from sayso.demo.local import START_MS, OpenStore
from sayso.runtime.commands import Caller
from sayso.runtime.ports import Call, Evidence, Finished, ModelRequest, Rescue
from sayso.storage.store import Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import ScriptedModel, call, calls, say
from sayso.testing.stores import GatedStore
from tests.simulation.process import process

ALICE = Caller(Principal.parse("user:alice"), "api token")


def script(request: ModelRequest) -> Finished:
    return calls(call("act")) if request.messages[-1].role is MessageRole.USER else say("Done.")


def agent(did: list[str]) -> Agent:
    """One whose tool can't be asked again: no key, no lookup."""
    made = Agent("once", ScriptedModel(script), "Do it.")

    @made.tool(effect="book", keyed=False)
    async def act(call: Call) -> str:
        did.append(call.key)
        call.made("table", "R7", source="restaurant")
        return "booked R7"

    return made


def started(store: Store, clock: VirtualClock, ids: CountingIds, did: list[str], rescue: Rescue) -> App:
    return App(agent(did), store=store, clock=clock, ids=ids, rescue=rescue)


@pytest.mark.rule("K9", "D5")
async def test_an_answer_that_the_store_did_not_take_settles_its_operation_at_the_next_start(
    open_store: OpenStore, tmp_path: Path
) -> None:
    clock, ids, did, kept = VirtualClock(START_MS), CountingIds(), list[str](), tmp_path / "sayso.rescue"
    async with open_store(clock.now_ms) as inside:
        store = GatedStore(inside)
        store.refuse_writes(of=[Kind.TOOL_RESULT])
        async with process(started(store.store, clock, ids, did, RescueFile(kept))) as app:
            session = (await app.commands.open_session(ALICE)).id
            await app.commands.post(ALICE, session, "Go")
            async with asyncio.timeout(10):
                while app.worker.status(session).state != "retrying":  # noqa: ASYNC110 - the worker says when
                    await asyncio.sleep(0)
        assert len(did) == 1
        assert kept.exists()

        store.mend()
        async with process(started(store.store, clock, ids, did, RescueFile(kept))) as app:
            async with asyncio.timeout(10):
                await app.worker.rested()
        rows = await inside.rows(session)
        [operation] = await inside.operations(session)
        [ref] = await inside.refs("restaurant", [Ref("restaurant", "table", "R7")])

    [result] = [row.body for row in rows if isinstance(row.body, ToolResultBody)]
    assert (result.outcome, result.parts[0].text) == (Outcome.OK, "booked R7")
    assert operation.state is OperationState.ANSWERED
    assert ref.session == session
    assert len(did) == 1, "it was not sent again"
    assert not kept.exists(), "what was taken is kept no longer"


@pytest.mark.rule("K9")
def test_a_rescue_file_survives_its_process_and_keeps_a_line_that_it_cannot_read(tmp_path: Path) -> None:
    file = tmp_path / "sayso.rescue"
    one = Evidence("s1", "T1.1.1", "act", happened=True, text="line\nbreak \u2028 and \x00", made=(Ref("r", "k", "v"),))
    other = Evidence("s2", "T9.1.1", "act", happened=False, text="")
    first = RescueFile(file)
    first.keep([one, other])
    file.write_text(file.read_text("utf-8") + "{ no JSON\n", "utf-8")

    second = RescueFile(file)

    assert [*second.of("s1")] == [one]
    assert [*second.of("s2")] == [other]
    second.drop("s1", "T1.1.1")
    second.drop("s2", "T9.1.1")
    assert file.read_text("utf-8") == "{ no JSON\n"
    assert file.stat().st_mode & 0o077 == 0
    assert [*RescueFile(file).of("s1")] == []


@pytest.mark.rule("K9")
def test_where_nothing_can_be_written_the_process_still_ends(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rescue = RescueFile(tmp_path / "missing" / "sayso.rescue")

    rescue.keep([Evidence("s1", "T1.1.1", "act", happened=True, text="booked")])

    assert "an answer could not be rescued" in caplog.text
    assert "booked" not in caplog.text
