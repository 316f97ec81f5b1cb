"""The JSON calls: each one asks `Commands`, and puts the answer into its public shape."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Header, Path, Query, Response
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Message, Receive

from sayso.core.inputs import Answer, InFlight, Keep, SettingsChange
from sayso.core.session import Others, Position, SessionRole
from sayso.runtime.commands import Commands
from sayso.runtime.effects import Effects
from sayso.runtime.files import Files
from sayso.runtime.identity import Identity
from sayso.runtime.people import Asked, People
from sayso.server import wire
from sayso.server.auth import By, ByOperator, authenticate
from sayso.server.body import read_json
from sayso.storage.store import Store

#: body of a JSON call
BODY_BYTES_MAX = 1024 * 1024
ROWS_MAX = 1_000

IdempotencyKey = Annotated[
    wire.Name | None,
    Header(alias="Idempotency-Key", description="Recognises a repeat: the same key and content are stored once."),
]
Limit = Annotated[int, Query(ge=1, le=ROWS_MAX)]
Seq = Annotated[int, Query(ge=0, lt=10**18)]
InboxPlace = Annotated[int, Path(ge=1, lt=10**18, description="Its place in the session's inbox.")]


class Api:
    """The endpoints. Their texts are what OpenAPI says of them."""

    def __init__(self, commands: Commands, store: Store, files: Files) -> None:
        self._commands, self._people, self._store = commands, People(commands, store), store
        self._files, self._effects = files, Effects(commands, store)

    async def open_session(self, by: By, wanted: wire.OpenSession | None = None) -> wire.SessionView:
        """Open a session. It belongs to the caller."""
        record = await self._commands.open_session(by, title="" if wanted is None else wanted.title)
        return wire.session_view(record)

    async def list_sessions(
        self, by: By, limit: Limit = 50, before: Annotated[wire.Name | None, Query()] = None
    ) -> wire.SessionList:
        """List the caller's sessions, newest first; an operator's list has everybody's."""
        found = await self._commands.sessions(by, limit=limit, before=before)
        return wire.SessionList(sessions=[wire.session_view(record) for record in found])

    async def get_session(self, by: By, session: str) -> wire.SessionView:
        """Return one session, and how many inputs wait in it."""
        waiting = await self._commands.waiting(by, session)
        return wire.session_view(await self._commands.session(by, session), waiting=waiting)

    async def post_input(
        self, by: By, session: str, wanted: wire.PostInput, idempotency_key: IdempotencyKey = None
    ) -> wire.InputStored:
        """Post a message. It is stored when this returns; what it starts is seen in the history and the stream."""
        put = await self._commands.post(
            by,
            session,
            wanted.text,
            idempotency_key=idempotency_key,
            as_of=None if wanted.as_of is None else Position.parse(wanted.as_of),
            client_send_ids=tuple(wanted.client_send_ids),
            attachments=tuple(wanted.attachments),
            in_flight=None if wanted.in_flight is None else InFlight(wanted.in_flight),
        )
        return wire.input_stored(put)

    async def delete_upload(self, by: By, session: str, upload: str) -> None:
        """Drop an upload of the caller's that no message has taken."""
        await self._files.discard(by, session, upload)

    async def change_session(
        self,
        by: By,
        session: str,
        wanted: wire.ChangeSession,
        response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> wire.Settled:
        """Change a session's title, or how it treats others. 200 with the row that says so, or 202: it will."""
        change = SettingsChange(wanted.title, None if wanted.others is None else Others(wanted.others))
        asked = await self._people.change(by, session, change, idempotency_key=idempotency_key)
        return self._settled(response, session, asked)

    async def close_session(
        self, by: By, session: str, response: Response, idempotency_key: IdempotencyKey = None
    ) -> wire.Settled:
        """End a session; its history stays. 200 with its last row, or 202: it will be settled."""
        put, row = await self._commands.close_session(by, session, idempotency_key=idempotency_key)
        return self._settled(response, session, (put.n, row))

    async def stop_turn(
        self,
        by: By,
        session: str,
        response: Response,
        wanted: wire.StopTurn | None = None,
        idempotency_key: IdempotencyKey = None,
    ) -> wire.Settled:
        """Stop the running turn, or withdraw the question of one. 200 with the row that says so, or 202: it will be
        settled. What is out has a few seconds to answer; the turn's end is a row of its own."""
        turn = wanted.turn if wanted is not None else None
        put, row = await self._commands.stop(by, session, turn=turn, idempotency_key=idempotency_key)
        return self._settled(response, session, (put.n, row))

    async def delete_session(self, by: By, session: str) -> None:
        """Delete a session and everything of it, at once."""
        await self._commands.delete_session(by, session)

    async def list_effects(
        self, by: By, session: str, limit: Limit = 100, everything: Annotated[bool, Query(alias="all")] = False
    ) -> wire.EffectList:
        """List what the session's operations left in the world, newest first: what stands, what may stand, and what
        is under way; with `all`, what is gone and what left nothing too."""
        return wire.effect_list(await self._effects.page(by, session, limit=limit, everything=everything))

    async def get_queue(self, by: By, session: str) -> wire.QueueView:
        """Return what waits for its turn: the caller's own messages, and how many there are of all."""
        return wire.queue_view(await self._people.queue(by, session))

    async def retract_input(
        self, by: By, session: str, n: InboxPlace, response: Response, idempotency_key: IdempotencyKey = None
    ) -> wire.Settled:
        """Take back a message of one's own that waits. 200 with the row that says so, or 202: it will be settled."""
        asked = await self._people.retract(by, session, n, idempotency_key=idempotency_key)
        return self._settled(response, session, asked)

    async def list_participants(self, by: By, session: str) -> wire.ParticipantList:
        """List who takes part in the session: its owner, then the others."""
        return wire.participant_list(await self._people.participants(by, session))

    async def put_participant(
        self,
        by: By,
        session: str,
        person: str,
        wanted: wire.Invite,
        response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> wire.Settled:
        """Let somebody take part, or in another role. 200 with the row that says so, or 202: it will be settled."""
        whom, role = wire.person(person), SessionRole(wanted.role)
        asked = await self._people.invite(by, session, whom, role, idempotency_key=idempotency_key)
        return self._settled(response, session, asked)

    async def delete_participant(
        self, by: By, session: str, person: str, response: Response, idempotency_key: IdempotencyKey = None
    ) -> wire.Settled:
        """Let somebody take part no more, or leave. 200 with the row that says so, or 202: it will be settled."""
        whom = wire.person(person)
        asked = await self._people.remove(by, session, whom, idempotency_key=idempotency_key)
        return self._settled(response, session, asked)

    @staticmethod
    def _settled(response: Response, session: str, asked: Asked) -> wire.Settled:
        if asked[1] is None:
            response.status_code = wire.TAKEN
        return wire.settled(session, *asked)

    async def get_history(
        self,
        by: By,
        session: str,
        limit: Annotated[int | None, Query(ge=1, le=ROWS_MAX)] = None,
        before: Annotated[int | None, Query(ge=0, lt=10**18)] = None,
    ) -> Response:
        """Return the newest rows and the token to follow them from, or those before a row's number.

        Never less than was accepted: where the store can't be read it is 503, and a client keeps what it shows.
        """
        return wire.history_page(await self._commands.history(by, session, limit=limit, before=before))

    async def list_consents(
        self,
        by: By,
        session: str,
        open_only: Annotated[bool, Query(alias="open", description="Only those that still wait.")] = False,
    ) -> wire.QuestionList:
        """List the session's questions, in the order they were asked."""
        found = await self._commands.standings(by, session, open_only=open_only)
        return wire.QuestionList(consents=[wire.question_view(standing) for standing in found])

    async def get_consent(self, by: By, session: str, consent: str) -> wire.QuestionView:
        """Return one question: its steps, its digest, and what became of it."""
        return wire.question_view(await self._commands.standing(by, session, consent))

    async def answer_consent(
        self,
        by: By,
        session: str,
        consent: str,
        wanted: wire.AnswerQuestion,
        response: Response,
        idempotency_key: IdempotencyKey = None,
    ) -> wire.AnswerTaken:
        """Answer a question. 200 with the row that settled it, or 202: it is stored and will be settled."""
        answer = Answer(
            consent,
            wanted.digest,
            wanted.verdict == "yes",
            wanted.reason,
            None if wanted.steps is None else tuple(wanted.steps),
        )
        put, settled = await self._commands.answer(by, session, answer, idempotency_key=idempotency_key)
        if settled is None:
            response.status_code = wire.TAKEN
        return wire.AnswerTaken(input=put.n, settled=None if settled is None else wire.row_view(settled, session))

    async def get_journal(self, by: ByOperator, session: str, limit: Limit = 500, after: Seq = 0) -> wire.JournalPage:
        """Return a session's rows as stored. For operators."""
        await self._commands.session(by, session)
        rows = await self._store.rows(session, after=after, limit=limit)
        return wire.JournalPage(rows=[wire.journal_row(row) for row in rows])

    async def get_status(self, by: By, session: str) -> wire.StatusView:
        """Say how far the store follows a session: counts and instants, nothing of what was said."""
        return wire.status_view(await self._commands.status(by, session))

    async def get_conflict(self, by: ByOperator, session: str) -> wire.ConflictView:
        """Return both versions of what is in conflict: what was accepted and shown, and what is stored.

        For operators.
        """
        return wire.conflict_view(await self._commands.dispute(by, session))

    async def settle_conflict(self, by: ByOperator, session: str, wanted: wire.SettleConflict) -> wire.InputStored:
        """Choose a version. The choice becomes a row, and the session goes on. For operators."""
        return wire.input_stored(await self._commands.settle_dispute(by, session, Keep(wanted.keep)))

    async def get_door(
        self, by: ByOperator, limit: Limit = 200, session: Annotated[wire.Name | None, Query()] = None
    ) -> wire.NoteList:
        """Return what the door refused, dropped or could not place, oldest first. For operators."""
        found = await self._store.door(session=session, limit=limit)
        return wire.NoteList(notes=[wire.note_view(row) for row in found])

    async def health(self) -> wire.Health:
        """Say that the process answers."""
        return wire.Health()

    async def ready(self) -> wire.Health:
        """Say that the store can be read and written, or answer 503."""
        await self._store.healthy()
        return wire.Health()


Handle = Callable[[Request], Coroutine[Any, Any, Response]]


class Call(APIRoute):
    """A JSON call; OpenAPI, and what is generated from it, names it as its function is named."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, operation_id=endpoint.__name__, **options)


def guarded(identity: Identity) -> type[Call]:
    """Return the kind of call that knows its caller before it reads anything else.

    The framework would read and parse a body first, and without a limit.
    """

    class Guarded(Call):
        def get_route_handler(self) -> Handle:
            handle = super().get_route_handler()

            async def guard(request: Request) -> Response:
                request.state.caller = await authenticate(identity, request.headers)
                for what, text in request.path_params.items():
                    wire.named(what, text)
                if self.body_field is not None:
                    body = await read_json(request.scope, request.receive, bytes_max=BODY_BYTES_MAX)
                    request = Request(request.scope, _again(body, request.receive))
                return await handle(request)

            return guard

    return Guarded


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that hands out a body that was read already, then what comes after it."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again
