"""The command line. Nothing is imported before it is needed, so that `sayso --help` is quick."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import click

from sayso.core.errors import SaysoError

T = TypeVar("T")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sayso")
def main() -> None:
    """sayso: an agent runtime that knows on whose say-so it acts."""


_database = click.option(
    "--database",
    "-d",
    default=None,
    metavar="FILE|URL",
    help="the store: a SQLite file, or postgresql://… (default: from settings, sayso.db)",
)


@main.command()
@click.argument("target", metavar="MODULE:AGENT")
@click.option("--host", default=None, help="address to listen on (default 127.0.0.1)")
@click.option("--port", type=int, default=None, help="port to listen on (default 8000; 0 picks a free one)")
@_database
def serve(target: str, host: str | None, port: int | None, database: str | None) -> None:
    """Serve the agent at MODULE:AGENT over HTTP, and run its sessions."""
    from sayso.assembly import serve_forever

    _run(serve_forever(target, host=host, port=port, database=database))


@main.command()
@click.argument("name", required=False, metavar="[SCENARIO]")
@click.option("--list", "list_", is_flag=True, help="list the scenarios and what can be broken in each")
@click.option("--history", is_flag=True, help="also print what the model was shown")
@click.option("--ablate", metavar="RULE", default=None, help="break this rule, and see the harm")
@click.option("--serve", is_flag=True, help="start the demo's server and keep it running, with what to type")
@click.option("--port", type=int, default=8000, show_default=True, help="with --serve: the port")
def demo(name: str | None, list_: bool, history: bool, ablate: str | None, serve: bool, port: int) -> None:
    """Play a SCENARIO and print its log.

    Without a name: the tour, over HTTP, against a real server with the outside in a process of its own.
    """
    from sayso.demo import play

    if list_:
        click.echo("\n".join(play.listed()))
    elif serve:
        _run(play.keep_serving(port, show=click.echo))
    elif name is None and ablate is None:
        _run(play.over_http("tour", show=click.echo))
    else:
        _run(play.in_process(name or "offer", ablate=ablate, history=history, show=click.echo))


@main.command()
@click.argument("session", required=False)
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND", help="only this kind, as turn.ask, or turn for all of them"
)
@click.option("--turn", default=None, metavar="T2", help="only this turn")
@click.option("--grep", "words", default="", metavar="WORDS", help="only entries that say this")
@click.option("--minutes", type=click.IntRange(min=1), default=None, help="only the last so many minutes")
@click.option("--follow", "-f", is_flag=True, help="go on with new entries as they are stored")
@click.option("--json", "json_", is_flag=True, help="one JSON object a line")
@_database
def log(
    session: str | None,
    kinds: tuple[str, ...],
    turn: str | None,
    words: str,
    minutes: int | None,
    follow: bool,
    json_: bool,
    database: str | None,
) -> None:
    """Print the numbered list of SESSION: its journal and the door's record. Without one: list the sessions."""
    from sayso import assembly
    from sayso.runtime.numbered import Chosen

    if session is None:
        click.echo("\n".join(_run(assembly.read_sessions(database))))
        return
    since_ms = 0 if minutes is None else assembly.minutes_ago_ms(minutes)
    chosen = Chosen(kinds, turn, words, since_ms)
    if follow:
        _run(_print(assembly.follow_log(database, session, chosen=chosen, as_json=json_)))
    else:
        for line in _run(assembly.read_log(database, session, chosen=chosen, as_json=json_)):
            click.echo(line)


async def _print(lines: AsyncIterator[str]) -> None:
    async for line in lines:
        click.echo(line)


@main.command()
@click.argument("session")
@click.option("--all", "everything", is_flag=True, help="also what is gone, and what left nothing")
@_database
def effects(session: str, everything: bool, database: str | None) -> None:
    """Print what the operations of SESSION left in the world: what stands, what may stand, what is under way."""
    from sayso.assembly import read_effects

    click.echo("\n".join(_run(read_effects(database, session, everything=everything))))


@main.group()
def token() -> None:
    """API tokens of users and operators."""


@token.command("create")
@click.argument("principal", metavar="KIND:ID")
@click.option("--label", default="", help="a note for the list")
@click.option("--days", type=click.IntRange(min=1), default=None, help="how long it is good for (default: no end)")
@_database
def token_create(principal: str, label: str, days: int | None, database: str | None) -> None:
    """Make a token for KIND:ID, as user:alice or operator:dora. It is shown once and stored only as a hash."""
    from sayso.assembly import create_token

    click.echo(_run(create_token(database, principal, label=label, days=days)))


@token.command("list")
@_database
def token_list(database: str | None) -> None:
    """List the tokens: whose, since when, until when."""
    from sayso.assembly import list_tokens

    click.echo("\n".join(_run(list_tokens(database))))


@token.command("revoke")
@click.argument("token_id", metavar="ID")
@_database
def token_revoke(token_id: str, database: str | None) -> None:
    """Make the token ID useless from now on."""
    from sayso.assembly import revoke_token

    click.echo(_run(revoke_token(database, token_id)))


@main.group()
def source() -> None:
    """Sources: try one out, or say which session takes what it sends."""


@source.command("test")
@click.argument("name")
@click.option("--secret", required=True, metavar="SECRET", help="what the source signs with: env:NAME, or the text")
@click.option("--data", required=True, metavar="JSON", help="the body to send")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="the server")
@click.option("--id", "event_id", default=None, help="the event id (default: a new one)")
def source_test(name: str, secret: str, data: str, url: str, event_id: str | None) -> None:
    """Sign DATA as the source NAME would (Standard Webhooks v1), send it, and print the status."""
    from sayso.assembly import send_hook

    click.echo(_run(send_hook(name, secret=secret, data=data, url=url, event_id=event_id)))


@source.command("bind")
@click.argument("source")
@click.argument("session")
@_database
def bind(source: str, session: str, database: str | None) -> None:
    """Let SESSION take what SOURCE sends about nothing that a session made."""
    from sayso.assembly import bind_source

    click.echo(_run(bind_source(database, source, session)))


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a command to its end; what it raises on purpose becomes one clear line and exit code 1."""
    try:
        return asyncio.run(work)
    except SaysoError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
