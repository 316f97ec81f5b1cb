"""What listeners cost: a thousand that hear nothing, an event on its way to four hundred, and some who don't read.

A server in a process of its own and its readers in this one, over HTTP on loopback. The time of an event is from the
instant that its row has (its acceptance, in whole milliseconds) to the instant its last byte is read here, so what
400 readers cost in this process is in it too.
"""

from __future__ import annotations

import asyncio
import re
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import cast
from urllib.parse import urlsplit

import httpx2
import uvloop

from bench import turns
from sayso.assembly import create_token
from sayso.testing.server_process import ServerProcess

IDLE, IDLE_SESSIONS = 1_000, 50
LIVE, LIVE_TURNS = 400, 40
#: between two turns of the delay's measurement: a person's pace, not a flood's
PAUSE_S = 0.25
SLOW, SLOW_TURNS, SLOW_WORDS = 20, 60, "a long answer. " * 1_500
AT_MS = re.compile(rb'"at_ms":(\d+)')

#: what the server serves
served = turns.agent(keyed=True)


@dataclass
class Reader(asyncio.Protocol):
    """One who follows a session. `on_event` gets each event's bytes; a reader that is slow takes none."""

    request: bytes
    on_event: Callable[[bytes], None] = lambda _: None
    slow: bool = False
    began: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    _buffer: bytes = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's has its methods
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        *events, self._buffer = (self._buffer + data).split(b"\n\n")
        for event in events:
            if b"event: caught_up" in event:
                self.began.set_result(None)
                if self.slow:
                    self.transport.pause_reading()
            self.on_event(event)


@dataclass(frozen=True, slots=True)
class Served:
    """A server, and alice who may use it."""

    url: str
    pid: int
    http: httpx2.AsyncClient

    async def session(self) -> str:
        """Open a session."""
        answer = await self.http.post("/v1/sessions", json={})
        answer.raise_for_status()
        return str(answer.json()["id"])

    async def post(self, session: str, text: str = "do it") -> None:
        """Post a message."""
        (await self.http.post(f"/v1/sessions/{session}/inputs", json={"text": text})).raise_for_status()

    async def follow(self, session: str, **options: object) -> Reader:
        """Begin to follow a session, and return once the past was told."""
        at = urlsplit(self.url)
        lines = (
            f"GET /v1/sessions/{session}/stream HTTP/1.1",
            f"Host: {at.netloc}",
            f"Authorization: {self.http.headers['Authorization']}",
        )
        request = "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"
        sock = socket.socket()
        if options.get("slow"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (at.hostname, at.port))
        _, reader = await loop.create_connection(lambda: Reader(request, **options), sock=sock)  # type: ignore[arg-type]
        await asyncio.wait_for(reader.began, 30)
        return reader

    def status(self, name: str) -> int:
        """Return a figure of the process as Linux has it, e.g. `VmRSS` in KiB."""
        found = re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None, name
        return int(found[1])


@asynccontextmanager
async def server() -> AsyncIterator[Served]:
    """Serve on a fresh file."""
    with tempfile.TemporaryDirectory(prefix="sayso-bench-") as name:
        file = Path(name) / "sayso.db"
        token = await create_token(str(file), "user:alice", label="bench", days=1)
        with ServerProcess("bench.listeners:served", database=file) as process:
            headers = {"Authorization": f"Bearer {token}"}
            async with httpx2.AsyncClient(base_url=process.url, headers=headers, timeout=60) as http:
                yield Served(process.url, process.pid, http)


async def idle() -> None:
    """A thousand listeners who hear nothing."""
    async with server() as here:
        sessions = [await here.session() for _ in range(IDLE_SESSIONS)]
        first = [await here.follow(sessions[0]) for _ in range(100)]  # what the first ones bring is not theirs
        before, threads = here.status("VmRSS"), here.status("Threads")
        readers = [await here.follow(sessions[n % IDLE_SESSIONS]) for n in range(IDLE)]
        each = (here.status("VmRSS") - before) / IDLE
        more = here.status("Threads") - threads
        print(f"{IDLE} idle listeners: {each:.1f} KiB each in the whole server (bar: 20), {more} threads more (bar: 0)")
        for reader in first + readers:
            reader.transport.abort()


async def live() -> None:
    """How long an event is on its way to 400 listeners."""
    async with server() as here:
        session = await here.session()
        delays: list[float] = []

        def heard(event: bytes) -> None:
            if (at := AT_MS.search(event)) is not None:
                delays.append(time.time() * 1000 - int(at[1]))

        readers = [await here.follow(session, on_event=heard) for _ in range(LIVE)]
        for n in range(LIVE_TURNS):
            await here.post(session)
            async with asyncio.timeout(30):
                while len(delays) < (n + 1) * 7 * LIVE:  # noqa: ASYNC110 - readers are many
                    await asyncio.sleep(0.01)
            await asyncio.sleep(PAUSE_S)
        cuts = quantiles(delays, n=100)
        print(
            f"{len(delays)} events to {LIVE} listeners: median {median(delays):.1f} ms,"
            f" p99 {cuts[98]:.1f} ms (bar: 100), longest {max(delays):.1f} ms"
        )
        for reader in readers:
            reader.transport.abort()


async def slow() -> None:
    """What readers who don't read cost those who write: turns beside as many who do."""
    async with server() as here:
        took = {}
        for kind in (False, True):
            session = await here.session()
            done = asyncio.Event()

            def heard(event: bytes, done: asyncio.Event = done) -> None:
                if b"event: turn.end" in event:
                    done.set()

            writer = await here.follow(session, on_event=heard)
            others = [await here.follow(session, slow=kind) for _ in range(SLOW)]
            each = []
            for _ in range(SLOW_TURNS):
                began = time.perf_counter()
                done.clear()
                await here.post(session, SLOW_WORDS)
                await asyncio.wait_for(done.wait(), 30)
                each.append((time.perf_counter() - began) * 1000)
            took[kind] = median(each)
            for reader in (writer, *others):
                reader.transport.abort()
        print(
            f"a turn beside {SLOW} readers: {took[False]:.1f} ms where they read, {took[True]:.1f} ms where they don't"
            f" (ratio {took[True] / took[False]:.2f})"
        )


async def main() -> None:
    """Measure and print a line each."""
    await idle()
    await live()
    await slow()


if __name__ == "__main__":
    uvloop.run(main())
