"""Play a cell of the crash matrix: a real server is killed at a named place, started again on the same file, and the
story goes on as its people do. Who got no answer sends again; a page comes back by the last event that it has.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import ssl
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from sayso.adapters.system import SystemClock, SystemIds
from sayso.core.consent import Standing
from sayso.core.operation import OperationState
from sayso.core.origin import Principal
from sayso.core.rows import Row, Scalar
from sayso.core.session import Position, SessionRecord
from sayso.core.turn import Turn, fold
from sayso.demo.crash_child import Order
from sayso.demo.scenarios import offer
from sayso.demo.scenarios_under_way import TABLE
from sayso.demo.stage import SECRETS
from sayso.demo.zygote import Started, Zygote
from sayso.runtime.identity import Identity
from sayso.runtime.numbered import Line, numbered
from sayso.sources import sign
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import DoorRow, InboxRow, OperationRow
from sayso.testing.crash import MOMENT_S
from sayso.testing.world_server import GroupClient, RestaurantClient, VenueClient

BOOK = "Book Friday at seven for four and tell the group"
#: how long a cell may take, seconds
PATIENCE_S = 20.0
#: how long a look at the session waits for news before the next one, seconds
LOOK_S = 0.05


# --- cells ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Story:
    """What happens where nobody dies. Alice books and tells the group, the restaurant calls, she says yes; or she says
    more while the table is being booked."""

    name: str
    about: str
    #: the restaurant has no table when she says yes
    full: bool = False
    #: how long a session without work stays loaded
    linger_ms: int = 60_000
    #: her yes has an Idempotency-Key
    keyed: bool = True
    #: what becomes of what she says while the table is being booked, and what she says then
    in_flight: str = ""
    more: str = ""
    #: the row after which the restaurant, which has the table booked, answers
    answers_after: tuple[str, int] = ("input.classified", 1)
    #: what she says to what she is asked; None where she is asked nothing
    verdict: str | None = "yes"
    #: what she says first; the venue that she has to wait for
    first: str = f"{TABLE}. And tell the group"
    venue: str = "restaurant"


STORIES = {
    story.name: story
    for story in (
        Story("offer", "the restaurant's offer is taken; the session stays loaded; her yes has an Idempotency-Key"),
        Story(
            "failing",
            "the restaurant is full when she says yes; the session is let go whenever it is quiet; her yes has no key",
            full=True,
            linger_ms=0,
            keyed=False,
        ),
        Story(
            "saturday",
            "while the table is being booked she says “Actually, Saturday”; the turn begins anew, and Friday is undone",
            linger_ms=0,
            in_flight="merge",
            more="Actually, Saturday",
        ),
        Story(
            "anew",
            "while the table is being booked she adds “And tell the group”; the turn begins anew at once",
            linger_ms=0,
            in_flight="restart",
            first=TABLE,
            more="And tell the group",
            answers_after=("turn.start", 2),
            verdict=None,
        ),
        Story(
            "joined",
            "while the table is being booked she adds “And tell the group”, which joins the turn",
            in_flight="merge",
            first=TABLE,
            more="And tell the group",
            verdict=None,
        ),
        Story(
            "another",
            "while the table is being booked she wonders “Would six fit too?”, which has a turn of its own",
            linger_ms=0,
            in_flight="merge",
            more="Would six fit too?",
            verdict=None,
        ),
        Story(
            "stopped",
            "while the table is being booked she stops the turn",
            in_flight="merge",
            answers_after=("turn.stop", 1),
            verdict=None,
        ),
        Story(
            "unkeyed",
            "Sam is told something, who would get it twice if it came again; then she says something else",
            linger_ms=0,
            in_flight="merge",
            first="Tell Sam that I am late",
            more="Would six fit too?",
            answers_after=("turn.start", 1),
            verdict=None,
            venue="group",
        ),
        Story(
            "unsure",
            "while the table is being booked she says “Six”; the turn pauses and asks, and it is another matter",
            in_flight="merge",
            more="Six",
            verdict="no",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A story, and where its server is killed: at the first place, and once started again at the second."""

    story: str
    points: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.story, *self.points])

    @classmethod
    def parse(cls, line: str) -> Cell:
        """Return the cell that a line names."""
        story, *points = line.split()
        return cls(story, tuple(points))


# --- before the story ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prepared:
    """A file in which Alice has a token and a session, to be copied for each cell."""

    folder: Path
    database: Path
    token: str
    session: str


@asynccontextmanager
async def prepared() -> AsyncIterator[Prepared]:
    """Yield a prepared file, in memory where there is a place for files there: no cell is about the disk."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(
        prefix="sayso-crash-", dir=memory if os.access(memory, os.W_OK) else None
    ) as folder:
        database, ids = Path(folder, "prepared.db"), SystemIds()
        store = await SqliteStore.open(database, clock=SystemClock().now_ms, exclusive=True)
        alice = Principal.parse("user:alice")
        token = await Identity(store, ids).mint(alice, label="crash matrix")
        session = (await store.create_session(ids.session(), owner=alice, title="Friday")).id
        await store.close()
        yield Prepared(Path(folder), database, token, session)


# --- what is seen ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """What the file holds after a kill, as the next start finds it."""

    record: SessionRecord
    waiting: tuple[InboxRow, ...]
    standings: tuple[Standing, ...]
    operations: tuple[OperationRow, ...]
    turn: Turn | None
    replies: int

    @property
    def out(self) -> list[OperationRow]:
        """The operations that were sent and not answered; of some the file says already that they are unknown."""
        return [one for one in self.operations if one.state in (OperationState.SENT, OperationState.UNKNOWN)]


@dataclass(frozen=True, slots=True)
class Try:
    """One attempt of somebody outside: to which start of the server, and the answer, if there was one."""

    start: int
    status: int | None
    said: Any = None


@dataclass
class Played:
    """Everything that is known when a story is over."""

    cell: Cell
    #: the file after each kill
    found: list[Found] = field(default_factory=list)
    #: the places that each start of the server passed
    passed: list[list[str]] = field(default_factory=list)
    #: the kinds of the rows in each write of the first start, in order
    writes: list[str] = field(default_factory=list)
    #: exit codes of the server's starts
    codes: list[int] = field(default_factory=list)
    #: of the message, the hook and the answer
    tries: dict[str, list[Try]] = field(default_factory=lambda: defaultdict(list))
    reader: Reader = field(default_factory=lambda: Reader())
    consents: list[dict[str, Any]] = field(default_factory=list)
    history: list[dict[str, Any]] = field(default_factory=list)
    books: dict[str, Any] = field(default_factory=dict)
    #: what the outside did
    lines: list[str] = field(default_factory=list)
    # from the store, when all is over
    rows: list[Row] = field(default_factory=list)
    operations: list[OperationRow] = field(default_factory=list)
    inbox: list[InboxRow] = field(default_factory=list)
    door: list[DoorRow] = field(default_factory=list)
    tables: dict[str, list[tuple[Scalar, ...]]] = field(default_factory=dict)
    log: list[Line] = field(default_factory=list)
    #: what the server logged: warnings and worse
    said: str = ""
    seconds: float = 0.0

    def __repr__(self) -> str:
        return f"Played({self.cell})"

    @property
    def kills(self) -> int:
        """How often the server was killed."""
        return self.codes.count(-signal.SIGKILL)


@dataclass
class Reader:
    """A page that follows the session, and comes back by the id of the last event it has (K1)."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    #: rows that it showed and was told to drop
    dropped: list[dict[str, Any]] = field(default_factory=list)
    #: the start of the server whose past it has seen the end of
    caught_up: int = -1
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last_event_id(self) -> str | None:
        """The position of the last row."""
        return self.rows[-1]["position"] if self.rows else None

    def take(self, event: str, data: dict[str, Any], *, start: int, is_row: bool) -> None:
        """Take in an event."""
        if event == "resume":
            keep = data["keep"]
            self.dropped += [row for row in self.rows if seq(row) > keep]
            self.rows = [row for row in self.rows if seq(row) <= keep]
        elif event == "caught_up":
            self.caught_up = start
        elif is_row:
            self.rows.append(data)
        self.news.set()


def seq(row: Mapping[str, Any]) -> int:
    """Return the number of a row, as it is public."""
    return Position.parse(row["position"]).seq


# --- the story -------------------------------------------------------------------


class Town:
    """One cell's server, its outside and its people."""

    def __init__(
        self, one: Zygote, given: Prepared, cell: Cell, folder: Path, http: httpx2.AsyncClient, moment_s: float
    ) -> None:
        self._zygote, self._given, self._cell, self._folder, self._http = one, given, cell, folder, http
        self._moment_s = moment_s
        self._story = STORIES[cell.story]
        self._database = folder / "sayso.db"
        self._world_url = ""
        self._as_alice = {"Authorization": f"Bearer {given.token}"}
        self._server: asyncio.Future[Server] = asyncio.get_running_loop().create_future()
        self._started: list[Started] = []
        self.played = Played(cell)

    async def play(self) -> None:
        """Play the story to its end, whatever happens to the server."""
        world = self._zygote.world()
        self._started.append(world)
        self._world_url = await world.process.address() or ""
        shutil.copyfile(self._given.database, self._database)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._keep_serving())
            reading = tasks.create_task(self._read())
            await self._act()
            await serving
            reading.cancel()
        self.played.books = (await self._http.get(f"{self._world_url}/books")).json()
        self.played.lines = (await self._http.get(f"{self._world_url}/lines")).json()
        await self._read_file()

    async def end(self) -> None:
        """End whatever still runs."""
        for each in self._started:
            each.signal(signal.SIGKILL)
            await each.process.exit_code()

    async def _act(self) -> None:
        await (self._say_more() if self._story.in_flight else self._take_the_offer())
        while not await self._stopped():
            await self._rest()

    async def _say_more(self) -> None:
        """Whatever dies meanwhile, the restaurant holds its answer until it is known what becomes of her words."""
        at = self._at_world()
        tables, group = RestaurantClient("restaurant", "bookings", at), GroupClient("group", "messages", at)
        venue = tables if self._story.venue == "restaurant" else group
        await venue.hold()
        session = f"/v1/sessions/{self._given.session}"
        message = {"json": {"text": self._story.first}, "headers": {"Idempotency-Key": "message-1"}}
        await self._insist("message", f"{session}/inputs", **message)
        await self._held(venue)
        more = {"json": {"text": self._story.more}, "headers": {"Idempotency-Key": "message-2"}}
        if self._story.more:
            await self._insist("more", f"{session}/inputs", **more)
        else:
            await self._insist("stop", f"{session}/stop", **(more | {"json": {"turn": "T1"}}))
        kind, count = self._story.answers_after
        while await self._count(kind) < count:
            await self._news()
        await venue.release()
        if self._story.verdict == "no":
            while not await self._questions():
                await self._news()
        else:
            await self._rest()
        if self._story.verdict is not None:
            await self._answer(self._story.verdict)

    async def _held(self, venue: VenueClient) -> None:
        """Return once the venue has done what it was asked, and does not answer; or nobody asks it any more, because
        that would be a second time."""
        waiting = asyncio.create_task(venue.until_held())
        while not waiting.done() and not await self._count("turn.end"):
            await self._news()
        waiting.cancel()

    async def _count(self, kind: str) -> int:
        """Return how many rows of a kind there are."""
        return [row["kind"] for row in (await self._get("/history?limit=500"))["rows"]].count(kind)

    async def _take_the_offer(self) -> None:
        message = {"json": {"text": BOOK}, "headers": {"Idempotency-Key": "message-1"}}
        await self._insist("message", f"/v1/sessions/{self._given.session}/inputs", **message)
        await self._rest()
        restaurant = RestaurantClient("restaurant", "bookings", self._at_world())
        await restaurant.take_away("R1")
        await self._insist("hook", "/v1/hooks/restaurant")
        await self._rest()
        if self._story.full:
            await restaurant.full("Friday", "20:30")
        await self._answer("yes")

    async def _answer(self, verdict: str) -> None:
        [question] = await self._questions()
        headers = {"Idempotency-Key": "yes-1"} if self._story.keyed else {}
        answer = {"json": {"verdict": verdict, "digest": question["digest"]}, "headers": headers}
        await self._insist("answer", f"/v1/sessions/{self._given.session}/consents/{question['id']}", **answer)
        await self._rest()

    def _at_world(self) -> httpx2.AsyncClient:
        self._http.base_url = httpx2.URL(self._world_url)
        return self._http

    # the server

    async def _keep_serving(self) -> None:
        """Start the server, and start it again each time it was killed, until it stops of its own accord."""
        for start in itertools.count():
            told, log = self._folder / f"passed-{start}", self._folder / "server.log"
            at = self._cell.points[start] if start < len(self._cell.points) else None
            order = Order(str(self._database), self._world_url, at, str(told), self._moment_s)
            story = self._story
            started = self._zygote.serve(
                order, start=start, linger_ms=story.linger_ms, in_flight=story.in_flight, log=str(log)
            )
            self._started.append(started)
            url = await started.process.address()
            if url is not None:
                self._server.set_result(Server(start, url, started))
            code = await started.process.exit_code()
            if url is not None:
                self._server = asyncio.get_running_loop().create_future()
            self.played.codes.append(code)
            lines = [line.partition(" ") for line in told.read_text().splitlines()] if told.exists() else []
            self.played.passed.append([name for name, _, _ in lines])
            self.played.writes = self.played.writes or [note for _, _, note in lines if note]
            self.played.said = log.read_text() if log.exists() else ""
            if code != -signal.SIGKILL:
                return
            self.played.found.append(await self._look(self._folder / f"found-{start}"))

    async def _look(self, aside: Path) -> Found:
        """Return what a copy of the file holds: opening the file itself would do the next start's work for it."""
        store = await SqliteStore.open(_copied(self._database, aside), clock=SystemClock().now_ms, exclusive=False)
        record = await store.session(self._given.session)
        assert record is not None
        rows = await store.rows(record.id)
        found = Found(
            record,
            tuple(await store.inbox(record.id, after=0, limit=100)),
            tuple(await store.standings(record.id)),
            tuple(await store.operations(record.id)),
            None if record.turn is None else fold(record.turn, tuple(row for row in rows if row.turn == record.turn)),
            len([row for row in rows if row.kind in ("model.called", "model.said")]),
        )
        await store.close()
        return found

    async def _running(self) -> Server:
        return await asyncio.shield(self._server)

    # its people

    async def _insist(self, what: str, path: str, **options: Any) -> None:
        """Send something, and send it again until there is an answer, as who sends a hook does."""
        while True:
            server = await self._running()
            sent = {**options, "headers": {**self._as_alice, **options["headers"]}} if options else self._signed()
            try:
                answer = await self._http.post(server.url + path, **sent)
            except httpx2.TransportError:
                self.played.tries[what].append(Try(server.start, None))
                await server.started.process.exit_code()
                continue
            said = answer.json() if answer.content else None
            self.played.tries[what].append(Try(server.start, answer.status_code, said))
            return

    def _signed(self) -> dict[str, Any]:
        """Return the restaurant's hook, signed afresh: each attempt has its own time, and the same id."""
        body = json.dumps(offer("20:30")).encode()
        headers = sign(SECRETS["restaurant"], webhook_id="evt_17", timestamp_s=int(time.time()), body=body)
        return {"content": body, "headers": headers}

    async def _get(self, path: str) -> Any:
        """Read something of Alice's session."""
        while True:
            server = await self._running()
            try:
                answer = await self._http.get(
                    f"{server.url}/v1/sessions/{self._given.session}{path}", headers=self._as_alice
                )
                return answer.raise_for_status().json()
            except httpx2.TransportError:
                await server.started.process.exit_code()

    async def _questions(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self._get("/consents"))["consents"]
        return found

    async def _rest(self) -> None:
        """Return once no input waits, no turn is open, no yes owes one, and the page has seen all of it."""
        while not await self._at_rest():
            await self._news()

    async def _news(self) -> None:
        """Wait a little, or until the page sees something new."""
        self.played.reader.news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self.played.reader.news.wait()

    async def _at_rest(self) -> bool:
        before, asked, session = await self._get(""), await self._questions(), await self._get("")
        owed = any(one["state"] == "approved" for one in asked)
        still = before == session and session["turn"] is None and session["waiting"] == 0 and not owed
        let_go = session["state"] == "idle" or self._story.linger_ms > 0
        reader, server = self.played.reader, await self._running()
        shown = len(reader.rows) == seq(session) and reader.caught_up == server.start
        return still and let_go and shown

    async def _stopped(self) -> bool:
        """Tell the server to stop. Return whether it did, and was not killed meanwhile."""
        self.played.consents = await self._questions()
        self.played.history = (await self._get("/history?limit=500"))["rows"]
        server = await self._running()
        server.started.signal(signal.SIGTERM)
        return await server.started.process.exit_code() != -signal.SIGKILL

    # a page

    async def _read(self) -> None:
        """Follow the session, and come back whenever the stream ends."""
        while True:
            server = await self._running()
            with suppress(httpx2.TransportError):
                await self._follow(server)
            await server.started.process.exit_code()

    async def _follow(self, server: Server) -> None:
        reader = self.played.reader
        headers = dict(self._as_alice)
        if reader.last_event_id is not None:
            headers["Last-Event-ID"] = reader.last_event_id
        url = f"{server.url}/v1/sessions/{self._given.session}/stream"
        async with self._http.stream("GET", url, headers=headers, timeout=PATIENCE_S) as answer:
            answer.raise_for_status()
            rest = b""
            async for piece in answer.aiter_raw():
                *events, rest = (rest + piece).split(b"\n\n")
                for each in events:
                    fields = dict(line.split(": ", 1) for line in each.decode().splitlines())
                    if "event" in fields:
                        data = json.loads(fields["data"])
                        reader.take(fields["event"], data, start=server.start, is_row="id" in fields)

    # when all is over

    async def _read_file(self) -> None:
        store = await SqliteStore.open(self._database, clock=SystemClock().now_ms, exclusive=False)
        session, played = self._given.session, self.played
        played.rows = await store.rows(session)
        played.operations = await store.operations(session)
        played.inbox = await store.inbox_record(session)
        played.door = await store.door(session=session)
        played.tables = await store.side_tables(session)
        played.log = await numbered(store, session)
        await store.close()


def _copied(database: Path, aside: Path) -> Path:
    """Return a copy of a store's file, with what is still in its write-ahead log, in a folder of its own."""
    aside.mkdir()
    for suffix in ("", "-wal"):
        if (each := database.with_name(database.name + suffix)).exists():
            shutil.copyfile(each, aside / each.name)
    return aside / database.name


@dataclass(frozen=True, slots=True)
class Server:
    """A start of the server that listens, or did."""

    start: int
    url: str
    started: Started


async def play(one: Zygote, given: Prepared, cell: Cell, *, moment_s: float = MOMENT_S) -> Played:
    """Play one cell; a server that is killed lives on at its place for `moment_s`, save for the thread that came to it.

    Raises:
        TimeoutError: it did not come to its end.
    """
    began = time.monotonic()
    nobody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # as in the child: there is no TLS on loopback
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        async with httpx2.AsyncClient(verify=nobody, trust_env=False, timeout=PATIENCE_S) as http:
            town = Town(one, given, cell, Path(folder), http, moment_s)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await town.play()
            finally:
                await town.end()
    town.played.seconds = time.monotonic() - began
    return town.played
