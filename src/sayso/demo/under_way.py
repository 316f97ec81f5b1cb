"""The demo's agent for the turn under way: what a person says while it works is looked at, and what it did is taken
over, found out or undone. Its model is a script, which plans whatever was asked of it and has no result yet."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from sayso.agent import Agent, Unready
from sayso.core.context import Message, MessageRole
from sayso.core.errors import ToolFailed
from sayso.core.inputs import Fit
from sayso.core.rows import Outcome
from sayso.demo.concierge import number, signed_by_demo
from sayso.runtime.ports import Absent, Call, Classifier, Finished, Heard, Meanwhile, Model, ModelRequest, ProposedCall
from sayso.testing.scripted import ScriptedClassifier, call, calls, say
from sayso.testing.world import Outside, TurnedDown

#: how words fit what is under way, by how they begin
FITS: Mapping[str, Fit] = {
    "And tell": Fit.ADDS,
    "Also tell": Fit.ADDS,
    "Would six": Fit.INDEPENDENT,
    "Actually,": Fit.REVISES,
}
_BOOK = re.compile(r"book (\w+) at (\w+) for (\w+)", re.IGNORECASE)
_SEATS = re.compile(r"(\w+) seats for (\w+) at (\w+)", re.IGNORECASE)
_SAM = re.compile(r"tell sam(?: that ([^.<]+))?", re.IGNORECASE)
_DAY = re.compile(r"actually, (\w+)", re.IGNORECASE)
_PARTY = re.compile(r"\b(six)\b", re.IGNORECASE)


def _hour(word: str) -> str:
    return f"{12 + number(word)}:00"


def _task(request: ModelRequest) -> list[Message]:
    """Return what came since the assistant last said that it is done."""
    task: list[Message] = []
    for message in reversed(request.messages):
        if message.role is MessageRole.ASSISTANT and not message.calls:
            break
        task.append(message)
    return task[::-1]


def _wanted(said: list[str]) -> list[ProposedCall]:
    """Return the steps that all these words ask for together."""
    day, hour, party, tables, steps = "", "", 0, 1, list[ProposedCall]()
    for text in said:
        if booking := _BOOK.search(text):
            day, hour, party = booking[1].capitalize(), _hour(booking[2]), number(booking[3])
            tables = 2 if "two tables" in text else 1
        day = change[1] if day and (change := _DAY.search(text)) else day
        party = 6 if party and _PARTY.search(text) else party
    if day:
        steps += [call("reserve_table", day=day, time=hour, party=party)] * tables
    for text in said:
        if seats := _SEATS.search(text):
            steps.append(call("book_seats", film=seats[2], time=_hour(seats[3]), seats=number(seats[1])))
        if "tell the group" in text.lower():
            steps.append(call("tell_group", text=f"{day} {hour}, a table for {party}."))
        if sam := _SAM.search(text):
            steps.append(call("tell_sam", text=(sam[1] or f"{day} {hour}, a table for {party}").strip()))
    return steps


def script(request: ModelRequest) -> Finished:
    """Plan what was asked for and has no result in this turn; then say what came of it."""
    task = _task(request)
    said = [m.text for m in task if m.role is MessageRole.USER or m.source.startswith("source:")]
    anew = max((place for place, m in enumerate(task) if "begins anew in place of" in m.text), default=-1)
    tried = [_content(m, task) for m in task[anew + 1 :] if m.role is MessageRole.RESULT and _was_tried(m)]
    steps = []
    for step in _wanted(said):
        content = (step.tool, dict(step.arguments or {}))
        if content in tried:
            tried.remove(content)
        else:
            steps.append(step)
    if steps:
        return calls(*steps)
    came = {m.outcome for m in task[anew + 1 :] if m.role is MessageRole.RESULT}
    if Outcome.UNKNOWN in came:
        return say("I can't say whether it was done.")
    return say("It is done." if Outcome.OK in came else "All right.")


def _was_tried(result: Message) -> bool:
    return result.outcome is not Outcome.NOT_STARTED


def _content(result: Message, task: list[Message]) -> tuple[str, dict[str, Any]]:
    """Return what the call was that a result answers."""
    called = next(c for m in task for c in m.calls if c.call == result.call)
    return called.tool, dict(called.arguments)


def fit(meanwhile: Meanwhile) -> Fit:
    """Say how words fit, as a careful model would: what it does not know it is unsure of."""
    return next((fit for begins, fit in FITS.items() if meanwhile.said.startswith(begins)), Fit.UNSURE)


def assistant(
    outside: Outside,
    *,
    model: Model,
    in_flight: str = "merge",
    classifier: Classifier | None = None,
    scheme: Callable[[str], Unready] = signed_by_demo,
) -> Agent:
    """Return the agent, whose tools act on `outside`: one of each kind. Tables are booked under a key and can be given
    back; the group knows a repeat by its key; Sam does not; the cinema can be asked."""
    agent = Agent(
        "assistant",
        model=model,
        instructions="You book tables and seats, and keep people informed.",
        in_flight=in_flight,  # type: ignore[arg-type]  # one of the policies
        classifier=classifier or ScriptedClassifier(fit),
    )

    async def give_back(call: Call) -> str:
        """Give a table back."""
        made = await outside.restaurant.lookup(call.undoes)
        if made is None:
            raise ToolFailed("the restaurant knows no such table")
        await outside.restaurant.cancel(made, key=call.key)
        return f"gave {made} back"

    @agent.tool(
        effect="book",
        keyed=True,
        when=["day", "time"],
        critical=["party"],
        say="book a table for {party} on {day} at {time}",
        release=give_back,
    )
    async def reserve_table(call: Call, day: str, time: str, party: int) -> str:
        """Book a table at the restaurant."""
        try:
            made = await outside.restaurant.book(day, time, party, key=call.key)
        except TurnedDown as no:
            raise ToolFailed(no.detail) from no
        call.made("reservation", made, source="restaurant")
        return f"booked {made}"

    async def seats_of(call: Call) -> str:
        """Ask the cinema what became of an attempt."""
        found = await outside.cinema.lookup(call.key)
        if found is None:
            raise Absent
        return f"booked {found}"

    @agent.tool(effect="book", say="book {seats} seats for {film} at {time}", lookup=seats_of)
    async def book_seats(call: Call, film: str, time: str, seats: int) -> str:
        """Book seats at the cinema."""
        return f"booked {await outside.cinema.book(film, time, seats, key=call.key)}"

    @agent.tool(effect="send", keyed=True, say="tell the group {text}")
    async def tell_group(call: Call, text: str) -> str:
        """Write to the group."""
        await outside.group.tell(text, key=call.key)
        return "sent"

    @agent.tool(effect="send", say="tell Sam {text}")
    async def tell_sam(call: Call, text: str) -> str:
        """Write to Sam, whose phone shows whatever comes as often as it comes."""
        await outside.group.tell(f"to Sam: {text}")
        return "sent"

    @agent.source("restaurant", scheme("restaurant"))
    def restaurant(event: dict[str, str]) -> Heard:
        """Say what the restaurant says."""
        return Heard(text=event["text"], about=[("reservation", event["reservation"])])

    @agent.source("cinema", scheme("cinema"))
    def cinema(event: dict[str, str]) -> Heard:
        """Say what the cinema says."""
        return Heard(text=event["text"])

    return agent
