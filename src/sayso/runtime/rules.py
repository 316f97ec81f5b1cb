"""The decisions of `core` that the runtime calls, as one value.

Production always uses `RULES`. A test that breaks a rule on purpose (E3) hands in another value: there is
no flag in the code that could turn a rule off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sayso.core import authority, consent, context
from sayso.core.labels import Part
from sayso.core.origin import Principal
from sayso.core.session import SessionRole


def _as_asked(standing: consent.Standing, parts: tuple[Part, ...]) -> tuple[consent.Step, ...]:
    """Return the ticked steps as they were when the question was asked; `parts`, what is in view, is not read."""
    return standing.ticked


@dataclass(frozen=True, slots=True)
class Rules:
    """Each field is the one place where that rule is applied."""

    #: may an action run (B2, B3)
    decide: Callable[..., authority.Decision] = authority.decide
    #: the runtime's words for a question (B6)
    question: consent.Wording = consent.question
    #: what an answer comes to (B7 to B9)
    settle: Callable[..., consent.Settled] = consent.settle
    #: the steps that a yes runs (B5)
    steps: Callable[[consent.Standing, tuple[Part, ...]], tuple[consent.Step, ...]] = _as_asked
    #: what somebody is in a session, and so what she may see and do there
    role: Callable[[Principal, Principal, SessionRole | None], SessionRole | None] = authority.role_of
    #: labelled data for the model (B4)
    labelled: context.Labelling = context.labelled


RULES = Rules()
