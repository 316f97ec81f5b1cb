"""A whole sayso behind a real server, its worker too: what a request asks for is settled as in production."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx2

from sayso import Agent
from sayso.assembly import App
from sayso.core.origin import Principal
from sayso.runtime.limits import Limits
from sayso.server.app import Server
from sayso.storage.store import Store
from sayso.testing.scripted import ScriptedModel, say
from tests.e2e.serving import Headers, no_faults, opened


@dataclass
class Whole:
    """A server, and what is behind it."""

    app: App
    store: Store
    model: ScriptedModel
    http: httpx2.AsyncClient
    address: tuple[str, int]
    _numbers: count[int] = field(default_factory=count)

    async def auth(self, principal: str) -> Headers:
        """Return the headers of somebody with a new token."""
        token = await self.app.identity.mint(Principal.parse(principal), label="test")
        return {"Authorization": f"Bearer {token}"}

    async def somebody(self) -> tuple[str, Headers]:
        """Return a new user, as `user:u7`, and her headers."""
        user = f"user:u{next(self._numbers)}"
        return user, await self.auth(user)

    async def session(self, headers: Headers) -> str:
        """Return the address of a new session."""
        answer = await self.http.post("/v1/sessions", json={}, headers=headers)
        return f"/v1/sessions/{answer.json()['id']}"

    async def shared(self, role: str = "member") -> tuple[str, Headers, Headers]:
        """Return the address of a new session, its owner's headers, and those of somebody who takes part."""
        (_, owner), (user, other) = await self.somebody(), await self.somebody()
        session = await self.session(owner)
        answer = await self.http.put(f"{session}/participants/{user}", json={"role": role}, headers=owner)
        assert answer.status_code == 200, answer.text
        return session, owner, other


@asynccontextmanager
async def whole(
    kind: str,
    folder: Path,
    *,
    limits: Limits | None = None,
    around: Callable[[Store], Store] = lambda store: store,
    model: ScriptedModel | None = None,
) -> AsyncIterator[Whole]:
    """Serve an app on a store of this kind; no client's doing may be logged as a fault of ours."""
    model = model or ScriptedModel(lambda request: say(f"I heard: {request.messages[-1].text}"))
    with no_faults():
        async with opened(kind, folder) as (kept, _):
            store = around(kept)
            app = App(Agent("assistant", model=model, instructions="You listen."), store=store, limits=limits)
            async with app.running():
                server = Server(app.asgi, port=0, grace_s=5)
                running = asyncio.create_task(server.serve())
                await asyncio.to_thread(server.listening.wait, 10)
                host, port = server.address
                async with httpx2.AsyncClient(base_url=f"http://{host}:{port}", timeout=10) as http:
                    yield Whole(app, store, model, http, server.address)
                server.stop()
                await running
