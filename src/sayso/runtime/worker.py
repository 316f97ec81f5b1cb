"""Find sessions with work, own them one task each, let them go; make due timers inputs.

A hint carries no data and may be lost: whoever hears one looks again, and everybody looks from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
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
#: how soon a session is looked at again that another transaction was at
PASSED_OVER_MS = 20


@dataclass(frozen=True, slots=True)
class Disputed:
    """A session whose store holds other rows than ours, or refuses ours: what we accepted, and under which right."""

    token: Token
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Owned:
    """A session's owner here, and its right to it."""

    task: asyncio.Task[None]
    token: Token


class Worker:
    """One node's work. `run` returns after `stop`; one task owns each session meanwhile."""

    def __init__(self, around: Around, feeds: Feeds, *, node: str) -> None:
        self._around, self._feeds, self._node = around, feeds, node
        self._drivers: dict[str, Driver] = {}
        self._wake = asyncio.Event()
        #: sessions that stand still until an operator chooses
        self._disputed: dict[str, Disputed] = {}
        #: how often in a row a session's owner failed here
        self._failures: dict[str, int] = {}
        #: who owns each session here, and those that are being deleted
        self._owner_of: dict[str, Owned] = {}
        self._deleting: set[str] = set()
        self._waiting_for_a_slot = 0
        self._stopping = False
        #: what the store does not do just now: said once when it begins, and once when it is over
        self._failing: set[str] = set()
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
    def waiting_for_a_slot(self) -> int:
        """How many sessions could not be claimed when last looked, because every slot is active; counted up to a
        claim's size."""
        return self._waiting_for_a_slot

    @property
    def at_rest(self) -> bool:
        """Whether nothing is left to do until something comes in or a timer is due (for tests and demos)."""
        settled = len(self._owner_of) == len(self._drivers) and all(d.at_rest for d in self._drivers.values())
        return settled and not self._wake.is_set() and not any(self._looking.values())

    async def rested(self) -> None:
        """Return once it is at rest. What is due by now on the clock has its turn first."""
        for _ in range(3):
            await asyncio.sleep(0)
        while not self.at_rest:  # noqa: ASYNC110 - many things make it so, and in production nobody waits for it
            await asyncio.sleep(0)

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

    # deleting

    async def delete(self, session: str) -> bool:
        """Delete a session, whoever owns it. Here nothing more is admitted first: what is out is given up, and what
        was accepted and is not stored is not waited for. Afterwards nothing of it can land in the store any more, and
        those who listen are sent away. False if there is none.

        Raises:
            StoreUnavailable, CommitUnknown: it may still be there, and goes on as after a crash if so.
        """
        self._deleting.add(session)
        try:
            owned = self._owner_of.get(session)
            if owned is not None:
                owned.task.cancel()
                await asyncio.wait((owned.task,))
            try:
                deleted = await self._around.store.delete_session(session)
            except (Busy, OutcomeUnknown):
                if owned is not None:
                    _ = self._spawn(self._give_back(owned.token))
                raise
        finally:
            self._deleting.discard(session)
        self._disputed.pop(session, None)
        self._feeds.dismiss(session, "gone")
        self._feeds.disown(session)
        return deleted

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
        again_ms = self._around.limits.timer_look_ms
        while await self._woken(within_ms=again_ms):
            self._looking["claim"] = True
            again_ms = self._around.limits.timer_look_ms
            room = self._around.limits.sessions - len(self._owner_of)
            try:
                if room <= 0:
                    await self._make_room()
                elif await self._claim(min(CLAIM_MAX, room)):
                    again_ms = PASSED_OVER_MS
                    continue
            except (Busy, OutcomeUnknown) as error:
                self._fails("no session claimed", error)
                continue
            self._works("no session claimed", "sessions claimed again")
            self._looking["claim"] = False

    async def _claim(self, at_most: int) -> bool:
        """Own what is ready; True if a session was passed over, because another transaction was at it just then.
        No hint need follow that one: it may be a delivery that came again, or one that is refused."""
        claimed = await self._around.store.claim(self._node, at_most=at_most)
        for one in claimed:
            self._own(one)
        if len(claimed) == at_most:  # there may be more
            self._wake.set()
            return False
        self._waiting_for_a_slot = 0
        return bool(await self._around.store.ready(at_most=1))

    async def _make_room(self) -> None:
        """Every slot is taken: ask those that rested longest to let go, as many as wait to be claimed. Who works, or
        stands still because the store does not follow, keeps its slot; then what waits stays stored, and is
        claimed once a slot is free (H38)."""
        waiting = await self._around.store.ready(at_most=CLAIM_MAX)
        drivers = self._drivers.values()
        wanted = max(0, waiting - sum(driver.leaves for driver in drivers))
        resting = [driver for driver in drivers if driver.rests_since_ms is not None and not driver.leaves]
        for driver in sorted(resting, key=lambda driver: driver.rests_since_ms or 0)[:wanted]:
            driver.let_go()
        unserved = max(0, wanted - len(resting))
        if unserved and not self._waiting_for_a_slot:
            log.warning("all slots are active", extra={"sessions": len(self._drivers), "waiting": unserved})
        self._waiting_for_a_slot = unserved

    def _rested(self) -> None:
        """Somebody has nothing left to do, and others wait for a slot."""
        if self._waiting_for_a_slot:
            self._wake.set()

    async def _woken(self, *, within_ms: int) -> bool:
        """Return at a hint, or after a while without one; False once the worker is to stop."""
        try:
            async with asyncio.timeout(within_ms / 1000):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()
        return not self._stopping

    async def _drain(self) -> None:
        """Wait for the drivers to let go; those that don't in time are left to the successor, as in a crash."""
        owned = {each.task: each.token for each in self._owner_of.values()}
        if not owned:
            return
        _, late = await asyncio.wait(owned, timeout=self._around.limits.drain_ms / 1000)
        if not late:
            return
        log.warning("steps still out at the end of the drain", extra={"sessions": len(late)})
        for owner in late:
            owner.cancel()
        await asyncio.wait(late)
        for owner in late:  # so that the next process takes it up as one that was given up in good order
            with suppress(Busy, OutcomeUnknown):
                await self._around.store.surrender(owned[owner])

    # sessions

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return self._tasks.create_task(work)

    def _own(self, claimed: Claimed) -> None:
        session = claimed.token.session
        if session in self._deleting:
            _ = self._spawn(self._give_back(claimed.token))
            return
        before = self._owner_of.get(session)
        owner = self._tasks.create_task(
            self._owned(claimed, before.task if before is not None else None), name=f"session {session}"
        )
        self._owner_of[session] = Owned(owner, claimed.token)
        owner.add_done_callback(partial(self._ended, session))

    def _ended(self, session: str, owner: asyncio.Task[None]) -> None:
        """Forget an owner that was cancelled before it began; the others have done so themselves."""
        owned = self._owner_of.get(session)
        if owned is not None and owned.task is owner:
            del self._owner_of[session]

    async def _owned(self, claimed: Claimed, before: asyncio.Task[None] | None) -> None:
        """Own one session until it is let go. Nothing that happens in it may end the worker. Who owned it here `before`
        was taken over from, and may not know it yet: it ends first, and so those who listen come back by their
        cursor, and drop what it showed them and could not store (K1)."""
        session = claimed.token.session
        if before is not None:
            before.cancel()
            await asyncio.wait([before])
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
            log.exception("a session's owner failed", extra={"session": session, "attempt": claimed.record.attempts})
            await self._give_back(claimed.token, failed=True)
        finally:
            self._drivers.pop(session, None)
            owned = self._owner_of.get(session)
            if owned is not None and owned.task is asyncio.current_task():
                del self._owner_of[session]
            if session not in self._disputed:
                self._feeds.disown(session)
            self._wake.set()  # a hint that came to the driver after it had let go is heard here

    async def _drive(self, claimed: Claimed) -> None:
        around, session = self._around, claimed.token.session
        loaded = await load(around.store, claimed.record, around.rules, around.limits)
        feed = self._feeds.own(session)
        journal = Journal(around.store, feed, claimed.token, claimed.record, spawn=self._spawn)
        driver = Driver(around, claimed, loaded, journal, self._spawn, on_rest=self._rested)
        self._drivers[session] = driver
        if self._stopping:
            driver.stop()
        await driver.run()

    async def _give_back(self, token: Token, *, failed: bool = False) -> None:
        """Leave the session ready for another claim, after a pause that grows, so that a fault can't spin; and
        try until the store takes it, so that nobody's session stays with nobody."""
        session = token.session
        failures = self._failures[session] = self._failures.get(session, 0) + 1
        while True:
            await self._sleep(delay_ms(failures, chance=random.random()))  # noqa: S311 - jitter, no secret
            try:
                await self._around.store.surrender(token, failed=failed)
                return
            except (Busy, OutcomeUnknown) as error:
                log.warning("session not given back yet", extra={"session": session, "cause": str(error)})
                if self._stopping:
                    return
                failures += 1

    async def _sleep(self, ms: int) -> None:
        await self._around.clock.sleep_until(self._around.clock.now_ms() + ms)

    def _fails(self, phrase: str, error: Exception) -> None:
        if phrase not in self._failing:
            self._failing.add(phrase)
            log.warning(phrase, extra={"cause": str(error)})

    def _works(self, phrase: str, again: str) -> None:
        if phrase in self._failing:
            self._failing.discard(phrase)
            log.info(again)

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
                self._fails("timers not fired", error)
            else:
                self._works("timers not fired", "timers fired again")
            self._looking["timers"] = False
            look_at = self._around.clock.now_ms() + self._around.limits.timer_look_ms
            await self._around.clock.sleep_until(min(next_at_ms or look_at, look_at))
