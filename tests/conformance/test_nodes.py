"""Do all stores keep the same promises? Which nodes live, and what becomes of the sessions of one that doesn't."""

from __future__ import annotations

import asyncio

import pytest

from sayso.core.rows import ModelSaidBody
from sayso.core.session import Position, SessionRecord, SessionState, Token
from sayso.storage.bodies import HAND_BACK_AT_ONCE
from sayso.storage.store import LEASE_MS, Released, WriteOutcome
from tests.conformance.given import ALICE, DAY, NOON, Clock, Inspected, hook, owned, rows, taken

SAID = ModelSaidBody(1, ())
HERE = "http://10.0.0.1:8000"


async def record_of(store: Inspected, session: str = "s1") -> SessionRecord:
    record = await store.session(session)
    assert record is not None
    return record


async def swept(store: Inspected, clock: Clock, *, node: str = "n1") -> Token:
    """Let a node own a session with one row, and its lease end; return the right that it had."""
    token = await owned(store, node=node)
    assert await store.write(token, rows(token, 0, taken(1))) is WriteOutcome.WRITTEN
    await store.beat(node, HERE)
    clock.later(LEASE_MS)
    assert await store.sweep() == 1
    return token


# --- leases ------------------------------------------------------------------


@pytest.mark.rule("K10")
async def test_a_lease_ends_so_long_after_the_last_beat_by_the_stores_clock(store: Inspected, clock: Clock) -> None:
    assert await store.beat("n1", HERE) == NOON + LEASE_MS
    clock.later(2_000)

    assert await store.beat("n1", HERE) == NOON + 2_000 + LEASE_MS
    assert await store.beat("n1", "http://elsewhere:8000", lease_ms=500) == NOON + 2_500
    assert await store.beat("n2", HERE, lease_ms=60_000) == NOON + 62_000


@pytest.mark.rule("K2", "K10")
async def test_a_lease_holds_until_its_deadline_and_no_longer(store: Inspected, clock: Clock) -> None:
    token = await owned(store, node="n1")
    await store.beat("n1", HERE)

    clock.later(LEASE_MS - 1)
    assert await store.sweep() == 0
    assert await store.write(token, rows(token, 0, taken(1))) is WriteOutcome.WRITTEN
    clock.later(1)
    assert await store.sweep() == 1


@pytest.mark.rule("K2", "K10")
async def test_a_beat_before_the_deadline_renews_and_one_at_it_is_late(store: Inspected, clock: Clock) -> None:
    await store.beat("n1", HERE)

    clock.later(LEASE_MS - 1)
    assert await store.beat("n1", HERE) == NOON + 2 * LEASE_MS - 1
    clock.later(LEASE_MS)
    assert await store.beat("n1", HERE) is None


@pytest.mark.rule("K2")
async def test_who_was_declared_dead_is_told_at_every_beat(store: Inspected, clock: Clock) -> None:
    await swept(store, clock)

    for _ in range(3):
        assert await store.beat("n1", HERE) is None
        clock.later(1_000)
    assert await store.beat("n1 again", HERE) == clock.now_ms + LEASE_MS


async def test_who_was_declared_dead_claims_nothing(store: Inspected, clock: Clock) -> None:
    await swept(store, clock)

    assert await store.claim("n1", at_most=9) == []
    assert await store.ready(at_most=9) == 1
    assert [each.token.session for each in await store.claim("n2", at_most=9)] == ["s1"]


@pytest.mark.rule("K2", "K10")
@pytest.mark.parametrize("jump_ms", [60_000, -60_000])
async def test_a_clock_that_jumps_costs_a_take_over_at_most(store: Inspected, clock: Clock, jump_ms: int) -> None:
    """Forwards: all are declared dead too early, and fenced. Backwards: the store's time waits, and leases are long."""
    token = await owned(store, node="n1")
    await store.beat("n1", HERE)
    clock.later(1_000)
    assert await store.beat("n1", HERE) == NOON + 1_000 + LEASE_MS

    clock.later(jump_ms)

    if jump_ms > 0:
        assert await store.sweep() == 1
        assert await store.write(token, rows(token, 0, SAID)) is WriteOutcome.FENCED
        assert await store.beat("n1", HERE) is None
    else:
        assert await store.beat("n1", HERE) == NOON + 1_000 + LEASE_MS
        assert await store.sweep() == 0
        assert await store.write(token, rows(token, 0, SAID)) is WriteOutcome.WRITTEN


async def test_who_was_declared_dead_is_forgotten_after_a_day(store: Inspected, clock: Clock) -> None:
    await swept(store, clock)
    clock.later(DAY - 1)
    await store.sweep()
    assert await store.beat("n1", HERE) is None

    clock.later(1)
    await store.sweep()

    assert await store.beat("n1", HERE) == clock.now_ms + LEASE_MS


# --- sweep -------------------------------------------------------------------


async def test_only_the_sessions_of_those_whose_lease_has_ended_are_handed_back(store: Inspected, clock: Clock) -> None:
    """One lives, and one never had a lease. A session that nobody owns is as it was."""
    for session, node in (("s1", "ends"), ("s2", "lives"), ("s3", "has none"), ("s4", "ends")):
        await owned(store, session=session, node=node)
    await store.create_session("s5", owner=ALICE, title="")
    await store.beat("ends", HERE)
    clock.later(3_000)
    await store.beat("lives", HERE)
    before = {session: await record_of(store, session) for session in ("s2", "s3", "s5")}
    clock.later(3_000)

    assert await store.sweep() == 2

    for session in ("s1", "s4"):
        handed_back = await record_of(store, session)
        assert (handed_back.state, handed_back.node, handed_back.epoch) == (SessionState.READY, None, 2)
    assert {session: await record_of(store, session) for session in before} == before


@pytest.mark.rule("K2", "X45")
async def test_the_owner_that_was_swept_is_fenced_in_all_that_it_may_do(store: Inspected, clock: Clock) -> None:
    token = await swept(store, clock)
    before = await record_of(store)

    for _ in ("before another owns it", "after"):
        assert await store.write(token, rows(token, 1, SAID)) is WriteOutcome.FENCED
        assert await store.write(token, rows(token, 0, taken(1))) is WriteOutcome.FENCED
        assert await store.release(token, looked_to=9) is Released.FENCED
        assert not await store.surrender(token, failed=True)
        assert await record_of(store) == before
        await store.claim("n2", at_most=1)
        before = await record_of(store)
    assert len(await store.rows("s1")) == 1


@pytest.mark.rule("K1", "K2")
async def test_the_next_owner_goes_on_where_the_last_one_stopped(store: Inspected, clock: Clock) -> None:
    lost = await swept(store, clock)
    assert (await store.put(hook("evt_2"))).node is None

    [claim] = await store.claim("n2", at_most=9)

    assert claim.token.epoch > lost.epoch
    assert claim.token.nonce != lost.nonce
    assert (claim.record.head, claim.record.inbox_tail, claim.record.node) == (1, 2, "n2")
    assert await store.write(claim.token, rows(claim.token, 1, SAID)) is WriteOutcome.WRITTEN
    assert [(row.seq, row.epoch) for row in await store.rows("s1")] == [(1, lost.epoch), (2, claim.token.epoch)]
    assert await store.keep("s1", Position(lost.epoch, 5)) == 1
    assert await store.release(claim.token, looked_to=2) is Released.IDLE


@pytest.mark.rule("N18")
async def test_each_owner_whose_lease_ends_is_one_attempt_more(store: Inspected, clock: Clock) -> None:
    await owned(store, node="n1")
    for attempt in (1, 2, 3):
        assert (await record_of(store)).attempts == attempt
        await store.beat(f"n{attempt}", HERE)
        clock.later(LEASE_MS)
        assert await store.sweep() == 1
        assert (await record_of(store)).attempts == attempt
        [claim] = await store.claim(f"n{attempt + 1}", at_most=1)

    await store.write(claim.token, rows(claim.token, 0, SAID))

    assert (await record_of(store)).attempts == 0


async def test_what_was_swept_waits_behind_what_was_ready_before(store: Inspected, clock: Clock) -> None:
    await owned(store, session="s1", node="n1")
    await store.beat("n1", HERE)
    clock.later(LEASE_MS - 1)
    await store.create_session("s2", owner=ALICE, title="")
    await store.put(hook("evt_2", session="s2"))
    clock.later(1)
    await store.sweep()

    assert [each.token.session for each in await store.claim("n2", at_most=9)] == ["s2", "s1"]


async def test_a_second_sweep_changes_nothing(store: Inspected, clock: Clock) -> None:
    await swept(store, clock)
    before = await record_of(store)
    clock.later(1)

    assert await store.sweep() == 0
    assert await record_of(store) == before


async def test_sweepers_at_once_hand_back_each_session_once(store: Inspected, clock: Clock) -> None:
    names = [f"s{n}" for n in range(HAND_BACK_AT_ONCE + 1)]
    for name in names:
        await store.create_session(name, owner=ALICE, title="")
        await store.put(hook(name, session=name))
    assert len(await store.claim("n1", at_most=len(names))) == len(names)
    await store.beat("n1", HERE)
    clock.later(LEASE_MS)

    handed_back = await asyncio.gather(*(store.sweep() for _ in range(8)))

    assert sum(handed_back) == len(names)
    assert {(await record_of(store, name)).epoch for name in names} == {2}


async def test_a_restart_under_another_incarnation_keeps_nothing_of_the_last_one_alive(
    store: Inspected, clock: Clock
) -> None:
    """One lease an incarnation, whatever the process is called and wherever it is reached."""
    await owned(store, node="n1.a")
    await store.beat("n1.a", HERE)
    clock.later(LEASE_MS - 1)
    await store.beat("n1.b", HERE)
    clock.later(1)

    assert await store.sweep() == 1
    assert [each.token.session for each in await store.claim("n1.b", at_most=9)] == ["s1"]
    assert await store.sweep() == 0


# --- reclaim -----------------------------------------------------------------


@pytest.mark.rule("K2")
async def test_what_a_node_owns_and_does_not_run_is_handed_back(store: Inspected) -> None:
    tokens = {session: await owned(store, session=session, node="n1") for session in ("s3", "s1", "s2")}
    others = await owned(store, session="s4", node="n2")
    await store.beat("n1", HERE)

    assert await store.reclaim("n1", {"s2", "s4", "s9"}) == ["s1", "s3"]

    for session, token in tokens.items():
        runs = session == "s2"
        outcome = await store.write(token, rows(token, 0, SAID))
        assert outcome is (WriteOutcome.WRITTEN if runs else WriteOutcome.FENCED)
    assert await store.write(others, rows(others, 0, SAID)) is WriteOutcome.WRITTEN
    again = await store.claim("n1", at_most=9)
    assert [(each.token.session, each.token.epoch, each.record.attempts) for each in again] == [
        ("s1", 3, 2),
        ("s3", 3, 2),
    ]


async def test_a_second_reclaim_changes_nothing(store: Inspected) -> None:
    await owned(store, node="n1")
    assert await store.reclaim("n1", set()) == ["s1"]
    before = await record_of(store)

    assert await store.reclaim("n1", set()) == []
    assert await store.reclaim("nobody", set()) == []
    assert await record_of(store) == before


async def test_a_session_that_was_let_go_is_nobodys_to_reclaim(store: Inspected) -> None:
    idle, ready = await owned(store, session="s1"), await owned(store, session="s2")
    await store.release(idle, looked_to=1)
    await store.surrender(ready)
    before = [await record_of(store, session) for session in ("s1", "s2")]

    assert await store.reclaim("n1", set()) == []
    assert [await record_of(store, session) for session in ("s1", "s2")] == before
