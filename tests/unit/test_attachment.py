"""Files as rows speak of them: what they are, and what their bytes are called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.attachment import OCTETS, digest_of, media_type_of


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("image/png", "image/png"),
        ("IMAGE/PNG", "image/png"),
        ("text/plain; charset=utf-8", "text/plain"),
        (" application/pdf ;x=y", "application/pdf"),
        ("image/svg+xml", "image/svg+xml"),
        ("application/vnd.oasis.opendocument.text", "application/vnd.oasis.opendocument.text"),
        ("", OCTETS),
        ("png", OCTETS),
        ("image/", OCTETS),
        ("image/png/x", OCTETS),
        ("image/*", OCTETS),
        ("*/*", OCTETS),
        ("text/html\r\nX: y", OCTETS),
        ("text/\u202ehtml", OCTETS),
        ("image/" + "x" * 200, OCTETS),
    ],
)
def test_a_media_type_is_a_type_or_it_is_octets(given: str, told: str) -> None:
    assert media_type_of(given) == told


@given(st.text())
def test_a_media_type_can_be_written_into_a_header(text: str) -> None:
    told = media_type_of(text)

    assert told.isascii()
    assert told.isprintable()
    assert told.count("/") == 1


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_equal_bytes_have_one_name_and_others_another(one: bytes, other: bytes) -> None:
    assert (digest_of(one) == digest_of(other)) == (one == other)
    assert digest_of(one).startswith("sha256:")
