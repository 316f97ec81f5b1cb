"""A real server is killed at every commit and every await of nine stories, and all end as if nothing had happened.

Each cell is played by `tools/crash_story.py` with real processes, sockets and files; here is what must be true at its
end. `make test` plays a twelfth of them, `make matrix` all.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from sayso.core.operation import OperationState
from sayso.core.rows import (
    Ending,
    Kind,
    Outcome,
    Row,
    Scalar,
    ToolResultBody,
    ToolSentBody,
    ToolUnknownBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.core.session import Token
from sayso.storage.memory import MemoryStore
from sayso.storage.store import Entry, InboxRow, OperationRow, WriteOutcome
from tools.crash_matrix import Matrix, all_cells, matrix, recorded_cells, table
from tools.crash_story import STORIES, Cell, Played, play, seq

#: `make matrix` plays every cell (a minute or two); otherwise every so many, so that each kind of place is among them
EVERY = 1 if os.environ.get("SAYSO_TEST_MATRIX") == "all" else 12
ALL_CELLS = recorded_cells()
CELLS = ALL_CELLS[::EVERY]
#: what can be asked what became of it, where anything can be
LOOKED_UP = {"offer": "reserve_table", "failing": "reserve_table"}


@dataclass(frozen=True)
class Wanted:
    """What a story comes to, whatever was killed."""

    #: who waited for an answer
    tries: tuple[str, ...]
    #: the questions, and what became of each
    asked: list[tuple[str, str]]
    #: how many rows there are of some kinds
    kinds: dict[Kind, int]
    tables: dict[str, dict[str, Any]]
    texts: list[str]
    #: how much was done outside
    made: int
    endings: list[Ending]
    results: list[str]
    operations: dict[str, OperationState]
    given_back: int = 0
    #: an operation of which nobody may find out: whoever is killed while it is out leaves it unknown
    unsure: str = ""


def _table(day: str, time: str) -> dict[str, Any]:
    return {"day": day, "time": time, "party": 4}


DONE, ASKED, FAILED, CANCELLED = Ending.DONE, Ending.ASKED, Ending.FAILED, Ending.CANCELLED
ANSWERED = OperationState.ANSWERED
SEE_YOU, CHANGED = "Friday 19:00, a table for 4. See you there!", "Change of plan: Friday 20:30."
FRIDAY, SATURDAY = "Friday 19:00, a table for 4.", "Saturday 19:00, a table for 4."
ONE_YES = {Kind.TURN_ASK: 1, Kind.CONSENT_APPROVED: 1, Kind.CONSENT_USED: 1}
OF_THE_OFFER = ["T1.1.1", "T1.1.2", "T2.1.1", "T2.1.2", "T3.0.1", "T3.0.2"]
FIRST = {"T1.1.1": OperationState.GONE, "T1.1.2": ANSWERED}
WANTED = {
    "offer": Wanted(
        ("message", "hook", "answer"),
        [("A1", "used")],
        {**ONE_YES, Kind.EFFECT_GONE: 1},
        {"R2": _table("Friday", "20:30")},
        [SEE_YOU, CHANGED],
        4,
        [DONE, ASKED, DONE, DONE],
        OF_THE_OFFER,
        FIRST | {"T3.0.1": ANSWERED, "T3.0.2": ANSWERED},
    ),
    "failing": Wanted(
        ("message", "hook", "answer"),
        [("A1", "used")],
        {**ONE_YES, Kind.EFFECT_GONE: 1},
        {},
        [SEE_YOU],
        2,
        [DONE, ASKED, FAILED, DONE],
        OF_THE_OFFER,
        FIRST | {"T3.0.1": OperationState.FAILED},
    ),
    "saturday": Wanted(
        ("message", "more", "answer"),
        [("A1", "used")],
        {**ONE_YES, Kind.INPUT_CLASSIFIED: 1},
        {"R2": _table("Saturday", "19:00")},
        [SATURDAY],
        3,
        [CANCELLED, DONE, DONE, DONE],
        ["T1.1.1", "T1.1.2", "T2.1.1", "T2.1.2", "T3.0.1"],
        {"T1.1.1": OperationState.RELEASED} | dict.fromkeys(("T2.1.1", "T2.1.2", "T3.0.1"), ANSWERED),
        given_back=1,
    ),
    "anew": Wanted(
        ("message", "more"),
        [],
        {Kind.TURN_ASK: 0, Kind.INPUT_CLASSIFIED: 1, Kind.NOTICE: 0},
        {"R1": _table("Friday", "19:00")},
        [FRIDAY],
        2,
        [CANCELLED, DONE],
        ["T1.1.1", "T2.1.1", "T2.1.2"],
        {"T1.1.1": ANSWERED, "T2.1.2": ANSWERED},
    ),
    "joined": Wanted(
        ("message", "more"),
        [],
        {Kind.TURN_ASK: 0, Kind.INPUT_CLASSIFIED: 1, Kind.NOTICE: 0},
        {"R1": _table("Friday", "19:00")},
        [FRIDAY],
        2,
        [DONE],
        ["T1.1.1", "T1.2.1"],
        {"T1.1.1": ANSWERED, "T1.2.1": ANSWERED},
    ),
    "another": Wanted(
        ("message", "more"),
        [],
        {Kind.TURN_ASK: 0, Kind.INPUT_CLASSIFIED: 1, Kind.NOTICE: 0},
        {"R1": _table("Friday", "19:00")},
        [FRIDAY],
        2,
        [DONE, DONE],
        ["T1.1.1", "T1.1.2"],
        {"T1.1.1": ANSWERED, "T1.1.2": ANSWERED},
    ),
    "stopped": Wanted(
        ("message", "stop"),
        [],
        {Kind.TURN_ASK: 0, Kind.TURN_STOP: 1},
        {"R1": _table("Friday", "19:00")},
        [],
        1,
        [CANCELLED],
        ["T1.1.1", "T1.1.2"],
        {"T1.1.1": ANSWERED},
        unsure="T1.1.1",
    ),
    "unkeyed": Wanted(
        ("message", "more"),
        [],
        {Kind.TURN_ASK: 0},
        {},
        ["to Sam: I am late"],
        1,
        [DONE, DONE],
        ["T1.1.1"],
        {"T1.1.1": ANSWERED},
        unsure="T1.1.1",
    ),
    "unsure": Wanted(
        ("message", "more", "answer"),
        [("A1", "declined")],
        {Kind.TURN_ASK: 1, Kind.INPUT_CLASSIFIED: 2, Kind.NOTICE: 0},
        {"R1": _table("Friday", "19:00")},
        [FRIDAY],
        2,
        [DONE, DONE],
        ["T1.1.1", "T1.1.2"],
        {"T1.1.1": ANSWERED, "T1.1.2": ANSWERED},
    ),
}


@pytest.fixture(scope="module")
async def plays() -> AsyncIterator[Matrix]:
    async with matrix(CELLS) as one:
        yield one


async def test_the_list_of_places_is_whole_and_current(plays: Matrix) -> None:
    """If not: `python -m tools.crash_matrix`."""
    async with asyncio.timeout(120):
        found = await all_cells(plays.zygote, plays.given)
    assert _of_the_story(found) == _of_the_story(ALL_CELLS)


def _of_the_story(cells: Iterable[Cell]) -> set[str]:
    """The places that the story passes; how often a worker looks around beside it is up to its clock."""
    around = ("store.claim", "commit.claim", "store.fire", "commit.fire", "store.forget", "commit.forget")
    return {str(cell) for cell in cells if not cell.points[-1].startswith(around)}


@pytest.mark.rule("A4", "A7", "A8", "B8", "B10", "B15", "C3", "C8", "D1", "D2", "D3", "D4", "D5", "D6", "E1")
@pytest.mark.rule("K1", "K13", "K15", "K16", "K27")
@pytest.mark.rule("F3", "F25", "F35", "F54", "N1", "N20", "W10", "W12")
@pytest.mark.parametrize("cell", CELLS, ids=str)
async def test_a_killed_server_changes_nothing_in_the_end(plays: Matrix, cell: Cell) -> None:
    played = await plays.played(cell)

    assert played.kills == len(cell.points), f"ended as {played.codes}"
    assert played.codes[-1] == 0
    assert played.said == ""
    everybody_was_answered(played)
    what_was_asked_was_asked_and_answered_once(played)
    it_was_done_once(played)
    rows_are_whole(played)
    await side_tables_follow_from_the_rows(played)
    every_turn_and_call_has_ended(played)
    the_log_says_what_was_found(played)
    the_page_shows_what_is_stored(played)


# --- what must be true ---------------------------------------------------------


def everybody_was_answered(played: Played) -> None:
    """Who had no answer sent again until there was one, and it was good; what was told then still stands (N1)."""
    wanted = WANTED[played.cell.story]
    assert list(played.tries) == list(wanted.tries)
    for tries in played.tries.values():
        *before, last = tries
        assert [each.status for each in before] == [None] * len(before)
        assert last.status in (200, 202)
    if "hook" in wanted.tries:
        assert played.tries["hook"][-1].status == 202
    if "answer" in wanted.tries:
        settled = (played.tries["answer"][-1].said or {}).get("settled")
        assert settled is None or settled in played.history


def what_was_asked_was_asked_and_answered_once(played: Played) -> None:
    wanted, story = WANTED[played.cell.story], STORIES[played.cell.story]
    assert [(question["id"], question["state"]) for question in played.consents] == wanted.asked
    kinds = Counter(row.kind for row in played.rows)
    assert {kind: kinds[kind] for kind in wanted.kinds} == wanted.kinds
    assert [entry for entry in played.inbox if entry.state == "taken"] == played.inbox
    answers = [entry for entry in played.inbox if entry.input.answer is not None]
    tried = len(played.tries["answer"]) if "answer" in wanted.tries else 0
    assert len(answers) in range(min(tried, 1), (min(tried, 1) if story.keyed else tried) + 1)
    assert len(played.inbox) - len(answers) == 2


def it_was_done_once(played: Played) -> None:
    """By the outside's own books, which no crash of ours can touch."""
    wanted = WANTED[played.cell.story]
    if played.cell.story == "unkeyed" and played.books["texts"] == []:  # killed before it went out: it never does
        assert _states(played) == {"T1.1.1": OperationState.UNKNOWN}
        return
    assert played.books["tables"] == wanted.tables
    assert played.books["texts"] == wanted.texts
    assert len([line for line in played.lines if " holds " in line or " has " in line]) == wanted.made
    assert len([line for line in played.lines if "was given R1 back" in line]) == wanted.given_back


def rows_are_whole(played: Played) -> None:
    rows = played.rows
    assert [row.seq for row in rows] == list(range(1, len(rows) + 1))
    assert len({row.commit_key for row in rows}) == len(rows)
    assert all(earlier.epoch <= later.epoch and earlier.at_ms <= later.at_ms for earlier, later in pairwise(rows))


async def side_tables_follow_from_the_rows(played: Played) -> None:
    """Inputs and rows, written anew into an empty store, make the same side tables."""
    assert await rebuilt(played) == played.tables


def every_turn_and_call_has_ended(played: Played) -> None:
    wanted, bodies = WANTED[played.cell.story], [row.body for row in played.rows]
    started = [row.turn for row in played.rows if isinstance(row.body, TurnStartBody)]
    ended = [row.turn for row in played.rows if isinstance(row.body, TurnEndBody)]
    assert started == ended == [f"T{n}" for n in range(1, len(wanted.endings) + 1)]
    assert [body.ending for body in bodies if isinstance(body, TurnEndBody)] == wanted.endings
    assert sorted(body.call for body in bodies if isinstance(body, ToolResultBody)) == wanted.results
    states = _states(played)
    if wanted.unsure and states[wanted.unsure] is OperationState.UNKNOWN:
        assert any(found.out for found in played.found), "it was out when the server was killed"
        assert [row.kind for row in played.rows].count(Kind.NOTICE) == 1, "she is told"
    else:
        assert states == wanted.operations


def _states(played: Played) -> dict[str, OperationState]:
    return {operation.operation: operation.state for operation in played.operations}


def the_log_says_what_was_found(played: Played) -> None:
    """An operation that was out when the process ended is unknown from then on, and is asked for, or sent again under
    its key; nothing else ever is."""
    found_out = [(kill, one) for kill, found in enumerate(played.found) for one in _sent(found.operations)]
    for kill, out in found_out:
        after = [row for row in played.rows if row.epoch > played.found[kill].record.epoch]
        about = [row.body for row in after if getattr(row.body, "operation", None) == out.operation]
        # the result of a call whose turn began anew says that nobody knows, and another call takes the operation over
        unknown, *later = [body for body in about if getattr(body, "outcome", None) is not Outcome.UNKNOWN]
        if out.operation == WANTED[played.cell.story].unsure and not later:
            continue  # nobody asks, and nobody sends it again: she is told
        then = later[0]
        assert isinstance(unknown, ToolUnknownBody)
        if out.tool == LOOKED_UP.get(played.cell.story):  # what it made is known, or that it never was
            assert isinstance(then, ToolResultBody | ToolUnknownBody)
        else:
            assert isinstance(then, ToolSentBody)
            assert then.attempt == out.attempts + 1
        assert any(line.kind == "tool.unknown" and line.text.startswith(out.tool) for line in played.log)
    if not any(found.out for found in played.found):
        assert not any(isinstance(row.body, ToolUnknownBody) for row in played.rows)
        assert all(row.body.attempt == 1 for row in played.rows if isinstance(row.body, ToolSentBody))
    sent = [row.body for row in played.rows if isinstance(row.body, ToolSentBody)]
    assert all(body.key.endswith(f":{body.operation}") for body in sent)
    attempts = [body.attempt for body in sorted(sent, key=lambda body: (body.operation, body.attempt))]
    assert all(later in (1, earlier + 1) for earlier, later in pairwise(attempts))


def _sent(operations: tuple[OperationRow, ...]) -> list[OperationRow]:
    return [one for one in operations if one.state is OperationState.SENT]


def the_page_shows_what_is_stored(played: Played) -> None:
    """Whatever a page was shown too early, it ends with the stored rows, each once (K1)."""
    assert played.reader.rows == played.history
    assert [row["position"] for row in played.history] == [str(row.position) for row in played.rows]
    assert not any(row in played.history for row in played.reader.dropped)


# --- the side tables, built anew -------------------------------------------------


@dataclass
class Clock:
    """The time of whatever is written now."""

    now_ms: int = 0

    def __call__(self) -> int:
        return self.now_ms


async def rebuilt(played: Played) -> dict[str, list[tuple[Scalar, ...]]]:
    """Return the side tables of an empty store into which the inputs and the rows were written, in their order."""
    clock = Clock()
    store = MemoryStore(clock=clock)
    session = played.found[0].record if played.found else None
    assert session is not None
    await store.create_session(session.id, owner=session.owner, title=session.title)
    inputs, token = deque(played.inbox), None
    for row in played.rows:
        while inputs and inputs[0].at_seq < row.seq:
            clock.now_ms = inputs[0].received_at_ms
            await store.put(_entry(session.id, inputs.popleft()))
        token = await _owned(store, token, row.epoch)
        again = Row(row.seq, row.epoch, row.turn, token.commit_key(row.seq), row.at_ms, row.body)
        assert await store.write(token, [again]) is WriteOutcome.WRITTEN
    return await store.side_tables(session.id)


def _entry(session: str, stored: InboxRow) -> Entry:
    return Entry(session, stored.source, stored.event_id, stored.input, f"sha256:{stored.event_id}", keep_ms=60_000)


async def _owned(store: MemoryStore, token: Token | None, epoch: int) -> Token:
    """Return the right to write under an epoch."""
    while token is None or token.epoch < epoch:
        if token is not None:
            await store.surrender(token)
        [claimed] = await store.claim("rebuilding", at_most=1)
        token = claimed.token
    return token


# --- and beside the cells --------------------------------------------------------


@pytest.mark.rule("K1", "N1")
async def test_a_page_drops_the_rows_that_it_saw_and_that_were_never_stored(plays: Matrix) -> None:
    """The process lives on for a while before its COMMIT: the page is shown the rows, and nothing acts on them."""
    cell = Cell("offer", ("commit.write:before#9",))
    async with asyncio.timeout(60):
        played = await play(plays.zygote, plays.given, cell, moment_s=1.0)

    dropped = [row["kind"] for row in played.reader.dropped]
    assert dropped == ["consent.used", "turn.start", "turn.steps", "tool.sent"]
    assert "tool.reserve_table:before#2" not in played.passed[0]
    the_page_shows_what_is_stored(played)
    it_was_done_once(played)
    assert [seq(row) for row in played.reader.rows] == list(range(1, len(played.rows) + 1))


async def test_the_table_names_every_place(plays: Matrix) -> None:
    some = [Cell("offer", (point,)) for point in ("commit.write:before#10", "tool.tell_group:after#2")]
    async with asyncio.timeout(60):
        lines = table([await play(plays.zygote, plays.given, cell) for cell in some]).splitlines()

    assert "| before `commit.write` 10 | T3 is open: reserve_table is out, tell_group is due | " in "\n".join(lines)
    assert "| after `tool.tell_group` 2 | T3 is open: reserve_table is done, tell_group is out | " in "\n".join(lines)
