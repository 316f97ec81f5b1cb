"""An agent that books tables, and hears from the restaurant about them."""

from typing import Any

from sayso import Agent, Call, Heard, standard_webhook
from sayso.runtime.ports import Finished, ModelRequest
from sayso.testing import scripted

BOOKED: dict[str, str] = {}  # stands for the restaurant's own books, which know a repeat by its key


def script(request: ModelRequest) -> Finished:
    """Stand for a language model: plan a booking when something new is heard."""
    newest = request.messages[-1]
    if newest.source.startswith(("user:", "source:")):
        time = "20:30" if "20:30" in newest.text else "19:00"
        return scripted.calls(scripted.call("reserve_table", day="Friday", time=time, party=4))
    return scripted.say("I have done what I may.")


agent = Agent("concierge", model=scripted.ScriptedModel(script), instructions="You book tables.")


@agent.tool(
    effect="book",
    keyed=True,
    when=["day", "time"],
    critical=["party"],
    say="book a table for {party} on {day} at {time}",
)
async def reserve_table(call: Call, day: str, time: str, party: int) -> str:
    """Book a table at the restaurant."""
    booking = BOOKED.setdefault(call.key, f"R{len(BOOKED) + 1}")
    call.made("reservation", booking, source="restaurant")  # from now on this session hears from it about that
    return f"booked {booking}"


@agent.source("restaurant", standard_webhook("env:RESTAURANT_SECRET"))
def restaurant(event: dict[str, Any]) -> Heard:
    """Say what an event from the restaurant means."""
    return Heard(
        text=event["text"],
        about=[("reservation", event["reservation"])],
        gone=event["type"] == "cancelled",
    )
