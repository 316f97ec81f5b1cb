"""The decisions of `core` that the runtime calls, as one value.

Production always uses `RULES`. A test that breaks a rule on purpose (E3) hands in another value: there is
no flag in the code that could turn a rule off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sayso.core import authority, consent, context


@dataclass(frozen=True, slots=True)
class Rules:
    """Each field is the one place where that rule is applied."""

    #: may an action run (B2, B3)
    decide: Callable[..., authority.Decision] = authority.decide
    #: the runtime's words for a question (B6)
    question: consent.Wording = consent.question
    #: what an answer comes to (B7 to B9)
    settle: Callable[..., consent.Settled] = consent.settle
    #: labelled data for the model (B4)
    labelled: context.Labelling = context.labelled


RULES = Rules()
