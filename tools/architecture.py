"""Write the generated parts of the documents: what the code itself can say, it says.

A part stands between `<!-- generated: NAME -->` and `<!-- end -->`. Without arguments all parts are written
anew; `--check` only says which document is out of date, and exits 1; a NAME prints that part alone.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
import tomllib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_args

import click

from sayso.cli import main as main_command
from sayso.core.authority import Action, Mandate, Verdict, decide
from sayso.core.contract import ApproverRole, ConsentPolicy, Contract, ContractError, Effect
from sayso.core.errors import OutOfOrder
from sayso.core.labels import OUTSIDER, RUNTIME, USER, Label
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.rows import Called, Ending, Outcome, TurnStartBody
from sayso.core.turn import (
    Asked,
    Begun,
    Due,
    End,
    Ended,
    Event,
    GaveUp,
    Intended,
    Joined,
    ModelFailed,
    Paused,
    Phase,
    Proceed,
    Replied,
    Resumed,
    Sent,
    Settled,
    StepsFixed,
    Stopped,
    Turn,
    Unpaused,
    advance,
    due,
    start,
)
from sayso.runtime.limits import Limits
from sayso.server.app import create_app

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "sayso"
DOCUMENTS = ("ARCHITECTURE.md", "README.md")
#: members of a group that are named; more are "the others"
FEW = 6
#: lines of a log that follow the question
LOG_LINES_AFTER_ASK = 12


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def link(path: Path) -> str:
    """Return a link to a file of this repository, named as its readers call it."""
    shown = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else Path(path.name)
    return f"[`{shown}`]({path.relative_to(ROOT)})"


# --- the turn ----------------------------------------------------------------


def _call(place: int, effect: Effect, *, keyed: bool = False, verdict: Verdict = Verdict.RUN) -> Called:
    who = ("user:alice",) if verdict is Verdict.ASK else ()
    return Called(f"T1.1.{place}", "tool", {}, verdict, "", effect, keyed=keyed, approvers=who)


_READ = _call(1, Effect.READ)
_KEYED = _call(2, Effect.BOOK, keyed=True)
_UNKEYED = _call(3, Effect.SEND)
_GUARDED = _call(4, Effect.BOOK, verdict=Verdict.ASK)
_DENIED = _call(5, Effect.BOOK, verdict=Verdict.DENY)
#: what a reply may plan, and a consent may fix
_PLANS: tuple[tuple[Called, ...], ...] = ((), (_READ,), (_KEYED,), (_UNKEYED,), (_DENIED,), (_READ, _GUARDED))

_ALICE = Origin(Principal(PrincipalKind.USER, "alice"), "api token")
#: a turn in which the model is asked, and one that runs what a consent fixed
_STARTS = {"model": TurnStartBody(_ALICE, 2), "steps": TurnStartBody(_ALICE, 0, consent="A1")}


def _events(turn: Turn) -> Iterator[Event]:
    """Yield one event of each kind, of each call and outcome: what may come, and what may not."""
    yield from (Proceed(), Joined(), ModelFailed("it broke off"), Asked("A1"), Resumed())
    yield from (Paused("A9"), Unpaused("A9"), Stopped("she stopped it"))
    for plan in _PLANS:
        yield from (Replied(plan), StepsFixed(plan))
    for planned in turn.plan:
        call = planned.called.call
        yield from (Intended(call), Sent(call), Begun(call), GaveUp(call))
        yield from (Settled(call, outcome) for outcome in (Outcome.OK, Outcome.FAILED))
    yield from (Ended(ending) for ending in Ending)


def _same(turn: Turn) -> Hashable:
    """Return what tells one turn from another, save for counts, of which there is no end."""
    plan = tuple((each.called.call, each.group, each.state, each.outcome) for each in turn.plan)
    waits = turn.paused, turn.stopped
    return turn.phase, max(turn.steps_left, 0), turn.asked, turn.refused, turn.failure, turn.ending, waits, plan


@dataclass
class Explored:
    """What `advance` did with every event in every turn that could be reached."""

    #: from, to, event: the kinds of turn in which that happened
    moves: dict[tuple[Phase, Phase, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    due: dict[Phase, set[str]] = field(default_factory=lambda: defaultdict(set))
    #: phases in which there are turns with nothing due
    quiet: set[Phase] = field(default_factory=set)
    #: how a turn may be ended from a phase, as far as its end is ever due there
    endings: dict[Phase, set[Ending]] = field(default_factory=lambda: defaultdict(set))


@cache
def explore() -> Explored:
    """Drive the machine from each start with every event, until no turn is new."""
    found = Explored()
    for kind, body in _STARTS.items():
        first = start("T1", body)
        _note_due(found, first.phase, due(first))
        waiting, seen = [first], {_same(first)}
        while waiting:
            turn = waiting.pop()
            for event in _events(turn):
                try:
                    after, next_due = advance(turn, event)
                except OutOfOrder:
                    continue
                _note_due(found, after.phase, next_due)
                found.moves[turn.phase, after.phase, type(event).__name__].add(kind)
                if (key := _same(after)) not in seen:
                    seen.add(key)
                    waiting.append(after)
    return found


def _note_due(found: Explored, phase: Phase, what: tuple[Due, ...]) -> None:
    if not what:
        found.quiet.add(phase)
    for one in what:
        found.due[phase].add(type(one).__name__)
        if isinstance(one, End):
            found.endings[phase].add(one.ending)


def turn() -> str:
    """Return the diagram of the turn machine, as `advance` behaves."""
    found = explore()
    said = {(before, after): _events_between(found, before, after) for before in Phase for after in Phase}
    moves = [f"    {before} --> {after}: {events}" for (before, after), events in said.items() if events]
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> boundary: turn.start", *moves, "    ended --> [*]"]
    for phase in Phase:
        lines += [f"    note right of {phase}", *(f"        {line}" for line in _due_in(found, phase)), "    end note"]
    lines.append("```")
    never = [ending for ending in Ending if not any(ending in some for some in found.endings.values())]
    if never:
        lines += ["", f"An end that the machine takes and that is never due: {', '.join(never)}."]
    return "\n".join(lines)


def _events_between(found: Explored, before: Phase, after: Phase) -> str:
    said = []
    for (source, target, event), kinds in sorted(found.moves.items()):
        if (source, target) != (before, after) or (before, event) == (Phase.ENDED, Resumed.__name__):
            continue
        if event == Ended.__name__:
            event = f"Ended ({', '.join(ending for ending in Ending if ending in found.endings[before])})"
        said.append(f"{event} (fixed steps)" if kinds == {"steps"} else event)
    return ", ".join(said)


def _due_in(found: Explored, phase: Phase) -> list[str]:
    order = [each.__name__ for each in get_args(Due)]
    names = [name for name in order if name in found.due[phase]]
    if not names:
        return ["due: nothing"]
    half = (len(names) + 1) // 2 if len(names) > 4 else len(names)
    rows = [", ".join(names[:half]), *([", ".join(names[half:])] if names[half:] else [])]
    return ["due: " + ",<br/>".join(rows) + ("<br/>or nothing" if phase in found.quiet else "")]


# --- verdicts ----------------------------------------------------------------

_OWNER = Principal(PrincipalKind.USER, "olga")
_ORIGINS = {kind: Origin(Principal(kind, f"some-{kind}"), "as verified") for kind in PrincipalKind}


@dataclass(frozen=True, slots=True)
class Judged:
    """What `decide` said, with the names of the case taken out, so that equal answers are equal."""

    verdict: str
    reason: str
    who: str = ""


def judge(
    effect: Effect,
    policy: ConsentPolicy,
    kind: PrincipalKind,
    *,
    approver: ApproverRole | None = None,
    owned: bool = True,
    labels: tuple[Label, ...] = (),
    mandates: tuple[Mandate, ...] = (),
) -> Judged:
    """Return what becomes of one call of a tool like this, in a turn of such an origin."""
    try:
        contract = Contract("tool", effect=effect, consent=policy, approver=approver)
    except ContractError as error:
        return Judged("refused", "when the tool is declared: " + str(error).removeprefix("tool: "))
    origin = _ORIGINS[kind]
    said = decide(Action("tool", {}), contract, origin, labels, mandates, owner=_OWNER if owned else None)
    names = {str(origin.principal): "*origin*", str(_OWNER): "the session's owner", "role:operator": "an operator"}
    reason = re.sub(rf"\beffect {effect}\b", "effect *effect*", said.reason)
    for name, stands_for in names.items():
        reason = reason.replace(name, stands_for)
    who = " or ".join(names.get(each, each) for each in said.approvers)
    return Judged(said.verdict, reason, who.replace("*origin*", "that user"))


def verdicts() -> str:
    """Return the table of effect, consent policy and origin, and who is asked: from `core` alone."""
    head = ("consent", "effect", "origin of the turn", "verdict", "because", "who is asked")
    return "\n\n".join([table(head, _verdict_rows()), _labels_sentence(), _approvers()])


def _verdict_rows() -> Iterator[Sequence[str]]:
    for policy in ConsentPolicy:
        by_effect = {effect: tuple(judge(effect, policy, kind) for kind in PrincipalKind) for effect in Effect}
        for effects in _alike(by_effect):
            by_kind = dict(zip(PrincipalKind, by_effect[effects[0]], strict=True))
            for kinds in _alike(by_kind):
                said = by_kind[kinds[0]]
                what, origin = _several(effects, Effect), _several(kinds, PrincipalKind)
                yield policy, what, origin, f"**{said.verdict}**", said.reason, said.who


def _labels_sentence() -> str:
    """Say whether labels and mandates change anything, by trying."""

    def everything(labels: tuple[Label, ...], mandates: tuple[Mandate, ...]) -> list[Judged]:
        return [
            judge(effect, policy, kind, labels=labels, mandates=mandates)
            for effect in Effect
            for policy in ConsentPolicy
            for kind in PrincipalKind
        ]

    cases = [((), ()), ((RUNTIME,), ()), ((USER,), ()), ((OUTSIDER,), ()), ((OUTSIDER,), (Mandate("M1"),))]
    same = all(everything(labels, mandates) == everything((), ()) for labels, mandates in cases)
    if same:
        return "What the turn has read (its labels) and mandates are handed in and change nothing yet."
    return "This is a turn that has read nothing from outside, without a mandate; labels and mandates change it."


def _approvers() -> str:
    """Return the table of who may approve, for a call that is asked about whoever started the turn."""
    head = ("approver in the contract", "origin of the turn", "session has an owner", "verdict", "who is asked")
    rows = []
    for approver in (None, *ApproverRole):
        for owned in (True, False):
            said = {
                kind: judge(Effect.BOOK, ConsentPolicy.ALWAYS, kind, approver=approver, owned=owned)
                for kind in PrincipalKind
            }
            for kinds in _alike(said):
                one, origin = said[kinds[0]], _several(kinds, PrincipalKind)
                who = one.who or "nobody can be"
                rows.append((approver or "not named", origin, "yes" if owned else "no", f"**{one.verdict}**", who))
    return table(head, rows)


K = TypeVar("K", bound=StrEnum)


def _alike(results: Mapping[K, object]) -> list[list[K]]:
    """Group what has equal results, small groups first."""
    groups: dict[object, list[K]] = {}
    for key, result in results.items():
        groups.setdefault(result, []).append(key)
    return sorted(groups.values(), key=len)


def _several(some: Sequence[K], of: type[K]) -> str:
    """Name some members of an enum: all of them, a few, or the others."""
    if len(some) == len(of):
        return "any"
    return ", ".join(some) if len(some) <= FEW else f"the {len(some)} others"


# --- what holds, and what fails ----------------------------------------------

_RULE = re.compile(r"\bmark\.rule\(([^)]*)\)")
_RULE_ID = re.compile(r"[\"']([A-Z]\d+)[\"']")


def _listed(kind: str) -> list[dict[str, Any]]:
    """Return the entries of one kind in the list beside this file."""
    entries: list[dict[str, Any]] = tomllib.loads((ROOT / "tools" / "architecture.toml").read_text("utf-8"))[kind]
    return entries


_TEST = re.compile(r"^(?:async )?def (test_\w+)\(", re.MULTILINE)


@dataclass
class Tests:
    """The test files, by the rules that their markers name and by the tests in them."""

    by_rule: dict[str, set[Path]] = field(default_factory=lambda: defaultdict(set))
    by_name: dict[str, Path] = field(default_factory=dict)


def scan_tests() -> Tests:
    """Return what the test files hold."""
    found = Tests()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text("utf-8")
        for rule in (rule for names in _RULE.findall(text) for rule in _RULE_ID.findall(names)):
            found.by_rule[rule].add(path)
        found.by_name.update(dict.fromkeys(_TEST.findall(text), path))
    return found


def invariants() -> str:
    """Return the table of what always holds, where it is enforced, and which tests prove it."""
    tests = scan_tests()
    rows = [
        (each["says"], " ".join(each["rules"]), _places(each["where"]), _proof(each, tests))
        for each in _listed("invariant")
    ]
    return table(("what holds", "rules", "enforced in", "tests"), rows)


def failures() -> str:
    """Return the table of what goes wrong, what happens then, and which tests show it."""
    tests = scan_tests()
    rows = [(each["fault"], each["then"], each["seen"], _proof(each, tests)) for each in _listed("failure")]
    return table(("fault", "what happens", "what a person sees", "tests"), rows)


def _proof(each: Mapping[str, Any], tests: Tests) -> str:
    """Return links to the tests that prove an entry: those with one of its rules, or those that it names.

    Raises:
        ValueError: it names a test that isn't there.
    """
    paths = {path for rule in each.get("rules", ()) for path in tests.by_rule.get(rule, ())}
    for name in each.get("tests", ()):
        if name not in tests.by_name:
            raise ValueError(f"tools/architecture.toml names {name}, and there is no such test")
        paths.add(tests.by_name[name])
    links = [f"[{_spoken(path)}]({path.relative_to(ROOT)})" for path in sorted(paths)]
    return ", ".join([*links, *([each["also"]] if "also" in each else [])]) or "none yet"


def _spoken(path: Path) -> str:
    return path.stem.removeprefix("test_").replace("_", " ")


def _places(places: Sequence[str]) -> str:
    """Return links to places, each written `file: a text in it`.

    Raises:
        ValueError: one of them isn't there.
    """
    by_file: dict[Path, list[str]] = defaultdict(list)
    for place in places:
        name, _, words = place.partition(": ")
        path = SOURCE / name if (SOURCE / name).exists() else ROOT / name
        if not path.exists() or words not in path.read_text("utf-8"):
            raise ValueError(f"tools/architecture.toml names {place!r}, which isn't there")
        by_file[path].append(f"`{words}`")
    return "; ".join(f"{link(path)}: {', '.join(words)}" for path, words in by_file.items())


# --- the map -----------------------------------------------------------------


def map_() -> str:
    """Return the packages from top to bottom, and what each module says it is for."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    layers = next(each["layers"] for each in contracts if each["id"] == "layers")
    rows = []
    for layer in layers:
        for name in re.findall(r"\w+", layer):
            modules = [SOURCE / f"{name}.py"] if (SOURCE / f"{name}.py").exists() else _modules(SOURCE / name)
            said = [(path, sentence) for path in modules if (sentence := first_sentence(path))]
            rows += [(f"`{name}`" if path == said[0][0] else "", link(path), sentence) for path, sentence in said]
    return table(("package", "module", "what it is for"), rows)


def _modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"), key=lambda path: (path.parent, path.name != "__init__.py", path.name))


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring; empty where it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!]) (?=[A-Z`])", paragraph, maxsplit=1)[0]


# --- for the readme ----------------------------------------------------------


def limits() -> str:
    """Return every limit, its default and what it bounds, from the comments beside the fields."""
    defaults = Limits()
    rows: list[Sequence[str]] = []
    said = ""
    for line in (SOURCE / "runtime" / "limits.py").read_text("utf-8").splitlines():
        comment, named = re.fullmatch(r"    #: (.*)", line), re.match(r"    (\w+): int = ", line)
        if comment:
            said = f"{said} {comment[1]}".strip()
        elif named:
            rows.append((f"`{named[1]}`", _amount(named[1], getattr(defaults, named[1])), said))
            said = ""
    return table(("limit", "default", "what it bounds"), rows)


def _amount(name: str, value: int) -> str:
    units: tuple[tuple[str, int], ...] = (("", 1),)
    if name.endswith("_ms"):
        units = (("ms", 1), ("s", 1_000), ("min", 60_000), ("h", 3_600_000), ("days", 86_400_000))
    elif name.endswith("_bytes"):
        units = (("bytes", 1), ("KiB", 1024), ("MiB", 1024 * 1024))
    unit, size = [(unit, size) for unit, size in units if value % size == 0 and value >= size][-1]
    return f"{value // size:,} {unit}".strip()


def routes() -> str:
    """Return every HTTP route, as OpenAPI describes it."""
    parts = inspect.signature(create_app).parameters.values()
    unused: dict[str, Any] = {each.name: None for each in parts if each.default is each.empty}
    paths = create_app(**unused).openapi()["paths"]
    rows = [
        (f"`{method.upper()} {path}`", " ".join(operation["description"].split()))
        for path, item in paths.items()
        for method, operation in item.items()
    ]
    return table(("route", "what it does"), rows)


def commands() -> str:
    """Return every command, as `--help` describes it."""
    rows = [(f"`{usage}`", help_) for usage, help_ in _commands("sayso", main_command)]
    return table(("command", "what it does"), rows)


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    if isinstance(command, click.Group):
        for below, each in command.commands.items():
            yield from _commands(f"{name} {below}", each)
        return
    places = [each.make_metavar(click.Context(command)) for each in command.params if isinstance(each, click.Argument)]
    yield " ".join([name, *places]), " ".join((command.help or "").partition("\n\n")[0].split())


def example() -> str:
    """Return the example that the readme shows, as it stands."""
    text = (ROOT / "docs" / "examples" / "concierge_min.py").read_text("utf-8")
    return f"```python\n{text.strip()}\n```"


def demo_log() -> str:
    """Return the part of the recorded offer in which the restaurant calls and the runtime asks."""
    lines = (ROOT / "tests" / "recorded" / "offer.log").read_text("utf-8").splitlines()
    asked = next(place for place, line in enumerate(lines) if " turn.ask " in line)
    first = max(place for place in range(asked) if " input.persisted " in lines[place])
    return "\n".join(["```text", *lines[first : asked + LOG_LINES_AFTER_ASK], "```"])


def crash_matrix() -> str:
    """Return the table of the crash matrix, as `make matrix`'s tool recorded it."""
    return (ROOT / "tests" / "recorded" / "crash_matrix.md").read_text("utf-8").strip()


# --- documents ---------------------------------------------------------------

BLOCKS: dict[str, Callable[[], str]] = {
    "turn": turn,
    "verdicts": verdicts,
    "invariants": invariants,
    "failures": failures,
    "map": map_,
    "limits": limits,
    "routes": routes,
    "commands": commands,
    "example": example,
    "demo-log": demo_log,
    "crash-matrix": crash_matrix,
}
_BLOCK = re.compile(r"(<!-- generated: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return a document with its generated parts as they should be.

    Raises:
        KeyError: a part has a name that nothing here writes.
    """
    return _BLOCK.sub(lambda match: f"{match[1]}\n{BLOCKS[match['name']]()}\n\n{match[3]}", text)


def stale() -> list[str]:
    """Return the documents whose generated parts are out of date."""
    texts = {name: (ROOT / name).read_text("utf-8") for name in DOCUMENTS}
    return [name for name, text in texts.items() if filled(text) != text]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write, check, or print one part."""
    parser = argparse.ArgumentParser(prog="architecture", description=__doc__)
    parser.add_argument("part", nargs="?", choices=sorted(BLOCKS), help="print this part, and write nothing")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    asked = parser.parse_args(arguments)
    if asked.part:
        print(BLOCKS[asked.part]())
        return 0
    old = stale()
    for name in old:
        if asked.check:
            print(f"{name} is out of date: run `make docs`", file=sys.stderr)
        else:
            path = ROOT / name
            path.write_text(filled(path.read_text("utf-8")), "utf-8")
            print(f"wrote {name}")
    return 1 if asked.check and old else 0


if __name__ == "__main__":
    raise SystemExit(main())
