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
    assert pace.left_s(200.0) == 0.0
    pace.begin(4, 200.0)
    assert pace.left_s(200.0) == 0.0, "three steps are known"
    pace.end(200.01)
    assert pace.left_s(200.01) == 0.0, "no step is under way"
    pace.begin(4, 201.0)
    assert pace.left_s(201.0) == pytest.approx(0.005)


def test_the_shortest_of_the_steps_that_were_not_larger_counts() -> None:
    pace = timed(*[(4, 0.02)] * 4, (4, 0.01), *[(300, 0.2)] * 6)
    pace.begin(4, 200.0)
    assert pace.left_s(200.0) == pytest.approx(0.005)


def test_large_steps_say_nothing_of_small_ones() -> None:
    pace = timed(*[(300, 0.2)] * 8)
    pace.begin(4, 200.0)
    assert pace.left_s(200.0) == 0.0
    pace.end(200.01)
    pace.begin(400, 200.02)
    assert pace.left_s(200.02) == pytest.approx(0.005), "and small ones of large ones, that they take no less"


def test_a_step_that_was_launched_behind_another_begins_at_its_end() -> None:
    pace = Pace()
    pace.begin(1, 0.0)
    for step in range(1, 6):
        pace.begin(1, step - 0.9)  # long before the one before it has ended
        pace.end(float(step))
    assert pace.left_s(5.0) == pytest.approx(0.5)


def test_what_was_long_ago_is_forgotten() -> None:
    pace = timed((4, 0.001), *[(4, 0.02)] * 40)
    pace.begin(4, 200.0)
    assert pace.left_s(200.0) == pytest.approx(0.01)


def test_what_has_passed_of_it_is_not_promised_again() -> None:
    pace = timed(*[(4, 0.01)] * 8)  # the last ends at 100.08
    pace.begin(4, 100.075)
    assert [pace.left_s(100.08 + late) for late in (0.0, 0.003, 0.006)] == pytest.approx([0.005, 0.002, 0.0])
    assert [pace.spare_s(100.08 + late) for late in (0.0, 0.003, 0.008)] == pytest.approx([0.0075, 0.0045, 0.0])


def test_a_launch_must_fit_in_before_the_step_ends() -> None:
    pace = timed(*[(4, 0.01)] * 8)
    pace.begin(4, 100.075)
    for seconds in (0.001, 0.001, 0.03, 0.001, 0.02):  # now and then one that takes long: most do not
        pace.launched(seconds)
    assert pace.spare_s(100.08) == pytest.approx(0.0075 - 2 * 0.001)
    for _ in range(6):
        pace.launched(0.004)
    assert pace.spare_s(100.08) == 0.0
    assert pace.left_s(100.08) == pytest.approx(0.005), "copies need no launch"


def test_nothing_is_to_spare_where_nothing_is_known() -> None:
    pace = timed(*[(4, 0.01)] * 3)
    assert pace.spare_s(100.0) == 0.0
    pace.begin(4, 100.03)
    assert pace.spare_s(100.03) == 0.0
