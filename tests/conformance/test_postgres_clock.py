"""The server's time as a node knows it: close to it, not ahead of it, and never backwards (K10)."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sayso.storage.postgres_clock import DatabaseClock


@dataclass
class Machine:
    """A node's monotonic clock, and a server that is ahead of it by so much."""

    here_ms: float = 5_000.0
    ahead_ms: float = 1_800_000_000_000.0

    def look(self, clock: DatabaseClock, *, out_ms: float, back_ms: float) -> int:
        """Ask the server for the time; the question and the answer take their time."""
        asked_ms = clock.here_ms()
        self.here_ms += out_ms
        server_ms = self.here_ms + self.ahead_ms
        self.here_ms += back_ms
        return clock.read(server_ms, asked_ms=asked_ms)

    @property
    def server_ms(self) -> float:
        return self.here_ms + self.ahead_ms


legs = st.floats(0, 500)


@pytest.mark.rule("K10")
@given(looks=st.lists(st.tuples(legs, legs, st.floats(0, 10_000), st.sampled_from([0, 0, 0, -70_000, 50_000]))))
def test_time_never_steps_back_whatever_the_server_says(looks: list[tuple[float, float, float, float]]) -> None:
    machine = Machine()
    clock = DatabaseClock(lambda: machine.here_ms)
    machine.look(clock, out_ms=1, back_ms=1)
    known, stamped = clock(), 0
    for out_ms, back_ms, passes_ms, jump_ms in looks:
        machine.ahead_ms += jump_ms
        machine.here_ms += passes_ms
        assert clock() >= known
        again = machine.look(clock, out_ms=out_ms, back_ms=back_ms)
        assert again >= stamped
        stamped = again
        assert clock() >= max(known, stamped)
        known = clock()


@pytest.mark.rule("K10")
@given(looks=st.lists(st.tuples(legs, legs, st.floats(0, 10_000)), min_size=1))
def test_time_is_never_ahead_of_the_servers_and_behind_by_the_quickest_answer_at_most(
    looks: list[tuple[float, float, float]],
) -> None:
    machine = Machine()
    clock = DatabaseClock(lambda: machine.here_ms)
    for out_ms, back_ms, passes_ms in looks:
        machine.look(clock, out_ms=out_ms, back_ms=back_ms)
        machine.here_ms += passes_ms
    quickest_ms = min(back_ms for _, back_ms, _ in looks)

    assert machine.server_ms - quickest_ms - 1.1 <= clock() <= machine.server_ms + 0.1


@pytest.mark.rule("K10")
def test_a_server_whose_clock_was_set_is_followed_forwards_at_once_and_backwards_by_waiting() -> None:
    machine = Machine()
    clock = DatabaseClock(lambda: machine.here_ms)
    machine.look(clock, out_ms=1, back_ms=1)
    machine.ahead_ms += 60_000
    machine.look(clock, out_ms=1, back_ms=1)
    assert machine.server_ms - clock() < 3

    last = clock()
    machine.ahead_ms -= 60_000
    assert machine.look(clock, out_ms=1, back_ms=1) <= last
    machine.here_ms += 30_000
    assert clock() == last
    machine.here_ms += 30_001
    assert last <= clock() <= machine.server_ms
