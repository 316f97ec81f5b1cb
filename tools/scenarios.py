"""Write docs/scenarios.md from the recorded logs: each rule, its scenario's log, and the log with the rule broken.

`--check` only says whether the page is up to date.
"""

from __future__ import annotations

import html
import sys
from collections import defaultdict
from pathlib import Path

from sayso.demo.play import SCENARIOS
from sayso.demo.scenarios import Scenario
from sayso.testing.ablations import ABLATIONS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scenarios.md"
RECORDED = ROOT / "tests" / "recorded"

HEAD = """# What each rule prevents

Each scenario is a short story, played by the production runtime; only the model is a script, and the restaurant, the
group and the cinema keep books. `sayso demo NAME` plays it, `sayso demo NAME --ablate RULE` plays it with one rule
broken on purpose, so that the harm shows. This page is written from the recorded logs by `make docs`; a test compares
them with what the scenarios print today.

Times are hours and minutes since the story began. What stands between ‹ and › came from somebody; everything else is
the runtime's.
"""


def page() -> str:
    """Return the page."""
    parts = [HEAD, _contents()]
    parts += [_section(scenario) for scenario in SCENARIOS.values()]
    return "\n".join(parts)


def _contents() -> str:
    by_rule: dict[str, list[str]] = defaultdict(list)
    for scenario in SCENARIOS.values():
        for rule in scenario.rules:
            by_rule[rule].append(f"[{scenario.name}](#{scenario.name})")
    rows = [f"| {rule} | {', '.join(by_rule[rule])} |" for rule in sorted(by_rule, key=lambda r: (r[0], int(r[1:])))]
    return "\n".join(["| rule | shown in |", "| --- | --- |", *rows, ""])


def _section(scenario: Scenario) -> str:
    title = f"## {scenario.name}\n\n{_capital(scenario.about)}. Rules {', '.join(scenario.rules)}.\n"
    kept = _log(scenario.name)
    if not scenario.ablations:
        return f"{title}\n```text\n{kept}\n```\n"
    return title + "".join(_beside(scenario.name, kept, ablation) for ablation in scenario.ablations)


def _beside(name: str, kept: str, ablation: str) -> str:
    broken = ABLATIONS[ablation]
    body = _log(f"{name}--{ablation}").rsplit("\nThe harm: ", 1)[0]
    left, right = (f"<pre>{html.escape(text, quote=False)}</pre>" for text in (kept, body))
    return (
        f"\n<table>\n<tr><th>With the rule</th><th>{_capital(broken.about)} ({broken.rule})</th></tr>\n"
        f'<tr valign="top"><td>\n{left}\n</td><td>\n{right}\n</td></tr>\n</table>\n\n'
        f"**The harm:** {broken.harm} `sayso demo {name} --ablate {ablation}`\n"
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _log(name: str) -> str:
    """Return a recorded log without its first line, which says what the title says."""
    return (RECORDED / f"{name}.log").read_text("utf-8").split("\n\n", 1)[1].rstrip()


def main() -> int:
    """Write the page, or check it."""
    wanted = page()
    if "--check" in sys.argv:
        return 0 if PAGE.exists() and PAGE.read_text("utf-8") == wanted else 1
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
