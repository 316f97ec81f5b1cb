"""Ids that come twice: those of a provider's calls, and those that a client gives what it sends."""

from __future__ import annotations

import pytest

from sayso.core.operation import EffectState
from sayso.core.rows import Ending, ModelCalledBody, Outcome, ToolResultBody, TurnEndBody
from sayso.core.view import public
from sayso.demo.local import OpenStore
from sayso.runtime.ports import ModelRequest, ProposedCall
from sayso.testing.scripted import Reply, calls, say
from tests.simulation.room import Room, room


def same_id_twice(request: ModelRequest) -> Reply:
    """Answer with two calls of one id the first time, and in words after that."""
    if any(message.calls for message in request.messages):
        return say("again?")
    return calls(ProposedCall("note", {"what": "a"}, "dup"), ProposedCall("pay", {"what": "b"}, "dup"))


def same_id_later(request: ModelRequest) -> Reply:
    """Use one id in two replies, one call each, then answer in words."""
    made = sum(len(message.calls) for message in request.messages)
    if made == 2:
        return say("done")
    return calls(ProposedCall("note", {"what": f"n{made}"}, "same"))


async def results(here: Room) -> list[ToolResultBody]:
    return await here.bodies(ToolResultBody)


@pytest.mark.rule("F72")
@pytest.mark.rule("H12", "X53")
async def test_two_calls_of_one_id_are_rejected_before_anything_runs_and_end_the_turn(open_store: OpenStore) -> None:
    """Each call has a ref of ours, so a row frame stands for each result: no repair is needed to tell them apart."""
    async with room(open_store, answers=same_id_twice) as here:
        await here.say("alice", "go")

        assert here.handed == []
        assert len(here.model.requests) == 1
        [called] = await here.bodies(ModelCalledBody)
        assert [(c.tool, c.arguments["what"], c.provider_id) for c in called.calls] == [
            ("note", "a", "dup"),
            ("pay", "b", "dup"),
        ]
        found = await results(here)
        assert [(r.call, r.tool, r.outcome, r.effect) for r in found] == [
            ("T1.1.1", "note", Outcome.REFUSED, EffectState.NONE),
            ("T1.1.2", "pay", Outcome.REFUSED, EffectState.NONE),
        ]
        assert all("rejected before execution" in r.parts[0].text for r in found)
        [end] = await here.bodies(TurnEndBody)
        assert end.ending is Ending.FAILED
        assert "‹dup›" in end.reason
        assert [await here.store.operation(here.session, r.call) for r in found] == [None, None]

        await here.say("alice", "still there?")
        assert [body.ending for body in await here.bodies(TurnEndBody)] == [Ending.FAILED, Ending.DONE]


@pytest.mark.rule("H13", "X53")
async def test_an_id_that_comes_again_in_a_later_reply_carries_nothing_over(open_store: OpenStore) -> None:
    async with room(open_store, answers=same_id_later) as here:
        await here.say("alice", "go")

        assert [what for _, what in here.handed] == ["n0", "n1"]
        assert [(r.call, r.outcome, r.effect) for r in await results(here)] == [
            ("T1.1.1", Outcome.OK, EffectState.COMMITTED),
            ("T1.2.1", Outcome.OK, EffectState.COMMITTED),
        ]
        assert len({call.key for call, _ in here.handed}) == 2


@pytest.mark.rule("H19")
async def test_a_clients_own_id_may_come_again_and_an_idempotency_key_may_not(open_store: OpenStore) -> None:
    async with room(open_store) as here:
        first = await here.post("alice", "hello", client_send_ids=("c1",))
        second = await here.post("alice", "hello", client_send_ids=("c1",), idempotency_key="k1")
        again = await here.post("alice", "hello", client_send_ids=("c1",), idempotency_key="k1")
        await here.rest()

        assert first != second == again
        shown = [public(row, here.session) for row in await here.rows() if row.kind == "input"]
        assert [each["body"]["client_send_ids"] for each in shown] == [["c1"], ["c1"]]
        assert len({each["position"] for each in shown}) == 2
