"""An agent to be simulated, with a tool of every kind. What it is asked to do it does, in that order.

Its books tell what was really done. A person or the supplier says `please: order bolts, ship crate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from sayso.agent import Agent
from sayso.core.context import MessageRole
from sayso.core.inputs import Fit, InFlight
from sayso.core.rows import InputClassifiedBody
from sayso.runtime.ports import Absent, Call, Finished, Heard, Meanwhile, Model, ModelRequest
from sayso.sources import standard_webhook
from sayso.testing.ledger import Ledger
from sayso.testing.scripted import ScriptedClassifier, ScriptedModel, call, calls, say
from sayso.testing.simulation.checking import Simulation
from sayso.testing.simulation.invariants import INVARIANTS, invariant
from sayso.testing.simulation.setting import Played
from sayso.testing.simulation.story import Cast, Sender

SECRET = "whsec_c2F5c28tc2ltdWxhdGlvbi13b3Jrc2hvcC1zZWNyZXQ="  # noqa: S105 - made up
_PLEASE = re.compile(r"please: ([\w ,]+)")
#: how words fit what is under way, by how they begin
FITS: Mapping[str, Fit] = {
    "please": Fit.ADDS,
    "also": Fit.ADDS,
    "instead": Fit.REVISES,
    "perhaps": Fit.UNSURE,
}

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
        "please: note a, note b, note c, note d, note e, note f, note g, note h",
        "also, please: note c",
        "also, please: order bolts, ship crate",
        "instead, please: order nuts, write done",
        "instead, please: order bolts, note a",
        "by the way, please: look window",
        "perhaps, please: note d",
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


def fit(meanwhile: Meanwhile) -> Fit:
    """Say how words fit what is under way, by how they begin."""
    return next((fit for begins, fit in FITS.items() if meanwhile.said.startswith(begins)), Fit.INDEPENDENT)


@invariant("C3", "C4")
def what_the_classifier_says_counts(played: Played) -> Iterator[str]:
    """Words are taken for what the classifier says that they are, or for nothing that anybody can tell."""
    said = {entry.n: " ".join(part.text for part in entry.input.parts) for entry in played.inbox}
    for row in played.rows:
        if isinstance(row.body, InputClassifiedBody) and row.body.by == "scripted":
            wanted = fit(Meanwhile(played.session, str(row.turn), said[row.body.n], (), ()))
            if row.body.fit not in (wanted, Fit.UNSURE):
                yield f"input {row.body.n} is {wanted} and was taken for {row.body.fit}"


def script(request: ModelRequest) -> Finished:
    """Call what the newest words ask for: up to a `then` in one reply, what stands behind it in the next."""
    asked, replies = "", 0
    for message in reversed(request.messages):
        if message.role is MessageRole.ASSISTANT:
            replies += 1
        elif wanted := _PLEASE.search(message.text):
            asked = wanted[1]
            break
        elif not message.call and message.source != "runtime":
            break
    plans = [part.strip(" ,") for part in asked.split("then")]
    if not asked or replies >= len(plans):
        return say("Done." if replies else "Hello.")
    steps = [step.split() for step in plans[replies].split(",")]
    return calls(*(call(step[0], what=step[1]) for step in steps if len(step) == 2))


#: what must hold of the workshop
ALL = (*INVARIANTS, what_the_classifier_says_counts)


def simulations(**options: Any) -> list[Simulation[Ledger]]:
    """Return a simulation of the agent under each policy for what is said while a turn runs."""
    return [
        Simulation(
            partial(workshop, in_flight=policy),
            CAST,
            world=Ledger,
            name=f"workshop {policy}",
            invariants=ALL,
            **options,
        )
        for policy in InFlight
    ]


def workshop(books: Ledger, *, model: Model | None = None, in_flight: InFlight = InFlight.QUEUE) -> Agent:
    """Return the agent, whose tools act on these books."""
    agent = Agent(
        "workshop",
        model or ScriptedModel(script),
        "You do as you are asked.",
        in_flight=in_flight.value,
        classifier=ScriptedClassifier(fit),
    )

    async def ordered(call: Call) -> str:
        if not books.knows("order", key=call.key):
            raise Absent
        return "ordered"

    async def painted(call: Call, what: str) -> str:
        if not books.knows("paint", key=call.key):
            raise Absent
        return f"painted {what}"

    async def send_back(call: Call) -> str:
        books.once("send back", key=call.key, what=call.undoes)
        return "sent back"

    @agent.tool(effect="book", keyed=True, say="order {what}", lookup=ordered, release=send_back)
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
