"""What a call came to: shown at once, then guarded and accepted; what it left in the world, on whose say-so, and
which files it gave back. On each store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

from sayso import Agent, Call, File, Output, ToolFailed
from sayso.core.inputs import Input, InputKind
from sayso.core.labels import RUNTIME, Part
from sayso.core.operation import EffectState, OperationState
from sayso.core.origin import Principal
from sayso.core.rows import Kind, NoticeBody, Outcome, ToolResultBody, ToolSentBody, encode_body
from sayso.demo.local import OpenStore
from sayso.journal.feed import Listener
from sayso.journal.frames import Frame
from sayso.runtime.limits import Limits
from sayso.runtime.ports import ModelRequest
from sayso.storage.store import Entry
from sayso.testing.scripted import Reply, call, calls, say
from tests.simulation.room import Room, caller, room

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))


def script(request: ModelRequest) -> Reply:
    """Call what the newest words name, tool by tool; then say that it is done."""
    newest = request.messages[-1]
    _, colon, tools = newest.text.partition("use: ")
    if colon and newest.source.startswith(("user:", "timer:")):
        return calls(*(call(tool) for tool in tools.split("\n")[0].split()))
    return say("done")


def opened(open_store: OpenStore, tools: Callable[[Agent], None], **options: Any) -> Any:
    return room(open_store, tools=tools, answers=script, **options)


def frames(listener: Listener) -> list[Frame]:
    found = []
    while not listener.queue.empty():
        event = listener.queue.get_nowait()
        assert event is not None
        found.append(event.frame)
    return found


async def until(found: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(10):
        while not await found():  # noqa: ASYNC110 - the worker says when
            await asyncio.sleep(0)


def told(tab: list[Frame], event: str) -> list[dict[str, Any]]:
    return [json.loads(frame.data) for frame in tab if frame.event == event]


async def results(room: Room) -> list[ToolResultBody]:
    return await room.bodies(ToolResultBody)


def text(body: ToolResultBody) -> str:
    return "\n".join(part.text for part in body.parts)


# --- shown at once, then accepted ------------------------------------------------


@pytest.mark.rule("X22")
async def test_who_comes_while_a_tool_runs_is_shown_that_it_runs(open_store: OpenStore) -> None:
    """Neither waiting for an answer nor done: its call and its sending are rows, and a result is not."""
    async with room(open_store) as here:
        here.hold.append(asyncio.Event())
        await here.post("alice", "use note: milk")
        await until(lambda: here.bodies(ToolSentBody))
        tab: list[Frame] = []
        async with aclosing(await here.app.commands.follow(caller("alice"), here.session)) as coming:
            async for frame in coming:
                tab.append(frame)
                if frame.event == "caught_up":
                    break

        [called] = told(tab, "model.called")
        [sent] = told(tab, "tool.sent")
        assert [(each["call"], each["verdict"]) for each in called["body"]["calls"]] == [("T1.1.1", "run")]
        assert sent["body"]["call"] == "T1.1.1"
        assert told(tab, "tool.result") == told(tab, "turn.ask") == []
        here.hold.pop().set()
        await here.rest()


def a_printer(agent: Agent) -> None:
    @agent.tool(effect="send", guard=lambda said: said.replace("4711", "****"))
    def print_badge(call: Call) -> Output:
        call.effect("unknown")
        return Output("jammed", "pin 4711", files=[File("preview.png", PNG, "image/png")], error=True)

    @agent.tool(effect="send", guard=lambda said: said.replace("4711", "****"), guarded_first=True)
    def print_pin(call: Call) -> str:
        return "pin 4711"


@pytest.mark.rule("H5")
async def test_a_receipt_is_shown_at_once_and_replaced_once_by_the_accepted_row(open_store: OpenStore) -> None:
    """An error receipt with an unknown effect and a preview file: two tabs see the same, the row has the guarded text,
    its file and on whose say-so it ran; no event has that, nor a byte of the file."""
    async with opened(open_store, a_printer) as office:
        (one, _), (two, _) = (office.app.feeds.listen(office.session) for _ in range(2))
        await office.say("alice", "use: print_badge")

        tab = frames(one)
        assert tab == frames(two)
        preview = {
            "id": "T1.1.1.f1",
            "filename": "preview.png",
            "media_type": "image/png",
            "size_bytes": len(PNG),
        }
        order = [frame.event for frame in tab if frame.event.startswith("tool.")]
        assert order == ["tool.intended", "tool.sent", "tool.provisional", "tool.result"]
        [shown] = told(tab, "tool.provisional")
        assert shown == {
            "session": office.session,
            "turn": "T1",
            "call": "T1.1.1",
            "tool": "print_badge",
            "outcome": "failed",
            "text": "jammed\npin 4711",
            "effect": "unknown",
            "attachments": [preview],
        }
        [accepted] = [frame for frame in tab if frame.event == "tool.result"]
        [body] = await results(office)
        [row] = [row for row in await office.rows() if row.kind is Kind.TOOL_RESULT]
        assert accepted.id == str(row.position)
        public = json.loads(accepted.data)["body"]
        assert [part["text"] for part in public["parts"]] == ["jammed\npin ****"]
        assert (public["call"], public["tool"], public["outcome"]) == ("T1.1.1", "print_badge", "failed")
        assert (public["effect"], public["attachments"]) == ("unknown", [preview])
        assert all(frame.id is None for frame in tab if frame.event == "tool.provisional")
        assert "alice" not in "".join(frame.data for frame in tab if frame.event.startswith("tool."))
        assert "PNG" not in "".join(frame.data for frame in tab)

        assert (body.effect, body.acting_principal) == (EffectState.UNKNOWN, "user:alice")
        [kept] = body.attachments
        assert await office.store.piece(kept.digest, 0) == PNG
        [operation] = await office.store.operations(office.session)
        assert operation.state is OperationState.UNKNOWN


@pytest.mark.rule("H5")
async def test_a_result_that_is_guarded_first_is_shown_as_its_row_alone(open_store: OpenStore) -> None:
    async with opened(open_store, a_printer) as office:
        listener, _ = office.app.feeds.listen(office.session)
        await office.say("alice", "use: print_pin")

        tab = frames(listener)
        assert told(tab, "tool.provisional") == []
        assert "4711" not in "".join(frame.data for frame in tab)
        [body] = await results(office)
        assert (text(body), body.effect) == ("pin ****", EffectState.COMMITTED)


async def shouting(said: str) -> str:
    await asyncio.sleep(0)
    return said.upper()


def broken(_: str) -> str:
    raise RuntimeError("no such pattern")


def silent(_: str) -> Any:
    return None


async def hung(_: str) -> str:
    await asyncio.Event().wait()
    return "never"


@pytest.mark.parametrize(
    ("guard", "tells"),
    [
        (shouting, "SEAT 4"),
        (broken, "what seat said is withheld, because its guard failed with RuntimeError"),
        (silent, "what seat said is withheld, because its guard failed with TypeError"),
        (hung, "what seat said is withheld, because its guard failed with TimeoutError"),
    ],
    ids=["async", "raises", "no text", "hangs"],
)
async def test_where_a_guard_fails_the_text_is_withheld_and_the_effect_stays_what_it_was(
    open_store: OpenStore, guard: Any, tells: str
) -> None:
    def tools(agent: Agent) -> None:
        @agent.tool(effect="book", guard=guard, guarded_first=True)
        def seat(call: Call) -> str:
            return "seat 4"

    async with opened(open_store, tools, limits=Limits(guard_ms=50)) as office:
        await office.say("alice", "use: seat")

        [body] = await results(office)
        assert (text(body), body.outcome, body.effect) == (tells, Outcome.OK, EffectState.COMMITTED)
        assert [part.source for part in body.parts] == ["tool:seat" if tells.isupper() else "runtime"]
        shown = [message.text for message in office.model.requests[-1].last if message.call]
        assert len(shown) == 1
        assert tells in shown[0]
        assert "seat 4" not in shown[0]


async def test_a_refusal_of_the_tool_is_guarded_too(open_store: OpenStore) -> None:
    def tools(agent: Agent) -> None:
        @agent.tool(effect="book", guard=lambda said: said.replace("4711", "****"))
        def seat(call: Call) -> str:
            raise ToolFailed("no seat for card 4711")

    async with opened(open_store, tools) as office:
        await office.say("alice", "use: seat")

        [body] = await results(office)
        assert text(body) == "no seat for card ****"


@pytest.mark.rule("H5")
async def test_what_is_shown_before_it_is_accepted_is_cut_to_a_limit_of_its_own(open_store: OpenStore) -> None:
    def tools(agent: Agent) -> None:
        @agent.tool(effect="read")
        def manual(call: Call) -> Output:
            return Output("\0" * 300, files=[File(f"{n}.bin", b"x" * 100) for n in range(4)])

    limits = Limits(provisional_bytes=100, result_bytes=200, result_files=2)
    async with opened(open_store, tools, limits=limits) as office:
        listener, _ = office.app.feeds.listen(office.session)
        await office.say("alice", "use: manual")

        [shown] = told(frames(listener), "tool.provisional")
        assert shown["text"] == "\0" * 100 + "… (cut: 200 more bytes)"
        assert [file["filename"] for file in shown["attachments"]] == ["0.bin", "1.bin"]
        [body] = await results(office)
        assert text(body).startswith("\0" * 200 + "… (cut: 100 more bytes)\n")


# --- what it left in the world ---------------------------------------------------


def tools_that_say(agent: Agent) -> None:
    def declare(name: str, does: Callable[[Call], Any], effect: str = "book") -> None:
        def tool(call: Call) -> Any:
            return does(call)

        tool.__name__ = name
        agent.tool(effect=effect)(tool)

    def fails(**options: Any) -> Callable[[Call], Any]:
        def does(call: Call) -> Any:
            call.made("seat", "S1", source="restaurant")
            raise ToolFailed("no", **options)

        return does

    def says(word: str, then: Any = "so far") -> Callable[[Call], Any]:
        def does(call: Call) -> Any:
            call.made("seat", "S1", source="restaurant")
            call.effect(word)
            if isinstance(then, Exception):
                raise then
            return then

        return does

    def breaks(call: Call) -> Any:
        call.effect("partial")
        raise OSError("connection reset")

    declare("answers", lambda call: "booked")
    declare("reads", lambda call: "four", effect="read")
    declare("reads_and_fails", fails(), effect="read")
    declare("refuses", fails())
    declare("undoes", fails(effect="rolled_back"))
    declare("half", fails(effect="partial"))
    declare("perhaps", fails(effect="unknown"))
    declare("says_half", says("partial"))
    declare("says_undone", says("rolled_back"))
    declare("says_nothing_to_do", says("none"))
    declare("says_half_and_refuses", says("partial", ToolFailed("no")))
    declare("reports_an_error", lambda call: Output("503", error=True))
    declare("reports_an_error_of_a_read", lambda call: Output("404", error=True), effect="read")
    declare("breaks_off", breaks)
    declare("breaks_off_reading", breaks, effect="read")


ANSWERED, FAILED, UNKNOWN = OperationState.ANSWERED, OperationState.FAILED, OperationState.UNKNOWN
SAID = [
    ("answers", Outcome.OK, "committed", ANSWERED, 0),
    ("reads", Outcome.OK, None, None, 0),
    ("reads_and_fails", Outcome.FAILED, "none", None, 0),
    ("refuses", Outcome.FAILED, "none", FAILED, 0),
    ("undoes", Outcome.FAILED, "rolled_back", FAILED, 0),
    ("half", Outcome.FAILED, "partial", ANSWERED, 1),
    ("perhaps", Outcome.FAILED, "unknown", UNKNOWN, 1),
    ("says_half", Outcome.FAILED, "partial", ANSWERED, 1),
    ("says_undone", Outcome.FAILED, "rolled_back", FAILED, 0),
    ("says_nothing_to_do", Outcome.OK, "none", ANSWERED, 1),
    ("says_half_and_refuses", Outcome.FAILED, "partial", ANSWERED, 1),
    ("reports_an_error", Outcome.FAILED, "unknown", UNKNOWN, 0),
    ("reports_an_error_of_a_read", Outcome.FAILED, None, None, 0),
    ("breaks_off", Outcome.UNKNOWN, "unknown", UNKNOWN, 0),
    ("breaks_off_reading", Outcome.FAILED, None, None, 0),
]


@pytest.mark.rule("H5", "H9")
async def test_a_result_says_what_its_call_left_as_far_as_somebody_saw_it(open_store: OpenStore) -> None:
    """What nobody saw is unknown, never none; what a tool says counts before what its answer looks like."""
    async with opened(open_store, tools_that_say) as office:
        for turn, (tool, outcome, effect, state, refs) in enumerate(SAID, 1):
            await office.say("alice", f"use: {tool} answers")

            first, second = (await results(office))[-2:]
            assert (first.tool, first.outcome, first.effect, len(first.made)) == (tool, outcome, effect, refs)
            operations = {row.operation: row.state for row in await office.store.operations(office.session)}
            assert operations.get(f"T{turn}.1.1") == state, tool
            # what comes after a call that did not succeed does not start (K15), and left nothing
            after = (Outcome.OK, "committed") if outcome is Outcome.OK else (Outcome.NOT_STARTED, "none")
            assert (second.outcome, second.effect) == after, tool


@pytest.mark.parametrize("word", ["done", "", "Committed"])
async def test_a_word_for_an_effect_that_is_none_is_the_tools_fault_and_leaves_it_unknown(
    open_store: OpenStore, word: str
) -> None:
    def tools(agent: Agent) -> None:
        @agent.tool(effect="book")
        def seat(call: Call) -> str:
            call.effect(word)
            return "booked"

        @agent.tool(effect="book")
        def table(call: Call) -> str:
            raise ToolFailed("no", effect="committed")

    async with opened(open_store, tools) as office:
        await office.say("alice", "use: seat")
        await office.say("alice", "use: table")

        for body in await results(office):
            assert (body.outcome, body.effect) == (Outcome.UNKNOWN, EffectState.UNKNOWN)
            assert "it may or may not have happened" not in text(body)


# --- on whose say-so -------------------------------------------------------------


@pytest.mark.rule("H9")
async def test_both_shapes_of_a_result_name_who_acted_and_not_who_owns_the_session(open_store: OpenStore) -> None:
    """Bob's turn in alice's session: one call is answered, the other is not, a third never starts."""
    async with opened(open_store, tools_that_say) as office:
        await office.invite("bob")
        listener, _ = office.app.feeds.listen(office.session)
        await office.say("bob", "use: answers breaks_off answers")

        found = [(body.outcome, body.effect, body.acting_principal) for body in await results(office)]
        assert found == [
            (Outcome.OK, EffectState.COMMITTED, "user:bob"),
            (Outcome.UNKNOWN, EffectState.UNKNOWN, "user:bob"),
            (Outcome.NOT_STARTED, EffectState.NONE, "user:bob"),
        ]
        shown = [frame.data for frame in frames(listener) if frame.event.startswith("tool.")]
        assert shown
        assert "bob" not in "".join(shown)


@pytest.mark.rule("H9", "B10")
async def test_what_a_consent_fixed_is_done_on_the_say_so_of_who_gave_it(open_store: OpenStore) -> None:
    """The restaurant's call waits on the restaurant's account; the step that ran, on alice's."""

    def answers(request: ModelRequest) -> Reply:
        newest = request.messages[-1]
        asks = newest.source.startswith("source:")
        return calls(call("note", what="20:30")) if asks else say("done")

    async with room(open_store, answers=answers) as office:
        await office.hook("20:30 is free", id="evt_1")
        await office.rest()
        await office.yes("alice")

        found = [(body.outcome, body.effect, body.acting_principal) for body in await results(office)]
        assert found == [
            (Outcome.WAITING, EffectState.NONE, "source:restaurant"),
            (Outcome.OK, EffectState.COMMITTED, "user:alice"),
        ]


@pytest.mark.rule("H10")
async def test_where_nobody_is_behind_a_turn_its_results_have_no_key_for_it(open_store: OpenStore) -> None:
    """A timer's turn: absent, not empty; and a read of it has nothing to say of its effect either."""
    async with opened(open_store, tools_that_say) as office:
        timer = Principal.parse("timer:7")
        received = Input(InputKind.EVENT, timer, "runtime", (Part("use: reads answers", "timer:7", RUNTIME),))
        await office.store.put(Entry(office.session, "timer", "7@1", received, "sha256:1", keep_ms=1_000))
        office.app.worker.hint(office.session)
        await office.rest()

        read, asked = await results(office)
        assert "acting_principal" not in json.loads(encode_body(read))
        assert "effect" not in json.loads(encode_body(read))
        assert (asked.outcome, asked.acting_principal) == (Outcome.WAITING, None)


# --- texts and files -------------------------------------------------------------


def an_artist(agent: Agent) -> None:
    @agent.tool(effect="read")
    def draw(call: Call) -> list[Any]:
        return ["a plan", File("plan.png", PNG, "image/png"), "of the room"]

    @agent.tool(effect="read")
    def photo(call: Call) -> File:
        return File("../photo.png", PNG, "Image/PNG; q=1")

    @agent.tool(effect="read")
    def lists(call: Call) -> list[str]:
        return ["one", "two"]

    @agent.tool(effect="read")
    def hides(call: Call) -> dict[str, Any]:
        return {"inside": File("plan.png", PNG)}

    @agent.tool(effect="read")
    def album(call: Call) -> Output:
        return Output("five", files=[File(f"{n}.bin", bytes([n]) * 40) for n in range(5)])


@pytest.mark.rule("H14")
async def test_texts_are_one_scalar_and_files_are_attachments_with_no_byte_in_a_row_an_event_or_the_history(
    open_store: OpenStore,
) -> None:
    async with opened(open_store, an_artist) as office:
        listener, _ = office.app.feeds.listen(office.session)
        await office.say("alice", "use: draw")

        scalar = "a plan\nof the room"
        [body] = await results(office)
        assert [part.text for part in body.parts] == [scalar]
        tab = frames(listener)
        assert [shown["text"] for shown in told(tab, "tool.provisional")] == [scalar]
        page = await office.app.commands.history(caller("alice"), office.session)
        [stored] = [row for row in page.rows if row.kind is Kind.TOOL_RESULT]
        [accepted] = [frame for frame in tab if frame.event == "tool.result"]
        assert json.loads(accepted.data)["body"]["parts"][0]["text"] == scalar
        assert (stored.body, str(stored.position)) == (body, accepted.id)

        [kept] = body.attachments
        assert (kept.filename, kept.media_type, kept.size_bytes) == ("plan.png", "image/png", len(PNG))
        found = await office.app.files.attachment(caller("alice"), office.session, kept.id)
        assert b"".join([piece async for piece in office.app.files.pieces(found)]) == PNG
        for said in (encode_body(body), *(frame.data for frame in tab)):
            assert "PNG" not in said
        shown = office.model.requests[-1].last[-1]
        assert scalar in shown.text
        assert [attached.id for attached in shown.attachments] == ["T1.1.1.f1"]


@pytest.mark.rule("H14")
@pytest.mark.parametrize(
    ("tool", "outcome", "said", "files"),
    [
        ("photo", Outcome.OK, "", [("photo.png", "image/png")]),
        ("lists", Outcome.OK, '["one", "two"]', []),
        ("hides", Outcome.FAILED, "the tool broke off with TypeError", []),
    ],
)
async def test_a_file_alone_is_a_result_a_list_of_texts_is_json_and_a_file_inside_json_is_refused(
    open_store: OpenStore, tool: str, outcome: Outcome, said: str, files: list[tuple[str, str]]
) -> None:
    async with opened(open_store, an_artist) as office:
        await office.say("alice", f"use: {tool}")

        [body] = await results(office)
        assert (body.outcome, text(body)) == (outcome, said)
        assert [(file.filename, file.media_type) for file in body.attachments] == files


@pytest.mark.rule("H14")
async def test_a_file_that_is_too_large_or_one_too_many_is_named_and_not_lost_silently(open_store: OpenStore) -> None:
    async with opened(open_store, an_artist, limits=Limits(result_files=3, result_files_bytes=100)) as office:
        await office.say("alice", "use: album")

        [body] = await results(office)
        assert text(body).split("\n") == [
            "five",
            "(file 2.bin of 40 bytes was not kept: the files of a result may have 100 bytes together)",
            "(2 more files were not kept: a result may bring 3)",
        ]
        assert [(file.id, file.filename) for file in body.attachments] == [
            ("T1.1.1.f1", "0.bin"),
            ("T1.1.1.f2", "1.bin"),
        ]


@pytest.mark.rule("X58")
async def test_text_that_a_database_would_refuse_is_stored_and_read_as_it_came(open_store: OpenStore) -> None:
    def tools(agent: Agent) -> None:
        @agent.tool(effect="book")
        def odd(call: Call) -> Output:
            call.made("se\0at", "S\0 1", source="restaurant")
            return Output("a\0b\ud800c", files=[File("n\0ame\ud800.txt", b"\0", "te\0xt/plain")])

    async with opened(open_store, tools) as office:
        await office.say("alice", "use: odd")

        [body] = await results(office)
        assert text(body) == "a\0b\ufffdc"
        assert [(file.filename, file.media_type) for file in body.attachments] == [
            ("name\ufffd.txt", "application/octet-stream")
        ]
        assert "a[U+0000]b\ufffdc" in office.model.requests[-1].last[-1].text


# --- one after the other ----------------------------------------------------------


@pytest.mark.rule("X23")
async def test_a_call_that_ended_is_seen_while_its_neighbours_are_out(open_store: OpenStore) -> None:
    """Its row is durable and its text is shown before the batch is whole."""
    ends = asyncio.Event()

    def tools(agent: Agent) -> None:
        @agent.tool(effect="read", parallel_safe=True)
        async def quick(call: Call) -> str:
            return "quick"

        @agent.tool(effect="read", parallel_safe=True)
        async def slow(call: Call) -> str:
            await ends.wait()
            return "slow"

    async with opened(open_store, tools) as office:
        listener, _ = office.app.feeds.listen(office.session)
        await office.post("alice", "use: slow quick")
        await until(lambda: results(office))
        early = frames(listener)
        ends.set()
        await office.rest()

        assert [shown["tool"] for shown in told(early, "tool.provisional")] == ["quick"]
        assert [json.loads(f.data)["body"]["tool"] for f in early if f.event == "tool.result"] == ["quick"]
        assert [body.tool for body in await results(office)] == ["quick", "slow"]


@pytest.mark.rule("X6")
async def test_a_notice_between_a_call_and_its_result_ends_no_batch(open_store: OpenStore) -> None:
    """It stands where it came; the model is shown the batch whole, and the notice behind it (K30)."""
    began, ends = asyncio.Event(), asyncio.Event()

    def tools(agent: Agent) -> None:
        @agent.tool(effect="book")
        async def seat(call: Call) -> str:
            began.set()
            await ends.wait()
            return f"seat {call.key[-1]}"

    async with opened(open_store, tools) as office:
        await office.post("alice", "use: seat seat")
        await began.wait()
        notice = Input(InputKind.NOTICE, Principal.parse("source:restaurant"), "x", (Part("hot", "source:r", RUNTIME),))
        await office.store.put(Entry(office.session, "restaurant", "e1", notice, "sha256:1", keep_ms=1_000))
        office.app.worker.hint(office.session)
        await until(lambda: office.bodies(NoticeBody))
        ends.set()
        await office.rest()

        kinds = [row.kind for row in await office.rows()]
        assert kinds.index(Kind.NOTICE) < kinds.index(Kind.TOOL_RESULT)
        assert [text(body) for body in await results(office)] == ["seat 1", "seat 2"]
        roles = [message.role for message in office.model.requests[-1].last]
        assert roles == ["user", "assistant", "result", "result", "data"]
