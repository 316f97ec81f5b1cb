"""The published and derived vectors of the schemes with a shared key: the verdict, the reason and the event id."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from sayso.runtime.ports import RawRequest, Verified
from sayso.sources import SecretMissing, SecretUnsupported, Unready, bearer, standard_webhook

FILE = Path(__file__).parents[1] / "vectors" / "webhooks.json"


@dataclass(frozen=True, slots=True)
class Vector:
    """One entry of the file."""

    id: str
    scheme: Unready
    secrets: tuple[str, ...]
    request: RawRequest
    now_ms: int
    #: "accept", or the reason of the refusal
    expected: str
    event_id: str | None
    id_signed: bool | None


def scheme_of(entry: Mapping[str, Any]) -> Unready:
    if entry["scheme"] == "standard-webhooks":
        return standard_webhook(*entry["secrets"], tolerance_s=entry["tolerance"])
    event_id = None
    if "id_header" in entry:
        event_id = f"header:{entry['id_header']}"
    if "id_json" in entry:
        event_id = "json:/" + "/".join(entry["id_json"])
    return bearer(*entry["secrets"], header=entry["secret_header"], event_id=event_id)


def vector_of(entry: Mapping[str, Any]) -> Vector:
    headers = tuple((name.encode(), value.encode()) for name, value in entry["headers"])
    return Vector(
        id=entry["id"],
        scheme=scheme_of(entry),
        secrets=tuple(entry["secrets"]),
        request=RawRequest("POST", "/v1/hooks/acme", headers, base64.b64decode(entry["body_b64"])),
        now_ms=entry["now"] * 1000,
        expected=entry["expect"].get("reason", entry["expect"]["verdict"]),
        event_id=entry["expect"].get("event_id"),
        id_signed=entry.get("id_signed"),
    )


def vectors(scheme: str) -> list[Vector]:
    return [vector_of(entry) for entry in json.loads(FILE.read_text("utf-8"))["vectors"] if entry["scheme"] == scheme]


def needs_ed25519(vector: Vector) -> bool:
    return any(secret.startswith("whpk_") for secret in vector.secrets)


def is_about_configuration(vector: Vector) -> bool:
    return vector.expected == "config_empty_secret"


STANDARD = vectors("standard-webhooks")
SHARED = vectors("shared-secret")
ALL = STANDARD + SHARED

AT_START = [vector for vector in ALL if is_about_configuration(vector)]
ED25519 = [vector for vector in ALL if needs_ed25519(vector)]
VERIFIED = [vector for vector in ALL if vector not in AT_START and vector not in ED25519]


def each(chosen: list[Vector]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", chosen, ids=[vector.id for vector in chosen])


def test_every_vector_of_these_schemes_is_in_one_of_the_groups() -> None:
    assert (len(STANDARD), len(SHARED)) == (53, 6)
    assert (len(VERIFIED), len(ED25519), len(AT_START)) == (51, 6, 2)


@pytest.mark.rule("A1", "A3")
@each(VERIFIED)
def test_verdict_and_reason_are_those_of_the_vector(vector: Vector) -> None:
    found = vector.scheme.ready({}).verify(vector.request, source="acme", now_ms=vector.now_ms)

    if vector.expected == "accept":
        assert isinstance(found, Verified), found
        assert found.event_id == vector.event_id
        assert found.key in {f"secret {place}" for place in range(1, len(vector.secrets) + 1)}
    else:
        assert not isinstance(found, Verified)
        assert found.reason == vector.expected
        assert found.status == (400 if vector.expected == "duplicate_header" else 401)


@each([vector for vector in ALL if vector.id_signed is not None])
def test_whether_the_id_is_signed_is_declared(vector: Vector) -> None:
    assert vector.scheme.ready({}).id_signed is vector.id_signed


@pytest.mark.rule("W4")
@each(AT_START)
def test_a_source_with_an_empty_secret_does_not_start(vector: Vector) -> None:
    with pytest.raises(SecretMissing, match=r"^secret 1 is empty$") as refused:
        vector.scheme.ready({})

    assert refused.value.reason == vector.expected


@each(ED25519)
def test_a_public_key_is_refused_at_start_and_never_keys_an_hmac(vector: Vector) -> None:
    with pytest.raises(SecretUnsupported, match=r"^secret 1 is an Ed25519 key, which sayso can't verify with yet"):
        vector.scheme.ready({})
