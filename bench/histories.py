"""What a history costs: capture of 100 to 10,000 rows and their public JSON, against a raw SELECT and JSON.

The raw side reads the same columns of the same file, parses each body, and makes one JSON text of all rows: what
anybody would do who keeps rows in SQLite and shows them. What is above it is sayso: rows as values, what is public of
them, a sentence for each, and what was accepted meanwhile in its place.
"""

from __future__ import annotations

import json
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvloop

from sayso.adapters.system import SystemClock
from sayso.core.authority import Verdict
from sayso.core.contract import Effect
from sayso.core.inputs import Input, InputKind
from sayso.core.labels import RUNTIME, USER, Part
from sayso.core.origin import Origin, Principal
from sayso.core.rows import (
    Body,
    Called,
    Ending,
    InputBody,
    ModelCalledBody,
    ModelSaidBody,
    Outcome,
    Row,
    ToolResultBody,
    TurnEndBody,
    TurnStartBody,
)
from sayso.journal.feed import Feeds
from sayso.journal.follow import capture
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Claimed, Entry

ROWS = (100, 1_000, 10_000)
TIMES = 25
SESSION = "s1"
ALICE = Principal.parse("user:alice")
#: what the raw side reads
SELECT = """
    select seq, epoch, turn, kind, commit_key, at_ms, version, body from journal
    where session = ? order by seq desc limit ?
"""


def turn(n: int, at_ms: int) -> Iterator[Body]:
    """Yield the rows of one turn: a message, a call of a tool that only reads, its result, a last word."""
    words = (Part("Is there a table for four on Friday at seven, and what would it cost us?", "user:alice", USER),)
    received = Input(InputKind.MESSAGE, ALICE, "api token", words)
    yield InputBody(n, f"user:alice@{SESSION}", f"e{n}", at_ms, received)
    yield TurnStartBody(Origin(ALICE, "api token", (n,)), steps_left=20)
    arguments = {"day": "Friday", "time": "19:00", "party": 4}
    called = Called(f"T{n}.1.1", "look_up_tables", arguments, Verdict.RUN, "the user started it", Effect.READ)
    yield ModelCalledBody(1, (called,), ())
    found = (Part("A table for four is free at 19:00 and at 20:30. " * 4, "tool:look_up_tables", RUNTIME),)
    yield ToolResultBody(f"T{n}.1.1", "look_up_tables", Outcome.OK, found)
    yield ModelSaidBody(2, (Part("Yes: at seven and at half past eight. Nothing is charged. " * 2, "model", RUNTIME),))
    yield TurnEndBody(Ending.DONE, "", 18)


async def filled(folder: Path, rows: int) -> SqliteStore:
    """Return a store whose session has so many rows, of whole turns but for the last."""
    store = await SqliteStore.open(folder / "sayso.db", clock=SystemClock().now_ms, exclusive=True)
    await store.create_session(SESSION, owner=ALICE, title="")
    await put(store, 1)
    [claimed] = await store.claim("bench", at_most=1)
    seq = 0
    for n in range(1, rows // 6 + 2):
        bodies = list(turn(n, claimed.record.at_ms))[: rows - seq]
        if not bodies:
            break
        if n > 1:
            await put(store, n)
        await store.write(claimed.token, [row(claimed, seq + i, n, body) for i, body in enumerate(bodies, 1)])
        seq += len(bodies)
    return store


async def put(store: SqliteStore, n: int) -> None:
    """Store an input for the next turn to take."""
    received = Input(InputKind.MESSAGE, ALICE, "api token")
    await store.put(Entry(SESSION, f"user:alice@{SESSION}", f"e{n}", received, "sha256:0", keep_ms=60_000))


def row(claimed: Claimed, seq: int, n: int, body: Body) -> Row:
    """Return a row of the n-th turn."""
    in_turn = None if isinstance(body, InputBody) else f"T{n}"
    return Row(seq, claimed.token.epoch, in_turn, claimed.token.commit_key(seq), claimed.record.at_ms + seq, body)


def raw(connection: sqlite3.Connection, rows: int) -> str:
    """Return the JSON of the newest rows, as anybody would make it."""
    found = connection.execute(SELECT, (SESSION, rows)).fetchall()
    shown = [
        {"position": f"{epoch}.{seq}", "kind": kind, "turn": turn, "at_ms": at_ms, "body": json.loads(body)}
        for seq, epoch, turn, kind, _, at_ms, _, body in reversed(found)
    ]
    return json.dumps(shown, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Cost:
    """Least milliseconds of so many tries: what else the machine does only adds."""

    wall: float
    cpu: float


async def measure(folder: Path, rows: int) -> tuple[Cost, Cost, float]:
    """Return what a capture with its JSON costs, and the raw read, taken by turns; and how long of the first the
    event loop is busy with JSON, in milliseconds."""
    store = await filled(folder, rows)
    connection = sqlite3.connect(folder / "sayso.db")
    feeds = Feeds()
    ours, raws, loops = [], [], []
    for _ in range(TIMES * max(1, 1_000 // rows)):
        began = _now()
        captured = await capture(store, feeds, SESSION, limit=rows)
        read = _now()
        text = captured.text
        ended = _now()
        ours.append(_since(began, ended))
        loops.append(_since(read, ended).cpu)
        began = _now()
        other = raw(connection, rows)
        raws.append(_since(began, _now()))
        assert len(json.loads(text)["rows"]) == len(json.loads(other)) == rows
    connection.close()
    await store.close()
    return _least(ours), _least(raws), min(loops)


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _since(began: tuple[float, float], ended: tuple[float, float]) -> Cost:
    return Cost((ended[0] - began[0]) * 1000, (ended[1] - began[1]) * 1000)


def _least(costs: list[Cost]) -> Cost:
    return Cost(min(cost.wall for cost in costs), min(cost.cpu for cost in costs))


async def main() -> None:
    """Measure and print a line for each number of rows."""
    print("a history: capture and its JSON, against a raw SELECT and JSON (bar: 2)")
    print("  rows   CPU ms   raw ms  ratio   wall ms   raw ms  ratio   in the loop, ms")
    for rows in ROWS:
        with tempfile.TemporaryDirectory(prefix="sayso-bench-") as name:
            ours, raws, loop = await measure(Path(name), rows)
        print(
            f"{rows:>6} {ours.cpu:>8.1f} {raws.cpu:>8.1f} {ours.cpu / raws.cpu:>6.2f} "
            f"{ours.wall:>9.1f} {raws.wall:>8.1f} {ours.wall / raws.wall:>6.2f} {loop:>12.1f}"
        )


if __name__ == "__main__":
    uvloop.run(main())
