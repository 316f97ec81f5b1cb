"""One session's owner: takes its inputs in order, performs what its turn machine says is due, commits what
came of it. One task owns a session, so nothing here needs a lock.

The shape of every step: stage rows (each is folded into the machine at once), accept them as one commit,
wait until it is durable, and only then let anything happen in the world.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sayso.core import view
from sayso.core.attachment import NO_BLOBS, Blobs
from sayso.core.consent import ConsentState
from sayso.core.contract import Contract
from sayso.core.errors import Unresolved
from sayso.core.inputs import Fit, InFlight, InputKind
from sayso.core.labels import Integrity
from sayso.core.operation import EffectState, OperationState, Settlement
from sayso.core.retry import delay_ms
from sayso.core.rows import (
    Called,
    ConsentWithdrawnBody,
    Draft,
    Ending,
    InputClassifiedBody,
    InputSupersededBody,
    Outcome,
)
from sayso.core.turn import (
    Ask,
    Begun,
    CallModel,
    CallState,
    Close,
    Due,
    End,
    Event,
    Intend,
    ModelFailed,
    Phase,
    Planned,
    Proceed,
    Resumed,
    Reuse,
    Run,
    Send,
    Settle,
    Turn,
    advance,
    at_last_word,
    between_steps,
    due,
)
from sayso.journal.append import Journal, JournalState, JournalStatus, Spawn
from sayso.runtime import compose
from sayso.runtime.fitting import Classified, Fitting
from sayso.runtime.inbox import Inbox
from sayso.runtime.limits import Limits
from sayso.runtime.loaded import Loaded
from sayso.runtime.operations import Attempt, Came, attempt, finished, look_up, provisional, unguarded
from sayso.runtime.ports import (
    Call,
    Classifier,
    Clock,
    Evidence,
    Finished,
    Model,
    ModelFault,
    ModelRequest,
    Rescue,
    Tools,
)
from sayso.runtime.rules import Rules
from sayso.storage.store import Claimed, DoorKind, DoorNote, InboxRow, Released, Store

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Persona:
    """What the runtime needs to know of an agent."""

    name: str
    instructions: str
    model: Model
    tools: Tools
    in_flight: InFlight = InFlight.QUEUE
    #: says how what a turn's own person says meanwhile fits it; without one, all of it belongs to the turn
    classifier: Classifier | None = None
    #: how long a person may go on before what she said starts a turn
    debounce_ms: int = 0


@dataclass(frozen=True, slots=True)
class Around:
    """What every driver of a worker shares."""

    store: Store
    clock: Clock
    persona: Persona
    limits: Limits
    rules: Rules
    rescue: Rescue


@dataclass(frozen=True, slots=True)
class ModelEnded:
    """The end of a model call: a reply, or why there is none."""

    turn: str
    reply: Finished | None
    fault: str = ""


@dataclass(frozen=True, slots=True)
class Broken:
    """Something that was out broke in a way that nobody foresaw."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Work:
    """Something that goes out once all that is staged is durable."""

    begin: Callable[[], Coroutine[Any, Any, None]]
    #: the call it is an attempt at; None for a model call
    call: str | None = None
    #: it may be the first thing that ever goes out for its call
    first: bool = False


@dataclass(frozen=True, slots=True)
class GraceOver:
    """What a stopped turn has out had its time."""

    turn: str


@dataclass(frozen=True, slots=True)
class Detached:
    """An operation that was given up and is still out: what it did may yet be heard (K25)."""

    called: Called
    turn: str
    #: on whose say-so it ran
    acting: str | None
    task: asyncio.Task[None]


#: what a driver waits for: the end of something that was out, or None, "look at the inbox"
Happening = ModelEnded | Attempt | Classified | Broken | GraceOver | None


class Driver:
    """The owner of one session, from claim to release."""

    def __init__(
        self,
        around: Around,
        claimed: Claimed,
        loaded: Loaded,
        journal: Journal,
        spawn: Spawn,
        *,
        on_rest: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_rest` is called whenever nothing is left to do."""
        self._on_rest = on_rest
        self._around, self._token, self._loaded, self._journal = around, claimed.token, loaded, journal
        self._attempts = claimed.record.attempts
        #: when it took the session up; what passed before that was nobody's work on the turn
        self._since_ms = around.clock.now_ms()
        self._spawn = spawn
        self._inbox = Inbox(
            around.store,
            loaded,
            around.rules,
            around.limits,
            tail=claimed.record.inbox_tail,
            sleep=lambda ms: around.clock.sleep_until(around.clock.now_ms() + ms),
            journal=journal,
        )
        self._happenings: asyncio.Queue[Happening] = asyncio.Queue()
        self._fitting = Fitting(
            around.persona.classifier,
            around.store,
            loaded,
            self._inbox,
            spawn,
            self._happenings.put_nowait,
            classify_ms=around.limits.classify_ms,
            in_flight=around.persona.in_flight,
        )
        #: what is out, and the call that it is an attempt at; None for the model
        self._out: dict[asyncio.Task[None], str | None] = {}
        #: operations that were given up and are still out, by call
        self._detached: dict[str, Detached] = {}
        #: ends the time that a stopped turn's calls have to answer
        self._grace: asyncio.Task[None] | None = None
        #: ends the time in which a sender may go on before her turn starts
        self._quiet: asyncio.Task[None] | None = None
        #: what may begin once everything staged is durable
        self._waiting: list[Work] = []
        self._staged = False
        #: answers of operations whose result is not known to be durable, by operation, with the tool that gave each
        self._heard: dict[str, tuple[str, Attempt]] = {}
        #: how many inputs wait, as those who listen were told
        self._waiting_shown = 0
        self._hinted = True
        self._resting = False
        #: since when nothing was left to do; None while something is
        self.rests_since_ms: int | None = None
        #: another session needs its place, so it lets go if it can
        self.leaves = False
        self._stopping = False

    @property
    def at_rest(self) -> bool:
        """Whether the session waits for something to come in, and for nothing else."""
        return self._resting and not self._hinted and not self.leaves

    def hint(self) -> None:
        """Look at the inbox."""
        self._hinted = True
        self._happenings.put_nowait(None)

    def let_go(self) -> None:
        """Give the session up now, if it still rests when this is heard; for another one that needs the place."""
        self.leaves = True
        self._happenings.put_nowait(None)

    def stop(self) -> None:
        """Give the session up as soon as nothing is out (K9)."""
        self._stopping = True
        self._happenings.put_nowait(None)

    async def run(self) -> None:
        """Own the session until it has nothing to do, or is asked to stop.

        Raises:
            Fenced, Conflict: the session is not this driver's any more; nothing else was written.
        """
        try:
            await self._resume()
            while True:
                await self._catch_up()
                if self._stopping and not self._out and not self._detached:
                    await self._around.store.surrender(self._token)
                    return
                if await self._idle():
                    return
        finally:
            await self._abandon()

    async def _catch_up(self) -> None:
        """Do all that can be done now: settle the control lane, go on with the turn, start the next one."""
        while True:
            if self._hinted:
                self._hinted = False
                await self._settle_control()
            if self._loaded.turn is None:
                await self._flush()  # the end of the one before
            if self._loaded.turn is None and not await self._start_next():
                if self._hinted:  # while something was settled: whoever stood still has taken the wake-up
                    continue
                return
            await self._go_on()
            if not self._hinted and self._loaded.turn is not None:
                return

    async def _settle_control(self) -> None:
        """Settle what is new in the control lane, a commit each: what an entry comes to is read from the
        store too, which must know what came of the one before."""
        await self._flush()
        for entry in await self._inbox.look():
            if entry.input.kind is InputKind.CLOSE:
                await self._close(entry)
                return
            if entry.input.kind is InputKind.STOP:
                self._stop(entry)
            else:
                self._stage(await self._inbox.settle(entry))
            await self._flush()
        self._stage(self._inbox.rejected(self._fitting.policy))
        await self._flush()
        self._fitting.look()
        await self._begin_anew_at_once()

    # what is said meanwhile

    async def _begin_anew_at_once(self) -> None:
        """End the running turn for another one without waiting for what is out: where the agent is set to (C7), or what
        its own person says changes what it is about and nothing of it is out but the model (C8)."""
        turn = self._loaded.turn
        if self._stopping or turn is None or turn.stopped or turn.steps_of is not None:
            return
        if self._fitting.first(Fit.REVISES) is not None:
            if turn.phase is Phase.THINKING:
                await self._begin_anew()
            return
        restarts = any(map(self._fitting.restarts, self._inbox.said_meanwhile()))
        if restarts and turn.paused is None and not any(map(self._forbids_restart, turn.plan)):
            await self._begin_anew()

    async def _begin_anew(self) -> bool:
        """End the running turn, and begin one with what was said before and since, in one commit. What is out is
        unknown, until it says what it did or a call of the new turn takes it over. Return whether there was
        anything to begin it with."""
        since = [entry.n for entry in self._inbox.said_meanwhile()]
        fits = [(entry, self._fitting.of(entry)) for entry in self._inbox.own()]
        adds = [entry.n for entry, fit in fits if fit is Fit.ADDS and entry.n in since and self._fitting.joins(entry)]
        said = [entry for entry, fit in fits if fit is Fit.REVISES or entry.n in adds]
        turn, body = self._loaded.turn, self._loaded.turn_body
        if not said or turn is None or body is None:
            return False
        revised = any(self._fitting.of(entry) is Fit.REVISES for entry in said)
        self._take_what_came()
        await self._flush()
        done = await self._inbox.done_in(turn.id)
        turn = self._loaded.turn
        if turn is None:  # the store did not follow for a while, and it ended
            return True
        if turn.phase is Phase.THINKING:
            self._stage(self._cut_off())
        self._let_go_of_what_is_out()
        self._fitting.forget()
        why = f"{body.origin.principal} {'changed what it is about' if revised else 'said more'}, and it begins anew"
        self._loaded.reuse |= {row.operation: row for row in done}
        self._stage([*compose.cancelled(turn, why, tell=False), *self._inbox.restarting(said, turn.id, body)])
        await self._flush()
        return True

    def _forbids_restart(self, planned: Planned) -> bool:
        contract = self._contracts.get(planned.called.tool)
        out = planned.called.is_operation and planned.state in (CallState.SENT, CallState.UNKNOWN)
        return out and contract is not None and contract.no_restart

    def _take_what_came(self) -> None:
        """Take in the results that have come and nobody has looked at, before their turn ends."""
        came = [self._happenings.get_nowait() for _ in range(self._happenings.qsize())]
        for happening in came:
            if isinstance(happening, Attempt):
                self._take(happening)
            else:
                self._happenings.put_nowait(happening)

    def _let_go_of_what_is_out(self) -> None:
        """Wait for nothing of the turn any more. An operation stays out: what it did may still be heard (K25)."""
        turn = self._turn
        for task, call in list(self._out.items()):
            planned = self._planned(call) if call is not None else None
            if planned is None or not planned.called.is_operation:
                task.cancel()
            else:
                self._detached[planned.called.call] = Detached(planned.called, turn.id, turn.acting, task)
                del self._out[task]

    def _stop(self, entry: InboxRow) -> None:
        """Stop the running turn (K24): nothing of it begins any more, and a reply that is being written ends where it
        is. What is out has its grace to answer."""
        self._stage(self._inbox.stop(entry))
        turn = self._loaded.turn
        if turn is None or not turn.stopped or self._grace is not None:
            return
        if turn.phase is Phase.THINKING:
            for task, call in self._out.items():
                if call is None:
                    task.cancel()
            self._stage(self._cut_off())
        ends_at_ms = self._around.clock.now_ms() + self._around.limits.stop_grace_ms
        self._grace = self._spawn(self._end_grace(turn.id, ends_at_ms))

    async def _end_grace(self, turn: str, at_ms: int) -> None:
        await self._around.clock.sleep_until(at_ms)
        self._happenings.put_nowait(GraceOver(turn))

    def _end_waiting_for_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _grace_over(self) -> None:
        """End a stopped turn. What is still out is given up: what it did is unknown, and it may still tell (K25)."""
        self._take_what_came()
        self._let_go_of_what_is_out()
        self._stage_end(compose.cancelled(self._turn, self._turn.stopped))

    async def _close(self, entry: InboxRow) -> None:
        """Write the session's last rows: what is out is given up, the turn ends, and nothing more begins. What answered
        before that keeps its answer."""
        self._end_waiting_for_grace()
        for answered in await self._give_up_what_is_out():
            self._take(answered)
        why = f"the session was closed by {entry.input.principal}"
        if self._loaded.turn is not None:
            self._stage(self._cut_off())
            self._stage_end(compose.cancelled(self._loaded.turn, why), offers=False)
        self._stage(self._inbox.closing(entry, why))
        await self._flush()

    async def _idle(self) -> bool:
        """Wait for the next happening, and take it in. Return whether the session was released instead."""
        self._show_queue()
        waits = self._loaded.turn is None or self._loaded.turn.paused is not None
        busy = not waits or bool(self._out) or self._fitting.busy
        if self._loaded.closed:
            return await self._released()
        self._resting = not busy
        # what was given up may still say what it did, and a sender may still go on
        stays = busy or bool(self._detached) or self._quiet is not None
        if not stays:
            self.rests_since_ms = self._around.clock.now_ms()
            self._on_rest()
        try:
            async with asyncio.timeout(None if stays else self._around.limits.linger_ms / 1000):
                happening = await self._happenings.get()
        except TimeoutError:
            return await self._released()
        finally:
            self._resting, self.rests_since_ms = False, None
        self._take(happening)
        try:
            return self.leaves and not stays and not self._hinted and await self._released()
        finally:
            self.leaves = False

    async def _released(self) -> bool:
        """Give the session up, unless something came in since the last look (K22)."""
        released = await self._around.store.release(self._token, looked_to=self._inbox.looked_to)
        self._hinted = self._hinted or released is Released.MORE
        return released is not Released.MORE

    def _show_queue(self) -> None:
        """Tell those who listen how many inputs wait, when that has changed; not whose, nor what they say."""
        waiting = self._inbox.waiting
        if waiting != self._waiting_shown:
            self._waiting_shown = waiting
            self._journal.show("queue", {"session": self._loaded.id, "waiting": waiting})

    async def _abandon(self) -> None:
        """Drop what is out. Its operations stay `sent` in the store, for the successor to settle (D5); the answers
        that came and are not stored are kept for it (K9)."""
        self._end_waiting_for_grace()
        if self._quiet is not None:
            self._quiet.cancel()
        for answered in await self._give_up_what_is_out():
            self._note_heard(answered)
        if self._heard:
            session, heard = self._loaded.id, self._heard.items()
            self._around.rescue.keep([_evidence(session, operation, *answer) for operation, answer in heard])

    async def _give_up_what_is_out(self) -> list[Attempt]:
        """Nothing begins any more, and nothing is waited for. Return the receipts that had come."""
        self._waiting.clear()
        out = [*self._fitting.forget(), *self._out, *(detached.task for detached in self._detached.values())]
        for task in out:
            task.cancel()
        await asyncio.gather(*out, return_exceptions=True)
        left = [self._happenings.get_nowait() for _ in range(self._happenings.qsize())]
        return [happening for happening in left if isinstance(happening, Attempt) and happening.is_receipt]

    def _note_heard(self, receipt: Attempt) -> None:
        planned, detached = self._planned(receipt.call), self._detached.get(receipt.call)
        called = detached.called if detached is not None else planned.called if planned is not None else None
        if called is not None and called.is_operation:
            self._heard[called.operation] = (called.tool, receipt)

    # turns

    @property
    def _turn(self) -> Turn:
        assert self._loaded.turn is not None
        return self._loaded.turn

    @property
    def _contracts(self) -> dict[str, Contract]:
        return dict(self._around.persona.tools.contracts)

    def _tell(self, event: Event) -> None:
        """Tell the machine an event that is no row."""
        self._loaded.turn, _ = advance(self._turn, event)

    async def _resume(self) -> None:
        """After a claim: what was out when the process before us ended is out no more."""
        await self._take_rescued()
        if self._attempts > self._around.limits.attempts_to_go_on:
            await self._give_up_what_stands_in_the_way()
        if self._loaded.turn is None:
            return
        log.info("turn resumed", extra={"session": self._loaded.id, "turn": self._loaded.turn.id})
        self._stage(compose.lost(self._turn))
        self._tell(Resumed())
        assert self._loaded.turn_body is not None
        say_so_at_ms = self._loaded.turn_body.say_so_at_ms
        now_ms = self._around.clock.now_ms()
        self._stage(compose.too_old(self._turn, say_so_at_ms, now_ms, self._contracts))
        if self._turn.stopped:  # nobody looks into what was out; but what is known of it is said
            for one in self._around.rescue.of(self._loaded.id):
                if (about := self._is_about(one.operation)) is not None:
                    self._take(_rescued(one, about.call))
        await self._flush()

    async def _give_up_what_stands_in_the_way(self) -> None:
        """Whoever took the session up before us failed, or ended, before anything more of it was stored, and so might
        we. Its open turn, the yes that owes one, or the input that waits longest, is given up; an operator is told."""
        why = f"given up after {self._attempts - 1} attempts to go on, of which nothing was stored"
        owed, turn = self._loaded.owed, self._loaded.turn
        if turn is not None:
            what = f"{turn.id} was"
            self._tell(Resumed())
            self._stage_end(compose.cancelled(self._turn, why, ending=Ending.FAILED))
        elif owed is not None:
            if owed.state is not ConsentState.APPROVED:
                return  # a no owes a turn that only speaks: it is tried again, with a growing pause
            what = f"the yes to {owed.consent.id} was"
            self._stage([Draft(ConsentWithdrawnBody(owed.consent.id, why))])
        else:
            waiting = await self._around.store.inbox(self._loaded.id, after=0, limit=1)
            if not waiting:
                return
            what = f"input {waiting[0].n} was"
            self._stage([Draft(InputSupersededBody(waiting[0].n, why))])
        log.error("session parked", extra={"session": self._loaded.id, "what": what, "attempts": self._attempts})
        await self._flush()
        note = DoorNote(DoorKind.PARKED, f"session {self._loaded.id}", f"{what} {why}", session=self._loaded.id)
        await self._around.store.note(note)

    async def _take_rescued(self) -> None:
        """Say what operations did that were given up, in a turn that is over, and answered when the store could not
        take it (K9, K25)."""
        for one in self._around.rescue.of(self._loaded.id):
            if self._is_about(one.operation) is not None:
                continue
            known = await self._around.store.operation(self._loaded.id, one.operation)
            if known is not None and known.state is OperationState.UNKNOWN:
                contract = self._contracts.get(known.tool)
                returns = contract.returns if contract is not None else Integrity.OUTSIDER
                came = _rescued(one, known.operation)
                self._stage([compose.settled(came, known.operation, known.tool, known.turn, None, returns)])

    async def _start_next(self) -> bool:
        """Begin the next turn: one that an answer owes comes before the queue (K13). False if there is none.

        What has nothing to run after all (a void consent, a question back to a person) ends without a turn.
        """
        if self._stopping or self._loaded.closed:
            return False
        owed = self._loaded.owed
        if owed is None:
            debounce_ms = self._around.persona.debounce_ms
            if self._waits_for_quiet(self._inbox.quiet_at_ms(debounce_ms)):
                return False
            drafts = await self._of_the_queue(together=debounce_ms > 0)
            if drafts is None:
                return False
        elif owed.state == "approved":
            now_ms = self._around.clock.now_ms()
            steps = self._around.rules.steps(owed, tuple(self._loaded.context.parts))
            undone = [step.undoes for step in steps if step.undoes is not None]
            moot = [operation for operation in undone if not await self._inbox.stands(operation)]
            drafts = compose.approved(owed, steps, self._loaded, self._contracts, now_ms=now_ms, moot=moot)
        else:
            drafts = [await self._continuation(owed.consent.id)]
        self._stage(drafts)
        return bool(drafts)

    async def _of_the_queue(self, *, together: bool) -> list[Draft] | None:
        """Return the rows that begin the turn of what waits longest; None while it is being found out whether it
        changes what its own sender was asked about: then that is planned again instead (C8)."""
        asked = self._inbox.own_question()
        fit = Fit.INDEPENDENT if asked is None else self._fitting.after(asked[1], asked[0])
        if fit is None:
            return None
        if asked is not None and (fit is Fit.REVISES or (fit is Fit.ADDS and self._fitting.joins(asked[0]))):
            return await self._inbox.instead(asked[1])
        return await self._inbox.next_turn(together=together)

    def _waits_for_quiet(self, at_ms: int) -> bool:
        """Whether what would start a turn may still be gone on with; it is looked at again then."""
        if self._quiet is not None:
            self._quiet.cancel()
            self._quiet = None
        if at_ms <= self._around.clock.now_ms():
            return False
        self._quiet = self._spawn(self._look_again(at_ms))
        return True

    async def _look_again(self, at_ms: int) -> None:
        await self._around.clock.sleep_until(at_ms)
        self._quiet = None
        self._happenings.put_nowait(None)

    async def _continuation(self, consent: str) -> Draft:
        standing = self._loaded.standings[consent]
        replaced = await self._inbox.replaced(standing.consent.about)
        return compose.continuation(standing, self._loaded, replaced, now_ms=self._around.clock.now_ms())

    async def _go_on(self) -> None:
        """Perform what is due until only what is out is waited for."""
        stood_still = True
        while stood_still:  # what was due then may not be what is due now
            while (turn := self._loaded.turn) is not None:
                effects = due(turn)
                if await self._join(turn, effects):
                    continue
                waits = turn.paused is not None or self._stopping
                if not effects and turn.phase is Phase.BOUNDARY and not waits:
                    if self._took_too_long():
                        effects = (End(Ending.FAILED, f"it took longer than {self._around.limits.turn_ms} ms"),)
                    else:
                        self._loaded.turn, effects = advance(turn, Proceed())
                if not effects:
                    break
                await self._perform(turn, effects[0])
            stood_still = await self._flush()

    def _took_too_long(self) -> bool:
        since_ms = max(self._loaded.turn_at_ms, self._since_ms)
        return self._around.clock.now_ms() - since_ms > self._around.limits.turn_ms

    async def _join(self, turn: Turn, effects: Sequence[Due]) -> bool:
        """Let what its own user said meanwhile take effect, where nothing is half done; return whether any did, or
        the turn is another by now, so that what is due must be looked at again.

        At a boundary, between two steps, or after the model's last word, and then it is asked again (C2, C6). What
        comes a moment later is simply still queued (K21).
        """
        if self._stopping or turn.steps_of is not None or turn.stopped or turn.paused is not None:
            return False
        boundary, step, last = turn.phase is Phase.BOUNDARY and not effects, between_steps(turn), at_last_word(turn)
        if not (boundary or step or last):
            return False
        if self._hinted:
            self._hinted = False
            await self._settle_control()
            if self._loaded.turn != turn:  # closed, or the store did not follow for a while
                return True
        revises, unsure = self._fitting.first(Fit.REVISES), self._fitting.first(Fit.UNSURE)
        adding = self._inbox.adding(self._fitting.merges) if turn.steps_left > 0 else []
        if revises is not None or (adding and step):
            if step:
                self._stage(compose.superseded(turn, str((revises or adding[0]).input.principal)))
                return True
            return await self._begin_anew()
        if unsure is not None and self._fitting.joins(unsure) and not last:
            limits, now_ms = self._around.limits, self._around.clock.now_ms()
            self._stage([compose.pause(unsure, turn, self._loaded, now_ms=now_ms, pause_ms=limits.pause_ms)])
            return True
        self._stage(self._inbox.joining(adding, turn.id))
        return bool(adding)

    async def _perform(self, turn: Turn, effect: Due) -> None:
        match effect:
            case Intend(call):
                self._stage([compose.intended(call, turn, self._key(call))])
            case Send(call) | Run(call) if call.tool not in self._contracts:
                self._stage([compose.closed(call, Outcome.NOT_STARTED, f"there is no tool {call.tool} any more", turn)])
            case Send(call, apart):
                if apart:
                    await self._flush()
                if self._is_open(call.call):
                    self._send(call)
            case Reuse(call):
                self._stage([compose.reused(call, turn)])
            case Run(call):
                self._tell(Begun(call.call))
                self._waiting.append(Work(partial(self._attempt, call, self._handed(call)), call.call, first=True))
            case Settle(call, attempts):
                self._settle(call, attempts)
            case Close(call, outcome, reason):
                self._stage([compose.closed(call, outcome, reason, turn)])
            case Ask(calls):
                self._ask(turn, calls)
            case End():
                await self._end(turn, effect)
            case CallModel():
                self._waiting.append(Work(partial(self._ask_model, turn.id, turn.replies + 1)))

    def _ask(self, turn: Turn, calls: Sequence[Called]) -> None:
        self._stage(
            compose.ask(
                calls,
                turn,
                self._loaded,
                self._contracts,
                now_ms=self._around.clock.now_ms(),
                consent_ms=self._around.limits.consent_ms,
                wording=self._around.rules.question,
            )
        )

    async def _end(self, turn: Turn, end: End) -> None:
        """End the turn. One that ran a consent's steps hands on, in the same commit, to a turn in which the
        model goes on with the origin of the turn that asked (K16)."""
        if end.ending is Ending.CANCELLED:  # stopped: nothing goes on from it either
            self._end_waiting_for_grace()
            self._stage_end(compose.cancelled(turn, end.reason))
            return
        hands_on = [] if turn.steps_of is None else [await self._continuation(turn.steps_of)]
        self._stage_end([compose.ended(turn, end), *hands_on])

    def _stage_end(self, rows: Sequence[Draft], *, offers: bool = True) -> None:
        """End the turn, and no other takes its place: what of an older one it did not take over is told of now, or,
        where it can be undone, a person is asked whether it shall be."""
        self._fitting.forget()
        undoable = compose.undoable(self._loaded, self._contracts) if offers else []
        offered = {row.operation for row in undoable}
        self._stage([*self._inbox.moot_pause(), *compose.left_over(self._loaded, offered=offered)])
        if undoable:
            offer = compose.offer_to_undo(
                undoable,
                self._turn,
                self._loaded,
                self._contracts,
                self._around.rules.decide,
                now_ms=self._around.clock.now_ms(),
                consent_ms=self._around.limits.consent_ms,
                wording=self._around.rules.question,
            )
            self._stage([offer])
        self._stage(rows)

    # rows

    def _stage(self, drafts: Sequence[Draft], *, blobs: Blobs = NO_BLOBS) -> None:
        """Add rows to the next commit, and fold them now: what is due next is read off the result. `blobs` are the
        bytes of the files that they name."""
        for draft in drafts:
            self._loaded.take(self._journal.stage(draft, blobs=blobs))
            self._staged = True

    async def _flush(self) -> bool:
        """Make what is staged durable; then begin what waited for that. Return whether the store did not follow
        for a while, and so what is due may have changed."""
        stood_still = False
        if self._staged:
            self._staged = False
            try:
                await self._journal.accept().durable()
            except Unresolved:
                stood_still = True
                await self._stand_still()
            self._loaded.forget_settled()
            self._forget_heard()
        begin, self._waiting = self._waiting, []
        for work in begin:
            task = self._spawn(self._reported(work))
            self._out[task] = work.call
            task.add_done_callback(self._ended)
        return stood_still

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._out.pop(task, None)

    def _forget_heard(self) -> None:
        """All that was staged is durable, results too: an answer that was kept for one of them is needed no more."""
        self._heard.clear()
        for one in self._around.rescue.of(self._loaded.id):
            if self._is_about(one.operation) is None:
                self._around.rescue.drop(one.session, one.operation)

    # the store does not follow

    async def _stand_still(self) -> None:
        """Wait until everything accepted is known to be stored; try when a try is due (1.6, 1.7 of the hand-off).

        Nothing goes out meanwhile, and no row is accepted but results: a reply's calls that did not go out get
        "not started" at once (H27), so that the conversation is whole for who reads it, and what was out may
        still answer. The steps of a yes wait, and are not sent if it has become too old (K14).
        """
        self._close_unsent()
        later: list[Happening] = []
        while self._journal.state is JournalState.RETRYING:
            happening = await self._next_or_due()
            if isinstance(happening, Attempt) and happening.is_receipt:
                self._take(happening)
                self._end_what_began()
            elif happening is not None:
                later.append(happening)
            await self._journal.reconcile(now_ms=self._around.clock.now_ms())
        await self._journal.settled()
        for happening in later:
            self._happenings.put_nowait(happening)
        self._close_too_old()
        if self._staged:
            await self._flush()

    async def _next_or_due(self) -> Happening:
        """Return what happens next, or None when the next try is due or somebody asks for a look."""
        due_ms = self._journal.status.next_retry_at_ms
        clock = self._around.clock
        waiting = asyncio.ensure_future(self._happenings.get())
        due = asyncio.ensure_future(clock.sleep_until(due_ms if due_ms is not None else clock.now_ms()))
        settled = asyncio.ensure_future(self._journal.settled())
        try:
            await asyncio.wait((waiting, due, settled), return_when=asyncio.FIRST_COMPLETED)
            return waiting.result() if waiting.done() else None
        finally:
            for future in (waiting, due, settled):
                future.cancel()
            await asyncio.gather(waiting, due, settled, return_exceptions=True)

    def _end_what_began(self) -> None:
        """Accept staged results behind what is pending."""
        if self._staged:
            self._staged = False
            with suppress(Unresolved):
                self._journal.accept(ends=True)

    def _close_unsent(self) -> None:
        """Give a reply's calls that provably did not go out their result."""
        turn = self._loaded.turn
        if turn is None or turn.steps_of is not None:
            return
        unsent = {work.call for work in self._waiting if work.first}
        for planned in turn.plan:
            never_out = planned.state in (CallState.PLANNED, CallState.INTENDED) or planned.called.call in unsent
            if never_out and planned.state is not CallState.SETTLED:
                why = "it was not sent: what came before it could not be stored"
                self._stage([compose.closed(planned.called, Outcome.NOT_STARTED, why, turn)])
                turn = self._loaded.turn or turn
        self._drop_closed()
        self._end_what_began()

    def _close_too_old(self) -> None:
        """What waited for the store so long that its say-so is too old now is not sent (K14)."""
        turn, body = self._loaded.turn, self._loaded.turn_body
        if turn is None or body is None:
            return
        unsent = frozenset(work.call for work in self._waiting if work.first and work.call is not None)
        now_ms = self._around.clock.now_ms()
        self._stage(compose.too_old(turn, body.say_so_at_ms, now_ms, self._contracts, unsent=unsent))
        self._drop_closed()

    def _drop_closed(self) -> None:
        """Let go of what would go out for a call that has its result."""
        self._waiting = [work for work in self._waiting if work.call is None or self._is_open(work.call)]

    def _planned(self, call: str) -> Planned | None:
        """Return a call of the open turn's plan, if there is one of that ref."""
        turn = self._loaded.turn
        plan = turn.plan if turn is not None else ()
        return next((planned for planned in plan if planned.called.call == call), None)

    def _is_about(self, operation: str) -> Called | None:
        """Return the call of the open turn that is about an operation, its own or one that it has taken over, while
        it has no result."""
        plan = self._loaded.turn.plan if self._loaded.turn is not None else ()
        about = (planned for planned in plan if planned.called.operation == operation)
        return next((planned.called for planned in about if planned.state is not CallState.SETTLED), None)

    def _is_open(self, call: str) -> bool:
        """Whether a call has no result yet."""
        planned = self._planned(call)
        return planned is not None and planned.state is not CallState.SETTLED

    @property
    def journal(self) -> JournalStatus:
        """How far the store follows."""
        return self._journal.status

    async def reconcile(self, *, now_ms: int | None = None) -> None:
        """Try to make everything accepted durable, if a try is due by `now_ms`."""
        await self._journal.reconcile(now_ms=now_ms)

    async def _reported(self, work: Work) -> None:
        """Whatever goes wrong in what is out, its owner hears of it; nothing fails unseen or elsewhere."""
        try:
            await work.begin()
        except Exception as error:  # noqa: BLE001 - it is raised again by the owner, who logs it
            self._happenings.put_nowait(Broken(error))

    # the world

    def _handed(self, call: Called, key: str | None = None) -> Call:
        assert self._loaded.turn_body is not None
        by = self._loaded.turn_body.origin.principal
        return compose.handed(call, self._turn, self._loaded.id, key or self._key(call), by)

    def _key(self, call: Called) -> str:
        return self._around.rules.key(self._loaded.id, self._turn, call)

    def _send(self, call: Called, *, after_ms: int = 0) -> None:
        """Store that an attempt goes out, and let it go once that is durable."""
        first = self._turn.find(call.call).attempts == 0
        key = self._key(call)
        self._stage([compose.sent(call, self._turn, key)])
        attempt_it = partial(self._attempt, call, self._handed(call, key), after_ms=after_ms)
        self._waiting.append(Work(attempt_it, call.call, first=first))

    async def _attempt(self, call: Called, handed: Call, *, after_ms: int = 0) -> None:
        clock, tools = self._around.clock, self._around.persona.tools
        if after_ms:
            await clock.sleep_until(clock.now_ms() + after_ms)
        await self._came(call, await attempt(tools, tools.contracts[call.tool], call.call, handed, call.arguments))

    async def _look_up(self, call: Called, handed: Call) -> None:
        tools = self._around.persona.tools
        await self._came(call, await look_up(tools, tools.contracts[call.tool], call.call, handed, call.arguments))

    async def _came(self, call: Called, ended: Attempt) -> None:
        """Show a receipt at once; then make of the attempt what becomes a row, and hand it to the owner."""
        tools, limits = self._around.persona.tools, self._around.limits
        contract = tools.contracts[call.tool]
        if ended.is_receipt and not contract.guarded_first and self._is_open(call.call):
            text, files = provisional(ended, limits)
            outcome = Outcome.OK if ended.came is Came.OK else Outcome.FAILED
            shown = view.provisional(
                session=self._loaded.id,
                turn=self._turn.id,
                call=call.call,
                tool=call.tool,
                outcome=outcome,
                text=text,
                effect=ended.effect,
                attachments=files,
            )
            self._journal.show("tool.provisional", shown)
        try:
            self._happenings.put_nowait(await finished(ended, tools, contract, limits))
        except asyncio.CancelledError:  # it answered all the same, and that must not be lost (K9)
            self._happenings.put_nowait(unguarded(ended))
            raise

    def _settle(self, call: Called, attempts: int, *, looked_up: bool = False) -> None:
        """Find out what became of an unknown operation: from an answer that was rescued (K9), or else ask the other
        side, send again with the same key, or tell a person (D5)."""
        rescue = self._around.rescue.of(self._loaded.id)
        rescued = next((one for one in rescue if one.operation == call.operation), None)
        if rescued is not None:
            self._take(_rescued(rescued, call.call))
            return
        if any(detached.called.operation == call.operation for detached in self._detached.values()):
            self._tell(Begun(call.call))  # the attempt that was given up is still out: what it says is this call's
            return
        contract = self._around.persona.tools.contracts.get(call.tool)
        most = self._around.limits.attempts_per_operation
        has_lookup = contract is not None and contract.has_lookup and not looked_up
        recognised = call.keyed and contract is not None and self._key_is_kept(call, contract)
        settlement = self._around.rules.settlement
        match settlement(has_lookup=has_lookup, recognised=recognised, attempts=attempts, attempts_max=most):
            case Settlement.LOOK_UP:
                self._tell(Begun(call.call))
                self._waiting.append(Work(partial(self._look_up, call, self._handed(call)), call.call))
            case Settlement.RESEND:
                self._send_again(call, attempts)
            case Settlement.TELL if call.keyed and not recognised:
                self._stage(compose.told(call, self._turn, "no answer came, and its key is too old to be sent again"))
            case Settlement.TELL:
                self._stage(compose.told(call, self._turn, "no answer came"))

    def _send_again(self, call: Called, attempts: int) -> None:
        self._send(call, after_ms=delay_ms(attempts, chance=0.5) if attempts > 1 else 0)

    def _key_is_kept(self, call: Called, contract: Contract) -> bool:
        """Whether the other side still recognises a repeat by the key."""
        sent_at_ms = self._turn.find(call.call).sent_at_ms
        return sent_at_ms is None or self._around.clock.now_ms() <= sent_at_ms + contract.key_kept_ms

    async def _ask_model(self, turn: str, number: int) -> None:
        persona, limits = self._around.persona, self._around.limits
        request = ModelRequest(
            persona.instructions, self._loaded.context.messages, persona.tools.offers, self._loaded.id, turn
        )
        reply, fault = None, ""
        try:
            async with asyncio.timeout(limits.model_ms / 1000), persona.model.stream(request) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        reply = event
                    else:
                        self._journal.write(turn, number, event.text)
            if reply is None or not (reply.text or reply.calls):
                reply, fault = None, "the model's answer was empty or cut short"
        except TimeoutError:
            fault = f"no answer from the model within {limits.model_ms} ms"
        except ModelFault as known:
            fault = f"the model failed: {known}"
        except Exception as error:
            log.exception("model failed", extra={"session": self._loaded.id, "turn": turn})
            fault = f"the model broke off with {type(error).__name__}"
        self._happenings.put_nowait(ModelEnded(turn, reply, fault))

    def _take(self, happening: Happening) -> None:
        """Take in the end of something that was out."""
        match happening:
            case None:
                return
            case ModelEnded(turn=turn) if self._loaded.turn is None or self._loaded.turn.id != turn:
                return  # an answer that nobody waits for any more
            case ModelEnded(reply=None, fault=fault):
                self._model_failed(fault)
            case ModelEnded(reply=Finished(calls=calls)) if self._turn.calls + len(calls) > self._most_calls:
                why = f"the model asked for more than {self._most_calls} calls in one turn"
                self._model_failed(f"{why}, and none of its last reply was run")
            case ModelEnded(reply=reply):
                assert reply is not None
                persona, decide = self._around.persona, self._around.rules.decide
                out = {detached.called.operation for detached in self._detached.values()}
                self._stage([compose.replied(reply, self._turn, self._loaded, persona.tools, decide, out=out)])
            case Broken(error):
                raise error
            case Classified(turn=about, n=n, fit=fit, by=by) as classified:
                self._fitting.taken_in(classified)
                running = self._loaded.turn.id if self._loaded.turn is not None else about
                if running == about:
                    replies = self._loaded.turn.replies if self._loaded.turn is not None else 0
                    self._stage([Draft(InputClassifiedBody(n, self._around.rules.fit(fit), by, replies), about)])
                    self._hinted = True
            case GraceOver(turn=stopped):
                self._grace = None
                if self._loaded.turn is not None and self._loaded.turn.id == stopped:
                    self._grace_over()
            case Attempt() as came if came.call in self._detached:
                self._answered_after_all(came)
            case Attempt(call=call) if not self._is_open(call):
                return  # of a call that was given up, and did nothing to the world
            case Attempt() as came:
                if came.is_receipt:
                    self._note_heard(came)
                self._attempted(came)

    def _answered_after_all(self, came: Attempt) -> None:
        """Take in what an operation did that was given up: as the result of the call that has taken it over, or by a
        row of its own, for the call that began it has its one result."""
        gone = self._detached.pop(came.call)
        taker = self._is_about(gone.called.operation)
        if taker is not None:
            self._note_heard(taken := replace(came, call=taker.call))
            self._attempted(taken)
        elif came.is_receipt:
            self._heard[gone.called.operation] = (gone.called.tool, came)
            returns = self._contracts[gone.called.tool].returns
            about = (gone.called.operation, gone.called.tool, gone.turn, gone.acting)
            self._stage([compose.settled(came, *about, returns, undoes=gone.called.undoes)], blobs=came.blobs)

    @property
    def _most_calls(self) -> int:
        return self._around.limits.calls_per_turn

    def _model_failed(self, fault: str) -> None:
        """End the turn. What was shown of the reply is kept, in the same commit (X54): were the process to end
        between the two, the model would be asked again, and the text would stand twice."""
        self._tell(ModelFailed(fault))
        [end] = due(self._turn)
        assert isinstance(end, End)
        self._stage_end([*self._cut_off(), compose.ended(self._turn, end)])

    def _cut_off(self) -> list[Draft]:
        """Return the row of what was shown of the reply that is being written."""
        turn = self._turn
        text = self._journal.written(turn.id, turn.replies + 1)
        if not text:
            self._journal.erase()
        return compose.broken_off(text, turn, self._loaded)

    def _attempted(self, ended: Attempt) -> None:
        turn = self._turn
        planned = turn.find(ended.call)
        called, contract = planned.called, self._contracts[planned.called.tool]
        match ended.came:
            case Came.OK | Came.FAILED:
                self._stage([compose.result(ended, called, turn, contract.returns)], blobs=ended.blobs)
            case Came.UNKNOWN if not ended.looked_up:
                self._stage([compose.unknown(called, turn, ended.text)])
            case Came.UNKNOWN:  # the lookup could not tell: as if there were none
                self._stage([compose.unknown(called, turn, ended.text)])
                self._settle(called, planned.attempts, looked_up=True)
            case Came.ABSENT if called.keyed and planned.attempts < self._around.limits.attempts_per_operation:
                self._stage([compose.unknown(called, turn, ended.text)])
                self._send_again(called, planned.attempts)  # whatever the age of its key: it is known not to be there
            case Came.ABSENT:
                self._stage([compose.result(ended, called, turn, contract.returns)])


def _evidence(session: str, operation: str, tool: str, came: Attempt) -> Evidence:
    lost = f"\n({len(came.attachments)} files that it gave back were lost)" if came.attachments else ""
    return Evidence(session, operation, tool, came.came is Came.OK, came.text + lost, came.made, came.effect)


def _rescued(one: Evidence, call: str) -> Attempt:
    unsaid = EffectState.COMMITTED if one.happened else EffectState.NONE
    came = Came.OK if one.happened else Came.FAILED
    return Attempt(call, came, one.text, one.made, effect=one.effect or unsaid)
