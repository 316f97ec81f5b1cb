"""From stored history to what is live and back: each row once and in place, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from sayso.core.errors import NotFound, StaleToken, StoreUnavailable
from sayso.core.rows import Row
from sayso.core.session import START, Position, SessionRecord, Token
from sayso.demo.local import OpenStore
from sayso.journal.append import JournalState
from sayso.journal.feed import Bounds, Captured
from sayso.journal.follow import capture, follow
from sayso.testing.stores import Gate, Point, StoreAround
from tests.simulation.desk import BOB, SESSION, Desk, Follower, called, desk_in, done, notice, result, said, words


@pytest.fixture
async def desk(open_store: OpenStore) -> AsyncIterator[Desk]:
    async with desk_in(open_store) as desk:
        yield desk


def numbers(captured: Captured) -> list[int]:
    return [row.seq for row in captured.rows]


async def reading(desk: Desk, limit: int = 100) -> tuple[Gate, asyncio.Task[Captured]]:
    """Begin to read the history, and return when the store has read and its reader has nothing yet."""
    gate = desk.store.hold(Point.LOADED)
    task = desk.spawn(desk.capture(limit))
    await gate.reached()
    return gate, task


# --- a history that is being read ---------------------------------------------


@pytest.mark.rule("H1", "X1", "K3")
@pytest.mark.parametrize("written", ["before the load", "while it is held", "after it"])
async def test_a_row_is_in_the_history_once_whenever_it_is_written(desk: Desk, written: str) -> None:
    """Accepted while its write is held and a reader has read the store already; the token is the same afterwards."""
    await desk.write(notice("earlier"))
    write = desk.store.hold(Point.WRITE)
    ticket = desk.accept(said("the answer"))
    await write.reached()
    if written == "before the load":
        write.open()
        await ticket.durable()
    load, task = await reading(desk)
    if written == "while it is held":
        write.open()
        await ticket.durable()
    load.open()
    captured = await task
    write.open()
    await ticket.durable()
    again = await desk.capture()

    assert numbers(captured) == [1, 2]
    assert captured.token == Position(1, 2)
    assert again == captured
    assert desk.journal.state is JournalState.HEALTHY


@pytest.mark.rule("H15", "X1")
async def test_a_row_that_is_accepted_while_a_history_is_read_is_in_it_and_its_token_names_it(desk: Desk) -> None:
    """Bob's message reaches a tab before the reader has its page, which has it once, with a token of its own."""
    before = await desk.capture()
    tab = await desk.follow().caught_up()
    load, task = await reading(desk)
    write = desk.store.hold(Point.WRITE)
    message = await desk.post("for the page", BOB, ("c1",))

    ticket = desk.accept(message)
    await tab.row(1)
    load.open()
    captured = await task
    write.open()
    await ticket.durable()

    [row] = json.loads(captured.text)["rows"]
    assert row == tab.view.rows[0]
    assert (row["body"]["sender"]["name"], row["body"]["client_send_ids"]) == ("bob", ["c1"])
    assert (before.token, captured.token) == (START, Position(1, 1))


@pytest.mark.rule("H41")
async def test_nobody_waits_for_a_reader(desk: Desk) -> None:
    """While the store is being read rows are accepted, published and stored, and listeners registered."""
    load, task = await reading(desk)

    tab = await desk.follow(after=START).caught_up()
    await desk.write(notice("one"))
    await tab.row(1)
    assert not task.done()
    load.open()

    assert numbers(await task) == [1]


@pytest.mark.rule("H24")
async def test_a_token_names_one_state_and_never_another(desk: Desk) -> None:
    tokens = [(await desk.capture()).token]
    for text in ("one", "two"):
        await desk.write(notice(text), done())
        tokens.append((await desk.capture()).token)

    assert tokens == [START, Position(1, 2), Position(1, 4)]
    assert desk.journal.state is JournalState.HEALTHY


@pytest.mark.rule("K3")
async def test_an_older_page_has_no_token(desk: Desk) -> None:
    """Nothing can be followed from it; and rows that are pending do not move it."""
    await desk.write(*(notice(str(n)) for n in range(1, 6)))
    held = desk.store.hold(Point.WRITE)
    ticket = desk.accept(notice("6"), notice("7"))
    await held.reached()

    newest, older = await desk.capture(2), await desk.capture(2, before=6)
    oldest = await desk.capture(2, before=1)
    held.open()
    await ticket.durable()

    assert (numbers(newest), newest.token) == ([6, 7], Position(1, 7))
    assert (numbers(older), older.token) == ([4, 5], None)
    assert (numbers(oldest), oldest.token) == ([], None)


@pytest.mark.rule("H39", "X3")
async def test_a_window_of_one_row_shows_a_lost_acknowledgement_in_place(desk: Desk) -> None:
    """What is shown is the row, once, in its place, and seeing it stored is as good as being told."""
    await desk.write(notice("one"))
    desk.store.lose_acknowledgements()
    ticket = desk.accept(notice("two"))
    with pytest.raises(Exception, match="not known to be stored"):
        await ticket.durable()

    first, pending = await desk.capture(1), desk.feeds.pending(SESSION)
    second = await desk.capture(1)

    assert numbers(first) == numbers(second) == [2]
    assert first == second
    assert pending == ()
    assert desk.journal.state is JournalState.HEALTHY
    assert [row.seq for row in await desk.stored()] == [1, 2]


@pytest.mark.rule("X3", "H39")
async def test_more_pending_rows_than_a_window_holds_keep_their_places(desk: Desk) -> None:
    await desk.write(*(notice(str(n)) for n in range(1, 4)))
    held = desk.store.hold(Point.WRITE)
    ticket = desk.accept(*(notice(str(n)) for n in range(4, 9)))
    await held.reached()

    windows = {limit: numbers(await desk.capture(limit)) for limit in (1, 3, 5, 6, 100)}
    middle = numbers(await desk.capture(3, before=6))
    held.open()
    await ticket.durable()

    assert windows == {1: [8], 3: [6, 7, 8], 5: [4, 5, 6, 7, 8], 6: [3, 4, 5, 6, 7, 8], 100: [*range(1, 9)]}
    assert middle == [3, 4, 5]


async def conflicted(desk: Desk) -> Row:
    """Bring another row into the store under our number, and a newer one behind it; return ours."""

    async def other_first(rows: Sequence[Row]) -> None:
        token = Token(SESSION, rows[0].epoch, rows[0].commit_key.partition(".")[0])
        other = replace(rows[0], body=notice("another"))
        newer = replace(
            rows[0], seq=rows[0].seq + 1, commit_key=token.commit_key(rows[0].seq + 1), body=notice("newer")
        )
        await desk.store.inside.write(token, [other, newer])

    desk.store.on(Point.WRITE, other_first, times=1)
    ticket = desk.accept(notice("ours"))
    with pytest.raises(Exception, match="holds another row"):
        await ticket.durable()
    return ticket.rows[0]


@pytest.mark.rule("H40")
@pytest.mark.parametrize("limit", [2, 100])
async def test_a_row_in_conflict_is_shown_in_its_place(desk: Desk, limit: int) -> None:
    """Ours, and then the newer one, as often as it is asked; ours stays pending."""
    await desk.write(notice("earlier"))
    ours = await conflicted(desk)

    shown = [json.loads((await desk.capture(limit)).text)["rows"] for _ in range(2)]

    assert [words(row) for row in shown[0]][-2:] == ["ours", "newer"]
    assert shown[0] == shown[1]
    assert desk.journal.state is JournalState.CONFLICT
    assert desk.feeds.pending(SESSION) == (ours,)


@pytest.mark.rule("H40", "K7")
async def test_who_follows_a_session_in_conflict_is_shown_ours(desk: Desk) -> None:
    """From a cursor, from the start and from a token: no page is sent one row under two texts."""
    await desk.write(notice("earlier"))
    listening = await desk.follow().caught_up()
    await conflicted(desk)
    await listening.row(2)

    from_start = await desk.follow().caught_up()
    painted = Follower()
    painted.view.load(json.loads((await desk.capture()).text))
    await desk.follow(painted, token=(await desk.capture()).token).caught_up()

    for page in (listening, from_start, painted):
        assert [words(row) for row in page.view.rows] == ["earlier", "ours"]


@pytest.mark.rule("K3")
async def test_a_history_that_was_read_while_its_session_changed_hands_is_thrown_away(desk: Desk) -> None:
    """What was accepted and is lost must not be shown; asked again it is right."""
    await desk.write(notice("one"))
    load, task = await reading(desk)
    write = desk.store.hold(Point.WRITE)
    ticket = desk.accept(notice("never stored"))
    await write.reached()
    await desk.give_up()
    load.open()

    with pytest.raises(StoreUnavailable):
        await task
    assert numbers(await desk.capture()) == [1]
    write.open()
    with pytest.raises(Exception, match="replaced"):
        await ticket.durable()


@pytest.mark.rule("H34")
async def test_a_store_that_cannot_be_read_yields_no_history_rather_than_a_part(desk: Desk) -> None:
    """And when it can, what is pending is there, once, and is still pending: reading it stored nothing."""
    await desk.write(notice("one"))
    desk.store.refuse_writes()
    ticket = desk.accept(notice("two"))
    with pytest.raises(Exception, match="not known to be stored"):
        await ticket.durable()
    desk.store.refuse_loads(times=1)
    with pytest.raises(StoreUnavailable):
        await desk.capture()
    assert desk.journal.state is JournalState.RETRYING

    captured = await desk.capture()

    assert numbers(captured) == [1, 2]
    assert captured.token == Position(1, 2)
    assert desk.journal.state is JournalState.RETRYING
    assert "pending" not in captured.text
    assert ticket.rows[0].commit_key not in captured.text


class Behind(StoreAround):
    """A store whose reads lack the newest row, as a copy of a database does that follows late."""

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> list[Row]:
        found: list[Row] = await self.inside.last_rows(session, limit=limit + 1, before=before)
        return found[:-1]


@pytest.mark.rule("H34", "K3")
async def test_less_than_was_stored_is_never_shown(desk: Desk) -> None:
    await desk.write(notice("one"), notice("two"))

    with pytest.raises(StoreUnavailable):
        await capture(Behind(desk.store.store).store, desk.feeds, SESSION, limit=10)


class Deleted(StoreAround):
    """A store from which the session goes once somebody has looked it up, and before she has read it."""

    async def session(self, session: str) -> SessionRecord | None:
        return None

    async def rows(
        self, session: str, *, after: int = 0, up_to: int | None = None, limit: int | None = None
    ) -> list[Row]:
        return []

    async def last_rows(self, session: str, *, limit: int, before: int | None = None) -> list[Row]:
        return []

    async def keep(self, session: str, position: Position) -> int:
        return 0


@pytest.mark.rule("X2")
async def test_a_session_that_was_deleted_is_not_shown_as_an_empty_one(desk: Desk) -> None:
    """Neither to who asks for its history nor to who comes back by a cursor: `resume {keep: 0}` would wipe the page."""
    await desk.write(notice("one"))
    await desk.give_up()
    gone = Deleted(desk.store.inside).store

    with pytest.raises(NotFound):
        await capture(gone, desk.feeds, SESSION, limit=10)
    with pytest.raises(NotFound):
        await anext(follow(gone, desk.feeds, SESSION, after=Position(1, 1)))
    assert desk.feeds.listeners() == 0


@pytest.mark.rule("X12", "X28", "X29", "K3")
async def test_who_asks_for_a_history_that_is_being_read_shares_it_and_misses_nothing(desk: Desk) -> None:
    """The read began before the row was there; both get the row, from one load."""
    await desk.write(notice("one"))
    load, first = await reading(desk)
    await desk.write(notice("two"))
    loads: list[int] = []

    async def counted(_: Sequence[Row]) -> None:
        loads.append(1)

    desk.store.on(Point.LOAD, counted)
    second = desk.spawn(desk.capture())
    other = desk.spawn(desk.capture(1))
    await other
    load.open()

    assert numbers(await first) == numbers(await second) == [1, 2]
    assert numbers(await other) == [2]
    assert len(loads) == 1, "the other window's alone"


@pytest.mark.rule("X12", "X29")
async def test_who_shares_a_read_does_not_fail_with_its_reader(desk: Desk) -> None:
    await desk.write(notice("one"))
    load, first = await reading(desk)
    second = desk.spawn(desk.capture())
    await asyncio.sleep(0)
    first.cancel()
    load.open()

    assert numbers(await second) == [1]


# --- to register with a token ---------------------------------------------------


@pytest.mark.rule("H3", "X25")
async def test_a_token_registers_only_while_nothing_came_after_it(desk: Desk) -> None:
    await desk.write(notice("one"))
    old = (await desk.capture()).token
    await desk.write(notice("two"), done())

    with pytest.raises(StaleToken):
        desk.feeds.listen(SESSION, token=old)
    assert desk.feeds.listeners() == 0
    refused = desk.follow(token=old)
    assert await refused.ended() == "stale_token"
    assert refused.events == ["resync", "farewell"]
    assert json.loads(refused.frames[0].data) == {"reason": "stale_token"}
    assert refused.frames[0].id is None

    new = (await desk.capture()).token
    assert new != old
    desk.feeds.listen(SESSION, token=new)
    assert desk.feeds.listeners() == 1


@pytest.mark.rule("H3")
async def test_a_token_that_stands_begins_where_the_history_ended(desk: Desk) -> None:
    """Without a read of the store, and with nothing sent twice."""
    await desk.write(notice("one"))
    captured = await desk.capture()
    desk.store.refuse_loads()

    page = Follower()
    page.view.load(json.loads(captured.text))
    await desk.follow(page, token=captured.token).caught_up()
    await desk.write(notice("two"))
    await page.row(2)

    assert page.events == ["resume", "caught_up", "notice"]
    assert json.loads(page.frames[0].data) == {"keep": 1}


@pytest.mark.rule("H3", "H24", "K1")
async def test_a_token_of_a_row_that_was_never_stored_is_stale_though_its_number_is_the_newest(desk: Desk) -> None:
    """The next owner knows what its newest row is, also before it has written one."""
    await desk.write(notice("one"))
    held = desk.store.hold(Point.WRITE)
    desk.accept(notice("never stored"))
    await held.reached()
    lost = (await desk.capture()).token
    await desk.give_up()
    await desk.own()
    await desk.write(notice("in its place"))
    await desk.give_up()
    await desk.own()

    stale = desk.follow(token=lost)
    assert await stale.ended() == "stale_token"
    good = await desk.from_history()

    assert lost == Position(1, 2)
    assert good.view.cursor == "2.2"


@pytest.mark.rule("K4")
async def test_elsewhere_a_token_is_a_position_to_follow_from(desk: Desk) -> None:
    """Nobody here knows what is newest in a session that is not owned here; so nothing is refused, nothing missed."""
    await desk.write(notice("one"))
    captured = await desk.capture()
    await desk.write(notice("two"))
    await desk.give_up()

    assert (await desk.capture()).token == Position(1, 2)
    page = Follower()
    page.view.load(json.loads(captured.text))
    await desk.follow(page, token=captured.token).caught_up()
    await desk.own()
    await desk.write(notice("three"))
    await page.row(3)

    assert [words(row) for row in page.view.rows] == ["one", "two", "three"]


@pytest.mark.rule("X16")
async def test_a_page_that_came_with_a_token_comes_back_by_it(desk: Desk) -> None:
    """It has seen no event with an id yet; what was written while it was away is painted when it is back."""
    await desk.write(notice("one"))
    page = await desk.from_history()
    await page.cut()
    await desk.write(notice("two"), notice("three"))

    await desk.follow(page).caught_up()

    assert page.numbers == [1, 2, 3]


# --- to come back by a cursor ----------------------------------------------------


@pytest.mark.rule("H25")
@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
async def test_zero_is_a_position(desk: Desk, owned: bool) -> None:
    """Who has seen nothing is sent everything, also where there are no words in it."""
    await desk.write(called(), result("seen"))
    if not owned:
        await desk.give_up()

    page = await desk.follow(after="0.0").caught_up()

    assert page.events == ["resume", "model.called", "tool.result", "caught_up"]
    assert [frame.id for frame in page.frames] == [None, "1.1", "1.2", None]


@pytest.mark.rule("K1", "X26")
async def test_a_cursor_of_a_life_that_ended_is_told_what_still_stands(desk: Desk) -> None:
    """What was published and never stored goes away, and the row that took its number is shown."""
    await desk.write(notice("stored"))
    page = await desk.follow().caught_up()
    held = desk.store.hold(Point.WRITE)
    desk.accept(notice("never stored"), notice("nor this"))
    await held.reached()
    await page.row(3)
    shown = page.view.cursor
    await page.cut()
    await desk.restart()
    await desk.write(notice("in its place"))

    await desk.follow(page).caught_up()

    assert shown == "1.3"
    assert [(row["position"], words(row)) for row in page.view.rows] == [("1.1", "stored"), ("2.2", "in its place")]


@pytest.mark.rule("K1", "X25")
async def test_who_listens_when_its_rows_are_lost_is_sent_away_and_healed(desk: Desk) -> None:
    """Also where no journal is left to say so, as after a fault of its owner."""
    await desk.write(notice("stored"))
    page = await desk.follow().caught_up()
    held = desk.store.hold(Point.WRITE)
    desk.accept(notice("never stored"))
    await held.reached()
    await page.row(2)
    await desk.give_up()
    assert await page.ended() == "moved"
    await desk.own()
    await desk.write(notice("in its place"))

    await desk.follow(page).caught_up()

    assert [words(row) for row in page.view.rows] == ["stored", "in its place"]


@pytest.mark.rule("X30", "X26")
@pytest.mark.parametrize("owned", [True, False], ids=["owned", "not owned"])
async def test_a_cursor_from_elsewhere_hides_nothing(desk: Desk, owned: bool) -> None:
    """It is beyond all there is: another session's, or of a store that was set back to an older copy."""
    await desk.write(notice("one"), notice("two"))
    if not owned:
        await desk.give_up()

    page = Follower()
    page.view.load({"rows": [], "token": "0.0"})
    frames = follow(desk.store.store, desk.feeds, SESSION, after=Position(desk.journal.token.epoch, 900))
    first = await anext(frames)
    rest = [await anext(frames)]
    if owned:
        await desk.write(notice("three"))
        rest.append(await anext(frames))
    await frames.aclose()

    assert json.loads(first.data) == {"keep": 2}
    assert [frame.event for frame in rest] == ["caught_up", "notice"][: len(rest)]


async def test_a_cursor_beyond_pending_rows_hides_none(desk: Desk) -> None:
    await desk.write(notice("one"))
    held = desk.store.hold(Point.WRITE)
    ticket = desk.accept(notice("two"))
    await held.reached()

    frames = follow(desk.store.store, desk.feeds, SESSION, after=Position(desk.journal.token.epoch, 900))
    first = await anext(frames)
    await frames.aclose()
    held.open()
    await ticket.durable()

    assert json.loads(first.data) == {"keep": 2}


async def test_a_reader_that_comes_back_soon_costs_the_store_nothing(desk: Desk) -> None:
    await desk.write(*(notice(str(n)) for n in range(1, 21)))
    page, other = await desk.follow().caught_up(), await desk.follow().caught_up()
    await page.cut()
    await desk.write(*(notice(str(n)) for n in range(21, 41)))
    desk.store.refuse_loads()

    await desk.follow(page).caught_up()

    assert page.numbers == other.numbers == [*range(1, 41)]


async def test_the_ring_is_bounded_in_rows_and_in_bytes_and_small_once_nobody_listens(open_store: OpenStore) -> None:
    """Whatever is not in it comes from the store, so it is a matter of speed alone."""
    bounds = Bounds(ring_rows=10, ring_bytes=4_000, alone_rows=3, alone_bytes=2_000)
    async with desk_in(open_store, bounds=bounds) as desk:
        reads: list[int] = []

        async def counted(_: Sequence[Row]) -> None:
            reads.append(1)

        async def costs(behind: int) -> int:
            """How many reads it costs to come back so many rows behind."""
            newest = desk.journal.head
            before = len(reads)
            page = Follower()
            page.view.load({"rows": [], "token": "0.0"})
            frames = follow(desk.store.store, desk.feeds, SESSION, after=Position(1, newest - behind))
            got = [(await anext(frames)).event for _ in range(behind + 2)]
            await frames.aclose()
            assert got == ["resume", *["notice"] * behind, "caught_up"]
            return len(reads) - before

        await desk.write(*(notice(str(n)) for n in range(20)))
        desk.store.on(Point.LOAD, counted)
        first_to_come = await costs(3)
        await desk.write(*(notice(str(n)) for n in range(20)))
        alone = [await costs(3), await costs(4)]
        await desk.follow().caught_up()
        await desk.write(*(notice(str(n)) for n in range(20)))
        listened = [await costs(10), await costs(11)]
        await desk.write(*(notice("x" * 1_500) for _ in range(4)))
        big = [await costs(2), await costs(3)]

    assert first_to_come > 0, "nothing was kept for nobody"
    assert [cost == 0 for cost in alone] == [True, False]
    assert [cost == 0 for cost in listened] == [True, False]
    assert [cost == 0 for cost in big] == [True, False]


@pytest.mark.rule("X14", "X15")
@pytest.mark.parametrize("restarted", [False, True], ids=["in the same life", "after a restart"])
async def test_a_reader_that_misses_very_much_is_told_which_rows_are_not_sent(
    open_store: OpenStore, restarted: bool
) -> None:
    """It reads them from the history, and has every row once."""
    async with desk_in(open_store, bounds=Bounds(ring_rows=4, replay_rows=10)) as desk:
        await desk.write(*(notice(str(n)) for n in range(1, 4)))
        page = await desk.follow().caught_up()
        await page.cut()
        await desk.write(*(notice(str(n)) for n in range(4, 31)))
        if restarted:
            await desk.restart()

        await desk.follow(page).caught_up()
        told = [json.loads(frame.data) for frame in page.frames if frame.event == "truncated"]
        needed, before = page.view.needs_history, page.numbers
        page.view.fill(json.loads((await desk.capture(100, before=told[0]["next"])).text))
        await desk.write(notice("31"))
        await page.row(31)

    assert told == [{"after": 3, "next": 21}]
    assert needed
    assert before == [1, 2, 3, *range(21, 31)]
    assert page.numbers == [*range(1, 32)]
    assert not page.view.needs_history


async def test_a_past_of_many_pages_comes_whole(desk: Desk) -> None:
    """Past the page of a store, at its edges too, from the start and from any cursor."""
    for first in range(1, 1_202, 100):
        await desk.accept(*(notice(str(n)) for n in range(first, first + 100))).durable()
    await desk.restart()

    for after in (0, 1, 299, 300, 301, 799, 800, 801):
        page = Follower()
        frames = follow(desk.store.store, desk.feeds, SESSION, after=Position(1, after))
        async for frame in frames:
            page.frames.append(frame)
            if frame.event == "caught_up":
                break
        await frames.aclose()
        assert [frame.id for frame in page.frames[1:-1]] == [f"1.{n}" for n in range(after + 1, 1_301)], after
        assert json.loads(page.frames[-1].data) == {"seq": 1_300}


@pytest.mark.rule("X24")
async def test_the_end_of_the_past_is_marked_and_what_comes_then_is_new(desk: Desk) -> None:
    """Rows that are written while the past is read come once: behind the mark, or before it."""
    await desk.write(notice("one"))
    await desk.restart()
    load = desk.store.hold(Point.LOADED)
    page = desk.follow()
    await load.reached()
    await desk.write(notice("two"), notice("three"))
    load.open()
    await page.row(3)

    assert page.numbers == [1, 2, 3]
    assert page.events == ["resume", "notice", "caught_up", "notice", "notice"]


@pytest.mark.rule("K5", "X19")
async def test_text_that_ends_while_the_past_is_read_leaves_nothing_behind(desk: Desk) -> None:
    """The row that ends a reply may be read before the pieces that came first; the page shows the row alone."""
    await desk.write(notice("one"))
    await desk.restart()
    desk.journal.write("T1", 1, "All ")
    load = desk.store.hold(Point.LOAD)
    page = desk.follow()
    await load.reached()
    desk.journal.write("T1", 1, "right.")
    await desk.write(said("All right."))
    load.open()
    await page.row(2)

    assert page.view.text is None
    assert words(page.view.rows[-1]) == "All right."


@pytest.mark.rule("X27")
async def test_a_reader_that_cannot_be_served_leaves_no_listener_behind(desk: Desk) -> None:
    """Neither where the store fails before the first event, nor where it fails later, nor where its reader leaves."""
    await desk.write(notice("one"))
    await desk.restart()
    for point in (Point.LOAD, Point.LOADED):

        async def unavailable(_: Sequence[Row]) -> None:
            raise StoreUnavailable("on purpose")

        desk.store.on(point, unavailable, times=1)
        with pytest.raises(StoreUnavailable):
            await anext(follow(desk.store.store, desk.feeds, SESSION))
    held = desk.store.hold(Point.LOAD)
    leaving = asyncio.ensure_future(anext(follow(desk.store.store, desk.feeds, SESSION)))
    await held.reached()
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)

    assert desk.feeds.listeners() == 0


# --- what is live -------------------------------------------------------------------


@pytest.mark.rule("X17")
async def test_a_listener_that_is_full_is_closed_at_the_first_event_it_refuses(open_store: OpenStore) -> None:
    """Nothing follows what it refused, so no hole is below its cursor; it comes back and has everything."""
    async with desk_in(open_store, bounds=Bounds(queue_events=5)) as desk:
        page = await desk.follow().caught_up()
        frames = follow(desk.store.store, desk.feeds, SESSION, after=START)
        slow = [await anext(frames) for _ in range(2)]
        for n in range(1, 8):
            await desk.write(notice(str(n)))
            await page.row(n)
        slow += [frame async for frame in frames]
        late = Follower()
        for frame in slow:
            late.view.apply(frame)
        await desk.follow(late).caught_up()

    assert [frame.event for frame in slow] == ["resume", "caught_up", *["notice"] * 5, "farewell"]
    assert slow[-1].id is None
    assert json.loads(slow[-1].data) == {"reason": "slow"}
    assert late.numbers == page.numbers == [1, 2, 3, 4, 5, 6, 7]


async def test_a_listener_is_full_by_bytes_too_and_one_burst_does_not_fill_it(open_store: OpenStore) -> None:
    async with desk_in(open_store, bounds=Bounds(queue_bytes=12_000)) as desk:
        listener, _ = desk.feeds.listen(SESSION)
        await desk.accept(*(notice("x" * 3_000) for _ in range(3))).durable()
        assert listener.farewell == ""
        await desk.accept(notice("x" * 3_000)).durable()
        await desk.accept(notice("y")).durable()

        assert listener.farewell == "slow"
        assert listener.queue.qsize() == 4 + 1, "the rows that it took, and the end"


@pytest.mark.rule("X18", "K5")
async def test_pieces_are_gathered_and_rows_beside_the_reply_do_not_break_them_up(desk: Desk) -> None:
    """Many tools that report at once do not fill a listener: what is shown live leaves held text alone."""
    page = await desk.follow().caught_up()
    for n in range(1_000):
        desk.journal.write("T1", 1, f"{n} ")
        if n % 100 == 0:
            desk.feeds.show(SESSION, "tool.provisional", {"call": f"T1.1.{n}"})
    text = "".join(f"{n} " for n in range(1_000))
    await desk.write(said(text))
    await page.row(1)

    assert page.events.count("delta") == 1
    assert page.events.count("tool.provisional") == 10
    assert [frame.id for frame in page.frames if frame.event in ("delta", "tool.provisional")] == [None] * 11
    assert words(page.view.rows[0]) == text


@pytest.mark.rule("X19", "K5")
async def test_who_joins_in_a_long_reply_has_it_from_its_first_character_to_its_last(desk: Desk) -> None:
    written = ""
    pages = [await desk.follow().caught_up()]
    for n in range(60):
        piece = f"{n} " + "word " * 1_000
        desk.journal.write("T1", 1, piece)
        written += piece
        if n % 20 == 10:
            pages.append(await desk.follow().caught_up())
    for page in pages:
        await page.until(lambda page=page: page.view.text == written)  # type: ignore[misc]  # bound on purpose
    await desk.write(said(written))
    for page in pages:
        await page.row(1)

    assert len(written) > 256 * 1024
    assert [page.view.text for page in pages] == [None] * 4


@pytest.mark.rule("H4", "X31")
async def test_two_tabs_have_one_message_once_and_the_same(desk: Desk) -> None:
    """Before any output; with its sender, its ids and its session, and with nothing else of him who acts."""
    token = (await desk.capture()).token
    one, two = await desk.follow(token=token).caught_up(), await desk.follow(token=token).caught_up()
    message = await desk.post("hello", BOB, ("c1",))
    await desk.write(message)
    await one.row(1)
    await two.row(1)
    stale = desk.follow(token=token)
    assert await stale.ended() == "stale_token"
    captured = await desk.capture()
    await desk.write(said("Hello Bob."))
    await one.row(2)
    await two.row(2)

    assert one.frames == two.frames
    assert one.events == ["resume", "caught_up", "input", "model.said"]
    event = json.loads(one.frames[2].data)
    assert event.keys() == {"session", "position", "kind", "turn", "at_ms", "line", "body"}
    assert event["session"] == SESSION
    assert event["body"].keys() == {
        "input", "sender", "verified", "received_at_ms", "about", "parts", "client_send_ids",
    }  # fmt: skip
    assert event["body"]["sender"] == {"kind": "user", "name": "bob"}
    assert event["body"]["client_send_ids"] == ["c1"]
    assert json.loads(captured.text)["rows"] == [event]
    assert captured.token != token


@pytest.mark.rule("X62")
async def test_many_listeners_need_no_thread_and_share_what_is_sent(open_store: OpenStore) -> None:
    async with desk_in(open_store) as desk:
        token = (await desk.capture()).token
        before = threading.active_count()
        pages = [desk.follow(token=token) for _ in range(300)]
        for page in pages:
            await page.caught_up()
        await desk.write(notice("one"))
        for page in pages:
            await page.row(1)

        assert threading.active_count() == before
        assert len({id(page.frames[-1].sse) for page in pages}) == 1
