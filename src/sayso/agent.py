"""What users write: an agent, its tools and its sources.

A wrong declaration fails where it stands, never when it is used (F22). Nothing runs here: `assembly`
turns the specs into tools and doors.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, Protocol, TypeVar, overload

from sayso.core.contract import ApproverRole, ConsentPolicy, Contract, ContractError, Effect, Role
from sayso.core.inputs import InFlight
from sayso.core.labels import Integrity
from sayso.runtime.ports import Call, Classifier, Heard, Model, Scheme

F = TypeVar("F", bound=Callable[..., Any])
H = TypeVar("H", bound=Callable[..., Heard])
W = TypeVar("W", bound=StrEnum)

#: from a result's text to what may be told of it
Guard = Callable[[str], str] | Callable[[str], Awaitable[str]]

#: what every model provider takes as a tool's name
_TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
#: what stands in the path of a source's hook
_SOURCE_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


class Unready(Protocol):
    """A scheme whose secrets are named and not read yet, as `sayso.sources` makes them."""

    def ready(self, environ: Mapping[str, str], /) -> Scheme:
        """Return the scheme, with the secrets that it names by "env:NAME" read from `environ`."""
        ...


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as declared."""

    name: str
    function: Callable[..., Any]
    contract: Contract
    #: the function's docstring, whole
    description: str = ""
    #: tells what became of an operation by its key
    lookup: Callable[..., Awaitable[Any]] | None = None
    #: from what the tool said to what may be told of it
    guard: Guard | None = None
    #: undoes what the tool did
    release: Callable[..., Any] | None = None


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One source as declared."""

    name: str
    scheme: Unready
    function: Callable[..., Heard]
    #: whether the function takes the body as it came; else it takes what its JSON says
    takes_bytes: bool = False


class Agent:
    """A model with instructions, tools and sources.

    `model` is a `Model`, or a name as "openai:gpt-5-mini" that is resolved when the server starts.
    """

    def __init__(
        self,
        name: str,
        model: Model | str,
        instructions: str,
        *,
        in_flight: Literal["queue", "merge", "reject", "restart"] = "queue",
        classifier: Classifier | Literal["model", "none"] | None = None,
        debounce_s: float = 0,
    ) -> None:
        """`in_flight` says what becomes of a person's message that arrives while a turn of hers runs: it waits and
        starts a turn of its own; it joins the running one as soon as nothing is half done; it is stored and not
        acted on, which a row tells her; or the turn ends and another begins with both, which takes over what was done
        where it plans the same again. Another person's always waits, and so does what a source or a timer says.

        `classifier` says whether what she says belongs to the turn at all: where it is another matter it waits, where
        it changes what she asked for the turn begins anew once what is out has answered, and where nobody can tell
        she is asked. `"model"` has this agent's model say so, by one short request: what is left out does that where
        words may join or begin a turn anew. `"none"` takes all of it for a part of the turn.

        `debounce_s` is how long a person may go on before what she said starts a turn: all of it is one turn's
        then. One who does not stop waits ten times as long at most.

        Raises:
            ValueError: there is no such policy, or no such classifier.
        """
        self.name, self.model, self.instructions = name, model, instructions
        self.in_flight = _word(InFlight, in_flight, "in_flight")
        if isinstance(classifier, str) and classifier not in ("model", "none"):
            raise ContractError(f"classifier is {classifier!r}, which is none of model, none, or a Classifier")
        asks = self.in_flight in (InFlight.MERGE, InFlight.RESTART)
        if debounce_s < 0:
            raise ContractError("debounce_s must not be negative")
        self.debounce_s = debounce_s
        self.classifier = classifier if classifier is not None else "model" if asks else "none"
        self._tools: dict[str, ToolSpec] = {}
        self._sources: dict[str, SourceSpec] = {}

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools, in the order in which they were declared."""
        return tuple(self._tools.values())

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources, in the order in which they were declared."""
        return tuple(self._sources.values())

    @overload
    def tool(self, function: F, /) -> F: ...
    @overload
    def tool(
        self,
        /,
        *,
        effect: str = ...,
        keyed: bool = ...,
        consent: str = ...,
        say: str | None = ...,
        when: Iterable[str] = ...,
        critical: Iterable[str] = ...,
        target: Iterable[str] = ...,
        object: Iterable[str] = ...,
        detail: Iterable[str] = ...,
        approver: str | None = ...,
        parallel_safe: bool = ...,
        timeout_s: float = ...,
        good_for_s: float = ...,
        key_kept_s: float = ...,
        no_restart: bool = ...,
        returns: str = ...,
        lookup: Callable[..., Awaitable[Any]] | None = ...,
        release: Callable[..., Any] | None = ...,
        guard: Guard | None = ...,
        guarded_first: bool = ...,
    ) -> Callable[[F], F]: ...
    def tool(
        self,
        function: F | None = None,
        /,
        *,
        effect: str = Effect.EXTERNAL,
        keyed: bool = False,
        consent: str = ConsentPolicy.DERIVED,
        say: str | None = None,
        when: Iterable[str] = (),
        critical: Iterable[str] = (),
        target: Iterable[str] = (),
        object: Iterable[str] = (),
        detail: Iterable[str] = (),
        approver: str | None = None,
        parallel_safe: bool = False,
        timeout_s: float = 30,
        good_for_s: float = 3600,
        key_kept_s: float = 86400,
        no_restart: bool = False,
        returns: str = Integrity.OUTSIDER,
        lookup: Callable[..., Awaitable[Any]] | None = None,
        release: Callable[..., Any] | None = None,
        guard: Guard | None = None,
        guarded_first: bool = False,
    ) -> F | Callable[[F], F]:
        """Declare a function as a tool; it is returned unchanged.

        Its first parameter is `call: Call`; the others are what the model fills in. `when`, `critical`,
        `target`, `object` and `detail` name arguments by what they are for; the rest is content. `lookup`
        is an async function of `call` and any of the tool's arguments: it returns what the tool would
        have, or raises `Absent`. `release` is a function of `call` and any of the tool's arguments that undoes what
        the tool did under the key `call.undoes`; it has a key of its own, and a person is asked before it is called.
        `guard` is a function from the text of a result to what may be told of it,
        async or not: it sees the text alone, no file, before that becomes a row. If it fails, the text is
        withheld, and the effect stays what it was. Those who listen are shown a result before its guard
        has seen it, unless `guarded_first` is set. What is left out stands at its careful value; `Contract`
        has the meanings.

        Raises:
            ContractError: the declaration contradicts itself, or names what isn't there.
        """

        def declare(function: F) -> F:
            name = _name_of(function)
            arguments = _arguments(name, function)
            contract = Contract(
                name,
                effect=_word(Effect, effect, f"{name}: effect"),
                keyed=keyed,
                consent=_word(ConsentPolicy, consent, f"{name}: consent"),
                roles=_roles(
                    name, arguments, when=when, critical=critical, target=target, object=object, detail=detail
                ),
                say=say,
                approver=None if approver is None else _word(ApproverRole, approver, f"{name}: approver"),
                parallel_safe=parallel_safe,
                timeout_ms=round(timeout_s * 1000),
                good_for_ms=round(good_for_s * 1000),
                key_kept_ms=round(key_kept_s * 1000),
                no_restart=no_restart,
                returns=_word(Integrity, returns, f"{name}: returns"),
                has_lookup=lookup is not None,
                has_release=release is not None,
                has_guard=guard is not None,
                guarded_first=guarded_first,
            )
            _check_say(contract)
            _check_lookup(name, arguments, lookup)
            _check_release(contract, arguments, release)
            _check_guard(name, guard)
            about = inspect.getdoc(function) or ""
            self._declare_tool(ToolSpec(name, function, contract, about, lookup, guard, release))
            return function

        return declare if function is None else declare(function)

    def _declare_tool(self, spec: ToolSpec) -> None:
        if spec.name in self._tools:
            raise ContractError(f"{spec.name}: there is a tool of this name already")
        self._tools[spec.name] = spec

    def source(self, name: str, scheme: Unready) -> Callable[[H], H]:
        """Declare a function as the reader of a source's events; it is returned unchanged.

        It takes what the body's JSON says, if its one parameter is named `event`, or the body as it came,
        if that is annotated `bytes`; and returns `Heard`.

        Raises:
            ContractError: `name` is taken or can't stand in a path, `scheme` is none, or the function
                takes something else.
        """
        if not _SOURCE_NAME.fullmatch(name):
            raise ContractError(f"{name!r} can't be a source's name: 1 to 64 of a-z, 0-9 and -, no - at first")
        if not callable(getattr(scheme, "ready", None)):
            raise ContractError(f"source {name}: {scheme!r} is no scheme; write standard_webhook(…) or bearer(…)")

        def declare(function: H) -> H:
            if name in self._sources:
                raise ContractError(f"source {name}: there is a source of this name already")
            self._sources[name] = SourceSpec(name, scheme, function, _takes_bytes(name, function))
            return function

        return declare


# --- tools -------------------------------------------------------------------


def _name_of(function: object) -> str:
    name = getattr(function, "__name__", None)
    if not callable(function) or name is None:
        raise ContractError(f"{function!r} is no function; options go by name, as @agent.tool(effect=…)")
    if not _TOOL_NAME.fullmatch(name):
        raise ContractError(f"{name!r} can't be a tool's name: 1 to 64 of A-Z, a-z, 0-9 and _, no digit at first")
    return str(name)


def _arguments(what: str, function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of what a model fills in: all parameters but the first, which is `call: Call`."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ContractError(f"{what}: it must return its result, not yield it")
    parameters = tuple(inspect.signature(function).parameters.values())
    if not parameters or not _is_call(parameters[0]):
        raise ContractError(f"{what}: its first parameter must be call: Call")
    for parameter in parameters[1:]:
        if parameter.kind not in _BY_NAME:
            raise ContractError(f"{what}: {parameter} can't be passed by name; every argument must be one that can")
        if parameter.annotation is parameter.empty:
            raise ContractError(f"{what}: argument {parameter.name} needs a type")
    return tuple(parameter.name for parameter in parameters[1:])


_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _is_call(parameter: inspect.Parameter) -> bool:
    """Whether it is `call: Call`; by its last name where annotations are texts, whose names need not exist
    when the program runs."""
    annotation = parameter.annotation
    if isinstance(annotation, str):
        typed = annotation.strip("'\"").rpartition(".")[2] == Call.__name__
    else:
        typed = annotation is Call
    return typed and parameter.name == "call" and parameter.kind in _BY_PLACE


def _roles(tool: str, arguments: tuple[str, ...], **named: Iterable[str]) -> dict[str, Role]:
    roles = dict.fromkeys(arguments, Role.CONTENT)
    for word, names in named.items():
        if isinstance(names, str):
            raise ContractError(f"{tool}: {word} takes a list of arguments, as {word}=[{names!r}]")
        for name in names:
            if name not in roles:
                raise ContractError(f"{tool}: {word} names {name}, which is no argument of the tool")
            if roles[name] is not Role.CONTENT:
                raise ContractError(f"{tool}: argument {name} is given two roles, {roles[name]} and {word}")
            roles[name] = Role(word)
    return roles


def _word(words: type[W], given: str, what: str) -> W:
    try:
        return words(given)
    except ValueError:
        raise ContractError(f"{what} is {given!r}, which is none of {', '.join(words)}") from None


def _check_say(contract: Contract) -> None:
    """Refuse what looks like a place for an argument and would be asked as it stands."""
    if any("{" in piece or "}" in piece for is_argument, piece in contract.say_parts if not is_argument):
        raise ContractError(f"{contract.tool}: say takes {{argument}} with a bare name, and no other brace")


def _check_lookup(tool: str, arguments: tuple[str, ...], lookup: Callable[..., Any] | None) -> None:
    if lookup is None:
        return
    if not inspect.iscoroutinefunction(lookup):
        raise ContractError(f"{tool}: lookup must be an async function")
    for name in _arguments(f"{tool}: lookup", lookup):
        if name not in arguments:
            raise ContractError(f"{tool}: lookup takes {name}, which is no argument of the tool")


def _check_release(contract: Contract, arguments: tuple[str, ...], release: Callable[..., Any] | None) -> None:
    if release is None:
        return
    if not contract.effect.consequential:
        raise ContractError(f"{contract.tool}: release undoes an effect, and {contract.effect} has none")
    for name in _arguments(f"{contract.tool}: release", release):
        if name not in arguments:
            raise ContractError(f"{contract.tool}: release takes {name}, which is no argument of the tool")


def _check_guard(tool: str, guard: Guard | None) -> None:
    """Refuse a guard that can't be called with one text."""
    if guard is None:
        return
    if not callable(guard):
        raise ContractError(f"{tool}: guard must be a function from a text to a text")
    try:
        inspect.signature(guard).bind("")
    except TypeError:
        raise ContractError(f"{tool}: guard must take one text, and nothing else") from None
    except ValueError:  # a built-in that doesn't say what it takes
        return


# --- sources -----------------------------------------------------------------


def _takes_bytes(source: str, function: Callable[..., Any]) -> bool:
    parameters = tuple(inspect.signature(function).parameters.values())
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ContractError(f"source {source}: its function only reads what came, so it can't be async")
    if len(parameters) == 1 and parameters[0].kind in _BY_PLACE:
        if parameters[0].annotation in (bytes, "bytes"):
            return True
        if parameters[0].name == "event":
            return False
    raise ContractError(f"source {source}: its function takes one parameter, event (the JSON) or body: bytes")
