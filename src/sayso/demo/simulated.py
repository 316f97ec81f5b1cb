"""The demo's agent in stories that nobody wrote: `python -m sayso.testing.simulation --simulation
sayso.demo.simulated:simulation`."""

from __future__ import annotations

from typing import Any

from sayso.agent import Agent
from sayso.demo.concierge import concierge, script, signed_by_demo
from sayso.demo.stage import SECRETS
from sayso.testing.scripted import ScriptedModel
from sayso.testing.simulation import Cast, Sender, Simulation
from sayso.testing.world import World

CAST = Cast(
    says=(
        "Book Friday at seven for four and tell the group",
        "Book Saturday at eight for two",
        "Hello",
    ),
    senders={
        "restaurant": Sender(
            SECRETS["restaurant"],
            [
                {"type": kind, "reservation": f"R{number}", "text": f"{time} is free"}
                for kind in ("cancelled", "offer", "notice")
                for number in (1, 2, 3)
                for time in ("20:30", "21:00")
            ],
        ),
        "cinema": Sender(SECRETS["cinema"], [{"type": "notice", "text": "the film is cancelled"}]),
    },
)


def _full(world: World) -> None:
    world.restaurant.full("Friday", "20:30")


def _free(world: World) -> None:
    world.restaurant.free("Friday", "20:30")


def _hold(world: World) -> None:
    world.restaurant.hold()


def _release(world: World) -> None:
    world.restaurant.release()


def _agent(world: World) -> Agent:
    return concierge(world, model=ScriptedModel(script), scheme=signed_by_demo)


def simulation(**options: Any) -> Simulation[World]:
    """Return the simulation of the concierge; the options are those of `Simulation`."""
    happenings = {
        "the restaurant is full on Friday at 20:30": _full,
        "the restaurant is free on Friday at 20:30": _free,
        "the restaurant does not answer": _hold,
        "the restaurant answers": _release,
    }
    return Simulation(_agent, CAST, world=World, happenings=happenings, **options)
