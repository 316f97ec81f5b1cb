"""What an operator sets and what they read: settings from three places, and log lines."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from sayso.adapters.logs import JsonFormatter
from sayso.runtime.limits import Limits
from sayso.settings import Settings

LIMITS = [field.name for field in dataclasses.fields(Limits)]


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start in an empty folder and without an environment of ours."""
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE", "HOST", "PORT", "LOG_LEVEL", "LOG_JSON", "LIMITS"):
        monkeypatch.delenv(f"SAYSO_{name}", raising=False)


def written(text: str) -> None:
    Path("sayso.toml").write_text(text)


# --- where a value comes from ---------------------------------------------------


def test_with_nothing_set_the_server_is_on_loopback_and_its_limits_are_the_defaults() -> None:
    settings = Settings()
    assert (settings.database, settings.host, settings.port) == ("sayso.db", "127.0.0.1", 8000)
    assert (settings.log_level, settings.log_json) == ("info", False)
    assert dataclasses.asdict(settings.limits) == dataclasses.asdict(Limits())


def test_the_environment_wins_over_the_file_and_arguments_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    written('host = "file"\nport = 1\ndatabase = "file.db"\n[limits]\nsessions = 1\nconsent_ms = 1\ndrain_ms = 1\n')
    monkeypatch.setenv("SAYSO_PORT", "2")
    monkeypatch.setenv("SAYSO_DATABASE", "environment.db")
    monkeypatch.setenv("SAYSO_LIMITS__CONSENT_MS", "2")
    monkeypatch.setenv("SAYSO_LIMITS__DRAIN_MS", "2")

    settings = Settings(database="argument.db", limits={"drain_ms": 3})  # type: ignore[arg-type]  # a part of them

    assert (settings.host, settings.port, settings.database) == ("file", 2, "argument.db")
    limits = settings.limits
    assert (limits.sessions, limits.consent_ms, limits.drain_ms, limits.model_ms) == (1, 2, 3, Limits().model_ms)


def test_the_databases_name_is_not_shown_since_a_url_may_hold_a_password() -> None:
    settings = Settings(database="postgresql://sayso:hush@db.example/sayso")
    assert "hush" not in f"{settings!r} {settings}"


@pytest.mark.parametrize("name", LIMITS)
def test_every_limit_can_be_set_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SAYSO_LIMITS__{name.upper()}", "7")
    assert getattr(Settings().limits, name) == 7


def test_limits_may_be_handed_in_whole() -> None:
    assert Settings(limits=Limits(sessions=7)).limits.sessions == 7  # type: ignore[arg-type]  # read as a dict


def test_another_file_may_be_named(tmp_path: Path) -> None:
    written("port = 1")
    other = tmp_path / "other.toml"
    other.write_text("port = 2")
    assert Settings.load(other).port == 2
    assert Settings.load(other, port=3).port == 3
    assert Settings.load().port == 1


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"missing\.toml"):
        Settings.load(tmp_path / "missing.toml")


def test_a_file_that_is_no_toml_is_refused_by_its_name() -> None:
    written("port: 8000")
    with pytest.raises(ValueError, match=r"sayso\.toml: "):
        Settings.load()


def test_a_variable_without_a_value_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAYSO_PORT", "")
    assert Settings().port == 8000


# --- what is refused ------------------------------------------------------------


def refused(**arguments: Any) -> str:
    with pytest.raises(ValidationError) as error:
        Settings(**arguments)
    return str(error.value)


@pytest.mark.rule("F22")
@pytest.mark.parametrize("text", ["prot = 1", "[limits]\nconsent_s = 1", "[limit]\nconsent_ms = 1"])
def test_a_name_in_the_file_that_means_nothing_is_refused(text: str) -> None:
    written(text)
    words = ("prot", "limits.consent_s", "limit")
    assert any(f"\n{word}\n" in refused() for word in words)


@pytest.mark.rule("F22")
@pytest.mark.parametrize("name", ["SAYSO_PROT", "SAYSO_LIMITS__CONSENT_S", "SAYSO_LIMITS_CONSENT_MS", "SAYSO_"])
def test_a_name_in_the_environment_that_means_nothing_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    assert name.lower().replace("sayso_limits__", "limits.") in refused()


def test_what_tests_are_told_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAYSO_TEST_POSTGRES", "postgresql://localhost")
    monkeypatch.setenv("SAYSOMETHING", "else")
    assert Settings().port == 8000


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_limit_is_a_positive_whole_number(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"SAYSO_LIMITS__{name.upper()}", value)
    assert f"limits.{name}" in refused()


@pytest.mark.parametrize(("name", "value"), [("port", 65_536), ("port", -1), ("log_level", "loud"), ("log_json", 2)])
def test_a_value_that_cannot_be_is_refused(name: str, value: object) -> None:
    assert name in refused(**{name: value})


def test_a_refusal_shows_no_value() -> None:
    assert "hunter2" not in refused(log_level="hunter2", password="hunter2")


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1  # type: ignore[misc]  # what is tested


# --- log lines ------------------------------------------------------------------


def logged(phrase: str, *values: object, error: BaseException | None = None, **fields: object) -> dict[str, Any]:
    record = logging.LogRecord("sayso.runtime", logging.WARNING, __file__, 1, phrase, values, None)
    if error is not None:
        record.exc_info = (type(error), error, error.__traceback__)
    vars(record).update(fields)
    line = JsonFormatter().format(record)
    assert "\n" not in line
    line.encode("ascii")
    read: dict[str, Any] = json.loads(line)
    return read


def test_a_line_is_a_phrase_and_its_fields() -> None:
    line = logged("lease taken", session="ses_1", epoch=3, late=False, node=None)
    assert isinstance(line.pop("at_ms"), int)
    assert line == {
        "level": "warning",
        "logger": "sayso.runtime",
        "message": "lease taken",
        "session": "ses_1",
        "epoch": 3,
        "late": False,
        "node": None,
    }


def test_what_is_put_into_a_phrase_is_not_written() -> None:
    """Somebody else's library may put a path with a token into its line."""
    line = logged('%s - "%s" %d', "127.0.0.1", "GET /v1/stream?token=secret", 200)
    assert line["message"] == '%s - "%s" %d'
    assert "secret" not in json.dumps(line)


def test_an_error_is_its_kind_and_place_without_its_text() -> None:
    try:
        raise KeyError("the user's words")
    except KeyError as error:
        line = logged("hook does not parse", error=error)
    assert line["error"] == "KeyError"
    assert line["where"][-1].endswith("test_an_error_is_its_kind_and_place_without_its_text")
    assert "words" not in json.dumps(line)


def test_a_field_takes_nothing_of_the_lines_own() -> None:
    line = logged("lease taken", level="quiet", at_ms=0, odd="a\ud800\n", path=Path("/tmp/a"))
    assert (line["level"], line["odd"], line["path"]) == ("warning", "a\ud800\n", "/tmp/a")
    assert line["at_ms"] > 0
