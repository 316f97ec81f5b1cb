"""Does a call cost the same however long a session's past is? PostgreSQL says how it looks where there is one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sayso.core.consent import ConsentState
from sayso.core.errors import SaysoError
from sayso.core.operation import OperationState, Ref
from sayso.core.rows import BODY_VERSION, ModelSaidBody, encode_body
from sayso.core.session import Position, Token
from sayso.storage import migrate, statements, statements_door, statements_nodes
from sayso.storage.statements import Body, Sql, dialect
from sayso.storage.store import DoorKind, DoorNote
from tests import postgres
from tests.conformance.given import NOON, Clock, hook, rows

OURS = Token("s1", 0, "")
#: of everything so much, settled, in one session that has seen much; and as many sessions
PAST = 5_000

CALLS: dict[str, tuple[Callable[[], Body[Any]], set[str]]] = {
    "claim": (lambda: statements.claim("n1", ["0"]), {"session_ready", "node_pkey (node = 'n1'"}),
    "release": (lambda: statements.release(OURS, 1), {"session_pkey (id = 's1'"}),
    "beat": (lambda: statements_nodes.beat("n1", "", 9), set()),
    "sweep": (
        lambda: statements_nodes.sweep(9, 0),
        {"node_lease (lease_until_ms <= ", "session_of_node", "node_dead (dead_at_ms <= ", "node_pkey (node = "},
    ),
    "reclaim": (
        lambda: statements_nodes.reclaim("n50", set()),
        {"session_of_node (node = 'n50'", "session_pkey (id = "},
    ),
    "a page of rows": (
        lambda: statements.rows("s1", 5, None, 10),
        {"journal_pkey ((session = 's1'::text) AND (seq > "},
    ),
    "the last rows": (
        lambda: statements.last_rows("s1", 5, None),
        {"journal_pkey ((session = 's1'::text) AND (seq < "},
    ),
    "keep": (
        lambda: statements.keep("s1", Position(7, 7)),
        {"session_pkey (id = 's1'", "journal_pkey ((session = 's1'::text) AND (seq <= "},
    ),
    "questions that are open or due": (
        lambda: statements.standings("s1", (ConsentState.OPEN,), True),
        {"consent_in_state ((session = 's1'::text) AND (state = 'open'", "consent_due (session = 's1'"},
    ),
    "unsettled operations": (
        lambda: statements.operations("s1", (OperationState.SENT,)),
        {"operation_in_state ((session = 's1'::text) AND (state = 'sent'"},
    ),
    "refs": (
        lambda: statements.refs("restaurant", [Ref("restaurant", "reservation", "R1")]),
        {"ref_to_session ((source = 'restaurant'::text) AND (kind = 'reservation'::text) AND (value = 'R1'"},
    ),
    "the queue": (
        lambda: statements_door.inbox("s1", 5, 10),
        {"inbox_queued ((session = 's1'::text) AND (n > "},
    ),
    "put": (
        lambda: statements_door.put(hook("evt_1", id_signed=False), inbox_max=1, door_notes_max=9),
        {"seen_content ((source = 'restaurant'::text) AND (digest = ", "session_pkey (id = 's1'"},
    ),
    "put into a long inbox": (
        lambda: statements_door.put(hook("evt_2"), inbox_max=0, door_notes_max=9),
        {"inbox_queued ((session = 's1'::text) AND (n > "},
    ),
    "note": (
        lambda: statements_door.note(DoorNote(DoorKind.REJECTED, "restaurant", "", session="s1"), door_notes_max=PAST),
        {"door_pkey (n <= ", "session_pkey (id = 's1'"},
    ),
    "fire": (lambda: statements_door.fire(), {"timer_due (next_at_ms <= "}),
    "forget": (lambda: statements_door.forget(10), {"seen_until (until_ms <= "}),
}


_LIVED = f"""
    insert into session (id, owner, title, created_at_ms, state, ready_at_ms, node, epoch, nonce, head, inbox_tail,
            turns, consents, at_ms)
        select 's' || i, 'user:u' || i % 100, '', 0,
            case i % 100 when 0 then 'ready' when 50 then 'owned' else 'idle' end, case i % 100 when 0 then i end,
            case i % 100 when 50 then 'n' || i end, 0, '', {PAST}, {PAST}, 0, 0, 0
        from generate_series(1, {PAST}) i;
    insert into node (node, registered_at_ms, lease_until_ms, dead_at_ms)
        select 'n' || i, 0, case when i % 100 < 2 then {NOON} + i * (i % 100) end,
            case i % 100 when 0 then {NOON} end from generate_series(1, {PAST}) i;
    insert into journal
        select 's1', i, 1, 'T1', '{{kind}}', 'x.' || i, 0, {BODY_VERSION}, '{{said}}' from generate_series(1, {PAST}) i;
    insert into call
        select 's1', 'T' || i, 'T1', 'book', '{{{{}}}}', 'settled', i, 'ok', i from generate_series(1, {PAST}) i;
    insert into operation
        select 's1', 'O' || i, 'T' || i, 'T1', 'book', 'k' || i, '', 'answered', 1 from generate_series(1, {PAST}) i;
    insert into consent (session, consent, state, seq, epoch, digest, expires_at_ms, body)
        select 's1', 'A' || i, 'declined', i, 1, '', 0, '' from generate_series(1, {PAST}) i;
    insert into ref
        select 's' || i % 100, 'restaurant', 'reservation', 'R' || i, null, 'T1', 'live', null, i
        from generate_series(1, {PAST}) i;
    insert into timer
        select 's' || i % 100, 'A' || i, 'expiry', case i % 100 when 0 then {NOON} + i end
        from generate_series(1, {PAST}) i;
    insert into inbox (session, n, lane, at_seq, state, source, event_id, received_at_ms, body, taken_seq)
        select 's1', i, 'normal', 0, 'taken', 'restaurant', 'e' || i, 0, '', i from generate_series(1, {PAST}) i;
    insert into seen
        select 'restaurant', 'e' || i, 'd' || i, i % 2, 's1', i, 0, {NOON} + i from generate_series(1, {PAST}) i;
    insert into door (at_ms, kind, source, text, event_id, digest)
        select 0, 'input.dropped', 'restaurant', '', '', '' from generate_series(1, {PAST}) i;
    analyze session, node, journal, call, operation, consent, ref, timer, inbox, seen, door
    """  # noqa: S608 - ours


@pytest.fixture(scope="module")
def connection() -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """The schema of this release, and a long past in it."""
    with postgres.schema() as url, psycopg.connect(url) as connection:
        for migration in migrate.released():
            for text in migration.statements("postgres"):
                connection.execute(text.encode())
        [said] = rows(OURS, 0, ModelSaidBody(1, ()))
        connection.execute(_LIVED.format(kind=said.kind, said=encode_body(said.body)).encode())
        connection.commit()
        yield connection


def plan(connection: psycopg.Connection[tuple[Any, ...]], body: Body[Any]) -> list[str]:
    """Run a body, and return each step by which PostgreSQL would look, with its condition."""
    steps: list[str] = []
    answer: Any = None
    try:
        while True:
            asked = body.send(answer)
            if isinstance(asked, Sql):
                text = dialect(asked.text, "postgres").replace("%", "%%").replace("?", "%s").encode()
                steps += lookups([row[0] for row in connection.execute(b"explain " + text, asked.params)])
                done = connection.execute(text, asked.params)
                answer = done.fetchall() if done.description else []
            else:
                answer = Clock().now_ms
    except (StopIteration, SaysoError):
        return steps


def lookups(explained: list[str]) -> list[str]:
    """Return `<index> <condition>` for each look into an index, and `Seq Scan on <table>` for each without."""
    found: list[str] = []
    for line in explained:
        if looked := _LOOKED.search(line):
            found.append(looked.group(1))
        elif line.strip().startswith("Index Cond: "):
            found[-1] += line.strip().removeprefix("Index Cond:")
        elif whole := _WHOLE.search(line):
            found.append(whole.group())
    return found


_LOOKED = re.compile(r"Index (?:Only )?Scan (?:Backward )?(?:using|on) (\w+)")
_WHOLE = re.compile(r"Seq Scan on \w+")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_looks_by_index_on_postgresql(connection: psycopg.Connection[tuple[Any, ...]], name: str) -> None:
    body, indexes = CALLS[name]

    steps = plan(connection, body())
    connection.rollback()

    for index in indexes:
        assert any(index in step for step in steps), steps
    assert [step for step in steps if step.startswith("Seq Scan")] == [], "a table is read from end to end"
