"""Each rule, broken on purpose (E3). Production code has no switch for any of this: a test or a demo hands
the runtime another value of `Rules`, or a part that breaks its promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from sayso.core.authority import Action, Decision, Mandate, decide
from sayso.core.contract import Contract
from sayso.core.labels import Label
from sayso.core.origin import Origin, Principal
from sayso.runtime.rules import RULES, Rules


@dataclass(frozen=True, slots=True)
class Ablation:
    """A rule taken away: which, how, and the harm that then happens."""

    name: str
    rule: str
    about: str
    harm: str
    rules: Rules


def _by_role(
    action: Action,
    contract: Contract,
    origin: Origin,
    labels: tuple[Label, ...],
    mandates: tuple[Mandate, ...],
    *,
    owner: Principal | None,
) -> Decision:
    """Whatever starts a turn arrives in the user's role, so it has the user's authority."""
    as_user = origin if owner is None else replace(origin, principal=owner)
    return decide(action, contract, as_user, labels, mandates, owner=owner)


ABLATIONS: Mapping[str, Ablation] = {
    ablation.name: ablation
    for ablation in (
        Ablation(
            "authority-by-role",
            "B2",
            "a turn's authority is read from the role its message plays, not from who sent it",
            "a table was booked and the group was told of it, and nobody was asked.",
            replace(RULES, decide=_by_role),
        ),
    )
}
