"""The made-up steps of a GPU's warm-up: each is a plan that a scheduler could have made, and every size comes twice."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest

from interleaf.core import PooledLayout, StepPlan
from interleaf.engine.cuda.graphs import decode_capacities
from interleaf.engine.cuda.warm import WarmUp
from interleaf.kernels.launch_shapes import CUT_RANKS
from interleaf.memory.geometry import PageGeometry
from interleaf.model.spec import parse_spec
from interleaf.parallel.shard import Shard

SPEC = parse_spec(
    {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "tiny",
)


class Runner:
    """Executes nothing, but holds plans to what StepPlan says, and notes what they were."""

    def __init__(
        self, geometry: PageGeometry, num_pages: int, seats: int, max_rows: int, mixed_rows: int, longest: int
    ) -> None:
        self.geometry, self.num_pages, self.seats = geometry, num_pages, seats
        self.max_rows, self.mixed_graph_rows, self.longest = max_rows, mixed_rows, longest
        self.capacities = decode_capacities(seats) if mixed_rows else ()
        self.known: dict[str, int] = {}  # rank of each adapter
        self.seated: dict[int, tuple[str | None, int, int]] = {}  # adapter, tokens, pages
        self.steps = 0
        self.is_warm = False
        self.warmed: list[object] = []
        self.sizes: Counter[tuple[str, int, int, int, bool]] = Counter()

    def warm_sampler(self) -> None:
        self.warmed.append("sampler")

    def warm_lora(self) -> None:
        self.warmed.append(tuple(self.known.values()))

    def know_adapters(self, adapters: Mapping[str, tuple[PooledLayout, Sequence[int]]]) -> None:
        for uid, (layout, pages) in adapters.items():
            assert uid not in self.known
            assert len(set(pages)) == layout.pages <= self.num_pages
            assert max(pages) < self.num_pages
            self.known[uid] = layout.layouts[0].spans[0].rank

    def warmed_up(self) -> None:
        assert not self.is_warm
        assert not self.seated
        self.is_warm = True

    def forget_adapters(self, uids: Iterable[str]) -> None:
        for uid in uids:
            del self.known[uid]

    def launch(self, plan: StepPlan) -> Any:
        assert plan.step == self.steps
        self.steps += 1
        for seat in plan.vacate:
            del self.seated[seat]
        filtered = False
        for start in plan.start:
            assert start.seat not in self.seated
            assert start.seat < self.seats
            assert start.adapter is None or start.adapter in self.known
            assert all(page < self.num_pages for page in start.pages)
            self.seated[start.seat] = start.adapter, 0, len(start.pages)
            self.filtered = filtered = start.params.temperature > 0
        assert len(set(self.known.values())) <= 1, "which kernels run hangs on all ranks that are known"
        assert list(plan.decode) == sorted(set(plan.decode))
        for seat, count in [(seat, 1) for seat in plan.decode] + [(c.seat, c.count) for c in plan.chunks]:
            adapter, tokens, pages = self.seated[seat]
            assert count > 0
            assert adapter is None or adapter in self.known
            assert tokens + count <= self.longest
            assert self.geometry.pages_for_tokens(tokens + count) <= pages
            self.seated[seat] = adapter, tokens + count, pages
        assert plan.num_tokens <= self.max_rows
        assert all(chunk.samples for chunk in plan.chunks)
        adapters = len({self.seated[seat][0] for seat in plan.sampled_seats} - {None})
        if plan.num_tokens:
            kind, filtered = ("mixed", filtered) if plan.chunks else ("decode", self.filtered)
            self.sizes[kind, plan.num_tokens, len(plan.decode), adapters, filtered] += 1
        return self

    def result(self) -> None:
        pass


def warmed_up(runner: Runner) -> Runner:
    told: list[tuple[int, int]] = []
    WarmUp(
        runner,  # type: ignore[arg-type]
        Shard(SPEC),
        runner.geometry,
        num_pages=runner.num_pages,
        num_seats=runner.seats,
        max_rows=runner.max_rows,
        max_model_len=runner.longest,
    ).run(lambda done, of: told.append((done, of)))
    assert told == [(i, len(told)) for i in range(1, len(told) + 1)]
    assert not runner.known
    assert runner.is_warm
    return runner


@pytest.mark.parametrize("longest", [4, 40, 4096])
@pytest.mark.parametrize(
    ("seats", "max_rows", "mixed_rows"),
    [(4, 16, 4), (20, 200, 200), (48, 256, 256), (512, 8192, 1024), (512, 512, 512), (64, 512, 0)],
)
@pytest.mark.parametrize("page_tokens", [1, 4])
def test_every_step_is_a_plan_and_every_size_is_met_twice(
    seats: int, max_rows: int, mixed_rows: int, longest: int, page_tokens: int
) -> None:
    geometry = PageGeometry(page_tokens, SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 2)
    runner = warmed_up(Runner(geometry, 4400 // page_tokens, seats, max_rows, mixed_rows, longest))
    assert runner.warmed == ["sampler", CUT_RANKS]
    for capacity in runner.capacities:
        for filtered in (False, True):
            assert runner.sizes["decode", capacity, capacity, 0, filtered] >= 2
        assert runner.sizes["decode", capacity, capacity, capacity, False] >= 2, "each row with an adapter of its own"
    mixed = Counter[tuple[int, int]]()
    for (kind, rows, decoding, adapters, _), times in runner.sizes.items():
        if kind == "mixed":
            assert adapters in (0, decoding + 1) or not decoding or longest < mixed_rows
            mixed[-(-rows // 64) * 64, decoding if adapters else -1] += times
    for rows in {*range(64, mixed_rows, 64), mixed_rows} - {0}:
        size = -(-rows // 64) * 64
        if longest > rows:
            assert mixed[size, -1] >= 2
            assert mixed[size, min(32, seats // 2, rows - 1)] >= 2


def test_sizes_above_those_of_prompts_are_not_made_up() -> None:
    geometry = PageGeometry(4, SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 2)
    runner = warmed_up(Runner(geometry, 9000, 2048, 2048, 2048, 4096))
    assert max(rows for kind, rows, decoding, *_ in runner.sizes if kind == "mixed" and decoding) == 1024


def test_a_pool_too_small_for_any_adapter_is_warmed_without() -> None:
    geometry = PageGeometry(1, SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 2)
    runner = warmed_up(Runner(geometry, 3, 8, 64, 64, 40))
    assert runner.warmed == ["sampler", ()]
    assert not any(adapters for _, _, _, adapters, _ in runner.sizes)
    assert runner.sizes["decode", 8, 8, 0, False] >= 2


def test_sequences_too_short_for_any_of_its_steps_are_left_alone() -> None:
    geometry = PageGeometry(4, SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 2)
    assert warmed_up(Runner(geometry, 8, 4, 16, 4, 3)).steps == 0
