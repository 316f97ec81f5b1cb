"""The crash matrix: where its servers are killed, and the table of what was found and what followed.

`python -m tools.crash_matrix` plays every cell, writes the list of cells and the table to tests/recorded, and prints
the table. `tests/e2e/test_crash_matrix.py` plays the cells of the list and checks each, and that the list is whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from itertools import groupby
from pathlib import Path

from sayso.core.consent import ConsentState, Standing
from sayso.core.inputs import InputKind
from sayso.core.operation import OperationState
from sayso.core.rows import AnswerRefusedBody, ToolSentBody, ToolUnknownBody
from sayso.core.turn import CallState, Phase, Turn
from sayso.demo.zygote import Zygote, zygote
from sayso.storage.store import OperationRow
from tools.crash_story import STORIES, Cell, Found, Played, Prepared, play, prepared

RECORDED = Path(__file__).parents[1] / "tests" / "recorded"
POINTS = RECORDED / "crash_points.txt"
TABLE = RECORDED / "crash_matrix.md"
#: cells played at the same time: each mostly waits
TOGETHER = 4
#: how long a cell may take, seconds
CELL_S = 40.0

#: kills after which the next start is killed too, at each of its places until what the first kill left is settled
AGAIN = (
    Cell("offer", ("tool.reserve_table:before#2",)),  # it never went out
    Cell("offer", ("tool.reserve_table:after#2",)),  # it happened, and nobody heard
    Cell("offer", ("tool.tell_group:after#2",)),  # the same, where nobody can be asked
)


# --- the cells -----------------------------------------------------------------


async def all_cells(one: Zygote, given: Prepared) -> list[Cell]:
    """Return every cell there is, found by playing: the places that a story passes, in order."""
    found = []
    for story in STORIES:
        undisturbed = await play(one, given, Cell(story))
        found += [Cell(story, (name,)) for name in undisturbed.passed[0]]
    for first in AGAIN:
        restarted = await play(one, given, first)
        found += [Cell(first.story, (*first.points, name)) for name in _until_settled(restarted.passed[1])]
    return found


def _until_settled(passed: Sequence[str]) -> list[str]:
    """Return the places up to the commit of the last answer from outside."""
    outside = max(place for place, name in enumerate(passed) if name.startswith(("tool.", "lookup.")))
    end = next(place for place in range(outside, len(passed)) if passed[place].startswith("store.write:after"))
    return list(passed[: end + 1])


def recorded_cells() -> list[Cell]:
    """Return the cells of the recorded list."""
    return [Cell.parse(line) for line in POINTS.read_text("utf-8").splitlines()]


class Matrix:
    """Plays cells, some ahead of the one that is asked for."""

    def __init__(self, one: Zygote, given: Prepared, cells: Sequence[Cell]) -> None:
        self.zygote, self.given = one, given
        self._cells = list(cells)
        self._playing: dict[Cell, asyncio.Task[Played]] = {}

    async def played(self, cell: Cell) -> Played:
        """Return a cell's end. One that comes to none in time is a failure, never a wait."""
        place = self._cells.index(cell)
        for ahead in self._cells[place : place + TOGETHER]:
            if ahead not in self._playing:
                self._playing[ahead] = asyncio.create_task(play(self.zygote, self.given, ahead))
        ended, _ = await asyncio.wait([self._playing[cell]], timeout=CELL_S)
        if not ended:
            self._playing[cell].cancel()
            raise AssertionError(f"{cell} came to no end in {CELL_S} s")
        if self._playing[cell].cancelled():
            raise AssertionError(f"{cell} was cancelled from within")
        return self._playing[cell].result()

    async def end(self) -> None:
        """Stop what was begun and not asked for."""
        for task in self._playing.values():
            task.cancel()
        await asyncio.gather(*self._playing.values(), return_exceptions=True)


@asynccontextmanager
async def matrix(cells: Sequence[Cell]) -> AsyncIterator[Matrix]:
    """Yield a matrix of these cells."""
    async with zygote() as one, prepared() as given:
        plays = Matrix(one, given, cells)
        try:
            yield plays
        finally:
            await plays.end()


# --- what was found ------------------------------------------------------------

_WAITS = {
    InputKind.MESSAGE: "her message waits",
    InputKind.EVENT: "the hook waits",
    InputKind.ANSWER: "her yes waits",
    InputKind.STOP: "her stop waits",
}


def found_in_words(found: Found) -> str:
    """Return what a kill left in the file."""
    says = [_turn_in_words(found.turn)] if found.turn is not None else []
    says += [f"{one.consent.id} is approved" for one in _approved(found)]
    says += [_WAITS[entry.input.kind] for entry in found.waiting]
    if says:
        return "; ".join(says)
    return f"T{found.record.turns} has ended" if found.record.turns else "nothing"


def _approved(found: Found) -> list[Standing]:
    return [standing for standing in found.standings if standing.state is ConsentState.APPROVED]


def _turn_in_words(turn: Turn) -> str:
    if turn.phase is not Phase.ACTING:
        return f"{turn.id} is open, the model is due"
    calls = [f"{planned.called.tool} {_STATES[planned.state]}" for planned in turn.plan]
    return f"{turn.id} is open: {', '.join(calls)}"


_STATES = {
    CallState.PLANNED: "is due",
    CallState.INTENDED: "is due",
    CallState.SENT: "is out",
    CallState.UNKNOWN: "is unknown",
    CallState.SETTLED: "is done",
}


# --- what followed -------------------------------------------------------------

_AGAIN = {
    "message": "her message comes again",
    "hook": "the hook comes again",
    "more": "her second message comes again",
    "stop": "her stop comes again",
    "answer": "her yes comes again",
}
_IDS = {"message": "message-1", "hook": "evt_17", "more": "message-2", "stop": "message-2", "answer": "yes-1"}
_TAKEN = {
    InputKind.MESSAGE: "it is taken",
    InputKind.EVENT: "it is taken",
    InputKind.ANSWER: "it is settled",
    InputKind.STOP: "it is settled",
}


def followed_in_words(played: Played, kill: int) -> str:
    """Return what came after a kill, counted from 0, because of it."""
    found = played.found[kill]
    says = [_settled(played, operation, kill) for operation in found.out]
    if found.turn is not None and not found.out:
        says.append(_goes_on(found.turn, played.passed[kill], found))
    says += ["its steps run" for _ in _approved(found)]
    says += [_TAKEN[entry.input.kind] for entry in found.waiting]
    says += [f"{again}: {_received(played, what)}" for what, again in _AGAIN.items() if _unheard(played, what, kill)]
    return "; ".join(says) or "it goes on"


def _unheard(played: Played, what: str, kill: int) -> bool:
    return any(each.start == kill and each.status is None for each in played.tries[what])


def _received(played: Played, what: str) -> str:
    if _IDS[what] in {noted.note.event_id for noted in played.door}:
        return "a known repeat"
    second = what == "answer" and any(isinstance(row.body, AnswerRefusedBody) for row in played.rows)
    return "a second one, which changes nothing" if second else "it is stored"


def _settled(played: Played, operation: OperationRow, kill: int) -> str:
    """Return how an operation was settled that was out, or unknown already."""
    bodies = [row.body for row in played.rows if row.epoch > played.found[kill].record.epoch]
    unknown = [body for body in bodies if isinstance(body, ToolUnknownBody) and body.operation == operation.operation]
    sent = [body for body in bodies if isinstance(body, ToolSentBody) and body.operation == operation.operation]
    later = [name for passed in played.passed[kill + 1 :] for name in passed]
    says = ["tool.unknown"] if unknown and operation.state is OperationState.SENT else []
    if any(name.startswith(f"lookup.{operation.tool}:") for name in later):
        says.append("the restaurant is asked: " + ("it never happened" if sent else "it happened"))
    says += [f"attempt {body.attempt} under the same key" for body in sent]
    return ", ".join(says)


def _goes_on(turn: Turn, passed: Sequence[str], found: Found) -> str:
    if turn.phase is Phase.ACTING:
        return f"{turn.id} goes on"
    asked = len([name for name in passed if name.startswith("model:before")]) > found.replies
    return "it is asked again" if asked else "it is asked"


# --- the table -----------------------------------------------------------------


def table(all_played: Iterable[Played]) -> str:
    """Return the table as Markdown: what leaves the same behind, and ends the same way, shares a line."""
    lines = []
    for (story, before), of_story in groupby(all_played, key=lambda each: (each.cell.story, each.cell.points[:-1])):
        same: dict[tuple[str, str], list[str]] = defaultdict(list)
        writes: list[str] = []
        for played in of_story:
            kill = len(before)
            found, followed = found_in_words(played.found[kill]), followed_in_words(played, kill)
            same[found, followed].append(played.cell.points[-1])
            writes = max(writes, played.writes, key=len)
        lines += ["", *_head(story, before, writes), "", "| killed | found | what followed |", "| --- | --- | --- |"]
        lines += [f"| {in_short(points)} | {found} | {followed} |" for (found, followed), points in same.items()]
    return "\n".join(lines).strip() + "\n"


def _head(story: str, before: tuple[str, ...], writes: Sequence[str]) -> list[str]:
    if before:
        return [f"**{story}**, killed {in_short(before)}, and killed again while that is settled:"]
    said = "; ".join(f"{number} `{kinds.replace(',', ' ')}`" for number, kinds in enumerate(writes, 1))
    return [f"**{story}**: {STORIES[story].about}. Its writes: {said}."]


def in_short(points: Iterable[str]) -> str:
    """Return places as a line names them: before, after or around what, and its number."""
    phases: dict[str, list[str]] = defaultdict(list)
    for point in points:
        place, _, number = point.rpartition("#")
        what, _, phase = place.rpartition(":")
        phases[f"`{what}` {number}"].append(phase)
    by_phase: dict[str, list[str]] = defaultdict(list)
    for what, some in phases.items():
        by_phase["around" if {"before", "after"} <= set(some) else some[0]].append(what)
    return "; ".join(f"{phase} {', '.join(whats)}" for phase, whats in by_phase.items())


def write(cells: Iterable[Cell], ends: Iterable[Played]) -> None:
    """Write the list of cells and the table."""
    POINTS.write_text("".join(f"{cell}\n" for cell in cells), "utf-8")
    TABLE.write_text(table(ends), "utf-8")


async def main() -> None:
    """Write the list and the table, and print the table."""
    began = time.monotonic()
    async with zygote() as one, prepared() as given:
        cells = await all_cells(one, given)
    async with matrix(cells) as plays:
        ends = [await plays.played(cell) for cell in cells]
    write(cells, ends)
    print(table(ends))
    print(f"{len(cells)} cells in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    asyncio.run(main())
