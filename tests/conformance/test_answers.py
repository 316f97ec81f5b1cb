"""Do all stores keep the same promises? Questions, answers at the door, and the timers that end a question."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sayso.core.consent import ConsentState
from sayso.core.errors import AnswerRefused, IllegalChange
from sayso.core.inputs import InputKind, Lane
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.rows import (
    ConsentApprovedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    TurnAskBody,
)
from sayso.core.session import Position, SessionState
from sayso.storage.store import DoorKind, PutOutcome
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
    started,
    yes_to,
)

# --- questions ---------------------------------------------------------------


def approved(n: int, name: str = "A1") -> ConsentApprovedBody:
    return ConsentApprovedBody(name, n, "user:alice", NOON + 1, "api token", ticks=(0,))


async def test_a_question_stands_as_it_was_asked(store: Inspected) -> None:
    question = consent()
    await asked(store, question)

    standing = await store.standing("s1", "A1")
    assert standing is not None
    assert (standing.consent, standing.state, standing.position) == (question, ConsentState.OPEN, Position(1, 4))
    assert await store.standing("s1", "A2") is None
    assert await store.standing("s2", "A1") is None
    record = await store.session("s1")
    assert record is not None
    assert record.consents == 1


async def test_an_approved_question_owes_a_turn_until_it_has_started(store: Inspected) -> None:
    question = consent()
    token = await asked(store, question)
    put = await store.put(answer(yes_to(question), key="k1"))
    assert put.n is not None
    await store.write(token, rows(token, 6, approved(put.n)))

    [standing] = await store.standings("s1", states=(ConsentState.OPEN,), due=True)
    assert (standing.state, standing.due_seq) == (ConsentState.APPROVED, 7)
    assert (standing.answered_by, standing.answered_at_ms, standing.ticks) == ("user:alice", NOON + 1, (0,))
    assert await store.standings("s1", states=(ConsentState.OPEN,)) == []

    await store.write(token, rows(token, 7, ConsentUsedBody("A1", "T2"), started(by=ALICE, consent="A1"), turn="T2"))

    assert await store.standings("s1", states=(), due=True) == []
    [standing] = await store.standings("s1")
    assert (standing.state, standing.used_by) == (ConsentState.USED, "T2")


@pytest.mark.rule("B8")
async def test_a_consent_is_used_once(store: Inspected) -> None:
    question = consent()
    token = await asked(store, question)
    for key in ("k1", "k2"):
        await store.put(answer(yes_to(question), key=key))
    await store.write(token, rows(token, 6, approved(2), ConsentUsedBody("A1", "T2")))

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 8, ConsentUsedBody("A1", "T3")))
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 8, approved(3)))

    [standing] = await store.standings("s1")
    assert (standing.state, standing.used_by) == (ConsentState.USED, "T2")
    assert [row.n for row in await store.inbox("s1", after=0, limit=9)] == [3]


async def test_a_withdrawn_question_owes_nothing_and_its_timer_is_off(store: Inspected, clock: Clock) -> None:
    question = consent()
    token = await asked(store, question)
    await store.put(answer(yes_to(question), key="k1"))
    await store.write(token, rows(token, 6, approved(2), ConsentWithdrawnBody("A1", "the table is gone")))

    assert await store.standings("s1", states=(), due=True) == []
    standing = await store.standing("s1", "A1")
    assert standing is not None
    assert (standing.state, standing.reason) == (ConsentState.WITHDRAWN, "the table is gone")
    clock.later(11 * MINUTE)
    assert (await store.fire()).stored == ()


async def test_questions_come_in_the_order_they_were_asked(store: Inspected) -> None:
    token = await asked(store, consent("A1"))
    await store.write(token, rows(token, 6, *(TurnAskBody(consent(f"A{n}")) for n in range(2, 12)), turn="T2"))
    await store.write(token, rows(token, 16, ConsentExpiredBody("A3", None)))

    assert [standing.consent.id for standing in await store.standings("s1")] == [f"A{n}" for n in range(1, 12)]
    open_ones = await store.standings("s1", states=(ConsentState.OPEN,))
    assert "A3" not in [standing.consent.id for standing in open_ones]
    assert len(open_ones) == 10


# --- answers -----------------------------------------------------------------


@pytest.mark.rule("K12")
async def test_an_approvers_answer_is_stored_and_waits_in_the_control_lane(store: Inspected) -> None:
    question = consent()
    await asked(store, question)

    put = await store.put(answer(yes_to(question, steps=(1,)), key="k1"))

    assert put.outcome is PutOutcome.STORED
    [row] = await store.inbox("s1", after=1, limit=9)
    assert (row.lane, row.input.kind, row.input.answer) == (
        Lane.CONTROL,
        InputKind.ANSWER,
        yes_to(question, steps=(1,)),
    )


@pytest.mark.rule("K12")
@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("question", "there is no such question"),
        ("person", "it waits for user:alice, not for user:bob"),
        ("digest", "the digest is not that of the steps that were asked about"),
        ("steps", "the ticked steps are not steps of this question"),
    ],
)
async def test_any_other_answer_is_refused_and_noted(store: Inspected, wrong: str, why: str) -> None:
    question = consent()
    await asked(store, question)
    said = {
        "question": yes_to(consent("A9")),
        "person": yes_to(question),
        "digest": yes_to(question, digest="sha256:0"),
        "steps": yes_to(question, steps=(2,)),
    }[wrong]
    by = BOB if wrong == "person" else ALICE

    for _ in range(2):  # it is not remembered either: the second one is refused, not known
        with pytest.raises(AnswerRefused, match=why):
            await store.put(answer(said, key="k1", by=by))

    assert len(await store.inbox_record("s1")) == 1
    record = await store.session("s1")
    assert record is not None
    assert record.inbox_tail == 1
    first, second = await store.door()
    assert first.note == second.note
    assert (first.note.kind, first.note.session, first.at_seq) == (DoorKind.REJECTED, "s1", 6)
    assert first.note.text == f"{said.consent} is not answered by {by}: {why}"


@pytest.mark.rule("K12")
async def test_a_second_and_a_late_answer_are_stored_like_the_first(store: Inspected, clock: Clock) -> None:
    question = consent()
    token = await asked(store, question)
    first = await store.put(answer(yes_to(question), key="k1"))
    assert first.n is not None
    await store.write(token, rows(token, 6, ConsentApprovedBody("A1", first.n, "user:alice", NOON, "api token")))
    clock.later(DAY)

    second = await store.put(answer(yes_to(question, yes=False), key="k2"))
    again = await store.put(answer(yes_to(question), key="k1"))

    assert (second.outcome, second.n, second.received_at_ms) == (PutOutcome.STORED, 3, NOON + DAY)
    assert again == replace(first, outcome=PutOutcome.DUPLICATE)


@pytest.mark.rule("K20")
@pytest.mark.parametrize(("text", "yes"), [("yes", True), (" No! ", False), ("YES.", True)])
async def test_a_bare_yes_that_has_seen_the_one_open_question_answers_it(
    store: Inspected, text: str, yes: bool
) -> None:
    question = consent()
    await asked(store, question)

    await store.put(message(text, key="k1", as_of=Position(1, 4)))

    [row] = await store.inbox("s1", after=1, limit=9)
    assert (row.lane, row.input.kind) == (Lane.CONTROL, InputKind.ANSWER)
    assert row.input.answer == yes_to(question, yes=yes)
    assert [part.text for part in row.input.parts] == [text]


@pytest.mark.rule("K20")
@pytest.mark.parametrize("as_of", [None, Position(1, 3), Position(0, 9)])
async def test_a_bare_yes_that_has_not_seen_the_question_is_unclear(store: Inspected, as_of: Position | None) -> None:
    await asked(store, consent())

    await store.put(message("yes", key="k1", as_of=as_of))

    [row] = await store.inbox("s1", after=1, limit=9)
    assert (row.lane, row.input.kind, row.input.answer) == (Lane.NORMAL, InputKind.UNCLEAR, None)


@pytest.mark.rule("K20")
async def test_a_bare_yes_to_two_open_questions_is_unclear(store: Inspected) -> None:
    token = await asked(store, consent())
    await store.write(token, rows(token, 6, TurnAskBody(consent("A2")), turn="T2"))

    await store.put(message("yes", key="k1", as_of=Position(1, 7)))

    [row] = await store.inbox("s1", after=1, limit=9)
    assert row.input.kind is InputKind.UNCLEAR


@pytest.mark.rule("K20")
@pytest.mark.parametrize("why", ["more words", "two parts", "not hers", "none open"])
async def test_anything_else_stays_a_message(store: Inspected, why: str) -> None:
    question = consent(approvers=("user:bob",) if why == "not hers" else ("user:alice",))
    token = await asked(store, question)
    if why == "none open":
        await store.write(token, rows(token, 6, ConsentExpiredBody("A1", None)))
    text = "yes, do it" if why == "more words" else "yes"

    await store.put(message(text, key="k1", as_of=Position(1, 9), parts=2 if why == "two parts" else 1))

    [row] = await store.inbox("s1", after=1, limit=9)
    assert (row.input.kind, row.lane) == (InputKind.MESSAGE, Lane.NORMAL)


@pytest.mark.rule("B7")
async def test_a_hook_that_says_yes_answers_nothing(store: Inspected) -> None:
    await asked(store, consent(approvers=("user:alice", "source:restaurant")))

    await store.put(replace(hook("evt_2", content="yes"), as_of=Position(1, 4)))

    [row] = await store.inbox("s1", after=1, limit=9)
    assert row.input.kind is InputKind.EVENT


# --- timers ------------------------------------------------------------------


@pytest.mark.rule("K12")
async def test_a_questions_expiry_is_an_input_and_comes_once(store: Inspected, clock: Clock) -> None:
    token = await asked(store, consent())
    assert (await store.fire()).next_at_ms == NOON + 10 * MINUTE
    await store.release(token, looked_to=1)
    clock.later(10 * MINUTE)

    fired = await store.fire()

    assert (fired.stored, fired.next_at_ms) == ((("s1", None),), None)
    [row] = await store.inbox("s1", after=1, limit=9)
    assert (row.lane, row.source, row.event_id) == (Lane.CONTROL, "timer@s1", f"A1@{NOON + 10 * MINUTE}")
    assert (row.input.kind, row.input.consent, row.input.verified) == (InputKind.EXPIRY, "A1", "runtime")
    assert row.input.principal == Principal(PrincipalKind.TIMER, "A1")
    assert row.received_at_ms == NOON + 10 * MINUTE
    record = await store.session("s1")
    assert record is not None
    assert record.state is SessionState.READY
    assert (await store.fire()).stored == ()


async def test_timers_of_two_sessions_do_not_meet(store: Inspected, clock: Clock) -> None:
    """Both are called A1 and end at the same instant; each session gets its own."""
    for name in ("s2", "s1"):
        token = await owned(store, session=name)
        late = rows(token, 0, TurnAskBody(consent(expires_at_ms=NOON + 2)))
        await store.write(token, [*late, *rows(token, 1, TurnAskBody(consent("A2", expires_at_ms=NOON + 9)))])
    clock.later(5)

    fired = await store.fire()

    assert fired.stored == (("s1", "n1"), ("s2", "n1"))
    assert fired.next_at_ms == NOON + 9
    for name in ("s1", "s2"):
        assert [row.source for row in await store.inbox(name, after=1, limit=9)] == [f"timer@{name}"]


async def test_the_answer_that_is_stored_first_stops_the_timer(store: Inspected, clock: Clock) -> None:
    question = consent()
    token = await asked(store, question)
    await store.put(answer(yes_to(question), key="k1"))
    await store.write(token, rows(token, 6, ConsentApprovedBody("A1", 2, "user:alice", NOON, "api token")))
    clock.later(DAY)

    fired = await store.fire()

    assert (fired.stored, fired.next_at_ms) == ((), None)
    assert [standing.state for standing in await store.standings("s1")] == [ConsentState.APPROVED]


async def test_timers_of_one_session_come_in_the_order_they_are_due(store: Inspected, clock: Clock) -> None:
    token = await owned(store)
    questions = [consent(f"A{n}", expires_at_ms=NOON + 10 - n) for n in range(1, 5)]
    await store.write(token, rows(token, 0, *(TurnAskBody(question) for question in questions)))
    clock.later(20)

    await store.fire()

    inbox = await store.inbox("s1", after=1, limit=9)
    assert [row.input.consent for row in inbox] == ["A4", "A3", "A2", "A1"]
