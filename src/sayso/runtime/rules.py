"""The decisions of `core` that the runtime calls, as one value.

Production always uses `RULES`. A test that breaks a rule on purpose (E3) hands in another value: there is
no flag in the code that could turn a rule off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sayso.core import authority, consent, context, inputs, operation
from sayso.core.inputs import Fit, Input
from sayso.core.labels import Part
from sayso.core.origin import Origin, Principal
from sayso.core.rows import Called
from sayso.core.session import SessionRole
from sayso.core.turn import Turn
from sayso.storage.store import OperationRow


def _as_asked(standing: consent.Standing, parts: tuple[Part, ...]) -> tuple[consent.Step, ...]:
    """Return the ticked steps as they were when the question was asked; `parts`, what is in view, is not read."""
    return standing.ticked


def _by_operation(session: str, turn: Turn, called: Called) -> str:
    """Return the key of the operation that a call is about: whatever turn plans it, and however often it is sent."""
    return operation.idempotency_key(session, called.operation)


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
    #: may an input be looked at for the running turn (C6)
    may_join: Callable[[Input, Origin, str], bool] = inputs.may_join
    #: what a classifier's word comes to (C3, C4)
    fit: Callable[[Fit], Fit] = lambda fit: fit
    #: which operations of a turn that begins anew may be taken over (C7, C8, D3)
    reuse: Callable[[Sequence[OperationRow]], Sequence[OperationRow]] = lambda done: done
    #: the idempotency key of a call's operation, in its session and turn (D2)
    key: Callable[[str, Turn, Called], str] = _by_operation
    #: what to do about an operation of which nobody knows (D5)
    settlement: Callable[..., operation.Settlement] = operation.settlement


RULES = Rules()
