"""A session that several people share, in this process: alice opened it, and what a tool was handed is kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from sayso import Agent, Call, Heard, standard_webhook
from sayso.assembly import App
from sayso.core.consent import Standing
from sayso.core.inputs import Answer, SettingsChange
from sayso.core.origin import Principal
from sayso.core.rows import InputBody, Row
from sayso.core.session import Others, SessionRole
from sayso.demo.local import OpenStore
from sayso.demo.stage import SECRETS
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.runtime.ports import ModelRequest, RawRequest
from sayso.runtime.rules import RULES, Rules
from sayso.sources import sign
from sayso.storage.store import Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import Reply, ScriptedModel, call, calls, say

T = TypeVar("T")

START_MS = 1_800_000_000_000
MEMBER, VIEWER = SessionRole.MEMBER, SessionRole.VIEWER


def user(who: str) -> Principal:
    return Principal.parse(f"user:{who}")


def caller(who: str) -> Caller:
    return Caller(user(who), "api token")


OPS = Caller(Principal.parse("operator:ops"), "api token")


def script(request: ModelRequest) -> Reply:
    """Use the tool that the newest words name, as `use note: milk`; say that it is done; else answer."""
    newest = request.messages[-1]
    if wanted := re.search(r"^use (\w+): (.*)$", newest.text, re.MULTILINE):
        return calls(call(wanted[1], what=wanted[2]))
    return say("done" if newest.call else f"I heard: {newest.text}")


@dataclass
class Room:
    """One session and everybody around it."""

    app: App
    store: Store
    clock: VirtualClock
    model: ScriptedModel
    session: str
    #: what each tool call was handed, and its argument
    handed: list[tuple[Call, str]]
    #: while set, a tool that was called waits for it before it answers
    hold: list[asyncio.Event]
    _make: Callable[[], App]
    _running: AsyncExitStack

    async def reborn(self) -> None:
        """End the process that runs the sessions, and start another on the same store."""
        await self._running.aclose()
        self.app = self._make()
        await self._running.enter_async_context(self.app.running())

    async def another(self, who: str) -> str:
        """Open another session, and return its id."""
        return (await self.app.commands.open_session(caller(who))).id

    async def post(self, who: str, text: str, **options: Any) -> int:
        """Post a message, and return its place in the inbox."""
        put = await self.app.commands.post(caller(who), self.session, text, **options)
        assert put.n is not None
        return put.n

    async def say(self, who: str, text: str) -> int:
        """Post a message, and return when it has had its turn."""
        n = await self.post(who, text)
        await self.rest()
        return n

    async def hook(self, text: str, *, id: str) -> int:
        """Let the restaurant call, and return the status."""
        body = text.encode()
        signed = sign(SECRETS["restaurant"], webhook_id=id, timestamp_s=self.clock.now_ms() // 1000, body=body)
        headers = tuple((name.encode(), value.encode()) for name, value in signed.items())
        request = RawRequest("POST", "/v1/hooks/restaurant", headers, body)
        return (await self.app.admission.receive("restaurant", request)).status

    async def invite(self, who: str, role: SessionRole = MEMBER, *, by: str = "alice") -> Row | None:
        """Let somebody take part."""
        _, row = await self.app.people.invite(caller(by), self.session, user(who), role)
        return row

    async def remove(self, who: str, *, by: str = "alice") -> Row | None:
        """Let somebody take part no more."""
        _, row = await self.app.people.remove(caller(by), self.session, user(who))
        return row

    async def yes(self, who: str) -> Row | None:
        """Answer the one open question with a yes."""
        [asked] = await self.app.commands.standings(caller("alice"), self.session, open_only=True)
        answer = Answer(asked.consent.id, asked.consent.digest, yes=True)
        _, row = await self.app.commands.answer(caller(who), self.session, answer)
        await self.rest()
        return row

    async def yes_to(self, asked: Standing, *, wait: bool = True) -> Row | None:
        """Let alice say yes to a question."""
        answer = Answer(asked.consent.id, asked.consent.digest, yes=True)
        _, row = await self.app.commands.answer(caller("alice"), self.session, answer)
        if wait:
            await self.rest()
        return row

    async def retract(self, who: str, n: int) -> Row | None:
        """Take back a message that waits."""
        _, row = await self.app.people.retract(caller(who), self.session, n)
        return row

    async def set(self, *, by: str = "alice", title: str | None = None, others: Others | None = None) -> Row | None:
        """Set how the session is called, or how it treats others."""
        _, row = await self.app.people.change(caller(by), self.session, SettingsChange(title, others))
        return row

    async def later(self, ms: int) -> None:
        """Let time pass, and return when all that can be done then is done."""
        self.clock.advance(ms)
        await self.rest()

    async def rest(self) -> None:
        """Return once no session has anything left to do."""
        await self.app.worker.rested()

    async def rows(self) -> list[Row]:
        return await self.store.rows(self.session)

    async def bodies(self, kind: type[T]) -> list[T]:
        return [row.body for row in await self.rows() if isinstance(row.body, kind)]

    async def until(self, kind: type[T], count: int = 1) -> list[T]:
        """Return the rows of a kind as soon as there are so many."""
        async with asyncio.timeout(20):
            while len(found := await self.bodies(kind)) < count:  # noqa: ASYNC110 - who follows hears of it too early
                await asyncio.sleep(0)
            return found

    async def heard(self) -> list[tuple[str, str]]:
        """Return who said what, as the journal has it."""
        inputs = [body.input for body in await self.bodies(InputBody)]
        return [(received.principal.id, received.parts[0].text) for received in inputs if received.parts]


@asynccontextmanager
async def room(
    open_store: OpenStore,
    *,
    limits: Limits | None = None,
    around: Callable[[Store], Store] = lambda store: store,
    answers: Callable[[ModelRequest], Reply] = script,
    tools: Callable[[Agent], None] = lambda _: None,
    rules: Rules = RULES,
    **options: Any,
) -> AsyncIterator[Room]:
    """Yield a room in which alice is alone; `around` may put something around the store, `tools` declares more of
    them, `options` are Agent's."""
    clock, model = VirtualClock(START_MS), ScriptedModel(answers, last=1_000)
    agent = Agent("assistant", model=model, instructions="You take notes.", **options)
    handed: list[tuple[Call, str]] = []
    hold: list[asyncio.Event] = []

    @agent.tool(effect="write", keyed=True, say="write down {what}")
    async def note(call: Call, what: str) -> str:
        handed.append((call, what))
        for event in hold:
            await event.wait()
        return f"noted {what}"

    @agent.tool(effect="read")
    async def look(call: Call, what: str) -> str:
        handed.append((call, what))
        for event in hold:
            await event.wait()
        return f"saw {what}"

    @agent.tool(effect="book", keyed=True, say="book {what}")
    async def book(call: Call, what: str) -> str:
        handed.append((call, what))
        call.made("reservation", what, source="restaurant")
        return f"booked {what}"

    @agent.tool(effect="pay", keyed=True, consent="always", say="pay {what}")
    async def pay(call: Call, what: str) -> str:
        handed.append((call, what))
        return f"paid {what}"

    tools(agent)

    @agent.source("restaurant", standard_webhook(SECRETS["restaurant"]))
    def restaurant(body: bytes) -> Heard:
        text = body.decode()
        about = [("reservation", name) for name in re.findall(r"\bR\d+", text)]
        return Heard(text, about=about, gone=text.startswith("cancelled"))

    ids = CountingIds()
    async with open_store(clock.now_ms) as kept, AsyncExitStack() as running:
        store = around(kept)

        def make() -> App:
            return App(agent, store=store, clock=clock, ids=ids, limits=limits, rules=rules)

        app = make()
        await running.enter_async_context(app.running())
        record = await app.commands.open_session(caller("alice"))
        await store.bind("restaurant", record.id)
        yield Room(app, store, clock, model, record.id, handed, hold, make, running)
