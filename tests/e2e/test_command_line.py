"""The command line on a real store: what a person types, and what she reads."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from sayso.cli import main
from sayso.demo.local import local_stage
from sayso.demo.play import SCENARIOS
from sayso.storage.postgres import PostgresStore
from sayso.storage.sqlite import SqliteStore
from sayso.storage.store import Store
from tests import postgres


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A store on which the tour was played, as a command names it, and the session."""

    def on(database: str) -> tuple[str, str]:
        @asynccontextmanager
        async def opened(now_ms: Callable[[], int]) -> AsyncIterator[Store]:
            if request.param == "postgres":
                store: Store = await PostgresStore.open(database, clock=now_ms, exclusive=True)
            else:
                store = await SqliteStore.open(database, clock=now_ms, exclusive=True)
            try:
                yield store
            finally:
                await store.close()

        async def play() -> str:
            async with local_stage(open_store=opened) as stage:
                await SCENARIOS["tour"].play(stage)
                return stage.session

        return database, asyncio.run(play())

    if request.param == "postgres":
        with postgres.schema() as url:
            yield on(url)
    else:
        yield on(str(tmp_path_factory.mktemp("played") / "sayso.db"))


def sayso(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def lines(result: Result) -> list[str]:
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


@pytest.mark.rule("E1", "K28")
def test_the_log_is_one_numbered_list_of_the_journal_and_the_doors_record(played: tuple[str, str]) -> None:
    file, session = played
    found = lines(sayso("log", session, "-d", file))

    assert [int(line.split()[0]) for line in found] == list(range(1, len(found) + 1))
    kinds = [line.split()[2] for line in found]
    order = [kinds.index(k) for k in ("input.persisted", "input", "turn.start", "input.rejected", "input.dropped")]
    assert order == sorted(order)


@pytest.mark.rule("E1")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--kind", "turn.ask"), {"turn.ask"}),
        (("--kind", "turn"), {"turn.start", "turn.ask", "turn.end", "turn.steps"}),
        (("--kind", "input.dropped", "--kind", "input.rejected"), {"input.dropped", "input.rejected"}),
        (("--turn", "T4"), {"turn.start", "model.said", "turn.end"}),
        (("--grep", "NEEDS ALICE'S CONSENT"), {"turn.ask"}),
    ],
    ids=["kind", "family", "two kinds", "turn", "words"],
)
def test_the_log_can_be_narrowed_and_keeps_its_numbers(
    played: tuple[str, str], options: tuple[str, ...], expected: set[str]
) -> None:
    file, session = played
    whole = lines(sayso("log", session, "-d", file))
    found = lines(sayso("log", session, "-d", file, *options))

    assert {line.split()[2] for line in found} == expected
    assert {" ".join(line.split()) for line in found} <= {" ".join(line.split()) for line in whole}


def test_the_log_as_json_is_an_object_a_line(played: tuple[str, str]) -> None:
    file, session = played
    found = [json.loads(line) for line in lines(sayso("log", session, "-d", file, "--json"))]

    assert [one["number"] for one in found] == list(range(1, len(found) + 1))
    assert set(found[0]) == {"number", "at_ms", "kind", "seq", "turn", "text"}
    assert [one["seq"] for one in found if one["seq"] is not None] == list(range(1, 1 + found[-1]["seq"]))


def test_a_followed_log_goes_on_until_it_is_interrupted(played: tuple[str, str]) -> None:
    file, session = played
    whole = lines(sayso("log", session, "-d", file))
    command = [sys.executable, "-m", "sayso", "log", session, "-d", file, "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        found = [process.stdout.readline().rstrip("\n") for _ in whole]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
        assert "Traceback" not in process.stderr.read()
    assert found == whole


def test_what_stands_in_the_world_is_printed_and_what_left_nothing_if_asked_for(played: tuple[str, str]) -> None:
    file, session = played
    stands = lines(sayso("effects", session, "-d", file))
    everything = lines(sayso("effects", session, "--all", "-d", file))

    assert any("standing  reserve_table" in line and "made reservation R" in line for line in stands)
    assert set(stands) <= set(everything)
    assert not any("nothing  " in line for line in stands)


def test_without_a_session_the_sessions_are_listed(played: tuple[str, str]) -> None:
    file, session = played
    [line] = lines(sayso("log", "-d", file))
    assert line.startswith(f"{session}  user:alice  ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("log", "ses_none", "-d", "{db}"), "no such session ses_none"),
        (("effects", "ses_none", "-d", "{db}"), "no such session ses_none"),
        (("log", "ses_1", "-d", "/nowhere/at/all.db"), "there is no /nowhere/at/all.db"),
        (("token", "create", "alice", "-d", "{db}"), "write kind:id, as user:alice"),
        (("token", "create", "source:x", "-d", "{db}"), "a token is for a user or an operator"),
        (("token", "revoke", "0123456789abcdef", "-d", "{db}"), "no such token"),
        (("source", "bind", "restaurant", "ses_none", "-d", "{db}"), "no such session ses_none"),
        (
            ("source", "test", "x", "--secret", "env:NOT_THERE", "--data", "{{}}"),
            "NOT_THERE: there is no such variable",
        ),
        (("source", "test", "x", "--secret", "???", "--data", "{{}}"), "secret"),
        (("serve", "nowhere"), "say where the agent is, as module:name"),
        (("serve", "nowhere:agent"), "No module named 'nowhere'"),
        (("serve", "sayso.core:agent"), "sayso.core has no agent"),
        (("serve", "sayso.core.text:OPEN"), "is a str, not an Agent"),
        (("demo", "nothing"), "there is no scenario 'nothing'"),
        (("demo", "offer", "--ablate", "x"), "'x' can't be broken in offer"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_can_not_be_done_is_said_in_one_line(played: tuple[str, str], words: tuple[str, ...], said: str) -> None:
    result = sayso(*(word.format(db=played[0]) for word in words))

    assert result.exit_code == 1
    assert said in result.output
    assert result.output.startswith("Error: ")
    assert len(result.output.splitlines()) == 1


def test_a_token_is_shown_once_listed_without_its_secret_and_revoked(tmp_path: Path) -> None:
    file = str(tmp_path / "sayso.db")
    [token] = lines(sayso("token", "create", "user:alice", "--label", "laptop", "-d", file))
    match = re.fullmatch(r"sayso_([0-9a-f]{16})_(\S+)", token)
    assert match is not None

    [listed] = lines(sayso("token", "list", "-d", file))
    assert listed == f"{match.group(1)}  user:alice  good  laptop"
    assert lines(sayso("token", "revoke", match.group(1), "-d", file)) == [f"token {match.group(1)} is revoked"]
    assert "revoked" in lines(sayso("token", "list", "-d", file))[0]
    assert match.group(2).encode() not in (tmp_path / "sayso.db").read_bytes()


@pytest.fixture
def on_postgres() -> Iterator[str]:
    """The URL of an empty schema."""
    with postgres.schema() as url:
        yield url


def test_every_command_takes_the_url_of_a_postgresql_database(on_postgres: str) -> None:
    [token] = lines(sayso("token", "create", "user:alice", "--label", "laptop", "-d", on_postgres))
    [listed] = lines(sayso("token", "list", "-d", on_postgres))
    assert listed.endswith("  user:alice  good  laptop")
    id_ = listed.split()[0]
    assert token.startswith(f"sayso_{id_}_")
    assert lines(sayso("token", "revoke", id_, "-d", on_postgres)) == [f"token {id_} is revoked"]
    assert lines(sayso("log", "-d", on_postgres)) == ["no sessions yet"]


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("postgresql://root:hush-hush@127.0.0.1:1/test", "nothing listens there"),
        ("postgresql://root:hush-hush@127.0.0.1:54x/test", "it can't be reached"),
        ("postgresql://root:hu@hush-hush@127.0.0.1/test", "write one that is in a password as %40"),
        ("postgresql://root:hush-hush@127.0.0.1/test?hush=1", "URL can't be read"),
        ("postgresql://root:hush-hush@nowhere.invalid/test", "its host's name is not known"),
        ("postgresql:///test?password=hush-hush&host=/nowhere/at/all", "nothing listens on that socket"),
        ("mysql://root:hush-hush@127.0.0.1/test", "a SQLite file, or a URL that begins with postgresql://"),
        ("host=127.0.0.1 dbname=test password=hush-hush", "a SQLite file, or a URL that begins with postgresql://"),
    ],
    ids=["nobody there", "no port", "two @", "unknown option", "no host", "no socket", "another's", "keywords"],
)
def test_a_database_that_is_not_there_is_said_without_its_password(url: str, said: str) -> None:
    command = [sys.executable, "-m", "sayso", "serve", "docs.examples.concierge_min:agent", "-d", url]
    done = subprocess.run(
        command,
        env={**os.environ, "RESTAURANT_SECRET": "whsec_" + "A" * 32},
        capture_output=True,
        text=True,
        timeout=60,
    )

    assert done.returncode == 1
    assert said in done.stderr
    assert "hush" not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) == 1


def test_without_its_driver_a_postgresql_store_names_the_package() -> None:
    program = "import sys; sys.modules['psycopg'] = None; from sayso.cli import main; main()"
    command = [sys.executable, "-c", program, "token", "list", "-d", "postgresql:///test"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert done.returncode == 1
    assert done.stderr == "Error: a store on PostgreSQL needs psycopg: pip install 'sayso[postgres]'\n"


@pytest.mark.rule("E2")
def test_the_demo_lists_its_scenarios_and_what_can_be_broken() -> None:
    found = "\n".join(lines(sayso("demo", "--list")))
    for scenario in SCENARIOS.values():
        assert scenario.name in found
        for ablation in scenario.ablations:
            assert f"--ablate {ablation}" in found


@pytest.mark.rule("E2", "B4")
def test_the_demo_shows_what_the_model_was_shown() -> None:
    found = sayso("demo", "offer", "--history").output
    assert 'source="source:restaurant" verified="standard-webhooks v1" integrity="outsider"' in found


@pytest.mark.rule("E3")
def test_an_ablated_demo_names_the_harm_in_one_line() -> None:
    assert lines(sayso("demo", "offer", "--ablate", "authority-by-role"))[-1] == (
        "The harm: a table was booked and the group was told of it, and nobody was asked."
    )
