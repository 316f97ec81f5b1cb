"""A model that follows a script, behind the real port: for our tests, for the demo and for users' tests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from sayso.core.context import Message
from sayso.core.inputs import Fit
from sayso.runtime.ports import Finished, Meanwhile, ModelFault, ModelRequest, ProposedCall, TextDelta


@dataclass(frozen=True, slots=True)
class Cut:
    """A reply that breaks off after some text, as a lost connection does."""

    text: str
    fault: ModelFault


#: what a script answers: a whole reply, a fault before any text, or one after some
Reply = Finished | ModelFault | Cut
Script = Callable[[ModelRequest], Reply]


def say(text: str) -> Finished:
    """Return a reply of words alone."""
    return Finished(text)


def call(tool: str, /, **arguments: Any) -> ProposedCall:
    """Return one call, for `calls`."""
    return ProposedCall(tool, arguments)


def calls(*proposed: ProposedCall, text: str = "") -> Finished:
    """Return a reply that asks for these calls, in order."""
    return Finished(text, proposed)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is kept of one request: not its messages, which are shared and grow."""

    instructions: str
    #: how many messages there were
    messages: int
    #: the newest ones
    last: tuple[Message, ...]
    #: names of the tools on offer
    tools: tuple[str, ...]
    session: str
    turn: str


class ScriptedModel:
    """Answers as its script says. The script is asked when a request comes, not when the answer is let go.

    A list gives each request its next reply, also one that nobody waits for in the end, so where requests
    are repeated after a crash the script should be a function. `last` is how many messages `requests` keep.
    """

    def __init__(self, script: Script | Iterable[Reply], *, name: str = "scripted", last: int = 8) -> None:
        self.name = name
        #: every request so far
        self.requests: list[Asked] = []
        #: while set, an answer waits for this before its first piece
        self.hold: asyncio.Event | None = None
        #: while set, an answer waits for this after its first piece of text
        self.hold_midway: asyncio.Event | None = None
        #: while set, every request fails with it, and the script isn't asked
        self.failing: ModelFault | None = None
        #: replies that are being read now
        self.open = 0
        self._script = script if callable(script) else _in_turn(iter(script))
        self._last = last
        self._came = asyncio.Event()

    async def until_asked(self, count: int = 1) -> None:
        """Return once there have been `count` requests."""
        while len(self.requests) < count:
            await self._came.wait()

    @asynccontextmanager
    async def stream(self, request: ModelRequest) -> AsyncIterator[AsyncIterator[TextDelta | Finished]]:
        """Return the script's reply, its text in pieces and then whole.

        Raises:
            ModelFault: the script says so, or a list of replies is used up (`script_over`).
        """
        self._note(request)
        reply = self.failing or self._script(request)
        self.open += 1
        try:
            async with aclosing(self._pieces(reply)) as pieces:
                yield pieces
        finally:
            self.open -= 1

    def _note(self, request: ModelRequest) -> None:
        count = len(request.messages)
        last = tuple(request.messages[place] for place in range(max(0, count - self._last), count))
        tools = tuple(offer.name for offer in request.tools)
        self.requests.append(Asked(request.instructions, count, last, tools, request.session, request.turn))
        came, self._came = self._came, asyncio.Event()
        came.set()

    async def _pieces(self, reply: Reply) -> AsyncGenerator[TextDelta | Finished]:
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(reply, ModelFault):
            raise reply
        for place, piece in enumerate(re.findall(r"\S+\s*|\s+", reply.text)):
            yield TextDelta(piece)
            if place == 0 and self.hold_midway is not None:
                await self.hold_midway.wait()
        if isinstance(reply, Cut):
            raise reply.fault
        yield reply


def _in_turn(replies: Iterator[Reply]) -> Script:
    def script(_: ModelRequest) -> Reply:
        return next(replies, ModelFault("script_over", "the script has no reply to this request"))

    return script


class ScriptedClassifier:
    """Says how what a person says meanwhile fits, as its script does: by her words, or for all of them the same. While
    `hold` is set it waits for that first."""

    def __init__(self, script: Mapping[str, Fit] | Callable[[Meanwhile], Fit] | Fit, *, name: str = "scripted") -> None:
        self.name = name
        #: everything it was asked
        self.asked: list[Meanwhile] = []
        self.hold: asyncio.Event | None = None
        self._script = script
        self._came = asyncio.Event()

    async def until_asked(self) -> None:
        """Return once it has been asked."""
        await self._came.wait()

    async def fit(self, meanwhile: Meanwhile) -> Fit:
        """See `Classifier`. Words that the script doesn't know are a KeyError."""
        self.asked.append(meanwhile)
        self._came.set()
        if self.hold is not None:
            await self.hold.wait()
        if isinstance(self._script, Fit):
            return self._script
        return self._script(meanwhile) if callable(self._script) else self._script[meanwhile.said]
