"""docs/scenarios.md says what the recorded logs say."""

from __future__ import annotations

from tools import scenarios


def test_the_page_of_scenarios_is_up_to_date() -> None:
    assert scenarios.PAGE.read_text("utf-8") == scenarios.page(), "run make docs"
