"""How long a step will take at least, from steps that were not larger."""

from __future__ import annotations

import pytest

from interleaf.engine.cuda.pace import Pace


def timed(*steps: tuple[int, float]) -> Pace:
    """After steps of (rows, seconds), each launched while the one before ran."""
    pace, now_s = Pace(), 100.0
    for rows, seconds in steps:
        pace.begin(rows, now_s)
        now_s += seconds
        pace.end(now_s)
    return pace


def test_nothing_is_promised_of_no_step_or_of_few() -> None:
    pace = timed(*[(4, 0.01)] * 3)
    assert pace.left_s == 0.0
    pace.begin(4, 200.0)
    assert pace.left_s == 0.0, "three steps are known"
    pace.end(200.01)
    assert pace.left_s == 0.0, "no step is under way"
    pace.begin(4, 201.0)
    assert pace.left_s == pytest.approx(0.005)


def test_the_shortest_of_the_steps_that_were_not_larger_counts() -> None:
    pace = timed(*[(4, 0.02)] * 4, (4, 0.01), *[(300, 0.2)] * 6)
    pace.begin(4, 200.0)
    assert pace.left_s == pytest.approx(0.005)


def test_large_steps_say_nothing_of_small_ones() -> None:
    pace = timed(*[(300, 0.2)] * 8)
    pace.begin(4, 200.0)
    assert pace.left_s == 0.0
    pace.end(200.01)
    pace.begin(400, 200.02)
    assert pace.left_s == pytest.approx(0.005), "and small ones of large ones, that they take no less"


def test_a_step_that_was_launched_behind_another_begins_at_its_end() -> None:
    pace = Pace()
    pace.begin(1, 0.0)
    for step in range(1, 6):
        pace.begin(1, step - 0.9)  # long before the one before it has ended
        pace.end(float(step))
    assert pace.left_s == pytest.approx(0.5)


def test_what_was_long_ago_is_forgotten() -> None:
    pace = timed((4, 0.001), *[(4, 0.02)] * 40)
    pace.begin(4, 200.0)
    assert pace.left_s == pytest.approx(0.01)
