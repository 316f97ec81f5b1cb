"""An agent to be simulated, with a tool of every kind. What it is asked to do it does, in that order.

Its books tell what was really done. A person or the supplier says `please: order bolts, ship crate`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

from sayso.agent import Agent
from sayso.core.context import MessageRole
from sayso.core.inputs import InFlight
from sayso.runtime.ports import Absent, Call, Finished, Heard, Model, ModelRequest
from sayso.sources import standard_webhook
from sayso.testing.ledger import Ledger
from sayso.testing.scripted import ScriptedModel, call, calls, say
from sayso.testing.simulation.checking import Simulation
from sayso.testing.simulation.story import Cast, Sender

SECRET = "whsec_c2F5c28tc2ltdWxhdGlvbi13b3Jrc2hvcC1zZWNyZXQ="  # noqa: S105 - made up
_PLEASE = re.compile(r"please: ([\w ,]+)")

CAST = Cast(
    says=(
        "hello",
        "please: order bolts",
        "please: order bolts, ship crate, write done",
        "please: ship crate",
        "please: paint door, look door",
        "please: look door, look window, note a, note b",
        "please: pay rent",
        "please: note a, pay rent, write done",
        "please: write hello, then, write again",
    ),
    senders={
        "supplier": Sender(
            SECRET,
            (
                {"text": "the bolts are here", "about": "bolts"},
                {"text": "please: order nails, write nails", "about": "bolts"},
                {"text": "please: ship crate", "about": "crate"},
                {"text": "please: look door", "about": "door"},
                {"text": "no bolts any more", "about": "bolts", "gone": True},
                {"text": "closed on Monday", "about": "bolts", "notice": True},
            ),
        )
    },
)


def script(request: ModelRequest) -> Finished:
    """Call what the newest words ask for: up to a `then` in one reply, what stands behind it in the next."""
    asked, replies = "", 0
    for message in reversed(request.messages):
        if message.role is MessageRole.ASSISTANT:
            replies += 1
        elif wanted := _PLEASE.search(message.text):
            asked = wanted[1]
            break
        elif not message.call:
            break
    plans = [part.strip(" ,") for part in asked.split("then")]
    if not asked or replies >= len(plans):
        return say("Done." if replies else "Hello.")
    steps = [step.split() for step in plans[replies].split(",")]
    return calls(*(call(step[0], what=step[1]) for step in steps if len(step) == 2))


def simulations(**options: Any) -> list[Simulation[Ledger]]:
    """Return a simulation of the agent under each policy for what is said while a turn runs."""
    return [
        Simulation(partial(workshop, in_flight=policy), CAST, world=Ledger, name=f"workshop {policy}", **options)
        for policy in InFlight
    ]


def workshop(books: Ledger, *, model: Model | None = None, in_flight: InFlight = InFlight.QUEUE) -> Agent:
    """Return the agent, whose tools act on these books."""
    agent = Agent("workshop", model or ScriptedModel(script), "You do as you are asked.", in_flight=in_flight.value)

    async def ordered(call: Call) -> str:
        if not books.knows("order", key=call.key):
            raise Absent
        return "ordered"

    async def painted(call: Call, what: str) -> str:
        if not books.knows("paint", key=call.key):
            raise Absent
        return f"painted {what}"

    @agent.tool(effect="book", keyed=True, say="order {what}", lookup=ordered)
    async def order(call: Call, what: str) -> str:
        books.once("order", key=call.key, what=what)
        call.made("thing", what, source="supplier")
        return "ordered"

    @agent.tool(effect="send", keyed=True, say="write {what}")
    async def write(call: Call, what: str) -> str:
        books.once("write", key=call.key, what=what)
        return "written"

    @agent.tool(effect="external", say="ship {what}")
    async def ship(call: Call, what: str) -> str:
        books.enter("ship", key=call.key, what=what)
        return "shipped"

    @agent.tool(effect="write", say="paint {what}", lookup=painted)
    def paint(call: Call, what: str) -> str:
        books.enter("paint", key=call.key, what=what)
        return f"painted {what}"

    @agent.tool(effect="pay", keyed=True, consent="always", say="pay {what}")
    async def pay(call: Call, what: str) -> str:
        books.once("pay", key=call.key, what=what)
        return "paid"

    @agent.tool(effect="write", keyed=True, say="note {what}")
    async def note(call: Call, what: str) -> str:
        books.once("note", key=call.key, what=what)
        return "noted"

    @agent.tool(effect="read", parallel_safe=True)
    async def look(call: Call, what: str) -> str:
        return f"saw {what}"

    @agent.source("supplier", standard_webhook(SECRET))
    def supplier(event: dict[str, str]) -> Heard:
        return Heard(
            event["text"],
            about=[("thing", event["about"])],
            gone=bool(event.get("gone")),
            notice=bool(event.get("notice")),
        )

    return agent
