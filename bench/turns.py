"""What a turn costs: commits, CPU and wall per turn in one session, as it grows; against raw fsync'd commits.

One turn: a message, a model reply that calls one tool, its result, a last word. The model is a script and
the tool does nothing, so what is measured is sayso and the disk.
"""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sayso.adapters.system import SystemClock
from sayso.agent import Agent
from sayso.assembly import App
from sayso.core.context import MessageRole
from sayso.core.origin import Principal
from sayso.journal.frames import Published
from sayso.runtime.commands import Caller
from sayso.runtime.ports import Call, Finished, ModelRequest
from sayso.storage.sqlite import SqliteStore
from sayso.testing.scripted import ScriptedModel, call, calls, say

TURNS = (10, 100, 1_000)
RAW_COMMITS = 200
HEAD = " turns  commits   CPU ms  CPU ratio  wall ms   raw ms  wall/raw"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one turn, on average over the last ten of so many."""

    turns: int
    commits: float
    cpu_ms: float
    wall_ms: float
    bytes: float


def script(request: ModelRequest) -> Finished:
    """Call the tool for a person's message, and say a word after its result."""
    newest = request.messages[-1]
    return calls(call("act", what="this")) if newest.role is MessageRole.USER else say("Done.")


def agent(*, keyed: bool) -> Agent:
    """An agent with one tool that does nothing."""
    made = Agent("bench", ScriptedModel(script, last=1), "Call the tool.")

    @made.tool(effect="send", keyed=keyed)
    async def act(call: Call, what: str) -> str:
        return "done"

    return made


async def measure(folder: Path, *, keyed: bool, turns: int) -> Cost:
    """Run `turns` turns in one session, and return what one of the last ten costs."""
    store = await SqliteStore.open(folder / f"{keyed}-{turns}.db", clock=SystemClock().now_ms, exclusive=True)
    app = App(agent(keyed=keyed), store=store)
    alice = Caller(Principal.parse("user:alice"), "api token")
    async with app.running():
        session = (await app.commands.open_session(alice)).id
        await _turns(app, alice, session, turns - 10)
        size = _bytes(folder)
        before = (store.commits, time.process_time(), time.perf_counter())
        await _turns(app, alice, session, 10)
        after = (store.commits, time.process_time(), time.perf_counter())
    commits, cpu, wall = ((b - a) / 10 for a, b in zip(before, after, strict=True))
    stored = await store.rows(session)
    await store.close()
    assert len(stored) == turns * 7 + (0 if keyed else turns), "every turn has its rows"
    # the commit that stored the input is not the turn's
    return Cost(turns, commits - 1, cpu * 1000, wall * 1000, (_bytes(folder) - size) / 10)


def _bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


async def _turns(app: App, alice: Caller, session: str, count: int) -> None:
    for _ in range(count):
        listener, _ = app.feeds.listen(session)
        await app.commands.post(alice, session, "do it")
        while (event := await listener.queue.get()) is not None:
            if isinstance(event, Published) and event.row.kind == "turn.end":
                break
        app.feeds.leave(session, listener)


def raw_commit_ms(folder: Path) -> float:
    """Return the wall time of one fsync'd commit of one small row, nothing else around it."""
    connection = sqlite3.connect(folder / "raw.db", isolation_level=None)
    connection.execute("pragma journal_mode = wal")
    connection.execute("pragma synchronous = full")
    connection.execute("create table t (n integer primary key, body text)")
    started = time.perf_counter()
    for n in range(RAW_COMMITS):
        connection.execute("begin immediate")
        connection.execute("insert into t values (?, ?)", (n, "x" * 512))
        connection.execute("commit")
    took = time.perf_counter() - started
    connection.close()
    return took / RAW_COMMITS * 1000


async def main() -> None:
    """Measure and print a table."""
    with tempfile.TemporaryDirectory(prefix="sayso-bench-") as name:
        for keyed in (True, False):
            print(f"one turn with one {'keyed' if keyed else 'unkeyed'} tool call")
            print(HEAD)
            first = 0.0
            for turns in TURNS:
                folder = Path(tempfile.mkdtemp(dir=name))
                raw = raw_commit_ms(folder)
                cost = await measure(folder, keyed=keyed, turns=turns)
                raw = (raw + raw_commit_ms_again(folder)) / 2
                first = first or cost.cpu_ms
                print(
                    f"{turns:>6} {cost.commits:>8.1f} {cost.cpu_ms:>8.2f} {cost.cpu_ms / first:>10.2f} "
                    f"{cost.wall_ms:>8.2f} {raw * cost.commits:>8.2f} {cost.wall_ms / (raw * cost.commits):>9.2f}"
                )


def raw_commit_ms_again(folder: Path) -> float:
    """The same once more, after the measurement, since a shared disk changes its pace."""
    (folder / "raw.db").unlink()
    return raw_commit_ms(folder)


if __name__ == "__main__":
    asyncio.run(main())
