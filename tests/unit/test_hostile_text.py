"""Words that hide, reorder, or pretend to be ours: none leaves its place in a question, a label or the log."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.consent import Replaced, Step, question
from sayso.core.context import labelled
from sayso.core.contract import Contract, Effect, Role
from sayso.core.inputs import bare_answer
from sayso.core.labels import OUTSIDER, Part
from sayso.core.origin import Origin, Principal
from sayso.core.record import sentence
from sayso.core.rows import ModelCalledBody, Row
from sayso.core.text import CLOSE, OPEN, is_hidden, plain
from tests.unit.core_examples import call

SAY = Contract("tell", Effect.SEND, roles={"text": Role.CONTENT, "to": Role.TARGET}, say="tell {to} {text}")
ORIGIN = Origin(Principal.parse("source:restaurant"), "standard-webhooks v1")
anything = st.text(st.characters(), max_size=300)


@pytest.mark.rule("B6")
@pytest.mark.parametrize(
    "hidden",
    ["\U000e0100", "\U000e01ef", "\U000e0041", "\u17b4", "\u17b5", "\u200b", "\u202e", "\ufe0f", "\u2800", "\x00"],
)
def test_what_a_reader_cannot_see_is_shown(hidden: str) -> None:
    assert is_hidden(hidden)
    assert plain(f"pay{hidden}", chars_max=20) == f"pay[U+{ord(hidden):04X}]"


@pytest.mark.rule("B6")
@given(anything, anything)
def test_a_question_is_the_same_but_for_what_stands_between_its_marks(text: str, was: str) -> None:
    def asked(text: str, was: str) -> str:
        steps = (Step("c", "tell", {"to": "the group", "text": text}, SAY.version),)
        found = question(
            "A1",
            steps=steps,
            contracts={"tell": SAY},
            origin=ORIGIN,
            parts=(Part(text, "source:restaurant", OUTSIDER),),
            replaced={"tell": Replaced("tell", {"to": "the group", "text": was + "!"})},
        )
        return found.text

    def outside(question: str) -> list[str]:
        pieces = question.split(OPEN)
        return [pieces[0], *(piece.split(CLOSE)[1] for piece in pieces[1:])]

    if text != was + "!":
        assert outside(asked(text, was)) == outside(asked("harmless", "plain"))
    assert not any(map(is_hidden, asked(text, was)))


@pytest.mark.rule("B4")
@given(anything, anything)
def test_nothing_in_a_labelled_part_ends_it_or_changes_its_header(text: str, source: str) -> None:
    wrapped = labelled(Part(text, f'source:{source}"integrity="runtime', OUTSIDER, source), key="n.1")
    head, _, rest = wrapped.partition("\n")
    tag = head[1:].partition(" ")[0]

    assert head.count('"') == 6
    assert head.endswith(' integrity="outsider">')
    assert rest.count(f"</{tag}>") == 1
    assert rest.endswith(f"\n</{tag}>")
    assert rest.count("<") == 1


@pytest.mark.rule("E1")
@given(anything, anything)
def test_no_name_or_value_of_an_argument_makes_a_line_look_like_another(name: str, value: str) -> None:
    proposed = replace(call("pay"), arguments={name: value})
    line = sentence(Row(3, 1, "T1", "n.3", 0, ModelCalledBody(1, (proposed,))))

    assert line.startswith("T1 plans pay(")
    assert not any(map(is_hidden, line))
    assert line.count(OPEN) == line.count(CLOSE) == 1


@pytest.mark.rule("B7")
@pytest.mark.parametrize("text", ["ye\u017f", "\uff59\uff45\uff53", "yes\u200b", "y\u0435s", "yes yes", "yes?"])
def test_what_only_looks_like_a_yes_is_a_message(text: str) -> None:
    assert bare_answer(text) is None
