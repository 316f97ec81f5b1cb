"""How a source proves who it is: one module for each kind of proof, all behind the `Scheme` port."""

from __future__ import annotations

from sayso.sources.shared_key import (
    SecretMalformed,
    SecretMissing,
    SecretUnsupported,
    SecretUnusable,
    Unready,
    bearer,
    sign,
    standard_webhook,
)

__all__ = [
    "standard_webhook",
    "bearer",
    "Unready",
    "sign",
    "SecretUnusable",
    "SecretMissing",
    "SecretMalformed",
    "SecretUnsupported",
]
