"""Play a scenario and print its log."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from sayso.core.errors import Invalid
from sayso.demo import scenarios_under_way  # noqa: F401 - adds its scenarios to the list
from sayso.demo.http_stage import HttpStage, http_stage
from sayso.demo.local import START_MS, OpenStore, in_memory, local_stage
from sayso.demo.scenarios import SCENARIOS, Scenario, offer
from sayso.demo.stage import SECRETS
from sayso.runtime.numbered import lay_out
from sayso.testing.ablations import ABLATIONS, NONE

__all__ = ["SCENARIOS"]

Show = Callable[[str], object]


def listed() -> list[str]:
    """Return a line for each scenario, and for each rule that can be broken in it."""
    lines, width = [], max(map(len, SCENARIOS))
    for scenario in SCENARIOS.values():
        lines.append(f"{scenario.name:<{width}} {scenario.about}")
        lines += [f"{'':<{width}} --ablate {name}: {ABLATIONS[name].about}" for name in scenario.ablations]
    return lines


def _found(name: str) -> Scenario:
    if name not in SCENARIOS:
        raise Invalid(f"there is no scenario {name!r}; there are: {', '.join(SCENARIOS)}")
    return SCENARIOS[name]


async def in_process(name: str, *, ablate: str | None = None, history: bool = False, show: Show) -> None:
    """Play a scenario in this process, on a clock of minutes, and show its log and what was really done.

    Raises:
        Invalid: there is no such scenario, or that rule can't be broken in it.
    """
    logging.getLogger("sayso").addHandler(logging.NullHandler())  # what it logs is no part of the story
    for line in await record(name, ablate=ablate, history=history):
        show(line)


async def record(
    name: str, *, ablate: str | None = None, history: bool = False, open_store: OpenStore = in_memory
) -> list[str]:
    """Return what `in_process` shows, line by line; the same in each run, and on each store."""
    scenario = _found(name)
    if ablate is not None and ablate not in scenario.ablations:
        known = ", ".join(scenario.ablations) or "none"
        raise Invalid(f"{ablate!r} can't be broken in {name}; rules that can: {known}")
    ablation = ABLATIONS[ablate] if ablate is not None else None
    async with local_stage(ablation or NONE, open_store=open_store, cast=scenario.cast) as stage:
        await scenario.play(stage)
        lines = lay_out(await stage.lines(), since_ms=START_MS)
        books = await stage.books()
        shown = stage.shown() if history else []
    head = f"{name}: {scenario.about}"
    if ablation is None:
        return [head, "", *lines, "", *outcome(books), *shown]
    return [
        f"{head}; broken on purpose: {ablation.about}",
        "",
        *lines,
        "",
        *outcome(books),
        f"The harm: {ablation.harm}",
    ]


def outcome(books: Any) -> list[str]:
    """Return what was really done outside, in words."""
    tables = [
        f"{name} ({table['party']} on {table['day']} at {table['time']})" for name, table in books["tables"].items()
    ]
    texts = [f"“{text}”" for text in books["texts"]]
    seats = [f"{name} ({one['seats']} for {one['film']} at {one['time']})" for name, one in books["seats"].items()]
    return [
        f"In the restaurant's books: {', '.join(tables) or 'nothing'}.",
        *([f"In the cinema's books: {', '.join(seats)}."] if seats else []),
        f"The group was told: {', '.join(texts) or 'nothing'}.",
    ]


async def over_http(name: str, *, show: Show) -> None:
    """Play a scenario against a real server on loopback, and show its log and what was really done.

    Raises:
        DemoBroken: the server did not do what it must.
    """
    scenario = _found(name)
    async with http_stage(show) as stage:
        await scenario.play(stage)
        books = await stage.books()
    for line in outcome(books):
        show(line)


async def keep_serving(port: int, *, show: Show) -> None:
    """Serve the demo's agent until a signal comes, on a store of its own, and say what to type."""
    async with http_stage(show, port=port) as stage:
        show("")
        for line in _to_type(stage):
            show(line)
        await stage.until_interrupted()


def _to_type(stage: HttpStage) -> list[str]:
    words = json.dumps({"text": "Book Friday at seven for four and tell the group"})
    return [
        "In another terminal, once:",
        f"  S={stage.url}/v1/sessions/{stage.session}",
        f"  T='Authorization: Bearer {stage.tokens['alice']}'",
        f"  export RESTAURANT_SECRET={SECRETS['restaurant']}",
        "Alice says what she wants:",
        f"  curl -s $S/inputs -H \"$T\" --json '{words}'",
        "the restaurant calls:",
        f"  sayso source test restaurant --url {stage.url} --secret env:RESTAURANT_SECRET \\",
        f"    --data '{json.dumps(offer('20:30'))}'",
        "what is asked of her, and the digest that an answer needs:",
        '  curl -s "$S/consents?open=true" -H "$T"',
        "her yes:",
        """  curl -s $S/consents/A1 -H "$T" --json '{"verdict": "yes", "digest": "sha256:…"}'""",
        "what happens, as it happens:",
        '  curl -sN "$S/stream?after=0.0" -H "$T"',
        "",
        "Ctrl-C ends it, and prints the log.",
    ]
