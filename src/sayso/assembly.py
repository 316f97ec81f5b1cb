"""Put the parts together: the one file that knows every concrete class.

`App` is sayso inside a program of your own. The functions below it are what the command line calls.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
from pydantic import ValidationError

from sayso.adapters.classifier import ModelClassifier
from sayso.adapters.functions import FunctionTools
from sayso.adapters.logs import JsonFormatter, LineFormatter
from sayso.adapters.rescue import RescueFile
from sayso.adapters.sources import FunctionSource
from sayso.adapters.system import StoreClock, SystemClock, SystemIds
from sayso.agent import Agent
from sayso.core.canonical import canonical
from sayso.core.errors import NotFound, Refused
from sayso.core.origin import Principal
from sayso.journal.feed import Bounds, Feeds
from sayso.journal.frames import PLAIN, Projection
from sayso.runtime.admission import Admission
from sayso.runtime.commands import Commands
from sayso.runtime.driver import Around, Persona
from sayso.runtime.effects import effects_of
from sayso.runtime.files import Files
from sayso.runtime.identity import Identity
from sayso.runtime.limits import Limits
from sayso.runtime.numbered import Chosen, Line, lay_out, numbered
from sayso.runtime.people import People
from sayso.runtime.ports import Classifier, Clock, Ids, Model, NoRescue, Rescue
from sayso.runtime.rules import RULES, Rules
from sayso.runtime.worker import Worker
from sayso.server.app import Application, Server, create_app
from sayso.settings import Settings
from sayso.sources import sign
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Store

log = logging.getLogger(__name__)

DAY_MS = 24 * 3_600_000


class Unusable(Refused):
    """What was given to start with can't be used: an agent, a setting, a model, a secret."""


class App:
    """One agent over one store: its commands, its doors, its worker, and the ASGI app in front of them."""

    def __init__(
        self,
        agent: Agent,
        *,
        store: Store,
        clock: Clock | None = None,
        ids: Ids | None = None,
        limits: Limits | None = None,
        rules: Rules = RULES,
        projection: Projection = PLAIN,
        environ: Mapping[str, str] = os.environ,
        rescue: Rescue | None = None,
    ) -> None:
        """Assemble; nothing runs yet, and the store is used as it is, never closed. `rescue` keeps what tools
        answered where the store can't at shutdown (K9); without one it is found out again. `projection` says what
        rows are to those who follow a session.

        Raises:
            Unusable: the agent's model can't be had, or a secret that its sources name is missing.
        """
        self.store = store
        clock, ids, limits = clock or StoreClock(lambda: store.now_ms()), ids or SystemIds(), limits or Limits()
        model = _model(agent.model)
        classifier = _classifier(agent, model)
        tools = FunctionTools(agent.tools)
        persona = Persona(
            agent.name, agent.instructions, model, tools, agent.in_flight, classifier, round(agent.debounce_s * 1000)
        )
        feeds = Feeds(projection=projection, bounds=_bounds(limits))
        self.worker = Worker(Around(store, clock, persona, limits, rules, rescue or NoRescue()), feeds, node=ids.node())
        self.commands = Commands(store, feeds, self.worker, ids, limits, rules=rules)
        self.people = People(self.commands, store)
        self.files = Files(self.commands, store)
        self.admission = Admission(_sources(agent, environ), store, self.worker, ids)
        self.identity = Identity(store, ids)
        self.feeds = feeds
        self._asgi: Application | None = None

    @property
    def asgi(self) -> Application:
        """The ASGI app, to be served by any server, or mounted in another app. Made when it is first wanted: to
        describe every call takes longer than all the rest of an `App`."""
        if self._asgi is None:
            self._asgi = create_app(
                commands=self.commands, admission=self.admission, identity=self.identity, store=self.store
            )
        return self._asgi

    @asynccontextmanager
    async def running(self) -> AsyncIterator[App]:
        """Run the worker meanwhile; at the end let running steps finish, and give every session up (K9)."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self.worker.register()
                tasks.create_task(self.worker.run())
                try:
                    yield self
                finally:
                    if self._asgi is not None:
                        self._asgi.streams.close()
                    self.feeds.dismiss_all("shutdown")
                    self.worker.stop()
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            raise group.exceptions[0] from None


def _bounds(limits: Limits) -> Bounds:
    return Bounds(
        queue_events=limits.queue_events,
        queue_bytes=limits.queue_bytes,
        ring_rows=limits.ring_rows,
        ring_bytes=limits.ring_bytes,
        replay_rows=limits.replay_rows,
    )


def _model(model: Model | str) -> Model:
    if isinstance(model, str):
        raise Unusable(f"model {model!r}: this release has no adapter for it; give Agent a Model object")
    return model


def _classifier(agent: Agent, model: Model) -> Classifier | None:
    if isinstance(agent.classifier, str):
        return ModelClassifier(model) if agent.classifier == "model" else None
    return agent.classifier


def _sources(agent: Agent, environ: Mapping[str, str]) -> dict[str, FunctionSource]:
    try:
        return {spec.name: FunctionSource(spec, spec.scheme.ready(environ)) for spec in agent.sources}
    except ValueError as error:
        raise Unusable(str(error)) from None


# --- what the command line calls ----------------------------------------------


def settings(**given: object) -> Settings:
    """Return the settings, with what was given on the command line last.

    Raises:
        Unusable: a value is wrong or a name is not known.
    """
    try:
        return Settings.load(None, **{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise Unusable(f"settings: {wrong}") from None
    except ValueError as error:
        raise Unusable(f"settings: {error}") from None


def load_agent(target: str) -> Agent:
    """Return the agent at `module:name`, or what the function of that name returns.

    Raises:
        Unusable: there is no such module or name, or it is no agent.
    """
    module_name, colon, name = target.partition(":")
    if not colon:
        raise Unusable(f"{target!r}: say where the agent is, as module:name")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except ModuleNotFoundError as error:
        raise Unusable(f"{target}: {error}") from None
    except AttributeError:
        raise Unusable(f"{target}: {module_name} has no {name}") from None
    agent = found() if callable(found) and not isinstance(found, Agent) else found
    if not isinstance(agent, Agent):
        raise Unusable(f"{target} is a {type(agent).__name__}, not an Agent")
    return agent


async def serve_forever(target: str, *, host: str | None, port: int | None, database: str | None) -> None:
    """Serve an agent until a signal ends it. Prints where it listens, on one line.

    Raises:
        Unusable: see `load_agent`, `settings` and `App`.
        StoreLocked, StoreUnavailable: the store is another process's, or can't be used.
    """
    chosen = settings(host=host, port=port, database=database)
    _set_up_logging(chosen)
    agent = load_agent(target)
    async with open_store(chosen.database, exclusive=True) as store:
        app = App(agent, store=store, limits=chosen.limits, rescue=RescueFile(_rescue_file(chosen)))
        async with app.running():
            await _serve(Server(app.asgi, host=chosen.host, port=chosen.port))
    log.info("stopped", extra={"database": shown(chosen.database)})


def _rescue_file(chosen: Settings) -> Path:
    """Return where answers are kept that the store did not take: as set, else beside the database's file."""
    if chosen.rescue_file:
        return Path(chosen.rescue_file)
    return Path("sayso.rescue" if chosen.database.startswith(SERVER) else f"{chosen.database}.rescue")


async def _serve(server: Server) -> None:
    """Serve until SIGINT or SIGTERM. The server's own handlers would end the process before the worker's
    steps are done, so the signals are this loop's before and after it."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop)
    serving = asyncio.create_task(server.serve())
    await asyncio.wait((serving, asyncio.create_task(_announce(server))), return_when=asyncio.FIRST_COMPLETED)
    await serving


async def _announce(server: Server) -> None:
    await asyncio.to_thread(server.listening.wait)
    host, port = server.address
    print(f"listening on http://{host}:{port}", flush=True)


def _set_up_logging(chosen: Settings) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if chosen.log_json else LineFormatter())
    logging.basicConfig(level=chosen.log_level.upper(), handlers=[handler])


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise Unusable(f"there is no {path}; name the store's file with --database")


#: how the URL of a database on a server begins; anything else is the path of a SQLite file
SERVER = ("postgresql://", "postgres://")
#: another database's URL, or a server's name as libpq has it in keywords
_NEITHER = re.compile(r"^[\w+.-]+://|(^|\s)(host|hostaddr|dbname|service)\s*=")


def shown(database: str) -> str:
    """Return what may be logged of a database's name: a path, and nothing of a URL, which may hold a password."""
    return "PostgreSQL" if database.startswith(SERVER) else database


@asynccontextmanager
async def open_store(database: str, *, exclusive: bool, must_exist: bool = False) -> AsyncIterator[Store]:
    """Open the store at a path or a URL for a block; `exclusive` is for who runs sessions.

    Raises:
        Unusable: the driver for it is not installed, there is no file where one must be, or it names neither.
        StoreLocked, StoreUnavailable: it is another process's, or can't be used.
    """
    store: Store
    if database.startswith(SERVER):
        store = await _on_postgres(database, exclusive=exclusive)
    elif _NEITHER.search(database):  # a file of that name would be made, and nobody would miss the database
        raise Unusable("the database is a SQLite file, or a URL that begins with postgresql://")
    else:
        if must_exist:
            _must_exist(Path(database))
        store = await SqliteStore.open(database, clock=SystemClock().now_ms, exclusive=exclusive)
    try:
        yield store
    finally:
        await store.close()


async def _on_postgres(url: str, *, exclusive: bool) -> Store:
    try:
        from sayso.storage.postgres import PostgresStore  # an extra: not everybody has its driver
    except ImportError as error:
        raise Unusable(str(error)) from None
    return await PostgresStore.open(url, exclusive=exclusive)


def _chosen(database: str | None) -> str:
    return settings(database=database).database


def minutes_ago_ms(minutes: int) -> int:
    """Return the instant so many minutes ago."""
    return SystemClock().now_ms() - minutes * 60_000


#: how often a followed log looks for new entries
LOOK_S = 0.5


async def read_log(
    database: str | None, session: str, *, chosen: Chosen | None = None, as_json: bool = False
) -> list[str]:
    """Return the numbered list of a session, as text or one JSON object a line.

    Raises:
        NotFound: there is no such session.
    """
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        return _shown(await _chosen_lines(store, session, chosen or Chosen()), as_json=as_json)


async def follow_log(
    database: str | None, session: str, *, chosen: Chosen | None = None, as_json: bool = False
) -> AsyncIterator[str]:
    """Yield the numbered list of a session, and then each new entry as it is stored, until nobody asks.

    An entry of the door that belongs before ones that were shown is shown when it is found, with its number.

    Raises:
        NotFound: there is no such session.
    """
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        seen: set[str] = set()
        while True:
            lines = await _chosen_lines(store, session, chosen or Chosen())
            for text in _shown([line for line in lines if line.ref not in seen], as_json=as_json):
                yield text
            seen.update(line.ref for line in lines)
            await asyncio.sleep(LOOK_S)


async def _chosen_lines(store: Store, session: str, chosen: Chosen) -> list[Line]:
    if await store.session(session) is None:
        raise NotFound(f"session {session}")
    return [line for line in await numbered(store, session) if chosen.takes(line)]


def _shown(lines: list[Line], *, as_json: bool) -> list[str]:
    if not as_json:
        return lay_out(lines)
    return [
        canonical(
            {
                "number": line.number,
                "at_ms": line.at_ms,
                "kind": line.kind,
                "seq": line.seq,
                "turn": line.turn,
                "text": line.text,
            }
        )
        for line in lines
    ]


async def read_sessions(database: str | None) -> list[str]:
    """Return a line for each of the newest sessions."""
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        found = await store.sessions(of=None, limit=100)
    return [f"{one.id}  {one.owner}  {one.head} rows  {one.state}  {one.title}" for one in found] or ["no sessions yet"]


async def read_effects(database: str | None, session: str, *, everything: bool) -> list[str]:
    """Return a line for each thing that the session's operations left in the world, newest first.

    Raises:
        NotFound: there is no such session.
    """
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        if await store.session(session) is None:
            raise NotFound(f"session {session}")
        page = await effects_of(store, session, limit=1_000, everything=everything)
    lines = [effect.line for effect in page.effects] or ["nothing stands" if not everything else "nothing was done"]
    return [*lines, "… and older ones"] if page.more else lines


async def create_token(database: str | None, principal: str, *, label: str, days: int | None) -> str:
    """Make an API token and return its text, which is stored nowhere.

    Raises:
        Unusable: no such kind of principal, or it can't have a token.
    """
    async with open_store(_chosen(database), exclusive=False) as store:
        try:
            ttl_ms = None if days is None else days * DAY_MS
            return await Identity(store, SystemIds()).mint(Principal.parse(principal), label=label, ttl_ms=ttl_ms)
        except ValueError as error:
            raise Unusable(str(error)) from None


async def list_tokens(database: str | None) -> list[str]:
    """Return a line for each token: its id, whose it is, what it is for, and whether it still works."""
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        found, now_ms = await store.tokens(), store.now_ms()
    lines = []
    for token in found:
        over = token.expires_at_ms is not None and token.expires_at_ms <= now_ms
        state = "revoked" if token.revoked_at_ms is not None else "expired" if over else "good"
        lines.append(f"{token.id}  {token.principal}  {state}  {token.label}".rstrip())
    return lines or ["no tokens yet"]


async def revoke_token(database: str | None, token_id: str) -> str:
    """Make a token useless, and return a sentence.

    Raises:
        NotFound: there is none of that id, or it was revoked before.
    """
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        if not await store.revoke_token(token_id):
            raise NotFound(f"token {token_id} that still works")
    return f"token {token_id} is revoked"


async def bind_source(database: str | None, source: str, session: str) -> str:
    """Make a session the one that takes what a source sends about nothing known, and return a sentence.

    Raises:
        NotFound: there is no such session.
    """
    async with open_store(_chosen(database), exclusive=False, must_exist=True) as store:
        if await store.session(session) is None:
            raise NotFound(f"session {session}")
        await store.bind(source, session)
    return f"{session} takes what {source} sends"


async def send_hook(name: str, *, secret: str, data: str, url: str, event_id: str | None) -> str:
    """Sign a body as the source would, send it once, and return what the server said, as a sentence.

    Raises:
        Unusable: the secret is missing or can't be one, or nobody answers at `url`.
    """
    if secret.startswith("env:") and not os.environ.get(secret[4:]):
        raise Unusable(f"{secret}: there is no such variable")
    literal = os.environ[secret[4:]] if secret.startswith("env:") else secret
    body, clock, webhook_id = data.encode(), SystemClock(), event_id or SystemIds().event()
    try:
        headers = sign(literal, webhook_id=webhook_id, timestamp_s=clock.now_ms() // 1000, body=body)
        async with httpx2.AsyncClient(base_url=url) as http:
            answer = await http.post(f"/v1/hooks/{name}", content=body, headers=headers)
    except ValueError as error:
        raise Unusable(str(error)) from None
    except httpx2.HTTPError as error:
        raise Unusable(f"{url}: {type(error).__name__} {error}") from None
    return f"{webhook_id}: {answer.status_code} {answer.reason_phrase}"
