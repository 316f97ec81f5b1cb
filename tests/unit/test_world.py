"""The outside keeps books: what was really done, once for each key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from sayso.testing.world import Outside, TurnedDown, World


async def test_what_was_done_stands_in_the_books_and_the_lines() -> None:
    world = World()
    outside: Outside = world

    assert await outside.restaurant.book("Friday", "19:00", 4, "k1") == "R1"
    assert await outside.group.tell("Friday at seven", "k2") == "M1"
    assert await outside.cinema.book("Metropolis", "17:00", 2, "k3") == "C1"

    assert world.books() == {
        "tables": {"R1": {"day": "Friday", "time": "19:00", "party": 4}},
        "texts": ["Friday at seven"],
        "seats": {"C1": {"film": "Metropolis", "time": "17:00", "seats": 2}},
    }
    assert world.lines == [
        "restaurant: holds R1, a table for 4 on Friday at 19:00",
        "group: has M1: Friday at seven",
        "cinema: holds C1, 2 seats for Metropolis at 17:00",
    ]


Ask = Callable[[World, str | None, int], Coroutine[None, None, str]]


async def book(world: World, key: str | None, content: int) -> str:
    return await world.restaurant.book("Friday", "19:00", content, key)


async def tell(world: World, key: str | None, content: int) -> str:
    return await world.group.tell(f"we are {content}", key)


async def seats(world: World, key: str | None, content: int) -> str:
    return await world.cinema.book("Metropolis", "17:00", content, key)


EVERYWHERE = pytest.mark.parametrize("ask", [book, tell, seats])


@EVERYWHERE
async def test_a_repeat_under_its_key_is_answered_again_and_done_once(ask: Ask) -> None:
    world = World()
    first = await ask(world, "ses_1:T1.1.1", 4)
    once = world.books()

    assert await ask(world, "ses_1:T1.1.1", 4) == first
    assert world.books() == once
    assert world.lines[-1].endswith(f"asked for {first} again under its key; nothing new")


@EVERYWHERE
async def test_a_key_that_comes_with_other_content_is_refused(ask: Ask) -> None:
    world = World()
    await ask(world, "k", 4)
    once = world.books()
    with pytest.raises(TurnedDown, match="other content") as refused:
        await ask(world, "k", 12)
    assert (refused.value.reason, world.books()) == ("key_reused", once)


@EVERYWHERE
async def test_without_a_key_everything_is_done_again(ask: Ask) -> None:
    world = World()
    assert await ask(world, None, 4) != await ask(world, None, 4)


@EVERYWHERE
async def test_a_key_tells_what_became_of_it(ask: Ask) -> None:
    world = World()
    made = await ask(world, "k", 4)
    venues = world.venues.values()
    assert [found for venue in venues if (found := await venue.lookup("k"))] == [made]
    assert [await venue.lookup("another") for venue in venues] == [None, None, None]


async def test_a_full_restaurant_turns_down_and_does_not_remember_it() -> None:
    world = World()
    world.restaurant.full("Friday", "19:00")
    with pytest.raises(TurnedDown) as refused:
        await world.restaurant.book("Friday", "19:00", 4, "k")
    assert (refused.value.reason, world.books()["tables"]) == ("full", {})
    assert await world.restaurant.lookup("k") is None
    assert await world.restaurant.book("Friday", "20:30", 4, "k2") == "R1"

    world.restaurant.free("Friday", "19:00")
    assert await world.restaurant.book("Friday", "19:00", 4, "k") == "R2"


async def test_a_table_that_is_taken_away_stands_no_longer() -> None:
    world = World()
    await world.restaurant.book("Friday", "19:00", 4, "k")
    world.restaurant.take_away("R1")
    assert world.books()["tables"] == {}
    assert world.lines[-1] == "restaurant: took R1 away"
    assert await world.restaurant.book("Friday", "19:00", 4, "k") == "R1"  # it did happen, under this key
    assert world.books()["tables"] == {}
    with pytest.raises(TurnedDown, match="no table is held as R1"):
        world.restaurant.take_away("R1")


async def test_seats_can_be_given_back_once() -> None:
    world = World()
    booking = await world.cinema.book("Metropolis", "17:00", 2)
    assert [await world.cinema.cancel(booking, key) for key in ("k", "k", None)] == [booking] * 3
    assert world.books()["seats"] == {}
    assert [line for line in world.lines if "gave back" in line] == ["cinema: gave back C1"]
    with pytest.raises(TurnedDown, match="there was no booking C2"):
        await world.cinema.cancel("C2")


@EVERYWHERE
async def test_a_held_venue_acts_and_keeps_its_answer(ask: Ask) -> None:
    world = World()
    for venue in world.venues.values():
        venue.hold()

    asking = asyncio.create_task(ask(world, "k", 4))
    held = [asyncio.create_task(venue.until_held()) for venue in world.venues.values()]
    done, others = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    assert (asking.done(), len(world.lines)) == (False, 1)

    for venue in world.venues.values():
        venue.release()
    assert (await asking)[1:] == "1"
    for other in others:
        other.cancel()


async def test_who_gives_up_on_a_held_request_finds_it_done() -> None:
    world = World()
    world.restaurant.hold()
    asking = asyncio.create_task(world.restaurant.book("Friday", "19:00", 4, "k"))
    await world.restaurant.until_held()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)

    assert await world.restaurant.lookup("k") == "R1"
    world.restaurant.release()
    assert await world.restaurant.book("Friday", "19:00", 4, "k") == "R1"
    assert len(world.books()["tables"]) == 1


async def test_a_venue_can_be_held_again() -> None:
    world = World()
    world.group.hold()
    first = asyncio.create_task(world.group.tell("one"))
    await world.group.until_held()
    world.group.release()
    await first

    world.group.hold()
    held = asyncio.create_task(world.group.until_held())
    await asyncio.sleep(0)
    assert not held.done()
    second = asyncio.create_task(world.group.tell("two"))
    await held
    world.group.release()
    assert await second == "M2"
