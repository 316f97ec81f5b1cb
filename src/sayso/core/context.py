"""What the model is shown of a journal: messages, in an order that every provider accepts.

Only a user's own words stand in the user's role. Everything else from outside is data under a label that
names its source and how it was verified, and that nothing inside it can close (B4). What the runtime did
under a consent is shown as data too, never as the model's own calls (K17).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from sayso.core.attachment import Attachment
from sayso.core.inputs import InputKind
from sayso.core.labels import OUTSIDER, RUNTIME, Label, Part, join
from sayso.core.operation import EffectState
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.record import described
from sayso.core.rows import (
    Called,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentWithdrawnBody,
    InputBody,
    ModelCalledBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    Row,
    ToolResultBody,
    ToolSettledBody,
    TurnEndBody,
    TurnStartBody,
    TurnStepsBody,
)
from sayso.core.text import attribute, block


class MessageRole(StrEnum):
    """Whose place a message takes in a model's request."""

    #: a user's own words
    USER = "user"
    #: labelled data: from outside, or what the runtime did
    DATA = "data"
    ASSISTANT = "assistant"
    #: the result of one of the assistant's calls
    RESULT = "result"


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `seq` is the row it comes from."""

    role: MessageRole
    text: str
    label: Label
    seq: int
    #: calls that the assistant made, in order
    calls: tuple[Called, ...] = ()
    #: the call that a result answers
    call: str = ""
    tool: str = ""
    outcome: Outcome | None = None
    #: what the call left in the world, where somebody classified it; the text says it where the outcome doesn't
    effect: EffectState | None = None
    #: for data: whose words they are
    source: str = ""
    #: files that the text describes; their bytes are not in it
    attachments: tuple[Attachment, ...] = ()


class Labelling(Protocol):
    """How a part from outside is wrapped; a parameter so that a test can break the rule on purpose."""

    def __call__(self, part: Part, *, key: str) -> str: ...


def labelled(part: Part, *, key: str) -> str:
    """Return `part` as labelled data. `key` is the row's secret commit key: the tag made from it can't be
    guessed by whoever wrote the text, and is the same each time the row is shown."""
    tag = "data-" + hashlib.sha256(key.encode()).hexdigest()[:16]
    verified = f' verified="{attribute(part.verified)}"' if part.verified else ' verified="no"'
    head = f'<{tag} source="{attribute(part.source)}"{verified} integrity="{part.label.integrity}">'
    return f"{head}\n{block(part.text)}\n</{tag}>"


def _by_runtime(text: str, *, source: str, label: Label, key: str) -> str:
    return labelled(Part(text, source, label, "runtime"), key=key)


@dataclass(slots=True)
class Context:
    """The messages of a session, kept up row by row; adding one costs the same at any length.

    While a batch of calls lacks results, other messages wait, so that a call is always followed by its
    results (K30). It keeps the newest `messages_max` messages or a few more, cut where a turn begins.
    """

    wrap: Labelling = labelled
    messages_max: int = 2_000
    messages: deque[Message] = field(default_factory=deque)
    #: texts in view, newest last, in which a question looks for where a value came from (K31)
    parts: deque[Part] = field(default_factory=lambda: deque(maxlen=64))
    label: Label = field(default_factory=lambda: join(()))
    #: whose words a person's last ones were; None while nobody spoke
    _speaker: Principal | None = None
    _open: set[str] = field(default_factory=set)
    _held: list[Message] = field(default_factory=list)
    #: calls that the runtime fixed, whose results are shown as data
    _fixed: dict[str, Called] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Take newly accepted rows into view."""
        for row in rows:
            for message in self._messages(row):
                self._place(message)
        self._cut()

    def _place(self, message: Message) -> None:
        if message.role is MessageRole.RESULT:
            if message.call not in self._open:
                return  # its call is before the window: no provider takes a result alone
            self.messages.append(message)
            self._open.discard(message.call)
            if not self._open:
                self.messages.extend(self._held)
                self._held.clear()
        elif self._open:
            self._held.append(message)
        else:
            self.messages.append(message)
            self._open.update(called.call for called in message.calls)
        self.label = self.label.join(message.label)

    def _cut(self) -> None:
        """Drop the oldest messages once there are a tenth too many, up to one that begins something. A turn that
        is longer than the window stays whole."""
        if len(self.messages) <= self.messages_max * 11 // 10 or self._open:
            return
        over = len(self.messages) - self.messages_max
        begins = (MessageRole.USER, MessageRole.DATA)
        cut = next((i for i, m in enumerate(self.messages) if i >= over and m.role in begins), 0)
        for _ in range(cut):
            self.messages.popleft()
        self.label = join(message.label for message in self.messages)

    def _messages(self, row: Row) -> list[Message]:
        match row.body:
            case InputBody() as body:
                return self._input(row, body)
            case NoticeBody(parts=parts):
                self.parts.extend(parts)
                return [self._data(row, part) for part in parts]
            case ModelSaidBody(parts=parts, interrupted=interrupted):
                reply = Message(MessageRole.ASSISTANT, _text(parts), join(p.label for p in parts), row.seq)
                cut_off = "That reply was cut off here. No more of it was shown to anybody, and nothing of it was run."
                return [reply, self._told(row, cut_off)] if interrupted else [reply]
            case ModelCalledBody(calls=calls, parts=parts):
                label = join(p.label for p in parts) if parts else self.label
                return [Message(MessageRole.ASSISTANT, _text(parts), label, row.seq, calls=calls)]
            case TurnStepsBody(calls=calls):
                self._fixed.update((called.call, called) for called in calls)
                return []
            case ToolResultBody() as body:
                return [self._result(row, body)]
            case ToolSettledBody() as body:
                return self._settled(row, body)
            case TurnStartBody(continues=turn) as body if turn is not None:
                return [self._told(row, f"This goes on from {turn}, whose question {body.consent} was answered.")]
            case TurnStartBody(restarts=turn) if turn is not None:
                anew = f"This begins anew in place of {turn}. Plan all that is wanted now, also what {turn} did"
                return [self._told(row, f"{anew}: a step that is equal is taken over, and not done again.")]
            case TurnEndBody(ending=ending, reason=reason) if reason:
                return [self._told(row, f"{row.turn} ended: {ending}; {reason}.")]
            case ConsentDeclinedBody(consent=consent, parts=parts) as body:
                hers = body.by.startswith(f"{PrincipalKind.USER}:")
                said = [self._person(row, part) if hers else self._data(row, part) for part in parts]
                if hers and parts:
                    self._speaker = Principal.parse(body.by)
                return [self._told(row, f"{body.by} said no to {consent}. Nothing of it was run."), *said]
            case ConsentExpiredBody(consent=consent):
                return [self._told(row, f"{consent} expired unanswered. Nothing of it was run.")]
            case ConsentWithdrawnBody(consent=consent, reason=reason):
                return [self._told(row, f"{consent} was withdrawn: {reason}.")]
            case ParticipantChangedBody(principal=principal, role=role):
                what = "takes part no more" if role is None else f"takes part in this session as {role}"
                return [self._told(row, f"{principal} {what}.")]
            case _:
                return []

    def _input(self, row: Row, body: InputBody) -> list[Message]:
        received = body.input
        mine = received.principal.kind is PrincipalKind.USER and received.kind is InputKind.MESSAGE
        said = [self._person(row, part) if mine else self._data(row, part) for part in received.parts]
        if mine:
            said = [*self._speaks(row, received.principal), *said]
        files = [(_file(a, str(received.principal), received.verified), a) for a in received.attachments]
        self.parts.extend([*received.parts, *(part for part, _ in files)])
        return [*said, *(self._data(row, part, attachments=(attached,)) for part, attached in files)]

    def _speaks(self, row: Row, who: Principal) -> list[Message]:
        """Return what is told where another person speaks than before: all of them have the user's role, and what a
        text says of its own sender is worth nothing."""
        before, self._speaker = self._speaker, who
        if before in (None, who):
            return []
        return [self._told(row, f"The next message is {who}'s. The last one was {before}'s.")]

    def _person(self, row: Row, part: Part) -> Message:
        return Message(MessageRole.USER, part.text, part.label, row.seq, source=part.source)

    def _data(self, row: Row, part: Part, *, attachments: tuple[Attachment, ...] = ()) -> Message:
        wrapped = self.wrap(part, key=row.commit_key)
        return Message(MessageRole.DATA, wrapped, part.label, row.seq, source=part.source, attachments=attachments)

    def _told(self, row: Row, text: str) -> Message:
        return self._data(row, Part(text, "runtime", join(()), "runtime"))

    def _result(self, row: Row, body: ToolResultBody) -> Message:
        files = body.attachments
        parts = (*body.parts, *(_file(attached, f"tool:{body.tool}", "tool contract") for attached in files))
        self.parts.extend(parts)
        label = join(part.label for part in parts)
        fixed = self._fixed.pop(body.call, None)
        left = "" if body.told_effect is None else _LEFT[body.told_effect]
        role, call = MessageRole.RESULT, body.call
        if fixed is not None:
            role, call = MessageRole.DATA, ""
            told = f"{body.tool}, run by the runtime with a person's consent: {body.outcome}. {left}".rstrip()
            text = f"{told} {_text(parts)}"
            wrapped = _by_runtime(text, source=f"tool:{body.tool}", label=label, key=row.commit_key)
        else:
            told_first = (Part(left, "runtime", RUNTIME, "runtime"),) if left else ()
            wrapped = "\n".join(self.wrap(part, key=row.commit_key) for part in (*told_first, *parts))
        return Message(
            role,
            wrapped,
            label,
            row.seq,
            call=call,
            tool=body.tool,
            outcome=body.outcome,
            effect=body.effect,
            attachments=files,
        )

    def _settled(self, row: Row, body: ToolSettledBody) -> list[Message]:
        """What was given up as unknown answered: the model is told, as data; the call's one result stands as it was."""
        files = tuple(_file(attached, f"tool:{body.tool}", "tool contract") for attached in body.attachments)
        self.parts.extend((*body.parts, *files))
        left = "" if body.told_effect is None else _LEFT[body.told_effect]
        what = f"{body.tool}, call {body.call}, which was given up as unknown"
        told = f"{what}, answered after all: {body.outcome}. {left}"
        return [self._told(row, told.rstrip()), *(self._data(row, part) for part in (*body.parts, *files))]


#: what the model is told of an effect, where the outcome does not say it
_LEFT = {
    EffectState.COMMITTED: "It happened all the same.",
    EffectState.NONE: "It did nothing.",
    EffectState.UNKNOWN: "It may have happened: nobody knows.",
    EffectState.PARTIAL: "A part of it happened, and stands.",
    EffectState.ROLLED_BACK: "It was undone again.",
}


def _file(attached: Attachment, source: str, verified: str) -> Part:
    """Return what is told of a file in the place of its bytes. Whoever sent it, its name may be anybody's."""
    return Part(f"file {attached.id}: {described(attached)}. Its content is not shown.", source, OUTSIDER, verified)


def _text(parts: Sequence[Part]) -> str:
    return "\n".join(part.text for part in parts)
