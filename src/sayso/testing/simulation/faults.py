"""What stands between one process and everything outside it: its store, its tools, its model. Here it ends, stands
still, and has its bad luck.

A process that has ended does nothing more, wherever it stood: what it asks of the outside from then on does not
arrive, as after `kill -9`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from sayso.agent import Agent, SourceSpec, ToolSpec
from sayso.core.errors import CommitUnknown, StoreUnavailable, ToolFailed
from sayso.core.inputs import Fit
from sayso.runtime.ports import Call, Classifier, Finished, Meanwhile, Model, ModelFault, ModelRequest, TextDelta
from sayso.storage.store import Store
from sayso.testing.clock import VirtualClock

#: calls of a store that have a place of their own; the others are reads, or happen once
_PLACES = ("put", "write", "release", "surrender", "claim", "fire")
_READS = ("inbox", "rows", "last_rows", "session", "standings", "operations", "keep", "refs", "ready")


class BrokeOff(Exception):
    """What a tool or a model raises where a story breaks it off."""


@dataclass(slots=True)
class Fault:
    """Something that goes wrong at a place, once it was passed `after` times, and so many times in a row."""

    at: str
    what: str
    after: int
    ms: int = 0
    times: int = 1


class Faults:
    """What is to go wrong in a story, until it has."""

    def __init__(self) -> None:
        self._armed: list[Fault] = []
        #: how many have happened
        self.happened = 0

    def arm(self, fault: Fault) -> None:
        """From now on, count how often its place is passed."""
        self._armed.append(fault)

    def mend(self) -> None:
        """Nothing goes wrong any more that has not."""
        self._armed.clear()

    def due(self, place: str) -> Fault | None:
        """Return what goes wrong at a place that is being passed."""
        for fault in self._armed:
            if fault.at == place:
                if not fault.after:
                    fault.times -= 1
                    if not fault.times:
                        self._armed.remove(fault)
                    self.happened += 1
                    return fault
                fault.after -= 1
        return None


class Process:
    """One process, as far as the outside knows: whether it runs, stands still, or has ended."""

    def __init__(self, faults: Faults, clock: VirtualClock) -> None:
        self._faults, self._clock = faults, clock
        self._awake, self._over = asyncio.Event(), asyncio.Event()
        self._awake.set()
        #: it passed a place at which it ends; whoever plays the story ends it
        self.doomed = False
        self.ended = False
        #: calls of the store that are under way
        self.under_way = 0

    def stand_still(self) -> None:
        """Come no further than the next place."""
        self._awake.clear()

    def wake(self) -> None:
        """Go on."""
        self._awake.set()

    @property
    def stands_still(self) -> bool:
        """Whether it stands still."""
        return not self._awake.is_set()

    def end(self) -> None:
        """Nothing that it does arrives anywhere any more."""
        self.ended = True
        self._awake.set()
        self._over.set()

    async def passes(self, place: str) -> str | None:
        """Pass a place; return what goes wrong there that its caller is to do.

        Raises:
            StoreUnavailable, CommitUnknown: the store's answer there, also to a process that has ended.
        """
        await self._awake.wait()
        if self.ended:
            await self._to_the_end()
        fault = self._faults.due(place)
        if fault is None:
            return None
        match fault.what:
            case "crash":
                self.doomed = True
                await self._to_the_end()
            case "hang":
                await self._to_the_end()
            case "slow":
                await self._clock.sleep_until(self._clock.now_ms() + fault.ms)
                await self._awake.wait()
                if self.ended:
                    await self._to_the_end()
            case "unavailable":
                raise StoreUnavailable("the store does not answer")
            case "lost":
                raise CommitUnknown("the answer was lost")
            case what:
                return what
        return None

    async def _to_the_end(self) -> None:
        """Come no further, for as long as the process runs."""
        await self._over.wait()
        raise StoreUnavailable("this process has ended")

    def store(self, inside: Store) -> Store:
        """Return the store as this process reaches it."""
        return cast("Store", _Wire(inside, self))

    def agent(self, agent: Agent) -> Agent:
        """Return the agent with its tools as this process reaches them."""
        return _Reached(agent, self)


class _Wire:
    """A store at the end of a wire that one process has."""

    def __init__(self, inside: Store, process: Process) -> None:
        self._inside, self._process = inside, process

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inside, name)
        if not inspect.iscoroutinefunction(found):
            return found
        called = self._over(name if name in _PLACES else "read" if name in _READS else name, found)
        setattr(self, name, called)  # found at once the next time
        return called

    def _over(self, place: str, call: Callable[..., Any]) -> Callable[..., Any]:
        process, before, after = self._process, f"{place}:before", f"{place}:after"

        @functools.wraps(call)
        async def over(*args: Any, **named: Any) -> Any:
            await process.passes(before)
            process.under_way += 1
            try:
                result = await call(*args, **named)
            finally:
                process.under_way -= 1
            await process.passes(after)
            return result

        return over


class _Reached(Agent):
    """The same agent; its model, its classifier and each of its tools is called by way of a process."""

    def __init__(self, agent: Agent, process: Process) -> None:
        super().__init__(agent.name, _ReachedModel(agent.model, process), agent.instructions)
        self.in_flight, self.debounce_s = agent.in_flight, agent.debounce_s
        self.classifier = agent.classifier
        if not isinstance(agent.classifier, str):
            self.classifier = _ReachedClassifier(agent.classifier, process)
        self._agent, self._reached = agent, tuple(_reached(spec, process) for spec in agent.tools)

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """See `Agent`."""
        return self._reached

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """See `Agent`."""
        return self._agent.sources


def _reached(spec: ToolSpec, process: Process) -> ToolSpec:
    lookup = None if spec.lookup is None else _watched(spec.lookup, process, "lookup")
    release = None if spec.release is None else _watched(spec.release, process, "tool")
    return replace(spec, function=_watched(spec.function, process, "tool"), lookup=lookup, release=release)


def _watched(function: Callable[..., Any], process: Process, place: str) -> Callable[..., Any]:
    """Return a function that passes a place before and after. One that is not async runs on the loop, so that a story
    comes out the same each time."""

    @functools.wraps(function)
    async def watched(call: Call, **arguments: Any) -> Any:
        _go_on(await process.passes(f"{place}:before"))
        result = function(call, **arguments)
        if inspect.isawaitable(result):
            result = await result
        _go_on(await process.passes(f"{place}:after"))
        return result

    return watched


def _go_on(wrong: str | None) -> None:
    if wrong == "lie":
        raise ToolFailed("it did not work")
    if wrong == "break":
        raise BrokeOff("it broke off")


class _ReachedClassifier:
    """A classifier by way of a process."""

    def __init__(self, classifier: Classifier, process: Process) -> None:
        self.name, self._classifier, self._process = classifier.name, classifier, process

    async def fit(self, meanwhile: Meanwhile) -> Fit:
        """See `Classifier`."""
        _go_on(await self._process.passes("classifier:before"))
        fit = await self._classifier.fit(meanwhile)
        _go_on(await self._process.passes("classifier:after"))
        return fit


class _ReachedModel:
    """A model by way of a process."""

    def __init__(self, model: Model | str, process: Process) -> None:
        if isinstance(model, str):
            raise TypeError(f"a simulation needs a model that it can call, not the name {model!r}")
        self.name, self._model, self._process = model.name, model, process

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[TextDelta | Finished]]:
        """See `Model`."""
        self._broken(await self._process.passes("model:before"))
        async with self._model.stream(request) as pieces, aclosing(self._reached(pieces)) as reached:
            yield reached

    async def _reached(self, pieces: AsyncIterator[TextDelta | Finished]) -> AsyncGenerator[TextDelta | Finished]:
        async for piece in pieces:
            if isinstance(piece, Finished):
                await self._process.passes("model:after")
                yield piece
            else:
                yield piece
                self._broken(await self._process.passes("model:midway"))

    @staticmethod
    def _broken(wrong: str | None) -> None:
        if wrong is not None:
            raise ModelFault("broke_off", "the connection was lost")
