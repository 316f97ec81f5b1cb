"""Rows: every body reads back, whichever release wrote it; what each changes beside the journal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.attachment import digest_of
from sayso.core.inputs import Answer, Fit, Input, InputKind, Keep, Lane, timer_event_id
from sayso.core.operation import EffectState, OperationState, sources_of
from sayso.core.rows import (
    BODY_VERSION,
    Absent,
    AnswerRefusedBody,
    Body,
    Change,
    ConflictSettledBody,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    Delete,
    Draft,
    EffectGoneBody,
    Ending,
    InputBody,
    InputClassifiedBody,
    InputRetractedBody,
    InputSupersededBody,
    Insert,
    Kind,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    Release,
    RequestRefusedBody,
    SessionChangedBody,
    SessionClosedBody,
    Table,
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
    UnknownVersion,
    Update,
    changes,
    decode_arguments,
    decode_body,
    decode_consent,
    decode_input,
    encode_body,
    encode_consent,
    encode_input,
)
from sayso.core.session import Others, SessionRole
from sayso.core.text import scrub
from tests.unit.core_examples import (
    ALICE,
    HOSTILE,
    R1,
    RESTAURANT,
    any_of,
    bodies_saying,
    call,
    consent,
    file,
    heard,
    numbered,
    origin,
    row,
    told,
    typed,
    with_files,
)

BODIES: tuple[type[Any], ...] = get_args(Body)
EXAMPLES = bodies_saying("Friday at 19:00 ‹é 🎬›")


def again(body: Body) -> Body:
    """Write a body and read it back."""
    text = encode_body(body)
    assert text.encode().decode() == text
    return decode_body(row(body).kind, BODY_VERSION, text)


# --- bodies read back as they were written -----------------------------------


@given(st.one_of(*map(any_of, BODIES)))
def test_a_body_reads_back_as_it_was_written(body: Body) -> None:
    assert again(body) == body


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_a_body_of_each_kind_reads_back_as_it_was_written(kind: type[Any]) -> None:
    """The one above may not reach each kind in a short run; the examples do, with every field filled."""
    examples = [body for body in EXAMPLES if type(body) is kind]

    assert examples
    assert [*map(again, examples)] == examples


@pytest.mark.parametrize(
    "text", [t for t in HOSTILE if len(t) < 100] + ["", "‹\0›", "漢字 🎬 ﷽", '"\\u0000'], ids=ascii
)
def test_odd_text_is_kept_save_the_lone_surrogates_that_nothing_can_hold(text: str) -> None:
    for said, kept in zip(bodies_saying(text), bodies_saying(scrub(text)), strict=True):
        assert again(said) == kept


def test_a_megabyte_is_kept() -> None:
    notice = NoticeBody((told("a" * 2**20),))

    assert again(notice) == notice


def test_there_is_one_body_for_each_kind() -> None:
    assert {row(body).kind for body in EXAMPLES} == set(Kind)
    assert len(BODIES) == len(Kind)
    for body in EXAMPLES:
        assert Draft(body).kind is row(body).kind
        assert type(decode_body(row(body).kind, BODY_VERSION, encode_body(body))) is type(body)


def test_an_input_reads_back_as_it_was_stored() -> None:
    stored = [body.input for body in EXAMPLES if isinstance(body, InputBody)]

    assert {value.kind for value in stored} == set(InputKind)
    assert [decode_input(encode_input(value)) for value in stored] == stored


@given(st.text(st.characters(), max_size=9))
def test_a_question_reads_back_as_it_was_stored(text: str) -> None:
    asked = consent(text=text)

    assert decode_consent(encode_consent(asked)) == consent(text=scrub(text))


# --- other releases ----------------------------------------------------------


@pytest.mark.parametrize("body", EXAMPLES, ids=numbered(EXAMPLES))
def test_a_row_of_a_newer_version_is_not_guessed_at(body: Body) -> None:
    with pytest.raises(UnknownVersion, match="a newer sayso wrote it"):
        decode_body(row(body).kind, BODY_VERSION + 1, encode_body(body))


def test_a_row_of_a_kind_that_is_not_known_is_not_guessed_at() -> None:
    for kind in ("turn.forked", "", "INPUT", "input "):
        with pytest.raises(UnknownVersion, match="a newer sayso wrote it"):
            decode_body(kind, BODY_VERSION, "{}")


def widened(value: Any) -> Any:
    """Add a field to every object of a body, as another release could have."""
    if isinstance(value, list):
        return [widened(item) for item in value]
    if isinstance(value, dict):
        inner = {name: item if name == "arguments" else widened(item) for name, item in value.items()}
        return {"unheard_of": [{"a": None}], **inner, "also_new": "x"}
    return value


@pytest.mark.parametrize("body", EXAMPLES, ids=numbered(EXAMPLES))
def test_fields_that_are_not_known_here_are_passed_over(body: Body) -> None:
    text = json.dumps(widened(json.loads(encode_body(body))))

    assert decode_body(row(body).kind, BODY_VERSION, text) == body


def test_a_field_that_an_older_release_did_not_write_has_its_default() -> None:
    started = TurnStartBody(origin(ALICE), 8)

    assert json.loads(encode_body(started)).keys() == {"origin", "steps_left"}
    assert again(started) == started


# --- whose words a row holds -------------------------------------------------


WORDS: list[Body] = [
    heard(InputKind.MESSAGE, ALICE, "hello"),
    heard(InputKind.EVENT, RESTAURANT, "hello"),
    NoticeBody((told("hello"),)),
    ModelCalledBody(1, (call("book"),), (told("hello"),)),
    ModelSaidBody(1, (told("hello"),)),
    ToolResultBody("T1.1.1", "search", Outcome.OK, (told("hello"),)),
    ToolSettledBody("T1.1.1", "T1.1.1", "book", Outcome.OK, (told("hello"),)),
    ConsentDeclinedBody("A1", 5, "user:alice", 700, (typed("hello"),)),
]


@pytest.mark.parametrize("body", WORDS, ids=numbered(WORDS))
def test_words_are_stored_with_their_source_and_label(body: Body) -> None:
    stored = json.loads(encode_body(body))
    (part,) = stored.get("parts") or stored["input"]["parts"]

    assert part["text"] == "hello"
    assert part["source"]
    assert part["label"]["integrity"] in ("user", "outsider")
    assert part["verified"]


# --- what a row changes ------------------------------------------------------

KEYS = {
    Table.SESSION: set[str](),
    Table.INBOX: {"n"},
    Table.CALL: {"call"},
    Table.OPERATION: {"operation"},
    Table.CONSENT: {"consent"},
    Table.REF: {"source", "kind", "value"},
    Table.TIMER: {"timer"},
    Table.PARTICIPANT: {"principal"},
    Table.ATTACHMENT: {"attachment"},
}


def said(change: Change) -> str:
    """A change on one line: `+` adds a row, `=` takes the place of one, `-` drops one, `{key}` changes one,
    `{*}` all, `if` one of these."""
    if isinstance(change, Release):
        return f"-attachment n={change.n}"
    if isinstance(change, Delete):
        return f"-{change.table} " + " ".join(f"{name}={value}" for name, value in change.key.items())
    if isinstance(change, Absent):
        key = " ".join(f"{name}={value}" for name, value in change.key.items())
        return f"no {change.table} {key} may be {' '.join(change.when)}"
    values = " ".join(f"{name}={value}" for name, value in change.values.items())
    if isinstance(change, Insert):
        return f"{'=' if change.replace else '+'}{change.table} {values}"
    key = "*" if change.all else " ".join(f"{name}={value}" for name, value in change.key.items())
    return f"{change.table}{{{key}}} {values}" + (f" if {' '.join(change.when)}" if change.when else "")


ASKED = consent(expires_at_ms=600_000)
CHANGED: list[tuple[Body, list[str]]] = [
    (heard(InputKind.EVENT, RESTAURANT, "gone", n=3), ["inbox{n=3} state=taken taken_seq=7 if queued"]),
    (
        with_files(heard(InputKind.MESSAGE, ALICE, "see here", n=3)),
        [
            "inbox{n=3} state=taken taken_seq=7 if queued",
            "attachment{attachment=n3.1} seq=7",
            "attachment{attachment=n3.2} seq=7",
        ],
    ),
    (NoticeBody((told("gone"),), n=4), ["inbox{n=4} state=taken taken_seq=7 if queued"]),
    (NoticeBody((told("gone"),)), []),
    (AnswerRefusedBody(5, "user:alice", "late", "A1"), ["inbox{n=5} state=taken taken_seq=7 if queued"]),
    (ConflictSettledBody(6, "operator:ops", Keep.OURS, 5), ["inbox{n=6} state=taken taken_seq=7 if queued"]),
    (RequestRefusedBody(5, "user:alice", "too many"), ["inbox{n=5} state=taken taken_seq=7 if queued"]),
    (
        ParticipantChangedBody(5, "user:bob", SessionRole.MEMBER, "user:alice"),
        [
            "inbox{n=5} state=taken taken_seq=7 if queued",
            "=participant principal=user:bob role=member seq=7",
        ],
    ),
    (
        ParticipantChangedBody(5, "user:bob", None, "user:bob"),
        ["inbox{n=5} state=taken taken_seq=7 if queued", "-participant principal=user:bob"],
    ),
    (
        InputRetractedBody(5, 4, "user:bob"),
        [*(f"inbox{{n={n}}} state=taken taken_seq=7 if queued" for n in (5, 4)), "-attachment n=4"],
    ),
    (
        SessionChangedBody(5, "user:alice", "Friday", Others.REFUSE),
        ["inbox{n=5} state=taken taken_seq=7 if queued", "session{} title=Friday others=refuse"],
    ),
    (
        InputSupersededBody(5, "the session was closed"),
        ["inbox{n=5} state=taken taken_seq=7 if queued", "-attachment n=5"],
    ),
    (InputClassifiedBody(5, Fit.REVISES, "scripted", 1), []),
    (
        InputClassifiedBody(5, Fit.ADDS, "user:alice", 1, "A1", 6, 900),
        [
            "inbox{n=6} state=taken taken_seq=7 if queued",
            "consent{consent=A1} state=used answered_by=user:alice answered_at_ms=900 used_by=T2 if open",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        InputClassifiedBody(5, Fit.INDEPENDENT, "nobody", 1, "A1", 6),
        [
            "inbox{n=6} state=taken taken_seq=7 if queued",
            "consent{consent=A1} state=expired if open",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        SessionClosedBody(5, "user:alice", 900),
        [
            "inbox{n=5} state=taken taken_seq=7 if queued",
            "inbox{*} state=taken taken_seq=7 if queued",
            "session{} closed_at_ms=900",
        ],
    ),
    (
        SessionChangedBody(5, "user:alice", ""),
        ["inbox{n=5} state=taken taken_seq=7 if queued", "session{} title="],
    ),
    (
        EffectGoneBody(R1, "restaurant", 3, "T1.1.1"),
        [
            "ref{source=restaurant kind=reservation value=R1} state=gone reported_by=restaurant if live",
            "operation{operation=T1.1.1} state=gone if answered",
        ],
    ),
    (
        EffectGoneBody(R1, "restaurant", 3),
        ["ref{source=restaurant kind=reservation value=R1} state=gone reported_by=restaurant if live"],
    ),
    (
        TurnStartBody(origin(RESTAURANT), 8),
        ["session{} turn=T2 turn_seq=7 turn_principal=source:restaurant turns=2"],
    ),
    (
        TurnStartBody(origin(ALICE), 0, consent="A1"),
        ["session{} turn=T2 turn_seq=7 turn_principal=user:alice turns=2", "consent{consent=A1} due_seq=None"],
    ),
    (TurnStopBody(14, "user:alice", 950), ["inbox{n=14} state=taken taken_seq=7 if queued"]),
    (
        TurnEndBody(Ending.DONE),
        ["no call turn=T2 may be open", "session{} turn=None turn_seq=None turn_principal=None"],
    ),
    (
        ModelCalledBody(1, (call("book", party=4, day="é"), call("tell"))),
        [
            '+call call=book turn=T2 tool=book arguments={"day":"é","party":4} state=open seq=7',
            "+call call=tell turn=T2 tool=tell arguments={} state=open seq=7",
        ],
    ),
    (
        ModelCalledBody(1, (replace(call("book"), takes="T1.1.1", done=True),)),
        [
            "+call call=book turn=T2 tool=book arguments={} state=open seq=7",
            "operation{operation=T1.1.1} turn=T2",
        ],
    ),
    (TurnStepsBody("A1", (call("book"),)), ["+call call=book turn=T2 tool=book arguments={} state=open seq=7"]),
    (ModelSaidBody(1, ()), []),
    (
        TurnAskBody(ASKED),
        [
            "+consent consent=A1 turn=T1 state=open seq=7 epoch=3 "
            f"digest={ASKED.digest} expires_at_ms=600000 body={encode_consent(ASKED)}",
            "+timer timer=A1 purpose=consent next_at_ms=600000",
            "session{} consents=1",
        ],
    ),
    (
        ToolIntendedBody("T1.1.1", "T1.1.1", "pay", "s:T1.1.1", "d"),
        [
            "+operation operation=T1.1.1 call=T1.1.1 turn=T2 tool=pay key=s:T1.1.1 digest=d state=intended attempts=0 "
            "sent_at_ms=None"
        ],
    ),
    (
        ToolSentBody("T1.1.1", "T1.1.1", "book", "s:T1.1.1", "d", 1),
        [
            "+operation operation=T1.1.1 call=T1.1.1 turn=T2 tool=book key=s:T1.1.1 digest=d state=sent attempts=1 "
            "sent_at_ms=1000"
        ],
    ),
    (
        ToolSentBody("T1.1.1", "T1.1.1", "pay", "s:T1.1.1", "d", 1, intended=True),
        ["operation{operation=T1.1.1} state=sent attempts=1 sent_at_ms=1000 if intended sent unknown"],
    ),
    (
        ToolSentBody("T1.1.1", "T1.1.1", "book", "s:T1.1.1", "d", 2),
        ["operation{operation=T1.1.1} state=sent attempts=2 if intended sent unknown"],
    ),
    (
        ToolUnknownBody("T1.1.1", "T1.1.1", "book", "no answer"),
        ["operation{operation=T1.1.1} state=unknown if sent unknown"],
    ),
    (
        ToolSettledBody("T1.1.1", "T1.1.1", "book", Outcome.OK, (), (R1,)),
        [
            "operation{operation=T1.1.1} state=answered if sent unknown",
            "=ref source=restaurant kind=reservation value=R1 operation=T1.1.1 call=T1.1.1 state=live "
            "reported_by=None seq=7",
        ],
    ),
    (
        ToolSettledBody("T1.1.1", "T1.1.1", "book", Outcome.FAILED, ()),
        ["operation{operation=T1.1.1} state=failed if sent unknown"],
    ),
    (
        ToolResultBody("T1.1.1", "book", Outcome.OK, (), operation="T1.1.1", stored=True, made=(R1,)),
        [
            "call{call=T1.1.1} state=settled outcome=ok result_seq=7 if open",
            "operation{operation=T1.1.1} state=answered if sent unknown",
            "=ref source=restaurant kind=reservation value=R1 operation=T1.1.1 call=T1.1.1 state=live "
            "reported_by=None seq=7",
        ],
    ),
    (
        ToolResultBody("T1.1.1", "draw", Outcome.OK, (), attachments=(file("T1.1.1.f1", b"png"),)),
        [
            "call{call=T1.1.1} state=settled outcome=ok result_seq=7 if open",
            "+attachment attachment=T1.1.1.f1 n=None seq=7 filename=plan.png media_type=image/png "
            f"digest={digest_of(b'png')} size_bytes=3 uploader=tool:draw",
        ],
    ),
    (
        ToolResultBody("T1.1.1", "book", Outcome.FAILED, (), operation="T1.1.1", stored=True),
        [
            "call{call=T1.1.1} state=settled outcome=failed result_seq=7 if open",
            "operation{operation=T1.1.1} state=failed if sent unknown",
        ],
    ),
    (
        ToolResultBody("T1.1.1", "book", Outcome.UNKNOWN, (), operation="T1.1.1", stored=True),
        [
            "call{call=T1.1.1} state=settled outcome=unknown result_seq=7 if open",
            "operation{operation=T1.1.1} state=unknown if sent unknown",
        ],
    ),
    (
        ToolResultBody("T1.1.1", "pay", Outcome.NOT_STARTED, (), operation="T1.1.1", stored=True),
        [
            "call{call=T1.1.1} state=settled outcome=not_started result_seq=7 if open",
            "operation{operation=T1.1.1} state=not_started if intended sent",
        ],
    ),
    (
        ToolResultBody("T1.1.1", "look", Outcome.WAITING, ()),
        ["call{call=T1.1.1} state=settled outcome=waiting result_seq=7 if open"],
    ),
    (
        ConsentApprovedBody("A1", 4, "user:alice", 600, "api token", (0, 2)),
        [
            "inbox{n=4} state=taken taken_seq=7 if queued",
            "consent{consent=A1} state=approved due_seq=7 ticks=[0,2] "
            "answered_by=user:alice answered_at_ms=600 if open",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        ConsentApprovedBody("A1", 4, "user:alice", 600, "api token"),
        [
            "inbox{n=4} state=taken taken_seq=7 if queued",
            "consent{consent=A1} state=approved due_seq=7 ticks=None answered_by=user:alice answered_at_ms=600 if open",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        ConsentDeclinedBody("A1", 5, "user:alice", 700, (typed("not now"),)),
        [
            "inbox{n=5} state=taken taken_seq=7 if queued",
            "consent{consent=A1} state=declined due_seq=7 "
            "answered_by=user:alice answered_at_ms=700 reason=not now if open",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        ConsentExpiredBody("A1", 6),
        [
            "inbox{n=6} state=taken taken_seq=7 if queued",
            "consent{consent=A1} state=expired if open",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        ConsentExpiredBody("A1", None),
        ["consent{consent=A1} state=expired if open", "timer{timer=A1} next_at_ms=None"],
    ),
    (
        ConsentWithdrawnBody("A1", "it is gone"),
        [
            "consent{consent=A1} state=withdrawn reason=it is gone due_seq=None if open approved",
            "timer{timer=A1} next_at_ms=None",
        ],
    ),
    (
        ConsentUsedBody("A1", "T2"),
        ["consent{consent=A1} state=used used_by=T2 if approved", "timer{timer=A1} next_at_ms=None"],
    ),
]


CHANGING = [body for body, _ in CHANGED]


@pytest.mark.parametrize(("body", "expected"), CHANGED, ids=numbered(CHANGING))
def test_a_row_changes(body: Body, expected: list[str]) -> None:
    assert [*map(said, changes(row(body, seq=7, turn="T2", epoch=3)))] == expected


def test_the_table_of_changes_has_every_kind() -> None:
    assert {row(body).kind for body in CHANGING} == set(Kind)


@pytest.mark.parametrize("body", CHANGING, ids=numbered(CHANGING))
def test_what_a_row_changes_follows_from_its_place_its_time_and_its_body_alone(body: Body) -> None:
    one, other = row(body), replace(row(body), commit_key="another.1")

    assert changes(one) == changes(one) == changes(other)


@pytest.mark.parametrize("body", EXAMPLES, ids=numbered(EXAMPLES))
def test_every_change_names_a_row_of_this_session_by_its_whole_key(body: Body) -> None:
    for change in changes(row(body)):
        if isinstance(change, Release | Absent) or (isinstance(change, Update) and change.all and not change.key):
            continue
        key = change.values if isinstance(change, Insert) else change.key
        assert key.keys() >= KEYS[change.table]
        assert isinstance(change, Insert) or change.key.keys() == KEYS[change.table]
        assert "session" not in {*key, *({} if isinstance(change, Delete) else change.values)}


# --- what may not be done twice ----------------------------------------------


def guard(body: Body, table: Table) -> tuple[str, ...]:
    """The states from which a row of `table` may go where `body` takes it."""
    (when,) = guards(body, table)
    return when


def guards(body: Body, table: Table) -> list[tuple[str, ...]]:
    return [c.when for c in changes(row(body)) if isinstance(c, Update) and c.table is table]


def test_a_call_can_have_no_second_result() -> None:
    for outcome in Outcome:
        assert guard(ToolResultBody("T1.1.1", "t", outcome, ()), Table.CALL) == ("open",)


@pytest.mark.rule("B8")
def test_a_consent_is_answered_while_open_and_used_once_after_a_yes() -> None:
    approved = ConsentApprovedBody("A1", 4, "user:alice", 600, "api token")

    assert guard(approved, Table.CONSENT) == ("open",)
    assert guard(ConsentDeclinedBody("A1", 5, "user:alice", 700), Table.CONSENT) == ("open",)
    assert guard(ConsentExpiredBody("A1", None), Table.CONSENT) == ("open",)
    assert guard(ConsentUsedBody("A1", "T2"), Table.CONSENT) == ("approved",)


def test_an_input_is_taken_once() -> None:
    taking = [body for body, lines in CHANGED if any(line.startswith("inbox") for line in lines)]

    assert {row(body).kind for body in taking} == {
        *(Kind.INPUT, Kind.NOTICE, Kind.ANSWER_REFUSED, Kind.CONFLICT_SETTLED),
        *(Kind.REQUEST_REFUSED, Kind.PARTICIPANT_CHANGED, Kind.INPUT_RETRACTED, Kind.SESSION_CHANGED),
        *(Kind.INPUT_SUPERSEDED, Kind.SESSION_CLOSED, Kind.TURN_STOP, Kind.INPUT_CLASSIFIED),
        *(Kind.CONSENT_APPROVED, Kind.CONSENT_DECLINED, Kind.CONSENT_EXPIRED),
    }
    assert all({*guards(body, Table.INBOX)} == {("queued",)} for body in taking)


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Outcome.OK, OperationState.ANSWERED),
        (Outcome.FAILED, OperationState.FAILED),
        (Outcome.UNKNOWN, OperationState.UNKNOWN),
        (Outcome.NOT_STARTED, OperationState.NOT_STARTED),
    ],
)
def test_an_operation_moves_with_its_result_as_its_table_allows(outcome: Outcome, state: OperationState) -> None:
    body = ToolResultBody("T1.1.1", "t", outcome, (), operation="T1.1.1", stored=True)
    (moved,) = [c for c in changes(row(body)) if isinstance(c, Update) and c.table is Table.OPERATION]

    assert moved == Update(Table.OPERATION, {"operation": "T1.1.1"}, {"state": state}, when=sources_of(state))


@pytest.mark.parametrize("outcome", [Outcome.OK, Outcome.FAILED])
@pytest.mark.parametrize(
    ("effect", "state"),
    [
        (EffectState.COMMITTED, OperationState.ANSWERED),
        (EffectState.PARTIAL, OperationState.ANSWERED),
        (EffectState.UNKNOWN, OperationState.UNKNOWN),
        (EffectState.NONE, None),
        (EffectState.ROLLED_BACK, None),
    ],
)
def test_what_an_operation_did_counts_before_how_it_answered(
    outcome: Outcome, effect: EffectState, state: OperationState | None
) -> None:
    """What happened, or may have, is never called failed; where nothing stands, the outcome says how it came."""
    body = ToolResultBody("T1.1.1", "t", outcome, (), operation="T1.1.1", stored=True, effect=effect)
    (moved,) = [c for c in changes(row(body)) if isinstance(c, Update) and c.table is Table.OPERATION]

    by_outcome = OperationState.ANSWERED if outcome is Outcome.OK else OperationState.FAILED
    assert moved.values == {"state": state or by_outcome, "effect": effect}
    assert moved.when == sources_of(state or by_outcome)


@pytest.mark.rule("H10")
def test_where_there_is_nobody_behind_a_turn_its_results_have_no_key_for_it() -> None:
    body = ToolResultBody("T1.1.1", "t", Outcome.OK, ())

    assert "acting_principal" not in encode_body(body)
    assert "effect" not in encode_body(body)
    assert json.loads(encode_body(replace(body, acting_principal="user:bob")))["acting_principal"] == "user:bob"


def test_a_calls_arguments_read_back_from_its_side_table() -> None:
    arguments: dict[str, Any] = {"party": 2**60, "note": "é\n", "deep": {"a": [None, 0.5]}}
    (opened,) = changes(row(ModelCalledBody(1, (call("book", **arguments),))))

    assert isinstance(opened, Insert)
    assert decode_arguments(str(opened.values["arguments"])) == arguments


# --- how an input waits ------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "lane"),
    [
        (InputKind.MESSAGE, Lane.NORMAL),
        (InputKind.EVENT, Lane.NORMAL),
        (InputKind.UNCLEAR, Lane.NORMAL),
        (InputKind.NOTICE, Lane.CONTROL),
        (InputKind.ANSWER, Lane.CONTROL),
        (InputKind.EXPIRY, Lane.CONTROL),
        (InputKind.CHOICE, Lane.CONTROL),
        (InputKind.PARTICIPANT, Lane.CONTROL),
        (InputKind.RETRACT, Lane.CONTROL),
        (InputKind.SETTINGS, Lane.CONTROL),
        (InputKind.CLOSE, Lane.CONTROL),
        (InputKind.STOP, Lane.CONTROL),
    ],
)
def test_answers_expiries_and_notices_overtake_the_queue(kind: InputKind, lane: Lane) -> None:
    assert Input(kind, ALICE, "api token", answer=Answer("A1", "d", True)).lane is lane


def test_a_questions_expiry_is_one_event_a_question_and_instant() -> None:
    assert timer_event_id("A1", 600_000) == "A1@600000"
