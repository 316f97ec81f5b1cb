"""What a value owes to whom. Every stored part carries its source and its label from the first row on.

No rule reads labels yet (`decide` takes them); a part stored without one could never get it back.
Nothing the model says raises a label.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Integrity(StrEnum):
    """How far a text's author is trusted, from most to least."""

    #: the clock, configuration, the runtime's own words
    RUNTIME = "runtime"
    #: typed by the verified user in this session
    USER = "user"
    #: minted by the service itself: ids, numbers of its ledger
    PLATFORM = "platform"
    #: an authenticated member of the same workspace
    MEMBER = "member"
    #: everybody else
    OUTSIDER = "outsider"


_ORDER = tuple(Integrity)


@dataclass(frozen=True, slots=True)
class Label:
    """Integrity (a chain) and the private sources that a value may reveal (a set)."""

    integrity: Integrity
    private: tuple[str, ...] = ()

    def join(self, other: Label) -> Label:
        """Return the label of a value made from both: lower integrity, union of private sources."""
        lower = max(self.integrity, other.integrity, key=_ORDER.index)
        return Label(lower, tuple(sorted({*self.private, *other.private})))


RUNTIME = Label(Integrity.RUNTIME)
USER = Label(Integrity.USER)
OUTSIDER = Label(Integrity.OUTSIDER)


def join(labels: Iterable[Label]) -> Label:
    """Return the label of a value made from all of them; of nothing, the runtime's."""
    joined = RUNTIME
    for label in labels:
        joined = joined.join(label)
    return joined


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of text with its source and label; the unit of every row that holds somebody's words."""

    text: str
    #: whose words they are: a principal, `model`, `tool:<name>` or `runtime`
    source: str
    label: Label
    #: how the source was verified; empty for what the runtime itself made
    verified: str = ""
