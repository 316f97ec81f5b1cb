"""Do all stores keep the same promises? What arrives, what comes again, what is due, and the door's record."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sayso.core.errors import IllegalChange, InboxFull, Misused, NotFound
from sayso.core.inputs import InputKind, Lane
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import ModelSaidBody
from sayso.core.session import Position, SessionState
from sayso.storage.store import DoorKind, DoorNote, PutOutcome, TokenRow
from tests.conformance.given import (
    ALICE,
    BOB,
    DAY,
    MINUTE,
    NOON,
    Clock,
    Inspected,
    answer,
    asked,
    consent,
    hook,
    message,
    owned,
    rows,
    taken,
    yes_to,
)


@pytest.fixture
async def open_store(store: Inspected) -> Inspected:
    """A store with two sessions that nobody owns."""
    await store.create_session("s1", owner=ALICE, title="dinner")
    await store.create_session("s2", owner=BOB, title="film")
    return store


async def notes(store: Inspected) -> list[tuple[str, str]]:
    """Return what the door has noted."""
    return [(row.note.kind, row.note.text) for row in await store.door()]


# --- stored ------------------------------------------------------------------


async def test_an_input_waits_in_its_session_and_makes_it_ready(open_store: Inspected, clock: Clock) -> None:
    entry = hook("evt_1")
    put = await open_store.put(entry)
    clock.later(5)
    second = await open_store.put(message("and a window seat", key="k1"))

    assert (put.outcome, put.session, put.n, put.received_at_ms, put.head) == (PutOutcome.STORED, "s1", 1, NOON, 0)
    assert put.node is None
    assert (second.n, second.received_at_ms) == (2, NOON + 5)
    first, other = await open_store.inbox("s1", after=0, limit=9)
    assert (first.n, first.lane, first.state, first.source, first.event_id) == (
        1,
        Lane.NORMAL,
        "queued",
        "restaurant",
        "evt_1",
    )
    assert (first.received_at_ms, first.at_seq, first.input, first.taken_seq) == (NOON, 0, entry.input, None)
    assert other.input.kind is InputKind.MESSAGE
    record = await open_store.session("s1")
    assert record is not None
    assert (record.state, record.inbox_tail) == (SessionState.READY, 2)
    assert await notes(open_store) == []


async def test_who_owns_the_session_is_hinted_at(store: Inspected) -> None:
    token = await owned(store, node="n7")
    await store.write(token, rows(token, 0, ModelSaidBody(1, ())))

    put = await store.put(hook("evt_2"))

    assert (put.node, put.head) == ("n7", 1)
    assert [row.at_seq for row in await store.inbox("s1", after=1, limit=9)] == [1]
    record = await store.session("s1")
    assert record is not None
    assert record.state is SessionState.OWNED


async def test_the_inbox_is_read_in_pages(open_store: Inspected) -> None:
    for n in range(1, 6):
        await open_store.put(hook(f"evt_{n}"))

    assert [row.n for row in await open_store.inbox("s1", after=0, limit=2)] == [1, 2]
    assert [row.n for row in await open_store.inbox("s1", after=2, limit=9)] == [3, 4, 5]
    assert await open_store.inbox("s2", after=0, limit=9) == []


async def test_there_is_no_such_session(open_store: Inspected) -> None:
    with pytest.raises(NotFound):
        await open_store.put(hook("evt_1", session="s9"))

    assert (await open_store.put(hook("evt_1"))).outcome is PutOutcome.STORED


async def test_what_no_session_knows_is_kept_and_noted(open_store: Inspected) -> None:
    put = await open_store.put(hook("evt_1", session=None))
    again = await open_store.put(hook("evt_1", session=None))

    assert (put.outcome, put.session, put.n, put.head) == (PutOutcome.UNCLAIMED, None, None, 0)
    assert (again.outcome, again.session, again.n) == (PutOutcome.DUPLICATE, None, None)
    assert await notes(open_store) == [
        ("input.unclaimed", "evt_1 from restaurant: no session knows what it names; kept"),
        ("input.dropped", "evt_1 again from restaurant; acknowledged, not acted on"),
    ]


async def test_a_full_lane_takes_no_more_until_the_owner_has_taken_some(small: Inspected) -> None:
    question = consent()
    token = await asked(small, question)
    for n in (2, 3, 4):
        await small.put(hook(f"evt_{n}"))

    for _ in range(2):  # nothing of it is remembered: the second one is no repeat
        with pytest.raises(InboxFull):
            await small.put(hook("evt_5"))
    assert (await small.put(hook("evt_2"))).outcome is PutOutcome.DUPLICATE
    assert (await small.put(answer(yes_to(question), key="k1"))).n == 5
    assert (await small.put(message("yes", key="k2", as_of=Position(1, 6)))).n == 6

    await small.write(token, rows(token, 6, taken(3)))

    assert (await small.put(hook("evt_5"))).n == 7


# --- repeats -----------------------------------------------------------------


@pytest.mark.rule("A4", "K27")
async def test_a_repeat_is_acknowledged_and_not_stored_again(open_store: Inspected, clock: Clock) -> None:
    first = await open_store.put(hook("evt_1"))
    clock.later(MINUTE)

    again = await open_store.put(hook("evt_1"))
    elsewhere = await open_store.put(hook("evt_1", session="s2"))
    unrouted = await open_store.put(hook("evt_1", session=None))

    for put in (again, elsewhere, unrouted):
        assert put == replace(first, outcome=PutOutcome.DUPLICATE)
    assert [row.n for row in await open_store.inbox("s1", after=0, limit=9)] == [1]
    assert await open_store.inbox("s2", after=0, limit=9) == []
    assert await notes(open_store) == [("input.dropped", "evt_1 again from restaurant; acknowledged, not acted on")] * 3


@pytest.mark.rule("A4")
async def test_the_same_id_from_another_source_is_no_repeat(open_store: Inspected) -> None:
    await open_store.put(hook("evt_1"))

    other = await open_store.put(hook("evt_1", source="cinema"))

    assert (other.outcome, other.n) == (PutOutcome.STORED, 2)


async def test_a_repeat_is_answered_as_its_first_one_was(store: Inspected) -> None:
    """Also when rows have come since: where it stands in the record does not move."""
    token = await owned(store)
    await store.write(token, rows(token, 0, ModelSaidBody(1, ())))
    first = await store.put(hook("evt_2"))
    await store.write(token, rows(token, 1, ModelSaidBody(2, ())))

    again = await store.put(hook("evt_2"))

    assert again == replace(first, outcome=PutOutcome.DUPLICATE)
    [row] = await store.door()
    assert (row.note.session, row.at_seq) == ("s1", 2)


@pytest.mark.rule("A6")
async def test_an_id_is_remembered_as_long_as_its_entry_says(open_store: Inspected, clock: Clock) -> None:
    await open_store.put(hook("evt_1", keep_ms=3 * DAY))
    clock.later(3 * DAY - 1)
    assert (await open_store.put(hook("evt_1", keep_ms=3 * DAY))).outcome is PutOutcome.DUPLICATE
    assert await open_store.forget() == 0

    clock.later(1)

    renewed = await open_store.put(hook("evt_1", content="another one", keep_ms=DAY))
    assert (renewed.outcome, renewed.n) == (PutOutcome.STORED, 2)
    assert (await open_store.put(hook("evt_1", content="another one"))).outcome is PutOutcome.DUPLICATE
    clock.later(DAY)
    assert await open_store.forget() == 1
    assert await open_store.forget() == 0
    assert (await open_store.put(hook("evt_1"))).n == 3


@pytest.mark.rule("A6")
async def test_forgetting_leaves_what_is_still_to_be_recognised(open_store: Inspected, clock: Clock) -> None:
    for n in range(5):
        await open_store.put(hook(f"short_{n}", keep_ms=DAY))
        await open_store.put(hook(f"long_{n}", keep_ms=2 * DAY))
    clock.later(DAY)

    assert await open_store.forget() == 5
    assert (await open_store.put(hook("long_3"))).outcome is PutOutcome.DUPLICATE


@pytest.mark.rule("K27")
async def test_the_same_id_with_other_content_is_a_suspect_replay(open_store: Inspected) -> None:
    first = await open_store.put(hook("evt_1"))

    put = await open_store.put(hook("evt_1", content="the table is yours"))

    assert put == replace(first, outcome=PutOutcome.SUSPECT_REPLAY)
    assert len(await open_store.inbox("s1", after=0, limit=9)) == 1
    assert await notes(open_store) == [
        ("input.dropped", "evt_1 from restaurant came again with other content; acknowledged, not acted on")
    ]


@pytest.mark.rule("K27")
async def test_known_content_under_an_id_that_nothing_vouches_for_is_a_suspect_replay(
    open_store: Inspected, clock: Clock
) -> None:
    first = await open_store.put(hook("evt_1", id_signed=False, keep_ms=DAY))

    replayed = await open_store.put(hook("evt_2", id_signed=False))
    honest = await open_store.put(hook("evt_1", id_signed=False))
    elsewhere = await open_store.put(hook("evt_2", id_signed=False, source="cinema"))
    clock.later(DAY)
    later = await open_store.put(hook("evt_2", id_signed=False))

    assert replayed == replace(first, outcome=PutOutcome.SUSPECT_REPLAY)
    assert honest.outcome is PutOutcome.DUPLICATE
    assert (elsewhere.outcome, later.outcome) == (PutOutcome.STORED, PutOutcome.STORED)
    assert (await notes(open_store))[0] == (
        "input.dropped",
        "evt_2 from restaurant repeats known content under another id; acknowledged, not acted on",
    )


async def test_equal_content_under_two_signed_ids_is_two_events(open_store: Inspected) -> None:
    await open_store.put(hook("evt_1"))

    assert (await open_store.put(hook("evt_2"))).outcome is PutOutcome.STORED


@pytest.mark.rule("K27")
async def test_an_idempotency_key_with_other_content_is_misused(open_store: Inspected) -> None:
    await open_store.put(message("book a table", key="k1"))

    with pytest.raises(Misused):
        await open_store.put(message("book two tables", key="k1"))

    assert (await open_store.put(message("book a table", key="k1"))).outcome is PutOutcome.DUPLICATE
    assert len(await open_store.inbox("s1", after=0, limit=9)) == 1


@pytest.mark.parametrize("strange", ["\ud800", "\0"], ids=["half a surrogate pair", "NUL"])
async def test_what_not_every_database_can_hold_is_stored_alike_and_found_again(
    open_store: Inspected, strange: str
) -> None:
    """A name is kept with U+FFFD in its place; what is said keeps its NULs, which JSON can write."""
    await open_store.create_session("s9", owner=ALICE, title=f"t{strange}")
    await open_store.put(hook(f"evt_{strange}", content="gone\0"))
    again = await open_store.put(hook(f"evt_{strange}", content="gone\0"))
    await open_store.note(DoorNote(DoorKind.REJECTED, f"s{strange}", f"text{strange}", f"id{strange}"))

    record = await open_store.session("s9")
    assert record is not None
    assert record.title == "t\ufffd"
    assert again.outcome is PutOutcome.DUPLICATE
    [row] = await open_store.inbox("s1", after=0, limit=9)
    assert row.event_id == "evt_\ufffd"
    assert row.input.parts[0].text == "gone\0"
    note = (await open_store.door())[-1].note
    assert (note.source, note.text, note.event_id) == ("s\ufffd", "text\ufffd", "id\ufffd")


@pytest.mark.rule("K12")
async def test_received_times_never_fall_along_an_inbox(open_store: Inspected, clock: Clock) -> None:
    """Even if the clock is set back between two inputs (K10)."""
    for event, step in (("a", 10), ("b", -500), ("c", 3), ("d", 700)):
        clock.later(step)
        await open_store.put(hook(event))

    times = [row.received_at_ms for row in await open_store.inbox_record("s1")]
    assert times == sorted(times)
    assert open_store.now_ms() >= times[-1]


# --- the door's record -------------------------------------------------------


@pytest.mark.rule("K28")
async def test_the_door_keeps_its_own_record(store: Inspected, clock: Clock) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, ModelSaidBody(1, ())))
    refused = DoorNote(DoorKind.REJECTED, "restaurant", "signature doesn't match", digest="sha256:1")
    await store.note(refused)
    clock.later(1)
    for name in ("s1", "s2"):
        await store.note(DoorNote(DoorKind.DROPPED, "restaurant", "again", "evt_1", name))

    everything = await store.door()
    assert [(row.n, row.at_ms, row.at_seq) for row in everything] == [
        (1, NOON, None),
        (2, NOON + 1, 1),
        (3, NOON + 1, None),
    ]
    assert everything[0].note == refused
    assert [row.n for row in await store.door(session="s1")] == [1, 2]
    assert [row.n for row in await store.door(limit=2)] == [2, 3]
    assert await store.door(limit=0) == []


@pytest.mark.rule("K28")
async def test_the_doors_record_is_bounded_and_keeps_the_newest(small: Inspected) -> None:
    for n in range(1, 8):
        await small.note(DoorNote(DoorKind.REJECTED, "restaurant", f"note {n}"))

    assert [(row.n, row.note.text) for row in await small.door()] == [(5, "note 5"), (6, "note 6"), (7, "note 7")]


# --- bindings, tokens, life --------------------------------------------------


async def test_a_source_is_bound_to_the_last_session_it_was_given(open_store: Inspected) -> None:
    assert await open_store.bound("restaurant") is None

    await open_store.bind("restaurant", "s1")
    await open_store.bind("restaurant", "s2")

    assert await open_store.bound("restaurant") == "s2"
    assert await open_store.bound("cinema") is None


async def test_tokens_are_kept_and_revoked_once(store: Inspected, clock: Clock) -> None:
    first = TokenRow("t2", "hash of a secret", ALICE, "laptop", NOON, None)
    second = TokenRow("t1", "hash of another", Principal(PrincipalKind.OPERATOR, "ops"), "ci", NOON + 1, NOON + DAY)
    for token in (second, first):
        await store.add_token(token)
    with pytest.raises(IllegalChange):
        await store.add_token(first)
    clock.later(7)

    assert await store.tokens() == [first, second]
    assert await store.token("t1") == second
    assert await store.token("t9") is None
    assert await store.revoke_token("t2")
    assert not await store.revoke_token("t2")
    assert not await store.revoke_token("t9")
    assert await store.token("t2") == replace(first, revoked_at_ms=NOON + 7)


@pytest.mark.rule("K10")
async def test_the_stores_time_never_steps_back(store: Inspected, clock: Clock) -> None:
    clock.later(100)
    assert store.now_ms() == NOON + 100
    clock.later(-50)
    assert store.now_ms() == NOON + 100
    clock.later(51)
    assert store.now_ms() == NOON + 101


async def test_a_store_that_can_be_used_is_healthy(store: Inspected) -> None:
    await store.healthy()
