"""The demo's server as a process that is ended on purpose: the production App behind the real Server, with the
places of `testing.crash` around it. `demo.zygote` makes such processes, many and fast.
"""

from __future__ import annotations

import asyncio
import signal
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import httpx2

from sayso.adapters.system import SystemClock
from sayso.agent import Agent, SourceSpec, ToolSpec
from sayso.assembly import App
from sayso.core.inputs import Fit
from sayso.demo.concierge import concierge, script, signed_by_demo
from sayso.demo.under_way import assistant
from sayso.demo.under_way import script as script_under_way
from sayso.runtime.limits import Limits
from sayso.runtime.ports import Classifier, Meanwhile
from sayso.server.app import Server
from sayso.storage.sqlite import SqliteStore
from sayso.testing.crash import MOMENT_S, CrashPoints, WatchedAnswers, WatchedModel, WatchedStore
from sayso.testing.scripted import ScriptedModel
from sayso.testing.world_server import CinemaClient, GroupClient, RestaurantClient

#: nobody looks at the clock of its own accord in a story, so that each run passes the same places
LOOK_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Order:
    """What a process is started with."""

    database: str
    world_url: str
    #: where to end, by name; None: nowhere
    at: str | None
    #: file that is told every place that is passed
    told: str
    #: how long the other threads go on at the place, before the end
    moment_s: float = MOMENT_S


class Outside:
    """The venues of a world whose address is known when the process starts, not before."""

    restaurant: RestaurantClient
    group: GroupClient
    cinema: CinemaClient

    def at(self, url: str) -> None:
        """Find the world at this address."""
        plain = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # nobody is trusted, and reading whom to trust takes long
        http = httpx2.AsyncClient(base_url=url, timeout=60, trust_env=False, verify=plain)
        self.restaurant = RestaurantClient("restaurant", "bookings", http)
        self.group = GroupClient("group", "messages", http)
        self.cinema = CinemaClient("cinema", "bookings", http)


class WatchedAgent(Agent):
    """An agent whose tools and lookups have their places."""

    def __init__(self, agent: Agent, points: CrashPoints) -> None:
        classifier = agent.classifier
        if not isinstance(classifier, str):
            classifier = WatchedClassifier(classifier, points)
        super().__init__(
            agent.name, agent.model, agent.instructions, in_flight=agent.in_flight.value, classifier=classifier
        )
        self._watched = tuple(_watched(spec, points) for spec in agent.tools)
        self._heard = agent.sources

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools, each with a place before and after."""
        return self._watched

    @property
    def sources(self) -> tuple[SourceSpec, ...]:
        """The sources as they were declared."""
        return self._heard


def _watched(spec: ToolSpec, points: CrashPoints) -> ToolSpec:
    lookup = None if spec.lookup is None else points.around(f"lookup.{spec.name}", spec.lookup)
    release = None if spec.release is None else points.around(f"release.{spec.name}", spec.release)
    return replace(spec, function=points.around(f"tool.{spec.name}", spec.function), lookup=lookup, release=release)


class WatchedClassifier:
    """A classifier with a place before and after what it says."""

    def __init__(self, inside: Classifier, points: CrashPoints) -> None:
        self.name, self._fit = inside.name, points.around("classifier", inside.fit)

    async def fit(self, meanwhile: Meanwhile) -> Fit:
        """See `Classifier`."""
        return await self._fit(meanwhile)


class Incarnation:
    """One start of the server, put together before its file and its outside are known: a fork away from running.

    Each start of one story needs another of these: a process is known to the store by its App's id.
    """

    def __init__(self, *, linger_ms: int, in_flight: str) -> None:
        """`in_flight` is what becomes of what a person says while the agent of `demo.under_way` works; empty: it is the
        concierge."""
        self._points, self._outside = CrashPoints(), Outside()
        self._store = WatchedStore(self._points)
        if in_flight:
            model = WatchedModel(ScriptedModel(script_under_way), self._points)
            served = assistant(self._outside, model=model, in_flight=in_flight)
        else:
            model = WatchedModel(ScriptedModel(script), self._points)
            served = concierge(self._outside, model=model, scheme=signed_by_demo)
        agent = WatchedAgent(served, self._points)
        limits = Limits(linger_ms=linger_ms, timer_look_ms=LOOK_MS)
        self._app = App(agent, store=self._store.as_store, limits=limits)
        self._app.asgi.add_middleware(WatchedAnswers, points=self._points)

    async def run(self, order: Order, listens: Callable[[str], object]) -> None:
        """Serve until SIGTERM, or until the place of the order; `listens` is told the address."""
        self._points.arm(at=order.at, told=Path(order.told), moment_s=order.moment_s)
        self._outside.at(order.world_url)
        store = await SqliteStore.open(
            order.database, clock=SystemClock().now_ms, exclusive=True, on_commit=self._points.committing
        )
        self._store.behind(store)
        try:
            async with self._app.running():
                server = Server(self._app.asgi, port=0)
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.stop)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(server.serve())
                    await asyncio.to_thread(server.listening.wait)
                    host, port = server.address
                    listens(f"http://{host}:{port}")
        finally:
            await store.close()
