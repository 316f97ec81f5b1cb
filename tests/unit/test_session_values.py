"""Positions, principals, origins and labels: the small values that everything else compares."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.core.labels import OUTSIDER, RUNTIME, USER, Integrity, Label, join
from sayso.core.origin import Origin, Principal, PrincipalKind
from sayso.core.session import START, Position, SessionRecord, SessionState, Token
from sayso.core.text import is_hidden
from tests.unit.core_examples import AGENT, ALICE, OPS, RESTAURANT, TIMER

positions = st.builds(Position, st.integers(0, 10**18 - 1), st.integers(0, 10**18 - 1))
labels = st.builds(
    lambda integrity, private: Label(integrity, tuple(sorted(private))),
    st.sampled_from(Integrity),
    st.sets(st.text(max_size=3), max_size=3),
)
#: from most to least trusted, as authority.md states it
CHAIN = ("runtime", "user", "platform", "member", "outsider")


# --- positions ---------------------------------------------------------------


@given(positions)
def test_a_position_reads_back_as_it_was_written(position: Position) -> None:
    assert Position.parse(str(position)) == position


@pytest.mark.parametrize(
    "text",
    [
        *("", ".", "1", "1.", ".1", "1.2.3", "-1.2", "+1.2", "1.-2", "01.2", "1.02", " 1.2", "1.2 ", "1.2\n", "1,2"),
        *("1e3.2", "\u0663.\u0661", "0x1.2", "1." + "9" * 19, "null"),
    ],
    ids=ascii,
)
def test_what_is_no_position_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"a position is <epoch>\.<seq>"):
        Position.parse(text)


def test_positions_order_by_epoch_and_then_by_number() -> None:
    ordered = [START, Position(0, 2), Position(0, 10), Position(1, 1), Position(2, 0), Position(10, 0)]

    assert all(earlier < later for earlier, later in pairwise(ordered))
    assert str(START) == "0.0"


def test_a_record_and_a_token_name_places_by_their_epoch() -> None:
    record = SessionRecord(
        "s1", ALICE, "", 0, SessionState.OWNED, "n1", 3, "nonce", 17, 4, None, None, None, turns=2, consents=1, at_ms=0
    )

    assert str(record.position) == "3.17"
    assert Token("s1", 3, "nonce").commit_key(17) == "nonce.17"


# --- principals --------------------------------------------------------------


def _is_visible(text: str) -> bool:
    return not any(map(is_hidden, text))


@given(st.sampled_from(PrincipalKind), st.from_regex(r"[^\s:@][^\s:]{0,199}", fullmatch=True).filter(_is_visible))
def test_a_principal_reads_back_as_it_was_written(kind: PrincipalKind, name: str) -> None:
    principal = Principal(kind, name)

    assert Principal.parse(str(principal)) == principal


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\u202eb", "a\u200bb", "\U000e0041lice"])
def test_no_principal_has_an_id_that_hides_something(name: str) -> None:
    with pytest.raises(ValueError, match="visible characters"):
        Principal(PrincipalKind.USER, name)


def test_a_sources_peer_is_never_the_local_user_of_that_name() -> None:
    peer = Principal.parse("source:slack/42")
    user = Principal.parse("user:42")

    assert peer != user
    assert peer.kind is PrincipalKind.SOURCE
    assert str(peer) == "source:slack/42"
    assert Principal.parse("source:42") != user
    assert not Origin(Principal.parse("source:42"), "token").is_user


@pytest.mark.parametrize(
    "text",
    [
        *("", "alice", ":", "user:", ":alice", "User:alice", "admin:alice", "role:operator", "user:al ice"),
        *(
            "user: alice",
            " user:alice",
            "user:alice\n",
            "user:a:b",
            "user:source:42",
            "user:@here",
            "user:" + "a" * 201,
        ),
    ],
    ids=ascii,
)
def test_what_is_no_principal_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"principal|PrincipalKind"):
        Principal.parse(text)


def test_only_a_user_makes_a_users_origin() -> None:
    assert Origin(ALICE, "api token").is_user
    assert not any(Origin(who, "api token").is_user for who in (RESTAURANT, TIMER, AGENT, OPS))


# --- labels ------------------------------------------------------------------


def test_integrity_is_a_chain_and_a_join_takes_the_lower_end() -> None:
    for place, higher in enumerate(CHAIN):
        for lower in CHAIN[place:]:
            joined = Label(Integrity(higher)).join(Label(Integrity(lower)))
            assert joined == Label(Integrity(lower)), (higher, lower)


@given(labels, labels, labels)
def test_a_join_does_not_depend_on_order_or_repeats(a: Label, b: Label, c: Label) -> None:
    assert a.join(b) == b.join(a)
    assert a.join(b).join(c) == a.join(b.join(c))
    assert a.join(a) == a
    assert join((a, b, c)) == join((c, a, b, a))


@given(labels, labels)
def test_a_join_never_raises_integrity_and_forgets_no_private_source(a: Label, b: Label) -> None:
    joined = a.join(b)

    assert CHAIN.index(joined.integrity) == max(CHAIN.index(a.integrity), CHAIN.index(b.integrity))
    assert set(joined.private) == {*a.private, *b.private}


@given(st.lists(labels, max_size=5), labels)
def test_more_in_a_context_only_lowers_its_label(context: list[Label], more: Label) -> None:
    before, after = join(context), join([*context, more])

    assert CHAIN.index(after.integrity) >= CHAIN.index(before.integrity)
    assert set(after.private) >= set(before.private)


def test_a_join_of_nothing_is_the_runtimes() -> None:
    assert join(()) == RUNTIME
    assert join((RUNTIME, USER)) == USER
    assert join((USER, OUTSIDER, RUNTIME)) == OUTSIDER
