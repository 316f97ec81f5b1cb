"""The HTTP server: every route, listed once, and a uvicorn that lets its readers go before it stops."""

from __future__ import annotations

import logging
import socket
import threading
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sayso.runtime.admission import Admission
from sayso.runtime.commands import Commands
from sayso.runtime.files import Files
from sayso.runtime.identity import Identity
from sayso.server import openapi, wire
from sayso.server.api import Api, Call, guarded
from sayso.server.body import HangUp
from sayso.server.files import Downloads, Uploads
from sayso.server.hooks import Hooks
from sayso.server.stream import PING_S, Streams
from sayso.storage.store import Store

log = logging.getLogger(__name__)


def create_app(
    *, commands: Commands, admission: Admission, identity: Identity, store: Store, ping_s: float = PING_S
) -> Application:
    """Return the ASGI application, to be served by `Server`, or mounted in another one.

    Whoever serves it otherwise calls `streams.close()` when stopping: servers wait for responses to end, and
    streams don't by themselves.
    """
    streams = Streams(commands, identity, ping_s=ping_s)
    files = Files(commands, store)
    uploads, downloads = Uploads(commands, files, identity), Downloads(files, identity)
    api = Api(commands, store, files)
    return Application(routes(api, Hooks(admission), streams, uploads, downloads, identity), streams)


def routes(
    api: Api, hooks: Hooks, streams: Streams, uploads: Uploads, downloads: Downloads, identity: Identity
) -> list[BaseRoute]:
    """Return every route."""
    call = guarded(identity)
    session = "/v1/sessions/{session}"
    participant = f"{session}/participants/{{person:path}}"  # an id may hold a slash
    return [
        Route("/v1/hooks/{source}", hooks),
        call("/v1/sessions", api.open_session, methods=["POST"], status_code=201),
        call("/v1/sessions", api.list_sessions),
        call(session, api.get_session),
        call(f"{session}/inputs", api.post_input, methods=["POST"], status_code=202),
        call(session, api.change_session, methods=["PATCH"], responses=wire.NOT_DONE),
        call(session, api.delete_session, methods=["DELETE"], status_code=204),
        call(f"{session}/stop", api.stop_turn, methods=["POST"], responses=wire.NOT_DONE),
        call(f"{session}/close", api.close_session, methods=["POST"], responses=wire.NOT_DONE),
        call(f"{session}/effects", api.list_effects),
        call(f"{session}/queue", api.get_queue),
        call(f"{session}/queue/{{n}}", api.retract_input, methods=["DELETE"], responses=wire.NOT_DONE),
        Route(f"{session}/uploads", uploads),
        call(f"{session}/uploads/{{upload}}", api.delete_upload, methods=["DELETE"], status_code=204),
        Route(f"{session}/attachments/{{attachment}}", downloads),
        call(f"{session}/participants", api.list_participants),
        call(participant, api.put_participant, methods=["PUT"], responses=wire.NOT_DONE),
        call(participant, api.delete_participant, methods=["DELETE"], responses=wire.NOT_DONE),
        call(f"{session}/history", api.get_history, response_model=wire.HistoryPage),
        Route(f"{session}/stream", streams),
        call(f"{session}/consents", api.list_consents),
        call(f"{session}/consents/{{consent}}", api.get_consent),
        call(f"{session}/consents/{{consent}}", api.answer_consent, methods=["POST"], responses=wire.NOT_SETTLED),
        call(f"{session}/journal", api.get_journal),
        call(f"{session}/status", api.get_status),
        call(f"{session}/conflict", api.get_conflict),
        call(f"{session}/conflict", api.settle_conflict, methods=["POST"], status_code=202),
        call("/v1/door", api.get_door),
        Call("/healthz", api.health),
        Call("/readyz", api.ready),
    ]


class Application(FastAPI):
    """The framework's application, as we want it, and the streams that it has open."""

    def __init__(self, routes: list[BaseRoute], streams: Streams) -> None:
        super().__init__(
            title="sayso",
            summary="An agent runtime that knows on whose say-so it acts",
            version=version("sayso"),
            routes=routes,
            middleware=[Middleware(HangUp), Middleware(Faults)],
            exception_handlers={**wire.HANDLERS},
            docs_url=None,  # these pages would load scripts from elsewhere
            redoc_url=None,
            redirect_slashes=False,  # a hook is never answered 3xx
            telemetry={"logs": False, "operation_spans": False, "auto_configure": False},  # no texts of errors
        )
        self.streams = streams

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; a stream that it opens runs outside the framework, of which it needs nothing more."""
        if scope["type"] == "http":
            await self.streams.opening(super().__call__, scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """Return the description of every route."""
        return openapi.completed(super().openapi())


class Faults:
    """ASGI middleware: what nobody foresaw is logged once and answered 500, and nothing of it is told."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything through. Where half an answer is out, the server has to cut the connection."""
        started = False

        async def sending(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            log.exception("request failed", extra={"method": scope.get("method"), "path": scope.get("path")})
            if started or scope["type"] != "http":
                raise
            await wire.problem(wire.FAULT)(scope, receive, send)


#: request line and headers of one request
HEAD_BYTES_MAX = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's HTTP/1.1, which would gather a head without an end until there is no memory left."""

    _head_bytes: int | None = 0  # None while a body is read

    def data_received(self, data: bytes) -> None:
        """Take what came, and cut a client off whose head goes on for too long."""
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self.send_400_response("The head of the request is too long.")

    def on_headers_complete(self) -> None:
        """From here on it is the body, which has a limit of its own."""
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Begin to count again, for the next request of the connection."""
        self._head_bytes = 0
        super().on_message_complete()


class Server(uvicorn.Server):
    """uvicorn, which waits for open responses when it stops; so its streams are ended first.

    `run` it, or await `serve` in an event loop that runs already. Port 0 takes a free one: once `listening`
    is set, `address` says which.
    """

    def __init__(self, app: Application, *, host: str = "127.0.0.1", port: int = 8000, grace_s: int = 10) -> None:
        """`grace_s` is how long requests may still take after the server was told to stop."""
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=BoundedHttp,
                ws="none",
                log_config=None,  # logging is its host's to set up
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=grace_s,
            )
        )
        self._streams = app.streams
        self.listening = threading.Event()
        #: host and port; empty until it listens
        self.address: tuple[str, int] = ("", 0)

    def stop(self) -> None:
        """Tell the server to stop, as SIGTERM does. It may be called from any thread."""
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and make known where."""
        await super().startup(sockets)
        self.address = (sockets or self.servers[0].sockets)[0].getsockname()[:2]
        self.listening.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then wait for what else is open. All ways to stop lead here, signals too."""
        self._streams.close()
        await super().shutdown(sockets)
