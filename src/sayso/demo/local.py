"""A stage in this process: the production runtime on a clock whose minutes pass when told.

Only what stands outside is made for the occasion: the model is a script, the restaurant and the group
keep books in memory, ids begin anew in each run. So the log of a scenario can be compared.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from sayso.agent import Agent, Unready
from sayso.assembly import App
from sayso.core.errors import AnswerRefused, NotFound, StoreUnavailable
from sayso.core.inputs import Answer
from sayso.core.origin import Principal
from sayso.core.rows import Row
from sayso.demo import under_way
from sayso.demo.concierge import concierge, script, signed_by_demo
from sayso.demo.scenarios import Cast
from sayso.demo.stage import SECRETS, Open
from sayso.journal.feed import Feeds, Listener
from sayso.journal.frames import PLAIN, Projection, Published
from sayso.runtime.commands import Caller
from sayso.runtime.limits import Limits
from sayso.runtime.numbered import Beside, Line, numbered
from sayso.runtime.ports import RawRequest, Scheme
from sayso.sources import sign
from sayso.storage.memory import MemoryStore
from sayso.storage.store import Store
from sayso.testing.ablations import NONE, Ablation
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.scripted import Asked, ScriptedModel
from sayso.testing.stores import FailingStore
from sayso.testing.world import World

#: where the demo's clock begins: a multiple of an hour, so that minutes read as a clock
START_MS = 1_764_518_400_000
MINUTE_MS = 60_000


class LocalStage:
    """See `Stage`. The session belongs to Alice."""

    def __init__(
        self,
        processes: Processes,
        clock: VirtualClock,
        world: World,
        model: ScriptedModel,
        done: Done,
        failing: FailingStore,
    ) -> None:
        self._processes, self.session = processes, done.session
        self._clock, self._world, self._model, self._done, self._failing = clock, world, model, done, failing

    @property
    def app(self) -> App:
        """The process that serves now."""
        return self._processes.app

    async def say(self, who: str, text: str, *, seen: bool = True, wait: bool = True) -> None:
        position = (await self.app.commands.history(_caller("alice"), self.session)).token if seen else None
        put = await self.app.commands.post(_caller(who), self.session, text, as_of=position)
        await (self.rest() if wait else self._noted(put.n))

    async def _noted(self, n: int | None) -> None:
        """Return once it is known how an input fits what is under way, or it was taken."""
        await self._until(lambda row: getattr(row.body, "n", None) == n)

    async def until(self, kind: str, turn: str) -> None:
        await self._until(lambda row: row.kind == kind and row.turn == turn)

    async def _until(self, is_it: Callable[[Row], bool]) -> None:
        while not any(map(is_it, await self.app.store.rows(self.session))):  # noqa: ASYNC110 - a feed tells too early
            await asyncio.sleep(0)

    async def begin(self, who: str, text: str, venue: str) -> None:
        position = (await self.app.commands.history(_caller("alice"), self.session)).token
        await self.app.commands.post(_caller(who), self.session, text, as_of=position)
        await self._world.venues[venue].until_held()

    async def hold(self, venue: str) -> None:
        self._world.venues[venue].hold()

    async def let_go(self, venue: str) -> None:
        self._world.venues[venue].release()
        await self.rest()

    async def stop(self, who: str) -> None:
        await self.app.commands.stop(_caller(who), self.session)

    async def crash(self) -> None:
        await self._processes.another()
        self._done.watch(self.app.feeds, self.session)

    async def hook(
        self,
        event: Mapping[str, Any],
        *,
        id: str,
        source: str = "restaurant",
        secret: str | None = None,
        changed: Mapping[str, Any] | None = None,
        signed_minutes_ago: int = 0,
        wait: bool = True,
    ) -> int:
        body = json.dumps(event).encode()
        if secret is None and event["type"] == "cancelled" and event["reservation"] in self._world.restaurant.tables:
            self._world.restaurant.take_away(event["reservation"])
        arrives = None if changed is None else json.dumps(changed).encode()
        return await self.deliver(
            body, id=id, source=source, secret=secret, arrives=arrives, signed_minutes_ago=signed_minutes_ago, wait=wait
        )

    async def deliver(
        self,
        body: bytes,
        *,
        id: str,
        source: str = "restaurant",
        secret: str | None = None,
        arrives: bytes | None = None,
        signed_minutes_ago: int = 0,
        wait: bool = True,
    ) -> int:
        """A source sends a body, whatever it is; `arrives` takes its place after it was signed."""
        signed_s = self._clock.now_ms() // 1000 - signed_minutes_ago * 60
        headers = sign(secret or SECRETS[source], webhook_id=id, timestamp_s=signed_s, body=body)
        pairs = tuple((name.encode(), value.encode()) for name, value in headers.items())
        request = RawRequest("POST", f"/v1/hooks/{source}", pairs, body if arrives is None else arrives)
        try:
            receipt = await self.app.admission.receive(source, request)
        except StoreUnavailable:
            return 503
        finally:
            self.app.worker.hint(self.session)  # carries nothing: whoever hears it looks again
            if wait:
                await self.rest()
        return receipt.status

    async def questions(self) -> list[Open]:
        standings = await self.app.commands.standings(_caller("alice"), self.session, open_only=True)
        return [Open(s.consent.id, s.consent.digest, s.consent.question.text) for s in standings]

    async def answer(self, who: str, question: Open, *, yes: bool, reason: str = "", times: int = 1) -> list[int]:
        answer = Answer(question.id, question.digest, yes, reason)
        statuses = list(await asyncio.gather(*(self._answer(who, answer) for _ in range(times))))
        await self.rest()
        return statuses

    async def _answer(self, who: str, answer: Answer) -> int:
        try:
            _, settled = await self.app.commands.answer(_caller(who), self.session, answer)
        except NotFound:
            return 404
        except AnswerRefused:
            return 409
        return 200 if settled is not None else 202

    async def full(self, day: str, time: str) -> None:
        self._world.restaurant.full(day, time)

    async def store_fails_once(self) -> None:
        self._failing.fail_once = True

    async def minutes(self, count: int) -> None:
        self._clock.advance(count * MINUTE_MS)
        await self.rest()

    def tick(self, ms: int) -> None:
        """Let a little time pass, and wait for nothing."""
        self._clock.advance(ms)

    async def books(self) -> Mapping[str, Any]:
        return self._world.books()

    async def rest(self) -> None:
        """Return once no session has anything left to do."""
        await self.app.worker.rested()

    @property
    def world(self) -> World:
        """The outside."""
        return self._world

    @property
    def model(self) -> ScriptedModel:
        """The model."""
        return self._model

    @staticmethod
    def yes(question: Open) -> Answer:
        """Return a yes to a question, by its id and digest."""
        return Answer(question.id, question.digest, yes=True)

    @property
    def requests(self) -> list[Asked]:
        """What the model was asked so far."""
        return self._model.requests

    @property
    def last_request(self) -> Asked:
        """What the model was asked last."""
        return self._model.requests[-1]

    def shown(self) -> list[str]:
        """Return what the model was shown in its last call, message by message."""
        model = self._model
        if not model.requests:
            return []
        lines = ["", f"What the model was shown in {model.requests[-1].turn}:"]
        for message in model.requests[-1].last:
            lines += ["", f"[{message.role}]", message.text or ", ".join(called.tool for called in message.calls)]
        return lines

    async def lines(self) -> list[Line]:
        """Return the numbered list of the session."""
        return await numbered(self.app.store, self.session, beside=self._done.entries)


#: at one place and time, what the outside did stands before what came through the door
_FIRST = 1_000_000


class Done(list[str]):
    """The world's lines as they are written, each with the place in the journal where it happened."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.entries: list[Beside] = []
        self.session = ""
        self._clock, self._seq = clock, 0
        self._listener: Listener | None = None

    def watch(self, feeds: Feeds, session: str) -> None:
        """Follow the session's journal from here on."""
        self.session = session
        self._listener, _ = feeds.listen(session)

    def append(self, line: str) -> None:
        """Note a line."""
        super().append(line)
        queue = self._listener.queue if self._listener is not None else None
        while queue is not None and not queue.empty() and (event := queue.get_nowait()) is not None:
            if isinstance(event, Published):
                self._seq = event.row.seq
        venue, _, text = line.partition(": ")
        self.entries.append(Beside(self._seq, self._clock.now_ms(), len(self) - _FIRST, f"outside.{venue}", text))


def _caller(who: str) -> Caller:
    return Caller(Principal.parse(f"user:{who}"), "api token")


OpenStore = Callable[[Callable[[], int]], AbstractAsyncContextManager[Store]]


@asynccontextmanager
async def in_memory(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
    """Yield a store that ends with the stage."""
    yield MemoryStore(clock=now_ms)


@asynccontextmanager
async def local_stage(
    ablation: Ablation = NONE,
    *,
    limits: Limits | None = None,
    open_store: OpenStore = in_memory,
    model: ScriptedModel | None = None,
    projection: Projection = PLAIN,
    cast: Cast | None = None,
) -> AsyncIterator[LocalStage]:
    """Yield a stage on which Alice has a session, which also hears what the cinema says. `open_store` is given
    the stage's clock; an ablation puts its broken part in front of the store, the sources or the rules."""
    clock = VirtualClock(START_MS)
    done = Done(clock)
    world = World(lines=done)
    model = model or ScriptedModel(script if cast is None else under_way.script, last=1_000)
    agent = _agent(cast, world, model, ablation)
    async with open_store(clock.now_ms) as kept:
        failing = FailingStore(kept)
        store = ablation.store(failing.store)
        make = partial(
            App,
            agent,
            store=store,
            clock=clock,
            ids=CountingIds(),
            # a process of the cast is ended without warning, so nothing is waited for
            limits=limits or (None if cast is None else Limits(drain_ms=0)),
            rules=ablation.rules,
            projection=projection,
        )
        async with Processes(make) as processes:
            record = await processes.app.commands.open_session(_caller("alice"), title="Friday")
            await store.bind("cinema", record.id)
            if cast is not None:
                await store.bind("restaurant", record.id)
            done.watch(processes.app.feeds, record.id)
            yield LocalStage(processes, clock, world, model, done, failing)


def _agent(cast: Cast | None, world: World, model: ScriptedModel, ablation: Ablation) -> Agent:
    def scheme(source: str) -> _Broken:
        return _Broken(signed_by_demo(source), ablation)

    if cast is None:
        return concierge(world, model=model, scheme=scheme)
    return under_way.assistant(world, model=model, in_flight=cast.in_flight, scheme=scheme)


class Processes:
    """One process after another on the same store."""

    def __init__(self, make: Callable[[], App]) -> None:
        self._make, self._running = make, AsyncExitStack()
        self.app = make()

    async def __aenter__(self) -> Processes:
        await self._running.enter_async_context(self.app.running())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._running.aclose()

    async def another(self) -> None:
        """End the one that runs, without a warning, and start the next."""
        await self._running.aclose()
        self.app = self._make()
        await self._running.enter_async_context(self.app.running())


class _Broken:
    """A source's scheme, as the ablation leaves it."""

    def __init__(self, whole: Unready, ablation: Ablation) -> None:
        self._whole, self._ablation = whole, ablation

    def ready(self, environ: Mapping[str, str], /) -> Scheme:
        return self._ablation.scheme(self._whole.ready(environ))
