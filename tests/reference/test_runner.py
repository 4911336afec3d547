"""Plans through the real runner: seats, pages, adapters, failures. The oracle: transformers with merged weights."""

import copy
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch

from interleaf.adapters.copy import AdapterCopier, LoadReport
from interleaf.adapters.image import build
from interleaf.adapters.parsed import LoraPair, ParsedAdapter, digest
from interleaf.adapters.sources import open_adapter
from interleaf.attention import TorchSdpa
from interleaf.core import AdapterLoad, Chunk, SamplingParams, SeatGrow, SeatStart, StepPlan
from interleaf.engine.runner import TorchRunner
from interleaf.engine.sampler import Sampler
from interleaf.errors import AdapterLoadFailed, EngineDead
from interleaf.parallel.shard import Shard
from tests.support.pooled_model import load, pool_for, spec_of
from tests.support.tiny_models import VOCAB, make_model

GREEDY = SamplingParams(temperature=0, max_tokens=100)
PAGE_TOKENS = 4
NUM_PAGES = 200
NUM_SEATS = 4


def _stronger(adapter):
    """Dummy adapters suit the small weights of fresh models; those of the tests' models are larger."""
    pairs = {at: LoraPair(pair.a, pair.b, 60 * pair.scale) for at, pair in adapter.pairs.items()}
    return ParsedAdapter(digest(pairs), pairs, adapter.source)


@pytest.fixture(scope="module")
def world():
    """transformers' model, ours, and two parsed adapters by uid."""
    theirs = make_model("llama3")
    spec = spec_of(theirs)
    adapters = [_stronger(open_adapter(f"dummy:r={r},targets=all,seed={r}", spec)) for r in (3, 8)]
    return theirs, load(theirs), {a.uid: a for a in adapters}


class Setup:
    """A runner, and the host's view of it: what a scheduler would know."""

    def __init__(self, world, *, overlap=False):
        self.theirs, model, self.adapters = world
        self.pool = pool_for(model.spec, PAGE_TOKENS, NUM_PAGES)
        self.pool.data.fill_(torch.nan)
        self.lost = set()
        attention, sampler = TorchSdpa(self.pool), Sampler(NUM_SEATS, VOCAB, torch.device("cpu"))
        self.model, self.sampler = model, sampler
        self.runner = TorchRunner(
            model, self.pool, attention, sampler, AdapterCopier(self.pool, self.image), NUM_SEATS, overlap=overlap
        )
        self.free = torch.randperm(NUM_PAGES, generator=torch.Generator().manual_seed(5)).tolist()
        self.num_steps = 0

    def image(self, uid):
        if uid in self.lost:
            raise AdapterLoadFailed(uid, "its image is not in host memory")
        return build(self.adapters[uid], Shard(self.model.spec), self.pool.geometry, torch.float32)

    def pages(self, count):
        return tuple(self.free.pop() for _ in range(count))

    def pages_for(self, num_tokens):
        return self.pages(self.pool.geometry.pages_for_tokens(num_tokens))

    def start(self, seat, prompt, adapter=None, outputs=(), params=GREEDY, room=40):
        ids = (*prompt, *outputs)
        return SeatStart(seat, adapter, ids, len(prompt), params, 1, self.pages_for(len(ids) + room), ())

    def load(self, uid):
        pages = self.image(uid).layout.pages
        return AdapterLoad(uid, self.pages(pages))

    def launch(self, **fields):
        handle = self.runner.launch(StepPlan(self.num_steps, **fields))
        self.num_steps += 1
        return handle

    def step(self, **fields):
        return self.launch(**fields).result().token_ids

    def expected(self, prompt, count, adapter=None):
        """Greedy tokens of transformers' model, with W + scale * B A in place of W."""
        model = self.theirs
        if adapter is not None:
            model = copy.deepcopy(model)
            with torch.no_grad():
                for (layer, module), pair in self.adapters[adapter].pairs.items():
                    block = model.model.layers[layer]
                    owner = block.self_attn if hasattr(block.self_attn, module) else block.mlp
                    getattr(owner, module).weight += pair.scale * pair.b.float() @ pair.a.float()
        ids = list(prompt)
        for _ in range(count):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]


def prompt(seed, length):
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(params=[False, True], ids=["inline", "overlap"])
def setup(world, request):
    made = Setup(world, overlap=request.param)
    yield made
    made.runner.close()


def test_each_seat_decodes_what_it_sampled_with_its_own_adapter(setup):
    one, two = setup.adapters
    setup.step(load=(setup.load(one), setup.load(two)))
    assert setup.runner.poll_loads() == [LoadReport(one), LoadReport(two)]
    assert setup.runner.poll_loads() == []
    prompts = [prompt(seed, 5 + seed) for seed in range(4)]
    adapters = [one, None, two, one]
    expected = [setup.expected(p, 8, a) for p, a in zip(prompts, adapters, strict=True)]
    assert expected[0] != setup.expected(prompts[0], 8)  # the adapter matters
    starts = tuple(setup.start(i, p, a) for i, (p, a) in enumerate(zip(prompts, adapters, strict=True)))
    found = [setup.step(start=starts, chunks=tuple(Chunk(i, 0, 5 + i, True) for i in range(4)))]
    found += [setup.step(decode=(0, 1, 2, 3)) for _ in range(7)]
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected


def test_a_prompt_is_computed_in_chunks_beside_decode_rows(setup):
    short, long = prompt(1, 3), prompt(2, 23)
    assert setup.step(start=(setup.start(1, short),), chunks=(Chunk(1, 0, 3, True),)) == (setup.expected(short, 1)[0],)
    setup.step(start=(setup.start(0, long),), chunks=(Chunk(0, 0, 9, False),), decode=(1,))
    assert setup.launch(chunks=(Chunk(0, 9, 5, False),)).result().token_ids == ()
    tokens = setup.step(chunks=(Chunk(0, 14, 9, True),), decode=(1,))
    assert tokens == (setup.expected(short, 3)[2], setup.expected(long, 1)[0])
    assert setup.step(decode=(0, 1)) == (setup.expected(long, 2)[1], setup.expected(short, 4)[3])


def test_a_seat_grows_into_new_pages_when_it_must(setup):
    ids = prompt(3, 3)
    found = [*setup.step(start=(setup.start(2, ids, room=0),), chunks=(Chunk(2, 0, 3, True),))]
    for length in range(4, 30):
        grow = (SeatGrow(2, setup.pages(1)),) if (length - 1) % PAGE_TOKENS == 0 else ()
        found += setup.step(grow=grow, decode=(2,))
    assert found == setup.expected(ids, 27)


def test_a_vacated_seat_and_its_pages_serve_the_next_sequence_in_the_same_step(setup):
    first, second = prompt(4, 9), prompt(5, 6)
    start = setup.start(0, first)
    setup.step(start=(start,), chunks=(Chunk(0, 0, 9, True),))
    setup.step(decode=(0,))
    again = SeatStart(0, None, tuple(second), 6, GREEDY, 1, start.pages[::-1], ())
    tokens = setup.step(vacate=(0,), start=(again,), chunks=(Chunk(0, 0, 6, True),))
    assert [*tokens, *setup.step(decode=(0,))] == setup.expected(second, 2)


def test_a_preempted_sequence_goes_on_where_it_was(setup):
    ids = prompt(6, 7)
    expected = setup.expected(ids, 6)
    setup.step(start=(setup.start(0, ids),), chunks=(Chunk(0, 0, 7, True),))
    setup.step(decode=(0,))
    setup.step(vacate=(0,))
    resumed = setup.start(3, ids, outputs=expected[:2])
    tokens = setup.step(start=(resumed,), chunks=(Chunk(3, 0, 9, True),))
    assert [*tokens, *setup.step(decode=(3,))] == expected[2:4]


def test_pages_of_an_evicted_adapter_hold_another_one_in_the_same_step(setup):
    one, two = setup.adapters
    big = setup.load(two)
    setup.step(load=(big,))
    ids = prompt(7, 5)
    setup.step(start=(setup.start(0, ids, two),), chunks=(Chunk(0, 0, 5, True),))
    needed = setup.image(one).layout.pages
    setup.step(vacate=(0,), evict=(two,), load=(AdapterLoad(one, big.pages[:needed]),))
    tokens = setup.step(start=(setup.start(0, ids, one),), chunks=(Chunk(0, 0, 5, True),))
    assert [*tokens, *setup.step(decode=(0,))] == setup.expected(ids, 2, one)


def test_an_adapter_of_nan_spoils_exactly_the_rows_that_use_it(world):
    setup = Setup(world)
    one, two = setup.adapters
    loads = {uid: setup.load(uid) for uid in (one, two)}
    setup.step(load=tuple(loads.values()))
    seen = []
    forward = setup.model.forward
    adapters = (one, None, two, one)
    for spoil in (False, True):
        if spoil:
            setup.pool.data[list(loads[one].pages)] = torch.nan
        starts = tuple(setup.start(i, prompt(8 + i, 4), a, room=4) for i, a in enumerate(adapters))
        try:
            setup.model.forward = lambda batch, pool: seen.append(forward(batch, pool)) or seen[-1]
            setup.step(
                vacate=(0, 1, 2, 3) if spoil else (), start=starts, chunks=tuple(Chunk(i, 0, 4, True) for i in range(4))
            )
        finally:
            del setup.model.forward
    assert seen[1][[0, 3]].isnan().all()
    assert torch.equal(seen[1][[1, 2]], seen[0][[1, 2]])


def test_an_image_that_cannot_be_had_is_reported_and_the_step_goes_on(setup):
    one, two = setup.adapters
    load_one, load_two = setup.load(one), setup.load(two)
    setup.lost.add(one)
    ids = prompt(9, 4)
    tokens = setup.step(load=(load_one, load_two), start=(setup.start(0, ids),), chunks=(Chunk(0, 0, 4, True),))
    assert list(tokens) == setup.expected(ids, 1)
    failed, done = setup.runner.poll_loads()
    assert (failed.uid, "not in host memory" in failed.error) == (one, True)
    assert done == LoadReport(two)


def test_what_a_step_raises_is_raised_by_its_result_and_ends_the_runner(setup):
    ids = prompt(10, 4)
    setup.step(start=(setup.start(0, ids, room=0),), chunks=(Chunk(0, 0, 4, True),))
    broken = setup.launch(decode=(0,))  # its token has no page
    later = setup.launch(decode=(0,))
    with pytest.raises(AssertionError, match="beyond its sequence's pages"):
        broken.result()
    with pytest.raises(EngineDead, match="step 2 follows a step that failed") as caught:
        later.result()
    assert isinstance(caught.value.__cause__, AssertionError)


def test_launch_returns_while_the_step_before_is_still_running(world):
    setup = Setup(world, overlap=True)
    go = Event()
    sample = setup.sampler.sample
    setup.sampler.sample = lambda logits, seats: go.wait(60) and sample(logits, seats)
    ids = prompt(11, 5)
    handles = [setup.launch(start=(setup.start(0, ids),), chunks=(Chunk(0, 0, 5, True),))]
    handles += [setup.launch(decode=(0,)) for _ in range(3)]
    assert not any(handle.ready() for handle in handles)
    go.set()
    assert [handle.result().token_ids[0] for handle in handles] == setup.expected(ids, 4)
    assert all(handle.ready() for handle in handles)
    setup.runner.close()


def test_the_work_list_is_kept_while_the_same_rows_use_the_same_adapters(world, monkeypatch):
    import interleaf.engine.inputs as inputs

    setup = Setup(world)
    one, two = setup.adapters
    setup.step(load=(setup.load(one), setup.load(two)))
    built = []
    build_work = inputs.build_work
    monkeypatch.setattr(inputs, "build_work", lambda segments: built.append(segments) or build_work(segments))
    starts = tuple(setup.start(i, prompt(i, 4), a) for i, a in enumerate((one, one, None, two)))
    setup.step(start=starts, chunks=tuple(Chunk(i, 0, 4, True) for i in range(4)))
    assert [[(adapter is None, first, rows) for adapter, first, rows in s] for s in built] == [
        [(False, 0, 8), (True, 8, 4), (False, 12, 4)]
    ]
    for _ in range(3):
        setup.step(decode=(0, 1, 2, 3))
    setup.step(decode=(0, 2, 3))
    setup.step(vacate=(1,), decode=(0, 2, 3))
    assert [[(adapter is None, first, rows) for adapter, first, rows in s] for s in built[1:]] == [
        [(False, 0, 2), (True, 2, 1), (False, 3, 1)],
        [(False, 0, 1), (True, 1, 1), (False, 2, 1)],
        [(False, 0, 1), (True, 1, 1), (False, 2, 1)],
    ]


def test_the_worker_computes_with_its_creators_number_of_threads(world):
    def threads_in_worker():
        torch.set_num_threads(1)
        setup = Setup(world, overlap=True)
        sample = setup.sampler.sample
        seen = []
        setup.sampler.sample = lambda *a: seen.append(torch.get_num_threads()) or sample(*a)
        setup.step(start=(setup.start(0, [1, 2]),), chunks=(Chunk(0, 0, 2, True),))
        setup.runner.close()
        return seen

    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(threads_in_worker).result() == [1]


def test_logprobs_and_penalties_reach_the_sampler(setup):
    params = SamplingParams(temperature=0, max_tokens=10, logprobs=2)
    handle = setup.launch(
        start=(setup.start(0, prompt(1, 4), params=params), setup.start(1, prompt(2, 4))),
        chunks=(Chunk(0, 0, 4, True), Chunk(1, 0, 4, True)),
    )
    asked, silent = handle.result().logprobs
    assert asked.top_ids[0] == handle.result().token_ids[0]
    assert silent is None
