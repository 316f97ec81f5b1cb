"""Play many stories, and make of one that fails the shortest that still does: printed, and kept to be played again."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from sayso.agent import Agent
from sayso.runtime.limits import Limits
from sayso.runtime.rules import RULES, Rules
from sayso.testing.ledger import Ledger
from sayso.testing.simulation.invariants import INVARIANTS, Invariant
from sayso.testing.simulation.playing import play
from sayso.testing.simulation.setting import Keeps, OpenStore, Played, Setting
from sayso.testing.simulation.stores import in_memory
from sayso.testing.simulation.story import Action, Cast, Rates, Story, draw

W = TypeVar("W", bound=Keeps)

#: stories played to make one shorter
SHRINK_MAX = 400


@dataclass(frozen=True, slots=True)
class Violation:
    """A story after which something does not hold."""

    invariant: Invariant
    #: what does not hold, in sentences
    found: tuple[str, ...]
    story: Story

    def __str__(self) -> str:
        rules = f" ({', '.join(self.invariant.rules)})" if self.invariant.rules else ""
        found = "\n".join(f"  - {each}" for each in self.found)
        return f"{self.invariant.name}{rules}: {self.invariant.holds}\n{found}\n{self.story}"


class Violated(AssertionError):
    """An invariant does not hold. Its text has the seed, the story, and the shortest one that was found of it."""

    def __init__(self, name: str, first: Violation, shrunk: Violation, kept: Path | None) -> None:
        drawn = f"{name}, seed {first.story.seed}, {len(first.story.actions)} actions\n{first}"
        short = f"shrunk to {len(shrunk.story.actions)} actions\n{shrunk}"
        super().__init__("\n\n".join([drawn, short, *([] if kept is None else [f"kept in {kept}"])]))
        self.first, self.shrunk, self.kept = first, shrunk, kept


@dataclass(slots=True)
class Report:
    """What was played, and what came of it."""

    stories: int = 0
    actions: int = 0
    rows: int = 0
    deeds: int = 0
    crashes: int = 0
    take_overs: int = 0
    faults: int = 0
    seconds: float = 0.0
    violations: list[Violation] = field(default_factory=list)

    def add(self, played: Played) -> None:
        """Count a story."""
        self.stories += 1
        self.actions += len(played.story.actions)
        self.rows += len(played.rows)
        self.deeds += len(played.ledger.deeds)
        self.crashes += played.crashes
        self.take_overs += played.take_overs
        self.faults += played.faults

    def __add__(self, other: Report) -> Report:
        both = (self, other)
        counts = {name: sum(getattr(each, name) for each in both) for name in _COUNTS}
        return Report(**counts, seconds=max(self.seconds, other.seconds), violations=self.violations + other.violations)

    def __str__(self) -> str:
        rate = self.stories / self.seconds if self.seconds else 0.0
        return (
            f"{self.stories} sessions in {self.seconds:.0f} s ({rate:.0f} a second): {self.actions} actions, "
            f"{self.rows} rows, {self.deeds} deeds, {self.crashes} crashes, {self.take_overs} take-overs, "
            f"{self.faults} other faults; {len(self.violations)} violations"
        )


_COUNTS = ("stories", "actions", "rows", "deeds", "crashes", "take_overs", "faults")


class Simulation(Generic[W]):
    """An agent, the world around it, and who talks to it: everything but what happens."""

    def __init__(
        self,
        agent: Callable[[W], Agent],
        cast: Cast,
        *,
        world: Callable[[], W] = Ledger,  # type: ignore[assignment]  # the default is for those whose world is a Ledger
        name: str = "",
        store: OpenStore = in_memory,
        invariants: Sequence[Invariant] = INVARIANTS,
        happenings: Mapping[str, Callable[[W], None]] | None = None,
        rates: Rates | None = None,
        actions: int = 24,
        limits: Limits | None = None,
        rules: Rules = RULES,
        keep: Path | None = None,
    ) -> None:
        """`agent` makes the agent for a world, anew for each process of a story: its tools act on that world and
        enter what they do in its ledger, and its model is one that can be called, as a `ScriptedModel`.

        `name` tells kept stories of this simulation from others in the folder `keep`; it is the agent's name if
        left out. `happenings` are what may befall the world beside (a restaurant that is full), by name.
        `rules` is for tests of the runtime itself.
        """
        self.cast = replace(cast, happenings=tuple(happenings or ()))
        self.name = name or agent(world()).name
        self.invariants = tuple(invariants)
        self._rates, self._actions, self._keep = rates or Rates(), actions, keep
        self._setting = Setting(
            agent, world, self.cast, store, dict(happenings or {}), limits=limits or Limits(), rules=rules
        )

    # stories

    def story(self, seed: int) -> Story:
        """Return the story of a seed."""
        return draw(seed, self.cast, rates=self._rates, length=self._actions)

    def play(self, story: Story) -> Played:
        """Play a story, and return what was left."""
        return play(story, self._setting)

    def violations(self, played: Played) -> Iterator[Violation]:
        """Yield what does not hold after a story."""
        for each in self.invariants:
            found = tuple(each.check(played))
            if found:
                yield Violation(each, found, played.story)

    # many of them

    def run(self, seeds: Iterable[int], *, stop: bool = False) -> Report:
        """Play the stories of these seeds, the first invariant of each that does not hold being its violation; with
        `stop`, up to the first."""
        return self._run(map(self.story, seeds), stop=stop)

    def _run(self, stories: Iterable[Story], *, stop: bool) -> Report:
        report, began = Report(), time.monotonic()
        for story in stories:
            played = self.play(story)
            report.add(played)
            report.violations += [*self.violations(played)][:1]
            if stop and report.violations:
                break
        report.seconds = time.monotonic() - began
        return report

    def check(self, seeds: Iterable[int]) -> Report:
        """Play the kept stories and those of the seeds. Call it from a plain function: each story has its own loop.

        Raises:
            Violated: an invariant does not hold. The story was shrunk, and kept if there is a folder for it.
        """
        for stories in (self.kept(), map(self.story, seeds)):
            report = self._run(stories, stop=True)
            for violation in report.violations:
                shrunk = self.shrink(violation)
                raise Violated(self.name, violation, shrunk, self.keep(shrunk))
        return report

    # one that fails

    def shrink(self, violation: Violation) -> Violation:
        """Return the same violation after the shortest story that dropping actions leads to."""
        smallest, tries, part = violation, 0, max(1, len(violation.story.actions) // 2)
        while True:
            start, shorter = 0, False
            while start < len(smallest.story.actions) and tries < SHRINK_MAX:
                actions = smallest.story.actions
                found = self._still(violation, actions[:start] + actions[start + part :])
                tries += 1
                if found is None:
                    start += part
                else:
                    smallest, shorter = found, True
            if tries >= SHRINK_MAX or (part == 1 and not shorter):
                return smallest
            part = max(1, part // 2)

    def _still(self, violation: Violation, actions: tuple[Action, ...]) -> Violation | None:
        """Return the violation if it is one of a shorter story too."""
        played = self.play(replace(violation.story, actions=actions))
        found = tuple(violation.invariant.check(played))
        return Violation(violation.invariant, found, played.story) if found else None

    # kept ones

    def keep(self, violation: Violation) -> Path | None:
        """Write a story down, if there is a folder for it; return the file."""
        if self._keep is None:
            return None
        self._keep.mkdir(parents=True, exist_ok=True)
        path = self._keep / f"{_file_name(self.name)}-{violation.invariant.name}-{violation.story.seed}.json"
        data: dict[str, Any] = {
            "simulation": self.name,
            "invariant": violation.invariant.name,
            "found": list(violation.found),
            "told": str(violation.story).splitlines(),
        }
        path.write_text(json.dumps(data | violation.story.to_json(), indent=1) + "\n")
        return path

    def kept(self) -> list[Story]:
        """Return the stories of this simulation that once failed."""
        if self._keep is None or not self._keep.is_dir():
            return []
        read = [json.loads(path.read_text()) for path in sorted(self._keep.glob("*.json"))]
        return [Story.from_json(data) for data in read if data["simulation"] == self.name]


def _file_name(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-") or "simulation"


def simulate(agent: Callable[[W], Agent], cast: Cast, *, seeds: Iterable[int] = range(300), **options: Any) -> Report:
    """Play the stories of `seeds` with an agent; the options are those of `Simulation`.

    Raises:
        Violated: see `Simulation.check`.
    """
    return Simulation(agent, cast, **options).check(seeds)
