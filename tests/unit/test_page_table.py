"""Page tables: what starts, grows and leaves, and where a position lies."""

import numpy as np
import pytest

from interleaf.memory.page_table import PageTable


def test_a_position_lies_in_its_page_of_the_table_at_its_place_in_that_page():
    table = PageTable(num_seats=3, page_tokens=4)
    table.start(0, (9, 2, 5))
    table.start(2, (7,))
    seats, positions = np.array([0, 0, 0, 2]), np.array([0, 6, 11, 3])
    assert table.slots(seats, positions, rows_per_page=100).tolist() == [900, 202, 503, 703]


def test_growing_continues_a_table_and_leaves_the_other_seats_alone():
    table = PageTable(num_seats=2, page_tokens=1)
    table.start(0, (3,))
    table.start(1, (8, 9))
    for page in range(10, 60):  # far beyond the room of a fresh table
        table.grow(0, (page,))
    assert table.num_pages.tolist() == [51, 2]
    assert table.pages[0, :51].tolist() == [3, *range(10, 60)]
    assert table.pages[1, :2].tolist() == [8, 9]


def test_lengths_move_on_by_seat():
    table = PageTable(num_seats=3, page_tokens=2)
    for seat in range(3):
        table.start(seat, (seat,))
    table.advance(np.array([0, 2]), 1)
    table.advance(np.array([1, 2]), np.array([2, 1]))
    assert table.lengths.tolist() == [1, 2, 2]


def test_a_vacated_seat_starts_again_from_nothing():
    table = PageTable(num_seats=1, page_tokens=2)
    table.start(0, (4, 5, 6))
    table.advance(np.array([0]), 5)
    table.vacate(0)
    table.start(0, (1,))
    assert table.lengths.tolist() == [0]
    assert table.num_pages.tolist() == [1]
    assert table.slots(np.array([0]), np.array([1]), rows_per_page=10).tolist() == [11]


def test_a_position_beyond_the_pages_is_not_looked_up_in_what_an_earlier_occupant_left():
    table = PageTable(num_seats=1, page_tokens=2)
    table.start(0, (4, 5, 6))
    table.vacate(0)
    table.start(0, (1,))
    with pytest.raises(AssertionError, match="beyond its sequence's pages"):
        table.slots(np.array([0]), np.array([2]), rows_per_page=10)


def test_a_seat_is_taken_once():
    table = PageTable(num_seats=1, page_tokens=2)
    table.start(0, (4,))
    with pytest.raises(AssertionError, match="seat 0 is taken"):
        table.start(0, (5,))
