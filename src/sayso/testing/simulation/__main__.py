"""`python -m sayso.testing.simulation`: play many stories, in as many processes as you like.

Exit 1 where something does not hold, with the seed and the shortest story that was found of it.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from sayso.testing.simulation.checking import Report, Simulation, Violation
from sayso.testing.simulation.setting import OpenStore
from sayso.testing.simulation.stores import in_a_file, in_memory
from sayso.testing.simulation.story import Rates

#: stories of one piece of work, and seconds between two lines of progress
PIECE, TELL_S = 50, 10.0


STORES: dict[str, OpenStore] = {"memory": in_memory, "sqlite": in_a_file}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for; each process makes its simulations of it."""

    maker: str
    store: str
    rates: Rates
    actions: int
    keep: Path | None
    go_on: bool

    def play(self, seeds: range) -> Report:
        """Play the stories of some seeds, the simulations taking turns; one that fails is shrunk and kept."""
        simulations = _made(self)
        report = Report()
        for place, simulation in enumerate(simulations):
            mine = [seed for seed in seeds if seed % len(simulations) == place]
            played = simulation.run(mine)
            if not self.go_on:
                played.violations = [simulation.shrink(violation) for violation in played.violations[:1]]
                for violation in played.violations:
                    simulation.keep(violation)
            played.seconds += report.seconds
            report += played
        return report


@cache
def _made(asked: Asked) -> list[Simulation[Any]]:
    module, _, name = asked.maker.partition(":")
    make = getattr(importlib.import_module(module), name)
    made = make(store=STORES[asked.store], rates=asked.rates, actions=asked.actions, keep=asked.keep)
    return [made] if isinstance(made, Simulation) else list(made)


def _reports(asked: Asked, seeds: range, jobs: int) -> Iterator[Report]:
    pieces = [seeds[start : start + PIECE] for start in range(0, len(seeds), PIECE)]
    if jobs == 1:
        yield from map(asked.play, pieces)
        return
    with ProcessPoolExecutor(jobs) as pool:
        try:
            yield from pool.map(asked.play, pieces)
        finally:
            pool.shutdown(cancel_futures=True)


def _told(violation: Violation, *, shrunk: bool) -> str:
    seed, story = violation.story.seed, violation.story
    if shrunk:
        return f"seed {seed}, shrunk to {len(story.actions)} actions\n{violation}"
    return f"seed {seed}: {violation.invariant.name}: {violation.found[0]}"


@click.command()
@click.option("--seeds", default=1_000, show_default=True, help="How many stories.")
@click.option("--first", default=0, show_default=True, help="The first seed.")
@click.option("--store", type=click.Choice(list(STORES)), default="memory", show_default=True)
@click.option("--crash-rate", default=Rates().crash, show_default=True, help="The part of actions that are crashes.")
@click.option("--fault-rate", default=Rates().fault, show_default=True, help="The part that are other faults.")
@click.option("--actions", default=24, show_default=True, help="How long a story is.")
@click.option("--jobs", default=1, show_default=True, help="How many processes play.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), help="The folder for stories that fail.")
@click.option("--go-on", is_flag=True, help="Count what fails, and play on: nothing is shrunk and kept.")
@click.option(
    "--simulation",
    "maker",
    default="sayso.testing.simulation.workshop:simulations",
    show_default=True,
    help="module:function that takes the options of Simulation and returns one, or several that take turns.",
)
def main(
    seeds: int,
    first: int,
    store: str,
    crash_rate: float,
    fault_rate: float,
    actions: int,
    jobs: int,
    keep: Path | None,
    maker: str,
    go_on: bool,
) -> None:
    """Play the stories of many seeds, and stop at the first after which something does not hold."""
    asked = Asked(maker, store, Rates(crash=crash_rate, fault=fault_rate), actions, keep, go_on)
    whole, began = Report(), time.monotonic()
    told_at = began
    for report in _reports(asked, range(first, first + seeds), jobs):
        whole += report
        whole.seconds = time.monotonic() - began
        for violation in report.violations:
            click.echo(_told(violation, shrunk=not go_on))
        if report.violations and not go_on:
            break
        if time.monotonic() - told_at >= TELL_S:
            told_at = time.monotonic()
            click.echo(whole)
    click.echo(whole)
    sys.exit(1 if whole.violations else 0)


if __name__ == "__main__":
    main()
