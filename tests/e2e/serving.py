"""A real server for tests of the HTTP surface: uvicorn on loopback, real stores, commands, admission, sources.

No model and no worker: what an owner would write, a test writes through `Owner`, as the journal's one writer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx2

from sayso.adapters.system import SystemIds
from sayso.core.consent import AskedStep, Consent, Question, Shown, Step, steps_digest
from sayso.core.contract import Role
from sayso.core.labels import RUNTIME, Part
from sayso.core.origin import Origin, Principal
from sayso.core.rows import Body, ModelSaidBody, Row, TurnAskBody
from sayso.core.session import Token
from sayso.journal.append import JournalState, JournalStatus
from sayso.journal.feed import Feed, Feeds
from sayso.runtime.admission import Admission
from sayso.runtime.commands import Commands
from sayso.runtime.identity import Identity
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Heard, Scheme
from sayso.server.app import Server, create_app
from sayso.sources import bearer, sign, standard_webhook
from sayso.storage.memory import MemoryStore
from sayso.storage.postgres import PostgresStore
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import DoorRow, Store, WriteOutcome
from tests import postgres

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLwSw"
LIMITS = Limits(settle_wait_ms=2_000, message_bytes=64 * 1024, history_rows=50)
#: body of a hook
HOOK_BYTES_MAX = 128 * 1024

Headers = dict[str, str]


@dataclass
class Skewed:
    """The computer's clock, and how far ahead a test has put it."""

    ahead_ms: int = 0

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms


class Restaurant:
    """A source whose bodies are JSON."""

    def __init__(self, name: str, scheme: Scheme) -> None:
        self.name, self.scheme = name, scheme

    def hear(self, body: bytes) -> Heard:
        said = json.loads(body)
        return Heard(str(said["text"]), about=[("reservation", str(said.get("reservation", "")))])


def sources() -> dict[str, Restaurant]:
    signed = standard_webhook(SECRET, body_bytes_max=HOOK_BYTES_MAX).ready({})
    told = bearer("let-me-in", event_id="header:idempotency-key").ready({})
    return {"restaurant": Restaurant("restaurant", signed), "cinema": Restaurant("cinema", told)}


@dataclass
class Hints:
    """Notes who was hinted at, and passes the hint on to an owner if there is one."""

    seen: list[str] = field(default_factory=list)
    owner: Owner | None = None

    def hint(self, session: str) -> None:
        self.seen.append(session)
        if self.owner is not None:
            self.owner.hinted.set()

    def status(self, session: str) -> JournalStatus:
        return JournalStatus(JournalState.HEALTHY)

    async def reconcile(self, session: str) -> JournalStatus:
        return self.status(session)

    async def delete(self, session: str) -> bool:
        raise AssertionError("nobody deletes a session here")

    def disputed(self, session: str) -> tuple[Row, ...]:
        return ()

    async def give_up(self, session: str) -> bool:
        return False


@dataclass
class Owner:
    """One who owns a session and writes its rows: published, then stored."""

    store: Store
    feed: Feed
    token: Token
    head: int
    hinted: asyncio.Event = field(default_factory=asyncio.Event)

    def publish(self, *bodies: Body, turn: str | None = None) -> tuple[Row, ...]:
        """Accept rows as a journal does: positions, the pending list, the listeners, without an await."""
        at_ms = self.store.now_ms()
        rows = tuple(
            Row(seq, self.token.epoch, turn, self.token.commit_key(seq), at_ms, body)
            for seq, body in enumerate(bodies, self.head + 1)
        )
        self.head += len(rows)
        self.feed.pending.extend(rows)
        self.feed.publish(rows)
        return rows

    async def write(self, *bodies: Body, turn: str | None = None) -> None:
        """Accept rows, and return when they are stored."""
        rows = self.publish(*bodies, turn=turn)
        assert await self.store.write(self.token, rows) is WriteOutcome.WRITTEN
        self.feed.stored(len(rows))

    async def says(self, *texts: str) -> None:
        """Write a row for each text."""
        await self.write(*(said(text) for text in texts), turn="T1")


def said(text: str) -> ModelSaidBody:
    return ModelSaidBody(1, (Part(text, "model", RUNTIME),))


def question(consent_id: str, approver: str, *, expires_at_ms: int = 2**53, steps: int = 1) -> Consent:
    """Return a question about booking tables."""
    planned = tuple(Step(f"T1.1.{i}", "reserve_table", {"party": 4 + i}, "v1") for i in range(steps))
    asked = AskedStep("book a table", (Shown("party", "4", Role.CRITICAL, "restaurant", True, "12"),))
    return Consent(
        id=consent_id,
        turn="T1",
        origin=Origin(Principal.parse("source:restaurant"), "standard-webhooks v1", (1,)),
        steps=planned,
        digest=steps_digest(planned),
        approvers=(approver,),
        about=(),
        question=Question(f"{consent_id}: book a table for ‹4›?", "restaurant started this turn", (asked,) * steps),
        asked_at_ms=0,
        expires_at_ms=expires_at_ms,
    )


@dataclass
class Served:
    """A server that listens, and the parts behind it."""

    store: Store
    feeds: Feeds
    hints: Hints
    commands: Commands
    identity: Identity
    admission: Admission
    clock: Skewed
    server: Server
    running: asyncio.Task[None]
    http: httpx2.AsyncClient
    numbers: Iterator[int] = field(default_factory=count)

    async def auth(self, principal: str, *, ttl_ms: int | None = None) -> Headers:
        """Return the headers of somebody with a new token."""
        token = await self.identity.mint(Principal.parse(principal), label="test", ttl_ms=ttl_ms)
        return {"Authorization": f"Bearer {token}"}

    async def somebody(self) -> tuple[str, Headers]:
        """Return a new user, as `user:u7`, and her headers."""
        user = f"user:u{next(self.numbers)}"
        return user, await self.auth(user)

    async def session(self, headers: Headers, title: str = "") -> str:
        """Return the id of a new session."""
        answer = await self.http.post("/v1/sessions", json={"title": title}, headers=headers)
        assert answer.status_code == 201, answer.text
        id_: str = answer.json()["id"]
        return id_

    async def own(self, session: str) -> Owner:
        """Take a session that has input, to write its rows."""
        for claimed in await self.store.claim(f"node{next(self.numbers)}", at_most=1_000):
            if claimed.token.session == session:
                return Owner(self.store, self.feeds.own(session), claimed.token, claimed.record.head)
        raise AssertionError(f"{session} was not ready")

    async def owned(self, headers: Headers) -> tuple[str, Owner]:
        """Return a new session with one input, and its owner."""
        session = await self.session(headers)
        answer = await self.http.post(f"/v1/sessions/{session}/inputs", json={"text": "hello"}, headers=headers)
        assert answer.status_code == 202, answer.text
        return session, await self.own(session)

    async def asked(self, approver: str, headers: Headers, **options: Any) -> tuple[str, Consent, Owner]:
        """Return a new session with one open question, and its owner."""
        session, owner = await self.owned(headers)
        consent = question("A1", approver, **options)
        await owner.write(TurnAskBody(consent), turn="T1")
        return session, consent, owner

    def signed(self, body: bytes, webhook_id: str | None = None, *, age_s: int = 0) -> Headers:
        """Return the headers of a hook from the restaurant."""
        sent_at_s = self.store.now_ms() // 1000 - age_s
        return sign(SECRET, webhook_id=webhook_id or self.event_id(), timestamp_s=sent_at_s, body=body)

    def event_id(self) -> str:
        """Return an id that no event had."""
        return f"msg_{next(self.numbers)}"

    async def door(self) -> list[DoorRow]:
        """Return the door's record."""
        return await self.store.door(limit=10_000)

    @property
    def address(self) -> tuple[str, int]:
        return self.server.address


class OnPurpose(Exception):
    """A fault that a test puts in, and that nobody is to be blamed for."""


class Troubled(MemoryStore):
    """A store that fails where a test says so, by the name of a method, before it has done anything."""

    def __init__(self, *, clock: Callable[[], int]) -> None:
        super().__init__(clock=clock)
        self.trouble: dict[str, Exception] = {}
        #: how many uses of a method still go well
        self.spared: dict[str, int] = {}

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__("__dict__")
        if name in own.get("trouble", {}):
            left = own["spared"][name] = own["spared"].get(name, 0) - 1
            if left < 0:
                raise own["trouble"][name]
        return super().__getattribute__(name)


@asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[tuple[Store, Skewed]]:
    """Open a store of this kind, and close it."""
    clock = Skewed()
    store: Store
    with ExitStack() as stack:
        if kind == "postgres":
            url = stack.enter_context(postgres.schema())
            store = await PostgresStore.open(url, clock=clock.now_ms, exclusive=True)
        elif kind == "sqlite":
            store = await SqliteStore.open(folder / "sayso.db", clock=clock.now_ms, exclusive=True)
        else:
            store = Troubled(clock=clock.now_ms)
        yield store, clock
        await store.close()


@asynccontextmanager
async def served_on(kind: str, folder: Path, *, ping_s: float = 15.0) -> AsyncIterator[Served]:
    """Open a store and serve it; no client's doing may be logged as a fault of ours."""
    with no_faults():
        async with opened(kind, folder) as (store, clock), serving(store, clock=clock, ping_s=ping_s) as served:
            yield served


@asynccontextmanager
async def serving(
    store: Store,
    *,
    clock: Skewed,
    ping_s: float = 15.0,
    grace_s: int = 5,
    more: Mapping[str, Restaurant] | None = None,
) -> AsyncIterator[Served]:
    """Serve a store until the block ends, then stop as a signal would; `more` are other sources."""
    ids, feeds, hints = SystemIds(), Feeds(), Hints()
    commands = Commands(store, feeds, hints, ids, LIMITS)
    identity = Identity(store, ids)
    admission = Admission({**sources(), **(more or {})}, store, hints, ids)
    app = create_app(commands=commands, admission=admission, identity=identity, store=store, ping_s=ping_s)
    server = Server(app, port=0, grace_s=grace_s)
    running = asyncio.create_task(server.serve())
    await asyncio.to_thread(server.listening.wait, 10)
    host, port = server.address
    async with httpx2.AsyncClient(base_url=f"http://{host}:{port}", timeout=10) as http:
        yield Served(store, feeds, hints, commands, identity, admission, clock, server, running, http)
    server.stop()
    await running


@contextmanager
def no_faults() -> Iterator[None]:
    """Fail if anything is logged as an error meanwhile: no client's doing is a fault of ours."""
    met: list[logging.LogRecord] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            forced = record.name == "uvicorn.error" and "timeout graceful shutdown" in record.getMessage()
            on_purpose = record.exc_info and isinstance(record.exc_info[1], OnPurpose | asyncio.CancelledError)
            if not forced and not on_purpose:
                met.append(record)

    collect = Collect(logging.ERROR)
    logging.getLogger().addHandler(collect)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(collect)
    assert not met, [record.getMessage() for record in met]


@dataclass(frozen=True)
class Raw:
    """An answer read from a socket."""

    status: int
    headers: Headers
    body: bytes


async def exchange(address: tuple[str, int], *sent: bytes) -> Raw:
    """Send bytes as they are, and return the first answer."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for each in sent:
            writer.write(each)
            await writer.drain()
        return await read_answer(reader)
    finally:
        writer.close()


async def read_answer(reader: asyncio.StreamReader) -> Raw:
    """Return one answer, its body as long as it says."""
    async with asyncio.timeout(10):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Raw(int(first.split()[1]), headers, body)


def problem(answer: httpx2.Response, status: int, slug: str | None = None) -> dict[str, Any]:
    """Check that an answer is a problem of this kind, and return it."""
    assert answer.status_code == status, (answer.status_code, answer.text)
    assert answer.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = answer.json()
    assert found["status"] == status
    assert found["title"]
    assert found["type"] == (f"/problems/{slug}" if slug else "about:blank")
    return found
