"""Conversions between tokens, pages, lanes, tiles and bytes, against numbers worked out by hand."""

import pytest

from interleaf.memory.geometry import PageGeometry

LLAMA3_8B = PageGeometry(page_tokens=16, num_layers=32, num_kv_heads=8, head_dim=128, itemsize_bytes=2)
SMOLLM2 = PageGeometry(page_tokens=16, num_layers=30, num_kv_heads=3, head_dim=64, itemsize_bytes=4)


def test_pages_and_bytes_of_two_known_models() -> None:
    assert LLAMA3_8B.lane_elems == 2 * 16 * 8 * 128
    assert LLAMA3_8B.page_bytes == 2 * 2**20
    assert LLAMA3_8B.token_bytes == 128 * 2**10
    assert SMOLLM2.page_bytes == 737_280


def test_one_rank_16_adapter_on_llama3_8b_costs_as_much_as_640_tokens() -> None:
    widths_in_and_out = 4096 + 4096 + 2 * (4096 + 1024) + (4096 + 4096) + 2 * (4096 + 14336) + (14336 + 4096)
    assert LLAMA3_8B.pages_for_stream(16 * widths_in_and_out) * LLAMA3_8B.page_tokens == 640


@pytest.mark.parametrize(("tokens", "pages"), [(1, 1), (16, 1), (17, 2), (8192, 512)])
def test_a_page_that_is_begun_is_counted(tokens: int, pages: int) -> None:
    assert SMOLLM2.pages_for_tokens(tokens) == pages


def test_only_whole_pages_fit_a_budget() -> None:
    assert SMOLLM2.pages_for_bytes(737_280 * 3 - 1) == 2


@pytest.mark.parametrize(
    ("geometry", "widths", "tile"),
    [
        (SMOLLM2, (576, 192, 1536), 64),
        (LLAMA3_8B, (4096, 1024, 14336), 128),
        (PageGeometry(16, 2, 2, 16, 4), (64, 32, 96), 32),
        (PageGeometry(1, 2, 1, 8, 4), (24, 8), 8),
    ],
)
def test_a_tile_divides_the_lane_and_every_width(geometry: PageGeometry, widths: tuple[int, ...], tile: int) -> None:
    assert geometry.tile(widths) == tile
    assert geometry.lane_elems % geometry.block_elems(tile) == 0
