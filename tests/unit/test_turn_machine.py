"""The turn machine: scripts of events and what is due after each, and random turns driven to their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.authority import Verdict
from sayso.core.contract import Effect
from sayso.core.errors import OutOfOrder
from sayso.core.inputs import InputKind
from sayso.core.labels import RUNTIME, Part
from sayso.core.operation import Settlement, settlement
from sayso.core.rows import (
    Body,
    Called,
    Ending,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    Row,
    ToolIntendedBody,
    ToolResultBody,
    ToolSentBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
)
from sayso.core.turn import (
    CALLS_PER_REPLY_MAX,
    Ask,
    Asked,
    Begun,
    CallModel,
    CallState,
    Close,
    Due,
    End,
    Ended,
    Event,
    GaveUp,
    Intend,
    Intended,
    Joined,
    ModelFailed,
    Paused,
    Phase,
    Proceed,
    Replied,
    Resumed,
    Reuse,
    Run,
    Send,
    Sent,
    Settle,
    Settled,
    StepsFixed,
    Stopped,
    Turn,
    Unpaused,
    advance,
    due,
    event_of,
    fold,
    start,
)
from tests.unit.core_examples import ALICE, RESTAURANT, call, consent, heard, origin, row

OK, FAILED, REFUSED, WAITING = Outcome.OK, Outcome.FAILED, Outcome.REFUSED, Outcome.WAITING
NOT_STARTED, UNKNOWN = Outcome.NOT_STARTED, Outcome.UNKNOWN

BOOK = call("book")
TELL = call("tell", effect=Effect.SEND)
PAY = call("pay", effect=Effect.PAY, keyed=False)
LOOK = call("look", effect=Effect.READ)
LOOK_1 = call("look1", effect=Effect.READ, parallel_safe=True)
LOOK_2 = call("look2", effect=Effect.READ, parallel_safe=True)
GUARDED = call("guarded", Verdict.ASK)
BARRED = call("barred", Verdict.DENY)


def said(what: Due) -> str:
    """What is due, in a few words."""
    match what:
        case CallModel():
            return "call model"
        case Intend(called):
            return f"intend {called.call}"
        case Send(called, apart):
            return f"send {called.call}" + (" apart" if apart else "")
        case Reuse(called):
            return f"reuse {called.takes} as {called.call}"
        case Run(called):
            return f"run {called.call}"
        case Settle(called, attempts):
            return f"settle {called.call} after {attempts}"
        case Close(called, outcome):
            return f"close {called.call} {outcome}"
        case Ask(calls):
            return f"ask {' '.join(called.call for called in calls)}"
        case End(ending):
            return f"end {ending}"


def follow(turn: Turn, *script: tuple[Event, str]) -> Turn:
    """Tell the events one by one; after each, exactly what the script says must be due."""
    for event, expected in script:
        turn, effects = advance(turn, event)
        assert "; ".join(map(said, effects)) == expected, event
        assert isinstance(event, Proceed) or due(turn) == effects
    return turn


def reached(turn: Turn, *told: Event) -> Turn:
    """The turn after these events."""
    for event in told:
        turn, _ = advance(turn, event)
    return turn


def ordinary(*calls: Called, steps_left: int = 8) -> Turn:
    """A turn of the restaurant's; with calls, one whose model has just planned them."""
    turn = start("T1", TurnStartBody(origin(RESTAURANT), steps_left))
    return reached(turn, Proceed(), Replied(calls)) if calls else turn


def approved(*calls: Called) -> Turn:
    """The turn that an approved consent starts; with calls, with its steps fixed."""
    turn = start("T2", TurnStartBody(origin(ALICE), 0, consent="A1"))
    return reached(turn, StepsFixed(calls)) if calls else turn


# --- one call ----------------------------------------------------------------


def test_words_alone_end_a_turn() -> None:
    turn = follow(ordinary(), (Proceed(), "call model"), (Replied(()), "end done"), (Ended(Ending.DONE), ""))

    assert (turn.phase, turn.ending, turn.steps_left) == (Phase.ENDED, Ending.DONE, 7)


def test_a_keyed_operation_is_sent_at_once() -> None:
    follow(
        ordinary(),
        (Proceed(), "call model"),
        (Replied((BOOK,)), "send book"),
        (Sent("book"), ""),
        (Settled("book", OK), ""),
        (Proceed(), "call model"),
        (Replied(()), "end done"),
        (Ended(Ending.DONE), ""),
    )


def test_an_unkeyed_operation_is_stored_before_and_apart_from_its_sending() -> None:
    follow(
        ordinary(),
        (Proceed(), "call model"),
        (Replied((PAY,)), "intend pay"),
        (Intended("pay"), "send pay apart"),
        (Sent("pay"), ""),
        (Settled("pay", OK), ""),
    )


def test_a_read_runs_without_a_row() -> None:
    follow(
        ordinary(),
        (Proceed(), "call model"),
        (Replied((LOOK,)), "run look"),
        (Begun("look"), ""),
        (Settled("look", OK), ""),
        (Proceed(), "call model"),
    )


def test_a_denied_call_is_closed_with_its_reason_and_the_model_goes_on() -> None:
    turn = ordinary(BARRED)

    assert due(turn) == (Close(BARRED, REFUSED, "because barred"),)
    follow(turn, (Settled("barred", REFUSED), ""), (Proceed(), "call model"))


def test_a_model_that_fails_fails_the_turn() -> None:
    turn = follow(ordinary(), (Proceed(), "call model"), (ModelFailed("no answer"), "end failed"))

    assert due(turn) == (End(Ending.FAILED, "no answer"),)
    follow(turn, (Ended(Ending.FAILED), ""))


def test_the_model_is_called_once_for_each_boundary_that_is_left() -> None:
    thinking = follow(ordinary(), (Proceed(), "call model"))

    assert due(thinking) == ()
    follow(thinking, (Replied((LOOK,)), "run look"), (Begun("look"), ""), (Settled("look", OK), ""))


@pytest.mark.rule("K9")
def test_what_was_shown_of_a_reply_that_broke_off_is_no_reply() -> None:
    assert event_of(row(ModelSaidBody(1, (), interrupted=True))) is None
    assert event_of(row(ModelSaidBody(1, ()))) == Replied(())


@pytest.mark.parametrize(
    "turn",
    [
        lambda: ordinary(),
        lambda: reached(ordinary(), Proceed()),
        lambda: ordinary(BOOK),
        lambda: reached(ordinary(BOOK), Sent("book")),
        lambda: ordinary(GUARDED),
        lambda: approved(BOOK),
    ],
    ids=["boundary", "thinking", "planned", "sent", "asking", "approved"],
)
def test_a_turn_can_be_ended_in_any_phase_and_then_nothing_is_due(turn: Callable[[], Turn]) -> None:
    ended = follow(turn(), (Ended(Ending.CANCELLED), ""), (Resumed(), ""))

    assert (ended.phase, ended.ending) == (Phase.ENDED, Ending.CANCELLED)


# --- several calls: in order, and stop at the first failure (K15) ------------


@pytest.mark.rule("K15")
def test_a_step_starts_only_after_the_one_before_it_succeeded() -> None:
    follow(
        ordinary(BOOK, PAY, TELL),
        (Sent("book"), ""),
        (Settled("book", OK), "intend pay"),
        (Intended("pay"), "send pay apart"),
        (Sent("pay"), ""),
        (Settled("pay", OK), "send tell"),
        (Sent("tell"), ""),
        (Settled("tell", OK), ""),
        (Proceed(), "call model"),
    )


@pytest.mark.rule("K15", "B15")
@pytest.mark.parametrize("outcome", [FAILED, UNKNOWN, NOT_STARTED])
@pytest.mark.parametrize("plan", [ordinary, approved])
def test_nothing_starts_after_a_step_that_did_not_succeed(outcome: Outcome, plan: Callable[..., Turn]) -> None:
    follow(
        plan(BOOK, LOOK, TELL),
        (Sent("book"), ""),
        (Settled("book", outcome), "close look not_started; close tell not_started"),
        (Settled("look", NOT_STARTED), "close tell not_started"),
    )


@pytest.mark.rule("K15")
@pytest.mark.parametrize("first", [LOOK, LOOK_1, BARRED])
def test_a_read_that_failed_or_a_call_that_is_denied_stops_what_stands_after_it(first: Called) -> None:
    turn = ordinary(first, BOOK, GUARDED)
    if first is not BARRED:
        turn = follow(turn, (Begun(first.call), ""))

    follow(
        turn,
        (Settled(first.call, REFUSED), "close book not_started; close guarded not_started"),
        (Settled("book", NOT_STARTED), "close guarded not_started"),
        (Settled("guarded", NOT_STARTED), ""),
        (Proceed(), "call model"),
    )


@pytest.mark.rule("K15")
def test_parallel_safe_neighbours_go_out_together_and_the_rest_waits_for_all_of_them() -> None:
    plan = ordinary(LOOK_1, LOOK_2, BOOK)
    out = follow(plan, (Begun("look1"), "run look2"), (Begun("look2"), ""))

    follow(out, (Settled("look2", OK), ""), (Settled("look1", OK), "send book"))
    # one that fails stops what stands after the group, and none of its neighbours
    follow(out, (Settled("look1", FAILED), ""), (Settled("look2", OK), "close book not_started"))
    follow(plan, (Begun("look1"), "run look2"), (Settled("look1", FAILED), "run look2"))


def test_calls_that_are_not_parallel_safe_go_out_one_by_one_also_among_those_that_are() -> None:
    follow(
        ordinary(LOOK_1, LOOK, LOOK_2),
        (Begun("look1"), ""),
        (Settled("look1", OK), "run look"),
        (Begun("look"), ""),
        (Settled("look", OK), "run look2"),
    )


# --- a guarded call among others (K19) ---------------------------------------


@pytest.mark.rule("K19", "F10")
def test_what_stands_before_a_guarded_call_runs_then_safe_reads_and_all_the_rest_is_one_question() -> None:
    turn = follow(
        ordinary(BOOK, GUARDED, LOOK_1, TELL, LOOK),
        (Sent("book"), ""),
        (Settled("book", OK), "run look1"),
        (Begun("look1"), ""),
        (Settled("look1", OK), "ask guarded tell look"),
        (Asked("A1"), "close guarded waiting; close tell waiting; close look waiting"),
        (Settled("guarded", WAITING), "close tell waiting; close look waiting"),
        (Settled("tell", WAITING), "close look waiting"),
        (Settled("look", WAITING), "end asked"),
        (Ended(Ending.ASKED), ""),
    )

    assert (turn.asked, turn.ending) == ("A1", Ending.ASKED)


@pytest.mark.rule("K19")
def test_nothing_is_asked_and_nothing_ends_before_the_last_operation_is_settled() -> None:
    out = follow(ordinary(BOOK, GUARDED), (Sent("book"), ""), (GaveUp("book"), "settle book after 1"))

    follow(out, (Settled("book", OK), "ask guarded"))
    follow(out, (Settled("book", UNKNOWN), "close guarded not_started"))


@pytest.mark.rule("K15", "K19")
def test_nothing_is_asked_after_a_step_that_failed() -> None:
    follow(
        ordinary(BOOK, GUARDED, LOOK_1),
        (Sent("book"), ""),
        (Settled("book", FAILED), "close guarded not_started; close look1 not_started"),
        (Settled("look1", NOT_STARTED), "close guarded not_started"),
        (Settled("guarded", NOT_STARTED), ""),
        (Proceed(), "call model"),
    )


@pytest.mark.rule("K19")
def test_safe_reads_on_both_sides_of_a_guarded_call_go_out_together() -> None:
    follow(
        ordinary(LOOK_1, GUARDED, LOOK_2),
        (Begun("look1"), "run look2"),
        (Begun("look2"), ""),
        (Settled("look1", OK), ""),
        (Settled("look2", OK), "ask guarded"),
    )


@pytest.mark.rule("K19")
def test_two_guarded_calls_and_what_stands_between_them_are_one_question() -> None:
    other = call("other", Verdict.ASK)

    assert due(ordinary(GUARDED, BOOK, other)) == (Ask((GUARDED, BOOK, other)),)


def test_a_guarded_call_for_other_people_is_put_back_to_be_asked_on_its_own() -> None:
    ops = call("ops", Verdict.ASK, approvers=("role:operator",))

    turn = ordinary(GUARDED, ops)
    why = "it waits for other people than the steps before it; call it again on its own"
    assert due(turn) == (Close(ops, NOT_STARTED, why),)
    turn = follow(turn, (Settled("ops", NOT_STARTED), "ask guarded"))
    follow(turn, (Asked("A1"), "close guarded waiting"), (Settled("guarded", WAITING), "end asked"))


def test_a_safe_read_that_fails_after_a_guarded_call_leaves_the_question() -> None:
    follow(ordinary(GUARDED, LOOK_1), (Begun("look1"), ""), (Settled("look1", FAILED), "ask guarded"))


def test_a_guarded_call_that_only_looks_is_asked_about_too() -> None:
    guarded = call("guarded", Verdict.ASK, Effect.READ, parallel_safe=True)

    assert [*map(said, due(ordinary(guarded)))] == ["ask guarded"]


# --- replies that are refused whole ------------------------------------------


def test_two_calls_of_one_id_refuse_the_reply_before_anything_of_it_runs() -> None:
    """H12, F14: each call has its refusal, under its own name, and the turn ends with an error naming the id."""
    one, other = call("book", provider_id="dup"), call("tell", provider_id="dup")
    third = call("look", effect=Effect.READ, provider_id="own")
    turn = ordinary(one, third, other)

    closing = "rejected before execution: calls of one reply have the same id, ‹dup›, so none of the reply was run"
    assert due(turn) == tuple(Close(called, REFUSED, closing) for called in (one, third, other))
    follow(
        turn,
        (Settled("book", REFUSED), "close look refused; close tell refused"),
        (Settled("look", REFUSED), "close tell refused"),
        (Settled("tell", REFUSED), "end failed"),
    )


def test_an_id_that_comes_again_in_a_later_reply_is_no_repeat() -> None:
    """H13, F14: our refs tell the calls apart."""
    follow(
        ordinary(call("T1.1.1", provider_id="x"), steps_left=3),
        (Sent("T1.1.1"), ""),
        (Settled("T1.1.1", FAILED), ""),
        (Proceed(), "call model"),
        (Replied((call("T1.2.1", provider_id="x"),)), "send T1.2.1"),
    )


def test_calls_without_an_id_are_not_taken_for_one() -> None:
    follow(ordinary(BOOK, TELL), (Sent("book"), ""), (Settled("book", OK), "send tell"))


@pytest.mark.parametrize(("count", "refused"), [(CALLS_PER_REPLY_MAX, False), (CALLS_PER_REPLY_MAX + 1, True)])
def test_a_reply_of_too_many_calls_is_refused_whole(count: int, refused: bool) -> None:
    calls = tuple(call(f"c{n}") for n in range(count))
    effects = due(ordinary(*calls))

    if refused:
        why = f"more than {CALLS_PER_REPLY_MAX} calls in one reply, so none of them was run"
        assert effects == tuple(Close(called, REFUSED, why) for called in calls)
    else:
        assert effects == (Send(calls[0], apart=False),)


# --- the limit of model calls ------------------------------------------------


def test_a_turn_whose_model_calls_are_spent_fails_at_its_next_boundary() -> None:
    last = follow(ordinary(LOOK, steps_left=1), (Begun("look"), ""), (Settled("look", OK), "end failed"))

    assert due(last) == (End(Ending.FAILED, "no model calls are left to this turn"),)
    follow(ordinary(steps_left=1), (Proceed(), "call model"), (Replied(()), "end done"))
    assert [*map(said, due(ordinary(steps_left=0)))] == ["end failed"]


# --- the turn of a consent (B10) ---------------------------------------------


@pytest.mark.rule("B10")
def test_an_approved_turn_runs_its_steps_in_order_and_ends_without_the_model() -> None:
    turn = follow(
        approved(),
        (StepsFixed((BOOK, PAY, LOOK)), "send book"),
        (Sent("book"), ""),
        (Settled("book", OK), "intend pay"),
        (Intended("pay"), "send pay apart"),
        (Sent("pay"), ""),
        (Settled("pay", OK), "run look"),
        (Begun("look"), ""),
        (Settled("look", OK), "end done"),
        (Ended(Ending.DONE), ""),
    )

    assert turn.replies == 0


@pytest.mark.rule("B10")
@pytest.mark.parametrize("event", [Proceed(), Replied(()), Replied((BOOK,))], ids=["proceed", "words", "calls"])
def test_an_approved_turn_takes_no_word_of_the_model(event: Event) -> None:
    for turn in (approved(), approved(BOOK)):
        with pytest.raises(OutOfOrder):
            advance(turn, event)
    assert due(approved()) == ()


def test_parallel_safe_steps_of_a_consent_run_in_order_too() -> None:
    follow(approved(LOOK_1, LOOK_2), (Begun("look1"), ""), (Settled("look1", OK), "run look2"))


@pytest.mark.rule("B15")
@pytest.mark.parametrize(("outcome", "reason"), [(FAILED, "book: failed"), (UNKNOWN, "book: unknown")])
def test_an_approved_turn_whose_step_did_not_succeed_ends_failed_and_names_it(outcome: Outcome, reason: str) -> None:
    turn = follow(
        approved(BOOK, TELL),
        (Sent("book"), ""),
        (Settled("book", outcome), "close tell not_started"),
        (Settled("tell", NOT_STARTED), "end failed"),
    )

    assert due(turn) == (End(Ending.FAILED, reason),)


def test_the_turn_after_an_answer_goes_on_with_the_model() -> None:
    goes_on = start("T3", TurnStartBody(origin(RESTAURANT), 4, continues="T1", consent="A1"))

    follow(goes_on, (Proceed(), "call model"), (Replied((BOOK,)), "send book"))


# --- after a crash, and after an attempt that was given up (D5) --------------


@pytest.mark.rule("D5")
def test_an_attempt_that_was_given_up_is_settled_and_each_one_counts() -> None:
    follow(
        ordinary(BOOK, TELL),
        (Sent("book"), ""),
        (GaveUp("book"), "settle book after 1"),
        (Sent("book"), ""),
        (GaveUp("book"), "settle book after 2"),
        (GaveUp("book"), "settle book after 2"),
        (Settled("book", OK), "send tell"),
    )


@pytest.mark.rule("D5")
def test_an_unknown_operation_can_be_looked_up_which_is_no_attempt() -> None:
    unknown = follow(
        ordinary(PAY), (Intended("pay"), "send pay apart"), (Sent("pay"), ""), (GaveUp("pay"), "settle pay after 1")
    )
    asked = follow(unknown, (Begun("pay"), ""))

    follow(asked, (Settled("pay", OK), ""), (Proceed(), "call model"))
    follow(asked, (GaveUp("pay"), "settle pay after 1"))
    follow(asked, (Resumed(), "settle pay after 1"))


@pytest.mark.rule("D5")
def test_after_a_crash_what_was_sent_is_settled_what_was_stored_is_sent_and_a_read_is_due_again() -> None:
    follow(ordinary(BOOK), (Sent("book"), ""), (Resumed(), "settle book after 1"))
    follow(ordinary(PAY), (Intended("pay"), "send pay apart"), (Resumed(), "send pay apart"))
    follow(ordinary(PAY), (Intended("pay"), "send pay apart"), (Sent("pay"), ""), (Resumed(), "settle pay after 1"))
    follow(ordinary(LOOK), (Begun("look"), ""), (Resumed(), "run look"))
    follow(ordinary(BOOK), (Resumed(), "send book"))
    follow(ordinary(PAY), (Resumed(), "intend pay"))
    follow(ordinary(GUARDED), (Resumed(), "ask guarded"), (Asked("A1"), "close guarded waiting"))
    follow(ordinary(GUARDED), (Asked("A1"), "close guarded waiting"), (Resumed(), "close guarded waiting"))
    follow(approved(BOOK), (Sent("book"), ""), (Resumed(), "settle book after 1"))


def test_after_a_crash_the_model_is_asked_again() -> None:
    follow(ordinary(), (Proceed(), "call model"), (Resumed(), ""), (Proceed(), "call model"))
    follow(ordinary(BOOK), (Sent("book"), ""), (Settled("book", OK), ""), (Resumed(), ""), (Proceed(), "call model"))


def test_after_a_crash_only_what_was_out_of_a_group_is_due_again() -> None:
    out = follow(ordinary(LOOK_1, LOOK_2), (Begun("look1"), "run look2"), (Begun("look2"), ""))

    follow(out, (Settled("look1", OK), ""), (Resumed(), "run look2"), (Begun("look2"), ""), (Settled("look2", OK), ""))


# --- a pause -----------------------------------------------------------------


@pytest.mark.rule("C2", "K23")
def test_a_paused_turn_begins_nothing_until_its_own_question_is_settled() -> None:
    planned = reached(ordinary(BOOK, PAY), Sent("book"), Settled("book", OK))
    follow(
        planned,
        (Paused("A1"), ""),
        (Unpaused("A2"), ""),
        (Resumed(), ""),
        (Unpaused("A1"), "intend pay"),
    )
    follow(ordinary(), (Paused("A1"), ""), (Unpaused("A1"), ""), (Proceed(), "call model"))


@pytest.mark.rule("K23", "K24")
def test_a_paused_turn_that_is_stopped_ends() -> None:
    follow(ordinary(), (Paused("A1"), ""), (Stopped("alice stopped it"), "end cancelled"))


# --- events that cannot happen -----------------------------------------------

ABOUT_A_CALL = (Intended("book"), Sent("book"), Begun("book"), GaveUp("book"), Settled("book", OK))
PLAN = (Proceed(), Replied((BOOK, TELL)))
#: the turn, what happened to it, and what can't happen then
IMPOSSIBLE: dict[str, tuple[Callable[[], Turn], tuple[Event, ...], tuple[Event, ...]]] = {
    "at a boundary": (ordinary, (), (ModelFailed("x"), StepsFixed((BOOK,)), Asked("A1"), *ABOUT_A_CALL)),
    "while thinking": (ordinary, (Proceed(),), (Proceed(), StepsFixed((BOOK,)), Asked("A1"), *ABOUT_A_CALL)),
    "while acting": (
        ordinary,
        PLAN,
        (Proceed(), Replied(()), Replied((BOOK,)), ModelFailed("x"), StepsFixed((BOOK,)), GaveUp("book")),
    ),
    "for a call that is out": (ordinary, (*PLAN, Sent("book")), (Intended("book"), Begun("book"))),
    "for a call that is stored": (
        ordinary,
        (Proceed(), Replied((PAY,)), Intended("pay")),
        (Intended("pay"), Begun("pay"), GaveUp("pay")),
    ),
    "for a call that was given up": (ordinary, (*PLAN, Sent("book"), GaveUp("book")), (Intended("book"),)),
    "for a call with a result": (ordinary, (*PLAN, Sent("book"), Settled("book", OK)), ABOUT_A_CALL),
    "for a call of no plan": (ordinary, (Proceed(), Replied((TELL,))), ABOUT_A_CALL),
    "while it is paused": (
        ordinary,
        (Paused("A1"),),
        (Proceed(), Paused("A2"), Joined(), ModelFailed("x"), Asked("A1"), *ABOUT_A_CALL),
    ),
    "for a turn with something out": (ordinary, (*PLAN, Sent("book")), (Paused("A1"), Joined())),
    "for a turn whose model is out": (ordinary, (Proceed(),), (Paused("A1"), Joined())),
    "for a turn that runs the steps of a yes": (approved, (StepsFixed((BOOK, TELL)),), (Paused("A1"), Joined())),
    "after the question": (
        ordinary,
        (Proceed(), Replied((GUARDED,)), Asked("A1")),
        (Asked("A1"), Asked("A2"), Proceed(), Replied(())),
    ),
    "after the end": (
        ordinary,
        (Ended(Ending.DONE),),
        (
            *(Proceed(), Replied(()), Replied((BOOK,)), ModelFailed("x"), StepsFixed((BOOK,)), Asked("A1")),
            *(Ended(Ending.DONE), Ended(Ending.CANCELLED), *ABOUT_A_CALL),
        ),
    ),
    "before an approved turn's steps": (
        approved,
        (),
        (Proceed(), Replied(()), Replied((BOOK,)), ModelFailed("x"), Asked("A1"), *ABOUT_A_CALL),
    ),
    "in an approved turn": (
        approved,
        (StepsFixed((BOOK,)),),
        (Proceed(), Replied(()), StepsFixed((BOOK,)), ModelFailed("x")),
    ),
}


@pytest.mark.parametrize("when", IMPOSSIBLE)
def test_what_cannot_happen_is_an_error_and_changes_nothing(when: str) -> None:
    begin, happened, impossible = IMPOSSIBLE[when]
    turn = reached(begin(), *happened)
    before = repr(turn)

    for event in impossible:
        with pytest.raises(OutOfOrder):
            advance(turn, event)
    assert repr(turn) == before


names = st.sampled_from(("book", "pay", "look", "guarded", "nobody"))
calls_of_a_reply = st.lists(
    st.sampled_from((BOOK, PAY, LOOK, GUARDED, BARRED)), max_size=5, unique_by=lambda c: c.call
).map(tuple)
events = st.one_of(
    st.builds(Proceed),
    st.builds(Replied, calls_of_a_reply),
    st.builds(ModelFailed, st.just("x")),
    st.builds(StepsFixed, calls_of_a_reply),
    *(st.builds(kind, names) for kind in (Intended, Sent, Begun, GaveUp)),
    st.builds(Settled, names.filter(lambda name: name != "guarded"), st.sampled_from(Outcome)),
    st.builds(Settled, st.just("guarded"), st.sampled_from((WAITING, REFUSED, NOT_STARTED))),
    st.builds(Asked, st.just("A1")),
    st.builds(Ended, st.sampled_from(Ending)),
    st.builds(Resumed),
)


@given(st.sampled_from((ordinary, approved)), st.sampled_from(((), PLAN)), st.lists(events, max_size=20))
def test_the_machine_takes_any_event_or_says_that_it_is_out_of_order(
    begin: Callable[[], Turn], first: tuple[Event, ...], told: list[Event]
) -> None:
    turn = begin()
    for event in (*first, *told):
        before = repr(turn)
        with suppress(OutOfOrder):
            after, effects = advance(turn, event)
            assert effects == ((CallModel(),) if isinstance(event, Proceed) else due(after))
            assert repr(turn) == before
            turn = after
        due(turn)  # says what to do in any state that was reached


# --- whole turns -------------------------------------------------------------


@dataclass(slots=True)
class Play:
    """Plays a turn as the driver does: the first thing due is done, and when nothing is due something that is
    out comes back. What the model plans and what comes back is drawn."""

    data: st.DataObject
    #: how often the process dies between two things
    crashes: int = 0
    turn: Turn = field(default_factory=lambda: ordinary(steps_left=2))
    rows: list[Row] = field(default_factory=list)
    #: the turn as it was after each row
    live: list[Turn] = field(default_factory=list)
    #: calls that are out, and "the model"
    out: set[str] = field(default_factory=set)
    looked_up: set[str] = field(default_factory=set)
    modelled: int = 0

    def record(self, body: Body) -> None:
        """Store a row, and tell the machine."""
        self.rows.append(row(body, seq=len(self.rows) + 1, turn=self.turn.id))
        event = event_of(self.rows[-1])
        if event is not None:
            self.turn, _ = advance(self.turn, event)
        self.live.append(self.turn)

    def to_the_end(self) -> None:
        for _ in range(400):
            if self.turn.phase is Phase.ENDED:
                return
            if self.crashes and self.data.draw(st.integers(0, 4)) == 0:
                self.crash()
            effects = due(self.turn)
            if effects:
                self.perform(effects[0])
            elif self.turn.phase is Phase.BOUNDARY:
                self.turn, effects = advance(self.turn, Proceed())
                assert effects == (CallModel(),)
                self.out.add("the model")
            else:
                self.come_back(self.data.draw(st.sampled_from(sorted(self.out))))
        raise AssertionError("the turn does not end")

    def crash(self) -> None:
        """Lose everything but the rows; what was out is stored as given up, as the next owner does."""
        self.crashes -= 1
        self.out.clear()
        self.turn = fold(self.turn.id, tuple(self.rows))
        for p in self.turn.plan:
            if p.state is CallState.SENT and self.data.draw(st.booleans()):
                self.record(ToolUnknownBody(p.called.call, p.called.call, p.called.tool, "the process ended"))
        self.turn, _ = advance(self.turn, Resumed())

    def perform(self, what: Due) -> None:
        match what:
            case CallModel():
                raise AssertionError("due only when a boundary is left")
            case Intend(called):
                self.record(ToolIntendedBody(called.call, called.call, called.tool, "key", "digest"))
            case Send(called):
                self.send(called)
            case Run(called):
                self.turn, _ = advance(self.turn, Begun(called.call))
                self.out.add(called.call)
            case Settle(called, attempts):
                self.settle(called, attempts)
            case Close(called, outcome):
                self.result(called.call, outcome)
            case Ask():
                self.record(TurnAskBody(consent()))
            case End(ending, reason):
                self.record(TurnEndBody(ending, reason, self.turn.steps_left))

    def settle(self, called: Called, attempts: int) -> None:
        has_lookup = called.call not in self.looked_up and self.data.draw(st.booleans())
        match settlement(has_lookup=has_lookup, recognised=called.keyed, attempts=attempts, attempts_max=3):
            case Settlement.LOOK_UP:
                self.looked_up.add(called.call)
                self.turn, _ = advance(self.turn, Begun(called.call))
                self.out.add(called.call)
            case Settlement.RESEND:
                self.send(called)
            case Settlement.TELL:
                self.result(called.call, UNKNOWN)

    def model(self) -> None:
        self.modelled += 1
        number = self.turn.replies + 1
        kinds = self.data.draw(st.lists(st.sampled_from(KINDS), max_size=4))
        calls = tuple(kind(f"{self.turn.id}.{number}.{place}") for place, kind in enumerate(kinds, 1))
        if calls:
            self.record(ModelCalledBody(number, calls))
        elif self.data.draw(st.booleans()):
            self.record(ModelSaidBody(number, ()))
        else:
            self.turn, _ = advance(self.turn, ModelFailed("no answer"))

    def send(self, called: Called) -> None:
        attempt = self.turn.find(called.call).attempts + 1
        self.record(ToolSentBody(called.call, called.call, called.tool, "key", "digest", attempt))
        self.out.add(called.call)

    def come_back(self, ref: str) -> None:
        self.out.remove(ref)
        if ref == "the model":
            self.model()
            return
        called = self.turn.find(ref).called
        came = self.data.draw(st.sampled_from((OK, OK, FAILED, UNKNOWN)))
        if came is UNKNOWN and called.is_operation:
            self.record(ToolUnknownBody(ref, ref, called.tool, "no answer came"))
        else:
            self.result(ref, FAILED if came is UNKNOWN else came)

    def result(self, ref: str, outcome: Outcome) -> None:
        if self.data.draw(st.booleans()):  # rows beside the machine change nothing
            self.record(NoticeBody((Part("a notice", "runtime", RUNTIME),)))
        self.record(ToolResultBody(ref, "tool", outcome, ()))

    # what must hold afterwards

    @property
    def planned(self) -> list[tuple[Called, ...]]:
        return [r.body.calls for r in self.rows if isinstance(r.body, ModelCalledBody | TurnStepsBody)]

    @property
    def outcomes(self) -> dict[str, Outcome]:
        return {r.body.call: r.body.outcome for r in self.rows if isinstance(r.body, ToolResultBody)}

    def check(self) -> None:
        """Each call has one result; nothing runs that may not; nothing runs after a failure; the end is the end."""
        every = [called.call for calls in self.planned for called in calls]
        results = [r.body.call for r in self.rows if isinstance(r.body, ToolResultBody)]
        assert Counter(results) == Counter(every)
        assert due(self.turn) == ()
        assert [r.seq for r in self.rows if isinstance(r.body, TurnEndBody)] == [len(self.rows)]
        for calls in self.planned:
            self.check_plan(calls)
        asked = [r for r in self.rows if isinstance(r.body, TurnAskBody)]
        assert len(asked) == (self.turn.ending is Ending.ASKED)
        assert all(
            not isinstance(r.body, ToolSentBody | ToolIntendedBody) or r.seq < a.seq for r in self.rows for a in asked
        )

    def check_plan(self, calls: tuple[Called, ...]) -> None:
        sent = Counter(r.body.call for r in self.rows if isinstance(r.body, ToolSentBody))
        for place, called in enumerate(calls):
            if called.verdict is not Verdict.RUN:
                assert sent[called.call] == 0
                assert self.outcomes[called.call] in (WAITING, REFUSED, NOT_STARTED)
            if not called.is_operation:
                assert sent[called.call] == 0
            if not called.keyed:
                assert sent[called.call] <= 1
            if sent[called.call]:
                assert all(self.outcomes[before.call] is OK for before in calls[:place])


KINDS: tuple[Callable[[str], Called], ...] = (
    lambda ref: call(ref),
    lambda ref: call(ref, effect=Effect.PAY, keyed=False),
    lambda ref: call(ref, effect=Effect.READ),
    lambda ref: call(ref, effect=Effect.READ, parallel_safe=True),
    lambda ref: call(ref, Verdict.ASK),
    lambda ref: call(ref, Verdict.ASK, approvers=("role:operator",)),
    lambda ref: call(ref, Verdict.DENY),
    lambda ref: call(ref, provider_id="same"),
)


def begun(data: st.DataObject, *, crashes: int) -> Play:
    """A turn of the restaurant's at its first boundary."""
    play = Play(data, crashes)
    play.record(TurnStartBody(origin(RESTAURANT), 2))
    return play


def begun_with_steps(data: st.DataObject, *, crashes: int) -> Play:
    """An approved turn with its steps fixed: calls that run, of every kind."""
    kinds = data.draw(st.lists(st.sampled_from(KINDS[:4]), min_size=1, max_size=5))
    calls = tuple(kind(f"T2.0.{place}") for place, kind in enumerate(kinds, 1))
    play = Play(data, crashes, turn=approved())
    play.record(TurnStartBody(origin(ALICE), 0, consent="A1"))
    play.record(TurnStepsBody("A1", calls))
    return play


@pytest.mark.rule("K15")
@given(st.data())
def test_every_turn_ends_and_every_call_of_it_has_exactly_one_result(data: st.DataObject) -> None:
    play = begun(data, crashes=0)

    play.to_the_end()

    play.check()


@pytest.mark.rule("D5")
@given(st.data())
def test_every_turn_ends_with_one_result_a_call_however_often_its_process_dies(data: st.DataObject) -> None:
    play = begun(data, crashes=6)

    play.to_the_end()

    play.check()


@pytest.mark.rule("B10", "B15")
@given(st.data())
def test_an_approved_turn_runs_its_steps_and_never_calls_the_model_however_often_its_process_dies(
    data: st.DataObject,
) -> None:
    play = begun_with_steps(data, crashes=4)

    play.to_the_end()

    play.check()
    assert play.modelled == 0
    succeeded = all(outcome is OK for outcome in play.outcomes.values())
    assert play.turn.ending is (Ending.DONE if succeeded else Ending.FAILED)


@given(st.data(), st.sampled_from((begun, begun_with_steps)))
def test_after_each_row_the_fold_of_the_rows_is_the_turn_that_was_live(
    data: st.DataObject, begin: Callable[..., Play]
) -> None:
    """Nothing else holds turn state: the next owner sees what this one saw, less what was out."""
    play = begin(data, crashes=0)
    play.to_the_end()

    for length, live in enumerate(play.live, 1):
        folded = fold(play.turn.id, tuple(play.rows[:length]))
        # why the model failed is held only until the row that ends the turn says it
        assert advance(folded, Resumed()) == advance(replace(live, failure=""), Resumed())


@pytest.mark.parametrize(
    "bodies",
    [
        (),
        (ModelSaidBody(1, ()),),
        (TurnStartBody(origin(ALICE), 4), ToolSentBody("x", "x", "t", "k", "d", 1)),
        (TurnStartBody(origin(ALICE), 4), ModelSaidBody(1, ()), TurnEndBody(Ending.DONE), ModelSaidBody(2, ())),
    ],
    ids=["no rows", "no start", "a call of no plan", "after the end"],
)
def test_rows_that_are_no_turn_from_its_start_are_not_folded(bodies: tuple[Body, ...]) -> None:
    with pytest.raises(OutOfOrder):
        fold("T1", tuple(row(body, seq=seq) for seq, body in enumerate(bodies, 1)))


# --- what stands before a failed step, and what stands after it (K15, K19) -------------


@pytest.mark.rule("K15", "K19")
def test_a_refused_call_after_the_guarded_one_stops_what_follows_it_and_not_the_question() -> None:
    denied = call("denied", Verdict.DENY)
    turn = ordinary(GUARDED, denied, BOOK)

    follow(
        turn,
        (Settled("denied", REFUSED), "close book not_started"),
        (Settled("book", Outcome.NOT_STARTED), "ask guarded"),
    )


@pytest.mark.rule("K15", "K19")
def test_a_read_that_failed_beside_the_question_does_not_withdraw_it() -> None:
    turn = follow(ordinary(GUARDED, LOOK_1), (Begun("look1"), ""))

    follow(turn, (Settled("look1", FAILED), "ask guarded"))


@pytest.mark.rule("K15", "K11")
def test_what_waits_for_other_people_is_not_fixed_nor_is_anything_after_it() -> None:
    other = replace(call("other", Verdict.ASK), approvers=("role:operator",))
    turn = ordinary(GUARDED, other, BOOK)

    follow(
        turn,
        (Settled("other", Outcome.NOT_STARTED), "close book not_started"),
        (Settled("book", Outcome.NOT_STARTED), "ask guarded"),
    )


@pytest.mark.parametrize(
    ("calls", "event"),
    [
        ((BOOK,), Settled("book", OK)),
        ((BOOK,), Begun("book")),
        ((BOOK,), Intended("book")),
        ((LOOK_1,), Sent("look1")),
        ((GUARDED,), Sent("guarded")),
        ((BOOK,), Asked("A1")),
    ],
    ids=["answered", "begun", "intended", "read sent", "fixed sent", "asked"],
)
def test_nothing_happens_to_a_call_that_its_kind_and_state_do_not_allow(
    calls: tuple[Called, ...], event: Event
) -> None:
    """An operation never goes out without a row, and never has an answer before it went out (D1)."""
    with pytest.raises(OutOfOrder):
        advance(ordinary(*calls), event)


# --- what joins ----------------------------------------------------------------


@pytest.mark.rule("C2", "H29")
def test_input_joins_after_the_last_result_and_the_model_is_asked_once_as_before() -> None:
    turn = follow(
        ordinary(BOOK, TELL),
        (Sent("book"), ""),
        (Settled("book", OK), "send tell"),
        (Sent("tell"), ""),
        (Settled("tell", OK), ""),
        (Joined(), ""),
        (Joined(), ""),
        (Proceed(), "call model"),
        (Replied(()), "end done"),
    )

    assert turn.steps_left == 6


@pytest.mark.rule("C2", "H31")
def test_input_that_joins_when_the_model_has_said_something_has_it_asked_again() -> None:
    turn = follow(
        ordinary(),
        (Proceed(), "call model"),
        (Replied(()), "end done"),
        (Joined(), ""),
        (Proceed(), "call model"),
        (Replied(()), "end done"),
        (Ended(Ending.DONE), ""),
    )

    assert turn.replies == 2


@pytest.mark.rule("C2")
@pytest.mark.parametrize(
    "turn",
    [
        reached(ordinary(), Proceed()),
        ordinary(BOOK),
        reached(ordinary(BOOK), Sent("book")),
        reached(ordinary(BOOK), Sent("book"), GaveUp("book")),
        reached(ordinary(BOOK, TELL), Sent("book"), Settled("book", OK)),
        ordinary(GUARDED),
        reached(ordinary(GUARDED), Asked("A1")),
        reached(ordinary(GUARDED), Asked("A1"), Settled("guarded", WAITING)),
        approved(),
        approved(BOOK),
        reached(approved(BOOK), Sent("book"), Settled("book", OK)),
        ordinary(steps_left=0),
        reached(ordinary(steps_left=1), Proceed(), Replied(())),
        reached(ordinary(), Proceed(), ModelFailed("no answer")),
        reached(ordinary(), Ended(Ending.DONE)),
    ],
    ids=str,
)
def test_nothing_joins_while_something_is_half_done_or_where_the_model_is_not_asked_again(turn: Turn) -> None:
    with pytest.raises(OutOfOrder):
        advance(turn, Joined())


@pytest.mark.rule("C2")
def test_a_turn_that_something_joined_is_folded_as_it_was() -> None:
    """Its rows alone say so: the input's row is of the turn; the one that started it belongs to none."""
    bodies: list[Body] = [
        TurnStartBody(origin(ALICE), 8),
        ModelSaidBody(1, ()),
        heard(InputKind.MESSAGE, ALICE, "and then?", n=2),
    ]
    folded = fold("T1", tuple(row(body, turn="T1") for body in bodies))

    assert folded == reached(start("T1", TurnStartBody(origin(ALICE), 8)), Proceed(), Replied(()), Joined())
