"""The GPU's runner, on the CPU: every token that the CPU's runner gives, whatever the mix, with graphs and without."""

import dataclasses
import random

import pytest
import torch

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu

from tests.support.interpreted import IS_INTERPRETED  # noqa: E402

if not IS_INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1; test_smollm2_on_gpu.py is for the device", allow_module_level=True)

from interleaf.attention.triton_paged import TritonPaged  # noqa: E402
from interleaf.config import EngineConfig  # noqa: E402
from interleaf.core import RequestFailed, SamplingParams, StreamOrder, TokenEvent  # noqa: E402
from interleaf.engine.build import build_engine  # noqa: E402
from interleaf.engine.client import InProcessClient  # noqa: E402
from interleaf.engine.device_sampler import SamplingKind  # noqa: E402
from interleaf.errors import AdapterLoadFailed  # noqa: E402
from interleaf.kernels.device_lora import DeviceLora  # noqa: E402
from interleaf.memory.eviction import PageCosts  # noqa: E402
from tests.support.host_device import HostDevice  # noqa: E402
from tests.support.host_runner import HostLora, on_host_device  # noqa: E402
from tests.support.peft_adapters import ALL, Recipe, save_adapter  # noqa: E402
from tests.support.tiny_models import VOCAB, make_model  # noqa: E402

RANKS = (1, 4, 9)
ADAPTERS = {f"a{rank}": "" for rank in RANKS}
"""Names, and where `folder` puts them. So strong that no greedy answer is the base model's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = make_model("llama3")
    for rank in RANKS:
        recipe = Recipe({"r": rank, "target_modules": list(ALL)}, strength=0.5)
        ADAPTERS[f"a{rank}"] = str(save_adapter(model, recipe, folder / f"a{rank}", seed=rank))
    model.save_pretrained(folder)
    return str(folder)


def config(**settings):
    return EngineConfig(
        **(
            {
                "memory": 2**20,
                "page_tokens": 4,
                "max_num_seqs": 6,
                "max_batch_tokens": 16,
                "max_model_len": 60,
                "seed": 1,
            }
            | settings
        )
    )


def requests(num, seed=0):
    """(prompt, params, adapter)"""
    draw = random.Random(seed)
    found = []
    for i in range(num):
        kind = draw.choice(["greedy", "drawn", "filtered", "outside"])
        params = {
            "greedy": {"temperature": 0},
            "drawn": {"temperature": 0.9},
            "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
            "outside": {"temperature": 0.7, "repetition_penalty": 1.3, "logprobs": 3, "min_tokens": 1},
        }[kind]
        prompt = [draw.randrange(3, VOCAB) for _ in range(draw.choice([1, 3, 17, 30]))]
        length = draw.choice([1, 2, 5, 11])
        ends = {"ignore_eos": True} if draw.random() < 0.5 else {"stop_token_ids": tuple(range(100, 110))}
        found.append(
            (prompt, SamplingParams(max_tokens=length, seed=i, **params, **ends), draw.choice([None, *ADAPTERS]))
        )
    return found


def with_kernels(parts):
    """The engine with the real kernels, interpreted; its host tier lays adapters out anew."""
    parts.store._order = StreamOrder.TILES
    geometry, heads, seats = parts.geometry, parts.spec.num_heads, parts.config.max_num_seqs
    return on_host_device(
        parts,
        attention=lambda pool: TritonPaged(pool, heads, window=None, max_seqs=seats, max_rows=16),
        lora=lambda pool: DeviceLora(
            num_layers=geometry.num_layers,
            lane_elems=geometry.lane_elems,
            max_rows=seats,
            device="cpu",
        ),
    )


def answers(parts, wanted, turns_between=0):
    client = InProcessClient(parts)
    for name, source in ADAPTERS.items():
        client.add_adapter(name, source)
    found = {}

    def turn():
        for event in client.poll():
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokenEvent):
                found[event.request_id].append((event.token_id, event.logprobs))

    for request in wanted:
        found[client.submit(*request)] = []
        for _ in range(turns_between):
            turn()
    while client.has_work:
        turn()
    stats = client.stats()
    assert stats.pool.kv_pages == 0
    client.close()
    return list(found.values()), stats


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        for (_, a), (_, b) in zip(one, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.chosen == pytest.approx(b.chosen, abs=1e-4)


def test_no_answer_is_the_same_without_its_adapter(folder):
    """Or these tests could not tell."""
    greedy = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    names = [*ADAPTERS, None]
    found, _ = answers(build_engine(folder, config()), [([3 + i] * 3, greedy, a) for i in range(8) for a in names])
    told = [[token for token, _ in answer] for answer in found]
    for i in range(0, len(told), len(names)):
        assert len({tuple(tokens) for tokens in told[i : i + len(names)]}) == len(names)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("max_graphs", [0, 2, 64])
def test_it_gives_the_tokens_of_the_cpu_s_runner(folder, overlap, max_graphs):
    wanted = requests(14)
    expected, _ = answers(build_engine(folder, config(overlap=overlap)), wanted)
    device = HostDevice()
    parts = on_host_device(build_engine(folder, config(overlap=overlap)), device=device, max_graphs=max_graphs)
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    stats = parts.runner.stats()
    assert (stats.num_graph_steps > 0) == (max_graphs > 0)
    assert (stats.num_captures > 0) == (device.num_captures > 0) == (max_graphs > 0)
    assert not stats.num_piecewise_steps or max_graphs
    assert 0 < stats.num_mixed_steps < stats.num_steps


def test_small_mixed_steps_run_in_pieces_and_change_no_token(folder):
    """Prompts come one by one while others decode: most mixed steps have fewer rows than there are seats."""
    wanted = [
        ([3 + i] * 3, SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True), adapter)
        for i, adapter in enumerate([None, "a1", "a4", None, "a9", "a1", None, "a4", None, None, "a9", None])
    ]
    settings = {"max_num_seqs": 8, "max_batch_tokens": 8}
    expected, _ = answers(build_engine(folder, config(**settings)), wanted)
    parts = on_host_device(build_engine(folder, config(**settings)))
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    assert parts.runner.stats().num_piecewise_steps >= 3


def test_pieces_captured_for_base_rows_are_not_replayed_for_adapters(folder):
    """Prompts of one length come one by one, beside a sequence that decodes all along."""
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 50)]
    wanted = [([9] * 3, greedy[1], None)]
    wanted += [([20 + i] * 5, greedy[0], adapter) for i, adapter in enumerate([None] * 5 + ["a9"] * 5 + [None, "a4"])]
    expected, _ = answers(build_engine(folder, config()), wanted)
    parts = on_host_device(build_engine(folder, config()))
    found, _ = answers(parts, wanted, turns_between=4)
    assert_same(found, expected)
    assert parts.runner.stats().num_piecewise_steps >= 6


def test_pieces_of_few_rows_are_not_replayed_for_many(folder):
    """Short prompts and long ones by turns, the short ones first; their pieces are captured from the third on."""
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (2, 40)]
    wanted = [([9] * 3, greedy[1], None)] + [([20 + i] * (90 if i % 2 else 5), greedy[0], None) for i in range(8)]
    settings = {"max_batch_tokens": 200, "max_model_len": 120}
    expected, _ = answers(build_engine(folder, config(**settings)), wanted)
    parts = on_host_device(build_engine(folder, config(**settings)), max_mixed_graph_rows=200)
    found, _ = answers(parts, wanted, turns_between=4)
    assert_same(found, expected)
    assert len(parts.runner._forward._mixed_graphs) == 2
    assert parts.runner.stats().num_piecewise_steps >= 4


def test_steps_of_more_rows_than_seats_run_in_pieces_too(folder):
    """Prompts longer than there are seats, a few at a time; the longest are still launched kernel by kernel."""
    wanted = [
        ([3 + i] * (3 + 3 * i), SamplingParams(temperature=0, max_tokens=3 + i, ignore_eos=True), adapter)
        for i, adapter in enumerate([None, "a1", "a4", None, "a9", "a1", "a9", "a4"])
    ]
    settings = {"max_num_seqs": 3, "max_batch_tokens": 24}
    expected, _ = answers(build_engine(folder, config(**settings)), wanted)
    parts = on_host_device(build_engine(folder, config(**settings)), max_mixed_graph_rows=16)
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    stats = parts.runner.stats()
    assert 3 <= stats.num_piecewise_steps < stats.num_mixed_steps


class LoraByMix(HostLora):
    """Another key for every set of adapters, and for every work another that may stand in for it, a step in two."""

    def __init__(self, pool, extra_s):
        super().__init__(pool)
        self.extra_s, self.keys, self.num_asked = extra_s, {}, 0

    def plan(self, segments, *, graph):
        step = super().plan(segments, graph=graph)
        mix = frozenset(uid for uid, _, _ in segments)
        return step and dataclasses.replace(step, key=self.keys.setdefault(mix, len(self.keys)))

    def stand_in(self, segments, has_graph):
        self.num_asked += 1
        step = self.plan(segments, graph=True)
        assert not has_graph(step.key)
        ready = [key for key in self.keys.values() if has_graph(key)]
        return (dataclasses.replace(step, key=ready[0]), self.extra_s) if ready else None


@pytest.mark.parametrize("extra_s", [None, 0.0, 0.009, 1.0])
def test_a_step_replays_what_was_captured_for_other_adapters_while_that_is_cheap(folder, extra_s):
    """None: the runner has not been warmed up, and captures whatever it meets."""
    wanted = requests(30)
    expected, _ = answers(build_engine(folder, config()), wanted)
    made = []

    def lora(pool):
        made.append(LoraByMix(pool, extra_s))
        return made[0]

    parts = on_host_device(build_engine(folder, config()), lora=lora)
    charged, stood_in = [], {"decode": 0, "pieces": 0}

    def noting(graphs, kind):
        does_without = graphs.does_without

        def noted(key, seconds):
            charged.append(key in graphs)
            answer = does_without(key, seconds)
            stood_in[kind] += answer
            return answer

        graphs.does_without = noted

    if extra_s is not None:
        parts.runner.warmed_up()
        noting(parts.runner._forward._graphs, "decode")
        noting(parts.runner._forward._mixed_graphs, "pieces")
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    stats = parts.runner.stats()
    assert not any(charged), "what is charged is the key that has none"
    assert sum(stood_in.values()) == stats.num_stand_ins
    if extra_s is None:
        assert made[0].num_asked == stats.num_stand_ins == 0
    elif extra_s == 1.0:
        assert stats.num_stand_ins == 0 < made[0].num_asked
    else:
        assert 0 < stats.num_stand_ins <= made[0].num_asked
        steps = stats.num_graph_steps + stats.num_piecewise_steps
        assert steps > stats.num_stand_ins
        assert stood_in["decode"] > 0
        assert stood_in["pieces"] > 0 or extra_s
    assert stats.num_captures > 0


@pytest.mark.parametrize("swap_memory", [0, "1MiB"])
def test_a_pool_that_evicts_and_preempts_changes_no_token(folder, swap_memory):
    wanted = [
        ([3 + i] * 9, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), adapter)
        for i, adapter in enumerate([None, "a1", "a4", None, "a9", None])
    ]
    expected, _ = answers(build_engine(folder, config()), wanted)
    settings = {"memory": 47 * 3072, "max_model_len": 40, "admission": "optimistic", "swap_memory": swap_memory}
    parts = on_host_device(build_engine(folder, config(**settings)))
    parts.residency.reclaimer.policy.costs = PageCosts(adapter_s=1.0, prefix_s=100.0)
    found, stats = answers(parts, wanted)
    assert_same(found, expected)
    assert stats.preemptions
    assert (stats.swap_in_pages > 0) == (stats.resumed_swapped > 0) == (swap_memory != 0)
    assert stats.swap_used_slots == 0
    assert stats.adapter_evictions


def test_prompts_wait_for_a_group_of_seats_and_nothing_else_changes(folder):
    wanted = requests(14, seed=4)
    expected, _ = answers(build_engine(folder, config()), wanted)
    parts = on_host_device(build_engine(folder, config(refill_seats=3)))
    found, _ = answers(parts, wanted)
    assert_same(found, expected)


def test_a_load_that_takes_long_delays_only_its_own_request(folder):
    device = HostDevice()
    parts = on_host_device(build_engine(folder, config()), device=device)
    client = InProcessClient(parts)
    client.add_adapter("a4", ADAPTERS["a4"])
    device.holds_copies = True
    slow = client.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=4), "a4")
    quick = client.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=4), None)
    events = [event for _ in range(12) for event in client.poll()]
    assert {event.request_id for event in events} == {quick}
    device.holds_copies = False
    events = []
    while client.has_work:
        events += client.poll()
    assert sum(isinstance(event, TokenEvent) for event in events) == 4
    assert {event.request_id for event in events} == {slow}
    client.close()


def test_a_request_starts_before_its_adapters_copy_has_ended_if_its_step_will_wait_for_it(folder):
    """The step loop hears of a copy one step late: it is handed over early, and the answer is the same."""
    asked = SamplingParams(temperature=0, max_tokens=4)
    expected, _ = answers(build_engine(folder, config()), [([5, 6, 7], asked, "a4")])
    device = HostDevice()
    parts = on_host_device(build_engine(folder, config()), device=device, copy_page_s=lambda: 1e-9)
    client = InProcessClient(parts)
    client.add_adapter("a4", ADAPTERS["a4"])
    client.submit([5, 6, 7], SamplingParams(temperature=0, max_tokens=40), None)
    for _ in range(12):  # the pace of steps is known from now on
        client.poll()
    device.holds_copies = True
    id_ = client.submit([5, 6, 7], asked, "a4")
    tokens = [e.token_id for _ in range(12) for e in client.poll() if isinstance(e, TokenEvent) and e.request_id == id_]
    assert parts.runner._copier.num_under_way == 1
    assert tokens == [token for token, _ in expected[0]]
    device.holds_copies = False
    client.close()


def test_a_load_that_fails_fails_its_own_requests_and_may_be_tried_again(folder):
    """Pages of a failed load are given back by an eviction of an adapter that the device never knew."""
    parts = on_host_device(build_engine(folder, config()))
    client = InProcessClient(parts)
    client.add_adapter("a4", ADAPTERS["a4"])
    image, attempts = parts.runner._copier._image, []

    def breaks_once(uid):
        attempts.append(uid)
        if len(attempts) == 1:
            raise AdapterLoadFailed(uid, "it is gone")
        return image(uid)

    parts.runner._copier._image = breaks_once
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    other, first = client.submit([5, 6, 7], params, None), client.submit([5, 6, 7], params, "a4")
    events = []
    while client.has_work:
        events += client.poll()
    (failed,) = (event for event in events if isinstance(event, RequestFailed))
    assert "it is gone" in failed.reason
    assert failed.request_id == first
    assert sum(isinstance(event, TokenEvent) and event.request_id == other for event in events) == 12
    again = client.submit([5, 6, 7], params, "a4")
    events = []
    while client.has_work:
        events += client.poll()
    assert sum(isinstance(event, TokenEvent) and event.request_id == again for event in events) == 12
    client.close()


def test_a_graph_for_which_there_is_no_memory_is_done_without(folder):
    wanted = requests(14)
    expected, _ = answers(build_engine(folder, config()), wanted)
    device = HostDevice()
    asked = []

    def refuse(run):
        asked.append(run)
        raise torch.OutOfMemoryError

    device.capture = refuse
    parts = on_host_device(build_engine(folder, config()), device=device)
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    assert asked
    stats = parts.runner.stats()
    assert stats.num_captures == stats.num_graph_steps == stats.num_piecewise_steps == 0


def test_a_step_for_which_memory_is_short_takes_that_of_the_graphs_and_gives_the_same_tokens(folder):
    greedy = [SamplingParams(temperature=0, max_tokens=5 + i % 7, ignore_eos=True) for i in range(20)]
    wanted = [([3 + i] * 17, params, "a4") for i, params in enumerate(greedy)]
    expected, _ = answers(build_engine(folder, config()), wanted)
    device = HostDevice()
    parts = on_host_device(build_engine(folder, config()), device=device)
    steps, model = parts.runner._forward, parts.runner._model
    graphs, launched = steps._graphs, steps._kernel_by_kernel
    compute, eager, held = model.forward, [], []

    def forward(*batch):
        logits = compute(*batch)  # what it has written stays written
        if eager and len(graphs):
            held.append(len(graphs))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return logits

    def kernel_by_kernel(*batch):
        eager.append(True)
        try:
            return launched(*batch)
        finally:
            eager.clear()

    model.forward, steps._kernel_by_kernel = forward, kernel_by_kernel
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    assert device.num_reclaims == len(held) > 1  # others were captured after the first had been given up
    assert parts.runner.stats().num_graph_steps > 0


def test_a_step_in_pieces_for_which_memory_is_short_does_the_same(folder):
    greedy = [SamplingParams(temperature=0, max_tokens=5 + i % 7, ignore_eos=True) for i in range(20)]
    wanted = [([3 + i] * 2, params, "a4") for i, params in enumerate(greedy)]
    expected, _ = answers(build_engine(folder, config()), wanted)
    device = HostDevice()
    parts = on_host_device(build_engine(folder, config()), device=device)
    steps = parts.runner._forward
    pieces, graphs = steps._pieces, (steps._graphs, steps._mixed_graphs)
    compute, held = pieces.run, []

    def run(*args):
        logits = compute(*args)
        if any(map(len, graphs)) and len(held) < 3:
            held.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return logits

    pieces.run = run
    found, _ = answers(parts, wanted)
    assert_same(found, expected)
    assert device.num_reclaims == len(held) > 1


def test_memory_that_stays_short_ends_the_engine_with_its_name(folder):
    parts = on_host_device(build_engine(folder, config()))
    client = InProcessClient(parts)
    client.submit([5, 6, 7], SamplingParams(max_tokens=4), None)

    def short(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    parts.runner._model.forward = short
    events = []
    while client.has_work:
        events += client.poll()
    assert "out of memory" in events[-1].reason
    client.close()


def test_graphs_that_end_with_logits_leave_them_in_one_place(folder):
    parts = on_host_device(build_engine(folder, config()))
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=1, ignore_eos=True)
    answers(parts, [([3 + i] * 4, params, None) for i in range(6)])
    assert any(key[2] is SamplingKind.OUTSIDE for key in parts.runner._forward._graphs._graphs)
    assert parts.runner._forward._outside.shape == (6, VOCAB)


def test_a_failed_step_fails_every_later_one(folder):
    parts = on_host_device(build_engine(folder, config()))
    client = InProcessClient(parts)
    client.submit([5, 6, 7], SamplingParams(max_tokens=4), None)

    def broken(*_):
        raise RuntimeError("the device is gone")

    parts.runner._model.forward, forward = broken, parts.runner._model.forward
    events = []
    while client.has_work:
        events += client.poll()
    assert isinstance(events[-1], RequestFailed)
    assert "the device is gone" in events[-1].reason
    assert not client.is_alive
    parts.runner._model.forward = forward
    client.close()


def test_our_own_kernels_give_the_tokens_of_the_cpu_s(folder):
    """Attention and LoRA as a GPU without FlashInfer computes them, adapters in the GPU's order."""
    wanted = requests(5, seed=126)  # long prompts and decode steps, of the base and of every adapter
    expected, _ = answers(build_engine(folder, config()), wanted)
    found, _ = answers(with_kernels(build_engine(folder, config())), wanted)
    assert_same(found, expected)


def test_the_scrap_page_is_nobody_s(folder):
    """Rows that pad a batch write to the last page, which the allocator never gives away."""
    parts = on_host_device(build_engine(folder, config()))
    assert parts.pool.num_pages == parts.allocator.num_pages + 1
    answers(parts, [([7, 8], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), None)] * 3)
    assert torch.isfinite(parts.pool.data[-1, :, :, 0]).all()  # three rows were padded to four
