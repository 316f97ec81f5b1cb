"""The same World in a process of its own, behind HTTP, for tests that kill the others.

`python -m sayso.testing.world_server --port 0 --print-port` prints its port on a line and serves. It ends on
SIGTERM, and when its standard input closes if that is a pipe: so it never outlives whoever started it.
"""

from __future__ import annotations

import argparse
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Annotated, Any, Literal, Self

import httpx2
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sayso.testing.world import TurnedDown, Venue, World

KEY = "Idempotency-Key"
VenueName = Literal["restaurant", "group", "cinema"]


class _Wire(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TableWanted(_Wire):
    """Body of POST /restaurant/bookings."""

    day: str
    time: str
    party: int


class TextWanted(_Wire):
    """Body of POST /group/messages."""

    text: str


class SeatsWanted(_Wire):
    """Body of POST /cinema/bookings."""

    film: str
    time: str
    seats: int


class Fill(_Wire):
    """Body of POST /control: have no table then, or have some again."""

    do: Literal["full", "free"]
    day: str
    time: str


class TakeAway(_Wire):
    """Body of POST /control: drop a reservation."""

    do: Literal["take_away"]
    reservation: str


class Door(_Wire):
    """Body of POST /control: hold a venue's answers after their effect, or let them go."""

    do: Literal["hold", "release"]
    venue: VenueName


_CONTROL: TypeAdapter[Fill | TakeAway | Door] = TypeAdapter(
    Annotated[Fill | TakeAway | Door, Field(discriminator="do")]
)


# --- the server --------------------------------------------------------------


def app(world: World) -> Starlette:
    """Return `world` behind HTTP: 201 for what is done now, 200 for its repeat, 409 for a no."""
    served = _Served(world)
    return Starlette(
        routes=[
            Route("/restaurant/bookings", served.book_table, methods=["POST"]),
            Route("/group/messages", served.tell, methods=["POST"]),
            Route("/cinema/bookings", served.book_seats, methods=["POST"]),
            Route("/cinema/bookings/{booking}", served.cancel_seats, methods=["DELETE"]),
            Route("/restaurant/bookings/{booking}", served.cancel_table, methods=["DELETE"]),
            Route("/{venue:str}/bookings", served.look_up, methods=["GET"]),
            Route("/{venue:str}/messages", served.look_up, methods=["GET"]),
            Route("/{venue:str}/held", served.held, methods=["GET"]),
            Route("/books", served.books, methods=["GET"]),
            Route("/lines", served.lines, methods=["GET"]),
            Route("/control", served.control, methods=["POST"]),
        ],
        exception_handlers={TurnedDown: _turned_down, ValidationError: _not_understood},
    )


class _Served:
    """The routes. Each says whether it repeats before it acts: with one event loop nothing comes between."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def book_table(self, request: Request) -> Response:
        wanted, key = TableWanted.model_validate_json(await request.body()), request.headers.get(KEY)
        status = await _status(self._world.restaurant, key)
        return _made(await self._world.restaurant.book(wanted.day, wanted.time, wanted.party, key), status)

    async def tell(self, request: Request) -> Response:
        wanted, key = TextWanted.model_validate_json(await request.body()), request.headers.get(KEY)
        status = await _status(self._world.group, key)
        return _made(await self._world.group.tell(wanted.text, key), status)

    async def book_seats(self, request: Request) -> Response:
        wanted, key = SeatsWanted.model_validate_json(await request.body()), request.headers.get(KEY)
        status = await _status(self._world.cinema, key)
        return _made(await self._world.cinema.book(wanted.film, wanted.time, wanted.seats, key), status)

    async def cancel_seats(self, request: Request) -> Response:
        key = request.headers.get(KEY)
        return _made(await self._world.cinema.cancel(request.path_params["booking"], key), 200)

    async def cancel_table(self, request: Request) -> Response:
        key = request.headers.get(KEY)
        return _made(await self._world.restaurant.cancel(request.path_params["booking"], key), 200)

    async def look_up(self, request: Request) -> Response:
        venue = self._world.venues.get(request.path_params["venue"])
        made = None if venue is None else await venue.lookup(request.query_params.get("key", ""))
        return Response(status_code=404) if made is None else _made(made, 200)

    async def held(self, request: Request) -> Response:
        venue = self._world.venues.get(request.path_params["venue"])
        if venue is None:
            return Response(status_code=404)
        await venue.until_held()
        return Response(status_code=204)

    async def books(self, _: Request) -> Response:
        return JSONResponse(self._world.books())

    async def lines(self, _: Request) -> Response:
        return JSONResponse(self._world.lines)

    async def control(self, request: Request) -> Response:
        match _CONTROL.validate_json(await request.body()):
            case Fill(do="full", day=day, time=time):
                self._world.restaurant.full(day, time)
            case Fill(do="free", day=day, time=time):
                self._world.restaurant.free(day, time)
            case TakeAway(reservation=reservation):
                self._world.restaurant.take_away(reservation)
            case Door(do="hold", venue=name):
                self._world.venues[name].hold()
            case Door(do="release", venue=name):
                self._world.venues[name].release()
        return Response(status_code=204)


async def _status(venue: Venue, key: str | None) -> int:
    return 200 if key is not None and await venue.lookup(key) is not None else 201


def _made(name: str, status: int) -> Response:
    return JSONResponse({"id": name}, status)


async def _turned_down(_: Request, error: Exception) -> Response:
    assert isinstance(error, TurnedDown)
    return JSONResponse({"reason": error.reason, "detail": error.detail}, 409)


async def _not_understood(_: Request, error: Exception) -> Response:
    return JSONResponse({"detail": str(error)}, 422)


def main() -> None:
    """Serve a new World until SIGTERM, or until the pipe at standard input closes."""
    import uvicorn  # only the server's process needs it

    parser = argparse.ArgumentParser(prog="sayso.testing.world_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--print-port", action="store_true", help="print the port on a line before serving")
    options = parser.parse_args()
    # No grace: a request that is held would keep the process for ever.
    config = uvicorn.Config(app(World()), log_level="critical", access_log=False, timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", options.port)) as listening:
        if options.print_port:
            print(listening.getsockname()[1], flush=True)
        if stat.S_ISFIFO(os.fstat(0).st_mode):
            threading.Thread(target=_end_with_parent, args=(server,), daemon=True).start()
        server.run(sockets=[listening])


def _end_with_parent(server: Any) -> None:
    while os.read(0, 4096):
        pass
    server.should_exit = True


# --- the client --------------------------------------------------------------


class WorldClient:
    """The venues of a World in another process, with the names that they have on a `World`.

    `timeout_s` bounds every request, also one that is held; a tool's own timeout is usually shorter.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 60) -> None:
        self._http = httpx2.AsyncClient(base_url=base_url, timeout=timeout_s, trust_env=False)
        self.restaurant = RestaurantClient("restaurant", "bookings", self._http)
        self.group = GroupClient("group", "messages", self._http)
        self.cinema = CinemaClient("cinema", "bookings", self._http)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def books(self) -> dict[str, Any]:
        """Return what stands now: tables held, texts sent, seats held."""
        books: dict[str, Any] = (await self._http.get("/books")).raise_for_status().json()
        return books

    async def lines(self) -> list[str]:
        """Return what the outside did, in order."""
        lines: list[str] = (await self._http.get("/lines")).raise_for_status().json()
        return lines


class VenueClient:
    """What the three clients have in common."""

    def __init__(self, name: VenueName, things: str, http: httpx2.AsyncClient) -> None:
        self.name: VenueName = name
        self._path, self._http = f"/{name}/{things}", http

    async def hold(self) -> None:
        """From now on answers wait after their effect."""
        await self._control(Door(do="hold", venue=self.name))

    async def release(self) -> None:
        """Let the answers go that wait, and all further ones."""
        await self._control(Door(do="release", venue=self.name))

    async def until_held(self) -> None:
        """Return once a request has taken effect and waits with its answer."""
        (await self._http.get(f"/{self.name}/held")).raise_for_status()

    async def lookup(self, key: str) -> str | None:
        """Return the id of what was done under this key, or None."""
        answer = await self._http.get(self._path, params={"key": key})
        return None if answer.status_code == 404 else _id(answer)

    async def _make(self, wanted: BaseModel, key: str | None) -> str:
        return _id(await self._http.post(self._path, json=wanted.model_dump(), headers=_headers(key)))

    async def _control(self, order: Fill | TakeAway | Door) -> None:
        _judged(await self._http.post("/control", json=order.model_dump()))


class RestaurantClient(VenueClient):
    """`Restaurant`, in another process."""

    async def book(self, day: str, time: str, party: int, key: str | None = None) -> str:
        """Return the id of the reservation that is made, or was made under this key.

        Raises:
            TurnedDown: it is full then, or the key came with other content.
        """
        return await self._make(TableWanted(day=day, time=time, party=party), key)

    async def cancel(self, reservation: str, key: str | None = None) -> str:
        """Give a table back, and return its id.

        Raises:
            TurnedDown: there was no such reservation, or the key came with other content.
        """
        return _id(await self._http.delete(f"{self._path}/{reservation}", headers=_headers(key)))

    async def full(self, day: str, time: str) -> None:
        """Be full then; reservations that stand are kept."""
        await self._control(Fill(do="full", day=day, time=time))

    async def free(self, day: str, time: str) -> None:
        """Have tables then."""
        await self._control(Fill(do="free", day=day, time=time))

    async def take_away(self, reservation: str) -> None:
        """Drop a reservation.

        Raises:
            TurnedDown: no such table is held.
        """
        await self._control(TakeAway(do="take_away", reservation=reservation))


class GroupClient(VenueClient):
    """`Group`, in another process."""

    async def tell(self, text: str, key: str | None = None) -> str:
        """Return the id of the message that everybody has now.

        Raises:
            TurnedDown: the key came with other content.
        """
        return await self._make(TextWanted(text=text), key)


class CinemaClient(VenueClient):
    """`Cinema`, in another process."""

    async def book(self, film: str, time: str, seats: int, key: str | None = None) -> str:
        """Return the id of the booking that is made, or was made under this key.

        Raises:
            TurnedDown: the key came with other content.
        """
        return await self._make(SeatsWanted(film=film, time=time, seats=seats), key)

    async def cancel(self, booking: str, key: str | None = None) -> str:
        """Give the seats of a booking back, and return its id.

        Raises:
            TurnedDown: there was no such booking, or the key came with other content.
        """
        return _id(await self._http.delete(f"{self._path}/{booking}", headers=_headers(key)))


def _headers(key: str | None) -> dict[str, str]:
    return {} if key is None else {KEY: key}


def _judged(answer: httpx2.Response) -> httpx2.Response:
    if answer.status_code == 409:
        raise TurnedDown(**answer.json())
    return answer.raise_for_status()


def _id(answer: httpx2.Response) -> str:
    return str(_judged(answer).json()["id"])


# --- a process of its own -----------------------------------------------------


@contextmanager
def start_world() -> Iterator[str]:
    """Start a World in a new process and yield its base URL; it ends with the block, or with this process.

    Raises:
        RuntimeError: it did not start.
    """
    command = [sys.executable, "-m", "sayso.testing.world_server", "--port", "0", "--print-port"]
    with subprocess.Popen(  # noqa: S603 - our own program, no shell; Ctrl-C at a terminal is not for it
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            if not port:
                raise RuntimeError(f"the world did not start: exit code {process.wait()}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


if __name__ == "__main__":
    main()
