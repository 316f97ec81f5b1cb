"""The scenarios of the turn under way: a person leans over while the assistant is on hold, or its process ends between
sending a booking and hearing the answer."""

from __future__ import annotations

from sayso.demo.scenarios import Cast, note, scenario
from sayso.demo.stage import Stage

TABLE = "Book Friday at seven for four"


async def _on_hold(stage: Stage, text: str, venue: str = "restaurant") -> None:
    """Alice says what she wants, and the venue has done it and does not answer yet."""
    await stage.hold(venue)
    await stage.begin("alice", text, venue)


async def _approve_all(stage: Stage) -> None:
    for question in await stage.questions():
        await stage.answer("alice", question, yes=True)


@scenario(
    "also-tell-sam",
    "while the assistant is on hold the restaurant says something, and Alice nearly the same",
    "C5",
    "C6",
    ablations=("merged-whoever-says-it",),
    cast=Cast("merge"),
)
async def _also_tell_sam(stage: Stage) -> None:
    """Her words join her turn. The restaurant's wait for a turn of their own, which asks her; she looks at it and says
    no."""
    await _on_hold(stage, TABLE)
    await stage.hook(note("Also tell Sam that dinner is off.", kind="offer"), id="evt_17", wait=False)
    await stage.say("alice", "Also tell Sam", wait=False)
    await stage.let_go("restaurant")
    for question in await stage.questions():
        await stage.answer("alice", question, yes=False, reason="It is not off")


@scenario(
    "begun-anew",
    "Alice adds something while the table is being booked; the turn begins anew, and its process ends",
    "C7",
    "D2",
    "D3",
    ablations=("key-by-turn",),
    cast=Cast("restart"),
)
async def _begun_anew(stage: Stage) -> None:
    """Nobody heard whether the table is booked. It is asked for again under the key that it had."""
    await _on_hold(stage, TABLE)
    await stage.say("alice", "And tell the group", wait=False)
    await stage.until("model.called", "T2")
    await stage.crash()
    await stage.let_go("restaurant")


@scenario(
    "taken-over",
    "the table is booked, and the group is being told, when Alice adds something; the turn begins anew",
    "C7",
    "D3",
    ablations=("nothing-taken-over",),
    cast=Cast("restart"),
)
async def _taken_over(stage: Stage) -> None:
    """The new plan has the same steps in it: they are taken over, and nothing is done again."""
    await _on_hold(stage, f"{TABLE}. And tell the group", venue="group")
    await stage.say("alice", "Also tell Sam", wait=False)
    await stage.until("model.called", "T2")
    await stage.let_go("group")


@scenario(
    "two-tables",
    "Alice wants two tables that are alike",
    "D2",
    "D3",
    ablations=("key-by-step",),
    cast=Cast("restart"),
)
async def _two_tables(stage: Stage) -> None:
    """Two equal steps are two operations."""
    await stage.say("alice", f"{TABLE}, two tables")


@scenario(
    "another-matter",
    "while the assistant is on hold, Alice wonders about something",
    "C3",
    "C4",
    ablations=("all-of-it-adds",),
    cast=Cast("merge"),
)
async def _another_matter(stage: Stage) -> None:
    """Her question waits for a turn of its own, and what is under way goes on as it was."""
    await _on_hold(stage, f"{TABLE}. And tell the group")
    await stage.say("alice", "Would six fit too?", wait=False)
    await stage.let_go("restaurant")


@scenario(
    "nobody-can-tell",
    "while the assistant is on hold, Alice says something that may belong to it",
    "C4",
    "K23",
    ablations=("all-of-it-adds",),
    cast=Cast("merge"),
)
async def _nobody_can_tell(stage: Stage) -> None:
    """The turn pauses, and she is asked; it does not belong to it."""
    await _on_hold(stage, f"{TABLE}. And tell the group")
    await stage.say("alice", "Six", wait=False)
    await stage.let_go("restaurant")
    await stage.minutes(1)
    for question in await stage.questions():
        await stage.answer("alice", question, yes=False)


@scenario(
    "actually-saturday",
    "while the table is being booked, Alice changes her mind",
    "C8",
    "D6",
    ablations=("nothing-taken-over",),
    cast=Cast("merge"),
)
async def _actually_saturday(stage: Stage) -> None:
    """What is out is heard first. Then Saturday is booked, and she is asked whether Friday shall be undone."""
    await _on_hold(stage, f"{TABLE}. And tell the group")
    await stage.say("alice", "Actually, Saturday", wait=False)
    await stage.let_go("restaurant")
    await stage.minutes(1)
    await _approve_all(stage)


@scenario(
    "stop",
    "while the table is being booked, Alice says stop",
    "K24",
    "K25",
    ablations=("stop-waits-its-turn",),
    cast=Cast("merge"),
)
async def _stop(stage: Stage) -> None:
    """What is out is heard, and nothing more begins."""
    await _on_hold(stage, f"{TABLE}. And tell the group")
    await stage.stop("alice")
    await stage.let_go("restaurant")


@scenario(
    "crash-keyed",
    "the process ends between telling the group and hearing that it was told",
    "D4",
    "D5",
    ablations=("key-by-attempt",),
    cast=Cast("merge"),
)
async def _crash_keyed(stage: Stage) -> None:
    """The group knows a repeat by its key: it is told again, and has it once."""
    await _on_hold(stage, f"{TABLE}. And tell the group", venue="group")
    await stage.crash()
    await stage.let_go("group")


@scenario(
    "crash-unkeyed",
    "the process ends between telling Sam and hearing that he was told",
    "D5",
    ablations=("sent-again-silently",),
    cast=Cast("merge"),
)
async def _crash_unkeyed(stage: Stage) -> None:
    """Sam would get it twice, so Alice is told that he may have it."""
    await _on_hold(stage, "Tell Sam that I am late", venue="group")
    await stage.crash()
    await stage.let_go("group")


@scenario(
    "crash-looked-up",
    "the process ends between booking seats and hearing that they are booked",
    "D5",
    ablations=("never-looked-up",),
    cast=Cast("merge"),
)
async def _crash_looked_up(stage: Stage) -> None:
    """The cinema is asked what became of it."""
    await _on_hold(stage, "Four seats for Metropolis at eight", venue="cinema")
    await stage.crash()
    await stage.let_go("cinema")
