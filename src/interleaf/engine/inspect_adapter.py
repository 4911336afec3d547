"""What an adapter is, and what it takes on a model, without loading the model's weights."""

from __future__ import annotations

from interleaf.adapters.image import build
from interleaf.adapters.sources import open_adapter
from interleaf.config import EngineConfig
from interleaf.engine.build import page_geometry, resolve_dtype
from interleaf.model.spec import parse_spec
from interleaf.parallel.shard import Shard
from interleaf.weights.checkpoint import open_checkpoint


def inspect_adapter(
    source: str, model: str, *, dtype: str, page_tokens: int, load_format: str
) -> list[tuple[str, str]]:
    """Facts about an adapter, as (label, text) lines.

    Raises: AdapterRejected: with everything that is wrong with it; and what reading the model's configuration raises.
    """
    config = EngineConfig.from_mapping({"dtype": dtype, "page_tokens": page_tokens, "load_format": load_format})
    checkpoint = open_checkpoint(model, config.load_format)
    try:
        shard = Shard(parse_spec(checkpoint.config, model))
        pool_dtype = resolve_dtype(config, checkpoint)
        geometry = page_geometry(shard, config.page_tokens, pool_dtype)
    finally:
        checkpoint.close()
    parsed = open_adapter(source, shard.spec)
    layout = build(parsed, shard, geometry, pool_dtype).layout  # its values, too, must fit the pool
    summary = parsed.summary()
    pooled_bytes = layout.pages * geometry.page_bytes
    return [
        ("adapter", source),
        ("uid", summary.uid),
        ("ranks", ", ".join(map(str, summary.ranks))),
        ("modules", ", ".join(summary.targets)),
        ("layers", f"{summary.num_layers} of {shard.spec.num_layers}"),
        ("stored", f"{summary.stored_bytes:,} bytes of {', '.join(summary.dtypes)}"),
        ("pages", f"{layout.pages} of {geometry.page_bytes:,} bytes ({geometry.page_tokens} tokens of KV cache each)"),
        ("bytes", f"{pooled_bytes:,} in the pool, {layout.used_bytes:,} of them its weights"),
        ("as much as", f"the KV cache of {layout.pages * geometry.page_tokens:,} tokens"),
    ]
