"""What the runtime asks of the outside: a clock, ids, a model, tools, the schemes of sources.

Values and protocols only. Every implementation lives in `adapters`, `sources` or `testing`,
and `assembly` alone chooses one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sayso.core.attachment import OCTETS
from sayso.core.contract import Contract
from sayso.core.inputs import Fit
from sayso.core.operation import EffectState, Ref, effect_state

if TYPE_CHECKING:  # a user's module imports this one, and must not wait for pydantic
    from sayso.core.context import Message

# --- sources -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RawRequest:
    """An inbound hook as it came: nothing decoded, nothing parsed, headers in order with repeats."""

    method: str
    #: path and query, as sent
    target: str
    headers: tuple[tuple[bytes, bytes], ...]
    #: after transfer decoding, before content or charset decoding
    body: bytes


@dataclass(frozen=True, slots=True)
class Verified:
    """The scheme vouches for the sender of these bytes."""

    #: which of our keys matched, by its reference (never the secret), so that a rotation can be watched
    key: str
    #: the sender's signed time, milliseconds since 1970 UTC; None where the scheme signs none
    signed_at_ms: int | None
    #: the sender's event id; None where it gave none (A5)
    event_id: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The request did not prove where it came from, and why: a reason for the operator, never the sender."""

    #: one of the words of the vectors, e.g. "signature", "missing_header", "timestamp"
    reason: str
    #: the sentence of the door's record
    detail: str
    #: 401, or 400 where the framing can't be read
    status: int = 401


class Scheme(Protocol):
    """How a source proves who it is. Bytes in, verdict out; no I/O, no clock of its own."""

    #: e.g. "standard-webhooks v1"; becomes part of a turn's origin
    name: str
    #: whether the event id is covered by the proof; where not, the body's digest is kept too
    id_signed: bool
    #: how long a repeat must be recognised, milliseconds
    keep_ms: int
    #: larger bodies are refused while reading
    body_bytes_max: int

    def verify(self, request: RawRequest, *, source: str, now_ms: int) -> Verified | Refusal:
        """Return who vouches for `request`, or why nobody does. Never raises."""
        ...


@dataclass(frozen=True, slots=True)
class Heard:
    """What an event from a source says, in the words of the one who wrote the source's function.

    `text` becomes labelled data for the model, never the user's words (B4). `about` names things that
    tools of a session made, by (kind, value), in the order in which they are tried (A12).
    """

    text: str
    about: Sequence[tuple[str, str]] = ()
    #: what `about` names no longer exists (A13)
    gone: bool = False
    #: delivered at once, starts no turn (A11)
    notice: bool = False


class SourceDoor(Protocol):
    """One source, ready: how it proves itself, and what its events mean."""

    name: str
    scheme: Scheme

    def hear(self, body: bytes) -> Heard:
        """Return what a verified body says.

        Raises:
            ValueError: the body does not parse; it is kept and shown to the operator, not acted on.
        """
        ...


# --- clock and ids -----------------------------------------------------------


class Clock(Protocol):
    """Time and waiting. The runtime reads no other clock."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970 UTC; never less than before."""
        ...

    async def sleep_until(self, instant_ms: int) -> None:
        """Return at `instant_ms`, or soon after."""
        ...


class Ids(Protocol):
    """Names that nobody else has."""

    def session(self) -> str:
        """Return a new session id, `ses_…`; ids sort by time."""
        ...

    def event(self) -> str:
        """Return a local event id for input that came without one (A5)."""
        ...

    def node(self) -> str:
        """Return a new incarnation of this process."""
        ...

    def secret(self) -> str:
        """Return 32 random bytes as text, for a token."""
        ...


# --- model -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ToolOffer:
    """A tool as the model is shown it."""

    name: str
    description: str
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """One request. `messages` grows with the session and is shared: read it, never keep or change it."""

    instructions: str
    messages: Sequence[Message]
    tools: Sequence[ToolOffer]
    session: str
    turn: str
    #: the name of the one tool that the reply has to call; empty where the model is free
    must_call: str = ""


@dataclass(frozen=True, slots=True)
class ProposedCall:
    """One call as the model wrote it. `arguments` is None where its JSON could not be read."""

    tool: str
    arguments: Mapping[str, Any] | None
    #: the provider's id, a note only (H13)
    provider_id: str = ""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of text, while it is being written."""

    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The whole reply. Nothing acts on a call before this."""

    text: str
    calls: tuple[ProposedCall, ...] = ()


class ModelFault(Exception):
    """The model gave no usable answer; `kind` is a word for the record, e.g. `timeout`, `truncated`."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


class Model(Protocol):
    """One provider request at a time; leaving the context closes the connection."""

    name: str

    def stream(self, request: ModelRequest) -> AbstractAsyncContextManager[AsyncIterator[TextDelta | Finished]]:
        """Return the reply as it comes; it ends with `Finished`.

        Raises:
            ModelFault: no usable answer came.
        """
        ...


# --- input in flight ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Meanwhile:
    """What a person said while a turn of hers runs, and what the turn is about."""

    session: str
    turn: str
    said: str
    #: what she said before, which the turn acts on
    before: tuple[str, ...]
    #: what it has planned and done, a line each
    steps: tuple[str, ...]


class Classifier(Protocol):
    """Says how what a person says meanwhile fits her running turn (C3). What it says is stored, so it is asked once;
    one that fails, or takes too long, counts as unsure."""

    #: for the row, e.g. "openai:gpt-5-mini"
    name: str

    async def fit(self, meanwhile: Meanwhile) -> Fit:
        """Return how it fits. May raise."""
        ...


# --- tools -------------------------------------------------------------------


@dataclass(slots=True)
class Call:
    """What a tool function is handed beside its arguments."""

    session: str
    turn: str
    #: the operation's idempotency key: hand it to the other side (D2)
    key: str
    #: on whose say-so it runs, as `user:alice`
    principal: str
    #: which attempt this is, from 1
    attempt: int = 1
    #: the key of the operation that is to be undone; empty where nothing is (D6)
    undoes: str = ""
    refs: list[Ref] = field(default_factory=list)
    #: what it said of its effect; None while it said nothing
    said: EffectState | None = None

    def made(self, kind: str, value: str, *, source: str) -> None:
        """Say that this call made something: from now on this session hears from `source` about it (A12)."""
        self.refs.append(Ref(source, kind, value))

    def effect(self, word: str) -> None:
        """Say what this call left in the world: `committed`, `none`, `partial`, `rolled_back`, or `unknown`. The last
        word counts. A tool that says nothing and returns has committed; one whose effect is none or a read has
        no effect to speak of. A call that is not committed and not `none` did not succeed: what comes after
        it in a plan does not start (K15).

        Raises:
            ValueError: there is no such word.
        """
        self.said = effect_state(word)


class File:
    """A file that a tool gives back, beside its text. It is stored with the result, and read by who may read that."""

    __slots__ = ("data", "media_type", "name")

    def __init__(self, name: str, data: bytes | bytearray | memoryview, media_type: str = OCTETS) -> None:
        """`name` is shown, never a path.

        Raises:
            TypeError: `data` is not bytes.
        """
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"file {name!r}: its data is a {type(data).__name__}, not bytes")
        self.name, self.data, self.media_type = str(name), bytes(data), str(media_type)

    def __repr__(self) -> str:
        return f"File({self.name!r}, {len(self.data)} bytes, {self.media_type!r})"


class Output:
    """What a tool gives back where one text is not enough: `Output("Seat 4", "Gate B", files=[File(...)])`.

    The texts are lines of one text. `error=True` says that this is no success; what it did all the same is said by
    `Call.effect`, else nobody knows.
    """

    __slots__ = ("error", "files", "texts")

    def __init__(self, *texts: str, files: Iterable[File] = (), error: bool = False) -> None:
        self.texts, self.files, self.error = texts, tuple(files), error
        given: tuple[tuple[type, object], ...] = (
            *((str, each) for each in texts),
            *((File, each) for each in self.files),
        )
        for wanted, each in given:
            if not isinstance(each, wanted):
                raise TypeError(f"Output takes texts, and files=[File(...)]: {type(each).__name__} is neither")

    def __repr__(self) -> str:
        return f"Output({len(self.texts)} texts, files={self.files!r}, error={self.error})"


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """What a tool returned."""

    text: str
    files: tuple[File, ...] = ()
    #: it is no success, and says so itself
    is_error: bool = False


class Absent(Exception):
    """What a lookup raises to say: no operation with this key ever happened there."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """An operation's answer that the store did not take before the process ended (K9)."""

    session: str
    operation: str
    tool: str
    #: the other side said yes; else it said no
    happened: bool
    text: str
    made: tuple[Ref, ...] = ()
    #: what it left in the world, where it said so
    effect: EffectState | None = None


class Rescue(Protocol):
    """Where answers wait that the store did not take."""

    def keep(self, evidence: Sequence[Evidence]) -> None:
        """Keep answers; they survive the process when this returns. Never raises: the process is ending."""
        ...

    def of(self, session: str) -> Sequence[Evidence]:
        """Return what is kept for a session's operations."""
        ...

    def drop(self, session: str, operation: str) -> None:
        """Forget an answer: it is stored now, or its operation was settled otherwise."""
        ...


class NoRescue:
    """Nothing is kept: after a restart such an operation is looked up, sent again by its key, or told (D5)."""

    def keep(self, evidence: Sequence[Evidence]) -> None:
        """Keep nothing."""

    def of(self, session: str) -> Sequence[Evidence]:
        """Return nothing."""
        return ()

    def drop(self, session: str, operation: str) -> None:
        """Do nothing."""


class Tools(Protocol):
    """The tools of an agent."""

    @property
    def contracts(self) -> Mapping[str, Contract]:
        """Every tool's declaration, by name."""
        ...

    @property
    def offers(self) -> Sequence[ToolOffer]:
        """The tools as a model is shown them."""
        ...

    def check(self, tool: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments as they would be used: validated, JSON values only, defaults filled in.

        Raises:
            Invalid: they are not what the tool takes; the text is for the model.
        """
        ...

    async def call(self, tool: str, call: Call, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Call the tool.

        Raises:
            ToolFailed: it did not happen.
            Exception: anything else: for a tool with an effect, nobody knows.
        """
        ...

    async def guard(self, tool: str, text: str) -> str:
        """Return what may be told of a result's text, for a tool whose contract has a guard.

        Raises:
            Exception: whatever the guard raises; then nothing of the text may be told.
        """
        ...

    async def look_up(self, tool: str, call: Call, arguments: Mapping[str, Any]) -> ToolAnswer:
        """Ask the other side what became of the operation with this key.

        Raises:
            Absent: it never happened there.
            Exception: it can't be told now.
        """
        ...
