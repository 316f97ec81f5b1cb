"""Let an agent live through thousands of stories in which everything goes wrong, and check what must hold all the same.

The production runtime runs them, on a clock that jumps and over any store. docs/simulation.md says how to test an
agent of your own.
"""

from sayso.testing.ledger import Deed, Ledger
from sayso.testing.simulation.checking import Report, Simulation, Violated, Violation, simulate
from sayso.testing.simulation.invariants import INVARIANTS, Invariant, invariant
from sayso.testing.simulation.setting import Acknowledged, Keeps, OpenStore, Played
from sayso.testing.simulation.stores import in_a_file, in_memory
from sayso.testing.simulation.story import Action, Cast, Rates, Sender, Story

__all__ = [
    "simulate",
    "Simulation",
    "Cast",
    "Sender",
    "Rates",
    "Ledger",
    "Deed",
    "Keeps",
    "Report",
    "Violation",
    "Violated",
    "Story",
    "Action",
    "Played",
    "Acknowledged",
    "Invariant",
    "invariant",
    "INVARIANTS",
    "OpenStore",
    "in_memory",
    "in_a_file",
]
