"""The World in a process of its own: the same books behind HTTP, and an end that comes when it should."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from typing import IO
from urllib.parse import urlsplit

import httpx2
import pytest

from sayso.testing.world import Outside, TurnedDown, World
from sayso.testing.world_server import WorldClient, start_world

SERVER = [sys.executable, "-m", "sayso.testing.world_server", "--port", "0", "--print-port"]
#: how long a process may take to end; only a failure waits for it
END_S = 20

PARENT = """
import sys
from sayso.testing.world_server import start_world

with start_world() as url:
    print(url, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def url() -> Iterator[str]:
    with start_world() as started:
        yield started


@pytest.fixture
async def client(url: str) -> AsyncIterator[WorldClient]:
    async with WorldClient(url) as connected:
        yield connected


async def an_evening(outside: Outside) -> list[object]:
    """Return what the venues say to one evening's requests, whichever way they are asked."""
    said: list[object] = [
        await outside.restaurant.book("Friday", "19:00", 4, "ses_1:T1.1.1"),
        await outside.restaurant.book("Friday", "19:00", 4, "ses_1:T1.1.1"),
        await outside.restaurant.book("Friday", "19:00", 4),
        await outside.group.tell("Freitag um sieben ☺", "ses_1:T1.1.2"),
        await outside.cinema.book("Metropolis", "17:00", 2, "k3"),
        await outside.cinema.cancel("C1", "k4"),
        await outside.restaurant.lookup("ses_1:T1.1.1"),
        await outside.restaurant.lookup("k3"),
        await outside.group.lookup("ses_1:T1.1.2"),
        await outside.cinema.lookup("k4"),
    ]
    for refused in (
        outside.restaurant.book("Friday", "19:00", 12, "ses_1:T1.1.1"),
        outside.group.tell("another text", "ses_1:T1.1.2"),
        outside.cinema.cancel("C9"),
    ):
        with pytest.raises(TurnedDown) as error:
            await refused
        said.append((error.value.reason, error.value.detail))
    return said


async def test_a_tool_cannot_tell_the_process_from_the_world_itself(client: WorldClient) -> None:
    world = World()
    assert await an_evening(client) == await an_evening(world)
    assert await client.books() == world.books()
    assert await client.lines() == world.lines


async def test_what_is_done_now_and_its_repeat_have_their_own_status(url: str) -> None:
    async with httpx2.AsyncClient(base_url=url, headers={"Idempotency-Key": "k"}, trust_env=False) as http:
        wanted = {"day": "Friday", "time": "19:00", "party": 4}
        first = await http.post("/restaurant/bookings", json=wanted)
        repeat = await http.post("/restaurant/bookings", json=wanted)
        other = await http.post("/restaurant/bookings", json=wanted | {"party": 12})
        wrong = await http.post("/restaurant/bookings", json={"party": 4})
        nowhere = await http.get("/theatre/bookings", params={"key": "k"})
    assert (first.status_code, first.json()) == (201, {"id": "R1"})
    assert (repeat.status_code, repeat.json()) == (200, {"id": "R1"})
    assert (other.status_code, other.json()["reason"]) == (409, "key_reused")
    assert (wrong.status_code, nowhere.status_code) == (422, 404)


async def test_the_restaurant_can_be_full_and_take_away(client: WorldClient) -> None:
    await client.restaurant.full("Friday", "19:00")
    with pytest.raises(TurnedDown) as refused:
        await client.restaurant.book("Friday", "19:00", 4, "k")
    assert refused.value.reason == "full"
    await client.restaurant.free("Friday", "19:00")
    assert await client.restaurant.book("Friday", "19:00", 4, "k") == "R1"
    await client.restaurant.take_away("R1")
    assert (await client.books())["tables"] == {}
    with pytest.raises(TurnedDown):
        await client.restaurant.take_away("R1")


async def test_a_request_can_be_held_between_its_effect_and_its_answer(client: WorldClient) -> None:
    """So a caller can be killed at the one moment at which nobody knows."""
    await client.restaurant.hold()
    asking = asyncio.create_task(client.restaurant.book("Friday", "19:00", 4, "k"))
    await client.restaurant.until_held()

    assert not asking.done()
    assert list((await client.books())["tables"]) == ["R1"]
    assert await client.restaurant.lookup("k") == "R1"

    await client.restaurant.release()
    assert await asking == "R1"


async def test_who_is_gone_when_the_answer_comes_finds_it_by_the_key(client: WorldClient) -> None:
    await client.group.hold()
    asking = asyncio.create_task(client.group.tell("Friday", "k"))
    await client.group.until_held()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await client.group.release()

    assert await client.group.tell("Friday", "k") == "M1"
    assert (await client.books())["texts"] == ["Friday"]


# --- the process ----------------------------------------------------------------


def connected(base_url: str) -> socket.socket:
    """Return a connection that the server has answered on and keeps open."""
    parts = urlsplit(base_url)
    line = socket.create_connection((str(parts.hostname), int(parts.port or 0)), timeout=END_S)
    line.sendall(b"GET /lines HTTP/1.1\r\nhost: world\r\n\r\n")
    assert line.recv(4096).startswith(b"HTTP/1.1 200")
    return line


def hung_up(line: socket.socket) -> bool:
    """Return once the server has closed the connection."""
    with line:
        while line.recv(4096):
            pass
    return True


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(SERVER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        yield started
        started.kill()


def pipe(end: IO[str] | None) -> IO[str]:
    assert end is not None
    return end


def url_of(process: subprocess.Popen[str]) -> str:
    return f"http://127.0.0.1:{int(pipe(process.stdout).readline())}"


def test_it_ends_on_sigterm(process: subprocess.Popen[str]) -> None:
    line = connected(url_of(process))
    process.terminate()
    assert process.wait(END_S) in (0, -signal.SIGTERM)
    assert hung_up(line)
    assert pipe(process.stdout).read() == ""


async def test_it_ends_on_sigterm_also_while_a_request_is_held(process: subprocess.Popen[str]) -> None:
    async with WorldClient(url_of(process)) as client:
        await client.restaurant.hold()
        asking = asyncio.create_task(client.restaurant.book("Friday", "19:00", 4))
        await client.restaurant.until_held()
        process.terminate()
        with pytest.raises(httpx2.HTTPError):
            await asking
    assert process.wait(END_S) in (0, -signal.SIGTERM)


def test_it_ends_when_its_pipe_closes(process: subprocess.Popen[str]) -> None:
    line = connected(url_of(process))
    pipe(process.stdin).close()
    assert process.wait(END_S) == 0
    assert hung_up(line)


def test_it_does_not_outlive_a_parent_that_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        line = connected(pipe(parent.stdout).readline().strip())
        parent.kill()
    assert hung_up(line)


def test_it_lives_on_without_a_pipe() -> None:
    """Started by hand, in the background, it has no standard input that could tell it to end."""
    with subprocess.Popen(SERVER, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        base_url = url_of(process)
        connected(base_url).close()
        connected(base_url).close()
        process.terminate()


def test_the_block_ends_the_process() -> None:
    with start_world() as base_url:
        line = connected(base_url)
    assert hung_up(line)
