"""An image holds exactly A and scaled B, where the layout says; the ranks' images together are the whole adapter."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interleaf.adapters.image import build, draft, layout_of, require_tile
from interleaf.adapters.parsed import LoraPair, ParsedAdapter
from interleaf.adapters.sources import open_adapter
from interleaf.core import AdapterUid, LoraGroup, ModelSpec, Module, StreamOrder
from interleaf.errors import AdapterRejected, ConfigError
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.support.peft_folders import MODEL, NUM_LAYERS, WIDTHS

SPEC = ModelSpec(**MODEL)
MIXED = {
    **{(0, m): r for m, r in zip(Module, (1, 3, 6, 8, 5, 2, 7), strict=True)},
    **{(2, Module.V): 3, (2, Module.DOWN): 1, (2, Module.K): 16},
}
"""Odd ranks, all modules in layer 0, none in layer 1, some in layer 2."""

SPLIT_BY_OUTPUT = (Module.Q, Module.K, Module.V, Module.GATE, Module.UP)


def geometry_of(shard: Shard, page_tokens: int = 4, itemsize: int = 4) -> PageGeometry:
    spec = shard.spec
    return PageGeometry(page_tokens, spec.num_layers, shard.kv_heads.count, spec.head_dim, itemsize)


def adapter(ranks, seed=0, scale=1.7, dtype=torch.float32) -> ParsedAdapter:
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for (layer, module), rank in ranks.items():
        inputs, outputs = WIDTHS[module]
        a = torch.randn(rank, inputs, generator=generator).to(dtype)
        b = torch.randn(outputs, rank, generator=generator).to(dtype)
        pairs[layer, module] = LoraPair(a, b, scale)
    return ParsedAdapter(AdapterUid("test"), pairs, "test")


def stream_of(image, layer):
    """A layer's stream, gathered page by page."""
    return torch.cat([page[layer] for page in image.data])


def read_back(image, layer):
    """Walk a layer's stream in the documented order (all A of a group, then all B, group after group).

    Returns: {module: (A, B transposed)}, and how many elements were read.
    """
    index = image.layout.layer_layout[layer]
    if index is None:
        return {}, 0
    stream, at, found = stream_of(image, layer), 0, {}
    for group in LoraGroup:
        spans = image.layout.layouts[index].group(group)
        halves = {}
        for width in ("in_features", "out_features"):
            for span in spans:
                elems = span.rank * getattr(span, width)
                halves[span.module, width] = stream[at : at + elems].view(span.rank, -1)
                at += elems
        for span in spans:
            found[span.module] = (halves[span.module, "in_features"], halves[span.module, "out_features"])
    return found, at


@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_a_and_scaled_b_come_back_from_the_image(page_tokens):
    shard, parsed = Shard(SPEC), adapter(MIXED)
    image = build(parsed, shard, geometry_of(shard, page_tokens), torch.float32)
    for layer in range(NUM_LAYERS):
        found, _ = read_back(image, layer)
        assert set(found) == {m for l, m in MIXED if l == layer}
        for module, (a, b_t) in found.items():
            pair = parsed.pairs[layer, module]
            assert torch.equal(a, pair.a)
            assert torch.equal(b_t, (pair.b * 1.7).T)


def test_spans_say_where_the_matrices_lie():
    shard, parsed = Shard(SPEC), adapter(MIXED)
    image = build(parsed, shard, geometry_of(shard), torch.float32)
    for layer in (0, 2):
        stream = stream_of(image, layer)
        for span in image.layout.layouts[image.layout.layer_layout[layer]].spans:
            pair = parsed.pairs[layer, span.module]
            assert torch.equal(stream[span.a_first :][: span.a_elems], pair.a.flatten())
            assert torch.equal(stream[span.b_first :][: span.b_elems], (pair.b * 1.7).T.flatten())


def test_a_groups_columns_stand_side_by_side_in_its_fused_output():
    spans = layout_of(MIXED, Shard(SPEC), geometry_of(Shard(SPEC))).layouts[0].spans
    assert {s.module: s.out_first for s in spans} == {
        **{Module.Q: 0, Module.K: 64, Module.V: 96, Module.O: 0},
        **{Module.GATE: 0, Module.UP: 128, Module.DOWN: 0},
    }
    # A module's column does not depend on which others are targeted.
    assert layout_of({(0, Module.V): 2}, Shard(SPEC), geometry_of(Shard(SPEC))).layouts[0].spans[0].out_first == 96


def test_pages_are_those_of_the_longest_stream_and_the_rest_is_zero():
    shard = Shard(SPEC)
    geometry = geometry_of(shard)
    image = build(adapter(MIXED), shard, geometry, torch.float32)
    elems = [sum(r * sum(WIDTHS[m]) for (l, m), r in MIXED.items() if l == layer) for layer in range(NUM_LAYERS)]
    assert image.layout.pages == -(-max(elems) // (2 * 4 * 2 * 16)) == image.data.shape[0]
    assert image.data.shape == (image.layout.pages, NUM_LAYERS, geometry.lane_elems)
    assert image.layout.used_bytes == 4 * sum(elems)
    for layer in range(NUM_LAYERS):
        assert read_back(image, layer)[1] == elems[layer]
        assert not stream_of(image, layer)[elems[layer] :].any()


def test_a_short_stream_after_a_long_one_leaves_nothing_behind():
    shard = Shard(SPEC)
    image = build(adapter({(0, Module.GATE): 8, (1, Module.K): 1}), shard, geometry_of(shard), torch.float32)
    assert not stream_of(image, 1)[96:].any()


def test_layers_with_equal_ranks_share_a_layout():
    ranks = {(l, m): 4 for l in range(NUM_LAYERS) for m in (Module.Q, Module.UP)}
    layout = layout_of(ranks, Shard(SPEC), geometry_of(Shard(SPEC)))
    assert (len(layout.layouts), layout.layer_layout) == (1, (0, 0, 0))
    layout = layout_of(MIXED, Shard(SPEC), geometry_of(Shard(SPEC)))
    assert (len(layout.layouts), layout.layer_layout) == (2, (0, None, 1))


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(4, 4, 2), (4, 2, 2), (4, 1, 2), (4, 2, 4)])
def test_the_ranks_images_together_are_the_adapter(heads, kv_heads, world):
    spec = ModelSpec(**MODEL | {"num_heads": heads, "num_kv_heads": kv_heads})
    ranks = {at: r for at, r in MIXED.items() if kv_heads == 2 or at[1] not in (Module.K, Module.V)}
    kv_ranks = {at: r for at, r in MIXED.items() if at[1] in (Module.K, Module.V)}
    parsed = adapter(ranks)
    generator = torch.Generator().manual_seed(5)
    for (layer, module), rank in kv_ranks.items():
        pair = LoraPair(
            torch.randn(rank, 64, generator=generator), torch.randn(kv_heads * 16, rank, generator=generator), 1.7
        )
        parsed.pairs[layer, module] = pair
    shards = [Shard(spec, rank, world) for rank in range(world)]
    images = [build(parsed, shard, geometry_of(shard), torch.float32) for shard in shards]
    assert len({image.layout.pages for image in images}) == 1
    for (layer, module), pair in parsed.pairs.items():
        parts = [read_back(image, layer)[0][module] for image in images]
        b_t = (pair.b * 1.7).T
        if module in SPLIT_BY_OUTPUT:
            assert all(torch.equal(a, pair.a) for a, _ in parts)
            # KV heads that are fewer than the ranks are held by several: count each once.
            once = world // min(world, kv_heads) if module in (Module.K, Module.V) else 1
            assert torch.equal(torch.cat([b for _, b in parts[::once]], dim=1), b_t)
        else:
            assert torch.equal(torch.cat([a for a, _ in parts], dim=1), pair.a)
            assert all(torch.equal(b, b_t) for _, b in parts)


def test_the_sum_of_the_ranks_outputs_is_the_whole_product():
    parsed, world = adapter(MIXED), 2
    x = {m: torch.randn(5, WIDTHS[m][0], generator=torch.Generator().manual_seed(9)) for m in Module}
    shards = [Shard(SPEC, rank, world) for rank in range(world)]
    images = [build(parsed, shard, geometry_of(shard), torch.float32) for shard in shards]
    for (layer, module), pair in parsed.pairs.items():
        whole = x[module] @ (1.7 * pair.b @ pair.a).T
        total = torch.zeros_like(whole)
        for shard, image in zip(shards, images, strict=True):
            a, b_t = read_back(image, layer)[0][module]
            part = x[module][:, shard.in_span(module).as_slice()] @ a.T @ b_t
            total[:, shard.out_span(module).as_slice()] += part
        torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_scale_is_folded_in_float32_before_rounding(stored, dtype):
    shard, parsed = Shard(SPEC), adapter({(1, Module.O): 3}, scale=1 / 3, dtype=stored)
    image = build(parsed, shard, geometry_of(shard, itemsize=dtype.itemsize), dtype)
    a, b_t = read_back(image, 1)[0][Module.O]
    pair = parsed.pairs[1, Module.O]
    assert torch.equal(a, pair.a.to(dtype))
    assert torch.equal(b_t, (pair.b.to(torch.float32) * torch.tensor(1 / 3)).T.to(dtype))


@pytest.mark.parametrize("half", ["A", "B"])
def test_a_value_beyond_float16_is_refused_with_its_place(half):
    shard, parsed = Shard(SPEC), adapter({(1, Module.O): 3}, scale=4.0)
    pair = parsed.pairs[1, Module.O]
    (pair.a if half == "A" else pair.b)[2, 1] = -1e5 if half == "A" else 2e4
    with pytest.raises(AdapterRejected, match=f"lora_{half}.*65504.*layer 1 o_proj"):
        build(parsed, shard, geometry_of(shard, itemsize=2), torch.float16)
    build(parsed, shard, geometry_of(shard, itemsize=2), torch.bfloat16)


def test_a_dummy_fills_its_image():
    shard = Shard(SPEC)
    image = build(open_adapter("dummy:r=5,targets=all,seed=1", SPEC), shard, geometry_of(shard), torch.float32)
    for layer in range(NUM_LAYERS):
        elems = read_back(image, layer)[1]
        assert (stream_of(image, layer)[:elems] != 0).float().mean() > 0.999


def test_a_tile_divides_every_row_and_lane():
    for world, page_tokens in itertools.product((1, 2), (1, 4, 16)):
        shard = Shard(SPEC, 0, world)
        tile = require_tile(shard, geometry_of(shard, page_tokens))
        assert tile in (16, 32)
        assert geometry_of(shard, page_tokens).lane_elems % tile == 0
        assert all(width % tile == 0 for width in shard.widths())


def test_widths_without_a_common_tile_are_refused_with_the_arithmetic():
    shard = Shard(ModelSpec(**MODEL | {"hidden_size": 72}))
    with pytest.raises(ConfigError, match=r"at least 16 elements and would have 8.*lane \(256.*72"):
        require_tile(shard, geometry_of(shard))


@pytest.mark.parametrize("page_tokens", [1, 4])
def test_in_tile_order_every_element_stands_where_the_definition_puts_it(page_tokens):
    shard = Shard(SPEC)
    ranks = MIXED | {(0, Module.Q): 9, (0, Module.K): 12}  # a stack of three blocks, which modules do not respect
    geometry = geometry_of(shard, page_tokens)
    rows = build(adapter(ranks), shard, geometry, torch.float32)
    tiles = build(adapter(ranks), shard, geometry, torch.float32, StreamOrder.TILES)
    assert tiles.data.shape == rows.data.shape
    for layer in (0, 2):
        layout = tiles.layout.layouts[tiles.layout.layer_layout[layer]]
        tile = layout.tile
        assert (layout.order, tile) == (StreamOrder.TILES, 32)
        plain, stream = stream_of(rows, layer), stream_of(tiles, layer)
        for group in LoraGroup:
            spans = layout.group(group)
            matrices = [(s.b_first, s.rank, s.out_features, s.rank) for s in spans]
            if spans:
                matrices.append((spans[0].a_first, sum(s.rank for s in spans), spans[0].in_features, 16))
            for first, height, width, block in matrices:
                for i in range(height):
                    top = i // block * block
                    low = min(block, height - top)
                    for at in range(0, width, tile):
                        place = first + top * width + at * low + (i - top) * tile
                        here = stream[place : place + tile]
                        assert torch.equal(here, plain[first + i * width + at :][:tile])
        assert not stream[layout.elems :].any()


FLOATS = [torch.float32, torch.float16, torch.bfloat16]
GROUPS = (
    ("q_proj", "k_proj", "v_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj"),
    ("down_proj",),
)


def laid_out(parsed, shard, page_tokens, dtype, order):
    """The image by definition, an element's place at a time: the ADRs 0002, 0008 and 0010 in a loop."""
    lane = 2 * page_tokens * shard.kv_heads.count * shard.spec.head_dim
    tile = 128
    while lane % tile or any(width % tile for width in shard.widths()):
        tile //= 2
    streams = []
    for layer in range(shard.spec.num_layers):
        stream = []

        def put(rows, stacked, stream=stream):
            height, width = rows.shape
            block, cut = height, width
            if order is StreamOrder.TILES:
                block, cut = min(16, height) if stacked else height, tile
            for top in range(0, height, block):
                for at in range(0, width, cut):
                    for row in rows[top : top + block]:
                        stream.extend(row[at : at + cut].to(dtype))

        for group in GROUPS:
            present = [m for m in map(Module, group) if (layer, m) in parsed.pairs]
            pairs = [(m, parsed.pairs[layer, m]) for m in present]
            ours = [pair.a[:, shard.in_span(m).first : shard.in_span(m).stop] for m, pair in pairs]
            if order is StreamOrder.TILES and ours:
                put(torch.cat([a.float() for a in ours]), True)
            for a in ours if order is StreamOrder.ROWS else ():
                put(a, False)
            for m, pair in pairs:
                b = pair.b[shard.out_span(m).first : shard.out_span(m).stop].float()
                put((b * torch.tensor(pair.scale, dtype=torch.float32)).T, False)
        streams.append(stream)
    pages = -(-max(map(len, streams)) // lane)
    image = torch.zeros(len(streams), pages * lane, dtype=dtype)
    for layer, stream in enumerate(streams):
        image[layer, : len(stream)] = torch.tensor(stream, dtype=dtype) if stream else 0
    return image.view(len(streams), pages, lane).transpose(0, 1)


def same_bits(left, right):
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.dictionaries(
        st.tuples(st.integers(0, NUM_LAYERS - 1), st.sampled_from(Module)), st.integers(1, 19), min_size=1, max_size=9
    ),
    stored=st.sampled_from(FLOATS),
    dtype=st.sampled_from(FLOATS),
    order=st.sampled_from(StreamOrder),
    world=st.sampled_from([1, 2]),
    page_tokens=st.sampled_from([1, 4, 16]),
    layers=st.integers(1, NUM_LAYERS),
    scale=st.sampled_from([1.0, 1 / 3, -1.7]),
)
def test_every_bit_of_an_image_is_where_the_definition_puts_it(
    ranks, stored, dtype, order, world, page_tokens, layers, scale
):
    parsed = adapter(ranks, scale=scale, dtype=stored)
    next(iter(parsed.pairs.values())).b[0, 0] = -0.0
    for rank in range(world):
        shard = Shard(SPEC, rank, world)
        geometry = geometry_of(shard, page_tokens, dtype.itemsize)
        expected = laid_out(parsed, shard, page_tokens, dtype, order)
        assert same_bits(build(parsed, shard, geometry, dtype, order).data, expected)
        made = draft(parsed, shard, geometry, dtype, order)
        assert made.num_bytes == expected.nbytes
        # All parts are made in the same memory, which must not show.
        parts = [part.clone() for part in made.parts(layers)]
        assert same_bits(torch.cat(parts, dim=1), expected)


@pytest.mark.parametrize("bounds", [None, (math.inf, math.inf), (math.nan, 3e4), (1e6, 1e6)])
def test_a_bound_that_does_not_tell_has_the_values_looked_at(bounds):
    shard, parsed = Shard(SPEC), adapter({(1, Module.O): 3})
    pair = parsed.pairs[1, Module.O]
    parsed.pairs[1, Module.O] = LoraPair(pair.a, pair.b, 4.0, bounds)
    image = build(parsed, shard, geometry_of(shard, itemsize=2), torch.float16)
    assert torch.equal(read_back(image, 1)[0][Module.O][0], pair.a.half())
    pair.b[2, 1] = 2e4
    with pytest.raises(AdapterRejected, match=r"lora_B times the scale.*layer 1 o_proj"):
        build(parsed, shard, geometry_of(shard, itemsize=2), torch.float16)


def test_a_rank_refuses_only_values_that_it_holds():
    parsed = adapter({(0, Module.UP): 3})
    parsed.pairs[0, Module.UP].b[-1, 0] = 1e5
    lower, upper = (Shard(SPEC, rank, 2) for rank in range(2))
    build(parsed, lower, geometry_of(lower, itemsize=2), torch.float16)
    with pytest.raises(AdapterRejected, match="lora_B"):
        build(parsed, upper, geometry_of(upper, itemsize=2), torch.float16)
