"""Do all stores agree on who takes part in a session, and in which sessions somebody does?"""

from __future__ import annotations

import pytest

from sayso.core.errors import IllegalChange
from sayso.core.rows import ParticipantChangedBody
from sayso.core.session import SessionRole
from sayso.storage.store import ParticipantRow
from tests.conformance.given import ALICE, BOB, Inspected, hook, owned, rows

MEMBER, VIEWER = SessionRole.MEMBER, SessionRole.VIEWER


def changed(n: int, role: SessionRole | None) -> ParticipantChangedBody:
    return ParticipantChangedBody(n, str(BOB), role, str(ALICE))


async def test_the_newest_row_says_what_somebody_is(store: Inspected) -> None:
    token = await owned(store)
    for n in (2, 3):
        await store.put(hook(f"evt_{n}"))
    assert await store.participants("s1") == []

    for n, role in ((1, VIEWER), (2, MEMBER)):
        await store.write(token, rows(token, n - 1, changed(n, role)))
        assert await store.participants("s1") == [ParticipantRow(BOB, role, n)]
        assert await store.participant("s1", BOB) == ParticipantRow(BOB, role, n)
    await store.write(token, rows(token, 2, changed(3, None)))

    assert await store.participants("s1") == []
    assert await store.participant("s1", BOB) is None
    assert [row.taken_seq for row in await store.inbox_record("s1")] == [1, 2, 3]


async def test_what_was_asked_is_taken_once(store: Inspected) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, changed(1, MEMBER)))

    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 1, changed(1, None)))

    assert await store.participants("s1") == [ParticipantRow(BOB, MEMBER, 1)]


@pytest.mark.rule("X36", "X37")
async def test_ones_sessions_are_those_one_owns_or_takes_part_in_and_no_others(store: Inspected) -> None:
    """Newest first, page by page; of another session nothing, whoever asks."""
    shared = await owned(store, session="s2")
    for session, owner in (("s1", BOB), ("s3", BOB), ("s4", ALICE), ("s5", BOB)):
        await store.create_session(session, owner=owner, title="")
    await store.write(shared, rows(shared, 0, changed(1, VIEWER)))

    async def of(limit: int, before: str | None = None) -> list[str]:
        return [record.id for record in await store.sessions(of=BOB, limit=limit, before=before)]

    assert await of(10) == ["s5", "s3", "s2", "s1"]
    assert await of(2) == ["s5", "s3"]
    assert await of(2, before="s3") == ["s2", "s1"]
    assert await of(0) == []
    assert [record.id for record in await store.sessions(of=ALICE, limit=10)] == ["s4", "s2"]
    assert await store.participant("s4", BOB) is None
