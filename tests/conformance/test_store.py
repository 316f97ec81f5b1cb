"""Do all stores keep the same promises? Ownership, rows, and what rows change."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sayso.core.errors import IllegalChange
from sayso.core.inputs import Keep
from sayso.core.operation import OperationState, Ref
from sayso.core.rows import (
    Called,
    ConflictSettledBody,
    EffectGoneBody,
    Ending,
    ModelSaidBody,
    Outcome,
    ToolIntendedBody,
    ToolUnknownBody,
    TurnEndBody,
)
from sayso.core.session import Position, SessionState, Token
from sayso.storage.store import Released, WriteOutcome
from tests.conformance.given import (
    ALICE,
    BOB,
    NOON,
    Clock,
    Inspected,
    called,
    hook,
    owned,
    planned,
    result,
    rows,
    sent,
    sha,
    started,
    taken,
)

SAID = ModelSaidBody(1, ())
TABLE = Ref("restaurant", "reservation", "R1")


# --- sessions and ownership --------------------------------------------------


async def test_a_new_session_is_idle_and_empty(store: Inspected) -> None:
    created = await store.create_session("s1", owner=ALICE, title="dinner")

    assert created == await store.session("s1")
    assert (created.owner, created.title, created.created_at_ms) == (ALICE, "dinner", NOON)
    assert (created.state, created.epoch, created.head, created.inbox_tail) == (SessionState.IDLE, 0, 0, 0)
    assert await store.claim("n1", at_most=1) == []
    assert await store.session("s2") is None


async def test_a_session_is_not_stored_twice(store: Inspected) -> None:
    await store.create_session("s1", owner=ALICE, title="dinner")

    with pytest.raises(IllegalChange):
        await store.create_session("s1", owner=BOB, title="mine now")

    kept = await store.session("s1")
    assert kept is not None
    assert kept.owner == ALICE


async def test_sessions_are_listed_newest_first_by_owner_and_page(store: Inspected) -> None:
    for name, owner in (("s1", ALICE), ("s2", BOB), ("s3", ALICE), ("s4", ALICE)):
        await store.create_session(name, owner=owner, title="")

    async def listed(**which: object) -> list[str]:
        return [record.id for record in await store.sessions(**which)]  # type: ignore[arg-type]  # names of its own

    assert await listed(of=None, limit=9) == ["s4", "s3", "s2", "s1"]
    assert await listed(of=ALICE, limit=2) == ["s4", "s3"]
    assert await listed(of=ALICE, limit=2, before="s3") == ["s1"]
    assert await listed(of=None, limit=1, before="s3") == ["s2"]


async def test_the_longest_ready_session_is_claimed_first_and_once(store: Inspected, clock: Clock) -> None:
    for name in ("s3", "s1", "s2"):
        await store.create_session(name, owner=ALICE, title="")
        await store.put(hook(name, session=name))
        clock.later(1)

    first = await store.claim("n1", at_most=2)
    second = await store.claim("n2", at_most=2)

    assert [claim.token.session for claim in first] == ["s3", "s1"]
    assert [claim.token.session for claim in second] == ["s2"]
    assert await store.claim("n1", at_most=9) == []
    owner = await store.session("s3")
    assert owner == first[0].record
    assert (owner.state, owner.node, owner.epoch, owner.nonce) == (SessionState.OWNED, "n1", 1, first[0].token.nonce)


async def test_every_claim_has_a_higher_epoch_and_another_nonce(store: Inspected) -> None:
    token = await owned(store)
    assert await store.surrender(token)

    [again] = await store.claim("n1", at_most=1)

    assert again.token.epoch == token.epoch + 1
    assert again.token.nonce != token.nonce


@pytest.mark.rule("K22")
async def test_release_sees_an_input_that_came_after_the_last_look(store: Inspected) -> None:
    token = await owned(store)
    await store.put(hook("evt_2"))

    assert await store.release(token, looked_to=1) is Released.MORE
    assert await store.release(token, looked_to=2) is Released.IDLE


@pytest.mark.rule("K22")
async def test_release_compares_with_what_was_looked_at_not_with_what_was_taken(store: Inspected) -> None:
    """An entry that must wait stays queued, and its session rests until something new comes."""
    token = await owned(store)

    assert await store.release(token, looked_to=1) is Released.IDLE
    assert await store.claim("n1", at_most=1) == []
    assert [row.n for row in await store.inbox("s1", after=0, limit=9)] == [1]

    await store.put(hook("evt_2"))

    assert len(await store.claim("n1", at_most=1)) == 1
    assert [row.n for row in await store.inbox("s1", after=0, limit=9)] == [1, 2]


async def test_who_let_go_is_fenced(store: Inspected) -> None:
    token = await owned(store)
    assert await store.surrender(token)

    assert not await store.surrender(token)
    assert await store.release(token, looked_to=1) is Released.FENCED
    assert await store.write(token, rows(token, 0, taken(1))) is WriteOutcome.FENCED
    assert await store.rows("s1") == []


async def test_a_new_node_takes_the_sessions_of_dead_ones_and_fences_them(store: Inspected) -> None:
    token = await owned(store, node="dead")
    await store.create_session("s2", owner=ALICE, title="")

    assert await store.register("n2") == 1

    assert await store.write(token, rows(token, 0, taken(1))) is WriteOutcome.FENCED
    record = await store.session("s1")
    assert record is not None
    assert (record.state, record.epoch) == (SessionState.READY, token.epoch + 1)
    [claim] = await store.claim("n2", at_most=9)
    assert claim.token.epoch == token.epoch + 2
    assert await store.register("n2") == 0
    assert await store.write(claim.token, rows(claim.token, 0, taken(1))) is WriteOutcome.WRITTEN


# --- the five outcomes of write ----------------------------------------------


async def test_rows_come_back_as_they_were_written(store: Inspected) -> None:
    token = await owned(store)
    written = rows(token, 0, taken(1), started(), planned(), at_ms=NOON + 5)

    assert await store.write(token, written) is WriteOutcome.WRITTEN

    assert await store.rows("s1") == written
    record = await store.session("s1")
    assert record is not None
    assert (record.head, record.at_ms, record.position) == (3, NOON + 5, Position(1, 3))


async def test_rows_are_read_by_range_and_from_the_end(store: Inspected) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, *[SAID] * 6))

    async def seqs(**which: int) -> list[int]:
        return [row.seq for row in await store.rows("s1", **which)]

    assert await seqs(after=2, up_to=4) == [3, 4]
    assert await seqs(after=1, limit=2) == [2, 3]
    assert await seqs(after=6) == []
    assert [row.seq for row in await store.last_rows("s1", limit=2)] == [5, 6]
    assert [row.seq for row in await store.last_rows("s1", limit=2, before=4)] == [2, 3]
    assert await store.last_rows("s1", limit=0) == []
    assert await store.rows("nobody") == []


async def test_the_same_rows_again_are_already_there(store: Inspected) -> None:
    """A lost acknowledgement: the commit key says that it was us, and nothing is done twice."""
    token = await owned(store)
    written = rows(token, 0, taken(1), started())
    await store.write(token, written)
    await store.write(token, rows(token, 2, SAID))

    assert await store.write(token, written) is WriteOutcome.ALREADY
    assert [row.seq for row in await store.rows("s1")] == [1, 2, 3]


@pytest.mark.parametrize("difference", ["body", "turn", "at_ms", "length"])
async def test_other_content_under_our_keys_is_a_conflict(store: Inspected, difference: str) -> None:
    token = await owned(store)
    written = rows(token, 0, SAID, SAID)
    await store.write(token, written)
    other = {
        "body": rows(token, 0, SAID, ModelSaidBody(2, ())),
        "turn": rows(token, 0, SAID, SAID, turn="T2"),
        "at_ms": rows(token, 0, SAID, SAID, at_ms=NOON + 1),
        "length": rows(token, 0, SAID, SAID, SAID),
    }[difference]

    assert await store.write(token, other) is WriteOutcome.CONFLICT
    assert await store.rows("s1") == written


async def test_rows_whose_predecessor_is_missing_wait(store: Inspected) -> None:
    token = await owned(store)

    assert await store.write(token, rows(token, 1, SAID)) is WriteOutcome.BEHIND
    assert await store.rows("s1") == []
    assert await store.write(token, rows(token, 0, SAID)) is WriteOutcome.WRITTEN
    assert await store.write(token, rows(token, 1, SAID)) is WriteOutcome.WRITTEN


@pytest.mark.parametrize("wrong", ["epoch", "nonce"])
async def test_another_epoch_or_nonce_is_fenced(store: Inspected, wrong: str) -> None:
    """The nonce is for a database that lost commits and gave an epoch out again."""
    token = await owned(store)
    other = replace(token, epoch=token.epoch - 1) if wrong == "epoch" else replace(token, nonce="0" * 16)

    assert await store.write(other, rows(other, 0, SAID)) is WriteOutcome.FENCED
    assert await store.rows("s1") == []


async def test_a_session_that_is_not_there_takes_nothing(store: Inspected) -> None:
    token = Token("nowhere", 1, "0" * 16)

    assert await store.write(token, rows(token, 0, SAID)) is WriteOutcome.GONE
    assert await store.release(token, looked_to=0) is Released.FENCED
    assert not await store.surrender(token)


async def test_rows_that_are_no_one_write_are_a_fault_of_the_caller(store: Inspected) -> None:
    token = await owned(store)
    one, two, three = rows(token, 0, SAID, SAID, SAID)

    for wrong in ([], [one, three], [two, one], [replace(one, epoch=9)], [replace(one, commit_key="x.1")]):
        with pytest.raises(ValueError, match="row"):
            await store.write(token, wrong)

    assert await store.rows("s1") == []


@pytest.mark.rule("N18")
async def test_attempts_are_counted_at_the_claim_until_something_is_stored(store: Inspected) -> None:
    """A process that ended, and an owner that failed, count; one that gave the session up in good order does not."""

    async def attempts() -> int:
        record = await store.session("s1")
        assert record is not None
        return record.attempts

    async def claimed(node: str) -> Token:
        [claim] = await store.claim(node, at_most=1)
        assert claim.record.attempts == await attempts()
        return claim.token

    token = await owned(store, node="n1")
    assert await attempts() == 1
    await store.register("n2")
    token = await claimed("n2")
    assert await store.surrender(token, failed=True)
    token = await claimed("n2")
    assert await attempts() == 3
    await store.write(token, rows(token, 0, SAID))
    assert await attempts() == 0
    assert await store.surrender(token, failed=True)
    token = await claimed("n2")
    assert await store.surrender(token)
    assert await attempts() == 0
    token = await claimed("n2")
    assert await store.release(token, looked_to=9) is Released.IDLE
    assert await attempts() == 0


@pytest.mark.rule("K1")
async def test_keep_drops_what_a_lost_owner_published_and_never_stored(store: Inspected) -> None:
    lost = await owned(store, node="dead")
    await store.write(lost, rows(lost, 0, SAID, SAID, SAID))
    assert await store.keep("s1", Position(lost.epoch, 5)) == 5  # its own epoch: accepted, perhaps not stored yet

    await store.register("n2")
    [claim] = await store.claim("n2", at_most=1)
    await store.write(claim.token, rows(claim.token, 3, SAID, SAID))

    assert await store.keep("s1", Position(lost.epoch, 5)) == 3
    assert await store.keep("s1", Position(lost.epoch, 2)) == 2
    assert await store.keep("s1", Position(claim.token.epoch, 9)) == 9
    assert await store.keep("s1", Position(claim.token.epoch + 1, 9)) == 5
    assert await store.keep("s1", Position(0, 0)) == 0
    assert await store.keep("nobody", Position(1, 1)) == 0


@pytest.mark.rule("K1", "K7")
async def test_keep_drops_what_a_choice_passed_over_until_the_reader_has_seen_the_choice(store: Inspected) -> None:
    """Also of a reader whose last rows were lost, so that the choice has a lower number than its cursor."""
    lost = await owned(store, node="dead")
    await store.write(lost, rows(lost, 0, SAID, SAID, SAID))
    await store.register("n2")
    [claim] = await store.claim("n2", at_most=1)
    choice = ConflictSettledBody(1, "operator:ops", Keep.STORED, from_seq=2)
    await store.write(claim.token, rows(claim.token, 3, choice))
    before, now = lost.epoch, claim.token.epoch

    kept = [await store.keep("s1", Position(*at)) for at in ((before, 1), (before, 3), (before, 9), (now, 3), (now, 4))]
    assert kept == [1, 1, 1, 1, 4]


# --- what rows change --------------------------------------------------------


async def test_a_turn_is_open_from_its_start_to_its_end(store: Inspected) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, taken(1), started()))

    record = await store.session("s1")
    assert record is not None
    assert (record.turn, record.turn_seq, record.turn_principal, record.turns) == ("T1", 2, "source:restaurant", 1)

    await store.write(token, rows(token, 2, TurnEndBody(Ending.DONE)))

    record = await store.session("s1")
    assert record is not None
    assert (record.turn, record.turn_seq, record.turn_principal, record.turns) == (None, None, None, 1)


async def test_a_taken_input_leaves_the_queue_and_stays_on_record(store: Inspected) -> None:
    token = await owned(store)
    await store.put(hook("evt_2"))

    await store.write(token, rows(token, 0, taken(1)))

    assert [row.n for row in await store.inbox("s1", after=0, limit=9)] == [2]
    assert [(row.n, row.state, row.taken_seq) for row in await store.inbox_record("s1")] == [
        (1, "taken", 1),
        (2, "queued", None),
    ]


@pytest.mark.parametrize("n", [1, 7])
async def test_an_input_is_taken_once_and_only_if_it_is_there(store: Inspected, n: int) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, taken(1)))

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 1, SAID, taken(n)))

    assert [row.seq for row in await store.rows("s1")] == [1]
    assert await store.write(token, rows(token, 1, SAID)) is WriteOutcome.WRITTEN


async def test_a_call_has_one_result(store: Inspected) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, started(), planned(), result()))

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 3, result(outcome=Outcome.FAILED)))
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 3, result("T1.1.9")))
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 3, planned()))

    assert [row.seq for row in await store.rows("s1")] == [1, 2, 3]


@pytest.mark.rule("C2", "F58")
@pytest.mark.parametrize("ending", Ending)
async def test_a_turn_ends_in_no_way_while_a_call_has_no_result(store: Inspected, ending: Ending) -> None:
    token = await owned(store)
    calls = (called("T1.1.1"), called("T1.1.2"))
    await store.write(token, rows(token, 0, started(), planned(*calls), result("T1.1.1")))

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 3, TurnEndBody(ending)))

    end = rows(token, 3, result("T1.1.2", outcome=Outcome.NOT_STARTED), TurnEndBody(ending))
    assert await store.write(token, end) is WriteOutcome.WRITTEN


@pytest.mark.rule("D3")
async def test_an_operation_that_is_taken_over_is_its_new_turns(store: Inspected) -> None:
    token = await owned(store)
    first = (started(), planned(), sent("T1.1.1"), result(operation="T1.1.1"), TurnEndBody(Ending.CANCELLED))
    await store.write(token, rows(token, 0, *first))
    again = replace(called("T2.1.1"), takes="T1.1.1", done=True)
    await store.write(token, rows(token, 5, started(), planned(again), turn="T2"))

    found = await store.operation("s1", "T1.1.1")
    assert found is not None
    assert (found.turn, found.call, found.key) == ("T2", "T1.1.1", "s1:T1.1.1")


async def test_an_operation_goes_through_its_states_and_no_others(store: Inspected) -> None:
    token = await owned(store)
    intended = ToolIntendedBody("O1", "T1.1.1", "book", "s1:O1", sha("book"))
    await store.write(token, rows(token, 0, started(), planned(), intended))
    [operation] = await store.operations("s1")
    assert (operation.state, operation.attempts, operation.key) == (OperationState.INTENDED, 0, "s1:O1")
    assert operation.arguments == '{"day":"Friday","party":4}'
    assert await store.operation("s1", "O1") == operation
    assert await store.operation("s1", "O2") is None

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 3, result(operation="O1")))
    await store.write(token, rows(token, 3, sent(intended=True), ToolUnknownBody("O1", "T1.1.1", "book", "no answer")))
    assert [op.state for op in await store.operations("s1", states=(OperationState.UNKNOWN,))] == ["unknown"]
    await store.write(token, rows(token, 5, sent(attempt=2), result(operation="O1")))

    assert await store.operations("s1", states=(OperationState.SENT, OperationState.UNKNOWN)) == []
    [operation] = await store.operations("s1")
    assert (operation.state, operation.attempts) == (OperationState.ANSWERED, 2)
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 7, sent(attempt=3)))


async def test_operations_are_read_oldest_first(store: Inspected) -> None:
    token = await owned(store)
    calls: list[Called] = [called(f"T1.1.{place}") for place in range(1, 13)]
    await store.write(token, rows(token, 0, started(), planned(*calls)))
    await store.write(token, rows(token, 2, *(sent(f"O{n}", call=f"T1.1.{n}") for n in range(1, 13))))

    assert [op.operation for op in await store.operations("s1")] == [f"O{n}" for n in range(1, 13)]


async def test_a_ref_finds_its_session_by_source_and_goes_when_it_is_gone(store: Inspected) -> None:
    token = await owned(store)
    made = (TABLE, Ref("cinema", "seat", "R1"))
    await store.write(token, rows(token, 0, started(), planned(), sent(), result(operation="O1", made=made)))

    [found] = await store.refs("restaurant", [TABLE, TABLE, Ref("cinema", "seat", "R1")])
    assert (found.session, found.ref, found.state, found.operation, found.seq) == ("s1", TABLE, "live", "O1", 4)
    assert await store.refs("restaurant", [Ref("restaurant", "reservation", "R2")]) == []

    gone = EffectGoneBody(TABLE, "source:restaurant", 1, "O1")
    await store.write(token, rows(token, 4, gone))

    [found] = await store.refs("restaurant", [TABLE])
    assert (found.state, found.reported_by) == ("gone", "source:restaurant")
    assert [(row.ref, row.state, row.reported_by) for row in await store.made("s1")] == [
        (Ref("cinema", "seat", "R1"), "live", None),
        (TABLE, "gone", "source:restaurant"),
    ]
    assert await store.made("s2") == []
    assert [op.state for op in await store.operations("s1")] == [OperationState.GONE]
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 5, gone))


async def test_a_thing_that_two_sessions_made_is_found_in_both(store: Inspected) -> None:
    for name in ("s2", "s1"):
        token = await owned(store, session=name)
        await store.write(token, rows(token, 0, started(), planned(), sent(), result(operation="O1", made=[TABLE])))

    assert [row.session for row in await store.refs("restaurant", [TABLE])] == ["s1", "s2"]


async def test_the_newest_operation_speaks_for_a_thing_that_was_made_again(store: Inspected) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, started(), planned(called("T1.1.1"), called("T1.1.2"))))
    await store.write(token, rows(token, 2, sent(), result(operation="O1", made=[TABLE])))
    await store.write(token, rows(token, 4, EffectGoneBody(TABLE, "source:restaurant", 1)))
    second = result("T1.1.2", operation="O2", made=[TABLE])
    await store.write(token, rows(token, 5, sent("O2", call="T1.1.2"), second))

    [found] = await store.refs("restaurant", [TABLE])
    assert (found.state, found.operation, found.seq) == ("live", "O2", 7)


async def test_a_name_that_no_utf8_can_hold_is_stored_all_the_same(store: Inspected) -> None:
    """A tool may return anything; a write that could never succeed would stop its session for good."""
    token = await owned(store)
    odd = Ref("restaurant", "reservation", "R\ud800")
    await store.write(token, rows(token, 0, started(), planned(), sent(), result(operation="O1", made=[odd])))

    [found] = await store.refs("restaurant", [odd])
    assert found.operation == "O1"
