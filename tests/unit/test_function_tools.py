"""Python functions behind the `Tools` port: what the model is shown, what a call may hold, what comes back."""

from __future__ import annotations

import asyncio
import contextvars
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import AfterValidator, BaseModel, Field

from sayso.adapters.functions import FunctionTools, describe
from sayso.agent import Agent
from sayso.core.canonical import canonical
from sayso.core.contract import ContractError
from sayso.core.errors import Invalid, ToolFailed
from sayso.core.operation import EffectState, Ref
from sayso.runtime.ports import Absent, Call, File, Output, Tools

if TYPE_CHECKING:
    from sayso.core.rows import Kind as OnlyForTypes


class Board(StrEnum):
    HALF = "half"
    FULL = "full"


class Guest(BaseModel):
    name: str
    age: int


@dataclass
class Booked:
    id: str
    day: date


def tools(*functions: Callable[..., Any], **options: Any) -> Tools:
    agent = Agent("concierge", model="openai:gpt-5-mini", instructions="")
    for function in functions:
        agent.tool(**options)(function)
    return FunctionTools(agent.tools)


def a_call() -> Call:
    return Call("ses_1", "T1", "ses_1:T1.1.1", "user:alice")


def reserve(call: Call, day: date, party: Annotated[int, Field(ge=1, le=12)], nights: float = 1) -> str:
    """Book a table.

    It stands until the restaurant takes it away.

    Args:
        day: the day, as 2026-12-04
        party (int): how many come,
            children too

    Returns:
        The reservation's id.
    """
    return f"{day:%d.%m.%Y} for {party}, {nights} nights"


# --- what the model is shown --------------------------------------------------


def test_a_tool_is_shown_with_its_types_bounds_defaults_and_texts() -> None:
    [offer] = tools(reserve).offers

    assert offer.name == "reserve"
    assert offer.description == (
        "Book a table.\n\nIt stands until the restaurant takes it away.\n\nReturns:\n    The reservation's id."
    )
    assert offer.schema == {
        "type": "object",
        "additionalProperties": False,
        "required": ["day", "party"],
        "properties": {
            "day": {"type": "string", "format": "date", "description": "the day, as 2026-12-04"},
            "party": {
                "type": "integer",
                "minimum": 1,
                "maximum": 12,
                "description": "how many come, children too",
            },
            "nights": {"type": "number", "default": 1},
        },
    }


def test_a_tool_without_arguments_or_texts_is_shown() -> None:
    def now(call: Call) -> str:
        return "noon"

    [offer] = tools(now).offers
    assert (offer.name, offer.description) == ("now", "")
    assert offer.schema == {"type": "object", "additionalProperties": False, "properties": {}}


def test_a_docstring_without_an_args_section_is_the_description() -> None:
    assert describe("Book a table.\n\nArguments: none worth a section.") == (
        "Book a table.\n\nArguments: none worth a section.",
        {},
    )


def test_what_an_args_section_says_of_an_argument_may_go_on_and_hold_a_colon() -> None:
    docstring = """Book.

    Args:
        day: which one:
            note: a Friday

        *parties: of whom

    Raises:
        Full: no table
    """
    assert describe(docstring) == (
        "Book.\n\nRaises:\n    Full: no table",
        {"day": "which one: note: a Friday", "parties": "of whom"},
    )


async def test_an_argument_may_have_a_name_that_a_model_has_its_own_use_for() -> None:
    def odd(call: Call, copy: str, model_config: str, schema: str, _hidden: str, self: str) -> list[str]:
        return [copy, model_config, schema, _hidden, self]

    found = tools(odd)
    arguments = {"copy": "a", "model_config": "b", "schema": "c", "_hidden": "d", "self": "e"}
    assert set(found.offers[0].schema["properties"]) == set(arguments)
    assert found.check("odd", arguments) == arguments
    assert (await found.call("odd", a_call(), arguments)).text == '["a", "b", "c", "d", "e"]'


# --- what a call may hold -----------------------------------------------------


def takes(call: Call, a: Any = None) -> Any:
    return a


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"day": "2026-12-04", "party": "4"}, "party: Input should be a valid integer"),
        ({"day": "2026-12-04", "party": 4.5}, "party: Input should be a valid integer"),
        ({"day": "2026-12-04", "party": True}, "party: Input should be a valid integer"),
        ({"day": "2026-12-04", "party": 13}, "party: Input should be less than or equal to 12"),
        ({"day": "Friday", "party": 4}, "day: "),
        ({"day": 20261204, "party": 4}, "day: "),
        ({"day": "2026-12-04", "party": 4, "nights": "2"}, "nights: Input should be a valid number"),
        ({"day": "2026-12-04", "party": 4, "nights": float("nan")}, "can't be read"),
        ({"day": "2026-12-04"}, "party: Field required"),
        ({"day": "2026-12-04", "party": 4, "smoking": False}, "smoking: Extra inputs are not permitted"),
        ({"day": "2026-12-04", "party": 4, "call": "x"}, "call: Extra inputs are not permitted"),
        ({"day": "2026-12-04", "party": 4, "argument_2": 2}, "argument_2: Extra inputs are not permitted"),
        ({"day": "2026-12-04", "party": object()}, "can't be read"),
        ({}, "day: Field required; party: Field required"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_the_reason(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid) as refused:
        tools(reserve).check("reserve", arguments)
    assert why in refused.value.detail


def test_a_tool_that_is_not_there_is_refused() -> None:
    with pytest.raises(Invalid, match="there is no tool 'reserve_all'"):
        tools(reserve).check("reserve_all", {})


def test_arguments_too_deep_to_read_are_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(Invalid):
        tools(takes).check("takes", {"a": deep})
    while deep:  # taken apart here, since the interpreter would go as deep to drop it
        deep = deep[0]


def test_a_wall_of_faults_is_cut_with_a_count() -> None:
    with pytest.raises(Invalid, match="and 20 more"):
        tools(reserve).check("reserve", {f"x{place}": 1 for place in range(28)})


def test_a_validator_that_breaks_refuses_the_arguments() -> None:
    def breaks(value: int) -> int:
        raise KeyError("no such table")

    def sit(call: Call, table: int) -> None: ...

    sit.__annotations__["table"] = Annotated[int, AfterValidator(breaks)]
    with pytest.raises(Invalid, match=r"can't be read \(KeyError\)"):
        tools(sit).check("sit", {"table": 1})


def test_checked_arguments_are_json_with_defaults_filled_in() -> None:
    checked = tools(reserve).check("reserve", {"day": "2026-12-04", "party": 4})
    assert checked == {"day": "2026-12-04", "party": 4, "nights": 1}


def test_a_whole_number_will_do_for_a_float() -> None:
    checked = tools(reserve).check("reserve", {"day": "2026-12-04", "party": 4, "nights": 2})
    assert checked["nights"] == 2


async def test_a_call_gets_its_arguments_in_the_types_that_it_declares() -> None:
    got: list[object] = []

    def stay(call: Call, day: date, price: Decimal, board: Board, guest: Guest, *, room: Literal["a"] | None) -> None:
        got.extend((day, price, board, guest, room))

    found = tools(stay)
    arguments = {"day": "2026-12-04", "price": "9.90", "board": "half", "guest": {"name": "Ann", "age": 7}, "room": "a"}
    checked = found.check("stay", arguments)
    assert checked == arguments

    await found.call("stay", a_call(), checked)

    assert got == [date(2026, 12, 4), Decimal("9.90"), Board.HALF, Guest(name="Ann", age=7), "a"]


async def test_arguments_that_no_longer_fit_are_refused_before_the_function_runs() -> None:
    with pytest.raises(Invalid):
        await tools(reserve).call("reserve", a_call(), {"day": "2026-12-04"})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_checking_twice_changes_nothing(value: Any) -> None:
    """What is stored of a call is checked again before it runs: it must come out the same."""
    found = tools(takes)
    checked = found.check("takes", {"a": value})
    assert found.check("takes", checked) == checked
    canonical(checked).encode()


def test_a_lone_surrogate_in_an_argument_is_replaced() -> None:
    assert tools(takes).check("takes", {"a": "\ud800"}) == {"a": "\ufffd"}


# --- what comes back ----------------------------------------------------------


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ("booked R1", "booked R1"),
        ("", ""),
        (None, "done"),
        ({"id": "R1", "seats": [1, 2]}, '{"id": "R1", "seats": [1, 2]}'),
        (Booked("R1", date(2026, 12, 4)), '{"id": "R1", "day": "2026-12-04"}'),
        (Guest(name="Zoë", age=7), '{"name": "Zoë", "age": 7}'),
        (4, "4"),
        ("a\ud800b", "a\ufffdb"),
        (["a\ud800b"], '["a\ufffdb"]'),
    ],
)
async def test_a_result_is_text_or_becomes_json(returned: object, text: str) -> None:
    def tool(call: Call) -> object:
        return returned

    async def waiting(call: Call) -> object:
        return returned

    found = tools(tool, waiting)
    assert (await found.call("tool", a_call(), {})).text == text
    assert (await found.call("waiting", a_call(), {})).text == text


@pytest.mark.parametrize("returned", [object(), {"at": threading.Lock()}, float("inf")], ids=["object", "in", "inf"])
async def test_a_result_that_json_cannot_say_fails_by_name(returned: object) -> None:
    def tool(call: Call) -> object:
        return returned

    with pytest.raises(TypeError, match=r"tool returned a .*: return a text or JSON values"):
        await tools(tool).call("tool", a_call(), {})


async def test_what_a_call_made_is_kept_as_texts() -> None:
    def book(call: Call) -> str:
        call.made("reservation", 17, source="restaurant")  # type: ignore[arg-type]  # an untyped tool does this
        call.made("table", "a\ud800", source="restaurant")
        return "booked"

    call = a_call()
    await tools(book).call("book", call, {})
    assert call.refs == [Ref("restaurant", "reservation", "17"), Ref("restaurant", "table", "a\ufffd")]


@pytest.mark.parametrize("error", [ToolFailed("full"), TimeoutError("no answer"), KeyError("id")])
async def test_what_a_tool_raises_comes_through(error: Exception) -> None:
    def tool(call: Call) -> None:
        raise error

    async def waiting(call: Call) -> None:
        raise error

    found = tools(tool, waiting)
    for name in ("tool", "waiting"):
        with pytest.raises(type(error)) as raised:
            await found.call(name, a_call(), {})
        assert str(raised.value) == str(error)


async def test_a_tool_that_is_cancelled_from_within_broke_off() -> None:
    """A client library's lost connection comes as a cancellation; whoever waits must not take it for theirs."""

    async def tool(call: Call) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled from within"):
        await tools(tool).call("tool", a_call(), {})


async def test_a_call_that_is_given_up_is_cancelled() -> None:
    began = asyncio.Event()

    async def tool(call: Call) -> None:
        began.set()
        await asyncio.Event().wait()

    running = asyncio.create_task(tools(tool).call("tool", a_call(), {}))
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_tool_that_raises_stop_iteration_still_comes_to_an_end() -> None:
    def tool(call: Call) -> str:
        return next(iter(()))

    with pytest.raises(RuntimeError, match="StopIteration"):
        await tools(tool).call("tool", a_call(), {})


async def test_a_function_that_is_not_async_runs_beside_the_loop_with_its_context() -> None:
    here = contextvars.ContextVar("here", default="elsewhere")
    here.set("session ses_1")
    go_on = threading.Event()

    def tool(call: Call) -> str:
        assert go_on.wait(10)
        return f"{here.get()}, {threading.current_thread() is threading.main_thread()}"

    running = asyncio.create_task(tools(tool).call("tool", a_call(), {}))
    await asyncio.sleep(0)
    go_on.set()  # only a loop that goes on comes here
    assert (await running).text == "session ses_1, False"


async def test_a_function_that_hands_back_an_awaitable_is_awaited() -> None:
    async def later() -> str:
        return "booked"

    def tool(call: Call) -> Any:
        return later()

    assert (await tools(tool).call("tool", a_call(), {})).text == "booked"


# --- what became of it --------------------------------------------------------


async def became(call: Call, day: date) -> str:
    if day.year == 2026:
        call.made("reservation", 17, source="restaurant")  # type: ignore[arg-type]  # an untyped lookup does this
        return f"{call.key} stands on {day:%d.%m.}"
    raise Absent


async def became_nothing(call: Call) -> None: ...


async def test_a_lookup_is_told_the_key_and_the_arguments_that_it_names() -> None:
    found = tools(reserve, lookup=became)
    assert found.contracts["reserve"].has_lookup
    call = a_call()
    answer = await found.look_up("reserve", call, {"day": "2026-12-04", "party": 4})
    assert answer.text == "ses_1:T1.1.1 stands on 04.12."
    assert call.refs == [Ref("restaurant", "reservation", "17")]


async def test_a_lookup_that_finds_nothing_says_so() -> None:
    with pytest.raises(Absent):
        await tools(reserve, lookup=became).look_up("reserve", a_call(), {"day": "2025-12-04", "party": 4})


async def test_a_lookup_that_returns_none_is_no_answer() -> None:
    """Taken as "never happened", a forgotten `return` would book twice."""
    with pytest.raises(TypeError, match="raise Absent"):
        await tools(reserve, lookup=became_nothing).look_up("reserve", a_call(), {"day": "2026-12-04", "party": 4})


async def test_a_tool_without_a_lookup_cannot_tell() -> None:
    with pytest.raises(TypeError, match="has no lookup"):
        await tools(reserve).look_up("reserve", a_call(), {"day": "2026-12-04", "party": 4})


# --- what can be no tool ------------------------------------------------------


def lock(call: Call, held: threading.Lock) -> None: ...
def callback(call: Call, then: Callable[[], None]) -> None: ...
def unknown_type(call: Call, kind: OnlyForTypes) -> None: ...
def wrong_default(call: Call, party: int = "four") -> None: ...  # type: ignore[assignment]  # what is tested
def none_by_default(call: Call, day: str = None) -> None: ...  # type: ignore[assignment]  # noqa: RUF013 - what is tested
def infinite_default(call: Call, price: float = float("inf")) -> None: ...
def field_by_default(call: Call, party: int = Field(4, ge=1)) -> None: ...


@pytest.mark.rule("F22")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lock, "JSON can't say"),
        (callback, "JSON can't say"),
        (unknown_type, "isn't known where it stands"),
        (wrong_default, "the default of party is no value of its type"),
        (none_by_default, "the default of day is no value of its type"),
        (infinite_default, "the default of price is no value of its type"),
        (field_by_default, "write argument party as Annotated"),
    ],
)
def test_a_signature_that_json_cannot_say_is_refused_before_anything_runs(
    function: Callable[..., Any], why: str
) -> None:
    with pytest.raises(ContractError, match=f"{function.__name__}: .*{why}"):
        tools(function)


def test_types_that_no_argument_has_need_not_exist() -> None:
    def tool(call: Call, day: str) -> OnlyForTypes | None:
        return None

    assert tools(tool).check("tool", {"day": "Friday"}) == {"day": "Friday"}


def test_two_tools_of_one_name_are_refused() -> None:
    one, other = (Agent(name, model="", instructions="") for name in ("one", "other"))
    one.tool(reserve)
    other.tool(reserve)
    with pytest.raises(ContractError, match="reserve: there is a tool of this name already"):
        FunctionTools([*one.tools, *other.tools])


def test_a_schema_is_json() -> None:
    def stay(call: Call, guests: list[Guest], rooms: Mapping[str, Decimal], board: Board = Board.HALF) -> None: ...

    schema = tools(stay).offers[0].schema
    assert json.loads(json.dumps(schema)) == schema
    assert schema["properties"]["board"]["default"] == "half"


# --- texts, files, a guard -----------------------------------------------------


def a_plan(call: Call) -> Any: ...


@pytest.mark.rule("H14")
@pytest.mark.parametrize(
    ("given_back", "text", "files", "is_error"),
    [
        (Output(), "", [], False),
        (Output("one", "two", error=True), "one\ntwo", [], True),
        (Output("one", files=[File("a.txt", b"a")]), "one", ["a.txt"], False),
        (File("a.txt", bytearray(b"a")), "", ["a.txt"], False),
        (["one", File("a.txt", memoryview(b"a")), {"n": 2}], 'one\n{"n": 2}', ["a.txt"], False),
        ((File("a.txt", b"a"), File("b.txt", b"b")), "", ["a.txt", "b.txt"], False),
        (["one", "two"], '["one", "two"]', [], False),
        ([], "[]", [], False),
    ],
)
async def test_what_a_function_gives_back_is_one_text_and_its_files(
    given_back: object, text: str, files: list[str], is_error: bool
) -> None:
    def gives(call: Call) -> Any:
        return given_back

    answer = await tools(gives).call("gives", a_call(), {})

    assert (answer.text, [file.name for file in answer.files], answer.is_error) == (text, files, is_error)
    assert all(type(file.data) is bytes for file in answer.files)


@pytest.mark.rule("H14")
@pytest.mark.parametrize("inside", [{"plan": File("a.txt", b"a")}, [[File("a.txt", b"a")]], {"plan": Output("a")}])
async def test_bytes_inside_json_are_refused_and_never_written_into_a_text(inside: object) -> None:
    def gives(call: Call) -> Any:
        return inside

    with pytest.raises(TypeError, match="return a text or JSON values"):
        await tools(gives).call("gives", a_call(), {})


def test_what_is_no_file_and_no_text_is_refused_where_it_stands() -> None:
    with pytest.raises(TypeError, match=r"file 'a.txt': its data is a str, not bytes"):
        File("a.txt", "text")  # type: ignore[arg-type]  # what an untyped tool does
    with pytest.raises(TypeError, match="int is neither"):
        Output("a", 4)  # type: ignore[arg-type]  # what an untyped tool does
    with pytest.raises(TypeError, match="bytes is neither"):
        Output(files=[b"a"])  # type: ignore[list-item]  # what an untyped tool does


def test_a_file_and_an_output_say_what_they_are_without_their_bytes() -> None:
    held = Output("secret", files=[File("a.txt", b"secret", "text/plain")])

    assert repr(held) == "Output(1 texts, files=(File('a.txt', 6 bytes, 'text/plain'),), error=False)"


async def test_a_guard_is_asked_in_a_thread_or_as_it_is_and_must_return_a_text() -> None:
    async def upper(text: str) -> str:
        return text.upper()

    def thread(text: str) -> str:
        return f"{text} {threading.current_thread() is threading.main_thread()}"

    assert await tools(a_plan, guard=upper).guard("a_plan", "a\ud800") == "A\ufffd"
    assert await tools(a_plan, guard=thread).guard("a_plan", "main:") == "main: False"
    with pytest.raises(TypeError, match="the guard of a_plan returned a NoneType"):
        await tools(a_plan, guard=lambda text: None).guard("a_plan", "a")
    with pytest.raises(TypeError, match="a_plan has no guard"):
        await tools(a_plan).guard("a_plan", "a")


@pytest.mark.parametrize("word", ["committed", "done", ""])
def test_a_failure_that_committed_or_names_no_effect_is_no_failure(word: str) -> None:
    with pytest.raises(ValueError, match=r"did not fail|which is none of"):
        ToolFailed("no", effect=word)


def test_a_failure_says_its_text_and_what_it_left() -> None:
    assert (str(ToolFailed("no")), ToolFailed("no").effect) == ("no", None)
    assert ToolFailed("no", effect="partial").effect is EffectState.PARTIAL
