"""The engine's benchmark: its arithmetic against numbers worked out by hand, and whole rows of a tiny model."""

import json
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import engine as bench
from bench.engine import parse_arguments
from bench.engine_adapters import HostArena
from bench.engine_cold import cold_start
from bench.engine_floor import ModelCosts, StepCost, step_costs, total_floor_s
from bench.engine_loading import loading
from bench.engine_log import EventLog, StepLog
from bench.engine_profile import StepProfile, group_of, layer_of, profile, read_steps, steps_of, summarise
from bench.engine_report import RECORDED, record
from bench.engine_rows import (
    MODELS,
    TRACES,
    Row,
    adapter_set,
    asked_for,
    model_path,
    parse_row,
    random_prompts,
    read_trace,
)
from bench.engine_run import BenchRequest, Recording, _steps, _throughput, drive, make_requests
from bench.engine_setup import BenchEngine, read_spec
from interleaf.core import (
    AdapterLoad,
    AdapterUid,
    Chunk,
    ModelSpec,
    Module,
    RequestFinished,
    SamplingParams,
    SeatStart,
    StepPlan,
    TokenEvent,
)
from interleaf.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
SETTINGS = {"load_format": "dummy", "device": "cpu", "memory": "4MiB", "max_num_seqs": 4, "seed": 0}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(CONFIG))
    return path


def write_trace(path: Path, requests: list[tuple[float, int | None, int, int]]) -> Path:
    names = ("arrival_s", "adapter", "prompt_tokens", "output_tokens")
    path.write_text("".join(json.dumps(dict(zip(names, r, strict=True))) + "\n" for r in requests))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    adapters = [0, 1, None, 2, 0, 5, 1, 2]
    return write_trace(tmp_path / "eight.jsonl", [(0.0, a, 5 + i, 1 + i) for i, a in enumerate(adapters)])


def run(model: Path, *arguments: object) -> int:
    fixed = ["--model-config", model, "--device", "cpu", "--memory", "4MiB", "--max-num-seqs", 4, "--warm-up", 3]
    return bench.main([str(a) for a in (*fixed, *arguments)])


# --- what a row asks for ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "requests", "distinct"),
    [
        ("saturated-llama3-8b-n0", 1000, 0),
        ("saturated-llama3-8b-n1", 1000, 1),
        ("saturated-llama3-8b-n50", 1000, 50),
        ("saturated-llama3-8b-n150", 1000, 134),
        ("saturated-llama3-8b-n2000", 1000, 421),
        ("saturated-llama3-8b-uniform-n600", 2400, 593),
        ("saturated-llama2-7b-n300", 1000, 215),
        ("saturated-llama2-7b-uniform-n2000", 3000, 1549),
        ("openloop-llama3-8b-n1000-rate20-zipf1", 1200, 372),
    ],
)
def test_the_traces_hold_the_requests_that_are_quoted(name: str, requests: int, distinct: int) -> None:
    found = read_trace(TRACES / f"{name}.jsonl")
    assert (len(found), len(asked_for(found))) == (requests, distinct)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama2-7b", 6.738), ("llama3-8b", 8.030), ("llama-13b", 13.016), ("llama-30b", 32.529), ("llama-70b", 68.977)],
)
def test_the_model_configurations_have_the_parameters_that_those_models_have(name: str, billions: float) -> None:
    spec = read_spec(model_path(name))
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    costs = ModelCosts.of(spec, 2)
    assert (costs.linear_elems + 2 * costs.head_elems + norms) / 1e9 == pytest.approx(billions, abs=1e-3)


def test_every_model_configuration_is_served() -> None:
    assert len([read_spec(path) for path in MODELS.glob("*.json")]) == 5


def test_a_row_takes_what_it_does_not_say_from_the_command_line(trace: Path) -> None:
    defaults = Row(Path(), "none", 2, None, None, {"device": "cpu", "max_num_seqs": 4})
    row = parse_row(f"{trace}:s2:repeat=3:share=0.5:max_num_seqs=8:memory=0.9:attention=triton", defaults)
    assert (row.trace, row.adapters, row.repeat, row.share, row.limit) == (trace, "s2", 3, 0.5, None)
    assert row.settings == {"device": "cpu", "max_num_seqs": 8, "memory": "0.9", "attention": "triton"}
    assert parse_row(f"{trace}:none", defaults).repeat == 2


@pytest.mark.parametrize("text", ["{}", "{}:", "{}:s3", "{}:r0-all", "{}:s1:repeat", "{}:s1:repeat=x", "missing:s1"])
def test_a_malformed_row_is_refused(text: str, trace: Path) -> None:
    with pytest.raises(ConfigError):
        parse_row(text.format(trace), Row(Path(), "none"))


def test_s2_gives_its_ranks_by_turn() -> None:
    s2 = adapter_set("s2")
    assert s2 is not None
    assert [s2.rank(i) for i in range(6)] == [64, 32, 16, 8, 64, 32]
    assert s2.modules == (Module.Q, Module.K, Module.V, Module.O)


def test_prompts_depend_on_the_seed_alone_and_have_the_lengths_asked_for() -> None:
    prompts = random_prompts([3, 1, 4], 50, seed=1)
    assert [len(prompt) for prompt in prompts] == [3, 1, 4]
    assert prompts == random_prompts([3, 1, 4], 50, seed=1) != random_prompts([3, 1, 4], 50, seed=2)
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)


# --- the floor --------------------------------------------------------------------------------------------------------

SPEC = ModelSpec(
    family="llama", vocab_size=10, hidden_size=4, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=2,
    intermediate_size=6, rms_norm_eps=1e-5, max_position=64,
)  # fmt: skip


def test_the_floor_of_a_run_is_what_it_comes_to_by_hand() -> None:
    # A layer: q 4x4, k and v 4x2 each, o 4x4, gate and up 4x6 each, down 6x4: 16 + 8 + 8 + 16 + 24 + 24 + 24 = 120.
    # Two layers: 240. Head: 10 x 4 = 40. KV of a token: 2 layers x 2 x 2 = 8 elements. A row's attention to one token:
    # 2 layers x (4 + 4 multiplications, as many additions) = 32 operations. Elements of 2 bytes.
    a, b = AdapterUid("a"), AdapterUid("b")
    params = SamplingParams(max_tokens=9)

    def start(seat: int, uid: AdapterUid | None, count: int) -> SeatStart:
        return SeatStart(seat, uid, (0,) * count, count, params, 0, (0,), ())

    plans = [
        StepPlan(0, load=(AdapterLoad(a, (3,)),)),
        StepPlan(
            1,
            start=(start(0, a, 3), start(1, None, 5)),
            chunks=(Chunk(0, 0, 3, samples=True), Chunk(1, 0, 2, samples=False)),
        ),
        StepPlan(2, chunks=(Chunk(1, 2, 3, samples=True),), decode=(0,)),
        StepPlan(3, decode=(0, 1)),
        StepPlan(
            4, vacate=(0,), start=(start(0, b, 1), start(2, a, 1)),
            chunks=(Chunk(0, 0, 1, True), Chunk(2, 0, 1, True)), decode=(1,),
        ),
    ]  # fmt: skip
    nothing, prefill, mixed, decode, reused = step_costs(plans, ModelCosts.of(SPEC, 2), {a: 200, b: 60}, num_seats=3)

    assert nothing.floor_s == 0
    # Five rows: (240 + 40 + 5 x 4) x 2 bytes of weights, no KV stored before, a's 200 bytes once. Operations: 5 rows x
    # 480 + 1 head x 80 + 3 rows x 100 elements x 2 of LoRA + (1 + 2 + 3 + 1 + 2) pairs x 32.
    assert (prefill.weight_bytes, prefill.kv_bytes, prefill.adapter_bytes) == (600, 0, 200)
    assert prefill.flops == 2400 + 80 + 600 + 9 * 32
    # Four rows, two sampled. Stored: 3 tokens of seat 0, 2 of seat 1. Pairs: 4 + (3 + 4 + 5).
    assert (mixed.weight_bytes, mixed.kv_bytes, mixed.adapter_bytes) == (592, 5 * 8 * 2, 200)
    assert mixed.flops == 4 * 480 + 2 * 80 + 200 + 16 * 32
    assert (mixed.rows, mixed.decode_rows, mixed.adapters) == (4, 1, 1)
    # Stored: 4 tokens of seat 0, 5 of seat 1.
    assert (decode.weight_bytes, decode.kv_bytes, decode.adapter_bytes) == (576, 9 * 8 * 2, 200)
    assert decode.flops == 2 * 480 + 2 * 80 + 200 + 11 * 32
    # Seat 0 begins anew with b, seat 2 has a: both adapters once. Stored: 6 tokens of seat 1.
    assert (reused.kv_bytes, reused.adapter_bytes, reused.adapters) == (6 * 8 * 2, 260, 2)

    assert decode.floor_s == pytest.approx((576 + 144 + 200) / 4.3e12)  # 1672 operations take far less
    total = sum((c.weight_bytes + c.kv_bytes + c.adapter_bytes) / 4.3e12 for c in (prefill, mixed, decode, reused))
    assert total_floor_s([nothing, prefill, mixed, decode, reused]) == pytest.approx(total)


def test_a_step_of_many_rows_is_bound_by_its_operations() -> None:
    start = SeatStart(0, None, (0,) * 4000, 4000, SamplingParams(), 0, (0,), ())
    (cost,) = step_costs(
        [StepPlan(0, start=(start,), chunks=(Chunk(0, 0, 4000, True),))], ModelCosts.of(SPEC, 2), {}, num_seats=1
    )
    operations = 4000 * 480 + 80 + 4000 * 4001 // 2 * 32
    assert cost.floor_s == pytest.approx(operations / 790e12)
    assert cost.floor_s > cost.bytes_s


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine(model: Path) -> Any:
    arena = HostArena(pin=False, threads=2)
    made = BenchEngine(model, SETTINGS, arena)
    yield made
    made.close()
    arena.close()


def test_adapters_are_pairwise_different_small_and_as_large_as_their_ranks(engine: BenchEngine) -> None:
    s2 = adapter_set("s2")
    assert s2 is not None
    sources = engine.lay_out(s2, [0, 1, 2, 3, 4, 8, 900])
    images = {index: engine.images._made[source] for index, source in sources.items()}
    for index, image in images.items():
        # Two layers of q 32x32, k and v 32x16 each and o 32x32: A and B have 64 + 48 + 48 + 64 elements a rank.
        assert image.layout.used_bytes == 2 * 224 * s2.rank(index) * 4
        assert image.data.isfinite().all()
        assert 0.005 < image.data.std() < 0.02
        assert image.data.abs().max() < 0.1
    for i, j in combinations(images, 2):
        n = min(images[i].data.numel(), images[j].data.numel())
        assert not torch.equal(images[i].data.flatten()[:n], images[j].data.flatten()[:n])


def test_the_pool_holds_what_was_laid_out(engine: BenchEngine) -> None:
    r4 = adapter_set("r4-all")
    assert r4 is not None
    names = engine.register(engine.lay_out(r4, [0, 1, 2, 7]))
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    drive(engine, [BenchRequest(0.0, (1, 2, 3), params, name) for name in names.values()])
    for name in names.values():
        uid = engine.parts.registry.uid(name)
        pages = engine.parts.residency.pages(uid)
        assert pages
        assert torch.equal(engine.parts.pool.lanes[list(pages)], engine.images.image(uid).data)


def test_the_arena_is_used_again_and_copies_do_not_overlap() -> None:
    arena = HostArena(pin=False, block_bytes=2**21, threads=2)
    sizes = [300_000, 900_000, 200_000, 1_500_000, 700_000]
    windows = [torch.full((n,), i, dtype=torch.uint8) for i, n in enumerate(sizes)]
    first = arena.fill(windows)
    assert [int(c.unique()) for c in first] == [0, 1, 2, 3, 4]
    assert [len(c) for c in first] == sizes
    before = arena.num_bytes
    again = arena.fill([torch.full((n,), 9, dtype=torch.uint8) for n in sizes[:3]])
    assert arena.num_bytes == before
    assert again[0].data_ptr() == first[0].data_ptr()
    assert [int(c.unique()) for c in again] == [9, 9, 9]
    (large,) = arena.fill([torch.ones(2**22, dtype=torch.uint8)])
    assert int(large.sum()) == 2**22
    arena.close()


def test_adapters_are_cold_and_their_pages_free_when_a_row_begins(engine: BenchEngine) -> None:
    r4 = adapter_set("r4-all")
    assert r4 is not None
    sources = engine.lay_out(r4, [0, 1])
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    for _ in range(2):
        names = engine.register(sources)
        assert engine.client.stats().resident_adapters == 0
        assert engine.parts.allocator.num_free_pages == engine.parts.allocator.num_pages
        log = drive(engine, [BenchRequest(0.0, (1, 2), params, names[i]) for i in (0, 1)]).steps
        assert sorted(load.uid for plan in log.plans for load in plan.load) == sorted(
            engine.parts.registry.uid(name) for name in names.values()
        )


# --- whole rows -------------------------------------------------------------------------------------------------------


def test_several_rows_run_on_one_engine_and_every_request_yields_its_length(
    model: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    rows = [f"{trace}:none", f"{trace}:r4-all:repeat=2", f"{trace}:s1:limit=6"]
    assert run(model, *(part for row in rows for part in ("--row", row)), "--json", out) == 0
    printed = capsys.readouterr().out
    assert printed.count("engine of tiny built") == 1
    assert printed.count("tok/s   ") == 4

    report = json.loads(out.read_text())
    assert report["model"] == "tiny"
    assert "torch" in report["versions"]
    base, all_linear, s1 = report["rows"]
    assert [len(row["runs"]) for row in report["rows"]] == [1, 2, 1]
    for row, tokens, distinct in ((base, 36, 0), (all_linear, 36, 4), (s1, 21, 4)):
        for figures in row["runs"]:
            assert figures["problems"] == []
            assert figures["output_tokens"] == tokens
            assert figures["distinct_adapters"] == distinct
            assert figures["loads"] - figures["reloads"] == distinct
            assert figures["floor_ratio"] > 1
            assert figures["floor_ratio"] == pytest.approx(figures["seconds"] / figures["floor_s"])
            assert figures["decode"]["steps"] + figures["mixed"]["steps"] == figures["steps"]
    rates = [figures["output_tokens_per_s"] for figures in all_linear["runs"]]
    assert all_linear["output_tokens_per_s"] == pytest.approx(sum(rates) / 2)
    assert base["runs"][0]["hit_rate"] is None
    assert all_linear["runs"][0]["peak_adapter_pages"] > 0


def test_steps_are_recorded_in_a_folder_that_there_was_not(model: Path, trace: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "steps"
    assert run(model, "--trace", trace, "--repeat", 2, "--record-steps", folder) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["eight-none-1.jsonl", "eight-none-2.jsonl"]


def test_rows_of_other_settings_get_an_engine_of_their_own(
    model: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{trace}:none", f"{trace}:s1:max_num_seqs=2", f"{trace}:s1", f"{trace}:s1:limit=3"]
    out = tmp_path / "out.json"
    assert run(model, *(part for row in rows for part in ("--row", row)), "--json", out) == 0
    report = json.loads(out.read_text())["rows"]
    [two_seats] = next(row["runs"] for row in report if "max_num_seqs=2" in row["memory"])
    assert two_seats["full_decode"]["rows"] == 2 > two_seats["decode"]["rows"], "only steps with all seats taken"
    assert 0 < two_seats["full_decode"]["steps"] < two_seats["decode"]["steps"]
    named = [row["memory"] for row in report]
    assert len(set(named)) == 3, "they would be recorded as one row"
    printed = capsys.readouterr().out
    full = two_seats["full_decode"]
    assert f"the fullest of them: {full['steps']} steps" in printed
    assert printed.count("engine of tiny built") == 2
    assert [line.split()[1:3] for line in printed.splitlines() if line.startswith("| eight")] == [
        ["eight", "|"], ["eight", "|"], ["eight", "|"], ["eight", "|"],
    ]  # fmt: skip


def test_a_capped_pool_stays_within_its_cap_and_adapters_come_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PLAIN_POOL_BYTES", 40 * 8192)  # 40 pages: 16 tokens x 16 x 2 x 2 layers x 8 bytes
    requests = [(0.0, i % 4, 4, 6) for i in range(16)]
    path, out = write_trace(tmp_path / "turns.jsonl", requests), tmp_path / "out.json"
    assert run(model, "--trace", path, "--adapters", "r16-all", "--pool-adapter-share", 0.3, "--json", out) == 0
    (row,) = json.loads(out.read_text())["rows"]
    (figures,) = row["runs"]
    assert row["memory"] == "13GB+0.3, max_num_seqs=4"
    assert row["pool_bytes"] <= 40 * 8192 + 0.3 * row["adapter_bytes"]
    assert figures["peak_adapter_pages"] + 1 <= figures["pool_pages"]
    assert figures["pool_pages"] * figures["page_bytes"] == row["pool_bytes"]
    assert figures["output_tokens"] == 16 * 6


def test_a_run_that_takes_too_long_is_ended_and_counts_for_nothing(
    model: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert run(model, "--trace", trace, "--adapters", "s1", "--max-run", 0, "--json", out) == 1
    (row,) = json.loads(out.read_text())["rows"]
    assert "of 8 requests finished" in row["runs"][0]["problems"][0]
    assert row["output_tokens_per_s"] is None
    assert "failed" in capsys.readouterr().out


def test_no_run_begins_after_the_time_is_up(model: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(model, "--trace", trace, "--repeat", 2, "--stop-after", 0) == 0
    assert "left out" in capsys.readouterr().out


def test_requests_of_an_open_loop_wait_for_their_time(model: Path, tmp_path: Path, engine: BenchEngine) -> None:
    requests = make_requests(
        read_trace(write_trace(tmp_path / "open.jsonl", [(0.0, None, 3, 2), (0.15, None, 3, 2)])), {}, 128, seed=0
    )
    recording = drive(engine, requests)
    events = recording.events
    first_s = [
        next(when for when, ids in zip(events.when_s, _batches(events), strict=True) if id_ in ids) - recording.begin_s
        for id_ in recording.ids
    ]
    assert first_s[1] >= 0.15
    figures = _throughput(recording, requests)
    assert figures["ttft_s"]["max"] == pytest.approx(max(first_s[0], first_s[1] - 0.15)), "from when it was due"


def _batches(events: EventLog) -> list[list[str]]:
    ids = iter(events.ids)
    return [[next(ids) for _ in range(count)] for count in events.counts]


# --- what is made of the notes ----------------------------------------------------------------------------------------


def _told(*batches: tuple[float, list[tuple[str, type]]]) -> EventLog:
    log = EventLog()
    for when_s, events in batches:
        log.when_s.append(when_s)
        log.counts.append(len(events))
        log.ids += [id_ for id_, _ in events]
        log.types += [kind for _, kind in events]
    return log


TOKEN, END = TokenEvent, RequestFinished


def _asked(arrival_s: float, tokens: int) -> BenchRequest:
    return BenchRequest(arrival_s, (1, 2), SamplingParams(max_tokens=tokens), None)


def test_latencies_are_counted_from_a_requests_arrival() -> None:
    events = _told(
        (101.0, [("a", TOKEN)]),
        (102.5, [("a", TOKEN), ("b", TOKEN)]),
        (103.0, [("a", TOKEN), ("a", END)]),
        (104.0, [("b", TOKEN), ("b", END)]),
    )
    figures = _throughput(Recording(100.0, StepLog(), events, ["a", "b"]), [_asked(0.0, 3), _asked(2.0, 2)])
    assert figures["problems"] == []
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 4)
    assert figures["requests_per_s"] == pytest.approx(2 / 4)
    assert figures["ttft_s"]["p50"] == pytest.approx((1.0 + 0.5) / 2)
    assert figures["latency_s"]["p50"] == pytest.approx((3.0 + 2.0) / 2)
    assert figures["itl_ms"]["max"] == pytest.approx(1500)  # gaps: 1.5, 0.5 and 1.5 seconds
    assert figures["itl_ms"]["p50"] == pytest.approx(1500)


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_request_of_another_length_is_a_problem(tokens: int) -> None:
    events = _told((1.0, [("a", TOKEN)] * 2 + [("a", END)]))
    figures = _throughput(Recording(0.0, StepLog(), events, ["a"]), [_asked(0.0, tokens)])
    assert figures["problems"]


@pytest.mark.parametrize(
    ("decode", "mixed", "full"),
    [
        ([100, 95, 94, 50], [200], [100, 95]),
        ([50, 20, 49, 48], [10, 60], [50, 49, 48]),
        ([20, 18], [], [20]),
        ([7], [], [7]),
        ([], [3], []),
        ([], [], []),
    ],
)
def test_full_decode_steps_have_nearly_all_rows_of_the_largest_one(
    decode: list[int], mixed: list[int], full: list[int]
) -> None:
    """Those with prompts are no decode steps, however many sequences decode beside."""
    plans = [StepPlan(i, decode=tuple(range(n))) for i, n in enumerate(decode)]
    plans += [StepPlan(0, decode=tuple(range(n)), chunks=(Chunk(n, 0, 1, True),)) for n in mixed]
    costs = [StepCost(len(p.decode), len(p.decode), 0, 1, 0, 0, 0) for p in plans]
    turns = range(1, len(plans) + 1)
    log = StepLog(plans, launched_s=[float(i) for i in turns], done_s=[i + 0.5 for i in turns])
    host_s = [cost.rows / 1e3 for cost in costs]
    figures = _steps(Recording(0.0, log, host_s=host_s, turn_steps=list(turns)), costs, Counter())
    found = figures["full_decode"]
    if not full:
        assert found is None
        return
    assert (found["steps"], found["rows"]) == (len(full), sum(full) / len(full))
    assert found["host_ms"] == pytest.approx(found["rows"])
    assert figures["decode"]["steps"] == len(decode)


# --- what is kept -----------------------------------------------------------------------------------------------------


def test_recorded_rows_replace_those_of_the_same_trace_model_adapters_and_memory(
    model: Path, trace: Path, tmp_path: Path
) -> None:
    out, into = tmp_path / "out.json", tmp_path / "docs" / "engine.json"
    rows = ["--row", f"{trace}:none", "--row", f"{trace}:s1:repeat=2"]
    run(model, *rows, "--json", out)
    assert record([out], into, "abc") == (2, 0)
    first = json.loads(into.read_text())
    run(model, "--row", f"{trace}:s1", "--row", f"{trace}:s2", "--json", out)
    assert bench.main(["--record", str(out), "--into", str(into), "--commit", "def"]) == 0
    second = json.loads(into.read_text())
    assert [(row["adapters"], row["commit"]) for row in second] == [("none", "abc"), ("s1", "def"), ("s2", "def")]
    assert second[0] == first[0]
    assert [len(row["runs"]) for row in (*first, second[1])] == [1, 2, 1]
    schema = json.loads((REPOSITORY / "docs/benchmarks/h200/engine.schema.json").read_text())["items"]
    assert set(schema["required"]) == set(schema["properties"]) == set(RECORDED) == set(second[0])
    kinds = {"string": str, "number": float, "array": list, "object": dict, "null": type(None)}
    for row in second:
        for name, value in row.items():
            declared = schema["properties"][name]["type"]
            declared = [declared] if isinstance(declared, str) else declared
            assert isinstance(value, tuple(kinds[kind] for kind in declared)), name


def _results(path: Path, torch_version: str, *rates: float) -> Path:
    runs = [{"output_tokens_per_s": rate, "floor_ratio": 100 / rate, "problems": []} for rate in rates]
    row = {"trace": "t", "model": "m", "adapters": "s1", "memory": "0.9", "runs": runs}
    path.write_text(json.dumps({"versions": {"torch": torch_version}, "rows": [row]}))
    return path


def test_runs_of_a_row_in_several_files_are_put_together(tmp_path: Path) -> None:
    files = [_results(tmp_path / "a", "2", 10.0, 50.0), _results(tmp_path / "b", "2", 25.0)]
    assert record(files, tmp_path / "engine.json", "abc") == (1, 0)
    (row,) = json.loads((tmp_path / "engine.json").read_text())
    assert (row["runs"], row["output_tokens_per_s"], row["floor_ratio"]) == ([10.0, 50.0, 25.0], 25.0, 4.0)
    with pytest.raises(ConfigError, match="other versions"):
        record([files[0], _results(tmp_path / "c", "3", 1.0)], tmp_path / "engine.json", "abc")


def test_a_file_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a file of results"):
        record([tmp_path / "x.json"], tmp_path / "engine.json", "abc")
    assert not (tmp_path / "engine.json").exists()


# --- profiles ---------------------------------------------------------------------------------------------------------


def _trace_events() -> list[dict[str, Any]]:
    """Steps launched every 100; their kernels run while the next is launched, an upload of the second before them."""

    def annotation(label: str, ts: int) -> dict[str, Any]:
        return {"cat": "user_annotation", "name": f"bench step {label}", "ts": ts, "dur": 50}

    def launch(ts: int, correlation: int) -> dict[str, Any]:
        return {"cat": "cuda_runtime", "name": "cudaGraphLaunch", "ts": ts, "args": {"correlation": correlation}}

    def kernel(name: str, ts: int, dur: int, correlation: int) -> dict[str, Any]:
        return {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}

    return [
        annotation("decode T=2", 0), launch(10, 1), annotation("decode T=2", 100), launch(110, 2),
        annotation("decode T=2", 200), launch(210, 3),
        annotation("mixed T=9", 300), launch(310, 4), annotation("decode T=3", 400), launch(410, 5),
        annotation("decode T=2", 500), launch(510, 6),
        launch(90, 9), kernel("between steps", 91, 1, 9),
        kernel("nvjet_gemm", 110, 40, 1), kernel("_shrink", 150, 10, 1), kernel("_shrink", 155, 10, 1),
        {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 120, "dur": 2, "args": {"correlation": 2, "stream": 13}},
        kernel("nvjet_gemm", 180, 60, 2), kernel("FusedAddRMSNorm", 250, 10, 2),
        kernel("nvjet_gemm", 270, 70, 3), kernel("nvjet_gemm", 350, 80, 4),
        kernel("nvjet_gemm", 480, 10, 5), kernel("nvjet_gemm", 540, 10, 6),
        annotation("mixed T=9", 600), launch(610, 7), kernel("nvjet_gemm", 620, 90, 7),
        annotation("decode T=2", 700), launch(710, 8), kernel("nvjet_gemm", 715, 10, 8),
    ]  # fmt: skip


def test_a_kernel_belongs_to_the_step_that_launched_it() -> None:
    steps = read_steps(_trace_events())
    labels = ["decode T=2", "decode T=2", "decode T=2", "mixed T=9", "decode T=3", "decode T=2", "mixed T=9"]
    assert [step.label for step in steps] == [*labels, "decode T=2"]
    assert [step.begin_us for step in steps] == [110, 180, 270, 350, 480, 540, 620, 715], "not of an upload"
    assert steps[0].us == {"nvjet_gemm": 40, "_shrink": 20}
    assert steps[0].busy_us == 55  # two of its kernels overlap by 5
    decode, period_us = steps_of(steps, "decode")
    assert decode == steps[:2], "followed by their like"
    assert period_us == (70 + 90) / 2  # 110 -> 180 -> 270
    summary = summarise(decode, period_us)
    assert summary["groups"]["gemm"] == {"us": 50.0, "kernels": 1.0}
    assert summary["groups"]["lora shrink"] == {"us": 10.0, "kernels": 1.0}
    assert summary["idle_us"] == 80 - (55 + 70) / 2, "the upload ran beside the step before"
    mixed, period_us = steps_of(steps, "mixed")
    assert (mixed, period_us) == ([steps[6]], 95), "the last one"


@pytest.mark.parametrize(
    ("rows", "chosen"),
    [([2, 2, 2, 3, 3], [0, 1]), ([1, 2, 2, 2], [1, 2]), ([2, 3, 2, 3], []), ([2], []), ([], [])],
)
def test_decode_steps_are_those_followed_by_their_like(rows: list[int], chosen: list[int]) -> None:
    steps = [
        StepProfile(f"decode T={n}", 0.0, spans=[(10.0 * i * i, 10.0 * i * i + 5)], names=["k"], streams=[7])
        for i, n in enumerate(rows)
    ]
    found, period_us = steps_of(steps, "decode")
    assert found == [steps[i] for i in chosen]
    assert period_us == (sum(20 * i + 10 for i in chosen) / len(chosen) if chosen else 0)


def test_a_layers_timeline_is_the_mean_of_the_layers_that_have_the_same_kernels() -> None:
    names = {"r": "rotate_append", "g": "nvjet_gemm", "s": "shrink"}
    kernels = [("r", 0, 2), ("g", 2, 10), ("r", 20, 23), ("g", 22, 34), ("r", 40, 41), ("s", 41, 42), ("r", 50, 51)]
    events: list[dict[str, Any]] = [
        {"cat": "user_annotation", "name": "bench step decode T=1", "ts": 0, "dur": 9},
        {"cat": "cuda_runtime", "ts": 1, "args": {"correlation": 7}},
    ]
    for name, begin, end in kernels:
        kernel = {"cat": "kernel", "name": names[name], "ts": begin, "dur": end - begin, "args": {"correlation": 7}}
        events.append(kernel)
    assert layer_of(read_steps(events)) == [
        ("rotate_append", 0, 2.5),
        ("nvjet_gemm", 2, 12),
        ("rotate_append", 20, 22),
    ], "two layers of a rotation and a product; the one with a shrink is another kind"


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("nvjet_tst_128x64_64x6_1x2_h_bz_TNT", "gemm"),
        ("void cutlass::device_kernel<flashinfer::BatchPrefillWithPagedKVCacheKernel<...>>", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<...>", "attention"),
        ("void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>", "norm"),
        ("void flashinfer::activation::act_and_mul_kernel<__nv_bfloat16>", "activation"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("expand", "lora expand"),
        ("decode", "attention"),
        ("void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheKernel<...>", "rotary + append"),
        ("choose", "sampling"),
        ("add_rms_norm", "norm"),
        ("something of ours", "other"),
    ],
)
def test_kernels_are_grouped_by_what_they_do(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_a_profiled_engine_decodes_then_mixes_and_is_left_as_it_was(engine: BenchEngine) -> None:
    said: list[str] = []
    result = profile(engine, "s2", 2, 3, 5, (1, 7), 4, said.append)
    assert said == ["the profile holds no decode step", "the profile holds no mixed step"]  # no GPU, no kernels
    assert (result["distinct"], result["rows"]) == (2, 3)
    plans = engine.recording.log.plans
    assert sum(len(plan.decode) == 3 and not plan.chunks for plan in plans) >= 4
    mixed = [plan for plan in plans if len(plan.decode) == 3 and plan.chunks]
    assert [sum(chunk.count for chunk in plan.chunks) for plan in mixed] == [7] * 3
    assert engine.recording.annotate is None
    assert engine.parts.allocator.num_free_pages == engine.parts.allocator.num_pages


def test_a_cold_adapter_is_compared_with_itself_warm(engine: BenchEngine) -> None:
    said: list[str] = []
    result = cold_start(engine, "s1", 2, said.append, background=2, prompt_tokens=8)
    assert len(said) == 1
    loads = [load.uid for plan in engine.recording.log.plans for load in plan.load]
    assert len(loads) == len(set(loads)) == 3  # one to warm up; each of the two once, for its cold request
    assert result["image_bytes"] >= 2 * 224 * 8 * 4
    assert engine.parts.allocator.num_free_pages == engine.parts.allocator.num_pages


def test_copies_beside_a_batch_are_counted_and_everything_is_given_back(engine: BenchEngine) -> None:
    said: list[str] = []
    result = loading(engine, "s1", 6, said.append, rows=3, context_tokens=4, rounds=2, under_way=2)
    assert len(said) == 1
    assert result["bytes_per_s"] > 0
    assert (
        result["image_bytes"] == engine.images.layout_for(adapter_set("s1"), 0).pages * engine.parts.geometry.page_bytes
    )
    assert not any(plan.load for plan in engine.recording.log.plans), "the scheduler's own plans hold none"
    assert engine.parts.allocator.num_free_pages == engine.parts.allocator.num_pages


@pytest.mark.parametrize("text", ["8", "8x", "x9", "0x5", "3x-1", "ax3"])
def test_prompts_of_a_profile_are_a_number_and_a_length(model: Path, text: str, capsys: Any) -> None:
    assert parse_arguments(["--profile", "1", "--profile-prompts", "3x70"]).profile_prompts == (3, 70)
    assert parse_arguments(["--profile", "1"]).profile_prompts == (8, 512)
    with pytest.raises(SystemExit):
        parse_arguments(["--profile", "1", "--profile-prompts", text])
    assert f"a number of prompts, x, a number of tokens, got '{text}'" in capsys.readouterr().err


def test_a_profile_is_refused_on_a_cpu(model: Path) -> None:
    with pytest.raises(ConfigError, match="GPU"):
        run(model, "--profile", 3)
