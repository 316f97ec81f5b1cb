"""Do all stores keep the same promises about files? Sent ahead, taken by a message, given back by a tool, gone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sayso.core.attachment import digest_of
from sayso.core.errors import CommitUnknown, IllegalChange, InboxFull, Misused, NotFound, NoUpload, UploadsFull
from sayso.core.inputs import InputKind
from sayso.core.rows import ModelSaidBody, Table
from sayso.core.session import Token
from sayso.storage.shape import PIECE_BYTES, CommitPhase
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import AttachmentRow, InboxRow, PutOutcome, WriteOutcome
from tests.conformance.given import (
    ALICE,
    BOB,
    DAY,
    MINUTE,
    NOON,
    Clock,
    Inspected,
    asking,
    blobs,
    consent,
    file,
    message,
    owned,
    planned,
    result,
    rows,
    staged,
    started,
    taken,
)

PLAN, PHOTO = b"plan", b"\x89PNG photo"
SAID = ModelSaidBody(1, ())
LONG = bytes(range(256)) * (PIECE_BYTES // 256 * 2) + b"the end"


@pytest.fixture
async def open_store(store: Inspected) -> Inspected:
    """A store with two sessions that nobody owns."""
    await store.create_session("s1", owner=ALICE, title="dinner")
    await store.create_session("s2", owner=BOB, title="film")
    return store


async def in_turn(store: Inspected) -> Token:
    """Return the right to a session in whose turn a tool is out."""
    token = await owned(store)
    await store.write(token, rows(token, 0, started(), planned()))
    return token


async def kept(store: Inspected, data: bytes) -> bytes | None:
    """Return these bytes as the store has them, read piece by piece; None if it hasn't."""
    found, place = b"", 0
    while (piece := await store.piece(digest_of(data), place)) is not None:
        found, place = found + piece, place + 1
    return found if place else None


async def waiting(store: Inspected, session: str = "s1") -> list[InboxRow]:
    """Return what waits in a session."""
    return await store.inbox(session, after=0, limit=100)


# --- sent ahead --------------------------------------------------------------


async def test_an_upload_waits_for_its_message_until_it_is_told(open_store: Inspected) -> None:
    assert await staged(open_store, "u1", PLAN, keep_ms=MINUTE) == NOON + MINUTE

    assert await open_store.blobs() == {digest_of(PLAN): 1}
    assert await kept(open_store, PLAN) == PLAN
    assert await waiting(open_store) == []


async def test_equal_bytes_are_kept_once_and_counted_for_each_who_sent_them(open_store: Inspected) -> None:
    await staged(open_store, "u1", PLAN)
    await staged(open_store, "u2", PLAN)
    await staged(open_store, "u3", PLAN, by=BOB, session="s2")
    await staged(open_store, "u4", PHOTO)

    assert await open_store.blobs() == {digest_of(PLAN): 3, digest_of(PHOTO): 1}

    assert await open_store.discard_upload("s1", "u2", uploader=ALICE)
    assert await open_store.blobs() == {digest_of(PLAN): 2, digest_of(PHOTO): 1}
    assert await kept(open_store, PLAN) == PLAN


async def test_who_sent_it_may_take_it_back_and_nobody_else(open_store: Inspected) -> None:
    await staged(open_store, "u1", PLAN)

    assert not await open_store.discard_upload("s1", "u1", uploader=BOB)
    assert not await open_store.discard_upload("s2", "u1", uploader=ALICE)
    assert not await open_store.discard_upload("s1", "u9", uploader=ALICE)
    assert await open_store.blobs() == {digest_of(PLAN): 1}

    assert await open_store.discard_upload("s1", "u1", uploader=ALICE)
    assert not await open_store.discard_upload("s1", "u1", uploader=ALICE)
    assert await open_store.blobs() == {}
    assert await kept(open_store, PLAN) is None


async def test_a_person_has_so_many_uploads_in_a_session_and_no_more(open_store: Inspected, clock: Clock) -> None:
    await staged(open_store, "u1", most=2, keep_ms=MINUTE)
    await staged(open_store, "u2", most=2)
    with pytest.raises(UploadsFull, match="s1: 2 uploads wait"):
        await staged(open_store, "u3", most=2)
    await staged(open_store, "u4", by=BOB, most=2)
    await staged(open_store, "u5", session="s2", most=2)
    assert await open_store.blobs() == {digest_of(PLAN): 4}

    clock.later(MINUTE)

    await staged(open_store, "u6", most=2)


async def test_a_persons_uploads_are_bounded_together_too(open_store: Inspected) -> None:
    await staged(open_store, "u1", b"12345", most_bytes=9)
    with pytest.raises(UploadsFull, match="5 bytes wait"):
        await staged(open_store, "u2", b"67890", most_bytes=9)

    await staged(open_store, "u3", b"6789", most_bytes=9)
    assert await open_store.blobs() == {digest_of(b"12345"): 1, digest_of(b"6789"): 1}


async def test_an_upload_needs_a_session(open_store: Inspected) -> None:
    with pytest.raises(NotFound):
        await staged(open_store, "u1", session="s9")

    assert await open_store.blobs() == {}


async def test_an_upload_that_nobody_named_goes_when_its_time_is_over(open_store: Inspected, clock: Clock) -> None:
    await staged(open_store, "u1", PLAN, keep_ms=MINUTE)
    await staged(open_store, "u2", PHOTO, keep_ms=DAY)
    clock.later(MINUTE - 1)
    assert await open_store.forget() == 0
    clock.later(1)

    assert await open_store.forget() == 1

    assert await open_store.blobs() == {digest_of(PHOTO): 1}
    assert await open_store.forget() == 0


# --- taken by a message ------------------------------------------------------


@pytest.mark.rule("K29")
async def test_a_message_takes_the_uploads_that_it_names(open_store: Inspected) -> None:
    await staged(open_store, "u1", PLAN)
    await staged(open_store, "u2", PHOTO)

    put = await open_store.put(message("see here", key="k1", uploads=["u2", "u1"]))

    assert put.n == 1
    [row] = await waiting(open_store)
    assert row.input.attachments == (file("n1.1", PHOTO), file("n1.2", PLAN))
    assert await open_store.attachment("s1", "n1.1") == AttachmentRow(
        file("n1.1", PHOTO), seq=None, n=1, uploader="user:alice", sender=ALICE
    )
    assert await open_store.blobs() == {digest_of(PLAN): 1, digest_of(PHOTO): 1}
    assert not await open_store.discard_upload("s1", "u1", uploader=ALICE)


@pytest.mark.rule("K29")
async def test_another_participants_message_takes_an_upload_and_both_are_known(open_store: Inspected) -> None:
    """The row names the sender, the bytes their uploader."""
    await staged(open_store, "u1", PLAN, by=ALICE)

    await open_store.put(message("alice's plan", key="k1", by=BOB, uploads=["u1"]))

    [row] = await waiting(open_store)
    assert row.input.principal == BOB
    found = await open_store.attachment("s1", "n1.1")
    assert found is not None
    assert (found.uploader, found.sender) == ("user:alice", BOB)


@pytest.mark.rule("K29", "X7")
@pytest.mark.parametrize("named", ["u1", "u7", "u8", "u9"], ids=["used up", "elsewhere", "expired", "unknown"])
async def test_a_message_that_names_what_is_not_there_is_not_stored_and_uses_nothing_up(
    open_store: Inspected, clock: Clock, named: str
) -> None:
    await staged(open_store, "u1", PLAN)
    await open_store.put(message("the first", key="k1", uploads=["u1"]))
    await staged(open_store, "u7", PHOTO, session="s2")
    await staged(open_store, "u8", PHOTO, keep_ms=MINUTE)
    clock.later(MINUTE)
    await staged(open_store, "u2", b"good")
    before = await open_store.blobs()

    with pytest.raises(NoUpload) as refused:
        await open_store.put(message("the second", key="k2", uploads=["u2", named]))

    assert refused.value.upload == named
    assert [row.n for row in await waiting(open_store)] == [1]
    assert await open_store.blobs() == before
    assert (await open_store.put(message("another", key="k2", uploads=["u2"]))).outcome is PutOutcome.STORED


@pytest.mark.rule("K29")
async def test_a_message_that_names_an_upload_twice_is_refused(open_store: Inspected) -> None:
    await staged(open_store, "u1", PLAN)

    with pytest.raises(NoUpload):
        await open_store.put(message("twice", key="k1", uploads=["u1", "u1"]))

    assert (await open_store.put(message("once", key="k2", uploads=["u1"]))).n == 1


@pytest.mark.rule("X7")
async def test_a_message_that_finds_the_inbox_full_leaves_its_upload(small: Inspected) -> None:
    await small.create_session("s1", owner=ALICE, title="")
    for n in range(3):
        await small.put(message(f"message {n}", key=f"k{n}"))
    await staged(small, "u1", PLAN)

    with pytest.raises(InboxFull):
        await small.put(message("too many", key="k9", uploads=["u1"]))

    assert await small.blobs() == {digest_of(PLAN): 1}
    token = (await small.claim("n1", at_most=1))[0].token
    await small.write(token, rows(token, 0, taken(1)))
    assert (await small.put(message("too many", key="k9", uploads=["u1"]))).outcome is PutOutcome.STORED


@pytest.mark.rule("A5", "X7")
async def test_a_repeat_is_answered_like_the_first_though_its_upload_is_used_up(open_store: Inspected) -> None:
    await staged(open_store, "u1", PLAN)
    await staged(open_store, "u2", PLAN)
    sent = message("see here", key="k1", uploads=["u1"])
    first = await open_store.put(sent)

    again = await open_store.put(sent)

    assert again == replace(first, outcome=PutOutcome.DUPLICATE)
    with pytest.raises(Misused):
        await open_store.put(message("see here", key="k1", uploads=["u2"]))
    assert await open_store.discard_upload("s1", "u2", uploader=ALICE)
    assert await open_store.blobs() == {digest_of(PLAN): 1}


@pytest.mark.rule("K20")
async def test_a_yes_with_a_file_is_more_than_a_bare_yes(store: Inspected) -> None:
    token = await owned(store)
    await store.write(token, rows(token, 0, *asking(consent())))
    await staged(store, "u1", PLAN)

    await store.put(message("yes", key="k1", uploads=["u1"]))

    assert [row.input.kind for row in await waiting(store)] == [InputKind.MESSAGE]


async def test_a_file_is_shown_by_the_row_that_takes_its_input(store: Inspected) -> None:
    token = await owned(store)
    await staged(store, "u1", PLAN)
    put = await store.put(message("see here", key="k1", uploads=["u1"]))
    assert put.n is not None

    await store.write(token, rows(token, 0, taken(1), taken(put.n, files=[PLAN])))

    assert await store.attachment("s1", "n2.1") == AttachmentRow(
        file("n2.1", PLAN), seq=2, n=2, uploader="user:alice", sender=None
    )
    assert await store.blobs() == {digest_of(PLAN): 1}


async def test_a_file_is_found_in_its_own_session_alone(open_store: Inspected) -> None:
    await staged(open_store, "u1", PLAN)
    await open_store.put(message("see here", key="k1", uploads=["u1"]))

    assert await open_store.attachment("s1", "n1.1") is not None
    assert await open_store.attachment("s2", "n1.1") is None
    assert await open_store.attachment("s1", "n1.2") is None
    assert await open_store.attachment("s9", "n1.1") is None


# --- given back by a tool ----------------------------------------------------


@pytest.mark.rule("H21")
async def test_who_sees_the_row_can_have_the_bytes(store: Inspected) -> None:
    """Row, file, reference and bytes are one write."""
    token = await in_turn(store)

    written = rows(token, 2, result(files=[PLAN, PHOTO]))
    assert await store.write(token, written, blobs=blobs(PLAN, PHOTO)) is WriteOutcome.WRITTEN

    assert await store.rows("s1", after=2) == written
    assert await store.attachment("s1", "T1.1.1.f2") == AttachmentRow(
        file("T1.1.1.f2", PHOTO), seq=3, n=None, uploader="tool:book"
    )
    assert await store.blobs() == {digest_of(PLAN): 1, digest_of(PHOTO): 1}
    assert [await kept(store, PLAN), await kept(store, PHOTO)] == [PLAN, PHOTO]


@pytest.mark.rule("H22")
async def test_a_write_that_is_repeated_counts_once(store: Inspected) -> None:
    token = await in_turn(store)
    written = rows(token, 2, result(files=[PLAN, PHOTO]))
    await store.write(token, written, blobs=blobs(PLAN, PHOTO))

    for _ in range(2):
        assert await store.write(token, written, blobs=blobs(PLAN, PHOTO)) is WriteOutcome.ALREADY

    assert await store.blobs() == {digest_of(PLAN): 1, digest_of(PHOTO): 1}
    assert len((await store.side_tables("s1"))[Table.ATTACHMENT]) == 2


async def test_what_is_not_written_keeps_no_bytes(store: Inspected) -> None:
    token = await in_turn(store)
    stale = replace(token, epoch=token.epoch - 1)
    brings, beside = result(files=[PLAN]), blobs(PLAN)

    assert await store.write(stale, rows(stale, 2, brings), blobs=beside) is WriteOutcome.FENCED
    assert await store.write(token, rows(token, 3, brings), blobs=beside) is WriteOutcome.BEHIND
    assert await store.write(token, rows(token, 1, brings), blobs=beside) is WriteOutcome.CONFLICT
    with pytest.raises(IllegalChange):
        await store.write(token, rows(token, 2, brings, taken(9)), blobs=beside)

    assert await store.blobs() == {}
    assert await kept(store, PLAN) is None


async def test_bytes_that_are_there_need_not_come_again(store: Inspected) -> None:
    token = await in_turn(store)
    await staged(store, "u1", PLAN)

    assert await store.write(token, rows(token, 2, result(files=[PLAN]))) is WriteOutcome.WRITTEN

    assert await store.blobs() == {digest_of(PLAN): 2}


async def test_a_row_without_its_bytes_is_refused(store: Inspected) -> None:
    token = await in_turn(store)

    with pytest.raises(IllegalChange, match="no bytes of sha256:"):
        await store.write(token, rows(token, 2, SAID, result(files=[PLAN])), blobs=blobs(PHOTO))

    assert [row.seq for row in await store.rows("s1")] == [1, 2]
    assert await store.blobs() == {}
    assert await store.write(token, rows(token, 2, result(files=[PLAN])), blobs=blobs(PLAN)) is WriteOutcome.WRITTEN


@pytest.mark.parametrize("known", [True, False], ids=["stored before", "new"])
async def test_other_bytes_under_a_digest_are_refused_and_never_stored(store: Inspected, known: bool) -> None:
    token = await in_turn(store)
    if known:
        await staged(store, "u1", PLAN)

    with pytest.raises(IllegalChange, match="not those of sha256:"):
        await store.write(token, rows(token, 2, result(files=[PLAN])), blobs={digest_of(PLAN): PHOTO})
    with pytest.raises(IllegalChange, match="not those of sha256:"):
        await store.write(token, rows(token, 2, result(files=[LONG])), blobs={digest_of(LONG): LONG[:-1] + b"!"})

    assert [row.seq for row in await store.rows("s1")] == [1, 2]
    assert await kept(store, PLAN) == (PLAN if known else None)


@pytest.mark.rule("H23")
async def test_the_same_bytes_from_a_tool_leave_an_upload_alone(store: Inspected) -> None:
    token = await in_turn(store)
    await staged(store, "u1", PLAN)

    await store.write(token, rows(token, 2, result(files=[PLAN])), blobs=blobs(PLAN))

    assert await store.blobs() == {digest_of(PLAN): 2}
    assert (await store.put(message("see here", key="k1", uploads=["u1"]))).outcome is PutOutcome.STORED
    assert await store.blobs() == {digest_of(PLAN): 2}


async def test_two_files_of_a_row_may_have_the_same_bytes(store: Inspected) -> None:
    token = await in_turn(store)

    await store.write(token, rows(token, 2, result(files=[PLAN, PLAN])), blobs=blobs(PLAN))

    assert await store.blobs() == {digest_of(PLAN): 2}


# --- bytes -------------------------------------------------------------------


@pytest.mark.parametrize("data", [LONG, LONG[:PIECE_BYTES], LONG[: PIECE_BYTES + 1], b"x"], ids=len)
async def test_bytes_come_back_as_they_were_a_piece_at_a_time(open_store: Inspected, data: bytes) -> None:
    await staged(open_store, "u1", data)

    assert await kept(open_store, data) == data
    first = await open_store.piece(digest_of(data), 0)
    assert first == data[:PIECE_BYTES]

    await open_store.discard_upload("s1", "u1", uploader=ALICE)
    assert await kept(open_store, data) is None


async def test_a_file_may_be_empty(store: Inspected) -> None:
    token = await in_turn(store)

    await store.write(token, rows(token, 2, result(files=[b""])), blobs=blobs(b""))

    assert await store.blobs() == {digest_of(b""): 1}
    assert await store.piece(digest_of(b""), 0) is None


@pytest.mark.parametrize("phase", CommitPhase)
async def test_what_a_lost_commit_left_of_a_long_file_is_nobodys_and_swept_away(
    tmp_path: Path, phase: CommitPhase
) -> None:
    """Its pieces go ahead in transactions of their own, and count for nothing until the last one."""
    armed = [True]

    def lose(at: CommitPhase, names: tuple[str, ...]) -> None:
        if armed and at is phase and "stage_upload" in names:
            armed.clear()
            raise OSError("on purpose")

    def pieces() -> int:
        with closing(sqlite3.connect(tmp_path / "sayso.db")) as beside:
            [(count,)] = beside.execute("select count(*) from piece").fetchall()
            return int(count)

    stored = phase is CommitPhase.AFTER
    store = await SqliteStore.open(tmp_path / "sayso.db", clock=Clock(), exclusive=True, on_commit=lose)
    try:
        await store.create_session("s1", owner=ALICE, title="")
        with pytest.raises(CommitUnknown):
            await staged(store, "u1", LONG)

        assert pieces() == 3
        assert await store.blobs() == ({digest_of(LONG): 1} if stored else {})
        assert await kept(store, LONG) == (LONG if stored else None)
        assert await store.forget() == 0
        assert pieces() == (3 if stored else 0)

        await staged(store, "u2", LONG)
        assert await kept(store, LONG) == LONG
        assert await store.discard_upload("s1", "u2", uploader=ALICE)
        assert pieces() == (3 if stored else 0)
    finally:
        await store.close()
