"""Does a call cost the same however long a session's past is? SQLite says by which index it would look."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from sayso.core.consent import ConsentState
from sayso.core.errors import SaysoError
from sayso.core.operation import OperationState, Ref
from sayso.core.session import Position, Token
from sayso.storage import migrate, statements, statements_door, statements_files, statements_nodes
from sayso.storage.statements import Body, Many, Sql
from sayso.storage.store import Upload
from tests.conformance.given import ALICE, Clock, hook

OURS = Token("s1", 0, "")

CALLS: dict[str, tuple[Callable[[], Body[Any]], set[str]]] = {
    "claim": (lambda: statements.claim("n1", ["0"]), {"session_ready", "PRIMARY KEY (node=?)"}),
    "beat": (lambda: statements_nodes.beat("n1", "", 9), set()),
    "sweep": (
        lambda: statements_nodes.sweep(9, 0),
        {"node_lease (lease_until_ms<?)", "session_of_node (node=?)", "node_dead (dead_at_ms<?)"},
    ),
    "reclaim": (lambda: statements_nodes.reclaim("n1", set()), {"session_of_node (node=?)"}),
    "ready": (lambda: statements.ready(9), {"session_ready"}),
    "delete": (
        lambda: statements_door.delete_session("s1"),
        {
            "sqlite_autoindex_journal_1 (session=?)",
            "sqlite_autoindex_inbox_1 (session=?)",
            "upload_of_session (session=?)",
        },
    ),
    "release": (lambda: statements.release(OURS, 1), {"PRIMARY KEY (id=?)"}),
    "a page of rows": (
        lambda: statements.rows("s1", 5, None, 10),
        {"sqlite_autoindex_journal_1 (session=? AND seq>? AND seq<?)"},
    ),
    "the last rows": (lambda: statements.last_rows("s1", 5, None), {"sqlite_autoindex_journal_1"}),
    "keep": (lambda: statements.keep("s1", Position(7, 7)), {"sqlite_autoindex_journal_1 (session=? AND seq<?)"}),
    "questions that are open or due": (
        lambda: statements.standings("s1", (ConsentState.OPEN,), True),
        {"consent_in_state (session=? AND state=?)", "consent_due (session=?)"},
    ),
    "unsettled operations": (
        lambda: statements.operations("s1", (OperationState.SENT,)),
        {"operation_in_state (session=? AND state=?)"},
    ),
    "refs": (
        lambda: statements.refs("restaurant", [Ref("restaurant", "reservation", "R1")]),
        {"ref_to_session (source=? AND kind=? AND value=?)"},
    ),
    "one's sessions": (
        lambda: statements.sessions(ALICE, 10, "s5"),
        {"session_of_owner (owner=? AND id<?)", "participant_in_sessions (principal=? AND session<?)"},
    ),
    "one's role": (lambda: statements.participant("s1", ALICE), {"PRIMARY KEY (session=? AND principal=?)"}),
    "who takes part": (lambda: statements.participants("s1"), {"PRIMARY KEY (session=?)"}),
    "the queue": (lambda: statements_door.inbox("s1", 5, 10), {"inbox_queued (session=? AND n>?)"}),
    "put": (
        lambda: statements_door.put(hook("evt_1", id_signed=False), inbox_max=1, door_notes_max=9),
        {"seen_content (source=? AND digest=?)", "PRIMARY KEY (id=?)"},
    ),
    "put into a long inbox": (
        lambda: statements_door.put(hook("evt_1"), inbox_max=0, door_notes_max=9),
        {"inbox_queued (session=? AND n>?)"},
    ),
    "fire": (lambda: statements_door.fire(), {"timer_due (next_at_ms<?)", "timer_due (next_at_ms>?)"}),
    "forget": (lambda: statements_door.forget(10), {"seen_until (until_ms<?)"}),
    "an upload": (
        lambda: statements_files.stage_upload(Upload("u", "s1", ALICE, "f", "t/s", "d"), b"x", 1, 9, 9),
        {"upload_of_session (session=? AND uploader=?)", "sqlite_autoindex_piece_1 (digest=?)"},
    ),
    "a message with an upload": (
        lambda: statements_door.put(replace(hook("evt_1"), uploads=("u",)), inbox_max=9, door_notes_max=9),
        {"sqlite_autoindex_upload_1 (upload=?)"},
    ),
    "uploads whose time is over": (lambda: statements_files.expire(10), {"upload_until (until_ms<?)"}),
    "bytes that are nobody's": (lambda: statements_files.sweep(10), {"blob_of_nobody"}),
    "a file": (
        lambda: statements_files.attachment("s1", "n1.1"),
        {"sqlite_autoindex_attachment_1 (session=? AND attachment=?)"},
    ),
    "a piece of it": (
        lambda: statements_files.piece("d", 0),
        {"sqlite_autoindex_piece_1 (digest=? AND place=?)", "PRIMARY KEY (digest=?)"},
    ),
    "the files of an input": (
        lambda: statements.release_attachments("s1", 1),
        {"attachment_of_input (session=? AND n=?)"},
    ),
    "a session's files": (
        lambda: statements_files.release_all("s1"),
        {"upload_of_session (session=?)", "sqlite_autoindex_attachment_1 (session=?)"},
    ),
}


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    """An empty database with the schema of this release, and one session."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        for migration in migrate.released():
            for text in migration.statements("sqlite"):
                connection.execute(text)
        plan(connection, statements.create_session("s1", ALICE, ""))
        yield connection


def plan(connection: sqlite3.Connection, body: Body[Any]) -> list[str]:
    """Run a body, and return how SQLite would look for what each of its statements names."""
    steps: list[str] = []
    answer: Any = None
    try:
        while True:
            asked = body.send(answer)
            if isinstance(asked, Sql):
                steps += [step for *_, step in connection.execute(f"explain query plan {asked.text}", asked.params)]
                answer = connection.execute(asked.text, asked.params).fetchall()
            elif isinstance(asked, Many):
                answer = connection.executemany(asked.text, asked.rows).fetchall()
            else:
                answer = Clock().now_ms
    except (StopIteration, SaysoError):
        return steps


@pytest.mark.parametrize("name", CALLS)
def test_a_call_looks_by_index(connection: sqlite3.Connection, name: str) -> None:
    body, indexes = CALLS[name]

    steps = plan(connection, body())

    for index in indexes:
        assert any(index in step for step in steps), steps
    # what is read there was found by an index, or is no table
    of_a_query = ("SCAN waiting", "SCAN hers", "SCAN CONSTANT ROW")
    whole = [step for step in steps if step.startswith("SCAN") and "INDEX" not in step and step not in of_a_query]
    assert whole == [], "a table is read from end to end"
