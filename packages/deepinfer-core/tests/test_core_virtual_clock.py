"""A virtual clock moves by what the host does and waits for, and by nothing else."""

from __future__ import annotations

import pytest

from deepinfer_core.testing.virtual_clock import VirtualClock


def test_clock_moves_by_constants_and_waits():
    clock = VirtualClock()
    clock.advance(30)
    assert clock.wait_until(100) == 70
    assert clock.wait_until(50) == 0
    assert (clock.now_ns(), clock.waited_ns) == (100, 70)
    with pytest.raises(ValueError, match="-1"):
        clock.advance(-1)


def test_clock_adds_host_time_but_for_pauses():
    spent = [500]
    clock = VirtualClock(lambda: spent[0])
    assert clock.now_ns() == 0
    spent[0] += 40
    with clock.paused():
        spent[0] += 1000
        assert clock.now_ns() == 40
        with clock.paused():
            clock.advance(5)
            spent[0] += 1000
        assert clock.now_ns() == 45
    assert clock.now_ns() == 45
    spent[0] += 2
    assert clock.now_ns() == 47


def test_measured_clock_runs_with_the_work_of_the_thread():
    clock = VirtualClock.measured()
    first = clock.now_ns()
    sum(range(10_000))
    assert clock.now_ns() > first
    with clock.paused():
        held = clock.now_ns()
        sum(range(10_000))
        assert clock.now_ns() == held
