"""What a tool does to the world, as declared. The careful value stands wherever nothing was declared."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from sayso.core.canonical import digest
from sayso.core.labels import Integrity


class Effect(StrEnum):
    """What a call does to the world."""

    NONE = "none"
    READ = "read"
    FETCH = "fetch"
    WRITE = "write"
    NOTIFY = "notify"
    SEND = "send"
    PUBLISH = "publish"
    SHARE = "share"
    MEMBERSHIP = "membership"
    BOOK = "book"
    PAY = "pay"
    ACCOUNT = "account"
    CREDENTIAL = "credential"
    DESTROY = "destroy"
    #: nothing was declared: treated as the strictest
    EXTERNAL = "external"

    @property
    def consequential(self) -> bool:
        """Whether somebody else could notice the call. A fetch can carry data away, so it counts."""
        return self not in (Effect.NONE, Effect.READ)


class ConsentPolicy(StrEnum):
    """When a call needs somebody's say-so."""

    #: never: whoever started the turn, it runs
    NEVER = "never"
    #: decided from the effect and the turn's origin
    DERIVED = "derived"
    #: always, also when the user started the turn
    ALWAYS = "always"


class Role(StrEnum):
    """What an argument is for."""

    TARGET = "target"
    OBJECT = "object"
    CRITICAL = "critical"
    WHEN = "when"
    DETAIL = "detail"
    CONTENT = "content"


class ApproverRole(StrEnum):
    """A role that a contract may name instead of the person whose authority would be used (K11)."""

    OWNER = "owner"
    OPERATOR = "operator"


_FIELD = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")


class ContractError(ValueError):
    """A contract contradicts itself: found when the tool is declared, never when it is called (F22)."""


@dataclass(frozen=True, slots=True)
class Contract:
    """One tool's declaration.

    Raises:
        ContractError: `consent="never"` without a declared effect; a `say` that names no argument
            of the tool; `parallel_safe` with an effect; `guarded_first` without a guard; limits that are not
            positive.
    """

    tool: str
    effect: Effect = Effect.EXTERNAL
    #: whether the other side drops our repeat by the idempotency key we send
    keyed: bool = False
    consent: ConsentPolicy = ConsentPolicy.DERIVED
    #: name of each argument and what it is for; an undeclared one is `content`
    roles: Mapping[str, Role] = field(default_factory=dict)
    #: the runtime's sentence for a question, with `{argument}` in it, e.g. "book a table for {party}"
    say: str | None = None
    approver: ApproverRole | None = None
    #: may run beside its neighbours in one reply, in any order
    parallel_safe: bool = False
    #: how long one attempt may take, milliseconds; after that the operation is unknown
    timeout_ms: int = 30_000
    #: after a restart an operation not yet sent is sent only while its say-so is at most this old (K14)
    good_for_ms: int = 3_600_000
    #: how long the other side recognises a repeat by the key, from the first time it was sent; after that a keyed
    #: operation is not sent again (D5)
    key_kept_ms: int = 86_400_000
    #: a turn in which it was sent is not begun anew for what its person says meanwhile: that waits
    no_restart: bool = False
    #: how far its results are trusted; undeclared, not at all (R2)
    returns: Integrity = Integrity.OUTSIDER
    #: whether the tool can tell what became of an operation by its key
    has_lookup: bool = False
    #: whether what it did can be undone, by a call of its own that a person is asked about (D6)
    has_release: bool = False
    #: the tool whose effect it undoes; no model is offered it
    undoes: str = ""
    #: whether what it says goes through a guard before it is a row
    has_guard: bool = False
    #: whether nothing of what it says is shown before the guard has seen it
    guarded_first: bool = False

    def __post_init__(self) -> None:
        if self.consent is ConsentPolicy.NEVER and self.effect is Effect.EXTERNAL:
            raise ContractError(f"{self.tool}: consent=never needs a declared effect")
        if self.parallel_safe and self.effect.consequential:
            raise ContractError(f"{self.tool}: only a tool without an effect can be parallel-safe")
        if self.guarded_first and not self.has_guard:
            raise ContractError(f"{self.tool}: guarded_first needs a guard")
        if self.timeout_ms <= 0 or self.good_for_ms <= 0 or self.key_kept_ms <= 0:
            raise ContractError(f"{self.tool}: timeout, good_for and key_kept must be positive")
        stray = [name for name in self.fields if name not in self.roles]
        if stray:
            raise ContractError(f"{self.tool}: say names {', '.join(stray)}, which is no argument of the tool")

    def releasing(self) -> Contract:
        """Return the contract of the call that undoes what this tool did: always asked about, in the same words."""
        say = None if self.say is None else f"undo: {self.say}"
        consent = ConsentPolicy.ALWAYS
        bare = replace(self, say=say, consent=consent, undoes=self.tool, has_lookup=False, has_release=False)
        return replace(bare, tool=f"{self.tool}.release", has_guard=False, guarded_first=False, parallel_safe=False)

    @property
    def fields(self) -> tuple[str, ...]:
        """The arguments that `say` names, in its order."""
        return tuple(_FIELD.findall(self.say or ""))

    @property
    def say_parts(self) -> tuple[tuple[bool, str], ...]:
        """`say` cut at its arguments: (is it an argument, its name or the literal text)."""
        pieces = _FIELD.split(self.say or "")
        return tuple((index % 2 == 1, piece) for index, piece in enumerate(pieces) if piece)

    @property
    def version(self) -> str:
        """A digest of what the tool does and how it is asked about; not of its time limits. A question asked
        under another one is void (R11)."""
        return digest(
            {
                "tool": self.tool,
                "effect": self.effect,
                "keyed": self.keyed,
                "consent": self.consent,
                "roles": dict(self.roles),
                "say": self.say,
                "approver": self.approver,
                "parallel_safe": self.parallel_safe,
                "returns": self.returns,
            }
        )
