"""Examples of the core's values: the restaurant's call, and one body of each kind of row.

Everything has a short way to be said, and every field that holds free text can be given any text.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any, get_args, get_origin, get_type_hints

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from sayso.core.attachment import Attachment, digest_of, of_input
from sayso.core.authority import Verdict
from sayso.core.consent import AskedStep, Consent, ConsentState, Question, Shown, Standing, Step, steps_digest
from sayso.core.contract import Effect, Role
from sayso.core.inputs import Answer, Choice, Fit, Input, InputKind, Keep, ParticipantChange, Restated, SettingsChange
from sayso.core.labels import OUTSIDER, RUNTIME, USER, Label, Part
from sayso.core.operation import EffectState, Ref
from sayso.core.origin import Origin, Principal
from sayso.core.rows import (
    AnswerRefusedBody,
    Body,
    Called,
    ConflictSettledBody,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    EffectGoneBody,
    Ending,
    InputBody,
    InputClassifiedBody,
    InputRetractedBody,
    InputSupersededBody,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    RequestRefusedBody,
    Row,
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

ALICE = Principal.parse("user:alice")
BOB = Principal.parse("user:bob")
OPS = Principal.parse("operator:ops")
RESTAURANT = Principal.parse("source:restaurant")
TIMER = Principal.parse("timer:7")
AGENT = Principal.parse("agent:s9")
R1 = Ref("restaurant", "reservation", "R1")
#: where in the journal a question of these examples was asked
ASKED_AT = Position(3, 17)

#: what hides, reorders, closes a quotation, or can't be written as UTF-8
HOSTILE = (
    "›",
    "‹›, with party = ‹4",
    "12› for ‹4",
    "\n\nA2, asked because you said so: pay ‹1›?",
    "\r\x1b[2Kyes",
    "\u202e12\u202c",
    "\u2066\u2067\u2068\u2069",
    "1\u200b2\u200d\u2060\ufeff",
    "\0",
    "\ud800",
    "\udfff\ud83d",
    "\u2028\u2029\x85",
    "<b>12</b> &amp; </data>",
    "[yes](https://evil.example)",
    "\U000e0059\U000e0045\U000e0053",
    "a" * 2**20,
    "›" * 2**20,
)

#: any text at all, lone surrogates too
any_text: SearchStrategy[str] = st.text(st.characters(), max_size=40) | st.sampled_from(HOSTILE[:-2])


def origin(principal: Principal, *, inputs: tuple[int, ...] = (1,)) -> Origin:
    verified = "api token" if principal.kind == "user" else "standard-webhooks v1"
    return Origin(principal, verified, inputs)


def typed(text: str, *, by: Principal = ALICE) -> Part:
    """What a person typed."""
    return Part(text, str(by), USER, "api token")


def told(text: str) -> Part:
    """What the restaurant told us."""
    return Part(text, str(RESTAURANT), OUTSIDER, "standard-webhooks v1")


def ours(text: str) -> Part:
    """The runtime's own words."""
    return Part(text, "runtime", RUNTIME, "runtime")


def read(text: str, *, tool: str = "search") -> Part:
    """What a tool gave back."""
    return Part(text, f"tool:{tool}", OUTSIDER, "tool contract")


def call(
    name: str,
    verdict: Verdict = Verdict.RUN,
    effect: Effect = Effect.BOOK,
    *,
    keyed: bool = True,
    parallel_safe: bool = False,
    approvers: tuple[str, ...] = (),
    provider_id: str = "",
    **arguments: object,
) -> Called:
    """One call of a plan. Its ref and its tool are both `name`."""
    who = approvers or (("user:alice",) if verdict is Verdict.ASK else ())
    return Called(
        name,
        name,
        arguments,
        verdict,
        f"because {name}",
        effect,
        keyed=keyed,
        parallel_safe=parallel_safe,
        contract="sha256:c",
        approvers=who,
        provider_id=provider_id,
    )


def step(tool: str = "reserve_table", **arguments: object) -> Step:
    return Step("T1.1.1", tool, arguments, "sha256:c")


def consent(
    id_: str = "A1",
    *,
    steps: tuple[Step, ...] = (step(party=12),),
    approvers: tuple[str, ...] = ("user:alice",),
    by: Principal = RESTAURANT,
    about: tuple[Ref, ...] = (R1,),
    text: str = "A1, asked because restaurant started this turn, not you: run reserve_table, with party = ‹12›?",
    expires_at_ms: int = 600_000,
) -> Consent:
    shown = tuple(
        AskedStep(text, tuple(Shown(name, text, Role.CRITICAL, text, True, text) for name in s.arguments))
        for s in steps
    )
    return Consent(
        id=id_,
        turn="T1",
        origin=origin(by),
        steps=steps,
        digest=steps_digest(steps),
        approvers=approvers,
        about=about,
        question=Question(text, text, shown),
        asked_at_ms=0,
        expires_at_ms=expires_at_ms,
        steps_left=3,
    )


def standing(
    asked: Consent | None = None, *, state: ConsentState = ConsentState.OPEN, at: Position = ASKED_AT
) -> Standing:
    return Standing(asked or consent(), state, at)


def row(body: Body, *, seq: int = 7, turn: str | None = "T2", epoch: int = 3, commit_key: str = "nonce.7") -> Row:
    return Row(seq, epoch, turn, commit_key, 1_000, body)


def numbered(bodies: Iterable[Body]) -> list[str]:
    """Return a name for each body, for a test that takes them one by one."""
    return [f"{n} {row(body).kind}" for n, body in enumerate(bodies, 1)]


def heard(
    kind: InputKind,
    principal: Principal,
    text: str = "",
    *,
    n: int = 1,
    event_id: str = "evt_1",
    about: tuple[Ref, ...] = (),
    answer: Answer | None = None,
    **asked: Any,
) -> InputBody:
    """The row of an input, as its owner takes it."""
    parts = (typed(text, by=principal) if principal.kind == "user" else told(text),) if text else ()
    about_consent = "A1" if kind is InputKind.EXPIRY else None
    received = Input(kind, principal, "api token", parts, about, answer=answer, consent=about_consent, **asked)
    return InputBody(n, str(principal), event_id, 500, received)


def chosen(choice: Choice) -> InputBody:
    """The row of an operator's choice, if its owner took it as such."""
    return InputBody(1, str(OPS), "evt_1", 500, Input(InputKind.CHOICE, OPS, "api token", choice=choice))


def file(id_: str, data: bytes = b"%PDF-1.7", *, filename: str = "plan.png") -> Attachment:
    """What a row says of a file."""
    return Attachment(id_, filename, "image/png", len(data), digest_of(data))


def with_files(body: InputBody, filename: str = "plan.png") -> InputBody:
    """The row of an input that came with two files."""
    files = tuple(file(of_input(body.n, place), filename=filename) for place in (1, 2))
    return replace(body, input=replace(body.input, attachments=files))


def bodies_saying(text: str) -> tuple[Body, ...]:
    """Return one body of each kind (and a few more), with `text` wherever a text is free."""
    thing = Ref(text, text, text)
    voiced = Origin(RESTAURANT, text, (1,))
    part = Part(text, text, Label(OUTSIDER.integrity, (text,)), text)
    planned = Called("T1.1.1", text, {text: [text, {text: text}]}, Verdict.RUN, text, Effect.BOOK, provider_id=text)
    fixed = Step("T1.1.1", text, {text: text}, text)
    return (
        InputBody(
            1,
            text,
            text,
            500,
            Input(InputKind.EVENT, RESTAURANT, text, (part,), (thing,), gone=True, client_send_ids=(text,)),
        ),
        heard(InputKind.MESSAGE, ALICE, text or "hello", event_id=text),
        with_files(heard(InputKind.MESSAGE, ALICE, text or "hello"), text),
        heard(InputKind.NOTICE, RESTAURANT, text, event_id=text, about=(thing,)),
        heard(InputKind.UNCLEAR, ALICE, text),
        heard(InputKind.EXPIRY, TIMER, event_id=text),
        heard(InputKind.ANSWER, ALICE, answer=Answer("A1", text, True, text, (0,))),
        chosen(Choice(Keep.OURS, 12, (Restated(text, (part,)),))),
        NoticeBody((part,), 2),
        NoticeBody((part,)),
        EffectGoneBody(thing, "restaurant", 3, "T1.1.1"),
        TurnStartBody(voiced, 8, continues="T1", consent="A1", about=(thing,), say_so_at_ms=9),
        TurnStepsBody("A1", (planned,)),
        TurnAskBody(consent(steps=(fixed,), about=(thing,))),
        TurnStopBody(14, "user:alice", 950),
        heard(InputKind.STOP, ALICE, stops="T1"),
        TurnEndBody(Ending.FAILED, text, 2),
        ModelCalledBody(1, (planned, planned), (part,)),
        ModelSaidBody(2, (part, part)),
        ModelSaidBody(2, (part,), interrupted=True),
        ToolIntendedBody("T1.1.1", "T1.1.1", "search", text, text),
        ToolSentBody("T1.1.1", "T1.1.1", "search", text, text, 2, intended=True),
        ToolUnknownBody("T1.1.1", "T1.1.1", "search", text),
        ToolResultBody("T1.1.1", "search", Outcome.OK, (part,), "T1.1.1", True, (thing,)),
        ToolResultBody("T1.1.1", "draw", Outcome.OK, (part,), attachments=(file("T1.1.1.f1", filename=text),)),
        ToolResultBody("T1.1.1", "search", Outcome.NOT_STARTED, (Part(text, "runtime", RUNTIME),)),
        ToolResultBody(
            *("T1.1.1", "pay", Outcome.FAILED, (part,)), effect=EffectState.PARTIAL, acting_principal="user:bob"
        ),
        ToolSettledBody(
            *("T1.1.1", "T1.1.1", "pay", Outcome.FAILED, (part,), (thing,), (file("T1.1.1.f1", filename=text),)),
            effect=EffectState.PARTIAL,
            acting_principal="user:bob",
        ),
        ConsentApprovedBody("A1", 4, "user:alice", 600, "api token", (0, 1)),
        ConsentDeclinedBody("A1", 5, "user:alice", 700, (part,)),
        ConsentExpiredBody("A1", 6),
        ConsentWithdrawnBody("A1", text),
        ConsentUsedBody("A1", "T2"),
        AnswerRefusedBody(7, "user:alice", text, "A1"),
        ConflictSettledBody(8, "operator:ops", Keep.STORED, 12, (text,)),
        RequestRefusedBody(8, "user:alice", text),
        ParticipantChangedBody(9, "user:bob", SessionRole.VIEWER, "user:alice"),
        heard(InputKind.PARTICIPANT, ALICE, participant=ParticipantChange(BOB, SessionRole.MEMBER)),
        InputRetractedBody(10, 9, "user:alice"),
        heard(InputKind.RETRACT, ALICE, retracts=9),
        SessionChangedBody(11, "user:alice", text, Others.REFUSE),
        InputSupersededBody(12, text),
        InputClassifiedBody(12, Fit.UNSURE, text, 1),
        InputClassifiedBody(12, Fit.ADDS, "user:alice", 1, "A1", 14, 940),
        InputClassifiedBody(12, Fit.INDEPENDENT, "nobody", 1, "A1", 15),
        SessionClosedBody(13, "user:alice", 900),
        heard(InputKind.CLOSE, ALICE),
        heard(InputKind.SETTINGS, ALICE, settings=SettingsChange(text, Others.REFUSE)),
    )


json_values: SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=3,
)
json_objects: SearchStrategy[dict[str, Any]] = st.dictionaries(st.text(max_size=6), json_values, max_size=3)


#: few values that differ in what could go wrong: drawing them costs little, so every field of every kind can be
simple: dict[Any, SearchStrategy[Any]] = {
    str: st.sampled_from(("", "a", "é 漢\n🎬", "\0", "‹›", '"\\u0000', "null")),
    int: st.sampled_from((0, 1, 2**62)),
    bool: st.booleans(),
    type(None): st.none(),
}
objects: SearchStrategy[dict[str, Any]] = st.sampled_from(
    ({}, {"": None}, {"n": 2**70, "f": -0.5, "b": [True, {"é\0": "‹›"}, []]}, {"a": 1e300, "z": {"a": {"a": 1}}})
)


def any_of(hint: Any) -> SearchStrategy[Any]:
    """Return any value of a type of the core, every field filled: a new field is covered without a word here."""
    if hint is Principal:
        return st.sampled_from((ALICE, BOB, OPS, RESTAURANT, TIMER, AGENT))
    if isinstance(hint, type) and is_dataclass(hint):
        hints = get_type_hints(hint)
        return st.builds(hint, **{field.name: any_of(hints[field.name]) for field in fields(hint)})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(hint)
    args = get_args(hint)
    if get_origin(hint) is types.UnionType:
        return st.one_of(*map(any_of, args))
    if get_origin(hint) is tuple:  # always of one type and any length
        return st.lists(any_of(args[0]), max_size=2).map(tuple)
    if get_origin(hint) is Mapping:
        return objects
    return simple[hint]
