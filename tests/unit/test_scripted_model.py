"""What a test decides: the model's words, the time, the ids; and the real clock and ids beside them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.adapters.system import SystemClock, SystemIds
from sayso.core.context import Message, MessageRole
from sayso.core.labels import USER
from sayso.runtime.ports import (
    Clock,
    Finished,
    Ids,
    Model,
    ModelFault,
    ModelRequest,
    ProposedCall,
    TextDelta,
    ToolOffer,
)
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import Cut, ScriptedModel, call, calls, say


def request(*texts: str, turn: str = "T1") -> ModelRequest:
    messages = deque(Message(MessageRole.USER, text, USER, seq) for seq, text in enumerate(texts, 1))
    return ModelRequest("You book tables.", messages, [ToolOffer("book", "", {})], "ses_1", turn)


async def answer(model: Model, asked: ModelRequest) -> list[TextDelta | Finished]:
    async with model.stream(asked) as events:
        return [event async for event in events]


# --- the model's words ------------------------------------------------------------


async def test_a_list_is_answered_reply_by_reply() -> None:
    model = ScriptedModel([calls(call("book", day="Friday", party=4), call("tell")), say("Booked.")])

    assert await answer(model, request("Book")) == [
        Finished("", (ProposedCall("book", {"day": "Friday", "party": 4}), ProposedCall("tell", {})))
    ]
    assert await answer(model, request("Book")) == [TextDelta("Booked."), Finished("Booked.")]
    with pytest.raises(ModelFault, match="script_over"):
        await answer(model, request("Book"))


async def test_a_function_answers_what_it_is_asked() -> None:
    model = ScriptedModel(lambda asked: say(f"You said {asked.messages[-1].text}"))
    assert (await answer(model, request("hello")))[-1] == Finished("You said hello")
    assert (await answer(model, request("hello", "goodbye")))[-1] == Finished("You said goodbye")


@given(st.text())
async def test_the_pieces_make_the_whole(text: str) -> None:
    *pieces, last = await answer(ScriptedModel([say(text)]), request())
    assert last == Finished(text)
    assert "".join(piece.text for piece in pieces if isinstance(piece, TextDelta)) == text


def test_a_call_may_have_an_argument_named_tool() -> None:
    assert call("lend", tool="saw") == ProposedCall("lend", {"tool": "saw"})


async def test_requests_are_kept_light() -> None:
    model = ScriptedModel([say("yes")], last=2)
    asked = request("one", "two", "three", turn="T7")
    await answer(model, asked)
    assert isinstance(asked.messages, deque)
    asked.messages.clear()

    [kept] = model.requests
    assert (kept.instructions, kept.messages, kept.tools) == ("You book tables.", 3, ("book",))
    assert (kept.session, kept.turn) == ("ses_1", "T7")
    assert [message.text for message in kept.last] == ["two", "three"]


async def test_a_script_may_fail() -> None:
    model = ScriptedModel([ModelFault("timeout"), say("Here again.")])
    with pytest.raises(ModelFault, match="timeout"):
        await answer(model, request())
    assert (await answer(model, request()))[-1] == Finished("Here again.")


async def test_a_reply_may_be_cut_after_some_of_its_text() -> None:
    model = ScriptedModel([Cut("Booked for ", ModelFault("truncated"))])
    async with model.stream(request()) as events:
        assert [await anext(events), await anext(events)] == [TextDelta("Booked "), TextDelta("for ")]
        with pytest.raises(ModelFault, match="truncated"):
            await anext(events)


async def test_while_told_to_fail_the_script_is_not_asked() -> None:
    model = ScriptedModel([say("Booked.")])
    model.failing = ModelFault("unavailable")
    for _ in range(2):
        with pytest.raises(ModelFault, match="unavailable"):
            await answer(model, request())
    model.failing = None
    assert (await answer(model, request()))[-1] == Finished("Booked.")
    assert len(model.requests) == 3


async def test_an_answer_can_be_held_until_the_test_lets_it_go() -> None:
    model = ScriptedModel([say("Booked for four.")])
    model.hold = asyncio.Event()
    asking = asyncio.create_task(answer(model, request()))

    await model.until_asked()
    assert (asking.done(), model.open) == (False, 1)

    model.hold.set()
    assert (await asking)[-1] == Finished("Booked for four.")
    assert model.open == 0


async def test_an_answer_can_be_held_in_the_middle_of_its_text() -> None:
    model = ScriptedModel([say("Booked for four.")])
    model.hold_midway = asyncio.Event()
    async with model.stream(request()) as events:
        assert await anext(events) == TextDelta("Booked ")
        rest = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not rest.done()
        model.hold_midway.set()
        assert await rest == TextDelta("for ")


async def test_a_held_answer_can_be_given_up() -> None:
    model = ScriptedModel([say("Booked.")])
    model.hold = asyncio.Event()
    asking = asyncio.create_task(answer(model, request()))
    await model.until_asked()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert model.open == 0


async def test_a_test_can_wait_for_a_later_request() -> None:
    model = ScriptedModel([say("one"), say("two")])
    second = asyncio.create_task(model.until_asked(2))
    await answer(model, request())
    assert not second.done()
    await answer(model, request())
    await second


# --- a clock that stands still ------------------------------------------------------


async def asleep(clock: VirtualClock, instants: Iterable[int], woke: list[int]) -> list[asyncio.Task[None]]:
    """Start a sleeper for each instant, and return when all of them sleep."""

    async def sleep(instant: int) -> None:
        await clock.sleep_until(instant)
        woke.append(instant)

    sleepers = [asyncio.create_task(sleep(instant)) for instant in instants]
    await asyncio.sleep(0)
    return sleepers


async def test_sleepers_wake_in_the_order_of_their_instants() -> None:
    clock, woke = VirtualClock(), list[int]()
    sleepers = await asleep(clock, [30, 10, 20, 10, 40], woke)

    clock.advance(30)
    await asyncio.gather(*sleepers[:4])

    assert woke == [10, 10, 20, 30]
    assert clock.due_ms == 40
    clock.advance_to(40)
    await sleepers[4]


async def test_nobody_wakes_before_it_is_time() -> None:
    clock, woke = VirtualClock(1_000), list[int]()
    [sleeper] = await asleep(clock, [2_000], woke)
    clock.advance(999)
    await asyncio.sleep(0)
    assert not woke
    clock.advance(1)
    await sleeper
    assert clock.now_ms() == 2_000


async def test_each_instant_can_be_had_for_itself() -> None:
    clock, seen = VirtualClock(), list[int]()

    async def every_ten() -> None:
        for instant in (10, 20, 30):
            await clock.sleep_until(instant)
            seen.append(clock.now_ms())

    ticking = asyncio.create_task(every_ten())
    await asyncio.sleep(0)
    while clock.due_ms is not None:
        clock.advance_to(clock.due_ms)
        await asyncio.sleep(0)
    await ticking
    assert seen == [10, 20, 30]


async def test_a_sleeper_that_was_cancelled_is_no_longer_due() -> None:
    clock, woke = VirtualClock(), list[int]()
    early, late = await asleep(clock, [10, 20], woke)
    early.cancel()
    await asyncio.gather(early, return_exceptions=True)
    assert clock.due_ms == 20
    clock.advance(20)
    await late
    assert woke == [20]


async def test_an_instant_that_has_passed_lets_others_go_first() -> None:
    clock, others = VirtualClock(50), list[str]()
    asyncio.get_running_loop().call_soon(others.append, "went")
    await clock.sleep_until(50)
    assert others == ["went"]


def test_time_does_not_go_back() -> None:
    clock = VirtualClock(50)
    with pytest.raises(ValueError, match="49 has passed"):
        clock.advance_to(49)
    with pytest.raises(ValueError, match="has passed"):
        clock.advance(-1)


def test_minutes_are_counted_from_the_start() -> None:
    clock = VirtualClock(1_700_000_000_000)
    assert clock.minutes == 0
    clock.advance(2 * 60_000 - 1)
    assert clock.minutes == 1
    clock.advance(1)
    assert clock.minutes == 2


def test_ids_count_from_one_in_each_run() -> None:
    for _ in range(2):
        ids: Ids = CountingIds()
        assert [ids.session(), ids.session(), ids.event(), ids.node(), ids.secret()] == [
            "ses_1",
            "ses_2",
            "evt_1",
            "node_1",
            "secret_1",
        ]


# --- the real ones ------------------------------------------------------------------


class Hands:
    """The two clocks of a computer, set by hand."""

    def __init__(self) -> None:
        self.wall_ms = self.monotonic_ms = 1_000_000

    def clock(self) -> SystemClock:
        return SystemClock(wall_ns=lambda: self.wall_ms * 1_000_000, monotonic_ns=lambda: self.monotonic_ms * 1_000_000)

    def pass_time(self, ms: int) -> None:
        self.wall_ms += ms
        self.monotonic_ms += ms


def test_the_clock_is_the_wall_clock_also_after_it_was_set_forward() -> None:
    hands = Hands()
    clock = hands.clock()
    hands.pass_time(10)
    assert clock.now_ms() == 1_000_010
    hands.wall_ms += 3_600_000
    assert clock.now_ms() == 4_600_010


def test_a_clock_that_was_set_back_goes_on_slowly_until_the_wall_has_caught_up() -> None:
    hands = Hands()
    clock = hands.clock()
    hands.wall_ms -= 100
    assert clock.now_ms() == 1_000_000
    hands.pass_time(100)
    assert clock.now_ms() == 1_000_050
    hands.pass_time(100)
    assert clock.now_ms() == 1_000_100 == hands.wall_ms
    hands.pass_time(100)
    assert clock.now_ms() == 1_000_200 == hands.wall_ms


@given(st.lists(st.tuples(st.integers(-1000, 1000), st.integers(0, 1000))))
def test_a_clock_never_steps_back(moves: list[tuple[int, int]]) -> None:
    hands = Hands()
    clock = hands.clock()
    before = clock.now_ms()
    for step_ms, passed_ms in moves:
        hands.wall_ms += step_ms
        hands.pass_time(passed_ms)
        now = clock.now_ms()
        assert before <= now
        before = now


async def test_a_sleeper_looks_at_the_clock_again_before_it_wakes() -> None:
    hands = Hands()
    clock: Clock = hands.clock()
    looks = 0

    def now_ns() -> int:
        nonlocal looks
        looks += 1
        hands.pass_time(1)
        return hands.wall_ms * 1_000_000

    clock = SystemClock(wall_ns=now_ns, monotonic_ns=lambda: hands.monotonic_ms * 1_000_000)
    await clock.sleep_until(hands.wall_ms + 4)
    assert hands.wall_ms >= 1_000_005
    assert looks > 2


def test_real_ids_are_new_and_sort_by_time() -> None:
    ids: Ids = SystemIds()
    made = [ids.session() for _ in range(1000)]
    assert made == sorted(set(made))
    assert all(name.startswith("ses_") for name in made)
    assert ids.event().startswith("evt_")
    assert ids.node().startswith("node_")
    assert len({ids.secret() for _ in range(10)}) == 10
    assert len(ids.secret()) >= 43
