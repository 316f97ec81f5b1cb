"""From a bearer token to the caller. It is looked at before anything else of a request, its body above all."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.requests import Request

from sayso.core.errors import Forbidden, Unauthenticated
from sayso.runtime.commands import Caller
from sayso.runtime.identity import Identity


async def authenticate(identity: Identity, headers: Headers) -> Caller:
    """Return who asks, from `Authorization: Bearer`.

    Raises:
        Unauthenticated: the header is missing, came twice, or holds no token that stands.
    """
    sent = headers.getlist("authorization")
    scheme, _, token = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
    if scheme.lower() != "bearer":
        raise Unauthenticated("a valid API token is needed")
    return await identity.authenticate(token.strip(" "))


#: what OpenAPI says of it; `authenticate` has read the header by the time a route runs
_SCHEME = HTTPBearer(auto_error=False, scheme_name="token", description="An API token, as `sayso token` makes it.")


async def caller(request: Request, _: Annotated[HTTPAuthorizationCredentials | None, Depends(_SCHEME)]) -> Caller:
    """Return who asks, as the route found out before it read the body."""
    found: Caller = request.state.caller
    return found


async def operator(by: Annotated[Caller, Depends(caller)]) -> Caller:
    """Return who asks, if that is an operator.

    Raises:
        Forbidden: it is not.
    """
    if not by.is_operator:
        raise Forbidden("this is for operators")
    return by


#: parameters of a route
By = Annotated[Caller, Depends(caller)]
ByOperator = Annotated[Caller, Depends(operator)]
