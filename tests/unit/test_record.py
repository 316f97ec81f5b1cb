"""How a row reads: one sentence a kind, on one line; and what a reader is sent of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given

from sayso.core import view
from sayso.core.consent import ConsentState, Standing
from sayso.core.inputs import Answer, Fit, Input, InputKind, Keep, ParticipantChange, SettingsChange
from sayso.core.operation import EffectState, Ref
from sayso.core.record import persisted, sentence
from sayso.core.rows import (
    AnswerRefusedBody,
    Body,
    ConflictSettledBody,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    EffectGoneBody,
    Ending,
    InputClassifiedBody,
    InputRetractedBody,
    InputSupersededBody,
    Kind,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    RequestRefusedBody,
    SessionChangedBody,
    SessionClosedBody,
    ToolIntendedBody,
    ToolResultBody,
    ToolSentBody,
    ToolSettledBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
    TurnStopBody,
)
from sayso.core.session import Others, Position, SessionRole
from sayso.core.text import is_hidden
from tests.unit.core_examples import (
    ALICE,
    BOB,
    R1,
    RESTAURANT,
    TIMER,
    any_text,
    bodies_saying,
    call,
    consent,
    file,
    heard,
    numbered,
    origin,
    ours,
    read,
    row,
    step,
    told,
    typed,
    with_files,
)

ASKED = consent(
    approvers=("user:alice", "role:operator"),
    text="A1, asked because restaurant started this turn, not you: book ‹12›?",
)
R2 = Ref("restaurant", "reservation", "R2")

SENTENCES: list[tuple[Body, str]] = [
    (heard(InputKind.MESSAGE, ALICE, "book Friday\nat seven"), "alice: ‹book Friday⏎at seven›"),
    (heard(InputKind.UNCLEAR, ALICE, "yes"), "alice: ‹yes›"),
    (
        with_files(heard(InputKind.MESSAGE, ALICE, "see here"), "the\u202eplan›.png"),
        "alice: ‹see here› with ‹the[U+202E]plan>.png› (image/png, 8 bytes), "
        "‹the[U+202E]plan>.png› (image/png, 8 bytes)",
    ),
    (
        ToolResultBody("T2.1.1", "draw", Outcome.OK, (read("drawn"),), attachments=(file("T2.1.1.f1"),)),
        "draw: ok, ‹drawn› with ‹plan.png› (image/png, 8 bytes)",
    ),
    (
        heard(InputKind.EVENT, RESTAURANT, "the table is gone", about=(R1,)),
        "restaurant about reservation R1: ‹the table is gone›",
    ),
    (heard(InputKind.NOTICE, RESTAURANT, "closed on Monday"), "restaurant: ‹closed on Monday›"),
    (heard(InputKind.ANSWER, ALICE, answer=Answer("A1", "d", True)), "alice answers A1: yes"),
    (heard(InputKind.ANSWER, ALICE, answer=Answer("A1", "d", False, "too late")), "alice answers A1: no"),
    (heard(InputKind.EXPIRY, TIMER, event_id="A1@600000"), "the time of A1 is over (A1@600000)"),
    (NoticeBody((told("closed on Monday"),), 2), "‹closed on Monday›"),
    (NoticeBody((told("book may or may not have happened"),)), "book may or may not have happened"),
    (EffectGoneBody(R1, "restaurant", 3, "T1.1.1"), "R1: reported by restaurant"),
    (TurnStartBody(origin(RESTAURANT), 8), "T2 origin=restaurant"),
    (TurnStartBody(origin(ALICE), 0, consent="A1"), "T2 origin=alice, runs the steps of A1"),
    (
        TurnStartBody(origin(RESTAURANT), 8, continues="T1", consent="A1"),
        "T2 origin=restaurant, continues T1 after the answer to A1",
    ),
    (
        TurnStepsBody("A1", (call("book", party=12), call("tell", text="at 20:30"))),
        "T2 runs what A1 fixed: book(party=12); tell(text=‹at 20:30›)",
    ),
    (
        TurnAskBody(ASKED),
        "T2: A1 needs alice or role:operator's consent, "
        "asked because restaurant started this turn, not you: book ‹12›?",
    ),
    (TurnStopBody(14, "user:alice", 950), "T2 is stopped by user:alice: nothing more of it begins"),
    (heard(InputKind.STOP, ALICE), "alice asks that the turn stops"),
    (heard(InputKind.STOP, ALICE, stops="T2"), "alice asks that T2 stops"),
    (
        ToolSettledBody("T1.1.1", "T1.1.1", "book", Outcome.OK, (read("booked"),), (R1,)),
        "book, operation T1.1.1, answered after all: ok, ‹booked›; made reservation R1",
    ),
    (
        ToolSettledBody("T1.1.1", "T1.1.1", "pay", Outcome.FAILED, (), effect=EffectState.PARTIAL),
        "pay, operation T1.1.1, answered after all: failed; effect: partial",
    ),
    (TurnEndBody(Ending.DONE), "T2 done"),
    (TurnEndBody(Ending.FAILED, "no answer from the model"), "T2 failed: no answer from the model"),
    (
        ModelCalledBody(1, (call("book", party=4, day="Friday"), call("look"))),
        "T2 plans book(party=4, day=‹Friday›); look()",
    ),
    (ModelSaidBody(1, (told("it is"), told("booked"))), "T2: ‹it is⏎booked›"),
    (ModelSaidBody(1, (told("it i"),), interrupted=True), "T2: ‹it i›, cut off there"),
    (ToolIntendedBody("T2.1.1", "T2.1.1", "pay", "k", "d"), "pay, operation T2.1.1: stored, not sent yet"),
    (ToolSentBody("T2.1.1", "T2.1.1", "book", "k", "d", 1), "book, operation T2.1.1"),
    (ToolSentBody("T2.1.1", "T2.1.1", "book", "k", "d", 2), "book, operation T2.1.1, attempt 2, same key"),
    (
        ToolUnknownBody("T2.1.1", "T2.1.1", "book", "no answer within 30000 ms"),
        "book, operation T2.1.1: no answer within 30000 ms; it may have happened",
    ),
    (
        ToolResultBody("T2.1.1", "book", Outcome.OK, (read("booked"),), "T2.1.1", True, (R1, R2)),
        "book: ok, ‹booked›; made reservation R1, reservation R2",
    ),
    (ToolResultBody("T2.1.1", "book", Outcome.FAILED, (read("full"),)), "book: failed, ‹full›"),
    (
        ToolResultBody("T2.1.1", "book", Outcome.OK, (read("booked"),), effect=EffectState.COMMITTED),
        "book: ok, ‹booked›",
    ),
    (
        ToolResultBody("T2.1.1", "book", Outcome.FAILED, (read("full"),), effect=EffectState.NONE),
        "book: failed, ‹full›; effect: none",
    ),
    (
        ToolResultBody("T2.1.1", "pay", Outcome.FAILED, (read("2 of 3"),), made=(R1,), effect=EffectState.ROLLED_BACK),
        "pay: failed, ‹2 of 3›; made reservation R1; effect: rolled back",
    ),
    (
        ToolResultBody("T2.1.1", "pay", Outcome.OK, (ours("withheld"),), effect=EffectState.PARTIAL),
        "pay: ok, withheld; effect: partial",
    ),
    (
        ToolResultBody("T2.1.1", "draw", Outcome.OK, (), attachments=(file("T2.1.1.f1"),)),
        "draw: ok with ‹plan.png› (image/png, 8 bytes)",
    ),
    (
        ToolResultBody("T2.1.1", "book", Outcome.NOT_STARTED, (ours("a step before it did not succeed"),)),
        "book: not started, a step before it did not succeed",
    ),
    (ToolResultBody("T2.1.1", "book", Outcome.WAITING, (ours("waiting for A1"),)), "book: waiting for A1"),
    (ConsentApprovedBody("A1", 4, "user:alice", 600, "api token"), "A1 by user:alice (api token)"),
    (
        ConsentApprovedBody("A1", 4, "user:alice", 600, "api token", (0, 2)),
        "A1 by user:alice (api token), steps 1, 3 of it",
    ),
    (ConsentDeclinedBody("A1", 5, "user:alice", 700), "A1 by user:alice"),
    (ConsentDeclinedBody("A1", 5, "user:alice", 700, (typed("too late"),)), "A1 by user:alice: ‹too late›"),
    (ConsentExpiredBody("A1", 6), "A1: nobody answered in time; nothing was run"),
    (ConsentWithdrawnBody("A1", "A2 takes its place"), "A1: A2 takes its place"),
    (ConsentUsedBody("A1", "T2"), "A1: used by T2; it is good for no other"),
    (
        AnswerRefusedBody(7, "user:alice", "A1 was approved by user:bob; this changes nothing", "A1"),
        "user:alice: A1 was approved by user:bob; this changes nothing",
    ),
    (
        ConflictSettledBody(8, "operator:ops", Keep.OURS, 12),
        "operator:ops keeps our rows from 12 on: they are told again below",
    ),
    (
        ConflictSettledBody(8, "operator:ops", Keep.STORED, 12, ("T1: ‹All right.›",)),
        "operator:ops keeps the stored rows from 12 on; passed over: T1: <All right.>",
    ),
    (RequestRefusedBody(8, "user:alice", "no more may"), "user:alice: no more may"),
    (
        ParticipantChangedBody(8, "user:bob", SessionRole.MEMBER, "user:alice"),
        "user:bob takes part as member, by user:alice",
    ),
    (ParticipantChangedBody(9, "user:bob", None, "user:alice"), "user:bob takes part no more, by user:alice"),
    (ParticipantChangedBody(9, "user:bob", None, "user:bob"), "user:bob left"),
    (
        heard(InputKind.PARTICIPANT, ALICE, participant=ParticipantChange(BOB, SessionRole.MEMBER)),
        "alice asks that user:bob takes part as member",
    ),
    (
        heard(InputKind.PARTICIPANT, BOB, participant=ParticipantChange(BOB, None)),
        "bob asks that user:bob takes part no more",
    ),
    (InputRetractedBody(9, 8, "user:bob"), "user:bob took back input 8 before anybody looked at it"),
    (heard(InputKind.RETRACT, BOB, retracts=8), "bob takes back input 8"),
    (
        SessionChangedBody(9, "user:alice", "Friday\n", Others.REFUSE),
        "user:alice: its title is ‹Friday⏎› and others are refused meanwhile",
    ),
    (SessionChangedBody(9, "user:alice", None, Others.QUEUE), "user:alice: others wait their turn meanwhile"),
    (InputSupersededBody(9, "the session was closed\n"), "input 9 is not acted on: the session was closed⏎"),
    (InputClassifiedBody(9, Fit.REVISES, "open\nai", 1), "input 9 revises T2, open⏎ai says"),
    (InputClassifiedBody(9, Fit.ADDS, "user:alice", 1, "A1", 10, 900), "input 9 adds to T2, as user:alice answers A1"),
    (
        InputClassifiedBody(9, Fit.INDEPENDENT, "nobody", 1, "A1", 10),
        "input 9 is no part of T2, as nobody answered A1 in time",
    ),
    (SessionClosedBody(9, "user:alice", 900), "by user:alice; nothing more comes in"),
    (heard(InputKind.CLOSE, ALICE), "alice closes the session"),
    (
        heard(InputKind.SETTINGS, ALICE, settings=SettingsChange(others=Others.REFUSE)),
        "alice asks: others are refused meanwhile",
    ),
]
SAYING = [body for body, _ in SENTENCES]


@pytest.mark.parametrize(("body", "reads"), SENTENCES, ids=numbered(SAYING))
def test_a_row_reads(body: Body, reads: str) -> None:
    assert sentence(row(body, turn="T2")) == reads


def test_every_kind_has_a_sentence() -> None:
    assert {row(body).kind for body in SAYING} == set(Kind)


@given(any_text)
def test_no_text_breaks_its_line_or_hides_in_it(text: str) -> None:
    for body in bodies_saying(text):
        if not isinstance(body, ModelCalledBody | TurnStepsBody):  # for calls, see the next test
            assert not any(map(is_hidden, sentence(row(body)))), type(body)


@given(any_text)
def test_no_value_or_tool_of_a_call_breaks_its_line_or_hides_in_it(text: str) -> None:
    for body in (ModelCalledBody(1, (call(text, note=text),)), TurnStepsBody("A1", (call(text, note=[text]),))):
        assert not any(map(is_hidden, sentence(row(body))))


def test_a_megabyte_makes_no_long_line() -> None:
    text = "a" * 2**20
    for body in (*bodies_saying(text), ModelCalledBody(1, (call(text, note=text, other=[text]),))):
        if not isinstance(body, ModelCalledBody | TurnStepsBody) or "note" in body.calls[0].arguments:
            assert len(sentence(row(body))) < 1_000


@given(any_text)
def test_somebodys_words_stand_between_marks_that_they_cannot_close(text: str) -> None:
    for body in (
        heard(InputKind.MESSAGE, ALICE, text or "x"),
        NoticeBody((told(text),), 2),
        ModelSaidBody(1, (told(text),)),
        ToolResultBody("T2.1.1", "look", Outcome.OK, (read(text),)),
        ToolSettledBody("T1.1.1", "T1.1.1", "book", Outcome.OK, (read(text),)),
        ConsentDeclinedBody("A1", 5, "user:alice", 700, (typed(text),)),
    ):
        line = sentence(row(body))
        assert (line.count("‹"), line.count("›")) == (1, 1)
        assert line.endswith("›")


@pytest.mark.parametrize(
    ("received", "event_id", "reads"),
    [
        (
            Input(InputKind.EVENT, RESTAURANT, "standard-webhooks v1"),
            "evt_1\n",
            "evt_1⏎ from restaurant, verified by standard-webhooks v1; now acknowledged",
        ),
        (
            Input(InputKind.MESSAGE, ALICE, "api token"),
            "k1",
            "k1 from alice, verified by api token; now acknowledged",
        ),
        (
            Input(InputKind.ANSWER, BOB, "api token", answer=Answer("A1", "d", True)),
            "k2",
            "bob answers A1: yes (api token); now acknowledged",
        ),
        (
            Input(InputKind.PARTICIPANT, ALICE, "api token", participant=ParticipantChange(BOB, SessionRole.VIEWER)),
            "k3",
            "alice asks that user:bob takes part as viewer (api token); now acknowledged",
        ),
        (
            Input(InputKind.RETRACT, ALICE, "api token", retracts=8),
            "k4",
            "alice takes back input 8 (api token); now acknowledged",
        ),
        (
            Input(InputKind.SETTINGS, ALICE, "api token", settings=SettingsChange("Friday")),
            "k5",
            "alice asks: its title is ‹Friday› (api token); now acknowledged",
        ),
        (Input(InputKind.EXPIRY, TIMER, "runtime", consent="A1"), "A1@600000", "A1@600000 from the runtime's timer"),
    ],
    ids=["event", "message", "answer", "participant", "retract", "settings", "expiry"],
)
def test_the_door_says_what_it_stored(received: Input, event_id: str, reads: str) -> None:
    assert persisted(received, event_id) == reads


# --- what a reader is sent ---------------------------------------------------

#: what is the runtime's own, marked so that it can be looked for
SECRET = "zq-secret"
PRIVATE: list[Body] = [
    heard(InputKind.MESSAGE, ALICE, "hello", event_id=f"event-{SECRET}"),
    heard(InputKind.EVENT, RESTAURANT, "hello", event_id=f"event-{SECRET}", about=(R1,)),
    NoticeBody((told("hello"),), 2),
    EffectGoneBody(R1, "restaurant", 3, "T1.1.1"),
    TurnStartBody(origin(RESTAURANT), 8),
    TurnStepsBody("A1", (call("book", provider_id=f"id-{SECRET}", party=12),)),
    TurnAskBody(ASKED),
    TurnEndBody(Ending.DONE),
    ModelCalledBody(1, (call("book", provider_id=f"id-{SECRET}", party=12),), (told("I will"),)),
    ModelSaidBody(1, (told("hello"),)),
    ToolIntendedBody("T2.1.1", "T2.1.1", "pay", f"key-{SECRET}", f"digest-{SECRET}"),
    ToolSentBody("T2.1.1", "T2.1.1", "pay", f"key-{SECRET}", f"digest-{SECRET}", 1),
    ToolUnknownBody("T2.1.1", "T2.1.1", "pay", "no answer"),
    ToolResultBody(
        *("T2.1.1", "pay", Outcome.OK, (read("paid"),), "T2.1.1", True, (R1,)), acting_principal=f"user:{SECRET}"
    ),
    with_files(heard(InputKind.MESSAGE, ALICE, "hello")),
    ConsentApprovedBody("A1", 4, "user:alice", 600, "api token", (0,)),
    ConsentDeclinedBody("A1", 5, "user:alice", 700, (typed("no"),)),
    ConsentExpiredBody("A1", 6),
    ConsentWithdrawnBody("A1", "gone"),
    ConsentUsedBody("A1", "T2"),
    AnswerRefusedBody(7, "user:alice", "late", "A1"),
    ConflictSettledBody(8, "operator:ops", Keep.STORED, 12, ("a line",)),
    RequestRefusedBody(9, "user:alice", "no more may"),
    ParticipantChangedBody(10, "user:bob", SessionRole.MEMBER, "user:alice"),
    InputRetractedBody(11, 9, "user:bob"),
    SessionChangedBody(12, "user:alice", "Friday", Others.QUEUE),
    InputSupersededBody(13, "the session was closed"),
    InputClassifiedBody(13, Fit.ADDS, "user:alice", 1, "A1", 14, 900),
    SessionClosedBody(14, "user:alice", 900),
    TurnStopBody(15, "user:alice", 950),
    ToolSettledBody(
        *("T2.1.1", "T2.1.1", "pay", Outcome.OK, (read("paid"),), (R1,)), acting_principal=f"user:{SECRET}"
    ),
]


@pytest.mark.parametrize("body", PRIVATE, ids=numbered(PRIVATE))
def test_a_reader_is_sent_no_commit_key_nonce_provider_id_or_idempotency_key(body: Body) -> None:
    sent = view.public(row(body, commit_key=f"nonce-{SECRET}.7"), "ses_1")

    assert SECRET not in json.dumps(sent)
    assert sent.keys() == {"session", "position", "kind", "turn", "at_ms", "line", "body"}
    assert (sent["position"], sent["kind"], sent["line"]) == ("3.7", row(body).kind, sentence(row(body)))


def test_every_kind_is_looked_at_for_what_is_private() -> None:
    assert {row(body).kind for body in PRIVATE} == set(Kind)


@pytest.mark.parametrize("body", bodies_saying("x"), ids=numbered(bodies_saying("x")))
def test_what_a_reader_is_sent_is_json(body: Body) -> None:
    sent = view.public(row(body), "ses_1")

    assert json.loads(json.dumps(sent)) == sent


def test_a_reader_sees_whose_voice_a_turn_has_and_who_a_person_is_by_her_name_alone() -> None:
    sent = view.public(row(TurnStartBody(origin(RESTAURANT), 8, continues="T1", consent="A1")), "ses_1")

    assert sent["body"] == {
        "origin": {"kind": "source", "name": "restaurant", "verified": "standard-webhooks v1"},
        "continues": "T1",
        "consent": "A1",
        "restarts": None,
    }


@pytest.mark.parametrize(
    "body",
    [
        with_files(heard(InputKind.MESSAGE, ALICE, "see here", n=3)),
        ToolResultBody("T2.1.1", "draw", Outcome.OK, (), attachments=(file("n3.1"), file("n3.2"))),
    ],
    ids=["an input's", "a result's"],
)
def test_a_reader_is_told_of_a_file_what_fetches_it_and_nothing_of_its_bytes(body: Body) -> None:
    sent = view.public(row(body), "ses_1")

    told_of = {"filename": "plan.png", "media_type": "image/png", "size_bytes": 8}
    assert sent["body"]["attachments"] == [{"id": "n3.1", **told_of}, {"id": "n3.2", **told_of}]
    assert "sha256" not in json.dumps(sent)
    assert "attachments" not in view.public(row(heard(InputKind.MESSAGE, ALICE, "hello")), "ses_1")["body"]


@pytest.mark.rule("H5", "H9")
def test_a_reader_sees_what_a_call_left_where_somebody_classified_it_and_never_on_whose_say_so() -> None:
    body = ToolResultBody("T2.1.1", "pay", Outcome.FAILED, (read("no answer"),), acting_principal="user:bob")

    assert "effect" not in view.public(row(body), "ses_1")["body"]
    sent = view.public(row(replace(body, effect=EffectState.UNKNOWN)), "ses_1")
    assert sent["body"]["effect"] == "unknown"
    assert "bob" not in json.dumps(sent)


def test_a_reader_sees_of_a_question_all_that_a_yes_would_cover() -> None:
    two = consent(steps=(step(party=12, day="Friday"), step("tell_group", text="at 20:30")), text="‹12›?")
    sent = view.question(two)

    assert (sent["id"], sent["digest"], sent["approvers"]) == ("A1", two.digest, ["user:alice"])
    assert (sent["text"], sent["asked_at_ms"], sent["expires_at_ms"]) == ("‹12›?", 0, 600_000)
    assert [(s["tool"], [a["name"] for a in s["arguments"]]) for s in sent["steps"]] == [
        ("reserve_table", ["party", "day"]),
        ("tell_group", ["text"]),
    ]
    assert sent["steps"][0]["arguments"][0] == {
        "name": "party",
        "value": "‹12›?",
        "role": "critical",
        "source": "‹12›?",
        "outside": True,
        "was": "‹12›?",
    }


def test_a_reader_sees_what_became_of_a_question() -> None:
    settled = Standing(
        consent(), ConsentState.USED, Position(3, 17), "user:alice", 600, "", (0,), due_seq=None, used_by="T2"
    )
    sent = view.standing(settled)

    assert sent | view.question(consent()) == sent
    assert (sent["state"], sent["position"], sent["answered_by"], sent["answered_at_ms"], sent["ticks"]) == (
        *("used", "3.17", "user:alice", 600),
        [0],
    )
    assert (sent["used_by"], sent["reason"]) == ("T2", "")
    assert view.standing(Standing(consent(), ConsentState.OPEN, Position(3, 17)))["ticks"] is None
