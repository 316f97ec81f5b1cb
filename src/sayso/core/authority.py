"""May this run? Decided from the verified origin and the contract, never by the model (B2, B3).

The prompt carries no rule that this file does not enforce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from sayso.core.contract import ApproverRole, ConsentPolicy, Contract
from sayso.core.labels import Label
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.session import SessionRole


class Verdict(StrEnum):
    """Authority's answer about an action."""

    RUN = "run"
    ASK = "ask"
    #: not done and nobody interrupted: listed at the end of the turn (R10); no rule returns it yet
    PARK = "park"
    DENY = "deny"


@dataclass(frozen=True, slots=True)
class Action:
    """What the model proposes: one call of one tool."""

    tool: str
    arguments: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Mandate:
    """Consent given ahead, within bounds (B13). Its bounds come later; nothing makes one yet."""

    id: str


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict, why, and (for `ask`) who may approve, as `Approver` texts."""

    verdict: Verdict
    reason: str
    approvers: tuple[str, ...] = ()


def approvers(contract: Contract, origin: Origin, *, owner: Principal | None) -> tuple[str, ...]:
    """Return who may approve: a principal, or `role:operator`; empty where nobody can (K11, B14).

    The person whose authority would be used is the turn's principal if that is a user,
    else the session's owner. A contract may name a role instead.
    """
    if contract.approver is ApproverRole.OPERATOR:
        return ("role:operator",)
    if contract.approver is None and origin.is_user:
        return (str(origin.principal),)
    return (str(owner),) if owner is not None else ()


def may_approve(principal: Principal, approvers: tuple[str, ...]) -> bool:
    """Return whether `principal` is one of `approvers`, by name or by role."""
    if principal.kind is PrincipalKind.OPERATOR and "role:operator" in approvers:
        return True
    return principal.kind in (PrincipalKind.USER, PrincipalKind.OPERATOR) and str(principal) in approvers


def role_of(principal: Principal, owner: Principal, given: SessionRole | None) -> SessionRole | None:
    """Return what `principal` is in a session of `owner` in which she was given the role `given`; None if she
    is nothing there, and then the session does not exist for her."""
    if principal == owner:
        return SessionRole.OWNER
    if principal.kind is PrincipalKind.OPERATOR:
        return SessionRole.OPERATOR
    return given if principal.kind is PrincipalKind.USER else None


def may_post(role: SessionRole) -> bool:
    """Return whether that role may say something: a message, an answer. A viewer reads."""
    return role is not SessionRole.VIEWER


def may_manage(role: SessionRole) -> bool:
    """Return whether that role may say who takes part, and how long the session lasts."""
    return role in (SessionRole.OWNER, SessionRole.OPERATOR)


def decide(
    action: Action,
    contract: Contract,
    origin: Origin,
    labels: tuple[Label, ...],
    mandates: tuple[Mandate, ...],
    *,
    owner: Principal | None,
) -> Decision:
    """Return whether `action` runs, is asked about, or is denied, and why.

    `labels` are those of everything in the turn's context; `mandates` are those in force. Both are
    part of the signature because callers must supply them; the rules that read them come with B12, B13.
    """
    starter = str(origin.principal)
    if contract.consent is ConsentPolicy.NEVER:
        return Decision(Verdict.RUN, "its contract needs no consent")
    if contract.consent is ConsentPolicy.DERIVED:
        if not contract.effect.consequential:
            return Decision(Verdict.RUN, f"effect {contract.effect} changes nothing")
        if origin.is_user:
            return Decision(Verdict.RUN, f"{starter} started the turn")
        reason = f"{starter} started the turn, not a user"
    else:
        reason = "its contract always needs consent"
    who = approvers(contract, origin, owner=owner)
    if not who:
        return Decision(Verdict.DENY, f"{reason}, and there is nobody to ask")
    return Decision(Verdict.ASK, reason, who)
