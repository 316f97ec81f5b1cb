"""API tokens: who a caller is. `sayso_<id>_<secret>` is shown once, and only its secret's SHA-256 is stored.

The secret is 32 random bytes, so nobody can try them all and no slow hash is needed. A token that is
unknown, wrong, expired, revoked or no token at all is refused in one and the same way.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from sayso.core.errors import Invalid, Unauthenticated
from sayso.core.origin import Principal, PrincipalKind
from sayso.core.text import scrub
from sayso.runtime.commands import Caller
from sayso.runtime.ports import Ids
from sayso.storage.store import Store, TokenRow

#: how a caller with a token was verified, as an origin records it
VERIFIED = "api token"
LABEL_CHARS_MAX = 200

_TOKEN = re.compile(r"sayso_([0-9a-f]{16})_([!-~]{16,256})")
#: what a secret is compared with where no token has the id: it takes the same time, and nothing hashes to it
_NOBODY = "0" * 64


class Identity:
    """Makes tokens, and tells whose they are."""

    def __init__(self, store: Store, ids: Ids) -> None:
        self._store, self._ids = store, ids

    async def mint(self, principal: Principal, *, label: str = "", ttl_ms: int | None = None) -> str:
        """Store a new token and return its text, which can't be had again. `ttl_ms=None`: it doesn't expire.

        Raises:
            Invalid: the principal is neither a user nor an operator, or the token would be expired at once.
        """
        if principal.kind not in (PrincipalKind.USER, PrincipalKind.OPERATOR):
            raise Invalid(f"a token is for a user or an operator, not for {principal}")
        if ttl_ms is not None and ttl_ms < 1:
            raise Invalid("a token must be good for some time")
        token_id, secret, now_ms = _hash(self._ids.secret())[:16], self._ids.secret(), self._store.now_ms()
        await self._store.add_token(
            TokenRow(
                id=token_id,
                secret_hash=_hash(secret),
                principal=principal,
                label=scrub(label)[:LABEL_CHARS_MAX],
                created_at_ms=now_ms,
                expires_at_ms=None if ttl_ms is None else now_ms + ttl_ms,
            )
        )
        return f"sayso_{token_id}_{secret}"

    async def authenticate(self, text: str) -> Caller:
        """Return whose token `text` is.

        Raises:
            Unauthenticated: it is nobody's now; why is not said.
        """
        match = _TOKEN.fullmatch(text)
        if match is None:
            raise _refusal()
        token = await self._store.token(match.group(1))
        expected = _NOBODY if token is None else token.secret_hash
        proven = hmac.compare_digest(_hash(match.group(2)), expected)
        if token is None or not proven or not self._stands(token):
            raise _refusal()
        return Caller(token.principal, VERIFIED)

    def _stands(self, token: TokenRow) -> bool:
        expired = token.expires_at_ms is not None and token.expires_at_ms <= self._store.now_ms()
        return token.revoked_at_ms is None and not expired


def _refusal() -> Unauthenticated:
    return Unauthenticated("a valid API token is needed")


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
