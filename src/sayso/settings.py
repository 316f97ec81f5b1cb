"""What an operator sets, and from where: `sayso.toml`, then the environment, then arguments; the last one wins.

A name that means nothing is an error, in the file as in the environment: a limit that was misspelt is a
limit that isn't kept.
"""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, create_model, field_validator
from pydantic.dataclasses import dataclass
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from sayso.runtime.limits import Limits

PREFIX = "SAYSO_"
#: what tests are told by the environment is no setting
NOT_SETTINGS = "SAYSO_TEST_"
FILE = Path("sayso.toml")


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class CheckedLimits(Limits):
    """Limits as an operator gives them: each is positive."""

    @field_validator("*")
    @classmethod
    def _positive(cls, value: int) -> int:
        if value < 1:
            raise ValueError("a limit must be positive")
        return value


class Settings(BaseSettings):
    """One process's settings. `SAYSO_PORT` sets `port`, `SAYSO_LIMITS__CONSENT_MS` sets `limits.consent_ms`.

    Raises:
        ValidationError: a value is wrong, or a name is not known; the text shows no values.
    """

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_nested_delimiter="__",
        env_ignore_empty=True,
        toml_file=FILE,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
    )

    #: path of a SQLite file, or URL of a PostgreSQL database, which may hold a password
    database: Annotated[str, Field(repr=False)] = "sayso.db"
    #: where answers of tools are kept that the store could not take at shutdown; empty: beside the database's file,
    #: or `sayso.rescue` here for a database with a URL
    rescue_file: str = ""
    #: loopback unless an operator decides otherwise
    host: str = "127.0.0.1"
    #: 0: any free one
    port: Annotated[int, Field(ge=0, le=65_535)] = 8000
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False
    limits: CheckedLimits = CheckedLimits()

    @classmethod
    def load(cls, file: Path | None = None, **arguments: Any) -> Self:
        """Return the settings, with `file` in the place of `sayso.toml`.

        Raises:
            FileNotFoundError: `file` is named and not there.
            ValueError: a file is no TOML, a value is wrong, or a name is not known.
        """
        if file is not None and not file.is_file():
            raise FileNotFoundError(f"there is no {file}")
        here = create_model(cls.__name__, __base__=cls, __cls_kwargs__={"toml_file": file or FILE})
        try:
            return here(**arguments)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{file or FILE}: {error}") from error

    @field_validator("limits", mode="before")
    @classmethod
    def _fields(cls, given: object) -> object:
        return dataclasses.asdict(given) if isinstance(given, Limits) else given

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Return where values come from, the first one first; no `.env`, no secrets directory."""
        return init_settings, _Environment(settings_cls), TomlConfigSettingsSource(settings_cls)


class _Environment(EnvSettingsSource):
    """The environment, with the names under our prefix that mean nothing, so that they are refused."""

    def __call__(self) -> dict[str, Any]:
        known = {f"{PREFIX}{name}".lower() for name in self.settings_cls.model_fields}
        strange = {
            name: value
            for name, value in self.env_vars.items()
            if name.startswith(PREFIX.lower())
            and not name.startswith(NOT_SETTINGS.lower())
            and name.partition(self.env_nested_delimiter or "")[0] not in known
        }
        return super().__call__() | strange
