"""One question about exact steps, and its answer.

A question fixes the steps when it is asked (B5), is worded by the runtime from their arguments (B6),
is good once (B8) and for a time (B9). Only an approver's answer by id and digest is a yes (B7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from sayso.core.authority import may_approve
from sayso.core.canonical import canonical, digest
from sayso.core.contract import Contract, Role
from sayso.core.inputs import Answer, InputKind
from sayso.core.labels import Integrity, Part
from sayso.core.operation import Ref
from sayso.core.origin import Origin, Principal
from sayso.core.session import Position
from sayso.core.text import CLOSE, OPEN, plain, quoted

#: characters of one value that a question shows before it says how many are left out
VALUE_CHARS_MAX = 200


class ConsentState(StrEnum):
    """Where a question stands (K13)."""

    OPEN = "open"
    #: said yes to, not yet run; it starts when no turn runs, before the queue
    APPROVED = "approved"
    #: its turn has started; it can start no other (B8)
    USED = "used"
    DECLINED = "declined"
    EXPIRED = "expired"
    #: something newer took its place, or its subject is gone (K18)
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Step:
    """One fixed call: what would run, and under which declaration."""

    call: str
    tool: str
    arguments: Mapping[str, object]
    #: version of the tool's contract when the question was asked
    contract: str
    #: the operation that it undoes (D6)
    undoes: str | None = None
    #: an operation that may have done the same already (K25)
    again: str | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """One argument as the question shows it."""

    name: str
    value: str
    role: Role
    #: whose words the value was found in, or "the assistant" where nobody said it
    source: str
    #: whether it came from outside: from no user and not from the runtime
    outside: bool
    #: what it was in the operation that this step would replace, where it differs (K31)
    was: str | None = None


@dataclass(frozen=True, slots=True)
class AskedStep:
    """One step of a question: its sentence, and every argument."""

    sentence: str
    arguments: tuple[Shown, ...]


@dataclass(frozen=True, slots=True)
class Question:
    """The runtime's words. `text` is the whole question on one line."""

    text: str
    because: str
    steps: tuple[AskedStep, ...]


@dataclass(frozen=True, slots=True)
class Consent:
    """A question as it was asked. What became of it is a projection of later rows."""

    id: str
    #: the turn that asked
    turn: str
    origin: Origin
    steps: tuple[Step, ...]
    digest: str
    approvers: tuple[str, ...]
    about: tuple[Ref, ...]
    question: Question
    asked_at_ms: int
    #: the last instant, of the time an answer was received, at which a yes counts (B9)
    expires_at_ms: int
    #: model calls that were left to the asking turn, for its continuation (K16)
    steps_left: int = 0
    #: the input whose place in the turn it asks about, where it is a pause: it fixes no steps, and its turn waits (K23)
    pause: int | None = None

    @property
    def plans(self) -> bool:
        """Whether it asks about steps that a turn planned; not about a pause, nor about undoing what was done."""
        return bool(self.steps) and all(step.undoes is None for step in self.steps)


@dataclass(frozen=True, slots=True)
class Standing:
    """A question and what became of it."""

    consent: Consent
    state: ConsentState
    #: where in the journal it was asked
    position: Position
    answered_by: str | None = None
    answered_at_ms: int | None = None
    reason: str = ""
    #: places of the ticked steps; None means all
    ticks: tuple[int, ...] | None = None
    #: journal position of the answer that still owes a turn (K13, K16); None if none is owed
    due_seq: int | None = None
    #: the turn that ran it
    used_by: str | None = None

    @property
    def ticked(self) -> tuple[Step, ...]:
        """The steps that the yes covers, in order."""
        steps = self.consent.steps
        return steps if self.ticks is None else tuple(step for i, step in enumerate(steps) if i in self.ticks)


def steps_digest(steps: Iterable[Step]) -> str:
    """Return the digest of what a question fixes: each step's tool and canonical arguments, in order."""
    return digest([[step.tool, step.arguments, *([] if step.undoes is None else [step.undoes])] for step in steps])


@dataclass(frozen=True, slots=True)
class Replaced:
    """The operation that a step would replace: the newest of its tool whose ref the asking input names."""

    tool: str
    arguments: Mapping[str, object]


def show_value(value: object) -> str:
    """Return a value as a question shows it, without quotation marks: one line, nothing hidden."""
    return plain(value if isinstance(value, str) else canonical(value), chars_max=VALUE_CHARS_MAX)


def _says(part: Part, value: object) -> bool:
    """Return whether `value` stands in `part` as a whole word, not inside a longer one."""
    needle = (value if isinstance(value, str) else canonical(value)).casefold()
    hay = part.text.casefold()
    start = hay.find(needle) if needle else -1
    while start >= 0:
        end = start + len(needle)
        before, after = hay[start - 1 : start], hay[end : end + 1]
        if not ((before.isalnum() and needle[0].isalnum()) or (after.isalnum() and needle[-1].isalnum())):
            return True
        start = hay.find(needle, start + 1)
    return False


def found_in(value: object, parts: Iterable[Part]) -> tuple[str, bool]:
    """Return whose words `value` stands in, and whether that is outside (K31).

    A person's own words win over others that say the same. A value that nobody said is the assistant's,
    and outside, because what it was made from is not known.
    """
    first: tuple[str, bool] | None = None
    for part in parts:
        if _says(part, value):
            outside = part.label.integrity not in (Integrity.RUNTIME, Integrity.USER)
            if not outside:
                return part.source, False
            first = first or (part.source, True)
    return first or ("the assistant", True)


def sentence(contract: Contract, arguments: Mapping[str, object]) -> str:
    """Return the runtime's words for one call, from its contract and arguments alone (B6).

    Every value stands between marks that nothing in it can close. An argument that `say` does not
    name is listed after it, so that nothing a yes covers goes unsaid. Without a `say` the call is
    spelled out.
    """
    rest = [name for name in arguments if name not in contract.fields]
    if contract.say is None:
        said = f"run {contract.tool}"
    else:
        said = "".join(
            quoted_value(arguments.get(piece, "")) if is_field else piece for is_field, piece in contract.say_parts
        )
    extra = ", ".join(f"{plain(name, chars_max=60)} = {quoted_value(arguments[name])}" for name in sorted(rest))
    return f"{said}, with {extra}" if extra else said


def quoted_value(value: object) -> str:
    """Return a value between the marks of a question."""
    text = value if isinstance(value, str) else canonical(value)
    return quoted(text, chars_max=VALUE_CHARS_MAX)


def _asked(step: Step, contract: Contract, parts: tuple[Part, ...], replaced: Mapping[str, Replaced]) -> AskedStep:
    old = replaced.get(step.tool)
    shown = []
    for name, value in step.arguments.items():
        source, outside = found_in(value, parts)
        before = old.arguments.get(name) if old else None
        was = show_value(before) if before is not None and canonical(before) != canonical(value) else None
        shown.append(Shown(name, show_value(value), contract.roles.get(name, Role.CONTENT), source, outside, was))
    said = sentence(contract, step.arguments)
    return AskedStep(said if step.again is None else f"{said}, which may have happened already", tuple(shown))


def question(
    consent_id: str,
    *,
    steps: tuple[Step, ...],
    contracts: Mapping[str, Contract],
    origin: Origin,
    parts: tuple[Part, ...],
    replaced: Mapping[str, Replaced],
    approvers: tuple[str, ...] = (),
    why: str = "",
) -> Question:
    """Return the question about `steps`, in the runtime's words (B6). `why` is the runtime's reason to ask, where it is
    not who started the turn.

    `parts` are the texts in view, searched for where each value came from. Their words enter the
    question only as a value's source; the event's own text never does.
    """
    asked = tuple(_asked(step, contracts[step.tool], parts, replaced) for step in steps)
    starter = plain(origin.principal.id, chars_max=60)
    if why:
        because = why
    elif str(origin.principal) in approvers:
        because = "you started this turn, and it always asks"
    else:
        because = f"{starter} started this turn, not you"
    changed = [
        f"{plain(shown.name, chars_max=60)} was {OPEN}{shown.was}{CLOSE}"
        for step in asked
        for shown in step.arguments
        if shown.was is not None
    ]
    what = "; then ".join(step.sentence for step in asked)
    text = f"{consent_id}, asked because {because}: {what}?" + (f" ({', '.join(changed)})" if changed else "")
    return Question(text, because, asked)


def pause_question(consent_id: str, turn: str, words: str) -> Question:
    """Return the question that a paused turn asks its own person about what she said meanwhile (C4), in the runtime's
    words around hers."""
    said = quoted(words, chars_max=VALUE_CHARS_MAX)
    because = f"{turn} is under way, and it is not clear whether what you said belongs to it"
    text = f"{consent_id}, asked because {because}: does {said} belong to it? (if not, it waits for its own turn)"
    return Question(text, because, ())


#: how a question is worded; a parameter of the runtime so that a test can break the rule on purpose
Wording = Callable[..., Question]


def refuse_at_door(answer: Answer, standing: Standing | None, by: Principal) -> str | None:
    """Return why the door does not take `answer`, or None if it does (K12).

    A second or late answer is taken like the first: what it means is the owner's to say.
    """
    if standing is None:
        return "there is no such question"
    if not may_approve(by, standing.consent.approvers):
        return f"it waits for {' or '.join(standing.consent.approvers)}, not for {by}"
    if answer.digest != standing.consent.digest:
        return "the digest is not that of the steps that were asked about"
    if answer.yes and answer.steps is not None:
        places = set(answer.steps)
        if not places or not places <= set(range(len(standing.consent.steps))):
            return "the ticked steps are not steps of this question"
    return None


def read_bare(yes: bool, open_ones: Iterable[Standing], by: Principal, *, as_of: Position | None) -> Answer | InputKind:
    """Return what a message that is a bare yes or no means (B7, K20).

    An answer, if exactly one open question waits for its sender and she had seen it; a plain message,
    if none does; else unclear: the runtime asks which.
    """
    waiting = [standing for standing in open_ones if may_approve(by, standing.consent.approvers)]
    if not waiting:
        return InputKind.MESSAGE
    one = waiting[0]
    seen = as_of is not None and as_of.epoch >= one.position.epoch and as_of.seq >= one.position.seq
    if len(waiting) > 1 or not seen:
        return InputKind.UNCLEAR
    return Answer(one.consent.id, one.consent.digest, yes)


class Settled(StrEnum):
    """What an answer came to."""

    APPROVED = "approved"
    DECLINED = "declined"
    #: received after the deadline: it runs nothing and says so (B9)
    LATE = "late"
    #: the question was settled before (B8)
    REPEATED = "repeated"


def settle(standing: Standing, answer: Answer, *, received_at_ms: int) -> Settled:
    """Return what a stored answer comes to. In time means at or before the deadline (K12)."""
    if standing.state is not ConsentState.OPEN:
        return Settled.LATE if standing.state is ConsentState.EXPIRED else Settled.REPEATED
    if received_at_ms > standing.consent.expires_at_ms:
        return Settled.LATE
    return Settled.APPROVED if answer.yes else Settled.DECLINED


def supersedes(newer: Consent, older: Consent) -> bool:
    """Return whether a new question takes the place of an open one: same origin, same ref (K18)."""
    return newer.origin.principal == older.origin.principal and bool(set(newer.about) & set(older.about))
