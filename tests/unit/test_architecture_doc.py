"""The generated parts of the documents are what the code says, and the readme's example is one that runs."""

from __future__ import annotations

import importlib

import pytest

from sayso.agent import Agent
from tools import architecture


def test_the_documents_are_up_to_date() -> None:
    """If not: `make docs`."""
    assert architecture.stale() == []


@pytest.mark.rule("B2", "B3")
def test_the_table_of_verdicts_is_printed_from_core_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert architecture.main(["verdicts"]) == 0

    printed = capsys.readouterr().out
    print(printed)
    assert "| derived | the 13 others | source, timer, agent, operator | **ask** |" in printed
    assert "| derived | the 13 others | user | **run** |" in printed
    assert "| derived | none, read | any | **run** |" in printed


@pytest.mark.rule("C2")
def test_the_diagram_shows_where_the_machine_goes_and_no_more() -> None:
    moves = {(before, after) for before, after, _ in architecture.explore().moves}

    assert ("thinking", "acting") in moves
    assert ("acting", "boundary") in moves
    assert not any(before == "ended" and after != "ended" for before, after in moves)


def test_what_has_no_name_here_is_not_written_over() -> None:
    with pytest.raises(KeyError):
        architecture.filled("<!-- generated: nobody -->\n<!-- end -->")


def test_the_readme_s_example_declares_an_agent() -> None:
    agent = importlib.import_module("docs.examples.concierge_min").agent

    assert isinstance(agent, Agent)
    assert [tool.name for tool in agent.tools] == ["reserve_table"]
    assert [source.name for source in agent.sources] == ["restaurant"]
