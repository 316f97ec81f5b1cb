"""Play one story: the production runtime, on a clock that jumps, with everything around it that a story speaks of.

Nothing is decided here that the story does not say, so that the same story comes out the same again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sayso.assembly import App
from sayso.core.contract import Contract
from sayso.core.errors import SaysoError
from sayso.core.inputs import Answer
from sayso.core.origin import Principal
from sayso.core.session import Position, SessionRole, SessionState
from sayso.core.view import public
from sayso.journal.append import JournalState
from sayso.runtime.commands import Caller
from sayso.runtime.ports import RawRequest
from sayso.sources import sign
from sayso.storage.store import PutOutcome, Store
from sayso.testing.clock import CountingIds, VirtualClock
from sayso.testing.simulation.faults import Fault, Faults, Process
from sayso.testing.simulation.loop import run
from sayso.testing.simulation.setting import Acknowledged, Played, Setting
from sayso.testing.simulation.story import Action, Story
from sayso.testing.view import View

#: where a story's clock begins
START_MS = 1_800_000_000_000
#: how many pages follow the session
PAGES = 2
#: steps that a story has at its end to come to rest, and how far the clock goes on beside them
REST_STEPS, REST_MS, LATER_MS = 1_500, 500, 10_000
#: looks at a session that rests, one after the other, until it is believed; and where others do not rest
CALM_STEPS, STILL_STEPS = 3, 400


def play(story: Story, setting: Setting) -> Played:
    """Play a story to its end, and return what was left."""
    clock = VirtualClock(START_MS)
    jitter = random.getstate()
    random.seed(story.seed)
    errors = _Errors()
    try:
        with errors:
            return run(_play(story, setting, clock, errors.failed), clock)
    finally:
        random.setstate(jitter)


async def _play(story: Story, setting: Setting, clock: VirtualClock, failed: list[str]) -> Played:
    async with setting.store(clock.now_ms) as store:
        playing = _Playing(story, setting, store, clock, failed)
        try:
            return await playing.whole()
        finally:
            await playing.close()


class _Errors(logging.Handler):
    """Keeps what the runtime says of its own failures, and keeps everything else it says from being printed."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.failed: list[str] = []
        self._log = logging.getLogger("sayso")

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it, if it is about an owner."""
        if record.name == "sayso.runtime.worker":
            cause = record.exc_info[1] if record.exc_info else getattr(record, "cause", "")
            self.failed.append(f"{record.getMessage()}: {cause!r}")

    def __enter__(self) -> None:
        self._log.addHandler(self)
        self._before = (self._log.propagate, self._log.level)
        self._log.propagate = False
        self._log.setLevel(logging.ERROR)

    def __exit__(self, *_: object) -> None:
        self._log.removeHandler(self)
        self._log.propagate = self._before[0]
        self._log.setLevel(self._before[1])


@dataclass(slots=True)
class _Running:
    """A process, and what runs in it."""

    #: what the store knows it by
    node: str
    process: Process
    app: App
    work: asyncio.Task[None]


@dataclass(slots=True)
class _Page:
    """A page, and the connection that it has, if it has one."""

    view: View
    reading: asyncio.Task[None] | None = None


class _Playing:
    """A story under way."""

    def __init__(self, story: Story, setting: Setting, store: Store, clock: VirtualClock, failed: list[str]) -> None:
        self._story, self._setting, self._store, self._clock = story, setting, store, clock
        self._world, self._ids, self._faults = setting.world(), CountingIds(), Faults()
        self._callers = {who: Caller(Principal.parse(f"user:{who}"), "api token") for who in setting.cast.people}
        self._owner = self._callers[setting.cast.people[0]]
        #: the newest is the one that people reach
        self._running: list[_Running] = []
        named: dict[str, dict[str, Any]] = {}
        self._pages = [_Page(View(named=named)) for _ in range(PAGES)]
        #: calls of people and sources that are under way, with the process that they came to
        self._clients: dict[asyncio.Task[None], Process] = {}
        self._acknowledged: list[Acknowledged] = []
        self._failed, self._seen_wrong = failed, list[str]()
        self._contracts: dict[str, Contract] = {}
        self._starts = self._crashes = self._take_overs = 0
        self._session = ""

    async def whole(self) -> Played:
        """Play it all."""
        await self._start()
        self._session = f"ses_{self._story.seed}"
        await self._store.create_session(self._session, owner=self._owner.principal, title="")
        for source in self._setting.cast.senders:
            await self._store.bind(source, self._session)
        for action in self._story.actions:
            await self._do(action)
            for _ in range(action.steps):
                await self._step()
        rested = await self._rest()
        await self._everybody_catches_up()
        rows = await self._store.rows(self._session)
        return Played(
            story=self._story,
            session=self._session,
            owner=self._owner.principal,
            contracts=self._contracts,
            rows=rows,
            inbox=await self._store.inbox_record(self._session),
            standings=await self._store.standings(self._session),
            operations=await self._store.operations(self._session),
            ledger=self._world.ledger,
            acknowledged=self._acknowledged,
            pages=[page.view.rows for page in self._pages],
            expected=[json.loads(json.dumps(public(row, self._session))) for row in rows],
            rested=rested,
            seen_wrong=self._seen_wrong,
            failed=self._failed,
            crashes=self._crashes,
            take_overs=self._take_overs,
            faults=self._faults.happened,
        )

    async def close(self) -> None:
        """End everything."""
        for page in self._pages:
            await self._cut(page)
        for running in self._running:
            await self._end(running)

    # processes

    @property
    def _app(self) -> App:
        return self._running[-1].app

    async def _start(self) -> None:
        """Another process starts, and frees what others have: to it, they are dead. People reach it from now on."""
        process = Process(self._faults, self._clock)
        agent = self._setting.agent(self._world)
        self._contracts = {spec.name: spec.contract for spec in agent.tools}
        undoing = [spec.contract.releasing() for spec in agent.tools if spec.release is not None]
        self._contracts |= {contract.tool: contract for contract in undoing}
        app = App(
            process.agent(agent),
            store=process.store(self._store),
            clock=self._clock,
            ids=self._ids,
            limits=self._setting.limits,
            rules=self._setting.rules,
            environ={},
        )
        await app.worker.register()
        self._starts += 1
        self._running.append(_Running(f"node_{self._starts}", process, app, asyncio.create_task(app.worker.run())))

    async def _end(self, running: _Running) -> None:
        """A process ends where it stands; what it had sent may have been done, and who called it hears nothing."""
        running.process.end()
        cut_off = [client for client, process in self._clients.items() if process is running.process]
        for task in (running.work, *cut_off):
            task.cancel()
        await asyncio.gather(*cut_off, return_exceptions=True)
        try:
            await running.work
        except asyncio.CancelledError:
            pass
        except BaseExceptionGroup as group:
            self._failed.append(f"the worker ended: {group.exceptions[0]!r}")

    async def _crash(self, running: _Running) -> None:
        """A process ends, connections go, and another process starts: whoever supervises them sees to that, and only
        a start frees what a dead process had."""
        self._crashes += 1
        await self._end(running)
        self._running.remove(running)
        for page in self._pages:
            await self._cut(page)
        await self._start()

    async def _step(self) -> None:
        """Let all others have their turn, and as much time as the store takes to answer."""
        await asyncio.sleep(0)
        await self._store.bound("")
        for running in tuple(self._running):
            if running.process.doomed:
                await self._crash(running)

    async def _settled(self) -> None:
        """Return once no call of a store is under way: the clock's minutes are not the store's."""
        while any(running.process.under_way for running in self._running):
            await self._step()

    # what happens

    async def _do(self, action: Action) -> None:
        await _DOERS[action.do](self, **action.args)

    async def say(self, who: str, text: str, key: str, seen: bool) -> None:
        position = None
        if seen:
            record = await self._store.session(self._session)
            position = Position(record.epoch, record.head) if record is not None else None
        commands, by = self._app.commands, self._callers[who]

        async def said() -> None:
            put = await commands.post(by, self._session, text, idempotency_key=f"{who} {key}", as_of=position)
            self._told(f"{who}'s {text!r}", put.n)

        self._client(said)

    async def event(self, source: str, event: Mapping[str, Any], id: str) -> None:
        body, admission = json.dumps(event).encode(), self._app.admission
        secret = self._setting.cast.senders[source].secret

        async def sent() -> None:
            headers = sign(secret, webhook_id=id, timestamp_s=self._clock.now_ms() // 1000, body=body)
            pairs = tuple((name.encode(), value.encode()) for name, value in headers.items())
            receipt = await admission.receive(source, RawRequest("POST", "/", pairs, body))
            if receipt.put is None:
                self._failed.append(f"{source}'s {id} was refused with {receipt.status}")
            elif receipt.put.outcome is PutOutcome.STORED:
                self._told(f"{source}'s {id}", receipt.put.n)

        self._client(sent)

    async def answer(self, who: str, which: int, yes: bool) -> None:
        standings = await self._store.standings(self._session)
        if not standings:
            return
        consent = standings[-1 - which % len(standings)].consent
        answer = Answer(consent.id, consent.digest, yes)
        app = self._app

        async def answered() -> None:
            put, _ = await app.commands.answer(self._callers[who], self._session, answer)
            self._told(f"{who}'s answer to {consent.id}", put.n)

        self._client(answered)

    async def stop(self, who: str) -> None:
        self._client(partial(self._app.commands.stop, self._callers[who], self._session))

    async def retract(self, who: str, which: int) -> None:
        principal = self._callers[who].principal
        waiting = [each.n for each in await self._store.inbox(self._session, after=0, limit=100)]
        hers = [n for n in waiting if await self._is_hers(n, principal)]
        if hers:
            wanted = hers[which % len(hers)]
            self._client(partial(self._app.people.retract, self._callers[who], self._session, wanted))

    async def _is_hers(self, n: int, principal: Principal) -> bool:
        entry = await self._store.inbox_entry(self._session, n)
        return entry is not None and entry.input.owner == principal

    async def invite(self, who: str) -> None:
        whom = self._callers[who].principal
        self._client(partial(self._app.people.invite, self._owner, self._session, whom, SessionRole.MEMBER))

    async def leave(self, who: str) -> None:
        caller = self._callers[who]
        self._client(partial(self._app.people.remove, caller, self._session, caller.principal))

    async def wait(self, ms: int) -> None:
        await self._settled()
        self._clock.advance(ms)

    async def crash(self) -> None:
        await self._crash(self._running[-1])

    async def fault(self, at: str, what: str, after: int, ms: int = 0, times: int = 1) -> None:
        self._faults.arm(Fault(at, what, after, ms, times))

    async def mend(self) -> None:
        self._faults.mend()

    async def take_over(self, stands_still: bool) -> None:
        """Another process starts, and to it the one before is dead; which that one does not know."""
        if stands_still:
            self._running[-1].process.stand_still()
        self._take_overs += 1
        await self._start()

    async def wake(self) -> None:
        for running in self._running:
            running.process.wake()

    async def happen(self, what: str) -> None:
        self._setting.happenings[what](self._world)

    # people wait for nothing

    def _told(self, what: str, n: int | None) -> None:
        self._acknowledged.append(Acknowledged(what, n))

    def _client(self, call: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.create_task(self._called(call))
        self._clients[task] = self._running[-1].process
        task.add_done_callback(self._clients.pop)

    async def _called(self, call: Callable[[], Awaitable[object]]) -> None:
        """Call as a client does: what is refused is refused, and nothing else may go wrong."""
        try:
            await call()
        except SaysoError:
            pass
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what a story is to find
            self._failed.append(f"a call broke off: {error!r}")

    # pages

    async def connect(self, page: int, anew: bool) -> None:
        await self._connect(self._pages[page], anew=anew)

    async def cut(self, page: int) -> None:
        await self._cut(self._pages[page])

    async def _cut(self, page: _Page) -> None:
        if page.reading is not None:
            page.reading.cancel()
            with suppress(asyncio.CancelledError):
                await page.reading
            page.reading = None
            page.view.cut()

    async def _connect(self, page: _Page, *, anew: bool) -> None:
        """Come back by the cursor; or paint anew from the history, and come by its token."""
        if page.reading is None or page.reading.done():
            page.reading = asyncio.create_task(self._read(page, anew=anew or page.view.needs_history))

    async def _read(self, page: _Page, *, anew: bool) -> None:
        app, view = self._app, page.view
        try:
            token = None
            if anew:
                captured = await app.commands.history(self._owner, self._session)
                if captured.token is not None:
                    view.load(json.loads(captured.text))
                    token = captured.token
            cursor = None if view.cursor is None or token is not None else Position.parse(view.cursor)
            frames = await app.commands.follow(self._owner, self._session, token=token, after=cursor)
            async with aclosing(frames):
                async for frame in frames:
                    view.apply(frame)
        except SaysoError:
            pass
        except AssertionError as wrong:
            self._seen_wrong.append(str(wrong))
        if not view.farewell:
            view.cut()

    # the end

    async def _rest(self) -> bool:
        """Let everything come to its end; nothing new goes wrong meanwhile. False if it does not.

        Where a process that was taken over from waits for ever, the session is at rest all the same, once whatever
        that one had out has had its time.
        """
        self._faults.mend()
        await self.wake()
        calm = still = 0
        for step in range(REST_STEPS):
            for _ in range(8):
                await self._step()
            session, others = await self._are_calm()
            calm, still = calm + 1 if session and others else 0, still + 1 if session else 0
            if calm == CALM_STEPS or still == STILL_STEPS:
                return True
            await self._settled()
            self._clock.advance(REST_MS if step < REST_STEPS // 10 else LATER_MS)
        return False

    async def _are_calm(self) -> tuple[bool, bool]:
        """Return whether nothing is left to do for the session, and for whoever does not have it."""
        record = await self._store.session(self._session)
        assert record is not None
        at_rest = {
            running.node: running.app.worker.at_rest
            and running.app.worker.status(self._session).state is JournalState.HEALTHY
            for running in self._running
        }
        waits = await self._store.inbox(self._session, after=0, limit=1)
        idle = record.state is SessionState.IDLE or at_rest.get(record.node or "", False)
        return idle and record.turn is None and not waits and not self._clients, all(at_rest.values())

    async def _everybody_catches_up(self) -> None:
        newest = len(await self._store.rows(self._session))
        for page in self._pages:
            if self._take_overs:  # it may follow a process that has the session no more, or never had it (K4)
                await self._cut(page)
            for _ in range(400):
                view = page.view
                up = view.caught_up and not view.needs_history and len(view.rows) == newest
                if up or self._seen_wrong:
                    break
                await self._connect(page, anew=False)
                await self._step()
                await self._settled()
                self._clock.advance(REST_MS)


_DOERS: Mapping[str, Callable[..., Awaitable[None]]] = {
    name: getattr(_Playing, name)
    for name in (
        *("say", "event", "answer", "stop", "retract", "invite", "leave", "wait", "crash", "fault", "mend"),
        *("take_over", "wake", "connect", "cut", "happen"),
    )
}
