"""A PostgreSQL server for the tests, and a schema of its own for each store.

`SAYSO_TEST_POSTGRES` names a database by its URL. Without it: one that runs on this machine and lets us in,
else one that is started here for as long as the tests run. Where there is none, the tests that need one are
skipped by name; with `CI` set they fail.
"""

from __future__ import annotations

import atexit
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest

_NUMBERS = count(1)


class NoServer(Exception):
    """There is no PostgreSQL to be had; the text says what was tried."""


@cache
def server() -> str:
    """Return the URL of a database in which we may make schemas.

    Raises:
        NoServer: there is none.
    """
    if named := os.environ.get("SAYSO_TEST_POSTGRES"):
        return named
    for url in _running():
        try:
            with psycopg.connect(url, connect_timeout=2):
                return url
        except psycopg.Error:
            continue
    return _started()


def _running() -> Iterator[str]:
    """Yield what may run here: on loopback, or on the socket of Debian's packages."""
    ours = pwd.getpwuid(os.geteuid()).pw_name
    for at in ("@127.0.0.1:5432", "@"):
        for role, database in ((ours, "test"), (ours, ours), ("postgres", "postgres")):
            beside = "?host=/var/run/postgresql" if at == "@" else ""
            yield f"postgresql://{role}{at}/{database}{beside}"


def _started() -> str:
    """Start a server of our own, on a socket in a folder that goes with it; root can't, so another user does."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    which = shutil.which("initdb")
    bin_ = found[-1].parent if found else Path(which).resolve().parent if which else None
    if bin_ is None:
        raise NoServer("set SAYSO_TEST_POSTGRES to a database's URL, or install PostgreSQL")
    folder = Path(tempfile.mkdtemp(prefix="sayso-postgres-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    user = "nobody" if os.geteuid() == 0 else None
    if user is not None:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)

    def run(*command: str) -> None:
        done = subprocess.run(
            command, user=user, cwd=folder, capture_output=True, text=True, timeout=60, env={"PATH": os.environ["PATH"]}
        )
        if done.returncode:
            raise NoServer(f"{command[0]} failed: {done.stderr.strip()[-500:]}")

    data = str(folder / "data")
    run(str(bin_ / "initdb"), "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c max_connections=200"
    run(str(bin_ / "pg_ctl"), "-D", data, "-w", "-l", str(folder / "log"), "-o", options, "start")
    atexit.register(run, str(bin_ / "pg_ctl"), "-D", data, "-m", "immediate", "stop")
    return f"postgresql://postgres@/postgres?host={quote(str(folder), safe='')}"


def required() -> str:
    """Return the server's URL; skip the test that asks where there is none, and fail it in CI."""
    try:
        return server()
    except NoServer as error:
        if os.environ.get("CI"):
            pytest.fail(f"no PostgreSQL: {error}")
        pytest.skip(f"no PostgreSQL: {error}")


def within(url: str, schema: str) -> str:
    """Return the URL of a schema in a database."""
    return f"{url}{'&' if '?' in url else '?'}options=-csearch_path%3D{schema}"


@contextmanager
def schema() -> Iterator[str]:
    """Yield the URL of an empty schema, which is dropped at the end with all that is in it."""
    url = required()
    name = f"sayso_test_{os.getpid()}_{next(_NUMBERS)}"
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"create schema {name}".encode())
        try:
            yield within(url, name)
        finally:
            # a test that failed may have left a transaction open
            connection.execute(b"set lock_timeout = '10s'")
            connection.execute(f"drop schema {name} cascade".encode())
