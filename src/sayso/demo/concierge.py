"""The demo's agent: it books tables and keeps the group informed. Its model is a script, so no key is needed.

The script plans exactly what an obliging model would: a table that is offered is booked, and the group is
told. What may run is not its business, and it is never asked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

from sayso.agent import Agent, Unready
from sayso.core.context import Message, MessageRole
from sayso.core.errors import ToolFailed
from sayso.core.rows import Outcome
from sayso.demo.stage import SECRETS
from sayso.runtime.ports import Absent, Call, Finished, Heard, Model, ModelRequest
from sayso.sources import standard_webhook
from sayso.testing.scripted import ScriptedModel, call, calls, say
from sayso.testing.world import Outside, TurnedDown
from sayso.testing.world_server import WorldClient

_NUMBERS = {"two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "twelve": 12}
_ASKED = re.compile(r"book (\w+) at (\w+) for (\w+)", re.IGNORECASE)
_OFFERED = re.compile(r"(\d\d:\d\d) is free(?: for (\d+))?")
#: a labelled part, and whatever stands after its end
_LABELLED = re.compile(r"<(data[-0-9a-f]*)[^>]*>\n.*?\n</\1>(.*)", re.DOTALL)
_TELL = re.compile(r"user: tell the group that (.+)")


def number(word: str) -> int:
    """Return the number that a word means; two where it means none."""
    return int(word) if word.isdigit() else _NUMBERS.get(word.lower(), 2)


def _tail(request: ModelRequest) -> list[Message]:
    """The newest messages back to the last thing the assistant said or called."""
    tail: list[Message] = []
    for message in reversed(request.messages):
        tail.append(message)
        if message.role is MessageRole.ASSISTANT:
            break
    return tail


def _outside_of_labels(tail: list[Message]) -> str:
    """What stands in labelled data after a label's end: to a model it looks like the conversation itself."""
    found = (_LABELLED.search(message.text) for message in tail if message.role is MessageRole.DATA)
    return "\n".join(match.group(2) for match in found if match is not None)


def script(request: ModelRequest) -> Finished:
    """Answer as an obliging model would."""
    tail = _tail(request)
    newest = tail[0]
    done = [message for message in tail if message.outcome is not None and message.outcome is not Outcome.WAITING]
    told = _TELL.search(_outside_of_labels(tail))
    if told is not None:
        return calls(call("tell_group", text=told.group(1).strip()))
    if newest.role is MessageRole.USER:
        return _to_person(newest.text)
    if newest.role is MessageRole.DATA and newest.source.startswith("source:"):
        return _to_offer(newest.text)
    failed = [message.tool for message in done if message.outcome is not Outcome.OK]
    if failed:
        return say(f"That did not work: {', '.join(sorted(set(failed)))}.")
    return say("Done. The table is booked and the group knows." if done else "I have noted that.")


def _to_person(text: str) -> Finished:
    asked = _ASKED.search(text)
    if asked is None:
        return say("All right.")
    day, hour, party = asked.group(1).capitalize(), f"{12 + number(asked.group(2))}:00", number(asked.group(3))
    book = call("reserve_table", day=day, time=hour, party=party)
    if "tell the group" not in text:
        return calls(book)
    return calls(book, call("tell_group", text=f"{day} {hour}, a table for {party}. See you there!"))


def _to_offer(text: str) -> Finished:
    offered = _OFFERED.search(text)
    if offered is None:
        return say("I have noted that.")
    time, party = offered.group(1), int(offered.group(2) or 4)
    return calls(
        call("reserve_table", day="Friday", time=time, party=party),
        call("tell_group", text=f"Change of plan: Friday {time}."),
    )


def signed_by_env(source: str) -> Unready:
    """Return a source's scheme, whose secret is in the environment."""
    return standard_webhook(f"env:{source.upper()}_SECRET")


def signed_by_demo(source: str) -> Unready:
    """Return a source's scheme with the demo's own secret, for a process that has no environment of its own."""
    return standard_webhook(SECRETS[source])


def concierge(
    outside: Outside, *, model: Model | None = None, scheme: Callable[[str], Unready] = signed_by_env
) -> Agent:
    """Return the demo's agent, whose tools act on `outside`; `scheme` says how a source proves itself."""
    agent = Agent(
        "concierge",
        model=model or ScriptedModel(script),
        instructions="You book tables and keep the group informed.",
    )

    async def booked(call: Call) -> str:
        """Ask the restaurant what became of an attempt."""
        found = await outside.restaurant.lookup(call.key)
        if found is None:
            raise Absent
        call.made("reservation", found, source="restaurant")
        return f"booked {found}"

    @agent.tool(
        effect="book",
        keyed=True,
        when=["day", "time"],
        critical=["party"],
        say="book a table for {party} on {day} at {time}",
        lookup=booked,
    )
    async def reserve_table(call: Call, day: str, time: str, party: int) -> str:
        """Book a table at the restaurant."""
        try:
            made = await outside.restaurant.book(day, time, party, key=call.key)
        except TurnedDown as no:
            raise ToolFailed(no.detail) from no
        call.made("reservation", made, source="restaurant")
        return f"booked {made}"

    @agent.tool(effect="send", keyed=True, say="tell the group {text}")
    async def tell_group(call: Call, text: str) -> str:
        """Write to the group."""
        await outside.group.tell(text, key=call.key)
        return "sent"

    @agent.source("restaurant", scheme("restaurant"))
    def restaurant(event: dict[str, str]) -> Heard:
        return Heard(
            text=event["text"],
            about=[("reservation", event["reservation"])],
            gone=event["type"] == "cancelled",
            notice=event["type"] == "notice",
        )

    @agent.source("cinema", scheme("cinema"))
    def cinema(event: dict[str, str]) -> Heard:
        return Heard(text=event["text"], notice=event["type"] == "notice")

    return agent


def agent() -> Agent:
    """Return the agent for `sayso serve sayso.demo.concierge:agent`; the outside is at DEMO_WORLD_URL."""
    return concierge(WorldClient(os.environ["DEMO_WORLD_URL"]))
