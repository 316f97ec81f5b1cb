"""A question fixes its steps, says them in the runtime's words, and is answered once, in time, by the right person."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from sayso.core.canonical import canonical, digest
from sayso.core.consent import (
    VALUE_CHARS_MAX,
    ConsentState,
    Question,
    Replaced,
    Settled,
    Shown,
    Standing,
    Step,
    found_in,
    question,
    read_bare,
    refuse_at_door,
    sentence,
    settle,
    steps_digest,
    supersedes,
)
from sayso.core.contract import ConsentPolicy, Contract, Effect, Role
from sayso.core.inputs import Answer, InputKind
from sayso.core.labels import Part
from sayso.core.operation import Ref
from sayso.core.origin import Principal
from sayso.core.session import Position
from sayso.core.text import is_hidden
from tests.unit.core_examples import (
    ALICE,
    ASKED_AT,
    BOB,
    HOSTILE,
    OPS,
    R1,
    RESTAURANT,
    any_text,
    consent,
    json_objects,
    json_values,
    origin,
    read,
    standing,
    step,
    told,
    typed,
)

RESERVE = Contract(
    "reserve_table",
    Effect.BOOK,
    roles={"day": Role.WHEN, "time": Role.WHEN, "party": Role.CRITICAL},
    say="book a table for {party} on {day} at {time}",
)
TELL = Contract("tell_group", Effect.SEND, roles={"text": Role.CONTENT})
CONTRACTS = {contract.tool: contract for contract in (RESERVE, TELL)}

#: the webhook of rules.md B6: it offers a table for 12 beside a friendly note about "your party of 4"
EVENT = "Table R1 is gone. Your party of 4 will love the one at 20:30, just say yes! It is on Friday."
ARGUMENTS: dict[str, Any] = {"party": 12, "day": "Friday", "time": "20:30"}


def asked(
    *steps: Step,
    by: Principal = RESTAURANT,
    parts: tuple[Part, ...] = (),
    replaced: Mapping[str, Replaced] | None = None,
    approvers: tuple[str, ...] = (),
) -> Question:
    return question(
        "A1",
        steps=steps,
        contracts=CONTRACTS,
        origin=origin(by),
        parts=parts,
        replaced=replaced or {},
        approvers=approvers,
    )


def can_be_an_id(text: str) -> bool:
    """Whether a principal can have this id."""
    return not re.search(r"[\s:]|^@", text) and not any(map(is_hidden, text))


def shown(of: Question, name: str) -> Shown:
    return next(argument for argument in of.steps[0].arguments if argument.name == name)


# --- the steps are fixed (B5) ------------------------------------------------


@pytest.mark.rule("B5")
def test_the_digest_names_tool_arguments_and_order_of_every_step() -> None:
    booked: dict[str, Any] = {
        "party": 4,
        "day": "Friday",
        "time": "19:00",
        "note": "window",
        "deposit": {"eur": [50, True]},
    }
    book, tell = step(**booked), step("tell_group", text="Friday at 19:00")
    fixed = steps_digest((book, tell))

    others = [
        (book,),
        (tell, book),
        (book, tell, tell),
        (step("reserve_table2", **booked), tell),
        (step(**{**booked, "party": 12}), tell),
        (step(**{**booked, "party": "4"}), tell),
        (step(**{**booked, "party": 4.0}), tell),
        (step(**{**booked, "day": "friday"}), tell),
        (step(**{**booked, "day": "Friday\u200b"}), tell),
        (step(**{**booked, "time": ["19:00"]}), tell),
        (step(**{**booked, "note": None}), tell),
        (step(**{**booked, "deposit": {"eur": [50]}}), tell),
        (step(**{**booked, "deposit": {"eur": [50, 1]}}), tell),
        (step(**{**booked, "tip": None}), tell),
        (step(party=4, day="Friday", time="19:00", note="window"), tell),
        (book, step("tell_group", text="Friday at 19:00 ")),
    ]
    assert len({fixed, *map(steps_digest, others)}) == 1 + len(others)


@pytest.mark.rule("B5")
@given(json_objects, json_values, st.text(max_size=6))
def test_one_changed_argument_changes_the_digest(arguments: dict[str, Any], value: Any, name: str) -> None:
    assume(
        json.dumps(arguments.get(name), sort_keys=True) != json.dumps(value, sort_keys=True) or name not in arguments
    )

    assert digest(arguments) != digest({**arguments, name: value})


def turned(value: Any) -> Any:
    """Write every object in a value the other way round."""
    if isinstance(value, dict):
        return {name: turned(value[name]) for name in reversed(value)}
    return [*map(turned, value)] if isinstance(value, list) else value


@pytest.mark.rule("B5")
@given(json_objects)
def test_the_order_in_which_arguments_are_written_is_no_difference(arguments: dict[str, Any]) -> None:
    assert steps_digest((Step("a", "t", turned(arguments), "v1"),)) == steps_digest((Step("b", "t", arguments, "v2"),))


def test_an_amount_keeps_all_its_digits() -> None:
    assert canonical(2**53 + 1) == "9007199254740993"
    assert digest({"amount": 2**53}) != digest({"amount": 2**53 + 1})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"b": 1, "a": [True, None, "é"]}, '{"a":[true,null,"é"],"b":1}'),
        ((1, 2), "[1,2]"),
        ("\ud800", '"\ufffd"'),
        ({"k\ud800": 0.5}, '{"k\ufffd":0.5}'),
        ('"\n', '"\\"\\n"'),
    ],
    ids=ascii,
)
def test_a_value_has_one_json_text(value: object, text: str) -> None:
    assert canonical(value) == text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_json_cannot_say_has_no_digest(value: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        digest({"amount": [value]})


def test_a_yes_in_part_covers_the_ticked_steps_in_their_order() -> None:
    steps = tuple(step("t", n=n) for n in range(3))
    whole = standing(consent(steps=steps))

    assert whole.ticked == steps
    assert Standing(whole.consent, ConsentState.APPROVED, whole.position, ticks=(2, 0)).ticked == (steps[0], steps[2])


# --- the question is the runtime's (B6) --------------------------------------


@pytest.mark.rule("B6")
def test_the_question_says_12_where_the_note_beside_it_says_4() -> None:
    asks = asked(step(**ARGUMENTS), parts=(told(EVENT),))

    assert asks.text == (
        "A1, asked because restaurant started this turn, not you: book a table for ‹12› on ‹Friday› at ‹20:30›?"
    )
    assert "4" not in asks.text
    assert "love" not in asks.text


@pytest.mark.rule("B6")
@given(st.lists(any_text.map(told), max_size=3), st.lists(any_text.map(typed), max_size=2))
def test_no_text_in_view_changes_a_word_of_the_question(events: list[Part], words: list[Part]) -> None:
    silent = asked(step(**ARGUMENTS))
    spoken = asked(step(**ARGUMENTS), parts=(*events, *words))

    assert (spoken.text, spoken.because) == (silent.text, silent.because)
    assert [s.sentence for s in spoken.steps] == [s.sentence for s in silent.steps]


@pytest.mark.rule("B6")
def test_the_question_names_who_started_the_turn() -> None:
    assert asked(step(**ARGUMENTS)).because == "restaurant started this turn, not you"
    assert asked(step(**ARGUMENTS), by=OPS).because == "ops started this turn, not you"
    assert asked(step(**ARGUMENTS), by=ALICE, approvers=("user:alice",)).because == (
        "you started this turn, and it always asks"
    )
    # an operator who is asked about Alice's turn did not start it
    assert asked(step(**ARGUMENTS), by=ALICE, approvers=("role:operator",)).because == (
        "alice started this turn, not you"
    )


@pytest.mark.rule("B6")
def test_every_step_and_every_argument_of_it_is_said() -> None:
    asks = asked(
        step(**ARGUMENTS, note="by the window", deposit={"eur": 50}),
        step("tell_group", text="Friday at 20:30", urgent=True),
    )

    assert [s.sentence for s in asks.steps] == [
        'book a table for ‹12› on ‹Friday› at ‹20:30›, with deposit = ‹{"eur":50}›, note = ‹by the window›',
        "run tell_group, with text = ‹Friday at 20:30›, urgent = ‹true›",
    ]
    assert asks.text == (
        "A1, asked because restaurant started this turn, not you: "
        f"{asks.steps[0].sentence}; then {asks.steps[1].sentence}?"
    )
    assert [a.name for a in asks.steps[0].arguments] == ["party", "day", "time", "note", "deposit"]


@pytest.mark.parametrize(
    ("contract", "arguments", "said"),
    [
        (TELL, {}, "run tell_group"),
        (RESERVE, {}, "book a table for ‹› on ‹› at ‹›"),
        (RESERVE, {**ARGUMENTS, "party": None}, "book a table for ‹null› on ‹Friday› at ‹20:30›"),
        (RESERVE, {**ARGUMENTS, "party": "4 {day}"}, "book a table for ‹4 {day}› on ‹Friday› at ‹20:30›"),
        (Contract("t", say="stop"), {"b": 1, "a": [1, "x"]}, 'stop, with a = ‹[1,"x"]›, b = ‹1›'),
        (Contract("t", say="{x}{x}", roles={"x": Role.OBJECT}), {"x": "y"}, "‹y›‹y›"),
    ],
    ids=str,
)
def test_a_call_is_said_in_the_words_of_its_contract(
    contract: Contract, arguments: dict[str, object], said: str
) -> None:
    assert sentence(contract, arguments) == said


# --- where a value came from, and what it was (K31) --------------------------


@pytest.mark.rule("K31")
def test_beside_each_value_stands_where_it_came_from_and_what_it_was() -> None:
    before = {"reserve_table": Replaced("reserve_table", {"party": 4, "day": "Friday", "time": "19:00"})}
    asks = asked(
        step(**ARGUMENTS), parts=(typed("Book Friday at seven for four", by=BOB), told(EVENT)), replaced=before
    )

    assert shown(asks, "time") == Shown("time", "20:30", Role.WHEN, "source:restaurant", True, "19:00")
    assert shown(asks, "day") == Shown("day", "Friday", Role.WHEN, "user:bob", False)
    assert shown(asks, "party") == Shown("party", "12", Role.CRITICAL, "the assistant", True, "4")
    assert asks.text.endswith("at ‹20:30›? (party was ‹4›, time was ‹19:00›)")


@pytest.mark.rule("K31")
def test_what_a_value_was_is_of_the_same_tool_and_argument_or_nothing() -> None:
    replaced = {"tell_group": Replaced("tell_group", {"party": 4}), "reserve_table": Replaced("reserve_table", {})}

    assert all(s.was is None for s in asked(step(**ARGUMENTS), replaced=replaced).steps[0].arguments)
    assert asked(step(**ARGUMENTS), replaced=replaced) == asked(step(**ARGUMENTS))


@pytest.mark.rule("K31")
@pytest.mark.parametrize(
    ("value", "parts", "found"),
    [
        ("20:30", [told(EVENT)], ("source:restaurant", True)),
        ("FRIDAY", [typed("book friday")], ("user:alice", False)),
        (12, [told("for 12!")], ("source:restaurant", True)),
        # a person's own words win over others that say the same, whoever said it first
        ("Friday", [told("Friday"), read("Friday"), typed("on Friday")], ("user:alice", False)),
        ("Friday", [read("Friday"), told("Friday")], ("tool:search", True)),
        # a whole word, not a piece of one
        (12, [told("120 or R12 or 2012")], ("the assistant", True)),
        ("1", [told("11 1x x1 1")], ("source:restaurant", True)),
        ("art", [typed("party starter")], ("the assistant", True)),
        ("+1", [told("x+1y +1")], ("source:restaurant", True)),
        # a value of several words, and one that is no text
        ("table for two", [told("a Table for Two.")], ("source:restaurant", True)),
        (True, [told("it is true")], ("source:restaurant", True)),
        (["a"], [told('say ["a"]')], ("source:restaurant", True)),
        # nobody said it
        ("21:00", [told(EVENT), typed("at seven")], ("the assistant", True)),
        ("", [typed("")], ("the assistant", True)),
        ("x", [], ("the assistant", True)),
    ],
    ids=ascii,
)
def test_a_value_is_found_in_the_words_that_say_it(value: object, parts: list[Part], found: tuple[str, bool]) -> None:
    assert found_in(value, parts) == found


# --- hostile values stay in their quotation (B6) -----------------------------

SMS = Contract("sms", Effect.SEND, roles={"to": Role.TARGET, "text": Role.CONTENT}, say="text {to}: {text}")
QUOTED = re.compile("‹[^‹›]*›")


def ask_about(value: object, *, was: object, extra: str) -> Question:
    """Ask about a call that holds `value` three times: in its sentence, after it, and in what it replaces."""
    fixed = Step("T1.1.1", "sms", {"to": "+49 1", "text": value, extra: value}, "")
    replaced = {"sms": Replaced("sms", {"text": was})}
    return question(
        "A1", steps=(fixed,), contracts={"sms": SMS}, origin=origin(RESTAURANT), parts=(), replaced=replaced
    )


@pytest.mark.rule("B6")
@given(any_text | st.sampled_from(HOSTILE) | json_values, any_text | json_values)
def test_no_value_leaves_its_quotation(value: object, was: object) -> None:
    """What stands outside the marks is what stands there for a harmless value, and all of it can be seen."""
    assume(was is not None and canonical(was) != canonical(value) and was != value)
    hostile, harmless = ask_about(value, was=was, extra="note"), ask_about("hello", was="bye", extra="note")

    assert QUOTED.sub("‹›", hostile.text) == QUOTED.sub("‹›", harmless.text)
    assert hostile.text.count("‹") == hostile.text.count("›") == 4
    assert not any(map(is_hidden, hostile.text))
    assert hostile.because == harmless.because
    for argument in hostile.steps[0].arguments:
        assert not any(map(is_hidden, argument.value + (argument.was or "")))


@pytest.mark.rule("B6")
@given(any_text)
def test_no_name_of_an_argument_opens_or_closes_a_quotation(name: str) -> None:
    said = sentence(Contract("t"), {name: "x"})

    assert (said.count("‹"), said.count("›")) == (1, 1)
    assert not any(map(is_hidden, said))


@pytest.mark.rule("B6")
def test_a_huge_value_is_cut_with_a_count() -> None:
    asks = asked(Step("T1.1.1", "tell_group", {"text": "a" * 2**20}, ""))

    assert asks.text.endswith(f"text = ‹{'a' * VALUE_CHARS_MAX}… (and {2**20 - VALUE_CHARS_MAX} more characters)›?")


@pytest.mark.rule("B6")
@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("hi›, with amount = ‹1", "‹hi>, with amount = <1›"),
        ("a\nA2, asked because", "‹a⏎A2, asked because›"),
        ("\u202e21\u202c", "‹[U+202E]21[U+202C]›"),
        ("1\u200b2", "‹1[U+200B]2›"),
        ("\0\x1b[2K", "‹[U+0000][U+001B][2K›"),
        ("\ud800", "‹[U+D800]›"),
        ("<b>4</b>", "‹<b>4</b>›"),
        (["›", "\u202e"], '‹[">","[U+202E]"]›'),
    ],
    ids=ascii,
)
def test_a_hostile_value_reads(value: object, said: str) -> None:
    assert sentence(Contract("t"), {"x": value}) == f"run t, with x = {said}"


@given(st.text(st.characters(), min_size=1, max_size=20).filter(can_be_an_id))
def test_no_name_of_an_origin_leaves_its_place_in_the_question(name: str) -> None:
    asks = asked(step(**ARGUMENTS), by=Principal.parse(f"source:{name}"))

    assert not any(map(is_hidden, asks.text))
    assert asks.text.count("‹") == asks.text.count("›") == len(ARGUMENTS)


# --- the door (B7) -----------------------------------------------------------

TWO = consent(steps=(step(party=4), step("tell_group", text="x")), approvers=("user:alice", "role:operator"))


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    ("by", "ticks"),
    [(ALICE, None), (OPS, None), (ALICE, (0,)), (ALICE, (1,)), (ALICE, (0, 1)), (ALICE, (1, 0))],
    ids=str,
)
def test_the_door_takes_an_approvers_answer_by_id_and_digest(by: Principal, ticks: tuple[int, ...] | None) -> None:
    assert refuse_at_door(Answer("A1", TWO.digest, True, steps=ticks), standing(TWO), by) is None
    assert refuse_at_door(Answer("A1", TWO.digest, False), standing(TWO), by) is None


@pytest.mark.rule("B7")
def test_the_door_refuses_an_answer_to_no_question() -> None:
    assert refuse_at_door(Answer("A9", TWO.digest, True), None, ALICE) == "there is no such question"


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    "by", [BOB, RESTAURANT, "source:alice", "timer:alice", "agent:alice", "operator:alice"], ids=str
)
def test_the_door_refuses_an_answer_of_anybody_else(by: Principal | str) -> None:
    principal = Principal.parse(str(by))
    asked_of_alice = consent(approvers=("user:alice",))

    for yes in (True, False):
        refusal = refuse_at_door(Answer("A1", asked_of_alice.digest, yes), standing(asked_of_alice), principal)
        assert refusal == f"it waits for user:alice, not for {by}"


@pytest.mark.rule("B7")
@pytest.mark.parametrize(
    "digest_", ["", "sha256:", steps_digest((step(party=13),)), TWO.digest[:-1], TWO.digest.upper()]
)
def test_the_door_refuses_an_answer_to_other_steps(digest_: str) -> None:
    refusal = refuse_at_door(Answer("A1", digest_, True), standing(TWO), ALICE)

    assert refusal == "the digest is not that of the steps that were asked about"


@pytest.mark.rule("B7")
@pytest.mark.parametrize("ticks", [(), (2,), (0, 2), (-1,), (0, 1, 2)], ids=str)
def test_the_door_refuses_ticks_that_are_no_steps(ticks: tuple[int, ...]) -> None:
    refusal = refuse_at_door(Answer("A1", TWO.digest, True, steps=ticks), standing(TWO), ALICE)

    assert refusal == "the ticked steps are not steps of this question"


@pytest.mark.parametrize("state", ConsentState)
def test_the_door_takes_a_second_or_late_answer_like_the_first(state: ConsentState) -> None:
    """What it means is the owner's to say (K12)."""
    assert refuse_at_door(Answer("A1", TWO.digest, True), standing(TWO, state=state), ALICE) is None


# --- a bare yes (K20) --------------------------------------------------------


@pytest.mark.rule("B7", "K20")
@pytest.mark.parametrize("yes", [True, False])
@pytest.mark.parametrize("as_of", ["3.17", "3.18", "4.17", "4.30"])
def test_a_bare_word_answers_the_one_open_question_that_its_sender_had_seen(as_of: str, yes: bool) -> None:
    meant = read_bare(yes, [standing(at=ASKED_AT)], ALICE, as_of=Position.parse(as_of))

    assert meant == Answer("A1", consent().digest, yes)


@pytest.mark.rule("B7", "K20")
@pytest.mark.parametrize("as_of", [None, "0.0", "3.16", "2.17", "2.99", "4.16"])
def test_a_bare_word_whose_sender_had_not_seen_the_question_is_unclear(as_of: str | None) -> None:
    seen = None if as_of is None else Position.parse(as_of)

    assert read_bare(True, [standing(at=ASKED_AT)], ALICE, as_of=seen) is InputKind.UNCLEAR


@pytest.mark.rule("B7", "K20")
def test_a_bare_word_that_fits_two_questions_is_unclear() -> None:
    two = [standing(at=Position(3, 1)), standing(consent("A2"), at=Position(3, 2))]

    assert read_bare(True, two, ALICE, as_of=Position(3, 9)) is InputKind.UNCLEAR


@pytest.mark.rule("B7", "K20")
def test_a_bare_word_that_fits_no_question_is_a_message_like_any_other() -> None:
    assert read_bare(True, [], ALICE, as_of=Position(3, 9)) is InputKind.MESSAGE
    assert read_bare(True, [standing()], BOB, as_of=Position(3, 99)) is InputKind.MESSAGE


def test_a_bare_word_is_not_unclear_because_of_a_question_to_somebody_else() -> None:
    two = [standing(consent("A1", approvers=("user:bob",))), standing(consent("A2"))]

    assert read_bare(True, two, ALICE, as_of=Position(3, 17)) == Answer("A2", consent().digest, True)
    assert read_bare(True, two, OPS, as_of=Position(3, 17)) is InputKind.MESSAGE


# --- what an answer comes to (B8, B9) ----------------------------------------


@pytest.mark.rule("B9")
@pytest.mark.parametrize(
    ("received_at_ms", "yes", "comes_to"),
    [
        (0, True, Settled.APPROVED),
        (599_999, True, Settled.APPROVED),
        (600_000, True, Settled.APPROVED),
        (600_001, True, Settled.LATE),
        (10**13, True, Settled.LATE),
        (600_000, False, Settled.DECLINED),
        (600_001, False, Settled.LATE),
    ],
)
def test_an_answer_counts_up_to_its_deadline_and_not_a_millisecond_longer(
    received_at_ms: int, yes: bool, comes_to: Settled
) -> None:
    open_question = standing(consent(expires_at_ms=600_000))
    answer = Answer("A1", open_question.consent.digest, yes)

    assert settle(open_question, answer, received_at_ms=received_at_ms) is comes_to


@pytest.mark.rule("B8")
@pytest.mark.parametrize("yes", [True, False])
@pytest.mark.parametrize(
    ("state", "comes_to"),
    [
        (ConsentState.APPROVED, Settled.REPEATED),
        (ConsentState.USED, Settled.REPEATED),
        (ConsentState.DECLINED, Settled.REPEATED),
        (ConsentState.WITHDRAWN, Settled.REPEATED),
        (ConsentState.EXPIRED, Settled.LATE),
    ],
)
def test_the_first_answer_wins(state: ConsentState, comes_to: Settled, yes: bool) -> None:
    settled = standing(state=state)

    for received_at_ms in (1, 600_000, 600_001):
        answer = Answer("A1", settled.consent.digest, yes)
        assert settle(settled, answer, received_at_ms=received_at_ms) is comes_to


# --- one question per origin and ref (K18) -----------------------------------

R2 = Ref("restaurant", "reservation", "R2")
SAME_NAME_ELSEWHERE = Ref("cinema", "reservation", "R1")


@pytest.mark.rule("K18")
@pytest.mark.parametrize(
    ("newer", "older", "takes_its_place"),
    [
        ({"about": (R1,)}, {"about": (R1,)}, True),
        ({"about": (R2, R1)}, {"about": (R1,)}, True),
        ({"about": (R1,)}, {"about": (R2, R1)}, True),
        ({"about": (R2,)}, {"about": (R1,)}, False),
        ({"about": (SAME_NAME_ELSEWHERE,)}, {"about": (R1,)}, False),
        ({"about": ()}, {"about": ()}, False),
        ({"about": ()}, {"about": (R1,)}, False),
        ({"about": (R1,), "by": ALICE}, {"about": (R1,)}, False),
        ({"about": (R1,), "by": Principal.parse("source:alice")}, {"about": (R1,), "by": ALICE}, False),
    ],
    ids=str,
)
def test_a_newer_question_of_the_same_origin_about_the_same_thing_takes_the_place_of_the_older(
    newer: dict[str, Any], older: dict[str, Any], takes_its_place: bool
) -> None:
    assert supersedes(consent("A2", **newer), consent("A1", **older)) is takes_its_place


def test_a_question_of_an_always_asking_tool_is_put_to_the_user_who_started_the_turn() -> None:
    pay = Contract("pay", Effect.PAY, consent=ConsentPolicy.ALWAYS, roles={"amount": Role.CRITICAL}, say="pay {amount}")
    asks = question(
        "A7",
        steps=(step("pay", amount="50 EUR"),),
        contracts={"pay": pay},
        origin=origin(ALICE),
        parts=(),
        replaced={},
        approvers=("user:alice",),
    )

    assert asks.text == "A7, asked because you started this turn, and it always asks: pay ‹50 EUR›?"
