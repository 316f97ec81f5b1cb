"""Python functions as tools.

What validates a call's arguments is what the model was shown: both come from the function's signature.
Nothing is guessed: a text is no number, and an argument that the function doesn't take is refused.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python

from sayso.core.contract import Contract, ContractError
from sayso.core.errors import Invalid
from sayso.core.operation import Ref
from sayso.core.text import scrub, scrub_json
from sayso.runtime.ports import Call, File, Output, ToolAnswer, ToolOffer

#: functions that are not async and run at once; further ones wait within their own timeout
THREADS_MAX = 32
#: faults of one call's arguments that the model is told
FAULTS_MAX = 10


class DeclaredTool(Protocol):
    """A tool as `sayso.agent.ToolSpec` declares it."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Any]: ...
    @property
    def contract(self) -> Contract: ...
    @property
    def description(self) -> str: ...
    @property
    def lookup(self) -> Callable[..., Awaitable[Any]] | None: ...
    @property
    def guard(self) -> Callable[[str], Any] | None: ...
    @property
    def release(self) -> Callable[..., Any] | None: ...


class FunctionTools:
    """The functions of an agent, behind the `Tools` port.

    Raises:
        ContractError: two tools have one name, or a signature has a type or a default that JSON can't say.
    """

    def __init__(self, specs: Iterable[DeclaredTool], *, threads_max: int = THREADS_MAX) -> None:
        self._tools: dict[str, _Tool] = {}
        for spec in specs:
            if spec.name in self._tools:
                raise ContractError(f"{spec.name}: there is a tool of this name already")
            self._tools[spec.name] = _tool(spec)
        self._offers = tuple(tool.offer for tool in self._tools.values())
        self._contracts = {name: tool.spec.contract for name, tool in self._tools.items()}
        for tool in tuple(self._tools.values()):
            if tool.spec.release is not None:
                undoing = tool.spec.contract.releasing()
                self._tools[undoing.tool] = tool
                self._contracts[undoing.tool] = undoing
        self._threads = ThreadPoolExecutor(threads_max, thread_name_prefix="sayso-tool")

    @property
    def contracts(self) -> Mapping[str, Contract]:
        """Every tool's declaration, by name, and that of the call which undoes what it did, as `book.release`."""
        return self._contracts

    @property
    def offers(self) -> Sequence[ToolOffer]:
        """The tools as a model is shown them."""
        return self._offers

    def check(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments as they would be used: validated, JSON values only, defaults filled in.

        Raises:
            Invalid: they are not what the tool takes; the text is for the model.
        """
        return self._read(tool, arguments).model_dump(mode="json", by_alias=True)

    async def call(self, tool: str, call: Call, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the function with `arguments` as `check` returned them, in the types that it declares; or the tool's
        `release`, with those of them that it takes.

        Raises:
            Invalid: they do not fit (any more); the function was not called.
            ToolFailed: the function says that it did not happen.
            TypeError: it returned what is neither text, JSON, `Output`, nor a list of texts and `File`s.
            RuntimeError: it was cancelled, and not by us.
            Exception: whatever else the function raises.
        """
        values, spec = self._values(tool, arguments), self._tools[tool].spec
        function = spec.function
        if self._contracts[tool].undoes and spec.release is not None:
            function = spec.release
            values = {name: values[name] for name in list(inspect.signature(function).parameters)[1:]}
        result = await _unless_cancelled(tool, self._run(function, call, **values))
        _as_texts(call.refs)
        return _answer(tool, result)

    async def guard(self, tool: str, text: str) -> str:
        """Return what the tool's guard leaves of a text.

        Raises:
            TypeError: there is no guard, or it returned no text.
            Exception: whatever else the guard raises.
        """
        guard = self._tools[tool].spec.guard
        if guard is None:
            raise TypeError(f"{tool} has no guard")
        left = await _unless_cancelled(f"the guard of {tool}", self._run(guard, text))
        if not isinstance(left, str):
            raise TypeError(f"the guard of {tool} returned a {type(left).__name__}, not a text")
        return scrub(left)

    async def look_up(self, tool: str, call: Call, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Ask the tool's `lookup` what became of the operation with this key.

        Raises:
            Absent: it never happened there.
            TypeError: there is no lookup, or it returned neither text nor JSON. None is no answer: a lookup
                that meant "nothing there" and one that forgot its `return` look the same.
            Exception: whatever else the lookup raises.
        """
        values = self._values(tool, arguments)
        lookup = self._tools[tool].spec.lookup
        if lookup is None:
            raise TypeError(f"{tool} has no lookup")
        wanted = list(inspect.signature(lookup).parameters)[1:]
        result = await _unless_cancelled(tool, lookup(call, **{name: values[name] for name in wanted}))
        if result is None:
            raise TypeError(f"the lookup of {tool} returned None: raise Absent, or return what the tool would have")
        _as_texts(call.refs)
        return _answer(tool, result)

    def _values(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        read = self._read(tool, arguments)
        return {name: getattr(read, field) for name, field in self._tools[tool].fields.items()}

    def _read(self, tool: str, arguments: Mapping[str, Any]) -> BaseModel:
        """Return the arguments in the function's types. By way of JSON, whose strict reading still knows that
        a date is written as a text."""
        if tool not in self._tools:
            raise Invalid(f"there is no tool {tool!r}")
        try:
            text = json.dumps(scrub_json(dict(arguments)), allow_nan=False)
            return self._tools[tool].model.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise Invalid(_faults(error)) from None
        except Exception as error:  # a validator of the user's may raise anything
            raise Invalid(f"the arguments can't be read ({type(error).__name__})") from error

    async def _run(self, function: Callable[..., Any], /, *args: Any, **values: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **values)
        run = partial(contextvars.copy_context().run, _to_its_end, partial(function, *args, **values))
        result = await asyncio.get_running_loop().run_in_executor(self._threads, run)
        return await result if inspect.isawaitable(result) else result


async def _unless_cancelled(tool: str, running: Awaitable[Any]) -> Any:
    """Return what it returns. A cancellation that is not ours, as of a client whose connection was lost, is the
    tool's failure: it must not end whoever waits."""
    try:
        return await running
    except asyncio.CancelledError as error:
        waiting = asyncio.current_task()
        if waiting is None or waiting.cancelling():
            raise
        raise RuntimeError(f"{tool} was cancelled from within") from error


def _to_its_end(function: Callable[[], Any]) -> Any:
    try:
        return function()
    except StopIteration as stop:  # no future can carry one: whoever waits would wait for ever
        raise RuntimeError("the tool raised StopIteration") from stop


# --- from a signature to a schema --------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tool:
    spec: DeclaredTool
    offer: ToolOffer
    model: type[BaseModel]
    #: name of each argument, and of the model's field that holds it
    fields: Mapping[str, str]


#: tools that were made, by their name, description and arguments; beyond so many none is kept
MADE_MAX = 1_000
_MADE: dict[tuple[Any, ...], _Tool] = {}


class _Untitled(GenerateJsonSchema):
    """A schema without the titles that only repeat each argument's name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _tool(spec: DeclaredTool) -> _Tool:
    parameters = list(inspect.signature(spec.function).parameters.values())[1:]
    types = _types(spec, parameters)
    declared = tuple((each.name, types[each.name], type(each.default), each.default) for each in parameters)
    try:
        made = _MADE.get((spec.name, spec.description, declared))
    except TypeError:  # a type or a default that has no hash
        return _made(spec, parameters, types)
    if made is None:
        made = _made(spec, parameters, types)
        if len(_MADE) < MADE_MAX:
            _MADE[spec.name, spec.description, declared] = made
    return replace(made, spec=spec)


def _made(spec: DeclaredTool, parameters: list[inspect.Parameter], types: dict[str, Any]) -> _Tool:
    """Return a tool with its model, which takes milliseconds to make."""
    description, said_of = describe(spec.description)
    # Fields are numbered, because an argument may have a name that a model has its own use for, as `copy`.
    fields = {each.name: f"argument_{place}" for place, each in enumerate(parameters)}
    definitions: dict[str, Any] = {
        fields[each.name]: (types[each.name], _field(spec.name, each, types[each.name], said_of.get(each.name)))
        for each in parameters
    }
    try:
        model = create_model(spec.name, __config__=ConfigDict(extra="forbid", strict=True), **definitions)
        schema = model.model_json_schema(schema_generator=_Untitled)
    except PydanticUserError as error:
        raise ContractError(f"{spec.name}: JSON can't say one of its arguments: {error.message}") from error
    schema.pop("title", None)
    return _Tool(spec, ToolOffer(spec.name, description, schema), model, fields)


def _types(spec: DeclaredTool, parameters: list[inspect.Parameter]) -> dict[str, Any]:
    """Return the types of the arguments. The other annotations may name what only a type checker imports."""
    annotated = SimpleNamespace(__annotations__={each.name: each.annotation for each in parameters})
    names = getattr(inspect.unwrap(spec.function), "__globals__", {})
    try:
        return get_type_hints(annotated, globalns=names, include_extras=True)
    except NameError as error:
        raise ContractError(f"{spec.name}: a type of its arguments isn't known where it stands: {error}") from error


def _field(tool: str, parameter: inspect.Parameter, type_: Any, description: str | None) -> Any:
    options: dict[str, Any] = {"alias": parameter.name}
    if description:
        options["description"] = description
    if parameter.default is parameter.empty:
        return Field(**options)
    _check_default(tool, parameter, type_)
    return Field(default=parameter.default, **options)


def _check_default(tool: str, parameter: inspect.Parameter, type_: Any) -> None:
    """Refuse a default that could not be stored and read back, since a call left out is called with it."""
    if isinstance(parameter.default, FieldInfo):
        raise ContractError(f"{tool}: write argument {parameter.name} as Annotated[…, Field(…)] = default")
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(type_)
        stored = json.dumps(adapter.dump_python(parameter.default, mode="json", warnings=False), allow_nan=False)
        adapter.validate_json(stored, strict=True)
    except (ValueError, TypeError) as error:
        raise ContractError(f"{tool}: the default of {parameter.name} is no value of its type") from error
    except PydanticUserError as error:
        raise ContractError(f"{tool}: JSON can't say argument {parameter.name}: {error.message}") from error


_ARGS = re.compile(r"(Args|Arguments):\s*")
_ENTRY = re.compile(r"(?P<indent>\s+)\*{0,2}(?P<name>\w+)\s*(\([^)]*\))?\s*:\s*(?P<text>.*)")


def describe(docstring: str) -> tuple[str, dict[str, str]]:
    """Return a docstring without its "Args:" section, and what that section says of each argument."""
    rest: list[str] = []
    said_of: dict[str, str] = {}
    inside, indent, name = False, "", ""
    for line in inspect.cleandoc(docstring).splitlines():
        if _ARGS.fullmatch(line):
            inside, indent, name = True, "", ""
            continue
        inside = inside and (not line or line[0].isspace())
        if not inside:
            rest.append(line)
        elif (entry := _ENTRY.fullmatch(line)) and entry["indent"] == (indent or entry["indent"]):
            indent, name = entry["indent"], entry["name"]
            said_of[name] = entry["text"].strip()
        elif name and line.strip():
            said_of[name] = f"{said_of[name]} {line.strip()}".strip()
    return "\n".join(rest).strip(), said_of


# --- texts -------------------------------------------------------------------


def _faults(error: ValidationError) -> str:
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    told = [f"{'.'.join(map(str, fault['loc'])) or 'the arguments'}: {fault['msg']}" for fault in faults[:FAULTS_MAX]]
    if len(faults) > FAULTS_MAX:
        told.append(f"and {len(faults) - FAULTS_MAX} more")
    return scrub("; ".join(told))


def _as_texts(refs: list[Ref]) -> None:
    """Make texts of what a tool without types may have given as numbers: the effect has happened, and a row
    that can't be written would lose it."""
    refs[:] = [Ref(*(scrub(str(each)) for each in (ref.source, ref.kind, ref.value))) for ref in refs]


def _answer(tool: str, result: object) -> ToolAnswer:
    """Return what a function gave back: texts as one, a line each, and files beside it (H14)."""
    match result:
        case None:
            return ToolAnswer("done")
        case Output(texts=texts, files=files, error=error):
            return ToolAnswer(scrub("\n".join(texts)), files, error)
        case File():
            return ToolAnswer("", (result,))
        case list() | tuple() if any(isinstance(each, File) for each in result):
            texts = tuple(_text(tool, each) for each in result if not isinstance(each, File))
            return ToolAnswer("\n".join(texts), tuple(each for each in result if isinstance(each, File)))
        case _:
            return ToolAnswer(_text(tool, result))


def _text(tool: str, result: object) -> str:
    """Return a result as text: as it is, or as JSON."""
    if isinstance(result, str):
        return scrub(result)
    try:
        return json.dumps(scrub_json(to_jsonable_python(result)), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise TypeError(f"{tool} returned a {type(result).__name__}: return a text or JSON values") from error
