"""What `/openapi.json` says beyond the JSON calls: how refusals look, the hooks, and the stream."""

from __future__ import annotations

from typing import Any

from sayso.server.wire import PROBLEM_TYPE, Problem, UploadStored

Json = dict[str, Any]

_REFUSED: Json = {
    "description": "Refused; the problem says why.",
    "content": {PROBLEM_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
}

_HOOK: Json = {
    "post": {
        "operationId": "receive_hook",
        "summary": "Receive Hook",
        "description": "Take an inbound webhook. The answer has no body and speaks of receipt alone: "
        "what a hook says, and whether a session knows it, doesn't change it.",
        "parameters": [{"name": "source", "in": "path", "required": True, "schema": {"type": "string"}}],
        "requestBody": {"required": True, "content": {"*/*": {"schema": {"type": "string", "format": "binary"}}}},
        "responses": {
            "202": {"description": "Stored, or known already."},
            "400": {"description": "The framing of the proof can't be read."},
            "401": {"description": "Nobody vouches for it."},
            "404": {"description": "No such source."},
            "408": {"description": "The body didn't arrive in time."},
            "413": {"description": "The body is too large."},
            "415": {"description": "The body is encoded."},
            "429": {"description": "Too many inputs wait; see Retry-After."},
            "503": {"description": "It may not be stored; send it again, see Retry-After."},
        },
    }
}

_STREAM: Json = {
    "get": {
        "operationId": "stream_session",
        "summary": "Stream Session",
        "description": "Follow a session: `resume` says which rows of the past still stand, then come the missing "
        "rows, `caught_up`, and rows as they are accepted, with `delta` for a reply that is being written "
        "and `queue` when how many inputs wait has changed. An event "
        "that is a row has its position as its id.",
        "security": [{"token": []}],
        "parameters": [
            {"name": "session", "in": "path", "required": True, "schema": {"type": "string"}},
            {"name": "after", "in": "query", "schema": {"type": "string"}, "example": "3.17"},
            {"name": "Last-Event-ID", "in": "header", "schema": {"type": "string"}, "description": "Wins over after."},
        ],
        "responses": {
            "200": {"description": "Events.", "content": {"text/event-stream": {"schema": {"type": "string"}}}},
            "default": _REFUSED,
        },
    }
}


_BYTES: Json = {"*/*": {"schema": {"type": "string", "format": "binary"}}}
_SESSION: Json = {"name": "session", "in": "path", "required": True, "schema": {"type": "string"}}

_UPLOADS: Json = {
    "post": {
        "operationId": "upload_file",
        "summary": "Upload File",
        "description": "Send a file ahead of the message that will name it. The body is the file, and Content-Type "
        "says what it is. It waits under an id that nobody else is told, and is dropped after a while.",
        "security": [{"token": []}],
        "parameters": [
            _SESSION,
            {
                "name": "filename",
                "in": "query",
                "schema": {"type": "string"},
                "description": "What it is called; left out, Content-Disposition may say it.",
            },
            {"name": "Content-Disposition", "in": "header", "schema": {"type": "string"}},
        ],
        "requestBody": {"required": True, "content": _BYTES},
        "responses": {
            "201": {
                "description": "It waits.",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/UploadStored"}}},
            },
            "default": _REFUSED,
        },
    }
}

_ATTACHMENT: Json = {
    "get": {
        "operationId": "get_attachment",
        "summary": "Get Attachment",
        "description": "Return a file that a row of the session shows; of an input that waits, to its sender alone.",
        "security": [{"token": []}],
        "parameters": [
            _SESSION,
            {"name": "attachment", "in": "path", "required": True, "schema": {"type": "string"}, "example": "n7.1"},
            {"name": "If-None-Match", "in": "header", "schema": {"type": "string"}},
        ],
        "responses": {
            "200": {"description": "The file, in its own type.", "content": _BYTES},
            "304": {"description": "It is as the client has it: a file never changes."},
            "default": _REFUSED,
        },
    }
}


def completed(schema: Json) -> Json:
    """Return the framework's description with what it can't know: our problems, and the routes that aren't its."""
    paths = {path: _refusing(item) for path, item in schema["paths"].items()}
    paths |= {
        "/v1/hooks/{source}": _HOOK,
        "/v1/sessions/{session}/stream": _STREAM,
        "/v1/sessions/{session}/uploads": _UPLOADS,
        "/v1/sessions/{session}/attachments/{attachment}": _ATTACHMENT,
    }
    problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    stored = UploadStored.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
    ours = {**problem.pop("$defs"), "Problem": problem, "UploadStored": stored}
    theirs = {"HTTPValidationError", "ValidationError"}
    components = schema["components"]
    schemas = {name: shape for name, shape in components["schemas"].items() if name not in theirs} | ours
    return {**schema, "paths": dict(sorted(paths.items())), "components": {**components, "schemas": schemas}}


def _refusing(item: Json) -> Json:
    return {
        method: {
            **operation,
            "responses": {
                **{status: answer for status, answer in operation["responses"].items() if status != "422"},
                "default": _REFUSED,
            },
        }
        for method, operation in item.items()
    }
