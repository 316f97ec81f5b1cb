"""A Python function as the reader of a source's events. It is handed what was verified, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from sayso.runtime.ports import Heard, Scheme


class DeclaredSource(Protocol):
    """A source as `sayso.agent.SourceSpec` declares it."""

    @property
    def name(self) -> str: ...
    @property
    def function(self) -> Callable[..., Heard]: ...
    @property
    def takes_bytes(self) -> bool: ...


class FunctionSource:
    """One source behind the `SourceDoor` port: its scheme, ready, and the function that reads its events."""

    def __init__(self, spec: DeclaredSource, scheme: Scheme) -> None:
        self.name, self.scheme = spec.name, scheme
        self._function, self._takes_bytes = spec.function, spec.takes_bytes

    def hear(self, body: bytes) -> Heard:
        """Return what a verified body says.

        Raises:
            ValueError: the body is no JSON in UTF-8, the function can't read it, or what it returned is no
                `Heard`. The text names the source, for the operator.
        """
        said = body if self._takes_bytes else self._parsed(body)
        try:
            heard: object = self._function(said)
        except Exception as error:
            raise ValueError(f"source {self.name}: its function raised {_brief(error)}") from error
        if not isinstance(heard, Heard):
            raise ValueError(f"source {self.name}: its function returned a {type(heard).__name__}, not a Heard")
        return self._checked(heard)

    def _parsed(self, body: bytes) -> Any:
        """Return the body's JSON. UTF-8 and nothing else, so that everybody reads the same text in it."""
        try:
            return json.loads(body.decode("utf-8"), parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"source {self.name}: the body is no JSON in UTF-8: {_brief(error)}") from error

    def _checked(self, heard: Heard) -> Heard:
        """Return it if its fields are what they claim: types are only a promise in somebody's function."""
        text: object = heard.text
        about: object = heard.about
        if not isinstance(text, str):
            raise ValueError(f"source {self.name}: the text that its function heard is a {type(text).__name__}")
        if not isinstance(about, tuple | list) or not all(_names_a_thing(each) for each in about):
            raise ValueError(f"source {self.name}: about takes a list of pairs, each a kind and a value")
        return heard


def _names_a_thing(pair: object) -> bool:
    """Whether it is a kind and a value. Whole numbers will do: senders number their things, and `Ref` has text."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(isinstance(each, str | int) and not isinstance(each, bool) and str(each) for each in pair)


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number in JSON")


def _brief(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"
