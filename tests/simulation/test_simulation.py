"""Agents live through stories in which everything goes wrong, and what must hold, holds. Each invariant can fail:
for each there is something broken that it finds.

`SAYSO_TEST_STORIES=10000` plays so many. A story that once failed stands in `kept`, and is played each time.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sayso.core.inputs import InFlight
from sayso.demo.simulated import simulation as concierge
from sayso.storage.postgres import PostgresStore
from sayso.storage.store import Store
from sayso.testing.ledger import Ledger
from sayso.testing.simulation import (
    INVARIANTS,
    Invariant,
    OpenStore,
    Played,
    Rates,
    Simulation,
    Story,
    Violated,
    in_a_file,
    in_memory,
    simulate,
)
from sayso.testing.simulation.__main__ import main
from sayso.testing.simulation.workshop import ALL, CAST, workshop
from tests import postgres
from tests.simulation.broken import BROKEN, Broken

KEPT = Path(__file__).parent / "kept"
STORIES = int(os.environ.get("SAYSO_TEST_STORIES", "300"))
#: one test plays so many
PIECE = 20


@asynccontextmanager
async def on_postgres(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
    with postgres.schema() as url:
        store = await PostgresStore.open(url, clock=now_ms, exclusive=True)
        try:
            yield store
        finally:
            await store.close()


MAKERS: dict[str, Callable[..., Simulation[Any]]] = {"concierge": concierge} | {
    f"workshop {policy}": partial(
        Simulation, partial(workshop, in_flight=policy), CAST, world=Ledger, name=f"workshop {policy}", invariants=ALL
    )
    for policy in InFlight
}


def _in_turn(seeds: range, **options: Any) -> None:
    """Play the stories of these seeds, the simulations taking turns; a story that fails is shrunk and kept."""
    for place, maker in enumerate(MAKERS.values()):
        made = maker(**options)
        for violation in made.run((seed for seed in seeds if seed % len(MAKERS) == place), stop=True).violations:
            shrunk = made.shrink(violation)
            raise Violated(made.name, violation, shrunk, made.keep(shrunk))


@pytest.mark.rule("A4", "A5", "A7", "A8", "A10", "K27", "X41")
@pytest.mark.rule("B1", "B2", "B3", "B7", "B8", "B9", "B10", "B15", "K11", "K13", "K15", "K16", "K17", "N1")
@pytest.mark.rule("C1", "C2", "C3", "C4", "C6", "C7", "C8", "D1", "D2", "D3", "D4", "D5", "H12", "K24", "K25")
@pytest.mark.rule("H1", "H5", "H24", "K1", "K2", "K3", "K22", "N2", "N21")
@pytest.mark.parametrize("first", range(0, STORIES, PIECE))
def test_whatever_happens_what_must_hold_holds(first: int) -> None:
    _in_turn(range(first, first + PIECE), keep=KEPT)


@pytest.mark.rule("A8", "D5", "H5", "K2", "K13")
@pytest.mark.parametrize("first", range(0, 20, 5))
@pytest.mark.parametrize("store", [in_a_file, on_postgres])
def test_whatever_happens_what_must_hold_holds_on_databases(store: OpenStore, first: int) -> None:
    """Here reads and writes take time, which is their own: a seed says who does what, and not what comes of it."""
    if store is on_postgres:
        postgres.required()
    _in_turn(range(first, first + 5), store=store)


def _kept() -> list[Path]:
    return sorted(KEPT.glob("*.json"))


@pytest.mark.parametrize("path", _kept(), ids=lambda path: path.stem)
def test_what_once_failed_does_not_fail_again(path: Path) -> None:
    data = json.loads(path.read_text())
    made = MAKERS[data["simulation"]](keep=KEPT)
    assert [*made.violations(made.play(Story.from_json(data)))] == []


# --- that the simulator finds what is broken ------------------------------------


def _simulation(broken: Broken, **options: Any) -> Simulation[Ledger]:
    invariants = [each for each in ALL if each.name == broken.invariant]
    return Simulation(
        partial(workshop, in_flight=broken.in_flight),
        CAST,
        world=broken.world,
        store=broken.opened,
        rules=broken.rules,
        invariants=invariants,
        **options,
    )


def test_every_rule_of_an_invariant_is_marked() -> None:
    """So that `pytest -m rule` lists what is proven here."""
    marks = getattr(test_whatever_happens_what_must_hold_holds, "pytestmark", [])
    marked = {rule for mark in marks if mark.name == "rule" for rule in mark.args}
    assert {rule for each in ALL for rule in each.rules} <= marked


def test_there_is_something_broken_for_each_invariant() -> None:
    assert {broken.invariant for broken in BROKEN} == {each.name for each in ALL}


@pytest.mark.rule("E3")
@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: f"{broken.invariant}: {broken.about}")
def test_what_is_broken_is_found_and_made_a_shorter_story(broken: Broken, tmp_path: Path) -> None:
    made = _simulation(broken, keep=tmp_path)

    with pytest.raises(Violated) as found:
        made.check(range(1_000))

    first, shrunk, path = found.value.first, found.value.shrunk, found.value.kept
    assert len(shrunk.story.actions) < len(first.story.actions)
    assert f"seed {first.story.seed}" in str(found.value)
    assert str(shrunk.story) in str(found.value)
    assert path is not None
    again = Story.from_json(json.loads(path.read_text()))
    assert again == shrunk.story
    assert [each.found for each in made.violations(made.play(again))] == [shrunk.found]


def test_what_was_kept_is_played_first(tmp_path: Path) -> None:
    broken = next(each for each in BROKEN if each.invariant == "every_listener_saw_the_same")
    made = _simulation(broken, keep=tmp_path)
    with pytest.raises(Violated) as found:
        made.check(range(1_000))

    with pytest.raises(Violated) as again:
        _simulation(broken, keep=tmp_path).check(())

    assert again.value.first.story == found.value.shrunk.story


@pytest.mark.parametrize("seed", range(8))
def test_a_story_comes_out_the_same_each_time(seed: int) -> None:
    made = Simulation(workshop, CAST, world=Ledger)
    story = made.story(seed)
    once, again = (_without_names(made.play(told)) for told in (story, Story.from_json(story.to_json())))
    assert once == again


def _without_names(played: Played) -> list[object]:
    """What came of a story, but for the store's own random names."""
    return [(row.seq, row.epoch, row.turn, row.at_ms, row.body) for row in played.rows] + list(played.ledger.deeds)


def test_a_story_is_told_in_words() -> None:
    told = str(Simulation(workshop, CAST, world=Ledger).story(5)).splitlines()
    assert len(told) == 24
    assert all(re.fullmatch(r" +\d+  \S.*", line) for line in told)


def test_stories_reach_everywhere() -> None:
    """Nothing is proven by stories in which nothing happens."""
    report = Simulation(workshop, CAST, world=Ledger, rates=Rates(crash=0.2)).run(range(30))
    assert (report.stories, report.actions, report.violations) == (30, 720, [])
    assert min(report.crashes, report.take_overs, report.faults) >= 15
    assert report.deeds >= 40


def test_an_invariant_of_ones_own() -> None:
    """A user's own sentence about her own books."""

    def at_most_one(played: Played) -> list[str]:
        shipped = [deed for deed in played.ledger.deeds if deed.name == "ship"]
        return [f"{len(shipped)} crates went out"] if len(shipped) > 1 else []

    mine = Invariant("one_crate", "At most one crate is shipped.", (), at_most_one)
    with pytest.raises(Violated, match="one_crate: At most one crate is shipped"):
        simulate(workshop, CAST, world=Ledger, seeds=range(1_000), store=in_memory, invariants=(*INVARIANTS, mine))


def test_the_command_plays_and_says_what_it_played() -> None:
    done = CliRunner().invoke(main, ["--seeds", "8"])
    assert done.exit_code == 0, done.output
    assert re.match(r"8 sessions in .* 0 violations", done.output)


def test_the_command_fails_with_the_shortest_story(tmp_path: Path) -> None:
    chosen = ["--simulation", "tests.simulation.broken:careless", "--crash-rate", "0.3", "--keep", str(tmp_path)]
    done = CliRunner().invoke(main, ["--seeds", "300", *chosen])
    assert done.exit_code == 1
    assert re.search(r"seed \d+, shrunk to \d+ actions\nno_keyed_effect_twice", done.output)
    [kept] = tmp_path.glob("careless-no_keyed_effect_twice-*.json")
    assert json.loads(kept.read_text())["actions"]


def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    names: dict[str, Any] = {"__name__": "example"}
    for example in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(example, "docs/simulation.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    names["test_my_agent"]()
    assert names["milk_once"].holds == "Nobody gets more than three cartons."
    assert all(f"| `{each.name}` |" in page for each in INVARIANTS)
