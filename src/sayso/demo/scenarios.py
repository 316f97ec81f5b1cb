"""The scenarios, each a short story over a stage. A rule that it shows is named beside the line that does it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sayso.demo.stage import Stage

Play = Callable[[Stage], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """A story, what it shows, and the ablations under which it does harm."""

    name: str
    about: str
    play: Play
    #: rules that can be broken in it, by name
    ablations: tuple[str, ...] = ()


SCENARIOS: dict[str, Scenario] = {}


def scenario(name: str, about: str, *, ablations: tuple[str, ...] = ()) -> Callable[[Play], Play]:
    """Add a story to the list."""

    def add(play: Play) -> Play:
        SCENARIOS[name] = Scenario(name, about, play, ablations)
        return play

    return add


def offer(time: str, *, party: int | None = None, reservation: str = "R1") -> Mapping[str, Any]:
    """Return the body of the restaurant's call: that table is gone, another is free."""
    seats = f" for {party}" if party is not None else ""
    return {
        "type": "cancelled",
        "reservation": reservation,
        "text": f"The 19:00 table is gone. {time} is free{seats}.",
    }


FORGED = "whsec_bm90LXRoZS1yZXN0YXVyYW50LXNlY3JldA=="


@scenario(
    "offer",
    "the restaurant calls, the runtime asks, Alice says yes",
    ablations=("authority-by-role",),
)
async def the_offer(stage: Stage) -> None:
    """The article's story: her words run at once (B1); the restaurant's become a question (B3, B6), which she
    answers (B7), and a fresh turn runs exactly what was asked (B5, B10)."""
    await stage.say("alice", "Book Friday at seven for four and tell the group")
    await stage.minutes(3)
    await stage.hook(offer("20:30"), id="evt_17")
    await stage.minutes(2)
    for question in await stage.questions():
        await stage.answer("alice", question, yes=True)


@scenario(
    "tour",
    "the offer, with everything around it that must not work",
    ablations=("authority-by-role",),
)
async def the_tour(stage: Stage) -> None:
    """The offer again, and beside it: a forged call (A1, A2), a repeat (A4), another person's yes (B7), a second
    yes (B8)."""
    await stage.say("alice", "Book Friday at seven for four and tell the group")
    await stage.minutes(3)
    await stage.hook(offer("23:00"), id="evt_16", secret=FORGED)
    await stage.minutes(1)
    await stage.hook(offer("20:30"), id="evt_17")
    await stage.minutes(1)
    await stage.hook(offer("20:30"), id="evt_17")
    await stage.minutes(1)
    for question in await stage.questions():
        await stage.answer("bob", question, yes=True)
        await stage.answer("alice", question, yes=True)
        await stage.minutes(1)
        await stage.answer("alice", question, yes=True)
