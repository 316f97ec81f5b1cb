"""A stage over HTTP: a real server in a process of its own, the outside in another, loopback between them.

What a user would do with curl, done here: a signed webhook is posted, a question is read and answered with
an API token, the journal is read at the end.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from sayso.assembly import create_token, read_log
from sayso.demo.stage import SECRETS, Open
from sayso.sources import sign
from sayso.testing.server_process import ServerProcess
from sayso.testing.world_server import WorldClient, start_world

#: how long the demo waits for anything, seconds
PATIENCE_S = 30.0
_IN_PROCESS = "this server can't be told to; play this one in process"


def demo_environ(world_url: str) -> dict[str, str]:
    """Return the environment that `sayso.demo.concierge:agent` needs."""
    secrets = {f"{source.upper()}_SECRET": secret for source, secret in SECRETS.items()}
    return {**secrets, "DEMO_WORLD_URL": world_url}


class DemoBroken(RuntimeError):
    """The server did not do what the demo waits for."""


class HttpStage:
    """See `Stage`. Time is real; the session belongs to Alice."""

    def __init__(self, http: httpx2.AsyncClient, tokens: Mapping[str, str], world: WorldClient) -> None:
        self._http, self.tokens, self._world = http, tokens, world
        self.url = str(http.base_url).rstrip("/")
        self.session = ""
        self._position = "0.0"

    def _as(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[who]}"}

    async def open(self) -> None:
        """Open Alice's session."""
        answer = await self._http.post("/v1/sessions", json={"title": "Friday"}, headers=self._as("alice"))
        self.session = answer.raise_for_status().json()["id"]

    async def until_interrupted(self) -> None:
        """Return at SIGINT or SIGTERM."""
        interrupted = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
        await interrupted.wait()

    async def say(self, who: str, text: str, *, seen: bool = True, wait: bool = True) -> None:
        await self.post(who, text, seen=seen)
        if wait:
            await self.rest()

    async def begin(self, who: str, text: str, venue: str) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def hold(self, venue: str) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def let_go(self, venue: str) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def until(self, kind: str, turn: str) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def stop(self, who: str) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def crash(self) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def post(self, who: str, text: str, *, seen: bool = True) -> None:
        """A person writes, and does not wait."""
        body = {"text": text, "as_of": self._position if seen else None}
        answer = await self._http.post(f"/v1/sessions/{self.session}/inputs", json=body, headers=self._as(who))
        answer.raise_for_status()

    async def hook(
        self,
        event: Mapping[str, Any],
        *,
        id: str,
        source: str = "restaurant",
        secret: str | None = None,
        changed: Mapping[str, Any] | None = None,
        signed_minutes_ago: int = 0,
        wait: bool = True,
    ) -> int:
        body = json.dumps(event).encode()
        if secret is None and event["type"] == "cancelled" and event["reservation"] in (await self.books())["tables"]:
            await self._world.restaurant.take_away(event["reservation"])
        signed_s = int(time.time()) - signed_minutes_ago * 60
        headers = sign(secret or SECRETS[source], webhook_id=id, timestamp_s=signed_s, body=body)
        arrives = body if changed is None else json.dumps(changed).encode()
        answer = await self._http.post(f"/v1/hooks/{source}", content=arrives, headers=headers)
        if wait:
            await self.rest()
        return answer.status_code

    async def questions(self) -> list[Open]:
        found = await self._get("/consents?open=true")
        return [Open(one["id"], one["digest"], one["text"]) for one in found["consents"]]

    async def answer(self, who: str, question: Open, *, yes: bool, reason: str = "", times: int = 1) -> list[int]:
        given = (self.post_answer(who, question, yes=yes, reason=reason) for _ in range(times))
        statuses = list(await asyncio.gather(*given))
        await self.rest()
        return statuses

    async def post_answer(self, who: str, question: Open, *, yes: bool, reason: str = "") -> int:
        """A person answers, and does not wait for what it starts."""
        body = {"verdict": "yes" if yes else "no", "digest": question.digest, "reason": reason}
        answer = await self._http.post(
            f"/v1/sessions/{self.session}/consents/{question.id}", json=body, headers=self._as(who)
        )
        return answer.status_code

    async def minutes(self, count: int) -> None:
        """Time is real here, and nobody wants to wait: nothing happens."""

    async def full(self, day: str, time: str) -> None:
        await self._world.restaurant.full(day, time)

    async def store_fails_once(self) -> None:
        raise DemoBroken(_IN_PROCESS)

    async def books(self) -> Mapping[str, Any]:
        return await self._world.books()

    async def rest(self) -> None:
        """Return once no input waits, no turn is open and no yes still owes one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if await self._at_rest():
                return
            await asyncio.sleep(0.05)
        raise DemoBroken("the server did not come to rest")

    async def _at_rest(self) -> bool:
        """The session is read before and after its questions: what changed in between doesn't count as rest."""
        before = await self._get("")
        asked = await self._get("/consents")
        session = await self._get("")
        self._position = session["position"]
        owed = any(one["state"] == "approved" for one in asked["consents"])
        still = session["turn"] is None and session["waiting"] == 0 and not owed
        return still and before == session

    async def _get(self, what: str) -> dict[str, Any]:
        answer = await self._http.get(f"/v1/sessions/{self.session}{what}", headers=self._as("alice"))
        found: dict[str, Any] = answer.raise_for_status().json()
        return found


@asynccontextmanager
async def http_stage(show: Callable[[str], object], *, port: int = 0) -> AsyncIterator[HttpStage]:
    """Yield a stage whose server, outside and store live in a temporary place and end with it.

    Raises:
        ServerBroken: the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="sayso-demo-") as folder, start_world() as world_url:
        database = Path(folder, "demo.db")
        tokens = {
            who: await create_token(str(database), f"user:{who}", label="demo", days=1) for who in ("alice", "bob")
        }
        environ = demo_environ(world_url)
        server = ServerProcess("sayso.demo.concierge:agent", database=database, environ=environ, port=port)
        await asyncio.to_thread(server.start)
        show(f"serving sayso.demo.concierge:agent on {server.url}, the outside on {world_url}")
        try:
            async with httpx2.AsyncClient(base_url=server.url) as http, WorldClient(world_url) as world:
                stage = HttpStage(http, tokens, world)
                await stage.open()
                yield stage
        finally:
            await asyncio.to_thread(server.stop)
        for line in await read_log(str(database), stage.session):
            show(line)
