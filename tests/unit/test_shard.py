"""Slices of ranks: together they are the whole, and heads of q find their heads of k."""

import pytest

from interleaf.core import ModelSpec, Module
from interleaf.errors import ConfigError
from interleaf.parallel.shard import Shard


def spec(heads: int, kv_heads: int, intermediate: int = 96) -> ModelSpec:
    return ModelSpec("llama", 100, 64, 2, heads, kv_heads, 16, intermediate, 1e-5, 128)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world"), [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (9, 3, 3), (4, 2, 1)]
)
def test_the_slices_of_all_ranks_cover_every_module(heads: int, kv_heads: int, world: int) -> None:
    model = spec(heads, kv_heads)
    shards = [Shard(model, rank, world) for rank in range(world)]
    for module in Module:
        ins = {i for s in shards for i in range(s.in_span(module).first, s.in_span(module).stop)}
        outs = {o for s in shards for o in range(s.out_span(module).first, s.out_span(module).stop)}
        assert ins == set(range(model.in_features(module)))
        assert outs == set(range(model.out_features(module)))


@pytest.mark.parametrize(("heads", "kv_heads", "world"), [(8, 2, 2), (8, 2, 4), (8, 1, 4), (6, 3, 3)])
def test_every_query_head_lies_with_its_kv_head(heads: int, kv_heads: int, world: int) -> None:
    group = heads // kv_heads
    for rank in range(world):
        shard = Shard(spec(heads, kv_heads), rank, world)
        needed = {head // group for head in range(shard.heads.first, shard.heads.stop)}
        assert needed <= set(range(shard.kv_heads.first, shard.kv_heads.stop))


def test_the_fused_columns_follow_one_another() -> None:
    shard = Shard(spec(8, 2), 1, 2)
    assert [shard.out_first(m) for m in (Module.Q, Module.K, Module.V)] == [0, 64, 80]
    assert [shard.out_first(m) for m in (Module.GATE, Module.UP)] == [0, 48]
    assert shard.out_first(Module.O) == shard.out_first(Module.DOWN) == 0


@pytest.mark.parametrize(
    ("heads", "kv_heads", "intermediate", "world", "message"),
    [
        (6, 2, 96, 4, "num_heads=6 cannot be divided evenly among 4 ranks"),
        (8, 2, 90, 4, "intermediate_size=90 cannot be divided evenly among 4 ranks"),
        (12, 3, 96, 2, "num_kv_heads=3 and 2 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    heads: int, kv_heads: int, intermediate: int, world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard(spec(heads, kv_heads, intermediate), 0, world)
