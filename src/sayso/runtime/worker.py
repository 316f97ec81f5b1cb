"""Find sessions with work, own them one task each, let them go; make due timers inputs.

A hint carries no data and may be lost: whoever hears one looks again, and everybody looks from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from sayso.core.errors import Busy, Conflict, Fenced, Gone, OutcomeUnknown
from sayso.core.retry import delay_ms
from sayso.core.rows import Row
from sayso.core.session import Token
from sayso.journal.append import Journal, JournalState, JournalStatus
from sayso.journal.feed import Feeds
from sayso.runtime.driver import Around, Driver
from sayso.runtime.loaded import load
from sayso.storage.store import Claimed

log = logging.getLogger(__name__)

#: ready sessions taken in one claim
CLAIM_MAX = 64


@dataclass(frozen=True, slots=True)
class Disputed:
    """A session whose store holds other rows than ours, or refuses ours: what we accepted, and under which right."""

    token: Token
    rows: tuple[Row, ...]


class Worker:
    """One node's work. `run` returns after `stop`; one task owns each session meanwhile."""

    def __init__(self, around: Around, feeds: Feeds, *, node: str) -> None:
        self._around, self._feeds, self._node = around, feeds, node
        self._drivers: dict[str, Driver] = {}
        self._wake = asyncio.Event()
        self._owners: set[asyncio.Task[None]] = set()
        #: sessions that stand still until an operator chooses
        self._disputed: dict[str, Disputed] = {}
        #: how often in a row a session's owner failed here
        self._failures: dict[str, int] = {}
        self._stopping = False
        #: a claim, or a look at the timers, is on its way
        self._looking = {"claim": True, "timers": True}
        self._tasks: asyncio.TaskGroup

    # hints

    def hint(self, session: str) -> None:
        """Look at a session's inbox: its owner here, or else by claiming what is ready."""
        driver = self._drivers.get(session)
        if driver is not None:
            driver.hint()
        else:
            self._wake.set()

    @property
    def owned(self) -> int:
        """How many sessions this worker owns now."""
        return len(self._drivers)

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left to do until something comes in or a timer is due (for tests and demos)."""
        settled = len(self._owners) == len(self._drivers) and all(d.at_rest for d in self._drivers.values())
        return settled and not self._wake.is_set() and not any(self._looking.values())

    # how the store follows

    def status(self, session: str) -> JournalStatus:
        """Return how far the store follows a session: only what this worker owns can be behind."""
        disputed = self._disputed.get(session)
        if disputed is not None:
            return JournalStatus(JournalState.CONFLICT, len(disputed.rows))
        driver = self._drivers.get(session)
        return driver.journal if driver is not None else JournalStatus(JournalState.HEALTHY)

    async def reconcile(self, session: str) -> JournalStatus:
        """Try at once, whenever the next try is due, to make everything accepted of a session durable; return how
        it stands afterwards."""
        driver = self._drivers.get(session)
        if driver is not None:
            await driver.reconcile(now_ms=driver.journal.next_retry_at_ms)
        return self.status(session)

    def disputed(self, session: str) -> tuple[Row, ...]:
        """Return our rows of a session whose store holds others in their place; none if there is no conflict."""
        disputed = self._disputed.get(session)
        return disputed.rows if disputed is not None else ()

    async def give_up(self, session: str) -> bool:
        """After an operator chose (K7): let a disputed session go, so that it is loaded from the store under the
        next epoch, whose first look finds the choice. False if it is not disputed here.

        Raises:
            StoreUnavailable, CommitUnknown: it is still disputed; try again.
        """
        disputed = self._disputed.get(session)
        if disputed is None:
            return False
        await self._around.store.surrender(disputed.token)  # False: another epoch has it, which is as good
        self._disputed.pop(session, None)
        self._feeds.dismiss(session, "moved")
        self._feeds.disown(session)
        self._wake.set()
        return True

    # life

    async def register(self) -> None:
        """Make this node known, and free the sessions that an ended process left owned (A8)."""
        freed = await self._around.store.register(self._node)
        if freed:
            log.info("sessions of an ended process freed", extra={"sessions": freed, "node": self._node})

    async def run(self) -> None:
        """Work until `stop`; call `register` before."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            timers = tasks.create_task(self._fire_timers())
            try:
                await self._claim_all()
                await self._drain()
            finally:
                timers.cancel()

    def stop(self) -> None:
        """Begin to stop: claim nothing more, let running steps end within the drain limit (K9)."""
        self._stopping = True
        for driver in self._drivers.values():
            driver.stop()
        self._wake.set()

    async def _claim_all(self) -> None:
        self._wake.set()
        while await self._woken():
            self._looking["claim"] = True
            room = self._around.limits.sessions - len(self._drivers)
            if room <= 0:
                continue
            try:
                claimed = await self._around.store.claim(self._node, at_most=min(CLAIM_MAX, room))
            except (Busy, OutcomeUnknown) as error:
                log.warning("no session claimed", extra={"cause": str(error)})
                continue
            for one in claimed:
                self._own(one)
            if len(claimed) == CLAIM_MAX:
                self._wake.set()
            self._looking["claim"] = False

    async def _woken(self) -> bool:
        """Return at a hint, or after a while without one; False once the worker is to stop."""
        try:
            async with asyncio.timeout(self._around.limits.timer_look_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        return not self._stopping

    async def _drain(self) -> None:
        """Wait for the drivers to let go; those that don't in time are left to the successor, as in a crash."""
        if not self._owners:
            return
        _, late = await asyncio.wait(self._owners, timeout=self._around.limits.drain_ms / 1000)
        if late:
            log.warning("steps still out at the end of the drain", extra={"sessions": len(late)})
        for owner in late:
            owner.cancel()

    # sessions

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _own(self, claimed: Claimed) -> None:
        owner = self._tasks.create_task(self._owned(claimed), name=f"session {claimed.token.session}")
        self._owners.add(owner)
        owner.add_done_callback(self._owners.discard)

    async def _owned(self, claimed: Claimed) -> None:
        """Own one session until it is let go. Nothing that happens in it may end the worker."""
        session = claimed.token.session
        try:
            await self._drive(claimed)
            self._failures.pop(session, None)
        except Conflict as error:
            log.error("session stands still", extra={"session": session, "cause": str(error)})
            self._disputed[session] = Disputed(claimed.token, self._feeds.pending(session))
        except (Fenced, Gone) as error:
            log.warning("session lost", extra={"session": session, "cause": str(error)})
        except (Busy, OutcomeUnknown) as error:
            log.warning("session given up for now", extra={"session": session, "cause": str(error)})
            await self._give_back(claimed.token)
        except Exception:
            log.exception("a session's owner failed", extra={"session": session})
            await self._give_back(claimed.token)
        finally:
            self._drivers.pop(session, None)
            if session not in self._disputed:
                self._feeds.disown(session)
            self._wake.set()  # a hint that came to the driver after it had let go is heard here

    async def _drive(self, claimed: Claimed) -> None:
        around, session = self._around, claimed.token.session
        loaded = await load(around.store, claimed.record, around.rules, around.limits)
        feed = self._feeds.own(session)
        journal = Journal(around.store, feed, claimed.token, claimed.record, spawn=self._spawn)
        driver = Driver(around, claimed, loaded, journal, self._spawn)
        self._drivers[session] = driver
        if self._stopping:
            driver.stop()
        await driver.run()

    async def _give_back(self, token: Token) -> None:
        """Leave the session ready for another claim, after a pause that grows, so that a fault can't spin; and
        try until the store takes it, so that nobody's session stays with nobody."""
        session = token.session
        failures = self._failures[session] = self._failures.get(session, 0) + 1
        while True:
            await self._sleep(delay_ms(failures, chance=random.random()))  # noqa: S311 - jitter, no secret
            try:
                await self._around.store.surrender(token)
                return
            except (Busy, OutcomeUnknown) as error:
                log.warning("session not given back yet", extra={"session": session, "cause": str(error)})
                if self._stopping:
                    return
                failures += 1

    async def _sleep(self, ms: int) -> None:
        await self._around.clock.sleep_until(self._around.clock.now_ms() + ms)

    # timers

    async def _fire_timers(self) -> None:
        """Store the input of each due timer, and look again at the next one, or after a while; forget now and
        then what needs no recognising any more (A6)."""
        forget_at_ms = 0
        while True:
            next_at_ms = None
            self._looking["timers"] = True
            try:
                fired = await self._around.store.fire()
                next_at_ms = fired.next_at_ms
                for session, _ in fired.stored:
                    self.hint(session)
                if self._around.clock.now_ms() >= forget_at_ms:
                    await self._around.store.forget()
                    forget_at_ms = self._around.clock.now_ms() + self._around.limits.forget_every_ms
            except (Busy, OutcomeUnknown) as error:
                log.warning("timers not fired", extra={"cause": str(error)})
            self._looking["timers"] = False
            look_at = self._around.clock.now_ms() + self._around.limits.timer_look_ms
            await self._around.clock.sleep_until(min(next_at_ms or look_at, look_at))
