"""Do all stores answer alike, whatever is asked in whatever order? The oracle is the store in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from sayso.core.attachment import digest_of
from sayso.core.consent import ConsentState
from sayso.core.errors import SaysoError
from sayso.core.operation import OperationState, Ref
from sayso.core.origin import Principal
from sayso.core.rows import (
    AnswerRefusedBody,
    Body,
    ConsentApprovedBody,
    ConsentDeclinedBody,
    ConsentExpiredBody,
    ConsentUsedBody,
    ConsentWithdrawnBody,
    EffectGoneBody,
    Ending,
    InputRetractedBody,
    InputSupersededBody,
    ModelSaidBody,
    NoticeBody,
    Outcome,
    ParticipantChangedBody,
    RequestRefusedBody,
    Row,
    SessionChangedBody,
    SessionClosedBody,
    ToolIntendedBody,
    ToolUnknownBody,
    TurnAskBody,
    TurnEndBody,
)
from sayso.core.session import Others, Position, SessionRecord, SessionRole, Token
from sayso.storage.store import Claimed, DoorKind, DoorNote, Entry
from tests.conformance.conftest import OPENERS
from tests.conformance.given import (
    ALICE,
    BOB,
    DAY,
    MINUTE,
    NOON,
    Clock,
    Inspected,
    answer,
    blobs,
    called,
    consent,
    hook,
    message,
    planned,
    quick_folder,
    result,
    rows,
    sent,
    sha,
    staged,
    started,
    taken,
    yes_to,
)

T = TypeVar("T")

SESSIONS = ("s1", "s2")
NODES = ("n1", "n2")
#: those that have a lease, and may be declared dead; the others are never
LEASED = ("n3", "n4")

sessions = st.sampled_from(SESSIONS)
people = st.sampled_from([ALICE, BOB])
places = st.integers(1, 4)
calls = st.sampled_from(["T1.1.1", "T1.1.2"])
operations = st.sampled_from(["O1", "O2"])
questions = st.sampled_from(["A1", "A2"])
positions = st.none() | st.builds(Position, st.integers(0, 4), st.integers(0, 8))
refs = st.builds(
    Ref, st.sampled_from(["restaurant", "cinema"]), st.just("reservation"), st.sampled_from(["R1", "R\ud800"])
)
#: few of each, so that they meet
keys = st.sampled_from(["k1", "k2", "k3"])
#: bytes: nothing, little, and more than one piece
CONTENTS = {"nothing": b"", "little": b"plan", "much": bytes(range(256)) * 5_000}
contents = st.sampled_from(list(CONTENTS))
uploads = st.integers(1, 6).map("u{}".format)

entries = st.one_of(
    st.builds(
        hook,
        keys,
        session=st.none() | sessions,
        content=st.sampled_from(["gone", "free", "yes"]),
        source=st.sampled_from(["restaurant", "cinema"]),
        keep_ms=st.sampled_from([MINUTE, DAY]),
        id_signed=st.booleans(),
    ),
    st.builds(
        message,
        st.sampled_from(["yes", "no", "hello", " Yes. "]),
        key=keys,
        by=people,
        session=sessions,
        as_of=positions,
        parts=st.integers(0, 2),
        uploads=st.just(()) | st.lists(uploads, max_size=2),
        waiting_max=st.sampled_from([None, None, 1, 2]),
    ),
    st.builds(
        answer,
        st.builds(
            yes_to,
            st.builds(consent, questions),
            yes=st.booleans(),
            digest=st.sampled_from([None, None, "sha256:0"]),
            steps=st.sampled_from([None, None, (0,), (1, 5)]),
        ),
        key=keys,
        by=people,
        session=sessions,
    ),
)

bodies: st.SearchStrategy[Body] = st.one_of(
    st.builds(ModelSaidBody, st.integers(1, 2), st.just(())),
    st.builds(taken, places),
    st.builds(NoticeBody, st.just(()), st.none() | places),
    st.builds(InputRetractedBody, places, places, st.just("user:alice")),
    st.builds(InputSupersededBody, places, st.just("moot")),
    st.builds(SessionClosedBody, places, st.just("user:alice"), st.just(NOON)),
    st.builds(
        SessionChangedBody,
        places,
        st.just("user:alice"),
        st.sampled_from([None, "", "Friday\ud800"]),
        st.none() | st.sampled_from(Others),
    ),
    st.builds(RequestRefusedBody, places, st.just("user:alice"), st.just("no more may")),
    st.builds(
        ParticipantChangedBody,
        places,
        st.sampled_from(["user:alice", "user:bob"]),
        st.sampled_from([None, SessionRole.MEMBER, SessionRole.VIEWER]),
        st.just("user:alice"),
    ),
    st.builds(AnswerRefusedBody, places, st.just("user:alice"), st.just("it was settled before")),
    st.builds(started, consent=st.none() | questions),
    st.builds(TurnEndBody, st.sampled_from(Ending)),
    st.builds(planned, st.builds(called, calls)),
    st.builds(lambda o, c: ToolIntendedBody(o, c, "book", f"s:{o}", sha(o)), operations, calls),
    st.builds(sent, operations, call=calls, attempt=st.integers(1, 2), intended=st.booleans()),
    st.builds(ToolUnknownBody, operations, calls, st.just("book"), st.just("no answer")),
    st.builds(
        result,
        calls,
        outcome=st.sampled_from([Outcome.OK, Outcome.FAILED, Outcome.UNKNOWN, Outcome.NOT_STARTED]),
        operation=st.none() | operations,
        made=st.lists(refs, max_size=2),
        files=st.just(()) | st.lists(st.sampled_from([b"", b"plan"]), max_size=2),
    ),
    st.builds(EffectGoneBody, refs, st.just("source:restaurant"), places, st.none() | operations),
    st.builds(TurnAskBody, st.builds(consent, questions, approvers=st.sampled_from([("user:alice",), ("user:bob",)]))),
    st.builds(
        ConsentApprovedBody,
        questions,
        places,
        st.just("user:alice"),
        st.integers(0, 9),
        st.just("api token"),
        st.sampled_from([None, (0, 1)]),
    ),
    st.builds(ConsentDeclinedBody, questions, places, st.just("user:alice"), st.integers(0, 9)),
    st.builds(ConsentExpiredBody, questions, st.none() | places),
    st.builds(ConsentWithdrawnBody, questions, st.just("its subject is gone")),
    st.builds(ConsentUsedBody, questions, st.just("T2")),
)


def comparable(value: object) -> object:
    """Return an answer without the nonce, which each store makes up for itself."""
    match value:
        case list() | tuple():
            return [comparable(item) for item in value]
        case Claimed(token=token, record=record):
            return replace(token, nonce=""), replace(record, nonce="")
        case Row():
            return replace(value, commit_key=f".{value.seq}")
        case _:
            return replace(value, nonce="") if hasattr(value, "nonce") else value  # type: ignore[type-var]  # a record


class Story(StrEnum):
    """A legal piece of a session's life, so that random rows find something to be legal or illegal about."""

    SAY = "say"
    BOOK = "book"
    ASK = "ask"
    GIVE_UP = "give up"


def told(story: Story, record: SessionRecord, queued: int | None) -> list[Body]:
    """Return the rows of a story that begins where the session stands."""
    number = record.turns + 1
    call, operation = f"T{number}.1.1", f"O{number}"
    begin: list[Body] = [started()] if queued is None else [taken(queued), started()]
    match story:
        case Story.SAY:
            return [*begin, ModelSaidBody(1, ()), TurnEndBody(Ending.DONE)]
        case Story.BOOK:
            made = [Ref("restaurant", "reservation", "R1")]
            return [
                *begin,
                planned(called(call)),
                sent(operation, call=call),
                result(call, operation=operation, made=made, files=[*CONTENTS.values()]),
            ]
        case Story.ASK:
            asked = TurnAskBody(consent(f"A{record.consents + 1}"))
            return [*begin, planned(called(call)), asked, result(call, outcome=Outcome.WAITING)]
        case Story.GIVE_UP:
            unknown = ToolUnknownBody(operation, call, "book", "no answer")
            return [*begin, planned(called(call)), sent(operation, call=call), unknown]


class Commands(RuleBasedStateMachine):
    """Asks two stores the same, and compares what they answer or raise."""

    kind: str

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = quick_folder()
        self.clock = Clock()
        self.open = AsyncExitStack()
        self.oracle = self.loop.run_until_complete(self._open("memory"))
        self.store = self.loop.run_until_complete(self._open(self.kind))
        self.inputs = self.uploads = 0
        #: the newest right to each session, in the oracle and in the store, and where its next row goes
        self.rights: dict[str, tuple[Token, Token]] = {}
        self.stale: dict[str, tuple[Token, Token]] = {}
        self.ask(lambda store: store.create_session("s1", owner=ALICE, title=""))
        self.ask(lambda store: store.create_session("s2", owner=BOB, title=""))
        for session in SESSIONS:
            self.own(session)

    async def _open(self, kind: str) -> Inspected:
        return await self.open.enter_async_context(OPENERS[kind](Path(self.folder.name), self.clock, 5, 4))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            self.loop.run_until_complete(self.open.aclose())
            self.loop.close()
            self.folder.cleanup()

    def ask(
        self,
        first: Callable[[Inspected], Coroutine[Any, Any, T]],
        second: Callable[[Inspected], Coroutine[Any, Any, T]] | None = None,
    ) -> tuple[T, T] | None:
        """Return both answers, which are alike; None if both raise the same."""

        async def answered(store: Inspected, call: Callable[[Inspected], Coroutine[Any, Any, T]]) -> Any:
            try:
                return await call(store)
            except SaysoError as error:
                return error

        ours, theirs = (
            self.loop.run_until_complete(answered(self.oracle, first)),
            self.loop.run_until_complete(answered(self.store, second or first)),
        )
        if isinstance(ours, SaysoError) or isinstance(theirs, SaysoError):
            assert type(ours) is type(theirs)
            return None
        assert comparable(ours) == comparable(theirs)
        return ours, theirs

    def ask_owner(
        self, session: str, stale: bool, call: Callable[[Inspected, Token], Coroutine[Any, Any, T]]
    ) -> tuple[T, T] | None:
        """Ask with each store's own token, the newest or the one before."""
        rights = (self.stale if stale else self.rights).get(session)
        if rights is None:
            return None
        return self.ask(lambda store: call(store, rights[0]), lambda store: call(store, rights[1]))

    # nodes

    @rule(session=sessions, node=st.sampled_from(NODES + LEASED), at_most=st.integers(0, 2))
    def own(self, session: str, node: str = "n1", at_most: int = 2) -> None:
        """Give a session work, and claim what is ready."""
        self.inputs += 1
        self.put(hook(f"evt_{self.inputs}", session=session, content=f"event {self.inputs}"))
        claimed = self.ask(lambda store: store.claim(node, at_most=at_most))
        assert claimed is not None
        for ours, theirs in zip(*claimed, strict=True):
            if ours.token.session in self.rights:
                self.stale[ours.token.session] = self.rights[ours.token.session]
            self.rights[ours.token.session] = (ours.token, theirs.token)

    @rule(session=sessions, way=st.sampled_from(["release", "surrender", "die"]), looked_to=st.integers(0, 6))
    def let_go(self, session: str, way: str, looked_to: int) -> None:
        match way:
            case "release":
                self.ask_owner(session, False, lambda store, token: store.release(token, looked_to=looked_to))
            case "surrender":
                self.ask_owner(session, False, lambda store, token: store.surrender(token))
            case _:
                self.ask(lambda store: store.register("n2"))

    @rule(node=st.sampled_from(LEASED), ms=st.integers(0, 9_000))
    def beat(self, node: str, ms: int) -> None:
        """And let about as much time pass as a lease is long."""
        self.ask(lambda store: store.beat(node, f"http://{node}"))
        self.clock.later(ms)

    @rule(node=st.sampled_from(NODES + LEASED), running=st.none() | st.sets(sessions))
    def hand_back(self, node: str, running: set[str] | None) -> None:
        """What its node forgot, or what the dead left."""
        if running is None:
            self.ask(lambda store: store.sweep())
        else:
            self.ask(lambda store: store.reclaim(node, running))

    # rows

    @rule(
        session=sessions,
        several=st.lists(bodies, min_size=1, max_size=4),
        ahead=st.sampled_from([0, 0, 0, 0, 1, -1]),
        came=st.sets(contents),
    )
    def write(self, session: str, several: list[Body], ahead: int, came: set[str]) -> None:
        record = self.loop.run_until_complete(self.oracle.session(session))
        assert record is not None
        after, beside = max(0, record.head + ahead), blobs(*(CONTENTS[name] for name in came))
        self.ask_owner(
            session, False, lambda store, token: store.write(token, rows(token, after, *several), blobs=beside)
        )

    @rule(session=sessions, story=st.sampled_from(Story))
    def write_a_story(self, session: str, story: Story) -> None:
        record = self.loop.run_until_complete(self.oracle.session(session))
        queued = self.loop.run_until_complete(self.oracle.inbox(session, after=0, limit=1))
        assert record is not None
        several = told(story, record, queued[0].n if queued else None)
        made = [
            rows(token, record.head, *several, turn=f"T{record.turns + 1}") for token in self.rights.get(session, ())
        ]
        if made:
            self.ask(
                lambda store: store.write(self.rights[session][0], made[0], blobs=blobs(*CONTENTS.values())),
                lambda store: store.write(self.rights[session][1], made[1], blobs=blobs(*CONTENTS.values())),
            )

    @rule(session=sessions, body=bodies, last=st.integers(1, 3))
    def write_late(self, session: str, body: Body, last: int) -> None:
        """By one who was replaced, and by one who lost the acknowledgement."""

        async def again(store: Inspected, token: Token) -> object:
            stored = [row for row in await store.last_rows(session, limit=last) if row.epoch == token.epoch]
            return await store.write(token, stored) if stored else None

        self.ask_owner(session, False, again)
        self.ask_owner(session, True, lambda store, token: store.write(token, rows(token, 0, body)))
        self.ask_owner(session, True, lambda store, token: store.release(token, looked_to=9))
        self.ask_owner(session, True, lambda store, token: store.surrender(token))

    @rule(session=sessions, anew=st.sampled_from([ALICE, BOB]))
    def delete(self, session: str, anew: Principal) -> None:
        """And open another in its place; whoever owned the first finds that it isn't his."""
        self.ask(lambda store: store.delete_session(session))
        self.ask(lambda store: store.delete_session(session))
        self.ask_owner(session, False, lambda store, token: store.write(token, rows(token, 0, ModelSaidBody(1, ()))))
        self.ask(lambda store: store.create_session(session, owner=anew, title=""))

    # the door

    @rule(entry=entries)
    def put(self, entry: Entry) -> None:
        self.ask(lambda store: store.put(entry))

    @rule(content=contents, by=people, session=sessions, keep_ms=st.sampled_from([MINUTE, DAY]))
    def stage_upload(self, content: str, by: Principal, session: str, keep_ms: int) -> None:
        self.uploads += 1
        name = f"u{self.uploads}"
        limits = {"keep_ms": keep_ms, "most": 3, "most_bytes": len(CONTENTS["much"]) + 4}
        self.ask(lambda store: staged(store, name, CONTENTS[content], by=by, session=session, **limits))

    @rule(content=contents, by=people, session=sessions, also=st.lists(uploads, max_size=1), times=st.integers(1, 2))
    def send_a_file(self, content: str, by: Principal, session: str, also: list[str], times: int) -> None:
        """Ahead of its message, which may name another upload too, and may come twice as two messages."""
        self.stage_upload(content, by, session, DAY)
        for time in range(times):
            key = f"with u{self.uploads} {time}"
            self.put(message("see here", key=key, by=by, session=session, uploads=[f"u{self.uploads}", *also]))

    @rule(upload=uploads, by=people, session=sessions)
    def discard_upload(self, upload: str, by: Principal, session: str) -> None:
        self.ask(lambda store: store.discard_upload(session, upload, uploader=by))

    @rule(session=sessions, name=st.sampled_from(["n1.1", "n2.1", "n3.2", "T1.1.1.f1"]), content=contents)
    def read_files(self, session: str, name: str, content: str) -> None:
        async def files(store: Inspected) -> list[object]:
            pieces = [await store.piece(digest_of(CONTENTS[content]), place) for place in range(3)]
            return [await store.attachment(session, name), pieces]

        self.ask(files)

    @rule(ms=st.sampled_from([1, MINUTE, 11 * MINUTE, DAY, -MINUTE]), session=st.none() | sessions)
    def time_passes(self, ms: int, session: str | None) -> None:
        self.clock.later(ms)
        self.ask(lambda store: store.fire())
        self.ask(lambda store: store.forget())
        self.ask(lambda store: store.note(DoorNote(DoorKind.REJECTED, "restaurant", f"{ms}", session=session)))

    # reads

    @rule(
        session=sessions,
        after=st.integers(0, 6),
        limit=st.integers(0, 3),
        position=st.builds(Position, st.integers(0, 6), st.integers(0, 12)),
        wanted=st.lists(refs, max_size=3),
    )
    def read(self, session: str, after: int, limit: int, position: Position, wanted: list[Ref]) -> None:
        async def pages(store: Inspected) -> list[object]:
            return [
                await store.rows(session, after=after, limit=limit),
                await store.rows(session, up_to=after),
                await store.last_rows(session, limit=limit, before=after),
                await store.inbox(session, after=after, limit=limit),
                await store.door(session=session, limit=limit),
                await store.keep(session, position),
                await store.refs("restaurant", wanted),
                await store.sessions(of=None, limit=limit, before=session),
                await store.sessions(of=BOB, limit=after),
                await store.participants(session),
                await store.inbox_entry(session, after),
                await store.ready(at_most=limit),
                await store.participant(session, BOB),
            ]

        self.ask(pages)

    @rule(
        session=sessions,
        states=st.none() | st.lists(st.sampled_from(ConsentState), unique=True),
        of=st.none() | st.lists(st.sampled_from(OperationState), unique=True),
        due=st.booleans(),
    )
    def read_projections(
        self, session: str, states: list[ConsentState] | None, of: list[OperationState] | None, due: bool
    ) -> None:
        async def projections(store: Inspected) -> list[object]:
            return [
                await store.standings(session, states=states, due=due),
                await store.standing(session, "A1"),
                await store.operations(session, states=of),
                await store.operation(session, "O1"),
            ]

        self.ask(projections)

    @invariant()
    def everything_is_alike(self) -> None:
        if not hasattr(self, "store"):
            return

        async def everything(store: Inspected) -> list[object]:
            seen: list[object] = [await store.door(), store.now_ms(), await store.blobs()]
            for session in SESSIONS:
                seen += [await store.session(session), await store.inbox_record(session)]
                seen += [await store.side_tables(session)]
            return seen

        self.ask(everything)


@pytest.mark.parametrize("kind", [kind for kind in OPENERS if kind != "memory"])
def test_random_commands_have_the_answers_of_the_oracle(kind: str) -> None:
    """A failure prints the commands that lead to it. Each of them is a few round trips to a server, so that on
    PostgreSQL a fifth of the stories must do."""
    machine = type(f"Commands_{kind}", (Commands,), {"kind": kind})
    stories = settings().max_examples // (5 if kind == "postgres" else 1)
    run_state_machine_as_test(machine, settings=settings(stateful_step_count=40, max_examples=stories))
