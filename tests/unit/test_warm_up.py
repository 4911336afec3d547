"""The made-up steps of a GPU's warm-up: each is a plan that a scheduler could have made, and every size comes twice."""

from collections import Counter

import pytest

from interleaf.engine.cuda.graphs import decode_capacities
from interleaf.engine.cuda.warm import WarmUp
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
GEOMETRY = PageGeometry(4, SPEC.num_layers, SPEC.num_kv_heads, SPEC.head_dim, 2)


class Runner:
    """Executes nothing, but holds plans to what StepPlan says, and notes their sizes."""

    def __init__(self, num_pages: int, seats: int, max_rows: int, mixed_rows: int, longest: int) -> None:
        self.num_pages, self.seats = num_pages, seats
        self.max_rows, self.mixed_graph_rows, self.longest = max_rows, mixed_rows, longest
        self.capacities = decode_capacities(seats) if mixed_rows else ()
        self.known: set[str] = set()
        self.seated: dict[int, tuple[str | None, int, int]] = {}  # adapter, tokens, pages
        self.steps = 0
        self.is_warm = False
        self.sizes: Counter[tuple[str, int, bool]] = Counter()

    def warm_sampler(self) -> None:
        pass

    def warm_lora(self) -> None:
        assert self.known or self.num_pages < 64

    def know_adapters(self, adapters) -> None:
        for uid, (layout, pages) in adapters.items():
            assert uid not in self.known
            assert len(pages) == layout.pages <= self.num_pages
            self.known.add(uid)

    def warmed_up(self) -> None:
        assert not self.is_warm
        assert not self.seated
        self.is_warm = True

    def forget_adapters(self, uids) -> None:
        self.known.difference_update(uids)

    def launch(self, plan):
        assert plan.step == self.steps
        self.steps += 1
        for seat in plan.vacate:
            del self.seated[seat]
        for start in plan.start:
            assert start.seat not in self.seated
            assert start.seat < self.seats
            assert start.adapter is None or start.adapter in self.known
            assert all(page < self.num_pages for page in start.pages)
            self.seated[start.seat] = start.adapter, 0, len(start.pages)
        assert list(plan.decode) == sorted(set(plan.decode))
        for seat, count in [(seat, 1) for seat in plan.decode] + [(c.seat, c.count) for c in plan.chunks]:
            adapter, tokens, pages = self.seated[seat]
            assert count > 0
            assert tokens + count <= self.longest
            assert GEOMETRY.pages_for_tokens(tokens + count) <= pages
            self.seated[seat] = adapter, tokens + count, pages
        assert plan.num_tokens <= self.max_rows
        adapters = {self.seated[seat][0] for seat in plan.sampled_seats} - {None}
        if plan.num_tokens:
            rows = -(-plan.num_tokens // 64) * 64 if plan.chunks else plan.num_tokens
            self.sizes["mixed" if plan.chunks else "decode", rows, bool(adapters)] += 1
        return self

    def result(self) -> None:
        pass


@pytest.mark.parametrize("longest", [4, 40, 4096])
@pytest.mark.parametrize(
    ("seats", "max_rows", "mixed_rows"), [(4, 16, 4), (48, 256, 256), (512, 8192, 1024), (512, 512, 512), (64, 512, 0)]
)
def test_every_step_is_a_plan_and_every_size_is_met_twice(
    seats: int, max_rows: int, mixed_rows: int, longest: int
) -> None:
    runner = Runner(1100, seats, max_rows, mixed_rows, longest)
    told = []
    WarmUp(
        runner,  # type: ignore[arg-type]
        Shard(SPEC),
        GEOMETRY,
        num_pages=runner.num_pages,
        num_seats=seats,
        max_rows=max_rows,
        max_model_len=longest,
    ).run(lambda *done: told.append(done))
    assert told == [(i, len(told)) for i in range(1, len(told) + 1)]
    assert not runner.known
    assert runner.is_warm
    for with_adapters in (False, True):
        for capacity in runner.capacities:
            assert runner.sizes["decode", capacity, with_adapters] >= 2
        for rows in range(64, mixed_rows + 1, 64):
            prompts = -(-(rows - 32 * with_adapters) // (longest - 1))
            if prompts + 32 * with_adapters <= min(seats, 60):  # more prompts of equal length may fill a smaller size
                assert runner.sizes["mixed", rows, with_adapters] >= 2


def test_sequences_too_short_for_any_of_its_steps_are_left_alone() -> None:
    runner = Runner(8, 4, 16, 4, 3)
    WarmUp(
        runner,  # type: ignore[arg-type]
        Shard(SPEC),
        GEOMETRY,
        num_pages=8,
        num_seats=4,
        max_rows=16,
        max_model_len=3,
    ).run()
    assert runner.steps == 0
    assert runner.is_warm
