"""A stage over HTTP: a real server in a process of its own, the outside in another, loopback between them.

What a user would do with curl, done here: a signed webhook is posted, a question is read and answered with
an API token, the journal is read at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, BinaryIO

import httpx2

from sayso.assembly import create_token, read_log
from sayso.demo.stage import RESTAURANT_SECRET, Open
from sayso.sources import sign
from sayso.testing.world_server import WorldClient, start_world

#: how long the demo waits for anything, seconds
PATIENCE_S = 30.0


class DemoBroken(RuntimeError):
    """The server did not do what the demo waits for."""


class HttpStage:
    """See `Stage`. Time is real; the session belongs to Alice."""

    def __init__(self, http: httpx2.AsyncClient, tokens: Mapping[str, str], world: WorldClient) -> None:
        self._http, self._tokens, self._world = http, tokens, world
        self.session = ""
        self._position = "0.0"

    def _as(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._tokens[who]}"}

    async def open(self) -> None:
        """Open Alice's session."""
        answer = await self._http.post("/v1/sessions", json={"title": "Friday"}, headers=self._as("alice"))
        self.session = answer.raise_for_status().json()["id"]

    async def say(self, who: str, text: str) -> None:
        body = {"text": text, "as_of": self._position}
        answer = await self._http.post(f"/v1/sessions/{self.session}/inputs", json=body, headers=self._as(who))
        answer.raise_for_status()
        await self._rest()

    async def hook(
        self, event: Mapping[str, Any], *, id: str, secret: str = RESTAURANT_SECRET, changed: bytes | None = None
    ) -> int:
        body = json.dumps(event).encode()
        if event["type"] == "cancelled" and event["reservation"] in (await self.books())["tables"]:
            await self._world.restaurant.take_away(event["reservation"])
        headers = sign(secret, webhook_id=id, timestamp_s=int(time.time()), body=body)
        answer = await self._http.post("/v1/hooks/restaurant", content=changed or body, headers=headers)
        await self._rest()
        return answer.status_code

    async def questions(self) -> list[Open]:
        answer = await self._http.get(
            f"/v1/sessions/{self.session}/consents", params={"open": "true"}, headers=self._as("alice")
        )
        found = answer.raise_for_status().json()["consents"]
        return [Open(one["id"], one["digest"], one["text"]) for one in found]

    async def answer(self, who: str, question: Open, *, yes: bool, reason: str = "") -> int:
        body = {"verdict": "yes" if yes else "no", "digest": question.digest, "reason": reason}
        answer = await self._http.post(
            f"/v1/sessions/{self.session}/consents/{question.id}", json=body, headers=self._as(who)
        )
        if answer.status_code < 400:
            await self._rest()
        return answer.status_code

    async def minutes(self, count: int) -> None:
        """Time is real here, and nobody wants to wait: nothing happens."""

    async def books(self) -> Mapping[str, Any]:
        return await self._world.books()

    async def _rest(self) -> None:
        """Return once no input waits, no turn is open and no yes still owes one."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if await self._at_rest():
                return
            await asyncio.sleep(0.05)
        raise DemoBroken("the server did not come to rest")

    async def _at_rest(self) -> bool:
        path = f"/v1/sessions/{self.session}"
        session = (await self._http.get(path, headers=self._as("alice"))).raise_for_status().json()
        self._position = session["position"]
        asked = (await self._http.get(f"{path}/consents", headers=self._as("alice"))).raise_for_status().json()
        owed = any(one["state"] == "approved" for one in asked["consents"])
        return bool(session["turn"] is None and session["waiting"] == 0 and not owed)


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _opened(file: Path) -> BinaryIO:
    return file.open("wb")


async def _bound(server: asyncio.subprocess.Process, log: Path) -> str:
    """Return the address that the server says it listens on."""
    assert server.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        while line := await server.stdout.readline():
            text = line.decode().strip()
            if text.startswith("listening on "):
                return text.removeprefix("listening on ")
    raise DemoBroken(f"the server ended before it listened:\n{_text(log)}")


@asynccontextmanager
async def http_stage(show: Callable[[str], object]) -> AsyncIterator[HttpStage]:
    """Yield a stage whose server, outside and store live in a temporary place and end with it."""
    with tempfile.TemporaryDirectory(prefix="sayso-demo-") as folder, start_world() as world_url:
        database, errors = Path(folder, "demo.db"), Path(folder, "server.log")
        tokens = {
            who: await create_token(str(database), f"user:{who}", label="demo", days=1) for who in ("alice", "bob")
        }
        environ = os.environ | {"RESTAURANT_SECRET": RESTAURANT_SECRET, "DEMO_WORLD_URL": world_url}
        command = (sys.executable, "-m", "sayso", "serve", "sayso.demo.concierge:agent")
        with _opened(errors) as stderr:
            server = await asyncio.create_subprocess_exec(
                *command,
                "--port",
                "0",
                "--database",
                str(database),
                env=environ,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
            )
            try:
                url = await _bound(server, errors)
                show(f"serving sayso.demo.concierge:agent on {url}, the outside on {world_url}")
                async with httpx2.AsyncClient(base_url=url) as http, WorldClient(world_url) as world:
                    stage = HttpStage(http, tokens, world)
                    await stage.open()
                    yield stage
            finally:
                if server.returncode is None:
                    server.terminate()
                await server.wait()
        if stage.session:
            for line in await read_log(str(database), stage.session):
                show(line)
