"""Operations: their key, the moves of their states, what is done about one that nobody heard back from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.operation import (
    MOVES,
    OperationState,
    Ref,
    Settlement,
    idempotency_key,
    settlement,
    sources_of,
)
from sayso.core.retry import delay_ms

#: where each state may lead, written out
LEADS_TO = {
    "intended": "sent not_started",
    "sent": "sent answered failed unknown not_started",
    "unknown": "sent answered failed unknown released",
    "answered": "gone released",
    "failed": "released",
    "gone": "released",
    "released": "released",
    "not_started": "",
}
#: session and operation ids as sayso makes them hold no colon
ids = st.text("0123456789abcdefT.-", min_size=1, max_size=12)


@pytest.mark.rule("D2")
def test_a_key_is_the_session_and_the_operation_so_a_meant_second_booking_has_another() -> None:
    assert idempotency_key("s1", "T1.1.1") == "s1:T1.1.1"
    assert idempotency_key("s1", "T1.1.2") != idempotency_key("s1", "T1.1.1")
    assert idempotency_key("s2", "T1.1.1") != idempotency_key("s1", "T1.1.1")


@pytest.mark.rule("D2")
@given(st.tuples(ids, ids), st.tuples(ids, ids))
def test_two_operations_share_a_key_only_if_they_are_one(one: tuple[str, str], other: tuple[str, str]) -> None:
    assert (idempotency_key(*one) == idempotency_key(*other)) == (one == other)


@pytest.mark.parametrize("state", OperationState)
def test_an_operation_moves_only_as_the_table_says(state: OperationState) -> None:
    assert MOVES[state] == {OperationState(to) for to in LEADS_TO[state].split()}


@pytest.mark.parametrize("target", OperationState)
def test_the_states_before_a_state_are_those_that_lead_to_it(target: OperationState) -> None:
    assert set(sources_of(target)) == {state for state, to in LEADS_TO.items() if target in to.split()}


def test_what_failed_was_never_sent_or_is_no_more_does_not_come_back() -> None:
    """So a given-up attempt never becomes "not started", and a thing that is gone does not come back. One that is
    `sent` may: where the row that says so was accepted and never durable, nothing went out (H27)."""
    assert OperationState.FAILED not in MOVES[OperationState.ANSWERED]
    assert OperationState.NOT_STARTED not in MOVES[OperationState.UNKNOWN]
    over = {OperationState.FAILED, OperationState.GONE, OperationState.NOT_STARTED, OperationState.RELEASED}
    assert all(MOVES[final] <= {OperationState.RELEASED} for final in over)


@pytest.mark.rule("D5")
@pytest.mark.parametrize(
    ("has_lookup", "keyed", "attempts", "what"),
    [
        (True, True, 1, Settlement.LOOK_UP),
        (True, True, 5, Settlement.LOOK_UP),
        (True, False, 1, Settlement.LOOK_UP),
        (False, True, 1, Settlement.RESEND),
        (False, True, 4, Settlement.RESEND),
        (False, True, 5, Settlement.TELL),
        (False, True, 6, Settlement.TELL),
        (False, False, 1, Settlement.TELL),
        (False, False, 0, Settlement.TELL),
    ],
)
def test_an_unknown_operation_is_looked_up_else_sent_again_with_its_key_else_told(
    has_lookup: bool, keyed: bool, attempts: int, what: Settlement
) -> None:
    assert settlement(has_lookup=has_lookup, recognised=keyed, attempts=attempts, attempts_max=5) is what


@pytest.mark.rule("D5")
@given(st.booleans(), st.integers(0, 100), st.integers(0, 100))
def test_an_unkeyed_operation_is_never_sent_again(has_lookup: bool, attempts: int, attempts_max: int) -> None:
    what = settlement(has_lookup=has_lookup, recognised=False, attempts=attempts, attempts_max=attempts_max)

    assert what is not Settlement.RESEND


@given(st.integers(1, 1_000), st.floats(0, 1, exclude_max=True))
def test_a_delay_doubles_from_a_second_to_a_minute_and_is_drawn_from_its_upper_half(
    attempt: int, chance: float
) -> None:
    ceiling_ms = min(60_000, 1_000 * 2 ** (attempt - 1))

    assert ceiling_ms // 2 <= delay_ms(attempt, chance=chance) <= ceiling_ms


def test_a_ref_reads_as_what_it_names() -> None:
    assert str(Ref("restaurant", "reservation", "R1")) == "reservation R1"
    assert Ref("restaurant", "reservation", "R1") != Ref("cinema", "reservation", "R1")
