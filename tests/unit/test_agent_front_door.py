"""What a user's module may declare, and what it may not: `sayso.agent`, and sources as they are then heard."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import sayso
from sayso import Agent, Call, Heard, bearer, standard_webhook
from sayso.adapters.sources import FunctionSource
from sayso.core.contract import ApproverRole, ConsentPolicy, ContractError, Effect, Role
from sayso.core.labels import Integrity
from sayso.runtime.ports import SourceDoor
from sayso.testing.scripted import ScriptedModel

Declare = Callable[[Agent], object]


def agent() -> Agent:
    return Agent("concierge", model="openai:gpt-5-mini", instructions="You book tables.")


async def reserve_table(call: Call, day: str, time: str, party: int) -> str:
    """Book a table."""
    return "booked R1"


async def booked(call: Call, day: str) -> str:
    return "booked R1"


# --- what is declared --------------------------------------------------------


def test_a_tool_declares_its_whole_contract() -> None:
    concierge = agent()

    declared = concierge.tool(
        effect="book",
        keyed=True,
        consent="always",
        when=["day", "time"],
        critical=["party"],
        say="book a table for {party} on {day} at {time}",
        approver="owner",
        timeout_s=1.5,
        good_for_s=60,
        returns="platform",
        lookup=booked,
    )(reserve_table)

    assert declared is reserve_table
    [spec] = concierge.tools
    assert (spec.name, spec.function, spec.description) == ("reserve_table", reserve_table, "Book a table.")
    assert spec.lookup is booked
    contract = spec.contract
    assert (contract.effect, contract.keyed, contract.consent) == (Effect.BOOK, True, ConsentPolicy.ALWAYS)
    assert contract.roles == {"day": Role.WHEN, "time": Role.WHEN, "party": Role.CRITICAL}
    assert contract.fields == ("party", "day", "time")
    assert (contract.approver, contract.returns) == (ApproverRole.OWNER, Integrity.PLATFORM)
    assert (contract.timeout_ms, contract.good_for_ms, contract.has_lookup) == (1500, 60_000, True)


def test_a_bare_tool_stands_at_the_careful_values() -> None:
    concierge = agent()

    @concierge.tool
    def note(call: Call, text: str, loud: bool = False) -> None: ...

    [spec] = concierge.tools
    contract = spec.contract
    assert (contract.effect, contract.keyed, contract.consent) == (Effect.EXTERNAL, False, ConsentPolicy.DERIVED)
    assert contract.roles == {"text": Role.CONTENT, "loud": Role.CONTENT}
    assert (contract.returns, contract.parallel_safe) == (Integrity.OUTSIDER, False)
    assert (spec.description, spec.lookup, contract.has_lookup) == ("", None, False)


def test_say_may_name_an_argument_that_was_given_no_role() -> None:
    concierge = agent()
    concierge.tool(effect="book", say="book for {party}")(reserve_table)
    assert concierge.tools[0].contract.roles["party"] is Role.CONTENT


def test_tools_keep_their_order() -> None:
    concierge = agent()

    @concierge.tool
    def second(call: Call) -> None: ...

    @concierge.tool(effect="read", parallel_safe=True)
    def first(call: Call) -> None: ...

    assert [spec.name for spec in concierge.tools] == ["second", "first"]


def test_a_model_may_be_given_by_name_or_as_it_is() -> None:
    model = ScriptedModel([])
    assert agent().model == "openai:gpt-5-mini"
    assert Agent("concierge", model, "You book tables.").model is model


def quoted_call(agent: Agent) -> None:
    def tool(call: "Call") -> None: ...  # noqa: UP037 - as written where annotations are texts already

    agent.tool(tool)


def qualified_call(agent: Agent) -> None:
    def tool(call: sayso.Call) -> None: ...

    agent.tool(tool)


@pytest.mark.parametrize("declare", [quoted_call, qualified_call])
def test_call_is_known_however_it_is_spelt(declare: Declare) -> None:
    concierge = agent()
    declare(concierge)
    assert len(concierge.tools) == 1


# --- what is refused ---------------------------------------------------------


def positional_only(call: Call, day: str, /) -> None: ...
def many(call: Call, *days: str) -> None: ...
def any_named(call: Call, **days: str) -> None: ...
def nothing() -> None: ...
def no_call(day: str) -> None: ...
def call_is_text(call: str) -> None: ...
def call_is_last(day: str, call: Call) -> None: ...
def call_by_name(*, call: Call) -> None: ...
def call_has_another_name(context: Call) -> None: ...
def untyped(call: Call, day) -> None: ...  # type: ignore[no-untyped-def]  # what is tested
def größe(call: Call) -> None: ...


async def yields(call: Call) -> AsyncIterator[str]:
    yield "booked"


SIGNATURES: dict[str, tuple[Any, str]] = {
    "positional only": (positional_only, "can't be passed by name"),
    "*args": (many, "can't be passed by name"),
    "**kwargs": (any_named, "can't be passed by name"),
    "no parameter": (nothing, "first parameter must be call: Call"),
    "no call": (no_call, "first parameter must be call: Call"),
    "call of another type": (call_is_text, "first parameter must be call: Call"),
    "call not first": (call_is_last, "first parameter must be call: Call"),
    "call by name only": (call_by_name, "first parameter must be call: Call"),
    "call under another name": (call_has_another_name, "first parameter must be call: Call"),
    "no type": (untyped, "argument day needs a type"),
    "a generator": (yields, "must return its result"),
    "a name that no model takes": (größe, "can't be a tool's name"),
    "no function": ("book", "is no function"),
    "a function without a name": (functools.partial(nothing), "is no function"),
}


@pytest.mark.rule("F22")
@pytest.mark.parametrize("name", SIGNATURES)
def test_a_function_that_can_be_no_tool_is_refused_at_once(name: str) -> None:
    function, why = SIGNATURES[name]
    concierge = agent()
    with pytest.raises(ContractError, match=why):
        concierge.tool(function)
    assert concierge.tools == ()


async def lookup_of_party_size(call: Call, size: int) -> str:
    return ""


def lookup_at_once(call: Call) -> str:
    return ""


OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown effect": ({"effect": "buy"}, "effect is 'buy', which is none of none, read, fetch"),
    "unknown consent": ({"effect": "book", "consent": "sometimes"}, "consent is 'sometimes'"),
    "unknown approver": ({"approver": "boss"}, "approver is 'boss', which is none of owner, operator"),
    "unknown integrity": ({"returns": "trusted"}, "returns is 'trusted'"),
    "a role of no argument": ({"when": ["week"]}, "when names week, which is no argument"),
    "a role of the call itself": ({"target": ["call"]}, "target names call, which is no argument"),
    "two roles": ({"when": ["day"], "critical": ["day"]}, "day is given two roles, when and critical"),
    "a text for a list": ({"when": "day"}, r"as when=\['day'\]"),
    "say of no argument": ({"say": "book {table}"}, "say names table"),
    "say with a format": ({"say": "book {party:d}"}, "no other brace"),
    "never asked, effect undeclared": ({"consent": "never"}, "consent=never needs a declared effect"),
    "an effect beside others": ({"effect": "book", "parallel_safe": True}, "parallel-safe"),
    "no time": ({"timeout_s": 0}, "must be positive"),
    "good for no time": ({"good_for_s": -1}, "must be positive"),
    "guard of nothing": ({"guard": lambda: ""}, "guard must take one text"),
    "guard of two": ({"guard": lambda text, more: text}, "guard must take one text"),
    "guard is a text": ({"guard": "secrets"}, "guard must be a function"),
    "guarded first by nothing": ({"guarded_first": True}, "guarded_first needs a guard"),
    "lookup not async": ({"lookup": lookup_at_once}, "lookup must be an async function"),
    "lookup of no argument": ({"lookup": lookup_of_party_size}, "lookup takes size, which is no argument"),
}


@pytest.mark.rule("F22")
@pytest.mark.parametrize("name", OPTIONS)
def test_a_declaration_that_contradicts_itself_is_refused_at_once(name: str) -> None:
    options, why = OPTIONS[name]
    concierge = agent()
    with pytest.raises(ContractError, match=f"reserve_table.*{why}"):
        concierge.tool(**options)(reserve_table)
    assert concierge.tools == ()


@pytest.mark.rule("F22")
def test_a_second_tool_of_one_name_is_refused_and_the_first_kept() -> None:
    concierge = agent()
    concierge.tool(effect="book")(reserve_table)
    with pytest.raises(ContractError, match="reserve_table: there is a tool of this name already"):
        concierge.tool(effect="read")(reserve_table)
    assert [spec.contract.effect for spec in concierge.tools] == [Effect.BOOK]


# --- sources -----------------------------------------------------------------


def heard_by(function: Callable[..., Heard], body: bytes) -> Heard:
    concierge = agent()
    concierge.source("restaurant", bearer("a token for tests, long enough"))(function)
    [spec] = concierge.sources
    door: SourceDoor = FunctionSource(spec, spec.scheme.ready({}))
    return door.hear(body)


def test_a_source_is_handed_what_the_json_says() -> None:
    def restaurant(event: dict[str, Any]) -> Heard:
        return Heard(event["text"], about=[("reservation", event["id"])], gone=True)

    heard = heard_by(restaurant, b'{"text": "R\xc3\xbcckruf", "id": "R1", "id": "R2"}')

    assert heard == Heard("Rückruf", about=[("reservation", "R2")], gone=True)


def test_a_source_may_ask_for_the_bytes_as_they_came() -> None:
    def restaurant(body: bytes) -> Heard:
        return Heard(body.hex())

    assert heard_by(restaurant, b"\xef\xbb\xbfno json") == Heard("efbbbf6e6f206a736f6e")


def test_a_source_is_declared_with_its_scheme_and_returned_unchanged() -> None:
    def restaurant(event: Any) -> Heard:
        return Heard("")

    concierge = agent()
    scheme = standard_webhook("env:RESTAURANT_SECRET")
    declared = concierge.source("restaurant", scheme)(restaurant)
    assert declared is restaurant
    [spec] = concierge.sources
    assert (spec.name, spec.scheme, spec.function, spec.takes_bytes) == ("restaurant", scheme, restaurant, False)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'\xef\xbb\xbf{"text": "a"}',
        '{"text": "a"}'.encode("utf-16"),
        b'{"text": "\xff"}',
        b"[" * 100_000,
        b"NaN",
        b"9" * 10_000,
    ],
    ids=["empty", "cut", "byte order mark", "utf-16", "no utf-8", "deep", "no number", "a number too long"],
)
def test_a_body_that_is_no_json_in_utf8_is_a_value_error_that_names_the_source(body: bytes) -> None:
    with pytest.raises(ValueError, match="source restaurant: the body is no JSON in UTF-8"):
        heard_by(lambda event: Heard(str(event)), body)


@pytest.mark.parametrize(
    ("returned", "why"),
    [
        (None, "returned a NoneType, not a Heard"),
        ("gone", "returned a str, not a Heard"),
        (Heard(None), "heard is a NoneType"),  # type: ignore[arg-type]  # what is tested
        (Heard("a", about="R1"), "about takes a list of pairs"),  # type: ignore[arg-type]  # what is tested
        (Heard("a", about=[("reservation",)]), "about takes a list of pairs"),  # type: ignore[list-item]  # tested
        (Heard("a", about=[("reservation", None)]), "about takes"),  # type: ignore[list-item]  # what is tested
        (Heard("a", about=[("reservation", "")]), "about takes a list of pairs"),
    ],
)
def test_what_is_no_heard_is_a_value_error_that_names_the_source(returned: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"source restaurant: .*{why}"):
        heard_by(lambda event: returned, b"{}")


def test_a_fault_of_the_function_is_a_value_error_that_names_the_source() -> None:
    with pytest.raises(ValueError, match="source restaurant: its function raised KeyError: 'text'"):
        heard_by(lambda event: Heard(event["text"]), b"{}")


async def reads_slowly(event: Any) -> Heard:
    return Heard("")


@pytest.mark.rule("F22")
@pytest.mark.parametrize(
    ("function", "why"),
    [
        (reads_slowly, "can't be async"),
        (lambda: Heard(""), "takes one parameter"),
        (lambda event, more: Heard(""), "takes one parameter"),
        (lambda *event: Heard(""), "takes one parameter"),
        (lambda thing: Heard(""), "takes one parameter"),
    ],
    ids=["async", "no parameter", "two", "*event", "another name"],
)
def test_a_function_that_can_read_no_event_is_refused_at_once(function: Any, why: str) -> None:
    with pytest.raises(ContractError, match=f"source restaurant: .*{why}"):
        agent().source("restaurant", bearer("env:TOKEN"))(function)


@pytest.mark.rule("F22")
@pytest.mark.parametrize("name", ["", "Restaurant", "-restaurant", "rest/aurant", "rest aurant", "r" * 65, "größe"])
def test_a_name_that_can_stand_in_no_path_is_refused_at_once(name: str) -> None:
    with pytest.raises(ContractError, match="can't be a source's name"):
        agent().source(name, bearer("env:TOKEN"))


@pytest.mark.rule("F22")
def test_a_second_source_of_one_name_is_refused() -> None:
    concierge = agent()
    concierge.source("restaurant", bearer("env:TOKEN"))(lambda event: Heard(""))
    with pytest.raises(ContractError, match="source restaurant: there is a source of this name already"):
        concierge.source("restaurant", bearer("env:TOKEN"))(lambda event: Heard(""))


@pytest.mark.rule("F22")
def test_a_secret_in_the_place_of_a_scheme_is_refused_at_once() -> None:
    with pytest.raises(ContractError, match="is no scheme"):
        agent().source("restaurant", "env:TOKEN")  # type: ignore[arg-type]  # what is tested


# --- the package -------------------------------------------------------------


def test_the_package_offers_its_names_and_no_others() -> None:
    assert {name: getattr(sayso, name) for name in sayso.__all__}
    with pytest.raises(AttributeError, match="no attribute 'Agents'"):
        _ = sayso.Agents  # type: ignore[attr-defined]  # what is tested


def test_the_version_is_the_one_that_is_packaged() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert sayso.__version__ == project["version"]


def test_a_user_module_imports_no_server_and_no_client() -> None:
    """So a module of tools is imported in a moment, and beside any server."""
    program = "from sayso import *; import sys; print(sorted({name.partition('.')[0] for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert loaded.isdisjoint({"fastapi", "starlette", "uvicorn", "httpx2", "pydantic_settings", "uuid_utils"})


def test_a_policy_for_input_in_flight_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="none of queue, merge, reject, restart"):
        Agent("a", ScriptedModel([]), "", in_flight="sometimes")  # type: ignore[arg-type]  # what is tested
