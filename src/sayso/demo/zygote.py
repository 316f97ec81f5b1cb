"""A process that has imported everything once, and forks servers and worlds on request: a start in milliseconds.

`python -m sayso.demo.zygote` reads orders from standard input and tells on standard output what became of them, a
JSON object a line each. It has one thread, and no event loop, so a fork of it is as good as a fresh process. When its
input ends, it ends everything that it started; what it started ends when it does.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import httpx2
import uvicorn

from sayso.demo.crash_child import Incarnation, Order
from sayso.testing import world_server
from sayso.testing.world import World

#: servers that one story may start, one after the other
STARTS_MAX = 4
#: how long a session without work stays loaded, and what becomes of what a person says while the agent works, for each
#: kind of server
KINDS = ((60_000, ""), (0, ""), (60_000, "merge"), (0, "merge"), (0, "restart"))


# --- the process --------------------------------------------------------------


@dataclass
class _Child:
    name: str
    pid: int
    #: where it says what it has to say; its end is the process's end
    pipe: int


class _Zygote:
    """The orders, and the processes that were started for them."""

    def __init__(self) -> None:
        self._incarnations = {
            (linger_ms, in_flight): [Incarnation(linger_ms=linger_ms, in_flight=in_flight) for _ in range(STARTS_MAX)]
            for linger_ms, in_flight in KINDS
        }
        self._children: dict[int, _Child] = {}
        #: nobody ever writes to it: a child that reads its end knows that this process has gone
        self._alive, self._life = os.pipe()

    def run(self) -> None:
        """Obey until the orders end."""
        asyncio.run(_warm_up())
        gc.freeze()
        orders = b""
        while True:
            ready, _, _ = select.select([0, *self._children], [], [])
            for pipe in ready:
                if pipe != 0:
                    self._hear(self._children[pipe])
                    continue
                piece = os.read(0, 65536)
                if not piece:
                    return self._end_all()
                *whole, orders = (orders + piece).split(b"\n")
                for line in whole:
                    self._obey(json.loads(line))

    def _obey(self, order: dict[str, Any]) -> None:
        name, do = order.pop("name"), order.pop("do")
        if do == "world":
            self._fork(name, _world)
        elif do == "serve":
            incarnation = self._incarnations[order.pop("linger_ms"), order.pop("in_flight")][order.pop("start")]
            log = order.pop("log")
            self._fork(name, lambda listens: _serve(incarnation, Order(**order), log, listens))
        else:
            for child in self._children.values():
                if child.name == name:
                    os.kill(child.pid, signal.Signals[do])

    def _fork(self, name: str, work: Callable[[Callable[[str], object]], Coroutine[Any, Any, None]]) -> None:
        says, pipe = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(says)
            os.close(self._life)
            for each in self._children:
                os.close(each)
            _be(work, pipe, self._alive)
        os.close(pipe)
        self._children[says] = _Child(name, pid, says)

    def _hear(self, child: _Child) -> None:
        said = os.read(child.pipe, 4096)
        if said:
            _tell(name=child.name, url=said.decode().strip())
            return
        del self._children[child.pipe]
        os.close(child.pipe)
        _, status = os.waitpid(child.pid, 0)
        _tell(name=child.name, ended=os.waitstatus_to_exitcode(status))

    def _end_all(self) -> None:
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


async def _warm_up() -> None:
    """Serve once in this process: what is imported late, and what is made at first use, is there before a fork."""
    listens: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as folder:
        order = Order(f"{folder}/warm.db", "http://127.0.0.1:9", None, f"{folder}/passed")
        serving = asyncio.create_task(Incarnation(linger_ms=0, in_flight="").run(order, listens.set_result))
        async with httpx2.AsyncClient(base_url=await listens, trust_env=False) as http:
            for path in ("/readyz", "/v1/sessions", "/v1/sessions/none/stream"):
                await http.get(path)
            await http.post("/v1/hooks/restaurant", content=b"{}")
        signal.raise_signal(signal.SIGTERM)
        await serving


def _tell(**said: object) -> None:
    os.write(1, json.dumps(said).encode() + b"\n")


def _be(work: Callable[[Callable[[str], object]], Coroutine[Any, Any, None]], pipe: int, alive: int) -> NoReturn:
    """Do the work of a child, and end without a trace of the process it was forked from."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    async def until_orphaned() -> None:
        asyncio.get_running_loop().add_reader(alive, os._exit, 1)
        await work(lambda url: os.write(pipe, f"{url}\n".encode()))

    code = 1
    try:
        asyncio.run(until_orphaned())
        code = 0
    except BaseException:
        logging.getLogger(__name__).exception("child failed")
    finally:
        os._exit(code)


async def _serve(incarnation: Incarnation, order: Order, log: str, listens: Callable[[str], object]) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    await incarnation.run(order, listens)


async def _world(listens: Callable[[str], object]) -> None:
    config = uvicorn.Config(world_server.app(World()), log_config=None, access_log=False, timeout_graceful_shutdown=0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listens(f"http://127.0.0.1:{listening.getsockname()[1]}")
        await uvicorn.Server(config).serve(sockets=[listening])


# --- its client ---------------------------------------------------------------


class Process:
    """A process that was asked for. Who waits for it and is cancelled takes nothing from others who wait."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._listening: asyncio.Future[str | None] = loop.create_future()
        self._ended: asyncio.Future[int] = loop.create_future()

    async def address(self) -> str | None:
        """Return where it listens, once it does; None if it ended before."""
        return await asyncio.shield(self._listening)

    async def exit_code(self) -> int:
        """Return its exit code once it has ended; negative: the signal."""
        return await asyncio.shield(self._ended)

    def hear(self, said: dict[str, Any]) -> None:
        """Take in what is known of it now."""
        if "url" in said:
            self._listening.set_result(said["url"])
            return
        if not self._listening.done():
            self._listening.set_result(None)
        self._ended.set_result(said["ended"])


class Zygote:
    """The other end of a zygote process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        self._stdin, self._process = process.stdin, process
        self._named: dict[str, Process] = {}
        self._count = 0

    async def listen(self) -> None:
        """Take in what it tells, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            said = json.loads(line)
            process = self._named[said["name"]] if "url" in said else self._named.pop(said["name"])
            process.hear(said)

    def world(self) -> Started:
        """Start a World."""
        return self._start("world")

    def serve(self, order: Order, *, start: int, linger_ms: int, in_flight: str, log: str) -> Started:
        """Start a server; `start` counts the starts on this file, from 0. What it logs is appended to `log`."""
        return self._start("serve", **asdict(order), start=start, linger_ms=linger_ms, in_flight=in_flight, log=log)

    def _start(self, do: str, **order: object) -> Started:
        self._count += 1
        name = f"{do} {self._count}"
        self._named[name] = process = Process()
        self._tell(name=name, do=do, **order)
        return Started(process, lambda number: self._tell(name=name, do=number.name))

    def _tell(self, **order: object) -> None:
        self._stdin.write(json.dumps(order).encode() + b"\n")


@dataclass(frozen=True, slots=True)
class Started:
    """A process, and a way to send it a signal, which does nothing once it has ended."""

    process: Process
    signal: Callable[[signal.Signals], None]


@asynccontextmanager
async def zygote() -> AsyncIterator[Zygote]:
    """Yield a zygote; everything that it started ends with the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    one = Zygote(process)
    listening = asyncio.create_task(one.listen())
    try:
        yield one
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await listening


if __name__ == "__main__":
    _Zygote().run()
