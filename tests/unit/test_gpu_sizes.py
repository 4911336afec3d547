"""What a GPU's pool leaves room for, and how large it may be; no GPU is asked."""

from types import SimpleNamespace

import pytest
import torch

from interleaf.config import EngineConfig
from interleaf.engine.cuda.build import _require_countable, mixed_graph_rows, step_bytes
from interleaf.engine.cuda.pieces import PiecewiseForward
from interleaf.engine.device_sampler import DeviceSampler
from interleaf.errors import ConfigError
from interleaf.memory.geometry import PageGeometry
from interleaf.parallel.shard import Shard
from tests.support.pooled_model import spec_of
from tests.support.tiny_models import make_model


@pytest.fixture(scope="module")
def shard():
    return Shard(spec_of(make_model("llama3")))


def config(**settings):
    return EngineConfig(**({"device": "cuda", "memory": "1GiB", "max_num_seqs": 64, "max_model_len": 64} | settings))


def test_a_step_has_room_for_seats_that_all_are_penalised_and_ask_for_logprobs(shard):
    few, many = (step_bytes(config(max_num_seqs=seats), shard, torch.bfloat16) for seats in (1, 513))
    vocab = shard.spec.vocab_size
    sampling = DeviceSampler.most_bytes(513, vocab, 513) - DeviceSampler.most_bytes(1, vocab, 1)
    assert many - few >= sampling + 3 * 512 * vocab * 2


def test_tables_of_pages_are_counted(shard):
    large, small = (step_bytes(config(page_tokens=n), shard, torch.bfloat16) for n in (16, 1))
    assert small - large == 2 * 65 * (64 - 4) * 4


def test_a_row_of_the_largest_step_has_room_for_what_lives_at_once_in_a_layer(shard):
    """The stream, its norm, y and one more of their size; q, k and v twice; gate, up and their product."""
    spec = shard.spec
    one_more, as_before = (
        step_bytes(config(max_batch_tokens=n, max_graphs=0), shard, torch.bfloat16) for n in (8193, 8192)
    )
    qkv = (spec.num_heads + spec.num_kv_heads + spec.num_kv_heads) * spec.head_dim
    wide = [spec.hidden_size] * 4 + [qkv] * 2 + [spec.intermediate_size] * 3
    assert one_more - as_before == sum(wide) * torch.bfloat16.itemsize


@pytest.mark.parametrize(("tokens", "rows"), [(512, 512), (8192, 1024), (64, 64)])
def test_what_leads_from_piece_to_piece_is_counted_and_a_small_step_s_activations(shard, tokens, rows):
    with_graphs, without = (
        step_bytes(config(max_batch_tokens=tokens, max_graphs=n), shard, torch.bfloat16) for n in (256, 0)
    )
    device = SimpleNamespace(torch_device=torch.device("cpu"))
    model = SimpleNamespace(dtype=torch.bfloat16, shard=shard, spec=shard.spec)
    pieces = PiecewiseForward(device, model, torch.empty(0), rows)
    wide = (pieces._qkv, pieces._o, pieces._h, pieces._y)
    one_more, as_before = (
        step_bytes(config(max_batch_tokens=n, max_graphs=0), shard, torch.bfloat16) for n in (8193, 8192)
    )
    captured_logits = 2 * 64 * shard.spec.vocab_size * 2
    assert with_graphs - without == sum(x.nbytes for x in wide) + rows * (one_more - as_before) + captured_logits


def test_steps_that_replay_graphs_have_as_many_rows_as_there_are_seats():
    """Or steps of all seats would be more than the tables of adapters take."""
    assert mixed_graph_rows(config(max_num_seqs=2048, max_batch_tokens=8192)) == 2048
    assert mixed_graph_rows(config(max_num_seqs=64, max_batch_tokens=8192)) == 1024


class Pool:
    """As large as it is said to be."""

    def __init__(self, geometry, num_pages):
        self.geometry, self.num_pages = geometry, num_pages


def test_a_pool_of_more_tiles_than_kernels_can_number_is_refused(shard):
    geometry = PageGeometry(16, shard.spec.num_layers, shard.kv_heads.count, shard.spec.head_dim, 2)
    most = (2**31 - 1) // (geometry.page_elems // geometry.tile(shard.widths()))
    _require_countable(Pool(geometry, most), shard)
    with pytest.raises(ConfigError, match="too large for this model's tiles"):
        _require_countable(Pool(geometry, most + 1), shard)
