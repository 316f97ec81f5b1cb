"""What a story is played with, and what is left of it: values only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from sayso.agent import Agent
from sayso.core.consent import Standing
from sayso.core.contract import Contract
from sayso.core.origin import Principal
from sayso.core.rows import Row
from sayso.runtime.limits import Limits
from sayso.runtime.rules import RULES, Rules
from sayso.storage.store import InboxRow, OperationRow, Store
from sayso.testing.ledger import Ledger
from sayso.testing.simulation.story import Cast, Story

#: how to open a store, given a clock
OpenStore = Callable[[Callable[[], int]], AbstractAsyncContextManager[Store]]


class Keeps(Protocol):
    """A world: whatever a user's tools act on, as long as it keeps books."""

    @property
    def ledger(self) -> Ledger: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What all stories of a simulation have in common."""

    #: makes the agent, for a world that is new in each story
    agent: Callable[[Any], Agent]
    world: Callable[[], Keeps]
    cast: Cast
    store: OpenStore
    #: what may happen in the world beside, by name
    happenings: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    rules: Rules = RULES


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """An input whose sender was told that it is stored."""

    what: str
    #: its place in the inbox; None where the sender was told of none
    n: int | None


@dataclass(slots=True)
class Played:
    """What was left when a story was over: all that an invariant may look at."""

    story: Story
    session: str
    owner: Principal
    contracts: Mapping[str, Contract]
    #: the rows as stored
    rows: list[Row]
    #: everything that came in, taken or not
    inbox: list[InboxRow]
    standings: list[Standing]
    operations: list[OperationRow]
    ledger: Ledger
    acknowledged: list[Acknowledged]
    #: what each page shows, and what it would have to
    pages: list[list[dict[str, Any]]]
    expected: list[dict[str, Any]]
    #: everything came to its end
    rested: bool
    #: what a page found wrong while it followed
    seen_wrong: list[str]
    #: what failed that never may: the runtime's own work
    failed: list[str]
    crashes: int
    take_overs: int
    faults: int
