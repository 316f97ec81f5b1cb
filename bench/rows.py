"""CPU of a keyed row that is accepted, published, fenced, stored and acknowledged, against a raw insert.

The raw insert has the same columns and the same number of rows in a transaction, on the same connection settings; what
is above it is sayso: the position, the commit key, the fence, the JSON of the body and the hand-over between threads.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from pathlib import Path

from sayso.adapters.system import SystemClock
from sayso.core.inputs import Input, InputKind
from sayso.core.labels import RUNTIME, Part
from sayso.core.origin import Principal
from sayso.core.rows import BODY_VERSION, Draft, NoticeBody, encode_body
from sayso.core.session import Position
from sayso.journal.append import Journal
from sayso.journal.feed import Feeds
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Entry

ROWS = 6_400
#: sessions that write side by side: alone each row is a commit, together they share commits
SESSIONS = (1, 64)
ALICE = Principal.parse("user:alice")
BODY = NoticeBody((Part("All right, the table for four is booked. " * 6, "runtime", RUNTIME, "runtime"),))


async def sayso_ms(folder: Path, *, sessions: int) -> tuple[float, float]:
    """Return CPU milliseconds a row, and rows a commit, where so many sessions write a row at a time."""
    store = await SqliteStore.open(folder / "sayso.db", clock=SystemClock().now_ms, exclusive=True)
    feeds = Feeds()
    received = Input(InputKind.MESSAGE, ALICE, "api token")
    for n in range(sessions):
        await store.create_session(f"s{n}", owner=ALICE, title="")
        await store.put(Entry(f"s{n}", f"user:alice@s{n}", "e1", received, "sha256:0", keep_ms=60_000))
    async with asyncio.TaskGroup() as tasks:
        journals = [
            Journal(store, feeds.own(one.token.session), one.token, one.record, spawn=tasks.create_task)
            for one in await store.claim("bench", at_most=sessions)
        ]
        commits, began = store.commits, time.process_time()
        for _ in range(ROWS // sessions):
            tickets = []
            for journal in journals:
                journal.stage(Draft(BODY))
                tickets.append(journal.accept())
            for ticket in tickets:
                await ticket.durable()
        took, commits = time.process_time() - began, store.commits - commits
    newest = await store.session("s0")
    assert newest is not None
    assert newest.position == Position(1, ROWS // sessions), "every row is stored"
    await store.close()
    return took / ROWS * 1000, ROWS / commits


def raw_ms(folder: Path, *, rows_a_commit: int) -> float:
    """Return CPU milliseconds of one raw insert, as many in a transaction."""
    connection = sqlite3.connect(folder / "raw.db", isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute(
        "create table journal (session text, seq bigint, epoch bigint, turn text, kind text, commit_key text,"
        " at_ms bigint, version bigint, body text, primary key (session, seq))"
    )
    text = encode_body(BODY)
    began = time.process_time()
    for n in range(ROWS):
        if n % rows_a_commit == 0:
            connection.execute("begin immediate")
        row = (f"s{n % 64}", n, 1, None, "notice", f"0123456789abcdef.{n}", n, BODY_VERSION, text)
        connection.execute("insert into journal values (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        if n % rows_a_commit == rows_a_commit - 1:
            connection.execute("commit")
    took = time.process_time() - began
    connection.close()
    return took / ROWS * 1000


async def main() -> None:
    """Measure and print a line for each number of sessions."""
    print("a keyed row, accepted to durable, against a raw insert")
    print(" sessions  rows/commit   µs CPU   raw µs  ratio")
    for sessions in SESSIONS:
        with tempfile.TemporaryDirectory(prefix="sayso-bench-") as name:
            folder = Path(name)
            ours, together = await sayso_ms(folder, sessions=sessions)
            raw = raw_ms(folder, rows_a_commit=max(1, round(together)))
        print(f"{sessions:>9} {together:>12.1f} {ours * 1000:>8.0f} {raw * 1000:>8.0f} {ours / raw:>6.1f}")


if __name__ == "__main__":
    asyncio.run(main())
