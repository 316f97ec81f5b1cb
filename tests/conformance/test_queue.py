"""What waits in a session: whose it is, how much of it may wait, who comes between whom, and what is taken back."""

from __future__ import annotations

import pytest

from sayso.core.errors import CrossUser, IllegalChange, InboxFull
from sayso.core.inputs import Lane
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import Ending, InputRetractedBody, SessionChangedBody, TurnEndBody
from sayso.core.session import Others, Token
from sayso.storage.store import Put, PutOutcome
from tests.conformance.given import (
    ALICE,
    BOB,
    Inspected,
    answer,
    asking,
    consent,
    hook,
    message,
    owned,
    rows,
    started,
    taken,
    yes_to,
)

OPS = Principal(PrincipalKind.OPERATOR, "ops")


# --- how much of one person's may wait -----------------------------------------


@pytest.mark.rule("X39")
async def test_a_person_fills_her_own_queue_and_nobody_elses(store: Inspected) -> None:
    """Two of alice's may wait; bob's, the sources' and all that is settled at once still come in."""
    token = await owned(store)
    question = consent(approvers=("user:alice",))
    await store.write(token, rows(token, 0, *asking(question)))
    for key in ("k1", "k2"):
        await store.put(message("hello", key=key, waiting_max=2))

    with pytest.raises(InboxFull) as full:
        await store.put(message("hello", key="k3", waiting_max=2))

    assert (full.value.owner, full.value.limit) == ("user:alice", 2)
    assert (await store.put(message("hello", key="k2", waiting_max=2))).outcome is PutOutcome.DUPLICATE
    assert (await store.put(message("hello", key="k4", by=BOB, waiting_max=2))).n == 4
    assert (await store.put(hook("evt_2"))).n == 5
    assert (await store.put(answer(yes_to(question), key="k5"))).n == 6
    with pytest.raises(InboxFull):
        await store.put(message("hello", key="k3", waiting_max=2))
    await store.write(token, rows(token, 6, taken(2)))
    assert (await store.put(message("hello", key="k3", waiting_max=2))).n == 7


@pytest.mark.rule("X39")
async def test_what_sources_fill_leaves_room_for_people(small: Inspected) -> None:
    """What nobody owns is counted together, three of a lane here; a refused one is as if it had not been sent."""
    await owned(small)
    for n in (2, 3):
        await small.put(hook(f"evt_{n}"))
    with pytest.raises(InboxFull) as full:
        await small.put(hook("evt_4", source="cinema"))

    assert full.value.owner is None
    assert (await small.put(message("hello", key="k1"))).n == 4
    assert (await small.put(message("hello", key="k1"))).outcome is PutOutcome.DUPLICATE


# --- who comes between whom ----------------------------------------------------


async def refusing(store: Inspected) -> tuple[Token, int]:
    """Store a session of alice's that refuses; return the right to it and its head. Nothing waits in it."""
    token = await owned(store)
    await store.write(token, rows(token, 0, SessionChangedBody(1, "user:alice", None, Others.REFUSE)))
    return token, 1


async def test_how_others_are_treated_is_what_the_newest_row_says(store: Inspected) -> None:
    token, head = await refusing(store)
    record = await store.session("s1")
    assert record is not None
    assert (record.others, record.title) == (Others.REFUSE, "dinner")
    await store.put(hook("evt_2"))

    await store.write(token, rows(token, head, SessionChangedBody(2, "user:alice", "lunch\ud800", Others.QUEUE)))

    record = await store.session("s1")
    assert record is not None
    assert (record.others, record.title) == (Others.QUEUE, "lunch\ufffd")


@pytest.mark.rule("H28", "K21")
async def test_while_anothers_turn_runs_a_persons_message_is_refused_and_nothing_is_stored(store: Inspected) -> None:
    token, head = await refusing(store)
    await store.write(token, rows(token, head, started(by=ALICE)))

    with pytest.raises(CrossUser):
        await store.put(message("me too", key="k1", by=BOB))
    with pytest.raises(CrossUser):
        await store.put(message("me too", key="k2", by=OPS))

    assert [entry.n for entry in await store.inbox_record("s1")] == [1]
    assert await store.door() == []
    assert (await store.put(message("and this", key="k3", by=ALICE))).n == 2
    assert (await store.put(hook("evt_2"))).n == 3


@pytest.mark.rule("H28", "K21")
async def test_while_anothers_message_waits_a_persons_is_refused(store: Inspected) -> None:
    """Also when no turn runs; what sources sent is nobody's. Once it was taken and its turn has ended, she is heard,
    under the same key."""
    token, head = await refusing(store)
    await store.put(hook("evt_2"))
    await store.put(message("first", key="k1"))
    with pytest.raises(CrossUser):
        await store.put(message("me too", key="k2", by=BOB))

    await store.write(token, rows(token, head, taken(3), started(by=ALICE), turn="T1"))
    with pytest.raises(CrossUser):
        await store.put(message("me too", key="k2", by=BOB))
    await store.write(token, rows(token, head + 2, TurnEndBody(Ending.DONE), turn="T1"))

    assert (await store.put(message("me too", key="k2", by=BOB))).n == 4
    with pytest.raises(CrossUser):
        await store.put(message("again me", key="k3"))


async def test_what_was_taken_before_is_recognised_also_while_it_would_be_refused(store: Inspected) -> None:
    token, head = await refusing(store)
    await store.put(message("me first", key="k1", by=BOB))
    await store.write(token, rows(token, head, taken(2), started(by=BOB), TurnEndBody(Ending.DONE), turn="T1"))
    await store.put(message("now me", key="k2"))

    again = await store.put(message("me first", key="k1", by=BOB))

    assert (again.outcome, again.n) == (PutOutcome.DUPLICATE, 2)


@pytest.mark.rule("H28")
async def test_a_sources_turn_is_nobodys_to_come_between(store: Inspected) -> None:
    token, head = await refusing(store)
    await store.write(token, rows(token, head, started()))

    assert (await store.put(message("me too", key="k1", by=BOB))).n == 2


async def test_an_answer_is_never_an_interjection(store: Inspected) -> None:
    """Neither by its id nor as a bare yes that is read as one."""
    token, head = await refusing(store)
    await store.put(hook("evt_2"))
    asked = consent(approvers=("user:bob",))
    await store.write(token, rows(token, head, taken(2), *asking(asked)[1:]))
    await store.write(token, rows(token, head + 6, started(by=ALICE), turn="T2"))

    assert (await store.put(answer(yes_to(asked), key="k1", by=BOB))).n == 3


@pytest.mark.parametrize("others", [None, Others.QUEUE])
async def test_where_others_wait_their_turn_they_do(store: Inspected, others: Others | None) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, SessionChangedBody(1, "user:alice", None, others), started(by=ALICE)))

    stored: list[Put] = [await store.put(message("hello", key="k1", by=by)) for by in (BOB, ALICE, OPS)]

    assert [put.n for put in stored] == [2, 3, 4]


# --- what is taken back --------------------------------------------------------


@pytest.mark.rule("X40", "X41")
async def test_what_is_taken_back_is_taken_once_and_waits_no_more(store: Inspected) -> None:
    token = await owned(store)
    await store.put(message("never mind", key="k1"))
    await store.put(hook("evt_3"))

    await store.write(token, rows(token, 0, InputRetractedBody(3, 2, "user:alice")))

    assert [entry.n for entry in await store.inbox("s1", after=0, limit=9)] == [1]
    entry = await store.inbox_entry("s1", 2)
    assert entry is not None
    assert (entry.state, entry.taken_seq, entry.lane) == ("taken", 1, Lane.NORMAL)
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 1, taken(2)))


async def test_what_was_taken_is_not_taken_back(store: Inspected) -> None:
    token = await owned(store)
    await store.put(hook("evt_2"))
    await store.write(token, rows(token, 0, taken(1), started()))

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 2, InputRetractedBody(2, 1, "user:alice")))

    assert [entry.n for entry in await store.inbox("s1", after=0, limit=9)] == [2]


async def test_an_entry_is_found_by_its_place(store: Inspected) -> None:
    await owned(store)

    found = await store.inbox_entry("s1", 1)

    assert [found] == await store.inbox_record("s1")
    assert await store.inbox_entry("s1", 2) is None
    assert await store.inbox_entry("s2", 1) is None
