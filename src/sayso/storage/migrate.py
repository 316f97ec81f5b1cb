"""Numbered SQL files, applied in order, forward only, each in a transaction of its own.

An applied file may never change: a database whose record names another checksum, or a number that this
release doesn't have, is refused rather than guessed at. The last release's code must run on a new schema.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from sayso.core.errors import Refused
from sayso.storage.statements import NOW, Body, Sql, dialect

_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


class SchemaTooNew(Refused):
    """A newer release has migrated this database; run that one, or a newer one."""


class SchemaChanged(Refused):
    """A migration that was applied to this database is not the one that this release has."""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file."""

    number: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        """The sha256 of the text, in hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def statements(self, database: str) -> list[str]:
        """Return the statements for `sqlite` or `postgres`; one ends where a line ends in a semicolon."""
        lines = [line for line in dialect(self.text, database).splitlines() if not line.lstrip().startswith("--")]
        return [part.strip() for part in re.split(r";\s*?\n", "\n".join([*lines, ""])) if part.strip()]


@cache
def released() -> tuple[Migration, ...]:
    """Return the migrations of this release, in order; they are numbered from 1 without a gap."""
    files = (resources.files("sayso.storage") / "migrations").iterdir()
    found = {
        int(match.group(1)): Migration(int(match.group(1)), match.group(2), file.read_text("utf-8"))
        for file in files
        if (match := _NAME.fullmatch(file.name))
    }
    return tuple(found[number] for number in range(1, len(found) + 1))


def pending(applied: Mapping[int, str], known: Sequence[Migration]) -> list[Migration]:
    """Return what is still to be applied, given the checksums of what was.

    Raises:
        SchemaTooNew, SchemaChanged: this release must not touch the database.
    """
    newest = max(applied, default=0)
    if newest > len(known):
        raise SchemaTooNew(f"the database has schema {newest}, this release of sayso knows {len(known)}: update sayso")
    for migration in known[:newest]:
        if applied.get(migration.number) != migration.checksum:
            raise SchemaChanged(
                f"migration {migration.number} ({migration.name}) was applied to this database with other content"
            )
    return list(known[newest:])


def applied() -> Body[dict[int, str]]:
    """Read which migrations were applied. Writes nothing where there is a record, so a read-only file will do."""
    yield Sql(
        """
        create table if not exists migration (
            number bigint primary key, name text not null, checksum text not null, applied_at_ms bigint not null
        )
        """
    )
    return dict((yield Sql("select number, checksum from migration")))


def apply(migration: Migration, *, database: str) -> Body[bool]:
    """Apply one migration; False if another process did so since `applied` looked."""
    now: int = yield NOW
    ours = yield Sql(
        """
        insert into migration (number, name, checksum, applied_at_ms) values (?, ?, ?, ?)
        on conflict (number) do nothing returning 1
        """,
        (migration.number, migration.name, migration.checksum, now),
    )
    if not ours:
        return False
    for statement in migration.statements(database):
        yield Sql(statement)
    return True
