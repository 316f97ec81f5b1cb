"""Each scenario ends well; each rule broken on purpose does its harm there (E3), on each store.

An ablation without a scenario that shows harm proves nothing, and a scenario that ends the same with the
rule broken does not show what the rule is for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from sayso.core.rows import (
    AnswerRefusedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentWithdrawnBody,
    InputBody,
    NoticeBody,
    Row,
    TurnAskBody,
    TurnStartBody,
)
from sayso.demo.local import OpenStore, local_stage
from sayso.demo.play import SCENARIOS
from sayso.runtime.numbered import Line
from sayso.testing.ablations import ABLATIONS, NONE, Ablation


@dataclass(frozen=True)
class Ended:
    """What a scenario came to."""

    tables: dict[str, Any]
    texts: list[str]
    rows: Sequence[Row]
    lines: Sequence[Line]
    operations: dict[str, str]
    seats: dict[str, Any]

    def count(self, body: type) -> int:
        return sum(isinstance(row.body, body) for row in self.rows)

    def at(self, time: str) -> list[int]:
        """The parties whose table is held at that time."""
        return [table["party"] for table in self.tables.values() if table["time"] == time]

    def door(self, kind: str) -> list[str]:
        return [line.text for line in self.lines if line.kind == kind]


async def play(name: str, open_store: OpenStore, ablation: Ablation = NONE) -> Ended:
    async with local_stage(ablation, open_store=open_store, cast=SCENARIOS[name].cast) as stage:
        await SCENARIOS[name].play(stage)
        books = await stage.books()
        rows = await stage.app.store.rows(stage.session)
        operations = {row.operation: row.state.value for row in await stage.app.store.operations(stage.session)}
        return Ended(books["tables"], books["texts"], rows, await stage.lines(), operations, books["seats"])


# --- what must be true at the end of each scenario with nothing broken ------------


def _offer(e: Ended) -> None:
    assert e.at("20:30") == [4]
    assert len(e.texts) == 2
    assert e.count(TurnAskBody) == 1


def _tour(e: Ended) -> None:
    _offer(e)
    assert e.door("input.rejected") == [
        "signature doesn't match restaurant's secret",
        "user:bob answered A1, which is not theirs to see",
    ]
    assert e.door("input.dropped") == ["evt_17 again from restaurant; acknowledged, not acted on"]


def _misleading(e: Ended) -> None:
    assert e.tables == {}
    assert e.count(ConsentDeclinedBody) == 1


def _notice(e: Ended) -> None:
    assert [type(row.body) for row in e.rows].count(NoticeBody) == 1
    assert e.count(TurnStartBody) == 2  # hers


def _same_id(e: Ended) -> None:
    _offer(e)
    assert any("film is cancelled" in row.body.parts[0].text for row in e.rows if isinstance(row.body, NoticeBody))


def _forged(e: Ended) -> None:
    _nothing_new(e)
    assert e.at("19:00") == [4]


def _nothing_new(e: Ended) -> None:
    assert [table for table in e.tables.values() if table["time"] != "19:00"] == []
    assert len(e.texts) == 1
    assert len(e.door("input.rejected")) >= 1


def _replay(e: Ended) -> None:
    _offer(e)
    assert e.door("input.rejected")[0].startswith("signed ")


def _late(e: Ended) -> None:
    assert e.tables == {}
    assert e.count(ConsentExpiredBody) == 1
    assert e.count(AnswerRefusedBody) == 1


def _second(e: Ended) -> None:
    _offer(e)
    assert e.count(AnswerRefusedBody) == 2


def _still_asked(e: Ended) -> None:
    assert e.tables == {}
    assert len(e.texts) == 1
    assert e.count(TurnAskBody) >= 1


def _bare(e: Ended) -> None:
    notices = [row.body.parts[0].text for row in e.rows if isinstance(row.body, NoticeBody)]
    assert [notice.split("?")[0] for notice in notices] == ["Which one do you mean", "Which one do you mean"]
    assert e.texts[1:] == ["Change of plan: Friday 20:30."]  # the one yes that counted


def _declined(e: Ended) -> None:
    assert e.tables == {}
    [declined] = [row.body for row in e.rows if isinstance(row.body, ConsentDeclinedBody)]
    assert declined.parts[0].text == "Too late for the children"


def _failing(e: Ended) -> None:
    assert e.tables == {}
    assert len(e.texts) == 1


def _newer(e: Ended) -> None:
    assert e.count(ConsentWithdrawnBody) == 1
    assert (e.at("20:30"), e.at("21:00")) == ([], [4])


def _twice(e: Ended) -> None:
    assert e.at("19:00") == [4, 4]
    assert e.count(InputBody) == 2


def _nothing_told(e: Ended) -> None:
    assert len(e.texts) == 1
    assert e.count(NoticeBody) == 1


# the turn under way

FRIDAY = "Friday 19:00, a table for 4."


def _also_tell_sam(e: Ended) -> None:
    assert e.texts == ["to Sam: Friday 19:00, a table for 4"]
    assert [row.body.consent.approvers for row in e.rows if isinstance(row.body, TurnAskBody)] == [("user:alice",)]
    assert e.count(ConsentDeclinedBody) == 1


def _begun_anew(e: Ended) -> None:
    assert (list(e.tables), e.texts) == (["R1"], [FRIDAY])
    assert e.operations == {"T1.1.1": "answered", "T2.1.2": "answered"}


def _taken_over(e: Ended) -> None:
    assert (list(e.tables), e.texts) == (["R1"], [FRIDAY, f"to Sam: {FRIDAY[:-1]}"])
    assert e.count(NoticeBody) == 0


def _two_tables(e: Ended) -> None:
    assert e.at("19:00") == [4, 4]


def _four_as_she_said(e: Ended) -> None:
    assert (e.at("19:00"), e.texts) == ([4], [FRIDAY])
    assert e.count(TurnStartBody) == 2


def _nobody_can_tell(e: Ended) -> None:
    _four_as_she_said(e)
    assert [row.body.consent.pause for row in e.rows if isinstance(row.body, TurnAskBody)] == [2]


def _saturday(e: Ended) -> None:
    assert [table["day"] for table in e.tables.values()] == ["Saturday"]
    assert e.texts == ["Saturday 19:00, a table for 4."]
    assert e.operations["T1.1.1"] == "released"


def _stopped(e: Ended) -> None:
    assert (e.at("19:00"), e.texts) == ([4], [])
    assert e.operations == {"T1.1.1": "answered"}


def _told_once(e: Ended) -> None:
    assert e.texts == [FRIDAY]


def _may_have_it(e: Ended) -> None:
    assert e.texts == ["to Sam: I am late"]
    assert (e.count(NoticeBody), e.operations) == (1, {"T1.1.1": "unknown"})


def _looked_up(e: Ended) -> None:
    assert (list(e.seats), e.operations) == (["C1"], {"T1.1.1": "answered"})


CHECKS: dict[str, Callable[[Ended], None]] = {
    "offer": _offer,
    "tour": _tour,
    "misleading-note": _misleading,
    "notice": _notice,
    "duplicate": _offer,
    "same-id": _same_id,
    "bad-signature": _forged,
    "changed-field": _nothing_new,
    "replay": _replay,
    "time-stamps": _nothing_new,
    "late-yes": _late,
    "second-yes": _second,
    "webhook-yes": _still_asked,
    "another-users-yes": _still_asked,
    "bare-yes": _bare,
    "no-with-reason": _declined,
    "failing-booking": _failing,
    "newer-offer": _newer,
    "twice-the-same-words": _twice,
    "store-down": _offer,
    "changed-plan": _offer,
    "closing-the-label": _nothing_told,
    "also-tell-sam": _also_tell_sam,
    "begun-anew": _begun_anew,
    "taken-over": _taken_over,
    "two-tables": _two_tables,
    "another-matter": _four_as_she_said,
    "nobody-can-tell": _nobody_can_tell,
    "actually-saturday": _saturday,
    "stop": _stopped,
    "crash-keyed": _told_once,
    "crash-unkeyed": _may_have_it,
    "crash-looked-up": _looked_up,
}


@pytest.mark.rule("A1", "A2", "A3", "A4", "A5", "A6", "A7", "A11", "A13", "B1", "B2", "B3", "B4", "B5", "B6")
@pytest.mark.rule("B7", "B8", "B9", "B10", "B11", "B14", "B15", "K12", "K13", "K15", "K16", "K18", "K20", "K31")
@pytest.mark.rule("C3", "C4", "C5", "C6", "C7", "C8", "D2", "D3", "D4", "D5", "D6", "K23", "K24", "K25")
@pytest.mark.parametrize("name", SCENARIOS)
async def test_a_scenario_ends_well(name: str, open_store: OpenStore) -> None:
    CHECKS[name](await play(name, open_store))


BROKEN = [(name, ablation) for name, scenario in SCENARIOS.items() for ablation in scenario.ablations]


#: what a broken rule does is the runtime's doing: two stores are enough, and the slowest is left out
OF_TWO = pytest.mark.parametrize("open_store", ["memory", "sqlite"], indirect=True)


@pytest.mark.rule("E3")
@OF_TWO
@pytest.mark.parametrize(("name", "ablation"), BROKEN)
async def test_a_rule_broken_on_purpose_does_harm(name: str, ablation: str, open_store: OpenStore) -> None:
    """What holds with the rule does not hold without it: so the test above would catch its loss."""
    ended = await play(name, open_store, ABLATIONS[ablation])
    with pytest.raises(AssertionError):
        CHECKS[name](ended)


@pytest.mark.rule("E3")
def test_every_ablation_has_a_scenario_in_which_it_does_harm() -> None:
    assert {ablation for _, ablation in BROKEN} == set(ABLATIONS)


HARM: dict[str, Callable[[Ended], bool]] = {
    "authority-by-role": lambda e: e.at("20:30") == [4] and e.count(TurnAskBody) == 0,
    "question-by-the-model": lambda e: e.at("20:30") == [12],
    "no-dedupe": lambda e: e.at("20:30") == [4, 4],
    "dedupe-by-id-alone": lambda e: e.count(NoticeBody) == 0,
    "signature-unchecked": lambda e: e.at("23:00") == [4],
    "time-unchecked": lambda e: len(e.tables) == 2,
    "act-before-store": lambda e: e.at("20:30") == [4, 4],
    "acknowledge-before-store": lambda e: e.tables == {} and e.count(TurnAskBody) == 0,
    "consent-without-expiry": lambda e: e.at("20:30") == [4],
    "consent-reusable": lambda e: e.at("20:30") == [4, 4] and e.count(TurnAskBody) == 1,
    "approver-unchecked": lambda e: e.at("20:30") == [4],
    "re-planned-at-the-yes": lambda e: e.at("20:30") == [12],
    "label-closable": lambda e: e.texts[-1] == "dinner is off",
    "merged-whoever-says-it": lambda e: "to Sam: dinner is off" in e.texts and e.count(TurnAskBody) == 0,
    "all-of-it-adds": lambda e: e.at("19:00") == [4, 6],
    "nothing-taken-over": lambda e: len(e.tables) == 2 and e.count(TurnAskBody) + e.count(NoticeBody) == 0,
    "key-by-turn": lambda e: e.at("19:00") == [4, 4],
    "key-by-step": lambda e: e.at("19:00") == [4],
    "key-by-attempt": lambda e: e.texts == [FRIDAY, FRIDAY],
    "sent-again-silently": lambda e: e.texts == ["to Sam: I am late"] * 2 and e.count(NoticeBody) == 0,
    "never-looked-up": lambda e: list(e.seats) == ["C1"] and e.count(NoticeBody) == 1,
    "stop-waits-its-turn": lambda e: e.texts == [FRIDAY],
}


@pytest.mark.rule("E3")
@OF_TWO
@pytest.mark.parametrize(("name", "ablation"), BROKEN)
async def test_the_harm_is_the_one_that_the_log_names(name: str, ablation: str, open_store: OpenStore) -> None:
    assert HARM[ablation](await play(name, open_store, ABLATIONS[ablation]))
